"""A sampler's batch on a GPU, with captured graphs, and random adapters for it. Needs a GPU to run."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tinkex.engine.cuda.decode_graphs import DecodeGraphs, DecodePipeline
from tinkex.engine.cuda.prefill_graphs import CapturedPrefill
from tinkex.engine.protocol import SampleWork
from tinkex.engine.torch.adapters import Adapter
from tinkex.engine.torch.continuous_batch import ContinuousBatch, StepLimits
from tinkex.engine.torch.kv import KVCache
from tinkex.engine.torch.load import load_decoder
from tinkex.engine.torch.models.decoder import Decoder
from tinkex.engine.torch.sequences import PublishedAdapter
from tinkex.engine.torch.states import StatePool
from tinkex.types.outputs import SampleResponse
from tinkex.types.params import LoraConfig, SamplingParams


def exact_decoder(path: Path) -> Decoder:
    """The model's weights, rounded to bf16, in fp32 on the CPU: no kernel there."""
    decoder = load_decoder(path)
    for weight in decoder.weights().values():
        weight.copy_(weight.bfloat16())
    return decoder


def prompt(seed: int, length: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(4, 320, length).astype(np.int32)


def new_cache(decoder: Decoder, pages: int = 200) -> KVCache:
    c, weight = decoder.config, decoder.unembed_weight
    clears = decoder.backend.clears_pages
    return KVCache(c.kv_shapes, pages, weight.device, weight.dtype, clears=clears)


def new_batch(decoder: Decoder, pages: int = 200, **limits: int) -> ContinuousBatch:
    cache = new_cache(decoder, pages)
    given = StepLimits(**{"context": decoder.config.max_context, "sequences": 64, **limits})
    shapes = decoder.config.state_shapes
    states = StatePool(shapes, 2 * given.sequences, cache.device) if shapes else None
    graphs = DecodeGraphs(decoder, cache, given.sequences, given.context, states)
    prefill = CapturedPrefill(decoder, cache, given, graphs)
    return ContinuousBatch(decoder, cache, given, DecodePipeline(graphs), prefill=prefill, states=states)


def published(decoder: Decoder, rank: int, seed: int, **flags: bool) -> PublishedAdapter:
    lora = LoraConfig(rank=rank, seed=seed, **flags)
    adapter = Adapter.fresh(lora, decoder.sites(), decoder.unembed_weight.device)
    noise = torch.randn(adapter.flat.shape, generator=torch.Generator().manual_seed(seed))
    adapter.flat.copy_((0.05 * noise).bfloat16())
    return PublishedAdapter(f"p{seed}", adapter, f"root{seed}".encode())


def submit(
    batch: ContinuousBatch,
    ids: np.ndarray,
    adapter: PublishedAdapter | None = None,
    work: dict | None = None,
    **params: Any,
):
    asked = SamplingParams(**{"max_tokens": 24, "stop": [], "seed": 1, **params})
    future: Future[SampleResponse] = Future()
    request = SampleWork(ids, asked, **(work or {}))
    return future, batch.submit(request, batch.check_work(request), adapter, future)

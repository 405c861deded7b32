"""The PyTorch engine: one base model, its trainer, its sampler, and the thread they share.

Builds the parts, plans the memory, and turns the blocking `Trainer` and the asynchronous `Sampler` of the
contract into work for that thread. Knows neither the arithmetic nor how requests are batched.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from tinkex.engine import cuda as kernels
from tinkex.engine.native.step import compiled_step
from tinkex.engine.protocol import (
    Command,
    CustomLoss,
    EngineConfig,
    EngineError,
    ModelInfo,
    Progress,
    R,
    SampleWork,
)
from tinkex.engine.request import user_error
from tinkex.engine.torch import memory
from tinkex.engine.torch.graph import read_graph
from tinkex.engine.torch.kv import PAGE, KVCache, page_bytes
from tinkex.engine.torch.load import load_decoder
from tinkex.engine.torch.model import Decoder
from tinkex.engine.torch.sampler import Batch, Limits
from tinkex.engine.torch.sequences import Published, Request
from tinkex.engine.torch.threads import ComputeThreads, apart, usable_cores
from tinkex.engine.torch.trainer import SUPPORTED_LOSSES, TorchTrainer
from tinkex.engine.torch.worker import Worker
from tinkex.types.outputs import SampleResponse

if TYPE_CHECKING:
    from tinkex.engine.cuda.decode import Pipeline
    from tinkex.engine.cuda.prefill import Prefill

_CHUNK_FLOPS = 1.2e14  # of a chunk of prompt on a GPU: 0.2 s on a large one
_PACKED_SHARE = 0.25  # of the memory that is free once the weights are loaded
_KV_SHARE, _ADAPTER_SHARE = 0.25, 0.25  # of what is free after that


class TorchEngine:
    """An engine on the CPU or on one CUDA device.

    >>> engine = TorchEngine(EngineConfig("models/SmolLM2-135M-Instruct"))    # doctest: +SKIP
    """

    def __init__(self, config: EngineConfig, decoder: Decoder | None = None) -> None:
        """`decoder` stands for the model that `config` names, if it is there already."""
        apart(lambda: self._load(config, decoder))

    def _load(self, config: EngineConfig, decoder: Decoder | None) -> None:
        device, dtype = choose_device(config)
        decoder = decoder or load_decoder(config.model, device, dtype)
        if config.deterministic and device.type == "cuda":
            check_deterministic(decoder)
        decoder.be_invariant(config.deterministic and device.type == "cuda")
        room = memory.free_bytes(device) * _PACKED_SHARE
        compiled = compiled_step(decoder, room)
        if compiled is None:
            decoder.pack(room)
        context = min(config.max_context or decoder.config.max_context, decoder.config.max_context)
        self.memory = plan_memory(config, decoder, context)
        self.memory["weights"] += compiled.nbytes if compiled else 0
        shape = decoder.config
        pages = self.memory["kv"] // page_bytes(shape.layers, shape.kv_heads, shape.head_dim, dtype)
        cache = KVCache(shape.layers, shape.kv_heads, shape.head_dim, pages, device, dtype)
        limits = Limits(context, config.max_batch, **_large_steps(decoder))
        pipeline, prefill = _captured_steps(decoder, cache, limits)
        self._batch = Batch(decoder, cache, limits, pipeline, compiled, prefill)
        self._trainer = TorchTrainer(
            decoder,
            config.name or config.model,
            max_context=context,
            max_pass_tokens=config.max_pass_tokens,
        )
        # Sums depend on how many threads share them: a deterministic engine does not change that under way.
        threads = config.threads or (usable_cores() if config.deterministic else None)
        if config.deterministic:
            self._trainer.share_from = 0
        self._worker = Worker(self._batch, lambda: ComputeThreads(threads).adjust, lambda: probe(device))
        self._trainer.between = self._worker.between
        self._batch.after_failure = self._worker.examine
        self.trainer = _Trainer(self._worker, self._trainer)
        self.sampler = _Sampler(self._worker, self._trainer, self._batch)
        self.info = ModelInfo(
            arch=shape.arch,
            vocab_size=shape.vocab_size,
            max_context=context,
            eos_ids=shape.eos_ids,
            parameters=sum(p.numel() for p in decoder.parameters()),
            layers=shape.layers,
            losses=SUPPORTED_LOSSES,
            fingerprint=self._trainer.base.fingerprint,
        )

    def check_loss(self, loss: CustomLoss) -> None:
        """Refuse an uploaded loss with anything in it that is not on the allow-list."""
        read_graph(loss)

    @property
    def working(self) -> bool:
        return self._worker.alive

    def stats(self) -> dict[str, float]:
        pages = self._batch.cache.pages
        return {
            "adapters_live": self._trainer.adapters,
            "adapters_published": len(self.sampler.published),
            "adapter_bytes": self._trainer.adapter_bytes,
            "kv_pages_total": pages.count,
            "kv_pages_used": pages.count - pages.available,
            "kv_pages_free": pages.available,
            "sequences_running": len(self._batch.running),
            "sequences_waiting": len(self._batch.waiting),
            "preemptions": self._batch.preemptions,
        }

    def close(self) -> None:
        self._worker.close()


def probe(device: torch.device) -> None:
    """Raise if the device cannot be used any more: what it was given to do is done, or fails here."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def choose_device(config: EngineConfig) -> tuple[torch.device, torch.dtype]:
    """The device and dtype that `config` asks for, or the best there is."""
    cuda = torch.cuda.is_available()
    device = (
        torch.device("cuda" if cuda else "cpu") if config.device == "auto" else torch.device(config.device)
    )
    if device.type == "cuda" and not cuda:
        raise user_error(f"device {config.device!r} was asked for, and this machine has no CUDA device")
    if config.dtype == "auto":
        return device, torch.bfloat16 if device.type == "cuda" else torch.float32
    return device, getattr(torch, config.dtype)


def check_deterministic(decoder: Decoder) -> None:
    """Refuse what cannot be the same to the last bit alone and in any batch on CUDA."""
    weight, shape = decoder.unembed_weight, decoder.config
    odd = [
        part.name
        for in_features, parts in decoder.sites().values()
        for part in parts
        if in_features % 8 or (part.kind != "unembed" and part.out_features % 8)
    ]
    problem = None
    if weight.dtype != torch.bfloat16:
        problem = f"this one is in {str(weight.dtype).removeprefix('torch.')}"
    elif shape.experts is not None:
        problem = f"{shape.arch} has experts"
    elif not kernels.usable(weight):
        problem = "its kernels need Triton, which is not installed"
    elif odd:
        problem = f"the sizes of {odd[0]} are not multiples of 8"
    if problem:
        raise user_error(f"deterministic on CUDA is for dense models in bfloat16, and {problem}")


def plan_memory(config: EngineConfig, decoder: Decoder, context: int) -> dict[str, int]:
    """Bytes for each use, from what is free now that the weights are loaded.

    KV pages for one full context at least, and never more than `max_batch` of them.
    """
    shape, weight = decoder.config, decoder.unembed_weight
    free = int(memory.free_bytes(weight.device))
    page = page_bytes(shape.layers, shape.kv_heads, shape.head_dim, weight.dtype)
    one = -(-context // PAGE)
    wanted = (int(free * _KV_SHARE) if config.kv_bytes is None else config.kv_bytes) // page
    pages = max(1, wanted) if config.kv_bytes is not None else min(max(wanted, one), one * config.max_batch)
    tokens = config.max_pass_tokens or memory.pass_tokens(shape, weight.dtype.itemsize, weight.device)
    return {
        "free": free,
        "weights": sum(p.nbytes for p in decoder.parameters()) + decoder.packed_bytes,
        "kv": pages * page,
        "adapters": int(free * _ADAPTER_SHARE) if config.adapter_bytes is None else config.adapter_bytes,
        "activations": tokens * memory.activation_bytes(shape, weight.dtype.itemsize, recompute=True),
    }


def _large_steps(decoder: Decoder) -> dict[str, int]:
    """On a GPU, prompts in chunks that are large enough for it and short for those who decode meanwhile."""
    if decoder.unembed_weight.device.type != "cuda":
        return {}
    parameters = sum(p.numel() for p in decoder.parameters())
    chunk = int(min(8192, max(512, _CHUNK_FLOPS / (2 * parameters)))) // 256 * 256
    return {"prefill_alone": chunk, "prefill_beside": chunk, "logits": 1 << 27}


def _captured_steps(
    decoder: Decoder, cache: KVCache, limits: Limits
) -> tuple[Pipeline, Prefill] | tuple[None, None]:
    """Decoding and prefill by captured steps, where the kernels can."""
    if not kernels.usable(decoder.unembed_weight) or decoder.config.experts is not None:
        return None, None
    from tinkex.engine.cuda.decode import Graphs, Pipeline
    from tinkex.engine.cuda.prefill import Prefill

    graphs = Graphs(decoder, cache, limits.sequences, limits.context)
    return Pipeline(graphs), Prefill(decoder, cache, limits, graphs)


class _Trainer:
    """The contract's trainer: any thread may call it, and waits for its turn."""

    def __init__(self, worker: Worker, trainer: TorchTrainer) -> None:
        self._worker, self._trainer = worker, trainer

    def run(self, command: Command[R], progress: Progress | None = None) -> R:
        return self._worker.job(lambda: self._trainer.run(command, progress)).result()


class _Sampler:
    """The contract's sampler. Everything but waiting happens on the engine's thread."""

    def __init__(self, worker: Worker, trainer: TorchTrainer, batch: Batch) -> None:
        self._worker, self._trainer, self._batch = worker, trainer, batch
        self._serial = itertools.count()
        self.published: dict[str, Published] = {}

    async def sample(self, work: SampleWork) -> SampleResponse:
        max_tokens = self._batch.check_work(work)  # refused here and now, even while a long pass runs
        future: Future[SampleResponse] = Future()
        taken: list[Request] = []

        def submit() -> None:
            if not future.cancelled():
                try:
                    taken.append(self._batch.submit(work, max_tokens, self._find(work.adapter), future))
                except Exception as error:
                    future.set_exception(error)

        self._worker.errand(submit)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            with contextlib.suppress(EngineError):  # closed: nothing is held any more
                self._worker.errand(lambda: [self._batch.cancel(request) for request in taken])
            raise

    def _find(self, name: str | None) -> Published | None:
        if name is not None and name not in self.published:
            raise user_error(f"there is no published adapter {name!r} on this engine")
        return None if name is None else self.published[name]

    async def publish(self, source: str | Path, name: str) -> None:
        def publish() -> None:
            if name not in self.published:
                if isinstance(source, Path):
                    adapter = self._trainer.load(source)
                else:
                    adapter = self._trainer.adapter(source).snapshot()
                root = f"adapter {next(self._serial)}".encode()  # a name may come back with other weights
                self.published[name] = Published(name, adapter, root)

        await asyncio.wrap_future(self._worker.job(publish))

    async def retire(self, name: str) -> None:
        done: Future[None] = Future()

        def retire() -> None:
            published = self.published.pop(name, None)
            if published is None:
                done.set_result(None)
            else:
                published.retired.append(done)
                published.settle()

        self._worker.errand(retire)
        await asyncio.wrap_future(done)

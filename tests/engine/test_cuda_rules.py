"""Requests with rules beside plain ones in captured decode steps, on a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.engine.stepping import finish
from tests.engine.tiny import tiny_model
from tinkex.engine.torch.continuous_batch import ContinuousBatch, StepLimits
from tinkex.engine.torch.load import load_decoder
from tinkex.engine.torch.models.decoder import Decoder

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from tests.engine.cuda_batch import new_batch, new_cache, published, submit

pytestmark = pytest.mark.gpu

ASKED: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({"presence_penalty": 1.5, "frequency_penalty": 0.7}, {}),
    ({"repetition_penalty": 1.8, "temperature": 0.0}, {}),
    ({"logit_bias": {7: 9.0, 9: 9.0}, "min_tokens": 4, "stop": [7]}, {}),
    ({"min_p": 0.2}, {}),
    ({"top_k": 4, "top_p": 0.8, "temperature": 0.7}, {"num_samples": 2}),
    ({}, {"topk_sample_logprobs": 3}),
]


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    path: Path = tiny_model(tmp_path_factory.mktemp("model"), "qwen3", intermediate_size=128)
    return load_decoder(path, "cuda", torch.bfloat16)


def answers(batch: ContinuousBatch, decoder: Decoder, steps: list[int]) -> list[Any]:
    advance = batch._advance

    def counted(plan: Any) -> None:
        steps.append(len(plan))
        advance(plan)

    batch._advance = counted  # type: ignore[method-assign]
    adapter, futures = published(decoder, 8, 1), []
    for i, (params, work) in enumerate(ASKED):
        ids = np.random.default_rng(i).integers(4, 320, 12 + i).astype(np.int32)
        futures.append(submit(batch, ids, adapter if i % 2 else None, work, seed=i, **params)[0])
    finish(batch)
    return [sequence for future in futures for sequence in future.result(timeout=0).sequences]


def test_rules_leave_nobody_out_of_captured_steps(decoder: Decoder) -> None:
    """The same tokens as steps without graphs draw, until bf16's rounding goes another way."""
    captured, plain = [], []
    got = answers(new_batch(decoder), decoder, captured)
    eager = ContinuousBatch(decoder, new_cache(decoder), StepLimits(decoder.config.max_context, 64))
    want = answers(eager, decoder, plain)
    assert len(captured) < 4 < 20 < len(plain)  # the prompts alone were computed without a graph
    same = [
        a == b
        for one, other in zip(got, want, strict=True)
        for a, b in zip(one.tokens[:6], other.tokens, strict=False)
    ]
    assert np.mean(same) > 0.8
    assert 7 not in got[3].tokens[:4]
    assert got[-1].topk_logprobs_np.token_ids.shape == (24, 3)

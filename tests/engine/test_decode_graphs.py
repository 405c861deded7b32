"""Captured decode steps without a device: which one serves how many rows, and rows with rules.

For the latter a step is not captured but run each time, its kernels in Triton's interpreter.
"""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.engine.by_kernels import INTERPRETED, MARKS
from tests.engine.stepping import finish
from tests.engine.tiny import tiny_model
from tests.engine.uncaptured import without_device
from tinkex.engine.cuda import decode_graphs as decode
from tinkex.engine.cuda import token_kernels
from tinkex.engine.cuda.cuda_backend import CudaBackend
from tinkex.engine.protocol import SampleWork
from tinkex.engine.torch.backend import PlacedRows
from tinkex.engine.torch.continuous_batch import ContinuousBatch, StepLimits
from tinkex.engine.torch.kv import KVCache
from tinkex.engine.torch.load import load_decoder
from tinkex.types.params import SamplingParams

pytestmark = [*MARKS, pytest.mark.slow]

CAPACITY = 32


class Graphs:
    """What `decode.Graphs` shows to a pipeline, on the CPU: a step draws the same token for everyone."""

    def __init__(self, there: set[int]) -> None:
        self.there, self.rows, self.placed = there, [], 0
        self.capacity, self.width = CAPACITY, 8
        self.results = decode.Results.of(torch.zeros(2, CAPACITY, dtype=torch.int64))
        self.results.tokens.fill_(7)
        self.results.logprobs.fill_(-1.0)

    def has(self, rows: int) -> bool:
        return rows in self.there

    def place(self, rows: PlacedRows) -> None:
        self.placed = decode.bucket(len(rows.temperature))

    def launch(self, orders: torch.Tensor) -> None:
        assert orders.shape == (token_kernels.ORDERS, CAPACITY)
        self.rows.append(self.placed)


@pytest.fixture
def no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    without_device(monkeypatch)


@pytest.fixture
def rows_of_steps(tmp_path: Path, no_device: None):
    """The rows of each step, from when 28 of 32 requests have ended to the other four's end."""
    decoder = load_decoder(tiny_model(tmp_path, "llama3"))

    def run(there: set[int]) -> list[int]:
        c, graphs = decoder.config, Graphs(there)
        cache = KVCache(c.kv_shapes, 200, torch.device("cpu"), torch.float32)
        pipeline: Any = decode.DecodePipeline(graphs)  # type: ignore[arg-type]
        batch = ContinuousBatch(decoder, cache, StepLimits(context=64, sequences=CAPACITY), pipeline)
        for i in range(CAPACITY):
            params = SamplingParams(max_tokens=40 if i < 4 else 4, stop=[], seed=i)
            work = SampleWork(np.arange(4, 8 + i % 3, dtype=np.int32), params)
            batch.submit(work, batch.check_work(work), None, Future())
        while len(batch.running) != 4:
            batch.step()
        begun = len(graphs.rows)
        while batch.busy:
            batch.step()
        return graphs.rows[begun:]

    return run


def test_a_smaller_graph_is_taken_at_once_if_it_is_there(rows_of_steps: Any) -> None:
    assert set(rows_of_steps({4})) == {4}


def test_a_smaller_graph_is_captured_only_for_those_who_stay(rows_of_steps: Any) -> None:
    rows = rows_of_steps(set())
    assert rows[:12] == [CAPACITY] * 12
    assert set(rows[20:]) == {4}


class UncapturedGraphs(decode.DecodeGraphs):
    """Runs a step where a graph would be replayed."""

    def replay(self, key: decode.DecodeGraphKey) -> None:
        self.keys = [*getattr(self, "keys", []), key]
        with torch.inference_mode():
            self._step(key)


class OddThenEven:
    """Stands for a `GrammarState`: every second token is even. It says when it was asked too early."""

    def __init__(self) -> None:
        self.consumed = 0

    def fork(self) -> OddThenEven:
        return OddThenEven()

    def mask(self) -> np.ndarray:
        allowed = np.arange(320) % 2 == (self.consumed + 1) % 2
        return np.packbits(allowed, bitorder="little")

    def consume(self, token: int) -> None:
        assert token % 2 == (self.consumed + 1) % 2
        self.consumed += 1


ASKED: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({"presence_penalty": 1.5, "frequency_penalty": 0.7}, {}),
    ({"repetition_penalty": 1.8, "temperature": 0.0}, {}),
    ({"logit_bias": {7: 9.0, 9: 9.0}, "min_tokens": 2, "stop": [7]}, {}),
    ({"min_p": 0.2, "top_k": 4, "top_p": 0.8, "temperature": 0.7}, {"num_samples": 2}),
    ({}, {"topk_sample_logprobs": 3}),
]


@pytest.mark.skipif(not INTERPRETED, reason="runs kernels on the CPU")
@pytest.mark.parametrize("invariant", [False, True])
def test_rules_leave_nobody_out_of_captured_steps(tmp_path: Path, no_device: None, invariant: bool) -> None:
    """Same tokens and lists as plain torch draws step by step; after the prompts, every step is captured."""
    plain = load_decoder(tiny_model(tmp_path, "llama3"))
    answers, advanced = [], []
    for ahead in (False, True):
        backend = CudaBackend(torch.device("cpu"), torch.float32, invariant=invariant)
        decoder = plain.with_backend(backend) if ahead else plain
        cache = KVCache(decoder.config.kv_shapes, 100, torch.device("cpu"), torch.float32)
        graphs = UncapturedGraphs(decoder, cache, 16, 64) if ahead else None
        pipeline = decode.DecodePipeline(graphs) if graphs else None
        batch = ContinuousBatch(decoder, cache, StepLimits(context=64, sequences=16), pipeline)
        advance = batch._advance
        batch._advance = lambda plan, advance=advance: (advanced.append(plan), advance(plan))  # type: ignore
        futures: list[Future[Any]] = []
        for i, (params, work) in enumerate(ASKED):
            asked = SamplingParams(**{"max_tokens": 5, "stop": [], "seed": i, **params})
            request, future = SampleWork(np.arange(4, 9 + i, dtype=np.int32), asked, **work), Future()
            batch.submit(request, batch.check_work(request), None, future)
            futures.append(future)
        asked = SamplingParams(max_tokens=5, stop=[], seed=99, grammar={"regex": ".*"})
        future: Future[Any] = Future()
        request = SampleWork(np.arange(4, 20, dtype=np.int32), asked)
        grammar: Any = OddThenEven()
        batch.submit(request, batch.check_work(request), None, future, grammar=grammar)
        advanced.clear()
        finish(batch)
        answers.append([s for f in [*futures, future] for s in f.result(timeout=0).sequences])
        if graphs:
            assert len(advanced) == 1  # the prompts
            assert all(key.keeps_logits for key in graphs.keys)
    for want, got in zip(*answers, strict=True):
        assert got.tokens == want.tokens
        np.testing.assert_allclose(got.logprobs_np, want.logprobs_np, atol=2e-4)
        if want.topk_logprobs_np is not None:
            assert got.topk_logprobs_np is not None
            np.testing.assert_array_equal(got.topk_logprobs_np.token_ids, want.topk_logprobs_np.token_ids)


@pytest.mark.skipif(not INTERPRETED, reason="runs kernels on the CPU")
def test_plain_steps_keep_no_logits(tmp_path: Path, no_device: None) -> None:
    decoder = load_decoder(tiny_model(tmp_path, "llama3")).with_backend(
        CudaBackend(torch.device("cpu"), torch.float32)
    )
    cache = KVCache(decoder.config.kv_shapes, 20, torch.device("cpu"), torch.float32)
    graphs = UncapturedGraphs(decoder, cache, 4, 64)
    batch = ContinuousBatch(decoder, cache, StepLimits(64, 4), decode.DecodePipeline(graphs))
    request = SampleWork(np.arange(4, 9, dtype=np.int32), SamplingParams(max_tokens=4, stop=[]))
    batch.submit(request, batch.check_work(request), None, Future())
    finish(batch)
    assert not any(key.keeps_logits for key in graphs.keys)
    assert "logits" not in vars(graphs)  # the buffer was never made

"""Which captured step serves how many rows, without a device: the pipeline's own reckoning."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.engine.by_kernels import MARKS
from tests.engine.tiny import tiny_model
from tinkex.engine.cuda import decode_graphs as decode
from tinkex.engine.cuda import token_kernels
from tinkex.engine.protocol import SampleWork
from tinkex.engine.torch.backend import Backend
from tinkex.engine.torch.continuous_batch import ContinuousBatch, StepLimits
from tinkex.engine.torch.kv import KVCache
from tinkex.engine.torch.load import load_decoder
from tinkex.types.params import SamplingParams

pytestmark = [*MARKS, pytest.mark.slow]

CAPACITY = 32


class Event:
    def record(self) -> None: ...

    def synchronize(self) -> None: ...


class Graphs:
    """What `decode.Graphs` shows to a pipeline, on the CPU: a step draws the same token for everyone."""

    def __init__(self, there: set[int]) -> None:
        self.there, self.rows, self.backend = there, [], Backend()
        self.capacity, self.width = CAPACITY, 8
        self.orders = torch.zeros(token_kernels.ORDERS, CAPACITY, dtype=torch.int64)
        self.table = torch.zeros(CAPACITY, self.width, dtype=torch.int32)
        self.temperature = torch.zeros(CAPACITY)
        self.results = decode.Results.of(torch.zeros(2, CAPACITY, dtype=torch.int64))
        self.results.tokens.fill_(7)
        self.results.logprobs.fill_(-1.0)

    def has(self, rows: int) -> bool:
        return rows in self.there

    def replay(self, key: decode.DecodeGraphKey) -> None:
        self.rows.append(key.rows)


@pytest.fixture
def rows_of_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The rows of each step, from when 28 of 32 requests have ended to the other four's end."""
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(decode, "fill", lambda target, values: target.copy_(torch.from_numpy(values)))
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

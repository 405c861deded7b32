"""Slots for recurrent states: every sequence has the state of its own tokens, whatever else happens."""

from __future__ import annotations

import random
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.engine.stepping import check, check_pages
from tests.engine.tiny import tiny_model
from tinkex.engine.protocol import SampleWork
from tinkex.engine.torch import sequence_memory, states
from tinkex.engine.torch.continuous_batch import ContinuousBatch, StepLimits
from tinkex.engine.torch.kv import KVCache, chain
from tinkex.engine.torch.load import load_decoder
from tinkex.engine.torch.models.decoder import Decoder
from tinkex.engine.torch.sequences import Landed, RunningSequence
from tinkex.engine.torch.states import StateGroup, StatePool, slot_bytes, snapshot_after
from tinkex.types.params import SamplingParams

pytestmark = pytest.mark.slow

SHAPES = {0: ((1,), (2, 3)), 2: ((4,),)}
CPU = torch.device("cpu")


class Folding:
    """A decoder with a recurrent layer beside it, whose state is the fold of a sequence's tokens."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder, self.tokens = decoder, 0
        self.config, self.unembed_weight, self.logits = decoder.config, decoder.unembed_weight, decoder.logits
        self.backend = decoder.backend

    def __call__(self, tokens: Tensor, *rest: Any, states: list[StateGroup], images: None) -> Tensor:
        self.tokens += len(tokens)
        for group in states:
            held = group.read(0)
            assert held is not None
            rows = tokens if group.rows_T is None else tokens[group.rows_T]
            after = [
                fold(ids.tolist(), state)
                for ids, state in zip(rows.split(group.lengths), held[0][:, 0].tolist(), strict=True)
            ]
            group.write(0, [torch.tensor(after)[:, None], held[1]])
        return self._decoder(tokens, *rest)


def fold(ids: Sequence[int], state: float = 0.0) -> float:
    for token in ids:
        state = (state * 31 + token + 1) % 65521
    return state


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return load_decoder(tiny_model(tmp_path_factory.mktemp("model"), "smollm2"))


def new_batch(
    decoder: Decoder, pages: int, slots: int, pipeline: Any = None, **limits: int
) -> ContinuousBatch:
    c = decoder.config
    cache = KVCache(c.kv_shapes, pages, CPU, torch.float32)
    bounds = StepLimits(**{"context": c.max_context, "sequences": 16, **limits})
    folding: Any = Folding(decoder)
    return ContinuousBatch(folding, cache, bounds, pipeline, states=StatePool(SHAPES, slots, CPU))


def submit(batch: ContinuousBatch, prompt: list[int], tokens: int, samples: int = 1) -> Future:
    params = SamplingParams(max_tokens=tokens, seed=len(prompt), temperature=1.0, stop=[])
    work = SampleWork(np.asarray(prompt, np.int32), params, num_samples=samples)
    future: Future = Future()
    batch.submit(work, batch.check_work(work), None, future)
    return future


def check_states(batch: ContinuousBatch) -> None:
    assert batch.memory.states is not None
    check(batch)
    check_pages(batch.memory.states.slots, ([s.slot] for s in batch.running if s.slot is not None))
    for sequence in batch.running:
        assert state_of(batch, sequence) == fold(sequence.ids(0, sequence.computed).tolist())


def state_of(batch: ContinuousBatch, sequence: RunningSequence) -> float:
    assert batch.memory.states is not None
    assert sequence.slot is not None
    return batch.memory.states.tensors[0][0][sequence.slot].item()


def finish(batch: ContinuousBatch) -> None:
    for _ in range(3000):
        if not batch.busy:
            break
        batch.step()
        check_states(batch)
    assert not batch.busy
    assert batch.memory.states is not None
    assert batch.memory.states.slots.available == batch.memory.states.slots.count


@pytest.mark.parametrize(("pages", "slots"), [(200, 40), (40, 5), (40, 1), (20, 3)])
def test_states_follow_sequences_through_forks_hits_and_preemption(
    decoder: Decoder, pages: int, slots: int
) -> None:
    batch, rng = new_batch(decoder, pages, slots, prefill_alone=64, prefill_beside=24), random.Random(slots)
    shared = [rng.randrange(300) for _ in range(150)]
    futures = []
    for _ in range(12):
        prompt = shared[: rng.choice((20, 48, 100, 150))] + [
            rng.randrange(300) for _ in range(rng.randrange(40))
        ]
        futures.append(submit(batch, prompt, rng.randrange(1, 40), rng.randrange(1, 4)))
        for _ in range(rng.randrange(8)):
            batch.step()
            check_states(batch)
    finish(batch)
    assert all(future.result().sequences for future in futures)
    assert pages > 20 or batch.preemptions


def test_a_prefix_is_reused_as_far_as_a_snapshot_goes(decoder: Decoder) -> None:
    batch, prompt = new_batch(decoder, 100, 8), list(range(100))
    submit(batch, prompt, 4)
    finish(batch)
    hit = submit(batch, [*prompt, 5, 6, 7], 4)
    finish(batch)
    assert hit.result().prompt_cache_hit_tokens == 96
    other = submit(batch, [*prompt[:50], 9], 1)  # its pages are cached, but no state at 48 tokens
    finish(batch)
    assert other.result().prompt_cache_hit_tokens == 0


def test_snapshots_are_evicted_least_recently_used_first() -> None:
    pool = StatePool(SHAPES, 3, CPU)
    slot = pool.start([])
    assert slot is not None
    pool.remember(slot, b"a")
    pool.remember(slot, b"b")
    assert (pool.reusable([b"a"]), pool.reusable([b"a", b"x", b"b", b"y"])) == (1, 3)
    used = pool.start([b"a"])  # evicts b, which is the oldest that nobody reads
    assert used is not None
    assert (pool.slots.holds(b"a"), pool.slots.holds(b"b")) == (True, False)
    pool.remember(slot, b"c")
    assert not pool.slots.holds(b"a")
    assert pool.fork(slot) is not None
    assert (pool.slots.holds(b"c"), pool.fork(slot), pool.start([])) == (False, None, None)
    assert slot_bytes(SHAPES) == 4 * (1 + 6 + 4)


def test_the_last_snapshot_becomes_the_sequence_that_reads_it() -> None:
    pool = StatePool(SHAPES, 1, CPU)
    slot = pool.start([])
    assert slot is not None
    pool.tensors[0][0][slot] = 7.0
    pool.slots.remember(slot, b"a")
    pool.release(slot)
    assert pool.start([b"a"]) == slot
    assert pool.tensors[0][0][slot].item() == 7.0


def test_snapshots_lie_on_the_grid_and_before_the_end_of_the_prompt() -> None:
    assert [snapshot_after(at, 1200) for at in (0, 511, 512, 1024, 1184, 1199)] == [
        512,
        512,
        1024,
        1184,
        1536,
        1536,
    ]
    assert [snapshot_after(0, prompt) for prompt in (1, 16, 17, 32)] == [512, 512, 16, 16]


class Ahead:
    """A pipeline whose steps change the state when they are launched and land one step later."""

    def __init__(self) -> None:
        self.states: StatePool | None = None
        self._flight: Landed = []

    def serves(self, request: object) -> bool:
        return True

    def step(self, sequences: Sequence[RunningSequence]) -> Landed:
        assert self.states is not None
        before, known = self._flight, {s: token for s, token, _, _ in self._flight}
        self._flight, held = [], self.states.tensors[0][0]
        for sequence in sequences:
            assert sequence.slot is not None
            at, token = sequence.computed + sequence.in_flight, known.get(sequence, sequence.last)
            held[sequence.slot] = fold([token], held[sequence.slot].item())
            sequence.in_flight += 1
            self._flight.append((sequence, at * 7 % 300, -1.0, None))
        return self._landed(before)

    def draw(self) -> None:
        """No request here has rules."""

    def land(self) -> Landed:
        before, self._flight = self._flight, []
        return self._landed(before)

    def drop(self) -> None:
        self._flight = []

    def _landed(self, flight: Landed) -> Landed:
        for sequence, _, _, _ in flight:
            sequence.in_flight -= 1
        return flight


def test_snapshots_fall_due_while_a_step_is_in_flight(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (states, sequence_memory):
        monkeypatch.setattr(module, "GRID", 32)
    pipeline: Any = Ahead()
    batch = new_batch(decoder, 60, 12, pipeline)
    pool = pipeline.states = batch.memory.states
    assert pool is not None
    futures = [submit(batch, list(range(100 + i, 120 + i)), 70) for i in range(2)]
    while batch.busy:
        batch.step()
    assert pool.slots.available == pool.slots.count
    for i, future in enumerate(futures):
        ids = [*range(100 + i, 120 + i), *future.result().sequences[0].tokens]
        links = chain(b"base", np.asarray(ids), [])
        for length in (32, 64):
            (slot,) = pool.slots.find(links[length // 16 - 1 : length // 16])
            assert pool.tensors[0][0][slot].item() == fold(ids[:length])

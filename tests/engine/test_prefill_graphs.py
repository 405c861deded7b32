"""Captured prefill, on a CPU: its steps by Triton's interpreter in fp32, held to the plain steps.

A stand-in takes the place of CUDA's graphs: what it captures, it runs when that is replayed. So all that a
graph would read has to be where the step looked for it the first time.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.engine.stepping import finish
from tests.engine.tiny import tiny_model
from tinkex.engine.protocol import SampleWork
from tinkex.engine.torch.adapters import Adapter
from tinkex.engine.torch.continuous_batch import ContinuousBatch, StepLimits
from tinkex.engine.torch.hooks import LoraHook, Site
from tinkex.engine.torch.kv import KVCache
from tinkex.engine.torch.load import load_decoder
from tinkex.engine.torch.models.decoder import Decoder
from tinkex.engine.torch.sequences import PublishedAdapter, RunningRequest
from tinkex.types.outputs import SampleResponse
from tinkex.types.params import LoraConfig, SamplingParams

if importlib.util.find_spec("triton") is None or not os.environ.get("TRITON_INTERPRET"):
    pytest.skip("needs Triton's interpreter", allow_module_level=True)

from tinkex.engine.cuda import lora_kernels as kernel
from tinkex.engine.cuda import prefill_graphs as prefill
from tinkex.engine.cuda.adapter_table import RowTiles, SiteAdapters, column_of, cut_tiles, usable
from tinkex.engine.cuda.attention_hooks import KernelAttend, layout_of
from tinkex.engine.cuda.grouped_lora import AdapterSlots, SlotShape
from tinkex.engine.cuda.prefill_graphs import (
    CapturedPrefill,
    PrefillGraphKey,
    cut,
    largest,
    size,
    write_orders,
)
from tinkex.engine.torch.kv import TokenSpan

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning:triton", "ignore::RuntimeWarning:triton"),
    pytest.mark.timeout(600),  # the interpreter takes seconds for what a GPU does in microseconds
]
CPU = torch.device("cpu")


class Replayed:
    """Stands for a graph."""

    def __init__(self, step: Callable[[], None]) -> None:
        self.replay = step


class Captured:
    """Stands for `decode.DecodeGraphs`, its hook without streams."""

    def __init__(self, decoder: Decoder) -> None:
        self._sites = decoder.sites()
        self.count = 0
        self.error: Exception | None = None

    def capture(self, step: Callable[[], None]) -> Replayed:
        self.count += 1
        if self.error:
            raise self.error
        return Replayed(step)

    def hook(self, slots: AdapterSlots, shape: SlotShape, cells: Tensor, rows: int) -> Any:
        sites = self._sites

        class Adding(LoraHook):
            def __call__(self, site: Site, x: Tensor, y: Tensor, **_: Any) -> Tensor:
                (in_features, parts), tiles = sites[site], RowTiles(cells, shape.rows)
                outs = [part.out_features for part in parts]
                at = SiteAdapters(slots.table(shape), tiles, column_of(site), in_features, outs)
                kernel.expand(kernel.shrink(x, at.a), y, at.b)
                return y

        return Adding() if shape.tiles else None


# -- sizes and orders --------------------------------------------------------------------------------------


def test_sizes_are_few_and_pad_little():
    sizes = [size(tokens) for tokens in range(1, 10000)]
    assert all(rows >= tokens for tokens, rows in enumerate(sizes, 1))
    assert all(rows - tokens <= max(63, tokens / 8) for tokens, rows in enumerate(sizes, 1))
    assert all(size(rows) == rows for rows in set(sizes))
    assert len(set(sizes)) < 50


def test_steps_that_keep_the_device_busy_are_left_alone():
    assert largest(600_000_000, 8192) == 8192
    assert largest(8_000_000_000, 8192) == 1500
    assert size(300) <= largest(8_000_000_000, 8192) < size(2000)


def test_what_lies_beyond_a_step_does_nothing():
    pieces = [TokenSpan([5, 2], 0, 20), TokenSpan([7, 1, 0], 33, 1)]
    key = PrefillGraphKey(64, 16, 6, 1, SlotShape(tiles=4, rows=32, rank=8))
    layout, tokens = layout_of(pieces, 16), np.arange(100, 121, dtype=np.int32)
    cells = np.array([[0, 0], [0, 0], [21, 0], [0, 1], [21, 0], [1, 0]], np.int32)
    orders = np.full(400, 99, np.int32)  # of a larger step before
    used = write_orders(orders, key, tokens, layout, cells)
    on_device = cut(torch.from_numpy(orders), key)
    got_tokens, positions, slots, tiles, got_cells, *none, pages = (part.tolist() for part in on_device)
    assert none == [[[]] * 4, [[]] * 3, [[]]]
    assert got_tokens == [[*range(100, 121), *[0] * 43]]
    assert positions == [[*range(20), 33, *[0] * 43]]
    assert slots == [[*range(80, 96), *range(32, 36), 1, *[-1] * 43]]
    assert tiles == [
        [0, 16, 20, 0, 0, 0],
        [16, 4, 1, 0, 0, 0],
        [0, 16, 33, 0, 0, 0],
        [0, 0, 2, 0, 0, 0],
    ]
    assert got_cells == [[0] * 4, [0] * 4, [21, 0, 0, 0], [0, 1, 1, 1], [21, 0, 0, 0], [1, 0, 0, 0]]
    assert pages[:5] == [5, 2, 7, 1, 0]
    assert used == len(orders) - len(pages) + 5
    assert all(part.data_ptr() % 16 == on_device[0].data_ptr() % 16 for part in on_device if part.numel())


def test_a_graph_serves_what_is_no_larger():
    shape = SlotShape(tiles=4, rows=64, rank=16)
    key = PrefillGraphKey(128, 16, 20, 2, shape)
    assert key.serves(key)

    def scaled(field: str, times: float) -> PrefillGraphKey:
        return key._replace(**{field: int(times * getattr(key, field))})

    def with_adapters(field: str, times: float) -> PrefillGraphKey:
        return key._replace(adapters=shape._replace(**{field: int(times * getattr(shape, field))}))

    for change, field in (
        (scaled, "rows"),
        (scaled, "tiles"),
        (with_adapters, "tiles"),
        (with_adapters, "rank"),
    ):
        assert key.serves(change(field, 0.5))
        assert not key.serves(change(field, 2))
    for change, field in ((scaled, "tile"), (scaled, "splits"), (with_adapters, "rows")):
        assert not key.serves(change(field, 0.5))
        assert not key.serves(change(field, 2))
    whole = key._replace(adapters=shape._replace(vectors=True))
    assert key.serves(whole)
    assert not whole.serves(key)


def test_adapters_rows_are_cut_into_tiles():
    segments = [(3, 0, 5), (0, 5, 37), (3, 40, 41), (1, 41, 305), (2, 305, 305), (2, 305, 306)]
    for rows in (16, 64, 128):
        cells = cut_tiles(segments, rows)
        slots, starts, counts, firsts, alike, after = cells.tolist()
        held = [(slot, at + i) for slot, at, n in zip(slots, starts, counts, strict=True) for i in range(n)]
        assert held == [(slot, at) for slot, start, stop in segments for at in range(start, stop)]
        assert all(at // rows == (at + n - 1) // rows for at, n in zip(starts, counts, strict=True))
        for block in range(3):
            assert firsts[block] == min(i for i, at in enumerate(starts) if at >= 128 * block)
        for i, (slot, at) in enumerate(zip(slots, starts, strict=True)):
            rest = range(at, (at // 128 + 1) * 128)
            there = [row for row in rest if (slot, row) in held]
            assert alike[i] == sum(row == at + n for n, row in enumerate(there))
            assert after[i] == sum(start < at + alike[i] for start in starts)


# -- steps -------------------------------------------------------------------------------------------------


class Attend(KernelAttend):
    """The kernels take what other kernels make: the plain rotation's results lie differently."""

    def __call__(self, layer: int, q_THC: Tensor, k_TGC: Tensor, v_TGC: Tensor) -> Tensor:
        return super().__call__(layer, q_THC.contiguous(), k_TGC.contiguous(), v_TGC.contiguous())


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill, "KernelAttend", Attend)
    # joining the parts of every row's keys would take seconds a step; test_kernels.py shows that it is right
    monkeypatch.setattr(prefill, "splits_for", lambda programs, tile: 1)


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    """With a sliding window."""
    path: Path = tiny_model(tmp_path_factory.mktemp("model"), "mistral", intermediate_size=128)
    return load_decoder(path)


def new_batch(
    decoder: Decoder, captured: bool, pages: int = 60, **given: int
) -> tuple[ContinuousBatch, Any, Any]:
    c = decoder.config
    cache = KVCache(c.kv_shapes, pages, CPU, torch.float32)
    limits = StepLimits(**{"context": c.max_context, "sequences": 6, "prefill_alone": 128, **given})
    graphs = Captured(decoder)
    steps = CapturedPrefill(decoder, cache, limits, graphs) if captured else None
    return ContinuousBatch(decoder, cache, limits, prefill=steps), steps, graphs


def published(decoder: Decoder, rank: int, seed: int, **flags: bool) -> PublishedAdapter:
    adapter = Adapter.fresh(LoraConfig(rank=rank, seed=seed, **flags), decoder.sites())
    noise = torch.randn(adapter.flat.shape, generator=torch.Generator().manual_seed(seed))
    adapter.flat.copy_(0.05 * noise)
    return PublishedAdapter(f"p{seed}", adapter, f"root{seed}".encode())


def prompt(seed: int, length: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(4, 320, length).astype(np.int32)


def submit(
    batch: ContinuousBatch,
    ids: np.ndarray,
    adapter: PublishedAdapter | None = None,
    work: dict | None = None,
    **params: Any,
) -> tuple[Future[SampleResponse], RunningRequest]:
    asked = SamplingParams(**{"max_tokens": 4, "stop": [], "seed": len(ids), **params})
    request, future = SampleWork(ids, asked, **(work or {})), Future()
    return future, batch.submit(request, batch.check_work(request), adapter, future)


def assert_same(got: list[SampleResponse], want: list[SampleResponse]) -> None:
    for one, other in zip(got, want, strict=True):
        assert [s.tokens for s in one.sequences] == [s.tokens for s in other.sequences]
        for a, b in zip(one.sequences, other.sequences, strict=True):
            np.testing.assert_allclose(a.logprobs_np, b.logprobs_np, atol=2e-4)
        if other.prompt_logprobs_np is not None:
            assert one.prompt_logprobs_np is not None
            np.testing.assert_allclose(one.prompt_logprobs_np[1:], other.prompt_logprobs_np[1:], atol=2e-4)
        assert one.prompt_cache_hit_tokens == other.prompt_cache_hit_tokens


def test_captured_steps_compute_what_plain_ones_do(decoder: Decoder):
    """Ragged prompts of adapters and of the base, several samples, scores, cached prefixes, cut draws."""
    wide, narrow = published(decoder, 16, 1), published(decoder, 4, 2, train_attn=False)
    part = published(decoder, 8, 3, train_mlp=False, train_unembed=False)
    answers = []
    for captured in (False, True):
        batch, steps, graphs = new_batch(decoder, captured, prefill_alone=96, prefill_beside=70)
        futures = [
            submit(batch, prompt(0, 1))[0],
            submit(batch, prompt(1, 45), wide)[0],
            submit(batch, prompt(2, 16), narrow, top_k=4)[0],
            submit(batch, prompt(3, 33), work={"num_samples": 3})[0],
            submit(batch, prompt(4, 40), part, work={"prompt_logprobs": True})[0],
            submit(batch, prompt(5, 17), wide)[0],
        ]
        finish(batch)
        futures += [
            submit(batch, np.append(prompt(1, 45), [9, 8, 7]), adapter)[0] for adapter in (wide, None)
        ]
        finish(batch)
        answers.append([future.result(timeout=0) for future in futures])
        if captured:
            assert graphs.count > 2
            assert steps.replayed > 2
    assert answers[0][6].prompt_cache_hit_tokens == 32
    assert_same(answers[1], answers[0])


def test_chunks_of_a_long_prompt(decoder: Decoder):
    """Chunks that end at, before and after the bounds of pages, tiles and sizes; longer than the window."""
    answers = []
    for captured in (False, True):
        batch, steps, _ = new_batch(decoder, captured, prefill_alone=65, prefill_beside=64)
        futures = [submit(batch, prompt(1, 200), max_tokens=3)[0], submit(batch, prompt(2, 127))[0]]
        finish(batch)
        answers.append([future.result(timeout=0) for future in futures])
        assert not captured or steps.replayed > 2
    assert_same(answers[1], answers[0])


def test_few_pages(decoder: Decoder):
    """Preempted sequences are computed anew, together with others' single tokens."""
    answers = []
    for captured in (False, True):
        batch, steps, _ = new_batch(decoder, captured, pages=5)
        futures = [submit(batch, prompt(i, 14 + i), max_tokens=8)[0] for i in range(4)]
        finish(batch)
        assert batch.preemptions > 0
        answers.append([future.result(timeout=0) for future in futures])
        assert not captured or steps.replayed > 2
    assert_same(answers[1], answers[0])


def test_a_slot_keeps_nothing_of_its_last_owner(decoder: Decoder):
    """An adapter everywhere, and then in its place one on the unembedding alone."""
    whole = published(decoder, 8, 1)
    part = published(decoder, 8, 2, train_attn=False, train_mlp=False)
    answers = []
    for captured in (False, True):
        batch, _, _ = new_batch(decoder, captured)
        futures = []
        for adapter in (whole, part, whole):
            futures.append(submit(batch, prompt(3, 12), adapter, max_tokens=1)[0])
            finish(batch)
        answers.append([future.result(timeout=0) for future in futures])
    assert_same(answers[1], answers[0])
    assert answers[0][0].sequences[0].logprobs != answers[0][1].sequences[0].logprobs


# -- graphs ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    # a width of the MLP at which the matrices of rank 1 lie where the kernels cannot read them
    return load_decoder(tiny_model(tmp_path_factory.mktemp("model"), "llama3", intermediate_size=100))


def first_tokens(batch: ContinuousBatch, length: int, adapter: PublishedAdapter | None = None) -> list[int]:
    future, _ = submit(batch, prompt(length, length), adapter, max_tokens=1)
    finish(batch)
    return future.result(timeout=0).sequences[0].tokens


def test_a_size_is_captured_when_it_comes_again(llama: Decoder):
    batch, steps, graphs = new_batch(llama, captured=True)
    for length, captured, replayed in ((10, 0, 0), (20, 1, 1), (30, 1, 2), (70, 1, 2), (100, 2, 3)):
        first_tokens(batch, length)
        assert (graphs.count, steps.replayed) == (captured, replayed), length


def test_a_larger_graph_does_until_a_size_is_common(llama: Decoder):
    """At first: with rows and tiles that do nothing, the base's apart from those with adapters."""
    batch, steps, graphs = new_batch(llama, captured=True)
    plain, _, _ = new_batch(llama, captured=False)
    for length, captured, replayed in (
        (70, 0, 0),
        (71, 1, 1),
        (10, 1, 2),
        (11, 1, 3),
        (12, 1, 3),
        (13, 2, 4),
    ):
        assert first_tokens(batch, length) == first_tokens(plain, length)
        assert (graphs.count, steps.replayed) == (captured, replayed), length
    narrow, wide = published(llama, 8, 1), published(llama, 16, 2)
    for length, adapter, captured, replayed in (
        (110, wide, 2, 4),
        (111, wide, 3, 5),
        (112, narrow, 3, 6),
        (80, narrow, 3, 7),
        (40, narrow, 3, 8),
        (12, narrow, 3, 8),  # other tiles
    ):
        assert first_tokens(batch, length, adapter) == first_tokens(plain, length, adapter)
        assert (graphs.count, steps.replayed) == (captured, replayed), length


def test_a_graph_that_is_much_too_large_does_not(llama: Decoder):
    batch, steps, graphs = new_batch(llama, captured=True, prefill_alone=512)
    for length in (200, 201, 10):
        first_tokens(batch, length)
    assert (graphs.count, steps.replayed) == (1, 1)


def test_a_graph_that_cannot_be_had_is_asked_for_once(llama: Decoder, caplog: pytest.LogCaptureFixture):
    batch, steps, graphs = new_batch(llama, captured=True)
    graphs.error = torch.OutOfMemoryError("no room")
    got = [first_tokens(batch, length) for length in (10, 20, 30, 40)]
    assert (graphs.count, steps.replayed) == (1, 0)
    assert "no room" in caplog.text
    plain, _, _ = new_batch(llama, captured=False)
    assert got == [first_tokens(plain, length) for length in (10, 20, 30, 40)]


def test_the_graphs_kept_are_those_used_last(llama: Decoder, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(prefill, "_GRAPHS", 2)
    batch, steps, graphs = new_batch(llama, captured=True, prefill_alone=256)
    for length in (10, 11, 70, 71, 12, 130, 131, 13):
        first_tokens(batch, length)
    assert graphs.count == 3
    assert {key.rows for key in steps._captured} == {64, 192}
    first_tokens(batch, 72)  # warm, and captured anew
    assert graphs.count == 4


def test_what_no_graph_can_serve_is_computed_as_ever(llama: Decoder, monkeypatch: pytest.MonkeyPatch):
    odd = published(llama, 1, 1)
    assert not usable([odd.adapter])
    batch, steps, graphs = new_batch(llama, captured=True)
    plain, _, _ = new_batch(llama, captured=False)
    for length in (40, 41, 42):
        assert first_tokens(batch, length, odd) == first_tokens(plain, length, odd)
    monkeypatch.setattr(steps, "rows", 100)
    for length in (120, 121, 122):
        assert first_tokens(batch, length) == first_tokens(plain, length)
    assert graphs.count == 0

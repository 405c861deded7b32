"""Warming up: it goes through everything that requests use, says how far it is, and leaves nothing behind."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.engine.tiny import tiny_model
from tinkex.config import keep_compiled
from tinkex.engine import protocol as p
from tinkex.engine import warm_up as module
from tinkex.engine.fake import FakeEngine
from tinkex.engine.torch.engine import TorchEngine
from tinkex.engine.warm_up import RUN, WarmUp, decode_sizes, prompt_sizes, warm_up

SMALL = WarmUp(rank=4, batch=5, pass_tokens=96, answers=2)


@pytest.fixture
def engine(tmp_path: Path) -> Any:
    engine = TorchEngine(p.EngineConfig(str(tiny_model(tmp_path, "qwen3")), device="cpu", threads=1))
    yield engine
    engine.close()


def test_nothing_is_left_of_it(engine: TorchEngine) -> None:
    before = dict(engine.heartbeat().stats)
    warm_up(engine, SMALL)
    engine.trainer.submit(p.DropAdapter("none")).result()  # then the report is new
    assert dict(engine.heartbeat().stats) == before


def test_all_that_requests_use_is_used(engine: TorchEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: set[int] = set()
    commands: list[str] = []
    forward, execute = engine._batch.step, engine._trainer.execute

    def step() -> None:
        forward()
        steps.add(len(engine._batch.running))

    def note(command: p.Command[Any]) -> Any:
        commands.append(type(command).__name__)
        return execute(command)

    monkeypatch.setattr(engine._batch, "step", step)
    monkeypatch.setattr(engine._trainer, "execute", note)
    warm_up(engine, SMALL)
    assert steps >= {1, 2, 3, 4, 5}
    assert commands[-3:] == ["ForwardBackward", "OptimStep", "DropAdapter"]  # captures free a pass's memory
    assert {"CreateAdapter", "ForwardBackward", "OptimStep", "ExportAdapter", "DropAdapter"} <= set(commands)


def test_it_says_how_far_it_is(engine: TorchEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(0, 100_000, 2))
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    said: list[str] = []
    warm_up(engine, SMALL, said.append)
    # 4 s for 1 of 53: passes count as seven each, prompts as 0.4
    assert said[0] == "compiling kernels and capturing steps: 1 of 29 (a pass of 64 tokens), about 208 s"
    assert len(said) > 5


def test_what_an_engine_cannot_do_does_not_stop_it(caplog: pytest.LogCaptureFixture) -> None:
    engine = FakeEngine(p.EngineConfig("fake", kind="fake", max_context=48))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module._Warming, "_publish", _refuses)
        warm_up(engine, WarmUp(rank=4, batch=2, pass_tokens=64))
    assert "warming up, publishing: no room; it will be compiled on first use" in caplog.text
    with pytest.raises(p.EngineError, match=r"run '\(warm-up\)' has no adapter"):
        engine.trainer.submit(p.ExportAdapter(RUN)).result()


def _refuses(warming: Any) -> None:
    raise p.EngineError("no room")


def test_a_lost_engine_is_not_hidden(engine: TorchEngine) -> None:
    engine.close()
    with pytest.raises(p.EngineLost):
        warm_up(engine, SMALL)


@pytest.mark.parametrize("batch", [1, 5, 64, 100, 256])
def test_every_captured_size_is_among_the_sizes(batch: int) -> None:
    bucket = pytest.importorskip("tinkex.engine.cuda.decode_graphs").bucket
    sizes = decode_sizes(batch)
    assert {bucket(n) for n in range(1, batch + 1)} == {bucket(n) for n in sizes}
    assert sizes[0] == batch
    for size in {bucket(n) for n in sizes}:  # the first and the last that a captured step serves
        served = [n for n in range(1, batch + 1) if bucket(n) == size]
        assert {served[0], served[-1]} <= set(sizes)


def test_every_captured_prompt_is_among_the_sizes() -> None:
    size = pytest.importorskip("tinkex.engine.cuda.prefill_graphs").size
    assert {size(n) for n in range(1, 8193)} == {size(n) for n in prompt_sizes(8192)}


def test_the_tiles_of_every_prompt_are_among_those_of_the_sizes() -> None:
    """Those of one adapter: a step is served by a graph of its size with tiles as large, and as many."""
    size = pytest.importorskip("tinkex.engine.cuda.prefill_graphs").size
    tile_rows = pytest.importorskip("tinkex.engine.cuda.adapter_table").tile_rows

    def shape(n: int) -> tuple[int, int]:
        return size(n), tile_rows(n)

    warm = {shape(n): -(-n // tile_rows(n)) for n in prompt_sizes(8192)}  # the last is the largest
    assert all(warm.get(shape(n), 0) >= -(-n // tile_rows(n)) for n in range(1, 8193))


def test_compiled_kernels_are_kept_in_the_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    assert keep_compiled(tmp_path) == tmp_path / "compiled"
    assert os.environ["TRITON_CACHE_DIR"] == str(tmp_path / "compiled")
    monkeypatch.setenv("TRITON_CACHE_DIR", "/elsewhere")
    assert keep_compiled(tmp_path) == Path("/elsewhere")

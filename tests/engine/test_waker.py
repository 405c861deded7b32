"""Streams are woken once for a step, and none is missed."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import uvloop

from tests.engine.tiny import tiny_model
from tinkex.engine import protocol as p
from tinkex.engine.torch.engine import TorchEngine
from tinkex.engine.torch.sampler import Waker
from tinkex.types.params import SamplingParams

LOOPS = [asyncio.new_event_loop, uvloop.new_event_loop]


class CountingLoop:
    """Keeps what it is asked to call."""

    def __init__(self) -> None:
        self.calls: list[Callable[[], None]] = []

    def call_soon_threadsafe(self, call: Callable[[], None]) -> None:
        self.calls.append(call)


def test_one_call_wakes_all() -> None:
    loop, waker = CountingLoop(), Waker()
    step: list[Any] = [asyncio.Event() for _ in range(256)]
    for ready in step:
        waker.wake(loop, ready)  # type: ignore[arg-type]
    (call,) = loop.calls
    call()
    assert all(ready.is_set() for ready in step)
    waker.wake(loop, step[0])  # type: ignore[arg-type]
    assert len(loop.calls) == 2


@pytest.mark.parametrize("new_loop", LOOPS)
def test_none_is_missed_while_the_loop_runs(new_loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    counts = [0] * 8

    async def everything() -> None:
        loop, waker = asyncio.get_running_loop(), Waker()
        events = [asyncio.Event() for _ in counts]
        given: list[int] = []

        def wake() -> None:
            for turn in range(400):
                given.append(turn)
                for ready in events:
                    waker.wake(loop, ready)

        async def follow(i: int) -> None:
            while counts[i] < 400:
                await events[i].wait()
                events[i].clear()
                counts[i] = len(given)

        thread = threading.Thread(target=wake)
        thread.start()
        await asyncio.wait_for(asyncio.gather(*(follow(i) for i in range(len(counts)))), 30)
        thread.join()

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(everything())
    assert counts == [400] * 8


@pytest.mark.parametrize("new_loop", LOOPS)
def test_streams_of_one_step_share_a_call(
    tmp_path: Path, new_loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    engine = TorchEngine(p.EngineConfig(str(tiny_model(tmp_path, "qwen3")), device="cpu", threads=1))
    params, calls = SamplingParams(max_tokens=8, stop=[]), list[int]()
    called = Waker._set

    def counted(waker: Waker) -> None:
        calls.append(1)
        called(waker)

    async def one(i: int) -> int:
        prompt = np.arange(4 + i, 12 + i, dtype=np.int32)
        pieces = [piece async for piece in engine.sampler.stream(p.SampleWork(prompt, params))]
        return sum(len(piece.tokens) for piece in pieces if isinstance(piece, p.SampledTokens))

    async def everything() -> list[int]:
        return await asyncio.gather(*(one(i) for i in range(32)))

    with pytest.MonkeyPatch.context() as patch, asyncio.Runner(loop_factory=new_loop) as runner:
        patch.setattr(Waker, "_set", counted)
        found = runner.run(everything())
    engine.close()
    assert found == [8] * 32
    assert len(calls) < 32 * 8  # one for each token, if none were shared; how many are depends on timing

"""A lane: functions one after the other, in the order given, off the event loop."""

from __future__ import annotations

import asyncio
import threading

import pytest

from tinkex.service.threads import Lane

pytestmark = pytest.mark.anyio


async def test_functions_given_at_once_are_done_in_order_and_one_at_a_time():
    lane, inside, order = Lane(), threading.Lock(), []

    def function(n: int) -> int:
        assert inside.acquire(blocking=False), "two at once"
        order.append(n)
        inside.release()
        return n

    results = await asyncio.gather(*(lane.run(lambda n=n: function(n)) for n in range(50)))
    assert results == order == list(range(50))
    assert await lane.run(threading.get_ident) != threading.get_ident()


async def test_the_next_begins_without_the_event_loop():
    lane, second = Lane(), threading.Event()
    lane_is_busy = threading.Event()
    first = asyncio.ensure_future(lane.run(lane_is_busy.wait))
    other = asyncio.ensure_future(lane.run(second.set))
    await asyncio.sleep(0)  # both are given
    lane_is_busy.set()
    assert second.wait(10)  # the loop stands still here, and hears of neither
    await asyncio.gather(first, other)


async def test_what_raises_fails_its_caller_alone():
    lane = Lane()

    def fails() -> None:
        raise ValueError("no")

    before, failed, after = await asyncio.gather(
        lane.run(lambda: 1), lane.run(fails), lane.run(lambda: 2), return_exceptions=True
    )
    assert (before, str(failed), after) == (1, "no", 2)

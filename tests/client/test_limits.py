"""Gates, and the rate limit that all samplers of a process share (K7, K10, K12, C11)."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Coroutine
from typing import Any

import pytest

from tests.client.conftest import PARAMS, PROMPT, close, eventually
from tests.stub import Stub, status
from tinkex import ServiceClient
from tinkex.client.limits import Gate, RateLimit, shared_rate_limit


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(coroutine)


def test_a_gate_is_first_come_first_served() -> None:
    async def scenario() -> list[int]:
        gate, order = Gate(2), []

        async def enter(n: int) -> None:
            async with gate.hold():
                order.append(n)
                assert gate.used <= 2
                await asyncio.sleep(0)

        await asyncio.gather(*map(enter, range(50)))
        assert gate.used == 0
        return order

    assert run(scenario()) == list(range(50))


def test_a_unit_larger_than_the_gate_passes_alone() -> None:
    async def scenario() -> None:
        gate = Gate(10)
        await gate.acquire(100)
        small = asyncio.ensure_future(gate.acquire(1))
        await asyncio.sleep(0)
        assert not small.done()
        assert len(gate) == 1
        gate.release(100)
        await small
        assert gate.used == 1

    run(scenario())


def test_a_cancelled_waiter_gives_its_place_up() -> None:
    async def scenario() -> None:
        gate = Gate(1)
        await gate.acquire()
        first, second = (asyncio.ensure_future(gate.acquire()) for _ in range(2))
        await asyncio.sleep(0)
        first.cancel()
        gate.release()
        await second
        gate.release()
        third = asyncio.ensure_future(gate.acquire())
        await asyncio.sleep(0)
        gate_held = asyncio.ensure_future(gate.acquire())
        await asyncio.sleep(0)
        gate.release()  # lets the last one in, which is cancelled before it notices
        gate_held.cancel()
        await asyncio.wait([gate_held, third])
        assert gate.used == 0

    run(scenario())


def test_a_resized_gate_admits_those_who_waited() -> None:
    async def scenario() -> None:
        gate = Gate(1)
        waiting = [asyncio.ensure_future(gate.acquire()) for _ in range(3)]
        await asyncio.sleep(0)
        assert [one.done() for one in waiting] == [True, False, False]
        gate.resize(3)
        await asyncio.gather(*waiting)

    run(scenario())


def test_waking_one_of_many_waiters_does_not_touch_the_others() -> None:
    """§5.4(5): a release costs the same whether ten or ten thousand wait."""

    async def scenario() -> int:
        gate = Gate(1)
        await gate.acquire()
        woken = 0

        async def wait() -> None:
            nonlocal woken
            await gate.acquire()
            woken += 1

        tasks = [asyncio.ensure_future(wait()) for _ in range(10_000)]
        await asyncio.sleep(0)
        gate.release()
        for _ in range(5):
            await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        return woken

    assert run(scenario()) == 1


def test_after_a_pause_one_probe_goes_first() -> None:
    async def scenario() -> None:
        limit = RateLimit()
        assert not await limit.turn()
        limit.pause(0.02)
        turns = [asyncio.ensure_future(limit.turn()) for _ in range(5)]
        await asyncio.sleep(0.06)
        assert [turn.done() for turn in turns] == [True, False, False, False, False]
        assert turns[0].result()
        limit.succeeded()
        limit.finish_probe()
        assert not any(await asyncio.gather(*turns[1:]))

    run(scenario())


def test_one_limit_for_one_server_and_credential() -> None:
    """C11, K9: the same object while anyone uses it, none left over afterwards."""
    one = shared_rate_limit("http://a", "me")
    assert shared_rate_limit("http://a", "me") is one
    assert shared_rate_limit("http://a", "you") is not one
    assert shared_rate_limit("http://b", "me") is not one
    old = weakref.ref(one)
    del one
    gc.collect()
    assert old() is None


@pytest.mark.parametrize("same_key", [True, False])
def test_a_429_pauses_every_sampler_with_the_same_credential_and_no_other(stub: Stub, same_key: bool) -> None:
    """K10, C11: across ServiceClients, and however the URL is spelled."""
    services = [
        ServiceClient(base_url=stub.url, api_key="tml-one"),
        ServiceClient(base_url=stub.url.upper() + "/", api_key="tml-one" if same_key else "tml-two"),
    ]
    first, second = (
        service.create_sampling_client(base_model="stub/base", timeout=5) for service in services
    )
    stub.script("asample", status(429, {"retry-after": "1.5"}))
    limited = first.sample(PROMPT, 1, PARAMS)
    stub.wait_for("asample", 1)
    identity = services[0]._connection.transport.credential.identity  # type: ignore[attr-defined]
    eventually(lambda: not shared_rate_limit(stub.url, identity).open)
    other = second.sample(PROMPT, 1, PARAMS)
    for future in (limited, other):
        future.result(5)
    refused = stub.sent("asample")[0].time
    (sent,) = [
        request.time
        for request in stub.sent("asample")
        if request.json["sampling_session_id"] == second._sampling_session_id
    ]
    assert (sent - refused >= 1.4) is same_key
    for service in services:
        close(service)


def test_many_limited_samples_go_on_when_the_server_does(stub: Stub, sampler: Any) -> None:
    """K16: a burst that meets 429s ends with every sample done and few requests wasted."""
    stub.script("asample", *[status(429, {"retry-after-ms": "30"})] * 10)
    futures = [sampler.sample(PROMPT, 1, PARAMS) for _ in range(40)]
    for future in futures:
        future.result(10)
    assert stub.count("asample") == 50

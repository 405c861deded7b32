"""Fair permits: round-robin for the runs and samplers of a client, fewest tokens first for users."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinkex.fair_permits import FairPermits, FewestTokensFirst
from tinkex.service.config import ServiceConfig

pytestmark = pytest.mark.anyio
both = pytest.mark.parametrize("kind", [FairPermits, FewestTokensFirst])


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


# -- both kinds ----------------------------------------------------------------------------------------------


@both
async def test_one_source_is_first_come_first_served(kind: type[FairPermits]) -> None:
    limiter, order = kind(2), list[int]()

    async def enter(n: int) -> None:
        async with limiter.permit():
            order.append(n)
            assert limiter.used <= 2
            await asyncio.sleep(0)

    await asyncio.gather(*map(enter, range(50)))
    assert limiter.used == 0
    assert order == list(range(50))


@both
async def test_a_request_for_more_than_there_is_is_admitted_alone(kind: type[FairPermits]) -> None:
    limiter = kind(10)
    await limiter.acquire("big", 100)
    small = asyncio.ensure_future(limiter.acquire("small", 1))
    await asyncio.sleep(0)
    assert not small.done()
    assert len(limiter) == 1
    limiter.release("big", 100)
    await small
    assert limiter.used == 1


@both
async def test_a_cancelled_waiter_gives_its_place_up(kind: type[FairPermits]) -> None:
    limiter = kind(1)
    await limiter.acquire()
    first, second = (asyncio.ensure_future(limiter.acquire()) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    limiter.release()
    await second
    limiter.release()
    third = asyncio.ensure_future(limiter.acquire())
    await asyncio.sleep(0)
    last = asyncio.ensure_future(limiter.acquire())
    await asyncio.sleep(0)
    limiter.release()  # admits the last one, which is cancelled before it notices
    last.cancel()
    await asyncio.wait([last, third])
    assert limiter.used == 0


@both
async def test_those_behind_a_cancelled_request_go_at_once(kind: type[FairPermits]) -> None:
    limiter = kind(2)
    await limiter.acquire("a")
    big, small = (asyncio.ensure_future(limiter.acquire(source, n)) for source, n in [("d", 5), ("e", 1)])
    await asyncio.sleep(0)
    assert not small.done()
    big.cancel()
    await asyncio.wait_for(small, 5)
    assert limiter.used == 2


@both
async def test_a_larger_capacity_admits_those_who_waited(kind: type[FairPermits]) -> None:
    limiter = kind(1)
    waiting = [asyncio.ensure_future(limiter.acquire(source)) for source in "abc"]
    await asyncio.sleep(0)
    assert [one.done() for one in waiting] == [True, False, False]
    limiter.resize(3)
    await asyncio.gather(*waiting)
    assert limiter.used == 3


@both
@pytest.mark.slow
async def test_waking_one_of_many_waiters_does_not_touch_the_others(kind: type[FairPermits]) -> None:
    """A release costs the same whether ten or ten thousand wait."""
    limiter = kind(1)
    await limiter.acquire()
    woken = 0

    async def wait() -> None:
        nonlocal woken
        await limiter.acquire()
        woken += 1

    tasks = [asyncio.ensure_future(wait()) for _ in range(10_000)]
    await asyncio.sleep(0)
    limiter.release()
    for _ in range(5):
        await asyncio.sleep(0)
    for task in tasks:
        task.cancel()
    assert woken == 1


# -- round-robin ---------------------------------------------------------------------------------------------


def passed(arrivals: list[str], capacity: int) -> list[str]:
    """In which order sources get through, when all ask at once and each leaves right away."""

    async def scenario() -> list[str]:
        limiter, order = FairPermits(capacity), []
        await limiter.acquire("", capacity)

        async def enter(source: str) -> None:
            async with limiter.permit(source):
                order.append(source)
                await asyncio.sleep(0)

        tasks = [asyncio.ensure_future(enter(source)) for source in arrivals]
        await asyncio.sleep(0)
        limiter.release("", capacity)
        await asyncio.gather(*tasks)
        assert limiter.used == len(limiter) == 0
        return order

    return asyncio.run(scenario())


def test_sources_take_turns() -> None:
    assert passed(["a"] * 5 + ["b"] + ["c"] * 2, 1) == ["a", "b", "c", "a", "c", "a", "a", "a"]


@pytest.mark.slow
@given(st.lists(st.sampled_from("abcd"), max_size=40), st.integers(1, 5))
def test_nobody_waits_for_more_than_one_turn_of_each_other(arrivals: list[str], capacity: int) -> None:
    """Between two turns of one source, no other has two while the first is waiting."""
    order = passed(arrivals, capacity)
    assert Counter(order) == Counter(arrivals)
    left = Counter(arrivals)
    since: dict[str, Counter[str]] = {source: Counter() for source in left}
    for source in order:
        for other, seen in since.items():
            if other != source and left[other]:
                seen[source] += 1
                assert seen[source] <= 1 + (capacity > 1)
        left[source] -= 1
        since[source].clear()


async def test_a_cancelled_waiter_costs_its_source_no_turn() -> None:
    limiter, order = FairPermits(1), list[str]()
    await limiter.acquire()

    async def enter(name: str, source: str) -> None:
        async with limiter.permit(source):
            order.append(name)

    tasks = {name: asyncio.ensure_future(enter(name, name[0])) for name in ("a1", "a2", "b1", "a3", "b2")}
    await asyncio.sleep(0)
    tasks["a1"].cancel()
    tasks["b1"].cancel()
    await asyncio.sleep(0)
    limiter.release()
    await asyncio.wait(tasks.values())
    assert order == ["a2", "b2", "a3"]


# -- fewest tokens first -------------------------------------------------------------------------------------


async def test_the_source_with_the_fewest_tokens_goes_next() -> None:
    permits, entered = FewestTokensFirst(16), list[str]()

    async def enter(source: str, count: int, tokens: int) -> None:
        await permits.acquire(source, count, tokens)
        entered.append(source)

    for source, count, tokens in [("long", 7, 7000), ("short", 7, 70), ("other", 2, 500)]:
        await enter(source, count, tokens)
    waiting = [asyncio.create_task(enter(source, 2, 10)) for source in ("long", "short")]
    await asyncio.sleep(0)
    permits.release("other", 2, 500)
    await waiting[1]
    permits.release("short", 2, 10)
    await waiting[0]
    assert entered[3:] == ["short", "long"]


async def test_whoever_has_least_goes_next() -> None:
    permits, entered = FewestTokensFirst(2), list[str]()

    async def visit(source: str, count: int = 1) -> None:
        await permits.acquire(source, count)
        entered.append(source)

    tasks = [asyncio.create_task(visit(source)) for source in "aaaabc"]
    await asyncio.sleep(0)
    assert entered == ["a", "a"]
    permits.release("a", 1)  # "a" still has one inside
    await asyncio.sleep(0)
    assert entered == ["a", "a", "b"]
    permits.release("b", 1)
    await asyncio.sleep(0)
    assert entered == ["a", "a", "b", "c"]
    for source in ("a", "c"):
        permits.release(source, 1)
        await asyncio.sleep(0)
    assert entered == ["a", "a", "b", "c", "a", "a"]
    tasks[-1].cancel()
    big, small = asyncio.create_task(visit("d", 5)), asyncio.create_task(visit("e"))
    await asyncio.sleep(0)
    big.cancel()  # what all waited behind has gone
    permits.release("a", 1)
    await asyncio.sleep(0.01)
    assert entered[-1] == "e"
    await asyncio.gather(*tasks, big, small, return_exceptions=True)


async def test_one_source_never_holds_all_permits() -> None:
    permits = FewestTokensFirst(18)
    assert all(permits.try_acquire("flood", 1) for _ in range(16))
    assert not permits.try_acquire("flood", 1)
    waiting = [asyncio.create_task(permits.acquire("flood", 1)) for _ in range(2)]
    await asyncio.sleep(0)
    await asyncio.wait_for(permits.acquire("new", 1), 5)  # though another waits
    assert not any(one.done() for one in waiting)
    for one in waiting:
        permits.release("flood", 1)
        await one


async def test_one_user_decodes_256_sequences_at_once_and_others_get_in(tmp_path: Path) -> None:
    """64 prompts of 4 samples are a usual batch: part of it must not wait until the rest is done."""
    config = ServiceConfig(tmp_path)
    permits = FewestTokensFirst(min(config.samples_in_flight, config.engine.max_batch))
    assert all(permits.try_acquire("one", 4) for _ in range(64))
    assert not permits.try_acquire("one", 4)
    assert permits.try_acquire("other", 32)

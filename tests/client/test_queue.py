"""The send queue: one run's requests are posted in order, whatever happens to any of them."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Awaitable
from typing import Any

import pytest

from tinkex.client.queue import SendQueue


class Sender:
    """Sends that record their order and can be held, refused or broken."""

    def __init__(self) -> None:
        self.queue = SendQueue()
        self.sent: list[Any] = []
        self.gate = threading.Event()
        self.gate.set()

    def send(
        self,
        name: Any,
        *,
        error: BaseException | None = None,
        late: BaseException | None = None,
        commits: bool = True,
    ):
        async def send() -> Awaitable[Any]:
            if commits:
                self.queue.commit()
            while not self.gate.is_set():
                await asyncio.sleep(0.002)
            self.sent.append(name)
            if error is not None:
                raise error

            async def result() -> Any:
                if late is not None:
                    raise late
                return name

            return result()

        return self.queue.enqueue(str(name), send)


def test_sends_go_in_the_order_of_the_calls() -> None:
    sender = Sender()
    futures = [sender.send(n) for n in range(200)]
    assert [future.result(20) for future in futures] == list(range(200))
    assert sender.sent == list(range(200))


def test_each_thread_keeps_its_order() -> None:
    sender = Sender()

    def call(thread: int) -> None:
        for n in range(50):
            sender.send((thread, n)).result(20)

    with concurrent.futures.ThreadPoolExecutor() as pool:
        list(pool.map(call, range(4)))
    for thread in range(4):
        assert [n for t, n in sender.sent if t == thread] == list(range(50))


def test_a_cancelled_send_that_waited_was_never_sent() -> None:
    sender = Sender()
    sender.gate.clear()
    first, second, third = (sender.send(n) for n in range(3))
    assert second.cancel()
    sender.gate.set()
    assert (first.result(20), third.result(20)) == (0, 2)
    assert sender.sent == [0, 2]


@pytest.mark.parametrize(
    "error", [ValueError("no"), asyncio.CancelledError(), concurrent.futures.CancelledError()]
)
@pytest.mark.parametrize("when", ["error", "late"])
@pytest.mark.parametrize("commits", [True, False])
def test_the_next_turn_comes_whatever_happens_to_one(error: BaseException, when: str, commits: bool) -> None:
    """Also if the turn was cancelled from below, when its future cannot be cancelled any more."""
    sender = Sender()
    sender.gate.clear()
    bad, good = sender.send("bad", commits=commits, **{when: error}), sender.send("good")  # type: ignore[arg-type]
    sender.gate.set()
    assert good.result(20) == "good"
    with pytest.raises((ValueError, concurrent.futures.CancelledError)):
        bad.result(20)


def test_a_turn_can_be_cancelled_until_it_commits_itself() -> None:
    queue, begun, go_on = SendQueue(), threading.Event(), threading.Event()
    sent: list[str] = []

    async def send() -> Awaitable[None]:
        begun.set()
        while not go_on.is_set():
            await asyncio.sleep(0.002)
        queue.commit()
        sent.append("it")
        return asyncio.sleep(0)

    early, late = queue.enqueue("early", send), queue.enqueue("late", send)
    assert begun.wait(20)
    assert early.cancel(), "its turn has come, but nothing was sent"
    go_on.set()
    late.result(20)
    assert sent == ["it"]
    assert not late.cancel()


def test_a_later_turn_does_not_wait_for_an_earlier_result() -> None:
    """Training is pipelined: only the sending takes queue."""
    queue = SendQueue()
    release = threading.Event()

    async def slow() -> Awaitable[str]:
        async def result() -> str:
            while not release.is_set():
                await asyncio.sleep(0.002)
            return "slow"

        return result()

    async def quick() -> Awaitable[str]:
        async def result() -> str:
            return "quick"

        return result()

    first, second = queue.enqueue("slow", slow), queue.enqueue("quick", quick)
    assert second.result(20) == "quick"
    assert not first.done()
    release.set()
    assert first.result(20) == "slow"

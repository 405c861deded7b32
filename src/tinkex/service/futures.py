"""Futures: accepted requests and their results, until the results have been fetched.

A result is there as soon as it is resolved, can be fetched more than once, and is kept until it is dropped.
A waiting long poll costs one asyncio future. Knows nothing of what is computed.
"""

from __future__ import annotations

import asyncio
import itertools
import time
import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from tinkex.errors import RequestErrorCategory
from tinkex.types.futures import RequestFailedResponse

# Why a future is not done yet: a queue state of the wire, and a sentence about it.
QueueState = tuple[str, str | None]
ACTIVE: QueueState = ("active", None)


@dataclass(eq=False, slots=True)
class Future:
    """One accepted request. `outcome` is its result, or a RequestFailedResponse."""

    request_id: str
    owner: str
    feed: str = ""  # the completion feed that reports it (completions.py)
    created: float = field(default_factory=time.monotonic)
    outcome: Any = None
    done: bool = False
    finished: float = 0.0
    delivered: float | None = None  # when it was fetched for the first time
    queue_state: QueueState = ACTIVE
    _waiters: list[asyncio.Future[None]] | None = None  # most are done before anybody polls

    def resolve(self, outcome: Any) -> None:
        """Set the outcome. The first one holds."""
        if not self.done:
            self.outcome, self.done, self.finished = outcome, True, time.monotonic()
            if self._waiters:
                wake(self._waiters)

    @property
    def failed(self) -> bool:
        return isinstance(self.outcome, RequestFailedResponse)

    async def wait(self, seconds: float) -> bool:
        """True once it is done, False after `seconds`."""
        if not self.done:
            if self._waiters is None:
                self._waiters = []
            await wait_among(self._waiters, seconds)
        return self.done


def failure(message: str, category: str = "server") -> RequestFailedResponse:
    return RequestFailedResponse(error=message, category=RequestErrorCategory.parse(category))


async def wait_among(waiters: list[asyncio.Future[None]], seconds: float) -> None:
    """Wait to be woken with all of `waiters`, or for `seconds`. (asyncio.wait would cost five times this.)"""
    loop = asyncio.get_running_loop()
    waiter = loop.create_future()
    waiters.append(waiter)
    timer = loop.call_later(seconds, _wake, waiter)
    try:
        await waiter
    finally:
        timer.cancel()
        if waiter in waiters:
            waiters.remove(waiter)


def wake(waiters: list[asyncio.Future[None]]) -> None:
    for waiter in waiters:
        _wake(waiter)
    waiters.clear()


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


class Futures:
    """All futures of a service."""

    def __init__(self) -> None:
        self._futures: dict[str, Future] = {}
        self._prefix, self._count = uuid.uuid4().hex[:12], itertools.count()

    def __len__(self) -> int:
        return len(self._futures)

    def create(self, owner: str, *, request_id: str | None = None, feed: str = "") -> Future:
        request_id = request_id or f"{self._prefix}-{next(self._count)}"
        future = self._futures[request_id] = Future(request_id, owner, feed)
        return future

    def create_resolved(self, owner: str, outcome: Any, request_id: str | None = None) -> Future:
        future = self.create(owner, request_id=request_id)
        future.resolve(outcome)
        return future

    def get(self, request_id: str) -> Future | None:
        return self._futures.get(request_id)

    def drop(self, request_ids: Iterable[str]) -> list[str]:
        """Forget those of these that are done; returns their ids."""
        dropped = [i for i in request_ids if (future := self._futures.get(i)) is not None and future.done]
        for request_id in dropped:
            del self._futures[request_id]
        return dropped

    def expired(self, now: float, keep: float, keep_delivered: float) -> list[str]:
        """Those fetched more than `keep_delivered` seconds ago, or done and not fetched for `keep`."""
        return [
            future.request_id
            for future in self._futures.values()
            if future.done
            and (
                now - future.finished > keep
                or (future.delivered is not None and now - future.delivered > keep_delivered)
            )
        ]

    def pending(self, run_id: str) -> list[Future]:
        """The unresolved futures of a run's requests."""
        return [f for i, f in self._futures.items() if not f.done and i.rpartition("#")[0] == run_id]

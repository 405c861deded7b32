"""Promises: accepted requests, until their results have been fetched.

Promises a client may rely on: a result is there as soon as it is resolved (no polling inside), can be fetched
more than once, and is kept until it is acknowledged or expires; a waiting poll costs one asyncio future.
Knows nothing of what is being computed, and nothing of bytes. Polls for many at once are in lanes.py.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from tinkex.errors import RequestErrorCategory
from tinkex.service.refusal import Caller, Refusal, not_found
from tinkex.types.futures import CancelFutureRequest, FutureRetrieveRequest, Pending, RequestFailedResponse

log = logging.getLogger("tinkex.service")

EXPIRED = "this request's result is no longer kept"

# Why a future is not done yet: a queue state of the wire, and words for it.
QueueState = tuple[str, str | None]
ACTIVE: QueueState = ("active", None)


@dataclass(eq=False, slots=True)
class Future:
    """One accepted request. `outcome` is its result, or a RequestFailedResponse."""

    request_id: str
    owner: str
    lane: str = ""  # the sampler whose batch poll reports it
    created: float = field(default_factory=time.monotonic)
    outcome: Any = None
    done: bool = False
    finished: float = 0.0
    delivered: float | None = None  # when it was fetched for the first time
    cancel: Callable[[], object] | None = None  # stops the work, if that is still possible
    on_done: Callable[[Future], None] | None = None  # called before anybody is told
    why: Callable[[], QueueState] = lambda: ACTIVE
    _waiters: list[asyncio.Future[None]] | None = None  # most are done before anybody asks

    def resolve(self, outcome: Any) -> None:
        """The first outcome holds."""
        if self.done:
            return
        self.outcome, self.done, self.finished, self.cancel = outcome, True, time.monotonic(), None
        if self.on_done is not None:
            try:
                self.on_done(self)
            except Exception:  # whoever waits must be told all the same
                log.exception("the outcome of %s could not be noted", self.request_id)
        if self._waiters:
            wake(self._waiters)

    def fail(self, message: str, category: str = "server") -> None:
        self.resolve(RequestFailedResponse(error=message, category=RequestErrorCategory.parse(category)))

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


async def _nowhere(request_id: str, caller: Caller) -> Future | None:
    return None


class Futures:
    """All promises of a service."""

    def __init__(
        self, *, long_poll: float = 30.0, keep: float = 3600.0, keep_delivered: float = 300.0
    ) -> None:
        self.long_poll = long_poll
        self.keep = keep
        self.keep_delivered = keep_delivered
        self._futures: dict[str, Future] = {}
        self._prefix, self._count = uuid.uuid4().hex[:12], itertools.count()
        # Asked for an id that is not here: of a run that was put on disk, say. Set by the service.
        self.elsewhere: Callable[[str, Caller], Awaitable[Future | None]] = _nowhere
        # Told of ids whose results are not kept any longer.
        self.on_drop: Callable[[list[str]], None] = lambda _: None

    def __len__(self) -> int:
        return len(self._futures)

    def create(self, owner: str, *, request_id: str | None = None, lane: str = "") -> Future:
        request_id = request_id or f"{self._prefix}-{next(self._count)}"
        future = self._futures[request_id] = Future(request_id, owner, lane)
        return future

    def get(self, request_id: str) -> Future | None:
        return self._futures.get(request_id)

    def drop(self, request_ids: Iterable[str]) -> None:
        """Let go of results."""
        dropped = [i for i in request_ids if (future := self._futures.get(i)) is not None and future.done]
        for request_id in dropped:
            del self._futures[request_id]
        if dropped:
            self.on_drop(dropped)

    def discard(self, future: Future) -> None:
        """Take back a promise that nobody was told of."""
        self._futures.pop(future.request_id, None)

    def expire(self, now: float | None = None) -> None:
        """Let go of what was fetched a while ago, and of what nobody fetched for long."""
        now = time.monotonic() if now is None else now
        self.drop(
            [
                future.request_id
                for future in self._futures.values()
                if future.done
                and (
                    now - future.finished > self.keep
                    or (future.delivered is not None and now - future.delivered > self.keep_delivered)
                )
            ]
        )

    # -- operations --------------------------------------------------------------------------------------

    async def retrieve_future(self, request: FutureRetrieveRequest, caller: Caller) -> Any:
        future = self._futures.get(request.request_id) or await self.elsewhere(request.request_id, caller)
        if future is None:
            raise Refusal(410, EXPIRED)  # not 404: on 410 official samplers ask anew by themselves
        if future.owner != caller.user:
            raise not_found(f"request {request.request_id}")
        if not future.done and not await future.wait(self.long_poll):
            return Pending(request.request_id, *future.why())
        if future.delivered is None:
            future.delivered = time.monotonic()
        return future.outcome

    async def cancel_future(self, request: CancelFutureRequest, caller: Caller) -> None:
        future = self._futures.get(request.request_id)
        if future is not None and future.owner == caller.user and future.cancel is not None:
            future.cancel()

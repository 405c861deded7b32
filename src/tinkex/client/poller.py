"""Waiting for results: one long poll per request, or one per sampler where the server offers it.

Promises: polls are paced whatever the server answers; a batch poll that breaks falls back to single polls
instead of failing everyone; queue states reach an observer on each change. Knows nothing of what a
result means.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from tinkex.client import loop as background
from tinkex.client.connection import Connection
from tinkex.client.retry import retryable
from tinkex.errors import APIConnectionError, APIStatusError, RequestErrorCategory, RequestFailedError
from tinkex.types.futures import (
    FutureRetrieveRequest,
    FuturesRetrieveRequest,
    MetadataOnly,
    Pending,
    RequestFailedResponse,
    SamplingSessionFuturesTarget,
)
from tinkex.wire import ops
from tinkex.wire.ops import Op

log = logging.getLogger("tinkex")
Observer = Callable[[str, str | None], None]  # queue state, its reason
MAX_FAILURES = 8  # of a batch poll in a row, before single polls take over for good
EARLY_KEPT = 120.0  # seconds; a submit that is answered later than that was given up
QUICK_POLL = 1.0  # a "not yet" that came back sooner than this was no long poll: wait before the next


async def retrieve(
    connection: Connection,
    op: Op[Any, Any],
    request_id: str,
    *,
    observe: Observer | None = None,
    ready: bool = False,
) -> Any:
    """The result of a promise of `op`; raises RequestFailedError if the server failed it.

    `ready` says that the result is known to be there, so that the request is a short one.
    """
    request = FutureRetrieveRequest(request_id=request_id)
    now = asyncio.get_running_loop().time
    pause = 0.0
    while True:
        asked = now()
        answer = await connection.transport.call(ops.RETRIEVE_FUTURE, request, awaiting=op, ready=ready)
        if isinstance(answer, RequestFailedResponse):
            raise RequestFailedError(
                f"{op.name} failed ({answer.category}): {answer.error}",
                request_id,
                RequestErrorCategory.parse(answer.category),
            )
        if isinstance(answer, Pending):
            if observe is not None:
                observe(answer.queue_state, answer.queue_state_reason)
        elif not isinstance(answer, MetadataOnly):
            if observe is not None:
                observe("active", None)
            return answer
        ready = False
        pause = min(max(0.05, pause * 2), QUICK_POLL) if now() - asked < QUICK_POLL else 0.0
        if pause:
            await asyncio.sleep(pause)


class BatchPoller:
    """One long poll for all samples of a sampling session (one at a time, and none when nobody waits)."""

    def __init__(self, connection: Connection, sampling_session_id: str, clone_id: int) -> None:
        self._connection = connection
        self._target = SamplingSessionFuturesTarget(
            sampling_session_id=sampling_session_id, cloned_sampler_id=clone_id
        )
        self._waiting: dict[str, asyncio.Future[bool]] = {}  # True: its result is there
        # Finished before anyone asked, and when: the answer to the submit was slower, or it was cancelled.
        self._early: dict[str, float] = {}
        self._retrieved: list[str] = []
        self._cursor = 0
        self._task: asyncio.Task[None] | None = None
        self._broken = False

    async def retrieve(self, op: Op[Any, Any], request_id: str, observe: Observer | None = None) -> Any:
        """As `retrieve` above, through the shared poll."""
        if request_id in self._early:
            ready = True
        else:
            ready = not self._broken and await self._finished(request_id)
        try:
            return await retrieve(self._connection, op, request_id, observe=observe, ready=ready)
        finally:  # whatever came of it, nobody will ask again
            self._early.pop(request_id, None)
            if not self._broken:
                self._retrieved.append(request_id)

    async def _finished(self, request_id: str) -> bool:
        """Wait for the shared poll to name it; False if it had better be asked for on its own."""
        waiter: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiting[request_id] = waiter
        if self._task is None:
            self._task = background.spawn(self._poll())
        try:
            return await waiter
        finally:
            self._waiting.pop(request_id, None)

    async def _poll(self) -> None:
        failures = 0
        try:
            # One more round after the last waiter, to tell the server what may be forgotten.
            while self._waiting or self._retrieved:
                try:
                    await self._poll_once()
                    failures = 0
                except (APIConnectionError, APIStatusError) as error:
                    failures += 1
                    if failures > MAX_FAILURES or not retryable(getattr(error, "status_code", 0)):
                        raise
                    if isinstance(error, APIConnectionError):
                        self._let_go()
                    await asyncio.sleep(min(0.1 * 2**failures, QUICK_POLL))
        except Exception as error:
            log.debug("batch retrieval gave up (%s); polling one by one", error)
            self._broken = True
            self._let_go()
        finally:
            self._task = None

    def _let_go(self) -> None:
        """Have everyone ask on their own: a server that came back may have forgotten what they wait for."""
        self._retrieved.clear()
        self._cursor = 0  # and it may count anew
        for waiter in self._waiting.values():
            if not waiter.done():
                waiter.set_result(False)

    async def _poll_once(self) -> None:
        retrieved, self._retrieved = self._retrieved, []
        asked = asyncio.get_running_loop().time()
        request = FuturesRetrieveRequest(
            target=self._target, prev_cursor=self._cursor, retrieved_request_ids=retrieved
        )
        try:
            reply = await self._connection.transport.call(ops.RETRIEVE_FUTURES, request)
        except BaseException:
            self._retrieved = retrieved + self._retrieved
            raise
        if reply.cursor < self._cursor:  # it came back without our noticing
            self._let_go()
        self._cursor = reply.cursor
        for completion in reply.completions:
            waiter = self._waiting.get(completion.request_id)
            if waiter is None:
                self._early[completion.request_id] = asked
            elif not waiter.done():
                waiter.set_result(True)
        while self._early and next(iter(self._early.values())) < asked - EARLY_KEPT:
            del self._early[next(iter(self._early))]
        quick = asyncio.get_running_loop().time() - asked < QUICK_POLL
        if not reply.completions and quick and self._waiting:
            await asyncio.sleep(0.1)


class QueueWatch:
    """Turns a stream of queue states into one log line per change, and tells whoever listens."""

    def __init__(self, what: str, listener: Observer | None = None) -> None:
        self._what = what
        self._listener = listener
        self._state = "active"

    def __call__(self, state: str, reason: str | None) -> None:
        if state == self._state:
            return
        self._state = state
        if state == "active":
            log.info("%s is running again", self._what)
        else:
            log.warning("%s is paused (%s)%s", self._what, state, f": {reason}" if reason else "")
        if self._listener is not None:
            try:
                self._listener(state, reason)
            except Exception:  # a user's code: it must not cost the result that was being waited for
                log.exception("%s: its queue state listener failed", self._what)

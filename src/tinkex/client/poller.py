"""Waiting for results: one long poll per request, or one per sampler where the server offers it.

Promises: polls are paced whatever the server answers; a batch poll that breaks falls back to single polls
instead of failing everyone; a server that forgot what is waited for is found out, even if it never seemed
to be away; queue states reach an observer on each change. Knows nothing of what a result means.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from tinkex.client import loop as background
from tinkex.client.queue_state import Listener
from tinkex.client.retry import retryable
from tinkex.client.server_connection import ServerConnection
from tinkex.client.transport import CallContext
from tinkex.errors import (
    APIConnectionError,
    APIStatusError,
    ExpiredError,
    RequestErrorCategory,
    RequestFailedError,
)
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
MAX_FAILURES = 8  # of a batch poll in a row, before single polls take over for good
EARLY_KEPT = 120.0  # seconds; a submit that is answered later than that was given up
QUICK_POLL = 1.0  # a "not yet" that came back sooner than this was no long poll: wait before the next


async def retrieve(
    connection: ServerConnection,
    op: Op[Any, Any],
    request_id: str,
    *,
    observe: Listener | None = None,
    size: int | None = None,
    owner: str = "",
) -> Any:
    """The result of a promise of `op`; raises RequestFailedError if the server failed it.

    `size` says that the result is known to be there, and how many bytes it has (0: nobody said). `owner` is
    the run or sampler that waits, as limits are shared.
    """
    with connection.reporting(op.name):
        return await _retrieve(connection, op, request_id, observe, size, owner)


async def _retrieve(
    connection: ServerConnection,
    op: Op[Any, Any],
    request_id: str,
    observe: Listener | None,
    size: int | None,
    owner: str,
) -> Any:
    async def ask(*, ready: bool) -> Any:
        request = FutureRetrieveRequest(request_id, allow_metadata_only=not ready)
        return await connection.transport.call(
            ops.RETRIEVE_FUTURE, request, CallContext(awaiting=op, ready=ready, owner=owner)
        )

    now = asyncio.get_running_loop().time
    pause = 0.0
    while True:
        asked = now()
        if size is None:
            answer = await ask(ready=False)
        else:
            async with connection.responses.permit(size, owner):
                answer = await ask(ready=True)
        if isinstance(answer, MetadataOnly) and size is None:
            size = answer.size
            continue
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
        size = None
        pause = min(max(0.05, pause * 2), QUICK_POLL) if now() - asked < QUICK_POLL else 0.0
        if pause:
            await asyncio.sleep(pause)


class BatchPoller:
    """One long poll for all samples of a sampling session (one at a time, and none when nobody waits)."""

    def __init__(self, connection: ServerConnection, sampling_session_id: str, clone_id: int) -> None:
        self._connection = connection
        self._target = SamplingSessionFuturesTarget(
            sampling_session_id=sampling_session_id, cloned_sampler_id=clone_id
        )
        # How large the result is, once it is there; None: it had better be asked for on its own.
        self._waiting: dict[str, asyncio.Future[int | None]] = {}
        # Finished before anyone asked (the submit's answer was slower, or it was cancelled): when, how large.
        self._early: dict[str, tuple[float, int]] = {}
        self._fetching = 0  # callers whose result is there and on its way
        self._moved = asyncio.Event()  # set when a caller came, went or was served
        self._retrieved: list[str] = []
        self._cursor = 0
        self._task: asyncio.Task[None] | None = None
        self._failures = 0  # of polls, in a row
        self._broken = False

    async def retrieve(self, op: Op[Any, Any], request_id: str, observe: Listener | None = None) -> Any:
        """As `retrieve` above, through the shared poll."""
        size = None
        if request_id in self._early:
            size = self._early[request_id][1]
        elif not self._broken:
            waiter = self._waiting[request_id] = asyncio.get_running_loop().create_future()
            self._moved.set()
            if self._task is None:
                self._task = background.spawn(self._poll())
            try:
                size = await waiter
            finally:
                del self._waiting[request_id]
                self._moved.set()
        self._fetching += 1
        try:
            owner = self._target.sampling_session_id
            return await retrieve(self._connection, op, request_id, observe=observe, size=size, owner=owner)
        except ExpiredError:
            self._let_go()  # forgotten, and perhaps not alone
            raise
        finally:  # whatever came of it, nobody will ask again
            self._fetching -= 1
            self._moved.set()
            self._early.pop(request_id, None)
            if not self._broken:
                self._retrieved.append(request_id)

    async def _poll(self) -> None:
        try:
            # One more round after the last caller was served, to tell the server what may be forgotten.
            while self._waiting or self._fetching or self._retrieved:
                if (self._waiting or self._fetching) and not self._unanswered():
                    self._moved.clear()
                    await self._moved.wait()
                    continue
                try:
                    await self._poll_once()
                    self._failures = 0
                except (APIConnectionError, APIStatusError) as error:
                    self._failures += 1
                    status = getattr(error, "status_code", 0)
                    if self._failures > MAX_FAILURES or not retryable(status):
                        raise
                    if status == 0 or status >= 500:
                        self._let_go()
                    await asyncio.sleep(min(0.1 * 2**self._failures, QUICK_POLL))
        except Exception as error:
            log.debug("batch retrieval gave up (%s); polling one by one", error)
            self._broken = True
            self._let_go()
        finally:
            self._task = None

    def _unanswered(self) -> bool:
        """Is there anything to wait for? A poll for nothing holds a place that another sampler needs."""
        return any(not waiter.done() for waiter in self._waiting.values())

    def _let_go(self) -> None:
        """Have everyone ask on their own: a server that came back may have forgotten what they wait for."""
        self._retrieved.clear()
        self._cursor = 0  # and it may count anew
        for waiter in self._waiting.values():
            if not waiter.done():
                waiter.set_result(None)

    async def _poll_once(self) -> None:
        retrieved, self._retrieved = self._retrieved, []
        asked = asyncio.get_running_loop().time()
        request = FuturesRetrieveRequest(
            target=self._target,
            prev_cursor=self._cursor,
            retrieved_request_ids=retrieved,
            timeout=None if self._unanswered() else 0.0,
        )
        try:
            reply = await self._connection.transport.call(ops.RETRIEVE_FUTURES, request)
        except BaseException:
            self._retrieved = retrieved + self._retrieved
            raise
        if reply.cursor < self._cursor:  # it came back without our noticing
            return self._let_go()  # and the next poll asks for all that has ended since
        self._cursor = reply.cursor
        for completion in reply.completions:
            waiter = self._waiting.get(completion.request_id)
            size = getattr(completion, "response_payload_uncompressed_size", None) or 0
            if waiter is None:
                self._early[completion.request_id] = asked, size
            elif not waiter.done():
                waiter.set_result(size)
        while self._early and next(iter(self._early.values()))[0] < asked - EARLY_KEPT:
            del self._early[next(iter(self._early))]
        if reply.completions or not self._waiting:
            return
        if asyncio.get_running_loop().time() - asked < QUICK_POLL:
            await asyncio.sleep(0.1)
        else:  # nothing for so long: let the one that waits longest see whether the server still knows it
            oldest = next(iter(self._waiting.values()))
            if not oldest.done():
                oldest.set_result(None)

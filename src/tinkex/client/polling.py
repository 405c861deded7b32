"""Polling for results, one by one or for a whole sampler, and the queue states that polls report.

Promises: the polls of an impatient server are paced; a batch poll that fails repeatedly is replaced by single
polls; a server that restarted and lost the requests is noticed, even if no connection failed.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, defaultdict
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

from tinkex import tracing
from tinkex.client import loop as background
from tinkex.client.retry import retry_after, retryable
from tinkex.client.server_connection import ServerConnection
from tinkex.client.telemetry import Telemetry
from tinkex.client.transport import CallContext, QueueListener
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
    PendingFuture,
    RequestFailedResponse,
    SamplingSessionFuturesTarget,
)
from tinkex.wire import ops
from tinkex.wire.ops import Op

log = logging.getLogger("tinkex")
MAX_FAILURES = 8  # of a batch poll in a row, after which only single polls are used
EARLY_KEPT = 120.0  # seconds for which a completion without a waiter is kept
QUICK_POLL = 1.0  # seconds; after a "not ready" that came sooner, wait before the next poll
PACE = 0.1  # seconds between polls if the server answers them at once
LOG_EVERY = 60.0  # seconds before the same queue state is logged again
ACTIVE = "active"
_UNLIMITED = nullcontext()


async def retrieve(
    connection: ServerConnection,
    op: Op[Any, Any],
    request_id: str,
    *,
    observe: QueueListener = lambda state, reason: None,
    size: int | None = None,
    source: str = "",
) -> Any:
    """The result of a request of `op`; raises RequestFailedError if the server failed it.

    `size`: the result is known to be ready and has this many bytes (0: unknown). `source` is the run or
    sampler that shares the limits.
    """
    now, pause = asyncio.get_running_loop().time, 0.0
    with connection.reporting(op.name):
        while True:
            asked, ready = now(), size is not None
            request = FutureRetrieveRequest(request_id, allow_metadata_only=not ready)
            context = CallContext(awaiting=op, ready=ready, source=source)
            async with _UNLIMITED if size is None else connection.responses.permit(source, size):
                answer = await connection.transport.call(ops.RETRIEVE_FUTURE, request, context)
            if isinstance(answer, MetadataOnly) and not ready:
                size = answer.size
                continue
            if isinstance(answer, RequestFailedResponse):
                message = f"{op.name} failed ({answer.category}): {answer.error}"
                raise RequestFailedError(message, request_id, RequestErrorCategory.parse(answer.category))
            if isinstance(answer, PendingFuture):
                observe(answer.queue_state, answer.queue_state_reason)
            elif not isinstance(answer, MetadataOnly):
                observe("active", None)
                return answer
            size = None
            pause = min(max(0.05, pause * 2), QUICK_POLL) if now() - asked < QUICK_POLL else 0.0
            if pause:
                await asyncio.sleep(pause)


class BatchPoller:
    """One long poll at a time for all samples of a sampling session, while there are waiters."""

    def __init__(self, connection: ServerConnection, sampling_session_id: str, clone_id: int) -> None:
        self._connection = connection
        self._id = sampling_session_id
        self._target = SamplingSessionFuturesTarget(sampling_session_id=self._id, cloned_sampler_id=clone_id)
        # Resolved with the result's size once it is ready; with None, the caller polls by itself.
        self._waiting: dict[str, asyncio.Future[int | None]] = {}
        # Completions without a waiter: when they came, and their sizes.
        self._early: dict[str, tuple[float, int]] = {}
        self._fetching = 0  # callers whose result is being fetched
        self._changed = asyncio.Event()  # set when a caller came, left or got its result
        self._retrieved: list[str] = []
        self._cursor = 0
        self._task: asyncio.Task[None] | None = None
        self._failures = 0  # of polls, in a row
        self._broken = False

    async def retrieve(self, op: Op[Any, Any], request_id: str, observe: QueueListener) -> Any:
        """`retrieve`, through the shared poll."""
        size = None
        if request_id in self._early:
            size = self._early[request_id][1]
        elif not self._broken:
            waiter = self._waiting[request_id] = asyncio.get_running_loop().create_future()
            self._changed.set()
            if self._task is None:
                self._task = background.spawn(self._poll())
            try:
                size = await waiter
            finally:
                del self._waiting[request_id]
                self._changed.set()
        self._fetching += 1
        try:
            return await retrieve(
                self._connection, op, request_id, observe=observe, size=size, source=self._id
            )
        except ExpiredError:
            self._release_all()  # the server may have lost the others too
            raise
        finally:  # it is not asked for again
            self._fetching -= 1
            self._changed.set()
            self._early.pop(request_id, None)
            if not self._broken:
                self._retrieved.append(request_id)

    async def _poll(self) -> None:
        try:
            # One more poll after the last result was fetched: it says what the server may delete.
            while self._waiting or self._fetching or self._retrieved:
                if (self._waiting or self._fetching) and not self._unanswered():
                    self._changed.clear()
                    await self._changed.wait()
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
                        self._release_all()
                    told = retry_after(error.response.headers) if isinstance(error, APIStatusError) else None
                    await asyncio.sleep(told or min(0.1 * 2**self._failures, QUICK_POLL))
        except Exception as error:
            log.debug("batch retrieval gave up (%s); polling one by one", error)
            self._broken = True
            self._release_all()
        finally:
            self._task = None

    def _unanswered(self) -> bool:
        """Does any caller wait? An idle poll would hold a permit that another sampler needs."""
        return any(not waiter.done() for waiter in self._waiting.values())

    def _release_all(self) -> None:
        """Let every caller poll by itself: a server that restarted may have lost their requests."""
        self._retrieved.clear()
        self._cursor = 0  # a restarted server counts from 0
        for waiter in self._waiting.values():
            _resolve(waiter, None)

    async def _poll_once(self) -> None:
        retrieved, self._retrieved = self._retrieved, []
        asked = asyncio.get_running_loop().time()
        request = FuturesRetrieveRequest(
            target=self._target, prev_cursor=self._cursor, retrieved_request_ids=retrieved,
            timeout=None if (held := self._unanswered()) else 0.0,
        )  # fmt: skip
        try:
            reply = await self._connection.transport.call(ops.RETRIEVE_FUTURES, request)
        except BaseException:
            self._retrieved = retrieved + self._retrieved
            raise
        if reply.cursor < self._cursor:  # the server restarted unnoticed
            return self._release_all()  # the next poll asks for all completions since
        self._cursor = reply.cursor
        for completion in reply.completions:
            size = getattr(completion, "response_payload_uncompressed_size", None) or 0
            if (waiter := self._waiting.get(completion.request_id)) is not None:
                _resolve(waiter, size)
            else:
                self._early[completion.request_id] = asked, size
        while self._early and next(iter(self._early.values()))[0] < asked - EARLY_KEPT:
            del self._early[next(iter(self._early))]
        if reply.completions or not self._waiting or not held:
            return
        if asyncio.get_running_loop().time() - asked < QUICK_POLL:
            await asyncio.sleep(PACE)
        else:  # nothing came: let the oldest caller find out whether the server still knows its request
            _resolve(next(iter(self._waiting.values())), None)


def _resolve(waiter: asyncio.Future[int | None], size: int | None) -> None:
    if not waiter.done():
        waiter.set_result(size)


# -- queue states ----------------------------------------------------------------------------------------


class QueueStateObserver(Protocol):
    """Receives changes of queue states.

    States are active, paused_capacity, paused_rate_limit, paused_billing, or one of a newer server.
    """

    def on_queue_state_change(self, queue_state: str, queue_state_reason: str | None) -> None: ...


@dataclass(frozen=True)
class QueueStats:
    """How often each state was entered, and how many seconds the past ones lasted in all."""

    state: str
    changes: dict[str, int]
    seconds: dict[str, float]


class QueueWatch:
    """Why a run's or sampler's work is paused: merges what polls and submissions say, and reports changes.

    Each change is counted, logged, and reported once and in order to the listeners, off the loop.
    """

    def __init__(self, what: str, *listeners: QueueListener, telemetry: Telemetry | None = None) -> None:
        self._what, self._listeners, self._telemetry = what, listeners, telemetry
        self._paused: dict[str, tuple[str, str | None]] = {}  # by source: a state other than active
        self._state, self._since = ACTIVE, time.monotonic()
        self._logged: dict[str, float] = {}  # when each state was last logged
        self._pause_was_logged = False
        self._changes: Counter[str] = Counter()
        self._seconds: defaultdict[str, float] = defaultdict(float)

    def __call__(self, state: str, reason: str | None) -> None:
        self._report("poll", state, reason)

    def submitting(self, state: str, reason: str | None) -> None:
        self._report("submission", state, reason)

    def stats(self) -> QueueStats:
        return QueueStats(self._state, dict(self._changes), dict(self._seconds))

    def _report(self, source: str, state: str, reason: str | None) -> None:
        if state == ACTIVE:
            if not self._paused:  # the usual case
                return
            self._paused.pop(source, None)
        else:
            self._paused[source] = (state, reason)
        state, reason = next(iter(self._paused.values()), (ACTIVE, None))
        if state != self._state:
            self._change(state, reason)

    def _change(self, state: str, reason: str | None) -> None:
        now = time.monotonic()
        old, lasted = self._state, now - self._since
        self._state, self._since = state, now
        self._changes[state] += 1
        self._seconds[old] += lasted
        self._log(state, reason, now)
        tracing.count_queue_state(old, state, lasted)
        if self._telemetry is not None:
            data = {"from": old, "to": state, "seconds": lasted}
            self._telemetry.log("queue_state", data, "INFO" if state == ACTIVE else "WARNING")
        for listener in self._listeners:
            background.in_order(f"{self._what}: its queue state observer failed", listener, state, reason)

    def _log(self, state: str, reason: str | None, now: float) -> None:
        if state == ACTIVE:
            if self._pause_was_logged:
                log.info("%s is running again", self._what)
            return
        self._pause_was_logged = now - self._logged.get(state, -LOG_EVERY) >= LOG_EVERY
        if self._pause_was_logged:
            self._logged[state] = now
            log.warning("%s is paused (%s)%s", self._what, state, f": {reason}" if reason else "")

"""One run's requests, sent in the order they were made.

Promises: a request is sent when everything before it was answered or given up, never out of order; one
that is cancelled while it waits leaves no trace (its seq id is only taken when its turn comes), and one that
is being sent cannot be cancelled; whatever happens to one turn, the next one comes. Knows nothing of what is
sent.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from tinkex import tracing
from tinkex.client import loop as background
from tinkex.client.future import APIFuture, fail, resolve, traced

T = TypeVar("T")

# Sends during its turn, and returns what then waits for the result, while later turns are already sent.
Send = Callable[[], Awaitable[Awaitable[T]]]


class Turns:
    """A queue of sends; `enqueue` may be called from any thread."""

    def __init__(self) -> None:
        self._queue: deque[tuple[Send[Any], APIFuture[Any], tracing.Hop | None]] = deque()
        self._task: asyncio.Task[None] | None = None
        self._current: APIFuture[Any] | None = None

    def enqueue(self, what: str, send: Send[T]) -> APIFuture[T]:
        """Queue a send; the future resolves to its result."""
        background.check_fork()
        future: APIFuture[T] = APIFuture(what)
        self._queue.append((send, future, traced(future, what)))
        background.call_soon(self._wake)
        return future

    def _wake(self) -> None:
        if self._task is None and self._queue:
            self._task = background.spawn(self._run())

    async def _run(self) -> None:
        try:
            while self._queue:
                send, future, hop = self._queue.popleft()
                if future.cancelled():
                    continue
                self._current = future
                with tracing.current(hop):
                    try:
                        waiting = await send()
                    except (Exception, asyncio.CancelledError) as error:
                        fail(future, error)
                    else:
                        _collect(waiting, future)
                self._current = None
                del send, future  # or the last one would live until the next comes
        finally:
            self._task = None

    def commit(self) -> None:
        """Within a turn, before anything is sent that cannot be taken back: cancelling is over."""
        assert self._current is not None, "it is nobody's turn"
        if not self._current.commit():
            raise asyncio.CancelledError

    async def while_wanted(self, waiting: Coroutine[Any, Any, T]) -> T:
        """Within a turn: await what can be left half done, and leave it if the turn's future is cancelled."""
        assert self._current is not None, "it is nobody's turn"
        task = background.spawn(waiting)
        self._current.when_done(lambda f: f.cancelled() and background.call_soon(task.cancel))
        return await task


def _collect(waiting: Awaitable[T], future: APIFuture[T]) -> None:
    """Wait for a result beside the queue."""

    async def collect() -> None:
        try:
            resolve(future, await waiting)
        except (Exception, asyncio.CancelledError) as error:
            fail(future, error)

    background.spawn(collect())

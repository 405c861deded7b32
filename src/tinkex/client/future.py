"""APIFuture: the one future type of the SDK, a `concurrent.futures.Future` that any event loop can await.

Promises: a wait that times out cancels nothing and can be repeated; waiting where the result could never
arrive (on the background thread, in a forked child) raises; an unread failure is logged.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import itertools
import logging
import math
import os
import sys
import time
import weakref
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Generator
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from tinkex import tracing
from tinkex.client import loop as background
from tinkex.errors import ClientClosedError, ForkedClientError, InvalidInputError, ResultTimeoutError

log = logging.getLogger("tinkex")
T = TypeVar("T")
UNREAD_PATIENCE = 30.0  # seconds to read a failure before the warning
UNREAD_CAPACITY = 1000  # unread failures remembered at a time


def check_timeout(timeout: object) -> None:
    """Raise InvalidInputError unless `timeout` is a number of seconds or None (no limit)."""
    number = isinstance(timeout, int | float) and not isinstance(timeout, bool) and timeout == timeout
    if timeout is not None and not number:
        raise InvalidInputError(f"timeout must be a number of seconds, or None for no limit, got {timeout!r}")


class APIFuture(concurrent.futures.Future[T], Generic[T]):
    """A result that will arrive later.

    `await future`, `future.result(timeout=…)` and `await future.result_async(timeout=…)` all return it.

    >>> future = run.forward_backward(data, "cross_entropy")        # doctest: +SKIP
    >>> future.result(timeout=60).metrics
    """

    def __init__(self, what: str = "request") -> None:
        super().__init__()
        self._condition._waiters = []  # type: ignore[attr-defined]  # a deque takes 600 bytes of each future
        self._task: asyncio.Task[Any] | None = None  # cancelled with the future
        self._what = what
        self._pid = os.getpid()
        self._failure: int | None = None  # its number among the unread failures

    def set_exception(self, exception: BaseException | None) -> None:
        if exception is not None and not isinstance(exception, ClientClosedError):  # the user closed it
            self._failure = _remember(self._what, exception)
        try:
            super().set_exception(exception)
        except concurrent.futures.InvalidStateError:
            self._mark_read()
            raise

    def _mark_read(self) -> None:
        if self._failure is not None:
            _unread.pop(self._failure, None)

    def result(self, timeout: float | None = None) -> T:
        """Wait up to `timeout` seconds for the result and return it; None: no limit."""
        self._check_can_wait(timeout)
        try:
            return super().result(timeout)
        except TimeoutError:
            if self.done():  # it finished just now, or failed with a TimeoutError of its own
                return super().result(0)
            raise self._timed_out(timeout) from None
        finally:
            self._mark_read()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait up to `timeout` seconds and return the error of a failed request, or None."""
        self._check_can_wait(timeout)
        try:
            return super().exception(timeout)
        except TimeoutError:
            raise self._timed_out(timeout) from None
        finally:
            self._mark_read()

    def add_done_callback(self, fn: Callable[[concurrent.futures.Future[T]], object]) -> None:
        """Call `fn(future)` once the future is done, in a callback thread: `fn` may block."""
        self.when_done(lambda future: background.in_callback(fn, future))

    def when_done(self, fn: Callable[[concurrent.futures.Future[T]], object]) -> None:
        """Like `add_done_callback`, on the thread that resolves the future: `fn` must not block."""
        super().add_done_callback(fn)

    def cancel(self) -> bool:
        """Cancel the request; False if that is no longer possible, and the future then resolves as usual.

        A training request can be cancelled until it is posted: then the server never sees it. Once posted,
        the server executes it, and cancel returns False. A custom pass can be cancelled until its gradients
        are posted, though its forward pass may have run. A sample is cancelled on the server too. Any other
        request that is on its way may still be executed.
        """
        if not super().cancel():
            return False
        with self._condition:
            if self._state == concurrent.futures._base.CANCELLED:
                self.set_running_or_notify_cancel()  # wakes concurrent.futures.wait
        if (task := self._task) is not None:
            background.call_soon(task.cancel)
        return True

    def commit(self) -> bool:
        """Make `cancel` return False from now on; False if the future is already cancelled."""
        with self._condition:
            if self._state == concurrent.futures._base.PENDING:
                self._state = concurrent.futures._base.RUNNING
            return self._state == concurrent.futures._base.RUNNING

    async def result_async(self, timeout: float | None = None) -> T:
        """Await the result for up to `timeout` seconds; a timeout cancels nothing."""
        check_timeout(timeout)
        self._check_fork()
        if not self.done():
            # Each await has its own waiter: cancelling one task must not affect the others.
            waiter = _waiter(self)
            if timeout is None:
                await waiter
            elif not (await asyncio.wait([waiter], timeout=timeout))[0]:
                waiter.cancel()
                raise self._timed_out(timeout)
        if self.cancelled():
            raise asyncio.CancelledError
        self._mark_read()
        return super().result(0)

    def __await__(self) -> Generator[Any, None, T]:
        return self.result_async().__await__()

    def future(self) -> concurrent.futures.Future[T]:
        """Return the future itself: it is a concurrent future already."""
        return self

    if not TYPE_CHECKING:  # hidden from type checkers, which would accept any attribute

        def __getattr__(self, name: str) -> Any:
            """Explain that an attribute of the result is not an attribute of the future."""
            hint = "" if name.startswith("_") else "; it is a future: wait for its .result(), and ask that"
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{hint}")

    def __repr__(self) -> str:
        if not self.done():
            state = "pending"
        elif self.cancelled():
            state = "cancelled"
        elif (error := super().exception(0)) is not None:
            state = f"failed: {type(error).__name__}"
        else:
            state = f"done: {type(super().result(0)).__name__}"
        return f"<APIFuture of {self._what}, {state}>"

    def _check_fork(self) -> None:
        if self._pid != os.getpid() and not self.done():
            raise ForkedClientError(background.FORKED)

    def _check_can_wait(self, timeout: float | None) -> None:
        check_timeout(timeout)
        self._check_fork()
        if not self.done() and background.on_loop():
            raise RuntimeError(
                f"waiting for a {self._what} here would wait for ever: this is tinkex's own thread "
                "(a callback?); await it from your own code instead"
            )

    def _timed_out(self, timeout: float | None) -> ResultTimeoutError:
        return ResultTimeoutError(
            f"no result of the {self._what} after {timeout:g} s; it goes on, and can be waited for again"
        )


class _Wakeups:
    """Finished waiters of one event loop, delivered in batches: one wake-up of the loop serves many."""

    def __init__(self) -> None:
        self._done: deque[asyncio.Future[None]] = deque()
        self._scheduled = False

    def add(self, loop: asyncio.AbstractEventLoop, waiter: asyncio.Future[None]) -> None:
        self._done.append(waiter)
        if not self._scheduled:
            self._scheduled = True
            try:
                loop.call_soon_threadsafe(self._deliver)
            except RuntimeError:  # the loop is closed: nothing waits there
                self._done.clear()

    def _deliver(self) -> None:
        self._scheduled = False  # reset first: a waiter added from now on wakes the loop again
        while self._done:
            waiter = self._done.popleft()
            if not waiter.done():
                waiter.set_result(None)


_wakeups: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Wakeups] = weakref.WeakKeyDictionary()


def _waiter(future: APIFuture[Any]) -> asyncio.Future[None]:
    """An asyncio future of the running loop that is resolved when `future` is done."""
    loop = asyncio.get_running_loop()
    wakeups = _wakeups.get(loop)
    if wakeups is None:
        wakeups = _wakeups[loop] = _Wakeups()
    waiter = loop.create_future()
    future.when_done(lambda _: wakeups.add(loop, waiter))
    return waiter


def resolve(future: concurrent.futures.Future[T], value: T) -> None:
    """Set the result, unless the future is already cancelled."""
    try:
        future.set_result(value)
    except concurrent.futures.InvalidStateError:
        pass


def fail(future: concurrent.futures.Future[Any], error: BaseException) -> None:
    """Set the exception, unless the future is already cancelled."""
    try:
        if not isinstance(error, asyncio.CancelledError):
            future.set_exception(error)
        elif not future.cancel():  # it is committed, but the task that waited for it was cancelled
            future.set_exception(concurrent.futures.CancelledError())
    except concurrent.futures.InvalidStateError:
        pass


def start(make: Callable[[], Coroutine[Any, Any, T]], what: str = "request") -> APIFuture[T]:
    """Run a coroutine on the background loop, from any thread; cancelling the future cancels it."""
    future: APIFuture[T] = APIFuture(what)
    hop = traced(future, what)

    def begin() -> None:
        if not future.cancelled():
            future._task = background.spawn(drive(make(), future, hop))
        if future.cancelled() and future._task is not None:
            future._task.cancel()  # cancelled by another thread since the check above

    background.call_soon(begin)
    return future


def traced(future: APIFuture[Any], what: str) -> tracing.Hop | None:
    """Start a tracing span that ends with the future; None if tracing is off."""
    hop = tracing.begin(f"client {what}")
    if hop is not None:
        cancelled = asyncio.CancelledError()
        ended = concurrent.futures.Future[Any].exception  # does not mark the failure as read
        future.when_done(lambda f: hop.end(cancelled if f.cancelled() else ended(f)))
    return hop


async def drive(waiting: Awaitable[T], future: APIFuture[T], hop: tracing.Hop | None) -> None:
    """Await something, and resolve `future` with what comes of it."""
    try:
        with tracing.current(hop):
            result = await waiting
        resolve(future, result)
    except BaseException as error:
        fail(future, error)
        if not isinstance(error, Exception | asyncio.CancelledError):
            raise


async def owned(future: APIFuture[T], timeout: float | None) -> T:
    """Await a future that only this task has: cancelling the task cancels the request."""
    try:
        return await future.result_async(timeout)
    except asyncio.CancelledError:
        future.cancel()
        raise


def completed(value: T, what: str = "request") -> APIFuture[T]:
    future: APIFuture[T] = APIFuture(what)
    future.set_result(value)
    return future


# -- failures that are never read ------------------------------------------------------------------------
# A training loop that never reads its futures would not notice that all of its steps fail. So one warning
# counts all unread failures and quotes the first; it comes after a while, or at exit.

_unread: dict[int, tuple[float, str]] = {}  # when it failed, and its message
_numbers = itertools.count()
_watching = False


def _remember(what: str, error: BaseException) -> int:
    """Record a failure; returns its number."""
    global _watching
    number = next(_numbers)
    # Has Ctrl-C ended the script? Then its failures are expected. (At a prompt it only ends one line.)
    interrupted = getattr(sys, "last_type", None) is KeyboardInterrupt and not hasattr(sys, "ps1")
    if len(_unread) < UNREAD_CAPACITY and not interrupted:
        _unread[number] = time.monotonic(), f"{what} failed ({type(error).__name__}: {error})"
        if not _watching and background.on_loop():
            _watching = True
            asyncio.get_running_loop().call_later(UNREAD_PATIENCE, _watch)
    return number


@atexit.register
def warn_of_unread(before: float = math.inf) -> None:
    """Warn of the failures before this moment that were not read since."""
    due = [number for number, (since, _) in list(_unread.items()) if since <= before]
    texts = [entry[1] for number in due if (entry := _unread.pop(number, None))]
    if texts:
        more = f", and {len(texts) - 1} more did" if len(texts) > 1 else ""
        log.warning("%s%s; nobody has asked for the result, which would have raised this", texts[0], more)


def _watch() -> None:
    global _watching
    warn_of_unread(time.monotonic() - UNREAD_PATIENCE / 2)  # failures of the same moment go into one warning
    _watching = bool(_unread)
    if _watching:
        asyncio.get_running_loop().call_later(UNREAD_PATIENCE / 3, _watch)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_unread.clear)  # the parent warns of them

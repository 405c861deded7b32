"""APIFuture: the one kind of future, awaitable and blocking alike.

Promises: a `concurrent.futures.Future` in every respect, which can also be awaited from any event loop,
cached once resolved, and cancelled for real. A wait that runs out of time cancels nothing: the request
goes on and can be waited for again. Waiting in a place where the result could never arrive (on the
background thread, in a forked child) raises instead of hanging. Knows nothing of requests.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import weakref
from collections import deque
from collections.abc import Callable, Coroutine, Generator
from typing import Any, Generic, TypeVar

from tinkex.client import loop as background
from tinkex.errors import ForkedClientError, ResultTimeoutError

T = TypeVar("T")


class APIFuture(concurrent.futures.Future[T], Generic[T]):
    """A result that is on its way.

    `await future`, `future.result(timeout=…)` and `await future.result_async(timeout=…)` all give it;
    `future.cancel()` gives it up.
    """

    def __init__(self, what: str = "request") -> None:
        super().__init__()
        self._what = what
        self._pid = os.getpid()

    def result(self, timeout: float | None = None) -> T:
        """The result, waiting for it up to `timeout` seconds (None: as long as it takes)."""
        self._check_can_wait()
        try:
            return super().result(timeout)
        except TimeoutError:
            if self.done():
                raise  # the request's own timeout, not ours
            raise self._timed_out(timeout) from None

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._check_can_wait()
        try:
            return super().exception(timeout)
        except TimeoutError:
            raise self._timed_out(timeout) from None

    def add_done_callback(self, fn: Callable[[concurrent.futures.Future[T]], object]) -> None:
        """Have `fn(future)` called once it is done; in a thread of its own kind, so it may take its time."""
        self.when_done(lambda future: background.in_callback(fn, future))

    def when_done(self, fn: Callable[[concurrent.futures.Future[T]], object]) -> None:
        """The same on whatever thread resolves it: for ourselves, and quick."""
        super().add_done_callback(fn)

    def cancel(self) -> bool:
        """Give the request up; False if its result is already there."""
        if not super().cancel():
            return False
        with self._condition:
            if self._state == concurrent.futures._base.CANCELLED:
                self.set_running_or_notify_cancel()  # or concurrent.futures.wait would never hear of it
        return True

    async def result_async(self, timeout: float | None = None) -> T:
        """The result, awaited up to `timeout` seconds; running out of time cancels nothing."""
        self._check_fork()
        if not self.done():
            # A waiter of its own: cancelling one task that awaits must not take the result from the others.
            waiter = _waiter(self)
            if timeout is None:
                await waiter
            elif not (await asyncio.wait([waiter], timeout=timeout))[0]:
                waiter.cancel()
                raise self._timed_out(timeout)
        if self.cancelled():
            raise asyncio.CancelledError
        return super().result(0)

    def __await__(self) -> Generator[Any, None, T]:
        return self.result_async().__await__()

    def future(self) -> concurrent.futures.Future[T]:
        """Itself: it already is a concurrent future."""
        return self

    def _check_fork(self) -> None:
        if self._pid != os.getpid() and not self.done():
            raise ForkedClientError(background.FORKED)

    def _check_can_wait(self) -> None:
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
    """Futures that are done, on their way to another event loop: many for the price of one wake-up."""

    def __init__(self) -> None:
        self._done: deque[asyncio.Future[None]] = deque()
        self._under_way = False

    def add(self, loop: asyncio.AbstractEventLoop, waiter: asyncio.Future[None]) -> None:
        self._done.append(waiter)
        if not self._under_way:
            self._under_way = True
            try:
                loop.call_soon_threadsafe(self._deliver)
            except RuntimeError:  # that loop is closed: nobody is waiting
                self._done.clear()

    def _deliver(self) -> None:
        self._under_way = False  # before the first: one that is added from now on wakes the loop again
        while self._done:
            waiter = self._done.popleft()
            if not waiter.done():
                waiter.set_result(None)


_wakeups: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Wakeups] = weakref.WeakKeyDictionary()


def _waiter(future: APIFuture[Any]) -> asyncio.Future[None]:
    """Something to await in the running event loop until `future` is done."""
    loop = asyncio.get_running_loop()
    wakeups = _wakeups.get(loop)
    if wakeups is None:
        wakeups = _wakeups[loop] = _Wakeups()
    waiter = loop.create_future()
    future.when_done(lambda _: wakeups.add(loop, waiter))
    return waiter


def resolve(future: concurrent.futures.Future[T], value: T) -> None:
    """Set the result, unless the future was cancelled meanwhile."""
    try:
        future.set_result(value)
    except concurrent.futures.InvalidStateError:
        pass


def fail(future: concurrent.futures.Future[Any], error: BaseException) -> None:
    """Set the exception, unless the future was cancelled meanwhile."""
    try:
        if isinstance(error, asyncio.CancelledError):
            future.cancel()
        else:
            future.set_exception(error)
    except concurrent.futures.InvalidStateError:
        pass


def start(make: Callable[[], Coroutine[Any, Any, T]], what: str = "request") -> APIFuture[T]:
    """Run a coroutine on the background loop; cancelling the future cancels it. Call from any thread."""
    future: APIFuture[T] = APIFuture(what)

    def begin() -> None:
        if future.cancelled():
            return
        task = background.spawn(_drive(make(), future))
        future.when_done(lambda f: f.cancelled() and background.call_soon(task.cancel))

    background.call_soon(begin)
    return future


async def _drive(coroutine: Coroutine[Any, Any, T], future: APIFuture[T]) -> None:
    try:
        resolve(future, await coroutine)
    except asyncio.CancelledError as error:
        fail(future, error)
    except BaseException as error:
        fail(future, error)
        if not isinstance(error, Exception):
            raise


def completed(value: T, what: str = "request") -> APIFuture[T]:
    """A future that already has its result."""
    future: APIFuture[T] = APIFuture(what)
    future.set_result(value)
    return future

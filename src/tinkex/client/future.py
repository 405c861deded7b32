"""APIFuture: the one kind of future, awaitable and blocking alike.

Promises: a `concurrent.futures.Future` in every respect, which can also be awaited from any event loop,
cached once resolved, and cancelled for real or not at all. A wait that runs out of time cancels nothing: the
request goes on and can be waited for again. Waiting in a place where the result could never arrive (on the
background thread, in a forked child) raises instead of hanging. A failure that nobody looks at is said
(unread.py). Knows nothing of requests.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Coroutine, Generator
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from tinkex import tracing
from tinkex.client import loop as background
from tinkex.client import unread
from tinkex.errors import ClientClosedError, ForkedClientError, InvalidInputError, ResultTimeoutError

T = TypeVar("T")


def check_timeout(timeout: object) -> None:
    """Refuse what is no time to wait. None: as long as it takes; 0 and less: not at all."""
    number = isinstance(timeout, int | float) and not isinstance(timeout, bool) and timeout == timeout
    if timeout is not None and not number:
        raise InvalidInputError(f"timeout must be a number of seconds, or None for no limit, got {timeout!r}")


class _Condition:
    """What a future needs of a threading.Condition, in a tenth of its memory: thousands are in flight."""

    __slots__ = ("_lock", "_sleepers")

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._sleepers: tuple[threading.Lock, ...] = ()

    def acquire(self) -> None:
        self._lock.acquire()

    def release(self) -> None:
        self._lock.release()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def wait(self, timeout: float | None = None) -> None:
        """Let go of the lock until `notify_all`, or until time is up. It must be held once."""
        sleeper = threading.Lock()
        sleeper.acquire()
        self._sleepers = (*self._sleepers, sleeper)
        self._lock.release()
        try:
            sleeper.acquire(timeout=-1 if timeout is None else max(0, min(timeout, threading.TIMEOUT_MAX)))
        finally:
            self._lock.acquire()
            self._sleepers = tuple(other for other in self._sleepers if other is not sleeper)

    def notify_all(self) -> None:
        sleepers, self._sleepers = self._sleepers, ()
        for sleeper in sleepers:
            sleeper.release()


class APIFuture(concurrent.futures.Future[T], Generic[T]):
    """A result that is on its way.

    `await future`, `future.result(timeout=…)` and `await future.result_async(timeout=…)` all give it;
    `future.cancel()` gives it up.
    """

    def __init__(self, what: str = "request") -> None:
        super().__init__()
        self._condition = _Condition()  # type: ignore[assignment]
        self._task: asyncio.Task[Any] | None = None  # what is cancelled with it
        self._what = what
        self._pid = os.getpid()
        self._failure: int | None = None  # its number among those that nobody has looked at

    def set_exception(self, exception: BaseException | None) -> None:
        if exception is not None and not isinstance(exception, ClientClosedError):  # who closes it knows
            self._failure = unread.failed(self._what, exception)
        try:
            super().set_exception(exception)
        except concurrent.futures.InvalidStateError:
            self._look()
            raise

    def _look(self) -> None:
        if self._failure is not None:
            unread.seen(self._failure)

    def result(self, timeout: float | None = None) -> T:
        """The result, waiting for it up to `timeout` seconds (None: as long as it takes)."""
        self._check_can_wait(timeout)
        try:
            return super().result(timeout)
        except TimeoutError:
            if self.done():  # just now, or the request failed by a timeout of its own
                return super().result(0)
            raise self._timed_out(timeout) from None
        finally:
            self._look()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._check_can_wait(timeout)
        try:
            return super().exception(timeout)
        except TimeoutError:
            raise self._timed_out(timeout) from None
        finally:
            self._look()

    def add_done_callback(self, fn: Callable[[concurrent.futures.Future[T]], object]) -> None:
        """Have `fn(future)` called once it is done; in a thread of its own kind, so it may take its time."""
        self.when_done(lambda future: background.in_callback(fn, future))

    def when_done(self, fn: Callable[[concurrent.futures.Future[T]], object]) -> None:
        """The same on whatever thread resolves it: for ourselves, and quick."""
        super().add_done_callback(fn)

    def cancel(self) -> bool:
        """Give the request up; False if its result is there, or if it will be executed all the same."""
        if not super().cancel():
            return False
        with self._condition:
            if self._state == concurrent.futures._base.CANCELLED:
                self.set_running_or_notify_cancel()  # or concurrent.futures.wait would never hear of it
        if (task := self._task) is not None:
            background.call_soon(task.cancel)
        return True

    def commit(self) -> bool:
        """From now on it cannot be taken back; False if it was cancelled before that."""
        with self._condition:
            if self._state == concurrent.futures._base.PENDING:
                self._state = concurrent.futures._base.RUNNING
            return self._state == concurrent.futures._base.RUNNING

    async def result_async(self, timeout: float | None = None) -> T:
        """The result, awaited up to `timeout` seconds; running out of time cancels nothing."""
        check_timeout(timeout)
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
        self._look()
        return super().result(0)

    def __await__(self) -> Generator[Any, None, T]:
        return self.result_async().__await__()

    def future(self) -> concurrent.futures.Future[T]:
        """Itself: it already is a concurrent future."""
        return self

    if not TYPE_CHECKING:  # a type checker shall go on to know what a future has

        def __getattr__(self, name: str) -> Any:
            """Say to whoever asks it for what its result has that this is not the result yet."""
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
        if not isinstance(error, asyncio.CancelledError):
            future.set_exception(error)
        elif not future.cancel():  # it was sent, and what waits for it was stopped from below
            future.set_exception(concurrent.futures.CancelledError())
    except concurrent.futures.InvalidStateError:
        pass


def start(make: Callable[[], Coroutine[Any, Any, T]], what: str = "request") -> APIFuture[T]:
    """Run a coroutine on the background loop; cancelling the future cancels it. Call from any thread."""
    future: APIFuture[T] = APIFuture(what)
    hop = traced(future, what)

    def begin() -> None:
        if not future.cancelled():
            future._task = background.spawn(_drive(make(), future, hop))
        if future.cancelled() and future._task is not None:
            future._task.cancel()  # meanwhile, by another thread

    background.call_soon(begin)
    return future


def traced(future: APIFuture[Any], what: str) -> tracing.Hop | None:
    """Hop 1, for whoever traces: from the caller's own span on, until the future is done."""
    hop = tracing.begin(f"client {what}")
    if hop is not None:
        cancelled = asyncio.CancelledError()
        ended = concurrent.futures.Future[Any].exception  # not the future's own, which counts as a look at it
        future.when_done(lambda f: hop.end(cancelled if f.cancelled() else ended(f)))
    return hop


async def _drive(coroutine: Coroutine[Any, Any, T], future: APIFuture[T], hop: tracing.Hop | None) -> None:
    try:
        with tracing.current(hop):
            result = await coroutine
        resolve(future, result)
    except asyncio.CancelledError as error:
        fail(future, error)
    except BaseException as error:
        fail(future, error)
        if not isinstance(error, Exception):
            raise


class Within:
    """A limit in seconds for one wait, checked before the request is made.

    In `Within(timeout).result(self.call())` Python evaluates `Within(timeout)` first, so a bad timeout is
    refused before `call` sends anything.
    """

    def __init__(self, timeout: float | None) -> None:
        check_timeout(timeout)
        self._timeout = timeout

    def result(self, future: APIFuture[T]) -> T:
        return future.result(self._timeout)

    async def result_async(self, future: APIFuture[T]) -> T:
        return await future.result_async(self._timeout)


async def owned(future: APIFuture[T], timeout: float | None) -> T:
    """Await a future that nobody else has: if the task that awaits it is cancelled, so is the request."""
    try:
        return await future.result_async(timeout)
    except asyncio.CancelledError:
        future.cancel()
        raise


def completed(value: T, what: str = "request") -> APIFuture[T]:
    """A future that already has its result."""
    future: APIFuture[T] = APIFuture(what)
    future.set_result(value)
    return future

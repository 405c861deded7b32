"""The one background thread whose event loop all clients of the process share, and its worker threads.

Promises: started on first use; user code and large bodies run in other threads and never block it; a forked
child gets an error instead of waiting for a thread that only its parent has.
"""

from __future__ import annotations

import asyncio
import atexit
import functools
import logging
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

from tinkex.errors import ForkedClientError, TinkerError

log = logging.getLogger("tinkex")
T = TypeVar("T")
P = ParamSpec("P")

FORKED = (
    "this process was forked from one that had already used tinkex, whose connections cannot be shared: "
    "start workers with multiprocessing's 'spawn' or 'forkserver' method, or make the first client "
    "after the fork"
)


class Threads(ThreadPoolExecutor):
    """An executor that still works after the main thread has ended, when other threads may train for hours.

    The standard one refuses work from then on, and at exit, when sessions are finished.
    """

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        try:
            return super().submit(fn, *args, **kwargs)
        except RuntimeError:
            return _in_own_thread(functools.partial(fn, *args, **kwargs))


def _in_own_thread(function: Callable[[], T]) -> Future[T]:
    done: Future[T] = Future()

    def work() -> None:
        if done.set_running_or_notify_cancel():
            try:
                done.set_result(function())
            except Exception as error:
                done.set_exception(error)
            except BaseException as error:  # SystemExit, say, would end the loop itself
                done.set_exception(TinkerError(f"{type(error).__name__} in a function of yours: {error}"))

    try:
        threading.Thread(target=work, name="tinkex-user", daemon=True).start()
    except RuntimeError:  # since Python 3.12 no thread starts at exit
        work()
    return done


_lock = threading.Lock()
_loop: asyncio.AbstractEventLoop | None = None
_thread: threading.Thread | None = None
_owner_pid: int | None = None
_stopped = False  # the interpreter is exiting
_tasks: set[asyncio.Task[Any]] = set()  # asyncio itself only keeps weak references

# Executors start their threads when they get work. Encoding and decoding has one of its own: user code that
# waits for a sample must not occupy the threads that decode it.
_workers = Threads(4, thread_name_prefix="tinkex-worker")
_callbacks = Threads(4, thread_name_prefix="tinkex-callback")
_observers = Threads(1, thread_name_prefix="tinkex-observer")  # one thread, which keeps their order


def check_fork() -> None:
    """Raise if the loop belongs to a parent process: waiting for it would never end."""
    if _owner_pid is not None and _owner_pid != os.getpid():
        raise ForkedClientError(FORKED)


def is_running_here() -> bool:
    """Does this process have the loop? False before its first use, and in a forked child."""
    return _owner_pid == os.getpid()


def get_loop() -> asyncio.AbstractEventLoop:
    """The background loop, started on first use."""
    global _loop, _thread, _owner_pid
    check_fork()
    if _stopped:
        raise TinkerError("the interpreter is exiting, so that nothing can be asked any more")
    if _loop is not None:
        return _loop
    with _lock:
        if _loop is None:
            try:
                from uvloop import new_event_loop  # half the CPU per request; not available on Windows
            except ImportError:
                from asyncio import new_event_loop
            loop = new_event_loop()
            loop.set_default_executor(Threads(thread_name_prefix="tinkex-service"))  # for embedded mode
            _thread = threading.Thread(target=loop.run_forever, name="tinkex", daemon=True)
            _thread.start()
            _owner_pid = os.getpid()
            _loop = loop
    return _loop


@atexit.register  # registered at import, so it runs after the sessions' own handler, which needs the loop
def _stop() -> None:
    """End the loop's thread: a uvloop that wakes up after the interpreter has gone crashes the process."""
    global _stopped
    if _loop is None or _thread is None or not is_running_here():
        return
    _stopped = True
    _loop.call_soon_threadsafe(_loop.stop)
    _thread.join(1.0)


if hasattr(os, "register_at_fork"):  # the parent may have held it; `_owner_pid` stays, for `check_fork`
    os.register_at_fork(after_in_child=_lock._at_fork_reinit)  # type: ignore[attr-defined]


def on_loop() -> bool:
    """True on the background loop's own thread, where blocking would deadlock."""
    try:
        return asyncio.get_running_loop() is _loop
    except RuntimeError:
        return False


def call_soon(callback: Callable[..., object], *args: Any) -> None:
    get_loop().call_soon_threadsafe(callback, *args)


def spawn(coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    """Start a task on the loop and keep a reference until it ends. Call on the loop's own thread."""
    task = asyncio.get_running_loop().create_task(coroutine)
    _tasks.add(task)
    task.add_done_callback(_tasks.discard)
    return task


async def off_loop(function: Callable[..., T], *args: Any) -> T:
    """Run `function` in a worker thread: for encoding and decoding, which end soon."""
    return await asyncio.get_running_loop().run_in_executor(_workers, function, *args)


def in_callback(function: Callable[..., object], *args: Any) -> None:
    """Call a user's callback, in another thread if this is the loop's."""
    if on_loop():
        _callbacks.submit(_call, "a callback of yours failed", function, *args)
    else:
        function(*args)


def in_order(failure: str, function: Callable[..., object], *args: Any) -> None:
    """Call a user's observer in another thread, after all earlier calls; log `failure` if it raises."""
    _observers.submit(_call, failure, function, *args)


def _call(failure: str, function: Callable[..., object], *args: Any) -> None:
    try:
        function(*args)
    except Exception:
        log.exception("%s", failure)


async def in_own_thread(function: Callable[..., T], *args: Any) -> T:
    """Run a user's `function` in a thread of its own.

    It may wait for samples, which need a worker to be decoded; and it may never end, which must not keep the
    process from exiting.
    """
    return await asyncio.shield(asyncio.wrap_future(_in_own_thread(functools.partial(function, *args))))

"""Threads for what may take minutes: an engine's commands, a model's loading. Knows nothing of either.

Promises: no thread keeps the process from ending, and an idle one is used again, since starting one costs a
millisecond of the event loop's time.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")
Task = tuple[Callable[[], Any], "Future[Any]"]
Tasks = SimpleQueue[Task]

_idle: list[Tasks] = []


async def in_thread(function: Callable[[], T]) -> T:
    """Run `function` in a thread, without a limit on how many run at once."""
    done: Future[T] = Future()
    _give((function, done))
    return await asyncio.wrap_future(done)


class Lane:
    """Functions that run in a thread one after the other, in the order given.

    The next one does not wait for the event loop to hear of the one before.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tasks: deque[Task] = deque()
        self._busy = False

    async def run(self, function: Callable[[], T]) -> T:
        done: Future[T] = Future()
        with self._lock:
            self._tasks.append((function, done))
            was_busy, self._busy = self._busy, True
        if not was_busy:
            _give((self._drain, Future()))
        return await asyncio.wrap_future(done)

    def _drain(self) -> None:
        while (task := self._next()) is not None:
            _tell(task[1], *_outcome(task[0]))
            del task

    def _next(self) -> Task | None:
        with self._lock:
            self._busy = bool(self._tasks)
            return self._tasks.popleft() if self._tasks else None


def _give(task: Task) -> None:
    try:
        tasks = _idle.pop()
    except IndexError:
        tasks = Tasks()
        threading.Thread(target=_work, args=(tasks,), name="tinkex-service", daemon=True).start()
    tasks.put(task)


def _work(tasks: Tasks) -> None:
    while True:
        function, done = tasks.get()
        outcome = _outcome(function)
        _idle.append(tasks)
        _tell(done, *outcome)
        del function, done, outcome  # nothing is held until the next task comes


def _outcome(function: Callable[[], Any]) -> tuple[Any, bool]:
    """What it returns or raises, and whether it raised that."""
    try:
        return function(), False
    except BaseException as error:
        return error, True


def _tell(done: Future[Any], outcome: Any, failed: bool) -> None:
    if done.set_running_or_notify_cancel():  # else whoever waited has gone
        (done.set_exception if failed else done.set_result)(outcome)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_idle.clear)  # a child has none of its parent's threads

"""Threads for what may take minutes: an engine's commands, a model's loading. Knows nothing of either.

Promises: no thread keeps the process from ending, and an idle one is used again, since starting one costs a
millisecond of the event loop's time.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")
Tasks = SimpleQueue[tuple[Callable[[], Any], "Future[Any]"]]

_idle: list[Tasks] = []


async def in_thread(function: Callable[[], T]) -> T:
    """Run `function` in a thread, without a limit on how many run at once."""
    done: Future[T] = Future()
    try:
        tasks = _idle.pop()
    except IndexError:
        tasks = Tasks()
        threading.Thread(target=_work, args=(tasks,), name="tinkex-service", daemon=True).start()
    tasks.put((function, done))
    return await asyncio.wrap_future(done)


def _work(tasks: Tasks) -> None:
    while True:
        function, done = tasks.get()
        try:
            outcome, failed = function(), False
        except BaseException as error:
            outcome, failed = error, True
        _idle.append(tasks)
        if done.set_running_or_notify_cancel():  # else whoever waited has gone
            (done.set_exception if failed else done.set_result)(outcome)
        del function, done, outcome  # nothing is held until the next task comes


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_idle.clear)  # a child has none of its parent's threads

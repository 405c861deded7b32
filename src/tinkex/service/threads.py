"""A thread for what may take minutes: an engine's command, a model's loading. Knows nothing of either."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


async def in_thread(function: Callable[[], T]) -> T:
    """Run `function` in a thread of its own, which does not keep the process from ending."""
    done: Future[T] = Future()

    def work() -> None:
        try:
            result = function()
        except BaseException as error:
            _settle(done, error=error)
        else:
            _settle(done, result)

    threading.Thread(target=work, name="tinkex-command", daemon=True).start()
    return await asyncio.wrap_future(done)


def _settle(done: Future[T], result: T | None = None, error: BaseException | None = None) -> None:
    if not done.set_running_or_notify_cancel():
        return  # whoever waited has gone
    if error is not None:
        done.set_exception(error)
    else:
        done.set_result(result)  # type: ignore[arg-type]

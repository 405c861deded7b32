"""Samples under way, given up together when none of them has finished for too long.

Promises: what is given up raises an APIConnectionError that says how long nothing happened; the watch ends
with the sampler that it is for. Lives on the background loop; knows nothing of samples but that they finish.
"""

from __future__ import annotations

import asyncio
import time
import weakref
from types import TracebackType
from typing import Any

from tinkex.client import loop as background
from tinkex.errors import APIConnectionError


class Progress:
    """What one sampler has under way: each of its tasks says `with progress:`."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._under_way: set[asyncio.Task[Any]] = set()
        self._stuck: APIConnectionError | None = None  # why those taken out of `_under_way` were given up
        self._last = time.monotonic()

    def made(self) -> None:
        """Something finished, or at least goes on."""
        self._last = time.monotonic()

    def __enter__(self) -> None:
        self._under_way.add(_current_task())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        task = _current_task()
        if kind is None:
            self.made()
        elif kind is asyncio.CancelledError and self._stuck is not None and task not in self._under_way:
            raise self._stuck from None
        self._under_way.discard(task)

    def watch(self, timeout: float) -> None:
        """From now on, give up what is under way when nothing has happened for `timeout` seconds."""
        self.made()
        background.spawn(_watch(weakref.ref(self), timeout))

    def give_up_if_stuck(self, timeout: float) -> None:
        quiet = time.monotonic() - self._last
        if not self._under_way:
            self.made()
        elif quiet > timeout:
            stuck, self._under_way = self._under_way, set()
            self._stuck = APIConnectionError(
                message=f"no sample of {self._what} finished for {quiet:.0f} s "
                f"(RetryConfig.progress_timeout); {len(stuck)} were waiting"
            )
            for task in stuck:
                task.cancel()


def _current_task() -> asyncio.Task[Any]:
    task = asyncio.current_task()
    assert task is not None
    return task


async def _watch(ref: weakref.ref[Progress], timeout: float) -> None:
    while True:
        await asyncio.sleep(min(60.0, timeout / 4))
        progress = ref()
        if progress is None:
            return
        progress.give_up_if_stuck(timeout)
        del progress

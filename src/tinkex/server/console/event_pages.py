"""Streams of server-sent events to pages: at most so many of one user, and an end when the server stops.

What several pages show is made once for all of them.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Coroutine, Hashable
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.responses import Response, StreamingResponse

from tinkex.server.console.visitors import Visitor
from tinkex.server.stream_sample import SSE_HEADERS, with_pings
from tinkex.service.refusal import Refusal

MOST_STREAMS = 64  # of one user
MOST_SHARED = 1000  # parts that are remembered, before those that are old are dropped
T = TypeVar("T")


class SharedParts:
    """Makes a part of a page once for all who ask for it within some time."""

    def __init__(self) -> None:
        self._made: dict[Hashable, tuple[float, asyncio.Task[Any]]] = {}

    async def get(self, key: Hashable, seconds: float, make: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """The part with this key, if it is younger than this; else a new one. A failure is everybody's."""
        now, found = time.monotonic(), self._made.get(key)
        if found is None or found[0] <= now:
            if len(self._made) >= MOST_SHARED:
                self._made = {k: one for k, one in self._made.items() if one[0] > now}
            found = self._made[key] = now + seconds, asyncio.create_task(make())
        return await asyncio.shield(found[1])


async def next_tick(seconds: float) -> None:
    """Wait until a moment that all pages have in common, so that they can share what they show."""
    await asyncio.sleep(seconds - time.monotonic() % seconds)


class LiveStreams:
    """The open streams of all pages."""

    def __init__(self, stopping: Callable[[], bool] = lambda: False) -> None:
        self._open: Counter[str] = Counter()
        self._stopping = stopping
        self.parts = SharedParts()

    def response(self, events: AsyncGenerator[bytes], visitor: Visitor) -> Response:
        if self._open[visitor.name] >= MOST_STREAMS:
            raise Refusal(429, f"{MOST_STREAMS} live pages are open: close some")
        return StreamingResponse(with_pings(self._until_stopped(events, visitor)), headers=SSE_HEADERS)

    async def _until_stopped(self, events: AsyncGenerator[bytes], visitor: Visitor) -> AsyncGenerator[bytes]:
        self._open[visitor.name] += 1
        try:
            async with aclosing(events):
                async for event in events:
                    if event:  # else nothing is to be sent, and this is but a chance to stop
                        yield event
                    if self._stopping():
                        return
        except Refusal:  # what it showed was deleted
            return
        finally:
            self._open[visitor.name] -= 1

"""Streams of server-sent events to pages: at most so many of one user, and an end when the server stops.

A stream also ends soon after its user has logged out, or the key was revoked. What several pages show is
made once for all of them.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Hashable
from contextlib import aclosing, asynccontextmanager
from typing import Any, Protocol, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from tinkex.server.console.visitors import Visitor, Visitors
from tinkex.server.stream_sample import EventStream
from tinkex.service.refusal import Refusal

MOST_STREAMS = 64  # of one user
RECHECKED = 10.0  # seconds between two looks at whether its user is still logged in
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
            found[1].add_done_callback(lambda made: made.cancelled() or made.exception())  # nobody may wait
        return await asyncio.shield(found[1])


async def next_tick(seconds: float) -> None:
    """Wait until a moment that all pages have in common, so that they can share what they show."""
    await asyncio.sleep(seconds - time.monotonic() % seconds)


class Closable(Protocol):
    """What a stream uses."""

    def aclose(self) -> Awaitable[object]: ...


class LiveStreams:
    """The open streams of all pages."""

    def __init__(self, visitors: Visitors, stopping: Callable[[], bool] = lambda: False) -> None:
        self._open: Counter[str] = Counter()
        self._visitors, self._stopping = visitors, stopping
        self.parts = SharedParts()

    def check_room(self, visitor: Visitor) -> None:
        """Refusal if this user has too many streams."""
        if self._open[visitor.name] >= MOST_STREAMS:
            raise Refusal(429, f"{MOST_STREAMS} live pages are open: close some")

    def response(
        self, events: AsyncGenerator[bytes], request: Request, visitor: Visitor, used: Closable | None = None
    ) -> Response:
        """Send events. What is `used` for them is closed at the end, also if none is ever sent."""
        self.check_room(visitor)
        self._open[visitor.name] += 1  # from here on: it is counted before it begins
        return EventStream(self._followed(events, request, visitor), self._ending(visitor, used or events))

    @asynccontextmanager
    async def _ending(self, visitor: Visitor, used: Closable) -> AsyncGenerator[None]:
        try:
            async with aclosing(used):
                yield
        finally:
            self._open[visitor.name] -= 1

    async def _followed(
        self, events: AsyncGenerator[bytes], request: Request, visitor: Visitor
    ) -> AsyncGenerator[bytes]:
        checked = time.monotonic()
        try:
            async with aclosing(events):
                async for event in events:
                    if event:  # else nothing is to be sent, and this is but a chance to stop
                        yield event
                    if self._stopping():
                        return
                    if (now := time.monotonic()) - checked >= RECHECKED:
                        checked = now
                        if self._visitors.find(request) != visitor:
                            return
        except Refusal:  # what it showed was deleted, or is the visitor's no more
            return

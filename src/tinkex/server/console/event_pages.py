"""Streams of server-sent events to pages: at most so many of one user, and an end when the server stops."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from starlette.responses import Response, StreamingResponse

from tinkex.server.console.visitors import Visitor
from tinkex.server.stream_sample import SSE_HEADERS, with_pings
from tinkex.service.refusal import Refusal

MOST_STREAMS = 64  # of one user


class LiveStreams:
    """The open streams of all pages."""

    def __init__(self, stopping: Callable[[], bool] = lambda: False) -> None:
        self._open: Counter[str] = Counter()
        self._stopping = stopping

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

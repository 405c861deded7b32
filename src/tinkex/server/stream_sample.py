"""POST /api/v1/stream_sample: a sample's tokens as server-sent events, while they are drawn.

An invalid request is an HTTP error, not an event. The response begins as soon as the request is accepted,
and a comment fills every long silence. A client that disconnects cancels the sample. wire/event_codec.py has
the form of the events.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import orjson
from anyio import CancelScope
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from tinkex.server.bodies import read_body
from tinkex.server.gateway import Endpoint, Gateway, IncomingRequest
from tinkex.service.sample_stream import SampleEvents
from tinkex.wire import ops
from tinkex.wire.event_codec import write_event

PING_SECONDS = 15.0  # of silence, after which a comment keeps proxies from closing the connection
SSE_HEADERS = {"content-type": "text/event-stream", "cache-control": "no-store", "x-accel-buffering": "no"}


def server_sent(name: str, value: Any) -> bytes:
    """One server-sent event."""
    lead = f"event: {name}\n" if name else ""
    return f"{lead}data: ".encode() + orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY) + b"\n\n"


async def with_pings(chunks: AsyncIterator[bytes], every: float = PING_SECONDS) -> AsyncIterator[bytes]:
    """The chunks, with a comment after every `every` seconds of silence."""
    async with aclosing(chunks):  # type: ignore[type-var]
        upcoming = asyncio.ensure_future(anext(chunks))
        try:
            while True:
                done, _ = await asyncio.wait([upcoming], timeout=every)
                if not done:
                    yield b": still here\n\n"
                    continue
                try:
                    chunk = upcoming.result()
                except StopAsyncIteration:
                    return
                yield chunk
                upcoming = asyncio.ensure_future(anext(chunks))
        finally:
            if not upcoming.done():
                upcoming.cancel()
                with CancelScope(shield=True):  # Starlette cancels this task when the client disconnects
                    await asyncio.wait([upcoming])


def stream_sample_endpoint(gateway: Gateway) -> Endpoint:
    """The endpoint; its body is that of asample."""

    async def handle(http: IncomingRequest) -> Response:
        caller = gateway.admit(http)
        body = await read_body(http.receive, http.headers, gateway.bodies.limit)
        request = await gateway.bodies.decode(ops.SAMPLE, {}, {}, http.headers, body)
        return SampleStreamResponse(gateway.service.stream(request, caller))

    return Endpoint(gateway, "stream_sample", handle)


class SampleStreamResponse(StreamingResponse):
    """Sends events as they come, and cancels the sample when sending ends, even before the first byte."""

    def __init__(self, events: SampleEvents) -> None:
        super().__init__(with_pings(_encoded(events)), headers=SSE_HEADERS)
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._events.aclose()


async def _encoded(events: SampleEvents) -> AsyncIterator[bytes]:
    async for event in events:
        yield server_sent(*write_event(event))

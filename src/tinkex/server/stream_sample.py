"""POST /api/v1/stream_sample: a sample's tokens while they are drawn, as events of wire/event_codec.py.

An invalid request is an HTTP error, not an event. The response begins as soon as the request is accepted,
and a comment fills every long silence. A client that disconnects cancels the sample.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, aclosing
from typing import Any

import orjson
from anyio import CancelScope
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from tinkex.server.bodies import IncomingRequest
from tinkex.server.gateway import Endpoint, Gateway
from tinkex.service.peers import Elsewhere
from tinkex.service.sample_events import SampleEvents
from tinkex.wire import ops
from tinkex.wire.event_codec import write_event

PING_SECONDS = 15.0  # of silence, after which a comment keeps proxies from closing the connection
SSE_HEADERS = {"content-type": "text/event-stream", "cache-control": "no-store", "x-accel-buffering": "no"}


def server_sent(name: str, value: Any) -> bytes:
    """One server-sent event."""
    lead = f"event: {name}\n" if name else ""
    return f"{lead}data: ".encode() + orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY) + b"\n\n"


class EventStream(StreamingResponse):
    """Sends events as they come; leaves `samples` when sending ends, even before the first byte."""

    def __init__(self, events: AsyncGenerator[bytes], samples: AbstractAsyncContextManager[Any]) -> None:
        super().__init__(with_pings(events), headers=SSE_HEADERS)
        self._samples = samples

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._samples:
            await super().__call__(scope, receive, send)


async def with_pings(chunks: AsyncGenerator[bytes]) -> AsyncIterator[bytes]:
    """The chunks, and a comment after every long silence."""
    async with aclosing(chunks):
        upcoming = asyncio.ensure_future(anext(chunks))
        try:
            while True:
                done, _ = await asyncio.wait([upcoming], timeout=PING_SECONDS)
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
    """The endpoint; its body is the same as asample's."""

    async def handle(http: IncomingRequest) -> Response:
        caller = gateway.admit(http)
        bodies = gateway.bodies
        limit = bodies.limit_of(ops.SAMPLE, http)
        body = await bodies.read(http, limit)
        request = await bodies.decode(ops.SAMPLE, http, body, limit)
        try:
            await gateway.service.check_here(request)
        except Elsewhere as there:
            return await gateway.forward(http, body, there)
        events = gateway.service.stream(request, caller)
        return EventStream(_encoded(events, gateway.without_paths), aclosing(events))

    return Endpoint(gateway, "stream_sample", handle)


async def _encoded(events: SampleEvents, without_paths: Callable[[Any], Any]) -> AsyncGenerator[bytes]:
    async for event in events:
        name, fields = write_event(event)
        yield server_sent(name, without_paths(fields) if name in ("queue", "error") else fields)

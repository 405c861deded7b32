"""Samples as they are drawn: a service's events as server-sent events (their forms: wire/event_codec.py).

Promises: what is wrong with the request itself is a refusal, not an event; the answer begins as soon as the
request is accepted, and is never silent for long; a client that leaves stops the work.
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

from tinkex.server.app import Backend, Door, Endpoint, Handler, Http
from tinkex.server.bodies import read_body
from tinkex.service.refusal import Caller
from tinkex.service.streams import SampleEvents
from tinkex.types.futures import Pending
from tinkex.types.sampling import SampleEvent, SampleRequest
from tinkex.wire import ops
from tinkex.wire.event_codec import write_event

STREAM_SAMPLE = ops.STREAM_SAMPLE.path
PING_SECONDS = 15.0  # of silence, after which a comment keeps proxies from hanging up
HEADERS = {"content-type": "text/event-stream", "cache-control": "no-store", "x-accel-buffering": "no"}


async def sample_events(
    service: Backend, request: SampleRequest, caller: Caller
) -> AsyncIterator[SampleEvent]:
    """Sample, and tell of its tokens and its end. Leaving early stops the work."""
    async with aclosing(await SampleEvents.open(service, request, caller)) as events:
        async for event in events:
            if not isinstance(event, Pending):
                yield event


async def begun(events: AsyncIterator[SampleEvent]) -> tuple[SampleEvent, AsyncIterator[SampleEvent]]:
    """The first event, and the stream with it put back: so that a refusal can still be an HTTP status."""
    first = await anext(events)

    async def again() -> AsyncIterator[SampleEvent]:
        async with aclosing(events):  # type: ignore[type-var]
            yield first
            async for event in events:
                yield event

    return first, again()


# -- server-sent events ----------------------------------------------------------------------------------


def server_sent(name: str, value: Any) -> bytes:
    lead = f"event: {name}\n" if name else ""
    return f"{lead}data: ".encode() + orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY) + b"\n\n"


async def kept_alive(chunks: AsyncIterator[bytes], every: float = PING_SECONDS) -> AsyncIterator[bytes]:
    """The chunks, with a comment wherever there was silence for too long."""
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
                with CancelScope(shield=True):  # else Starlette, whose client has left, cancels this wait too
                    await asyncio.wait([upcoming])


def stream_endpoint(door: Door) -> Endpoint:
    """POST /api/v1/stream_sample, whose body is that of asample."""
    return Endpoint(door, "stream_sample", _handler(door))


def _handler(door: Door) -> Handler:
    async def answer(http: Http) -> Response:
        caller = door.admit(http)
        body = await read_body(http.receive, http.headers, door.bodies.limit)
        request = await door.bodies.decode(ops.SAMPLE, {}, {}, http.headers, body)
        return _Streamed(await SampleEvents.open(door.service, request, caller))

    return answer


class _Streamed(StreamingResponse):
    """The events, sent as they come; however the sending ends, and if it never begins, the work stops."""

    def __init__(self, events: SampleEvents) -> None:
        super().__init__(kept_alive(_written(events)), headers=HEADERS)
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._events.aclose()


async def _written(events: SampleEvents) -> AsyncIterator[bytes]:
    async for event in events:
        yield server_sent(*write_event(event))

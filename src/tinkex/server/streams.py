"""Samples as they are drawn: a service's tokens as a stream of events, and as server-sent events.

    event: tokens   {"sequence": 0, "tokens": [..], "logprobs": [..]}      as they come
    event: done     the whole response, as retrieve_future gives it in JSON, with `sample_sequence_ids`
    event: error    {"error": "…", "category": "user"}                     instead of done

Promises: what is wrong with the request itself is a refusal, not an event; a client that leaves stops the
work. Knows the wire's JSON; knows nothing of OpenAI's.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson
from starlette.responses import Response, StreamingResponse

from tinkex.server.app import Backend, Door, Endpoint, Handler, Http
from tinkex.server.bodies import read_body
from tinkex.service.refusal import Caller
from tinkex.types.futures import CancelFutureRequest, FutureRetrieveRequest, Pending, RequestFailedResponse
from tinkex.types.outputs import SampleResponse
from tinkex.types.sampling import SampleRequest
from tinkex.wire import codec, ops

STREAM_SAMPLE = "/api/v1/stream_sample"
PING_SECONDS = 15.0  # of silence, after which a comment keeps proxies from hanging up
HEADERS = {"content-type": "text/event-stream", "cache-control": "no-store", "x-accel-buffering": "no"}


@dataclass(frozen=True)
class NewTokens:
    """Some more tokens of one sequence."""

    sequence: int
    tokens: np.ndarray
    logprobs: np.ndarray


Event = NewTokens | SampleResponse | RequestFailedResponse  # the last one is never NewTokens


async def sample_events(
    service: Backend, request: SampleRequest, caller: Caller, ids: list[str] | None = None
) -> AsyncIterator[Event]:
    """Sample, and tell of it; `ids` is filled with the ids of the sequences. Leaving early stops the work."""
    events: asyncio.Queue[Event] = asyncio.Queue()
    loop = asyncio.get_running_loop()

    def on_tokens(sequence: int, tokens: np.ndarray, logprobs: np.ndarray) -> None:  # on the engine's thread
        loop.call_soon_threadsafe(events.put_nowait, NewTokens(sequence, tokens.copy(), logprobs.copy()))

    promise = await service.samplers.sample(request, caller, on_tokens)
    if ids is not None:
        ids.extend(promise.sample_sequence_ids or [])
    ending = loop.create_task(_outcome(service, promise.request_id, caller, events))
    try:
        while True:
            event = await events.get()
            yield event
            if not isinstance(event, NewTokens):
                return
    finally:
        ending.cancel()
        await service.call(ops.CANCEL_FUTURE, CancelFutureRequest(request_id=promise.request_id), caller)
        service.core.futures.drop([promise.request_id])


async def _outcome(service: Backend, request_id: str, caller: Caller, events: asyncio.Queue[Event]) -> None:
    request, outcome = FutureRetrieveRequest(request_id), Pending()
    try:
        while isinstance(outcome, Pending):
            outcome = await service.call(ops.RETRIEVE_FUTURE, request, caller)
    except Exception as error:
        outcome = RequestFailedResponse(error=str(error) or type(error).__name__)
    events.put_nowait(outcome)


async def begun(events: AsyncIterator[Event]) -> tuple[Event, AsyncIterator[Event]]:
    """The first event, and the stream with it put back: so that a refusal can still be an HTTP status."""
    first = await anext(events)

    async def again() -> AsyncIterator[Event]:
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
                await asyncio.wait([upcoming])


def stream_endpoint(door: Door) -> Endpoint:
    """POST /api/v1/stream_sample, whose body is that of asample."""
    return Endpoint(door, "stream_sample", _handler(door))


def _handler(door: Door) -> Handler:
    async def answer(http: Http) -> Response:
        caller = door.admit(http)
        body = await read_body(http.receive, http.headers, door.bodies.limit)
        request = await door.bodies.decode(ops.SAMPLE, {}, {}, http.headers, body)
        ids: list[str] = []
        _, events = await begun(sample_events(door.service, request, caller, ids))
        return StreamingResponse(kept_alive(_chunks(events, ids)), headers=HEADERS)

    return answer


async def _chunks(events: AsyncIterator[Event], ids: list[str]) -> AsyncIterator[bytes]:
    async with aclosing(events):  # type: ignore[type-var]
        async for event in events:
            if isinstance(event, NewTokens):
                fields = {"sequence": event.sequence, "tokens": event.tokens, "logprobs": event.logprobs}
                yield server_sent("tokens", fields)
            elif isinstance(event, SampleResponse):
                fields = orjson.loads(codec.encode_result(event)[1])
                yield server_sent("done", {**fields, "sample_sequence_ids": ids})
            else:
                yield server_sent("error", event.to_wire())

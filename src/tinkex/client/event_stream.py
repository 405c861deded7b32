"""From an answer that is still coming to the events in it: bytes, server-sent events, a sample's events.

Promises: whatever is wrong with it is a typed error; one that ends without its last event has broken off.
Knows neither sockets nor retries.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator

from tinkex.client.failures import root_cause
from tinkex.client.http_library import LIBRARY_ERRORS
from tinkex.client.http_stream import Streamed
from tinkex.client.sse import ServerSentEvent, SSEDecoder
from tinkex.errors import APIResponseValidationError, InvalidInputError, Request, Response, StreamBrokenError
from tinkex.types.sampling import SampleEvent
from tinkex.wire.event_codec import read_event


async def read_events(streamed: Streamed, url: str) -> AsyncGenerator[SampleEvent, None]:
    """The events in the answer of `url`; stop at the last one, or it is said to be missing."""
    request = Request("POST", url)
    try:
        async for sent in _server_sent(streamed):
            if (event := read_event(sent.event, sent.data)) is not None:
                yield event
    except (OSError, *LIBRARY_ERRORS) as cause:
        raise StreamBrokenError(request, f"{url} broke off: {root_cause(cause)}") from None
    except InvalidInputError as error:
        response = Response(streamed.status, streamed.headers, "", request)
        what = f"POST {url}: an event cannot be read: {error}"
        raise APIResponseValidationError(response, None, what) from error
    raise StreamBrokenError(request, f"{url} broke off: it ended without its result")


async def _server_sent(streamed: Streamed) -> AsyncGenerator[ServerSentEvent, None]:
    if "text/event-stream" not in (kind := streamed.headers.get("content-type", "")):
        raise InvalidInputError(f"text/event-stream was expected, got {kind or 'nothing'}")
    decoder = SSEDecoder()
    async for piece in streamed:
        for event in decoder.feed(piece):
            yield event
    if (tail := decoder.end()) is not None:
        yield tail

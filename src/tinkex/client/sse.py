"""Server-sent events: the decoder, and a sample's events read from a streamed response.

Promises: the events do not depend on how the bytes were cut; each is given as soon as its last byte is there,
whether lines end in CR, LF or CRLF; only the unfinished event is buffered. Follows the HTML standard (section
9.2.6), except that `end` returns an unterminated last event instead of dropping it. A sample's stream that
ends without its last event is a StreamBrokenError. Knows neither sockets nor retries.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass

from tinkex.client.http1 import HttpStream
from tinkex.client.http_call import root_cause
from tinkex.client.http_library import LIBRARY_ERRORS
from tinkex.errors import (
    APIResponseValidationError,
    FailedRequest,
    FailedResponse,
    InvalidInputError,
    StreamBrokenError,
)
from tinkex.types.sampling import SampleEvent
from tinkex.wire.event_codec import read_event

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
MAX_EVENT = 1 << 28  # bytes


@dataclass(frozen=True)
class ServerSentEvent:
    """One event."""

    data: str
    event: str = "message"


class SSEDecoder:
    """An incremental decoder: bytes in, events out. Ids and retry times are ignored.

    >>> decoder = SSEDecoder()
    >>> decoder.feed(b"data: one\\n\\ndata: t")
    [ServerSentEvent(data='one', event='message')]
    >>> decoder.feed(b"wo\\r\\r")
    [ServerSentEvent(data='two', event='message')]
    """

    def __init__(self) -> None:
        self._line = bytearray()  # the unfinished line
        self._first = True  # has no line ended yet?
        self._after_cr = False  # an LF would belong to the line break before it
        self._data: list[str] = []
        self._size = 0
        self._event = ""

    def feed(self, data: bytes) -> list[ServerSentEvent]:
        """The events that end in `data`."""
        if not data:
            return []
        if self._after_cr and data[0] == ord("\n"):
            data = data[1:]
        self._after_cr = data.endswith(b"\r")
        events: list[ServerSentEvent] = []
        for piece in data.splitlines(keepends=True):
            self._line += piece
            self._bounded(len(self._line))
            if piece.endswith((b"\r", b"\n")) and (event := self._end_line()) is not None:
                events.append(event)
        return events

    def end(self) -> ServerSentEvent | None:
        """The stream is over: its last event, if no empty line ended it."""
        if self._line:
            self._end_line()
        return self._dispatch()

    def _end_line(self) -> ServerSentEvent | None:
        raw = bytes(self._line).rstrip(b"\r\n")
        self._line.clear()
        if self._first:
            self._first, raw = False, raw.removeprefix(BYTE_ORDER_MARK)
        if not raw:
            return self._dispatch()
        name, _, value = raw.decode(errors="replace").partition(":")
        self._field(name, value.removeprefix(" "))  # a comment has no name
        return None

    def _field(self, name: str, value: str) -> None:
        if name == "data":
            self._data.append(value)
            self._size += len(value) + 1
            self._bounded(self._size)
        elif name == "event":
            self._event = value

    def _dispatch(self) -> ServerSentEvent | None:
        data, event = self._data, self._event
        self._data, self._size, self._event = [], 0, ""
        return ServerSentEvent("\n".join(data), event or "message") if data else None

    def _bounded(self, size: int) -> None:
        if size > MAX_EVENT:
            raise InvalidInputError(f"an event of more than {MAX_EVENT} bytes")


async def read_events(streamed: HttpStream, url: str) -> AsyncGenerator[SampleEvent, None]:
    """The events of a response of `url`. The caller stops at the last one; running past it is an error."""
    request = FailedRequest("POST", url)
    try:
        async for sent in _server_sent(streamed):
            if (event := read_event(sent.event, sent.data)) is not None:
                yield event
    except (OSError, *LIBRARY_ERRORS) as cause:
        raise StreamBrokenError(request, f"{url} broke off: {root_cause(cause)}") from None
    except InvalidInputError as error:
        response = FailedResponse(streamed.status, streamed.headers, "", request)
        what = f"POST {url}: an event cannot be read: {error}"
        raise APIResponseValidationError(response, None, what) from error
    raise StreamBrokenError(request, f"{url} broke off: it ended without its result")


async def _server_sent(streamed: HttpStream) -> AsyncGenerator[ServerSentEvent, None]:
    if "text/event-stream" not in (kind := streamed.headers.get("content-type", "")):
        raise InvalidInputError(f"text/event-stream was expected, got {kind or 'nothing'}")
    decoder = SSEDecoder()
    async for piece in streamed:
        for event in decoder.feed(piece):
            yield event
    if (tail := decoder.end()) is not None:
        yield tail

"""Server-sent events, decoded as the bytes come.

Promises: the events of a stream do not depend on where it was cut; each is given as soon as its last byte is
there, whether lines end in CR, LF or CRLF; nothing is kept but the event that is under way. Follows the HTML
standard (section 9.2.6), except that `end` gives what an unterminated tail holds instead of dropping it.
Knows nothing of sockets, nor of what an event means.
"""

from __future__ import annotations

from dataclasses import dataclass

from tinkex.errors import InvalidInputError

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
MAX_EVENT = 1 << 28  # bytes; what is longer is no event but a mistake


@dataclass(frozen=True)
class ServerSentEvent:
    """One event. `id` is the last one that the stream named, in this event or before it."""

    data: str
    event: str = "message"
    id: str = ""


class SSEDecoder:
    """Bytes in, events out.

    >>> decoder = SSEDecoder()
    >>> decoder.feed(b"data: one\\n\\ndata: t")
    [ServerSentEvent(data='one', event='message', id='')]
    >>> decoder.feed(b"wo\\r\\r")
    [ServerSentEvent(data='two', event='message', id='')]
    """

    def __init__(self) -> None:
        self.retry: int | None = None  # milliseconds that the server asks to wait before reconnecting
        self._line = bytearray()  # of the line under way
        self._first = True  # has no line ended yet?
        self._after_cr = False  # an LF would belong to the line break before it
        self._data: list[str] = []
        self._size = 0
        self._event = ""
        self._id = self._last_id = ""

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
        """The stream is over: the event in its tail, if that had no empty line to end it."""
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
        self._take(name, value.removeprefix(" "))  # a comment has no name
        return None

    def _take(self, name: str, value: str) -> None:
        if name == "data":
            self._data.append(value)
            self._size += len(value) + 1
            self._bounded(self._size)
        elif name == "event":
            self._event = value
        elif name == "id" and "\0" not in value:
            self._id = value
        elif name == "retry" and value.isascii() and value.isdigit():
            self.retry = int(value)

    def _dispatch(self) -> ServerSentEvent | None:
        data, event = self._data, self._event
        self._data, self._size, self._event, self._last_id = [], 0, "", self._id
        return ServerSentEvent("\n".join(data), event or "message", self._last_id) if data else None

    def _bounded(self, size: int) -> None:
        if size > MAX_EVENT:
            raise InvalidInputError(f"an event of more than {MAX_EVENT} bytes")

"""uvicorn's HTTP protocol, with bounded requests and with small complete responses sent in one write.

uvicorn writes head and body separately: two system calls, two packets and two client wake-ups for each small
response. `scope[CONNECTION].send_whole` joins them; `whole_body` reads a small body without waiting for it.
Headers are not validated: they must be the server's own.

A request's head is bounded in bytes and fields, and head, body and idle connections have deadlines. They cost
no timers: the server calls `expire` on every connection about once a second. A client over a limit gets 431
or 408 and its connection is closed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Literal

import orjson
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

CONNECTION = "tinkex.connection"  # the scope's key for a SingleWriteProtocol
LARGE = 64 * 1024  # bytes; a larger body is not worth copying
MAX_HEAD = 64 * 1024  # bytes of a request's head, or of its trailers
MAX_FIELDS = 100  # header fields of a request, trailers included
HEAD_SECONDS = 10.0  # from a connection's first moment, or a later request's first byte, to the head's end
BODY_SECONDS = 30.0  # the longest silence within a body
BODY_RATE = 500  # bytes per second of a body, on average after the first BODY_SECONDS
UNREAD_SECONDS = 60.0  # a client that reads nothing of its response for this long is disconnected
DISCARD_RATE = 4 * 1024 * 1024  # bytes a second of what a client sends after it was refused
LINGER_SECONDS = 5.0  # what a refused client still sends is read: a reset would destroy the answer

Headers = Iterable[tuple[bytes, bytes]]


class SingleWriteProtocol(HttpToolsProtocol):
    """The protocol of one client connection; one of more than `most_connections` is refused."""

    _deadline = math.inf  # of the client; infinite while the server is at work
    _reading: Literal["", "head", "body"] = ""  # what of a request has begun and is not complete
    _refused = False  # answered by `_refuse`; what still arrives is discarded
    _unread = 0  # bytes received since the last request or part of a body was complete
    _part_began, _body_bytes = 0.0, 0  # the part is a head or a body
    _unsent, _taken, _sending_since, _taken_at = 0, 0, 0.0, 0.0  # bytes and times of the response in progress

    def __init__(self, *given: Any, most_connections: int = 2**31, **named: Any) -> None:
        super().__init__(*given, **named)
        self._most_connections = most_connections

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._deadline = self.loop.time() + HEAD_SECONDS
        if len(self.connections) > self._most_connections:
            self._refuse(503, "the server has as many connections as it accepts: try again in a moment")

    # -- requests ----------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return self._discard(len(data))
        self._unread += len(data)
        super().data_received(data)
        if self._unread > MAX_HEAD:
            self._refuse_head()
        elif self._reading:  # most requests come whole, and need no deadline
            now = self.loop.time()
            self._part_began = self._part_began or now
            if self._reading == "head":
                self._deadline = self._part_began + HEAD_SECONDS
            else:
                self._deadline = min(self._part_began + self._body_bytes / BODY_RATE, now) + BODY_SECONDS

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._reading, self._part_began = "head", 0.0

    def on_header(self, name: bytes, value: bytes) -> None:
        """As uvicorn's method, which it does not call: it runs for every header, and a call costs."""
        name = name.lower()
        if name == b"expect" and value.lower() == b"100-continue":
            self.expect_100_continue = True
        self.headers.append((name, value))
        if len(self.headers) > MAX_FIELDS:
            self._refuse_head()
            raise ValueError("too many header fields")  # stops the parser

    def on_headers_complete(self) -> None:
        if self._unread > MAX_HEAD:  # the body may have come with it
            size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
            if size > MAX_HEAD:
                self._refuse_head()
                raise ValueError("the head is too large")
        super().on_headers_complete()
        self._reading, self._part_began, self._body_bytes = "body", 0.0, 0
        # The connection, not uvicorn's request cycle: that holds the scope, a reference cycle.
        self.scope[CONNECTION] = self  # type: ignore[literal-required]

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        self._unread = 0
        self._body_bytes += len(body)
        if self.cycle.response_complete:  # a refusal
            self._discard(len(body))

    def _discard(self, size: int) -> None:
        """Read on later: reading a sender without end at full speed took most of a core."""
        self.flow.pause_reading()
        self.loop.call_later(size / DISCARD_RATE, self._read_on)

    def _read_on(self) -> None:
        if not self.transport.is_closing():
            self.flow.resume_reading()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._reading, self._unread = "", 0
        self._deadline = math.inf
        if self.cycle.response_complete:  # before the body was: a refusal
            self._begin_idle()

    def whole_body(self, scope: Any) -> bytes | None:
        """The body of a request, if it is complete."""
        cycle = self.cycle
        if cycle.scope is not scope or cycle.more_body or cycle.disconnected or cycle.response_complete:
            return None
        if cycle.waiting_for_100_continue or self.flow.read_paused:
            return None
        body, cycle.body = bytes(cycle.body), bytearray()
        cycle.message_event.clear()  # `receive` waits for what comes next: the disconnection
        return body

    # -- deadlines ---------------------------------------------------------------------------------------

    def expire(self, now: float, idle_early: float = 0.0) -> None:
        """Close the connection if a deadline has passed; if idle, `idle_early` seconds before it."""
        if self._is_unread(now):
            return self.transport.abort()
        if self._reading or self._refused:
            idle_early = 0.0
        if now + idle_early < self._deadline or self.transport.is_closing():
            return
        if self._refused:
            self.transport.close()
        elif self.flow.read_paused:  # the server has not read what the client may have sent
            self._deadline = now + BODY_SECONDS
        elif self._reading:
            self._refuse(408, "the request did not arrive in time: its connection is closed")
        else:
            self.transport.close()

    def _is_unread(self, now: float) -> bool:
        """Has the client stopped reading its response, or does it read too slowly on average?"""
        before, self._unsent = self._unsent, self.transport.get_write_buffer_size()
        if not self._unsent:
            return False
        if not before:
            self._sending_since, self._taken_at, self._taken = now, now, 0
        elif self._unsent != before:  # it may have been filled up again
            self._taken_at, self._taken = now, self._taken + max(0, before - self._unsent)
        return now > min(self._sending_since + self._taken / BODY_RATE, self._taken_at) + UNREAD_SECONDS

    def _begin_idle(self) -> None:
        self._deadline = self.loop.time() + self.timeout_keep_alive

    def _refuse_head(self) -> None:
        most = f"at most {MAX_HEAD} bytes and {MAX_FIELDS} header fields are accepted"
        self._refuse(431, f"the request's head is too large: {most}")

    def _refuse(self, status: int, message: str) -> None:
        """Answer in place of the application, and close the connection."""
        if self._refused:
            return
        self._refused, self._deadline = True, self.loop.time() + LINGER_SECONDS
        cycle = self.cycle
        if cycle and not cycle.response_complete:
            if self.pipeline or cycle.response_started or not cycle.more_body:
                self.transport.close()  # a response to an earlier request is under way
                return
            cycle.disconnected = True
            cycle.message_event.set()
        body = orjson.dumps({"detail": message})
        retry = b"retry-after: 1\r\n" if status == 503 else b""
        head = b"content-type: application/json\r\ncontent-length: %d\r\n%sconnection: close\r\n\r\n"
        self.transport.write(STATUS_LINE[status] + head % (len(body), retry) + body)
        if self.transport.can_write_eof():
            self.transport.write_eof()

    def send_400_response(self, msg: str) -> None:
        if not self._refused:
            super().send_400_response(msg)

    # -- responses ---------------------------------------------------------------------------------------

    def send_whole(self, scope: Any, status: int, headers: Headers, body: bytes) -> bool:
        """Write a response at the end of the event loop's current iteration."""
        cycle = self.cycle
        is_latest = cycle.scope is scope  # a client may pipeline the next request
        if not is_latest or cycle.response_started or scope["method"] == "HEAD":
            return False
        if self.flow.write_paused or not cycle.keep_alive or len(body) > LARGE:
            return False
        cycle.response_started = cycle.response_complete = True
        cycle.message_event.set()
        if not cycle.disconnected:
            lines = [*map(b": ".join, (*cycle.default_headers, *headers)), b"", body]
            self.loop.call_soon(self.transport.write, STATUS_LINE[status] + b"\r\n".join(lines))
            self.on_response_complete()
        return True

    def on_response_complete(self) -> None:
        if self.pipeline or self.transport.is_closing():
            super().on_response_complete()
            return
        self.server_state.total_requests += 1
        self.flow.resume_reading()
        if not self._reading:
            self._begin_idle()

    def shutdown(self) -> None:
        self.loop.call_soon(super().shutdown)  # after the pending write

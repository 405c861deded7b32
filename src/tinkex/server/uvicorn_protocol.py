"""uvicorn's HTTP protocol, with small complete responses sent in one write.

uvicorn writes head and body separately: two system calls, two packets and two client wake-ups for each small
response. `scope[SEND_WHOLE]` joins them. One keep-alive timer per connection replaces one timer per response.
Headers are not validated: they must be the server's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

SEND_WHOLE = "tinkex.send_whole"  # the scope's key for a SendWhole
LARGE = 64 * 1024  # bytes; a larger body is not worth copying

Headers = Iterable[tuple[bytes, bytes]]
# (scope, status, headers, body) -> False if the caller has to send ASGI messages instead.
SendWhole = Callable[[Any, int, Headers, bytes], bool]


class SingleWriteProtocol(HttpToolsProtocol):
    """The protocol of one client connection."""

    _idle_since: float | None = None  # None while a request is being answered

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        # Bound to the connection, not to uvicorn's request cycle: that holds the scope, a reference cycle.
        self.scope[SEND_WHOLE] = self.send_whole  # type: ignore[literal-required]

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
        self._idle_since = self.loop.time()
        if self.timeout_keep_alive_task is None:
            self._start_timer(self.timeout_keep_alive)

    def _start_timer(self, seconds: float) -> None:
        self.timeout_keep_alive_task = self.loop.call_later(seconds, self.timeout_keep_alive_handler)

    def _unset_keepalive_if_required(self) -> None:
        self._idle_since = None  # the timer keeps running and reads this
        if self.transport.is_closing():
            super()._unset_keepalive_if_required()

    def timeout_keep_alive_handler(self) -> None:
        self.timeout_keep_alive_task = None
        if self._idle_since is None:
            return  # the response under way starts the timer again
        left = self._idle_since + self.timeout_keep_alive - self.loop.time()
        if left > 0:
            self._start_timer(left)
        else:
            super().timeout_keep_alive_handler()

    def shutdown(self) -> None:
        self.loop.call_soon(super().shutdown)  # after the pending write

"""A connection's end of the server's: uvicorn's, but an answer that is small and whole leaves in one piece.

uvicorn takes an answer apart as ASGI has it, checks each header and sends head and body one after the other:
two calls of the kernel, two packets and two wake-ups of the client for each small answer. Promises: what is
given to `scope[WHOLE]` is sent in one call at the end of this turn of the event loop, so that clients are
woken when the server is about to rest; it says no where only the long way will do. A client that has been
silent for too long is hung up on, as there, but by one timer instead of a new one for each answer. Does not
check headers: they must be the server's own. Knows nothing of what is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

WHOLE = "tinkex.whole"  # a key of the scope, where an application finds SendWhole
LARGE = 64 * 1024  # bytes that are not worth copying

# The scope, status, headers and body; False if they were not taken, and have to be sent as ASGI has it.
SendWhole = Callable[[Any, int, Iterable[tuple[bytes, bytes]], bytes], bool]


class Connection(HttpToolsProtocol):
    """One client's connection."""

    _idle_since: float | None = None  # None while a request is under way

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        # Of the connection, not of the cycle: that holds the scope, and each request would leave a circle.
        self.scope[WHOLE] = self.send_whole  # type: ignore[literal-required]

    def send_whole(
        self, scope: Any, status: int, headers: Iterable[tuple[bytes, bytes]], body: bytes
    ) -> bool:
        cycle = self.cycle
        is_latest = cycle.scope is scope  # a client may have sent the next request without waiting
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
            self._look_again(self.timeout_keep_alive)

    def _look_again(self, seconds: float) -> None:
        self.timeout_keep_alive_task = self.loop.call_later(seconds, self.timeout_keep_alive_handler)

    def _unset_keepalive_if_required(self) -> None:
        self._idle_since = None  # the timer goes on, and finds this
        if self.transport.is_closing():
            super()._unset_keepalive_if_required()

    def timeout_keep_alive_handler(self) -> None:
        self.timeout_keep_alive_task = None
        if self._idle_since is None:
            return  # the answer that is being made starts it anew
        left = self._idle_since + self.timeout_keep_alive - self.loop.time()
        if left > 0:
            self._look_again(left)
        else:
            super().timeout_keep_alive_handler()

    def shutdown(self) -> None:
        self.loop.call_soon(super().shutdown)  # after what is about to be sent

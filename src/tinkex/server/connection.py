"""A connection's end of the server's: uvicorn's, but an answer that is small and whole leaves in one piece.

uvicorn takes an answer apart as ASGI has it, checks each header and sends head and body one after the other:
two calls of the kernel, two packets and two wake-ups of the client for each small answer. Promises: what is
given to `scope[WHOLE]` is sent in one call at the end of this turn of the event loop, so that clients are
woken when the server is about to rest; it says no where only the long way will do. Does not check headers:
they must be the server's own. Knows nothing of what is sent.
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
            pieces = [STATUS_LINE[status]]
            for name, value in (*cycle.default_headers, *headers):
                pieces += name, b": ", value, b"\r\n"
            pieces += b"\r\n", body
            self.loop.call_soon(self.transport.write, b"".join(pieces))
            self.on_response_complete()
        return True

    def shutdown(self) -> None:
        self.loop.call_soon(super().shutdown)  # after what is about to be sent

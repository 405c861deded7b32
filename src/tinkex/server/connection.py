"""A connection's end of the server's: uvicorn's, but every answer leaves in one piece.

uvicorn writes the head and the body of an answer apart: two calls of the kernel, two packets and two wake-ups
of the client for each small answer. Promises: what is written within one turn of the event loop is sent
together, in order, at the end of that turn; or at once when it is large, so that whoever streams is slowed
down as before. Knows nothing of what is sent.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

LARGE = 64 * 1024  # bytes


class Connection(HttpToolsProtocol):
    """One client's connection."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(_Gathering(transport, self.loop))  # type: ignore[arg-type]


class _Gathering:
    """A transport, but for when its bytes are sent."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport, self._loop = transport, loop
        self._pieces: list[bytes] = []
        self._size = 0
        self.is_closing = transport.is_closing  # asked for at every request

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        if not self._pieces:
            self._loop.call_soon(self._send)
        self._pieces.append(data)
        self._size += len(data)
        if self._size > LARGE:
            self._send()

    def _send(self) -> None:
        pieces, self._pieces, self._size = self._pieces, [], 0
        if pieces and not self.is_closing():  # the client may have gone meanwhile
            self._transport.writelines(pieces)

    def close(self) -> None:
        self._send()
        self._transport.close()

"""HTTP answers that are read while they are being sent: http1.py's counterpart for streams.

Promises: a connection of its own for each stream, closed with it, so that a server knows at once when nobody
listens any more; silence beyond the time given is a TimeoutError. Raises OSError and nothing else. Knows
nothing of events.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Protocol
from urllib.parse import urlsplit

from tinkex.client.http1 import MAX_HEAD, Body, read_head, write_request

PIECE = 64 * 1024  # bytes of a body that are read at once


class Streamed(Protocol):
    """An answer whose body is still coming: iterate it, and close it in any case."""

    status: int

    @property
    def headers(self) -> Mapping[str, str]:
        """By their names in lower case."""
        ...

    def __aiter__(self) -> Streamed: ...

    async def __anext__(self) -> bytes: ...

    async def aclose(self) -> None: ...


class PlainStream:
    """An answer over plain TCP."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, silence: float) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self._reader, self._writer, self._silence = reader, writer, silence
        self._chunked = False
        self._left: int | None = None  # bytes of the body, or of a chunk, still to come; None: not known

    @classmethod
    async def open(
        cls, host: str, port: int, request: Sequence[bytes | memoryview], *, silence: float, connect: float
    ) -> PlainStream:
        """Send a request (see `write_request`) and read the head of its answer."""
        try:
            async with asyncio.timeout(connect):
                reader, writer = await asyncio.open_connection(host, port, limit=MAX_HEAD)
        except TimeoutError:
            raise ConnectionError(f"no connection to {host}:{port} within {connect:g} s") from None
        stream = cls(reader, writer, silence)
        try:
            writer.writelines(request)
            async with _in_time(silence):
                await stream._read_head()
        except BaseException:
            await stream.aclose()
            raise
        return stream

    async def _read_head(self) -> None:
        while True:
            _, self.status, self.headers = read_head(await self._reader.readuntil(b"\r\n\r\n"))
            if self.status >= 200:  # else it is "continue", or the like
                break
        if "content-encoding" in self.headers:
            raise ConnectionError(f"a stream in {self.headers['content-encoding']}, which was not asked for")
        self._chunked = "chunked" in self.headers.get("transfer-encoding", "")
        if not self._chunked and "content-length" in self.headers:
            self._left = int(self.headers["content-length"])

    def __aiter__(self) -> PlainStream:
        return self

    async def __anext__(self) -> bytes:
        async with _in_time(self._silence):
            piece = await (self._next_of_chunk() if self._chunked else self._next())
        if not piece:
            raise StopAsyncIteration
        return piece

    async def _next(self) -> bytes:
        """Some bytes of the body, or of a chunk; none at its end."""
        if self._left == 0:
            return b""
        piece = await self._reader.read(PIECE if self._left is None else min(PIECE, self._left))
        if self._left is not None:
            if not piece:
                raise ConnectionResetError(f"{self._left} bytes are missing")
            self._left -= len(piece)
        return piece

    async def _next_of_chunk(self) -> bytes:
        if self._left is None:
            self._left = int((await self._reader.readuntil(b"\r\n")).split(b";")[0], 16)
            if self._left == 0:
                return b""  # trailers are not for us: the connection ends with this answer
        piece = await self._next()
        if self._left == 0:
            self._left = None
            await self._reader.readexactly(2)
        return piece

    async def aclose(self) -> None:
        self._writer.transport.abort()


async def open_plain(
    method: str, url: str, headers: dict[str, str], content: Body | None, *, silence: float, connect: float
) -> PlainStream:
    """Send a request to an http:// URL; the answer, once its head is there."""
    parts = urlsplit(url)
    target = url.removeprefix(f"{parts.scheme}://{parts.netloc}") or "/"
    request = write_request(method, target, {"host": parts.netloc, **headers}, content)
    host, port = parts.hostname or "", parts.port or 80
    return await PlainStream.open(host, port, request, silence=silence, connect=connect)


@asynccontextmanager
async def _in_time(seconds: float) -> AsyncGenerator[None]:
    """Whatever goes wrong in here is an OSError."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        raise TimeoutError(f"no word for {seconds:g} s") from None
    except (EOFError, asyncio.LimitOverrunError, ValueError, IndexError) as error:
        raise ConnectionResetError(f"the connection broke off: {error or 'closed by the server'}") from None

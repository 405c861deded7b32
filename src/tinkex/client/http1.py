"""HTTP/1.1 over plain TCP: for servers on this machine or this network, where requests are many and cheap.

A third of the CPU of a full HTTP library, because it does a third: no TLS, no proxies, no redirects, no
HTTP/2 (https:// goes through http_library.py). Promises: arrays are written without being copied;
a connection is used again only after a whole answer; one that the server closed while it was idle is replaced
without anyone noticing, unless that is news (`resend`). Raises OSError and nothing else. Knows nothing of
Tinker.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import cast
from urllib.parse import urlsplit

from tinkex.wire.codec import unpack

Body = bytes | Sequence[bytes | memoryview]
MAX_HEAD = 64 * 1024
MAX_BODY = 1 << 30  # bytes that an answer may unpack to, or that are believed to come
SCRATCH = 64 * 1024  # bytes that are read at once, unless they go where they will stay


Answer = tuple[int, dict[str, str], bytes]  # status, headers by their names in lower case, body


class Stale(ConnectionError):
    """A connection that was idle turned out to be closed: nothing of an answer came."""


class Http1:
    """Connections to one server, those not in use kept for the next request.

    Without `resend` a request that was written goes out once: that its connection broke is an error, though
    it may only have been idle for too long. A poll for many must know when the server went away.
    """

    def __init__(
        self, base_url: str, *, timeout: float, connect_timeout: float, keep: int, resend: bool = True
    ) -> None:
        parts = urlsplit(base_url)
        self._host, self._port = parts.hostname or "", parts.port or 80
        self._origin, self._netloc = f"{parts.scheme}://{parts.netloc}", parts.netloc
        self._timeout, self._connect_timeout = timeout, connect_timeout
        self._keep, self._resend = keep, resend
        self._idle: list[_Connection] = []
        self._scratch = memoryview(bytearray(SCRATCH))  # all connections are one loop's: none keeps it
        self._closed = False

    async def execute(self, method: str, url: str, headers: dict[str, str], content: Body | None) -> Answer:
        """Send one request and read its answer. `url` is one of this server's."""
        target = url.removeprefix(self._origin) or "/"
        pieces = write_request(method, target, {"host": self._netloc, **headers}, content)
        while self._idle:
            connection = self._idle.pop()
            if not connection.is_open:
                continue
            try:
                return await self._on(connection, pieces, method)
            except Stale:
                if not self._resend or method == "DELETE":  # which may have been done, and is not there twice
                    raise
        connection = await self._connect()
        return await self._on(connection, pieces, method)

    async def _on(self, connection: _Connection, pieces: list[bytes | memoryview], method: str) -> Answer:
        try:
            answer = await connection.exchange(pieces, method, self._timeout)
        except BaseException as error:
            connection.close()  # half of an answer may still be on its way
            if isinstance(error, TimeoutError):
                self._close_idle()  # where the way itself fell silent (a VPN, a sleep), they are dead too
            raise
        if connection.reusable and len(self._idle) < self._keep and not self._closed:
            self._idle.append(connection)
        else:
            connection.close()
        return answer

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._connect_timeout):
                _, connection = await loop.create_connection(
                    lambda: _Connection(self._scratch), self._host, self._port
                )
        except TimeoutError:
            raise ConnectionError(
                f"no connection to {self._host}:{self._port} within {self._connect_timeout:g} s"
            ) from None
        return connection

    async def aclose(self) -> None:
        self._closed = True
        self._close_idle()

    def _close_idle(self) -> None:
        while self._idle:
            self._idle.pop().close()


def write_request(
    method: str, target: str, headers: dict[str, str], body: Body | None
) -> list[bytes | memoryview]:
    """A request as what is to be written, the body as it is."""
    parts: list[bytes | memoryview] = []
    if body is not None:
        parts = [body] if isinstance(body, bytes) else list(body)
    lines = [f"{method} {target} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
    if body is not None or method not in ("GET", "DELETE"):
        lines.append(f"content-length: {sum(map(len, parts))}")
    head = "\r\n".join(lines) + "\r\n\r\n"
    if head.count("\n") != len(lines) + 1:
        raise ConnectionError("a header has a line break in it")  # or it would be two headers
    return [head.encode("latin-1", "replace"), *parts]


def read_head(raw: bytes) -> tuple[str, int, dict[str, str]]:
    """Version, status and headers of an answer; `raw` goes up to its empty line. ValueError if it is none."""
    first, *lines = raw[:-4].decode("latin-1").split("\r\n")
    version, status = first.split(" ", 2)[:2]
    if not version.startswith("HTTP/1."):
        raise ValueError(first[:40])
    headers: dict[str, str] = {}
    for line in lines:
        name, _, value = line.partition(":")
        headers[name.lower()] = value.strip()
    return version, int(status), headers


class _Connection(asyncio.BufferedProtocol):
    """One socket, one exchange at a time. A long body is read into its place, without being copied."""

    def __init__(self, scratch: memoryview) -> None:
        self._scratch = scratch
        self._transport: asyncio.Transport | None = None
        self._body: bytearray | None = None  # a long body, as far as it has come
        self._place: memoryview | None = None  # what of it is still to come
        self._waiter: asyncio.Future[Answer] | None = None
        self._used = self._again = False
        self.reusable = False

    # -- asking --------------------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    async def exchange(self, pieces: list[bytes | memoryview], method: str, timeout: float) -> Answer:
        if self._transport is None:
            raise Stale("the server closed the connection")
        loop = asyncio.get_running_loop()
        self._waiter = waiter = loop.create_future()
        self._again, self._used = self._used, True
        self._buffer = b""
        self._head: tuple[int, dict[str, str]] | None = None
        self._chunks: list[bytes] = []
        self._pending = bytearray()
        self._left: int | None = None  # bytes of the body, or of a chunk, still to come; None: not known
        self._chunked = False
        self._body = self._place = None
        self._bodiless = method == "HEAD"
        self.reusable = False
        timer = loop.call_later(timeout, self._fail, TimeoutError(f"no answer within {timeout:g} s"))
        self._transport.writelines(pieces)
        try:
            return await waiter
        finally:
            timer.cancel()
            self._waiter = None

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()  # a request that was given up half way is not to be sent to its end

    def _fail(self, error: Exception) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(error)

    # -- reading -------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one without saying so

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self._waiter is None or self._waiter.done():
            return
        if self._head is not None and self._left is None and not self._chunked and exc is None:
            self._guard(self._finish)  # a body without a length ends with its connection
        elif self._again and self._head is None and not self._buffer:
            self._fail(Stale("the server closed the connection"))
        else:
            self._fail(ConnectionResetError(f"the connection broke off: {exc or 'closed by the server'}"))

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._place or self._scratch

    def buffer_updated(self, nbytes: int) -> None:
        if self._waiter is None or self._waiter.done():
            return self.close()  # nobody asked
        if self._place is None:
            return self._guard(self._read, bytes(self._scratch[:nbytes]))
        self._place = self._place[nbytes:]
        if not self._place:
            self._guard(self._finish)

    def _guard(self, read: Callable[..., None], *args: bytes) -> None:
        try:
            read(*args)
        except (ValueError, IndexError) as error:  # InvalidInputError is one
            self._fail(ConnectionError(f"not an HTTP answer: {error}"))

    def _read(self, data: bytes) -> None:
        if self._head is None:
            data = self._read_head(self._buffer + data)
        if self._head is not None and self._waiter is not None and not self._waiter.done():
            self._read_body(data)

    def _read_head(self, data: bytes) -> bytes:
        """Take the head off `data` once it is whole; what is left belongs to the body."""
        end = data.find(b"\r\n\r\n")
        if end < 0:
            if len(data) > MAX_HEAD:
                raise ValueError("its head has no end")
            self._buffer = data
            return b""
        version, status, headers = read_head(data[: end + 4])
        self._buffer, data = b"", data[end + 4 :]
        if status < 200:  # "continue" and the like: the answer is still to come
            return self._read_head(data)
        self._head = (status, headers)
        if self._bodiless or status in (204, 304):
            self._left = 0
        elif "chunked" in headers.get("transfer-encoding", ""):
            self._chunked = True
        elif "content-length" in headers:
            self._left = int(headers["content-length"])
        closing = headers.get("connection", "").lower() == "close" or version == "HTTP/1.0"
        self.reusable = self._left is not None and not closing
        if self._left == 0:
            self._finish()
        return data

    def _read_body(self, data: bytes) -> None:
        if self._chunked:
            return self._read_chunks(data)
        if self._left is not None and SCRATCH < self._left - len(data) < MAX_BODY and not self._chunks:
            self._body = bytearray(self._left)
            self._body[: len(data)] = data
            self._place = memoryview(self._body)[len(data) :]
            return
        self._chunks.append(data)
        if self._left is not None:
            self._left -= len(data)
            if self._left < 0:
                raise ValueError("its body is longer than it said")
            if self._left == 0:
                self._finish()

    def _read_chunks(self, data: bytes) -> None:
        """A body of unknown length: a size in hex, that many bytes, a line break, and so on until 0."""
        self._pending += data
        while True:
            if self._left is None:
                end = self._pending.find(b"\r\n")
                if end < 0:
                    return
                self._left = int(self._pending[:end].split(b";")[0], 16)
                del self._pending[: end + 2]
            if len(self._pending) < self._left + 2:
                return
            if self._left == 0:
                return self._finish()  # trailers are not for us: the connection ends with this answer
            self._chunks.append(bytes(self._pending[: self._left]))
            del self._pending[: self._left + 2]
            self._left = None

    def _finish(self) -> None:
        assert self._head is not None
        status, headers = self._head
        body: bytes = self._chunks[0] if len(self._chunks) == 1 else b"".join(self._chunks)
        if self._body is not None:  # a bytearray: whoever reads bytes reads this
            body, self._body, self._place = self._body, None, None  # type: ignore[assignment]
        if encoding := headers.pop("content-encoding", ""):
            body = unpack(body, encoding, MAX_BODY)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result((status, headers, body))

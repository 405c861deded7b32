"""HTTP/1.1 over plain TCP, parsed by httptools.

It costs a third of the CPU of a full HTTP library, because it has no TLS, proxies, redirects or HTTP/2.
Promises: arrays are written without a copy; a connection is reused only after a whole response; each stream
has one of its own; memory grows with the bytes that arrive, not with the announced length; bodies have a
limit. Raises only OSError, whose messages quote nothing of the server. Knows nothing of Tinker.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import NamedTuple, cast
from urllib.parse import urlsplit

import httptools

from tinkex.wire.codec import unpack

Body = bytes | Sequence[bytes | memoryview]
MAX_HEAD = 64 * 1024
MAX_BODY = 1 << 30  # bytes of a whole response, compressed or not; real results are at most a tenth of it
SCRATCH = 64 * 1024  # bytes of the read buffer; longer bodies are received in place
TRUSTED = 1 << 24  # bytes allocated for an announced length; more is allocated as it arrives
STREAM_BUFFER = 256 * 1024  # unread bytes of a stream at which the socket is no longer read


class HttpRequest(NamedTuple):
    """One HTTP request, with header names in lower case."""

    method: str
    url: str
    headers: dict[str, str]
    content: Body | None = None


class HttpStream(NamedTuple):
    """A response whose body is still arriving; close it in any case."""

    status: int
    headers: Mapping[str, str]
    pieces: AsyncIterator[bytes]
    aclose: Callable[[], Awaitable[None]]


class HttpResponse(NamedTuple):
    """One HTTP response, with header names in lower case; the body of a stream is yet to come."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    stream: HttpStream | None = None


class StaleConnectionError(ConnectionError):
    """A connection that had been idle was closed: no byte of a response came."""


class RefusedResponseError(ConnectionError):
    """A response that must not be read; another attempt would get the same."""


class Http1Client:
    """Connections to one server; those not in use are kept for the next request.

    `timeout` limits the wait for a whole response, and in a stream the silence between two pieces. Without
    `resend` a request goes out once: a poll for many must see that the server closed its connection.
    """

    def __init__(
        self, base_url: str, *, timeout: float, connect_timeout: float, keep: int, resend: bool = True
    ) -> None:
        parts = urlsplit(base_url)
        self._host, self._port = parts.hostname or "", parts.port or 80
        self._origin, self._netloc = f"{parts.scheme}://{parts.netloc}", parts.netloc
        self._timeout, self._connect_timeout = timeout, connect_timeout
        self._keep, self._resend = keep, resend
        self._idle: list[_Http1Connection] = []
        self._scratch = memoryview(bytearray(SCRATCH))  # shared: one loop reads one connection at a time
        self._closed = False

    async def execute(self, request: HttpRequest) -> HttpResponse:
        pieces = self._write(request)
        while self._idle:
            connection = self._idle.pop()
            if not connection.is_open:
                continue
            try:
                return await self._exchange(connection, pieces)
            except StaleConnectionError:
                # The server may have executed it: a second DELETE would find nothing.
                if not self._resend or request.method == "DELETE":
                    raise
        return await self._exchange(await self._connect(), pieces)

    async def stream(self, request: HttpRequest) -> HttpStream:
        pieces = self._write(request)
        return await (await self._connect()).open_stream(pieces, self._timeout)

    def _write(self, request: HttpRequest) -> list[bytes | memoryview]:
        method, url, headers, content = request
        parts = [content] if isinstance(content, bytes) else list(content or ())
        lines = [f"{method} {url.removeprefix(self._origin) or '/'} HTTP/1.1", f"host: {self._netloc}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        if content is not None or method not in ("GET", "DELETE"):
            lines.append(f"content-length: {sum(map(len, parts))}")
        head = "\r\n".join(lines) + "\r\n\r\n"
        if head.count("\n") != len(lines) + 1:
            raise ConnectionError("a header has a line break in it")  # or it would be two headers
        return [head.encode("latin-1", "replace"), *parts]

    async def _exchange(self, connection: _Http1Connection, pieces: list[bytes | memoryview]) -> HttpResponse:
        try:
            response = await connection.exchange(pieces, self._timeout)
        except BaseException as error:
            connection.close()  # half of a response may still arrive
            if isinstance(error, TimeoutError):
                self._close_idle()  # if the network path itself is dead (VPN, sleep), so are they
            raise
        if connection.reusable and len(self._idle) < self._keep and not self._closed:
            self._idle.append(connection)
        else:
            connection.close()
        return response

    async def _connect(self) -> _Http1Connection:
        host, port, limit = self._host, self._port, self._connect_timeout
        connect = asyncio.get_running_loop().create_connection
        try:
            async with asyncio.timeout(limit):
                return (await connect(lambda: _Http1Connection(self._scratch), host, port))[1]
        except TimeoutError:
            raise ConnectionError(f"no connection to {host}:{port} within {limit:g} s") from None

    async def aclose(self) -> None:
        self._closed = True
        self._close_idle()

    def _close_idle(self) -> None:
        while self._idle:
            self._idle.pop().close()


class _Http1Connection(asyncio.BufferedProtocol):
    """One socket and its parser; one exchange at a time.

    The parser calls `on_…`. A long body of known length is received in its final place, past the parser.
    """

    def __init__(self, scratch: memoryview) -> None:
        self._scratch = scratch
        self._socket: asyncio.Transport | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._error: Exception | None = None
        self._place: memoryview | None = None  # the part of a long body that is yet to come
        self._used = self._reused = self._streaming = self._paused = False
        self._has_head = self._until_eof = False
        self._received = 0  # bytes since the last that were of the body
        self._size = self._length = 0  # bytes of the body: that the parser gave, that were announced
        self._timeout = 0.0  # seconds for a response; in a stream, of silence
        self._is_active = False  # is a response expected, or arriving?
        self._chunks: list[bytes | bytearray] = []  # of the body, as they arrived
        self.reusable = False
        self.status = 0
        self.headers: dict[str, str] = {}

    # -- the exchange --------------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        return self._socket is not None and not self._socket.is_closing()

    async def exchange(self, pieces: list[bytes | memoryview], timeout: float) -> HttpResponse:
        await self._send(pieces, timeout, streaming=False)
        body = self._take()
        if encoding := self.headers.pop("content-encoding", ""):
            if encoding not in ("gzip", "zstd", "identity"):
                raise RefusedResponseError("a body in an encoding that was not asked for")
            try:
                body = unpack(body, encoding, MAX_BODY)
            except ValueError as error:
                raise RefusedResponseError(f"a body that cannot be unpacked: {error}") from None
        return HttpResponse(self.status, self.headers, body)

    async def open_stream(self, pieces: list[bytes | memoryview], silence: float) -> HttpStream:
        """Send a request and read the head of the response; the connection itself iterates over the body."""
        try:
            await self._send(pieces, silence, streaming=True)
            if "content-encoding" in self.headers:
                raise RefusedResponseError("a stream in an encoding that was not asked for")
        except BaseException:
            self.close()
            raise
        return HttpStream(self.status, self.headers, self, self.aclose)

    def __aiter__(self) -> _Http1Connection:
        return self

    async def __anext__(self) -> bytes:
        while not self._chunks and self._is_active:
            await self._wait()
        if not (piece := self._take()):
            raise StopAsyncIteration
        return piece

    async def aclose(self) -> None:
        self.close()

    async def _send(self, pieces: list[bytes | memoryview], timeout: float, *, streaming: bool) -> None:
        """Write a request and wait for its response; when `streaming`, for the head of it."""
        if self._socket is None:
            raise StaleConnectionError("the server closed the connection")
        self._reused, self._used = self._used, True
        self._received = self._size = self._length = 0
        self._has_head = self._until_eof = False
        self._timeout, self._streaming, self._is_active, self.reusable = timeout, streaming, True, False
        self._error = self._place = None
        self.status, self.headers, self._chunks = 0, {}, []
        if self._parser is None:
            self._parser = httptools.HttpResponseParser(self)
        self._socket.writelines(pieces)
        await self._wait()

    async def _wait(self) -> None:
        """Wait for what the parser signals next; raise what went wrong instead."""
        if self._error is None:
            loop = asyncio.get_running_loop()
            self._waiter = loop.create_future()
            timer = loop.call_later(self._timeout, self._time_out)
            try:
                await self._waiter
            finally:
                timer.cancel()
                self._waiter = None
        if self._error is not None:
            raise self._error

    def _time_out(self) -> None:
        kind = "word for" if self._streaming else "answer within"
        self._fail(TimeoutError, f"no {kind} {self._timeout:g} s")

    def _take(self) -> bytes:
        """The body as far as it has arrived, and not been taken yet."""
        chunks, self._chunks = self._chunks, []
        if self._paused and self._socket is not None:
            self._paused = False
            self._socket.resume_reading()
        return cast(bytes, chunks[0]) if len(chunks) == 1 else b"".join(chunks)

    def close(self) -> None:
        if self._socket is not None:
            self._socket.abort()  # the rest of a cancelled request is not sent

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _fail(self, kind: type[OSError], message: str) -> None:
        if self._error is None:
            self._error = kind(message)
        self._wake()

    def _complete(self) -> None:
        self._is_active = False
        self._wake()

    # -- the socket ----------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._socket = cast(asyncio.Transport, transport)  # uvloop's is not declared as one

    def connection_lost(self, exc: Exception | None) -> None:
        self._socket = self._parser = None
        if not self._is_active:
            return
        if self._until_eof and exc is None:
            self._complete()
        elif self._reused and not self._has_head and not self._received:
            self._fail(StaleConnectionError, "the server closed the connection")
        else:
            self._fail(ConnectionResetError, f"the connection broke off: {exc or 'closed by the server'}")

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._place or self._scratch

    def buffer_updated(self, nbytes: int) -> None:
        if not self._is_active or self._parser is None:
            return self.close()  # bytes that belong to no request
        if self._place is not None:
            self._place = self._place[nbytes:]
            if not self._place:
                self._go_on_in_place()
            return
        self._received, size = self._received + nbytes, self._size
        try:
            self._parser.feed_data(self._scratch[:nbytes])
        except httptools.HttpParserError as error:
            if isinstance(error.__context__, RefusedResponseError):
                return self._fail(RefusedResponseError, str(error.__context__))
            return self._fail(ConnectionError, f"not an HTTP answer: {error.__context__ or error}")
        if self._size > size:
            self._received = 0
        if self._received > MAX_HEAD:
            self._fail(ConnectionError, "not an HTTP answer: its head, or what follows its body, has no end")
        elif self._streaming:
            self._signal_stream()
        elif not self._is_active:
            self._wake()  # only now: bytes after the body would have been an error
        elif self._has_head:
            self._receive_in_place()

    def _signal_stream(self) -> None:
        if self._has_head:
            self._wake()
        if sum(map(len, self._chunks)) > STREAM_BUFFER and self._socket is not None and not self._paused:
            self._paused = True
            self._socket.pause_reading()

    def _receive_in_place(self) -> None:
        """Receive the rest of a long body where it will stay."""
        if self._length - self._size > SCRATCH:
            body = bytearray(min(self._length, TRUSTED))
            body[: self._size] = b"".join(self._chunks)
            self._place = memoryview(body)[self._size :]
            self._chunks = [body]

    def _go_on_in_place(self) -> None:
        """The place is full: the body is whole, or gets as much again as has arrived."""
        arrived = len(self._chunks[0])
        if arrived == self._length:
            self._place = self._parser = None  # which has not seen the body, and expects it
            return self._complete()
        body = bytearray(min(self._length, 2 * arrived))  # the old one, still lent to the socket, cannot grow
        body[:arrived] = self._chunks[0]
        self._place, self._chunks = memoryview(body)[arrived:], [body]

    # -- the parser ----------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if not self._is_active:
            raise ValueError("its body is longer than it said")

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1").strip()

    def on_headers_complete(self) -> None:
        assert self._parser is not None
        self.status = self._parser.get_status_code()
        if self.status < 200:  # "continue" and the like: the response is yet to come
            self.headers.clear()
            return
        self._has_head = True
        self.reusable = self._parser.should_keep_alive()
        framed = "content-length" in self.headers or "transfer-encoding" in self.headers
        self._length = int(self.headers.get("content-length", 0))  # chunked bodies have none
        self._check_size(self._length)
        self._until_eof = not framed and self.status not in (204, 304)

    def on_body(self, body: bytes) -> None:
        self._size += len(body)
        if self._streaming:
            self._chunks.append(body)
            return
        self._check_size(self._size)
        if not self._chunks:
            self._chunks.append(body)
            return
        if not isinstance(whole := self._chunks[0], bytearray):  # many small chunks would be many objects
            self._chunks[0] = whole = bytearray(whole)
        whole += body

    def _check_size(self, size: int) -> None:
        if size > MAX_BODY and not self._streaming:
            raise RefusedResponseError(f"a body of {size} bytes or more; at most {MAX_BODY} are accepted")

    def on_message_complete(self) -> None:
        if self._has_head:
            self._is_active = False

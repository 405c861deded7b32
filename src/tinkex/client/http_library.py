"""TLS, HTTP/2 and proxies through pyqwest. No other module imports it.

Raises OSError and LIBRARY_ERRORS, and nothing else. Knows nothing of Tinker.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from functools import partial

import pyqwest

from tinkex.client.http1 import Body, HttpRequest, HttpResponse, HttpStream

LIBRARY_ERRORS = (pyqwest.ReadError, pyqwest.WriteError, pyqwest.RemoteProtocolError)
SILENCE = 5.0  # seconds without any response, after which a connection may be dead


class LibraryClient:
    """Connections of one kind of traffic.

    `streaming`: `timeout` limits the silence between two pieces of a response, not the whole of it.
    """

    def __init__(self, timeout: float, connect_timeout: float, keep: int, *, streaming: bool) -> None:
        self._patience = min(SILENCE, 0.9 * timeout)
        self._last_response = 0.0  # by time.monotonic()
        limit = _limit(timeout)
        self._make = partial(
            pyqwest.HTTPTransport,
            timeout=None if streaming else limit,
            read_timeout=limit if streaming else None,
            connect_timeout=_limit(connect_timeout),
            pool_max_idle_per_host=keep,
            tls_include_system_certs=True,
            follow_redirects=False,
            enable_otel=False,
        )
        self._transport: pyqwest.HTTPTransport | None = None  # created on first use, and after a dead one

    @contextmanager
    def _in_use(self) -> Generator[pyqwest.HTTPTransport]:
        """The connections; dropped after a request that timed out while nothing else was answered.

        With HTTP/2 every later request would go over the same dead connection. Requests under way keep it.
        """
        if self._transport is None:
            self._transport = self._make()
            self._client = pyqwest.Client(self._transport)
        transport, sent = self._transport, time.monotonic()
        try:
            yield transport
            self._last_response = time.monotonic()
        except (TimeoutError, asyncio.CancelledError):  # our own timeout, or the caller's
            waited = time.monotonic() - sent
            if waited > self._patience and self._last_response < sent and transport is self._transport:
                self._transport = None
            raise

    async def execute(self, request: HttpRequest) -> HttpResponse:
        """Send one request and read its response."""
        method, url, headers, content = request
        with self._in_use():
            response = await self._client.execute(method, url, headers, _whole(content))
        return HttpResponse(response.status, response.headers, response.content)  # type: ignore[arg-type]

    async def stream(self, request: HttpRequest) -> HttpStream:
        """Send one request; the response, once its head is there."""
        method, url, headers, content = request
        sent = pyqwest.Request(method, url, pyqwest.Headers(headers), _whole(content))  # type: ignore[arg-type]
        with self._in_use() as transport:
            return LibraryStream(await transport.execute(sent))

    async def aclose(self) -> None:
        if self._transport is not None:
            await self._transport.aclose()


def _whole(content: Body | None) -> bytes | None:
    return content if content is None or isinstance(content, bytes) else b"".join(content)


def _limit(seconds: float) -> float | None:
    """As pyqwest takes it: None instead of infinity."""
    return None if math.isinf(seconds) else seconds


class LibraryStream:
    """A response that is read while it arrives."""

    def __init__(self, response: pyqwest.Response) -> None:
        self.status: int = response.status
        self.headers: Mapping[str, str] = response.headers  # type: ignore[assignment]
        self._response, self._pieces = response, aiter(response.content)

    def __aiter__(self) -> LibraryStream:
        return self

    async def __anext__(self) -> bytes:
        return bytes(await anext(self._pieces))

    async def aclose(self) -> None:
        await self._response.aclose()

"""The HTTP library: TLS, HTTP/2 and proxies, for all that http1.py does not do. Only this module knows it.

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

from tinkex.client.http1 import Body

LIBRARY_ERRORS = (pyqwest.ReadError, pyqwest.WriteError, pyqwest.RemoteProtocolError)
SILENCE = 5.0  # seconds without an answer to anything, before a connection may be thought dead


class Library:
    """The HTTP library: TLS, HTTP/2, proxies."""

    def __init__(self, timeout: float, connect_timeout: float, keep: int, *, endless: bool) -> None:
        self._patience = min(SILENCE, 0.9 * timeout)
        self._heard = 0.0  # when anything came, by time.monotonic()
        limit = _limit(timeout)
        self._make = partial(
            pyqwest.HTTPTransport,
            timeout=None if endless else limit,
            read_timeout=limit if endless else None,  # of a stream: only silence is limited
            connect_timeout=_limit(connect_timeout),
            pool_max_idle_per_host=keep,
            tls_include_system_certs=True,
            follow_redirects=False,
            enable_otel=False,
        )
        self._transport: pyqwest.HTTPTransport | None = None  # made when it is needed, and after it was left

    @contextmanager
    def _in_use(self) -> Generator[pyqwest.HTTPTransport]:
        """The connections, which are left when nothing comes over them any more.

        With HTTP/2 all else would go the same way. What is under way there may still come to its end.
        """
        if self._transport is None:
            self._transport = self._make()
            self._client = pyqwest.Client(self._transport)
        transport, sent = self._transport, time.monotonic()
        try:
            yield transport
            self._heard = time.monotonic()
        except (TimeoutError, asyncio.CancelledError):  # our own time, or the caller's
            waited = time.monotonic() - sent
            if waited > self._patience and self._heard < sent and transport is self._transport:
                self._transport = None
            raise

    async def execute(
        self, method: str, url: str, headers: dict[str, str], content: Body | None
    ) -> tuple[int, Mapping[str, str], bytes]:
        body = b"".join(content) if isinstance(content, list) else content
        with self._in_use():
            response = await self._client.execute(method, url, headers, body)  # type: ignore[arg-type]
        return response.status, response.headers, response.content  # type: ignore[return-value]

    async def stream(
        self, method: str, url: str, headers: dict[str, str], content: Body | None
    ) -> LibraryStream:
        body = b"".join(content) if isinstance(content, list) else content
        request = pyqwest.Request(method, url, pyqwest.Headers(headers), body)  # type: ignore[arg-type]
        with self._in_use() as transport:
            return LibraryStream(await transport.execute(request))

    async def aclose(self) -> None:
        if self._transport is not None:
            await self._transport.aclose()


def _limit(seconds: float) -> float | None:
    """As the library says it, which knows no infinity."""
    return None if math.isinf(seconds) else seconds


class LibraryStream:
    """An answer of the HTTP library, whose body is still coming."""

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

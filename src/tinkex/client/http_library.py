"""The HTTP library: TLS, HTTP/2 and proxies, for all that http1.py does not do. Only this module knows it.

Raises OSError and LIBRARY_ERRORS, and nothing else. Knows nothing of Tinker.
"""

from __future__ import annotations

from collections.abc import Mapping

import pyqwest

from tinkex.client.http1 import Body

LIBRARY_ERRORS = (pyqwest.ReadError, pyqwest.WriteError, pyqwest.RemoteProtocolError)


class Library:
    """The HTTP library: TLS, HTTP/2, proxies."""

    def __init__(self, timeout: float, connect_timeout: float, keep: int, *, endless: bool) -> None:
        self._transport = pyqwest.HTTPTransport(
            timeout=None if endless else timeout,
            read_timeout=timeout if endless else None,  # of a stream: only silence is limited
            connect_timeout=connect_timeout,
            pool_max_idle_per_host=keep,
            tls_include_system_certs=True,
            follow_redirects=False,
            enable_otel=False,
        )
        self._client = pyqwest.Client(self._transport)

    async def execute(
        self, method: str, url: str, headers: dict[str, str], content: Body | None
    ) -> tuple[int, Mapping[str, str], bytes]:
        body = b"".join(content) if isinstance(content, list) else content
        response = await self._client.execute(method, url, headers, body)  # type: ignore[arg-type]
        return response.status, response.headers, response.content  # type: ignore[return-value]

    async def stream(
        self, method: str, url: str, headers: dict[str, str], content: Body | None
    ) -> LibraryStream:
        body = b"".join(content) if isinstance(content, list) else content
        request = pyqwest.Request(method, url, pyqwest.Headers(headers), body)  # type: ignore[arg-type]
        return LibraryStream(await self._transport.execute(request))

    async def aclose(self) -> None:
        await self._transport.aclose()


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

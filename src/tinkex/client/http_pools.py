"""One server's HTTP connections, a pool for each kind of traffic.

Promises: plain HTTP goes over our own HTTP/1.1 (http1.py), everything else through the HTTP library
(http_library.py); redirects are followed, and only the server itself is sent a key. Raises OSError and
LIBRARY_ERRORS, and nothing else. Knows nothing of permits, of retries, or of what bodies mean.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Protocol
from urllib.parse import urljoin, urlsplit

from tinkex.client.http1 import Http1Client, HttpRequest, HttpResponse, HttpStream
from tinkex.client.http_library import LibraryClient
from tinkex.config import Timeouts
from tinkex.wire import ops
from tinkex.wire.ops import Op, Pool

log = logging.getLogger("tinkex")

MAX_REDIRECTS = 5
MAX_ERROR_BODY = 1 << 20  # bytes of an error that are read where a stream was expected

# Statuses besides 2xx that are a reply, not a failure: "not yet", and "it is over there".
ALSO_OK: dict[str, tuple[int, ...]] = {
    ops.RETRIEVE_FUTURE.name: (408,),
    ops.GET_CHECKPOINT_ARCHIVE_URL.name: (301, 302, 303, 307, 308),
}


def capacities(https: bool) -> dict[Pool, int]:
    """Requests in flight for each kind of traffic.

    Over plain HTTP each one is a socket; over TLS they usually share one HTTP/2 connection.
    """
    return {
        Pool.SESSION: 2,
        Pool.TRAIN: 8,
        Pool.SAMPLE: 400 if https else 8,
        Pool.RETRIEVE: 2000 if https else 256,
        Pool.STREAM: 2000 if https else 256,
        Pool.POLL: 64,  # one for each sampler that waits: with fewer, the rest wait for another's result
        Pool.REST: 32 if https else 8,
        Pool.TELEMETRY: 1,
    }


class HttpClient(Protocol):
    """What sends requests of one kind of traffic: `Http1Client` or `LibraryClient`."""

    async def execute(self, request: HttpRequest) -> HttpResponse: ...

    async def stream(self, request: HttpRequest) -> HttpStream: ...

    async def aclose(self) -> None: ...


class HttpPools:
    """One server's connections; `keep` says how many of each kind stay open while idle."""

    def __init__(self, base_url: str, timeouts: Timeouts, keep: Mapping[Pool, int], *, plain: bool) -> None:
        self.plain = plain  # is there neither TLS nor a proxy on the way to the server?
        self._base_url, self._timeouts, self._keep = base_url, timeouts, keep
        self._clients: dict[tuple[Pool, bool], HttpClient] = {}

    async def send(self, op: Op[Any, Any], pool: Pool, request: HttpRequest) -> HttpResponse:
        """Send one request, follow redirects, and read the response."""
        response = await self._send(op, pool, request)
        for _ in range(MAX_REDIRECTS):
            if is_reply(op, response.status) or response.status >= 400:
                break
            url = urljoin(request.url, response.headers.get("location", request.url))
            request = request._replace(url=url)
            if not _same_origin(url, self._base_url):
                request = request._replace(headers={})  # a signed URL elsewhere must not see our key
            if response.status not in (307, 308):
                request = request._replace(method="GET", content=None)
            response = await self._send(op, pool, request)
        if note := response.headers.get("x-deprecation-note"):
            severe = response.headers.get("x-deprecation-level") == "error"
            log.log(logging.ERROR if severe else logging.WARNING, "%s: %s", self._base_url, note)
        return response

    async def _send(self, op: Op[Any, Any], pool: Pool, request: HttpRequest) -> HttpResponse:
        client = self.client(pool, request.url)
        if op is not ops.STREAM_SAMPLE:
            return await client.execute(request)
        stream = await client.stream(request)
        if stream.status < 300:
            return HttpResponse(stream.status, stream.headers, b"", stream)
        body = bytearray()
        try:
            async for piece in stream:
                body += piece
                if len(body) > MAX_ERROR_BODY:
                    break
        finally:
            await stream.aclose()
        return HttpResponse(stream.status, stream.headers, bytes(body))

    def client(self, pool: Pool, url: str) -> HttpClient:
        """What sends this kind of traffic to `url`."""
        plain = self.plain and url.startswith(self._base_url + "/")
        if (client := self._clients.get((pool, plain))) is None:
            client = self._clients[pool, plain] = self._make(pool, plain)
        return client

    def _make(self, pool: Pool, plain: bool) -> HttpClient:
        times, keep = self._timeouts, self._keep[pool]
        timeout = times.long_poll if pool in (Pool.RETRIEVE, Pool.POLL) else times.request
        if plain:
            return Http1Client(
                self._base_url, timeout=timeout, connect_timeout=times.connect, keep=keep,
                resend=pool is not Pool.POLL,
            )  # fmt: skip
        return LibraryClient(timeout, times.connect, keep, streaming=pool is Pool.STREAM)

    async def aclose(self) -> None:
        clients, self._clients = self._clients, {}
        for client in clients.values():
            await client.aclose()


def is_reply(op: Op[Any, Any], status: int) -> bool:
    """Is this status what was asked for, and neither an error nor a redirect to follow?"""
    return status < 300 or status in ALSO_OK.get(op.name, ())


def _same_origin(url: str, base_url: str) -> bool:
    """Same host and port, and no less encrypted."""
    to, base = urlsplit(url), urlsplit(base_url)
    return to.netloc.lower() == base.netloc and to.scheme in (base.scheme, "https")

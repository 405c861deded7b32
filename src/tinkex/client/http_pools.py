"""One server's HTTP connections, a pool for each kind of traffic.

Promises: plain HTTP goes over our own HTTP/1.1 (http1.py); TLS, HTTP/2 and proxies through pyqwest, which no
other module imports; redirects over HTTP are followed, and only the server itself is sent a key or a body;
a whole response has a limit. Raises OSError and LIBRARY_ERRORS, and nothing else. Knows nothing of permits,
of retries, or of what bodies mean.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from functools import partial
from urllib.parse import urljoin, urlsplit

import pyqwest

from tinkex.client.http1 import (
    MAX_BODY,
    Http1Client,
    HttpRequest,
    HttpResponse,
    HttpStream,
    RefusedResponseError,
)
from tinkex.client.redaction import redacted, secrets_of
from tinkex.client.transport import AnyOp
from tinkex.config import Timeouts
from tinkex.wire import ops
from tinkex.wire.ops import Pool

log = logging.getLogger("tinkex")

LIBRARY_ERRORS = (pyqwest.ReadError, pyqwest.WriteError, pyqwest.RemoteProtocolError)
SILENCE = 5.0  # seconds without any response, after which a connection may be dead
MAX_REDIRECTS = 5
MAX_ERROR_BODY = 1 << 20  # bytes of an error that are read where a stream was expected

# Statuses other than 2xx that are a reply and no failure: "not ready yet", and a redirect.
ALSO_OK: dict[str, tuple[int, ...]] = {
    ops.RETRIEVE_FUTURE.name: (408,),
    ops.GET_CHECKPOINT_ARCHIVE_URL.name: (301, 302, 303, 307, 308),
}


def capacities(https: bool) -> dict[Pool, int]:
    """Requests in flight: each is a socket over plain HTTP; over TLS they usually share a connection."""
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


class HttpPools:
    """One server's connections; `keep` says how many of each kind stay open while idle."""

    def __init__(self, base_url: str, timeouts: Timeouts, keep: Mapping[Pool, int], *, plain: bool) -> None:
        self._plain = plain  # plain TCP: no TLS and no proxy
        self._base_url, self._timeouts, self._keep = base_url, timeouts, keep
        self._clients: dict[tuple[Pool, bool], Http1Client | LibraryClient] = {}

    async def send(self, op: AnyOp, pool: Pool, request: HttpRequest) -> HttpResponse:
        """Send one request, follow redirects, and read the response."""
        secrets = request.headers
        response = await self._send(op, pool, request)
        for _ in range(MAX_REDIRECTS):
            if is_reply(op, response.status) or response.status >= 400:
                break
            request = self._redirected(request, response, secrets_of(secrets))
            response = await self._send(op, pool, request)
        if note := response.headers.get("x-deprecation-note"):
            severe = response.headers.get("x-deprecation-level") == "error"
            note = redacted(note, secrets_of(secrets))
            log.log(logging.ERROR if severe else logging.WARNING, "%s: %s", self._base_url, note)
        return response

    def _redirected(self, request: HttpRequest, response: HttpResponse, secrets: list[str]) -> HttpRequest:
        """The request that a redirect asks for; RefusedResponseError if it must not be sent."""
        if response.status not in (307, 308):
            request = request._replace(method="GET", content=None)
        try:
            url = urljoin(request.url, response.headers.get("location", request.url))
            to = urlsplit(url)
            valid = to.scheme in ("http", "https") and bool(to.hostname) and (to.port or 1) > 0
        except ValueError:
            valid, url = False, ""
        if not valid or not (url.isascii() and url.isprintable()) or " " in url:
            raise RefusedResponseError("a redirect to something else than an http or https URL")
        if _same_origin(url, self._base_url):
            return request._replace(url=url)
        if request.content is not None or request.method != "GET":
            raise RefusedResponseError("a redirect of a request with a body to another host")
        if redacted(url, secrets) != url:
            raise RefusedResponseError("a redirect that would send the key to another host")
        return request._replace(url=url, headers={})  # a signed URL elsewhere must not see our key

    async def _send(self, op: AnyOp, pool: Pool, request: HttpRequest) -> HttpResponse:
        client = self.client(pool, request.url)
        if op is not ops.STREAM_SAMPLE:
            return await client.execute(request)
        stream = await client.stream(request)
        if stream.status < 300:
            return HttpResponse(stream.status, stream.headers, b"", stream)
        body = bytearray()
        try:
            async for piece in stream.pieces:
                body += piece
                if len(body) > MAX_ERROR_BODY:
                    break
        finally:
            await stream.aclose()
        return HttpResponse(stream.status, stream.headers, bytes(body))

    def client(self, pool: Pool, url: str) -> Http1Client | LibraryClient:
        plain = self._plain and url.startswith(self._base_url + "/")
        if (client := self._clients.get((pool, plain))) is None:
            client = self._clients[pool, plain] = self._make(pool, plain)
        return client

    def _make(self, pool: Pool, plain: bool) -> Http1Client | LibraryClient:
        times, keep = self._timeouts, self._keep[pool]
        timeout = times.long_poll if pool in (Pool.RETRIEVE, Pool.POLL) else times.request
        if not plain:
            return LibraryClient(timeout, times.connect, keep, streaming=pool is Pool.STREAM)
        return Http1Client(
            self._base_url, timeout=timeout, connect_timeout=times.connect, keep=keep,
            resend=pool is not Pool.POLL,
        )  # fmt: skip

    async def aclose(self) -> None:
        clients, self._clients = self._clients, {}
        for client in clients.values():
            await client.aclose()


def is_reply(op: AnyOp, status: int) -> bool:
    """Is this status what was asked for, and neither an error nor a redirect to follow?"""
    return status < 300 or status in ALSO_OK.get(op.name, ())


def _same_origin(url: str, base_url: str) -> bool:
    """Same host and port, and no less encrypted."""
    to, base = urlsplit(url), urlsplit(base_url)
    return to.netloc.lower() == base.netloc and to.scheme in (base.scheme, "https")


class LibraryClient:
    """Connections of one kind of traffic, by pyqwest.

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
        body = bytearray()
        with self._in_use() as transport:
            async with await transport.execute(_library_request(request)) as response:
                async for piece in response.content:
                    body += piece
                    if len(body) > MAX_BODY:
                        raise RefusedResponseError(f"a body of more than {MAX_BODY} bytes")
        return HttpResponse(response.status, response.headers, bytes(body))  # type: ignore[arg-type]

    async def stream(self, request: HttpRequest) -> HttpStream:
        with self._in_use() as transport:
            response = await transport.execute(_library_request(request))
        return HttpStream(response.status, response.headers, aiter(response.content), response.aclose)  # type: ignore[arg-type]

    async def aclose(self) -> None:
        if self._transport is not None:
            await self._transport.aclose()


def _library_request(request: HttpRequest) -> pyqwest.Request:
    method, url, headers, content = request
    body = content if content is None or isinstance(content, bytes) else b"".join(content)
    return pyqwest.Request(method, url, pyqwest.Headers(headers), body)  # type: ignore[arg-type]


def _limit(seconds: float) -> float | None:
    """As pyqwest takes it: None instead of infinity."""
    return None if math.isinf(seconds) else seconds

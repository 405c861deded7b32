"""Connections to one server, kept apart by kind of traffic: where a request becomes bytes on a socket.

Promises: plain HTTP goes straight over TCP (http1.py), all else through the HTTP library (http_library.py);
redirects are followed, and nobody but the server itself is shown a key. Raises OSError and LIBRARY_ERRORS,
and nothing else. Knows nothing of turns, of retries, or of what bodies say.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol
from urllib.parse import urljoin, urlsplit

from tinkex.client.http1 import Body, Http1
from tinkex.client.http_library import Library
from tinkex.client.http_stream import Streamed, open_plain
from tinkex.config import Timeouts
from tinkex.wire import ops
from tinkex.wire.ops import Op, Pool

log = logging.getLogger("tinkex")

MAX_REDIRECTS = 5
MAX_REFUSAL = 1 << 20  # bytes of a refusal that are read where a stream was expected

# Statuses beside 2xx that are an answer, not a failure: "not yet", and "it is over there".
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
        Pool.POLL: 64,  # one for each sampler that waits: fewer, and the rest wait for another's result
        Pool.REST: 32 if https else 8,
        Pool.TELEMETRY: 1,
    }


class Answer(NamedTuple):
    """One HTTP response; of a stream, the body is still to come."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    stream: Streamed | None = None


class Http(Protocol):
    """Something that sends requests: Http1 for plain HTTP, the HTTP library for all else."""

    async def execute(
        self, method: str, url: str, headers: dict[str, str], content: Body | None
    ) -> tuple[int, Mapping[str, str], bytes]: ...

    async def aclose(self) -> None: ...


class HttpPools:
    """One server's connections; `keep` says how many of each kind may stay open while nobody uses them."""

    def __init__(self, base_url: str, timeouts: Timeouts, keep: Mapping[Pool, int], *, plain: bool) -> None:
        self.plain = plain  # is there neither TLS nor a proxy on the way to the server?
        self._base_url, self._timeouts, self._keep = base_url, timeouts, keep
        self._clients: dict[tuple[Pool, bool], Http] = {}

    async def send(
        self, op: Op[Any, Any], pool: Pool, url: str, headers: dict[str, str], content: Body | None
    ) -> Answer:
        """Send one request, follow where it is sent on to, and read the answer."""
        method = op.method
        answer = await self._exchange(op, pool, method, url, headers, content)
        for _ in range(MAX_REDIRECTS):
            if is_answer(op, answer.status) or answer.status >= 400:
                break
            url = urljoin(url, answer.headers.get("location", url))
            if not _same_place(url, self._base_url):
                headers = {}  # a signed URL elsewhere: never show it our key
            if answer.status not in (307, 308):
                method, content = "GET", None
            answer = await self._exchange(op, pool, method, url, headers, content)
        if note := answer.headers.get("x-deprecation-note"):
            severe = answer.headers.get("x-deprecation-level") == "error"
            log.log(logging.ERROR if severe else logging.WARNING, "%s: %s", self._base_url, note)
        return answer

    async def _exchange(
        self,
        op: Op[Any, Any],
        pool: Pool,
        method: str,
        url: str,
        headers: dict[str, str],
        content: Body | None,
    ) -> Answer:
        if op is not ops.STREAM_SAMPLE:
            return Answer(*await self.http(pool, url).execute(method, url, headers, content))
        stream = await self._open_stream(pool, method, url, headers, content)
        if stream.status < 300:
            return Answer(stream.status, stream.headers, b"", stream)
        body = bytearray()
        try:
            async for piece in stream:
                body += piece
                if len(body) > MAX_REFUSAL:
                    break
        finally:
            await stream.aclose()
        return Answer(stream.status, stream.headers, bytes(body))

    async def _open_stream(
        self, pool: Pool, method: str, url: str, headers: dict[str, str], content: Body | None
    ) -> Streamed:
        if self._is_plain(url):
            silence, connect = self._timeouts.request, self._timeouts.connect
            return await open_plain(method, url, headers, content, silence=silence, connect=connect)
        library = self.http(pool, url)
        assert isinstance(library, Library)
        return await library.stream(method, url, headers, content)

    def http(self, pool: Pool, url: str) -> Http:
        """What sends requests of this kind of traffic to `url`."""
        plain = self._is_plain(url)
        if (http := self._clients.get((pool, plain))) is None:
            http = self._clients[pool, plain] = self._make(pool, plain)
        return http

    def _make(self, pool: Pool, plain: bool) -> Http:
        times, keep = self._timeouts, self._keep[pool]
        timeout = times.long_poll if pool in (Pool.RETRIEVE, Pool.POLL) else times.request
        if plain:
            return Http1(
                self._base_url, timeout=timeout, connect_timeout=times.connect, keep=keep,
                resend=pool is not Pool.POLL,
            )  # fmt: skip
        return Library(timeout, times.connect, keep, endless=pool is Pool.STREAM)

    def _is_plain(self, url: str) -> bool:
        return self.plain and url.startswith(self._base_url + "/")

    async def aclose(self) -> None:
        clients, self._clients = self._clients, {}
        for http in clients.values():
            await http.aclose()


def is_answer(op: Op[Any, Any], status: int) -> bool:
    """Is this status what was asked for, and neither a refusal nor a word about where to ask?"""
    return status < 300 or status in ALSO_OK.get(op.name, ())


def _same_place(url: str, base_url: str) -> bool:
    """May `url` see what `base_url` may: the same host and port, and no less encrypted?"""
    to, base = urlsplit(url), urlsplit(base_url)
    return to.netloc.lower() == base.netloc and to.scheme in (base.scheme, "https")

"""Hop 2: how a call leaves this process. `Transport` is the seam; `HttpTransport` is HTTP behind it.

Promises: one call, one answer or one typed error; retries by the one policy; connections kept apart by
traffic kind with hard caps; big bodies built and parsed off the event loop. The only module that knows
the HTTP library, which does TLS; plain HTTP is http1.py's. Knows nothing of sessions, runs or futures.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
import uuid
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol
from urllib.parse import urljoin, urlsplit

import pyqwest

from tinkex._version import __version__
from tinkex.client.auth import Credential, JwtCredential
from tinkex.client.http1 import Body, Http1
from tinkex.client.limits import Gate, shared_rate_limit
from tinkex.client.loop import off_loop
from tinkex.client.retry import Attempt, RetryConfig, RetryPolicy, retryable
from tinkex.config import Timeouts, is_loopback
from tinkex.errors import (
    APIConnectionError,
    APIError,
    APIResponseValidationError,
    APITimeoutError,
    ClientClosedError,
    CredentialError,
    InvalidInputError,
    Request,
    Response,
    status_error,
)
from tinkex.types.config import ClientConfigResponse
from tinkex.wire import codec, ops
from tinkex.wire.ops import Op, Pool

log = logging.getLogger("tinkex")

BIG_BODY = 128 * 1024  # bytes from which encoding or decoding leaves the loop
MAX_REDIRECTS = 5
LOST_NOTICE = 10.0  # seconds of silence from a server that did answer, before it is said
CLOSED = "this client was closed; make a new ServiceClient"
JSON_ONLY = (400, 415, 422, 500)  # how servers that only speak JSON refuse a protobuf body

AnyOp = Op[Any, Any]

# Statuses beside 2xx that are an answer, not a failure: "not yet", and "it is over there".
ALSO_OK: dict[str, tuple[int, ...]] = {
    ops.RETRIEVE_FUTURE.name: (408,),
    ops.GET_CHECKPOINT_ARCHIVE_URL.name: (301, 302, 303, 307, 308),
}


class Transport(Protocol):
    """Where a client's calls go: an HTTP server, or a service in this process."""

    base_url: str  # "" for a service in this process

    async def call(
        self,
        op: AnyOp,
        request: Any,
        *,
        awaiting: AnyOp | None = None,
        ready: bool = False,
        method: str = "",
        retry: RetryConfig | None = None,
    ) -> Any:
        """Do one operation.

        For retrieve_future: `awaiting` is the operation whose result is asked for, and `ready` says that the
        result is known to be there. `method` is the public method behind the call, for servers that count.
        `retry` is the caller's own word on retries.
        """
        ...

    async def aclose(self) -> None: ...


class Http(Protocol):
    """Something that sends requests: Http1 for plain HTTP, the HTTP library for all else."""

    async def execute(
        self, method: str, url: str, headers: dict[str, str], content: Body | None
    ) -> tuple[int, Mapping[str, str], bytes]: ...

    async def aclose(self) -> None: ...


class Answer(NamedTuple):
    """One HTTP response."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class _Call(NamedTuple):
    """One call, however often it is sent."""

    op: AnyOp
    request: Any
    awaiting: AnyOp | None
    pool: Pool
    method: str
    idempotency_key: str
    retry: RetryConfig | None


class _Failed(Exception):
    """One try that failed: what the policy needs to know, and the error it would be."""

    def __init__(self, attempt: Attempt, error: APIError) -> None:
        self.attempt, self.error = attempt, error


def _caps(https: bool) -> dict[Pool, int]:
    """Requests in flight for each kind of traffic.

    Over plain HTTP each one is a socket; over TLS they usually share one HTTP/2 connection.
    """
    return {
        Pool.SESSION: 2,
        Pool.TRAIN: 8,
        Pool.SAMPLE: 400 if https else 8,
        Pool.RETRIEVE: 2000 if https else 256,
        Pool.POLL: 64 if https else 4,
        Pool.REST: 32 if https else 8,
        Pool.TELEMETRY: 1,
    }


class HttpTransport:
    """A Tinker server over HTTP."""

    def __init__(
        self,
        base_url: str,
        credential: Credential,
        *,
        headers: Mapping[str, str] | None = None,
        policy: RetryPolicy | None = None,
        timeouts: Timeouts | None = None,
        direct: bool = True,
    ) -> None:
        self.base_url = base_url
        self.credential = credential
        self.timeouts = timeouts or Timeouts()
        self.policy = policy or RetryPolicy(
            connect_budget=self.timeouts.unreachable, lost_budget=self.timeouts.lost
        )
        https = base_url.startswith("https")
        # Without TLS or a proxy in between, a request costs a third.
        self._plain = not https and (direct or is_loopback(base_url))
        self._gates = {pool: Gate(cap) for pool, cap in _caps(https).items()}
        self._clients: dict[tuple[Pool, bool], Http] = {}
        self._rate = shared_rate_limit(base_url, credential.identity)
        self._headers = {"user-agent": f"tinkex/{__version__}", **(headers or {})}
        process = uuid.uuid4().hex  # a counter behind one uuid is cheaper than a uuid for each request
        self._ids = (f"{process}-{n}" for n in itertools.count())
        self._compress = False
        self._reached = False
        self._silent_since: float | None = None
        self._speaks_proto: bool | None = None  # None: not known yet
        self._calling: set[asyncio.Task[Any] | None] = set()
        self._closed = False

    def honour(self, config: ClientConfigResponse) -> None:
        """Take over what the server's settings say about how to talk to it."""
        self._compress = config.proto_compress_fwdbwd
        self.policy = self.policy.with_billing(config.billing_exception_max_pause_duration_sec)
        if config.pjwt_auth_enabled and not isinstance(self.credential, JwtCredential):
            self.credential = JwtCredential(self.credential, self.call)

    async def aclose(self) -> None:
        """End every call under way with ClientClosedError, and let go of the connections."""
        self._closed = True
        for task in self._calling:
            if task is not None:
                task.cancel()
        clients, self._clients = self._clients, {}
        for http in clients.values():
            await http.aclose()

    # -- the call ----------------------------------------------------------------------------------------

    async def call(
        self,
        op: AnyOp,
        request: Any,
        *,
        awaiting: AnyOp | None = None,
        ready: bool = False,
        method: str = "",
        retry: RetryConfig | None = None,
    ) -> Any:
        if self._closed:
            raise ClientClosedError(CLOSED)
        pool = Pool.SAMPLE if ready else op.pool  # a result that is there needs no long poll
        # One key for one logical operation: however often it is sent, it is done once.
        key = "" if op.method == "GET" else next(self._ids)
        task = asyncio.current_task()
        self._calling.add(task)
        try:
            return await self._call(_Call(op, request, awaiting, pool, method, key, retry))
        except asyncio.CancelledError:
            if self._closed:
                raise ClientClosedError(CLOSED) from None
            raise
        finally:
            self._calling.discard(task)

    async def _call(self, call: _Call) -> Any:
        op = call.op
        started, tries = 0.0, 0
        error: APIError | None = None
        while True:
            try:
                answer = await self._try(call, proto=self._speaks_proto is not False)
                break
            except _Failed as failed:
                attempt, error = failed.attempt, failed.error
            except (CredentialError, InvalidInputError) as refusal:
                raise error or refusal from None  # a refusal promises that nothing was ever sent
            if self._may_want_json(op, attempt, tries) and (reply := await self._in_json(call)) is not None:
                return reply
            tries += 1
            now = time.monotonic()
            if tries == 1:
                started = now - attempt.took  # waiting for a turn to send is not held against the server
            elapsed = now - started
            policy = self.policy if call.retry is None else self.policy.tuned(call.retry)
            delay = policy.decide(attempt, tries, elapsed, patient=op.pool is Pool.SAMPLE)
            if delay is None or not op.retry:
                raise _with_history(error, tries, elapsed)
            self._say_if_lost(attempt)
            if op is ops.SAMPLE and attempt.status in (402, 429):
                self._rate.pause(delay)
                if attempt.status == 429:
                    started = now + delay  # queueing is no failure: what comes after it has its whole time
            else:
                await asyncio.sleep(delay)
        if op is ops.FORWARD_BACKWARD and self._speaks_proto is None:
            self._speaks_proto = True
        return await self._decode(call, answer)

    async def _try(self, call: _Call, *, proto: bool) -> Answer:
        """Send once; anything but a usable answer is `_Failed`."""
        op, url = call.op, self.base_url + call.op.path
        probing = await self._rate.turn() if op is ops.SAMPLE else False
        began = time.monotonic()
        try:
            # Before the gate: fetching a token is a call too, and must not wait for those that wait for it.
            api_key = await self._api_key(op)
            async with self._gates[call.pool].hold():
                # Encoded only now: thousands may wait for the gate, and none shall hold its body meanwhile.
                encoded = await self._encode(op, call.request, proto=proto)
                url = self.base_url + encoded.path + (f"?{encoded.query}" if encoded.query else "")
                began = time.monotonic()
                answer = await self._send(
                    call, url, self._headers_of(call, encoded, api_key), encoded.content
                )
        except (OSError, pyqwest.ReadError, pyqwest.WriteError, pyqwest.RemoteProtocolError) as cause:
            attempt = Attempt(cause=cause, reached=self._reached, took=time.monotonic() - began)
            raise _Failed(attempt, _connection_error(op, url, cause)) from None
        finally:
            if probing:
                self._rate.finish_probe()
        self._reached, self._silent_since = True, None
        if op is ops.SAMPLE and answer.status not in (402, 429):
            self._rate.succeeded()
        if answer.status < 300 or answer.status in ALSO_OK.get(op.name, ()):
            return answer
        attempt = Attempt(
            answer.status, answer.headers, empty_body=not answer.body, took=time.monotonic() - began
        )
        raise _Failed(attempt, _status_error(op, url, answer))

    def _may_want_json(self, op: AnyOp, failed: Attempt, earlier: int) -> bool:
        """Was a first protobuf body refused as by a server that only speaks JSON?

        What may pass (a 500, a proxy's 400) must have come twice.
        """
        if op is not ops.FORWARD_BACKWARD or self._speaks_proto is not None or failed.status not in JSON_ONLY:
            return False
        return earlier == 1 if retryable(failed.status, failed.empty_body) else earlier == 0

    async def _in_json(self, call: _Call) -> Any:
        """The reply to the same request in JSON; None if it was not about protobuf after all."""
        try:
            answer = await self._try(call, proto=False)
        except _Failed:
            return None
        self._speaks_proto = False
        log.info("%s takes no protobuf; sending JSON from now on", self.base_url)
        return await self._decode(call, answer)

    def _say_if_lost(self, attempt: Attempt) -> None:
        if attempt.status or not self._reached:
            return
        now = time.monotonic()
        if self._silent_since is None:
            self._silent_since = now
        elif now - self._silent_since >= LOST_NOTICE:
            self._silent_since = now
            log.warning(
                "lost contact with %s (%s); still trying, for up to %g s in all",
                self.base_url, attempt.cause, self.policy.lost_budget,
            )  # fmt: skip

    # -- sending -----------------------------------------------------------------------------------------

    async def _send(self, call: _Call, url: str, headers: dict[str, str], content: Body | None) -> Answer:
        method = call.op.method
        answer = Answer(*await self._http(call.pool, url).execute(method, url, headers, content))
        for _ in range(MAX_REDIRECTS):
            if not 300 <= answer.status < 400 or answer.status in ALSO_OK.get(call.op.name, ()):
                break
            url = urljoin(url, answer.headers.get("location", url))
            if not _same_place(url, self.base_url):
                headers = {}  # a signed URL elsewhere: never show it our key
            if answer.status not in (307, 308):
                method, content = "GET", None
            answer = Answer(*await self._http(call.pool, url).execute(method, url, headers, content))
        if note := answer.headers.get("x-deprecation-note"):
            severe = answer.headers.get("x-deprecation-level") == "error"
            log.log(logging.ERROR if severe else logging.WARNING, "%s: %s", self.base_url, note)
        return answer

    async def _api_key(self, op: AnyOp) -> str:
        credential = self.credential
        if op is ops.GET_AUTH_TOKEN and isinstance(credential, JwtCredential):
            credential = credential.inner  # a JWT is asked for with the key itself
        return credential.current() or await credential.token()

    def _http(self, pool: Pool, url: str) -> Http:
        """What sends requests of this kind of traffic to `url`."""
        plain = self._plain and url.startswith(self.base_url + "/")
        if (http := self._clients.get((pool, plain))) is None:
            polls = pool in (Pool.RETRIEVE, Pool.POLL)
            timeout = self.timeouts.long_poll if polls else self.timeouts.request
            keep = self._gates[pool].capacity
            if plain:
                http = Http1(self.base_url, timeout=timeout, connect_timeout=self.timeouts.connect, keep=keep)
            else:
                http = _Library(timeout, self.timeouts.connect, keep)
            self._clients[pool, plain] = http
        return http

    def _headers_of(self, call: _Call, encoded: codec.Encoded, api_key: str) -> dict[str, str]:
        headers = {**self._headers, **encoded.headers, "x-api-key": api_key}
        if call.idempotency_key:
            headers["x-idempotency-key"] = call.idempotency_key
        if call.op is ops.SAMPLE:
            headers["x-tinker-sampling-backpressure"] = "1"
        if call.awaiting is not None:
            headers["x-tinker-request-type"] = call.awaiting.request_type
            headers["accept"] = "application/x-protobuf, application/json"
        if call.method:
            headers["x-sdk-version"], headers["x-sdk-method"] = __version__, call.method
        return headers

    # -- bodies ------------------------------------------------------------------------------------------

    async def _encode(self, op: AnyOp, request: Any, *, proto: bool) -> codec.Encoded:
        compress = self._compress and op is ops.FORWARD_BACKWARD
        if codec.request_size(request, BIG_BODY) < BIG_BODY:
            return codec.encode_request(op, request, proto=proto, compress=compress)
        return await off_loop(lambda: codec.encode_request(op, request, proto=proto, compress=compress))

    async def _decode(self, call: _Call, answer: Answer) -> Any:
        op, awaiting = call.op, call.awaiting

        def decode() -> Any:
            if awaiting is not None:
                return codec.decode_result(awaiting, answer.status, answer.headers, answer.body)
            return codec.decode_reply(op, answer.status, answer.headers, answer.body)

        try:
            return decode() if len(answer.body) < BIG_BODY else await off_loop(decode)
        except InvalidInputError as error:
            url = self.base_url + op.path
            response = Response(answer.status, answer.headers, "", Request(op.method, url))
            raise APIResponseValidationError(
                response, answer.body[:4096], f"{op.method} {url}: the answer cannot be read: {error}"
            ) from error


class _Library:
    """The HTTP library: TLS, HTTP/2, proxies."""

    def __init__(self, timeout: float, connect_timeout: float, keep: int) -> None:
        self._transport = pyqwest.HTTPTransport(
            timeout=timeout,
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

    async def aclose(self) -> None:
        await self._transport.aclose()


def _same_place(url: str, base_url: str) -> bool:
    """May `url` see what `base_url` may: the same host and port, and no less encrypted?"""
    to, base = urlsplit(url), urlsplit(base_url)
    return to.netloc.lower() == base.netloc and to.scheme in (base.scheme, "https")


def _connection_error(op: AnyOp, url: str, cause: BaseException) -> APIConnectionError:
    request = Request(op.method, url)
    if isinstance(cause, TimeoutError) and not isinstance(cause, ConnectionError):
        return APITimeoutError(request, f"no answer from {op.method} {url} in time")
    return APIConnectionError(request, f"no connection to {url}: {_root_cause(cause)}")


def _root_cause(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return str(error) or type(error).__name__


def _status_error(op: AnyOp, url: str, answer: Answer) -> APIError:
    text, body = codec.decode_error(answer.status, answer.headers, answer.body)
    response = Response(
        answer.status, dict(answer.headers.items()), answer.body[:4096].decode(errors="replace"),
        Request(op.method, url),
    )  # fmt: skip
    return status_error(f"{answer.status} from {op.method} {url}: {text}", response, body)


def _with_history(error: APIError, tries: int, elapsed: float) -> APIError:
    """The error, saying how often and how long it was tried."""
    if tries > 1:
        error.message = f"{error.message} ({tries} attempts in {elapsed:.1f} s)"
        error.args = (error.message,)
    return error

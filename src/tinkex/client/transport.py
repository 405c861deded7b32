"""Hop 2: how a call leaves this process. `Transport` is the seam; `HttpTransport` is HTTP behind it.

Promises: one call, one answer or one typed error; retries by the one policy; connections kept apart by
traffic kind with hard caps, which runs and samplers share fairly; big bodies built and parsed off the event
loop. How bytes travel is http1.py's (plain HTTP) and http_library.py's (all else). Knows nothing of sessions,
runs or futures.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, aclosing, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple, Protocol
from urllib.parse import urljoin, urlsplit

from tinkex import tracing
from tinkex._version import __version__
from tinkex.client.auth import CommandCredential, Credential, JwtCredential
from tinkex.client.event_stream import read_events
from tinkex.client.failures import answer_error, connection_error, root_cause, with_history
from tinkex.client.http1 import Body, Http1
from tinkex.client.http_library import LIBRARY_ERRORS, Library
from tinkex.client.http_stream import Streamed, open_plain
from tinkex.client.limits import Gate, Hold, shared_host, shared_rate_limit
from tinkex.client.loop import off_loop
from tinkex.client.queue_state import Listener
from tinkex.client.retry import Attempt, RetryConfig, RetryPolicy, retryable
from tinkex.config import Timeouts, is_loopback
from tinkex.errors import (
    APIError,
    APIResponseValidationError,
    ClientClosedError,
    CredentialError,
    InvalidInputError,
    Request,
    Response,
)
from tinkex.types.config import ClientConfigResponse
from tinkex.types.sampling import SampleEvent, SampleRequest
from tinkex.types.training import ForwardBackwardRequest
from tinkex.wire import codec, ops
from tinkex.wire.ops import Op, Pool

log = logging.getLogger("tinkex")

# From where on encoding or decoding leaves the loop, as it may take more than a millisecond. Arrays are not
# copied into or out of protobuf: there it is their number that counts.
BIG_BODY = 128 * 1024  # bytes of JSON
BIG_PROTO = 1024 * 1024  # bytes of an answer
MANY_DATUMS = 128  # of a pass
MAX_REDIRECTS = 5
LOST_NOTICE = 10.0  # seconds of silence from a server that did answer, before it is said
CLOSED = "this client was closed; make a new ServiceClient"
PROBE_TIMEOUT = 10.0  # seconds for one look at whether a host is back
MAX_REFUSAL = 1 << 20  # bytes of a refusal that are read where a stream was expected
JSON_ONLY = (400, 415, 422, 500)  # how servers that only speak JSON refuse a protobuf body

AnyOp = Op[Any, Any]
LIMITED = (ops.SAMPLE, ops.STREAM_SAMPLE)  # what the rate limit of sampling applies to
PAUSES = {402: "paused_billing", 429: "paused_rate_limit"}  # statuses that mean "later", as queue states

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
        owner: str = "",
        observe: Listener | None = None,
        place: Hold | None = None,
    ) -> Any:
        """Do one operation.

        For retrieve_future: `awaiting` is the operation whose result is asked for, and `ready` says that the
        result is known to be there. `method` is the public method behind the call, for servers that count.
        `retry` is the caller's own word on retries, `owner` the run or sampler that shares limits with the
        others, and `observe` is told when the server puts the call off, and when it takes it again. `place`
        is where the caller waited for its turn: left as soon as the request waits for nothing but an answer.
        """
        ...

    def stream(
        self, request: SampleRequest, *, retry: RetryConfig | None = None, observe: Listener | None = None
    ) -> AsyncGenerator[SampleEvent, None]:
        """A sample's events; closing the generator stops the work. StreamBrokenError if they break off."""
        ...

    async def aclose(self) -> None: ...


class Http(Protocol):
    """Something that sends requests: Http1 for plain HTTP, the HTTP library for all else."""

    async def execute(
        self, method: str, url: str, headers: dict[str, str], content: Body | None
    ) -> tuple[int, Mapping[str, str], bytes]: ...

    async def aclose(self) -> None: ...


class Answer(NamedTuple):
    """One HTTP response; of a stream, the body is still to come."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    stream: Streamed | None = None


class _Call(NamedTuple):
    """One call, however often it is sent."""

    op: AnyOp
    request: Any
    awaiting: AnyOp | None
    pool: Pool
    method: str
    idempotency_key: str
    retry: RetryConfig | None
    owner: str
    observe: Listener | None
    place: Hold | None = None

    def leave_place(self) -> None:
        if self.place is not None:
            self.place.leave()


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
        Pool.STREAM: 2000 if https else 256,
        Pool.POLL: 64 if https else 4,
        Pool.REST: 32 if https else 8,
        Pool.TELEMETRY: 1,
    }


def _body_limits(config: ClientConfigResponse) -> dict[str, int]:
    """Bytes of requests on their way to the server at a time, for the operations that have big ones."""
    return {
        ops.SAMPLE.name: config.sample_dispatch_bytes_semaphore_size,
        ops.FORWARD_BACKWARD.name: config.fwdbwd_dispatch_bytes_semaphore_size,
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
        self._bodies = {op: Gate(size) for op, size in _body_limits(ClientConfigResponse()).items()}
        self._bodies[ops.STREAM_SAMPLE.name] = self._bodies[ops.SAMPLE.name]
        self._clients: dict[tuple[Pool, bool], Http] = {}
        self._rate = shared_rate_limit(base_url, credential.identity)
        self._host = shared_host(base_url)
        self._headers = {"user-agent": f"tinkex/{__version__}", **(headers or {})}
        process = uuid.uuid4().hex  # a counter behind one uuid is cheaper than a uuid for each request
        self._ids = (f"{process}-{n}" for n in itertools.count())
        self._compress = False
        self._no_retries = False  # of samples: the server wants none
        self._reached = False
        self._silent_since: float | None = None
        self._speaks_proto: bool | None = None  # None: not known yet
        self._calling: set[asyncio.Task[Any] | None] = set()
        self._closed = False

    @property
    def at_once(self) -> int:
        """How many samples can be sent at a time."""
        return self._gates[Pool.SAMPLE].capacity

    def honour(self, config: ClientConfigResponse, command: str | None = None) -> None:
        """Take over what the server's settings say about how to talk to it.

        `command` prints a token, if there is one: a server may prefer that to a key that it was not told of.
        """
        self._compress = config.proto_compress_fwdbwd
        self._no_retries = config.sample_no_retries
        self.policy = self.policy.with_billing(config.billing_exception_max_pause_duration_sec)
        for op, size in _body_limits(config).items():
            self._bodies[op].resize(size)
        if config.pjwt_auth_enabled and not isinstance(self.credential, JwtCredential):
            inner = self.credential
            preferred = config.credential_default_source == "credential_cmd"
            if preferred and command and inner.source != "argument":
                inner = CommandCredential(command)
            self.credential = JwtCredential(inner, self.call)

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
        owner: str = "",
        observe: Listener | None = None,
        place: Hold | None = None,
    ) -> Any:
        pool = Pool.SAMPLE if ready else op.pool  # a result that is there needs no long poll
        # One key for one logical operation: however often it is sent, it is done once.
        key = "" if op.method == "GET" else next(self._ids)
        owner = owner or _owner_of(request) or key  # what is nobody's in particular takes a turn of its own
        call = _Call(op, request, awaiting, pool, method, key, retry, owner, observe, place)
        with self._under_way(), tracing.span(f"transport {op.name}", kind="client", within=True):
            return await self._decode(call, await self._answered(call))

    @contextmanager
    def _under_way(self) -> Iterator[None]:
        """A call, or a stream: ended by `aclose`, with the error that says so."""
        if self._closed:
            raise ClientClosedError(CLOSED)
        task = asyncio.current_task()
        self._calling.add(task)
        try:
            yield
        except asyncio.CancelledError:
            if self._closed:
                raise ClientClosedError(CLOSED) from None
            raise
        finally:
            self._calling.discard(task)

    async def _answered(self, call: _Call) -> Answer:
        """Send until there is an answer, by the one policy."""
        op = call.op
        started: float | None = None
        tries = 0
        error: APIError | None = None
        breaker = self._host.breaker
        while True:
            if breaker.is_open:
                call.leave_place()  # whoever waits for the host does so together, and from now on
                started = time.monotonic() if started is None else started
                await self._host_back(call, started, tries, error)
            try:
                answer = await self._try(call, proto=self._speaks_proto is not False)
                break
            except _Failed as failed:
                attempt, error = failed.attempt, failed.error
            except (CredentialError, InvalidInputError) as refusal:
                raise error or refusal from None  # a refusal promises that nothing was ever sent
            if self._may_want_json(op, attempt, tries) and (json := await self._in_json(call)) is not None:
                return json
            tries += 1
            now = time.monotonic()
            if started is None:
                started = now - attempt.took  # waiting for a turn to send is not held against the server
            elapsed = now - started
            patient = op.pool in (Pool.SAMPLE, Pool.STREAM)
            delay = self._policy(call).decide(attempt, tries, elapsed, patient=patient)
            if call.observe is not None:
                call.observe(PAUSES.get(attempt.status, "active"), error.message)
            if delay is None or not op.retry:
                raise with_history(error, tries, elapsed)
            if not attempt.status:
                self._say_if_lost(attempt.cause)
            if op in LIMITED and attempt.status in PAUSES:
                self._rate.pause(delay)
                if attempt.status == 429:
                    started = now + delay  # queueing is no failure: what comes after it has its whole time
            elif attempt.status or not breaker.is_open:
                await asyncio.sleep(delay)
        if op is ops.FORWARD_BACKWARD and self._speaks_proto is None:
            self._speaks_proto = True
        if call.observe is not None:
            call.observe("active", None)
        return answer

    def _policy(self, call: _Call) -> RetryPolicy:
        policy = self.policy if call.retry is None else self.policy.tuned(call.retry)
        return replace(policy, enabled=False) if self._no_retries and call.op is ops.SAMPLE else policy

    async def _host_back(self, call: _Call, started: float, tries: int, error: APIError | None) -> None:
        """Wait, with everybody else, until the host can be reached; raise once this call's time is up."""
        elapsed, breaker, policy = time.monotonic() - started, self._host.breaker, self._policy(call)
        patience = policy.patience(self._reached, elapsed) if call.op.retry else 0.0
        if await self._host.reachable(patience, self._probe, policy.probe_delay):
            return
        cause = breaker.cause or ConnectionError("it does not answer")
        error = error or connection_error(call.op, self.base_url + call.op.path, cause)
        raise with_history(error, tries, time.monotonic() - started, breaker.state())

    async def _probe(self) -> None:
        """Does the host answer, whatever it says? OSError if not."""
        if self._closed:
            raise ClientClosedError(CLOSED)
        url = self.base_url + ops.GET_HEALTH.path
        try:
            async with asyncio.timeout(min(PROBE_TIMEOUT, self.timeouts.request)):
                await self._http(Pool.SESSION, url).execute("GET", url, dict(self._headers), None)
        except LIBRARY_ERRORS as cause:
            raise ConnectionError(root_cause(cause)) from cause
        except OSError:
            self._say_if_lost(self._host.breaker.cause)
            raise

    # -- streams -----------------------------------------------------------------------------------------

    async def stream(
        self, request: SampleRequest, *, retry: RetryConfig | None = None, observe: Listener | None = None
    ) -> AsyncGenerator[SampleEvent, None]:
        op = ops.STREAM_SAMPLE
        call = _Call(op, request, None, op.pool, "", next(self._ids), retry, _owner_of(request), observe)
        with self._under_way():
            async with self._gates[op.pool].hold(owner=call.owner):
                with tracing.span(f"transport {op.name}", kind="client", within=True):
                    streamed = (await self._answered(call)).stream
                assert streamed is not None, "what is no stream is no answer to stream_sample"
                try:
                    async with aclosing(read_events(streamed, self.base_url + op.path)) as events:
                        async for event in events:
                            yield event
                finally:
                    await streamed.aclose()

    async def _try(self, call: _Call, *, proto: bool) -> Answer:
        """Send once; anything but a usable answer is `_Failed`."""
        op, url = call.op, self.base_url + call.op.path
        probing = await self._rate.turn() if op in LIMITED else False
        began = time.monotonic()
        try:
            # Before the gate: fetching a token is a call too, and must not wait for those that wait for it.
            api_key = await self._api_key(call)
            # A stream holds its place for as long as it lasts: see `stream`.
            gate = self._gates[call.pool].hold(owner=call.owner)
            async with self._room(call), nullcontext() if op is ops.STREAM_SAMPLE else gate:
                call.leave_place()
                # Encoded only now: thousands may wait for the gate, and none shall hold its body meanwhile.
                encoded = await self._encode(op, call.request, proto=proto)
                url = self.base_url + encoded.path + (f"?{encoded.query}" if encoded.query else "")
                began = time.monotonic()
                answer = await self._send(
                    call, url, self._headers_of(call, encoded, api_key), encoded.content
                )
        except (OSError, *LIBRARY_ERRORS) as cause:
            if not isinstance(cause, TimeoutError) or isinstance(cause, ConnectionError):
                self._host.failed(cause)  # who is merely slow is there
            attempt = Attempt(cause=cause, reached=self._reached, took=time.monotonic() - began)
            raise _Failed(attempt, connection_error(op, url, cause)) from None
        finally:
            if probing:
                self._rate.finish_probe()
        self._reached, self._silent_since = True, None
        self._host.answered()
        if op in LIMITED and answer.status not in (402, 429):
            self._rate.succeeded()
        if answer.status < 300 or answer.status in ALSO_OK.get(op.name, ()):
            return answer
        attempt = Attempt(
            answer.status, answer.headers, empty_body=not answer.body, took=time.monotonic() - began
        )
        raise _Failed(attempt, answer_error(op, url, answer.status, answer.headers, answer.body))

    def _room(self, call: _Call) -> AbstractAsyncContextManager[object]:
        """Room for a request's body among those being sent; one larger than all of it goes alone."""
        if (gate := self._bodies.get(call.op.name)) is None:
            return nullcontext()
        return gate.hold(codec.request_size(call.request), call.owner)

    def _may_want_json(self, op: AnyOp, failed: Attempt, earlier: int) -> bool:
        """Was a first protobuf body refused as by a server that only speaks JSON?

        What may pass (a 500, a proxy's 400) must have come twice.
        """
        if op is not ops.FORWARD_BACKWARD or self._speaks_proto is not None or failed.status not in JSON_ONLY:
            return False
        return earlier == 1 if retryable(failed.status, failed.empty_body) else earlier == 0

    async def _in_json(self, call: _Call) -> Answer | None:
        """The answer to the same request in JSON; None if it was not about protobuf after all."""
        try:
            answer = await self._try(call, proto=False)
        except _Failed:
            return None
        self._speaks_proto = False
        log.info("%s takes no protobuf; sending JSON from now on", self.base_url)
        return answer

    def _say_if_lost(self, cause: BaseException | None) -> None:
        if not self._reached:
            return
        now = time.monotonic()
        if self._silent_since is None:
            self._silent_since = now
        elif now - self._silent_since >= LOST_NOTICE:
            self._silent_since = now
            log.warning(
                "lost contact with %s (%s); still trying, for up to %g s in all",
                self.base_url, cause, self.policy.lost_budget,
            )  # fmt: skip

    # -- sending -----------------------------------------------------------------------------------------

    async def _send(self, call: _Call, url: str, headers: dict[str, str], content: Body | None) -> Answer:
        method = call.op.method
        answer = await self._exchange(call, method, url, headers, content)
        for _ in range(MAX_REDIRECTS):
            if not 300 <= answer.status < 400 or answer.status in ALSO_OK.get(call.op.name, ()):
                break
            url = urljoin(url, answer.headers.get("location", url))
            if not _same_place(url, self.base_url):
                headers = {}  # a signed URL elsewhere: never show it our key
            if answer.status not in (307, 308):
                method, content = "GET", None
            answer = await self._exchange(call, method, url, headers, content)
        if note := answer.headers.get("x-deprecation-note"):
            severe = answer.headers.get("x-deprecation-level") == "error"
            log.log(logging.ERROR if severe else logging.WARNING, "%s: %s", self.base_url, note)
        return answer

    async def _exchange(
        self, call: _Call, method: str, url: str, headers: dict[str, str], content: Body | None
    ) -> Answer:
        if call.op is not ops.STREAM_SAMPLE:
            return Answer(*await self._http(call.pool, url).execute(method, url, headers, content))
        silence, connect = self.timeouts.request, self.timeouts.connect
        if self._is_plain(url):
            stream = await open_plain(method, url, headers, content, silence=silence, connect=connect)
        else:
            http = self._http(call.pool, url)
            assert isinstance(http, Library)
            stream = await http.stream(method, url, headers, content)
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

    async def _api_key(self, call: _Call) -> str:
        credential = self.credential
        if call.op is ops.GET_AUTH_TOKEN and isinstance(credential, JwtCredential):
            credential = credential.inner  # a JWT is asked for with the key itself
        if api_key := credential.current():
            return api_key
        call.leave_place()
        return await credential.token()

    def _is_plain(self, url: str) -> bool:
        return self._plain and url.startswith(self.base_url + "/")

    def _http(self, pool: Pool, url: str) -> Http:
        """What sends requests of this kind of traffic to `url`."""
        plain = self._is_plain(url)
        if (http := self._clients.get((pool, plain))) is None:
            polls = pool in (Pool.RETRIEVE, Pool.POLL)
            timeout = self.timeouts.long_poll if polls else self.timeouts.request
            keep = self._gates[pool].capacity
            if plain:
                http = Http1(self.base_url, timeout=timeout, connect_timeout=self.timeouts.connect, keep=keep)
            else:
                http = Library(timeout, self.timeouts.connect, keep, endless=pool is Pool.STREAM)
            self._clients[pool, plain] = http
        return http

    def _headers_of(self, call: _Call, encoded: codec.Encoded, api_key: str) -> dict[str, str]:
        headers = {"x-api-key": api_key, **self._headers, **encoded.headers}
        if call.idempotency_key:
            headers["x-idempotency-key"] = call.idempotency_key
        if call.op is ops.STREAM_SAMPLE:
            headers["accept"] = "text/event-stream"
        if call.op in LIMITED:
            headers["x-tinker-sampling-backpressure"] = "1"
        if call.awaiting is not None:
            headers["x-tinker-request-type"] = call.awaiting.request_type
            headers["accept"] = "application/x-protobuf, application/json"
        if call.method:
            headers["x-sdk-version"], headers["x-sdk-method"] = __version__, call.method
        tracing.inject(headers)
        return headers

    # -- bodies ------------------------------------------------------------------------------------------

    async def _encode(self, op: AnyOp, request: Any, *, proto: bool) -> codec.Encoded:
        compress = self._compress and op is ops.FORWARD_BACKWARD
        if proto and not compress and isinstance(request, ForwardBackwardRequest):
            quick = len(request.forward_backward_input.data) <= MANY_DATUMS
        else:
            quick = codec.request_size(request, BIG_BODY) < BIG_BODY
        if quick:
            return codec.encode_request(op, request, proto=proto, compress=compress)
        return await off_loop(lambda: codec.encode_request(op, request, proto=proto, compress=compress))

    async def _decode(self, call: _Call, answer: Answer) -> Any:
        op, awaiting = call.op, call.awaiting

        def decode() -> Any:
            if awaiting is not None:
                return codec.decode_result(awaiting, answer.status, answer.headers, answer.body)
            return codec.decode_reply(op, answer.status, answer.headers, answer.body)

        try:
            big = BIG_PROTO if codec.PROTO in answer.headers.get("content-type", "") else BIG_BODY
            return decode() if len(answer.body) < big else await off_loop(decode)
        except InvalidInputError as error:
            url = self.base_url + op.path
            response = Response(answer.status, answer.headers, "", Request(op.method, url))
            raise APIResponseValidationError(
                response, answer.body[:4096], f"{op.method} {url}: the answer cannot be read: {error}"
            ) from error


def _owner_of(request: Any) -> str:
    """Whose request it is, for sharing limits: a sampler's, a run's, or nobody's in particular."""
    return getattr(request, "sampling_session_id", None) or getattr(request, "model_id", None) or ""


def _same_place(url: str, base_url: str) -> bool:
    """May `url` see what `base_url` may: the same host and port, and no less encrypted?"""
    to, base = urlsplit(url), urlsplit(base_url)
    return to.netloc.lower() == base.netloc and to.scheme in (base.scheme, "https")

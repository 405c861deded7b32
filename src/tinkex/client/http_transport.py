"""`HttpTransport`: calls to a Tinker server over HTTP.

Promises: one call, one answer or one typed error; retries by the one policy (retry.py); so many calls under
way for each kind of traffic, which runs and samplers share fairly. What a call looks like as HTTP is
http_call.py's, and how bytes travel http_pools.py's. Knows nothing of sessions, runs or futures.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Generator, Mapping
from contextlib import AbstractAsyncContextManager, aclosing, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

from tinkex import tracing
from tinkex._version import __version__
from tinkex.client.credentials import CommandCredential, Credential, JwtCredential
from tinkex.client.http1 import HttpResponse
from tinkex.client.http_call import (
    SAMPLES,
    Call,
    Pace,
    answer_error,
    connection_error,
    decode,
    encode,
    headers_of,
    owner_of,
    root_cause,
    with_history,
)
from tinkex.client.http_library import LIBRARY_ERRORS
from tinkex.client.http_pools import HttpPools, capacities, is_reply
from tinkex.client.limits import FairLimiter, shared_host, shared_rate_limit
from tinkex.client.retry import Attempt, RetryPolicy, retryable
from tinkex.client.sse import read_events
from tinkex.client.transport import CLOSED, NO_CONTEXT, AnyOp, CallContext
from tinkex.config import Timeouts, is_loopback
from tinkex.errors import (
    APIConnectionError,
    APIError,
    ClientClosedError,
    CredentialError,
    InvalidInputError,
    NotFoundError,
)
from tinkex.types.config import ClientConfigRequest, ClientConfigResponse
from tinkex.types.sampling import SampleEvent, SampleRequest
from tinkex.wire import codec, ops
from tinkex.wire.ops import Pool

log = logging.getLogger("tinkex")

LOST_NOTICE = 10.0  # seconds of silence from a server that did answer, before it is said
PROBE_TIMEOUT = 10.0  # seconds for one look at whether a host is back
JSON_ONLY = (400, 415, 422, 500)  # how servers that only speak JSON refuse a protobuf body
IMPATIENT = (504, 524)  # proxies that do not wait for a poll as long as the server holds it
PAUSES = {402: "paused_billing", 429: "paused_rate_limit"}  # statuses that mean "later", as queue states


class _Failed(Exception):
    """One try that failed: what the policy needs to know, and the error it would be."""

    def __init__(self, attempt: Attempt, error: APIError) -> None:
        self.attempt, self.error = attempt, error


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
        timeouts: Timeouts | None = None,
        direct: bool = True,
        retries: bool = True,
        credential_cmd: str | None = None,
    ) -> None:
        self.base_url = base_url
        self.credential: Credential = credential
        self.timeouts = timeouts or Timeouts()
        self.policy = RetryPolicy(
            connect_budget=self.timeouts.unreachable, lost_budget=self.timeouts.lost, enabled=retries
        )
        self._credential_cmd = credential_cmd
        https = base_url.startswith("https")
        caps = capacities(https)
        # Without TLS or a proxy in between, a request costs a third.
        plain = not https and (direct or is_loopback(base_url))
        self._pools = HttpPools(base_url, self.timeouts, caps, plain=plain)
        self._gates = {pool: FairLimiter(cap) for pool, cap in caps.items()}
        self._bodies = {op: FairLimiter(size) for op, size in _body_limits(ClientConfigResponse()).items()}
        self._bodies[ops.STREAM_SAMPLE.name] = self._bodies[ops.SAMPLE.name]
        self._rate = shared_rate_limit(base_url, credential.identity)
        self._host = shared_host(base_url)
        self._pace = Pace()
        self._headers = {"user-agent": f"tinkex/{__version__}", **(headers or {})}
        process = uuid.uuid4().hex  # a counter behind one uuid is cheaper than a uuid for each request
        self._ids = (f"{process}-{n}" for n in itertools.count())
        self._compress = False
        self._no_retries = False  # of samples: the server wants none
        self._reached = False
        self._heard = 0.0  # when the server last answered anything, by time.monotonic()
        self._silent_since: float | None = None
        self._speaks_proto: bool | None = None  # None: not known yet
        self._under_way: set[asyncio.Task[Any]] = set()
        self._closed = False

    async def open(self) -> ClientConfigResponse:
        """Fetch the server's settings and apply those that say how to talk to it."""
        config = ClientConfigResponse()
        try:
            config = await self.call(ops.GET_CLIENT_CONFIG, ClientConfigRequest(sdk_version=__version__))
        except NotFoundError:
            pass  # an older or other server: the defaults describe it
        self._compress = config.proto_compress_fwdbwd
        self._no_retries = config.sample_no_retries
        self.policy = self.policy.with_billing(config.billing_exception_max_pause_duration_sec)
        for op, size in _body_limits(config).items():
            self._bodies[op].resize(size)
        if config.pjwt_auth_enabled and not isinstance(self.credential, JwtCredential):
            inner, command = self.credential, self._credential_cmd
            preferred = config.credential_default_source == "credential_cmd"
            if preferred and command and inner.source != "argument":
                inner = CommandCredential(command)
            self.credential = JwtCredential(inner, self.call)
        return config

    async def aclose(self) -> None:
        """End every call under way with ClientClosedError, and let go of the connections."""
        self._closed = True
        for task in self._under_way:
            task.cancel()
        await self._pools.aclose()

    # -- calls and streams -------------------------------------------------------------------------------

    async def call(self, op: AnyOp, request: Any, context: CallContext = NO_CONTEXT) -> Any:
        pool = Pool.SAMPLE if context.ready else op.pool  # a result that is there needs no long poll
        # One key for one logical operation: however often it is sent, it is done once.
        key = "" if op.method == "GET" else next(self._ids)
        owner = context.owner or owner_of(request) or key  # what is nobody's takes a turn of its own
        call = Call(op, request, context, pool, key, owner)
        with self._until_closed(), tracing.span(f"transport {op.name}", kind="client", within=True):
            return await decode(call, await self._answered(call), self.base_url, self._pace)

    async def stream(
        self, request: SampleRequest, context: CallContext = NO_CONTEXT
    ) -> AsyncGenerator[SampleEvent, None]:
        op = ops.STREAM_SAMPLE
        call = Call(op, request, context, op.pool, next(self._ids), context.owner or owner_of(request))
        with self._until_closed():
            async with self._gates[op.pool].permit(owner=call.owner):
                with tracing.span(f"transport {op.name}", kind="client", within=True):
                    streamed = (await self._answered(call)).stream
                assert streamed is not None, "what is no stream is no answer to stream_sample"
                try:
                    async with aclosing(read_events(streamed, self.base_url + op.path)) as events:
                        async for event in events:
                            yield event
                finally:
                    await streamed.aclose()

    @contextmanager
    def _until_closed(self) -> Generator[None]:
        """A call, or a stream: ended by `aclose`, with the error that says so."""
        if self._closed:
            raise ClientClosedError(CLOSED)
        task = asyncio.current_task()
        assert task is not None
        self._under_way.add(task)
        try:
            yield
        except asyncio.CancelledError:
            if self._closed:
                raise ClientClosedError(CLOSED) from None
            raise
        finally:
            self._under_way.discard(task)

    # -- until there is an answer ------------------------------------------------------------------------

    async def _answered(self, call: Call) -> HttpResponse:
        """Send until there is an answer, by the one policy."""
        while True:
            if self._host.breaker.is_open:
                await self._host_back(call)
            try:
                answer = await self._try(call, proto=self._speaks_proto is not False)
                break
            except _Failed as failed:
                if _is_gone(call, failed.attempt):
                    return HttpResponse(204, {}, b"")
                attempt, call.error = failed.attempt, failed.error
                if attempt.status == 401 and self._may_renew(call):
                    continue
            except (CredentialError, InvalidInputError) as refusal:
                raise call.error or refusal from None  # a refusal promises that nothing was ever sent
            if self._may_want_json(call, attempt) and (json := await self._in_json(call)) is not None:
                return json
            await self._pause(call, attempt, call.error)
        if call.op is ops.FORWARD_BACKWARD and self._speaks_proto is None:
            self._speaks_proto = True
        if call.context.observer is not None:
            call.context.observer("active", None)
        return answer

    async def _pause(self, call: Call, failed: Attempt, error: APIError) -> None:
        """Wait until the next try is due; raise `error` if there shall be none."""
        op, now = call.op, time.monotonic()
        if self._is_held(call, failed):
            call.tries, call.started = 0, now
        call.tries += 1
        if call.started is None:
            call.started = now - failed.took  # waiting for a turn to send is not held against the server
        elapsed = now - call.started
        patient = op.pool in (Pool.SAMPLE, Pool.STREAM)
        delay = self._policy(call).decide(failed, call.tries, elapsed, patient=patient)
        if call.context.observer is not None:
            call.context.observer(PAUSES.get(failed.status, "active"), error.message)
        if delay is None or not op.retry:
            raise with_history(error, call.tries, elapsed)
        if not failed.status:
            self._say_if_lost(failed.cause)
        if op in SAMPLES and failed.status in PAUSES:
            self._rate.pause(delay)
            if failed.status == 429:
                call.started = now + delay  # queueing is no failure: what comes after it has its whole time
        elif failed.status or not self._host.breaker.is_open:
            await asyncio.sleep(delay)

    def _policy(self, call: Call) -> RetryPolicy:
        policy = self.policy if call.context.retry is None else self.policy.tuned(call.context.retry)
        return replace(policy, enabled=False) if self._no_retries and call.op in SAMPLES else policy

    def _is_held(self, call: Call, failed: Attempt) -> bool:
        """Did we, or a proxy, not wait for a poll as long as a server that answers everything else holds it?

        Some hold one for many minutes. It is a "not yet" then, and no sign that anything is wrong.
        """
        timed_out = isinstance(failed.cause, TimeoutError) or failed.status in IMPATIENT
        return call.op is ops.RETRIEVE_FUTURE and timed_out and self._heard > time.monotonic() - failed.took

    def _may_renew(self, call: Call) -> bool:
        """Can it have been the token's fault, so that another is worth a try? Once for each call."""
        if call.renewed or call.op is ops.GET_AUTH_TOKEN or not isinstance(self.credential, JwtCredential):
            return False
        call.renewed = True
        self.credential.refused(call.token)
        return True

    async def _host_back(self, call: Call) -> None:
        """Wait, with everybody else, until the host can be reached; raise once this call's time is up."""
        if call.started is None:
            call.started = time.monotonic()
        breaker, policy = self._host.breaker, self._policy(call)
        elapsed = time.monotonic() - call.started
        patience = policy.patience(self._reached, elapsed) if call.op.retry else 0.0
        if await self._host.reachable(patience, self._probe, policy.probe_delay):
            return
        cause = breaker.cause or ConnectionError("it does not answer")
        error = call.error or connection_error(call.op, self.base_url + call.op.path, cause)
        raise with_history(error, call.tries, time.monotonic() - call.started, breaker.state())

    async def _probe(self) -> None:
        """Does the host answer, whatever it says? OSError if not."""
        if self._closed:
            raise ClientClosedError(CLOSED)
        url = self.base_url + ops.GET_HEALTH.path
        try:
            async with asyncio.timeout(min(PROBE_TIMEOUT, self.timeouts.request)):
                http = self._pools.client(Pool.SESSION, url)
                await http.execute("GET", url, dict(self._headers), None)
        except LIBRARY_ERRORS as cause:
            raise ConnectionError(root_cause(cause)) from cause
        except OSError:
            self._say_if_lost(self._host.breaker.cause)
            raise

    def _may_want_json(self, call: Call, failed: Attempt) -> bool:
        """Was a first protobuf body refused as by a server that only speaks JSON?

        What may pass (a 500, a proxy's 400) must have come twice.
        """
        if self._speaks_proto is not None or call.op is not ops.FORWARD_BACKWARD:
            return False
        tries = 1 if retryable(failed.status, failed.empty_body) else 0
        return failed.status in JSON_ONLY and call.tries == tries

    async def _in_json(self, call: Call) -> HttpResponse | None:
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

    # -- one try -----------------------------------------------------------------------------------------

    async def _try(self, call: Call, *, proto: bool) -> HttpResponse:
        """Send once; anything but a usable answer is `_Failed`."""
        op, url = call.op, self.base_url + call.op.path
        probing = await self._rate.turn() if op in SAMPLES else False
        began = time.monotonic()
        try:
            # Before the turn: fetching a token is a call too, and must not wait for those that wait for it.
            call.token = await self._api_key(call)
            async with self._room(call), self._turn(call):
                # Encoded only now: thousands may wait for their turn, and none shall hold its body meanwhile.
                encoded = await encode(
                    op, call.request, proto=proto, compress=self._compress, pace=self._pace
                )
                url = self.base_url + encoded.path + (f"?{encoded.query}" if encoded.query else "")
                headers = headers_of(call, encoded, self._headers)
                began = time.monotonic()
                answer = await self._pools.send(op, call.pool, url, headers, encoded.content)
        except (OSError, *LIBRARY_ERRORS) as cause:
            if not isinstance(cause, TimeoutError) or isinstance(cause, ConnectionError):
                self._host.failed(cause)  # who is merely slow is there
            attempt = Attempt(cause=cause, reached=self._reached, took=time.monotonic() - began)
            raise _Failed(attempt, connection_error(op, url, cause)) from None
        finally:
            if probing:
                self._rate.finish_probe()
        self._reached, self._silent_since = True, None
        if answer.status < 500:  # else it may be a proxy's
            self._heard = time.monotonic()
        self._host.answered()
        if op in SAMPLES and answer.status not in PAUSES:
            self._rate.succeeded()
        if is_reply(op, answer.status):
            return answer
        attempt = Attempt(
            answer.status, answer.headers, empty_body=not answer.body, took=time.monotonic() - began
        )
        raise _Failed(attempt, answer_error(op, url, answer.status, answer.headers, answer.body))

    async def _api_key(self, call: Call) -> str:
        credential = self.credential
        if call.op is ops.GET_AUTH_TOKEN and isinstance(credential, JwtCredential):
            credential = credential.inner  # a JWT is asked for with the key itself
        if api_key := credential.current():
            return api_key
        return await credential.token()

    def _room(self, call: Call) -> AbstractAsyncContextManager[object]:
        """Room for a request's body among those being sent; one larger than all of it goes alone."""
        if (gate := self._bodies.get(call.op.name)) is None:
            return nullcontext()
        return gate.permit(codec.request_size(call.request), call.owner)

    def _turn(self, call: Call) -> AbstractAsyncContextManager[object]:
        """A place among the calls of one kind; `stream` holds one of its own for as long as it lasts."""
        if call.op is ops.STREAM_SAMPLE:
            return nullcontext()
        return self._gates[call.pool].permit(owner=call.owner)


def _is_gone(call: Call, failed: Attempt) -> bool:
    """Was it deleted by an earlier try, whose answer got lost?"""
    return failed.status == 404 and call.op.method == "DELETE" and isinstance(call.error, APIConnectionError)

"""`HttpTransport`: calls to a Tinker server over HTTP.

Promises: one reply or one typed error for each call; retries by the one policy (retry.py); limits on the
requests in flight for each kind of traffic, shared fairly between runs and samplers. A call waits in one
place, `_attempt`, before it is sent. Knows nothing of sessions, runs or futures.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing, nullcontext
from dataclasses import replace
from typing import Any

from tinkex import tracing
from tinkex._version import __version__
from tinkex.client.credentials import CommandCredential, Credential, JwtCredential
from tinkex.client.http1 import HttpRequest, HttpResponse, RefusedResponseError
from tinkex.client.http_call import (
    SAMPLES,
    Call,
    Pace,
    connection_error,
    decode,
    encode,
    headers_of,
    read_events,
    refused_response,
    response_error,
    root_cause,
    source_of,
    with_history,
)
from tinkex.client.http_pools import LIBRARY_ERRORS, HttpPools, capacities, is_reply
from tinkex.client.limits import shared_host, shared_rate_limit
from tinkex.client.retry import Attempt, RetryPolicy, retryable
from tinkex.client.transport import CLOSED, NO_CONTEXT, AnyOp, CallContext
from tinkex.config import Timeouts, is_loopback
from tinkex.errors import (
    APIConnectionError,
    ClientClosedError,
    CredentialError,
    InvalidInputError,
    NotFoundError,
)
from tinkex.fair_permits import FairPermits, Permit
from tinkex.types.config import ClientConfigRequest, ClientConfigResponse
from tinkex.types.sampling import SampleEvent, SampleRequest
from tinkex.wire import codec, ops
from tinkex.wire.ops import Pool

log = logging.getLogger("tinkex")

LOST_NOTICE = 10.0  # seconds without a response from a server that did respond, before a warning
PROBE_TIMEOUT = 10.0  # seconds for one probe of an unreachable host
JSON_ONLY = (400, 415, 422, 500)  # how servers without protobuf refuse a protobuf body
PROXY_TIMEOUTS = (504, 524)  # from proxies that give up a long poll before the server does
PAUSES = {402: "paused_billing", 429: "paused_rate_limit"}  # statuses that mean "later", as queue states
_UNLIMITED = nullcontext()


def _body_limits(config: ClientConfigResponse) -> dict[str, int]:
    """Bytes of request bodies in flight, for the operations that have large ones."""
    return {
        ops.SAMPLE.name: config.sample_dispatch_bytes_semaphore_size,
        ops.FORWARD_BACKWARD.name: config.fwdbwd_dispatch_bytes_semaphore_size,
    }


class HttpTransport:
    """A Tinker server over HTTP. `direct`: there is no proxy. Implements `Transport`."""

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
        self.credential = self._exchange_credential = credential
        self.timeouts = timeouts or Timeouts()
        self.policy = RetryPolicy(
            connect_budget=self.timeouts.unreachable, lost_budget=self.timeouts.lost, enabled=retries
        )
        self._credential_cmd = credential_cmd
        https = base_url.startswith("https")
        caps = capacities(https)
        plain = not https and (direct or is_loopback(base_url))
        self._pools = HttpPools(base_url, self.timeouts, caps, plain=plain)
        self._permits = {pool: FairPermits(cap) for pool, cap in caps.items()}
        limits = _body_limits(ClientConfigResponse())
        self._body_bytes = {op: FairPermits(size) for op, size in limits.items()}
        self._body_bytes[ops.STREAM_SAMPLE.name] = self._body_bytes[ops.SAMPLE.name]
        self._rate = shared_rate_limit(base_url, credential.identity)
        self._host = shared_host(base_url)
        self._pace = Pace()
        self._headers = {"user-agent": f"tinkex/{__version__}", **(headers or {})}
        process = uuid.uuid4().hex  # a counter behind one uuid is cheaper than a uuid for each request
        self._ids = (f"{process}-{n}" for n in itertools.count())
        self._compress = False
        self._no_retries = False  # of samples: the server's settings forbid them
        self._reached = False  # has the server ever responded?
        self._last_response = 0.0  # by time.monotonic(), below 500
        self._silent_since: float | None = None
        self._speaks_proto: bool | None = None  # None: not known yet
        self._in_flight = _InFlight()

    async def open(self) -> ClientConfigResponse:
        try:
            config = await self.call(ops.GET_CLIENT_CONFIG, ClientConfigRequest(sdk_version=__version__))
        except NotFoundError:  # an older or other server: the defaults describe it
            config = ClientConfigResponse()
        self._compress = config.proto_compress_fwdbwd
        self._no_retries = config.sample_no_retries
        self.policy = replace(self.policy, billing_budget=config.billing_exception_max_pause_duration_sec)
        for op, size in _body_limits(config).items():
            self._body_bytes[op].resize(size)
        if config.pjwt_auth_enabled and self.credential is self._exchange_credential:
            by_command = config.credential_default_source == "credential_cmd"
            if by_command and self._credential_cmd and self.credential.source != "argument":
                self._exchange_credential = CommandCredential(self._credential_cmd)
            self.credential = JwtCredential(self._exchange_credential, self.call)
        return config

    async def aclose(self) -> None:
        """End every call in flight with ClientClosedError, and close the connections."""
        self._in_flight.close()
        await self._pools.aclose()

    # -- calls and streams -------------------------------------------------------------------------------

    async def call(self, op: AnyOp, request: Any, context: CallContext = NO_CONTEXT) -> Any:
        call = self._new_call(op, request, context)
        with self._in_flight, tracing.span(f"transport {op.name}", kind="client", within=True):
            outcome = await self._attempt(call)
            while isinstance(outcome, Attempt):
                outcome = await self._retry(call, outcome)
            return await decode(call, outcome, self.base_url, self._pace)

    async def stream(
        self, request: SampleRequest, context: CallContext = NO_CONTEXT
    ) -> AsyncGenerator[SampleEvent, None]:
        op = ops.STREAM_SAMPLE
        call = self._new_call(op, request, context)
        with self._in_flight:
            async with self._permits[op.pool].permit(call.source):
                with tracing.span(f"transport {op.name}", kind="client", within=True):
                    outcome = await self._attempt(call)
                    while isinstance(outcome, Attempt):
                        outcome = await self._retry(call, outcome)
                assert outcome.stream is not None, "stream_sample replies with a stream"
                try:
                    async with aclosing(read_events(outcome.stream, call, self.base_url)) as events:
                        async for event in events:
                            yield event
                finally:
                    await outcome.stream.aclose()

    def _new_call(self, op: AnyOp, request: Any, context: CallContext) -> Call:
        pool = Pool.SAMPLE if context.ready else op.pool  # a result that is ready needs no long poll
        return Call(op, request, context, pool, context.source or source_of(request))

    # -- one attempt -------------------------------------------------------------------------------------

    async def _attempt(self, call: Call, *, proto: bool = True) -> HttpResponse | Attempt:
        """Wait until the call may be sent, and send it once; returns a reply, or what failed.

        In this order it waits for the host (if its circuit is open), the rate limit, the credential, the
        bytes of its body and a permit. The credential comes before the permit: fetching a token is a call
        too, and must not wait for calls that wait for it.
        """
        if self._host.is_open:
            await self._wait_for_host(call)
        op, path = call.op, call.op.path
        probing = await self._rate.turn() if op in SAMPLES else False
        proto = proto and self._speaks_proto is not False
        began = time.monotonic()
        try:
            is_exchange = op is ops.GET_AUTH_TOKEN  # a JWT is asked for with the key itself
            credential = self._exchange_credential if is_exchange else self.credential
            call.token = credential.current() or await credential.token()
            async with self._room_for_body(call), self._permit(call):
                if not call.idempotency_key and op.method != "GET":  # one for all attempts: it executes once
                    call.idempotency_key = next(self._ids)
                # Encoded only now: of thousands that wait, none holds its body in memory.
                encoded = await encode(call, proto=proto, compress=self._compress, pace=self._pace)
                path = encoded.path + (f"?{encoded.query}" if encoded.query else "")
                call.headers = headers = headers_of(call, encoded, self._headers)
                began = time.monotonic()
                request = HttpRequest(op.method, self.base_url + path, headers, encoded.content)
                response = await self._pools.send(op, call.pool, request)
        except (CredentialError, InvalidInputError) as refusal:
            raise call.error or refusal from None  # a refusal promises that nothing was ever sent
        except RefusedResponseError as cause:
            self._host.answered()
            raise refused_response(call, self.base_url + path, cause) from None
        except (OSError, *LIBRARY_ERRORS) as cause:
            if not isinstance(cause, TimeoutError) or isinstance(cause, ConnectionError):
                self._host.failed(cause)  # a slow host is reachable
            error, took = connection_error(call, self.base_url + path, cause), time.monotonic() - began
            return Attempt(cause=cause, reached=self._reached, took=took, error=error)
        finally:
            if probing:
                self._rate.finish_probe()
        status = response.status
        self._reached, self._silent_since = True, None
        if status < 500:  # else it may be a proxy's
            self._last_response = time.monotonic()
        self._host.answered()
        if op in SAMPLES and status not in PAUSES:
            self._rate.succeeded()
        if is_reply(op, status):
            if op is ops.FORWARD_BACKWARD and self._speaks_proto is None:
                self._speaks_proto = proto
            if call.context.observer is not None:
                call.context.observer("active", None)
            return response
        error, took = response_error(call, self.base_url + path, response), time.monotonic() - began
        return Attempt(status, response.headers, empty_body=not response.body, took=took, error=error)

    def _room_for_body(self, call: Call) -> Permit | nullcontext[None]:
        if (limiter := self._body_bytes.get(call.op.name)) is None:
            return _UNLIMITED
        return limiter.permit(call.source, codec.request_size(call.request))

    def _permit(self, call: Call) -> Permit | nullcontext[None]:
        """A permit of the call's kind of traffic; `stream` holds its own until it ends."""
        if call.op is ops.STREAM_SAMPLE:
            return _UNLIMITED
        return self._permits[call.pool].permit(call.source)

    # -- after a failed attempt --------------------------------------------------------------------------

    async def _retry(self, call: Call, failed: Attempt) -> HttpResponse | Attempt:
        """Send it again, when the one policy says so; raise the error if it says not to."""
        lost, call.error = isinstance(call.error, APIConnectionError), failed.error
        if failed.status == 404 and call.op.method == "DELETE" and lost:
            return HttpResponse(204, {}, b"")  # an earlier attempt deleted it, unnoticed
        if failed.status == 401 and self._may_renew(call):
            return await self._attempt(call)
        if self._may_want_json(call, failed):
            response = await self._attempt(call, proto=False)
            if not isinstance(response, Attempt):  # else it was not about protobuf after all
                log.info("%s takes no protobuf; sending JSON from now on", self.base_url)
                return response
        await self._pause(call, failed)
        return await self._attempt(call)

    async def _pause(self, call: Call, failed: Attempt) -> None:
        """Wait until the next attempt is due; raise the error if there shall be none."""
        op, now, error = call.op, time.monotonic(), failed.error
        assert error is not None
        if self._was_long_poll(call, failed):
            call.tries, call.started = 0, now
        call.tries += 1
        if call.started is None:
            call.started = now - failed.took  # the wait for a permit does not count against the server
        elapsed = now - call.started
        delay = self._policy(call).decide(failed, call.tries, elapsed, patient=op in SAMPLES)
        if call.context.observer is not None:
            call.context.observer(PAUSES.get(failed.status, "active"), error.message)
        if delay is None or not op.retry:
            raise with_history(error, call.tries, elapsed)
        if not failed.status:
            self._warn_if_lost(failed.cause)
        if op in SAMPLES and failed.status in PAUSES:
            self._rate.pause(delay)
            if failed.status == 429:
                call.started = now + delay  # queueing is no failure: the retry budget begins after it
        elif failed.status or not self._host.is_open:
            await asyncio.sleep(delay)

    def _policy(self, call: Call) -> RetryPolicy:
        policy = self.policy if call.context.retry is None else self.policy.tuned(call.context.retry)
        return replace(policy, enabled=False) if self._no_retries and call.op in SAMPLES else policy

    def _was_long_poll(self, call: Call, failed: Attempt) -> bool:
        """Did a long poll outlast our timeout or a proxy's, while the server responds to other calls?"""
        timed_out = isinstance(failed.cause, TimeoutError) or failed.status in PROXY_TIMEOUTS
        is_alive = self._last_response > time.monotonic() - failed.took
        return call.op is ops.RETRIEVE_FUTURE and timed_out and is_alive

    def _may_renew(self, call: Call) -> bool:
        """Is another token worth an attempt? Once for each call."""
        once = not call.renewed and call.op is not ops.GET_AUTH_TOKEN
        call.renewed = True
        return once and self.credential.refused(call.token)

    def _may_want_json(self, call: Call, failed: Attempt) -> bool:
        """Was the first protobuf body refused as by a server that only speaks JSON?"""
        if self._speaks_proto is not None or call.op is not ops.FORWARD_BACKWARD:
            return False
        may_pass = retryable(failed.status, failed.empty_body)  # a 500, a proxy's 400: it must come twice
        return failed.status in JSON_ONLY and call.tries == may_pass

    # -- a host that cannot be reached -------------------------------------------------------------------

    async def _wait_for_host(self, call: Call) -> None:
        """Wait, with all other callers, until the host can be reached; raise when this call's time is up."""
        if call.started is None:
            call.started = time.monotonic()
        host, policy = self._host, self._policy(call)
        elapsed = time.monotonic() - call.started
        patience = policy.patience(self._reached, elapsed) if call.op.retry else 0.0
        if await host.reachable(patience, self._probe, policy.probe_delay):
            return
        cause = host.cause or ConnectionError("it does not answer")
        error = call.error or connection_error(call, self.base_url + call.op.path, cause)
        raise with_history(error, call.tries, time.monotonic() - call.started, host.state())

    async def _probe(self) -> None:
        """Check that the host responds, with any status; OSError if it does not."""
        self._in_flight.check_open()
        url = self.base_url + ops.GET_HEALTH.path
        try:
            async with asyncio.timeout(min(PROBE_TIMEOUT, self.timeouts.request)):
                await self._pools.client(Pool.SESSION, url).execute(HttpRequest("GET", url, self._headers))
        except LIBRARY_ERRORS as cause:
            raise ConnectionError(root_cause(cause)) from cause
        except OSError:
            self._warn_if_lost(self._host.cause)
            raise

    def _warn_if_lost(self, cause: BaseException | None) -> None:
        now = time.monotonic()
        since = now if self._silent_since is None else self._silent_since
        self._silent_since = since
        if self._reached and now - since >= LOST_NOTICE:
            self._silent_since = now
            log.warning(
                "lost contact with %s (%s); still trying, for up to %g s in all",
                self.base_url, cause, self.policy.lost_budget,
            )  # fmt: skip


class _InFlight:
    """The tasks of calls in flight, each within a `with` block; `close` ends them with ClientClosedError."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any] | None] = set()
        self._closed = False

    def check_open(self) -> None:
        if self._closed:
            raise ClientClosedError(CLOSED)

    def close(self) -> None:
        self._closed = True
        for task in self._tasks:
            assert task is not None
            task.cancel()

    def __enter__(self) -> None:
        self.check_open()
        self._tasks.add(asyncio.current_task())

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._tasks.discard(asyncio.current_task())
        if kind is asyncio.CancelledError and self._closed:
            raise ClientClosedError(CLOSED) from None

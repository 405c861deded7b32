"""What every endpoint shares: authentication, request ids, error responses, long polls and draining.

An error response is JSON with a length, never compressed, and never a 409, which official clients retry for
five minutes. An internal error is a 500 that names the request id and nothing else.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import re
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tinkex import tracing
from tinkex.config import is_loopback
from tinkex.engine.protocol import EngineError
from tinkex.errors import InvalidInputError
from tinkex.server.api_keys import Authenticator
from tinkex.server.bodies import BodyCodec, ClientDisconnected, IncomingRequest
from tinkex.server.metrics import Metrics
from tinkex.server.uvicorn_protocol import SEND_WHOLE, SendWhole
from tinkex.service.refusal import Caller, Refusal
from tinkex.service.service import Service
from tinkex.types.futures import PendingFuture
from tinkex.wire import codec, ops
from tinkex.wire.ops import Op

log = logging.getLogger("tinkex.server")

JSON = {"content-type": codec.JSON}
NOT_READY = "the server is starting, or stopping: ask again in a moment"
_CLIENT_GONE = 499  # for the log and the metrics; no response is sent
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


Handler = Callable[[IncomingRequest], Awaitable[Response]]


class BufferedResponse(Response):
    """A response with a complete body. Cheaper than Starlette's: a sample takes two of them."""

    def __init__(self, body: bytes, content_type: str, status: int = 200, encoding: str = "") -> None:
        self.status_code, self.body, self.background = status, body, None
        self.raw_headers = [
            (b"content-type", content_type.encode()),
            (b"content-length", str(len(body)).encode()),
        ]
        if encoding:
            self.raw_headers += [(b"content-encoding", encoding.encode()), (b"vary", b"accept-encoding")]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        send_whole: SendWhole | None = scope.get(SEND_WHOLE)
        if send_whole is None or not send_whole(scope, self.status_code, self.raw_headers, self.body):
            head = {"status": self.status_code, "headers": self.raw_headers}
            await send({"type": "http.response.start", **head})
            await send({"type": "http.response.body", "body": self.body})


def tinker_error(status: int, message: str, headers: dict[str, str] | None = None) -> Response:
    """An error response as Tinker clients read it."""
    status = 422 if status == 409 else status
    return Response(orjson.dumps({"detail": message}), status, {**JSON, **(headers or {})})


@dataclass(eq=False)
class Gateway:
    """The service, and what stands between it and HTTP."""

    service: Service
    authenticator: Authenticator
    bodies: BodyCodec
    metrics: Metrics
    public_url: str = ""

    def __post_init__(self) -> None:
        self.draining = False
        self._polls: set[asyncio.Task[Any]] = set()
        self._process, self._count = uuid.uuid4().hex[:12], itertools.count()

    def admit(self, http: IncomingRequest) -> Caller:
        """The caller; Refusal if the key is not accepted, or the service is not ready."""
        if not self.service.ready:
            raise Refusal(503, NOT_READY)
        headers, peer = http.headers, http.scope.get("client")
        url = self.public_url or f"{http.scope['scheme']}://{headers.get('host', '')}"
        # A proxy on this machine connects from loopback too, on behalf of a client elsewhere.
        proxied = self.public_url or "x-forwarded-for" in headers or "forwarded" in headers
        same_machine = not proxied and peer is not None and is_loopback_host(peer[0])
        return self.authenticator.caller(headers, url, same_machine)

    def request_id(self, http: IncomingRequest) -> str:
        given = http.headers.get("x-request-id")
        return given if given and _REQUEST_ID.fullmatch(given) else f"{self._process}-{next(self._count)}"

    async def long_poll(self, op: Op[Any, Any], request: Any, caller: Caller) -> Any:
        """Wait for a result. A server that drains answers "pending", and clients poll its successor."""
        task = asyncio.current_task()
        assert task is not None
        self._polls.add(task)
        try:
            return await self.service.call(op, request, caller)
        except asyncio.CancelledError:
            if not self.draining:
                raise
            task.uncancel()
            if op is ops.RETRIEVE_FUTURES:
                raise Refusal(503, NOT_READY) from None
            return PendingFuture(request.request_id)
        finally:
            self._polls.discard(task)

    async def drain(self, seconds: float) -> None:
        """Give open polls and streams `seconds` to finish, then end them."""
        self.draining = True
        if not self.service.ready:
            return
        if open_requests := {*self._polls, *self.service.samplers.running}:
            await asyncio.wait(open_requests, timeout=seconds)
        for task in self._polls:
            task.cancel()
        await self.service.samplers.stop()  # each open stream ends with a failure event


@lru_cache(maxsize=1024)
def is_loopback_host(host: str) -> bool:
    return is_loopback(f"//[{host}]" if ":" in host else f"//{host}")


@dataclass(eq=False)
class Endpoint:
    """A handler as an ASGI application, with tracing, metrics and error responses around it."""

    _gateway: Gateway
    _name: str
    _handler: Handler
    _error_response: Callable[[int, str, dict[str, str] | None], Response] = tinker_error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        began, http = time.perf_counter(), IncomingRequest(scope, receive)
        request_id = self._gateway.request_id(http)
        if tracing.is_on():
            with tracing.span(f"server {self._name}", kind="server", parent=tracing.extract(http.headers)):
                response = await self._handle(http, request_id)
        else:
            response = await self._handle(http, request_id)
        response.raw_headers.append((b"x-request-id", request_id.encode()))
        self._gateway.metrics.requests[self._name, response.status_code] += 1
        if log.isEnabledFor(logging.DEBUG):
            took = (time.perf_counter() - began) * 1000
            log.debug("%s %s %d %.1f ms", request_id, self._name, response.status_code, took)
        if response.status_code != _CLIENT_GONE:
            await response(scope, receive, send)

    async def _handle(self, http: IncomingRequest, request_id: str) -> Response:
        try:
            return await self._handler(http)
        except Exception as error:
            return self._failure(error, request_id)

    def _failure(self, error: Exception, request_id: str) -> Response:
        respond = self._error_response
        match error:
            case Refusal(status=status, message=message):
                return respond(status, message, {"retry-after": "1"} if status in (429, 503) else None)
            case InvalidInputError():
                return respond(422, str(error), None)
            case EngineError(category=category, message=message):
                return respond(422 if category == "user" else 500, message, None)
            case ClientDisconnected():
                return Response(status_code=_CLIENT_GONE)
            case _:
                log.error("%s failed (request %s)", self._name, request_id, exc_info=error)
                return respond(500, f"the server failed; its log says why at request {request_id}", None)

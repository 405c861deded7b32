"""The ASGI application: one endpoint for every row of the operation table, and what all endpoints share.

A handler decodes the body by its content type, calls the service, and encodes the result by the Accept
header, so that old and new clients share it. An error response is JSON with a length, never compressed, and
never a 409, which official clients retry for five minutes. An internal error is a 500 that names the request
id and nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import re
import time
import uuid
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from datetime import UTC
from email.utils import format_datetime
from functools import partial
from typing import Any, cast

import orjson
from starlette.applications import Starlette
from starlette.convertors import StringConvertor, register_url_convertor
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from tinkex import tracing
from tinkex.config import is_loopback_host
from tinkex.engine.protocol import EngineError
from tinkex.errors import InvalidInputError
from tinkex.server.api_keys import Authenticator, Identity, credential
from tinkex.server.bodies import BIG, BodyCodec, ClientDisconnected, IncomingRequest
from tinkex.server.forward import Forwarder
from tinkex.server.metrics import Metrics
from tinkex.server.uvicorn_protocol import CONNECTION, SingleWriteProtocol
from tinkex.service.peers import Elsewhere
from tinkex.service.refusal import Caller, InUse, Refusal
from tinkex.service.service import Service
from tinkex.types.checkpoints import CheckpointArchiveUrlResponse
from tinkex.types.config import EmptyRequest
from tinkex.types.futures import PendingFuture, RequestFailedResponse
from tinkex.wire import codec, ops
from tinkex.wire.ops import Op

log = logging.getLogger("tinkex.server")

JSON = {"content-type": codec.JSON}
NOT_READY = "the server is starting, or stopping: ask again in a moment"
PIECE = 1024 * 1024  # bytes of a response that are handed to the transport at a time
LONG_POLLS = (ops.RETRIEVE_FUTURE, ops.RETRIEVE_FUTURES)
_CLIENT_GONE = 499  # for the log and the metrics; no response is sent
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


Handler = Callable[[IncomingRequest], Awaitable[Response]]

WHY = frozenset(  # the fields of replies that say why
    {"detail", "error", "error_message", "info_message", "message", "queue_state_reason", "status_reason",
     "warning_message"}
)  # fmt: skip


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
        connection: SingleWriteProtocol | None = scope.get(CONNECTION)
        if not connection or not connection.send_whole(scope, self.status_code, self.raw_headers, self.body):
            head = {"status": self.status_code, "headers": self.raw_headers}
            await send({"type": "http.response.start", **head})
            body = memoryview(self.body)
            while len(body) > PIECE:  # the transport may copy unsent bytes
                await send({"type": "http.response.body", "body": body[:PIECE], "more_body": True})
                body = body[PIECE:]
            await send({"type": "http.response.body", "body": body})


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
    requests: InUse
    public_url: str = ""
    forwarder: Forwarder | None = None  # where several servers share a ledger

    def __post_init__(self) -> None:
        self.draining = False
        self._polls: set[asyncio.Task[Any]] = set()
        config = self.service.config
        home, models = config.home, config.models_directory or ""
        places = {str(home), str(home.resolve()), str(models), *config.models.values()}
        self._places = sorted((place for place in places if place.startswith("/")), key=len, reverse=True)
        self._raw_places = [place.encode() for place in self._places]
        self._process, self._count = uuid.uuid4().hex[:12], itertools.count()

    def admit(self, http: IncomingRequest, *, keyless: bool = False) -> Caller:
        """The caller; Refusal if its key is not accepted, it has too many requests, or we are not ready."""
        if not self.service.ready:
            raise Refusal(503, NOT_READY)
        headers, peer = http.headers, http.scope.get("client")
        url = self.public_url or f"{http.scope['scheme']}://{headers.get('host', '')}"
        # A proxy on this machine connects from loopback too, on behalf of a client elsewhere.
        proxied = self.public_url or "x-forwarded-for" in headers or "forwarded" in headers
        same_machine = not proxied and peer is not None and is_loopback_host(peer[0])
        caller = self.authenticator.caller(headers, url, same_machine, keyless=keyless)
        self.requests.take(caller.user, 1)
        http.user = caller.user
        return caller

    async def forward(self, http: IncomingRequest, body: bytes, there: Elsewhere) -> Response:
        """The answer of the server that owns the session."""
        if self.forwarder is None:
            raise there
        return await self.forwarder.send(http, body, there)

    def leave(self, http: IncomingRequest) -> None:
        """The request was answered or abandoned."""
        if http.user is not None:
            self.bodies.forget(http)
            self.requests.give_back(http.user, 1)

    def without_paths(self, told: Any) -> Any:
        """An error's text for clients: paths are shortened to names below the home or the model's directory.

        In parsed JSON, only the messages are changed; links stay as they are.
        """
        if isinstance(told, str):
            for place in self._places:
                told = told.replace(f"{place}/", "").replace(place, place.rpartition("/")[2])
            return told
        if isinstance(told, dict):
            fields = cast("dict[str, Any]", told)
            return {
                name: self.without_paths(value) if name in WHY or not isinstance(value, str) else value
                for name, value in fields.items()
            }
        if isinstance(told, list):
            items = cast("list[Any]", told)
            return [item if isinstance(item, str) else self.without_paths(item) for item in items]
        return told

    def clean(self, body: bytes) -> bytes:
        """A reply as JSON `without_paths`; nearly none has any."""
        if any(place in body for place in self._raw_places):
            return orjson.dumps(self.without_paths(orjson.loads(body)))
        return body

    def request_id(self, http: IncomingRequest) -> str:
        given = http.headers.get("x-request-id")
        return given if given and _REQUEST_ID.fullmatch(given) else f"{self._process}-{next(self._count)}"

    async def long_poll(self, op: Op[Any, Any], request: Any, caller: Caller) -> Any:
        """Wait for a result. A server that drains answers "pending", and clients poll its successor."""
        if op is ops.RETRIEVE_FUTURE and self.service.futures.is_done(request.request_id):
            return await self.service.call(op, request, caller)
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

    def refused(self, http: IncomingRequest, what: str, status: int, message: str) -> None:
        """Record a refused request for the console, if its user is known. Clients repeat 429 and 503."""
        with contextlib.suppress(Refusal):
            if status in (429, 503):
                return
            owner = self.authenticator.identify(credential(http.headers)).user
            self.metrics.refused(owner, what, f"{status}: {self.without_paths(message)}")

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
        try:
            try:
                response = await (self._handler(http) if not tracing.is_on() else self._traced(http))
            except Exception as error:
                response = await self._failed(http, error, request_id)
            response.raw_headers.append((b"x-request-id", request_id.encode()))
            self._gateway.metrics.requests[self._name, response.status_code] += 1
            if log.isEnabledFor(logging.DEBUG):
                took = (time.perf_counter() - began) * 1000
                log.debug("%s %s %d %.1f ms", request_id, self._name, response.status_code, took)
            if response.status_code != _CLIENT_GONE:
                await response(scope, receive, send)
        finally:
            self._gateway.leave(http)

    async def _traced(self, http: IncomingRequest) -> Response:
        """Call the handler within a span, to which a refusal is no error."""
        refused: Exception | None = None
        with tracing.span(f"server {self._name}", kind="server", parent=tracing.extract(http.headers)):
            try:
                return await self._handler(http)
            except Exception as error:
                refused = error
        raise refused

    async def _failed(self, http: IncomingRequest, error: Exception, request_id: str) -> Response:
        try:
            if isinstance(error, Elsewhere) and http.scope["method"] == "GET":
                return await self._gateway.forward(http, b"", error)
        except Exception as another:
            error = another
        return self._failure(error, request_id, http)

    def _failure(self, error: Exception, request_id: str, http: IncomingRequest) -> Response:
        def respond(status: int, message: str, headers: dict[str, str] | None) -> Response:
            self._gateway.refused(http, self._name, status, message)
            return self._error_response(status, self._gateway.without_paths(message), headers)

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


# -- operations ------------------------------------------------------------------------------------------


def build_app(gateway: Gateway, more: Iterable[BaseRoute] = ()) -> ASGIApp:
    """The application with the routes of all operations, and `more`."""
    endpoints = {op: Endpoint(gateway, op.name, _handler(op, gateway)) for op in ops.OPS.values()}
    routes: list[BaseRoute] = []
    for op, endpoint in endpoints.items():
        path = op.path.replace("{checkpoint_id:path}", "{checkpoint_id:checkpoint}")
        routes.append(Route(path, endpoint, methods=[op.method]))
        if op is ops.DELETE_CHECKPOINT:  # some clients give only a name
            routes.append(Route(op.path.replace(":path}", "}"), endpoint, methods=[op.method]))
    app = Starlette(routes=[*routes, *more], exception_handlers={HTTPException: _no_such_route})
    app.router.redirect_slashes = False
    # Starlette tries routes one after another. Most operations have a fixed path and are found in this table.
    fixed = {(op.method, op.path): endpoint for op, endpoint in endpoints.items() if not op.placeholders}

    def dispatch(scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        endpoint = fixed.get((scope["method"], scope["path"])) if scope["type"] == "http" else None
        return (endpoint or app)(scope, receive, send)

    return dispatch


class _CheckpointId(StringConvertor):
    """KIND/NAME. A general path would route the deletion of a checkpoint called "publish" to unpublishing."""

    regex = "[^/]+/[^/]+"


register_url_convertor("checkpoint", _CheckpointId())


async def _no_such_route(http: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    headers = dict(error.headers or {})
    if http.method == "OPTIONS" and error.status_code == 405:
        return Response(status_code=204, headers=headers)
    return tinker_error(error.status_code, f"{http.method} {http.url.path}: {error.detail}", headers)


def _handler(op: Op[Any, Any], gateway: Gateway) -> Handler:
    if op is ops.GET_HEALTH:
        return _health_handler(gateway)
    if op.name in _KEY_OPERATIONS:
        return _key_handler(gateway, _KEY_OPERATIONS[op.name])
    call = gateway.long_poll if op in LONG_POLLS else gateway.service.call
    bodies, has_body = gateway.bodies, op.method not in ("GET", "DELETE")

    async def handle(http: IncomingRequest) -> Response:
        caller, headers = gateway.admit(http), http.headers
        max_body = bodies.limit_of(op, http)
        body = await bodies.read(http, max_body) if has_body else b""
        try:
            request = await bodies.decode(op, http, body, max_body)
        except InvalidInputError as error:
            # A 4xx on one chunk of a pass makes official clients wait for ever: a run's request is accepted,
            # and its future fails.
            peek = partial(codec.peek_turn, op, headers=headers, body=body, max_body=max_body)
            turn = op.has_future and await bodies.parse(http, body, peek)
            if not turn:
                raise  # raised here, not in a helper: a traceback keeps the body of every frame alive
            try:
                promise = await gateway.service.fail(op.name, *turn, str(error), caller)
            except Elsewhere as there:
                return await gateway.forward(http, body, there)
            return await _response(op, gateway, http, None, promise)
        # Requests that came together are all decoded first: the code of one stage stays in the CPU's caches.
        await asyncio.sleep(0)
        try:
            value = await call(op, request, caller)
        except Elsewhere as there:
            return await gateway.forward(http, body, there)
        return await _response(op, gateway, http, request, value)

    return handle


async def _response(
    op: Op[Any, Any], gateway: Gateway, http: IncomingRequest, request: Any, value: Any
) -> Response:
    if op is ops.RETRIEVE_FUTURE:
        if isinstance(value, PendingFuture):
            return BufferedResponse(gateway.clean(codec.encode_result(value)[1]), codec.JSON, 408)
        if isinstance(value, RequestFailedResponse):
            return BufferedResponse(gateway.clean(codec.encode_reply(value)[1]), codec.JSON)
        accept = http.headers.get("accept", "")
        content_type, body = await gateway.bodies.encode_result(request.request_id, value, accept)
    elif isinstance(value, CheckpointArchiveUrlResponse):
        headers = {"location": value.url}
        if value.expires is not None:
            headers["expires"] = format_datetime(value.expires.astimezone(UTC), usegmt=True)
        return Response(status_code=302, headers=headers)
    elif value is None:
        return Response(status_code=204)
    else:
        content_type, body = codec.encode_reply(value)
        if content_type == codec.JSON and not op.has_future:  # a promise says nothing but ids
            body = gateway.clean(body)
    encoding = ""
    if len(body) >= BIG:
        encoding, body = await gateway.bodies.compressed(body, http.headers.get("accept-encoding", ""))
    return BufferedResponse(body, content_type, encoding=encoding)


def _health_handler(gateway: Gateway) -> Handler:
    async def handle(http: IncomingRequest) -> Response:
        if not gateway.service.ready or gateway.draining:
            raise Refusal(503, NOT_READY)
        health = await gateway.service.call(ops.GET_HEALTH, EmptyRequest(), Caller(""))
        return Response(codec.encode_reply(health)[1], 200, JSON)

    return handle


_KEY_OPERATIONS: dict[str, Callable[[Authenticator, Identity], Any]] = {
    ops.GET_AUTH_TOKEN.name: Authenticator.issue_token,
    ops.GET_API_KEY.name: Authenticator.describe,
    ops.DELETE_API_KEY.name: Authenticator.revoke,
}


def _key_handler(gateway: Gateway, operation: Callable[[Authenticator, Identity], Any]) -> Handler:
    async def handle(http: IncomingRequest) -> Response:
        gateway.admit(http)
        authenticator = gateway.authenticator
        value = operation(authenticator, authenticator.identify(credential(http.headers)))
        await gateway.service.disk.synced()  # a key that was revoked stays so
        return (
            Response(status_code=204) if value is None else Response(codec.encode_reply(value)[1], 200, JSON)
        )

    return handle

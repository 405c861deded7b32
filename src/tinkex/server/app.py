"""The ASGI application: one route and one handler for every row of the operation table.

A handler decodes the body by its content type, calls the service, and encodes the result by the Accept
header, so that old and new clients share it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from datetime import UTC
from email.utils import format_datetime
from typing import Any

from starlette.applications import Starlette
from starlette.convertors import StringConvertor, register_url_convertor
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from tinkex.errors import InvalidInputError
from tinkex.server.api_keys import Authenticator, Identity, credential
from tinkex.server.bodies import BIG, IncomingRequest
from tinkex.server.gateway import (
    JSON,
    NOT_READY,
    BufferedResponse,
    Endpoint,
    Gateway,
    Handler,
    tinker_error,
)
from tinkex.service.refusal import Caller, Refusal
from tinkex.types.checkpoints import CheckpointArchiveUrlResponse
from tinkex.types.config import EmptyRequest
from tinkex.types.futures import PendingFuture, RequestFailedResponse
from tinkex.wire import codec, ops
from tinkex.wire.ops import Op

LONG_POLLS = (ops.RETRIEVE_FUTURE, ops.RETRIEVE_FUTURES)


def build_app(gateway: Gateway, more: Iterable[BaseRoute] = ()) -> ASGIApp:
    """The application with the routes of all operations, and `more`."""
    endpoints = {op: Endpoint(gateway, op.name, _handler(op, gateway)) for op in ops.OPS.values()}
    routes: list[BaseRoute] = []
    for op, endpoint in endpoints.items():
        path = op.path.replace("{checkpoint_id:path}", "{checkpoint_id:checkpoint}")
        routes.append(Route(path, endpoint, methods=[op.method]))
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
        body = await bodies.read(http) if has_body else b""
        try:
            request = await bodies.decode(op, http, body)
        except InvalidInputError as error:
            # A 4xx on one chunk of a pass makes official clients wait for ever: a run's request is accepted,
            # and its future fails.
            max_body = bodies.limit
            turn = op.has_future and codec.peek_turn(op, headers=headers, body=body, max_body=max_body)
            if not turn:
                raise  # raised here, not in a helper: a traceback keeps the body of every frame alive
            promise = await gateway.service.fail(op, *turn, str(error), caller)
            return await _response(op, gateway, http, None, promise)
        return await _response(op, gateway, http, request, await call(op, request, caller))

    return handle


async def _response(
    op: Op[Any, Any], gateway: Gateway, http: IncomingRequest, request: Any, value: Any
) -> Response:
    if op is ops.RETRIEVE_FUTURE:
        if isinstance(value, PendingFuture):
            return BufferedResponse(codec.encode_result(value)[1], codec.JSON, 408)
        if isinstance(value, RequestFailedResponse):
            return BufferedResponse(codec.encode_reply(value)[1], codec.JSON)
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
        return (
            Response(status_code=204) if value is None else Response(codec.encode_reply(value)[1], 200, JSON)
        )

    return handle

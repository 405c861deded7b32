"""Hop 3: the door. Every operation's route is mounted from the op table, by one endpoint function.

Promises: bytes in, bytes out; old and new clients are served by the same handlers; a refusal is JSON with a
length, never compressed and never 409 (official clients would repeat it for minutes); an error of ours is a
500 that says nothing of our insides. Knows HTTP; knows nothing of training or sampling.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import re
import time
import uuid
from collections.abc import Awaitable, Callable, Iterable, Mapping
from datetime import UTC
from email.utils import format_datetime
from functools import lru_cache
from typing import Any, Protocol

import orjson
from starlette.applications import Starlette
from starlette.convertors import Convertor, register_url_convertor
from starlette.datastructures import QueryParams
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from tinkex import tracing
from tinkex.config import is_loopback
from tinkex.engine.protocol import EngineError
from tinkex.errors import InvalidInputError
from tinkex.server.auth import Auth, Identity, credential
from tinkex.server.bodies import BIG, Bodies, Disconnected, read_body
from tinkex.server.connection import WHOLE, SendWhole
from tinkex.server.metrics import Metrics
from tinkex.service.refusal import Caller, Refusal
from tinkex.types.checkpoints import CheckpointArchiveUrlResponse
from tinkex.types.config import EmptyRequest
from tinkex.types.futures import Pending, RequestFailedResponse, UntypedAPIFuture
from tinkex.wire import codec, ops
from tinkex.wire.ops import Op

log = logging.getLogger("tinkex.server")

JSON = {"content-type": codec.JSON}
LONG_POLLS = (ops.RETRIEVE_FUTURE, ops.RETRIEVE_FUTURES)
STARTING = "the server is starting, or stopping: ask again in a moment"
_GONE = 499  # for the log and the metrics: nobody is there to read it
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")

Handler = Callable[["Http"], Awaitable[Response]]


class Http:
    """A request as handlers read it; Starlette's has far more than they ask for, at every request."""

    __slots__ = ("headers", "receive", "scope")

    def __init__(self, scope: Scope, receive: Receive) -> None:
        self.scope, self.receive = scope, receive
        # By names in lower case, as uvicorn gives them.
        self.headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}

    @property
    def path_params(self) -> dict[str, Any]:
        return self.scope.get("path_params", {})

    @property
    def query(self) -> dict[str, str]:
        text = self.scope["query_string"]
        return dict(QueryParams(text)) if text else {}


class Answer(Response):
    """A body that is whole, sent without the care that Response takes: there are two for every sample."""

    def __init__(self, body: bytes, content_type: str, status: int = 200, encoding: str = "") -> None:
        self.status_code, self.body, self.background = status, body, None
        self.raw_headers = [
            (b"content-type", content_type.encode()),
            (b"content-length", str(len(body)).encode()),
        ]
        if encoding:
            self.raw_headers += [(b"content-encoding", encoding.encode()), (b"vary", b"accept-encoding")]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        send_whole: SendWhole | None = scope.get(WHOLE)
        if send_whole is None or not send_whole(scope, self.status_code, self.raw_headers, self.body):
            head = {"status": self.status_code, "headers": self.raw_headers}
            await send({"type": "http.response.start", **head})
            await send({"type": "http.response.body", "body": self.body})


class Backend(Protocol):
    """What the door needs of a service."""

    core: Any  # service.core.Core, and
    samplers: Any  # service.samplers.Samplers, once it has started
    ready: bool

    async def call(self, op: Op[Any, Any], request: Any, caller: Caller) -> Any: ...

    async def fail(
        self, op: Op[Any, Any], run_id: str, seq_id: int, message: str, caller: Caller
    ) -> UntypedAPIFuture:
        """Accept a run's unreadable request, and fail its future: a 4xx would leave clients stuck."""
        ...


def refused(status: int, message: str, headers: dict[str, str] | None = None) -> Response:
    """A refusal as Tinker clients read it."""
    status = 422 if status == 409 else status
    return Response(orjson.dumps({"detail": message}), status, {**JSON, **(headers or {})})


class Door:
    """What every endpoint shares: the service behind it, who may come in, and what is counted."""

    def __init__(
        self,
        service: Backend,
        *,
        bodies: Bodies | None = None,
        metrics: Metrics | None = None,
        public_url: str = "",
    ) -> None:
        self.service = service
        self.auth: Auth | None = None  # known once the service has opened its ledger
        self.bodies = bodies or Bodies()
        self.metrics = metrics or Metrics()
        self.draining = False
        self._public_url = public_url
        self._polls: set[asyncio.Task[Any]] = set()
        self._process, self._count = uuid.uuid4().hex[:12], itertools.count()

    def admit(self, http: Http) -> Caller:
        """Who is asking; Refusal if that is nobody, or nobody can be served now."""
        if self.auth is None or not self.service.ready:
            raise Refusal(503, STARTING)
        headers = http.headers
        url = self._public_url or f"{http.scope['scheme']}://{headers.get('host', '')}"
        return self.auth.caller(headers, url, self._is_same_machine(http))

    def _is_same_machine(self, http: Http) -> bool:
        # A proxy on this machine connects from loopback too, and says whom it speaks for.
        proxied = "x-forwarded-for" in http.headers or "forwarded" in http.headers
        peer = http.scope.get("client")
        return not proxied and not self._public_url and peer is not None and _is_this_machine(peer[0])

    def request_id(self, http: Http) -> str:
        given = http.headers.get("x-request-id")
        if given and _REQUEST_ID.fullmatch(given):
            return given
        return f"{self._process}-{next(self._count)}"

    async def long_poll(self, op: Op[Any, Any], request: Any, caller: Caller) -> Any:
        """Wait for a result; a server that is leaving says "not yet", and clients ask its successor."""
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
                raise Refusal(503, STARTING) from None
            return Pending(request.request_id)
        finally:
            self._polls.discard(task)

    async def drain(self, seconds: float) -> None:
        """Let polls and streams under way find their results for a while, then end them."""
        self.draining = True
        if not self.service.ready:
            return
        if under_way := {*self._polls, *self.service.samplers.running}:
            await asyncio.wait(under_way, timeout=seconds)
        for task in self._polls:
            task.cancel()
        await self.service.samplers.stop()  # streams end with a failure that says so


@lru_cache(maxsize=1024)
def _is_this_machine(host: str) -> bool:
    return is_loopback(f"//[{host}]" if ":" in host else f"//{host}")


class Endpoint:
    """A handler with everything around it, as an ASGI application (Starlette's own wrapping costs more)."""

    def __init__(
        self,
        door: Door,
        name: str,
        answer: Handler,
        refuse: Callable[[int, str, dict[str, str] | None], Response] = refused,
    ) -> None:
        self._door, self._name, self._answer, self._refuse = door, name, answer, refuse
        self._span = f"server {name}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        began, http = time.perf_counter(), Http(scope, receive)
        request_id = self._door.request_id(http)
        if tracing.is_on():
            with tracing.span(self._span, kind="server", parent=tracing.extract(http.headers)):
                response = await self._answer_or_fail(http, request_id)
        else:
            response = await self._answer_or_fail(http, request_id)
        response.raw_headers.append((b"x-request-id", request_id.encode()))
        self._door.metrics.count_request(self._name, response.status_code)
        if log.isEnabledFor(logging.DEBUG):
            took = (time.perf_counter() - began) * 1000
            log.debug("%s %s %d %.1f ms", request_id, self._name, response.status_code, took)
        if response.status_code != _GONE:
            await response(scope, receive, send)

    async def _answer_or_fail(self, http: Http, request_id: str) -> Response:
        try:
            return await self._answer(http)
        except Exception as error:
            return self._failure(error, request_id)

    def _failure(self, error: Exception, request_id: str) -> Response:
        match error:
            case Refusal(status=status, message=message):
                return self._refuse(status, message, {"retry-after": "1"} if status in (429, 503) else None)
            case InvalidInputError():
                return self._refuse(422, str(error), None)
            case EngineError(category=category, message=message):
                return self._refuse(422 if category == "user" else 500, message, None)
            case Disconnected():
                return Response(status_code=_GONE)
            case _:
                log.error("%s failed (request %s)", self._name, request_id, exc_info=error)
                return self._refuse(500, f"the server failed; its log says why at request {request_id}", None)


# -- operations ------------------------------------------------------------------------------------------


def build_app(door: Door, more: Iterable[BaseRoute] = ()) -> ASGIApp:
    """The ASGI application: every operation of the table, and `more`."""
    endpoints = {op: Endpoint(door, op.name, _handler(op, door)) for op in ops.OPS.values()}
    routes = [Route(_route(op), endpoint, methods=[op.method]) for op, endpoint in endpoints.items()]
    app = Starlette(routes=[*routes, *more], exception_handlers={HTTPException: _no_such_route})
    app.router.redirect_slashes = False
    # Routes are tried one after another: most operations have one fixed path, and are found by it at once.
    fixed = {(op.method, op.path): endpoint for op, endpoint in endpoints.items() if not op.placeholders}

    def dispatch(scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        endpoint = fixed.get((scope["method"], scope["path"])) if scope["type"] == "http" else None
        return (endpoint or app)(scope, receive, send)

    return dispatch


class _CheckpointId(Convertor[str]):
    """KIND/NAME. Were it any path, deleting a checkpoint called "publish" would be unpublishing "KIND"."""

    regex = "[^/]+/[^/]+"

    def convert(self, value: str) -> str:
        return value

    def to_string(self, value: str) -> str:
        return value


register_url_convertor("checkpoint", _CheckpointId())


def _route(op: Op[Any, Any]) -> str:
    return op.path.replace("{checkpoint_id:path}", "{checkpoint_id:checkpoint}")


async def _no_such_route(http: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    headers = dict(error.headers or {})
    if http.method == "OPTIONS" and error.status_code == 405:
        return Response(status_code=204, headers=headers)
    return refused(error.status_code, f"{http.method} {http.url.path}: {error.detail}", headers)


def _handler(op: Op[Any, Any], door: Door) -> Handler:
    if op is ops.GET_HEALTH:
        return _health(door)
    if op.name in _ABOUT_THE_KEY:
        return _about_the_key(door, _ABOUT_THE_KEY[op.name])
    call = door.long_poll if op in LONG_POLLS else door.service.call
    bodies, has_body = door.bodies, op.method not in ("GET", "DELETE")

    async def answer(http: Http) -> Response:
        caller, headers = door.admit(http), http.headers
        body = await read_body(http.receive, headers, bodies.limit) if has_body else b""
        try:
            request = await bodies.decode(op, http.path_params, http.query, headers, body)
        except InvalidInputError as error:
            promise = await _promise_to_fail(op, door, headers, body, caller, str(error))
            if promise is None:
                raise  # here: a frame that keeps an error is kept by it, and so would be the body
            return await _reply(op, door, http, None, promise)
        return await _reply(op, door, http, request, await call(op, request, caller))

    return answer


async def _promise_to_fail(
    op: Op[Any, Any], door: Door, headers: Mapping[str, str], body: bytes, caller: Caller, message: str
) -> UntypedAPIFuture | None:
    """What a run's request whose content cannot be read is answered with; None: it is no such request."""
    limit = door.bodies.limit
    turn = codec.peek_turn(op, headers=headers, body=body, max_body=limit) if op.is_promise else None
    return None if turn is None else await door.service.fail(op, *turn, message, caller)


async def _reply(op: Op[Any, Any], door: Door, http: Http, request: Any, value: Any) -> Response:
    if op is ops.RETRIEVE_FUTURE:
        if isinstance(value, Pending):
            return Answer(codec.encode_result(value)[1], codec.JSON, 408)
        if isinstance(value, RequestFailedResponse):
            return Answer(codec.encode_reply(value)[1], codec.JSON)
        encoded = await door.bodies.encode_result(request.request_id, value, http.headers.get("accept", ""))
    elif isinstance(value, CheckpointArchiveUrlResponse):
        return _elsewhere(value)
    elif value is None:
        return Response(status_code=204)
    else:
        encoded = codec.encode_reply(value)
    content_type, body = encoded
    encoding = ""
    if len(body) >= BIG:
        encoding, body = await door.bodies.packed(body, http.headers.get("accept-encoding", ""))
    return Answer(body, content_type, encoding=encoding)


def _elsewhere(value: CheckpointArchiveUrlResponse) -> Response:
    headers = {"location": value.url}
    if value.expires is not None:
        headers["expires"] = format_datetime(value.expires.astimezone(UTC), usegmt=True)
    return Response(status_code=302, headers=headers)


# -- what the door answers by itself ---------------------------------------------------------------------


def _health(door: Door) -> Handler:
    async def answer(http: Http) -> Response:
        if not door.service.ready or door.draining:
            raise Refusal(503, STARTING)
        health = await door.service.call(ops.GET_HEALTH, EmptyRequest(), Caller(""))
        return Response(codec.encode_reply(health)[1], 200, JSON)

    return answer


_ABOUT_THE_KEY: dict[str, Callable[[Auth, Identity], Any]] = {
    ops.GET_AUTH_TOKEN.name: Auth.issue,
    ops.GET_API_KEY.name: Auth.describe,
    ops.DELETE_API_KEY.name: Auth.revoke,
}


def _about_the_key(door: Door, say: Callable[[Auth, Identity], Any]) -> Handler:
    async def answer(http: Http) -> Response:
        door.admit(http)
        assert door.auth is not None
        value = say(door.auth, door.auth.identify(credential(http.headers)))
        return (
            Response(status_code=204) if value is None else Response(codec.encode_reply(value)[1], 200, JSON)
        )

    return answer

"""Embedded mode: a service and its engine behind the client's transport, without HTTP or codecs in between.

There is one service per home directory and process, shared by every ServiceClient and started by the first
call. tinkex/embedded.py hands it to the client, which imports neither this module nor the service.
"""

from __future__ import annotations

import asyncio
import atexit
import importlib.util
import sys
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from typing import Any

from tinkex import tracing
from tinkex._version import __version__
from tinkex.client import loop as background
from tinkex.client.http_call import SAMPLES, with_history
from tinkex.client.retry import Attempt, RetryPolicy
from tinkex.client.server_connection import ServerConnection
from tinkex.client.transport import NO_CONTEXT, CallContext
from tinkex.config import LOCAL, Settings
from tinkex.engine.protocol import EngineConfig
from tinkex.engine_exit import stop_engines
from tinkex.errors import (
    APIError,
    FailedRequest,
    FailedResponse,
    InvalidInputError,
    TinkerError,
    status_error,
)
from tinkex.service.config import ServiceConfig
from tinkex.service.refusal import LOCAL_USER, Caller, Refusal
from tinkex.service.service import Service
from tinkex.types.config import ClientConfigRequest, ClientConfigResponse
from tinkex.types.sampling import SampleEvent, SampleRequest
from tinkex.wire import ops
from tinkex.wire.ops import Op

NOT_INSTALLED = (
    "no API key and no server are set, so models would run in this process, but the engine is not installed. "
    "Either install it (pip install 'tinkex[engine]'), or set TINKER_API_KEY (and TINKER_BASE_URL) to use a "
    "server"
)
RUNS_HERE = (
    "tinkex: no API key and no server are set, so models run in this process (state: {home})\n"
    "tinkex: `tinkex console` shows its runs at http://127.0.0.1:8265"
)


class LocalTransport:
    """Calls a service directly. It is started by the first call, on the client's background loop."""

    base_url = ""
    credential = None
    policy = RetryPolicy()

    def __init__(self, service: Service, caller: Caller | None = None, *, only_look: bool = False) -> None:
        self.service = service
        self._begin = service.look if only_look else service.start
        self._caller = caller or Caller(LOCAL_USER, same_machine=True)
        self._starting: asyncio.Task[None] | None = None

    async def open(self) -> ClientConfigResponse:
        return await self.call(ops.GET_CLIENT_CONFIG, ClientConfigRequest(sdk_version=__version__))

    async def call(self, op: Op[Any, Any], request: Any, context: CallContext = NO_CONTEXT) -> Any:
        if not self.service.ready:
            await self._start()
        tries, began = 0, time.monotonic()
        while True:
            try:
                with tracing.span(f"transport {op.name}", within=True):
                    reply = await self.service.call(op, request, self._caller)
            except Refusal as refusal:
                tries += 1
                await self._pause(op, context, refusal, tries, began)
            else:
                if tries and context.observer is not None:
                    context.observer("active", None)
                return reply

    async def stream(
        self, request: SampleRequest, context: CallContext = NO_CONTEXT
    ) -> AsyncGenerator[SampleEvent, None]:
        if not self.service.ready:
            await self._start()
        tries, began, events = 0, time.monotonic(), None
        while events is None:
            try:
                with tracing.span(f"transport {ops.STREAM_SAMPLE.name}", within=True):
                    events = self.service.stream(request, self._caller)
            except Refusal as refusal:
                tries += 1
                await self._pause(ops.STREAM_SAMPLE, context, refusal, tries, began)
        async with aclosing(events):
            async for event in events:
                yield event

    async def _pause(
        self, op: Op[Any, Any], context: CallContext, refusal: Refusal, tries: int, began: float
    ) -> None:
        """After a 429, wait as long as the retry policy says; raise the error of any other refusal."""
        error, elapsed, is_busy = _status_error(op, refusal), time.monotonic() - began, refusal.status == 429
        if context.observer is not None:
            context.observer("paused_rate_limit" if is_busy else "active", refusal.message)
        if not is_busy or not op.retry:
            raise error from None
        policy = self.policy if context.retry is None else self.policy.tuned(context.retry)
        delay = policy.decide(Attempt(429, error=error), tries, elapsed, patient=op in SAMPLES)
        if delay is None:
            raise with_history(error, tries, elapsed) from None
        await asyncio.sleep(delay)

    async def _start(self) -> None:
        if self._starting is None or self._starting.done():
            self._starting = asyncio.get_running_loop().create_task(self._begin())
        await asyncio.shield(self._starting)

    async def aclose(self) -> None:
        """The service outlives its clients: it is the process's."""


def _status_error(op: Op[Any, Any], refusal: Refusal) -> APIError:
    response = FailedResponse(refusal.status, {}, refusal.message, FailedRequest(op.method, op.name))
    return status_error(refusal.message, response)


def service_config(settings: Settings) -> ServiceConfig:
    """How a service in one's own process is set up: any model on this machine can be named by its path."""
    home, engine = settings.home, EngineConfig(model="", quantize=settings.quantize)  # type: ignore[arg-type]
    return ServiceConfig(
        home,
        models_directory=home / "models",
        engine=engine,
        any_path=True,
        resume=False,
        offline=settings.offline,
        keep_rollouts=_share(settings.keep_rollouts),
    )


def _share(given: str) -> float:
    """The share of prompts whose samples are kept, for `tinkex console`.

    >>> _share(""), _share("0.1")
    (0.0, 0.1)
    """
    try:
        share = float(given or 0)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise InvalidInputError(f"TINKEX_KEEP_ROLLOUTS must be a number from 0 to 1, got {given!r}")
    return share


_transports: dict[Path, LocalTransport] = {}


@atexit.register
def _stop_engines() -> None:
    if background.is_running_here():  # else this is a forked child: its engines are its parent's
        stop_engines([transport.service for transport in _transports.values()])


def connection(settings: Settings) -> ServerConnection:
    """The connection of a ServiceClient that was given neither a key nor a URL."""
    home = settings.home.absolute()
    if home not in _transports:
        if importlib.util.find_spec("torch") is None:
            raise TinkerError(NOT_INSTALLED)
        made = LocalTransport(Service(service_config(settings)))
        first = _transports.setdefault(home, made) is made  # else another thread has just made one
        if first and settings.base_url != LOCAL:  # else the caller asked for it
            print(RUNS_HERE.format(home=home), file=sys.stderr)  # noqa: T201
    return ServerConnection(_transports[home], settings)


def look(settings: Settings) -> ServerConnection:
    """A connection to the home's state, for commands: restores no run, and needs no engine installed."""
    return ServerConnection(LocalTransport(Service(service_config(settings)), only_look=True), settings)

"""Embedded mode: a service and its engine behind the client's transport, without HTTP or codecs in between.

There is one service per home directory and process, shared by every ServiceClient and started by the first
call. tinkex/embedded.py hands it to the client, which imports neither this module nor the service.
"""

from __future__ import annotations

import asyncio
import atexit
import importlib.util
import os
import signal
import sys
import threading
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any

from tinkex import tracing
from tinkex._version import __version__
from tinkex.client import loop as background
from tinkex.client.retry import RetryPolicy
from tinkex.client.server_connection import ServerConnection
from tinkex.client.transport import NO_CONTEXT, CallContext
from tinkex.config import LOCAL, Settings
from tinkex.engine.protocol import Engine, EngineConfig
from tinkex.errors import FailedRequest, FailedResponse, InvalidInputError, TinkerError, status_error
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
EXIT_PATIENCE = 120.0  # seconds that an engine has to end its micro-batch when the process ends
EXIT_NOTICE = 0.5  # seconds after which a message says what is waited for
ENDING = "tinkex: the engine ends the micro-batch in hand; Ctrl-C leaves at once"


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
        try:
            with tracing.span(f"transport {op.name}", within=True):
                return await self.service.call(op, request, self._caller)
        except Refusal as refusal:
            raise _status_error(op, refusal) from None

    async def stream(
        self, request: SampleRequest, context: CallContext = NO_CONTEXT
    ) -> AsyncGenerator[SampleEvent, None]:
        if not self.service.ready:
            await self._start()
        try:
            with tracing.span(f"transport {ops.STREAM_SAMPLE.name}", within=True):
                events = self.service.stream(request, self._caller)
        except Refusal as refusal:
            raise _status_error(ops.STREAM_SAMPLE, refusal) from None
        async with aclosing(events):
            async for event in events:
                yield event

    async def _start(self) -> None:
        if self._starting is None or self._starting.done():
            self._starting = asyncio.get_running_loop().create_task(self._begin())
        await asyncio.shield(self._starting)

    async def aclose(self) -> None:
        """The service outlives its clients: it is the process's."""


def _status_error(op: Op[Any, Any], refusal: Refusal) -> TinkerError:
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
    """At exit: an engine that computes while the interpreter goes away would abort the process."""
    if not background.is_running_here():
        return  # a forked child: its engines are its parent's
    for transport in _transports.values():
        transport.service.models.begin_closing()
        transport.service.rollouts.stop()
        for engine in transport.service.models.engines():
            try:
                _close(engine)
            except KeyboardInterrupt:
                _leave()


def _close(engine: Engine) -> None:
    closing = threading.Thread(target=engine.close, daemon=True)
    try:
        closing.start()
    except RuntimeError:  # Python 3.12 begins no threads at exit
        engine.close()
        return
    closing.join(EXIT_NOTICE)
    if closing.is_alive():
        print(ENDING, file=sys.stderr)  # noqa: T201
        closing.join(EXIT_PATIENCE)


def _leave() -> None:
    """End as a process does that Ctrl-C ends, and without the interpreter's help: it would wait, or abort."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, OSError, ValueError):  # closed, or a broken pipe
            stream.flush()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGINT)


def connection(settings: Settings) -> ServerConnection:
    """The connection of a ServiceClient that was given neither a key nor a URL."""
    home = settings.home.absolute()
    if home not in _transports:
        if importlib.util.find_spec("torch") is None:
            raise TinkerError(NOT_INSTALLED)
        made = LocalTransport(Service(service_config(settings)))
        first = _transports.setdefault(home, made) is made  # else another thread has just made one
        if first and settings.base_url != LOCAL:  # a caller who asked for it need not be told
            print(RUNS_HERE.format(home=home), file=sys.stderr)  # noqa: T201
    return ServerConnection(_transports[home], settings)


def look(settings: Settings) -> ServerConnection:
    """A connection to what is in the home, for commands: restores no run, and needs no engine installed."""
    return ServerConnection(LocalTransport(Service(service_config(settings)), only_look=True), settings)

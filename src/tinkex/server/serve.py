"""A server's life: take the port, open the door, start the service behind it; and all of it backwards.

Promises: whatever keeps a server from starting is one StartError, in one line; the port answers from the
beginning, and says "not yet" until models are there; a signal lets work under way end, and a second one does
not. Without any key only this machine may connect. Knows uvicorn; knows no operation.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import ipaddress
import signal
import socket
import sys
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import uvicorn
from starlette.responses import Response
from starlette.routing import Route

from tinkex._version import __version__
from tinkex.engine.protocol import Engine
from tinkex.errors import TinkerError
from tinkex.server.app import Door, Endpoint, Http, build_app
from tinkex.server.auth import Auth
from tinkex.server.bodies import MAX_BODY, Bodies
from tinkex.server.connection import Connection
from tinkex.server.console import console_routes
from tinkex.server.downloads import download_routes, link_maker
from tinkex.server.openai import openai_routes
from tinkex.server.signing import Signer, WeightsTokens, home_secret
from tinkex.server.streams import STREAM_SAMPLE, stream_endpoint
from tinkex.service.config import ServiceConfig
from tinkex.service.ledger import Ledger
from tinkex.service.refusal import Refusal
from tinkex.service.service import Service

KEEP_ALIVE = 75  # seconds: longer than clients and proxies keep theirs, so that it is they who hang up
LEDGER = "ledger.sqlite"


class StartError(TinkerError):
    """The server cannot start; the message says what is in the way and what to do."""


@dataclass(frozen=True)
class ServerConfig:
    """Where a server listens, and what is behind it."""

    service: ServiceConfig
    host: str = "127.0.0.1"
    port: int = 8000  # 0: any free one
    public_url: str = ""  # how clients reach it, where that is not what they say in their Host header
    drain_seconds: float = (
        5.0  # how long polls under way may still find their results when it is told to stop
    )
    max_body: int = MAX_BODY


def serve(config: ServerConfig, say: Callable[[str], None]) -> None:
    """Serve until a signal says stop. `say` gets what a person at the terminal should read."""
    _tune_process()
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(Server(config, say).run(signals=(signal.SIGINT, signal.SIGTERM)))


def _tune_process() -> None:
    """For a process that is a server and nothing else."""
    # A thread that reads a big body lets the event loop have the interpreter after 1 ms instead of 5.
    sys.setswitchinterval(0.001)
    # Each request makes a few hundred objects, next to none of them in cycles: look for those less often.
    gc.set_threshold(50_000, 20, 100)
    if sys.platform != "win32":
        import resource

        # Every long poll holds a socket; the usual soft limit is 1,024.
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:  # not on Windows
        return None
    return uvloop.new_event_loop


class Server:
    """One service behind one port."""

    def __init__(self, config: ServerConfig, say: Callable[[str], None] = lambda _: None) -> None:
        self.config = config
        self.service = Service(config.service)
        self._say = say
        self._secret = _prepare_home(config.service.home)
        self._must_be_allowed()
        self._socket = _listen(config.host, config.port)
        self.address: tuple[str, int] = self._socket.getsockname()[:2]
        self.url = config.public_url or _url(config.host, self.address[1])
        on_this_machine = _is_loopback(config.host) and not config.public_url
        # Between processes of one machine, sending bytes is cheaper than packing them.
        bodies = Bodies(limit=config.max_body, compress=not on_this_machine)
        self.door = Door(self.service, bodies=bodies, public_url=config.public_url)
        self._uvicorn = _Uvicorn(self._uvicorn_config(), self.door, config.drain_seconds)

    def _must_be_allowed(self) -> None:
        if _is_loopback(self.config.host) or _has_keys(self.config.service.home):
            return
        raise StartError(
            f"no API key is configured, so only this machine may connect, not --host {self.config.host}. "
            f"Make a key first: tinkex server keys add NAME --home {self.config.service.home}"
        )

    def _uvicorn_config(self) -> uvicorn.Config:
        signer = Signer(self._secret)
        home = self.config.service.home
        routes = [
            Route(STREAM_SAMPLE, stream_endpoint(self.door), methods=["POST"]),
            Route("/metrics", Endpoint(self.door, "metrics", self._metrics), methods=["GET"]),
            *console_routes(self.door),
            *download_routes(self.door, home, signer),
            *openai_routes(self.door),
        ]
        return uvicorn.Config(
            build_app(self.door, routes),
            interface="asgi3",
            http=Connection,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=KEEP_ALIVE,
            timeout_graceful_shutdown=int(self.config.drain_seconds) + 10,
            backlog=4096,
        )

    async def _metrics(self, http: Http) -> Response:
        if self.door.auth is not None and not self.door.auth.is_open:
            self.door.admit(http)
        from tinkex.server.prometheus import CONTENT_TYPE, Page

        return Response(Page(self.door.metrics).text(), 200, {"content-type": CONTENT_TYPE})

    # -- life --------------------------------------------------------------------------------------------

    async def run(self, signals: Iterable[signal.Signals] = ()) -> None:
        """Serve until `stop`, or one of `signals`."""
        loop = asyncio.get_running_loop()
        for number in signals:
            loop.add_signal_handler(number, self.stop)
        listening = loop.create_task(self._uvicorn.serve([self._socket]))
        starting = loop.create_task(self._start())
        try:
            await asyncio.wait([listening, starting], return_when=asyncio.FIRST_COMPLETED)
            if starting.done():
                starting.result()
            await listening
        finally:
            await self._end(listening, starting)

    def stop(self) -> None:
        """End, letting work under way finish; asked a second time, at once."""
        self._uvicorn.force_exit = self._uvicorn.should_exit
        self._uvicorn.should_exit = True

    async def _start(self) -> None:
        try:
            await self.service.start()
        except (TinkerError, Refusal, OSError, ValueError) as error:
            raise StartError(_first_line(error)) from error
        core = self.service.core
        core.link = link_maker(Signer(self._secret), self.config.service.home)
        core.opened_by = WeightsTokens(self._secret).opened
        core.issues_tokens = True
        self.service.samplers.observers.append(self.door.metrics.sampled)
        self.service.runs.observe = self.door.metrics.worked
        self.door.metrics.watch(_Watched(self.service))
        self.door.auth = Auth(core.ledger, self._secret)
        for line in self._greeting():
            self._say(line)

    async def _end(self, listening: asyncio.Task[None], starting: asyncio.Task[None]) -> None:
        self.stop()
        starting.cancel()
        await asyncio.gather(listening, starting, return_exceptions=True)
        if self.service.ready:
            await self.service.stop()
        self.door.bodies.close()
        self._socket.close()

    # -- what a person reads -----------------------------------------------------------------------------

    def _greeting(self) -> Iterator[str]:
        assert self.door.auth is not None
        home = self.config.service.home
        yield f"tinkex {__version__} serves {self.url} (state in {home})"
        for model in self.service.core.engines:
            yield f"  {model.name}: {model.place}{_about_engine(model.engine)}"
        yield ""
        if self.door.auth.is_open:
            key = "tml-local"
            yield "No API key is configured: only this machine can connect, any key that begins with tml-"
            yield "will do, and each is a tenant of its own. `tinkex server keys add NAME` makes a real one."
        else:
            key = "tml-…"
            yield "Clients need a key: `tinkex server keys add NAME` makes one."
        yield ""
        yield "In a client's shell:"
        yield f"  export TINKER_BASE_URL={self.url}"
        yield f"  export TINKER_API_KEY={key}"


class _Uvicorn(uvicorn.Server):
    """uvicorn, with signals left to us and an end that long polls do not delay."""

    def __init__(self, config: uvicorn.Config, door: Door, drain_seconds: float) -> None:
        super().__init__(config)
        self._door, self._drain_seconds = door, drain_seconds

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        # The ports close at once and connections after their answer; polls get a while to find theirs.
        draining = asyncio.create_task(self._door.drain(self._drain_seconds))
        await super().shutdown(sockets)
        draining.cancel()


class _Watched:
    """A service's gauges."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def queue_depths(self) -> Iterable[tuple[str, int]]:
        return [(worker.model.name, worker.scheduler.waiting()) for worker in self._service.runs.workers]

    def engine_stats(self) -> Iterable[tuple[str, dict[str, float]]]:
        models = self._service.core.engines
        return [(model.name, model.engine.stats()) for model in models if model.engine is not None]

    def futures_kept(self) -> int:
        return len(self._service.core.futures)


# -- pieces ----------------------------------------------------------------------------------------------


def _prepare_home(home: Path) -> bytes:
    try:
        home.mkdir(parents=True, exist_ok=True)
        return home_secret(home)
    except (OSError, ValueError) as error:
        raise StartError(f"the home {home} cannot be used: {error}") from None


def _has_keys(home: Path) -> bool:
    ledger = Ledger(home / LEDGER)
    try:
        return bool(ledger.keys())
    finally:
        ledger.close()


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        # Said in full: asyncio turns Nagle's algorithm off only for sockets that say they are TCP.
        listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    except OSError as error:
        raise StartError(f"--host {host!r} is no address of this machine: {error}") from None
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise StartError(
                f"port {port} of {host} is in use: stop what uses it, or give another --port"
            ) from None
        raise StartError(f"cannot listen at {host}:{port}: {error.strerror}") from None
    return listener


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _url(host: str, port: int) -> str:
    if host in ("0.0.0.0", "::", ""):
        host = socket.gethostname()
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _about_engine(engine: Engine | None) -> str:
    if engine is None:
        return " (loaded on first use)"
    info = engine.info
    plan: dict[str, int] = getattr(engine, "memory", {})
    parts = [f"{info.parameters / 1e6:.1f} M parameters, context {info.max_context}"]
    parts += [f"{use} {size / 2**30:.2f} GiB" for use, size in plan.items() if use != "free"]
    return f" ({' · '.join(parts)})"


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]

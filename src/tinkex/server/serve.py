"""The life of a server process: bind the port, start the service, serve, drain, stop.

The port answers from the beginning, with 503 until the models are loaded. A failed start is a StartError of
one line. The first signal drains open requests; the second stops at once. Without any API key
only loopback connections are allowed, and no public URL.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import signal
import socket
import sys
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from tinkex._version import __version__
from tinkex.config import is_loopback_host
from tinkex.engine.protocol import Engine
from tinkex.errors import TinkerError
from tinkex.server.anthropic.messages_api import anthropic_routes
from tinkex.server.api_keys import LOCAL_KEY, Authenticator
from tinkex.server.bodies import MAX_UNDECODED, MAX_UNDECODED_PER_USER, BodyCodec, IncomingRequest
from tinkex.server.console.console_routes import server_console
from tinkex.server.downloads import download_routes
from tinkex.server.forward import Forwarder
from tinkex.server.gateway import Endpoint, Gateway, build_app
from tinkex.server.generate import generate_routes
from tinkex.server.metrics import Metrics
from tinkex.server.openai.responses_api import responses_routes
from tinkex.server.openai.routes import openai_routes, unknown_routes
from tinkex.server.openai.text_sampler import TextSampler, load_tokenizers
from tinkex.server.signing import DownloadSigner, WeightsTokens, home_secret
from tinkex.server.stream_sample import stream_sample_endpoint
from tinkex.server.uvicorn_protocol import CONNECTION, SingleWriteProtocol
from tinkex.service.config import ServiceConfig
from tinkex.service.peers import Peers
from tinkex.service.refusal import Caller, InUse, Refusal
from tinkex.service.service import ServerHooks, Service
from tinkex.store import is_remote
from tinkex.wire import ops
from tinkex.wire.codec import MAX_BODY

try:
    import resource
except ImportError:  # not on Windows
    resource = None

KEEP_ALIVE = 330  # seconds: longer than clients and proxies keep theirs, so that they close connections first
CROWDED_KEEP_ALIVE = 10  # while more than half of the connections that are accepted are open
TICKS = 5  # of uvicorn's clock, 0.1 s each, between two looks at the deadlines of connections
SPARE_FILES = 256  # descriptors that connections leave to files


class StartError(TinkerError):
    """The server cannot start; the message says why and what to do."""


@dataclass(frozen=True)
class ServerConfig:
    """Where a server listens, and which service it serves."""

    service: ServiceConfig
    host: str = "127.0.0.1"
    port: int = 8000  # 0: any free one
    public_url: str = ""  # how clients reach it, if not by the Host header that they send
    drain_seconds: float = 5.0  # for open polls and streams, when the server stops
    max_body: int = MAX_BODY
    max_connections: int = 16_384  # or fewer, if the process may not open as many files
    requests_per_user: int = 8_192  # open at a time, long polls included
    body_memory: int = MAX_UNDECODED
    body_memory_per_user: int = MAX_UNDECODED_PER_USER
    peer_url: str = ""  # how other servers of a shared ledger reach it, if not at its host and port
    cors_origins: tuple[str, ...] = ()  # whose pages may call the APIs from a browser


def serve(config: ServerConfig, say: Callable[[str], None]) -> None:
    """Serve until SIGINT or SIGTERM. `say` prints a line for the person at the terminal."""
    _tune_process()
    try:
        from uvloop import new_event_loop
    except ImportError:  # not on Windows
        new_event_loop = None
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(Server(config, say).run(signals=(signal.SIGINT, signal.SIGTERM)))


def _tune_process() -> None:
    # A thread that decodes a large body yields the GIL to the event loop after 1 ms instead of 5.
    sys.setswitchinterval(0.001)
    # A request creates a few hundred objects, almost none of them in cycles: collect less often.
    gc.set_threshold(50_000, 20, 100)
    if resource is not None:
        # Every long poll holds a socket; the usual soft limit is 1,024.
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _most_connections(wanted: int) -> int:
    if resource is None:
        return wanted
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return wanted if files == resource.RLIM_INFINITY else min(wanted, max(1, files - SPARE_FILES))


class Server:
    """One service behind one port."""

    def __init__(self, config: ServerConfig, say: Callable[[str], None] = lambda _: None) -> None:
        self.config = config
        self._say = say
        home = config.service.home
        self._socket = listen(config.host, config.port)
        self.address: tuple[str, int] = self._socket.getsockname()[:2]
        self.url = config.public_url or _url(config.host, self.address[1])
        try:
            self._build(home)
        except BaseException:
            self._socket.close()
            raise

    def _build(self, home: Path) -> None:
        config, peers = self.config, None
        try:
            home.mkdir(0o700, parents=True, exist_ok=True)
            if config.service.ledger is None:
                secret = home_secret(home)
            else:
                peers = Peers(config.service, config.peer_url or _url(config.host, self.address[1]))
                secret = peers.database.secret()
        except TinkerError as error:
            raise StartError(_first_line(error)) from error
        except (OSError, ValueError) as error:
            raise StartError(f"the home {home} cannot be used: {error}") from None
        self._secret, self._metrics, self._signer = secret, Metrics(), DownloadSigner(secret)
        place = config.service.store  # what an object store holds, it sends by itself
        self._files = home if place is None or is_remote(place) else Path(place)
        hooks = ServerHooks(self._link, WeightsTokens(secret).run_of, self._metrics, peers)
        try:
            self.service = Service(config.service, server=hooks)
        except TinkerError as error:
            raise StartError(_first_line(error)) from error
        authenticator = Authenticator(self.service.ledger, secret)
        public = config.public_url and f"--public-url {config.public_url}"
        elsewhere = public if is_loopback_host(config.host) else f"--host {config.host}"
        if elsewhere and authenticator.is_open:
            self.service.ledger.close()
            where = f"--home {home}" if peers is None else "--ledger postgresql://…"
            raise StartError(
                f"no API key is configured, so only this machine may connect, without {elsewhere}. "
                f"Make a key first: tinkex server keys add NAME {where}"
            )
        on_this_machine = is_loopback_host(config.host) and not config.public_url
        # Between processes of one machine, sending bytes is cheaper than compressing them.
        bodies = BodyCodec(
            limit=config.max_body, undecoded=config.body_memory,
            undecoded_per_user=config.body_memory_per_user, compress=not on_this_machine,
        )  # fmt: skip
        requests = InUse("open requests", config.requests_per_user, config.max_connections)
        self.gateway = Gateway(
            self.service, authenticator, bodies, self._metrics, requests, config.public_url,
            None if peers is None else Forwarder(),
        )  # fmt: skip
        self._most_connections = _most_connections(config.max_connections)
        self._uvicorn = _UvicornServer(
            self._uvicorn_config(), self.gateway, config.drain_seconds, self._most_connections
        )

    def _link(self, caller: Caller, path: Path, expires: float) -> str:
        """A link to a saved file or directory, valid until a unix time."""
        below = path.relative_to(self._files).as_posix()
        return caller.public_url + self._signer.sign(below, expires, caller.key_id)

    def _uvicorn_config(self) -> uvicorn.Config:
        gateway = self.gateway
        text = TextSampler(gateway)
        routes = [
            Route(ops.STREAM_SAMPLE.path, stream_sample_endpoint(gateway), methods=["POST"]),
            Route("/metrics", Endpoint(gateway, "metrics", self._metrics_page), methods=["GET"]),
            *server_console(gateway, self._secret),
            *download_routes(gateway, self._files, self._signer),
            *openai_routes(text),
            *responses_routes(text),
            *anthropic_routes(text),
            *generate_routes(text),
            *unknown_routes(text),
        ]
        return uvicorn.Config(
            self._across_origins(build_app(gateway, routes)), interface="asgi3", ws="none",
            http=partial(SingleWriteProtocol, most_connections=self._most_connections),  # type: ignore[arg-type]
            lifespan="off", log_config=None, access_log=False, server_header=False, proxy_headers=False,
            backlog=4096,
            timeout_keep_alive=KEEP_ALIVE, timeout_graceful_shutdown=int(self.config.drain_seconds) + 10,
        )  # fmt: skip

    def _across_origins(self, app: ASGIApp) -> ASGIApp:
        """Let pages of the configured origins in; without any, a browser lets in none."""
        if not self.config.cors_origins:
            return app

        async def by_send(scope: Scope, receive: Receive, send: Send) -> None:
            scope.pop(CONNECTION, None)  # responses that bypass `send` would lack these headers
            await app(scope, receive, send)

        methods = ["GET", "POST", "DELETE"]
        return CORSMiddleware(by_send, self.config.cors_origins, allow_methods=methods, allow_headers=["*"])

    async def _metrics_page(self, http: IncomingRequest) -> Response:
        if self.service.ready and not self.gateway.authenticator.is_open:
            self.gateway.admit(http)
        content_type, page = self._metrics.page(self.service)
        return Response(page, 200, {"content-type": content_type})

    # -- start and stop ----------------------------------------------------------------------------------

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
                await self._while_it_counts(listening)
            await listening
        finally:
            await self._end(listening, starting)

    async def _while_it_counts(self, listening: asyncio.Task[None]) -> None:
        """Wait for the end; StartError, at once, if other servers have ended this one."""
        if (peers := self.service.peers) is None:
            return
        lost = asyncio.get_running_loop().create_task(peers.lost.wait())
        await asyncio.wait([listening, lost], return_when=asyncio.FIRST_COMPLETED)
        if lost.done():
            self._uvicorn.force_exit = True
            raise StartError(peers.why_lost)
        lost.cancel()

    def stop(self) -> None:
        """Stop after open requests have finished; called a second time, stop at once."""
        self._uvicorn.force_exit = self._uvicorn.should_exit
        self._uvicorn.should_exit = True

    async def _start(self) -> None:
        try:
            await self.service.start()
            await load_tokenizers(self.service)
        except (TinkerError, Refusal, OSError, ValueError) as error:
            raise StartError(_first_line(error)) from error
        for line in self._greeting():
            self._say(line)

    async def _end(self, listening: asyncio.Task[None], starting: asyncio.Task[None]) -> None:
        self.stop()
        starting.cancel()
        await asyncio.gather(listening, starting, return_exceptions=True)
        if self.service.ready:
            await self.service.stop()
        if self.gateway.forwarder is not None:
            await self.gateway.forwarder.aclose()
        self.gateway.bodies.close()
        self._socket.close()

    def _greeting(self) -> Iterator[str]:
        home = self.config.service.home
        yield f"tinkex {__version__} serves {self.url} (state in {home})"
        for model in self.service.models:
            yield f"  {model.name}: {model.place}{_about_engine(model.engine)}"
        yield f"  console: {self.url}/console"
        yield ""
        is_open = self.gateway.authenticator.is_open
        if is_open:
            yield "No API key is configured: only this machine can connect. Any key is accepted, and each is"
            yield "its own tenant; /v1 needs none. `tinkex server keys add NAME` makes a real key."
        else:
            yield "Clients need a key: `tinkex server keys add NAME` makes one."
        yield ""
        yield "In a client's shell:"
        yield f"  export TINKER_BASE_URL={self.url}"
        yield f"  export TINKER_API_KEY={LOCAL_KEY if is_open else 'tml-…'}"
        yield f"For OpenAI's clients the base URL is {self.url}/v1, for Anthropic's {self.url}."


class _UvicornServer(uvicorn.Server):
    """uvicorn without its signal handlers; at shutdown it drains long polls first."""

    def __init__(
        self, config: uvicorn.Config, gateway: Gateway, drain_seconds: float, most_connections: int
    ) -> None:
        super().__init__(config)
        self._gateway, self._drain_seconds = gateway, drain_seconds
        self._most_connections, self._swept, self._ticked = most_connections, 0.0, 0.0

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield

    async def on_tick(self, counter: int) -> bool:
        now = asyncio.get_running_loop().time()
        self._gateway.metrics.stalled(max(0.0, now - self._ticked - 0.1) if self._ticked else 0.0)
        self._ticked = now
        if counter % TICKS == 0:
            self._close_late_connections(now)
        return await super().on_tick(counter)

    def _close_late_connections(self, now: float) -> None:
        # If the event loop was blocked, clients may have sent in time what it has not read yet.
        in_time, self._swept = now - self._swept < 2.0, now
        if not in_time:
            return
        connections: Any = self.server_state.connections
        crowded = len(connections) > self._most_connections // 2
        for connection in list(connections):
            connection.expire(now, KEEP_ALIVE - CROWDED_KEEP_ALIVE if crowded else 0.0)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        # The port closes at once, and a connection after its response. Open polls get a while to finish.
        draining = asyncio.create_task(self._gateway.drain(self._drain_seconds))
        await super().shutdown(sockets)
        draining.cancel()


# -- helpers ---------------------------------------------------------------------------------------------


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens there; StartError if it cannot."""
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        # IPPROTO_TCP must be explicit: asyncio sets TCP_NODELAY only on sockets that have it.
        listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    except OSError as error:
        raise StartError(f"--host {host!r} is no address of this machine: {error}") from None
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        why = f"cannot listen at {host}:{port}: {error.strerror}"
        if error.errno == errno.EADDRINUSE:
            why = f"port {port} of {host} is in use: stop what uses it, or give another --port"
        raise StartError(why) from None
    return listener


def _url(host: str, port: int) -> str:
    if host in ("0.0.0.0", "::", ""):
        host = socket.gethostname()
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _about_engine(engine: Engine | None) -> str:
    if engine is None:
        return " (loaded on first use)"
    info, memory = engine.info, engine.heartbeat().memory
    parts = [f"{info.parameters / 1e6:.1f} M parameters, context {info.max_context}"]
    parts += [f"{use} {size / 2**30:.2f} GiB" for use, size in memory.items() if use != "free"]
    return f" ({' · '.join(parts)})"


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]

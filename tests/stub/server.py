"""The stub server itself: its thread, its script of misbehaviour, and the record of what was sent to it."""

from __future__ import annotations

import asyncio
import functools
import itertools
import resource
import ssl
import tempfile
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from tests.stub.api import Api
from tests.stub.futures import Call
from tests.stub.http import Connection, Reply, Request, reply
from tests.stub.script import Action, Rule


@functools.cache
def certificate() -> Path:
    """A certificate for 127.0.0.1 with its key, made for this process: `Stub(tls=True)` shows it."""
    import trustme

    place = Path(tempfile.mkdtemp(prefix="stub-")) / "localhost.pem"
    authority = trustme.CA()
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(place)
    authority.cert_pem.write_to_path(place, append=True)
    return place


class Stub(Api):
    """A Tinker server on loopback. Its attributes may be changed while it runs.

    Keyword arguments are flags of client/config: `Stub(sample_use_retrieve_futures=True)`. Ops are named by
    the end of their path: `stub.script("asample", status(503), drop())`, `stub.hold("optim_step")`.
    """

    def __init__(
        self, *, port: int = 0, record: bool = True, tls: bool = False, http2: str = "", **config: Any
    ) -> None:
        super().__init__()
        self.config = config
        self.port = port
        self.tls = tls  # https, with `certificate()`
        self.http2 = http2  # with TLS: HTTP/2 alone, and what becomes of a request that is dropped
        self.record = record
        self.requests: list[Request] = []
        self.total_requests = 0
        self.connections = 0
        self.peak_connections = 0
        self._connections: set[Connection] = set()
        self._connection_numbers = itertools.count(1)
        self._rules: list[Rule] = []
        self._arrived = threading.Condition()
        self._thread: threading.Thread | None = None

    # --- running

    def __enter__(self) -> Stub:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._thread is not None:
            self.stop()

    def start(self) -> None:
        """Listen; after stop() on the same port, with all state kept."""
        assert self._thread is None, "already running"
        listening: Future[int] = Future()
        self._thread = threading.Thread(target=self._run, args=(listening,), name="stub", daemon=True)
        self._thread.start()
        self.port = listening.result(timeout=10)
        self.url = f"{'https' if self.tls else 'http'}://127.0.0.1:{self.port}"

    def stop(self) -> None:
        """Stop listening and break every connection, as a crash would."""
        assert self._thread is not None, "not running"
        self.loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join()
        self._thread = None

    def _run(self, listening: Future[int]) -> None:
        with asyncio.Runner(loop_factory=fast_loop()) as runner:
            runner.run(self._listen(listening))

    async def _listen(self, listening: Future[int]) -> None:
        self.loop = asyncio.get_running_loop()
        self._stopping = asyncio.Event()
        self._connections.clear()  # one that was accepted while the last loop ended is never closed
        try:
            server = await self.loop.create_server(
                self._protocol(), "127.0.0.1", self.port, backlog=4096, ssl=self._context()
            )
        except OSError as error:
            listening.set_exception(error)
            return
        listening.set_result(server.sockets[0].getsockname()[1])
        await self._stopping.wait()
        server.close()
        while self._connections:  # one may be accepted while the others close
            for connection in self._connections:
                connection.transport.abort()
            await asyncio.sleep(0)

    def _protocol(self) -> Callable[[], asyncio.BaseProtocol]:
        if not self.http2:
            return lambda: Connection(self)
        from tests.stub.http2 import Http2Connection

        return lambda: Http2Connection(self, self.http2)

    def _context(self) -> ssl.SSLContext | None:
        if not self.tls:
            return None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate())
        if self.http2:
            context.set_alpn_protocols(["h2"])
        return context

    def _on_loop(self, function: Callable[[], None]) -> None:
        """Run it where the state lives; at once when the server is down."""
        if self._thread is None:
            return function()
        done: Future[None] = Future()
        self.loop.call_soon_threadsafe(lambda: done.set_result(function()))
        done.result(timeout=30)

    # --- misbehaving

    def script(
        self,
        pattern: str,
        *actions: Action,
        where: Callable[[Request], bool] | None = None,
        always: bool = False,
    ) -> None:
        """Queue actions for the next requests that match; with `always` the last one goes on for ever."""
        self._rules.append(Rule(pattern, deque(actions), where, always))

    def unscript(self) -> None:
        """Forget every scripted action."""
        self._rules = []

    def hold(self, *ops: str) -> None:
        """Keep results of these ops ("asample", "optim_step", ...) pending until release()."""
        self.held_ops |= set(ops)

    def release(self, *ops: str) -> None:
        """Let held results go: those of the named ops, or all."""
        self._on_loop(lambda: self.let_go(set(ops) or set(self.held_ops)))

    def forget_results(self) -> None:
        """Lose every future, as a restart without a journal would: asking for one answers 410."""
        self._on_loop(self.lose_results)

    def forget_samples(self, *, abruptly: bool) -> None:
        """As above, and nothing of it is told to batch polls; `abruptly` breaks every connection too."""

        def forget() -> None:
            self.lose_results()
            self.channels.clear()
            for connection in list(self._connections) if abruptly else ():
                connection.transport.abort()

        self._on_loop(forget)

    def reset(self) -> None:
        """A fresh server at the same address: no state, no script, no records."""
        self.unscript()
        self.held_ops = set()
        self._on_loop(self.clear)
        self.requests.clear()
        self.peak_connections = self.connections

    # --- looking

    def sent(self, pattern: str = "*") -> list[Request]:
        """The recorded requests that match, oldest first."""
        return [request for request in list(self.requests) if request.matches(pattern)]

    def count(self, pattern: str = "*") -> int:
        return len(self.sent(pattern))

    def wait_for(self, pattern: str, count: int = 1, timeout: float = 10.0) -> list[Request]:
        """Block until `count` matching requests have come."""
        with self._arrived:
            if not self._arrived.wait_for(lambda: self.count(pattern) >= count, timeout):
                got = self.count(pattern)
                raise TimeoutError(f"{got} of {count} requests for {pattern!r} came within {timeout} s")
        return self.sent(pattern)

    # --- called by connections

    def opened(self, connection: Connection) -> int:
        self._connections.add(connection)
        self.connections = len(self._connections)
        self.peak_connections = max(self.peak_connections, self.connections)
        return next(self._connection_numbers)

    def closed(self, connection: Connection) -> None:
        self._connections.discard(connection)
        self.connections = len(self._connections)

    def handle(self, request: Request, connection: Connection) -> None:
        self.total_requests += 1
        if self.record:
            with self._arrived:
                self.requests.append(request)
                self._arrived.notify_all()
        if request.path.startswith("/stub/"):
            return connection.answer(self._control(request))
        action = next(filter(None, (rule.take(request) for rule in self._rules)), None)
        if action is None:
            self.route(Call(request, connection.answer))
        elif action.wait:
            self.loop.call_later(action.wait, self._act, action, request, connection)
        else:
            self._act(action, request, connection)

    def _act(self, action: Action, request: Request, connection: Connection) -> None:
        if action.end == "default":
            return self.route(Call(request, connection.answer, action.failure))
        if action.effect:
            self.route(Call(request, lambda _: None))
        elif action.refuses:
            self.refuse(request)
        if action.end == "reply":
            connection.answer(action.reply)
        elif action.end == "drop":
            connection.transport.abort()

    def _control(self, request: Request) -> Reply:
        """The same from another process: POST /stub/hold {"ops": [...]}, .../release, .../config {...}."""
        match request.path.removeprefix("/stub/"):
            case "hold":
                self.hold(*request.json["ops"])
            case "release":
                self.let_go(set(request.json["ops"]))
            case "config":
                self.config = request.json
            case "forget_peak":
                self.peak_connections = self.connections
        used = resource.getrusage(resource.RUSAGE_SELF)
        counted = {"connections": self.connections, "peak_connections": self.peak_connections}
        counted |= {"requests": self.total_requests, "held": len(self.held), "futures": len(self.promises)}
        return reply({**counted, "cpu_seconds": used.ru_utime + used.ru_stime})


def fast_loop() -> Callable[[], asyncio.AbstractEventLoop]:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop
    return uvloop.new_event_loop

"""An answer that is whole leaves in one piece; nothing is lost, held or reordered."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from tinkex.server import uvicorn_protocol
from tinkex.server.gateway import BufferedResponse
from tinkex.server.uvicorn_protocol import CONNECTION, LARGE, SingleWriteProtocol

pytestmark = pytest.mark.anyio

GET = b"GET /%s HTTP/1.1\r\nhost: here\r\n\r\n"


class Wire(asyncio.Transport):
    """A transport that remembers each call to send something."""

    def __init__(self) -> None:
        super().__init__({"peername": ("127.0.0.1", 5), "sockname": ("127.0.0.1", 6)})
        self.sent: list[bytes] = []
        self.closed = False

    def write(self, data: bytes) -> None:  # type: ignore[override]
        if not self.closed:
            self.sent.append(data)

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    def can_write_eof(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...


class Clock:
    """The running event loop, but time passes when it is told to."""

    def __init__(self) -> None:
        self._loop, self.now = asyncio.get_running_loop(), 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loop, name)

    def time(self) -> float:
        return self.now

    def wait(self, seconds: float, connection: SingleWriteProtocol) -> None:
        self.now += seconds
        connection.expire(self.now)


async def answer(scope: Scope, receive: Receive, send: Send) -> None:
    """Says the path that was asked for; of /large, more than is worth copying."""
    while scope["method"] == "POST":
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        if not message["more_body"]:
            break
    body = b"x" * (LARGE + 1) if scope["path"] == "/large" else scope["path"].encode()
    await BufferedResponse(body, "text/plain", 408 if scope["path"] == "/later" else 200)(
        scope, receive, send
    )


@pytest.fixture
def connect() -> Callable[..., tuple[SingleWriteProtocol, Wire]]:
    config = uvicorn.Config(
        answer, interface="asgi3", http=SingleWriteProtocol, ws="none", log_config=None, timeout_keep_alive=75
    )
    config.load()

    def make(loop: Any = None) -> tuple[SingleWriteProtocol, Wire]:
        wire = Wire()
        state = ServerState()
        state.default_headers = [(b"date", b"today")]
        connection = SingleWriteProtocol(config, state, {}, loop or asyncio.get_running_loop())
        connection.connection_made(wire)
        return connection, wire

    return make


async def turns(number: int = 5) -> None:
    for _ in range(number):
        await asyncio.sleep(0)


async def test_head_and_body_leave_together(connect):
    connection, wire = connect()
    connection.data_received(GET % b"later")
    await turns()
    head = b"HTTP/1.1 408 Request Timeout\r\ndate: today\r\ncontent-type: text/plain\r\ncontent-length: 6"
    assert wire.sent == [head + b"\r\n\r\n/later"]
    assert not wire.closed
    connection.data_received(GET % b"again")
    await turns()
    assert len(wire.sent) == 2
    assert wire.sent[1].endswith(b"\r\n\r\n/again")


async def test_requests_sent_without_waiting_are_answered_in_order(connect):
    connection, wire = connect()
    connection.data_received(GET % b"a" + GET % b"b" + GET % b"c")
    await turns(20)
    said = b"".join(wire.sent)
    assert said.count(b"HTTP/1.1 200 OK") == 3
    assert said.index(b"/a") < said.index(b"/b") < said.index(b"/c")


@pytest.mark.parametrize(
    "request_bytes",
    [
        GET % b"large",
        b"HEAD /x HTTP/1.1\r\nhost: here\r\n\r\n",
        b"GET /x HTTP/1.1\r\nconnection: close\r\n\r\n",
        b"GET /x HTTP/1.0\r\n\r\n",
    ],
)
async def test_all_else_takes_the_long_way(connect, request_bytes: bytes):
    connection, wire = connect()
    connection.data_received(request_bytes)
    await turns()
    head, _, body = b"".join(wire.sent).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\ndate: today\r\n")
    length = (
        0 if request_bytes.startswith(b"HEAD") else int(head.split(b"content-length: ")[1].split(b"\r")[0])
    )
    assert len(body) == length
    assert wire.closed == (b"connection: close" in head)
    assert wire.closed == (not request_bytes.endswith(b"host: here\r\n\r\n"))


async def test_a_client_that_does_not_read_is_waited_for(connect):
    connection, wire = connect()
    connection.pause_writing()
    connection.data_received(GET % b"x")
    await turns(20)
    assert wire.sent == []
    connection.resume_writing()
    await turns()
    assert b"".join(wire.sent).endswith(b"/x")


async def test_a_server_that_stops_sends_what_was_answered_first(connect):
    connection, wire = connect()
    connection.data_received(GET % b"last")
    await asyncio.sleep(0)  # answered, and not sent yet
    assert connection.cycle.response_complete
    connection.shutdown()
    await turns()
    assert wire.sent[0].endswith(b"/last")
    assert wire.closed


async def test_a_client_that_has_gone_is_no_error(connect):
    connection, wire = connect()
    connection.data_received(GET % b"x")
    connection.connection_lost(None)
    await turns()
    assert wire.sent == []


async def test_a_request_leaves_no_circle_behind(connect):
    connection, _ = connect()
    connection.data_received(GET % b"x")
    await turns()
    kept = connection.scope
    connection.data_received(GET % b"y")
    await turns()
    assert kept[CONNECTION] is connection  # which holds the scope of its last request alone
    assert connection.scope is not kept
    assert connection.cycle.scope is not kept


@pytest.mark.parametrize("path", [b"x", b"large"])  # sent whole, and the long way
async def test_a_client_that_falls_silent_is_hung_up_on(connect, path: bytes):
    clock = Clock()
    connection, wire = connect(clock)
    for _ in range(5):
        connection.data_received(GET % path)
        await turns()
        clock.wait(50, connection)
    assert not wire.closed
    clock.wait(24, connection)
    assert not wire.closed
    clock.wait(1, connection)
    assert wire.closed
    assert b" 408 " not in b"".join(wire.sent)  # nothing was asked


POST = b"POST /x HTTP/1.1\r\nhost: here\r\ncontent-length: 1000000\r\n\r\n"


async def test_a_client_that_has_asked_is_not_late(connect):
    """Deadlines are the client's: a server that takes long to answer is not cut off."""
    clock = Clock()
    connection, wire = connect(clock)
    connection.pause_writing()  # so the answer takes long
    connection.data_received(GET % b"x")
    await turns()
    clock.wait(1000, connection)
    assert not wire.closed
    connection.resume_writing()
    await turns()
    assert b"".join(wire.sent).endswith(b"/x")


async def test_a_head_that_arrives_slowly_is_given_up(connect):
    clock = Clock()
    connection, wire = connect(clock)
    connection.data_received(GET % b"x")
    await turns()
    for byte in GET % b"y" * 4:
        connection.data_received(bytes([byte]))
        clock.wait(0.9, connection)
        if len(wire.sent) == 2:
            break
    assert clock.now == pytest.approx(10, abs=2)
    assert wire.sent[1].startswith(b"HTTP/1.1 408 ")
    assert b"connection: close" in wire.sent[1]
    clock.wait(uvicorn_protocol.LINGER_SECONDS, connection)
    assert wire.closed


@pytest.mark.parametrize(("size", "each", "given_up"), [(1, 31, 31), (1, 1, 31), (100_000, 20, None)])
async def test_a_body_must_make_progress(connect, size: int, each: float, given_up: float | None):
    clock = Clock()
    connection, wire = connect(clock)
    connection.data_received(POST)
    await turns()
    while not wire.sent and clock.now < 500:
        connection.data_received(b"x" * size)
        clock.wait(each, connection)
        await turns()
    if given_up is None:
        assert b" 408 " not in wire.sent[0]
    else:
        assert clock.now == pytest.approx(given_up, abs=1.5)
        assert wire.sent[0].startswith(b"HTTP/1.1 408 ")


@pytest.mark.parametrize(
    "head",
    [
        b"GET /x HTTP/1.1\r\na: " + b"x" * 70_000,  # never ends
        b"GET /" + b"x" * 70_000,
        b"GET /x HTTP/1.1\r\na: " + b"x" * 70_000 + b"\r\n\r\n",
        b"GET /x HTTP/1.1\r\n" + b"a: b\r\n" * 102,
        b"\r\n" * 40_000,
        b"POST /x HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n0\r\na: " + b"x" * 70_000,
        b"POST /x HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n0\r\n" + b"a: b\r\n" * 102,
        b"POST /x HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n1;a=" + b"x" * 70_000,
    ],
)
@pytest.mark.parametrize("piece", [1000, 2**20])
@pytest.mark.parametrize("before", [b"", GET % b"x"])
async def test_a_head_is_bounded(connect, head: bytes, piece: int, before: bytes):
    connection, wire = connect()
    if before:
        connection.data_received(before)
        await turns()
        wire.sent.clear()
    for i in range(0, len(head), piece):
        connection.data_received(head[i : i + piece])
    assert wire.sent[0].startswith(b"HTTP/1.1 431 ")
    assert b"connection: close" in wire.sent[0]
    await turns()
    connection.data_received(b"x" * 100_000)
    await turns()
    assert len(wire.sent) == 1


async def test_a_refused_client_that_sends_on_is_read_slowly_and_hung_up_on(connect):
    clock = Clock()
    connection, wire = connect(clock)
    connection.data_received(b"GET /x HTTP/1.1\r\na: " + b"x" * 70_000)
    for _ in range(4):
        connection.data_received(b"x" * 65536)
        assert connection.flow.read_paused
        await asyncio.sleep(2 * 65536 / uvicorn_protocol.DISCARD_RATE)
        assert not connection.flow.read_paused
    connection.data_received(b"x" * 65536)
    clock.wait(uvicorn_protocol.LINGER_SECONDS, connection)  # though what it sent has not been read
    assert wire.closed


async def test_a_large_body_is_no_head(connect):
    connection, wire = connect()
    for _ in range(3):
        connection.data_received(POST + b"x" * 100_000)
        for _ in range(9):
            connection.data_received(b"x" * 100_000)
        await turns()
    assert len(wire.sent) == 3
    assert all(sent.startswith(b"HTTP/1.1 200 ") for sent in wire.sent)

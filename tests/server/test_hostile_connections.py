"""Clients that send too much, too slowly or nothing, over real sockets: answered and closed."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable

import numpy as np
import pytest

import tinkex
from tests.server.conftest import KEY, MODEL, OTHER_KEY, PROTO, Running, pass_body
from tinkex.server import serve, uvicorn_protocol
from tinkex.server.bodies import zstd
from tinkex.types.data import Datum, ModelInput

pytestmark = pytest.mark.slow

ZSTD = {"content-encoding": "zstd"}


def connect(server: Running) -> socket.socket:
    return socket.create_connection(server.server.address, timeout=20)


def heard(sock: socket.socket) -> bytes:
    """All that the server says until it closes."""
    said = b""
    while part := sock.recv(65536):
        said += part
    return said


def is_served(server: Running) -> bool:
    return server.ask("GET", "/api/v1/healthz").status == 200


def drip(sock: socket.socket, data: bytes, pause: float) -> bytes:
    """Send a byte at a time; what the server says when it has had enough."""
    sock.settimeout(pause)
    for byte in data:
        try:
            sock.sendall(bytes([byte]))
            if said := sock.recv(65536):
                sock.settimeout(20)
                return said + heard(sock)
            return b""
        except TimeoutError:
            continue
        except OSError:
            return b""
    raise AssertionError("the server listened to the end")


def send_only(sock: socket.socket, data: bytes) -> None:
    """Send and never read, for as long as the server has it."""
    sock.settimeout(0.2)
    sent, end = 0, time.monotonic() + 40
    while time.monotonic() < end:
        with contextlib.suppress(TimeoutError):  # it reads no more requests while its answers are not taken
            sent += sock.send(data[sent : sent + 65536] or b"\r\n")


def test_endless_headers_are_refused_at_once(server: Running):
    for line in (b"x" * 1000, b"a: " + b"b" * 1000 + b"\r\n"):
        sent = 0
        with connect(server) as sock:
            sock.sendall(b"GET /api/v1/healthz HTTP/1.1\r\n")
            sock.setblocking(False)
            said = b""
            while not said and sent < 50_000_000:
                try:
                    sent += sock.send(line)
                except BlockingIOError:
                    time.sleep(0.001)
                try:
                    said = sock.recv(65536)
                except BlockingIOError:
                    continue
            sock.shutdown(socket.SHUT_WR)  # the server discards what is under way, and closes
            sock.settimeout(20)
            said += heard(sock)
        assert said.startswith(b"HTTP/1.1 431 ")
        assert b"65536 bytes and 100 header fields" in said
        assert sent < 20_000_000
    assert is_served(server)


@pytest.mark.slow
def test_a_slow_head_gets_408(start: Callable[..., Running], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(uvicorn_protocol, "HEAD_SECONDS", 0.5)
    server = start()
    with connect(server) as sock:
        said = drip(sock, b"GET /api/v1/healthz HTTP/1.1\r\na: " + b"x" * 1000, 0.05)
    assert said.startswith(b"HTTP/1.1 408 ")
    with connect(server) as silent:
        assert heard(silent) == b""  # nothing was asked, nothing is answered
    assert is_served(server)


@pytest.mark.parametrize("key", ["tml-alice", ""])
def test_a_body_that_stops_gets_408(start: Callable[..., Running], monkeypatch, key: str):
    monkeypatch.setattr(uvicorn_protocol, "BODY_SECONDS", 0.5)
    server = start()
    head = f"POST /api/v1/create_session HTTP/1.1\r\nx-api-key: {key}\r\ncontent-length: 100000\r\n\r\n"
    with connect(server) as sock:
        sock.sendall(head.encode())
        said = drip(sock, b"x" * 1000, 0.05) if key else heard(sock)
    assert said.startswith(b"HTTP/1.1 408 " if key else b"HTTP/1.1 401 ")
    assert is_served(server)


@pytest.mark.slow
def test_an_idle_connection_is_kept_for_minutes_and_closed_cleanly(
    start: Callable[..., Running], monkeypatch: pytest.MonkeyPatch
):
    assert serve.KEEP_ALIVE >= 300
    monkeypatch.setattr(serve, "KEEP_ALIVE", 2)
    server = start()
    connection = server.connect()
    for _ in range(3):
        connection.request("GET", "/api/v1/healthz")
        assert connection.getresponse().read()
        time.sleep(0.5)
    began = time.monotonic()
    assert connection.sock.recv(1) == b""  # an end, no reset
    assert time.monotonic() - began > 0.8
    connection.close()


@pytest.mark.slow
def test_a_client_that_reads_nothing_is_cut_off(
    start: Callable[..., Running], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(uvicorn_protocol, "UNREAD_SECONDS", 1.0)
    server = start()
    assert server.ask("GET", "/metrics").status == 200
    headers = "".join(f"{name}: {value}\r\n" for name, value in {"host": "a", **KEY}.items())
    asks = f"GET /metrics HTTP/1.1\r\n{headers}\r\n".encode() * 20_000
    with connect(server) as sock, pytest.raises(ConnectionError):
        send_only(sock, asks)
    assert is_served(server)


@pytest.mark.slow
def test_a_long_poll_is_not_cut_off(start: Callable[..., Running], monkeypatch: pytest.MonkeyPatch):
    for name in ("HEAD_SECONDS", "BODY_SECONDS"):
        monkeypatch.setattr(uvicorn_protocol, name, 0.3)
    monkeypatch.setattr(serve, "KEEP_ALIVE", 1)
    server = start(long_poll=2.0)
    run = server.open_run()
    gap = server.ask(
        "POST", "/api/v1/optim_step",
        {"model_id": run, "seq_id": 9, "adam_params": {"learning_rate": 0.1}},
    ).json  # fmt: skip
    answer = server.ask("POST", "/api/v1/retrieve_future", {"request_id": gap["request_id"]})
    assert answer.status == 408
    assert answer.json["type"] == "try_again"


@pytest.mark.slow
def test_connections_are_bounded_and_idle_ones_make_room(start: Callable[..., Running]):
    server = start(max_connections=20)
    held = [connect(server) for _ in range(20)]
    try:
        time.sleep(0.3)
        with connect(server) as one_more:
            one_more.sendall(
                b"GET /api/v1/healthz HTTP/1.1\r\nx-api-key: %s\r\n\r\n" % KEY["x-api-key"].encode()
            )
            said = heard(one_more)
        assert said.startswith(b"HTTP/1.1 503 ")
        assert b"retry-after: 1" in said
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            try:
                if is_served(server):
                    break
            except OSError:
                pass
            time.sleep(0.5)
        else:
            raise AssertionError("silent connections were not closed")
    finally:
        for sock in held:
            sock.close()


# -- limits of each user ---------------------------------------------------------------------------------


def begin_body(server: Running, size: int | None, key: str = "tml-alice", sent: bytes = b"") -> socket.socket:
    """A pass whose body is not finished; without a size it is chunked."""
    head = f"POST /api/v1/forward_backward HTTP/1.1\r\nx-api-key: {key}\r\n"
    head += f"content-type: {PROTO['content-type']}\r\n"
    head += "transfer-encoding: chunked\r\n\r\n" if size is None else f"content-length: {size}\r\n\r\n"
    sock = connect(server)
    sock.sendall(head.encode() + (b"%x\r\n%s\r\n" % (len(sent), sent) if size is None else sent))
    return sock


def refusal(sock: socket.socket, seconds: float = 0.5) -> bytes:
    """What the server says about an unfinished body; nothing if it goes on reading."""
    sock.settimeout(seconds)
    said = b""
    try:
        while not said.endswith(b"}"):
            said += sock.recv(65536)
    except TimeoutError:
        pass
    return said


def is_told_to_wait(said: bytes) -> bool:
    return said.startswith(b"HTTP/1.1 429 ") and b"retry-after: 1" in said


@pytest.mark.slow
def test_unfinished_bodies_of_one_user_are_bounded(server: Running):
    """By default two of the largest, not fourteen; nobody else notices."""
    held = [begin_body(server, 254_000_000) for _ in range(14)]
    try:
        said = [refusal(sock) for sock in held]
        assert sum(map(is_told_to_wait, said)) == 12
        assert sum(not each for each in said) == 2
        assert any(b"bytes of unfinished bodies: at most 536870912 of one user" in each for each in said)
        with begin_body(server, 254_000_000, "tml-bob") as other:
            assert refusal(other) == b""
        run, each = server.open_run(), 2_000  # small bodies are free
        assert server.ask("POST", "/api/v1/forward_backward", pass_body(run, 1, each), PROTO).status == 200
    finally:
        for sock in held:
            sock.close()
    time.sleep(0.2)
    with begin_body(server, 254_000_000) as again:
        assert refusal(again) == b""


@pytest.mark.slow
def test_bodies_without_a_length_are_counted_as_they_arrive(start: Callable[..., Running]):
    server = start(body_memory_per_user=1_000_000)
    with begin_body(server, None, sent=b"x" * 600_000) as one:
        assert refusal(one) == b""
        with begin_body(server, None, sent=b"x" * 300_000) as two:
            assert refusal(two) == b""
            two.sendall(b"%x\r\n" % 300_000 + b"x" * 300_000)
            assert is_told_to_wait(refusal(two, 5))
        with begin_body(server, 600_000) as three:
            assert is_told_to_wait(refusal(three, 5))


@pytest.mark.slow
def test_unfinished_bodies_of_all_users_are_bounded(start: Callable[..., Running]):
    server = start(body_memory=1_000_000, body_memory_per_user=400_000)
    held = [begin_body(server, 400_000, f"tml-{n}") for n in range(2)]
    assert [refusal(sock) for sock in held] == [b"", b""]
    with begin_body(server, 400_000, "tml-2") as one_more:
        said = refusal(one_more, 5)
    assert is_told_to_wait(said)
    assert b"at most 1000000 of all users" in said
    for sock in held:
        sock.close()
    with begin_body(server, 500_000) as larger:  # it would wait for ever
        assert refusal(larger, 5).startswith(b"HTTP/1.1 413 ")


def test_however_a_body_ends_its_bytes_are_given_back(start: Callable[..., Running]):
    server = start(body_memory_per_user=1_000_000)
    run, body = server.open_run(), b"x" * 600_000
    for seq_id in range(1, 6):
        begin_body(server, 600_000, sent=b"x" * 100_000).close()
        begin_body(server, None, sent=b"x" * 600_000).close()
        while (answer := server.ask("POST", "/api/v1/asample", body)).status == 429:
            time.sleep(0.02)  # the server has not noticed yet that those were closed
        assert answer.status == 422
        assert server.ask("POST", "/api/v1/create_session", body).status == 413
        answer = server.ask("POST", "/api/v1/asample", zstd.compress(b"x" * 2_000_000), ZSTD)
        assert answer.status == 422
        answer = server.ask("POST", "/v1/completions", body)
        assert answer.status == 400
        accepted = server.ask("POST", "/api/v1/forward_backward", pass_body(run, seq_id, 30_000), PROTO)
        assert accepted.status == 200
    assert not server.server.gateway.bodies.undecoded.users


def test_open_requests_of_one_user_are_bounded(start: Callable[..., Running]):
    server = start(requests_per_user=3)
    run = server.open_run()
    step = {"model_id": run, "seq_id": 9, "adam_params": {"learning_rate": 0.1}}
    waits = server.ask("POST", "/api/v1/optim_step", step).json["request_id"]
    polls = [server.connect() for _ in range(3)]
    for poll in polls:
        poll.request("POST", "/api/v1/retrieve_future", f'{{"request_id": "{waits}"}}', KEY)
    time.sleep(0.3)
    for path in ("/api/v1/get_server_capabilities", "/v1/models"):
        answer = server.ask("GET", path)
        assert (answer.status, answer.headers["retry-after"]) == (429, "1")
        assert b"4 open requests: at most 3 of one user" in answer.body
        assert server.ask("GET", path, key=OTHER_KEY).status == 200
    assert [poll.getresponse().status for poll in polls] == [408] * 3
    assert server.ask("GET", "/api/v1/get_server_capabilities").status == 200


@pytest.mark.slow
def test_our_client_waits_for_its_turn(start: Callable[..., Running]):
    server = start(body_memory_per_user=100_000)
    counted = server.server.gateway.metrics.requests
    datum = Datum(ModelInput.from_ints([1] * 1_500), {"target_tokens": np.ones(1_500, np.int64)})
    with tinkex.ServiceClient(base_url=server.url, api_key="tml-alice") as service:
        run = service.create_lora_training_client(MODEL, rank=4)
        with begin_body(server, 90_000) as other:
            assert refusal(other) == b""
            waits = run.forward_backward([datum], "cross_entropy")
            while not counted["forward_backward", 429]:
                time.sleep(0.02)
        assert len(waits.result(20).loss_fn_outputs) == 1


@pytest.mark.slow
def test_what_follows_a_refused_head_is_discarded_slowly(server: Running, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(uvicorn_protocol, "DISCARD_RATE", 1 << 20)
    with connect(server) as sock:
        sock.sendall(b"GET /api/v1/healthz HTTP/1.1\r\na: " + b"b" * 70_000)
        sock.settimeout(2)
        with pytest.raises(TimeoutError):
            sock.sendall(b"b" * (64 << 20))
        assert sock.recv(65536).startswith(b"HTTP/1.1 431 ")
    assert is_served(server)


@pytest.mark.slow
def test_a_refused_body_is_discarded_slowly(server: Running, monkeypatch: pytest.MonkeyPatch):
    """It must not take the event loop from others; the client still gets its answer."""
    monkeypatch.setattr(uvicorn_protocol, "DISCARD_RATE", 1 << 20)
    fields = b"host: x\r\nx-api-key: tml-alice\r\ncontent-length: 999999999\r\n"
    with connect(server) as sock:
        sock.sendall(b"POST /api/v1/forward_backward HTTP/1.1\r\n" + fields + b"\r\n")
        assert b"413" in sock.recv(65536)
        sock.settimeout(2)
        with pytest.raises(TimeoutError):
            sock.sendall(bytes(64 << 20))
        assert is_served(server)
    body = bytes(1 << 20)  # one that is smaller arrives whole, and the connection goes on
    connection = server.connect()
    connection.request("POST", "/api/v1/create_session", body, KEY | {"content-type": "application/json"})
    assert connection.getresponse().read()
    connection.request("GET", "/api/v1/healthz", headers=KEY)
    assert connection.getresponse().status == 200
    connection.close()

"""Clients that send too much, too slowly or nothing, over real sockets: answered and closed."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable

import pytest

from tests.server.conftest import KEY, Running
from tinkex.server import serve, uvicorn_protocol


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

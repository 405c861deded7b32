"""HTTP/1.1 for the stub server: one connection, its requests and replies, by hand on asyncio.

Keep-alive and content-length bodies; chunked request bodies are refused. It knows no endpoint.
"""

from __future__ import annotations

import asyncio
import functools
import re
import time
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from http import HTTPStatus
from typing import Any, Protocol, cast
from urllib.parse import parse_qsl, unquote

import orjson

API = "/api/v1/"
PHRASES = {code.value: code.phrase for code in HTTPStatus}


@dataclass(frozen=True)
class Reply:
    status: int = 200
    body: bytes = b""
    headers: dict[str, str | None] = field(default_factory=dict)  # None removes a header that would be sent

    def encode(self) -> bytes:
        headers = {"content-type": "application/json", "content-length": str(len(self.body))} | self.headers
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items() if value is not None)
        return (
            f"HTTP/1.1 {self.status} {PHRASES.get(self.status, 'Unknown')}\r\n{lines}\r\n".encode("latin-1")
            + self.body
        )


def reply(value: Any, status: int = 200) -> Reply:
    return Reply(status, orjson.dumps(value))


@dataclass
class Request:
    """One request as it arrived; header names are lower-case, `connection` counts TCP connections from 1."""

    method: str
    target: str
    head: bytes
    body: bytes
    connection: int
    time: float = field(default_factory=time.monotonic)

    @functools.cached_property
    def path(self) -> str:
        return unquote(self.target.partition("?")[0])

    @functools.cached_property
    def query(self) -> dict[str, str]:
        return dict(parse_qsl(self.target.partition("?")[2]))

    @functools.cached_property
    def headers(self) -> dict[str, str]:
        lines = self.head.decode("latin-1").split("\r\n")[1:]
        return {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}

    @functools.cached_property
    def json(self) -> Any:
        """The JSON body; {} for an empty one."""
        return orjson.loads(self.body) if self.body else {}

    @property
    def op(self) -> str:
        return self.path.removeprefix(API)

    def matches(self, pattern: str) -> bool:
        """True for the path, its part after /api/v1/, its last segments, or a glob over any of these."""
        return (
            self.path == pattern or fnmatchcase(self.path, pattern) or fnmatchcase(self.path, f"*/{pattern}")
        )


class Server(Protocol):
    """What a connection needs of the server behind it."""

    def opened(self, connection: Connection) -> int: ...

    def closed(self, connection: Connection) -> None: ...

    def handle(self, request: Request, connection: Connection) -> None: ...


class Connection(asyncio.Protocol):
    """HTTP/1.1 with keep-alive and content-length bodies, one request at a time."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.buffer = bytearray()
        self.needed = 0
        self.busy = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.number = self.server.opened(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.server.closed(self)

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        self._serve()

    def _serve(self) -> None:
        while not self.busy and len(self.buffer) >= self.needed:
            request = self._next_request()
            if request is None:
                return
            self.busy = True
            self.server.handle(request, self)

    def _next_request(self) -> Request | None:
        end = self.buffer.find(b"\r\n\r\n")
        if end < 0:
            return None
        head = bytes(self.buffer[:end])
        lower = head.lower()
        if b"\r\ntransfer-encoding:" in lower:
            self.answer(reply({"detail": "the stub takes no chunked bodies"}, 411))
            self.transport.close()
            return None
        found = re.search(rb"\r\ncontent-length: *(\d+)", lower)
        self.needed = end + 4 + (int(found[1]) if found else 0)
        if len(self.buffer) < self.needed:
            return None
        body = bytes(self.buffer[end + 4 : self.needed])
        del self.buffer[: self.needed]
        self.needed = 0
        method, target, _ = head[: head.index(b"\r\n")].decode("latin-1").split(" ", 2)
        return Request(method, target, head, body, self.number)

    def answer(self, reply: Reply) -> None:
        if self.transport.is_closing():
            return
        try:
            self.transport.write(reply.encode())
        except RuntimeError:  # uvloop, of a connection whose loop has ended: nobody is there to answer
            return
        if reply.headers.get("content-length", "") is None:
            self.transport.close()  # a body without a length ends with the connection
        self.busy = False
        self._serve()

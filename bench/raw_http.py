"""A minimal HTTP/1.1 client for server benchmarks: prepared bytes out, status and body in, keep-alive.

It costs the same for every server that is measured. It reads only responses with a Content-Length, which is
what our server and the echo send.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

KEY = {"x-api-key": "tml-bench"}
JSON = {"content-type": "application/json", "accept": "application/json"}
PROTO = {"content-type": "application/x-protobuf", "accept": "application/json"}
WANTS_PROTO = {"content-type": "application/json", "accept": "application/x-protobuf"}


def request(
    method: str, path: str, body: bytes = b"", headers: Mapping[str, str] = JSON, length: int | None = None
) -> bytes:
    """A request as bytes; with `length`, one whose body follows."""
    length = len(body) if length is None else length
    lines = [f"{method} {path} HTTP/1.1", "host: bench", f"content-length: {length}"]
    lines += [f"{name}: {value}" for name, value in {**KEY, **headers}.items()]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def post(op: str, fields: Mapping[str, Any], headers: Mapping[str, str] = JSON) -> bytes:
    return request("POST", f"/api/v1/{op}", json.dumps(fields).encode(), headers)


class Connection(asyncio.Protocol):
    """One request at a time on one socket."""

    def __init__(self) -> None:
        self._transport: asyncio.WriteTransport | None = None
        self._buffer = bytearray()
        self._answer: asyncio.Future[tuple[int, bytes]] | None = None

    @classmethod
    async def open(cls, host: str, port: int) -> Connection:
        _, made = await asyncio.get_running_loop().create_connection(cls, host, port)
        return made

    async def ask(self, *pieces: bytes) -> tuple[int, bytes]:
        """Status and body of the answer."""
        assert self._transport is not None
        self._answer = asyncio.get_running_loop().create_future()
        for piece in pieces:
            self._transport.write(piece)
        return await self._answer

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    # -- asyncio's side ----------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.WriteTransport) -> None:  # type: ignore[override]
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            return
        head = bytes(self._buffer[:end]).lower()
        at = head.find(b"content-length: ")
        length = int(head[at + 16 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
        if len(self._buffer) < end + 4 + length:
            return
        body = bytes(self._buffer[end + 4 : end + 4 + length])
        del self._buffer[: end + 4 + length]
        if self._answer is not None and not self._answer.done():
            self._answer.set_result((int(head[9:12]), body))

    def connection_lost(self, exc: Exception | None) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(exc or ConnectionError("the server hung up"))


class Client:
    """One connection, with answers read as JSON."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    async def post(self, op: str, **fields: Any) -> Any:
        return await self.send(post(op, fields))

    async def send(self, *pieces: bytes) -> Any:
        status, body = await self.connection.ask(*pieces)
        if status not in (200, 204):
            raise RuntimeError(f"the server answered {status}: {body[:500]!r}")
        return json.loads(body) if body else None

    async def result(self, promise: Mapping[str, Any]) -> Any:
        """What became of a promise whose result comes as JSON."""
        asking = post("retrieve_future", {"request_id": promise["request_id"]})
        while True:
            status, body = await self.connection.ask(asking)
            if status != 408:
                return json.loads(body)

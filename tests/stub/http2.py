"""HTTP/2 for the stub server: one connection, its streams, each a request and its reply, on the h2 library.

Flow control is honoured both ways, so bodies may be of any size. It knows no endpoint.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import cast

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import (
    ConnectionTerminated,
    DataReceived,
    RequestReceived,
    StreamEnded,
    StreamReset,
    WindowUpdated,
)
from h2.exceptions import ProtocolError, StreamClosedError

from tests.stub.http import Connection, Reply, Request, Server

LOSSES = ("cut off", "refused", "goaway")


class Http2Connection(asyncio.Protocol):
    """Many requests at a time. `loss` is what becomes of one that is dropped.

    Cut off: its connection, with all that is on it; refused: the stream alone; goaway: the server takes no
    more on this connection, and says that this request was too many.
    """

    def __init__(self, server: Server, loss: str) -> None:
        assert loss in LOSSES, loss
        self.server, self.loss = server, loss
        self.h2 = H2Connection(H2Configuration(client_side=False, header_encoding="utf-8"))
        self.streams: dict[int, Stream] = {}

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.number = self.server.opened(cast(Connection, self))
        self.h2.initiate_connection()
        self.flush()

    def connection_lost(self, exc: Exception | None) -> None:
        self.server.closed(cast(Connection, self))

    def data_received(self, data: bytes) -> None:
        try:
            events = self.h2.receive_data(data)
        except ProtocolError:
            self.flush()
            return self.transport.close()
        for event in events:
            match event:
                case RequestReceived():
                    self.streams[event.stream_id] = Stream(self, event.stream_id, dict(event.headers))
                case DataReceived():
                    self.h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
                    if (stream := self.streams.get(event.stream_id)) is not None:
                        stream.body += event.data
                case StreamEnded():
                    if (stream := self.streams.get(event.stream_id)) is not None:
                        self.server.handle(stream.request(), cast(Connection, stream))
                case StreamReset():
                    self.streams.pop(event.stream_id, None)
                case WindowUpdated():
                    for stream in list(self.streams.values()):
                        with suppress(StreamClosedError):
                            stream.send()
                case ConnectionTerminated():
                    self.transport.close()
                case _:
                    pass
        self.flush()

    def flush(self) -> None:
        if (data := self.h2.data_to_send()) and not self.transport.is_closing():
            self.transport.write(data)


class Stream:
    """One request and its reply; what the stub takes for a connection of HTTP/1.1."""

    def __init__(self, connection: Http2Connection, number: int, headers: dict[str, str]) -> None:
        self.connection, self.number, self.headers = connection, number, headers
        self.transport = self  # to be aborted
        self.body = bytearray()
        self.left: bytes | None = None  # of the reply's body

    def request(self) -> Request:
        method, target = self.headers[":method"], self.headers[":path"]
        lines = [f"{method} {target} HTTP/2", *(f"{k}: {v}" for k, v in self.headers.items() if k[0] != ":")]
        head = "\r\n".join(lines).encode("latin-1")
        return Request(method, target, head, bytes(self.body), self.connection.number)

    def answer(self, reply: Reply) -> None:
        if self.number not in self.connection.streams:
            return  # nobody waits for it any more
        headers = {"content-type": "application/json", "content-length": str(len(reply.body))} | reply.headers
        fields = [(":status", str(reply.status))]
        fields += [(name.lower(), value) for name, value in headers.items() if value is not None]
        with suppress(StreamClosedError):  # given up, in the same breath as it was asked
            self.connection.h2.send_headers(self.number, fields)
            self.left = reply.body
            self.send()
            self.connection.flush()

    def send(self) -> None:
        """As much of the reply as the client has room for."""
        h2 = self.connection.h2
        while self.left is not None:
            room = min(h2.local_flow_control_window(self.number), h2.max_outbound_frame_size)
            if self.left and room <= 0:
                return
            piece, self.left = self.left[:room], self.left[room:] or None
            h2.send_data(self.number, piece, end_stream=self.left is None)
            if self.left is None:
                del self.connection.streams[self.number]

    def abort(self) -> None:
        """Lose this request, as `loss` says."""
        connection = self.connection
        if connection.streams.pop(self.number, None) is None:
            return
        if connection.loss == "cut off":
            return connection.transport.abort()
        if connection.loss == "refused":
            connection.h2.reset_stream(self.number, ErrorCodes.REFUSED_STREAM)
        else:
            connection.h2.close_connection(ErrorCodes.NO_ERROR, last_stream_id=max(self.number - 2, 0))
        connection.flush()
        if connection.loss == "goaway":
            connection.transport.close()

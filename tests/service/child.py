"""A service in a process of its own, behind a Unix socket: the smallest thing that can be killed.

    python -m tests.service.child HOME SOCKET KIND MODEL

Frames are a length and a pickle: (number, operation, request) in, (number, value or Refusal) out. The
transport on the other side is what an HTTP client would be: it reconnects, and sends again what was not
answered.
"""

from __future__ import annotations

import asyncio
import pickle
import struct
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tinkex.client.retry import RetryPolicy
from tinkex.client.transport import NO_CONTEXT, CallContext
from tinkex.engine.protocol import Engine, EngineConfig, build_engine
from tinkex.errors import FailedResponse, status_error
from tinkex.service.config import ServiceConfig
from tinkex.service.refusal import Caller, Refusal
from tinkex.service.service import Service
from tinkex.types.config import ClientConfigRequest, ClientConfigResponse
from tinkex.wire import ops
from tinkex.wire.ops import OPS, Op

MODEL = "m/base"
_LENGTH = struct.Struct("<I")


async def read_frame(reader: asyncio.StreamReader) -> Any:
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    return pickle.loads(await reader.readexactly(length))


def frame(value: Any) -> bytes:
    content = pickle.dumps(value)
    return _LENGTH.pack(len(content)) + content


# -- in the child ----------------------------------------------------------------------------------------


def build_slowly(config: EngineConfig) -> Engine:
    """An engine that takes long enough to be killed in the middle of things."""
    engine, thread = build_engine(config), ThreadPoolExecutor(1)
    submit = engine.trainer.submit

    def slowly(command: Any) -> Any:
        time.sleep(0.004)
        result = submit(command).result()
        time.sleep(0.004)
        return result

    engine.trainer.submit = lambda command: thread.submit(slowly, command)  # type: ignore[method-assign]
    return engine


async def serve(home: Path, socket: Path, kind: Any, model: str) -> None:
    engine = EngineConfig(model="", kind=kind, device="cpu", kv_bytes=2 << 20, threads=1)
    config = ServiceConfig(home, models={MODEL: model}, engine=engine, snapshot_steps=4, long_poll=2.0)
    service = Service(config, build_slowly)
    await service.start()
    tasks: set[asyncio.Task[None]] = set()

    async def answer(number: int, op: str, request: Any, writer: asyncio.StreamWriter) -> None:
        try:
            value = await service.call(OPS[op], request, Caller("ann"))
        except Refusal as refusal:
            value = refusal
            value.args = (refusal.status, refusal.message)
        writer.write(frame((number, value)))

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            task = asyncio.create_task(answer(*await read_frame(reader), writer))
            tasks.add(task)
            task.add_done_callback(tasks.discard)

    async with await asyncio.start_unix_server(connected, socket) as server:
        await server.serve_forever()


# -- in the test -----------------------------------------------------------------------------------------


class SocketTransport:
    """The client's transport to a child that may be killed and come back at any time."""

    base_url = ""
    credential = None
    policy = RetryPolicy()

    def __init__(self, socket: Path) -> None:
        self._socket = socket
        self._reader: asyncio.Task[None] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._number = 0
        self._connecting = asyncio.Lock()

    async def open(self) -> ClientConfigResponse:
        return await self.call(ops.GET_CLIENT_CONFIG, ClientConfigRequest(sdk_version="test"))

    async def call(self, op: Op[Any, Any], request: Any, context: CallContext = NO_CONTEXT) -> Any:
        while True:
            try:
                value = await self._once(op, request)
            except (OSError, EOFError):
                await asyncio.sleep(0.01)
                continue
            if isinstance(value, Refusal):
                raise status_error(value.message, FailedResponse(value.status))
            return value

    async def _once(self, op: Op[Any, Any], request: Any) -> Any:
        async with self._connecting:
            if self._writer is None:
                reader, self._writer = await asyncio.open_unix_connection(self._socket)
                self._reader = asyncio.create_task(self._read(reader))
        self._number += 1
        done = self._waiting[self._number] = asyncio.get_running_loop().create_future()
        self._writer.write(frame((self._number, op.name, request)))
        return await done

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                number, value = await read_frame(reader)
                done = self._waiting.pop(number)
                if not done.done():
                    done.set_result(value)
        except (OSError, EOFError):
            self._writer = None
            lost, self._waiting = self._waiting, {}
            for done in lost.values():
                if not done.done():
                    done.set_exception(ConnectionResetError())

    async def aclose(self) -> None:
        """The child is the test's."""


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], sys.argv[4]))

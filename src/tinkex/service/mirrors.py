"""Copies of all runs' metrics in wandb or trackio: each in its own process, which nothing waits for.

The event loop puts lines into a bounded queue; a thread writes them to the process. What is too much, or
comes while the process is gone, is dropped. A failure is logged once, and the process is started again later.
"""

from __future__ import annotations

import logging
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import orjson

from tinkex.config import child_environment
from tinkex.service.rows import RunRow

log = logging.getLogger("tinkex.service")
WAITING = 10_000  # lines that a process may be behind
PAUSE = 60.0  # seconds before a process that ended is started again
PATIENCE = 20.0  # seconds that a process has to send the last lines when the service stops


class MetricMirror:
    """One tracker."""

    def __init__(self, kind: str, directory: Path, pause: float = PAUSE) -> None:
        self.kind, self._directory, self._pause = kind, directory, pause
        self._queue: queue.Queue[bytes | None] = queue.Queue(WAITING)
        self._thread: threading.Thread | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._next_start = 0.0
        self._told = False
        self.dropped = self.starts = 0

    def put(self, line: bytes) -> None:
        """On the event loop: nothing but a put."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._write, name=f"tinkex-{self.kind}", daemon=True)
            self._thread.start()
        try:
            self._queue.put_nowait(line)
        except queue.Full:
            self.dropped += 1

    def stop(self) -> None:
        """Let the process send what it has, for a while."""
        if self._thread is None:
            return
        try:
            self._queue.put(None, timeout=PATIENCE)
            self._thread.join(PATIENCE)
        except queue.Full:
            pass
        if self._process is not None and self._process.poll() is None:
            log.warning("%s did not take the last metrics within %d s", self.kind, PATIENCE)
            self._process.terminate()

    # -- on the thread -----------------------------------------------------------------------------------

    def _write(self) -> None:
        while (line := self._queue.get()) is not None:
            if not self._deliver(line):
                self.dropped += 1
        process = self._process
        if process is not None and process.stdin is not None:
            with suppress(OSError, subprocess.TimeoutExpired):
                process.stdin.close()
                process.wait(PATIENCE)

    def _deliver(self, line: bytes) -> bool:
        try:
            process = self._running()
            if process is None or process.stdin is None:
                return False
            process.stdin.write(line)
            process.stdin.flush()
        except OSError as error:
            self._process, self._next_start = None, time.monotonic() + self._pause
            if not self._told:
                self._told = True
                log.warning(
                    "metrics are not mirrored to %s: its process is gone (%s); it is tried again every %d s",
                    self.kind, error, self._pause,
                )  # fmt: skip
            return False
        return True

    def _running(self) -> subprocess.Popen[bytes] | None:
        if self._process is None and time.monotonic() >= self._next_start:
            self.starts += 1
            self._directory.mkdir(parents=True, exist_ok=True)
            place = str(self._directory)
            command = [sys.executable, "-m", "tinkex.service.mirror_process", self.kind, place]
            # In its own session: Ctrl-C goes to the server, which then ends this process in order.
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, env=child_environment(),
                start_new_session=True,
            )  # fmt: skip
        return self._process


class MetricMirrors:
    """All trackers of a service: none, by default."""

    def __init__(self, kinds: Sequence[str], home: Path) -> None:
        self._mirrors = [MetricMirror(kind, home / "mirrors" / kind) for kind in kinds]

    def __bool__(self) -> bool:
        return bool(self._mirrors)

    def put(self, row: RunRow, line: Mapping[str, float]) -> None:
        """A line of a run's metrics: of a step, or what its client logged."""
        about: dict[str, Any] = {
            "run": row.run_id, "name": row.name, "metrics": line,
            "config": {
                "base_model": row.base_model, "owner": row.owner, "project": row.project_id,
                "tags": ", ".join(row.tags), **{f"lora.{k}": v for k, v in row.lora.model_dump().items()},
                **(row.user_metadata or {}),
            },
        }  # fmt: skip
        data = orjson.dumps(about, default=str) + b"\n"
        for mirror in self._mirrors:
            mirror.put(data)

    def stop(self) -> None:
        for mirror in self._mirrors:
            mirror.stop()

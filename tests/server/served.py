"""A real `tinkex serve` over a tiny model, in a process to be killed and started again."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.engine.tiny import tiny_model, tiny_tokenizer

MODEL = "m/base"
ROOT = Path(__file__).parents[2]


class Serve:
    """A server process at one address, over one home."""

    def __init__(
        self, directory: Path, *options: str, placed: str = "", text: bool = False, model: Path | None = None
    ) -> None:
        """`options` of `tinkex serve`; `placed` follows the model (`,trainers=2`); `text`: a tokenizer.

        `model` is served under the name of its directory, in place of a tiny one.
        """
        self.home = directory / "home"
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        name = MODEL if model is None else model.name
        if model is None:
            model = tiny_model(directory, "qwen3")
            if text:
                tiny_tokenizer(model)
        self._command = [
            sys.executable, "-m", "tinkex.cli", "serve",
            "--model", f"{name}={model}{placed}",
            "--port", str(self.port), "--home", str(self.home), "--device", "cpu", "--drain", "0.5",
            *options,
        ]  # fmt: skip
        self.start()

    def start(self) -> None:
        environment = {k: v for k, v in os.environ.items() if not k.startswith("TINK")}
        self._process = subprocess.Popen(
            self._command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT,
            env=environment | {"OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        assert self._process.stdout is not None
        said: list[str] = []
        for line in self._process.stdout:
            said.append(line)
            if re.search(r" serves http://", line):
                threading.Thread(target=said.extend, args=(self._process.stdout,), daemon=True).start()
                return
        pytest.fail(f"the server did not start:\n{''.join(said)}")

    @property
    def pid(self) -> int:
        return self._process.pid

    def kill(self) -> None:
        os.kill(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def terminate(self, seconds: float) -> None:
        """Ask it to end; it must within so many seconds."""
        self._process.terminate()
        self._process.wait(seconds)

    def journal(self, run_id: str) -> Path:
        session, _, number = run_id.rpartition(":train:")
        return self.home / "runs" / session / f"train-{number}" / "journal"

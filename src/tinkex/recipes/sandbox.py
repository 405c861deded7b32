"""Runs code of a model in a child process with limits: CPU time, memory, file sizes, processes, wall time.

A program sees an empty directory of its own and no environment; on Linux it has no network where user
namespaces are allowed. This is a guard against accidents and loops, not against an attacker: it is the same
user and the same file system. For hostile code use a container or a virtual machine around Tinkex.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

_CHILD = Path(__file__).with_name("sandbox_child.py")
_OUTPUT = 128 * 1024  # bytes of stdout and of stderr that are kept
TIMED_OUT = 124  # as the command `timeout` exits


@dataclass(frozen=True)
class ExecResult:
    """How a program ended: what it wrote, and its exit code (124: out of time, negative: a signal)."""

    stdout: str
    stderr: str
    exit_code: int
    metrics: dict[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True)
class SandboxLimits:
    """What a program may use."""

    seconds: float = 5.0  # wall time, and CPU time rounded up
    memory_mb: int = 512
    file_mb: int = 16
    processes: int = 256  # of the user in all: the system counts no other way
    open_files: int = 64


def run_python(code: str, stdin: str = "", limits: SandboxLimits | None = None) -> ExecResult:
    """Run Python code, isolated from the environment and the working directory.

    >>> run_python("print(6 * 7)").stdout  # doctest: +SKIP
    '42\\n'
    """
    limits = limits or SandboxLimits()
    with tempfile.TemporaryDirectory(prefix="tinkex-sandbox-") as place:
        (Path(place) / "main.py").write_text(code, encoding="utf-8", errors="replace")
        return _run([sys.executable, "-I", "main.py"], place, stdin, limits, _OUTPUT)


def _run(program: list[str], place: str, stdin: str, limits: SandboxLimits, most: int) -> ExecResult:
    out, err = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115
    with out, err:
        child = subprocess.Popen(
            [sys.executable, "-I", "-S", str(_CHILD), json.dumps(_rlimits(limits)), *program],
            cwd=place, env=_environment(place), stdin=subprocess.PIPE, stdout=out, stderr=err,
        )  # fmt: skip
        try:
            child.communicate(stdin.encode(errors="replace"), timeout=limits.seconds)
            code = child.returncode
        except subprocess.TimeoutExpired:
            code = TIMED_OUT
        finally:
            _end(child)
        return ExecResult(_head(out, most), _head(err, most), code)


def _end(child: subprocess.Popen[bytes]) -> None:
    """Kill the program and all that it started: it leads a session of its own."""
    for pid, kill in ((child.pid, os.killpg), (child.pid, os.kill)):
        try:
            kill(pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            continue
    child.wait()


def _head(file: Any, most: int) -> str:
    file.seek(0)
    return file.read(most).decode(errors="replace")


def _rlimits(limits: SandboxLimits) -> dict[str, int]:
    return {
        "RLIMIT_CPU": int(limits.seconds) + 1,
        "RLIMIT_AS": limits.memory_mb << 20,
        "RLIMIT_FSIZE": limits.file_mb << 20,
        "RLIMIT_NPROC": limits.processes,
        "RLIMIT_NOFILE": limits.open_files,
        "RLIMIT_CORE": 0,
    }


def _environment(place: str) -> Mapping[str, str]:
    return {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": place, "TMPDIR": place, "LANG": "C.UTF-8"}


class LocalSandbox:
    """A directory in which commands run under limits, with the methods of the cookbook's SandboxInterface."""

    def __init__(self, limits: SandboxLimits | None = None) -> None:
        self._limits = limits or SandboxLimits()
        self._place = Path(tempfile.mkdtemp(prefix="tinkex-sandbox-"))
        self._id = f"local-{uuid.uuid4().hex[:12]}"

    @property
    def sandbox_id(self) -> str:
        return self._id

    async def send_heartbeat(self) -> None:
        """Nothing to keep alive."""

    async def run_command(
        self, command: str, workdir: str | None = None, timeout: int = 60, max_output_bytes: int | None = None
    ) -> ExecResult:
        """Run a shell command in the sandbox's directory, or in one within it."""
        limits = replace(self._limits, seconds=float(timeout))
        try:
            place = self._within(workdir or ".")
        except PermissionError as error:
            return ExecResult("", str(error), 1)
        most = _OUTPUT if max_output_bytes is None else max_output_bytes
        return await asyncio.to_thread(_run, ["/bin/sh", "-c", command], str(place), "", limits, most)

    async def read_file(self, path: str, max_bytes: int | None = None, timeout: int = 60) -> ExecResult:
        try:
            with self._within(path).open("rb") as file:
                return ExecResult(file.read(max_bytes).decode(errors="replace"), "", 0)
        except OSError as error:
            return ExecResult("", str(error), 1)

    async def write_file(
        self, path: str, content: str | bytes, executable: bool = False, timeout: int = 60
    ) -> ExecResult:
        try:
            place = self._within(path)
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(content.encode() if isinstance(content, str) else content)
            place.chmod(0o755 if executable else 0o644)
            return ExecResult("", "", 0)
        except OSError as error:
            return ExecResult("", str(error), 1)

    async def cleanup(self) -> None:
        await asyncio.to_thread(shutil.rmtree, self._place, ignore_errors=True)

    def _within(self, path: str) -> Path:
        """A path of the sandbox; absolute ones count from its directory."""
        place = (self._place / path.lstrip("/")).resolve()
        if not place.is_relative_to(self._place.resolve()):
            raise PermissionError(f"{path} is outside of the sandbox")
        return place

"""Memory, utilisation and power of this machine's GPUs, as `nvidia-smi` reports them; empty without it."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import time
from typing import NamedTuple

FRESH = 2.0  # seconds for which a reading is good
_FIELDS = "name,memory.used,memory.total,utilization.gpu,power.draw,temperature.gpu"


class GpuReading(NamedTuple):
    """One GPU; a field is None if nvidia-smi does not report it."""

    name: str
    used_mib: float | None
    total_mib: float | None
    utilisation: float | None  # percent
    watts: float | None
    celsius: float | None


class Gpus:
    """Asks at most every FRESH seconds, off the event loop."""

    def __init__(self) -> None:
        self._program = shutil.which("nvidia-smi")
        self._read_at, self.last = 0.0, list[GpuReading]()

    async def read(self) -> list[GpuReading]:
        if self._program is not None and time.monotonic() - self._read_at > FRESH:
            self._read_at = time.monotonic()
            self.last = await asyncio.to_thread(_ask, self._program)
        return self.last


def _ask(program: str) -> list[GpuReading]:
    command = [program, f"--query-gpu={_FIELDS}", "--format=csv,noheader,nounits"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return [parse_gpu(line) for line in said.splitlines() if line.count(",") == 5]


def parse_gpu(line: str) -> GpuReading:
    """One line of what was asked for.

    >>> tuple(parse_gpu("NVIDIA H200, 1024, 143771, 37, 214.35, [N/A]"))
    ('NVIDIA H200', 1024.0, 143771.0, 37.0, 214.35, None)
    """
    name, *values = (part.strip() for part in line.split(","))
    return GpuReading(name, *(float(v) if v.replace(".", "", 1).isdigit() else None for v in values))

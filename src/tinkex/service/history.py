"""A run's history: a line of metrics for every step it took, in `metrics.jsonl` of its directory.

Promises: a line is what the passes since the last step said, put together, and what the step said; a disk
that takes no line costs the line and nothing else; a file that grows large loses every second line, so that
no history is larger than MOST_BYTES. Knows nothing of order, and of replay only that what is done again is
not told twice.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
from dataclasses import dataclass, field
from pathlib import Path

from tinkex.service.core import Core
from tinkex.service.refusal import Caller
from tinkex.service.rows import RunRow
from tinkex.service.scheduler import Work
from tinkex.types.training import GetTrainingRunRequest

log = logging.getLogger("tinkex.service")
FILE = "metrics.jsonl"
MOST_BYTES = 8 * 1024 * 1024  # of one run's history: some 30,000 steps


@dataclass
class _Window:
    """The passes of a run since its last step."""

    seconds: float = 0.0
    passes: int = 0
    metrics: dict[str, float] = field(default_factory=dict[str, float])

    def add(self, metrics: dict[str, float]) -> None:
        """Put a pass to those before it, each metric as its suffix says; a mean counts every pass alike."""
        for name, value in metrics.items():
            kind, before = name.rpartition(":")[2], self.metrics.get(name)
            if before is None:
                self.metrics[name] = value
            elif kind == "sum":
                self.metrics[name] = before + value
            elif kind in ("min", "max"):
                self.metrics[name] = min(before, value) if kind == "min" else max(before, value)
            else:
                self.metrics[name] = before + (value - before) / (self.passes + 1)
        self.passes += 1


class History:
    """What runs told of themselves, step by step."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._windows: dict[str, _Window] = {}

    def worked(self, row: RunRow, work: Work, op: str, seconds: float) -> None:
        """A run's work is done: remember a pass, write a step down."""
        future = work.what.future
        if op == "optim_step":
            window = self._windows.pop(row.run_id, _Window())
            if not future.failed:
                window.seconds += seconds
                self._write(row, window, future.outcome.metrics or {}, work.seq_id)
        elif work.what.one_pass is not None and work.what.one_pass.backward and not future.failed:
            window = self._windows.setdefault(row.run_id, _Window())
            window.seconds += seconds
            window.add(future.outcome.metrics)

    def _write(self, row: RunRow, window: _Window, step: dict[str, float], seq_id: int) -> None:
        line = {
            "step": int(step.get("optimizer_step", seq_id)),
            "time": round(time.time(), 3),
            "seconds": round(window.seconds, 4),
            "loss": _loss(window.metrics),
            **window.metrics,
            **{name: value for name, value in step.items() if name != "optimizer_step"},
        }
        finite = {name: value for name, value in line.items() if value is not None and math.isfinite(value)}
        try:
            directory = self._core.run_dir(row.run_id)
            directory.mkdir(parents=True, exist_ok=True)
            if _append(directory / FILE, f"{json.dumps(finite)}\n".encode()) > MOST_BYTES:
                _thin_out(directory / FILE)
        except OSError as error:
            log.warning("a step of %s is missing in its history: %s", row.run_id, error)

    async def get_run_metrics(self, request: GetTrainingRunRequest, caller: Caller) -> bytes:
        """The lines, as they are on disk; none if the run has taken no step."""
        row = self._core.run(request.training_run_id, caller)
        place = self._core.run_dir(row.run_id) / FILE
        return await asyncio.to_thread(lambda: place.read_bytes() if place.exists() else b"")


def _append(path: Path, line: bytes) -> int:
    """Add a whole line or nothing: half a one would spoil the next. Returns the bytes there are."""
    with open(path, "ab", buffering=0) as file:
        size = file.tell()
        if file.write(line) < len(line):
            file.truncate(size)
            raise OSError("no space is left for it")
    return size + len(line)


def _thin_out(path: Path) -> None:
    """Every second line goes, but for the last: a long run's curve keeps its shape, older parts the less."""
    lines = path.read_bytes().splitlines(keepends=True)
    part = path.with_suffix(".part")
    part.write_bytes(b"".join(lines[-1::-2][::-1]))
    part.replace(path)


def _loss(metrics: dict[str, float]) -> float | None:
    """The loss of a token, among those that count for it."""
    count = metrics.get("active:sum") or metrics.get("tokens:sum")
    return metrics["loss:sum"] / count if count and "loss:sum" in metrics else None

"""A run's metrics: one JSON line per optimizer step, in `metrics.jsonl` of its directory.

A line combines the metrics of the passes since the last step with those of the step. A full disk costs the
line and nothing else. A file that grows beyond MAX_BYTES loses every second line. Replayed work adds none.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import operator
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from tinkex.service.access import Access
from tinkex.service.home import Home
from tinkex.service.refusal import Caller
from tinkex.service.runs.execution import Execution
from tinkex.types.training import GetTrainingRunRequest

log = logging.getLogger("tinkex.service")
FILE = "metrics.jsonl"
MAX_BYTES = 8 * 1024 * 1024  # of one run: some 30,000 steps


@dataclass
class _Window:
    """The passes of a run since its last step."""

    seconds: float = 0.0
    passes: int = 0
    metrics: dict[str, float] = field(default_factory=dict[str, float])

    def add(self, metrics: dict[str, float]) -> None:
        """Reduce a pass into those before it, by each metric's suffix; a mean counts every pass alike."""
        self.passes += 1
        reducers = {"sum": operator.add, "min": min, "max": max}
        for name, value in metrics.items():
            if (before := self.metrics.get(name)) is None:
                self.metrics[name] = value
            elif reduce := reducers.get(name.rpartition(":")[2]):
                self.metrics[name] = reduce(before, value)
            else:
                self.metrics[name] = before + (value - before) / self.passes


class RunMetrics:
    """Writes and serves the metrics of runs."""

    def __init__(self, home: Home, access: Access) -> None:
        self._home = home
        self._access = access
        self._windows: defaultdict[str, _Window] = defaultdict(_Window)

    def worked(self, work: Execution, seconds: float) -> None:
        """A training request was executed: collect a pass, write a step."""
        run_id, future = work.run.id, work.future
        if work.op == "optim_step":
            window = self._windows.pop(run_id, _Window())
            if not future.failed:
                window.seconds += seconds
                self._write(run_id, window, future.outcome.metrics or {}, work.seq_id)
        elif work.backward and not future.failed:
            self._windows[run_id].seconds += seconds
            self._windows[run_id].add(future.outcome.metrics)

    def forget(self, run_id: str) -> None:
        """A run was closed: the passes after its last step are in no line."""
        self._windows.pop(run_id, None)

    def _write(self, run_id: str, window: _Window, step: dict[str, float], seq_id: int) -> None:
        metrics = window.metrics
        count = metrics.get("active:sum") or metrics.get("tokens:sum")  # tokens that count for the loss
        line = {
            "step": int(step.get("optimizer_step", seq_id)),
            "time": round(time.time(), 3),
            "seconds": round(window.seconds, 4),
            "loss": metrics["loss:sum"] / count if count and "loss:sum" in metrics else None,
            **metrics,
            **{name: value for name, value in step.items() if name != "optimizer_step"},
        }
        finite = {name: value for name, value in line.items() if value is not None and math.isfinite(value)}
        try:
            directory = self._home.run_dir(run_id)
            directory.mkdir(parents=True, exist_ok=True)
            if _append(directory / FILE, f"{json.dumps(finite)}\n".encode()) > MAX_BYTES:
                _thin_out(directory / FILE)
        except OSError as error:
            log.warning("a step of %s is missing in its metrics: %s", run_id, error)

    async def get_run_metrics(self, request: GetTrainingRunRequest, caller: Caller) -> bytes:
        """The lines, as they are on disk; empty if the run has taken no step."""
        row = self._access.run(request.training_run_id, caller)
        place = self._home.run_dir(row.run_id) / FILE
        return await asyncio.to_thread(lambda: place.read_bytes() if place.exists() else b"")


def _append(path: Path, line: bytes) -> int:
    """Add a whole line or nothing: half a line would spoil the next. Returns the size of the file."""
    with open(path, "ab", buffering=0) as file:
        size = file.tell()
        if file.write(line) < len(line):
            file.truncate(size)
            raise OSError("no space is left for it")
    return size + len(line)


def _thin_out(path: Path) -> None:
    """Drop every second line, keeping the last: a long run's curve keeps its shape."""
    lines = path.read_bytes().splitlines(keepends=True)
    part = path.with_suffix(".part")
    part.write_bytes(b"".join(lines[-1::-2][::-1]))
    part.replace(path)

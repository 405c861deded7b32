"""A run's metrics: one JSON line per optimizer step, in `metrics.jsonl` of its directory.

A line combines the metrics of the passes since the last step with those of the step, and how its time was
spent. What a client logs itself is in `logged.jsonl`. A full disk costs the line and nothing else. A file
that grows beyond MAX_BYTES is thinned out, on a thread. Replayed work adds none. The totals of a run are
collected in memory, and `flush` writes them to the ledger.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import operator
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tinkex.files import append_whole
from tinkex.service.access import Access
from tinkex.service.activity import own_run
from tinkex.service.home import Home
from tinkex.service.ledger import Ledger
from tinkex.service.ledger_file import LedgerFullError
from tinkex.service.mirrors import MetricMirrors
from tinkex.service.policy_metrics import pass_metrics
from tinkex.service.refusal import Caller, Refusal
from tinkex.service.rows import RunRow, SamplerRow
from tinkex.service.run_series import LOGGED, MOST_NAMES, STEPS, last_step, merged, names_in, thinned
from tinkex.service.runs.execution import SAVES, Execution
from tinkex.types.sampling import SampleRequest
from tinkex.types.training import GetTrainingRunRequest, LogRunMetricsRequest, OptimStepRequest

log = logging.getLogger("tinkex.service")
MAX_BYTES = 8 * 1024 * 1024  # of one file of a run: some 30,000 steps
CURVE = 48  # means of the loss that the ledger keeps of a run: up to twice as many


@dataclass
class _Window:
    """The passes of a run since its last step."""

    since: float | None = None  # when that was
    seconds: float = 0.0
    publishing: float = 0.0
    busy: float = 0.0  # while anything was accepted and not done
    busy_until: float = 0.0
    sampling: float = 0.0  # while samples of the run were drawn
    sampled_until: float = 0.0
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

    def spend(self, work: Execution, seconds: float, now: float) -> None:
        """Count the time of a request, from its acceptance; requests of one run overlap."""
        self.busy += max(0.0, now - max(work.future.created, self.busy_until, self.since or 0.0))
        self.busy_until = now
        if work.op in SAVES:
            self.publishing += seconds
        else:
            self.seconds += seconds

    def sample(self, seconds: float, now: float) -> None:
        """Count the time of a sample that ended; samples overlap each other, and requests."""
        self.sampling += max(0.0, now - max(now - seconds, self.sampled_until, self.since or 0.0))
        self.sampled_until = now

    def times(self, now: float) -> dict[str, float]:
        """How the time since the last step was spent, in seconds."""
        spent = {
            "waiting_seconds": max(0.0, self.busy - self.seconds - self.publishing),
            "publishing_seconds": self.publishing,
        }
        if self.sampling:
            spent["sampling_seconds"] = self.sampling
        if self.since is not None:
            spent["wall_seconds"] = now - self.since
        return {name: round(value, 4) for name, value in spent.items()}


@dataclass
class _Totals:
    """What a run has done so far."""

    steps: int
    tokens: int
    seconds: float
    loss: float | None
    curve: list[float]
    settings: dict[str, Any]  # of the last step and pass
    stride: int = 1  # steps of one mean of the curve
    partial: list[float] = field(default_factory=list[float])

    @classmethod
    def of(cls, row: RunRow) -> _Totals:
        stride = 1 << max(0, math.ceil(math.log2(max(1, row.steps) / (2 * CURVE))))
        settings = {**row.optimizer_config}
        return cls(row.steps, row.tokens, row.seconds, row.loss, list(row.curve), settings, stride)

    def add(self, step: int, loss: float | None) -> None:
        self.steps, self.loss = step, loss if loss is not None else self.loss
        if loss is None:
            return
        self.partial.append(loss)
        if len(self.partial) >= self.stride:
            self.curve.append(float(f"{sum(self.partial) / len(self.partial):.5g}"))
            self.partial.clear()
        if len(self.curve) >= 2 * CURVE:
            pairs = zip(self.curve[::2], self.curve[1::2], strict=True)
            self.curve, self.stride = [(a + b) / 2 for a, b in pairs], 2 * self.stride

    def columns(self) -> dict[str, Any]:
        return {
            "steps": self.steps, "tokens": self.tokens, "seconds": round(self.seconds, 3), "loss": self.loss,
            "curve": self.curve or self.partial, "optimizer_config": self.settings,
        }  # fmt: skip


class RunMetrics:
    """Writes and serves the metrics of runs."""

    def __init__(
        self,
        home: Home,
        access: Access,
        ledger: Ledger,
        wrote: Callable[[Path], None],
        mirrors: MetricMirrors,
    ) -> None:
        self._home, self._wrote, self._mirrors = home, wrote, mirrors
        self._access = access
        self._ledger = ledger
        self._windows: defaultdict[str, _Window] = defaultdict(_Window)
        self._totals: dict[str, _Totals] = {}
        self._changed: set[str] = set()  # runs whose totals the ledger has not
        self._logged: dict[str, set[str]] = {}  # what a client has logged, by run
        self._thinned: dict[Path, threading.Thread] = {}  # files that are being thinned out
        self._writing = threading.Lock()

    def worked(self, work: Execution, seconds: float) -> None:
        """A training request was executed: collect a pass, write a step."""
        run_id, future, now = work.run.id, work.future, time.monotonic()
        window, totals = self._windows[run_id], self._of(work.run.row)
        window.spend(work, seconds, now)
        totals.seconds += seconds
        self._changed.add(run_id)
        if work.op == "optim_step":
            self._windows[run_id] = _Window(since=now)
            if isinstance(work.request, OptimStepRequest):
                totals.settings |= vars(work.request.optim_params)
            if not future.failed:
                self._write(run_id, window, future.outcome.metrics or {}, work.seq_id)
        elif work.one_pass is not None and not future.failed:
            totals.tokens += work.tokens
            if work.backward:
                totals.settings["loss_fn"] = work.one_pass.loss_fn
                window.add(
                    future.outcome.metrics | pass_metrics(work.one_pass.data, future.outcome.loss_fn_outputs)
                )

    def sampled(self, row: SamplerRow, seconds: float, outcome: Any, request: SampleRequest) -> None:
        """A sample ended: its time counts, if the run that it was drawn from is trained in its session."""
        if (run_id := own_run(row)) is not None and run_id in self._windows:
            self._windows[run_id].sample(seconds, time.monotonic())

    def _of(self, row: RunRow) -> _Totals:
        if row.run_id not in self._totals:
            self._totals[row.run_id] = _Totals.of(self._ledger.run(row.run_id) or row)
        return self._totals[row.run_id]

    def forget(self, run_id: str) -> None:
        """A run was closed: the passes after its last step are in no line."""
        self.flush()
        self._windows.pop(run_id, None)
        self._totals.pop(run_id, None)
        self._logged.pop(run_id, None)

    def steps_of(self, run_id: str) -> int:
        """How many steps a run has taken."""
        known = self._totals.get(run_id)
        return last_step(self._home.run_dir(run_id)) if known is None else known.steps

    def flush(self) -> None:
        """Write the totals that have changed to the ledger; on a full disk, the next time."""
        try:
            with self._ledger.transaction():
                for run_id in self._changed:
                    self._ledger.update_run(run_id, **self._totals[run_id].columns())
            self._changed.clear()
        except LedgerFullError as error:
            log.warning("totals of runs were not written: %s", error)

    def _write(self, run_id: str, window: _Window, step: dict[str, float], seq_id: int) -> None:
        metrics = window.metrics
        count = metrics.get("active:sum") or metrics.get("tokens:sum")  # tokens that count for the loss
        number = int(step.get("optimizer_step", seq_id))
        loss = metrics["loss:sum"] / count if count and "loss:sum" in metrics else None
        if not step.get("skipped"):
            self._totals[run_id].add(number, loss if loss is not None and math.isfinite(loss) else None)
        line = {
            "step": number,
            "time": round(time.time(), 3),
            "seconds": round(window.seconds, 4),
            "loss": loss,
            **metrics,
            **{name: value for name, value in step.items() if name != "optimizer_step"},
            **window.times(time.monotonic()),
        }
        self._append(run_id, STEPS, line)

    def _append(self, run_id: str, file: str, line: Mapping[str, float | None]) -> None:
        finite = {name: value for name, value in line.items() if value is not None and math.isfinite(value)}
        if self._mirrors and (row := self._ledger.run(run_id)) is not None:
            self._mirrors.put(row, finite)
        try:
            directory = self._home.run_dir(run_id)
            directory.mkdir(parents=True, exist_ok=True)
            path = directory / file
            with self._writing:
                size = append_whole(path, f"{json.dumps(finite)}\n".encode())
            if size > MAX_BYTES and path not in self._thinned:
                thread = threading.Thread(target=self._thin_out, args=[path, size], daemon=True)
                self._thinned[path] = thread
                thread.start()
            self._wrote(path)
        except OSError as error:
            log.warning("a line of %s is missing in its metrics: %s", run_id, error)

    def _thin_out(self, path: Path, size: int) -> None:
        """Put fewer lines in the place of a file's first `size` bytes; others are added meanwhile."""
        try:
            with open(path, "rb") as file, open(path.with_suffix(".part"), "wb") as part:
                part.write(thinned(file.read(size)))
                with self._writing:
                    part.write(file.read())
                    part.flush()  # or raise: half a file must not replace a whole one
                    os.replace(part.name, path)
        except OSError as error:
            log.warning("%s was not thinned out: %s", path, error)
        finally:
            del self._thinned[path]

    # -- operations --------------------------------------------------------------------------------------

    async def log_run_metrics(self, request: LogRunMetricsRequest, caller: Caller) -> None:
        """Keep what a client measured itself: a reward, an accuracy."""
        row = self._access.run(request.training_run_id, caller, to_use=True)
        step = request.step
        if step is None:
            step = self.steps_of(row.run_id)
        self._home.check_disk()
        if (known := self._logged.get(row.run_id)) is None:
            found = await asyncio.to_thread(names_in, self._home.run_dir(row.run_id) / LOGGED)
            known = self._logged.setdefault(row.run_id, found)
        if (new := request.metrics.keys() - known) and len(known) + len(new) > MOST_NAMES:
            raise Refusal(422, f"this run has logged {len(known)} metrics by name, and may log {MOST_NAMES}")
        known.update(request.metrics)
        self._append(row.run_id, LOGGED, {**request.metrics, "step": step, "time": round(time.time(), 3)})

    async def get_run_metrics(self, request: GetTrainingRunRequest, caller: Caller) -> bytes:
        """The lines of the steps, with what the client logged for each; empty if there is none."""
        row = self._access.run(request.training_run_id, caller)
        return await asyncio.to_thread(merged, self._home.run_dir(row.run_id))

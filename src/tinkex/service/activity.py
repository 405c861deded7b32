"""Records what clients do: the time of their last request, their usage, and audit events.

Times and usage are collected in memory and written to the ledger by `flush`, every few seconds.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from functools import lru_cache
from typing import Any

from tinkex.service.ledger import Ledger
from tinkex.service.ledger_file import LedgerFullError
from tinkex.service.refusal import Caller
from tinkex.service.rows import AuditRow, RunRow, SamplerRow, Scope, UsageKind, UsageRow

log = logging.getLogger("tinkex.service")
STEADY = 3600.0  # seconds for which a clock that jumped must run steadily before anything expires by it
ASLEEP = 60.0  # seconds by which the wall clock must outrun the other, to say that the machine slept


class Activity:
    """Collects times and usage in memory, and writes them to the ledger."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.seen: dict[str, float] = {}  # when each session was last heard of
        self.awake_since = time.time()  # no client could be heard of before
        self._clocks = time.time(), time.monotonic()
        self._steady_from = 0.0  # on the monotonic clock
        self._compare_with_ledger()
        self._usage: defaultdict[tuple[Any, ...], defaultdict[UsageKind, float]] = defaultdict(_zeros)
        self._heard: dict[str, float] = {}  # since the last flush: sessions
        self._requested: dict[str, float] = {}  # since the last flush: runs

    def heard_of(self, session_id: str, run_id: str | None = None) -> None:
        now = time.time()
        self.seen[session_id] = self._heard[session_id] = now
        if run_id is not None:
            self._requested[run_id] = now

    def check_clocks(self) -> None:
        """Notice that the machine slept: the wall clock advanced, the monotonic one did not."""
        (then, ticks), self._clocks = self._clocks, (time.time(), time.monotonic())
        ahead = (self._clocks[0] - then) - (self._clocks[1] - ticks)
        if ahead > ASLEEP:
            self.awake_since = self._clocks[0]
        if abs(ahead) > ASLEEP:
            self._distrust(ahead)

    @property
    def clock_is_steady(self) -> bool:
        """May anything be deleted because its time is over? Not soon after the clock jumped."""
        return time.monotonic() >= self._steady_from

    def _distrust(self, ahead: float) -> None:
        self._steady_from = time.monotonic() + STEADY
        log.warning(
            "the clock differs by %.0f seconds from what was expected: for an hour no checkpoint is deleted "
            "because it has expired. Set the clock if it is wrong",
            ahead,
        )
        with suppress(LedgerFullError):  # for a process that starts within the hour
            self._ledger.add_audit(AuditRow(time.time(), "", "clock.jump", details={"seconds": ahead}))

    def _compare_with_ledger(self) -> None:
        """At start: is the time one that may follow the last one in the ledger?"""
        now, last = time.time(), self._ledger.last_seen()
        if last is not None and abs(now - last) > STEADY:
            self._distrust(now - last)
        elif self._ledger.audit(Scope(None), kind="clock", start=now - STEADY):
            self._steady_from = time.monotonic() + STEADY

    def count(self, row: RunRow | SamplerRow, amounts: Mapping[UsageKind, float]) -> None:
        """Add to the usage of a run or sampler."""
        is_run = isinstance(row, RunRow)
        project, run_id = (row.project_id, row.run_id) if is_run else (None, run_of_adapter(row.adapter_dir))
        usage = self._usage[row.owner, project, row.session_id or None, run_id, row.base_model]
        for kind, amount in amounts.items():
            if amount:
                usage[kind] += amount

    def audit(self, caller: Caller, event: str, **more: Any) -> None:
        self._ledger.add_audit(AuditRow(time.time(), caller.user, event, caller.project, **more))

    def flush(self) -> None:
        """Write what was collected since the last time; on a full disk, the next time."""
        try:
            self._write()
        except LedgerFullError as error:
            log.warning("usage was not written: %s", error)

    def _write(self) -> None:
        now, usage, heard, requested = time.time(), self._usage, self._heard, self._requested
        with self._ledger.transaction():
            self._ledger.add_usage(
                UsageRow(now, owner, kind, amount, project, session, run, model)
                for (owner, project, session, run, model), amounts in usage.items()
                for kind, amount in amounts.items()
            )
            for session_id, at in heard.items():
                self._ledger.update_session(session_id, last_seen_at=at)
            for run_id, at in requested.items():
                self._ledger.update_run(run_id, last_request_at=at)
        self._usage, self._heard, self._requested = defaultdict(_zeros), {}, {}


def _zeros() -> defaultdict[UsageKind, float]:
    return defaultdict(float)


@lru_cache(maxsize=4096)
def run_of_adapter(directory: str | None) -> str | None:
    """The run whose adapter is in `directory`, as `Home.run_dir` places it."""
    if directory is None:
        return None
    _, session_id, run, *_ = directory.split("/")
    return f"{session_id}:train:{run.removeprefix('train-')}"


def own_run(row: SamplerRow) -> str | None:
    """The run that a sampler's adapter is of, if its session is the sampler's."""
    run_id = run_of_adapter(row.adapter_dir)
    return run_id if run_id is not None and run_id.startswith(f"{row.session_id}:") else None

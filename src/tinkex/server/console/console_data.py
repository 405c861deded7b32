"""What pages read: the ledger's rows, the metric files of runs and, on a server, what goes on at this moment.

Works for any home directory, beside the process that serves it: `live` is what only that process knows.
Everything is read for one visitor, and nothing of another tenant's is found.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from tinkex.server.console.visitors import Visitor
from tinkex.service.home import Home
from tinkex.service.ledger import Ledger
from tinkex.service.refusal import Refusal, not_found
from tinkex.service.rows import CheckpointRow, RowPage, RunQuery, RunRow
from tinkex.service.run_listing import RUNNING_SECONDS, run_status
from tinkex.service.run_series import RunSeries
from tinkex.service.sessions import TraceEvent


class Live(Protocol):
    """What a process knows of the runs that it computes."""

    def flush(self) -> None:
        """Write what is collected in memory to the ledger."""
        ...

    def busy(self) -> set[str]:
        """Runs with requests that are not done."""
        ...

    def seen_at(self, session_id: str) -> float | None:
        """When a client was last heard of, if it was since this process began."""
        ...

    def waits_for(self, row: RunRow, owns: Callable[[str], bool]) -> str:
        """Why a run's requests are not executed yet, or what is sampled; "" if neither."""
        ...

    def events(self, row: RunRow) -> list[TraceEvent]:
        """The last requests of a run and of its samplers."""
        ...


@dataclass(frozen=True)
class ShownRun:
    """A run as pages show it."""

    row: RunRow
    state: str
    why: str

    @property
    def title(self) -> str:
        return self.row.name or self.row.run_id


@dataclass(eq=False)
class ConsoleData:
    """Reads for visitors."""

    ledger: Ledger
    home: Home
    lapse: float  # seconds without a heartbeat, after which a client is taken for gone
    live: Live | None = None
    series: RunSeries = field(default_factory=RunSeries)

    def _flush(self) -> None:
        if self.live is not None:
            self.live.flush()

    def runs(self, query: RunQuery, visitor: Visitor, *, limit: int, offset: int) -> RowPage[ShownRun]:
        self._flush()
        now, busy = time.time(), self._busy()
        query = replace(
            query, active_since=now - RUNNING_SECONDS, heard_since=now - self.lapse, busy=tuple(busy)
        )
        page = self.ledger.find_runs(query, visitor.scope, limit=limit, offset=offset)
        return RowPage(self.shown(page.rows), page.total)

    def _busy(self) -> set[str]:
        return set() if self.live is None else self.live.busy()

    def run(self, run_id: str, visitor: Visitor) -> ShownRun:
        """A run that the visitor may see; Refusal if there is none."""
        return self.some([run_id], visitor)[0]

    def some(self, run_ids: Iterable[str], visitor: Visitor) -> list[ShownRun]:
        """Those of these runs that the visitor may see; Refusal if that is none."""
        self._flush()
        missing, rows = list[Refusal](), list[RunRow]()
        for run_id in run_ids:
            try:
                rows.append(self.row(run_id, visitor))
            except Refusal as refusal:
                missing.append(refusal)
        if missing and not rows:
            raise missing[0]
        return self.shown(rows)

    def row(self, run_id: str, visitor: Visitor) -> RunRow:
        row = self.ledger.run(run_id)
        if row is None or not sees(visitor, row.owner, row.project_id):
            raise not_found(f"run {run_id}")
        return row

    def shown(self, rows: Iterable[RunRow]) -> list[ShownRun]:
        busy, shown = self._busy(), list[ShownRun]()
        for row in rows:
            seen = None if self.live is None else self.live.seen_at(row.session_id)
            if seen is None:
                session = self.ledger.session(row.session_id)
                seen = 0.0 if session is None else session.last_seen_at
            state, why = run_status(row, seen, self.lapse, busy=row.run_id in busy)
            shown.append(ShownRun(row, state, (why or "").replace(f"{self.home.root}/", "")))  # no path
        return shown

    def directory(self, row: RunRow) -> Path:
        return self.home.run_dir(row.run_id)

    def checkpoints(self, row: RunRow) -> list[CheckpointRow]:
        return [one for one in self.ledger.checkpoints_of_run(row.run_id) if not one.expired]


def sees(visitor: Visitor, owner: str, project: str | None) -> bool:
    """May this visitor read what is `owner`'s, in that project?"""
    scope = visitor.scope
    if scope.owner is None or owner in (scope.owner, scope.also):
        return True
    return scope.project is not None and project == scope.project

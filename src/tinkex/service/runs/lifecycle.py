"""The states of a run, and what is known of a run that is in memory.

    on disk ──open──► OPEN ──create or load──► RESIDENT
       ▲               ├──► MISMATCHED           │
       │               └──► FAILED ◄─────────────┤
       └───────────── EVICTED ◄──────────────────┘   from any state: the run is idle, or its engine was lost

"On disk" is a snapshot and a journal; the ledger then says `evicted` (or `live`, after a crash). A run whose
engine was lost is opened again at once if it has unanswered requests. A run whose session has ended is
`closed` in the ledger, and its journal is deleted. Only `Run.move` changes a state.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from tinkex.service.futures import Future
from tinkex.service.rows import RunRow
from tinkex.service.runs.journal import Journal, JournalError
from tinkex.service.scheduler import Scheduler
from tinkex.service.served_models import ServedModel

log = logging.getLogger("tinkex.service")


class RunState(Enum):
    """What can be done with a run that is in memory."""

    OPEN = "open"  # its journal is open and its requests are queued; its adapter is not on the device
    RESIDENT = "resident"  # its adapter is on the device
    MISMATCHED = "mismatched"  # this process serves other base weights than it was made with
    FAILED = "failed"  # it was never made, or could not be restored
    EVICTED = "evicted"  # it is on disk alone: look it up again


_NEXT: dict[RunState, tuple[RunState, ...]] = {
    RunState.OPEN: (RunState.RESIDENT, RunState.MISMATCHED, RunState.FAILED, RunState.EVICTED),
    RunState.RESIDENT: (RunState.FAILED, RunState.EVICTED),
    RunState.MISMATCHED: (RunState.EVICTED,),
    RunState.FAILED: (RunState.EVICTED,),
    RunState.EVICTED: (),
}


@dataclass(eq=False)
class Run:
    """A run in memory."""

    row: RunRow
    model: ServedModel
    scheduler: Scheduler
    journal: Journal
    restore_from: Path | None = None  # the snapshot to load; None: its first request creates the adapter
    state: RunState = RunState.OPEN
    problem: str = ""  # why it is FAILED or MISMATCHED
    has_gradients: bool = False  # passes since its last step
    failed_pass: str | None = None  # why the next step must fail
    steps: int = 0  # since the last snapshot
    snapshot_at: float = field(default_factory=time.monotonic)
    used_at: float = field(default_factory=time.monotonic)
    accepting: asyncio.Lock = field(default_factory=asyncio.Lock)
    unrecorded: list[Future] = field(default_factory=list[Future])  # outcomes that the journal has not taken
    delivered: set[str] = field(default_factory=set[str])  # request ids whose outcomes need not be kept
    committing: asyncio.Task[None] | None = None  # its last snapshot, on the way to the disk

    @property
    def id(self) -> str:
        return self.row.run_id

    @property
    def resident(self) -> bool:
        return self.state is RunState.RESIDENT

    @property
    def idle(self) -> bool:
        return self.scheduler.idle(self.id)

    def move(self, state: RunState, problem: str = "") -> None:
        assert state in _NEXT[self.state], f"run {self.id} cannot go from {self.state} to {state}"
        self.state, self.problem = state, problem

    def clear_gradients(self) -> None:
        self.has_gradients, self.failed_pass = False, None

    def write_outcomes(self) -> None:
        """Journal the outcomes. If that fails clients get them all the same; a replay computes them again."""
        try:
            while self.unrecorded:
                self.journal.resolve(self.unrecorded[0].request_id, self.unrecorded[0].outcome)
                self.unrecorded.pop(0)
        except JournalError as error:
            log.error("an outcome of %s could not be journaled: %s", self.id, error)


# -- request ids: named after their run, so that a result is found once the run is on disk ------------------


def request_id_of(run_id: str, seq_id: int) -> str:
    return f"{run_id}#{seq_id}"


def run_of(request_id: str) -> str:
    return request_id.rpartition("#")[0]


def seq_of(request_id: str) -> int:
    return int(request_id.rpartition("#")[2])

"""What a journaled request is to do when its turn comes: for the first time, or again after a restart.

Promises: what was answered before does what it did, no more and nothing else: a pass that failed fails its
window again though it might now succeed, a save is not written twice, and a checkpoint that was deleted since
stays deleted. How a barrier is executed is in barriers.py. Knows nothing of order.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tinkex.engine.protocol import CustomLoss, Engine, EngineError, Pass
from tinkex.service.barriers import Barriers
from tinkex.service.core import Core
from tinkex.service.engines import BaseModel
from tinkex.service.futures import Future
from tinkex.service.journal import Entry, Journal
from tinkex.service.rows import CustomLossRow, RunRow
from tinkex.service.worker import Job
from tinkex.types.futures import RequestFailedResponse
from tinkex.types.training import ForwardBackwardRequest

SAVES = ("save_weights", "save_weights_for_sampler", "save_weights_external")
UNREADABLE = "unreadable"  # the op of an entry whose request could not be read
REFUSED = "refused"  # the op of an unreadable whose client was told so at once: it only takes its place


@dataclass(frozen=True)
class Unreadable:
    """What is journaled in place of a request that was accepted only to fail in its turn."""

    op: str
    message: str


@dataclass(eq=False)
class Run:
    """A run at hand: its row, its journal, and whether it is on the device."""

    row: RunRow
    model: BaseModel
    journal: Journal
    resident: bool = False
    restore_from: Path | None = None  # the snapshot to load before the next work; None: it is made anew
    broken: str | None = None  # why nothing can be done with it any more
    misfit: str | None = None  # why nothing can be done with it in this process; on disk it stays as it is
    steps: int = 0  # since the last snapshot
    snapshot_at: float = field(default_factory=time.monotonic)
    used_at: float = field(default_factory=time.monotonic)
    accepting: asyncio.Lock = field(default_factory=asyncio.Lock)
    gone: bool = False  # put on disk: look it up anew
    unrecorded: list[Future] = field(default_factory=list[Future])  # outcomes that the journal could not take
    forgettable: set[str] = field(default_factory=set[str])  # results not wanted any more
    committing: asyncio.Task[None] | None = None  # its last snapshot, on the way to the disk

    @property
    def id(self) -> str:
        return self.row.run_id


class Jobs:
    """From journal entries to work for a worker."""

    def __init__(self, core: Core, barriers: Barriers) -> None:
        self._core = core
        self._barriers = barriers

    def first(self, run: Run, entry: Entry, future: Future, again_since: float | None) -> Job:
        """What a request does that has no answer yet; `again_since` as the barriers have it."""
        if isinstance(entry.request, Unreadable):
            unreadable = entry.request
            breaks = unreadable.op == "forward_backward"
            return _refusing(future, unreadable.op, unreadable.message, breaks_window=breaks)
        if entry.op == "forward_backward":
            one_pass = self._pass(run, entry.request)
            return Job(future, entry.op, one_pass, breaks_window=one_pass.backward)

        async def barrier(engine: Engine) -> Any:
            result = await self._barriers.find(entry.op)(engine, run.row, entry.request, again_since)
            run.resident = run.resident or entry.op in ("create_model", "load_weights")
            return result

        return Job(future, entry.op, barrier=barrier)

    def again(self, run: Run, entry: Entry, answered: Future, diverged: Callable[[Future], None]) -> Job:
        """What an answered request must do again for the run to be as it was; `diverged` if it cannot."""
        future = Future("", run.row.owner)
        backward = isinstance(entry.request, ForwardBackwardRequest) and not entry.request.forward_only
        if isinstance(entry.request, Unreadable):
            job = self.first(run, entry, future, None)
        elif answered.failed:
            job = _refusing(future, entry.op, answered.outcome.error, breaks_window=backward)
            if entry.seq_id == 0:
                run.broken = not_made(run.id, answered.outcome)
        elif entry.op in SAVES or (entry.op == "forward_backward" and not backward):
            job = Job(future, entry.op, barrier=_do_nothing)
        else:
            job = self.first(run, entry, future, None)
            future.on_done = lambda done: diverged(done) if done.failed else None
        return Job(future, job.name, job.one_pass, job.barrier, job.breaks_window, replayed=True)

    def _pass(self, run: Run, request: ForwardBackwardRequest) -> Pass:
        work, custom = request.forward_backward_input, None
        config = dict(work.loss_fn_config or {})
        if work.loss_fn == "custom":
            row = self._core.ledger.custom_loss(str(config.pop("loss_id", "")))
            if row is not None and row.owner == run.row.owner:
                custom = custom_loss(row)
        return Pass(run.id, work.data, work.loss_fn, config, not request.forward_only, custom)


def not_made(run_id: str, outcome: RequestFailedResponse) -> str:
    """Why nothing can be done with a run whose first request failed."""
    return f"run {run_id} could not be made: {outcome.error}"


def custom_loss(row: CustomLossRow) -> CustomLoss:
    return CustomLoss(tuple(item["name"] for item in row.inputs), tuple(row.nodes))


def _refusing(future: Future, op: str, message: str, *, breaks_window: bool) -> Job:
    async def refuse(engine: Engine) -> Any:
        raise EngineError(message, "user")

    return Job(future, op, barrier=refuse, breaks_window=breaks_window)


async def _do_nothing(engine: Engine) -> None:
    """It was done, and what it left is there."""

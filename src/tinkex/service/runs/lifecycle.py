"""A run in memory: its state, its adapter on the device, its snapshots, its way back to disk.

    on disk ──open──► OPEN
    OPEN ──create or load──► RESIDENT
    OPEN ──made with other base weights──► MISMATCHED
    OPEN, RESIDENT ──cannot be made or restored──► FAILED
    OPEN, RESIDENT, MISMATCHED, FAILED ──idle, or engine lost──► EVICTED (on disk again)

"On disk" is a snapshot and a journal; the ledger then says `evicted` (or `live`, after a crash). A run whose
engine was lost is opened again at once if it has unanswered requests. A run whose session has ended is
`closed` in the ledger, and its journal is deleted. Knows nothing of what requests mean.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any

from tinkex.engine.protocol import DropAdapter, Engine, EngineError, LoadAdapter, SaveAdapter
from tinkex.service.config import ServiceConfig
from tinkex.service.futures import Future, seq_of
from tinkex.service.group_commit import GroupCommit
from tinkex.service.ledger import Ledger
from tinkex.service.refusal import Refusal
from tinkex.service.rows import RunRow
from tinkex.service.runs.journal import Journal, JournalError
from tinkex.service.runs.snapshots import SNAPSHOT, Snapshots
from tinkex.service.scheduler import OrderedRequests, Scheduler
from tinkex.service.served_models import ServedModel, execute

log = logging.getLogger("tinkex.service")


class RunState(Enum):
    """What can be done with a run that is in memory."""

    OPEN = "open"  # its journal is open and its requests are queued; its adapter is not on the device
    RESIDENT = "resident"  # its adapter is on the device
    MISMATCHED = "mismatched"  # this process serves other base weights than it was made with
    FAILED = "failed"  # it was never made, or could not be restored
    EVICTED = "evicted"  # it is only on disk: look it up again


_NEXT: dict[RunState, tuple[RunState, ...]] = {
    RunState.OPEN: (RunState.RESIDENT, RunState.MISMATCHED, RunState.FAILED, RunState.EVICTED),
    RunState.RESIDENT: (RunState.FAILED, RunState.EVICTED),
    RunState.MISMATCHED: (RunState.EVICTED,),
    RunState.FAILED: (RunState.EVICTED,),
    RunState.EVICTED: (),
}


@dataclass(eq=False)
class Run:
    """A run in memory. Its async methods are called while the loop executes nothing else of the run."""

    config: ServiceConfig
    ledger: Ledger
    disk: GroupCommit
    snapshots: Snapshots
    in_memory: dict[str, Run]  # all runs, by id
    row: RunRow
    model: ServedModel
    scheduler: Scheduler
    queue: OrderedRequests
    journal: Journal
    restore_from: Path | None  # the snapshot to load; None: its first request creates the adapter
    state: RunState = RunState.OPEN
    on_device: bool = False  # its adapter takes memory there, even if it is FAILED by now
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
        return self.queue.idle

    def move(self, state: RunState, problem: str = "") -> None:
        """The only place where a state changes."""
        assert state in _NEXT[self.state], f"run {self.id} cannot go from {self.state} to {state}"
        self.state, self.problem = state, problem
        self.on_device = (self.on_device or self.resident) and state is not RunState.EVICTED

    def used(self) -> None:
        self.used_at = time.monotonic()

    def reread(self) -> None:
        """Its row has changed in the ledger."""
        self.row = self.ledger.run(self.id) or self.row

    def add_pass(self, failed: str | None = None) -> None:
        """A pass adds to the gradients; or it `failed`, so that the next step must."""
        self.has_gradients, self.failed_pass = True, self.failed_pass or failed

    def clear_gradients(self) -> None:
        self.has_gradients, self.failed_pass = False, None

    # -- outcomes ----------------------------------------------------------------------------------------

    def resolve(self, future: Future, outcome: Any, *, repeatable: bool = False) -> None:
        """Record an outcome: pollers wake on the event loop's next turn, when the journal has it.

        They get it once it is on the disk; at once if it is `repeatable`: a replay computes it again.
        """
        if future.done:
            return
        future.resolve(outcome)
        if self.state is RunState.MISMATCHED:
            return  # the request is still to be executed, by a server with the right weights
        self.unrecorded.append(future)
        self.write_outcomes()
        if not repeatable:
            future.hold_until(self.disk.mark())
        if future.failed and seq_of(future.request_id) == 0:
            self.was_not_made(outcome.error)

    async def record(self, future: Future, outcome: Any) -> None:
        """Journal a large outcome on a thread: `resolve` would take the event loop's time for it."""
        if not future.done and self.state is not RunState.MISMATCHED:
            with contextlib.suppress(JournalError):  # `resolve` tries again, and says so
                await asyncio.to_thread(self.journal.resolve, future.request_id, outcome)

    def write_outcomes(self) -> None:
        """Journal the outcomes. If that fails clients get them all the same; a replay computes them again."""
        try:
            while self.unrecorded:
                self.journal.resolve(self.unrecorded[0].request_id, self.unrecorded[0].outcome)
                self.unrecorded.pop(0)
        except JournalError as error:
            log.error("an outcome of %s could not be journaled: %s", self.id, error)

    def was_not_made(self, why: str) -> None:
        """Its first request failed."""
        self._fail_for_good(f"run {self.id} could not be made: {why}")

    def cannot_restore(self, why: str, category: str) -> str:
        """Give it up: for good, or, if the engine is to blame, in this process."""
        problem = f"run {self.id} could not be restored: {why}; go on from one of its checkpoints"
        if category == "user":
            self._fail_for_good(problem)
        else:
            problem += ", or with it after a restart of the server"
            self.move(RunState.FAILED, problem)
        log.error("%s", problem)
        return problem

    def _fail_for_good(self, problem: str) -> None:
        if self.state is not RunState.FAILED:
            self.move(RunState.FAILED, problem)
        self.ledger.update_run(self.id, corrupted=True, problem=problem)

    # -- on the device -----------------------------------------------------------------------------------

    async def make_resident(self, engine: Engine, seq_id: int) -> None:
        """Before work: load the adapter from the last snapshot, unless it is on the device."""
        self.check_weights(engine)
        if self.problem:
            raise EngineError(self.problem, "user")
        if self.resident:
            return
        await self._make_room(engine)
        if self.restore_from is not None:
            try:
                async with self.snapshots.read(self.restore_from) as location:
                    await execute(engine, LoadAdapter(self.id, str(location), optimizer=True))
            except EngineError as error:
                if error.category != "user":  # the engine is in trouble, and the snapshot may be good
                    raise
                raise EngineError(self.cannot_restore(str(error), "user")) from error
            self.move(RunState.RESIDENT)
        elif seq_id != 0:
            raise EngineError(f"run {self.id} was never made: its first request did not arrive", "user")
        if not self.row.fingerprint:
            self.ledger.update_run(self.id, fingerprint=engine.info.fingerprint)
            self.row = replace(self.row, fingerprint=engine.info.fingerprint)

    def check_weights(self, engine: Engine) -> None:
        """A run continues only with the base weights that it was made with."""
        made_with, here = self.row.fingerprint, engine.info.fingerprint
        if made_with and made_with != here and self.state is RunState.OPEN:
            problem = (
                f"run {self.id} was made with other weights than those that this server has as "
                f"{self.model.name!r} ({made_with}, not {here}); nothing of it is lost: start the server "
                "with those, and it goes on, with what it was asked to do before"
            )
            self.move(RunState.MISMATCHED, problem)
            log.error("%s", problem)

    async def _make_room(self, engine: Engine) -> None:
        """Evict the least recently used idle runs until one more adapter fits into the memory planned."""
        beat = engine.heartbeat()
        budget, count = beat.memory.get("adapters"), beat.stats.get("adapters_live", 0)
        if budget is None or not count:
            return
        each = beat.stats.get("adapter_bytes", 0) / count  # the heartbeat lags behind: only the mean is used
        loaded = [run for run in self.in_memory.values() if run.model is self.model and run.on_device]
        for run in sorted(loaded, key=lambda run: run.used_at):
            if each * (sum(run.on_device for run in loaded) + 1) <= budget:
                return
            if run.idle and await run.evict():
                log.info("run %s was evicted to make room for another", run.id)

    # -- snapshots ---------------------------------------------------------------------------------------

    async def after_pass(self, engine: Engine, next_seq: int) -> None:
        """After a pass that left no gradients: take a snapshot if the journal has grown long without one."""
        committing = self.committing is not None and not self.committing.done()
        if not committing and self.journal.replay_bytes >= self.config.snapshot_bytes:
            await self.snapshot(engine, next_seq)

    async def after_step(self, engine: Engine, next_seq: int, *, loaded: bool) -> None:
        """After a step or a load: take a snapshot if it is time."""
        self.steps += 1
        age = time.monotonic() - self.snapshot_at
        # The checkpoint that was loaded may be deleted or overwritten before a replay would need it.
        if loaded or self.steps >= self.config.snapshot_steps or age >= self.config.snapshot_seconds:
            await self.snapshot(engine, next_seq)
        if loaded:
            await self.committed()

    async def snapshot(self, engine: Engine, next_seq: int) -> None:
        """Save the run, which has no gradients. Training does not wait for the disk: see `committing`."""
        await self.committed()
        self.snapshot_at = time.monotonic()
        self.write_outcomes()
        try:
            part = await asyncio.to_thread(self.journal.begin_snapshot, next_seq)
            await execute(engine, SaveAdapter(self.id, str(part / SNAPSHOT), optimizer=True, sync=False))
        except (EngineError, JournalError, OSError) as error:
            log.error("no snapshot of %s: %s", self.id, error)  # the last one stays in force
            return
        self.committing = asyncio.get_running_loop().create_task(self._commit(part, next_seq, self.steps))
        self.steps = 0

    async def _commit(self, part: Path, next_seq: int, steps: int) -> None:
        """Sync a snapshot to the disk, and begin a replay from it from then on."""
        try:
            await self.snapshots.keep(self.id, part)
            delivered = {i for i in self.delivered if seq_of(i) < next_seq}
            before = self.snapshots.place_of(self.journal.snapshot)
            await asyncio.to_thread(self.journal.commit_snapshot, part, delivered)
            await self.snapshots.replaced(before, self.journal.snapshot)
        except (JournalError, OSError, Refusal) as error:
            log.error("no snapshot of %s: %s", self.id, error)
            self.steps += steps
        else:
            self.delivered -= delivered

    async def committed(self) -> None:
        if self.committing is not None:
            await asyncio.shield(self.committing)

    async def snapshot_if_changed(self) -> None:
        """With gradients, or a pass under way, no snapshot is taken: the passes are replayed instead."""
        engine, busy = self.model.engine, self.has_gradients or self.queue.running
        if engine is not None and self.resident and self.steps and not busy:
            await self.snapshot(engine, self.queue.next_seq)
        await self.committed()

    # -- eviction ----------------------------------------------------------------------------------------

    async def evict(self) -> bool:
        """Free the device, if the run is idle; its next request brings it back."""
        self.write_outcomes()
        if self.state is RunState.EVICTED or not self.idle or self.unrecorded:
            return False
        await self.snapshot_if_changed()
        async with self.accepting:
            if not self.idle:
                return False  # a request came meanwhile
            self.leave_memory()
        if self.model.engine is not None:
            with contextlib.suppress(EngineError):  # an engine that is lost holds nothing
                await execute(self.model.engine, DropAdapter(self.id))
        return True

    def leave_memory(self) -> None:
        """Leave the run to its files. Called with `accepting` held."""
        self.move(RunState.EVICTED)
        self.in_memory.pop(self.id, None)
        self.scheduler.close(self.id)
        self.journal.close()
        self.ledger.update_run(self.id, state="evicted")

"""Runs in memory and on the device: adapters loaded when needed, snapshotted now and then, evicted.

An adapter is on the device before work of its run begins, as its last snapshot has it; the least recently
used idle run makes room for another. An outcome is journaled before any client is told. Everything here runs
on the training loop's task, between or within batches. Knows nothing of what requests mean.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from tinkex.engine.protocol import DropAdapter, Engine, EngineError, LoadAdapter, SaveAdapter
from tinkex.service.config import ServiceConfig
from tinkex.service.ledger import Ledger
from tinkex.service.runs.execution import Execution
from tinkex.service.runs.journal import JournalError
from tinkex.service.runs.lifecycle import Run, RunState, seq_of
from tinkex.service.served_models import ServedModel, execute
from tinkex.store import sync_tree

log = logging.getLogger("tinkex.service")
SNAPSHOT = "adapter"  # the directory inside a snapshot


class Residency:
    """The runs in memory, by id."""

    def __init__(self, config: ServiceConfig, ledger: Ledger) -> None:
        self._config = config
        self._ledger = ledger
        self._runs: dict[str, Run] = {}

    def get(self, run_id: str) -> Run | None:
        return self._runs.get(run_id)

    def add(self, run: Run) -> None:
        self._runs[run.id] = run

    def runs(self, model: ServedModel | None = None) -> list[Run]:
        return [run for run in self._runs.values() if model is None or run.model is model]

    # -- outcomes ----------------------------------------------------------------------------------------

    def resolve(self, work: Execution, outcome: Any) -> None:
        """Record an outcome: pollers wake on the event loop's next turn, when the journal has it."""
        run, future = work.run, work.future
        if future is None or future.done:
            return
        future.resolve(outcome)
        if run.state is RunState.MISMATCHED:
            return  # the request is still to be executed, by a server with the right weights
        run.unrecorded.append(future)
        run.write_outcomes()
        if future.failed and seq_of(future.request_id) == 0:
            self.fail_run(run, not_created(run.id, outcome.error))

    def diverged(self, work: Execution, seq_id: int, message: str, category: str) -> None:
        """A replayed request failed that had succeeded: the run cannot become what it was."""
        if not work.run.problem:
            self.cannot_restore(
                work.run, f"{work.op} {seq_id} had succeeded and now failed ({message})", category
            )

    def cannot_restore(self, run: Run, why: str, category: str) -> str:
        """Give a run up: for good, or, if the engine is to blame, in this process."""
        problem = f"run {run.id} could not be restored: {why}; go on from one of its checkpoints"
        if category == "user":
            self.fail_run(run, problem)
        else:
            problem += ", or with it after a restart of the server"
            run.move(RunState.FAILED, problem)
        log.error("%s", problem)
        return problem

    def fail_run(self, run: Run, problem: str) -> None:
        """Give a run up for good, and keep the reason."""
        if run.state is not RunState.FAILED:
            run.move(RunState.FAILED, problem)
        self._ledger.update_run(run.id, corrupted=True, problem=problem)

    # -- on the device -----------------------------------------------------------------------------------

    async def make_resident(self, engine: Engine, run: Run, seq_id: int) -> None:
        """Before work of a run: have its adapter on the device, as its last snapshot has it."""
        self.check_weights(run, engine)
        if run.problem:
            raise EngineError(run.problem, "user")
        if run.resident:
            return
        await self._make_room(engine, run.model)
        if run.restore_from is not None:
            location = str(run.restore_from / SNAPSHOT)
            try:
                await execute(engine, LoadAdapter(run.id, location, optimizer=True))
            except EngineError as error:
                if error.category != "user":  # the engine is in trouble, and the snapshot may be good
                    raise
                raise EngineError(self.cannot_restore(run, str(error), "user")) from error
            run.move(RunState.RESIDENT)
        elif seq_id != 0:
            raise EngineError(f"run {run.id} was never made: its first request did not arrive", "user")
        if not run.row.fingerprint:
            self._ledger.update_run(run.id, fingerprint=engine.info.fingerprint)
            run.row = replace(run.row, fingerprint=engine.info.fingerprint)

    def check_weights(self, run: Run, engine: Engine) -> None:
        """A run goes on with the base weights that it was made with, and with no others."""
        made_with, here = run.row.fingerprint, engine.info.fingerprint
        if made_with and made_with != here and run.state is RunState.OPEN:
            problem = (
                f"run {run.id} was made with other weights than those that this server has as "
                f"{run.model.name!r} ({made_with}, not {here}); nothing of it is lost: start the server with "
                "those, and it goes on, with what it was asked to do before"
            )
            run.move(RunState.MISMATCHED, problem)
            log.error("%s", problem)

    async def _make_room(self, engine: Engine, model: ServedModel) -> None:
        """Evict the least recently used idle runs until one more adapter fits into the memory planned."""
        beat = engine.heartbeat()
        budget, count = beat.memory.get("adapters"), beat.stats.get("adapters_live", 0)
        if budget is None or not count:
            return
        each = beat.stats.get("adapter_bytes", 0) / count  # the heartbeat lags behind: only the mean is used
        resident = [run for run in self.runs(model) if run.resident]
        for run in sorted(resident, key=lambda run: run.used_at):
            if each * (sum(run.resident for run in resident) + 1) <= budget:
                return
            if run.idle and await self.evict(run):
                log.info("run %s was evicted to make room for another", run.id)

    # -- snapshots ---------------------------------------------------------------------------------------

    async def after_pass(self, engine: Engine, run: Run, next_seq: int) -> None:
        """After a pass that left no gradients: take a snapshot if the journal has grown long without one."""
        committing = run.committing is not None and not run.committing.done()
        if not committing and run.journal.replay_bytes >= self._config.snapshot_bytes:
            await self.snapshot(engine, run, next_seq)

    async def after_step(self, engine: Engine, work: Execution, next_seq: int) -> None:
        """After a step or a load: take a snapshot if it is time."""
        run, config = work.run, self._config
        run.steps += 1
        # The checkpoint that was loaded may be deleted or overwritten before a replay would need it.
        loaded = work.op == "load_weights"
        age = time.monotonic() - run.snapshot_at
        if loaded or run.steps >= config.snapshot_steps or age >= config.snapshot_seconds:
            await self.snapshot(engine, run, next_seq)
        if loaded:
            await self.committed(run)

    async def snapshot(self, engine: Engine, run: Run, next_seq: int) -> None:
        """Save a run that has no gradients. If that fails, the last snapshot stays in force.

        Training does not wait for the disk: the snapshot is `committing` when this returns.
        """
        await self.committed(run)
        run.snapshot_at = time.monotonic()
        run.write_outcomes()
        try:
            part = await asyncio.to_thread(run.journal.begin_snapshot, next_seq)
            await execute(engine, SaveAdapter(run.id, str(part / SNAPSHOT), optimizer=True, sync=False))
        except (EngineError, JournalError, OSError) as error:
            log.error("no snapshot of %s: %s", run.id, error)
            return
        run.committing = asyncio.get_running_loop().create_task(self._commit(run, part, next_seq, run.steps))
        run.steps = 0

    async def _commit(self, run: Run, part: Path, next_seq: int, steps: int) -> None:
        """Sync a snapshot to the disk, and begin a replay from it from then on."""
        try:
            await asyncio.to_thread(sync_tree, part)
            delivered = {i for i in run.delivered if seq_of(i) < next_seq}
            await asyncio.to_thread(run.journal.commit_snapshot, part, delivered)
        except (JournalError, OSError) as error:
            log.error("no snapshot of %s: %s", run.id, error)
            run.steps += steps
        else:
            run.delivered -= delivered

    async def committed(self, run: Run) -> None:
        if run.committing is not None:
            await asyncio.shield(run.committing)

    async def snapshot_if_changed(self, run: Run) -> None:
        """With gradients no snapshot is taken: the passes are replayed instead."""
        engine = run.model.engine
        if engine is not None and run.resident and run.steps and not run.has_gradients:
            await self.snapshot(engine, run, run.scheduler.next_seq(run.id))
        await self.committed(run)

    # -- eviction ----------------------------------------------------------------------------------------

    async def evict(self, run: Run) -> bool:
        """Free the device, if the run is idle; its next request brings it back."""
        run.write_outcomes()
        if run.state is RunState.EVICTED or not run.idle or run.unrecorded:
            return False
        await self.snapshot_if_changed(run)
        async with run.accepting:
            if not run.idle:
                return False  # a request came meanwhile
            self.forget(run)
        if run.model.engine is not None:
            with contextlib.suppress(EngineError):  # an engine that is lost holds nothing
                await execute(run.model.engine, DropAdapter(run.id))
        return True

    def forget(self, run: Run) -> None:
        """Leave a run to its files. Called with `run.accepting` held."""
        run.move(RunState.EVICTED)
        self._runs.pop(run.id, None)
        run.scheduler.close(run.id)
        run.journal.close()
        self._ledger.update_run(run.id, state="evicted")


def not_created(run_id: str, why: str) -> str:
    """Why nothing can be done with a run whose first request failed."""
    return f"run {run_id} could not be made: {why}"

"""Runs that this process has at hand: put in order, kept on the device, put on disk and brought back.

Promises: a run comes back as its last snapshot and its journal say, whoever had it before; what was executed
and answered in an earlier life is done again to the same effect, and never answered differently; an adapter
that is needed is on the device before its work begins, and one that nobody uses makes room for others.
Knows nothing of operations' meaning: how a barrier is executed is in barriers.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from tinkex import tracing
from tinkex.engine.protocol import (
    DropAdapter,
    Engine,
    EngineError,
    LoadAdapter,
    SaveAdapter,
)
from tinkex.service.barriers import Barriers
from tinkex.service.core import Core
from tinkex.service.engines import BaseModel
from tinkex.service.futures import ACTIVE, Future, QueueState
from tinkex.service.jobs import Jobs, Run, not_made
from tinkex.service.journal import Entry, Journal, JournalError, Restored, delete, restore
from tinkex.service.records import sync_below
from tinkex.service.refusal import Refusal
from tinkex.service.rows import RunRow
from tinkex.service.scheduler import Scheduler, Work
from tinkex.service.threads import in_thread
from tinkex.service.worker import Worker, execute
from tinkex.types.data import EncodedTextChunk
from tinkex.types.futures import RequestFailedResponse
from tinkex.types.training import ForwardBackwardRequest

log = logging.getLogger("tinkex.service")

SNAPSHOT = "adapter"  # the directory inside a snapshot


class Live:
    """The runs at hand, and the workers of their base models."""

    def __init__(self, core: Core, barriers: Barriers) -> None:
        self._core = core
        self._jobs = Jobs(core, barriers)
        self._runs: dict[str, Run] = {}
        self._reviving: dict[str, asyncio.Task[Run]] = {}
        self._workers: dict[str, Worker] = {}
        # Told of every finished piece of work: for accounts, and for the server's metrics.
        self.observers: list[Callable[[RunRow, Work, str, float], None]] = []

    @property
    def workers(self) -> list[Worker]:
        return list(self._workers.values())

    def worker(self, model: BaseModel) -> Worker:
        if model.name not in self._workers:
            config = self._core.config
            scheduler = Scheduler(batch_tokens=config.batch_tokens, gap_patience=config.gap_patience)
            worker = self._workers[model.name] = Worker(model, scheduler)
            worker.prepare, worker.settled = self._make_resident, self._settled
            worker.observe = self._observed
        return self._workers[model.name]

    def scheduler(self, run: Run) -> Scheduler:
        return self.worker(run.model).scheduler

    def _observed(self, work: Work, op: str, seconds: float) -> None:
        run = self._runs.get(work.run)
        for observer in self.observers if run is not None else ():
            observer(run.row, work, op, seconds)  # type: ignore[union-attr]

    # -- coming ------------------------------------------------------------------------------------------

    def reread(self, session_id: str) -> None:
        """A session's runs have changed in the ledger."""
        for run in self._runs.values():
            if run.row.session_id == session_id:
                run.row = self._core.ledger.run(run.id) or run.row

    def at_hand(self, run_id: str) -> Run | None:
        return self._runs.get(run_id)

    async def take_up(self, row: RunRow) -> None:
        """After a restart: go on with a run that owes answers; one that owes none waits to be asked for."""
        try:
            restored = await asyncio.to_thread(restore, self._core.run_dir(row.run_id) / "journal")
            if any(entry.request_id not in restored.done for entry in restored.entries):
                await self.find(row)
            else:
                self._core.ledger.update_run(row.run_id, state="evicted")
        except JournalError as error:
            self._corrupted(row, str(error))
        except (Refusal, OSError) as error:  # its base model is not configured any more, say
            log.error("run %s waits: %s", row.run_id, error)

    async def find(self, row: RunRow) -> Run:
        """The run, from disk if need be."""
        run = self._runs.get(row.run_id)
        if run is None:
            task = self._reviving.get(row.run_id)
            if task is None:
                task = asyncio.get_running_loop().create_task(self._revive(row))
                self._reviving[row.run_id] = task
                task.add_done_callback(lambda _: self._reviving.pop(row.run_id, None))
            run = await asyncio.shield(task)
        run.used_at = time.monotonic()
        return run

    async def _revive(self, row: RunRow) -> Run:
        if row.corrupted:
            raise Refusal(422, await asyncio.to_thread(self._why_lost, row.run_id))
        if row.state == "closed":
            raise Refusal(410, f"run {row.run_id} ended with its session; go on from one of its checkpoints")
        model = self._core.engines.find(row.base_model)
        try:
            restored, journal = await asyncio.to_thread(self._read_journal, row.run_id)
        except JournalError as error:
            self._corrupted(row, str(error))
            raise Refusal(
                422, f"run {row.run_id} could not be restored ({error}); go on from one of its checkpoints"
            ) from error
        except OSError as error:  # too many open files, a full disk: what is there may be good
            raise Refusal(503, f"run {row.run_id} cannot be read now: {error}") from error
        run = self._runs[row.run_id] = Run(row, model, journal, restore_from=restored.snapshot)
        if model.engine is not None:
            self._check_fit(run, model.engine)
        self.scheduler(run).open(run.id, row.owner, restored.next_seq)
        self._replay(run, restored)
        if row.state != "live":
            self._core.ledger.update_run(row.run_id, state="live")
        return run

    def _read_journal(self, run_id: str) -> tuple[Restored, Journal]:
        directory = self._core.run_dir(run_id) / "journal"
        return restore(directory), Journal(directory, fsync=self._core.config.fsync)

    def _why_lost(self, run_id: str) -> str:
        """Why a run is marked as corrupted: it was never made, or could not be restored. Reads files."""
        made = self.answer_to(request_id_of(run_id, 0))
        if isinstance(made, RequestFailedResponse):
            return not_made(run_id, made)
        return f"run {run_id} could not be restored; go on from one of its checkpoints"

    def answer_to(self, request_id: str) -> Any:
        """What a run's journal holds of a request, whatever became of the run; None: nothing. Reads files."""
        with contextlib.suppress(JournalError, OSError):
            return restore(self._core.run_dir(run_of(request_id)) / "journal").outcomes.get(request_id)

    def _corrupted(self, row: RunRow, why: str) -> None:
        log.error("run %s could not be restored: %s", row.run_id, why)
        self._core.ledger.update_run(row.run_id, corrupted=True)

    def _replay(self, run: Run, restored: Restored) -> None:
        """Put what the journal holds in order again: what was answered keeps its answer."""
        scheduler = self.scheduler(run)
        for entry in restored.undelivered:
            self._promise(run, entry.request_id).resolve(restored.outcomes[entry.request_id])
            scheduler.remember(run.id, entry.seq_id, entry.request_id, entry.digest)
        # Of those without an answer only the first can have been executed before.
        open_seq = min((e.seq_id for e in restored.entries if e.request_id not in restored.done), default=-1)
        for entry in restored.entries:
            future = self._promise(run, entry.request_id)
            if entry.request_id in restored.outcomes:
                future.resolve(restored.outcomes[entry.request_id])
            was_done = entry.request_id in restored.done  # its answer may be forgotten: then it is made anew
            self.schedule(run, entry, future, again=was_done or entry.seq_id == open_seq)
        last_done = max((e.seq_id for e in restored.entries if e.request_id in restored.done), default=0)
        scheduler.give_up(run.id, last_done, time.monotonic())  # what is missing below was given up before

    def _promise(self, run: Run, request_id: str) -> Future:
        """The future of a journaled request: a new one, unless this process has it still."""
        kept = self._core.futures.get(request_id)
        return kept or self._core.futures.create(run.row.owner, request_id=request_id)

    # -- order -------------------------------------------------------------------------------------------

    def schedule(self, run: Run, entry: Entry, future: Future, *, again: bool = False) -> None:
        """Put a journaled request in its run's order; `again`: it may have been done, and not answered."""
        if future.done:
            job = self._jobs.again(run, entry, future, lambda failed: self._diverged(run, entry, failed))
        else:
            job = self._jobs.first(run, entry, future, entry.accepted_at if again else None)
            if (hop := tracing.begin(f"scheduler {job.name}")) is not None:
                job = replace(job, hop=hop)
            future.on_done = lambda done: self._resolved(run, done)
            future.why = lambda: self._why(run)
        tokens = tokens_of(entry.request)
        is_pass = job.one_pass is not None
        is_step = job.name == "optim_step"
        work = Work(run.id, entry.seq_id, entry.request_id, is_pass, tokens, entry.digest, job, is_step)
        worker, now = self.worker(run.model), time.monotonic()
        lost = entry.seq_id and worker.scheduler.next_seq(run.id) == 0 and worker.scheduler.idle(run.id)
        worker.scheduler.submit(work, now)
        if lost:
            # Its client has its id, so it was made; nobody will ever send that again.
            self._break(run, "its creation is not in its journal", "user")
            worker.scheduler.give_up(run.id, entry.seq_id, now)
        worker.wake()

    def _diverged(self, run: Run, entry: Entry, future: Future) -> None:
        if (run.misfit or run.broken) is None:
            why = f"{entry.op} {entry.seq_id} had succeeded and now failed ({future.outcome.error})"
            self._break(run, why, future.outcome.category)

    def _break(self, run: Run, why: str, category: str) -> str:
        """Nothing more can be done with it: for good, or, if the engine is to blame, in this process."""
        run.broken = f"run {run.id} could not be restored: {why}; go on from one of its checkpoints"
        if category == "user":
            self._corrupted(run.row, why)
        else:
            run.broken += ", or with it after a restart of the server"
            log.error("%s", run.broken)
        return run.broken

    def _check_fit(self, run: Run, engine: Engine) -> None:
        """A run goes on with the weights that it was made with: others would make something else of it."""
        made_with, here = run.row.fingerprint, engine.info.fingerprint
        if made_with and made_with != here and run.misfit is None:
            run.misfit = (
                f"run {run.id} was made with other weights than those that this server has as "
                f"{run.model.name!r} ({made_with}, not {here}); nothing of it is lost: start the server with "
                "those, and it goes on, with what it was asked to do before"
            )
            log.error("%s", run.misfit)

    def _why(self, run: Run) -> QueueState:
        if run.model.loading:
            return "paused_capacity", f"the base model {run.model.name} is being loaded"
        missing = self.scheduler(run).missing(run.id) if not run.gone else None
        if missing is not None:
            return (
                "paused_capacity",
                f"request {missing} of this run has not arrived, and those after it wait",
            )
        return ACTIVE

    def _resolved(self, run: Run, future: Future) -> None:
        if run.misfit is not None:
            return  # what waits for the right model is still to be done
        run.unrecorded.append(future)
        self._record(run)
        if future.failed and seq_of(future.request_id) == 0:
            run.broken = not_made(run.id, future.outcome)
            self._core.ledger.update_run(run.id, corrupted=True)  # or it would be listed as a good one

    def _record(self, run: Run) -> None:
        """Journal outcomes. If that fails they are told all the same, and a restart finds them anew."""
        try:
            while run.unrecorded:
                run.journal.resolve(run.unrecorded[0].request_id, run.unrecorded[0].outcome)
                run.unrecorded.pop(0)
        except JournalError as error:
            log.error("an outcome of %s could not be journaled: %s", run.id, error)

    # -- on the device -----------------------------------------------------------------------------------

    async def _make_resident(self, engine: Engine, work: Work) -> None:
        """Before work of a run: its adapter is on the device, as its last snapshot had it."""
        run = self._runs[work.run]
        self._check_fit(run, engine)
        if why := run.misfit or run.broken:
            raise EngineError(why, "user")
        if run.resident:
            return
        await self._make_room(engine, run.model)
        if run.restore_from is not None:
            try:
                await execute(engine, LoadAdapter(run.id, run.restore_from / SNAPSHOT, optimizer=True))
            except EngineError as error:
                if error.category != "user":  # the engine is in trouble, and the snapshot may be good
                    raise
                raise EngineError(self._break(run, str(error), error.category)) from error
            run.resident = True
        elif work.seq_id != 0:
            raise EngineError(f"run {run.id} was never made: its first request did not arrive", "user")
        if not run.row.fingerprint:
            self._core.ledger.update_run(run.id, fingerprint=engine.info.fingerprint)
            run.row = replace(run.row, fingerprint=engine.info.fingerprint)

    async def _make_room(self, engine: Engine, model: BaseModel) -> None:
        """One more adapter is coming: put those used least on disk until it fits into what was planned."""
        budget = getattr(engine, "memory", {}).get("adapters")
        scheduler = self.worker(model).scheduler
        idle = [r for r in self._runs.values() if r.model is model and r.resident and scheduler.idle(r.id)]
        for run in sorted(idle, key=lambda run: run.used_at):
            stats = engine.stats()
            held, count = stats.get("adapter_bytes", 0), stats.get("adapters_live", 0)
            if budget is None or not count or held * (count + 1) / count <= budget:
                return
            if await self._put_away(run):
                log.info("run %s was put on disk to make room for another", run.id)

    async def _settled(self, engine: Engine, work: Work) -> None:
        """After a pass, a step or a load, when there are no gradients: time for a snapshot?"""
        run = self._runs[work.run]
        if work.is_pass:
            if self._is_long(run):
                await self._snapshot(engine, run, work.seq_id + 1)
            return
        run.steps += 1
        config, age = self._core.config, time.monotonic() - run.snapshot_at
        # What was loaded may be deleted or overwritten before a replay would need it.
        loaded = work.what.name == "load_weights"
        if loaded or run.steps >= config.snapshot_steps or age >= config.snapshot_seconds:
            await self._snapshot(engine, run, work.seq_id + 1)
        if loaded:
            await self._committed(run)

    def _is_long(self, run: Run) -> bool:
        """Has its journal grown without a step, and is nothing being done about it?"""
        busy = run.committing is not None and not run.committing.done()
        return not busy and run.journal.replay_bytes >= self._core.config.snapshot_bytes

    async def _snapshot(self, engine: Engine, run: Run, next_seq: int) -> None:
        """Only while the run has no gradients, and from its worker. If it fails, the last one holds.

        Nobody waits for the disk, which may take half a second: it is `committing` when this returns.
        """
        await self._committed(run)
        run.snapshot_at = time.monotonic()
        self._record(run)
        try:
            part = await asyncio.to_thread(run.journal.begin_snapshot, next_seq)
            await execute(engine, SaveAdapter(run.id, part / SNAPSHOT, optimizer=True, sync=False))
        except (EngineError, JournalError, OSError) as error:
            log.error("no snapshot of %s: %s", run.id, error)
            return
        run.committing = asyncio.get_running_loop().create_task(self._commit(run, part, next_seq, run.steps))
        run.steps = 0

    async def _commit(self, run: Run, part: Path, next_seq: int, steps: int) -> None:
        """Have a snapshot on the disk, and go by it from then on."""
        try:
            await in_thread(lambda: sync_below(part))
            delivered = {i for i in run.forgettable if seq_of(i) < next_seq}
            await asyncio.to_thread(run.journal.commit_snapshot, part, delivered)
        except (JournalError, OSError) as error:
            log.error("no snapshot of %s: %s", run.id, error)
            run.steps += steps
        else:
            run.forgettable -= delivered

    async def _committed(self, run: Run) -> None:
        if run.committing is not None:
            await asyncio.shield(run.committing)

    # -- going -------------------------------------------------------------------------------------------

    async def put_away(self, run: Run) -> bool:
        """Put a run on disk and free the device, if it is idle; it comes back with its next request."""
        return await self.worker(run.model).between(lambda: self._put_away(run))

    async def _put_away(self, run: Run) -> bool:
        """The same, on its worker. With gradients no snapshot is taken: its passes are replayed instead."""
        scheduler, worker = self.scheduler(run), self.worker(run.model)
        self._record(run)
        if run.gone or not scheduler.idle(run.id) or run.unrecorded:
            return False
        engine = run.model.engine
        if engine is not None and run.resident and run.steps and not worker.has_gradients(run.id):
            await self._snapshot(engine, run, scheduler.next_seq(run.id))
        await self._committed(run)
        async with run.accepting:
            if not scheduler.idle(run.id):
                return False  # it was needed again meanwhile
            self._let_go(run)
        if engine is not None and run.resident:
            await execute(engine, DropAdapter(run.id))
        self._core.ledger.update_run(run.id, state="evicted")
        return True

    def _let_go(self, run: Run) -> None:
        run.gone = True
        self._runs.pop(run.id, None)
        self.scheduler(run).close(run.id)
        self.worker(run.model).forget(run.id)
        run.journal.close()

    async def close(self, row: RunRow) -> bool:
        """A run whose session is over: let go of it for good, once what it was asked to do is done."""
        run = self._runs.get(row.run_id)
        if run is not None and not await self.put_away(run):
            return False
        self._core.ledger.update_run(row.run_id, state="closed")
        directory = self._core.run_dir(row.run_id) / "journal"
        await asyncio.to_thread(lambda: directory.is_dir() and delete(directory))
        return True

    def idle_runs(self, sessions: set[str]) -> list[Run]:
        return [
            run
            for run in self._runs.values()
            if run.row.session_id in sessions and self.scheduler(run).idle(run.id)
        ]

    def forget_results(self, request_ids: Iterable[str]) -> None:
        """These results need not be kept; those that a replay may ask about stay until a snapshot."""
        for request_id in request_ids:
            run = self._runs.get(run_of(request_id))
            if run is not None:
                run.forgettable.add(request_id)

    async def stop(self) -> None:
        """Finish what is being executed, and leave every run on disk as it is."""
        for worker in self.workers:
            await worker.stop()
        for run in list(self._runs.values()):
            engine, worker = run.model.engine, self.worker(run.model)
            if engine is not None and run.resident and run.steps and not worker.has_gradients(run.id):
                await self._snapshot(engine, run, worker.scheduler.next_seq(run.id))
            await self._committed(run)
            run.journal.close()


def request_id_of(run_id: str, seq_id: int) -> str:
    """A run's requests are named after it: so that a result can be found once the run is on disk."""
    return f"{run_id}#{seq_id}"


def run_of(request_id: str) -> str:
    return request_id.rpartition("#")[0]


def seq_of(request_id: str) -> int:
    return int(request_id.rpartition("#")[2])


def tokens_of(request: Any) -> int:
    if not isinstance(request, ForwardBackwardRequest):
        return 0
    return sum(
        chunk.length if isinstance(chunk, EncodedTextChunk) else 1
        for datum in request.forward_backward_input.data
        for chunk in datum.model_input.chunks
    )

"""Restores runs from disk, drives one training loop per trainer, evicts and closes runs.

A restored run has the state of its snapshot, and then replays its journal: requests that were answered before
have the same effect again and keep their answers. When an engine is lost, its runs are restored on a new one.
Knows nothing of what requests mean (execution.py does).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile

from tinkex.engine.protocol import EngineLost
from tinkex.service.config import ServiceConfig
from tinkex.service.futures import Future, Futures, QueueState, failure, run_of
from tinkex.service.group_commit import GroupCommit
from tinkex.service.home import Home
from tinkex.service.ledger import Ledger
from tinkex.service.refusal import Caller, InUse, Refusal
from tinkex.service.rows import RunRow
from tinkex.service.runs.execution import Barriers, Past, Unreadable, plan
from tinkex.service.runs.journal import Journal, JournalEntry, JournalError, Restored, delete, restore
from tinkex.service.runs.lifecycle import Run, RunState
from tinkex.service.runs.partition import choose_trainer
from tinkex.service.runs.request_content import size_of
from tinkex.service.runs.snapshots import Snapshots
from tinkex.service.runs.training_loop import TrainingLoop, TrainingObserver
from tinkex.service.scheduler import Scheduler
from tinkex.service.served_models import ServedModel, ServedModels
from tinkex.types.training import ForwardBackwardRequest

log = logging.getLogger("tinkex.service")


@dataclass(eq=False)
class RunManager:
    """The runs in memory, and the training loops of their base models."""

    config: ServiceConfig
    ledger: Ledger
    home: Home
    disk: GroupCommit
    models: ServedModels
    futures: Futures
    barriers: Barriers
    snapshots: Snapshots
    observers: Sequence[TrainingObserver]

    def __post_init__(self) -> None:
        limits = (self.config.queue_memory_per_user or math.inf), (self.config.queue_memory or math.inf)
        self.queued = InUse("bytes of passes that wait to be executed", *limits)
        self._runs: dict[str, Run] = {}
        self._opening: dict[str, asyncio.Task[Run | None]] = {}
        self._loops: dict[ServedModel, TrainingLoop] = {}  # one per trainer
        self._tasks: list[asyncio.Task[None]] = []
        self._stopping = False

    def get(self, run_id: str) -> Run | None:
        return self._runs.get(run_id)

    def busy(self) -> list[str]:
        """Runs with requests that are not done."""
        return [run.id for run in self._runs.values() if not run.idle]

    def order(self, model: ServedModel) -> tuple[list[str], list[str]]:
        """The runs on a trainer that are executed at this moment, and those whose requests wait."""
        loop = self._loops.get(model)
        return ([], []) if loop is None else loop.scheduler.order()

    def queue_depths(self) -> list[tuple[str, int]]:
        """Requests accepted and not begun, by base model."""
        depths = Counter[str]()
        for loop in self._loops.values():
            depths[loop.model.name] += loop.scheduler.waiting()
        return list(depths.items())

    # -- from disk ---------------------------------------------------------------------------------------

    async def find(self, row: RunRow) -> Run:
        """The run, from disk if need be."""
        run = self._runs.get(row.run_id)
        while run is None:  # again, if `resume_pending` left it on disk meanwhile
            run = await self._open_once(row)
        run.used()
        return run

    async def resume_pending(self, row: RunRow) -> None:
        """Open a run that a killed process left, if it has unanswered requests; else it stays on disk."""
        if row.run_id not in self._runs:  # a client's request may have opened it
            await self._open_once(row, only_pending=True)

    async def _open_once(self, row: RunRow, *, only_pending: bool = False) -> Run | None:
        if (task := self._opening.get(row.run_id)) is None:
            task = asyncio.get_running_loop().create_task(self._open(row, only_pending))
            self._opening[row.run_id] = task
            task.add_done_callback(lambda _: self._opening.pop(row.run_id, None))
        await asyncio.wait([task])  # unlike `shield`, it lets the callback run of one that has just ended
        return task.result()

    async def _open(self, row: RunRow, only_pending: bool) -> Run | None:
        made = bool(row.fingerprint)  # of the caller's row: a run that is being created has no files yet
        row = self.ledger.run(row.run_id) or row  # it may have changed while a caller waited
        if row.corrupted:
            problem = f"run {row.run_id} could not be restored; go on from one of its checkpoints"
            raise Refusal(422, row.problem or problem)
        if row.state == "closed":
            raise Refusal(410, f"run {row.run_id} ended with its session; go on from one of its checkpoints")
        model = self.models.find(row.base_model)
        journal, restored = await self._open_journal(row.run_id, made=made)
        resumes = not only_pending or any(e.request_id not in restored.done for e in restored.entries)
        if (state := "live" if resumes else "evicted") != row.state:
            self.ledger.update_run(row.run_id, state=state)
        if resumes:
            return self._resume(row, model, journal, restored)
        journal.close()
        return None

    def _trainer(self, row: RunRow, model: ServedModel) -> ServedModel:
        """The trainer of a run that comes into memory; recorded if its base model has several."""
        if len(model.trainers) == 1:
            return model.trainers[0]
        runs = Counter(run.model for run in self._runs.values())
        index = choose_trainer(row.trainer, [runs[trainer] for trainer in model.trainers])
        if index != row.trainer:
            self.ledger.update_run(row.run_id, trainer=index)
        return model.trainers[index]

    async def _open_journal(self, run_id: str, *, made: bool) -> tuple[Journal, Restored]:
        def read() -> tuple[Journal, Restored]:
            directory = self.home.run_dir(run_id) / "journal"
            if not directory.is_dir():
                if made and self.snapshots.shared:  # its files are with another server
                    raise FileNotFoundError(f"{directory} is not here")
                directory.mkdir(parents=True)
                for parent in takewhile(lambda parent: parent != self.home.root.parent, directory.parents):
                    self.disk.wrote(parent)
            journal = Journal(directory, disk=self.disk if self.disk.power else None)
            return journal, journal.restored()

        try:
            return await asyncio.to_thread(read)
        except JournalError as error:
            problem = f"run {run_id} could not be restored ({error}); go on from one of its checkpoints"
            self.ledger.update_run(run_id, corrupted=True, problem=problem)
            raise Refusal(422, problem) from error
        except OSError as error:  # too many open files, a full disk: the files may be good
            raise Refusal(503, f"run {run_id} cannot be read now: {error}") from error

    def _resume(self, row: RunRow, model: ServedModel, journal: Journal, restored: Restored) -> Run:
        """Queue the journal's requests again, in order; the first one's turn loads the snapshot.

        A record that was cut off is not among them: it was never acknowledged.
        """
        model = self._trainer(row, model)
        scheduler = self._loop(model).scheduler
        queue = scheduler.open(row.run_id, row.owner, restored.next_seq)
        run = self._runs[row.run_id] = Run(
            self.config, self.ledger, self.disk, self.snapshots, self._runs, row, model, scheduler, queue,
            journal, restored.snapshot,
        )  # fmt: skip
        if model.engine is not None:
            run.check_weights(model.engine)
        for entry in restored.undelivered:  # the snapshot covers them; their results were not fetched
            self._future(run, entry, restored)
            queue.remember(entry.seq_id, entry.request_id, entry.digest)
        done = {entry.seq_id for entry in restored.entries if entry.request_id in restored.done}
        # Of those without an outcome only the first can have been executed before. One that is done may have
        # lost its outcome: it is computed again.
        may_be_done = done | {min((e.seq_id for e in restored.entries if e.seq_id not in done), default=-1)}
        for entry in restored.entries:
            i = entry.request_id
            past = Past(entry.seq_id in may_be_done, i in restored.done, restored.tries.get(i, 0))
            self.schedule(run, entry, self._future(run, entry, restored), past)
        queue.give_up(max(done, default=0), time.monotonic())  # gaps below were given up before
        return run

    def take_room(self, run: Run, seq_id: int, size: int) -> Callable[[], None]:
        """Reserve queue memory for a pass; Refusal 429 if its owner is over the limit.

        Returns a function that releases it. An owner's only pass is always admitted. A pass that fills a gap
        may use twice the limit, else its run would stall.
        """
        owner = run.row.owner
        try:
            self.queued.take(owner, size, 1 if owner in self.queued.users else math.inf)
        except Refusal:
            if seq_id > max(run.queue.waiting, default=-1):
                raise
            self.queued.take(owner, size, 2)
        return partial(self.queued.give_back, owner, size)

    def _take_room_again(self, owner: str, entry: JournalEntry) -> Callable[[], None] | None:
        """Reserve memory for a replayed pass, ignoring limits."""
        if not isinstance(entry.request, ForwardBackwardRequest) or not (size := size_of(entry.request)):
            return None
        self.queued.take(owner, size, math.inf)
        return partial(self.queued.give_back, owner, size)

    def _future(self, run: Run, entry: JournalEntry, restored: Restored) -> Future:
        """The future of a journaled request, resolved if it has an outcome. It may exist already."""
        future, known = self.futures.get(entry.request_id), entry.request_id in restored.outcomes
        # An outcome that the journal does not have: it was given while the run did not fit the base weights.
        stale = future is not None and future.done and not known and entry.request_id not in restored.done
        if future is None or stale:
            release = None if known else self._take_room_again(run.row.owner, entry)
            future = self.futures.create(run.row.owner, request_id=entry.request_id, release=release)
        if known:
            future.resolve(restored.outcomes[entry.request_id])
        return future

    # -- order -------------------------------------------------------------------------------------------

    def _loop(self, model: ServedModel) -> TrainingLoop:
        if model not in self._loops:
            scheduler = Scheduler(gap_patience=self.config.gap_patience)
            loop = self._loops[model] = TrainingLoop(
                model, scheduler, self.barriers, self.disk, self.observers
            )
            drive = asyncio.get_running_loop().create_task(self._drive(loop), name=f"training {model.name}")
            self._tasks.append(drive)
        return self._loops[model]

    def schedule(self, run: Run, entry: JournalEntry, future: Future, past: Past = Past()) -> None:
        """Queue a journaled request."""
        work = plan(run, entry, future, self.ledger, past)
        if entry.seq_id == 0 and work.replayed and future.failed and not isinstance(work.request, Unreadable):
            run.was_not_made(future.outcome.error)
        lost = entry.seq_id and run.queue.next_seq == 0 and run.idle
        self._loop(run.model).submit(work)
        if lost:
            # Its client knows the run's id, so the creation was answered: it will not be sent again.
            run.cannot_restore("its creation is not in its journal", "user")
            run.queue.give_up(entry.seq_id, time.monotonic())

    async def _drive(self, loop: TrainingLoop) -> None:
        """Run a training loop; when its engine is lost, continue on a new one."""
        while True:
            try:
                return await loop.run()
            except EngineLost:
                if self._stopping or loop.model.closing:
                    return
            except Exception:
                log.exception("the training loop of %s failed; it goes on", loop.model.name)
                continue
            try:
                async with loop.executing:
                    await self._reopen_runs(loop.model)
            except Exception:
                log.exception("runs of %s could not be reopened", loop.model.name)

    async def _reopen_runs(self, model: ServedModel) -> None:
        """After the loss of an engine: its runs leave memory; those with unanswered requests are reopened."""
        unanswered: list[str] = []
        for run in [run for run in self._runs.values() if run.model is model]:
            try:
                run.write_outcomes()
                await run.committed()
                async with run.accepting:
                    if not run.idle:
                        unanswered.append(run.id)
                    run.leave_memory()
            except Exception:  # the other runs continue
                log.exception("run %s could not be closed", run.id)
        for run_id in unanswered:
            row = self.ledger.run(run_id)
            try:
                assert row is not None
                await self.find(row)
            except Exception as error:
                log.exception("run %s could not be opened again", run_id)
                for future in self.futures.pending(run_id):
                    future.resolve(failure(str(error)))

    # -- looking -----------------------------------------------------------------------------------------

    def queue_state(self, future: Future) -> QueueState:
        """Why a future is not done yet."""
        run = self._runs.get(run_of(future.request_id))
        if run is not None and run.model.loading:
            return "paused_capacity", f"the base model {run.model.name} is being loaded"
        if run is not None and (missing := run.queue.missing) is not None:
            why = f"request {missing} of this run has not arrived, and those after it wait"
            return "paused_capacity", why
        return future.queue_state

    async def find_future(self, request_id: str, caller: Caller) -> Future | None:
        """The future of a request whose run is on disk."""
        row = self.ledger.run(run_of(request_id))
        if row is None or row.owner != caller.user:
            return None
        try:
            await self.find(row)
        except Refusal as refusal:
            if refusal.status == 410:  # the run has ended, and its results with it
                return None
            future, outcome = Future(request_id, row.owner), failure(refusal.message)
            with contextlib.suppress(JournalError, OSError):  # its journal may hold the result all the same
                restored = await asyncio.to_thread(restore, self.home.run_dir(row.run_id) / "journal")
                outcome = restored.outcomes.get(request_id, outcome)
            future.resolve(outcome)
            return future
        return self.futures.get(request_id)

    def reread(self, session_id: str) -> None:
        """Rows of a session's runs have changed in the ledger."""
        for run in self._runs.values():
            if run.row.session_id == session_id:
                run.reread()

    # -- back to disk ------------------------------------------------------------------------------------

    async def evict(self, run: Run) -> bool:
        """Free the device, if the run is idle; its next request brings it back."""
        return await self._loop(run.model).between_batches(run.evict)

    async def evict_idle(self, sessions: set[str]) -> None:
        """Evict the idle runs of sessions that have lapsed."""
        for run in list(self._runs.values()):
            gone = run.state is RunState.EVICTED  # while another run was being evicted
            if run.row.session_id in sessions and not gone and run.idle and await self.evict(run):
                log.info("run %s was evicted: its session has lapsed", run.id)

    async def withdraw(self, row: RunRow, why: str) -> None:
        """Fail what a run was asked and has not done; a pass under way ends with its present micro-batch."""
        if (run := self._runs.get(row.run_id)) is None:
            return
        loop = self._loop(run.model)

        async def end() -> None:
            for future in self.futures.pending(run.id):
                run.resolve(future, failure(why, "user"))
            await loop.withdraw(run)

        await loop.between_batches(end)

    async def close(self, row: RunRow) -> bool:
        """After a run's session has ended: delete its journal, once its requests are done."""
        run = self._runs.get(row.run_id)
        if run is not None and not await self.evict(run):
            return False
        self.ledger.update_run(row.run_id, state="closed")
        await self.disk.synced()  # else a power cut could bring back the run without its journal
        directory = self.home.run_dir(row.run_id) / "journal"
        await asyncio.to_thread(lambda: directory.is_dir() and delete(directory))
        self.disk.wrote(directory)
        return True

    async def discard(self, row: RunRow) -> None:
        """Undo the creation of a run whose first request was not accepted."""
        if await self.close(row):
            self.ledger.delete_run(row.run_id)

    def forget_results(self, request_ids: Iterable[str]) -> None:
        """These results need not be kept; those that a replay may need stay until a snapshot covers them."""
        for request_id in request_ids:
            if (run := self._runs.get(run_of(request_id))) is not None:
                run.delivered.add(request_id)

    async def stop(self) -> None:
        """Finish the batches being executed, and leave every run on disk as it is."""
        self._stopping = True
        for loop in self._loops.values():
            loop.stop()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for run in list(self._runs.values()):
            await run.snapshot_if_changed()
            run.journal.close()

"""Runs: hop 4 of training. Each request is checked, journaled, put in its run's order, and promised.

Promises: a request is acknowledged only once the journal holds it; one with wrong content is accepted and its
future fails (a 4xx would leave official clients stuck); an unknown run, a foreign one, a refused operation is
a 4xx and counts as consumed. How a barrier is executed is in barriers.py. Knows nothing of HTTP.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

from tinkex.engine.protocol import (
    CreateAdapter,
    CustomLoss,
    DropAdapter,
    Engine,
    LoadAdapter,
    Pass,
    SaveAdapter,
)
from tinkex.service.barriers import Barriers, shown
from tinkex.service.core import Core
from tinkex.service.engines import BaseModel
from tinkex.service.futures import Future
from tinkex.service.journal import Entry, Journal, restore
from tinkex.service.refusal import Caller, Refusal
from tinkex.service.rows import CustomLossRow, RunRow
from tinkex.service.scheduler import Scheduler, Verdict, Work
from tinkex.service.worker import Job, Worker, execute
from tinkex.types import checkpoints as saves
from tinkex.types import losses, training
from tinkex.types.checkpoints import Cursor
from tinkex.types.data import EncodedTextChunk
from tinkex.types.futures import UntypedAPIFuture
from tinkex.types.params import AdamParams, LoraConfig

log = logging.getLogger("tinkex.service")

SNAPSHOT = "adapter"  # the directory inside a snapshot
BIG = 64 * 1024  # tokens from which a request is written to the journal off the loop


@dataclass(eq=False)
class Run:
    """A run that this process knows: its row, its journal, and whether it is on the device."""

    row: RunRow
    model: BaseModel
    journal: Journal | None
    resident: bool = False
    restore_from: Path | None = None  # the snapshot to load before the next work; None: create it anew
    dirty: bool = False  # gradients have been accumulated since the last step
    steps: int = 0  # since the last snapshot
    snapshot_at: float = field(default_factory=time.monotonic)
    used_at: float = field(default_factory=time.monotonic)
    accepting: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def id(self) -> str:
        return self.row.run_id


@dataclass(frozen=True)
class Unreadable:
    """A request of which only its place in a run could be read."""

    op: str
    message: str

    def model_dump(self) -> dict[str, Any]:
        return {"op": self.op, "message": self.message}


class Runs:
    """Training, one method per operation."""

    def __init__(self, core: Core, barriers: Barriers) -> None:
        self._core = core
        self._barriers = barriers
        self._runs: dict[str, Run] = {}
        self._workers: dict[str, Worker] = {}
        # Told of every finished piece of training work: the work, its operation, how long it ran.
        self.observe: Callable[[Work, str, float], None] = lambda *_: None

    # -- operations --------------------------------------------------------------------------------------

    async def create_model(self, request: training.CreateModelRequest, caller: Caller) -> UntypedAPIFuture:
        """Start a run. Asking again for the same number is the same run."""
        self._core.session(request.session_id, caller)
        model = self._core.engines.find(request.base_model)
        _check_optimizer(request.optimizer_config.type)
        lora = request.lora_config or LoraConfig(rank=32)
        if lora.rank > self._core.config.max_rank:
            raise Refusal(
                422, f"lora_config.rank must be at most {self._core.config.max_rank}, got {lora.rank}"
            )
        run = self._add(request, model.name, lora, caller)
        return await self._submit(run, 0, "create_model", request)

    async def load_weights(self, request: saves.LoadWeightsRequest, caller: Caller) -> UntypedAPIFuture:
        """Load a checkpoint into a run, or into a new one made for it."""
        if request.model_id is not None:
            run = self._find(request.model_id, caller)
            await self._checked(run, request, lambda: self._core.checkpoint(request.path, caller))
            return await self._submit(run, request.seq_id, "load_weights", request)
        if request.session_id is None or request.model_seq_id is None:
            raise Refusal(422, "load_weights needs a model_id, or a session_id and a model_seq_id")
        self._core.session(request.session_id, caller)
        checkpoint = self._core.checkpoint(request.path, caller)
        if request.optimizer_config is not None:
            _check_optimizer(request.optimizer_config.type)
        run = self._add(request, checkpoint.base_model, checkpoint.lora, caller)
        return await self._submit(run, 0, "load_weights", request)

    async def forward_backward(
        self, request: training.ForwardBackwardRequest, caller: Caller
    ) -> UntypedAPIFuture:
        run, work = self._find(request.model_id, caller), request.forward_backward_input
        if work.loss_fn == "stable_reinforce":
            self._refuse(
                run, request.seq_id, "this server has no loss stable_reinforce: its rule is not public"
            )
        if len(work.data) > (most := self._core.config.max_datums):
            self._refuse(run, request.seq_id, f"{len(work.data)} datums; at most {most} a request")
        return await self._submit(run, request.seq_id, "forward_backward", request)

    async def forward(self, request: training.ForwardBackwardRequest, caller: Caller) -> UntypedAPIFuture:
        return await self.forward_backward(replace(request, forward_only=True), caller)

    async def optim_step(self, request: training.OptimStepRequest, caller: Caller) -> UntypedAPIFuture:
        run, params = self._find(request.model_id, caller), request.optim_params
        if not isinstance(params, AdamParams):
            await self._checked(run, request, lambda: _check_optimizer(params.type))
        return await self._submit(run, request.seq_id, "optim_step", request)

    async def save_weights(self, request: saves.SaveWeightsRequest, caller: Caller) -> UntypedAPIFuture:
        return await self._save(request, caller, "save_weights")

    async def save_weights_for_sampler(
        self, request: saves.SaveWeightsForSamplerRequest, caller: Caller
    ) -> UntypedAPIFuture:
        return await self._save(request, caller, "save_weights_for_sampler")

    async def save_weights_external(
        self, request: saves.SaveWeightsExternalRequest, caller: Caller
    ) -> UntypedAPIFuture:
        return await self._save(request, caller, "save_weights_external")

    async def _save(self, request: Any, caller: Caller, op: str) -> UntypedAPIFuture:
        run = self._find(request.model_id, caller)
        await self._checked(run, request, lambda: self._barriers.check_save(request))
        return await self._submit(run, request.seq_id, op, request)

    async def fail(
        self, op: str, run_id: str, seq_id: int, message: str, caller: Caller
    ) -> UntypedAPIFuture:
        """Accept a request whose content cannot be read, in its place; it fails when its turn comes."""
        return await self._submit(self._find(run_id, caller), seq_id, "unreadable", Unreadable(op, message))

    async def unload_model(self, request: training.UnloadModelRequest, caller: Caller) -> UntypedAPIFuture:
        run = self._find(request.model_id, caller)
        await self.evict(run)
        done = self._core.promise(caller, training.UnloadModelResponse(model_id=run.id))
        return UntypedAPIFuture(done.request_id, run.id)

    async def create_custom_loss(
        self, request: losses.CreateCustomLossRequest, caller: Caller
    ) -> UntypedAPIFuture:
        self._core.session(request.session_id, caller)
        loss_id = f"{request.session_id}:loss:{request.custom_loss_seq_id}"
        row = CustomLossRow(
            loss_id, request.session_id, caller.user, request.name,
            [item.model_dump() for item in request.inputs],
            [node.model_dump() for node in request.graph.nodes],
        )  # fmt: skip
        self._core.ledger.add_custom_loss(row)
        done = self._core.promise(caller, losses.CreateCustomLossResponse(loss_id=loss_id))
        return UntypedAPIFuture(done.request_id)

    async def get_info(self, request: training.GetInfoRequest, caller: Caller) -> training.GetInfoResponse:
        row = self._core.run(request.model_id, caller)
        model = self._core.engines.find(row.base_model)
        engine = await model.load()
        tokenizer = model.tokenizer_dir() if caller.same_machine else None
        return training.GetInfoResponse(
            model_id=row.run_id,
            model_data=training.ModelData(
                arch=engine.info.arch,
                model_name=row.base_model,
                tokenizer_id=None if tokenizer is None or ":" in str(tokenizer) else str(tokenizer),
            ),
            is_lora=True,
            lora_rank=row.lora.rank,
            model_name=row.base_model,
        )

    async def get_training_run(
        self, request: training.GetTrainingRunRequest, caller: Caller
    ) -> training.TrainingRun:
        row = self._core.run(request.training_run_id, caller)
        return self._shown([row])[0]

    async def list_training_runs(
        self, request: training.ListTrainingRunsRequest, caller: Caller
    ) -> training.TrainingRunsResponse:
        scope = self._core.scope(caller, request.access_scope)
        page = self._core.ledger.runs(
            scope, limit=request.limit, offset=request.offset, project_id=request.project_id
        )
        return training.TrainingRunsResponse(
            training_runs=self._shown(page.rows),
            cursor=Cursor(offset=request.offset, limit=request.limit, total_count=page.total),
        )

    def _shown(self, rows: list[RunRow]) -> list[training.TrainingRun]:
        latest = self._core.ledger.latest_checkpoints([row.run_id for row in rows])

        def newest(row: RunRow, kind: str) -> Any:
            found = latest.get((row.run_id, kind))
            return None if found is None else shown(found)

        return [
            training.TrainingRun(
                training_run_id=row.run_id,
                base_model=row.base_model,
                model_owner=row.owner,
                is_lora=True,
                corrupted=row.corrupted,
                lora_rank=row.lora.rank,
                last_request_time=datetime.fromtimestamp(row.last_request_at, UTC),
                last_checkpoint=newest(row, "weights"),
                last_sampler_checkpoint=newest(row, "sampler_weights"),
                user_metadata={k: str(v) for k, v in (row.user_metadata or {}).items()} or None,
            )
            for row in rows
        ]

    # -- accepting ---------------------------------------------------------------------------------------

    async def _submit(self, run: Run, seq_id: int | None, op: str, request: Any) -> UntypedAPIFuture:
        """Journal a request, put it in order, and promise its result."""
        scheduler = self._worker(run.model).scheduler
        seq_id = scheduler.next_free(run.id) if seq_id is None else seq_id  # clients before 0.3 had none
        digest = await _digest(request)
        async with run.accepting:
            verdict, request_id = scheduler.judge(run.id, seq_id, digest)
            if verdict is Verdict.CONFLICT:
                raise Refusal(422, f"seq_id {seq_id} of {run.id} was another request")
            if verdict is Verdict.REPEATED:
                return UntypedAPIFuture(request_id, run.id)
            future = self._core.futures.create(run.row.owner)
            if verdict is Verdict.LATE:
                future.fail(f"seq_id {seq_id} came after its place was given up; send it anew", "user")
                return UntypedAPIFuture(future.request_id, run.id)
            entry = Entry(seq_id, future.request_id, op, request, time.time(), digest)
            try:
                await self._record(run, entry)
            except BaseException:
                self._core.futures.discard(future)
                raise
            self._schedule(run, entry, future)
        return UntypedAPIFuture(future.request_id, run.id)

    async def _record(self, run: Run, entry: Entry) -> None:
        if run.journal is None:
            return
        self._core.check_disk()
        if _tokens(entry.request) < BIG:
            run.journal.accept(entry)
        else:
            await asyncio.to_thread(run.journal.accept, entry)

    def _schedule(self, run: Run, entry: Entry, future: Future, *, replaying: bool = False) -> None:
        one_pass = barrier = None
        if entry.op == "forward_backward":
            one_pass = self._pass(run, entry.request)
            run.dirty = run.dirty or one_pass.backward
        else:
            execute_barrier = self._barriers.find(entry.op)

            async def barrier(engine: Engine) -> Any:
                return await execute_barrier(engine, run.row, entry.request, replaying)

        future.on_done = lambda done: self._resolved(run, done)
        spoils_step = getattr(entry.request, "op", "") in ("forward_backward", "forward") or (
            one_pass is not None and one_pass.backward
        )
        job = Job(future, entry.op, one_pass, barrier, spoils_step)
        tokens, is_pass = _tokens(entry.request), one_pass is not None
        work = Work(run.id, entry.seq_id, future.request_id, is_pass, tokens, entry.digest, job)
        worker = self._worker(run.model)
        worker.scheduler.submit(work, time.monotonic())
        worker.wake()

    def _pass(self, run: Run, request: training.ForwardBackwardRequest) -> Pass:
        work, custom = request.forward_backward_input, None
        config = dict(work.loss_fn_config or {})
        if work.loss_fn == "custom":
            row = self._core.ledger.custom_loss(str(config.pop("loss_id", "")))
            if row is not None and row.owner == run.row.owner:
                custom = CustomLoss(tuple(item["name"] for item in row.inputs), tuple(row.nodes))
        return Pass(run.id, work.data, work.loss_fn, config, not request.forward_only, custom)

    def _resolved(self, run: Run, future: Future) -> None:
        if run.journal is not None:
            run.journal.resolve(future.request_id, future.outcome)

    async def _checked(self, run: Run, request: Any, check: Any) -> None:
        """Run a check; if it refuses, the request's seq id is used up all the same."""
        try:
            check()
        except Refusal as refusal:
            self._refuse(run, request.seq_id, refusal.message, refusal.status)

    def _refuse(self, run: Run, seq_id: int | None, message: str, status: int = 422) -> NoReturn:
        if seq_id is not None:
            self._worker(run.model).scheduler.consume(run.id, seq_id, time.monotonic())
            self._worker(run.model).wake()
        raise Refusal(status, message)

    # -- runs come and go --------------------------------------------------------------------------------

    def _add(self, request: Any, base_model: str, lora: LoraConfig, caller: Caller) -> Run:
        run_id = f"{request.session_id}:train:{request.model_seq_id}"
        # Without a seed of its own a run could not be made again, as after a crash it must be.
        lora = replace(lora, seed=random.getrandbits(62)) if lora.seed is None else lora
        now = time.time()
        row = RunRow(
            run_id, request.session_id, request.model_seq_id, caller.user, base_model, lora, now, now,
            caller.project, user_metadata=request.user_metadata,
        )  # fmt: skip
        row, new = self._core.ledger.add_run(row)
        caller.must_own(row.owner, f"run {run_id}")
        if new:
            return self._open(row, next_seq=0)
        return self._find(run_id, caller)

    def _open(self, row: RunRow, next_seq: int) -> Run:
        model = self._core.engines.find(row.base_model)
        journal = Journal(self._core.run_dir(row.run_id) / "journal") if self._core.config.journal else None
        run = self._runs[row.run_id] = Run(row, model, journal)
        self._worker(model).scheduler.open(run.id, row.owner, next_seq)
        return run

    def _find(self, run_id: str, caller: Caller) -> Run:
        row = self._core.run(run_id, caller)
        caller.must_own(row.owner, f"run {run_id}")
        run = self._runs.get(run_id) or self.revive(row)
        run.used_at = time.monotonic()
        return run

    def revive(self, row: RunRow) -> Run:
        """Take up a run that another process (or an earlier life of this one) left: replay its journal."""
        if not self._core.config.journal:
            raise Refusal(410, f"run {row.run_id} is gone; go on from one of its checkpoints")
        restored = restore(self._core.run_dir(row.run_id) / "journal")
        run = self._open(row, restored.next_seq)
        run.restore_from = restored.snapshot
        futures, scheduler = self._core.futures, self._worker(run.model).scheduler
        for entry in restored.delivered_later:
            futures.create(row.owner, request_id=entry.request_id).resolve(
                restored.outcomes[entry.request_id]
            )
            scheduler.remember(run.id, entry.seq_id, entry.request_id, entry.digest)
        done = [e.seq_id for e in restored.entries if e.request_id in restored.done]
        present = {e.seq_id for e in restored.entries}
        for seq_id in range(restored.next_seq, max(done, default=-1)):
            if seq_id not in present:
                scheduler.consume(run.id, seq_id, time.monotonic())
        for entry in restored.entries:
            future = futures.create(row.owner, request_id=entry.request_id)
            if entry.request_id in restored.outcomes:
                future.resolve(restored.outcomes[entry.request_id])
            self._schedule(run, entry, future, replaying=True)
        self._core.ledger.update_run(row.run_id, state="live")
        return run

    def _worker(self, model: BaseModel) -> Worker:
        if model.name not in self._workers:
            config = self._core.config
            scheduler = Scheduler(batch_tokens=config.batch_tokens, gap_patience=config.gap_patience)
            worker = self._workers[model.name] = Worker(model, scheduler)
            worker.prepare, worker.after_step = self._make_resident, self._maybe_snapshot
            worker.observe = lambda *told: self.observe(*told)
        return self._workers[model.name]

    @property
    def workers(self) -> list[Worker]:
        return list(self._workers.values())

    # -- on and off the device ---------------------------------------------------------------------------

    async def _make_resident(self, engine: Engine, work: Work) -> None:
        """Before work of a run: its adapter is on the device, as its last snapshot had it."""
        run = self._runs[work.run]
        if run.resident or work.what.name == "create_model":
            run.resident = True
            return
        if run.restore_from is not None:
            await execute(engine, LoadAdapter(run.id, run.restore_from / SNAPSHOT, optimizer=True))
        elif work.seq_id != 0:
            await execute(engine, CreateAdapter(run.id, run.row.lora))
        run.resident = True

    async def _maybe_snapshot(self, engine: Engine, work: Work) -> None:
        run = self._runs.get(work.run)
        if run is None or run.journal is None:
            return
        run.dirty = False
        run.steps += 1
        config, age = self._core.config, time.monotonic() - run.snapshot_at
        if run.steps >= config.snapshot_steps or age >= config.snapshot_seconds:
            await self._snapshot(engine, run, work.seq_id + 1)

    async def _snapshot(self, engine: Engine, run: Run, next_seq: int) -> None:
        assert run.journal is not None
        part = await asyncio.to_thread(run.journal.begin_snapshot, next_seq)
        await execute(engine, SaveAdapter(run.id, part / SNAPSHOT, optimizer=True))
        await asyncio.to_thread(run.journal.commit_snapshot, part)
        run.steps, run.snapshot_at = 0, time.monotonic()

    async def evict(self, run: Run) -> bool:
        """Put a run on disk and free the device, if it is idle; it comes back with its next request."""
        scheduler = self._worker(run.model).scheduler
        if run.dirty or not scheduler.idle(run.id) or run.journal is None:
            return False
        if run.resident:
            engine = await run.model.load()
            await self._snapshot(engine, run, scheduler.next_seq(run.id))
            if not scheduler.idle(run.id):
                return False  # it was needed again meanwhile
            await execute(engine, DropAdapter(run.id))
        self._forget(run)
        self._core.ledger.update_run(run.id, state="evicted")
        return True

    def _forget(self, run: Run) -> None:
        self._worker(run.model).scheduler.close(run.id)
        self._worker(run.model).forget(run.id)
        self._runs.pop(run.id, None)
        if run.journal is not None:
            run.journal.close()

    def idle_runs(self, sessions: set[str]) -> list[Run]:
        return [run for run in self._runs.values() if run.row.session_id in sessions]

    def acknowledged(self, request_ids: list[str]) -> None:
        """These results need not be kept any longer."""
        for run in self._runs.values():
            if run.journal is not None:
                run.journal.forget(request_ids)

    async def stop(self) -> None:
        """Finish what is being executed, put every run on disk, and stop."""
        for worker in self.workers:
            await worker.stop()
        for run in list(self._runs.values()):
            if not await self.evict(run):
                self._forget(run)


def _check_optimizer(kind: str) -> None:
    if kind != "adamw":
        raise Refusal(422, f"this server has no optimizer {kind!r}; it has adamw")


def _tokens(request: Any) -> int:
    if not isinstance(request, training.ForwardBackwardRequest):
        return 0
    return sum(
        chunk.length if isinstance(chunk, EncodedTextChunk) else 1
        for datum in request.forward_backward_input.data
        for chunk in datum.model_input.chunks
    )


async def _digest(request: Any) -> bytes:
    """A fingerprint of a request's content, but for what a client may change when it repeats one."""
    if not isinstance(request, training.ForwardBackwardRequest):
        fields = request.model_dump()
        fields.pop("sampling_session_seq_id", None)
        return repr(sorted(fields.items(), key=lambda item: item[0])).encode()
    if _tokens(request) < BIG:
        return _digest_pass(request)
    return await asyncio.to_thread(_digest_pass, request)


def _digest_pass(request: training.ForwardBackwardRequest) -> bytes:
    work, crc = request.forward_backward_input, 0
    for datum in work.data:
        for chunk in datum.model_input.chunks:
            crc = zlib.crc32(
                chunk.tokens_np if isinstance(chunk, EncodedTextChunk) else repr(chunk).encode(), crc
            )
        for key, tensor in datum.loss_fn_inputs.items():
            crc = zlib.crc32(tensor.values_np, zlib.crc32(key.encode(), crc))
    return f"{work.loss_fn} {work.loss_fn_config} {len(work.data)} {request.forward_only} {crc}".encode()

"""Runs: hop 4 of training. Each request is checked, journaled, put in its run's order, and promised.

Promises: a request is acknowledged only once the journal holds it; one with wrong content, or for a pass that
we do not offer, is accepted and its future fails (a 4xx leaves official clients stuck); an unknown run or a
foreign one is a 4xx, and so is any other refusal, whose seq id counts as used, over a restart too. How runs
come and go is in live.py. Knows nothing of HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import random
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from tinkex.engine.protocol import EngineError
from tinkex.service.barriers import Barriers, shown
from tinkex.service.core import Core
from tinkex.service.futures import Future
from tinkex.service.jobs import REFUSED, UNREADABLE, Run, Unreadable, custom_loss
from tinkex.service.journal import Entry, JournalFullError
from tinkex.service.live import Live, request_id_of, run_of, tokens_of
from tinkex.service.losses import check_loss
from tinkex.service.refusal import Caller, Refusal
from tinkex.service.rows import CustomLossRow, RunRow
from tinkex.service.scheduler import Verdict, Work
from tinkex.service.worker import Worker
from tinkex.types import checkpoints as saves
from tinkex.types import training
from tinkex.types.checkpoints import Cursor
from tinkex.types.data import EncodedTextChunk, ForwardBackwardInput
from tinkex.types.futures import UntypedAPIFuture
from tinkex.types.losses import LOSSES, unknown_loss
from tinkex.types.params import AdamParams, LoraConfig

BIG = 64 * 1024  # tokens from which a request is read and journaled off the loop


class Runs:
    """Training, one method per operation."""

    def __init__(self, core: Core, barriers: Barriers, live: Live) -> None:
        self._core = core
        self._barriers = barriers
        self._live = live
        live.observers.append(lambda row, work, op, seconds: self.observe(work, op, seconds))
        # Told of every finished piece of work: its operation, how long it ran.
        self.observe: Callable[[Work, str, float], None] = lambda work, op, seconds: None

    @property
    def workers(self) -> list[Worker]:
        return self._live.workers

    # -- operations --------------------------------------------------------------------------------------

    async def create_model(self, request: training.CreateModelRequest, caller: Caller) -> UntypedAPIFuture:
        """Start a run. Asking again for the same number is the same run."""
        self._core.active_session(request.session_id, caller)
        model = self._core.engines.find(request.base_model)
        _check_optimizer(request.optimizer_config.type)
        lora = request.lora_config or LoraConfig(rank=32)
        if lora.rank > (most := self._core.config.max_rank):
            raise Refusal(422, f"lora_config.rank must be at most {most}, got {lora.rank}")
        row = self._add(request, model.name, lora, caller)
        return await self._submit(row, 0, "create_model", request)

    async def load_weights(self, request: saves.LoadWeightsRequest, caller: Caller) -> UntypedAPIFuture:
        """Load a checkpoint into a run, or into a new one made for it."""
        if request.model_id is not None:
            row = self._run(request.model_id, caller)
            await self._checked(row, request, lambda: self._source(request, caller))
            return await self._submit(row, request.seq_id, "load_weights", request)
        if request.session_id is None or request.model_seq_id is None:
            raise Refusal(422, "load_weights needs a model_id, or a session_id and a model_seq_id")
        self._core.active_session(request.session_id, caller)
        checkpoint = self._source(request, caller)
        if request.base_model is not None:
            wanted = self._core.engines.find(request.base_model).name
            if wanted != checkpoint.base_model:
                raise Refusal(422, f"{request.path} is for {checkpoint.base_model}, not for {wanted}")
        self._core.engines.find(checkpoint.base_model)
        if request.optimizer_config is not None:
            _check_optimizer(request.optimizer_config.type)
        row = self._add(request, checkpoint.base_model, checkpoint.lora, caller)
        return await self._submit(row, 0, "load_weights", request)

    def _source(self, request: saves.LoadWeightsRequest, caller: Caller) -> Any:
        return self._core.checkpoint(request.path, caller, token=request.weights_access_token)

    async def forward_backward(
        self, request: training.ForwardBackwardRequest, caller: Caller
    ) -> UntypedAPIFuture:
        row = self._run(request.model_id, caller)
        if why := self._not_offered(request.forward_backward_input):
            op = "forward" if request.forward_only else "forward_backward"
            return await self._submit_unreadable(row, request.seq_id, op, why)
        return await self._submit(row, request.seq_id, "forward_backward", request)

    def _not_offered(self, work: ForwardBackwardInput) -> str:
        """Why no engine of ours would execute this pass; "" if one might."""
        if work.loss_fn not in LOSSES:
            return unknown_loss(work.loss_fn)
        if len(work.data) > (most := self._core.config.max_datums):
            return f"{len(work.data)} datums; at most {most} a request"
        return ""

    async def forward(self, request: training.ForwardBackwardRequest, caller: Caller) -> UntypedAPIFuture:
        return await self.forward_backward(replace(request, forward_only=True), caller)

    async def optim_step(self, request: training.OptimStepRequest, caller: Caller) -> UntypedAPIFuture:
        row, params = self._run(request.model_id, caller), request.optim_params
        if not isinstance(params, AdamParams):
            await self._checked(row, request, lambda: _check_optimizer(params.type))
        return await self._submit(row, request.seq_id, "optim_step", request)

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
        row = self._run(request.model_id, caller)
        await self._checked(row, request, lambda: self._barriers.check_save(request))
        return await self._submit(row, request.seq_id, op, request)

    async def unload_model(self, request: training.UnloadModelRequest, caller: Caller) -> UntypedAPIFuture:
        """Free the device, if the run is idle; nothing is lost, and its next request brings it back."""
        row = self._run(request.model_id, caller)
        run = self._live.at_hand(row.run_id)
        if run is not None and self._live.scheduler(run).idle(run.id):
            await self._live.put_away(run)
        done = self._core.promise(caller, training.UnloadModelResponse(model_id=row.run_id))
        return UntypedAPIFuture(done.request_id, row.run_id)

    async def create_custom_loss(
        self, request: training.CreateCustomLossRequest, caller: Caller
    ) -> UntypedAPIFuture:
        """Keep a loss under an id."""
        self._core.active_session(request.session_id, caller)
        loss_id = f"{request.session_id}:loss:{request.custom_loss_seq_id}"
        row = CustomLossRow(
            loss_id, request.session_id, caller.user, request.name,
            [item.model_dump() for item in request.inputs],
            [node.model_dump() for node in request.graph.nodes],
        )  # fmt: skip
        why = check_loss(request) or self._refused_by_engines(row)
        if self._core.ledger.custom_loss(loss_id) is None:
            why = why or await self._core.over_quota(len(repr(row)), lately=True)
        if why:
            future = self._core.futures.create(caller.user)
            future.fail(why, "user")
            return UntypedAPIFuture(future.request_id)
        kept, _ = self._core.ledger.add_custom_loss(row)
        if kept != row:
            raise Refusal(422, f"custom_loss_seq_id {request.custom_loss_seq_id} was another loss")
        # The loss's own id is the promise's: after a restart it is found in the ledger.
        self._loss_future(loss_id, caller.user)
        return UntypedAPIFuture(loss_id)

    def _refused_by_engines(self, row: CustomLossRow) -> str:
        """Why an engine would not run this loss; "" if none is loaded yet: then it says so on use."""
        for model in self._core.engines:
            check = getattr(model.engine, "check_loss", None)
            try:
                if check is not None:
                    check(custom_loss(row))
            except EngineError as error:
                return error.message
        return ""

    def _loss_future(self, loss_id: str, owner: str) -> Future:
        future = self._core.futures.create(owner, request_id=loss_id)
        future.resolve(training.CreateCustomLossResponse(loss_id=loss_id))
        return future

    # -- looking -----------------------------------------------------------------------------------------

    async def get_info(self, request: training.GetInfoRequest, caller: Caller) -> training.GetInfoResponse:
        row = self._core.run(request.model_id, caller)
        model = self._core.engines.find(row.base_model)
        engine = await model.load()
        tokenizer = await asyncio.to_thread(model.tokenizer_dir) if caller.same_machine else None
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
        self._core.flush()  # last_request_time is among what it writes down
        latest = self._core.ledger.latest_checkpoints([row.run_id for row in rows], time.time())

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

    async def find_future(self, request_id: str, caller: Caller) -> Future | None:
        """The promise of a request whose run is on disk, or of an uploaded loss."""
        if (loss := self._core.ledger.custom_loss(request_id)) is not None:
            return self._loss_future(loss.loss_id, loss.owner)
        row = self._core.ledger.run(run_of(request_id))
        if row is None:
            return None
        caller.must_own(row.owner, f"request {request_id}")
        try:
            await self._live.find(row)
        except Refusal as refusal:
            if refusal.status == 410:  # the run has ended, and its results with it
                return None
            future = Future(request_id, row.owner)
            answer = await asyncio.to_thread(self._live.answer_to, request_id)
            if answer is None:
                future.fail(refusal.message)
            else:
                future.resolve(answer)
            return future
        return self._core.futures.get(request_id)

    # -- accepting ---------------------------------------------------------------------------------------

    def _run(self, run_id: str, caller: Caller) -> RunRow:
        return self._core.run(run_id, caller, to_use=True)

    def _add(self, request: Any, base_model: str, lora: LoraConfig, caller: Caller) -> RunRow:
        run_id = f"{request.session_id}:train:{request.model_seq_id}"
        # Without a seed of its own a run could not be made again, as after a crash it must be.
        lora = replace(lora, seed=random.getrandbits(62)) if lora.seed is None else lora
        now, project = time.time(), self._core.session(request.session_id, caller).project_id
        row = RunRow(
            run_id, request.session_id, request.model_seq_id, caller.user, base_model, lora, now, now,
            project, user_metadata=request.user_metadata,
        )  # fmt: skip
        return self._core.ledger.add_run(row)[0]

    async def fail(self, op: str, run_id: str, seq_id: int, message: str, caller: Caller) -> UntypedAPIFuture:
        """Accept a request that cannot be read, only for its future to fail in its turn."""
        return await self._submit_unreadable(self._run(run_id, caller), seq_id, op, message)

    async def _submit_unreadable(
        self, row: RunRow, seq_id: int | None, op: str, message: str
    ) -> UntypedAPIFuture:
        return await self._submit(row, seq_id, UNREADABLE, Unreadable(op, message))

    async def _submit(self, row: RunRow, seq_id: int | None, op: str, request: Any) -> UntypedAPIFuture:
        """Journal a request, put it in order, and promise its result."""
        self._core.heard_of(row.session_id, row.run_id)
        digest = await _digest(request)
        while True:
            run = await self._live.find(row)
            async with run.accepting:
                if run.gone:
                    row = self._core.ledger.run(row.run_id) or row
                    continue  # it was put on disk while we waited
                scheduler = self._live.scheduler(run)
                seq_id = scheduler.next_free(run.id) if seq_id is None else seq_id  # clients before 0.3
                verdict, request_id = scheduler.judge(run.id, seq_id, digest)
                if verdict is Verdict.CONFLICT:
                    raise Refusal(422, f"seq_id {seq_id} of {run.id} was another request")
                if verdict is Verdict.REPEATED:
                    return UntypedAPIFuture(request_id, run.id)
                if verdict is Verdict.LATE:
                    future = self._core.futures.create(run.row.owner)
                    future.fail(f"seq_id {seq_id} came after its place was given up; send it anew", "user")
                    return UntypedAPIFuture(future.request_id, run.id)
                if run.misfit is not None:
                    raise Refusal(422, run.misfit)
                with scheduler.arriving(run.id, seq_id):
                    return await self._accept(run, seq_id, op, request, digest)

    async def _accept(self, run: Run, seq_id: int, op: str, request: Any, digest: bytes) -> UntypedAPIFuture:
        if why := await self._no_room(request):
            request, op = Unreadable("forward" if request.forward_only else op, why), UNREADABLE
        request_id = request_id_of(run.id, seq_id)
        entry = Entry(seq_id, request_id, op, request, time.time(), digest)
        await self._record(run.journal, entry)
        future = self._core.futures.create(run.row.owner, request_id=request_id)
        self._live.schedule(run, entry, future)
        return UntypedAPIFuture(request_id, run.id)

    async def _no_room(self, request: Any) -> str:
        """Why the quota has no room for the record of this pass; "" if it has. What is small always fits."""
        if self._core.config.disk_quota is None or not isinstance(request, training.ForwardBackwardRequest):
            return ""
        size = sum(datum.nbytes for datum in request.forward_backward_input.data)
        return await self._core.over_quota(size, lately=True)

    async def _record(self, journal: Any, entry: Entry) -> None:
        self._core.check_disk()
        try:
            if tokens_of(entry.request) < BIG:
                journal.accept(entry)
            else:
                await asyncio.to_thread(journal.accept, entry)
        except JournalFullError as error:
            raise Refusal(503, f"{error}; this request was not accepted") from error

    async def _checked(self, row: RunRow, request: Any, check: Callable[[], Any]) -> None:
        """Run a check; if it refuses, the request's seq id is used up all the same, over a restart too."""
        try:
            check()
        except Refusal as refusal:
            if request.seq_id is not None:
                with contextlib.suppress(Refusal):  # its place may be taken already
                    await self._submit_unreadable(row, request.seq_id, REFUSED, refusal.message)
            raise


def _check_optimizer(kind: str) -> None:
    if kind != "adamw":
        raise Refusal(422, f"this server has no optimizer {kind!r}; it has adamw")


async def _digest(request: Any) -> bytes:
    """A fingerprint of a request's content, but for what a client may change when it repeats one."""
    if isinstance(request, training.ForwardBackwardRequest):
        if tokens_of(request) < BIG:
            return _digest_pass(request)
        return await asyncio.to_thread(_digest_pass, request)
    if isinstance(request, Unreadable):
        return hashlib.blake2b(repr(request).encode(), digest_size=16).digest()
    fields = request.model_dump()
    fields.pop("sampling_session_seq_id", None)
    return hashlib.blake2b(repr(sorted(fields.items())).encode(), digest_size=16).digest()


def _digest_pass(request: training.ForwardBackwardRequest) -> bytes:
    work, digest = request.forward_backward_input, hashlib.blake2b(digest_size=16)
    config = sorted((work.loss_fn_config or {}).items())
    digest.update(repr((work.loss_fn, config, len(work.data), request.forward_only)).encode())
    for datum in work.data:
        for chunk in datum.model_input.chunks:
            text = isinstance(chunk, EncodedTextChunk)
            digest.update(chunk.tokens_np.data if text else repr(chunk.model_dump()).encode())
        for key, tensor in sorted(datum.loss_fn_inputs.items()):
            digest.update(repr((key, tensor.dtype, tensor.shape)).encode())
            for array in (tensor.values_np, tensor.sparse_crow_np, tensor.sparse_col_np):
                digest.update(b"" if array is None else array.data)
    return digest.digest()

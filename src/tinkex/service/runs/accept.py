"""Training requests are accepted here: checked, journaled, queued in their run's order, answered by a future.

A request is acknowledged only once the journal holds it. One with wrong content is accepted and its future
fails (a 4xx leaves official clients stuck); an unknown or foreign run is a 4xx, and so is any other refusal,
which uses up its seq id, over a restart too. Knows nothing of HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import random
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tinkex.service.access import Access
from tinkex.service.activity import Activity
from tinkex.service.checkpoints import check_save
from tinkex.service.config import ServiceConfig
from tinkex.service.futures import Futures, failure
from tinkex.service.home import Home
from tinkex.service.ledger import Ledger
from tinkex.service.refusal import Caller, Refusal
from tinkex.service.rows import CheckpointRow, RunRow
from tinkex.service.runs.execution import REFUSED, UNREADABLE, Unreadable, tokens_of
from tinkex.service.runs.journal import Journal, JournalEntry, JournalFullError
from tinkex.service.runs.lifecycle import Run, RunState
from tinkex.service.runs.manager import RunManager
from tinkex.service.scheduler import Verdict
from tinkex.service.served_models import ServedModels
from tinkex.types import checkpoints as saves
from tinkex.types import training
from tinkex.types.data import EncodedTextChunk, ForwardBackwardInput
from tinkex.types.futures import UntypedAPIFuture
from tinkex.types.losses import LOSSES, unknown_loss
from tinkex.types.params import AdamParams, LoraConfig

BIG = 64 * 1024  # tokens from which a request is digested and journaled off the event loop


class TrainingRequests:
    """Training, one method per operation."""

    def __init__(
        self,
        config: ServiceConfig,
        ledger: Ledger,
        home: Home,
        access: Access,
        activity: Activity,
        models: ServedModels,
        futures: Futures,
        runs: RunManager,
    ) -> None:
        self._config = config
        self._ledger = ledger
        self._home = home
        self._access = access
        self._activity = activity
        self._models = models
        self._futures = futures
        self._runs = runs

    # -- operations --------------------------------------------------------------------------------------

    async def create_model(self, request: training.CreateModelRequest, caller: Caller) -> UntypedAPIFuture:
        """Start a run. Asking again for the same number is the same run."""
        self._access.active_session(request.session_id, caller)
        model = self._models.find(request.base_model)
        _check_optimizer(request.optimizer_config.type)
        lora = request.lora_config or LoraConfig(rank=32)
        if lora.rank > (most := self._config.max_rank):
            raise Refusal(422, f"lora_config.rank must be at most {most}, got {lora.rank}")
        return await self._create(request, "create_model", model.name, lora, caller)

    async def load_weights(self, request: saves.LoadWeightsRequest, caller: Caller) -> UntypedAPIFuture:
        """Load a checkpoint into a run, or into a new one made for it."""
        if request.model_id is not None:
            row = self._run(request.model_id, caller)
            await self._checked(row, request, lambda: self._source(request, caller))
            return await self._submit(row, request.seq_id, "load_weights", request)
        if request.session_id is None or request.model_seq_id is None:
            raise Refusal(422, "load_weights needs a model_id, or a session_id and a model_seq_id")
        self._access.active_session(request.session_id, caller)
        checkpoint = self._source(request, caller)
        if request.base_model is not None:
            wanted = self._models.find(request.base_model).name
            if wanted != checkpoint.base_model:
                raise Refusal(422, f"{request.path} is for {checkpoint.base_model}, not for {wanted}")
        self._models.find(checkpoint.base_model)
        if request.optimizer_config is not None:
            _check_optimizer(request.optimizer_config.type)
        return await self._create(request, "load_weights", checkpoint.base_model, checkpoint.lora, caller)

    def _source(self, request: saves.LoadWeightsRequest, caller: Caller) -> CheckpointRow:
        return self._access.checkpoint(request.path, caller, token=request.weights_access_token)

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
        if len(work.data) > (most := self._config.max_datums):
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
        await self._checked(row, request, lambda: check_save(request))
        return await self._submit(row, request.seq_id, op, request)

    async def unload_model(self, request: training.UnloadModelRequest, caller: Caller) -> UntypedAPIFuture:
        """Free the device, if the run is idle; nothing is lost, and its next request brings it back."""
        row = self._run(request.model_id, caller)
        run = self._runs.get(row.run_id)
        if run is not None and run.idle:
            await self._runs.evict(run)
        result = training.UnloadModelResponse(model_id=row.run_id)
        return UntypedAPIFuture(self._futures.create_resolved(caller.user, result).request_id, row.run_id)

    async def fail(self, op: str, run_id: str, seq_id: int, message: str, caller: Caller) -> UntypedAPIFuture:
        """Accept a request that cannot be read, only for its future to fail in its turn."""
        return await self._submit_unreadable(self._run(run_id, caller), seq_id, op, message)

    # -- accepting ---------------------------------------------------------------------------------------

    def _run(self, run_id: str, caller: Caller) -> RunRow:
        return self._access.run(run_id, caller, to_use=True)

    async def _create(
        self, request: Any, op: str, base_model: str, lora: LoraConfig, caller: Caller
    ) -> UntypedAPIFuture:
        run_id = f"{request.session_id}:train:{request.model_seq_id}"
        # Without a seed of its own a run could not be created again, as after a crash it must be.
        lora = replace(lora, seed=random.getrandbits(62)) if lora.seed is None else lora
        now, project = time.time(), self._access.session(request.session_id, caller).project_id
        row, is_new = self._ledger.add_run(
            RunRow(
                run_id, request.session_id, request.model_seq_id, caller.user, base_model, lora, now, now,
                project, user_metadata=request.user_metadata,
            )
        )  # fmt: skip
        try:
            return await self._submit(row, 0, op, request)
        except Exception:
            if is_new:
                await self._runs.discard(row)  # it was not accepted, so it must not be listed
            raise

    async def _submit_unreadable(
        self, row: RunRow, seq_id: int | None, op: str, message: str
    ) -> UntypedAPIFuture:
        return await self._submit(row, seq_id, UNREADABLE, Unreadable(op, message))

    async def _submit(self, row: RunRow, seq_id: int | None, op: str, request: Any) -> UntypedAPIFuture:
        """Journal a request, queue it, and promise its result."""
        self._activity.heard_of(row.session_id, row.run_id)
        digest = await _digest(request)
        while True:
            run = await self._runs.find(row)
            async with run.accepting:
                if run.state is RunState.EVICTED:
                    row = self._ledger.run(row.run_id) or row
                    continue  # it was evicted while we waited
                scheduler = run.scheduler
                seq_id = scheduler.next_free(run.id) if seq_id is None else seq_id  # clients before 0.3
                verdict, request_id = scheduler.judge(run.id, seq_id, digest)
                if verdict is Verdict.CONFLICT:
                    raise Refusal(422, f"seq_id {seq_id} of {run.id} was another request")
                if verdict is Verdict.REPEATED:
                    return UntypedAPIFuture(request_id, run.id)
                if verdict is Verdict.LATE:
                    why = failure(f"seq_id {seq_id} came after its place was given up; send it anew", "user")
                    late = self._futures.create_resolved(run.row.owner, why)
                    return UntypedAPIFuture(late.request_id, run.id)
                if run.state is RunState.MISMATCHED:
                    raise Refusal(422, run.problem)
                with scheduler.arriving(run.id, seq_id):
                    return await self._accept(run, seq_id, op, request, digest)

    async def _accept(self, run: Run, seq_id: int, op: str, request: Any, digest: bytes) -> UntypedAPIFuture:
        if why := await self._no_room(request):
            request, op = Unreadable("forward" if request.forward_only else op, why), UNREADABLE
        request_id = f"{run.id}#{seq_id}"
        entry = JournalEntry(seq_id, request_id, op, request, time.time(), digest)
        await self._record(run.journal, entry)
        future = self._futures.create(run.row.owner, request_id=request_id)
        self._runs.schedule(run, entry, future)
        return UntypedAPIFuture(request_id, run.id)

    async def _no_room(self, request: Any) -> str:
        """Why the quota has no room for the record of this pass; "" if it has. Small requests always fit."""
        if self._home.quota is None or not isinstance(request, training.ForwardBackwardRequest):
            return ""
        size = sum(datum.nbytes for datum in request.forward_backward_input.data)
        return await self._home.over_quota(size, lately=True)

    async def _record(self, journal: Journal, entry: JournalEntry) -> None:
        self._home.check_disk()
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
    """A fingerprint of a request's content, except for what a client may change when it repeats one."""
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

"""Training requests are accepted here: checked, journaled, queued in their run's order, answered by a future.

A request is acknowledged only once the journal holds it, and executed only then: on the disk, where a power
cut must be survived. One with wrong content is accepted and its future fails (a 4xx leaves official clients
stuck). An unknown run, or another user's, is a 4xx. Any other refusal is a 4xx too, and uses up its seq id,
also over a restart. Knows nothing of HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from tinkex.service.access import Access
from tinkex.service.activity import Activity
from tinkex.service.checkpoints import check_save
from tinkex.service.config import ServiceConfig
from tinkex.service.futures import Futures, failure
from tinkex.service.group_commit import GroupCommit
from tinkex.service.home import Home
from tinkex.service.ledger import Ledger
from tinkex.service.refusal import Caller, Refusal
from tinkex.service.rows import CheckpointRow, RunRow
from tinkex.service.runs.execution import REFUSED, Unreadable
from tinkex.service.runs.journal import JournalEntry, JournalFullError
from tinkex.service.runs.lifecycle import Run, RunState
from tinkex.service.runs.manager import RunManager
from tinkex.service.runs.request_content import digest_of, is_small, off_loop, size_of
from tinkex.service.scheduler import Verdict
from tinkex.service.served_models import ServedModels
from tinkex.types import training
from tinkex.types.checkpoints import LoadWeightsRequest
from tinkex.types.data import ForwardBackwardInput
from tinkex.types.futures import UntypedAPIFuture
from tinkex.types.losses import LOSSES, unknown_loss
from tinkex.types.params import AdamParams, LoraConfig
from tinkex.types.training import ForwardBackwardRequest

MAX_RANK, MAX_DATUMS = 1024, 4096  # of one request


@dataclass(eq=False)
class TrainingRequests:
    """Training, one method per operation."""

    config: ServiceConfig
    ledger: Ledger
    home: Home
    disk: GroupCommit
    access: Access
    activity: Activity
    models: ServedModels
    futures: Futures
    runs: RunManager

    # -- operations --------------------------------------------------------------------------------------

    async def create_model(self, request: training.CreateModelRequest, caller: Caller) -> UntypedAPIFuture:
        """Start a run. Asking again for the same number is the same run."""
        self.access.active_session(request.session_id, caller)
        model = self.models.find(request.base_model)
        _check_optimizer(request.optimizer_config.type)
        lora = request.lora_config or LoraConfig(rank=32)
        if lora.rank > MAX_RANK:
            raise Refusal(422, f"lora_config.rank must be at most {MAX_RANK}, got {lora.rank}")
        return await self._create(request, model.name, lora, caller)

    async def load_weights(self, request: LoadWeightsRequest, caller: Caller) -> UntypedAPIFuture:
        """Load a checkpoint into a run, or into a new one made for it."""

        def source() -> CheckpointRow:
            return self.access.checkpoint(request.path, caller, token=request.weights_access_token)

        if request.model_id is not None:
            return await self._submit_checked(request, caller, source)
        if request.session_id is None or request.model_seq_id is None:
            raise Refusal(422, "load_weights needs a model_id, or a session_id and a model_seq_id")
        self.access.active_session(request.session_id, caller)
        checkpoint = source()
        if request.base_model is not None:
            wanted = self.models.find(request.base_model).name
            if wanted != checkpoint.base_model:
                raise Refusal(422, f"{request.path} is for {checkpoint.base_model}, not for {wanted}")
        self.models.find(checkpoint.base_model)
        if request.optimizer_config is not None:
            _check_optimizer(request.optimizer_config.type)
        return await self._create(request, checkpoint.base_model, checkpoint.lora, caller)

    async def forward_backward(self, request: ForwardBackwardRequest, caller: Caller) -> UntypedAPIFuture:
        row = self._run(request.model_id, caller)
        why = self._not_offered(request.forward_backward_input)
        return await self._submit(row, request.seq_id, _failing(request, why) if why else request)

    def _not_offered(self, work: ForwardBackwardInput) -> str:
        """Why no engine of ours would execute this pass; "" if one might."""
        if work.loss_fn not in LOSSES:
            return unknown_loss(work.loss_fn)
        if len(work.data) > MAX_DATUMS:
            return f"{len(work.data)} datums; at most {MAX_DATUMS} a request"
        return ""

    async def forward(self, request: ForwardBackwardRequest, caller: Caller) -> UntypedAPIFuture:
        return await self.forward_backward(replace(request, forward_only=True), caller)

    async def optim_step(self, request: training.OptimStepRequest, caller: Caller) -> UntypedAPIFuture:
        params = request.optim_params
        kind = "adamw" if isinstance(params, AdamParams) else params.type
        return await self._submit_checked(request, caller, lambda: _check_optimizer(kind))

    async def save(self, request: Any, caller: Caller) -> UntypedAPIFuture:
        """Any of the three kinds of saves."""
        return await self._submit_checked(request, caller, lambda: check_save(request))

    async def unload_model(self, request: training.UnloadModelRequest, caller: Caller) -> UntypedAPIFuture:
        """Free the device, if the run is idle; nothing is lost, and its next request brings it back."""
        row = self._run(request.model_id, caller)
        run = self.runs.get(row.run_id)
        if run is not None and run.idle:
            await self.runs.evict(run)
        result = training.UnloadModelResponse(model_id=row.run_id)
        return UntypedAPIFuture(self.futures.create_resolved(caller.user, result).request_id, row.run_id)

    async def fail(self, op: str, run_id: str, seq_id: int, message: str, caller: Caller) -> UntypedAPIFuture:
        """Accept a request that cannot be read, only for its future to fail in its turn."""
        return await self._submit(self._run(run_id, caller), seq_id, Unreadable(op, message))

    # -- accepting ---------------------------------------------------------------------------------------

    def _run(self, run_id: str, caller: Caller) -> RunRow:
        run = self.runs.get(run_id)
        if run is not None and caller.owns(run.row.owner):  # to read the ledger takes a fifth of accepting
            return run.row
        return self.access.run(run_id, caller, to_use=True)

    async def _create(
        self, request: Any, base_model: str, lora: LoraConfig, caller: Caller
    ) -> UntypedAPIFuture:
        run_id = f"{request.session_id}:train:{request.model_seq_id}"
        # A replay creates the same adapter again, so every run has a seed.
        lora = replace(lora, seed=random.getrandbits(62)) if lora.seed is None else lora
        now, project = time.time(), self.access.session(request.session_id, caller).project_id
        live, most = self.ledger.count_live_runs(caller.user), self.config.runs_per_user
        if live >= most and self.ledger.run(run_id) is None:
            raise Refusal(429, f"you have {live} live runs, and {most} are allowed: end a session of yours")
        row, is_new = self.ledger.add_run(
            RunRow(
                run_id, request.session_id, request.model_seq_id, caller.user, base_model, lora, now, now,
                project, user_metadata=request.user_metadata, name=request.name or "",
                tags=request.tags or [],
                parent=request.path if isinstance(request, LoadWeightsRequest) else None,
            )
        )  # fmt: skip
        try:
            # A server that had made it may have ended before its journal said so: without a fingerprint.
            return await self._submit(replace(row, fingerprint=""), 0, request)
        except Exception:
            if is_new:
                await self.runs.discard(row)  # it was not accepted, so it must not be listed
            raise

    async def _submit_checked(
        self, request: Any, caller: Caller, check: Callable[[], object]
    ) -> UntypedAPIFuture:
        """Submit what passes a check; if it does not, its seq id is used up all the same."""
        row = self._run(request.model_id, caller)
        try:
            check()
        except Refusal as refusal:
            if request.seq_id is not None:
                with contextlib.suppress(Refusal):  # its place may be taken already
                    await self._submit(row, request.seq_id, Unreadable(REFUSED, refusal.message))
            raise
        return await self._submit(row, request.seq_id, request)

    async def _submit(self, row: RunRow, seq_id: int | None, request: Any) -> UntypedAPIFuture:
        """Journal a request, queue it, and promise its result once that is on the disk."""
        promise = await self._queue(row, seq_id, request)
        await self.disk.synced()
        return promise

    async def _queue(self, row: RunRow, seq_id: int | None, request: Any) -> UntypedAPIFuture:
        self.activity.heard_of(row.session_id, row.run_id)
        digest = await digest_of(request)
        while True:
            run = await self.runs.find(row)
            async with run.accepting:
                if run.state is RunState.EVICTED:
                    continue  # it was evicted while we waited
                seq_id = run.queue.next_free if seq_id is None else seq_id  # clients before 0.3
                verdict, request_id = run.queue.judge(seq_id, digest)
                if verdict is Verdict.CONFLICT:
                    raise Refusal(422, f"seq_id {seq_id} of {run.id} was another request")
                if verdict is Verdict.REPEATED:
                    return UntypedAPIFuture(request_id, run.id)
                if verdict is Verdict.LATE:
                    why = failure(f"seq_id {seq_id} came after its place was given up; send it anew", "user")
                    late = self.futures.create_resolved(run.row.owner, why)
                    return UntypedAPIFuture(late.request_id, run.id)
                if run.state is RunState.MISMATCHED:
                    raise Refusal(422, run.problem)
                with run.queue.arriving(seq_id):
                    return await self._accept(run, seq_id, request, digest)

    async def _accept(self, run: Run, seq_id: int, request: Any, digest: bytes) -> UntypedAPIFuture:
        owner, size = run.row.owner, 0
        if isinstance(request, ForwardBackwardRequest):  # others are small
            size = await off_loop(request, size_of)
        release = self.runs.take_room(run, seq_id, size) if size else None
        try:
            entry = await self._journal(run, seq_id, request, digest, size)
        except BaseException:
            if release is not None:
                release()
            raise
        mark = self.disk.mark()
        future = self.futures.create(owner, request_id=entry.request_id, mark=mark, release=release)
        self.runs.schedule(run, entry, future)
        return UntypedAPIFuture(entry.request_id, run.id)

    async def _journal(self, run: Run, seq_id: int, request: Any, digest: bytes, size: int) -> JournalEntry:
        if size and self.home.limited:
            if why := await self.home.over_quota(size, run.row.owner):
                request = _failing(request, why)
            else:
                self.home.count(run.row.owner, size)
        op = "forward_backward" if isinstance(request, ForwardBackwardRequest) else request.type
        entry = JournalEntry(seq_id, f"{run.id}#{seq_id}", op, request, time.time(), digest)
        self.home.check_disk()
        try:
            if is_small(request):
                run.journal.accept(entry)
            else:
                await asyncio.to_thread(run.journal.accept, entry)
        except JournalFullError as error:
            raise Refusal(503, f"{error}; this request was not accepted") from error
        return entry


def _failing(request: ForwardBackwardRequest, why: str) -> Unreadable:
    return Unreadable("forward" if request.forward_only else "forward_backward", why)


def _check_optimizer(kind: str) -> None:
    if kind != "adamw":
        raise Refusal(422, f"this server has no optimizer {kind!r}; it has adamw")

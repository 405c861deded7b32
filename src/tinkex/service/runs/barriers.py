"""How barriers are executed: creating an adapter, stepping, saving, loading.

Each sees exactly the requests before it. A checkpoint's files are complete before its row exists, and its row
before its future resolves. Executed again after a crash before its outcome was recorded, a barrier gives what
the first time would have given. Knows nothing of order or of futures.
"""

from __future__ import annotations

import asyncio
import math
import shutil
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tinkex.engine.protocol import (
    CreateAdapter,
    Engine,
    EngineError,
    ExportAdapter,
    LoadAdapter,
    OptimStep,
    SaveAdapter,
)
from tinkex.service import encryption
from tinkex.service.access import Access
from tinkex.service.activity import Activity
from tinkex.service.adapter_cache import AdapterCaches
from tinkex.service.home import Home
from tinkex.service.ledger import Ledger
from tinkex.service.refusal import Caller
from tinkex.service.rows import CheckpointKind, CheckpointRow, RunRow, SamplerRow
from tinkex.service.runs.execution import Execution
from tinkex.service.served_models import execute
from tinkex.types import checkpoints as saves
from tinkex.types import training

EPHEMERAL = "ephemeral"  # the directory of a run's unnamed published adapters


@dataclass(frozen=True)
class _Call:
    """One barrier on its engine. `accepted_at` is set if a killed process may have executed it."""

    engine: Engine
    run: RunRow
    request: Any
    accepted_at: float | None


class Barriers:
    """One method per barrier operation."""

    def __init__(
        self, home: Home, ledger: Ledger, access: Access, activity: Activity, adapters: AdapterCaches
    ) -> None:
        self._home = home
        self._ledger = ledger
        self._access = access
        self._activity = activity
        self._adapters = adapters
        self._table: dict[str, Callable[[_Call], Awaitable[Any]]] = {
            "create_model": self._create,
            "optim_step": self._step,
            "load_weights": self._load,
            "save_weights": self._save_state,
            "save_weights_for_sampler": self._save_for_sampler,
            "save_weights_external": self._save_external,
        }

    async def execute(self, engine: Engine, work: Execution) -> Any:
        """The result of a barrier, for the first time or replayed."""
        if work.refusal is not None:
            raise EngineError(work.refusal, "user")
        if work.skip:
            return None
        return await self._table[work.op](_Call(engine, work.run.row, work.request, work.accepted_at))

    async def _create(self, call: _Call) -> training.CreateModelResponse:
        await execute(call.engine, CreateAdapter(call.run.run_id, call.run.lora))
        return training.CreateModelResponse(model_id=call.run.run_id)

    async def _step(self, call: _Call) -> training.OptimStepResponse:
        metrics = await execute(call.engine, OptimStep(call.run.run_id, call.request.optim_params))
        # JSON has no NaN, and official clients take no null for a metric.
        return training.OptimStepResponse(metrics={k: v for k, v in metrics.items() if math.isfinite(v)})

    async def _load(self, call: _Call) -> saves.LoadWeightsResponse:
        request, run = call.request, call.run
        checkpoint = self._access.any_checkpoint(request.path)  # accept.py checked that it may be read
        if checkpoint is None:
            raise EngineError(f"{request.path} does not exist any more", "user")
        if checkpoint.encrypted:
            raise EngineError(f"{request.path} is encrypted: only its recipients can read it", "user")
        if checkpoint.base_model != run.base_model:
            raise EngineError(
                f"{request.path} is for {checkpoint.base_model}, this run is on {run.base_model}", "user"
            )
        if request.optimizer and not checkpoint.with_optimizer:
            raise EngineError(f"{request.path} was saved without optimizer state; load it without", "user")
        location = str(self._home.root / checkpoint.directory)
        await execute(call.engine, LoadAdapter(run.run_id, location, optimizer=request.optimizer))
        return saves.LoadWeightsResponse(path=request.path, model_id=run.run_id, type="load_weights")

    async def _save_state(self, call: _Call) -> saves.SaveWeightsResponse:
        row = await self._save(call, "weights", overwrite=call.request.overwrite, optimizer=True)
        return saves.SaveWeightsResponse(path=row.tinker_path, type="save_weights")

    async def _save_for_sampler(self, call: _Call) -> saves.SaveWeightsForSamplerResponseInternal:
        if call.request.path is not None:
            row = await self._save(call, "sampler_weights")
            return saves.SaveWeightsForSamplerResponseInternal(
                path=row.tinker_path, type="save_weights_for_sampler"
            )
        sampler = await self._publish(call)
        return saves.SaveWeightsForSamplerResponseInternal(
            sampling_session_id=sampler.sampler_id, type="save_weights_for_sampler"
        )

    async def _publish(self, call: _Call) -> SamplerRow:
        """An unnamed sampler. It is on disk before it is announced: it must survive a restart."""
        run, number = call.run, call.request.sampling_session_seq_id
        directory = self._home.run_dir(run.run_id) / EPHEMERAL / str(number)
        sampler = SamplerRow(
            f"{run.session_id}:sample:{number}", run.session_id, run.owner, run.base_model, time.time(),
            adapter=f"{run.session_id}:sample:{number}", adapter_dir=self._home.relative(directory),
        )  # fmt: skip
        kept = self._ledger.sampler(sampler.sampler_id)
        if kept is not None and kept.adapter_dir != sampler.adapter_dir:
            raise EngineError(f"sampler {sampler.sampler_id} exists already: use another number", "user")
        self._home.check_disk()
        await execute(call.engine, SaveAdapter(run.run_id, str(directory), overwrite=True))
        await self._must_fit(directory)
        exported = await execute(call.engine, ExportAdapter(run.run_id))
        await self._adapters.of(call.engine).add(sampler, exported)
        self._ledger.add_sampler(sampler)
        return sampler

    async def _save_external(self, call: _Call) -> saves.SaveWeightsExternalResponseInternal:
        recipients = encryption.read_recipients(call.request.age_encryption_recipients or [])
        row = await self._save(call, "external_weights", recipients=recipients)
        return saves.SaveWeightsExternalResponseInternal(
            path=row.tinker_path, size_bytes=row.size_bytes, type="save_weights_external"
        )

    async def _save(
        self,
        call: _Call,
        kind: CheckpointKind,
        *,
        overwrite: bool = False,
        optimizer: bool = False,
        recipients: list[Any] | None = None,
    ) -> CheckpointRow:
        """Write the files, then the row."""
        run, request = call.run, call.request
        directory = self._home.run_dir(run.run_id) / kind / request.path
        async with self._home.locked(place := self._home.relative(directory)):
            path = f"tinker://{run.run_id}/{kind}/{request.path}"
            kept = self._access.any_checkpoint(path)
            its_own = (
                kept is not None and call.accepted_at is not None and kept.created_at >= call.accepted_at
            )
            if kept is not None and not (overwrite or its_own):
                raise EngineError(f"ResourceAlreadyExists: {path} exists already", "user")
            await self._check_room(run, kind, 0 if kept is None else kept.size_bytes)
            size = await self._write(call, directory, optimizer, recipients)
            now = time.time()
            row = CheckpointRow(
                run.run_id, kind, request.path, run.owner, run.base_model, run.lora, place, size, now,
                optimizer, run.project_id, None if request.ttl_seconds is None else now + request.ttl_seconds,
                user_metadata=getattr(request, "user_metadata", None), encrypted=bool(recipients),
            )  # fmt: skip
            if kept is None:
                await self._must_fit(directory)
            with self._ledger.transaction():
                self._ledger.add_checkpoint(row, overwrite=True)
                caller = Caller(run.owner, run.project_id)
                self._activity.audit(caller, "checkpoints.save", run_id=run.run_id, tinker_path=path)
            self._activity.count(run, {"checkpoint": 1})
            return row

    async def _check_room(self, run: RunRow, kind: CheckpointKind, replaced: int) -> None:
        """A run's checkpoints of one kind are all of one size: the last one tells the next one's."""
        last = self._ledger.latest_checkpoints([run.run_id]).get((run.run_id, kind))
        size = 0 if last is None else last.size_bytes
        self._home.check_disk(size)
        if why := await self._home.over_quota(max(0, size - replaced)):
            raise EngineError(why, "user")

    async def _must_fit(self, directory: Path) -> None:
        """Delete what has just been written, if it is more than the quota allows."""
        if why := await self._home.over_quota(0):
            await asyncio.to_thread(shutil.rmtree, directory, True)
            raise EngineError(why, "user")

    async def _write(
        self, call: _Call, directory: Path, optimizer: bool, recipients: list[Any] | None
    ) -> int:
        run_id = call.run.run_id
        if not recipients:
            save = SaveAdapter(run_id, str(directory), optimizer=optimizer, overwrite=True)
            return await execute(call.engine, save)
        plain = directory.with_name(f".{directory.name}.plain.tmp")
        try:
            save = SaveAdapter(run_id, str(plain), optimizer=optimizer, overwrite=True)
            await execute(call.engine, save)
            return await asyncio.to_thread(encryption.seal, plain, directory, recipients)
        finally:
            await asyncio.to_thread(shutil.rmtree, plain, True)

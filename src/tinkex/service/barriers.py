"""What a barrier does when its turn comes: creating an adapter, stepping, saving, loading.

Promises: each sees exactly the work submitted before it; a checkpoint's files are complete before its row
exists, and its row before its future resolves; done a second time, after a crash before its answer was
known, each gives what the first time would have given. Runs on the worker's task, one at a time per base
model. Knows nothing of order or of futures.
"""

from __future__ import annotations

import asyncio
import math
import shutil
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tinkex.engine.protocol import CreateAdapter, Engine, EngineError, LoadAdapter, OptimStep, SaveAdapter
from tinkex.service import encryption
from tinkex.service.core import Core
from tinkex.service.refusal import Caller, Refusal
from tinkex.service.rows import CheckpointKind, CheckpointRow, RunRow, SamplerRow
from tinkex.service.worker import execute
from tinkex.types import checkpoints as saves
from tinkex.types import training

# …, the request, and when it was accepted if it may have been executed before, by a process that was killed.
Barrier = Callable[[Engine, RunRow, Any, float | None], Awaitable[Any]]
Publish = Callable[[Engine, SamplerRow, str], Awaitable[None]]
MAX_NAME = 200
MAX_RECIPIENTS = 10
EPHEMERAL = "ephemeral"  # the directory of a run's unnamed published adapters


async def _nobody(engine: Engine, sampler: SamplerRow, run: str) -> None:
    """Nobody samples."""


class Barriers:
    """How each ordered operation of a run is executed."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self.publish: Publish = _nobody  # make a run's adapter sampleable as it is now; set by the service
        self._table: dict[str, Barrier] = {
            "create_model": self._create,
            "optim_step": self._step,
            "load_weights": self._load,
            "save_weights": self._save_state,
            "save_weights_for_sampler": self._save_for_sampler,
            "save_weights_external": self._save_external,
        }

    def find(self, op: str) -> Barrier:
        return self._table[op]

    def check_save(self, request: Any) -> None:
        """Refuse a save whose name, lifetime or recipients cannot be."""
        name = request.path
        if name is not None and not is_name(name):
            raise Refusal(
                400,
                f"a checkpoint's name is 1 to {MAX_NAME} letters, digits or any of '._-+=@, ', without dots "
                f"or spaces at its ends, got {name!r}",
            )
        if name is None and getattr(request, "sampling_session_seq_id", None) is None:
            raise Refusal(422, "a save needs a path (its name)")
        recipients: list[str] = getattr(request, "age_encryption_recipients", None) or []
        if len(recipients) > MAX_RECIPIENTS:
            raise Refusal(422, f"at most {MAX_RECIPIENTS} age_encryption_recipients, got {len(recipients)}")
        self.check_ttl(request.ttl_seconds)

    def check_ttl(self, seconds: int | None) -> None:
        low, high = self._core.config.min_ttl, self._core.config.max_ttl
        if seconds is not None and not low <= seconds <= high:
            raise Refusal(422, f"ttl_seconds must be from {low} to {high}, or null for ever; got {seconds}")

    # -- making, stepping, loading -----------------------------------------------------------------------

    async def _create(
        self, engine: Engine, run: RunRow, request: training.CreateModelRequest, again: float | None
    ) -> training.CreateModelResponse:
        await execute(engine, CreateAdapter(run.run_id, run.lora))
        return training.CreateModelResponse(model_id=run.run_id)

    async def _step(
        self, engine: Engine, run: RunRow, request: training.OptimStepRequest, again: float | None
    ) -> training.OptimStepResponse:
        metrics = await execute(engine, OptimStep(run.run_id, request.optim_params))  # type: ignore[arg-type]
        # JSON has no NaN, and official clients take no null for a metric.
        return training.OptimStepResponse(metrics={k: v for k, v in metrics.items() if math.isfinite(v)})

    async def _load(
        self, engine: Engine, run: RunRow, request: saves.LoadWeightsRequest, again: float | None
    ) -> saves.LoadWeightsResponse:
        checkpoint = self._core.any_checkpoint(request.path)  # that it may be read was checked on acceptance
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
        directory = self._core.home / checkpoint.directory
        await execute(engine, LoadAdapter(run.run_id, directory, optimizer=request.optimizer))
        return saves.LoadWeightsResponse(path=request.path, model_id=run.run_id, type="load_weights")

    # -- saving ------------------------------------------------------------------------------------------

    async def _save_state(
        self, engine: Engine, run: RunRow, request: saves.SaveWeightsRequest, again: float | None
    ) -> saves.SaveWeightsResponse:
        row = await self._save(
            engine, run, "weights", request, again, overwrite=request.overwrite, optimizer=True
        )
        return saves.SaveWeightsResponse(path=row.tinker_path, type="save_weights")

    async def _save_for_sampler(
        self, engine: Engine, run: RunRow, request: saves.SaveWeightsForSamplerRequest, again: float | None
    ) -> saves.SaveWeightsForSamplerResponseInternal:
        if request.path is not None:
            row = await self._save(engine, run, "sampler_weights", request, again)
            return saves.SaveWeightsForSamplerResponseInternal(
                path=row.tinker_path, type="save_weights_for_sampler"
            )
        number = request.sampling_session_seq_id
        # On disk before it is announced: after a restart its sampler must still find it.
        directory = self._core.run_dir(run.run_id) / EPHEMERAL / str(number)
        sampler = SamplerRow(
            f"{run.session_id}:sample:{number}", run.session_id, run.owner, run.base_model, time.time(),
            adapter=f"{run.session_id}:sample:{number}", adapter_dir=self._core.relative(directory),
        )  # fmt: skip
        kept = self._core.ledger.sampler(sampler.sampler_id)
        if kept is not None and kept.adapter_dir != sampler.adapter_dir:
            raise EngineError(f"sampler {sampler.sampler_id} exists already: use another number", "user")
        self._core.check_disk()
        await execute(engine, SaveAdapter(run.run_id, directory, overwrite=True))
        await self._must_fit(directory)
        await self.publish(engine, sampler, run.run_id)
        self._core.ledger.add_sampler(sampler)
        return saves.SaveWeightsForSamplerResponseInternal(
            sampling_session_id=sampler.sampler_id, type="save_weights_for_sampler"
        )

    async def _save_external(
        self, engine: Engine, run: RunRow, request: saves.SaveWeightsExternalRequest, again: float | None
    ) -> saves.SaveWeightsExternalResponseInternal:
        recipients = encryption.read_recipients(request.age_encryption_recipients or [])
        row = await self._save(engine, run, "external_weights", request, again, recipients=recipients)
        return saves.SaveWeightsExternalResponseInternal(
            path=row.tinker_path, size_bytes=row.size_bytes, type="save_weights_external"
        )

    async def _save(
        self,
        engine: Engine,
        run: RunRow,
        kind: CheckpointKind,
        request: Any,
        again: float | None,
        *,
        overwrite: bool = False,
        optimizer: bool = False,
        recipients: list[Any] | None = None,
    ) -> CheckpointRow:
        """Write the files, then the row."""
        name, ledger = request.path, self._core.ledger
        directory = self._core.run_dir(run.run_id) / kind / name
        place = self._core.relative(directory)
        async with self._core.changing(place):
            kept = self._core.any_checkpoint(f"tinker://{run.run_id}/{kind}/{name}")
            its_own = kept is not None and again is not None and kept.created_at >= again
            if kept is not None and not (overwrite or its_own):
                raise EngineError(
                    f"ResourceAlreadyExists: tinker://{run.run_id}/{kind}/{name} exists already", "user"
                )
            await self._check_room(run, kind, 0 if kept is None else kept.size_bytes)
            size = await self._write(engine, run, directory, optimizer, recipients)
            now = time.time()
            expires = None if request.ttl_seconds is None else now + request.ttl_seconds
            row = CheckpointRow(
                run.run_id, kind, name, run.owner, run.base_model, run.lora, place, size, now, optimizer,
                run.project_id, expires,
                user_metadata=getattr(request, "user_metadata", None), encrypted=bool(recipients),
            )  # fmt: skip
            if kept is None:
                await self._must_fit(directory)
            with ledger.transaction():
                ledger.add_checkpoint(row, overwrite=True)
                caller = Caller(run.owner, run.project_id)
                self._core.audit(caller, "checkpoints.save", run_id=run.run_id, tinker_path=row.tinker_path)
            self._core.count(run, {"checkpoint": 1})
            return row

    async def _check_room(self, run: RunRow, kind: CheckpointKind, replaced: int) -> None:
        """A run's checkpoints of one kind are all of one size: the last one tells the next one's."""
        last = self._core.ledger.latest_checkpoints([run.run_id]).get((run.run_id, kind))
        size = 0 if last is None else last.size_bytes
        self._core.check_disk(size)
        if why := await self._core.over_quota(max(0, size - replaced)):
            raise EngineError(why, "user")

    async def _must_fit(self, directory: Path) -> None:
        """Take back what has just been written, if it is more than the quota allows."""
        if why := await self._core.over_quota(0):
            await asyncio.to_thread(shutil.rmtree, directory, True)
            raise EngineError(why, "user")

    async def _write(
        self, engine: Engine, run: RunRow, directory: Path, optimizer: bool, recipients: list[Any] | None
    ) -> int:
        if not recipients:
            return await execute(
                engine, SaveAdapter(run.run_id, directory, optimizer=optimizer, overwrite=True)
            )
        plain = directory.with_name(f".{directory.name}.plain.tmp")
        try:
            await execute(engine, SaveAdapter(run.run_id, plain, optimizer=optimizer, overwrite=True))
            return await asyncio.to_thread(encryption.seal, plain, directory, recipients)
        finally:
            await asyncio.to_thread(shutil.rmtree, plain, True)


def is_name(name: str) -> bool:
    """Can it be a directory's name everywhere, and one part of a path and of a URL?"""
    if not 1 <= len(name.encode()) <= MAX_NAME or name.strip(". ") != name:
        return False
    return all(char.isalnum() or char in "._-+=@, " for char in name)


def shown(row: CheckpointRow) -> saves.Checkpoint:
    """A checkpoint, as it is listed."""
    kinds = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}
    return saves.Checkpoint(
        checkpoint_id=row.checkpoint_id,
        checkpoint_type=kinds[row.kind],  # type: ignore[arg-type]
        time=datetime.fromtimestamp(row.created_at, UTC),
        tinker_path=row.tinker_path,
        size_bytes=row.size_bytes,
        public=row.public,
        user_metadata={k: str(v) for k, v in (row.user_metadata or {}).items()} or None,
        expires_at=None if row.expires_at is None else datetime.fromtimestamp(row.expires_at, UTC),
    )

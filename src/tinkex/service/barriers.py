"""What a barrier does when its turn comes: creating an adapter, stepping, saving, loading.

Promises: each sees exactly the work submitted before it; a checkpoint's files are complete before its row
exists, and its row before its future resolves; replaying one after a crash gives what the first time gave.
Runs on the worker's task, one at a time per base model. Knows nothing of order or of futures.
"""

from __future__ import annotations

import asyncio
import math
import shutil
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

from tinkex.engine.protocol import CreateAdapter, Engine, EngineError, LoadAdapter, OptimStep, SaveAdapter
from tinkex.service.core import Core
from tinkex.service.refusal import Caller, Refusal
from tinkex.service.rows import CheckpointKind, CheckpointRow, RunRow, SamplerRow
from tinkex.service.worker import execute
from tinkex.types import checkpoints as saves
from tinkex.types import training

Barrier = Callable[[Engine, RunRow, Any, bool], Awaitable[Any]]  # …, the request, is it a replay?
MAX_NAME = 200


class Barriers:
    """How each ordered operation of a run is executed."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._table: dict[str, Barrier] = {
            "create_model": self._create,
            "optim_step": self._step,
            "load_weights": self._load,
            "save_weights": self._save_state,
            "save_weights_for_sampler": self._save_for_sampler,
            "save_weights_external": self._save_external,
            "unreadable": self._unreadable,
        }

    def find(self, op: str) -> Barrier:
        return self._table[op]

    async def _unreadable(self, engine: Engine, row: RunRow, request: Any, replaying: bool) -> NoReturn:
        raise EngineError(request.message, "user")

    def check_save(self, request: Any) -> None:
        """Refuse a save whose name or lifetime cannot be."""
        name = getattr(request, "path", None)
        if name is not None and not _is_name(name):
            raise Refusal(
                400,
                f"a checkpoint's name is 1 to {MAX_NAME} letters, digits, '.', '_', '-' or ' ', got {name!r}",
            )
        if name is None and getattr(request, "sampling_session_seq_id", None) is None:
            raise Refusal(422, "a save needs a path (its name)")
        if (
            isinstance(request, saves.SaveWeightsExternalRequest)
            and len(request.age_encryption_recipients or []) > 10
        ):
            raise Refusal(422, "at most 10 age_encryption_recipients")
        self.check_ttl(request.ttl_seconds)

    def check_ttl(self, seconds: int | None) -> None:
        low, high = self._core.config.min_ttl, self._core.config.max_ttl
        if seconds is not None and not low <= seconds <= high:
            raise Refusal(422, f"ttl_seconds must be from {low} to {high}, or null for ever; got {seconds}")

    # -- the barriers ------------------------------------------------------------------------------------

    async def _create(
        self, engine: Engine, run: RunRow, request: training.CreateModelRequest, replaying: bool
    ) -> training.CreateModelResponse:
        await execute(engine, CreateAdapter(run.run_id, run.lora))
        return training.CreateModelResponse(model_id=run.run_id)

    async def _step(
        self, engine: Engine, run: RunRow, request: training.OptimStepRequest, replaying: bool
    ) -> training.OptimStepResponse:
        metrics = await execute(engine, OptimStep(run.run_id, request.optim_params))  # type: ignore[arg-type]
        # JSON has no NaN, and official clients take no null for a metric.
        return training.OptimStepResponse(metrics={k: v for k, v in metrics.items() if math.isfinite(v)})

    async def _load(
        self, engine: Engine, run: RunRow, request: saves.LoadWeightsRequest, replaying: bool
    ) -> saves.LoadWeightsResponse:
        checkpoint = self._core.checkpoint(request.path, Caller(run.owner, run.project_id))
        if checkpoint.base_model != run.base_model:
            raise EngineError(
                f"{request.path} is for {checkpoint.base_model}, this run is on {run.base_model}", "user"
            )
        if request.optimizer and not checkpoint.with_optimizer:
            raise EngineError(f"{request.path} was saved without optimizer state; load it without", "user")
        await execute(
            engine,
            LoadAdapter(run.run_id, self._core.home / checkpoint.directory, optimizer=request.optimizer),
        )
        return saves.LoadWeightsResponse(path=request.path, model_id=run.run_id, type="load_weights")

    async def _save_state(
        self, engine: Engine, run: RunRow, request: saves.SaveWeightsRequest, replaying: bool
    ) -> saves.SaveWeightsResponse:
        overwrite = request.overwrite or replaying
        row = await self._save(engine, run, "weights", request, overwrite=overwrite, optimizer=True)
        return saves.SaveWeightsResponse(path=row.tinker_path, type="save_weights")

    async def _save_for_sampler(
        self, engine: Engine, run: RunRow, request: saves.SaveWeightsForSamplerRequest, replaying: bool
    ) -> saves.SaveWeightsForSamplerResponseInternal:
        if request.path is not None:
            row = await self._save(engine, run, "sampler_weights", request, overwrite=replaying)
            return saves.SaveWeightsForSamplerResponseInternal(
                path=row.tinker_path, type="save_weights_for_sampler"
            )
        sampler_id = f"{run.session_id}:sample:{request.sampling_session_seq_id}"
        # On disk before it is announced: after a restart its sampler must still find it.
        directory = self._core.home / "ephemeral" / sampler_id.replace(":", "-")
        await execute(engine, SaveAdapter(run.run_id, directory, overwrite=True))
        if not replaying:
            await engine.sampler.publish(run.run_id, sampler_id)
        self._core.ledger.add_sampler(
            SamplerRow(
                sampler_id,
                run.session_id,
                run.owner,
                run.base_model,
                time.time(),
                adapter=sampler_id,
                adapter_dir=self._core.relative(directory),
            )
        )
        return saves.SaveWeightsForSamplerResponseInternal(
            sampling_session_id=sampler_id, type="save_weights_for_sampler"
        )

    async def _save_external(
        self, engine: Engine, run: RunRow, request: saves.SaveWeightsExternalRequest, replaying: bool
    ) -> saves.SaveWeightsExternalResponseInternal:
        recipients = request.age_encryption_recipients or []
        row = await self._save(
            engine, run, "external_weights", request, overwrite=replaying, recipients=recipients
        )
        return saves.SaveWeightsExternalResponseInternal(
            path=row.tinker_path, size_bytes=row.size_bytes, type="save_weights_external"
        )

    async def _save(
        self,
        engine: Engine,
        run: RunRow,
        kind: CheckpointKind,
        request: Any,
        *,
        overwrite: bool,
        optimizer: bool = False,
        recipients: list[str] | None = None,
    ) -> CheckpointRow:
        """Write the files, then the row."""
        name, ledger = request.path, self._core.ledger
        if not overwrite and ledger.checkpoint(run.run_id, kind, name) is not None:
            raise EngineError(
                f"ResourceAlreadyExists: tinker://{run.run_id}/{kind}/{name} exists already", "user"
            )
        self._core.check_disk()
        directory = self._core.run_dir(run.run_id) / kind / name
        size = await execute(engine, SaveAdapter(run.run_id, directory, optimizer=optimizer, overwrite=True))
        if recipients:
            size = await asyncio.to_thread(encrypt, directory, recipients)
        now = time.time()
        row = CheckpointRow(
            run.run_id,
            kind,
            name,
            run.owner,
            run.base_model,
            run.lora,
            self._core.relative(directory),
            size,
            now,
            optimizer,
            run.project_id,
            None if request.ttl_seconds is None else now + request.ttl_seconds,
            user_metadata=getattr(request, "user_metadata", None),
            encrypted=bool(recipients),
        )
        with ledger.transaction():
            ledger.add_checkpoint(row, overwrite=True)
            self._core.audit(
                Caller(run.owner, run.project_id),
                "checkpoints.save",
                run_id=run.run_id,
                tinker_path=row.tinker_path,
            )
            self._core.count("checkpoint", 1, run)
        return row


def _is_name(name: str) -> bool:
    """Can it be a directory's name everywhere, and one part of a path and of a URL?"""
    if not 1 <= len(name) <= MAX_NAME or name.strip(". ") != name.strip(" ") or name != name.strip():
        return False
    return all(char.isalnum() or char in "._- +=@," for char in name)


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


def encrypt(directory: Path, recipients: list[str]) -> int:
    """Replace every file by one that only the recipients can read (age, named *.age); the bytes there are."""
    try:
        import pyrage
    except ImportError:
        raise EngineError("this server cannot encrypt: pyrage is not installed") from None
    try:
        keys = [pyrage.x25519.Recipient.from_str(text) for text in recipients]
    except Exception as error:
        shutil.rmtree(directory, ignore_errors=True)
        raise EngineError(f"an age recipient is not valid: {error}", "user") from None
    size = 0
    for path in sorted(p for p in directory.rglob("*") if p.is_file()):
        sealed = path.with_name(path.name + ".age")
        pyrage.encrypt_file(str(path), str(sealed), keys)
        path.unlink()
        size += sealed.stat().st_size
    return size

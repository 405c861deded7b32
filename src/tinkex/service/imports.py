"""Imports adapters that were trained elsewhere: files are uploaded in pieces, and become a checkpoint.

The engine of the base model reads the files, checks that they fit it, and writes the checkpoint, so it is
like any other: one can sample from it and train it further. Repeating any request is harmless. Only files of
known names are accepted, and only tensors and JSON are read. An unused upload is deleted after an
hour, or at a restart.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from tinkex.engine.protocol import DropAdapter, Engine, EngineError, LoadAdapter, SaveAdapter
from tinkex.service.access import Access
from tinkex.service.activity import Activity
from tinkex.service.checkpoints import check_save, expiry
from tinkex.service.home import Home
from tinkex.service.ledger import Ledger
from tinkex.service.refusal import Caller, Refusal
from tinkex.service.rows import CheckpointRow, RunRow, SessionRow
from tinkex.service.saved_files import SavedFiles
from tinkex.service.served_models import ServedModel, ServedModels, execute
from tinkex.types import checkpoints as types
from tinkex.types.params import LoraConfig

WEIGHTS, CONFIG, OPTIMIZER = "adapter_model.safetensors", "adapter_config.json", "optimizer.safetensors"
FILES = (WEIGHTS, CONFIG, OPTIMIZER, "tinkex.json", "SHA256SUMS")
MAX_JSON = 4 * 1024 * 1024  # bytes of a file that is not tensors
PATIENCE = 20.0  # seconds for which a request waits for the import
ABANDONED = 3600.0  # seconds without a word after which an upload is deleted
_UPLOADS = uuid.UUID("0c5d1f0a-7a3f-4f6e-8f6b-2b6c0d3f9e55")  # the namespace of sessions that hold imports
_ID = re.compile(r"[A-Za-z0-9-]{16,64}")
_QUANTISED_NAME = re.compile(r"(-unsloth)?-(bnb-)?[48]bit$", re.IGNORECASE)


@dataclass(eq=False)
class Imports:
    """Uploads and imports, one method per operation."""

    ledger: Ledger
    home: Home
    files: SavedFiles
    access: Access
    activity: Activity
    models: ServedModels
    _heard: dict[str, float] = field(default_factory=dict[str, float], init=False)  # uploads, by session
    _tasks: dict[str, asyncio.Task[str]] = field(default_factory=dict[str, asyncio.Task[str]], init=False)

    # -- files -------------------------------------------------------------------------------------------

    async def upload_weights(
        self, request: types.UploadWeightsRequest, caller: Caller
    ) -> types.UploadWeightsResponse:
        """Keep a piece of a file; one that came before is not written again."""
        if request.file not in FILES:
            raise Refusal(422, f"an adapter has no file {request.file!r:.80}; allowed: {', '.join(FILES)}")
        end = request.offset + len(request.data)
        if not request.file.endswith(".safetensors") and end > MAX_JSON:
            raise Refusal(422, f"{request.file} has more than {MAX_JSON} bytes")
        session_id = _session_of(request.upload_id, caller)
        self._sweep()
        self.home.check_disk(len(request.data))
        if why := await self.home.over_quota(len(request.data), caller.user):
            raise Refusal(422, why)
        if self.ledger.session(session_id) is None:
            now, title = time.time(), "an imported adapter"
            project = caller.project
            row = SessionRow(session_id, caller.user, now, now, project, display_name=title)
            self.ledger.add_session(row)
        self.activity.heard_of(session_id)
        self._heard[session_id] = time.monotonic()
        place = self._staged(session_id) / request.file
        async with self.home.locked(self.home.relative(place.parent)):
            received = await asyncio.to_thread(_append, place, request.offset, request.data)
        self.home.count(caller.user, len(request.data))
        return types.UploadWeightsResponse(received=received)

    def _staged(self, session_id: str) -> Path:
        """Where its files wait: a name that a restart clears away."""
        return self.home.run_dir(f"{session_id}:train:0") / "weights" / ".upload.part"

    def _sweep(self) -> None:
        """Delete abandoned uploads."""
        long_ago = time.monotonic() - ABANDONED
        for session_id in [one for one, heard in self._heard.items() if heard < long_ago]:
            task = self._tasks.get(session_id)
            if task is None or task.done():
                self._forget(session_id)
                self._tasks.pop(session_id, None)

    def _forget(self, session_id: str) -> None:
        shutil.rmtree(self._staged(session_id), ignore_errors=True)
        self._heard.pop(session_id, None)

    # -- import ------------------------------------------------------------------------------------------

    async def import_weights(
        self, request: types.ImportWeightsRequest, caller: Caller
    ) -> types.ImportWeightsResponse:
        """Start an import or poll it; returns when it is done or after PATIENCE seconds."""
        check_save(types.SaveWeightsRequest(model_id="", path=request.name, ttl_seconds=request.ttl_seconds))
        session_id = _session_of(request.upload_id, caller)
        for row in self.ledger.checkpoints_of_run(f"{session_id}:train:0"):
            return types.ImportWeightsResponse(status="ready", tinker_path=row.tinker_path)
        if (task := self._tasks.get(session_id)) is None:
            if not (self._staged(session_id) / WEIGHTS).exists():
                raise Refusal(422, f"nothing was uploaded as {request.upload_id}: upload {WEIGHTS} first")
            task = asyncio.get_running_loop().create_task(self._import(session_id, request, caller))
            self._tasks[session_id] = task
        self._heard[session_id] = time.monotonic()
        await asyncio.wait([task], timeout=PATIENCE)
        if not task.done():
            return types.ImportWeightsResponse(status="pending")
        if (error := task.exception()) is not None:
            if not isinstance(error, Refusal | EngineError | OSError):
                raise error
            return types.ImportWeightsResponse(status="failed", error=self._message(session_id, error))
        return types.ImportWeightsResponse(status="ready", tinker_path=task.result())

    def _message(self, session_id: str, error: BaseException) -> str:
        """Why it failed, without the server's paths."""
        staged = str(self._staged(session_id))
        return str(error).replace(f"{staged}/", "").replace(staged, "the adapter")

    async def _import(self, session_id: str, request: types.ImportWeightsRequest, caller: Caller) -> str:
        staged, run_id = self._staged(session_id), f"{session_id}:train:0"
        try:
            model = self._base(staged, request.base_model)
            engine = await model.load()
            optimizer = (staged / OPTIMIZER).exists() and (staged / "tinkex.json").exists()
            place = self.files.new_place(self.home.run_dir(run_id) / "weights" / request.name)
            lora, size = await _convert(engine, run_id, staged, self.files, place, optimizer)
            return self._record(session_id, request, caller, model.name, lora, place, size, optimizer)
        finally:
            await asyncio.to_thread(self._forget, session_id)

    def _record(
        self, session_id: str, request: types.ImportWeightsRequest, caller: Caller, base_model: str,
        lora: LoraConfig, place: str, size: int, optimizer: bool,
    ) -> str:  # fmt: skip
        now, run_id = time.time(), f"{session_id}:train:0"
        project = caller.project
        run = RunRow(run_id, session_id, 0, caller.user, base_model, lora, now, now, project, state="closed")
        row = CheckpointRow(
            run_id, "weights", request.name, caller.user, base_model, lora, place, size, now, optimizer,
            project, expiry(request.ttl_seconds),
        )  # fmt: skip
        with self.ledger.transaction():
            self.ledger.add_run(run)
            self.ledger.add_checkpoint(row, overwrite=True)
        self.activity.audit(caller, "checkpoints.import", run_id=run_id, tinker_path=row.tinker_path)
        return row.tinker_path

    def _base(self, staged: Path, asked: str | None) -> ServedModel:
        """The base model asked for, or the one that the adapter's files name."""
        if asked:
            return self.models.find(asked)
        facts, config = _read_json(staged / "tinkex.json"), _read_json(staged / CONFIG)
        base: dict[str, Any] = facts.get("base") or {}
        for model in self.models:  # a name may be another one here; a fingerprint is not
            if model.engine is not None and model.engine.info.fingerprint == base.get("fingerprint"):
                return model
        name = str(base.get("name") or config.get("base_model_name_or_path") or "")
        if not name:
            raise Refusal(422, "the adapter's files do not name its base model; give it (--base NAME)")
        plain = _QUANTISED_NAME.sub("", name)
        known = {model.name.lower().rpartition("/")[2]: model for model in self.models}
        try:
            if plain.lower().startswith("unsloth/") and plain.lower().rpartition("/")[2] in known:
                return known[plain.lower().rpartition("/")[2]]
            return self.models.find(name)
        except Refusal as refusal:
            if (found := known.get(plain.lower().rpartition("/")[2])) is not None:
                return found
            raise Refusal(
                422, f"the adapter names the base model {name!r}: {refusal.message}. Give it (--base NAME)"
            ) from None


async def _convert(
    engine: Engine, run_id: str, staged: Path, files: SavedFiles, place: str, optimizer: bool
) -> tuple[LoraConfig, int]:
    """Let the engine read the files and write them as its own."""

    async def save(directory: Path) -> int:
        command = SaveAdapter(run_id, str(directory), optimizer=optimizer, overwrite=True)
        return await execute(engine, command)

    try:
        lora = await execute(engine, LoadAdapter(run_id, str(staged), optimizer=optimizer))
        return lora, await files.write(place, save)
    finally:
        await execute(engine, DropAdapter(run_id))


def _session_of(upload_id: str, caller: Caller) -> str:
    """The session that holds an import. Two callers never share one, even if they choose the same id."""
    if not _ID.fullmatch(upload_id):
        raise Refusal(422, f"upload_id must be 16 to 64 letters, digits or '-', got {upload_id!r:.80}")
    return str(uuid.uuid5(_UPLOADS, f"{caller.user}\n{upload_id}"))


def _append(place: Path, offset: int, data: bytes) -> int:
    """Write `data` at `offset`, where the file ends; how long it is then."""
    place.parent.mkdir(parents=True, exist_ok=True)
    with open(place, "ab") as file:
        size = file.seek(0, os.SEEK_END)
        if offset > size:
            raise Refusal(
                422, f"{place.name}: {size} bytes are there, so a piece at {offset} comes too early"
            )
        file.write(data[size - offset :])
        return max(size, offset + len(data))


def _read_json(file: Path) -> dict[str, Any]:
    try:
        found: Any = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise Refusal(422, f"{file.name} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise Refusal(422, f"{file.name} must be a JSON object")
    return cast(dict[str, Any], found)

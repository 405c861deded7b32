"""Saves: a run's adapter written under a name, exported for its recipients, or published without a name.

The files are complete before the row exists, and the row before the save's future resolves. A save that is
repeated after a crash, because its outcome was not recorded, gives what the first time would have given.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinkex.engine import protocol
from tinkex.engine.protocol import Engine, EngineError, SaveAdapter
from tinkex.service import encryption
from tinkex.service.access import Access
from tinkex.service.activity import Activity
from tinkex.service.adapter_cache import AdapterCaches
from tinkex.service.group_commit import GroupCommit
from tinkex.service.home import TAG, Home
from tinkex.service.ledger import Ledger
from tinkex.service.refusal import Caller
from tinkex.service.rows import CheckpointKind, CheckpointRow, RunRow, SamplerRow
from tinkex.service.saved_files import SavedFiles
from tinkex.service.served_models import execute
from tinkex.types import checkpoints as types

if TYPE_CHECKING:
    from tinkex.service.runs.execution import Execution

# Of each kind of save: what it writes, and its reply.
SAVES: dict[str, tuple[CheckpointKind, Callable[..., Any]]] = {
    "save_weights": ("weights", types.SaveWeightsResponse),
    "save_weights_for_sampler": ("sampler_weights", types.SaveWeightsForSamplerResponseInternal),
    "save_weights_external": ("external_weights", types.SaveWeightsExternalResponseInternal),
}
EPHEMERAL = "ephemeral"  # the directory of a run's unnamed published adapters


@dataclass(eq=False)
class Saves:
    """Writes what runs save."""

    home: Home
    files: SavedFiles
    ledger: Ledger
    access: Access
    activity: Activity
    adapters: AdapterCaches
    disk: GroupCommit

    async def _publish(self, engine: Engine, run: RunRow, number: int) -> str:
        """The id of an unnamed sampler. It is on disk before it is announced: it must survive a restart."""
        directory = self.home.run_dir(run.run_id) / EPHEMERAL / str(number)
        place, sampler_id = self.files.new_place(directory), f"{run.session_id}:sample:{number}"
        sampler = SamplerRow(
            sampler_id, run.session_id, run.owner, run.base_model, time.time(),
            adapter=sampler_id, adapter_dir=place,
        )  # fmt: skip
        kept = self.ledger.sampler(sampler_id)
        if kept is not None and (kept.adapter_dir or "").partition(TAG)[0] != place.partition(TAG)[0]:
            raise EngineError(f"sampler {sampler_id} exists already: use another number", "user")
        self.home.check_disk()
        written = kept.adapter_dir if kept is not None and self.files.in_store else place
        saved = self.files.location(written or place)
        exported = await execute(engine, protocol.ExportAdapter(run.run_id, saved))
        # Samplers take it while it is written. Nobody can name it before the row exists.
        adapters = self.adapters.of(engine)
        publishing = asyncio.ensure_future(adapters.add(sampler, exported))
        try:
            if kept is None or not self.files.in_store:  # else the first time wrote it, in its place for good
                await self._write_sampler(engine, run, place)
            await publishing
        except BaseException:
            await asyncio.gather(publishing, return_exceptions=True)
            with contextlib.suppress(EngineError):
                await adapters.remove(sampler_id)
            raise
        self.ledger.add_sampler(sampler)
        return sampler_id

    async def _write_sampler(self, engine: Engine, run: RunRow, place: str) -> None:
        command = SaveAdapter(run.run_id, "", overwrite=True, sync=self.disk.power, sampling=True)
        self.home.count(run.owner, await _write(self.files, engine, place, command))
        await self._must_fit(place, run.owner)

    async def save(self, engine: Engine, run: RunRow, work: Execution) -> Any:
        """Write the files, then the row."""
        request, (kind, reply) = work.request, SAVES[work.op]
        if request.path is None:
            sampler_id = await self._publish(engine, run, request.sampling_session_seq_id)
            return reply(sampling_session_id=sampler_id, type=work.op)
        recipients = encryption.read_recipients(getattr(request, "age_encryption_recipients", None) or [])
        optimizer, overwrite = kind == "weights", getattr(request, "overwrite", False)
        directory = self.home.run_dir(run.run_id) / kind / request.path
        place = self.files.new_place(directory)
        async with self.home.locked(place):
            path = f"tinker://{run.run_id}/{kind}/{request.path}"
            kept = self.access.any_checkpoint(path)
            if kept is not None and not overwrite and kept.created_at < work.may_be_done_since:
                raise EngineError(f"ResourceAlreadyExists: {path} exists already", "user")
            await self._check_room(run, kind, 0 if kept is None else kept.size_bytes)
            command = SaveAdapter(run.run_id, "", optimizer=optimizer, overwrite=True)
            size = await _write(self.files, engine, place, command, recipients)
            now = time.time()
            row = CheckpointRow(
                run.run_id, kind, request.path, run.owner, run.base_model, run.lora, place, size, now,
                optimizer, run.project_id, None if request.ttl_seconds is None else now + request.ttl_seconds,
                user_metadata=getattr(request, "user_metadata", None), encrypted=bool(recipients),
            )  # fmt: skip
            self.home.count(run.owner, size if kept is None else max(0, size - kept.size_bytes))
            if kept is None:
                await self._must_fit(place, run.owner)
            with self.ledger.transaction():
                self.ledger.add_checkpoint(row, overwrite=True)
                caller = Caller(run.owner, run.project_id)
                self.activity.audit(caller, "checkpoints.save", run_id=run.run_id, tinker_path=path)
            self.activity.count(run, {"checkpoint": 1})
            if kept is not None and kept.directory != place:
                await self.disk.synced()  # else a restart might find only the old row
                await self.files.remove(kept.directory)
            return reply(path=path, size_bytes=size, type=work.op)

    async def _check_room(self, run: RunRow, kind: CheckpointKind, replaced: int) -> None:
        """A run's checkpoints of one kind are all of one size: the next one takes as much as the last one."""
        last = self.ledger.latest_checkpoints([run.run_id]).get((run.run_id, kind))
        size = 0 if last is None else last.size_bytes
        self.home.check_disk(size)
        if why := await self.home.over_quota(max(0, size - replaced), run.owner):
            raise EngineError(why, "user")

    async def _must_fit(self, place: str, user: str) -> None:
        """Delete what has just been written, if it is more than the quota allows."""
        if why := await self.home.over_quota(0, user):
            await self.files.remove(place)
            raise EngineError(why, "user")


async def _write(
    files: SavedFiles, engine: Engine, place: str, command: SaveAdapter, recipients: list[Any] | None = None
) -> int:
    """Execute a save at its place, encrypted if there are recipients; returns the size of its files."""

    async def save(directory: Path) -> int:
        plain = directory.with_name(f".{directory.name}.plain.tmp") if recipients else directory
        try:
            size = await execute(engine, replace(command, location=str(plain)))
            if recipients:
                size = await asyncio.to_thread(encryption.seal, plain, directory, recipients)
            return size
        finally:
            if recipients:
                await asyncio.to_thread(shutil.rmtree, plain, True)

    return await files.write(place, save)

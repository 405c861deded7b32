"""Saved checkpoints: named, listed, published, downloaded, copied, deleted, expired."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from tinkex.service.access import Access, scope_of
from tinkex.service.activity import Activity
from tinkex.service.archive import LINK_LIFE, Archives
from tinkex.service.group_commit import GroupCommit
from tinkex.service.home import Home, free_spare
from tinkex.service.ledger import Ledger
from tinkex.service.ledger_file import LedgerFullError
from tinkex.service.refusal import Caller, Refusal
from tinkex.service.rows import CheckpointRow, RunRow, SessionRow, texts
from tinkex.service.saved_files import SavedFiles
from tinkex.types import checkpoints as types

_Named = types.CheckpointRequest | types.SetCheckpointTTLRequest
MAX_NAME = 200
MAX_RECIPIENTS = 10
MIN_TTL, MAX_TTL = 3600, int(10 * 365.25 * 24 * 3600)  # seconds
_COPIES = uuid.UUID("6f1c52d6-5f4b-4f0e-9d3d-0d1f5c9b7a11")  # the namespace of sessions that hold copies


@dataclass(eq=False)
class Checkpoints:
    """The upkeep of saved weights, one method per operation."""

    _ledger: Ledger
    _home: Home
    _disk: GroupCommit
    _access: Access
    _activity: Activity
    _archives: Archives
    _files: SavedFiles
    _owns: Callable[[str], bool]  # does this server own that session?
    _copying: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)

    def _find(self, request: _Named, caller: Caller, *, to_change: bool = True) -> CheckpointRow:
        path = f"tinker://{request.training_run_id}/{request.checkpoint_id}"
        return self._access.checkpoint(path, caller, to_change=to_change)

    # -- looking -----------------------------------------------------------------------------------------

    async def list_checkpoints(self, request: types.ListCheckpointsRequest, caller: Caller):
        run = self._access.run(request.training_run_id, caller)
        listed = [shown(row) for row in self._ledger.checkpoints_of_run(run.run_id) if not row.expired]
        cursor = types.Cursor(offset=0, limit=len(listed), total_count=len(listed))
        return types.CheckpointsListResponse(checkpoints=listed, cursor=cursor)

    async def list_user_checkpoints(self, request: types.ListUserCheckpointsRequest, caller: Caller):
        limit, offset = request.limit, request.offset
        page = self._ledger.checkpoints(scope_of(caller), limit=limit, offset=offset, now=time.time())
        cursor = types.Cursor(offset=offset, limit=limit, total_count=page.total)
        return types.CheckpointsListResponse(checkpoints=[shown(row) for row in page.rows], cursor=cursor)

    async def get_weights_info(self, request: types.WeightsInfoRequest, caller: Caller):
        row = self._access.checkpoint(request.tinker_path, caller)
        lora = row.lora
        return types.WeightsInfoResponse(
            base_model=row.base_model, is_lora=True, lora_rank=lora.rank, train_unembed=lora.train_unembed,
            train_mlp=lora.train_mlp, train_attn=lora.train_attn,
        )  # fmt: skip

    # -- changing ----------------------------------------------------------------------------------------

    async def publish_checkpoint(self, request: types.CheckpointRequest, caller: Caller) -> None:
        self._set_public(self._find(request, caller), True, caller)

    async def unpublish_checkpoint(self, request: types.CheckpointRequest, caller: Caller) -> None:
        self._set_public(self._find(request, caller), False, caller)

    def _set_public(self, row: CheckpointRow, public: bool, caller: Caller) -> None:
        self._ledger.update_checkpoint(*row.key, public=public)
        self._audit(caller, "publish" if public else "unpublish", row)

    def _audit(self, caller: Caller, event: str, row: CheckpointRow) -> None:
        self._activity.audit(caller, f"checkpoints.{event}", run_id=row.run_id, tinker_path=row.tinker_path)

    async def set_checkpoint_ttl(self, request: types.SetCheckpointTTLRequest, caller: Caller) -> None:
        row = self._find(request, caller)
        self._ledger.update_checkpoint(*row.key, expires_at=expiry(request.ttl_seconds))

    async def delete_checkpoint(self, request: types.CheckpointRequest, caller: Caller) -> None:
        """A name without its kind is that of sampler weights, or else of a state."""
        if "/" not in request.checkpoint_id:
            kinds = ("sampler_weights", "weights")
            ids = [f"{kind}/{request.checkpoint_id}" for kind in kinds]
            paths = {one: f"tinker://{request.training_run_id}/{one}" for one in ids}
            found = next((one for one in ids if self._access.any_checkpoint(paths[one]) is not None), ids[0])
            request = types.CheckpointRequest(training_run_id=request.training_run_id, checkpoint_id=found)
        row = self._find(request, caller)
        async with self._home.locked(row.directory):
            await self._remove(row)
        self._audit(caller, "delete", row)

    async def _remove(self, row: CheckpointRow) -> None:
        """The row first: what is listed must exist, what exists need not be listed.

        Unless the disk is full: then the files make room for the row's deletion.
        """
        try:
            self._ledger.delete_checkpoint(*row.key)
        except LedgerFullError:
            free_spare(self._home.root)
            await self._files.remove(row.directory)
            self._ledger.delete_checkpoint(*row.key)
        await self._disk.synced()  # else a power cut could bring back the row without its files
        await self._files.remove(row.directory)
        await asyncio.to_thread(self._archives.forget, self._home.root / row.directory)
        await self._files.forget_archive(row.directory)  # nor can it be downloaded any more

    async def expire(self) -> None:
        if not self._activity.clock_is_steady:
            return
        for row in self._ledger.expired_checkpoints(time.time()):
            if not self._owns(row.run_id.partition(":")[0]):
                continue
            async with self._home.locked(row.directory):
                if self._ledger.checkpoint(*row.key) == row:  # else it was saved again meanwhile
                    await self._remove(row)

    # -- downloads and copies ----------------------------------------------------------------------------

    async def get_external_weights_urls(self, request: types.CheckpointRequest, caller: Caller):
        row = self._find(request, caller, to_change=False)
        if row.kind != "external_weights":
            raise Refusal(400, "only exported checkpoints (external_weights/NAME) have files to download")
        expires = time.time() + LINK_LIFE
        # Their checksums are not encrypted, and a client expects only encrypted files.
        suffix = ".age" if row.encrypted else ""
        urls = await self._files.links(caller, row.directory, expires, suffix=suffix)
        return types.ExternalWeightsUrlsResponse(urls=urls, expires=datetime.fromtimestamp(expires, UTC))

    async def get_checkpoint_archive_url(self, request: types.CheckpointRequest, caller: Caller):
        row = self._find(request, caller, to_change=False)
        expires = time.time() + LINK_LIFE
        link = await self._files.archive(caller, row.directory, expires)
        return types.CheckpointArchiveUrlResponse(url=link, expires=datetime.fromtimestamp(expires, UTC))

    async def copy_weights(self, request: types.CopyWeightsRequest, caller: Caller):
        """A copy of one's own: of a checkpoint that may be read, under a run made to hold it."""
        async with self._copying:  # a client may repeat its request while the first one is being done
            return types.CopyWeightsResponse(tinker_path=await self._copy(request, caller))

    async def _copy(self, request: types.CopyWeightsRequest, caller: Caller) -> str:
        token = request.weights_access_token
        source = self._access.checkpoint(request.source_path, caller, token=token)
        expires_at = expiry(request.ttl_seconds)
        if (copied := self._copied_before(request, source, caller)) is not None:
            return copied
        self._home.check_disk(source.size_bytes)
        if why := await self._home.over_quota(source.size_bytes, caller.user):
            raise Refusal(422, why)
        run = self._holder(request, source, caller)
        target = self._files.new_place(self._home.run_dir(run.run_id) / source.kind / source.name)
        async with self._home.locked(source.directory):  # it may have been saved again meanwhile
            source = self._access.checkpoint(request.source_path, caller, token=token)
            await self._files.copy(source.directory, target)
        self._home.count(caller.user, source.size_bytes)
        row = replace(
            source, run_id=run.run_id, owner=caller.user, project_id=run.project_id, created_at=time.time(),
            public=False, directory=target, expires_at=expires_at,
        )  # fmt: skip
        self._ledger.add_checkpoint(row, overwrite=True)
        self._audit(caller, "copy", row)
        return row.tinker_path

    def _copied_before(
        self, request: types.CopyWeightsRequest, source: CheckpointRow, caller: Caller
    ) -> str | None:
        """Where the copy is, if this very request was done already and its answer lost on the way."""
        if request.session_id is not None or not caller.attempt:
            return None
        path = f"tinker://{_copy_id(caller)}:train:0/{source.checkpoint_id}"
        return None if self._access.any_checkpoint(path) is None else path

    def _holder(self, request: types.CopyWeightsRequest, source: CheckpointRow, caller: Caller) -> RunRow:
        """The run that holds a copy: in the session named, or in one made for it."""
        session_id, number = request.session_id, request.model_seq_id
        if session_id is not None and number is not None:
            project = self._access.active_session(session_id, caller).project_id
        elif request.destination_project_id is not None:
            project = self._access.project_for(request.destination_project_id, caller)
            session_id, number = _copy_id(caller), 0
            if self._ledger.session(session_id) is None:
                now, title = time.time(), f"copy of {request.source_path}"
                self._ledger.add_session(
                    SessionRow(session_id, caller.user, now, now, project, display_name=title)
                )
                self._activity.heard_of(session_id)
        else:
            raise Refusal(
                422, "copy_weights needs a session_id and a model_seq_id, or a destination_project_id"
            )
        now, run_id = time.time(), f"{session_id}:train:{number}"
        run = RunRow(
            run_id, session_id, number, caller.user, source.base_model, source.lora, now, now, project,
            state="closed",
        )  # fmt: skip
        kept, new = self._ledger.add_run(run)
        if not new and kept.state != "closed":
            raise Refusal(422, f"model_seq_id {number} of session {session_id} is a run already")
        return kept


def _copy_id(caller: Caller) -> str:
    """The session that holds a copy: one and the same however often a client repeats its request."""
    return str(uuid.uuid5(_COPIES, f"{caller.user}\n{caller.attempt}") if caller.attempt else uuid.uuid4())


def check_save(request: Any) -> None:
    """Refuse a save whose name, lifetime or recipients cannot be."""
    name = request.path
    if name is not None and not _is_name(name):
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
    expiry(request.ttl_seconds)


def _is_name(name: str) -> bool:
    """Can it be a directory's name everywhere, and one part of a path and of a URL?"""
    if not 1 <= len(name.encode()) <= MAX_NAME or name.strip(". ") != name:
        return False
    return all(char.isalnum() or char in "._-+=@, " for char in name)


def expiry(ttl_seconds: int | None) -> float | None:
    """When something with this lifetime expires; None: never. Refusal if the lifetime is not allowed."""
    if ttl_seconds is None:
        return None
    if not MIN_TTL <= ttl_seconds <= MAX_TTL:
        raise Refusal(
            422, f"ttl_seconds must be from {MIN_TTL} to {MAX_TTL}, or null for ever; got {ttl_seconds}"
        )
    return time.time() + ttl_seconds


def shown(row: CheckpointRow) -> types.Checkpoint:
    """A checkpoint, as it is listed."""
    kinds = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}
    return types.Checkpoint(
        checkpoint_id=row.checkpoint_id,
        checkpoint_type=kinds[row.kind],  # type: ignore[arg-type]
        time=datetime.fromtimestamp(row.created_at, UTC), tinker_path=row.tinker_path,
        size_bytes=row.size_bytes, public=row.public, user_metadata=texts(row.user_metadata) or None,
        expires_at=None if row.expires_at is None else datetime.fromtimestamp(row.expires_at, UTC),
    )  # fmt: skip

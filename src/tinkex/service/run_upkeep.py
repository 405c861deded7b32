"""Renames, tags and deletes runs. Requests that a run executes in order are accepted in runs/accept.py."""

from __future__ import annotations

import asyncio
import shutil
import time
from dataclasses import dataclass

from tinkex.service.access import Access
from tinkex.service.activity import Activity
from tinkex.service.checkpoints import Checkpoints
from tinkex.service.group_commit import GroupCommit
from tinkex.service.home import Home
from tinkex.service.ledger import Ledger
from tinkex.service.refusal import Caller, Refusal
from tinkex.service.rows import RunRow
from tinkex.service.run_listing import RUNNING_SECONDS
from tinkex.service.run_metrics import RunMetrics
from tinkex.service.runs.manager import RunManager
from tinkex.service.saved_files import SavedFiles
from tinkex.types.checkpoints import CheckpointRequest
from tinkex.types.training import DeleteRunRequest, UpdateRunRequest


@dataclass(eq=False)
class RunUpkeep:
    """The upkeep of runs, one method per operation."""

    _ledger: Ledger
    _home: Home
    _disk: GroupCommit
    _access: Access
    _activity: Activity
    _runs: RunManager
    _metrics: RunMetrics
    _checkpoints: Checkpoints
    _files: SavedFiles

    async def update_run(self, request: UpdateRunRequest, caller: Caller) -> None:
        """Rename a run, or give it other tags."""
        row = self._access.run(request.training_run_id, caller, to_use=True)
        changes: dict[str, object] = {}
        if request.name is not None:
            changes["name"] = " ".join(request.name.split())
        if request.tags is not None:
            changes["tags"] = list(dict.fromkeys(tag.strip() for tag in request.tags if tag.strip()))
        if changes:
            self._ledger.update_run(row.run_id, **changes)
            self._runs.reread(row.session_id)

    async def delete_run(self, request: DeleteRunRequest, caller: Caller) -> None:
        """Delete a run with everything of it, for good; what it does ends."""
        row = self._access.run(request.training_run_id, caller, to_use=True)
        saved = self._ledger.checkpoints_of_run(row.run_id)
        if saved and not request.checkpoints:
            raise Refusal(
                422,
                f"run {row.run_id} has {len(saved)} checkpoints, as {saved[0].tinker_path}: delete them "
                "first, or ask to delete them with it (`tinkex run delete --checkpoints`)",
            )
        self._refuse_if_elsewhere(row)
        await self._runs.withdraw(row, f"run {row.run_id} was deleted")
        if not await self._runs.close(row):
            raise Refusal(429, f"a request of run {row.run_id} is being executed; ask again in a moment")
        for one in saved:
            which = CheckpointRequest(training_run_id=row.run_id, checkpoint_id=one.checkpoint_id)
            await self._checkpoints.delete_checkpoint(which, caller)
        self._metrics.forget(row.run_id)
        directory = self._home.run_dir(row.run_id)
        beneath = f"{self._home.relative(directory)}/"
        for sampler in self._ledger.samplers_of_session(row.session_id):
            if (sampler.adapter_dir or "").startswith(beneath):
                self._access.delete_sampler(sampler.sampler_id)
                await self._files.remove(sampler.adapter_dir or "")
        self._ledger.delete_run(row.run_id)
        await self._disk.synced()  # else a power cut could bring back the run without its files
        await asyncio.to_thread(shutil.rmtree, directory, True)
        self._activity.audit(caller, "runs.delete", details={"run_id": row.run_id, "name": row.name})

    def _refuse_if_elsewhere(self, row: RunRow) -> None:
        """Another process may train it: this one only looks at the home."""
        session = self._ledger.session(row.session_id)
        if self._home.is_ours or row.ended or session is None:
            return
        if time.time() - session.last_seen_at < RUNNING_SECONDS:
            raise Refusal(422, f"run {row.run_id} is in use by another process: end its script first")

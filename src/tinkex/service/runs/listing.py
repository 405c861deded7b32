"""Runs as clients see them: one, or a page of them."""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime
from typing import Any

from tinkex.service.access import Access, scope_of
from tinkex.service.activity import Activity
from tinkex.service.checkpoints import shown
from tinkex.service.ledger import Ledger
from tinkex.service.refusal import Caller
from tinkex.service.rows import RunRow, texts
from tinkex.service.served_models import ServedModels
from tinkex.types import training
from tinkex.types.checkpoints import Checkpoint, Cursor


class RunListing:
    """What is known of runs, one method per operation."""

    def __init__(self, ledger: Ledger, access: Access, activity: Activity, models: ServedModels) -> None:
        self._ledger = ledger
        self._access = access
        self._activity = activity
        self._models = models

    async def get_info(self, request: training.GetInfoRequest, caller: Caller) -> training.GetInfoResponse:
        row = self._access.run(request.model_id, caller)
        model = self._models.find(row.base_model)
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
        row = self._access.run(request.training_run_id, caller)
        return self._shown([row])[0]

    async def list_training_runs(
        self, request: training.ListTrainingRunsRequest, caller: Caller
    ) -> training.TrainingRunsResponse:
        page = self._ledger.runs(
            scope_of(caller, request.access_scope),
            limit=request.limit,
            offset=request.offset,
            project_id=request.project_id,
        )
        return training.TrainingRunsResponse(
            training_runs=self._shown(page.rows),
            cursor=Cursor(offset=request.offset, limit=request.limit, total_count=page.total),
        )

    def _shown(self, rows: list[RunRow]) -> list[training.TrainingRun]:
        self._activity.flush()  # last_request_time is among what it writes
        latest = self._ledger.latest_checkpoints([row.run_id for row in rows], time.time())

        def newest(row: RunRow, kind: str) -> Checkpoint | None:
            found = latest.get((row.run_id, kind))
            return None if found is None else shown(found)

        runs: list[training.TrainingRun] = []
        for row in rows:
            status, reason = self._status(row)
            runs.append(
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
                    user_metadata=texts(row.user_metadata) or None,
                    status=status,
                    status_reason=reason,
                )
            )
        return runs

    def _status(self, row: RunRow) -> tuple[training.RunStatus, str | None]:
        """Whether a run failed, was interrupted, is over or goes on; and why."""
        if row.corrupted:
            return "failed", row.problem or None
        session = self._ledger.session(row.session_id)
        status: dict[str, Any] = {"type": "active"} if session is None else session.status
        detail = status.get("detail") or status.get("message")
        if status["type"] == "active":
            return "active", None
        if status["type"] != "client_finished":
            return "interrupted", detail
        match status["reason"]["type"]:
            case "success":
                return "finished", detail
            case "errored":
                return "failed", detail or "its script ended with an exception"
            case _:
                return "interrupted", detail or "its script was interrupted"

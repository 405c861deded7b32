"""What is known of runs, as clients list it: what they are, and in which state."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from datetime import UTC, datetime

from tinkex.service.access import Access, scope_of
from tinkex.service.activity import Activity
from tinkex.service.checkpoints import shown
from tinkex.service.config import ServiceConfig
from tinkex.service.ledger import Ledger
from tinkex.service.refusal import Caller
from tinkex.service.rows import RunRow, texts
from tinkex.service.run_metrics import RunMetrics
from tinkex.service.runs.manager import RunManager
from tinkex.service.samplers import Samplers
from tinkex.service.served_models import ServedModels
from tinkex.types import training
from tinkex.types.checkpoints import Cursor

RUNNING_SECONDS = 60.0  # without a request, before a run counts as idle


@dataclass(eq=False)
class RunListing:
    """Answers about runs, one method per operation."""

    _config: ServiceConfig
    _ledger: Ledger
    _access: Access
    _activity: Activity
    _models: ServedModels
    _runs: RunManager
    _samplers: Samplers
    _metrics: RunMetrics

    async def get_info(self, request: training.GetInfoRequest, caller: Caller) -> training.GetInfoResponse:
        row = self._access.run(request.model_id, caller)
        model = self._models.find(row.base_model)
        engine = await model.load()
        tokenizer = await asyncio.to_thread(model.tokenizer_dir) if caller.same_machine else None
        named = None if tokenizer is None or ":" in str(tokenizer) else str(tokenizer)
        data = training.ModelData(arch=engine.info.arch, model_name=row.base_model, tokenizer_id=named)
        return training.GetInfoResponse(
            model_id=row.run_id, model_data=data, is_lora=True, lora_rank=row.lora.rank,
            model_name=row.base_model,
        )  # fmt: skip

    async def get_training_run(
        self, request: training.GetTrainingRunRequest, caller: Caller
    ) -> training.TrainingRun:
        self._flush()
        return self._shown([self._access.called(request.training_run_id, caller)])[0]

    async def list_training_runs(
        self, request: training.ListTrainingRunsRequest, caller: Caller
    ) -> training.TrainingRunsResponse:
        self._flush()
        scope, limit, offset = scope_of(caller, request.access_scope), request.limit, request.offset
        page = self._ledger.runs(scope, limit=limit, offset=offset, project_id=request.project_id)
        cursor = Cursor(offset=offset, limit=limit, total_count=page.total)
        return training.TrainingRunsResponse(training_runs=self._shown(page.rows), cursor=cursor)

    def _flush(self) -> None:
        self._activity.flush()  # last_request_time is among what it writes
        self._metrics.flush()

    def _shown(self, rows: list[RunRow]) -> list[training.TrainingRun]:
        latest = self._ledger.latest_checkpoints([row.run_id for row in rows], time.time())
        checkpoints = {key: shown(row) for key, row in latest.items()}
        busy = {*self._runs.busy(), *self._samplers.under_way()}
        return [
            training.TrainingRun(
                training_run_id=row.run_id, base_model=row.base_model, model_owner=row.owner,
                is_lora=True, corrupted=row.corrupted, lora_rank=row.lora.rank,
                last_request_time=datetime.fromtimestamp(row.last_request_at, UTC),
                last_checkpoint=checkpoints.get((row.run_id, "weights")),
                last_sampler_checkpoint=checkpoints.get((row.run_id, "sampler_weights")),
                user_metadata=texts(row.user_metadata) or None, status=status, status_reason=reason,
                name=row.name or None, tags=row.tags or None, steps=row.steps, tokens=row.tokens,
            )
            for row in rows
            for status, reason in [self._status(row, row.run_id in busy)]
        ]  # fmt: skip

    def _status(self, row: RunRow, busy: bool) -> tuple[training.RunStatus, str | None]:
        """Whether a run failed, was interrupted, ended or is running; and why."""
        session = self._ledger.session(row.session_id)
        seen = self._activity.seen.get(row.session_id, 0.0 if session is None else session.last_seen_at)
        return run_status(row, seen, self._config.session_lapse, busy=busy)


def run_status(
    row: RunRow, seen_at: float, lapse: float, *, busy: bool = False
) -> tuple[training.RunStatus, str | None]:
    """A run's state in one word, and why; `busy`: it has requests that are not done."""
    if row.corrupted:
        return "failed", row.problem or None
    if row.ended:
        return row.ended, row.ended_why or None
    now = time.time()
    if busy or now - row.last_request_at < RUNNING_SECONDS:
        return "running", None
    if now - seen_at > lapse:
        return "interrupted", f"its client was last heard of {since(now - seen_at)} ago"
    return "idle", f"its client has sent nothing for {since(now - row.last_request_at)}"


def since(seconds: float) -> str:
    """A length of time in words.

    >>> since(150), since(30), since(7200)
    ('2 min', '30 s', '2 h')
    """
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{int(seconds // size)} {unit}"
    return f"{max(0, int(seconds))} s"

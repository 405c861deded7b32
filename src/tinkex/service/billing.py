"""Usage, storage and the audit log, as they are reported to their owners."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from tinkex.service.access import scope_of
from tinkex.service.activity import Activity
from tinkex.service.ledger import Ledger
from tinkex.service.refusal import Caller
from tinkex.service.rows import Scope, UsageRow, texts
from tinkex.types import reports


@dataclass(eq=False)
class Billing:
    """Reports, one method per operation."""

    _ledger: Ledger
    _activity: Activity
    _stored_at: float = field(default_factory=time.monotonic, init=False)

    async def get_audit_log(self, request: reports.AuditLogRequest, caller: Caller):
        start = end = None
        if request.day is not None:
            start = datetime(request.day.year, request.day.month, request.day.day, tzinfo=UTC).timestamp()
            end = start + 86400
        kind = "" if request.event_type == "all" else request.event_type
        rows = self._ledger.audit(scope_of(caller), kind=kind, start=start, end=end)
        entries = [
            reports.AuditLogEntry(
                timestamp=datetime.fromtimestamp(row.at, UTC), event=row.event, event_details=row.details,
                model_id=row.run_id, tinker_path=row.tinker_path, purpose=row.purpose,
            )
            for row in rows
        ]  # fmt: skip
        return reports.AuditLogResponse(entries=entries)

    async def get_billing_usage(self, request: reports.GetBillingUsageRequest, caller: Caller):
        self._activity.flush()
        start, end = _seconds(request.starting_on), _seconds(request.ending_before)
        rows = self._ledger.usage(start, end, scope_of(caller))
        ids = {row.session_id for row in rows if row.session_id}
        sessions = {
            i: reports.BillingUsageSession(user_metadata=texts(row.user_metadata))
            for i in ids
            if (row := self._ledger.session(i)) is not None
        }
        return reports.BillingUsageResponse(data=[_usage_event(row) for row in rows], sessions=sessions)

    async def get_current_checkpoint_storage_usage(
        self, request: reports.GetCurrentCheckpointStorageUsageRequest, caller: Caller
    ):
        data = [
            reports.CurrentCheckpointStorageUsageItem(
                project_id=item.project_id, org_user_urn=item.owner, checkpoint_count=item.checkpoints,
                size_bytes=item.size_bytes, size_gigabytes=item.size_bytes / 1e9,
            )
            for item in self._ledger.storage(scope_of(caller), project_id=request.project_id)
        ]  # fmt: skip
        return reports.CurrentCheckpointStorageUsageResponse(data=data)

    def count_storage(self, *, bill: bool = True) -> None:
        """Bill the storage of checkpoints since the last time, unless another server does."""
        now = time.monotonic()  # setting the wall clock must not bill anybody
        hours, self._stored_at = (now - self._stored_at) / 3600, now
        if not bill:
            return
        self._ledger.add_usage(
            UsageRow(time.time(), item.owner, "storage", item.size_bytes / 1e9 * hours, item.project_id)
            for item in self._ledger.storage(Scope(None))
        )


def _seconds(moment: datetime) -> float:
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _usage_event(row: UsageRow) -> reports.BillingUsageEvent:
    start, amount = datetime.fromtimestamp(row.hour, UTC), int(row.amount)
    info: Any
    match row.kind:
        case "training":
            info = reports.TrainingBillingEvent(token_count=amount)
        case "sampling_prefill" | "sampling_prefill_cached":
            cached = row.kind.endswith("cached")
            info = reports.SamplingPrefillBillingEvent(cached=cached, token_count=amount)
        case "sampling_sample":
            info = reports.SamplingSampleBillingEvent(token_count=amount)
        case "checkpoint":
            info = reports.CheckpointBillingEvent(count=amount)
        case _:
            info = reports.StorageBillingEvent(gigabyte_hours=row.amount)
    return reports.BillingUsageEvent(
        bucket_start=start, bucket_end=start + timedelta(hours=1), base_model=row.base_model,
        user_id=row.owner, user_name=row.owner, session_id=row.session_id, project_id=row.project_id,
        event_info=info,
    )  # fmt: skip

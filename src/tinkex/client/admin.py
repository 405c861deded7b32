"""AdminClient: what an organisation did and what it cost, for those who may see that.

Promises: the official names, parameters and defaults; `x()` gives a future, `await x_async()` its result.
"""

from __future__ import annotations

from datetime import date, datetime

from tinkex.client.calls import Calls, checks_timeouts
from tinkex.client.future import APIFuture
from tinkex.errors import InvalidInputError
from tinkex.types.billing import (
    AuditEventType,
    AuditLogRequest,
    AuditLogResponse,
    BillingUsageResponse,
    CurrentCheckpointStorageUsageResponse,
    GetBillingUsageRequest,
    GetCurrentCheckpointStorageUsageRequest,
)
from tinkex.wire import ops


@checks_timeouts
class AdminClient(Calls):
    """The audit log and billing of an organisation.

    >>> admin = AdminClient(base_url="http://127.0.0.1:8000")  # doctest: +SKIP
    >>> admin.get_audit_log(day=date(2026, 1, 2)).result().entries  # doctest: +SKIP
    """

    def get_audit_log(
        self, event_type: AuditEventType = "all", day: date | None = None
    ) -> APIFuture[AuditLogResponse]:
        """What happened: of all kinds or one, on `day` or lately."""
        request = AuditLogRequest(event_type=event_type, day=day)
        return self._submit(ops.GET_AUDIT_LOG, request, "get_audit_log")

    async def get_audit_log_async(
        self, event_type: AuditEventType = "all", day: date | None = None, *, timeout: float | None = None
    ) -> AuditLogResponse:
        return await self.get_audit_log(event_type, day).result_async(timeout)

    def get_billing_usage(
        self, starting_on: datetime | str, ending_before: datetime | str
    ) -> APIFuture[BillingUsageResponse]:
        """What was used from `starting_on` until just before `ending_before`, in buckets of an hour."""
        request = GetBillingUsageRequest(
            starting_on=_moment("starting_on", starting_on),
            ending_before=_moment("ending_before", ending_before),
        )
        return self._submit(ops.GET_BILLING_USAGE, request, "get_billing_usage")

    async def get_billing_usage_async(
        self, starting_on: datetime | str, ending_before: datetime | str, *, timeout: float | None = None
    ) -> BillingUsageResponse:
        return await self.get_billing_usage(starting_on, ending_before).result_async(timeout)

    def get_current_checkpoint_storage_usage(
        self, project_id: str | None = None
    ) -> APIFuture[CurrentCheckpointStorageUsageResponse]:
        """What checkpoints take up now: in one project, or in all."""
        request = GetCurrentCheckpointStorageUsageRequest(project_id=project_id)
        return self._submit(
            ops.GET_CURRENT_CHECKPOINT_STORAGE_USAGE, request, "get_current_checkpoint_storage_usage"
        )

    async def get_current_checkpoint_storage_usage_async(
        self, project_id: str | None = None, *, timeout: float | None = None
    ) -> CurrentCheckpointStorageUsageResponse:
        return await self.get_current_checkpoint_storage_usage(project_id).result_async(timeout)


def _moment(name: str, value: datetime | str) -> datetime:
    if isinstance(value, datetime):
        return value
    try:
        return datetime.fromisoformat(value)
    except (TypeError, ValueError):
        raise InvalidInputError(
            f"{name} must be a datetime or a string like '2026-01-02T03:00:00Z', got {value!r}"
        ) from None

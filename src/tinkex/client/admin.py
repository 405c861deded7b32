"""AdminClient: the audit log and the billing of an organisation, for its administrators.

Promises: the official names, parameters and defaults; `x()` returns a future, `await x_async()` the result.
"""

from __future__ import annotations

from datetime import date, datetime

from tinkex.client.base_client import BaseClient
from tinkex.client.future import APIFuture
from tinkex.client.twins import awaited
from tinkex.errors import InvalidInputError
from tinkex.types.reports import (
    AuditEventType,
    AuditLogResponse,
    BillingUsageResponse,
    CurrentCheckpointStorageUsageResponse,
)
from tinkex.wire import ops


class AdminClient(BaseClient):
    """The audit log and the billing of an organisation.

    >>> admin = AdminClient(base_url="http://127.0.0.1:8000")  # doctest: +SKIP
    >>> admin.get_audit_log(day=date(2026, 1, 2)).result().entries  # doctest: +SKIP
    """

    def get_audit_log(
        self, event_type: AuditEventType = "all", day: date | None = None
    ) -> APIFuture[AuditLogResponse]:
        """Return audit events, of one type or all, on `day` or the latest ones."""
        return self._submit(ops.GET_AUDIT_LOG, event_type=event_type, day=day)

    def get_billing_usage(
        self, starting_on: datetime | str, ending_before: datetime | str
    ) -> APIFuture[BillingUsageResponse]:
        """Return usage per hour, from `starting_on` up to but excluding `ending_before`."""
        start, end = _moment("starting_on", starting_on), _moment("ending_before", ending_before)
        return self._submit(ops.GET_BILLING_USAGE, starting_on=start, ending_before=end)

    def get_current_checkpoint_storage_usage(
        self, project_id: str | None = None
    ) -> APIFuture[CurrentCheckpointStorageUsageResponse]:
        """Return the storage that checkpoints use now, in one project or in all."""
        return self._submit(ops.GET_CURRENT_CHECKPOINT_STORAGE_USAGE, project_id=project_id)

    # -- the same, to await ------------------------------------------------------------------------------

    get_audit_log_async = awaited(get_audit_log)
    get_billing_usage_async = awaited(get_billing_usage)
    get_current_checkpoint_storage_usage_async = awaited(get_current_checkpoint_storage_usage)


def _moment(name: str, value: datetime | str) -> datetime:
    if isinstance(value, datetime):
        return value
    try:
        return datetime.fromisoformat(value)
    except (TypeError, ValueError):
        raise InvalidInputError(
            f"{name} must be a datetime or a string like '2026-01-02T03:00:00Z', got {value!r}"
        ) from None

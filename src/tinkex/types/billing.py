"""Values of the audit log and of billing."""

from __future__ import annotations

from datetime import date, datetime
from typing import Annotated, Any, Literal

from pydantic import Field

from tinkex.types.base import ReplyModel, RequestModel

AuditEventType = Literal["all", "checkpoints", "projects", "teams", "organizations"]


class AuditLogRequest(RequestModel):
    """List audit events, of one day if `day` is given."""

    event_type: AuditEventType = "all"
    day: date | None = None


class AuditLogEntry(ReplyModel):
    """One audit event."""

    timestamp: datetime
    event: str
    event_details: dict[str, Any] = Field(default_factory=dict)
    model_id: str | None = None
    tinker_path: str | None = None
    purpose: str | None = None


class AuditLogResponse(ReplyModel):
    """Audit events."""

    entries: list[AuditLogEntry]


class GetBillingUsageRequest(RequestModel):
    """Get usage in a period, its end excluded."""

    starting_on: datetime
    ending_before: datetime


class TrainingBillingEvent(ReplyModel):
    """Training tokens."""

    type: Literal["training"] = "training"
    token_count: int


class SamplingPrefillBillingEvent(ReplyModel):
    """Prompt tokens."""

    type: Literal["sampling_prefill"] = "sampling_prefill"
    cached: bool
    token_count: int


class SamplingSampleBillingEvent(ReplyModel):
    """Sampled tokens."""

    type: Literal["sampling_sample"] = "sampling_sample"
    token_count: int


class CheckpointBillingEvent(ReplyModel):
    """Checkpoints saved."""

    type: Literal["checkpoint"] = "checkpoint"
    count: int


class StorageBillingEvent(ReplyModel):
    """Storage of checkpoints."""

    type: Literal["storage"] = "storage"
    gigabyte_hours: float


BillingEventInfo = Annotated[
    TrainingBillingEvent
    | SamplingPrefillBillingEvent
    | SamplingSampleBillingEvent
    | CheckpointBillingEvent
    | StorageBillingEvent,
    Field(discriminator="type"),
]


class BillingUsageEvent(ReplyModel):
    """Usage of one kind in one period."""

    bucket_start: datetime
    bucket_end: datetime
    base_model: str | None = None
    user_id: str | None = None
    user_name: str | None = None
    session_id: str | None = None
    project_id: str | None = None
    estimated_cost_usd: float | None = None
    effective_rate_usd_per_million_tokens: float | None = None
    effective_rate_usd_per_gigabyte_month: float | None = None
    event_info: BillingEventInfo


class BillingUsageSession(ReplyModel):
    """A session named in a usage report."""

    user_metadata: dict[str, str] | None = None


class BillingUsageResponse(ReplyModel):
    """Usage, and the time up to which costs are final."""

    data: list[BillingUsageEvent]
    sessions: dict[str, BillingUsageSession] = Field(default_factory=dict)
    cost_data_through: datetime | None = None


class GetCurrentCheckpointStorageUsageRequest(RequestModel):
    """Get the current storage of checkpoints, in one project if it is given."""

    project_id: str | None = None


class CurrentCheckpointStorageUsageItem(ReplyModel):
    """Storage of one user's checkpoints in one project."""

    project_id: str | None = None
    org_user_urn: str | None = None
    user_email: str | None = None
    user_name: str | None = None
    checkpoint_count: int
    size_bytes: int
    size_gigabytes: float
    estimated_monthly_cost_usd: float | None = None


class CurrentCheckpointStorageUsageResponse(ReplyModel):
    """The current storage of checkpoints."""

    effective_rate_usd_per_gigabyte_month: float | None = None
    data: list[CurrentCheckpointStorageUsageItem]

"""What was done and what it cost: the audit log and billing."""

from __future__ import annotations

from datetime import date, datetime
from typing import Annotated, Any, Literal

from pydantic import Field

from tinkex.types.base import ReplyModel, RequestModel

AuditEventType = Literal["all", "checkpoints", "projects", "teams", "organizations"]


class AuditLogRequest(RequestModel):
    """What happened, on one day if `day` is given."""

    event_type: AuditEventType = "all"
    day: date | None = None


class AuditLogEntry(ReplyModel):
    """Something that happened."""

    timestamp: datetime
    event: str
    event_details: dict[str, Any] = Field(default_factory=dict)
    model_id: str | None = None
    tinker_path: str | None = None
    purpose: str | None = None


class AuditLogResponse(ReplyModel):
    """What happened."""

    entries: list[AuditLogEntry]


class GetBillingUsageRequest(RequestModel):
    """Usage in a span of time, its end left out."""

    starting_on: datetime
    ending_before: datetime


class TrainingBillingEvent(ReplyModel):
    """Tokens trained on."""

    type: Literal["training"] = "training"
    token_count: int


class SamplingPrefillBillingEvent(ReplyModel):
    """Prompt tokens read."""

    type: Literal["sampling_prefill"] = "sampling_prefill"
    cached: bool
    token_count: int


class SamplingSampleBillingEvent(ReplyModel):
    """Tokens sampled."""

    type: Literal["sampling_sample"] = "sampling_sample"
    token_count: int


class CheckpointBillingEvent(ReplyModel):
    """Checkpoints saved."""

    type: Literal["checkpoint"] = "checkpoint"
    count: int


class StorageBillingEvent(ReplyModel):
    """Checkpoints kept."""

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
    """Usage of one kind in one span of time."""

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
    """What a session of the report said about itself."""

    user_metadata: dict[str, str] | None = None


class BillingUsageResponse(ReplyModel):
    """Usage, and how far its costs are known."""

    data: list[BillingUsageEvent]
    sessions: dict[str, BillingUsageSession] = Field(default_factory=dict)
    cost_data_through: datetime | None = None


class GetCurrentCheckpointStorageUsageRequest(RequestModel):
    """What checkpoints take up now, in one project if it is given."""

    project_id: str | None = None


class CurrentCheckpointStorageUsageItem(ReplyModel):
    """The checkpoints of one user in one project."""

    project_id: str | None = None
    org_user_urn: str | None = None
    user_email: str | None = None
    user_name: str | None = None
    checkpoint_count: int
    size_bytes: int
    size_gigabytes: float
    estimated_monthly_cost_usd: float | None = None


class CurrentCheckpointStorageUsageResponse(ReplyModel):
    """What checkpoints take up now."""

    effective_rate_usd_per_gigabyte_month: float | None = None
    data: list[CurrentCheckpointStorageUsageItem]

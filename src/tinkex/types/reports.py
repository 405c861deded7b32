"""Reports: the audit log, usage and its cost, and a client's telemetry (off unless turned on)."""

from __future__ import annotations

from datetime import date, datetime
from typing import Annotated, Any, Literal

from pydantic import Field

from tinkex.types.base import ReplyModel, RequestModel

AuditEventType = Literal["all", "checkpoints", "projects", "teams", "organizations"]


class AuditLogRequest(RequestModel):
    event_type: AuditEventType = "all"
    day: date | None = None


class AuditLogEntry(ReplyModel):
    timestamp: datetime
    event: str
    event_details: dict[str, Any] = Field(default_factory=dict)
    model_id: str | None = None
    tinker_path: str | None = None
    purpose: str | None = None


class AuditLogResponse(ReplyModel):
    entries: list[AuditLogEntry]


class GetBillingUsageRequest(RequestModel):
    starting_on: datetime
    ending_before: datetime


class TrainingBillingEvent(ReplyModel):
    type: Literal["training"] = "training"
    token_count: int


class SamplingPrefillBillingEvent(ReplyModel):
    type: Literal["sampling_prefill"] = "sampling_prefill"
    cached: bool
    token_count: int


class SamplingSampleBillingEvent(ReplyModel):
    type: Literal["sampling_sample"] = "sampling_sample"
    token_count: int


class CheckpointBillingEvent(ReplyModel):
    type: Literal["checkpoint"] = "checkpoint"
    count: int


class StorageBillingEvent(ReplyModel):
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


class BillingUsageEvent(ReplyModel):  # usage of one kind in one period
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
    user_metadata: dict[str, str] | None = None


class BillingUsageResponse(ReplyModel):
    data: list[BillingUsageEvent]
    sessions: dict[str, BillingUsageSession] = Field(default_factory=dict)
    cost_data_through: datetime | None = None  # up to when costs are final


class GetCurrentCheckpointStorageUsageRequest(RequestModel):
    project_id: str | None = None


class CurrentCheckpointStorageUsageItem(ReplyModel):  # of one user in one project
    project_id: str | None = None
    org_user_urn: str | None = None
    user_email: str | None = None
    user_name: str | None = None
    checkpoint_count: int
    size_bytes: int
    size_gigabytes: float
    estimated_monthly_cost_usd: float | None = None


class CurrentCheckpointStorageUsageResponse(ReplyModel):
    effective_rate_usd_per_gigabyte_month: float | None = None
    data: list[CurrentCheckpointStorageUsageItem]


EventType = Literal["SESSION_START", "SESSION_END", "UNHANDLED_EXCEPTION", "GENERIC_EVENT"]
Severity = Literal["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"]


class _Event(ReplyModel):
    event_id: str
    event_session_index: int
    severity: Severity
    timestamp: datetime


class SessionStartEvent(_Event):
    event: Literal["SESSION_START"] = "SESSION_START"


class SessionEndEvent(_Event):
    event: Literal["SESSION_END"] = "SESSION_END"
    duration: str


class UnhandledExceptionEvent(_Event):
    event: Literal["UNHANDLED_EXCEPTION"] = "UNHANDLED_EXCEPTION"
    error_message: str
    error_type: str
    traceback: str | None = None


class GenericEvent(_Event):
    event: Literal["GENERIC_EVENT"] = "GENERIC_EVENT"
    event_name: str
    event_data: dict[str, Any] = Field(default_factory=dict)


TelemetryEvent = Annotated[
    SessionStartEvent | SessionEndEvent | UnhandledExceptionEvent | GenericEvent, Field(discriminator="event")
]


class TelemetryBatch(ReplyModel):
    events: list[TelemetryEvent]
    platform: str
    sdk_version: str
    session_id: str
    process_uuid: str = ""


class TelemetrySendRequest(RequestModel):
    large = frozenset({"events"})  # tracebacks

    events: list[Annotated[TelemetryEvent | dict[str, Any], Field(union_mode="left_to_right")]]
    platform: str
    sdk_version: str
    session_id: str
    process_uuid: str = ""  # clients before 0.24.0 send none


class TelemetryResponse(ReplyModel):  # official clients retry forever unless they read exactly this
    status: Literal["accepted"] = "accepted"

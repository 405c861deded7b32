"""Telemetry events of a client. Ours sends none unless the user turns it on."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import Field

from tinkex.types.base import ReplyModel, RequestModel

EventType = Literal["SESSION_START", "SESSION_END", "UNHANDLED_EXCEPTION", "GENERIC_EVENT"]
Severity = Literal["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"]


class _Event(ReplyModel):
    event_id: str
    event_session_index: int
    severity: Severity
    timestamp: datetime


class SessionStartEvent(_Event):
    """A session began."""

    event: Literal["SESSION_START"] = "SESSION_START"


class SessionEndEvent(_Event):
    """A session ended, after `duration`."""

    event: Literal["SESSION_END"] = "SESSION_END"
    duration: str


class UnhandledExceptionEvent(_Event):
    """An exception that was not caught."""

    event: Literal["UNHANDLED_EXCEPTION"] = "UNHANDLED_EXCEPTION"
    error_message: str
    error_type: str
    traceback: str | None = None


class GenericEvent(_Event):
    """Any other event."""

    event: Literal["GENERIC_EVENT"] = "GENERIC_EVENT"
    event_name: str
    event_data: dict[str, Any] = Field(default_factory=dict)


TelemetryEvent = Annotated[
    SessionStartEvent | SessionEndEvent | UnhandledExceptionEvent | GenericEvent, Field(discriminator="event")
]


class TelemetryBatch(ReplyModel):
    """Events of one process."""

    events: list[TelemetryEvent]
    platform: str
    sdk_version: str
    session_id: str
    process_uuid: str = ""


class TelemetrySendRequest(RequestModel):
    """Send events of one process. Clients before 0.24.0 send no process_uuid."""

    events: list[Annotated[TelemetryEvent | dict[str, Any], Field(union_mode="left_to_right")]]
    platform: str
    sdk_version: str
    session_id: str
    process_uuid: str = ""


class TelemetryResponse(ReplyModel):
    """The events were accepted. Official clients retry forever unless they read exactly this."""

    status: Literal["accepted"] = "accepted"

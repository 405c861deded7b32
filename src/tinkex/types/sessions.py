"""Sessions: opening, heartbeats, how they end, and searching them."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Annotated, Literal

from pydantic import AwareDatetime, Field, JsonValue

from tinkex.types.base import Count, ReplyModel, RequestModel

AccessScope = Literal["owned", "accessible"]


class CreateSessionRequest(RequestModel):
    tags: list[str] = Field(default_factory=list, max_length=256)
    user_metadata: Mapping[str, JsonValue] | None = None
    sdk_version: str = ""
    project_id: str | None = None
    display_name: str | None = None
    type: Literal["create_session"] = "create_session"


class CreateSessionResponse(ReplyModel):
    type: Literal["create_session"] = "create_session"
    info_message: str | None = None
    warning_message: str | None = None
    error_message: str | None = None
    session_id: str


class SessionHeartbeatRequest(RequestModel):
    session_id: str
    type: Literal["session_heartbeat"] = "session_heartbeat"


class SessionHeartbeatResponse(ReplyModel):
    type: Literal["session_heartbeat"] = "session_heartbeat"


# -- how a session ends ----------------------------------------------------------------------------------

ClientSessionFinishReasonType = Literal["success", "errored", "interrupted"]


class ClientSessionFinishSuccess(ReplyModel):
    type: Literal["success"] = "success"


class ClientSessionFinishErrored(ReplyModel):
    type: Literal["errored"] = "errored"


class ClientSessionFinishInterrupted(ReplyModel):
    type: Literal["interrupted"] = "interrupted"


ClientSessionFinishReason = Annotated[
    ClientSessionFinishSuccess | ClientSessionFinishErrored | ClientSessionFinishInterrupted,
    Field(discriminator="type"),
]


class FinishSessionRequest(RequestModel):
    sent_as_null = frozenset({"detail"})

    session_id: str
    reason: ClientSessionFinishReason
    detail: str | None = None


class SessionFailedRequestReason(ReplyModel):
    type: Literal["request"] = "request"
    request_id: str
    request_type: str


class SessionFailedTrainingRunReason(ReplyModel):
    type: Literal["training_run"] = "training_run"
    training_run_id: str


class SessionFailedSamplingSessionReason(ReplyModel):
    type: Literal["sampling_session"] = "sampling_session"
    sampling_session_id: str


SessionFailedReason = Annotated[
    SessionFailedRequestReason | SessionFailedTrainingRunReason | SessionFailedSamplingSessionReason,
    Field(discriminator="type"),
]


class SessionFailed(ReplyModel):  # ended by a failure on the server
    type: Literal["failed"] = "failed"
    category: Literal["user", "internal"]
    reason: SessionFailedReason
    message: str


class SessionCancelled(ReplyModel):  # by someone else
    type: Literal["cancelled"] = "cancelled"
    detail: str | None = None


class ClientSessionFinished(ReplyModel):  # closed by its client
    type: Literal["client_finished"] = "client_finished"
    reason: ClientSessionFinishReason
    detail: str | None = None


class SessionActive(ReplyModel):
    type: Literal["active"] = "active"


SessionStatus = Annotated[
    SessionFailed | SessionCancelled | ClientSessionFinished | SessionActive, Field(discriminator="type")
]


class ListSessionsRequest(RequestModel):
    limit: Count = 20
    offset: Count = 0
    access_scope: AccessScope = "owned"


class ListSessionsResponse(ReplyModel):
    sessions: list[str]


class GetSessionRequest(RequestModel):
    session_id: str
    access_scope: AccessScope = "owned"


class GetSessionResponse(ReplyModel):
    training_run_ids: list[str]
    sampler_ids: list[str]
    user_metadata: dict[str, str] | None = None
    display_name: str | None = None


class DeleteSessionRequest(RequestModel):
    session_id: str


class AssignSessionProjectRequest(RequestModel):
    session_id: str
    project_id: str


class ExportSessionTraceRequest(RequestModel):
    session_id: str


class SessionTraceExportResponse(ReplyModel):  # `url` is set when it is ready, `error` if it failed
    status: Literal["pending", "ready", "failed"]
    url: str | None = None
    error: str | None = None


class OwnSearchOwner(RequestModel):
    type: Literal["own"] = "own"


class AccessibleSearchOwner(RequestModel):  # every session that the caller may see
    type: Literal["accessible"] = "accessible"


class UserSearchOwner(RequestModel):
    type: Literal["user"] = "user"
    owner_urns: list[str] = Field(min_length=1, max_length=10)


SearchOwner = Annotated[OwnSearchOwner | AccessibleSearchOwner | UserSearchOwner, Field(discriminator="type")]


class ActiveSessionStatusQuery(RequestModel):
    type: Literal["active"] = "active"


class CancelledSessionStatusQuery(RequestModel):
    type: Literal["cancelled"] = "cancelled"


class FailedSessionStatusQuery(RequestModel):
    type: Literal["failed"] = "failed"


class ClientFinishedSessionStatusQuery(RequestModel):
    type: Literal["client_finished"] = "client_finished"
    reasons: list[ClientSessionFinishReasonType] | None = None


SessionStatusQuery = Annotated[
    ActiveSessionStatusQuery
    | CancelledSessionStatusQuery
    | FailedSessionStatusQuery
    | ClientFinishedSessionStatusQuery,
    Field(discriminator="type"),
]


class SessionSearchCursor(ReplyModel):
    last_created_at: AwareDatetime
    last_session_id: str


class SessionSearchRequest(RequestModel):  # every given field must match; newest first
    large = frozenset({"project_ids"})

    session_id: str | None = None
    project_ids: list[str] | None = None
    user_metadata: dict[str, str] = Field(default_factory=dict)
    display_name: str | None = Field(default=None, min_length=1)
    owner: SearchOwner = OwnSearchOwner()
    statuses: list[SessionStatusQuery] | None = Field(default=None, min_length=1)
    limit: int = Field(default=50, ge=1, le=200)
    cursor: SessionSearchCursor | None = None


class SessionSummary(ReplyModel):
    session_id: str
    created_at: datetime
    owner: str
    project_id: str
    status: SessionStatus | None = None
    checkpoints_count: int
    display_name: str | None = None
    user_metadata: dict[str, str] | None = None
    checkpoint_storage_bytes: int | None = None


class SessionSearchResponse(ReplyModel):
    sessions: list[SessionSummary]
    next_cursor: SessionSearchCursor | None = None

"""The table of operations: method, path, request, reply and result of every endpoint.

The server mounts its routes from this table, the client sends by it, and the service has one method per row.
An operation with a future replies `UntypedAPIFuture`; RETRIEVE_FUTURE then returns its `result`. Knows types
only: codec.py turns values into bytes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from types import NoneType
from typing import Any, Generic, TypeVar

from tinkex.types import (
    billing,
    checkpoints,
    config,
    futures,
    sampling,
    sessions,
    telemetry,
    training,
)
from tinkex.types.futures import UntypedAPIFuture
from tinkex.types.outputs import ForwardBackwardOutput, SampleResponse

Req = TypeVar("Req")
Reply = TypeVar("Reply")


class Pool(StrEnum):
    """Kinds of traffic. A client limits each separately, so that none starves another."""

    SESSION = "session"
    TRAIN = "train"
    SAMPLE = "sample"
    RETRIEVE = "retrieve"
    STREAM = "stream"  # streamed samples
    POLL = "poll"  # the long poll for many futures
    REST = "rest"
    TELEMETRY = "telemetry"


@dataclass(frozen=True, eq=False)
class Op(Generic[Req, Reply]):
    """One operation. `path` is in Starlette's syntax; its placeholders are fields of the request.

    The remaining fields of a GET or DELETE go in its query string.
    """

    name: str
    method: str
    path: str
    request: type[Req]
    reply: type[Reply]
    result: type[Any] | None = None  # the type of its future's result
    request_type: str = ""  # the header X-Tinker-Request-Type of a retrieval
    pool: Pool = Pool.REST
    retry: bool = True  # False: the caller repeats it at its own pace, so the transport must not

    @cached_property
    def placeholders(self) -> dict[str, bool]:
        """The fields in the path; True: the value may contain slashes."""
        return {name: kind == ":path" for name, kind in re.findall(r"{(\w+)(:path)?}", self.path)}

    @property
    def has_future(self) -> bool:
        return self.result is not None


_V1 = "/api/v1"
_RUN = f"{_V1}/training_runs/{{training_run_id}}"
_CHECKPOINT = f"{_RUN}/checkpoints/{{checkpoint_id:path}}"
_SESSION = f"{_V1}/sessions/{{session_id}}"


def _with_future(
    name: str, request: type[Req], result: type[Any], *, path: str | None = None, pool: Pool = Pool.TRAIN
) -> Op[Req, UntypedAPIFuture]:
    request_type = name.title().replace("_", "")
    return Op(name, "POST", path or f"{_V1}/{name}", request, UntypedAPIFuture, result, request_type, pool)


# -- server and credentials ------------------------------------------------------------------------------

GET_CLIENT_CONFIG = Op(
    "get_client_config", "POST", f"{_V1}/client/config", config.ClientConfigRequest,
    config.ClientConfigResponse, pool=Pool.SESSION,
)  # fmt: skip
GET_DYNAMIC_CONFIG = Op(
    "get_dynamic_config", "POST", f"{_V1}/client/dynamic_config", config.ClientConfigRequest,
    config.ClientDynamicConfigResponse, pool=Pool.SESSION, retry=False,
)  # fmt: skip
GET_AUTH_TOKEN = Op(
    "get_auth_token", "POST", f"{_V1}/auth/token", config.EmptyRequest, config.AuthTokenResponse,
    pool=Pool.SESSION,
)  # fmt: skip
GET_API_KEY = Op("get_api_key", "GET", f"{_V1}/auth/apikey/me", config.EmptyRequest, config.ApiKeyResponse)
DELETE_API_KEY = Op("delete_api_key", "DELETE", f"{_V1}/auth/apikey/me", config.EmptyRequest, NoneType)
GET_HEALTH = Op("get_health", "GET", f"{_V1}/healthz", config.EmptyRequest, config.HealthResponse)
GET_SERVER_CAPABILITIES = Op(
    "get_server_capabilities", "GET", f"{_V1}/get_server_capabilities", config.EmptyRequest,
    config.GetServerCapabilitiesResponse,
)  # fmt: skip
GET_TOKENIZER_FILE = Op(  # our extension
    "get_tokenizer_file", "GET", f"{_V1}/models/{{model_name:path}}/tokenizer/{{file}}",
    config.TokenizerFileRequest, bytes,
)  # fmt: skip
SEND_TELEMETRY = Op(
    "send_telemetry", "POST", f"{_V1}/telemetry", telemetry.TelemetrySendRequest,
    telemetry.TelemetryResponse, pool=Pool.TELEMETRY,
)  # fmt: skip

# -- sessions --------------------------------------------------------------------------------------------

CREATE_SESSION = Op(
    "create_session", "POST", f"{_V1}/create_session", sessions.CreateSessionRequest,
    sessions.CreateSessionResponse, pool=Pool.SESSION,
)  # fmt: skip
SESSION_HEARTBEAT = Op(
    "session_heartbeat", "POST", f"{_V1}/session_heartbeat", sessions.SessionHeartbeatRequest,
    sessions.SessionHeartbeatResponse, pool=Pool.SESSION, retry=False,
)  # fmt: skip
FINISH_SESSION = Op(
    "finish_session", "POST", f"{_SESSION}/finish", sessions.FinishSessionRequest, NoneType, pool=Pool.SESSION
)
SEARCH_SESSIONS = Op(
    "search_sessions", "POST", f"{_V1}/sessions/search", sessions.SessionSearchRequest,
    sessions.SessionSearchResponse,
)  # fmt: skip
LIST_SESSIONS = Op(
    "list_sessions", "GET", f"{_V1}/sessions", sessions.ListSessionsRequest, sessions.ListSessionsResponse
)
GET_SESSION = Op("get_session", "GET", _SESSION, sessions.GetSessionRequest, sessions.GetSessionResponse)
ASSIGN_SESSION_PROJECT = Op(
    "assign_session_project", "PUT", f"{_SESSION}/project", sessions.AssignSessionProjectRequest, NoneType
)
EXPORT_SESSION_TRACE = Op(
    "export_session_trace", "GET", f"{_SESSION}/trace_export", sessions.ExportSessionTraceRequest,
    sessions.SessionTraceExportResponse,
)  # fmt: skip

# -- runs ------------------------------------------------------------------------------------------------

CREATE_MODEL = _with_future("create_model", training.CreateModelRequest, training.CreateModelResponse)
# Used by clients up to 0.25.0
UNLOAD_MODEL = _with_future("unload_model", training.UnloadModelRequest, training.UnloadModelResponse)
GET_INFO = Op("get_info", "POST", f"{_V1}/get_info", training.GetInfoRequest, training.GetInfoResponse)
FORWARD_BACKWARD = _with_future("forward_backward", training.ForwardBackwardRequest, ForwardBackwardOutput)
# Used by clients up to 0.24.1; newer ones set forward_only
FORWARD = _with_future("forward", training.ForwardBackwardRequest, ForwardBackwardOutput)
OPTIM_STEP = _with_future("optim_step", training.OptimStepRequest, training.OptimStepResponse)
CREATE_CUSTOM_LOSS = _with_future(
    "create_custom_loss", training.CreateCustomLossRequest, training.CreateCustomLossResponse
)
LIST_TRAINING_RUNS = Op(
    "list_training_runs", "GET", f"{_V1}/training_runs", training.ListTrainingRunsRequest,
    training.TrainingRunsResponse,
)  # fmt: skip
GET_TRAINING_RUN = Op("get_training_run", "GET", _RUN, training.GetTrainingRunRequest, training.TrainingRun)
GET_RUN_METRICS = Op(  # our extension: JSON lines, one per step
    "get_run_metrics", "GET", f"{_RUN}/metrics", training.GetTrainingRunRequest, bytes
)

# -- checkpoints -----------------------------------------------------------------------------------------

SAVE_WEIGHTS = _with_future("save_weights", checkpoints.SaveWeightsRequest, checkpoints.SaveWeightsResponse)
SAVE_WEIGHTS_FOR_SAMPLER = _with_future(
    "save_weights_for_sampler",
    checkpoints.SaveWeightsForSamplerRequest,
    checkpoints.SaveWeightsForSamplerResponseInternal,
)
SAVE_WEIGHTS_EXTERNAL = _with_future(
    "save_weights_external",
    checkpoints.SaveWeightsExternalRequest,
    checkpoints.SaveWeightsExternalResponseInternal,
)
LOAD_WEIGHTS = _with_future("load_weights", checkpoints.LoadWeightsRequest, checkpoints.LoadWeightsResponse)
GET_WEIGHTS_INFO = Op(
    "get_weights_info", "POST", f"{_V1}/weights_info", checkpoints.WeightsInfoRequest,
    checkpoints.WeightsInfoResponse,
)  # fmt: skip
COPY_WEIGHTS = Op(
    "copy_weights", "POST", f"{_V1}/copy_weights", checkpoints.CopyWeightsRequest,
    checkpoints.CopyWeightsResponse,
)  # fmt: skip
LIST_CHECKPOINTS = Op(
    "list_checkpoints", "GET", f"{_RUN}/checkpoints", checkpoints.ListCheckpointsRequest,
    checkpoints.CheckpointsListResponse,
)  # fmt: skip
LIST_USER_CHECKPOINTS = Op(
    "list_user_checkpoints", "GET", f"{_V1}/checkpoints", checkpoints.ListUserCheckpointsRequest,
    checkpoints.CheckpointsListResponse,
)  # fmt: skip
# Before DELETE_CHECKPOINT: its placeholder would match these longer paths too.
PUBLISH_CHECKPOINT = Op(
    "publish_checkpoint", "POST", f"{_CHECKPOINT}/publish", checkpoints.CheckpointRequest, NoneType
)
UNPUBLISH_CHECKPOINT = Op(
    "unpublish_checkpoint", "DELETE", f"{_CHECKPOINT}/publish", checkpoints.CheckpointRequest, NoneType
)
SET_CHECKPOINT_TTL = Op(
    "set_checkpoint_ttl", "PUT", f"{_CHECKPOINT}/ttl", checkpoints.SetCheckpointTTLRequest, NoneType
)
GET_EXTERNAL_WEIGHTS_URLS = Op(
    "get_external_weights_urls", "GET", f"{_CHECKPOINT}/external_weights_urls",
    checkpoints.CheckpointRequest, checkpoints.ExternalWeightsUrlsResponse,
)  # fmt: skip
GET_CHECKPOINT_ARCHIVE_URL = Op(  # used by clients up to 0.35.0; a server may reply 302
    "get_checkpoint_archive_url", "GET", f"{_CHECKPOINT}/archive", checkpoints.CheckpointRequest,
    checkpoints.CheckpointArchiveUrlResponse,
)  # fmt: skip
DELETE_CHECKPOINT = Op("delete_checkpoint", "DELETE", _CHECKPOINT, checkpoints.CheckpointRequest, NoneType)

# -- sampling --------------------------------------------------------------------------------------------

CREATE_SAMPLING_SESSION = Op(
    "create_sampling_session", "POST", f"{_V1}/create_sampling_session",
    sampling.CreateSamplingSessionRequest, sampling.CreateSamplingSessionResponse, pool=Pool.SAMPLE,
)  # fmt: skip
JOIN_SAMPLING_SESSION = Op(
    "join_sampling_session", "POST", f"{_V1}/join_sampling_session", sampling.JoinSamplingSessionRequest,
    sampling.JoinSamplingSessionResponse, pool=Pool.SAMPLE,
)  # fmt: skip
SAMPLE = _with_future(
    "sample", sampling.SampleRequest, SampleResponse, path=f"{_V1}/asample", pool=Pool.SAMPLE
)
GET_SAMPLER = Op(
    "get_sampler", "GET", f"{_V1}/samplers/{{sampler_id}}", sampling.GetSamplerRequest,
    sampling.GetSamplerResponse,
)  # fmt: skip

# -- futures ---------------------------------------------------------------------------------------------

RETRIEVE_FUTURE = Op(
    "retrieve_future", "POST", f"{_V1}/retrieve_future", futures.FutureRetrieveRequest, object,
    pool=Pool.RETRIEVE,
)  # fmt: skip
RETRIEVE_FUTURES = Op(
    "retrieve_futures", "POST", f"{_V1}/retrieve_futures", futures.FuturesRetrieveRequest,
    futures.FuturesRetrieveResponse, pool=Pool.POLL, retry=False,
)  # fmt: skip
CANCEL_FUTURE = Op(
    "cancel_future", "POST", f"{_V1}/cancel_future", futures.CancelFutureRequest, NoneType,
    pool=Pool.RETRIEVE, retry=False,
)  # fmt: skip

# -- audit and billing -----------------------------------------------------------------------------------

GET_AUDIT_LOG = Op("get_audit_log", "GET", f"{_V1}/audit", billing.AuditLogRequest, billing.AuditLogResponse)
GET_BILLING_USAGE = Op(
    "get_billing_usage", "GET", f"{_V1}/billing/usage/events", billing.GetBillingUsageRequest,
    billing.BillingUsageResponse,
)  # fmt: skip
GET_CURRENT_CHECKPOINT_STORAGE_USAGE = Op(
    "get_current_checkpoint_storage_usage", "GET", f"{_V1}/billing/usage/checkpoints/current",
    billing.GetCurrentCheckpointStorageUsageRequest, billing.CurrentCheckpointStorageUsageResponse,
)  # fmt: skip

OPS: dict[str, Op[Any, Any]] = {row.name: row for row in list(globals().values()) if isinstance(row, Op)}

# Our extension. Not in the table: its reply is a stream of events (event_codec.py) with a route of its own.
STREAM_SAMPLE = replace(SAMPLE, name="stream_sample", path=f"{_V1}/stream_sample", pool=Pool.STREAM)

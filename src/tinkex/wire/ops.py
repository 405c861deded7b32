"""The table of operations: method, path, request, reply and result of every endpoint.

The server mounts its routes from this table, the client sends by it, and the service has one method per row.
Knows types only: codec.py turns values into bytes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from types import NoneType
from typing import Any, Generic, TypeVar

from tinkex import types as t

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
    """One operation. Its name is that of its constant, in lower case; its default path is its name.

    The path's placeholders, in Starlette's syntax, are fields of the request. The remaining fields of a GET
    or DELETE go in its query string. One with a future replies UntypedAPIFuture, and RETRIEVE_FUTURE then
    returns its `result`.
    """

    request: type[Req]
    reply: type[Reply]
    method: str = "POST"
    path: str = ""
    pool: Pool = Pool.REST
    retry: bool = True  # False: the caller repeats it at its own pace, so the transport must not
    result: type[Any] | None = None  # the type of its future's result
    name: str = ""

    @cached_property
    def placeholders(self) -> dict[str, bool]:
        """The fields in the path; True: the value may contain slashes."""
        return {name: kind == ":path" for name, kind in re.findall(r"{(\w+)(:path)?}", self.path)}

    @property
    def has_future(self) -> bool:
        return self.result is not None

    @cached_property
    def request_type(self) -> str:
        """The header X-Tinker-Request-Type of a retrieval."""
        return self.name.title().replace("_", "") if self.has_future else ""


def _with_future(
    request: type[Req], result: type[Any], path: str = "", pool: Pool = Pool.TRAIN
) -> Op[Req, t.UntypedAPIFuture]:
    return Op(request, t.UntypedAPIFuture, "POST", path, pool, result=result)


_RUN = "training_runs/{training_run_id}"
_CHECKPOINT = f"{_RUN}/checkpoints/{{checkpoint_id:path}}"
_SESSION = "sessions/{session_id}"

# fmt: off
# Server and credentials
GET_CLIENT_CONFIG = Op(t.ClientConfigRequest, t.ClientConfigResponse, "POST", "client/config", Pool.SESSION)
GET_DYNAMIC_CONFIG = Op(t.ClientConfigRequest, t.ClientDynamicConfigResponse, "POST",
                        "client/dynamic_config", Pool.SESSION, retry=False)
GET_AUTH_TOKEN = Op(t.EmptyRequest, t.AuthTokenResponse, "POST", "auth/token", Pool.SESSION)
GET_API_KEY = Op(t.EmptyRequest, t.ApiKeyResponse, "GET", "auth/apikey/me")
DELETE_API_KEY = Op(t.EmptyRequest, NoneType, "DELETE", "auth/apikey/me")
GET_HEALTH = Op(t.EmptyRequest, t.HealthResponse, "GET", "healthz")
GET_SERVER_CAPABILITIES = Op(t.EmptyRequest, t.GetServerCapabilitiesResponse, "GET")
GET_TOKENIZER_FILE = Op(t.TokenizerFileRequest, bytes, "GET",  # our extension
                        "models/{model_name:path}/tokenizer/{file}")
SEND_TELEMETRY = Op(t.TelemetrySendRequest, t.TelemetryResponse, "POST", "telemetry", Pool.TELEMETRY)

# Sessions
CREATE_SESSION = Op(t.CreateSessionRequest, t.CreateSessionResponse, pool=Pool.SESSION)
SESSION_HEARTBEAT = Op(t.SessionHeartbeatRequest, t.SessionHeartbeatResponse, pool=Pool.SESSION, retry=False)
FINISH_SESSION = Op(t.FinishSessionRequest, NoneType, "POST", f"{_SESSION}/finish", Pool.SESSION)
SEARCH_SESSIONS = Op(t.SessionSearchRequest, t.SessionSearchResponse, "POST", "sessions/search")
LIST_SESSIONS = Op(t.ListSessionsRequest, t.ListSessionsResponse, "GET", "sessions")
GET_SESSION = Op(t.GetSessionRequest, t.GetSessionResponse, "GET", _SESSION)
DELETE_SESSION = Op(t.DeleteSessionRequest, NoneType, "DELETE", _SESSION)  # our extension
ASSIGN_SESSION_PROJECT = Op(t.AssignSessionProjectRequest, NoneType, "PUT", f"{_SESSION}/project")
EXPORT_SESSION_TRACE = Op(t.ExportSessionTraceRequest, t.SessionTraceExportResponse, "GET",
                          f"{_SESSION}/trace_export")

# Runs
CREATE_MODEL = _with_future(t.CreateModelRequest, t.CreateModelResponse)
# Used by clients up to 0.25.0
UNLOAD_MODEL = _with_future(t.UnloadModelRequest, t.UnloadModelResponse)
GET_INFO = Op(t.GetInfoRequest, t.GetInfoResponse)
FORWARD_BACKWARD = _with_future(t.ForwardBackwardRequest, t.ForwardBackwardOutput)
# Used by clients up to 0.24.1; newer ones set forward_only
FORWARD = _with_future(t.ForwardBackwardRequest, t.ForwardBackwardOutput)
OPTIM_STEP = _with_future(t.OptimStepRequest, t.OptimStepResponse)
CREATE_CUSTOM_LOSS = _with_future(t.CreateCustomLossRequest, t.CreateCustomLossResponse)
LIST_TRAINING_RUNS = Op(t.ListTrainingRunsRequest, t.TrainingRunsResponse, "GET", "training_runs")
GET_TRAINING_RUN = Op(t.GetTrainingRunRequest, t.TrainingRun, "GET", _RUN)
# Our extension: JSON lines, one per step
GET_RUN_METRICS = Op(t.GetTrainingRunRequest, bytes, "GET", f"{_RUN}/metrics")
LOG_RUN_METRICS = Op(t.LogRunMetricsRequest, NoneType, "POST", f"{_RUN}/metrics")  # our extension, as:
UPDATE_RUN = Op(t.UpdateRunRequest, NoneType, "PUT", _RUN)
DELETE_RUN = Op(t.DeleteRunRequest, NoneType, "DELETE", _RUN)

# Checkpoints
SAVE_WEIGHTS = _with_future(t.SaveWeightsRequest, t.SaveWeightsResponse)
SAVE_WEIGHTS_FOR_SAMPLER = _with_future(t.SaveWeightsForSamplerRequest,
                                        t.SaveWeightsForSamplerResponseInternal)
SAVE_WEIGHTS_EXTERNAL = _with_future(t.SaveWeightsExternalRequest, t.SaveWeightsExternalResponseInternal)
LOAD_WEIGHTS = _with_future(t.LoadWeightsRequest, t.LoadWeightsResponse)
GET_WEIGHTS_INFO = Op(t.WeightsInfoRequest, t.WeightsInfoResponse, "POST", "weights_info")
COPY_WEIGHTS = Op(t.CopyWeightsRequest, t.CopyWeightsResponse)
# Our extension: files of an adapter as raw bytes, piece by piece, and then a checkpoint from them
UPLOAD_WEIGHTS = Op(t.UploadWeightsRequest, t.UploadWeightsResponse, "PUT", "uploads/{upload_id}/{file}")
IMPORT_WEIGHTS = Op(t.ImportWeightsRequest, t.ImportWeightsResponse)
LIST_CHECKPOINTS = Op(t.ListCheckpointsRequest, t.CheckpointsListResponse, "GET", f"{_RUN}/checkpoints")
LIST_USER_CHECKPOINTS = Op(t.ListUserCheckpointsRequest, t.CheckpointsListResponse, "GET", "checkpoints")
# Before DELETE_CHECKPOINT: its placeholder would match these longer paths too.
PUBLISH_CHECKPOINT = Op(t.CheckpointRequest, NoneType, "POST", f"{_CHECKPOINT}/publish")
UNPUBLISH_CHECKPOINT = Op(t.CheckpointRequest, NoneType, "DELETE", f"{_CHECKPOINT}/publish")
SET_CHECKPOINT_TTL = Op(t.SetCheckpointTTLRequest, NoneType, "PUT", f"{_CHECKPOINT}/ttl")
GET_EXTERNAL_WEIGHTS_URLS = Op(t.CheckpointRequest, t.ExternalWeightsUrlsResponse, "GET",
                               f"{_CHECKPOINT}/external_weights_urls")
# Used by clients up to 0.35.0; a server may reply 302
GET_CHECKPOINT_ARCHIVE_URL = Op(t.CheckpointRequest, t.CheckpointArchiveUrlResponse,
                                "GET", f"{_CHECKPOINT}/archive")
DELETE_CHECKPOINT = Op(t.CheckpointRequest, NoneType, "DELETE", _CHECKPOINT)

# Sampling
CREATE_SAMPLING_SESSION = Op(t.CreateSamplingSessionRequest, t.CreateSamplingSessionResponse,
                             pool=Pool.SAMPLE)
JOIN_SAMPLING_SESSION = Op(t.JoinSamplingSessionRequest, t.JoinSamplingSessionResponse, pool=Pool.SAMPLE)
SAMPLE = _with_future(t.SampleRequest, t.SampleResponse, "asample", Pool.SAMPLE)
GET_SAMPLER = Op(t.GetSamplerRequest, t.GetSamplerResponse, "GET", "samplers/{sampler_id}")

# Futures
RETRIEVE_FUTURE = Op(t.FutureRetrieveRequest, object, pool=Pool.RETRIEVE)
RETRIEVE_FUTURES = Op(t.FuturesRetrieveRequest, t.FuturesRetrieveResponse, pool=Pool.POLL, retry=False)
CANCEL_FUTURE = Op(t.CancelFutureRequest, NoneType, pool=Pool.RETRIEVE, retry=False)

# Audit and billing
GET_AUDIT_LOG = Op(t.AuditLogRequest, t.AuditLogResponse, "GET", "audit")
GET_BILLING_USAGE = Op(t.GetBillingUsageRequest, t.BillingUsageResponse, "GET", "billing/usage/events")
GET_CURRENT_CHECKPOINT_STORAGE_USAGE = Op(t.GetCurrentCheckpointStorageUsageRequest,
                                          t.CurrentCheckpointStorageUsageResponse, "GET",
                                          "billing/usage/checkpoints/current")
# fmt: on

OPS: dict[str, Op[Any, Any]] = {k.lower(): v for k, v in list(globals().items()) if isinstance(v, Op)}
for _name, _op in OPS.items():
    object.__setattr__(_op, "name", _name)
    object.__setattr__(_op, "path", f"/api/v1/{_op.path or _name}")

# Our extension. Not in the table: its reply is a stream of events (codec.py) with a route of its own.
STREAM_SAMPLE = replace(SAMPLE, name="stream_sample", path="/api/v1/stream_sample", pool=Pool.STREAM)

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
    """One operation. Its constant is its name in capitals; its default route is its name.

    The route's placeholders, in Starlette's syntax, are fields of the request. The remaining fields of a GET
    or DELETE go in its query string. One with a future replies UntypedAPIFuture, and RETRIEVE_FUTURE then
    returns its `result`.
    """

    name: str
    request: type[Req]
    reply: type[Reply]
    method: str = "POST"
    route: str = ""  # after /api/v1/
    pool: Pool = Pool.REST
    retry: bool = True  # False: the caller repeats it at its own pace, so the transport must not
    result: type[Any] | None = None  # the type of its future's result

    @cached_property
    def path(self) -> str:
        return f"/api/v1/{self.route or self.name}"

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
    name: str, request: type[Req], result: type[Any], route: str = "", pool: Pool = Pool.TRAIN
) -> Op[Req, t.UntypedAPIFuture]:
    return Op(name, request, t.UntypedAPIFuture, "POST", route, pool, result=result)


_RUN = "training_runs/{training_run_id}"
_CHECKPOINT = f"{_RUN}/checkpoints/{{checkpoint_id:path}}"
_SESSION = "sessions/{session_id}"

# fmt: off
# Server and credentials
GET_CLIENT_CONFIG = Op("get_client_config", t.ClientConfigRequest, t.ClientConfigResponse, "POST",
                       "client/config", Pool.SESSION)
GET_DYNAMIC_CONFIG = Op("get_dynamic_config", t.ClientConfigRequest, t.ClientDynamicConfigResponse, "POST",
                        "client/dynamic_config", Pool.SESSION, retry=False)
GET_AUTH_TOKEN = Op("get_auth_token", t.EmptyRequest, t.AuthTokenResponse, "POST", "auth/token", Pool.SESSION)
GET_API_KEY = Op("get_api_key", t.EmptyRequest, t.ApiKeyResponse, "GET", "auth/apikey/me")
DELETE_API_KEY = Op("delete_api_key", t.EmptyRequest, NoneType, "DELETE", "auth/apikey/me")
GET_HEALTH = Op("get_health", t.EmptyRequest, t.HealthResponse, "GET", "healthz")
GET_SERVER_CAPABILITIES = Op("get_server_capabilities", t.EmptyRequest, t.GetServerCapabilitiesResponse,
                             "GET")
GET_TOKENIZER_FILE = Op("get_tokenizer_file", t.TokenizerFileRequest, bytes, "GET",  # our extension
                        "models/{model_name:path}/tokenizer/{file}")
SEND_TELEMETRY = Op("send_telemetry", t.TelemetrySendRequest, t.TelemetryResponse, "POST", "telemetry",
                    Pool.TELEMETRY)

# Sessions
CREATE_SESSION = Op("create_session", t.CreateSessionRequest, t.CreateSessionResponse, pool=Pool.SESSION)
SESSION_HEARTBEAT = Op("session_heartbeat", t.SessionHeartbeatRequest, t.SessionHeartbeatResponse,
                       pool=Pool.SESSION, retry=False)
FINISH_SESSION = Op("finish_session", t.FinishSessionRequest, NoneType, "POST", f"{_SESSION}/finish",
                    Pool.SESSION)
SEARCH_SESSIONS = Op("search_sessions", t.SessionSearchRequest, t.SessionSearchResponse, "POST",
                     "sessions/search")
LIST_SESSIONS = Op("list_sessions", t.ListSessionsRequest, t.ListSessionsResponse, "GET", "sessions")
GET_SESSION = Op("get_session", t.GetSessionRequest, t.GetSessionResponse, "GET", _SESSION)
DELETE_SESSION = Op("delete_session", t.DeleteSessionRequest, NoneType, "DELETE", _SESSION)  # our extension
ASSIGN_SESSION_PROJECT = Op("assign_session_project", t.AssignSessionProjectRequest, NoneType, "PUT",
                            f"{_SESSION}/project")
EXPORT_SESSION_TRACE = Op("export_session_trace", t.ExportSessionTraceRequest, t.SessionTraceExportResponse,
                          "GET", f"{_SESSION}/trace_export")

# Runs
CREATE_MODEL = _with_future("create_model", t.CreateModelRequest, t.CreateModelResponse)
# Used by clients up to 0.25.0
UNLOAD_MODEL = _with_future("unload_model", t.UnloadModelRequest, t.UnloadModelResponse)
GET_INFO = Op("get_info", t.GetInfoRequest, t.GetInfoResponse)
FORWARD_BACKWARD = _with_future("forward_backward", t.ForwardBackwardRequest, t.ForwardBackwardOutput)
# Used by clients up to 0.24.1; newer ones set forward_only
FORWARD = _with_future("forward", t.ForwardBackwardRequest, t.ForwardBackwardOutput)
OPTIM_STEP = _with_future("optim_step", t.OptimStepRequest, t.OptimStepResponse)
CREATE_CUSTOM_LOSS = _with_future("create_custom_loss", t.CreateCustomLossRequest, t.CreateCustomLossResponse)
LIST_TRAINING_RUNS = Op("list_training_runs", t.ListTrainingRunsRequest, t.TrainingRunsResponse, "GET",
                        "training_runs")
GET_TRAINING_RUN = Op("get_training_run", t.GetTrainingRunRequest, t.TrainingRun, "GET", _RUN)
# Our extensions; metrics are JSON lines, one per step
GET_RUN_METRICS = Op("get_run_metrics", t.GetTrainingRunRequest, bytes, "GET", f"{_RUN}/metrics")
LOG_RUN_METRICS = Op("log_run_metrics", t.LogRunMetricsRequest, NoneType, "POST", f"{_RUN}/metrics")
UPDATE_RUN = Op("update_run", t.UpdateRunRequest, NoneType, "PUT", _RUN)
DELETE_RUN = Op("delete_run", t.DeleteRunRequest, NoneType, "DELETE", _RUN)

# Checkpoints
SAVE_WEIGHTS = _with_future("save_weights", t.SaveWeightsRequest, t.SaveWeightsResponse)
SAVE_WEIGHTS_FOR_SAMPLER = _with_future("save_weights_for_sampler", t.SaveWeightsForSamplerRequest,
                                        t.SaveWeightsForSamplerResponseInternal)
SAVE_WEIGHTS_EXTERNAL = _with_future("save_weights_external", t.SaveWeightsExternalRequest,
                                     t.SaveWeightsExternalResponseInternal)
LOAD_WEIGHTS = _with_future("load_weights", t.LoadWeightsRequest, t.LoadWeightsResponse)
GET_WEIGHTS_INFO = Op("get_weights_info", t.WeightsInfoRequest, t.WeightsInfoResponse, "POST", "weights_info")
COPY_WEIGHTS = Op("copy_weights", t.CopyWeightsRequest, t.CopyWeightsResponse)
# Our extension: files of an adapter as raw bytes, piece by piece, and then a checkpoint from them
UPLOAD_WEIGHTS = Op("upload_weights", t.UploadWeightsRequest, t.UploadWeightsResponse, "PUT",
                    "uploads/{upload_id}/{file}")
IMPORT_WEIGHTS = Op("import_weights", t.ImportWeightsRequest, t.ImportWeightsResponse)
LIST_CHECKPOINTS = Op("list_checkpoints", t.ListCheckpointsRequest, t.CheckpointsListResponse, "GET",
                      f"{_RUN}/checkpoints")
LIST_USER_CHECKPOINTS = Op("list_user_checkpoints", t.ListUserCheckpointsRequest, t.CheckpointsListResponse,
                           "GET", "checkpoints")
# Before DELETE_CHECKPOINT: its placeholder would match these longer paths too.
PUBLISH_CHECKPOINT = Op("publish_checkpoint", t.CheckpointRequest, NoneType, "POST", f"{_CHECKPOINT}/publish")
UNPUBLISH_CHECKPOINT = Op("unpublish_checkpoint", t.CheckpointRequest, NoneType, "DELETE",
                          f"{_CHECKPOINT}/publish")
SET_CHECKPOINT_TTL = Op("set_checkpoint_ttl", t.SetCheckpointTTLRequest, NoneType, "PUT",
                        f"{_CHECKPOINT}/ttl")
GET_EXTERNAL_WEIGHTS_URLS = Op("get_external_weights_urls", t.CheckpointRequest,
                               t.ExternalWeightsUrlsResponse, "GET", f"{_CHECKPOINT}/external_weights_urls")
# Used by clients up to 0.35.0; a server may reply 302
GET_CHECKPOINT_ARCHIVE_URL = Op("get_checkpoint_archive_url", t.CheckpointRequest,
                                t.CheckpointArchiveUrlResponse, "GET", f"{_CHECKPOINT}/archive")
DELETE_CHECKPOINT = Op("delete_checkpoint", t.CheckpointRequest, NoneType, "DELETE", _CHECKPOINT)

# Sampling
CREATE_SAMPLING_SESSION = Op("create_sampling_session", t.CreateSamplingSessionRequest,
                             t.CreateSamplingSessionResponse, pool=Pool.SAMPLE)
JOIN_SAMPLING_SESSION = Op("join_sampling_session", t.JoinSamplingSessionRequest,
                           t.JoinSamplingSessionResponse, pool=Pool.SAMPLE)
SAMPLE = _with_future("sample", t.SampleRequest, t.SampleResponse, "asample", Pool.SAMPLE)
GET_SAMPLER = Op("get_sampler", t.GetSamplerRequest, t.GetSamplerResponse, "GET", "samplers/{sampler_id}")

# Futures
RETRIEVE_FUTURE = Op("retrieve_future", t.FutureRetrieveRequest, object, pool=Pool.RETRIEVE)
RETRIEVE_FUTURES = Op("retrieve_futures", t.FuturesRetrieveRequest, t.FuturesRetrieveResponse,
                      pool=Pool.POLL, retry=False)
CANCEL_FUTURE = Op("cancel_future", t.CancelFutureRequest, NoneType, pool=Pool.RETRIEVE, retry=False)

# Audit and billing
GET_AUDIT_LOG = Op("get_audit_log", t.AuditLogRequest, t.AuditLogResponse, "GET", "audit")
GET_BILLING_USAGE = Op("get_billing_usage", t.GetBillingUsageRequest, t.BillingUsageResponse, "GET",
                       "billing/usage/events")
GET_CURRENT_CHECKPOINT_STORAGE_USAGE = Op("get_current_checkpoint_storage_usage",
                                          t.GetCurrentCheckpointStorageUsageRequest,
                                          t.CurrentCheckpointStorageUsageResponse, "GET",
                                          "billing/usage/checkpoints/current")

OPS: dict[str, Op[Any, Any]] = {op.name: op for op in (
    GET_CLIENT_CONFIG, GET_DYNAMIC_CONFIG, GET_AUTH_TOKEN, GET_API_KEY, DELETE_API_KEY, GET_HEALTH,
    GET_SERVER_CAPABILITIES, GET_TOKENIZER_FILE, SEND_TELEMETRY, CREATE_SESSION, SESSION_HEARTBEAT,
    FINISH_SESSION, SEARCH_SESSIONS, LIST_SESSIONS, GET_SESSION, DELETE_SESSION, ASSIGN_SESSION_PROJECT,
    EXPORT_SESSION_TRACE, CREATE_MODEL, UNLOAD_MODEL, GET_INFO, FORWARD_BACKWARD, FORWARD, OPTIM_STEP,
    CREATE_CUSTOM_LOSS, LIST_TRAINING_RUNS, GET_TRAINING_RUN, GET_RUN_METRICS, LOG_RUN_METRICS,
    UPDATE_RUN, DELETE_RUN, SAVE_WEIGHTS, SAVE_WEIGHTS_FOR_SAMPLER, SAVE_WEIGHTS_EXTERNAL, LOAD_WEIGHTS,
    GET_WEIGHTS_INFO, COPY_WEIGHTS, UPLOAD_WEIGHTS, IMPORT_WEIGHTS, LIST_CHECKPOINTS,
    LIST_USER_CHECKPOINTS, PUBLISH_CHECKPOINT, UNPUBLISH_CHECKPOINT, SET_CHECKPOINT_TTL,
    GET_EXTERNAL_WEIGHTS_URLS, GET_CHECKPOINT_ARCHIVE_URL, DELETE_CHECKPOINT, CREATE_SAMPLING_SESSION,
    JOIN_SAMPLING_SESSION, SAMPLE, GET_SAMPLER, RETRIEVE_FUTURE, RETRIEVE_FUTURES, CANCEL_FUTURE,
    GET_AUDIT_LOG, GET_BILLING_USAGE, GET_CURRENT_CHECKPOINT_STORAGE_USAGE,
)}
# fmt: on

# Our extension. Not in the table: its reply is a stream of events (codec.py) with a route of its own.
STREAM_SAMPLE = replace(SAMPLE, name="stream_sample", route="", pool=Pool.STREAM)

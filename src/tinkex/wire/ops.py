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

from tinkex.types import checkpoints, config, futures, reports, sampling, sessions, training
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
) -> Op[Req, UntypedAPIFuture]:
    return Op(request, UntypedAPIFuture, "POST", path, pool, result=result)


_RUN = "training_runs/{training_run_id}"
_CHECKPOINT = f"{_RUN}/checkpoints/{{checkpoint_id:path}}"
_SESSION = "sessions/{session_id}"

# fmt: off
# -- server and credentials ------------------------------------------------------------------------------

GET_CLIENT_CONFIG = Op(config.ClientConfigRequest, config.ClientConfigResponse, "POST", "client/config",
                       Pool.SESSION)
GET_DYNAMIC_CONFIG = Op(config.ClientConfigRequest, config.ClientDynamicConfigResponse, "POST",
                        "client/dynamic_config", Pool.SESSION, retry=False)
GET_AUTH_TOKEN = Op(config.EmptyRequest, config.AuthTokenResponse, "POST", "auth/token", Pool.SESSION)
GET_API_KEY = Op(config.EmptyRequest, config.ApiKeyResponse, "GET", "auth/apikey/me")
DELETE_API_KEY = Op(config.EmptyRequest, NoneType, "DELETE", "auth/apikey/me")
GET_HEALTH = Op(config.EmptyRequest, config.HealthResponse, "GET", "healthz")
GET_SERVER_CAPABILITIES = Op(config.EmptyRequest, config.GetServerCapabilitiesResponse, "GET")
GET_TOKENIZER_FILE = Op(config.TokenizerFileRequest, bytes, "GET",  # our extension
                        "models/{model_name:path}/tokenizer/{file}")
SEND_TELEMETRY = Op(reports.TelemetrySendRequest, reports.TelemetryResponse, "POST", "telemetry",
                    Pool.TELEMETRY)

# -- sessions --------------------------------------------------------------------------------------------

CREATE_SESSION = Op(sessions.CreateSessionRequest, sessions.CreateSessionResponse, pool=Pool.SESSION)
SESSION_HEARTBEAT = Op(sessions.SessionHeartbeatRequest, sessions.SessionHeartbeatResponse,
                       pool=Pool.SESSION, retry=False)
FINISH_SESSION = Op(sessions.FinishSessionRequest, NoneType, "POST", f"{_SESSION}/finish", Pool.SESSION)
SEARCH_SESSIONS = Op(sessions.SessionSearchRequest, sessions.SessionSearchResponse, "POST", "sessions/search")
LIST_SESSIONS = Op(sessions.ListSessionsRequest, sessions.ListSessionsResponse, "GET", "sessions")
GET_SESSION = Op(sessions.GetSessionRequest, sessions.GetSessionResponse, "GET", _SESSION)
ASSIGN_SESSION_PROJECT = Op(sessions.AssignSessionProjectRequest, NoneType, "PUT", f"{_SESSION}/project")
EXPORT_SESSION_TRACE = Op(sessions.ExportSessionTraceRequest, sessions.SessionTraceExportResponse, "GET",
                          f"{_SESSION}/trace_export")

# -- runs ------------------------------------------------------------------------------------------------

CREATE_MODEL = _with_future(training.CreateModelRequest, training.CreateModelResponse)
# Used by clients up to 0.25.0
UNLOAD_MODEL = _with_future(training.UnloadModelRequest, training.UnloadModelResponse)
GET_INFO = Op(training.GetInfoRequest, training.GetInfoResponse)
FORWARD_BACKWARD = _with_future(training.ForwardBackwardRequest, ForwardBackwardOutput)
# Used by clients up to 0.24.1; newer ones set forward_only
FORWARD = _with_future(training.ForwardBackwardRequest, ForwardBackwardOutput)
OPTIM_STEP = _with_future(training.OptimStepRequest, training.OptimStepResponse)
CREATE_CUSTOM_LOSS = _with_future(training.CreateCustomLossRequest, training.CreateCustomLossResponse)
LIST_TRAINING_RUNS = Op(training.ListTrainingRunsRequest, training.TrainingRunsResponse, "GET",
                        "training_runs")
GET_TRAINING_RUN = Op(training.GetTrainingRunRequest, training.TrainingRun, "GET", _RUN)
# Our extension: JSON lines, one per step
GET_RUN_METRICS = Op(training.GetTrainingRunRequest, bytes, "GET", f"{_RUN}/metrics")

# -- checkpoints -----------------------------------------------------------------------------------------

SAVE_WEIGHTS = _with_future(checkpoints.SaveWeightsRequest, checkpoints.SaveWeightsResponse)
SAVE_WEIGHTS_FOR_SAMPLER = _with_future(checkpoints.SaveWeightsForSamplerRequest,
                                        checkpoints.SaveWeightsForSamplerResponseInternal)
SAVE_WEIGHTS_EXTERNAL = _with_future(checkpoints.SaveWeightsExternalRequest,
                                     checkpoints.SaveWeightsExternalResponseInternal)
LOAD_WEIGHTS = _with_future(checkpoints.LoadWeightsRequest, checkpoints.LoadWeightsResponse)
GET_WEIGHTS_INFO = Op(checkpoints.WeightsInfoRequest, checkpoints.WeightsInfoResponse, "POST", "weights_info")
COPY_WEIGHTS = Op(checkpoints.CopyWeightsRequest, checkpoints.CopyWeightsResponse)
LIST_CHECKPOINTS = Op(checkpoints.ListCheckpointsRequest, checkpoints.CheckpointsListResponse, "GET",
                      f"{_RUN}/checkpoints")
LIST_USER_CHECKPOINTS = Op(checkpoints.ListUserCheckpointsRequest, checkpoints.CheckpointsListResponse, "GET",
                           "checkpoints")
# Before DELETE_CHECKPOINT: its placeholder would match these longer paths too.
PUBLISH_CHECKPOINT = Op(checkpoints.CheckpointRequest, NoneType, "POST", f"{_CHECKPOINT}/publish")
UNPUBLISH_CHECKPOINT = Op(checkpoints.CheckpointRequest, NoneType, "DELETE", f"{_CHECKPOINT}/publish")
SET_CHECKPOINT_TTL = Op(checkpoints.SetCheckpointTTLRequest, NoneType, "PUT", f"{_CHECKPOINT}/ttl")
GET_EXTERNAL_WEIGHTS_URLS = Op(checkpoints.CheckpointRequest, checkpoints.ExternalWeightsUrlsResponse, "GET",
                               f"{_CHECKPOINT}/external_weights_urls")
# Used by clients up to 0.35.0; a server may reply 302
GET_CHECKPOINT_ARCHIVE_URL = Op(checkpoints.CheckpointRequest, checkpoints.CheckpointArchiveUrlResponse,
                                "GET", f"{_CHECKPOINT}/archive")
DELETE_CHECKPOINT = Op(checkpoints.CheckpointRequest, NoneType, "DELETE", _CHECKPOINT)

# -- sampling --------------------------------------------------------------------------------------------

CREATE_SAMPLING_SESSION = Op(sampling.CreateSamplingSessionRequest, sampling.CreateSamplingSessionResponse,
                             pool=Pool.SAMPLE)
JOIN_SAMPLING_SESSION = Op(sampling.JoinSamplingSessionRequest, sampling.JoinSamplingSessionResponse,
                           pool=Pool.SAMPLE)
SAMPLE = _with_future(sampling.SampleRequest, SampleResponse, "asample", Pool.SAMPLE)
GET_SAMPLER = Op(sampling.GetSamplerRequest, sampling.GetSamplerResponse, "GET", "samplers/{sampler_id}")

# -- futures ---------------------------------------------------------------------------------------------

RETRIEVE_FUTURE = Op(futures.FutureRetrieveRequest, object, pool=Pool.RETRIEVE)
RETRIEVE_FUTURES = Op(futures.FuturesRetrieveRequest, futures.FuturesRetrieveResponse, pool=Pool.POLL,
                      retry=False)
CANCEL_FUTURE = Op(futures.CancelFutureRequest, NoneType, pool=Pool.RETRIEVE, retry=False)

# -- audit and billing -----------------------------------------------------------------------------------

GET_AUDIT_LOG = Op(reports.AuditLogRequest, reports.AuditLogResponse, "GET", "audit")
GET_BILLING_USAGE = Op(reports.GetBillingUsageRequest, reports.BillingUsageResponse, "GET",
                       "billing/usage/events")
GET_CURRENT_CHECKPOINT_STORAGE_USAGE = Op(reports.GetCurrentCheckpointStorageUsageRequest,
                                          reports.CurrentCheckpointStorageUsageResponse, "GET",
                                          "billing/usage/checkpoints/current")
# fmt: on

OPS: dict[str, Op[Any, Any]] = {k.lower(): v for k, v in list(globals().items()) if isinstance(v, Op)}
for _name, _op in OPS.items():
    object.__setattr__(_op, "name", _name)
    object.__setattr__(_op, "path", f"/api/v1/{_op.path or _name}")

# Our extension. Not in the table: its reply is a stream of events (codec.py) with a route of its own.
STREAM_SAMPLE = replace(SAMPLE, name="stream_sample", path="/api/v1/stream_sample", pool=Pool.STREAM)

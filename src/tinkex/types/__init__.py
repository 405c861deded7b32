"""Every value that client, service and server exchange, by its official name.

    from tinkex import types
    types.SamplingParams(max_tokens=16)

Names are imported on first use, so that importing this package loads neither numpy nor pydantic.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tinkex.errors import RequestErrorCategory as RequestErrorCategory
    from tinkex.types.checkpoints import *  # noqa: F403
    from tinkex.types.chunks import *  # noqa: F403
    from tinkex.types.config import *  # noqa: F403
    from tinkex.types.data import *  # noqa: F403
    from tinkex.types.futures import *  # noqa: F403
    from tinkex.types.optimizers import *  # noqa: F403
    from tinkex.types.outputs import *  # noqa: F403
    from tinkex.types.params import *  # noqa: F403
    from tinkex.types.reports import *  # noqa: F403
    from tinkex.types.sampling import *  # noqa: F403
    from tinkex.types.sessions import *  # noqa: F403
    from tinkex.types.tensor import *  # noqa: F403
    from tinkex.types.training import *  # noqa: F403

_NAMES = {
    "tinkex.errors": "RequestErrorCategory",
    "tinkex.types.tensor": "TensorData TensorDtype",
    "tinkex.types.params": "AdamParams LoraConfig LossFnType SamplingParams",
    "tinkex.types.chunks": "DmelChunk EncodedTextChunk ImageAssetPointerChunk ImageChunk ModelInputChunk",
    "tinkex.types.data": """
        Datum ForwardBackwardInput LossFnInputs LossFnOutput ModelInput PromptProvenanceSpan ProvenanceSpans
        SampledProvenanceSpan
    """,
    "tinkex.types.outputs": """
        ForwardBackwardOutput NewTokens PromptAltTokens SampledSequence SampleResponse StopDetail StopReason
        TopkLogprobs
    """,
    "tinkex.types.optimizers": """
        AdamOptimizerConfig DimuonOptimizerConfig DimuonParams OptimizerConfig OptimParams
        OtherOptimizerConfig OtherOptimParams
    """,
    "tinkex.types.training": """
        CreateCustomLossRequest CreateCustomLossResponse CreateModelRequest CreateModelResponse
        CustomLossGraph CustomLossInput CustomLossInputRank CustomLossNode CustomLossNodeOp
        DeleteRunRequest ForwardBackwardRequest ForwardRequest GetInfoRequest GetInfoResponse
        GetTrainingRunRequest ListTrainingRunsRequest LogRunMetricsRequest ModelData OptimStepRequest
        OptimStepResponse TrainingRun TrainingRunsResponse UnloadModelRequest UnloadModelResponse
        UpdateRunRequest
    """,
    "tinkex.types.sampling": """
        CreateSamplingSessionRequest CreateSamplingSessionResponse GetSamplerRequest GetSamplerResponse
        JoinSamplingSessionRequest JoinSamplingSessionResponse SampleRequest
    """,
    "tinkex.types.checkpoints": """
        Checkpoint CheckpointArchiveUrlResponse CheckpointRequest CheckpointsListResponse CheckpointType
        CopyWeightsRequest CopyWeightsResponse Cursor ExternalWeightsUrlsResponse ImportWeightsRequest
        ImportWeightsResponse ListCheckpointsRequest UploadWeightsRequest UploadWeightsResponse
        ListUserCheckpointsRequest LoadWeightsRequest LoadWeightsResponse ParsedCheckpointTinkerPath
        SaveWeightsExternalRequest SaveWeightsExternalResponse SaveWeightsExternalResponseInternal
        SaveWeightsForSamplerRequest SaveWeightsForSamplerResponse SaveWeightsForSamplerResponseInternal
        SaveWeightsRequest SaveWeightsResponse SetCheckpointTTLRequest WeightsInfoRequest WeightsInfoResponse
    """,
    "tinkex.types.futures": """
        CancelFutureRequest FutureCompletion FutureFailed FutureFinished FutureRetrieveRequest
        FutureRetrieveResponse FuturesRetrieveRequest FuturesRetrieveResponse MetadataOnly ModelID
        PendingFuture RequestFailedResponse RequestID SamplingSessionFuturesTarget UntypedAPIFuture
    """,
    "tinkex.types.sessions": """
        AccessibleSearchOwner AccessScope ActiveSessionStatusQuery AssignSessionProjectRequest
        CancelledSessionStatusQuery ClientFinishedSessionStatusQuery ClientSessionFinished
        ClientSessionFinishErrored ClientSessionFinishInterrupted ClientSessionFinishReason
        ClientSessionFinishReasonType ClientSessionFinishSuccess CreateSessionRequest CreateSessionResponse
        DeleteSessionRequest ExportSessionTraceRequest FailedSessionStatusQuery FinishSessionRequest
        GetSessionRequest
        GetSessionResponse ListSessionsRequest ListSessionsResponse OwnSearchOwner SearchOwner SessionActive
        SessionCancelled SessionFailed SessionFailedReason SessionFailedRequestReason
        SessionFailedSamplingSessionReason SessionFailedTrainingRunReason SessionHeartbeatRequest
        SessionHeartbeatResponse SessionSearchCursor SessionSearchRequest SessionSearchResponse SessionStatus
        SessionStatusQuery SessionSummary SessionTraceExportResponse UserSearchOwner
    """,
    "tinkex.types.config": """
        ApiKeyDetails ApiKeyResponse AuthTokenResponse ClientConfigRequest ClientConfigResponse
        ClientDynamicConfigResponse EmptyRequest GetServerCapabilitiesResponse HealthResponse NamedDetails
        SupportedModel TokenizerFileRequest UserDetails WhoamiResponse
    """,
    "tinkex.types.reports": """
        AuditEventType AuditLogEntry AuditLogRequest AuditLogResponse BillingEventInfo BillingUsageEvent
        BillingUsageResponse BillingUsageSession CheckpointBillingEvent CurrentCheckpointStorageUsageItem
        CurrentCheckpointStorageUsageResponse GetBillingUsageRequest GetCurrentCheckpointStorageUsageRequest
        SamplingPrefillBillingEvent SamplingSampleBillingEvent StorageBillingEvent TrainingBillingEvent
        EventType GenericEvent SessionEndEvent SessionStartEvent Severity TelemetryBatch TelemetryEvent
        TelemetryResponse TelemetrySendRequest UnhandledExceptionEvent
    """,
}
_HOME = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = sorted(_HOME)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    module = _HOME.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(module), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})

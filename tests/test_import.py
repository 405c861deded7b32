"""The public names of the package: light to import, complete, with the official signatures."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import subprocess
import sys
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

import tinkex
from tinkex import types

# What the official package, 0.36.0, lists in its `__all__`.
OFFICIAL = """
    TrainingClient ServiceClient SamplingClient RestClient AdminClient APIFuture auth AdamOptimizerConfig
    AdamParams DimuonOptimizerConfig DimuonParams OptimParams Checkpoint CheckpointType Datum DmelChunk
    EncodedTextChunk ForwardBackwardOutput SampledProvenanceSpan LoraConfig ModelID ModelInput
    ModelInputChunk OptimStepRequest OptimStepResponse ParsedCheckpointTinkerPath PromptProvenanceSpan
    SampledSequence SampleRequest SampleResponse SamplingParams StopReason TensorData TensorDtype TrainingRun
    TinkerError APIError APIStatusError APITimeoutError APIConnectionError APIResponseValidationError
    RequestFailedError BadRequestError AuthenticationError BillingError PermissionDeniedError NotFoundError
    ConflictError UnprocessableEntityError RateLimitError InternalServerError ExperimentalWarning types
    LossHandle PerDatumLossFn RequestOptions Timeout __version__ __title__
"""
OFFICIAL_TYPES = """
    AccessibleSearchOwner ActiveSessionStatusQuery AdamOptimizerConfig AdamParams AuditLogEntry
    AuditLogResponse AuthTokenResponse BillingEventInfo BillingUsageEvent BillingUsageResponse
    BillingUsageSession CancelledSessionStatusQuery Checkpoint CheckpointBillingEvent CheckpointType
    CheckpointsListResponse ClientConfigRequest ClientConfigResponse ClientDynamicConfigResponse
    ClientFinishedSessionStatusQuery ClientSessionFinishErrored ClientSessionFinishInterrupted
    ClientSessionFinishReason ClientSessionFinishReasonType ClientSessionFinishSuccess
    ClientSessionFinished CopyWeightsRequest CopyWeightsResponse CreateCustomLossRequest
    CreateCustomLossResponse CreateModelRequest CreateModelResponse CreateSamplingSessionRequest
    CreateSamplingSessionResponse CreateSessionRequest CreateSessionResponse
    CurrentCheckpointStorageUsageItem CurrentCheckpointStorageUsageResponse Cursor CustomLossGraph
    CustomLossInput CustomLossInputRank CustomLossNode Datum DimuonOptimizerConfig DimuonParams DmelChunk
    EncodedTextChunk EventType ExternalWeightsUrlsResponse FailedSessionStatusQuery ForwardBackwardInput
    ForwardBackwardOutput ForwardBackwardRequest ForwardRequest FutureCompletion FutureFailed
    FutureFinished FutureRetrieveRequest FutureRetrieveResponse FuturesRetrieveRequest
    FuturesRetrieveResponse GetBillingUsageRequest GetCurrentCheckpointStorageUsageRequest GetInfoRequest
    GetInfoResponse GetSamplerResponse GetServerCapabilitiesResponse GetSessionResponse HealthResponse
    ImageAssetPointerChunk ImageChunk JoinSamplingSessionRequest JoinSamplingSessionResponse
    ListSessionsResponse LoadWeightsRequest LoadWeightsResponse LoraConfig LossFnInputs LossFnOutput
    LossFnType ModelData ModelID ModelInput ModelInputChunk OptimParams OptimStepRequest OptimStepResponse
    OptimizerConfig OwnSearchOwner ParsedCheckpointTinkerPath PromptAltTokens PromptProvenanceSpan
    ProvenanceSpans RequestErrorCategory RequestFailedResponse RequestID SampleRequest SampleResponse
    SampledProvenanceSpan SampledSequence SamplingParams SamplingPrefillBillingEvent
    SamplingSampleBillingEvent SamplingSessionFuturesTarget SaveWeightsExternalRequest
    SaveWeightsExternalResponse SaveWeightsExternalResponseInternal SaveWeightsForSamplerRequest
    SaveWeightsForSamplerResponse SaveWeightsForSamplerResponseInternal SaveWeightsRequest
    SaveWeightsResponse SearchOwner SessionActive SessionCancelled SessionEndEvent SessionFailed
    SessionFailedReason SessionFailedRequestReason SessionFailedSamplingSessionReason
    SessionFailedTrainingRunReason SessionHeartbeatRequest SessionHeartbeatResponse SessionSearchCursor
    SessionSearchRequest SessionSearchResponse SessionStartEvent SessionStatus SessionStatusQuery
    SessionSummary Severity StopReason StorageBillingEvent SupportedModel TelemetryBatch TelemetryEvent
    TelemetryResponse TelemetrySendRequest TensorData TensorDtype TrainingBillingEvent TrainingRun
    TrainingRunsResponse UnhandledExceptionEvent UnloadModelRequest UnloadModelResponse UntypedAPIFuture
    UserSearchOwner WeightsInfoResponse WhoamiResponse
"""
# What its types can do: attributes and methods that programs call.
OFFICIAL_HELPERS = {
    "ModelInput": "chunks from_ints to_ints empty append append_int length",
    "EncodedTextChunk": "tokens type length",
    "ImageChunk": "length",
    "ImageAssetPointerChunk": "length",
    "DmelChunk": "length",
    "TensorData": "from_numpy from_torch from_torch_sparse to_numpy to_torch tolist data dtype shape",
    "Datum": "with_provenance model_input loss_fn_inputs",
    "SampleResponse": "sequences prompt_logprobs prompt_logprobs_np topk_prompt_logprobs",
    "SampledSequence": "tokens tokens_np logprobs logprobs_np topk_logprobs topk_logprobs_np",
    "ParsedCheckpointTinkerPath": "from_tinker_path",
}
POSIX = {"fcntl", "grp", "pwd", "resource", "termios", "tty"}  # Python has these on Unix alone
HEAVY = "numpy pydantic torch transformers pyqwest asyncio ssl orjson google.protobuf concurrent.futures"


def in_fresh_interpreter(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_the_package_loads_nothing_heavy() -> None:
    loaded = in_fresh_interpreter(
        f"import sys, tinkex, tinkex.types; print([m for m in {HEAVY.split()!r} if m in sys.modules])"
    )
    assert loaded == "[]"


@pytest.mark.slow
def test_using_a_client_loads_neither_torch_nor_transformers() -> None:
    loaded = in_fresh_interpreter(
        "import sys, tinkex\n"
        "[getattr(tinkex, name) for name in tinkex.__all__ if name != 'auth']\n"
        "print([m for m in ('torch', 'transformers', 'tokenizers') if m in sys.modules])"
    )
    assert loaded == "[]"


@pytest.mark.parametrize("name", OFFICIAL.split())
def test_every_official_name_is_there(name: str) -> None:
    assert getattr(tinkex, name) is not None
    assert name in tinkex.__all__
    assert name in dir(tinkex)


@pytest.mark.parametrize("name", OFFICIAL_TYPES.split())
def test_every_official_type_is_there(name: str) -> None:
    assert getattr(types, name) is not None


@pytest.mark.parametrize("name", OFFICIAL_HELPERS)
def test_every_official_helper_of_a_type_is_there(name: str) -> None:
    kind = getattr(types, name)
    fields = getattr(kind, "__annotations__", {}) | getattr(kind, "__dataclass_fields__", {})
    assert [
        each for each in OFFICIAL_HELPERS[name].split() if not hasattr(kind, each) and each not in fields
    ] == []


def test_a_loss_handle_has_the_official_attributes() -> None:
    given = {field.name for field in dataclasses.fields(tinkex.LossHandle)}
    wanted = {"name", "inputs", "session_id", "graph", "loss_id", "key", "input_names"}
    assert {each for each in wanted if each not in given and not hasattr(tinkex.LossHandle, each)} == set()


def test_the_auth_module_has_the_official_functions() -> None:
    for name in ("get_tinker_token", "tinker_has_credentials", "raise_if_tinker_not_accessible"):
        assert callable(getattr(tinkex.auth, name))


def test_every_name_we_list_resolves() -> None:
    for module in (tinkex, types):
        for name in module.__all__:
            getattr(module, name)
        with pytest.raises(AttributeError, match="nonsense"):
            module.nonsense


def test_every_error_is_one_of_ours() -> None:
    from tinkex import errors

    kinds = [kind for kind in vars(errors).values() if inspect.isclass(kind) and issubclass(kind, Exception)]
    for kind in kinds:
        assert issubclass(kind, (tinkex.TinkerError, Warning)), kind
        assert getattr(tinkex, kind.__name__) is kind


# -- signatures --------------------------------------------------------------------------------------------

NEEDED = object()  # a parameter without a default
KEYWORD = "*"  # those after it were keyword-only in the official SDK too

FORWARD = {"data": NEEDED, "loss_fn": NEEDED, "loss_fn_config": None}
SAVED = {"path": NEEDED, "weights_access_token": None}
RESUMED = {"path": NEEDED, "base_model": None, "user_metadata": None, "weights_access_token": None}
SAMPLER = {"retry_config": None, "record_stability_info": False}
# The official SDK 0.36.0: method -> (has an async twin, parameters in order with their defaults).
SERVICE: dict[str, tuple[bool, dict[str, Any]]] = {
    "__init__": (False, {
        "user_metadata": None, "project_id": None, KEYWORD: None, "display_name": None, "base_url": None,
        "api_key": None, "default_headers_overrides": None,
    }),
    "get_console_url": (False, {}),
    "get_server_capabilities": (True, {}),
    "create_lora_training_client": (True, {
        "base_model": NEEDED, "rank": 32, "seed": None, "train_mlp": True, "train_attn": True,
        "train_unembed": True, "user_metadata": None, "optimizer": None,
    }),
    "copy_weights": (False, {
        "path": NEEDED, KEYWORD: None, "ttl_seconds": None, "weights_access_token": None,
    }),
    "create_training_client_from_state": (True, {**RESUMED, "optimizer": None}),
    "create_training_client_from_state_with_optimizer": (True, RESUMED),
    "create_sampling_client": (True, {"model_path": None, "base_model": None, **SAMPLER}),
    "create_custom_loss": (False, {"fn": NEEDED, "input_ranks": NEEDED}),
    "create_rest_client": (False, {}),
    "get_telemetry": (False, {}),
}  # fmt: skip
TRAINING: dict[str, tuple[bool, dict[str, Any]]] = {
    "get_console_url": (False, {}),
    "forward": (True, FORWARD),
    "forward_backward": (True, FORWARD),
    "forward_backward_custom": (
        True,
        {"data": NEEDED, "loss_fn": NEEDED, KEYWORD: None, "loss_type_input": None},
    ),
    "optim_step": (True, {"optim_params": None, KEYWORD: None, "adam_params": None}),
    "save_state": (True, {"name": NEEDED, "ttl_seconds": None, "overwrite": False, "user_metadata": None}),
    "load_state": (True, SAVED),
    "load_state_with_optimizer": (True, SAVED),
    "save_weights_for_sampler": (True, {"name": NEEDED, "ttl_seconds": None, "user_metadata": None}),
    "save_weights_external": (True, {"name": NEEDED, "ttl_seconds": None, "age_encryption_recipients": None}),
    "get_info": (True, {}),
    "get_tokenizer": (False, {}),
    "create_sampling_client": (True, {"model_path": NEEDED, **SAMPLER}),
    "save_weights_and_get_sampling_client": (True, {"name": None, **SAMPLER}),
    "get_telemetry": (False, {}),
}
SAMPLING: dict[str, tuple[bool, dict[str, Any]]] = {
    "sample": (True, {
        "prompt": NEEDED, "num_samples": NEEDED, "sampling_params": NEEDED, "include_prompt_logprobs": False,
        "topk_prompt_logprobs": 0, "topk_sample_logprobs": 0, "target_prompt_logprobs": None,
        "prompt_alt_tokens_k": 0, "prompt_logprobs_last_n": None,
    }),
    "compute_logprobs": (True, {"prompt": NEEDED, "prompt_logprobs_last_n": None}),
    "get_tokenizer": (False, {}),
    "get_base_model": (True, {}),
    "get_telemetry": (False, {}),
    "get_sampler_handle": (False, {}),
    "from_sampler_handle": (False, {"handle": NEEDED, KEYWORD: None, "api_key": None}),
    "on_queue_state_change": (False, {"queue_state": NEEDED, "queue_state_reason": NEEDED}),
}  # fmt: skip
METHODS = [
    (kind, name + suffix, parameters)
    for kind, table in (
        ("ServiceClient", SERVICE),
        ("TrainingClient", TRAINING),
        ("SamplingClient", SAMPLING),
    )
    for name, (twin, parameters) in table.items()
    for suffix in (("", "_async") if twin else ("",))
]


@pytest.mark.parametrize(("kind", "name", "parameters"), METHODS, ids=[f"{k}.{n}" for k, n, _ in METHODS])
def test_the_official_parameters_are_taken_with_their_defaults(
    kind: str, name: str, parameters: dict[str, Any]
) -> None:
    method = getattr(getattr(tinkex, kind), name)
    assert inspect.iscoroutinefunction(method) is name.endswith("_async")
    ours = {key: value for key, value in inspect.signature(method).parameters.items() if key != "self"}
    positional = [key for key, value in ours.items() if value.kind is value.POSITIONAL_OR_KEYWORD]
    names = [key for key in parameters if key != KEYWORD]
    before = list(parameters).index(KEYWORD) if KEYWORD in parameters else len(parameters)
    assert positional == names[:before], "in the official order, and nothing of ours between them"
    for key in names:
        default = inspect.Parameter.empty if parameters[key] is NEEDED else parameters[key]
        assert ours[key].default == default, key
    added = [value for key, value in ours.items() if key not in names]
    assert all(value.default is not value.empty or value.kind is value.VAR_KEYWORD for value in added)


def test_close_takes_what_the_official_one_takes() -> None:
    """Its status may be left out here: it is "success" then."""
    parameters = inspect.signature(tinkex.ServiceClient.close).parameters
    assert {name: given.default for name, given in list(parameters.items())[1:]} == {
        "status": "success", "detail": None,
    }  # fmt: skip


@pytest.mark.parametrize("kind", ["RestClient", "AdminClient"])
def test_a_client_of_its_own_takes_a_url_and_a_key(kind: str) -> None:
    parameters = inspect.signature(getattr(tinkex, kind)).parameters
    for name in ("base_url", "api_key"):
        assert parameters[name].kind is inspect.Parameter.KEYWORD_ONLY
        assert parameters[name].default is None


def test_types_are_told_to_type_checkers() -> None:
    assert (resources.files("tinkex") / "py.typed").is_file()


def test_the_retry_config_has_the_official_fields() -> None:
    fields = inspect.signature(tinkex.RetryConfig).parameters
    assert list(fields) == [
        "max_connections", "progress_timeout", "retry_delay_base", "retry_delay_max", "jitter_factor",
        "enable_retry_logic", "enable_stuck_detection", "retryable_exceptions",
    ]  # fmt: skip


@pytest.mark.slow
def test_nothing_that_windows_lacks_is_imported_with_a_module() -> None:
    """`import tinkex.models` must not fail there; what locks a file imports `fcntl` when it does."""
    found = [
        f"{path}:{node.lineno}"
        for path in Path(tinkex.__file__).parent.rglob("*.py")
        for node in ast.parse(path.read_text()).body
        if path.name != "sandbox_child.py"  # a program of its own, for Linux's namespaces
        and isinstance(node, ast.Import | ast.ImportFrom)
        and {getattr(node, "module", None), *(name.name for name in node.names)} & POSIX
    ]
    assert found == []

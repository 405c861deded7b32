"""Replies and results of every shape, which record.py shows to the official SDKs and the tests compare."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import numpy as np

from tinkex import types as t

WHEN = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


def floats(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def tensor(array: Any, dtype: Any) -> t.TensorData:
    return t.TensorData.from_numpy(np.array(array, dtype))


def logprobs(*rows: list[float]) -> list[dict[str, t.TensorData]]:
    return [{"logprobs": tensor(row, np.float32)} for row in rows]


OUTPUTS: dict[str, t.ForwardBackwardOutput] = {
    "output-plain": t.ForwardBackwardOutput(
        "TorchLossReturn", logprobs([-0.5, -1.25], [-2.0]), {"loss:sum": 3.75, "tokens:sum": 3.0}
    ),
    "output-two-dimensional": t.ForwardBackwardOutput(
        "TorchLossReturn",
        [
            {"logprobs": tensor([[-1, -2, -3], [-4, -5, -6]], np.float32)},
            {"logprobs": tensor([[-7, -8, -9]], np.float32)},
        ],
        {"loss:sum": 1.0},
    ),
    "output-mixed-shapes": t.ForwardBackwardOutput(
        "TorchLossReturn",
        [*logprobs([-1.0, -2.0]), {"logprobs": tensor([[-1, -2], [-3, -4]], np.float32)}, *logprobs([-5.0])],
        {"loss:sum": -2.5},
    ),
    "output-two-fields": t.ForwardBackwardOutput(
        "TorchLossReturn",
        [{"logprobs": tensor([-1.5], np.float32), "rank": tensor([7], np.int64)}],
        {"loss:sum": 0.0},
    ),
    "output-empty": t.ForwardBackwardOutput("ArrayRecord", [], {"loss:sum": 0.0}),
}

TOPK = t.TopkLogprobs(
    np.array([[0, 0], [5, 0], [7, 8]], np.int32),
    np.array([[-99999.0, -99999.0], [-0.5, -99999.0], [-1.0, -2.0]], np.float32),
)
SAMPLES: dict[str, t.SampleResponse] = {
    "samples-1": t.SampleResponse([t.SampledSequence("stop", "q0", ints(5, 6, 7), floats(-0.5, -1, -2))]),
    "samples-2": t.SampleResponse(
        [
            t.SampledSequence("length", "q0", ints(9), floats(-0.25)),
            t.SampledSequence("stop", "q1", ints(3, 4), floats(-1.5, -2.5)),
        ],
        prompt_logprobs_np=floats(float("nan"), -1.0, -2.0),
        topk_prompt_logprobs_np=TOPK,
        prompt_cache_hit_tokens=2,
    ),
    "samples-rich": t.SampleResponse(
        [t.SampledSequence("stop", "q0", ints(5, 6, 7), floats(-0.5, -1, -2), TOPK)],
        prompt_logprobs_np=floats(float("nan"), -1.0, -2.0),
        target_prompt_logprobs=tensor([[-1, -2], [-3, 0]], np.float32),
        prompt_alt_tokens=t.PromptAltTokens(
            tensor([[1, 2], [3, 4]], np.int64), tensor([[-1, -2], [-3, -4]], np.float32)
        ),
    ),
    "samples-sparse-target": t.SampleResponse(
        [t.SampledSequence("stop", "q0", ints(5), floats(-0.5))],
        prompt_logprobs_np=floats(float("nan"), -1.0, -2.0),
        target_prompt_logprobs=t.TensorData(floats(-1.5), "float32", [2, 4], [0, 0, 1], [3]),
    ),
    "samples-no-logprobs": t.SampleResponse([t.SampledSequence("length", "q0", ints(1, 2))]),
}

_CHECKPOINT = t.Checkpoint(
    checkpoint_id="weights/a",
    checkpoint_type="training",
    time=WHEN,
    tinker_path="tinker://S:train:0/weights/a",
    size_bytes=10,
    expires_at=WHEN,
)
_CURSOR = t.Cursor(offset=0, limit=20, total_count=1)
_RUN = t.TrainingRun(
    training_run_id="S:train:0",
    base_model="m",
    model_owner="me",
    is_lora=True,
    lora_rank=8,
    last_request_time=WHEN,
    last_checkpoint=_CHECKPOINT,
    user_metadata={"a": "b"},
)
_EVENTS = [
    t.TrainingBillingEvent(token_count=5),
    t.SamplingPrefillBillingEvent(cached=True, token_count=5),
    t.SamplingSampleBillingEvent(token_count=5),
    t.CheckpointBillingEvent(count=5),
    t.StorageBillingEvent(gigabyte_hours=0.5),
]
_STATUSES = [
    t.SessionFailed(
        category="user", reason=t.SessionFailedTrainingRunReason(training_run_id="r"), message="bad luck"
    ),
    t.SessionCancelled(),
    t.ClientSessionFinished(reason=t.ClientSessionFinishErrored(), detail="boom"),
    t.SessionActive(),
]

# One or more of each reply, by class: the official class of the same name must read it.
REPLIES: list[Any] = [
    t.ClientConfigResponse(fwdbwd_max_chunk_len=7),
    t.ClientDynamicConfigResponse(sample_cancel_enabled=True),
    t.AuthTokenResponse(jwt="a.b.c"),
    t.HealthResponse(),
    t.GetServerCapabilitiesResponse(
        supported_models=[
            t.SupportedModel(model_name="m", max_context_length=9, trainable=True),
            t.SupportedModel(),
        ]
    ),
    t.TelemetryResponse(),
    t.CreateSessionResponse(session_id="S", warning_message="careful"),
    t.SessionHeartbeatResponse(),
    t.ListSessionsResponse(sessions=["S"]),
    t.GetSessionResponse(training_run_ids=["r"], sampler_ids=[], display_name="d"),
    t.SessionSearchResponse(
        sessions=[
            t.SessionSummary(
                session_id="S", created_at=WHEN, owner="o", project_id="p", status=status, checkpoints_count=1
            )
            for status in _STATUSES
        ],
        next_cursor=t.SessionSearchCursor(last_created_at=WHEN, last_session_id="S"),
    ),
    t.UntypedAPIFuture(request_id="r", sample_sequence_ids=["a", "b"]),
    t.CreateModelResponse(model_id="S:train:0"),
    t.UnloadModelResponse(model_id="S:train:0"),
    t.GetInfoResponse(
        model_id="S:train:0",
        model_data=t.ModelData(model_name="m", tokenizer_id="m"),
        optimizer_config=t.DimuonOptimizerConfig(),
        is_lora=True,
    ),
    t.OptimStepResponse(metrics={"lr": 0.5, "bad": float("nan")}),
    t.OptimStepResponse(),
    t.SaveWeightsResponse(path="tinker://S:train:0/weights/a"),
    t.SaveWeightsForSamplerResponse(path="tinker://S:train:0/sampler_weights/a"),
    t.SaveWeightsForSamplerResponseInternal(sampling_session_id="S:sample:0"),
    t.SaveWeightsExternalResponseInternal(path="tinker://S:train:0/external_weights/a", size_bytes=3),
    t.LoadWeightsResponse(path="tinker://S:train:0/weights/a"),
    t.WeightsInfoResponse(base_model="m", is_lora=True, lora_rank=8, train_mlp=False),
    t.CopyWeightsResponse(tinker_path="tinker://S:train:1/weights/a"),
    t.CheckpointsListResponse(checkpoints=[_CHECKPOINT], cursor=_CURSOR),
    t.TrainingRunsResponse(training_runs=[_RUN], cursor=_CURSOR),
    t.ExternalWeightsUrlsResponse(urls={"a": "http://x"}, expires=WHEN),
    t.CreateSamplingSessionResponse(sampling_session_id="S:sample:0"),
    t.JoinSamplingSessionResponse(client_counter=3),
    t.GetSamplerResponse(sampler_id="S:sample:0", base_model="m"),
    t.FuturesRetrieveResponse(
        completions=[
            t.FutureFinished(request_id="a", response_payload_uncompressed_size=5),
            t.FutureFailed(request_id="b"),
        ],
        cursor=4,
    ),
    t.RequestFailedResponse(error="no", category=t.RequestErrorCategory.User),
    t.CreateCustomLossResponse(loss_id="L"),
    t.AuditLogResponse(entries=[t.AuditLogEntry(timestamp=WHEN, event="e", event_details={"x": 1})]),
    t.BillingUsageResponse(
        data=[t.BillingUsageEvent(bucket_start=WHEN, bucket_end=WHEN, event_info=e) for e in _EVENTS],
        sessions={"S": t.BillingUsageSession(user_metadata={"a": "b"})},
    ),
    t.CurrentCheckpointStorageUsageResponse(
        data=[t.CurrentCheckpointStorageUsageItem(checkpoint_count=1, size_bytes=2, size_gigabytes=0.5)]
    ),
]

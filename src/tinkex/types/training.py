"""Training runs: creation, passes, steps, uploaded losses, and listing.

A pass holds arrays and is a dataclass: no pydantic on the hot path.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import Field, JsonValue, field_serializer, model_serializer, model_validator
from pydantic import SerializerFunctionWrapHandler as Handler

from tinkex.types.base import AnyJson, Count, Plain, ReplyModel, RequestModel, RunName, RunTags
from tinkex.types.checkpoints import Checkpoint, Cursor
from tinkex.types.data import ForwardBackwardInput
from tinkex.types.optimizers import AdamOptimizerConfig, OptimizerConfig, OptimParams
from tinkex.types.params import AdamParams, LoraConfig
from tinkex.types.sessions import AccessScope

CustomLossInputRank = Literal[0, 1, 2]  # a scalar, one value per token, or several per token
CustomLossNodeOp = Literal["placeholder", "get_attr", "call_function", "call_method", "call_module", "output"]


class CreateModelRequest(RequestModel):
    session_id: str
    model_seq_id: Count
    base_model: str
    user_metadata: Mapping[str, JsonValue] | None = None
    lora_config: Annotated[LoraConfig, Plain] | None = None
    optimizer_config: OptimizerConfig = AdamOptimizerConfig()
    name: RunName | None = None  # our extension
    tags: RunTags | None = None
    type: Literal["create_model"] = "create_model"


class CreateModelResponse(ReplyModel):
    model_id: str
    type: Literal["create_model"] = "create_model"


class UnloadModelRequest(RequestModel):  # sent by clients up to 0.25.0
    model_id: str
    type: Literal["unload_model"] = "unload_model"


class UnloadModelResponse(ReplyModel):
    model_id: str
    type: Literal["unload_model"] | None = None


class GetInfoRequest(RequestModel):
    model_id: str
    type: Literal["get_info"] = "get_info"


class ModelData(ReplyModel):
    arch: str | None = None
    model_name: str | None = None
    tokenizer_id: str | None = None


class GetInfoResponse(ReplyModel):
    type: Literal["get_info"] | None = None
    model_data: ModelData
    model_id: str
    optimizer_config: OptimizerConfig = AdamOptimizerConfig()
    is_lora: bool | None = None
    lora_rank: int | None = None
    model_name: str | None = None


@dataclass(frozen=True)
class ForwardBackwardRequest:
    """One pass of a run, or a chunk of one; `forward_only` computes no gradients."""

    forward_backward_input: ForwardBackwardInput
    model_id: str
    seq_id: int
    forward_only: bool = False


@dataclass(frozen=True)
class ForwardRequest:
    """The official name for a pass without gradients; ours is ForwardBackwardRequest(forward_only=True)."""

    forward_input: ForwardBackwardInput
    model_id: str
    seq_id: int | None = None


class OptimStepRequest(RequestModel):
    """One optimizer step of a run. On the wire `optim_params` is `adam_params` or `optimizer_params`."""

    optim_params: OptimParams
    model_id: str
    seq_id: Count | None = None
    type: Literal["optim_step"] = "optim_step"

    @model_validator(mode="before")
    @classmethod
    def _from_wire(cls, data: AnyJson | RequestModel) -> Any:
        if not isinstance(data, dict) or "optim_params" in data:
            return data
        data = dict(data)
        adam, other = data.pop("adam_params", None), data.pop("optimizer_params", None)
        params = adam if other is None else other
        return data if params is None else {**data, "optim_params": params}

    @model_serializer(mode="wrap")
    def _to_wire(self, handler: Handler) -> dict[str, Any]:
        fields = handler(self)
        name = "adam_params" if isinstance(self.optim_params, AdamParams) else "optimizer_params"
        return {**{k: v for k, v in fields.items() if k != "optim_params"}, name: fields["optim_params"]}


class OptimStepResponse(ReplyModel):
    """The metrics of a step."""

    metrics: dict[str, float] | None = None

    @field_serializer("metrics", when_used="json")
    def _finite(self, metrics: dict[str, float] | None) -> dict[str, float] | None:
        # JSON has no NaN, and official clients reject null metrics.
        return metrics and {name: n for name, n in metrics.items() if math.isfinite(n)}


# "active" is what older servers say of a run that is running or idle.
RunStatus = Literal["active", "running", "idle", "finished", "interrupted", "failed"]


class TrainingRun(ReplyModel):
    """A training run in a list."""

    training_run_id: str
    base_model: str
    model_owner: str
    is_lora: bool
    corrupted: bool = False
    lora_rank: int | None = None
    last_request_time: datetime
    last_checkpoint: Checkpoint | None = None
    last_sampler_checkpoint: Checkpoint | None = None
    user_metadata: dict[str, str] | None = None
    status: RunStatus | None = None  # of servers that say
    status_reason: str | None = None  # why it failed, was interrupted or waits
    name: str | None = None  # our extension, as all below
    tags: list[str] | None = None
    steps: int | None = None
    tokens: int | None = None


class ListTrainingRunsRequest(RequestModel):
    limit: Count = 20
    offset: Count = 0
    access_scope: AccessScope = "owned"
    project_id: str | None = None


class TrainingRunsResponse(ReplyModel):
    training_runs: list[TrainingRun]
    cursor: Cursor


class GetTrainingRunRequest(RequestModel):
    training_run_id: str
    access_scope: AccessScope = "owned"


class LogRunMetricsRequest(RequestModel):  # our extension
    training_run_id: str
    metrics: dict[Annotated[str, Field(min_length=1, max_length=120)], float] = Field(max_length=200)
    step: Count | None = None  # None: the number of steps taken so far


class UpdateRunRequest(RequestModel):  # our extension; None changes nothing
    training_run_id: str
    name: RunName | None = None
    tags: RunTags | None = None


class DeleteRunRequest(RequestModel):  # our extension
    training_run_id: str
    checkpoints: bool = False  # delete its checkpoints too; else it must have none


class CustomLossInput(RequestModel):
    """A parameter of a custom loss: "logprobs" first, then keys of loss_fn_inputs."""

    name: str
    rank: CustomLossInputRank


class CustomLossNode(RequestModel):
    """One operation, in order of execution; arguments name earlier nodes as {"ref": name}."""

    op: CustomLossNodeOp
    name: str
    target: str
    args: list[Any] = Field(default_factory=list)
    kwargs: dict[str, Any] = Field(default_factory=dict)


class CustomLossGraph(RequestModel):
    large = frozenset({"nodes"})

    format: Literal[1] = 1
    nodes: list[CustomLossNode]


class CreateCustomLossRequest(RequestModel):
    large = frozenset({"graph"})

    session_id: str
    custom_loss_seq_id: Count
    name: str
    inputs: list[CustomLossInput] = Field(max_length=16)
    graph: CustomLossGraph
    type: Literal["create_custom_loss"] = "create_custom_loss"


class CreateCustomLossResponse(ReplyModel):  # the id is for loss_fn_config
    loss_id: str
    type: Literal["create_custom_loss"] = "create_custom_loss"

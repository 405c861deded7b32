"""Sampling sessions and sample requests.

A sample request holds its prompt as arrays and is a dataclass: no pydantic on the hot path.
"""

from __future__ import annotations

from dataclasses import field
from typing import Literal

from tinkex.errors import InvalidInputError
from tinkex.strict import strict
from tinkex.types.base import Count, ReplyModel, RequestModel
from tinkex.types.data import ModelInput
from tinkex.types.futures import PendingFuture, RequestFailedResponse
from tinkex.types.outputs import NewTokens, SampleResponse
from tinkex.types.params import SamplingParams
from tinkex.types.tensor import TensorData

CLONE_STRIDE = 1_000_000_000  # seq ids reserved for each copy of a sampler


class CreateSamplingSessionRequest(RequestModel):  # on a base model, or on a published adapter
    session_id: str
    sampling_session_seq_id: Count
    base_model: str | None = None
    model_path: str | None = None
    type: Literal["create_sampling_session"] = "create_sampling_session"


class CreateSamplingSessionResponse(ReplyModel):
    type: Literal["create_sampling_session"] = "create_sampling_session"
    sampling_session_id: str


class JoinSamplingSessionRequest(RequestModel):  # get a number for a clone of a sampler
    sampling_session_id: str
    type: Literal["join_sampling_session"] = "join_sampling_session"


class JoinSamplingSessionResponse(ReplyModel):
    type: Literal["join_sampling_session"] = "join_sampling_session"
    client_counter: int


class GetSamplerRequest(RequestModel):
    sampler_id: str


class GetSamplerResponse(ReplyModel):
    sampler_id: str
    base_model: str
    model_path: str | None = None


_COUNTS = (
    ("num_samples", 1), ("topk_prompt_logprobs", 0), ("topk_sample_logprobs", 0), ("prompt_alt_tokens_k", 0),
)  # fmt: skip


@strict
class SampleRequest:
    """Sample `num_samples` continuations of a prompt, and optionally score the prompt."""

    prompt: ModelInput
    sampling_params: SamplingParams = field(default_factory=SamplingParams)
    num_samples: int = 1
    sampling_session_id: str | None = None
    seq_id: int | None = None
    base_model: str | None = None  # this or model_path, for servers without sampling sessions
    model_path: str | None = None
    prompt_logprobs: bool = False
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0
    target_prompt_logprobs: TensorData | None = None
    prompt_alt_tokens_k: int = 0
    prompt_logprobs_last_n: int | None = None
    record_stability_info: bool = False

    def __post_init__(self) -> None:
        for name, low in _COUNTS:
            value = getattr(self, name)
            if type(value) is not int or not low <= value < 2**63:
                _at_least(self, name, low)
        if self.prompt_logprobs_last_n is not None:
            _at_least(self, "prompt_logprobs_last_n", 1)
        if self.seq_id is not None:
            _at_least(self, "seq_id", 0)
        if type(self.prompt_logprobs) is not bool:
            raise InvalidInputError(
                f"prompt_logprobs must be True or False, got {self.prompt_logprobs!r:.80}"
            )
        if type(self.prompt) is not ModelInput:
            raise InvalidInputError(
                f"prompt must be a ModelInput, got {type(self.prompt).__name__}; "
                "ModelInput.from_ints(tokens) makes one"
            )
        if type(self.sampling_params) is not SamplingParams:
            given = type(self.sampling_params).__name__
            raise InvalidInputError(f"sampling_params must be SamplingParams, got {given}")
        targets = self.target_prompt_logprobs
        if targets is not None and not isinstance(targets, TensorData):
            given = type(targets).__name__
            raise InvalidInputError(f"target_prompt_logprobs must be TensorData, got {given}")


def _at_least(request: SampleRequest, name: str, low: int) -> None:
    value = getattr(request, name)
    if type(value) is not int and hasattr(value, "__index__") and not isinstance(value, bool):
        value = int(value)  # a numpy integer
        object.__setattr__(request, name, value)
    if type(value) is not int or not low <= value < 2**63:
        raise InvalidInputError(f"{name} must be a whole number from {low} on, got {value!r}")


# The events of a streamed sample; the last event is one of the last two types.
SampleEvent = NewTokens | PendingFuture | SampleResponse | RequestFailedResponse

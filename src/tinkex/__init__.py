"""Tinkex: the Tinker training API as an open system you run yourself.

The public names, and nothing else. Each is imported on first use, so that importing the package takes
milliseconds.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tinkex._version import __version__

__title__ = "tinkex"

_CLIENT = {
    "ServiceClient": "tinkex.embedded",
    "TrainingClient": "tinkex.client.training",
    "SamplingClient": "tinkex.client.sampling",
    "RestClient": "tinkex.client.rest",
    "AdminClient": "tinkex.client.admin",
    "APIFuture": "tinkex.client.future",
    "LossHandle": "tinkex.client.custom_loss",
    "PerDatumLossFn": "tinkex.client.custom_loss",
    "RecoveryPolicy": "tinkex.recovery",
    "RequestOptions": "tinkex.config",
    "RetryConfig": "tinkex.client.retry",
    "SampleStream": "tinkex.client.streaming",
    "Timeout": "tinkex.config",
    "Timeouts": "tinkex.config",
    "render_chat": "tinkex.tokenizers",
}
_TYPES = (
    "AdamOptimizerConfig", "AdamParams", "Checkpoint", "CheckpointType", "Datum", "DimuonOptimizerConfig",
    "DimuonParams", "DmelChunk", "EncodedTextChunk", "ForwardBackwardOutput", "ImageChunk", "LoraConfig",
    "ModelID", "ModelInput", "ModelInputChunk", "NewTokens", "OptimParams", "OptimStepRequest",
    "OptimStepResponse",
    "ParsedCheckpointTinkerPath", "PromptProvenanceSpan", "SampleRequest", "SampleResponse",
    "SampledProvenanceSpan", "SampledSequence", "SamplingParams", "StopReason", "TensorData", "TensorDtype",
    "TrainingRun",
)  # fmt: skip
_ERRORS = (
    "APIConnectionError", "APIError", "APIResponseValidationError", "APIStatusError", "APITimeoutError",
    "AuthenticationError", "BadRequestError", "BillingError", "ClientClosedError", "ConflictError",
    "CredentialError", "ExperimentalWarning", "ExpiredError", "ForkedClientError", "InternalServerError",
    "InvalidInputError", "ModelError", "NotFoundError", "PassIncompleteError", "PermissionDeniedError",
    "RateLimitError", "RecoveryFailedError", "RequestErrorCategory", "RequestFailedError",
    "ResultTimeoutError", "RunLostError", "StreamBrokenError", "StreamingUnsupportedError", "TinkerError",
    "TokenizerError", "UnprocessableEntityError",
)  # fmt: skip
_HOME: dict[str, str] = {
    **_CLIENT,
    **dict.fromkeys(_TYPES, "tinkex.types"),
    **dict.fromkeys(_ERRORS, "tinkex.errors"),
}
_MODULES = ("auth", "errors", "recovery", "regularizers", "types")

# Type checkers read the imports at the end of this file.
__all__ = ["__title__", "__version__", *_HOME, *_MODULES]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"tinkex.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'tinkex' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_HOME[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


if TYPE_CHECKING:
    from tinkex import auth as auth
    from tinkex import errors as errors
    from tinkex import recovery as recovery
    from tinkex import regularizers as regularizers
    from tinkex import types as types
    from tinkex.client.admin import AdminClient as AdminClient
    from tinkex.client.custom_loss import LossHandle as LossHandle
    from tinkex.client.custom_loss import PerDatumLossFn as PerDatumLossFn
    from tinkex.client.future import APIFuture as APIFuture
    from tinkex.client.rest import RestClient as RestClient
    from tinkex.client.retry import RetryConfig as RetryConfig
    from tinkex.client.sampling import SamplingClient as SamplingClient
    from tinkex.client.streaming import SampleStream as SampleStream
    from tinkex.client.training import TrainingClient as TrainingClient
    from tinkex.config import RequestOptions as RequestOptions
    from tinkex.config import Timeout as Timeout
    from tinkex.config import Timeouts as Timeouts
    from tinkex.embedded import ServiceClient as ServiceClient
    from tinkex.errors import *  # noqa: F403
    from tinkex.recovery import RecoveryPolicy as RecoveryPolicy
    from tinkex.tokenizers import render_chat as render_chat
    from tinkex.types.checkpoints import Checkpoint as Checkpoint
    from tinkex.types.checkpoints import CheckpointType as CheckpointType
    from tinkex.types.checkpoints import ParsedCheckpointTinkerPath as ParsedCheckpointTinkerPath
    from tinkex.types.data import Datum as Datum
    from tinkex.types.data import DmelChunk as DmelChunk
    from tinkex.types.data import EncodedTextChunk as EncodedTextChunk
    from tinkex.types.data import ImageChunk as ImageChunk
    from tinkex.types.data import ModelInput as ModelInput
    from tinkex.types.data import ModelInputChunk as ModelInputChunk
    from tinkex.types.data import PromptProvenanceSpan as PromptProvenanceSpan
    from tinkex.types.data import SampledProvenanceSpan as SampledProvenanceSpan
    from tinkex.types.futures import ModelID as ModelID
    from tinkex.types.optimizers import AdamOptimizerConfig as AdamOptimizerConfig
    from tinkex.types.optimizers import DimuonOptimizerConfig as DimuonOptimizerConfig
    from tinkex.types.optimizers import DimuonParams as DimuonParams
    from tinkex.types.optimizers import OptimParams as OptimParams
    from tinkex.types.outputs import ForwardBackwardOutput as ForwardBackwardOutput
    from tinkex.types.outputs import NewTokens as NewTokens
    from tinkex.types.outputs import SampledSequence as SampledSequence
    from tinkex.types.outputs import SampleResponse as SampleResponse
    from tinkex.types.outputs import StopReason as StopReason
    from tinkex.types.params import AdamParams as AdamParams
    from tinkex.types.params import LoraConfig as LoraConfig
    from tinkex.types.params import SamplingParams as SamplingParams
    from tinkex.types.sampling import SampleRequest as SampleRequest
    from tinkex.types.tensor import TensorData as TensorData
    from tinkex.types.tensor import TensorDtype as TensorDtype
    from tinkex.types.training import OptimStepRequest as OptimStepRequest
    from tinkex.types.training import OptimStepResponse as OptimStepResponse
    from tinkex.types.training import TrainingRun as TrainingRun

"""Tinkex: the Tinker training API as an open system you run yourself.

The public names, and nothing else. Each is imported on first use, so that importing the package takes
milliseconds.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tinkex._version import __version__

if TYPE_CHECKING:
    from tinkex import auth as auth
    from tinkex import data as data
    from tinkex import errors as errors
    from tinkex import recovery as recovery
    from tinkex import regularizers as regularizers
    from tinkex import rl as rl
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
    from tinkex.types import *  # noqa: F403

__title__ = "tinkex"

_MODULES = ("auth", "data", "errors", "recovery", "regularizers", "rl", "types")
_NAMES = {
    "client.admin": "AdminClient",
    "client.custom_loss": "LossHandle PerDatumLossFn",
    "client.future": "APIFuture",
    "client.rest": "RestClient",
    "client.retry": "RetryConfig",
    "client.sampling": "SamplingClient",
    "client.streaming": "SampleStream",
    "client.training": "TrainingClient",
    "config": "RequestOptions Timeout Timeouts",
    "embedded": "ServiceClient",
    "errors": """
        APIConnectionError APIError APIResponseValidationError APIStatusError APITimeoutError
        AuthenticationError BadRequestError BillingError ClientClosedError ConflictError CredentialError
        ExperimentalWarning ExpiredError ForkedClientError InternalServerError InvalidInputError ModelError
        NotFoundError PassIncompleteError PermissionDeniedError RateLimitError RecoveryFailedError
        RequestErrorCategory RequestFailedError ResultTimeoutError RunLostError StreamBrokenError
        StreamingUnsupportedError TinkerError TokenizerError UnprocessableEntityError
    """,
    "recovery": "RecoveryPolicy",
    "tokenizers": "render_chat",
    "types": """
        AdamOptimizerConfig AdamParams Checkpoint CheckpointType Datum DimuonOptimizerConfig DimuonParams
        DmelChunk EncodedTextChunk ForwardBackwardOutput ImageChunk LoraConfig ModelID ModelInput
        ModelInputChunk NewTokens OptimParams OptimStepRequest OptimStepResponse ParsedCheckpointTinkerPath
        PromptProvenanceSpan SampleRequest SampleResponse SampledProvenanceSpan SampledSequence
        SamplingParams StopReason TensorData TensorDtype TrainingRun
    """,
}
_HOME = {name: module for module, names in _NAMES.items() for name in names.split()}

# Type checkers read the imports above.
__all__ = ["__title__", "__version__", *_HOME, *_MODULES]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"tinkex.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'tinkex' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f"tinkex.{_HOME[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)

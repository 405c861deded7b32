"""Model inputs and training examples: ModelInput and Datum, over numpy arrays.

Needs only numpy, so that an engine can use these classes. Knows nothing of the wire or of tokenizers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from tinkex.errors import InvalidInputError
from tinkex.strict import strict, strict_init
from tinkex.types.chunks import EncodedTextChunk, ModelInputChunk, check
from tinkex.types.params import LossFnType
from tinkex.types.tensor import TensorData, TensorDtype, as_array

if TYPE_CHECKING:
    import torch


class ModelInput:
    """The input of a model: a sequence of chunks.

    >>> ModelInput.from_ints([1, 2]).append_int(3).to_ints()
    [1, 2, 3]
    """

    __slots__ = ("chunks",)
    chunks: list[ModelInputChunk]

    @strict_init
    def __init__(self, chunks: Sequence[ModelInputChunk]) -> None:
        if not isinstance(chunks, (list, Sequence)) or isinstance(chunks, (str, bytes)):
            given = type(chunks).__name__
            raise InvalidInputError(f"ModelInput.chunks must be a list of chunks, got {given}")
        self.chunks = list(chunks)
        for i, chunk in enumerate(self.chunks):
            if not isinstance(chunk, ModelInputChunk):
                raise InvalidInputError(
                    f"ModelInput.chunks[{i}] must be a chunk (EncodedTextChunk, ImageChunk, …), "
                    f"got {type(chunk).__name__}; for plain token ids use ModelInput.from_ints"
                )

    @classmethod
    def from_ints(cls, tokens: Sequence[int] | np.ndarray) -> ModelInput:
        """From token ids: a list, or any integer array."""
        return cls([EncodedTextChunk(tokens)])

    @classmethod
    def empty(cls) -> ModelInput:
        return cls([])

    def append(self, chunk: ModelInputChunk) -> ModelInput:
        """A new input with `chunk` at its end."""
        return ModelInput([*self.chunks, chunk])

    def append_int(self, token: int) -> ModelInput:
        return self.append(EncodedTextChunk([token]))

    @property
    def length(self) -> int:
        return sum(chunk.length for chunk in self.chunks)

    def to_numpy(self) -> np.ndarray:
        """All token ids as one int32 array; an error if a chunk is not text."""
        if len(self.chunks) == 1 and isinstance(only := self.chunks[0], EncodedTextChunk):  # the common case
            return only.tokens_np
        arrays = [c.tokens_np for c in self.chunks if isinstance(c, EncodedTextChunk)]
        if len(arrays) != len(self.chunks):
            kinds = sorted({type(c).__name__ for c in self.chunks} - {"EncodedTextChunk"})
            raise InvalidInputError(f"only text has token ids; this input also holds {', '.join(kinds)}")
        return np.concatenate(arrays) if arrays else np.empty(0, np.int32)

    def to_ints(self) -> list[int]:
        return self.to_numpy().tolist()

    def model_dump(self, **_: Any) -> dict[str, Any]:
        return {"chunks": [chunk.model_dump() for chunk in self.chunks]}

    def __eq__(self, other: object) -> bool:
        return self.chunks == other.chunks if isinstance(other, ModelInput) else NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self.chunks))

    def __repr__(self) -> str:
        return f"ModelInput(chunks={self.chunks!r})"


@strict
class _ProvenanceSpan:
    sequence_id: str
    offset: int = 0
    length: int = field(kw_only=True)

    def __post_init__(self) -> None:
        check(isinstance(self.sequence_id, str), "sequence_id must be a string", self.sequence_id)
        for name, value in (("offset", self.offset), ("length", self.length)):
            fine = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63
            check(fine, f"{name} must be a whole number from 0 on", value)


@strict
class PromptProvenanceSpan(_ProvenanceSpan):
    """These positions were the prompt of the sampled sequence `sequence_id`, from `offset` on."""


@strict
class SampledProvenanceSpan(_ProvenanceSpan):
    """These positions were sampled as part of the sequence `sequence_id`, from `offset` on."""


ProvenanceSpans = list[PromptProvenanceSpan | SampledProvenanceSpan]
if TYPE_CHECKING:
    ArrayLike = TensorData | np.ndarray | torch.Tensor | Sequence[float] | Sequence[Sequence[float]]
LossFnInputs = Mapping[str, "ArrayLike"]
LossFnOutput = dict[str, TensorData]
_NO_INPUTS: LossFnInputs = {}

# Inputs of the losses and their dtypes. Only these may be plain lists, which have no dtype.
LIST_DTYPES: Mapping[str, TensorDtype] = {
    "target_tokens": "int64", "weights": "float32", "advantages": "float32", "logprobs": "float32",
    "clip_low_threshold": "float32", "clip_high_threshold": "float32", "sequence_ratio_mask": "float32",
}  # fmt: skip
_SPARSE_KEYS = ("target_tokens", "weights")


def as_tensor(key: str, value: ArrayLike | Mapping[str, Any]) -> TensorData:
    """`value` as a TensorData of the dtype of `key`."""
    if isinstance(value, TensorData):
        return value
    as_float = LIST_DTYPES.get(key) == "float32"  # integers given as weights become floats
    if hasattr(value, "detach"):
        tensor: Any = value
        tensor = tensor.float() if as_float and not tensor.is_floating_point() else tensor
        return TensorData.from_torch_sparse(tensor) if key in _SPARSE_KEYS else TensorData.from_torch(tensor)
    if isinstance(value, np.ndarray):
        floats = as_float and value.dtype.kind in "iub"
        return TensorData.from_numpy(value.astype(np.float32) if floats else value)
    if isinstance(value, Mapping):
        return TensorData(**value)
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise InvalidInputError(f"must be a list, array or TensorData, got {type(value).__name__}")
    if key == "mask":
        raise InvalidInputError("no loss reads it; to leave positions out, set their 'weights' to 0")
    if key not in LIST_DTYPES:
        raise InvalidInputError(
            f"is a plain list, and only these keys may be: {', '.join(LIST_DTYPES)}; "
            "pass an array or TensorData for another key"
        )
    array = as_array(value) if len(value) else np.empty(0, LIST_DTYPES[key])
    return TensorData(array, LIST_DTYPES[key], shape=array.shape)


def _check_spans(name: str, spans: Sequence[object]) -> None:
    fine = isinstance(spans, Sequence) and not isinstance(spans, str | bytes)
    check(fine, f"Datum.{name} must be a list of spans", spans)
    for i, span in enumerate(spans):
        must = f"Datum.{name}[{i}] must be a PromptProvenanceSpan or a SampledProvenanceSpan"
        check(isinstance(span, PromptProvenanceSpan | SampledProvenanceSpan), must, span)


@dataclass(frozen=True, init=False)
class Datum:
    """One training example: the model's input and the loss's inputs.

    >>> d = Datum(ModelInput.from_ints([1, 2]), {"target_tokens": [2, 3], "weights": [0.0, 1.0]})
    >>> d.loss_fn_inputs["weights"]
    TensorData(float32, shape=[2])
    """

    model_input: ModelInput
    loss_fn_inputs: dict[str, TensorData]
    model_input_spans: ProvenanceSpans | None
    loss_fn_input_spans: ProvenanceSpans | None

    @strict_init
    def __init__(
        self,
        model_input: ModelInput,
        loss_fn_inputs: LossFnInputs = _NO_INPUTS,
        model_input_spans: ProvenanceSpans | None = None,
        loss_fn_input_spans: ProvenanceSpans | None = None,
    ) -> None:
        if not isinstance(model_input, ModelInput):
            raise InvalidInputError(
                f"Datum.model_input must be a ModelInput, got {type(model_input).__name__}; "
                "ModelInput.from_ints(tokens) makes one"
            )
        if not isinstance(loss_fn_inputs, (dict, Mapping)):  # dict first: the ABC's check is slow
            given = type(loss_fn_inputs).__name__
            raise InvalidInputError(f"Datum.loss_fn_inputs must be a dict of arrays by name, got {given}")
        inputs: dict[str, TensorData] = {}
        for key, value in loss_fn_inputs.items():
            if not isinstance(key, str):
                raise InvalidInputError(f"Datum.loss_fn_inputs has the key {key!r}; keys are strings")
            try:
                inputs[key] = as_tensor(key, value)
            except InvalidInputError as error:
                raise InvalidInputError(f"loss_fn_inputs[{key!r}]: {error}") from None
        if (model_input_spans is None) != (loss_fn_input_spans is None):
            raise InvalidInputError("a Datum has both model_input_spans and loss_fn_input_spans, or neither")
        if model_input_spans is not None and loss_fn_input_spans is not None:
            _check_spans("model_input_spans", model_input_spans)
            _check_spans("loss_fn_input_spans", loss_fn_input_spans)
        self.__dict__.update(
            model_input=model_input,
            loss_fn_inputs=inputs,
            model_input_spans=model_input_spans,
            loss_fn_input_spans=loss_fn_input_spans,
        )

    @cached_property
    def nbytes(self) -> int:
        """Its approximate size in a request's body."""
        total = sum(tensor.nbytes for tensor in self.loss_fn_inputs.values())
        for chunk in self.model_input.chunks:
            if isinstance(chunk, EncodedTextChunk):
                total += chunk.tokens_np.nbytes
            else:
                total += len(getattr(chunk, "data", None) or getattr(chunk, "dmel", b""))
        return total

    def with_provenance(self, model_input: ProvenanceSpans, loss_fn_inputs: ProvenanceSpans) -> Datum:
        """A copy with the provenance of its tokens."""
        return dataclasses.replace(self, model_input_spans=model_input, loss_fn_input_spans=loss_fn_inputs)


@dataclass(frozen=True)
class ForwardBackwardInput:
    """A forward-backward pass: datums, the loss's name and its settings."""

    data: list[Datum]
    loss_fn: LossFnType | str  # a server may know others
    loss_fn_config: Mapping[str, float | str] | None = None

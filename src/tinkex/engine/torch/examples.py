"""A pass's datums, read and checked: what cannot be computed is refused before anything is.

A refusal is an EngineError of category "user" that names the datum, the key, what was given and what is
allowed. Defaults are filled in, so that a loss finds every input it may read. Knows of the model only its
vocabulary and its context, and nothing of batches or adapters.

Shapes: N positions of a datum, K candidates of a position.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from tinkex.engine.protocol import EngineError, Pass
from tinkex.engine.torch.loss_graph import LossGraph, read_loss_graph
from tinkex.engine.torch.losses import LOSSES, Loss
from tinkex.errors import InvalidInputError
from tinkex.types.data import Datum, EncodedTextChunk
from tinkex.types.losses import check_finite, check_inputs, filled_inputs, loss_settings, unknown_loss

_MOST_CELLS = 1 << 26  # of all inputs of a pass: a few bytes of a sparse one may stand for gigabytes


@dataclass(frozen=True)
class Limits:
    """What a base model can take."""

    vocab_size: int
    max_context: int


@dataclass(frozen=True)
class Example:
    """One datum, checked: what the model reads, and the loss's inputs cell by cell."""

    tokens: np.ndarray  # int32 [N]
    targets: np.ndarray  # int64 [N] or [N, K]
    inputs: Mapping[str, np.ndarray]  # a built-in loss: float32, of the targets' shape; a graph's: as given


@dataclass(frozen=True)
class Work:
    """One pass, checked."""

    run: str
    backward: bool
    examples: list[Example]
    loss: Loss | None  # None: a graph's
    settings: Mapping[str, float] = field(default_factory=dict)
    graph: LossGraph | None = None

    @property
    def local(self) -> bool:
        return self.loss is not None and self.loss.local


def read_pass(work: Pass, limits: Limits) -> Work:
    """`work` with everything checked; raises EngineError (category "user") at the first thing wrong."""
    if not work.data:
        raise _user("a pass needs at least one datum, got none")
    cells = sum(math.prod(t.dense_shape) for datum in work.data for t in datum.loss_fn_inputs.values())
    if cells > _MOST_CELLS:
        raise _user(f"the pass's loss_fn_inputs hold {cells} numbers, zeros included; allowed: {_MOST_CELLS}")
    if work.loss_fn == "custom":
        return _read_custom(work, limits)
    if work.loss_fn not in LOSSES:
        raise _user(unknown_loss(work.loss_fn, [*LOSSES, "custom"]))
    with _refusing():
        settings = loss_settings(work.loss_fn, work.loss_fn_config)
    examples = []
    for i, datum in enumerate(work.data):
        with _refusing(i):
            tokens, targets = _tokens_and_targets(datum, work.loss_fn, limits)
            inputs = filled_inputs(work.loss_fn, datum.loss_fn_inputs, settings)
        examples.append(Example(tokens, targets, inputs))
    return Work(work.run, work.backward, examples, LOSSES[work.loss_fn], settings)


def _read_custom(work: Pass, limits: Limits) -> Work:
    if work.custom_loss is None:
        raise _user("loss_fn 'custom' needs an uploaded loss graph, and this pass has none")
    if extra := [key for key in work.loss_fn_config if key != "loss_id"]:
        raise _user(f"loss_fn_config has {extra[0]!r}; 'custom' takes: loss_id")
    graph = read_loss_graph(work.custom_loss)
    examples = []
    for i, datum in enumerate(work.data):
        inputs = {}
        with _refusing(i):
            tokens, targets = _tokens_and_targets(datum, "custom", limits)
            for key in graph.inputs[1:]:
                if key not in datum.loss_fn_inputs:
                    raise InvalidInputError(f"loss_fn_inputs has no {key!r}, which the custom loss reads")
                check_finite(key, datum.loss_fn_inputs[key])
                inputs[key] = datum.loss_fn_inputs[key].to_numpy()
        try:
            graph.check(targets.shape, {key: (value.shape, value.dtype) for key, value in inputs.items()})
        except EngineError as error:
            raise _user(f"datum {i}: {error.message}") from None
        examples.append(Example(tokens, targets, inputs))
    return Work(work.run, work.backward, examples, None, graph=graph)


def _tokens_and_targets(datum: Datum, loss_fn: str, limits: Limits) -> tuple[np.ndarray, np.ndarray]:
    for chunk in datum.model_input.chunks:
        if not isinstance(chunk, EncodedTextChunk):
            raise InvalidInputError(
                f"model_input holds {type(chunk).__name__}; this base model reads text only"
            )
    tokens = datum.model_input.to_numpy()
    if not tokens.size:
        raise InvalidInputError("model_input is empty")
    if tokens.size > limits.max_context:
        raise InvalidInputError(
            f"model_input has {tokens.size} tokens; the model's context is {limits.max_context}"
        )
    # A chunk's token ids are never negative.
    if tokens.max() >= limits.vocab_size:
        at = int(np.argmax(tokens >= limits.vocab_size))
        raise InvalidInputError(
            f"model_input[{at}] is {tokens[at]}; token ids are 0..{limits.vocab_size - 1}"
        )
    check_inputs(loss_fn, datum.loss_fn_inputs, tokens.size, limits.vocab_size, strict=True)
    return tokens, datum.loss_fn_inputs["target_tokens"].to_numpy()


@contextmanager
def _refusing(index: int | None = None) -> Iterator[None]:
    """Turn a refusal of the user's input into the engine's error, naming the datum."""
    try:
        yield
    except InvalidInputError as error:
        raise _user(str(error) if index is None else f"datum {index}: {error}") from None


def _user(message: str) -> EngineError:
    return EngineError(message, "user")

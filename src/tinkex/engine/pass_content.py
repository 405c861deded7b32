"""What a pass holds, checked: its settings, and its datums as arrays. Wrong content is named in the error.

Needs only numpy; knows no models and no gradients.

Shapes: N positions of a datum, K candidates of a position.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from tinkex.engine import protocol as p
from tinkex.engine.request import token_ids, user_error
from tinkex.errors import InvalidInputError
from tinkex.types.data import Datum
from tinkex.types.losses import check_inputs, filled_inputs, loss_settings, unknown_loss
from tinkex.types.tensor import TensorData

_MOST_CELLS = 1 << 26  # of all inputs of a pass: a few bytes of a sparse tensor may stand for gigabytes
Inputs = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class TrainingExample:
    """One checked datum: what the model reads, and the loss's inputs for each target cell."""

    tokens: np.ndarray  # int32 [N]
    targets: np.ndarray  # int64 [N] or [N, K]
    inputs: Inputs  # built-in losses: float32, of the targets' shape; an uploaded one's: as given
    images: Sequence[Any] = ()  # at some of its positions, as the engine has them


def read_pass(
    work: p.Pass,
    losses: Sequence[str],
    vocab: int,
    context: int,
    uploaded: Callable[[Mapping[str, TensorData], tuple[int, ...]], Inputs] | None = None,
) -> Generator[None, None, tuple[Mapping[str, float], list[TrainingExample]]]:
    """A pass's settings and examples; raises EngineError (category "user") at the first thing wrong.

    `uploaded` reads the inputs of an uploaded loss, given the targets' shape; that takes long, so this yields
    after each datum of one.
    """
    check_size(work)
    if work.loss_fn not in losses:
        raise user_error(unknown_loss(work.loss_fn, losses))
    with _refusing():
        settings = loss_settings(work.loss_fn, work.loss_fn_config) if uploaded is None else {}
    examples = []
    for i, datum in enumerate(work.data):
        with _refusing(f"datum {i}: "):
            tokens = _tokens(datum, vocab, context)
            given = datum.loss_fn_inputs
            check_inputs(work.loss_fn, given, tokens.size, vocab, strict=True)
            targets = given["target_tokens"].to_numpy()
            if uploaded is None:
                inputs = filled_inputs(work.loss_fn, given, settings)
            else:
                inputs = uploaded(given, targets.shape)
        examples.append(TrainingExample(tokens, targets, inputs))
        if uploaded is not None:
            yield
    return settings, examples


def check_size(work: p.Pass) -> None:
    if not work.data:
        raise user_error("a pass needs at least one datum, got none")
    cells = sum(math.prod(t.dense_shape) for datum in work.data for t in datum.loss_fn_inputs.values())
    if cells > _MOST_CELLS:
        raise user_error(
            f"the pass's loss_fn_inputs hold {cells} numbers, zeros included; allowed: {_MOST_CELLS}"
        )


def _tokens(datum: Datum, vocab: int, context: int) -> np.ndarray:
    tokens = token_ids(datum.model_input, "model_input")
    if not tokens.size:
        raise InvalidInputError("model_input is empty")
    if tokens.size > context:
        raise InvalidInputError(f"model_input has {tokens.size} tokens; the model's context is {context}")
    if tokens.max() >= vocab:  # a chunk's token ids are never negative
        at = int(np.argmax(tokens >= vocab))
        raise InvalidInputError(f"model_input[{at}] is {tokens[at]}; token ids are 0..{vocab - 1}")
    return tokens


@contextmanager
def _refusing(where: str = "") -> Iterator[None]:
    try:
        yield
    except p.EngineLost:
        raise
    except (InvalidInputError, p.EngineError) as error:
        raise user_error(f"{where}{error}") from None

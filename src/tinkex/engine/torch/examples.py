"""A pass's datums, read and checked: what cannot be computed is refused before anything is.

A refusal is an EngineError of category "user" that names the datum, the key, what was given and what is
allowed. Defaults are filled in, so that a loss finds every input it may read. Knows of the model only its
vocabulary and its context, and nothing of batches or adapters.

Shapes: N positions of a datum, K candidates of a position.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from tinkex.engine.protocol import EngineError, Pass
from tinkex.engine.torch.graph import Graph, read_graph
from tinkex.engine.torch.losses import LOSSES, Loss
from tinkex.types.data import LIST_DTYPES, Datum, EncodedTextChunk
from tinkex.types.tensor import TensorData

_LARGEST = float(np.finfo(np.float32).max)  # what settings become
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
    graph: Graph | None = None

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
    loss = _loss(work.loss_fn)
    settings = _settings(work.loss_fn, loss, work.loss_fn_config)
    examples = []
    for i, datum in enumerate(work.data):
        tokens, targets = _tokens_and_targets(i, datum, work.loss_fn, limits, wide=loss.wide)
        known = ("target_tokens", *loss.needs, *loss.may)
        _refuse_unknown(i, datum, work.loss_fn, known)
        inputs = _inputs(i, datum, work.loss_fn, loss, settings, targets.shape)
        examples.append(Example(tokens, targets, inputs))
    return Work(work.run, work.backward, examples, loss, settings)


def _read_custom(work: Pass, limits: Limits) -> Work:
    if work.custom_loss is None:
        raise _user("loss_fn 'custom' needs an uploaded loss graph, and this pass has none")
    if extra := [key for key in work.loss_fn_config if key != "loss_id"]:
        raise _user(f"loss_fn_config has {extra[0]!r}; 'custom' takes: loss_id")
    graph = read_graph(work.custom_loss)
    examples = []
    for i, datum in enumerate(work.data):
        tokens, targets = _tokens_and_targets(i, datum, "custom", limits, wide=True)
        inputs = {}
        for key in graph.inputs[1:]:
            if key not in datum.loss_fn_inputs:
                raise _user(f"datum {i}: loss_fn_inputs has no {key!r}, which the custom loss reads")
            inputs[key] = _finite(i, key, datum.loss_fn_inputs[key])
        try:
            graph.check(targets.shape, {key: (value.shape, value.dtype) for key, value in inputs.items()})
        except EngineError as error:
            raise _user(f"datum {i}: {error.message}") from None
        examples.append(Example(tokens, targets, inputs))
    return Work(work.run, work.backward, examples, None, graph=graph)


def _loss(name: str) -> Loss:
    if name in LOSSES:
        return LOSSES[name]
    allowed = ", ".join([*LOSSES, "custom"])
    if name == "stable_reinforce":
        raise _user(
            f"loss_fn 'stable_reinforce' is not supported (its rule is not public); allowed: {allowed}"
        )
    raise _user(f"loss_fn {name!r} is not known; allowed: {allowed}")


def _settings(name: str, loss: Loss, given: Mapping[str, float | str]) -> dict[str, float]:
    allowed = ", ".join(loss.settings) or "nothing"
    settings = dict(loss.settings)
    for key, value in given.items():
        if key not in settings:
            raise _user(f"loss_fn_config has {key!r}; {name} takes: {allowed}")
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= _LARGEST:
            raise _user(f"loss_fn_config[{key!r}] must be a finite number, got {value!r}")
        if value < 0:
            raise _user(f"loss_fn_config[{key!r}] must be at least 0, got {value!r}")
        settings[key] = float(value)
    for key, value in settings.items():
        if value is None:
            raise _user(f"{name} needs loss_fn_config[{key!r}], and it was not given")
    low, high = settings.get("clip_low_threshold") or 0.0, settings.get("clip_high_threshold") or math.inf
    if low > high:
        raise _user(f"loss_fn_config: clip_low_threshold {low:g} is above clip_high_threshold {high:g}")
    return {key: value for key, value in settings.items() if value is not None}


def _tokens_and_targets(
    i: int, datum: Datum, name: str, limits: Limits, *, wide: bool
) -> tuple[np.ndarray, np.ndarray]:
    for chunk in datum.model_input.chunks:
        if not isinstance(chunk, EncodedTextChunk):
            raise _user(
                f"datum {i}: model_input holds {type(chunk).__name__}; this base model reads text only"
            )
    tokens = datum.model_input.to_numpy()
    if not tokens.size:
        raise _user(f"datum {i}: model_input is empty")
    if tokens.size > limits.max_context:
        raise _user(
            f"datum {i}: model_input has {tokens.size} tokens; the model's context is {limits.max_context}"
        )
    _in_vocabulary(i, "model_input", tokens, limits)
    if "target_tokens" not in datum.loss_fn_inputs:
        raise _user(f"datum {i}: loss_fn_inputs has no 'target_tokens', which {name} needs")
    given = datum.loss_fn_inputs["target_tokens"]
    if given.dtype != "int64":
        raise _user(f"datum {i}: loss_fn_inputs['target_tokens'] must be int64, got {given.dtype}")
    targets, n = given.to_numpy(), tokens.size
    if not (targets.shape == (n,) or (wide and targets.ndim == 2 and len(targets) == n and targets.shape[1])):
        allowed = f"[{n}] or [{n}, K]" if wide else f"[{n}]"
        raise _user(
            f"datum {i}: loss_fn_inputs['target_tokens'] has shape {list(targets.shape)}; "
            f"{name} takes {allowed} for a model_input of {n} tokens"
        )
    _in_vocabulary(i, "loss_fn_inputs['target_tokens']", targets, limits)
    return tokens, targets


def _in_vocabulary(i: int, where: str, ids: np.ndarray, limits: Limits) -> None:
    # as unsigned numbers negative ones are the largest: one look finds both
    if ids.view(f"u{ids.itemsize}").max(initial=0) >= limits.vocab_size:
        position = np.argwhere((ids < 0) | (ids >= limits.vocab_size))[0].tolist()
        raise _user(
            f"datum {i}: {where} has the token id {ids[tuple(position)]} at position "
            f"{position[0] if len(position) == 1 else position}; allowed: 0..{limits.vocab_size - 1}"
        )


def _refuse_unknown(i: int, datum: Datum, name: str, takes: Sequence[str]) -> None:
    """Inputs of another loss are left alone, since one datum may serve several; others are mistakes."""
    for key in datum.loss_fn_inputs:
        if key not in LIST_DTYPES:
            close = difflib.get_close_matches(key, takes, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else "."
            raise _user(f"datum {i}: loss_fn_inputs has {key!r}{hint} {name} takes: {', '.join(takes)}")


def _inputs(
    i: int, datum: Datum, name: str, loss: Loss, settings: Mapping[str, float], shape: tuple[int, ...]
) -> dict[str, np.ndarray]:
    inputs: dict[str, np.ndarray] = {}
    for key in (*loss.needs, *loss.may):
        if key in datum.loss_fn_inputs:
            inputs[key] = _float_input(i, key, datum.loss_fn_inputs[key], shape)
        elif key in loss.needs:
            raise _user(f"datum {i}: loss_fn_inputs has no {key!r}, which {name} needs")
        elif key == "sequence_ratio_mask":
            inputs[key] = (inputs["advantages"] != 0).astype(np.float32)
        else:  # the threshold that the settings have, or weights of one
            inputs[key] = np.full(shape, settings.get(key, 1.0), np.float32)
    if (
        "clip_low_threshold" in inputs
        and (inputs["clip_low_threshold"] > inputs["clip_high_threshold"]).any()
    ):
        raise _user(f"datum {i}: clip_low_threshold is above clip_high_threshold at some position")
    if "sequence_ratio_mask" in inputs:
        _check_mask(i, inputs["sequence_ratio_mask"], inputs["advantages"])
    return inputs


def _check_mask(i: int, mask: np.ndarray, advantages: np.ndarray) -> None:
    if not np.isin(mask, (0.0, 1.0)).all():
        raise _user(f"datum {i}: loss_fn_inputs['sequence_ratio_mask'] must hold zeros and ones alone")
    if advantages.any() and not mask.any():
        raise _user(
            f"datum {i}: loss_fn_inputs['sequence_ratio_mask'] is zero everywhere, but there are advantages"
        )


def _float_input(i: int, key: str, given: TensorData, shape: tuple[int, ...]) -> np.ndarray:
    if given.dtype != "float32":
        raise _user(f"datum {i}: loss_fn_inputs[{key!r}] must be float32, got {given.dtype}")
    value = _finite(i, key, given)
    if value.shape != shape:
        raise _user(
            f"datum {i}: loss_fn_inputs[{key!r}] has shape {list(value.shape)}, target_tokens {list(shape)}: "
            "they must be the same"
        )
    return value


def _finite(i: int, key: str, given: TensorData) -> np.ndarray:
    value = given.to_numpy()
    if value.dtype.kind == "f" and not np.isfinite(value).all():
        position = np.argwhere(~np.isfinite(value))[0].tolist()
        raise _user(
            f"datum {i}: loss_fn_inputs[{key!r}] is {value[tuple(position)]} at position {position}; "
            "only finite numbers are allowed"
        )
    return value


def _user(message: str) -> EngineError:
    return EngineError(message, "user")

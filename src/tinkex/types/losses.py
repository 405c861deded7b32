"""The table of losses: what each one reads, its settings, and the checks of a datum against it.

The client, the service and every engine use this table: a loss is described once, and a bad datum is refused
with the same message everywhere. FORMULAS, the one numpy form of the losses, is here because both the fake
engine and the client's closed-form regularizers need it. Knows nothing of models, requests or the wire.

Shapes: N positions of a datum, K candidate targets of a position.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from tinkex.errors import InvalidInputError
from tinkex.strict import did_you_mean
from tinkex.types.data import LIST_DTYPES
from tinkex.types.tensor import MAX_TOKEN, TensorData

MAX_NODES, MAX_INPUTS = 2000, 16  # of an uploaded loss
_LARGEST = float(np.finfo(np.float32).max)  # an engine computes with settings in float32
_IGNORED = -100  # the target that other libraries leave out of the loss


@dataclass(frozen=True)
class LossSpec:
    """One loss: its inputs and its settings."""

    required: tuple[str, ...]
    # Defaults; a setting of the same name replaces one. None: 1 where the advantage is not 0, else 0.
    optional: Mapping[str, float | None] = field(default_factory=dict[str, float | None])
    config: Mapping[str, float | None] = field(default_factory=dict[str, float | None])  # None: required
    candidates: bool = False  # target_tokens may be [N, K]
    open: bool = False  # it reads further inputs, by names of its own

    @property
    def inputs(self) -> tuple[str, ...]:
        return (*self.required, *self.optional)


_RATIO = ("target_tokens", "logprobs", "advantages")
_PPO_CLIP = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
_CISPO_CLIP = {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0}

LOSSES: Mapping[str, LossSpec] = {
    "cross_entropy": LossSpec(("target_tokens",), {"weights": 1.0}, candidates=True),
    "importance_sampling": LossSpec(_RATIO),
    "ppo": LossSpec(_RATIO, _PPO_CLIP, _PPO_CLIP),
    "cispo": LossSpec(_RATIO, _CISPO_CLIP, _CISPO_CLIP),
    "dro": LossSpec(_RATIO, config={"beta": None}),
    "gspo": LossSpec(_RATIO, {**_PPO_CLIP, "sequence_ratio_mask": None}, _PPO_CLIP),
    "kl_divergence": LossSpec(("target_tokens", "logprobs"), {"weights": 1.0}, candidates=True),
    "custom": LossSpec(("target_tokens",), candidates=True, open=True),
}


def unknown_loss(name: str, known: Iterable[str] = LOSSES) -> str:
    """The message for a loss that a server or an engine does not have."""
    why = " (its rule is not public)" if name == "stable_reinforce" else ""
    return f"there is no loss {name!r}{why}; allowed: {', '.join(known)}"


def loss_settings(name: str, given: Mapping[str, float | str]) -> dict[str, float]:
    """`loss_fn_config` checked, with the loss's defaults.

    >>> loss_settings("ppo", {"clip_low_threshold": 0.5})
    {'clip_low_threshold': 0.5, 'clip_high_threshold': 1.2}
    """
    settings = dict(LOSSES[name].config)
    for key, value in given.items():
        if key not in settings:
            takes = ", ".join(settings) or "nothing"
            raise InvalidInputError(f"loss_fn_config has {key!r}; {name} takes: {takes}")
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= _LARGEST:
            raise InvalidInputError(f"loss_fn_config[{key!r}] must be a finite number, got {value!r}")
        if value < 0:
            raise InvalidInputError(f"loss_fn_config[{key!r}] must be at least 0, got {value!r}")
        settings[key] = float(value)
    complete = {key: value for key, value in settings.items() if value is not None}
    for key in settings.keys() - complete:
        raise InvalidInputError(f"{name} needs loss_fn_config[{key!r}], and it was not given")
    low, high = complete.get("clip_low_threshold", 0.0), complete.get("clip_high_threshold", math.inf)
    if low > high:
        bounds = f"clip_low_threshold {low:g} is above clip_high_threshold {high:g}"
        raise InvalidInputError(f"loss_fn_config: {bounds}")
    return complete


def check_inputs(
    name: str,
    given: Mapping[str, TensorData],
    length: int | None,
    vocab_size: int = MAX_TOKEN + 1,
    *,
    strict: bool,
) -> None:
    """Raise InvalidInputError if a datum's `loss_fn_inputs` do not fit the loss and its `length` positions.

    An engine is `strict`: it refuses a name that no loss reads. A client only refuses what is probably a
    misspelling, since a server may know more; for the same reason it checks what it can of a loss that is not
    in the table. `length` is None where an image does not say how many positions it takes.
    """
    reads = _reads(name, tuple(given), strict)
    shape = None
    if (targets := given.get("target_tokens")) is not None:
        shape = targets.dense_shape
        if vocab_size <= MAX_TOKEN or shape != (length,) or targets.dtype != "int64" or not targets.sound:
            _check_targets(name, targets, length, vocab_size)
    for key, tensor in given.items():
        if key == "target_tokens":
            continue
        if key in reads:
            if tensor.dtype != "float32":
                raise InvalidInputError(f"loss_fn_inputs[{key!r}] must be float32, got {tensor.dtype}")
            if tensor.dense_shape != shape:
                raise InvalidInputError(
                    f"loss_fn_inputs[{key!r}] has shape {list(tensor.dense_shape)}, but target_tokens has "
                    f"{list(shape or ())}: they must be the same"
                )
        elif strict:
            continue
        if tensor.dtype == "float32" and not tensor.sound:
            check_finite(key, tensor)


@lru_cache(256)
def _reads(name: str, given: tuple[str, ...], strict: bool) -> tuple[str, ...]:
    """The inputs that the loss reads; raises if `given` lacks one or has one that no loss reads.

    Cached: the datums of a pass mostly have the same keys, and the search for a close match is slow.
    """
    if (spec := LOSSES.get(name)) is None:
        return ()
    for key in spec.required:
        if key not in given:
            have = ", ".join(given) or "nothing"
            raise InvalidInputError(f"loss_fn_inputs: {name} needs {key!r}; given: {have}")
    missing = [key for key in spec.optional if key not in given]
    for key in () if spec.open else given:
        if key in LIST_DTYPES:
            continue  # one datum may serve several losses
        hint = mask_hint(name) if strict and key == "mask" else did_you_mean(key, missing, cutoff=0.75)
        if strict or hint != ".":
            takes = ", ".join(spec.inputs)
            raise InvalidInputError(f"loss_fn_inputs: {name} does not read {key!r}{hint} It takes: {takes}")
    return spec.inputs


def mask_hint(name: str) -> str:
    """How to leave positions out of a loss, as the end of a sentence."""
    key = "advantages" if "advantages" in LOSSES[name].required else "weights"
    return f"; to leave positions out, set their {key!r} to 0."


def _check_targets(name: str, targets: TensorData, length: int | None, vocab_size: int) -> None:
    spec, shape = LOSSES.get(name), targets.dense_shape
    if targets.dtype != "int64":
        raise InvalidInputError("loss_fn_inputs['target_tokens'] must be int64 token ids, got float32")
    if spec is not None and not (
        (len(shape) == 1 or (spec.candidates and len(shape) == 2 and shape[1]))
        and (length is None or shape[0] == length)
    ):
        size = "N" if length is None else length
        allowed = f"[{size}] or [{size}, K]" if spec.candidates else f"[{size}]"
        raise InvalidInputError(
            f"loss_fn_inputs['target_tokens'] has shape {list(shape)}; {name} takes {allowed} for a "
            f"model_input of {size} positions"
        )
    ids = targets.values_np
    # Read as unsigned numbers, negative ones are the largest, so one comparison finds both.
    within = targets.sound if vocab_size > MAX_TOKEN else ids.view(np.uint64).max(initial=0) < vocab_size
    if not within:
        place, value = _first(targets, (ids < 0) | (ids >= vocab_size))
        hint = mask_hint(name) if value == _IGNORED and name in LOSSES else ""
        raise InvalidInputError(
            f"loss_fn_inputs['target_tokens']{place} is {value}; token ids are 0..{vocab_size - 1}{hint}"
        )


def check_finite(key: str, tensor: TensorData) -> None:
    """Raise InvalidInputError if an input of floats holds a NaN or an infinity."""
    if tensor.dtype == "float32" and not tensor.sound:
        place, value = _first(tensor, ~np.isfinite(tensor.values_np))
        raise InvalidInputError(f"loss_fn_inputs[{key!r}]{place} is {value}; every value must be finite")


def _first(tensor: TensorData, wrong: np.ndarray) -> tuple[list[int], float]:
    """The index and the value of the first listed cell that is wrong."""
    at = int(np.argmax(wrong))
    dense = not tensor.is_sparse and len(tensor.dense_shape) > 1
    place = [int(n) for n in np.unravel_index(at, tensor.dense_shape)] if dense else [at]
    return place, tensor.values_np[at].item()


def filled_inputs(
    name: str, given: Mapping[str, TensorData], settings: Mapping[str, float]
) -> dict[str, np.ndarray]:
    """All inputs except the targets, already checked, as arrays of the targets' shape, with defaults."""
    spec, shape = LOSSES[name], given["target_tokens"].dense_shape
    inputs = {key: given[key].to_numpy() for key in spec.inputs[1:] if key in given}
    for key, default in spec.optional.items():
        if key not in inputs and default is None:
            inputs[key] = (inputs["advantages"] != 0).astype(np.float32)
        elif key not in inputs:
            inputs[key] = np.full(shape, settings.get(key, default), np.float32)
    low, high = inputs.get("clip_low_threshold"), inputs.get("clip_high_threshold")
    if low is not None and high is not None and (low > high).any():
        raise InvalidInputError("clip_low_threshold is above clip_high_threshold at some position")
    if (mask := inputs.get("sequence_ratio_mask")) is not None:
        if not np.isin(mask, (0.0, 1.0)).all():
            raise InvalidInputError("loss_fn_inputs['sequence_ratio_mask'] must hold zeros and ones alone")
        if inputs["advantages"].any() and not mask.any():
            raise InvalidInputError(
                "loss_fn_inputs['sequence_ratio_mask'] is zero everywhere, but there are advantages"
            )
    return inputs


# -- formulas --------------------------------------------------------------------------------------------
# For one cell: lp the trainer's logprob of the target, x["logprobs"] the sampler's or the teacher's. A cell
# whose weight or advantage is zero adds nothing, even if its logprobs are not finite.

Inputs = Mapping[str, np.ndarray]  # each of the targets' shape, [N] or [N, K], of one datum
Settings = Mapping[str, float]
Terms = tuple[np.ndarray, np.ndarray]  # each cell's loss, and the datum's loss by each cell's logprob


def _kl_divergence(lp: np.ndarray, x: Inputs, settings: Settings) -> Terms:
    mass = np.where(x["weights"] != 0, x["weights"] * np.exp(x["logprobs"]), 0.0)
    return mass * np.where(mass != 0, x["logprobs"] - lp, 0.0), -mass


def _importance_sampling(lp: np.ndarray, x: Inputs, settings: Settings) -> Terms:
    gain = np.exp(_lag(lp, x)) * x["advantages"]
    return -gain, -gain


def _cispo(lp: np.ndarray, x: Inputs, settings: Settings) -> Terms:
    ratio = np.clip(np.exp(_lag(lp, x)), x["clip_low_threshold"], x["clip_high_threshold"])
    return -ratio * x["advantages"] * lp, -ratio * x["advantages"]


def _dro(lp: np.ndarray, x: Inputs, settings: Settings) -> Terms:
    lag = _lag(lp, x)
    return 0.5 * settings["beta"] * lag**2 - lp * x["advantages"], settings["beta"] * lag - x["advantages"]


def _gspo(lp: np.ndarray, x: Inputs, settings: Settings) -> Terms:
    mask = x["sequence_ratio_mask"] != 0
    share = mask / max(1, mask.sum())
    terms, slopes = _clipped(np.full(lp.shape, np.sum(share * np.where(mask, lp - x["logprobs"], 0.0))), x)
    return terms, slopes.sum() * share  # every cell moves the one ratio that all of them have


def _lag(lp: np.ndarray, x: Inputs) -> np.ndarray:
    """lp - lq where there is an advantage: prompts have made-up logprobs."""
    return np.where(x["advantages"] != 0, lp - x["logprobs"], 0.0)


def _clipped(log_ratio: np.ndarray, x: Inputs) -> Terms:
    """-min(r·A, clip(r, lo, hi)·A), and its derivative by log r: none where the bound is what counts."""
    ratio, advantages = np.exp(log_ratio), x["advantages"]
    low, high = x["clip_low_threshold"], x["clip_high_threshold"]
    above, below = (advantages > 0) & (ratio > high), (advantages < 0) & (ratio < low)
    terms = -advantages * np.where(above, high, np.where(below, low, ratio))
    return terms, np.where(above | below, 0.0, terms)


FORMULAS: Mapping[str, Callable[[np.ndarray, Inputs, Settings], Terms]] = {
    "cross_entropy": lambda lp, x, settings: (-x["weights"] * lp, -x["weights"]),
    "importance_sampling": _importance_sampling,
    "ppo": lambda lp, x, settings: _clipped(_lag(lp, x), x),
    "cispo": _cispo,
    "dro": _dro,
    "gspo": _gspo,
    "kl_divergence": _kl_divergence,
}

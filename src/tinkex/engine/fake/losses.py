"""The losses in numpy: each one's value and its derivative by the target logprobs, in closed form.

The formulas are those of engine/torch/losses.py, whose docstring writes them out. The fake engine trains with
them, and tinkex.regularizers adds terms to them without torch. A cell whose weight or advantage is zero adds
nothing, whatever its logprobs are. Numpy alone; inputs are checked by tinkex.types.losses.

For one cell: lp the trainer's logprob of the target, x["logprobs"] the sampler's or the teacher's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

Inputs = Mapping[str, np.ndarray]  # each of the targets' shape, [N] or [N, K], of one datum
Settings = Mapping[str, float]
Terms = tuple[np.ndarray, np.ndarray]  # each cell's loss, and the datum's loss by each cell's logprob


def _cross_entropy(lp: np.ndarray, x: Inputs, settings: Settings) -> Terms:
    return -x["weights"] * lp, -x["weights"]


def _kl_divergence(lp: np.ndarray, x: Inputs, settings: Settings) -> Terms:
    mass = np.where(x["weights"] != 0, x["weights"] * np.exp(x["logprobs"]), 0.0)
    return mass * np.where(mass != 0, x["logprobs"] - lp, 0.0), -mass


def _importance_sampling(lp: np.ndarray, x: Inputs, settings: Settings) -> Terms:
    gain = np.exp(_lag(lp, x)) * x["advantages"]
    return -gain, -gain


def _ppo(lp: np.ndarray, x: Inputs, settings: Settings) -> Terms:
    return _clipped(_lag(lp, x), x)


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
    "cross_entropy": _cross_entropy,
    "importance_sampling": _importance_sampling,
    "ppo": _ppo,
    "cispo": _cispo,
    "dro": _dro,
    "gspo": _gspo,
    "kl_divergence": _kl_divergence,
}

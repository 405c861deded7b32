"""The losses that the fake engine knows: terms and their derivatives by the logprob, cell by cell.

The formulas are the wire's (wire-protocol §7). Numpy alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

Inputs = Mapping[str, np.ndarray]
Terms = tuple[np.ndarray, np.ndarray]  # each cell's loss, and its derivative by the cell's logprob


class Loss(NamedTuple):
    terms: Callable[..., Terms]
    needs: tuple[str, ...] = ()
    settings: Mapping[str, float | None] = {}
    wide: bool = False


def _cross_entropy(lp: np.ndarray, x: Inputs) -> Terms:
    return -x["weights"] * lp, -x["weights"]


def _log_ratio(lp: np.ndarray, x: Inputs) -> np.ndarray:
    return np.where(x["advantages"] != 0, lp - x["logprobs"], 0.0)


def _importance_sampling(lp: np.ndarray, x: Inputs) -> Terms:
    term = -np.exp(_log_ratio(lp, x)) * x["advantages"]
    return term, term


def _ppo(lp: np.ndarray, x: Inputs, clip_low_threshold: float, clip_high_threshold: float) -> Terms:
    ratio, advantages = np.exp(_log_ratio(lp, x)), x["advantages"]
    clipped = np.clip(ratio, clip_low_threshold, clip_high_threshold) * advantages
    return -np.minimum(ratio * advantages, clipped), np.where(
        ratio * advantages <= clipped, -ratio * advantages, 0
    )


def _cispo(lp: np.ndarray, x: Inputs, clip_low_threshold: float, clip_high_threshold: float) -> Terms:
    slope = -np.clip(np.exp(_log_ratio(lp, x)), clip_low_threshold, clip_high_threshold) * x["advantages"]
    return slope * lp, slope


def _dro(lp: np.ndarray, x: Inputs, beta: float) -> Terms:
    gap = _log_ratio(lp, x)
    return -(lp * x["advantages"] - 0.5 * beta * gap**2), -(x["advantages"] - beta * gap)


_RL = ("logprobs", "advantages")
LOSSES = {
    "cross_entropy": Loss(_cross_entropy, wide=True),
    "importance_sampling": Loss(_importance_sampling, _RL),
    "ppo": Loss(_ppo, _RL, {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}),
    "cispo": Loss(_cispo, _RL, {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0}),
    "dro": Loss(_dro, _RL, {"beta": None}),
}

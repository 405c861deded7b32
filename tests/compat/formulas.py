"""The policy losses as numpy formulas: the oracle of what official clients are told."""

from __future__ import annotations

from typing import Any

import numpy as np

# What the script sends (it cannot be imported here: it needs the client).
OLD = np.array([-4.0, -3.5, -6.0, -2.5, -5.0, -4.5, -3.0, -5.5])


ADVANTAGES = np.array([0.0, 1.0, -1.0, 0.5, -2.0, 1.5, 2.0, -0.5])


def importance_sampling(lp: Any, ratio: Any, gain: Any, lag: Any) -> float:
    return -(ratio * gain).sum()


def ppo(low: float, high: float) -> Any:
    return lambda lp, ratio, gain, lag: -np.minimum(ratio * gain, np.clip(ratio, low, high) * gain).sum()


def cispo(low: float, high: float) -> Any:
    return lambda lp, ratio, gain, lag: -(np.clip(ratio, low, high) * lp * gain).sum()


def dro(lp: Any, ratio: Any, gain: Any, lag: Any) -> float:
    return -np.where(gain != 0, lp * gain - 0.5 * 0.05 * lag**2, 0.0).sum()  # prompts count for nothing


FORMULAS = {
    "importance_sampling 0": importance_sampling,
    "ppo 0": ppo(0.8, 1.2),
    "ppo 1": ppo(0.5, 1.1),
    "cispo 0": cispo(0.0, 4.0),
    "cispo 1": cispo(0.5, 1.5),
    "dro 0": dro,
}

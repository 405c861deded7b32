"""Every loss as its formula in plain numpy: a sum over positions and datums, in double precision.

lp are the trainer's logprobs of a datum's targets and x its inputs. `still` are the same logprobs where a
gradient must not flow: derivatives are taken by moving lp and leaving `still` where it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

Arrays = Mapping[str, np.ndarray]
Config = Mapping[str, float]
Formula = Callable[[np.ndarray, np.ndarray, Arrays, Config], float]
BatchFormula = Callable[[Sequence[np.ndarray], Sequence[np.ndarray], Sequence[Arrays], Config], float]


def summed(formula: Formula) -> BatchFormula:
    """A loss of one datum, over all of them."""
    return lambda lps, stills, xs, c: sum(map(formula, lps, stills, xs, [c] * len(lps)))


def cross_entropy(lp: np.ndarray, still: np.ndarray, x: Arrays, c: Config) -> float:
    return float(-(lp * x.get("weights", np.ones_like(lp))).sum())


def importance_sampling(lp: np.ndarray, still: np.ndarray, x: Arrays, c: Config) -> float:
    return float(-(np.exp(lp - x["logprobs"]) * x["advantages"]).sum())


def ppo(lp: np.ndarray, still: np.ndarray, x: Arrays, c: Config) -> float:
    return _clipped(np.exp(lp - x["logprobs"]), x, c)


def _clipped(ratio: np.ndarray, x: Arrays, c: Config) -> float:
    low, high = _bounds(x, c, 0.8, 1.2)
    gain = x["advantages"]
    return float(-np.minimum(ratio * gain, np.clip(ratio, low, high) * gain).sum())


def _bounds(x: Arrays, c: Config, low: float, high: float) -> tuple[np.ndarray, np.ndarray]:
    """One per position, or one for all, or the defaults."""
    return tuple(
        x.get(name, np.asarray(c.get(name, default)))
        for name, default in (("clip_low_threshold", low), ("clip_high_threshold", high))
    )  # type: ignore[return-value]


def cispo(lp: np.ndarray, still: np.ndarray, x: Arrays, c: Config) -> float:
    return float(
        -(np.clip(np.exp(still - x["logprobs"]), *_bounds(x, c, 0.0, 4.0)) * lp * x["advantages"]).sum()
    )


def dro(lp: np.ndarray, still: np.ndarray, x: Arrays, c: Config) -> float:
    terms = lp * x["advantages"] - 0.5 * c["beta"] * (lp - x["logprobs"]) ** 2
    return float(-terms[x["advantages"] != 0].sum())  # a prompt's logprobs are made up


def gspo(lp: np.ndarray, still: np.ndarray, x: Arrays, c: Config) -> float:
    mask = x.get("sequence_ratio_mask", x["advantages"]) != 0
    return _clipped(np.exp((lp - x["logprobs"])[mask].mean()), x, c)


def kl_divergence(lp: np.ndarray, still: np.ndarray, x: Arrays, c: Config) -> float:
    teacher = np.exp(x["logprobs"])
    return float((x.get("weights", np.ones_like(lp)) * teacher * (x["logprobs"] - lp)).sum())


# -- losses of one's own ---------------------------------------------------------------------------------


def tempered(lp: np.ndarray, still: np.ndarray, x: Arrays, c: Config) -> float:
    """A whole sequence's ratio, softened, and a pull towards where it came from."""
    lag = lp - x["old"]
    return float(-np.log1p(np.exp(lag.mean())) * x["gain"].sum() + 0.1 * (lag**2).sum())


def preference(
    lps: Sequence[np.ndarray], stills: Sequence[np.ndarray], xs: Sequence[Arrays], c: Config
) -> float:
    """DPO: of two datums the first is preferred; `ref_logprobs` are the reference's."""
    margins = [((lp - x["ref_logprobs"]) * x["weights"]).sum() for lp, x in zip(lps, xs, strict=True)]
    pairs = zip(margins[::2], margins[1::2], strict=True)
    return float(np.mean([np.log1p(np.exp(-0.5 * (chosen - rejected))) for chosen, rejected in pairs]))


def pulled(lp: np.ndarray, still: np.ndarray, x: Arrays, c: Config) -> float:
    """Cross-entropy and a tenth of the squared distance from a reference, where the weight is not zero."""
    distance = (lp - x["ref_logprobs"])[x["weights"] != 0]
    return cross_entropy(lp, still, x, c) + 0.1 * float((distance**2).sum())


def tethered(lp: np.ndarray, still: np.ndarray, x: Arrays, c: Config) -> float:
    """PPO within [0.5, 1.05], and a tenth of the squared distance from the sampler, after the prompt."""
    distance = (lp - x["logprobs"])[x["advantages"] != 0]
    bounds = {"clip_low_threshold": 0.5, "clip_high_threshold": 1.05}
    return ppo(lp, still, x, bounds) + 0.1 * float((distance**2).sum())

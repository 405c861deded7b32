"""The losses: pure functions of the trainer's logprobs, a datum's inputs and the loss's settings.

docs/engine.md has the formulas. Each is a sum over target cells (a position of a datum, or a position and one
of its K candidates), to be minimised. A function returns one term per cell, and autograd computes its
gradient. A cell whose weight or advantage is zero contributes exactly 0, for any logprobs.

For one cell, lp is the trainer's logprob of the target, lq the input `logprobs`, and A `advantages`.
kl_divergence is the forward KL(teacher ‖ trainer) restricted to the listed candidates; neither side is
renormalised, so its gradient is that of cross_entropy with weights w·exp(lq).

Shapes: M target cells.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

Inputs = Mapping[str, Tensor]  # float32 [M] each, and "datum": int64 [M], the cell's datum
Settings = Mapping[str, float]
Metrics = dict[str, float]


def cross_entropy(lp: Tensor, x: Inputs, settings: Settings) -> Tensor:
    return -x["weights"] * lp


def importance_sampling(lp: Tensor, x: Inputs, settings: Settings) -> Tensor:
    return -_ratio(lp, x) * x["advantages"]


def ppo(lp: Tensor, x: Inputs, settings: Settings) -> Tensor:
    return _clipped(_log_ratio(lp, x), x)


def cispo(lp: Tensor, x: Inputs, settings: Settings) -> Tensor:
    ratio = _ratio(lp.detach(), x)
    return -torch.clamp(ratio, x["clip_low_threshold"], x["clip_high_threshold"]) * x["advantages"] * lp


def dro(lp: Tensor, x: Inputs, settings: Settings) -> Tensor:
    return -(lp * x["advantages"] - 0.5 * settings["beta"] * _log_ratio(lp, x).square())


def gspo(lp: Tensor, x: Inputs, settings: Settings) -> Tensor:
    return _clipped(_sequence_log_ratio(lp, x), x)


def kl_divergence(lp: Tensor, x: Inputs, settings: Settings) -> Tensor:
    weights, lq = x["weights"], x["logprobs"]
    mass = torch.where(weights != 0, weights * torch.exp(lq), 0.0)
    return mass * torch.where(mass != 0, lq - lp, 0.0)


def _log_ratio(lp: Tensor, x: Inputs) -> Tensor:
    """lp − lq where there is an advantage, 0 elsewhere: prompts have made-up logprobs."""
    return torch.where(x["advantages"] != 0, lp - x["logprobs"], 0.0)


def _ratio(lp: Tensor, x: Inputs) -> Tensor:
    return torch.exp(_log_ratio(lp, x))


def _sequence_log_ratio(lp: Tensor, x: Inputs) -> Tensor:
    """Each cell's datum's mean of lp − lq over the mask."""
    mask, datum = x["sequence_ratio_mask"], x["datum"]
    if not datum.numel():
        return lp
    datums = int(datum.max()) + 1
    masked = torch.where(mask != 0, lp - x["logprobs"], 0.0)
    total = masked.new_zeros(datums).index_add(0, datum, masked)
    count = mask.new_zeros(datums).index_add(0, datum, mask)
    return (total / count.clamp(min=1.0))[datum]


def _clipped(log_ratio: Tensor, x: Inputs) -> Tensor:
    """−min(r·A, clip(r, lo, hi)·A): a constant where the bound is what counts, and −r·A elsewhere.

    The ratio is not even computed where it is clipped or without an advantage: it may be infinite there, and
    0·inf is no gradient.
    """
    advantages, bounds = x["advantages"], _clip_bound(log_ratio, x)
    inside = torch.exp(torch.where(bounds.isnan() & (advantages != 0), log_ratio, 0.0))
    return -advantages * torch.where(bounds.isnan(), inside, bounds)


def _clip_bound(log_ratio: Tensor, x: Inputs) -> Tensor:
    """The bound that replaces a clipped cell's ratio, NaN where the ratio itself counts."""
    ratio, advantages = torch.exp(log_ratio.detach()), x["advantages"]
    low, high = x["clip_low_threshold"], x["clip_high_threshold"]
    bound = torch.where((advantages > 0) & (ratio > high), high, torch.nan)
    return torch.where((advantages < 0) & (ratio < low), low, bound)


def _weight_metrics(lp: Tensor, x: Inputs) -> Metrics:
    active = x["weights"] != 0
    return {"active:sum": float(active.sum()), "nll:mean": _mean(-lp[active])}


def _ratio_metrics(lp: Tensor, x: Inputs) -> Metrics:
    active = x["advantages"] != 0
    log_ratio = (lp - x["logprobs"])[active].double()
    ratio = torch.exp(log_ratio)
    return {
        "active:sum": float(active.sum()),
        "ratio:mean": _mean(ratio, 1.0),
        "ratio:min": float(ratio.min()) if len(ratio) else 1.0,
        "ratio:max": float(ratio.max()) if len(ratio) else 1.0,
        "kl_sample_train_v1:mean": _mean(-log_ratio),  # E_q[lq − lp]
        "kl_sample_train_v2:mean": _mean(0.5 * log_ratio.square()),
    }


def _ppo_metrics(lp: Tensor, x: Inputs) -> Metrics:
    return _ratio_metrics(lp, x) | _clip_metrics(_log_ratio(lp, x), x)


def _gspo_metrics(lp: Tensor, x: Inputs) -> Metrics:
    log_ratio = _sequence_log_ratio(lp, x)
    sequence = {"sequence_ratio:mean": _mean(torch.exp(log_ratio[x["advantages"] != 0]), 1.0)}
    return _ratio_metrics(lp, x) | _clip_metrics(log_ratio, x) | sequence


def _cispo_metrics(lp: Tensor, x: Inputs) -> Metrics:
    active, ratio = x["advantages"] != 0, _ratio(lp, x)
    outside = (ratio < x["clip_low_threshold"]) | (ratio > x["clip_high_threshold"])
    return _ratio_metrics(lp, x) | {"clip_fraction:mean": _mean(outside[active].float())}


def _clip_metrics(log_ratio: Tensor, x: Inputs) -> Metrics:
    clipped = ~_clip_bound(log_ratio, x).isnan()
    return {"clip_fraction:mean": _mean(clipped[x["advantages"] != 0].float())}


def _mean(values: Tensor, of_nothing: float = 0.0) -> float:
    return float(values.double().mean()) if values.numel() else of_nothing


@dataclass(frozen=True)
class Loss:
    """One loss: its terms and its metrics. Its inputs and settings are in tinkex.types.losses."""

    terms: Callable[[Tensor, Inputs, Settings], Tensor]
    metrics: Callable[[Tensor, Inputs], Metrics]
    local: bool = True  # a cell's gradient depends only on that cell


TORCH_LOSSES: Mapping[str, Loss] = {
    "cross_entropy": Loss(cross_entropy, _weight_metrics),
    "importance_sampling": Loss(importance_sampling, _ratio_metrics),
    "ppo": Loss(ppo, _ppo_metrics),
    "cispo": Loss(cispo, _cispo_metrics),
    "dro": Loss(dro, _ratio_metrics),
    "gspo": Loss(gspo, _gspo_metrics, local=False),
    "kl_divergence": Loss(kl_divergence, _weight_metrics),
}


def gradient(loss: Loss, lp: Tensor, inputs: Inputs, settings: Settings) -> Tensor:
    """∂loss/∂logprobs, cell by cell."""
    leaf = lp.detach().requires_grad_()
    with torch.enable_grad():
        (grad,) = torch.autograd.grad(loss.terms(leaf, inputs, settings).sum(), leaf)
    return grad


def per_datum(terms: Tensor, datum: Tensor, datums: int) -> Tensor:
    """The loss of each datum: the sum of its cells' terms, in double precision."""
    return torch.zeros(datums, dtype=torch.float64, device=terms.device).index_add_(0, datum, terms.double())

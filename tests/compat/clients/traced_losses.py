"""Losses to trace: what people write, and every form that an argument of an operation can have.

Imported by the official client's script and by the test of ours: nothing here knows a client.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

Returned = tuple[torch.Tensor, dict[str, torch.Tensor]]


def weighted(logprobs: torch.Tensor, weights: torch.Tensor) -> Returned:
    loss = -(logprobs * weights).sum()
    return loss, {"custom/nll:sum": loss.detach(), "custom/weight:mean": weights.mean()}


def clipped(logprobs: torch.Tensor, old: torch.Tensor, gain: torch.Tensor) -> Returned:
    ratio = torch.exp(logprobs - old)
    cut = torch.clamp(ratio, 0.8, max=1.2)
    loss = -torch.minimum(ratio * gain, cut * gain).sum()
    return loss, {"custom/clipped:mean": (ratio != cut).float().mean()}


def helped(logprobs: torch.Tensor, old: torch.Tensor) -> Returned:
    return _divergence(logprobs, old).sum(), {}


def _divergence(logprobs: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """A user's own helper: traced through."""
    lag = old - logprobs
    return lag.exp() - lag - 1


def shaped(logprobs: torch.Tensor) -> Returned:
    length = logprobs.shape[0]
    ramp = torch.arange(length, dtype=torch.float32, device=logprobs.device)
    late = (logprobs[1:] * ramp[1:]).sum() / length
    return late * math.log(2.0) + logprobs.size(0) * logprobs[-1], {
        "custom/best:mean": logprobs.max(dim=0).values
    }


def unpacked(logprobs: torch.Tensor) -> Returned:
    values, places = torch.sort(logprobs, descending=True)
    first, second = values.split([1, logprobs.shape[0] - 1])
    return first.sum() - second.mean() + 0.0 * places.sum(), {"custom/a.b/c-d_1:sum": first.sum()}


def curved(logprobs: torch.Tensor) -> Returned:
    smooth = F.softplus(logprobs) + F.huber_loss(logprobs, torch.zeros_like(logprobs), reduction="none")
    bent = torch.special.expit(logprobs) + torch.norm(logprobs, p=2) + abs(2 - logprobs) ** 2
    return smooth.sum() + bent.sum(), {}


def masked(logprobs: torch.Tensor, keep: torch.Tensor) -> Returned:
    kept = torch.where(keep > 0, logprobs, logprobs.new_full((), 0.0))
    finite = kept.masked_fill(kept == float("-inf"), 0.0).nan_to_num(nan=float("nan"))
    return finite[None, ...].squeeze(0)[::1].to(torch.float64).sum().to(dtype=logprobs.dtype), {}


def joined(logprobs: torch.Tensor) -> Returned:
    both = torch.cat([logprobs, -logprobs], dim=0).view(2, -1)
    return torch.logsumexp(both, dim=(0, 1)), {"custom/even:sum": both[:, 0].sum()}


def scaled(logprobs: torch.Tensor, beta: torch.Tensor) -> Returned:
    return (logprobs * beta).sum(), {}


def spread(logprobs: torch.Tensor, weights: torch.Tensor) -> Returned:
    return -(logprobs.log_softmax(-1) * weights).sum(), {}


LOSSES: list[tuple[Callable[..., Any], dict[str, int]]] = [
    (weighted, {"logprobs": 1, "weights": 1}),
    (clipped, {"logprobs": 1, "old": 1, "gain": 1}),
    (helped, {"logprobs": 1, "old": 1}),
    (shaped, {"logprobs": 1}),
    (unpacked, {"logprobs": 1}),
    (curved, {"logprobs": 1}),
    (masked, {"logprobs": 1, "keep": 1}),
    (joined, {"logprobs": 1}),
    (scaled, {"logprobs": 1, "beta": 0}),
    (spread, {"logprobs": 2, "weights": 2}),
]

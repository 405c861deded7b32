"""AdamW on an adapter's flat buffer, by torch.optim's fused kernel.

Clips by the global norm. A step is atomic: one whose gradient, or its square, is not finite is refused
and changes nothing. The kernel itself skips a refused step, so the device never waits for the host.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from tinkex.engine.protocol import EngineError
from tinkex.engine.torch.adapters import Adapter
from tinkex.types.params import AdamParams

_BLOCK = 1 << 16  # elements whose norm is computed in fp32; the blocks' norms are summed in fp64
_LARGEST = 1e19  # beyond, squares overflow in fp32: the second moment would be infinite for good
_PLAUSIBLE = 1e3  # of an adapter's weights; a fresh one's are below 1
_TINY = 1e-37  # with eps 0, a parameter that never had a gradient would become 0/0


@torch.no_grad()
def adamw_step(
    adapter: Adapter, params: AdamParams, norm_of: Callable[[Tensor], Tensor] | None = None
) -> dict[str, float]:
    """Update `adapter` from its gradients and clear them; returns the step's metrics.

    `norm_of`: the norm of the gradient, where `adapter` is a part of one.
    """
    grad = adapter.take_grad()
    if grad is None:
        return _metrics(adapter, params, grad_norm=0.0, skipped=1.0)
    norm, shrink, refused = _apply(adapter, grad, params, (norm_of or _global_norm)(grad)).tolist()
    if math.isinf(norm) and norm_of is None:  # squares may overflow in fp32 where the numbers do not
        in_double = torch.linalg.vector_norm(grad, dtype=torch.float64)
        norm, shrink, refused = _apply(adapter, grad, params, in_double).tolist()
    if refused:
        if adapter.step == 0:
            adapter.exp_avg = adapter.exp_avg_sq = None  # as they were
        raise EngineError(_why_refused(adapter, norm), "user")
    adapter.step += 1
    adapter.changed()
    return _metrics(adapter, params, grad_norm=norm, grad_clipped=float(shrink < 1.0))


def _why_refused(adapter: Adapter, norm: float) -> str:
    largest = float(adapter.flat.abs().max())
    if not largest <= _PLAUSIBLE:  # NaN too
        size = f"as large as {largest:.3g}" if math.isfinite(largest) else "not finite"
        return (
            f"the adapter's weights are {size} after step {adapter.step}, so no gradient can be computed and "
            "this step was not applied. The learning rate was likely too large: load an earlier checkpoint, "
            "or start a new run with a smaller one."
        )
    problem = "too large" if math.isfinite(norm) else "not finite"
    return (
        f"the gradient is {problem} (global norm {norm:g}), so this step was not applied and the "
        "gradients were cleared; the adapter is as it was. Look for extreme weights, advantages or "
        "ratios in the passes since the last step."
    )


def _apply(adapter: Adapter, grad: Tensor, params: AdamParams, norm: Tensor) -> Tensor:
    """The step, unless it is refused; returns the norm, the factor of clipping, and whether it is refused.

    Nothing here waits for the device. Where the norm is infinite the gradient is not clipped.
    """
    shrink = torch.ones_like(norm)
    if params.grad_clip_norm > 0:  # as torch's clip_grad_norm_ has it
        shrink = torch.where(norm.isinf(), 1.0, params.grad_clip_norm / (norm + 1e-6)).clamp(max=1.0)
        grad.mul_(shrink)
    refused = ~(norm * shrink <= _LARGEST)
    _update(adapter, grad, params, refused.float())
    return torch.stack((norm, shrink, refused.double()))


def _global_norm(grad: Tensor) -> Tensor:
    """Infinite if a block's squares overflow."""
    whole = len(grad) // _BLOCK * _BLOCK
    blocks = torch.linalg.vector_norm(grad[:whole].view(-1, _BLOCK), dim=1)
    norms = torch.cat((blocks, torch.linalg.vector_norm(grad[whole:]).view(1))).double()
    return torch.linalg.vector_norm(norms)


def _update(adapter: Adapter, grad: Tensor, params: AdamParams, refused: Tensor) -> None:
    moments, squares = adapter.moments()
    step = torch.full((), float(adapter.step), device=grad.device)
    options: dict[str, Any] = {"fused": True, "found_inf": refused, "amsgrad": False, "maximize": False}
    rates: dict[str, Any] = {"lr": params.learning_rate, "beta1": params.beta1, "beta2": params.beta2}
    rates |= {"eps": max(params.eps, _TINY), "weight_decay": params.weight_decay}
    adamw([adapter.flat], [grad], [moments], [squares], [], [step], **options, **rates)


def _metrics(adapter: Adapter, params: AdamParams, *, grad_norm: float, **more: float) -> dict[str, float]:
    return {
        "grad_norm": grad_norm,
        "learning_rate": params.learning_rate,
        "grad_clipped": 0.0,
        "skipped": 0.0,
        "optimizer_step": float(adapter.step),  # `step` would overwrite the loop's own in its log
    } | more

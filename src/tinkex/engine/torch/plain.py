"""The decoder's elementwise steps written out in torch operations, forward and backward, for any device.

`cuda.elementwise` has the same functions as single kernels; `functions` wraps either in autograd.

Shapes: T tokens, H query heads, G kv heads, P = H + G, C head dim, F MLP width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tinkex.engine.torch.hooks import Norms


def normalise(
    x: Tensor, rest: Tensor | None, delta: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """x + rest + delta as `add` gives it, its RMSNorm, and 1 / rms, which the backward needs."""
    total, rest = (x, rest) if delta is None else add(x, rest, delta)
    wide = _sum(total, rest, None)
    rstd = (torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_() / x.shape[-1]).add_(eps).rsqrt_()
    y = wide * rstd
    y = y.mul_(weight).to(x.dtype) if weight.dtype == torch.float32 else y.to(x.dtype).mul_(weight)
    return total, rest, y, rstd


def add(x: Tensor, rest: Tensor | None, delta: Tensor) -> tuple[Tensor, Tensor | None]:
    """x + rest + delta in x's dtype, and what rounding took from it: None in fp32, where nothing is."""
    wide = _sum(x, rest, delta)
    total = wide.to(x.dtype)
    return total, None if x.dtype == torch.float32 else (wide - total).to(x.dtype)


def _sum(x: Tensor, rest: Tensor | None, delta: Tensor | None) -> Tensor:
    wide = x.float()
    wide = wide if rest is None else wide + rest
    return wide if delta is None else wide + delta


def normalise_backward(grad: Tensor, x: Tensor, rstd: Tensor, weight: Tensor, more: Tensor | None) -> Tensor:
    """rstd * (g·w − x̂ · mean(g·w·x̂)), with x̂ = x · rstd, and `more` added to it."""
    wide, scaled = x.float(), (grad * weight).float()
    along = torch.linalg.vecdot(scaled, wide).unsqueeze_(-1).mul_(rstd.pow(3)).div_(-x.shape[-1])
    out = scaled.mul_(rstd).addcmul_(wide, along).to(grad.dtype)
    if more is not None:
        out += more
    return out


def _turn(x: Tensor, cos: Tensor, sin: Tensor, out: Tensor, sign: int) -> None:
    """Turn each head's pairs (x[i], x[i + C/2]) by `sign` times their angle; cos and sin are [T, 1, C/2]."""
    a, b = x.chunk(2, dim=-1)
    out_a, out_b = out.chunk(2, dim=-1)
    torch.mul(a, cos, out=out_a).addcmul_(b, sin, value=-sign)
    torch.mul(b, cos, out=out_b).addcmul_(a, sin, value=sign)


def _weight_PC(norms: Norms, h: int, g: int) -> Tensor:
    """A row for each head, so that one operation normalises q and k."""
    return torch.cat((norms[0].expand(h, -1), norms[1].expand(g, -1)))


def rotate(
    qkv: Tensor, cos: Tensor, sin: Tensor, heads: tuple[int, int], norms: Norms | None, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """q_THC and k_TGC, normalised (if asked) and rotated, v_TGC, and 1 / rms of q's and k's heads."""
    h, g = heads
    fused = qkv.view(qkv.shape[0], h + 2 * g, -1)
    qk, v = fused[:, : h + g], fused[:, h + g :]
    rstd = None
    if norms is not None:
        _, _, qk, rstd = normalise(qk, None, None, _weight_PC(norms, h, g), eps)
    turned = torch.empty(qk.shape, dtype=qk.dtype, device=qk.device)
    _turn(qk, cos.unsqueeze(1), sin.unsqueeze(1), turned, 1)
    # v is copied so that, without norms, the fused projection is freed and not kept until the backward
    return turned[:, :h], turned[:, h:], v.clone(), rstd


def rotate_backward(
    grads: tuple[Tensor, Tensor, Tensor],
    qkv: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    norms: Norms | None,
    rstd: Tensor | None,
) -> Tensor:
    """The gradient to the fused projection, whose values only the norms need."""
    grad_q, grad_k, grad_v = grads
    (tokens, h, c), g = grad_q.shape, grad_k.shape[1]
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    fused = torch.empty(tokens, h + 2 * g, c, dtype=grad_q.dtype, device=grad_q.device)
    _turn(grad_q, cos, sin, fused[:, :h], -1)
    _turn(grad_k, cos, sin, fused[:, h : h + g], -1)
    fused[:, h + g :] = grad_v
    if norms is not None:
        assert qkv is not None
        assert rstd is not None
        raw = qkv.view(tokens, h + 2 * g, c)[:, : h + g]
        fused[:, : h + g] = normalise_backward(fused[:, : h + g], raw, rstd, _weight_PC(norms, h, g), None)
    return fused.view(tokens, -1)


def swiglu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def swiglu_backward(grad: Tensor, gate_up: Tensor) -> Tensor:
    """The gradient to the fused [T, 2F]; silu(gate) is computed again."""
    gate, up = gate_up.chunk(2, dim=-1)
    out = torch.empty_like(gate_up)
    grad_gate, grad_up = out.chunk(2, dim=-1)
    torch.ops.aten.silu.out(gate, out=grad_up).mul_(grad)
    torch.mul(grad, up, out=grad_gate)
    torch.ops.aten.silu_backward.grad_input(grad_gate, gate, grad_input=grad_gate)
    return out

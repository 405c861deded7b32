"""The decoder's elementwise steps, lean in time and memory: RMSNorm with its residual, rotation, SwiGLU.

Each is a plain function and an autograd Function around it that keeps as little as its backward needs and
writes gradients of fused projections into one buffer. The base model's weights are frozen, so none of them
computes a gradient for a weight.

Shapes: T tokens, D width, H query heads, G kv heads, P = H + G, C head dim, F MLP width.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, packed: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias for a frozen weight; on CPU by the kernel that is quickest for so many rows.

    `packed` is what `pack` made of the weight, if anything; it is used where no gradient is needed.
    """
    if not _use_onednn(weight):
        return F.linear(x, weight, bias)
    if x.requires_grad:
        return _Linear.apply(x, weight, bias)
    rows, by_columns = x.shape[0], weight.t().is_contiguous()
    if rows == 1 and by_columns and weight.shape[0] > weight.shape[1]:
        return F.linear(x, weight, bias)  # oneDNN takes up to twice as long
    if packed is not None and (rows > 2 or not by_columns):
        weight = packed
    return product(x, weight, bias)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last dimension; statistics in fp32."""
    return _RmsNorm.apply(x, weight, eps) if x.requires_grad else _normalise(x, weight, eps)[0]


def add_rms_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The residual stream x + delta, and its RMSNorm."""
    if x.requires_grad or delta.requires_grad:
        return _AddRmsNorm.apply(x, delta, weight, eps)
    total = x + delta
    return total, _normalise(total, weight, eps)[0]


def split_rotate(
    qkv: Tensor, cos: Tensor, sin: Tensor, heads: tuple[int, int], norm_PC: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Split a fused [T, (H+2G)·C] into q_THC, k_TGC, v_TGC; q and k are normalised (if asked) and rotated."""
    return _SplitRotate.apply(qkv, cos, sin, heads, norm_PC, eps)


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of a fused [T, 2F]."""
    if gate_up.requires_grad:
        return _SwiGlu.apply(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


# -- matrix products -----------------------------------------------------------------------------------

_PACK_ROWS = 64  # what the blocked layout is chosen for; any number of rows can use it
_ONEDNN = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def _use_onednn(weight: Tensor) -> bool:
    # below this size the call costs more than it saves
    return (
        _ONEDNN
        and weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and weight.numel() >= 1 << 16
    )


def pack(weight: Tensor) -> Tensor | None:
    """A copy of a weight in oneDNN's blocked layout, for `linear`; None where that is of no use.

    Few rows then multiply 1.1 to 1.6 times as fast. Only a oneDNN product can read it.
    """
    return (
        torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _PACK_ROWS) if _use_onednn(weight) else None
    )


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias through oneDNN, without autograd. Quickest when `weight.T` is contiguous."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


class _Linear(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(weight)
        return product(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (weight,) = ctx.saved_tensors
        return product(grads[0], weight.t()), None, None


# -- RMSNorm -------------------------------------------------------------------------------------------


def _normalise(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The normalised x and 1 / rms(x), which the backward needs."""
    wide = x.float()
    rstd = (torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_() / x.shape[-1]).add_(eps).rsqrt_()
    return (wide * rstd).to(x.dtype).mul_(weight), rstd


def _normalise_backward(grad: Tensor, x: Tensor, rstd: Tensor, weight: Tensor) -> Tensor:
    """rstd * (g·w − x̂ · mean(g·w·x̂)), with x̂ = x · rstd."""
    wide, scaled = x.float(), (grad * weight).float()
    along = torch.linalg.vecdot(scaled, wide).unsqueeze_(-1).mul_(rstd.pow(3)).div_(-x.shape[-1])
    return scaled.mul_(rstd).addcmul_(wide, along).to(grad.dtype)


class _RmsNorm(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        y, rstd = _normalise(x, weight, eps)
        ctx.save_for_backward(x, rstd, weight)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, rstd, weight = ctx.saved_tensors
        return _normalise_backward(grads[0], x, rstd, weight), None, None


class _AddRmsNorm(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        total = x + delta
        y, rstd = _normalise(total, weight, eps)
        ctx.save_for_backward(total, rstd, weight)
        ctx.set_materialize_grads(False)
        return total, y

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        total, rstd, weight = ctx.saved_tensors
        grad_total, grad_y = grads
        if grad_y is None:
            return grad_total, grad_total, None, None
        grad = _normalise_backward(grad_y, total, rstd, weight)
        if grad_total is not None:
            grad += grad_total
        return grad, grad, None, None


# -- rotation ------------------------------------------------------------------------------------------


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, out: Tensor, sign: int) -> None:
    """Turn each head's pairs (x[i], x[i + C/2]) by `sign` times their angle; cos and sin are [T, 1, C/2]."""
    a, b = x.chunk(2, dim=-1)
    out_a, out_b = out.chunk(2, dim=-1)
    torch.mul(a, cos, out=out_a).addcmul_(b, sin, value=-sign)
    torch.mul(b, cos, out=out_b).addcmul_(a, sin, value=sign)


class _SplitRotate(Function):
    @staticmethod
    def forward(ctx: Any, qkv, cos, sin, heads, norm_PC, eps):  # type: ignore[override]
        h, g = heads
        fused = qkv.view(qkv.shape[0], h + 2 * g, -1)
        qk, v = fused[:, : h + g], fused[:, h + g :]
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        raw = rstd = None
        if norm_PC is not None:
            raw = qk
            qk, rstd = _normalise(qk, norm_PC, eps)
        turned = torch.empty(qk.shape, dtype=qk.dtype, device=qk.device)
        _rotate(qk, cos, sin, turned, 1)
        ctx.save_for_backward(cos, sin, raw, rstd, norm_PC)
        # v is copied so that the fused projection is freed here and not kept until the backward
        return turned[:, :h], turned[:, h:], v.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        cos, sin, raw, rstd, norm_PC = ctx.saved_tensors
        grad_q, grad_k, grad_v = grads
        (tokens, h, c), g = grad_q.shape, grad_k.shape[1]
        fused = torch.empty(tokens, h + 2 * g, c, dtype=grad_q.dtype, device=grad_q.device)
        _rotate(grad_q, cos, sin, fused[:, :h], -1)
        _rotate(grad_k, cos, sin, fused[:, h : h + g], -1)
        fused[:, h + g :] = grad_v
        if norm_PC is not None:
            fused[:, : h + g] = _normalise_backward(fused[:, : h + g], raw, rstd, norm_PC)
        return fused.view(tokens, -1), None, None, None, None, None


# -- SwiGLU --------------------------------------------------------------------------------------------


class _SwiGlu(Function):
    """Keeps only its input, which the fused projection made, and recomputes silu(gate) in the backward."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (gate_up,) = ctx.saved_tensors
        (gate, up), grad = gate_up.chunk(2, dim=-1), grads[0]
        out = torch.empty_like(gate_up)
        grad_gate, grad_up = out.chunk(2, dim=-1)
        torch.ops.aten.silu.out(gate, out=grad_up).mul_(grad)
        torch.mul(grad, up, out=grad_gate)
        torch.ops.aten.silu_backward.grad_input(grad_gate, gate, grad_input=grad_gate)
        return out

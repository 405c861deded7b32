"""The decoder's products and elementwise steps, as autograd sees them: lean in time and memory.

`impl` is the module that computes: `plain`, or `engine.cuda.elementwise`, which has the same functions.
The base model's weights are frozen, so none of them gets a gradient.

Shapes: T tokens, D width, H query heads, G kv heads, C head dim, F MLP width.
"""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from tinkex.engine.torch import plain
from tinkex.engine.torch.hooks import Norms, PartialProjection

if TYPE_CHECKING:
    from tinkex.engine.torch.quantised import QuantisedMatrix


def linear(
    x: Tensor, weight: Tensor | QuantisedMatrix, bias: Tensor | None = None, packed: Tensor | None = None
) -> Tensor:
    """x @ weight.T + bias for a frozen weight; `packed` is what `pack` made of the weight, if anything."""
    if not isinstance(weight, Tensor):
        return weight.linear(x, bias)
    if x.requires_grad and _use_onednn(weight):
        return _Linear.apply(x, weight, bias)
    return frozen_product(x, weight, bias, packed)


def frozen_product(
    x: Tensor, weight: Tensor | QuantisedMatrix, bias: Tensor | None = None, packed: Tensor | None = None
) -> Tensor:
    """The same where autograd need not see it; on CPU by the kernel that is quickest for so many rows."""
    if not isinstance(weight, Tensor):
        return weight.product(x, bias)
    if not _use_onednn(weight):
        return F.linear(x, weight, bias)
    rows, by_columns = x.shape[0], weight.t().is_contiguous()
    if rows == 1 and by_columns and weight.shape[0] > weight.shape[1]:
        return F.linear(x, weight, bias)  # oneDNN takes up to twice as long
    if packed is not None and (rows > 2 or not by_columns):
        weight = packed
    return product(x, weight, bias)


class Stream(NamedTuple):
    """The residual stream: x in the model's dtype and what rounding took from it (None: nothing, as in fp32).

    Every layer adds a little to a large sum, so pure bf16 would lose more here than in all products together.
    The backward uses only x.
    """

    x: Tensor
    rest: Tensor | None = None


def rms_norm(stream: Stream, weight: Tensor, eps: float, impl: ModuleType = plain) -> Tensor:
    """x / rms(x) * weight over the last dimension; statistics in fp32."""
    if stream.x.requires_grad:
        return _AddRmsNorm.apply(*stream, None, weight, eps, impl)[2]
    return impl.normalise(*stream, None, weight, eps)[2]


def add_rms_norm(
    stream: Stream, delta: Tensor | PartialProjection, weight: Tensor, eps: float, impl: ModuleType = plain
) -> tuple[Stream, Tensor]:
    """The stream with `delta` added to it, and its RMSNorm."""
    delta = delta if isinstance(delta, Tensor) else delta.addend()
    if stream.x.requires_grad or delta.requires_grad:
        x, rest, y = _AddRmsNorm.apply(*stream, delta, weight, eps, impl)
    else:
        x, rest, y, _ = impl.normalise(*stream, delta, weight, eps)
    return Stream(x, rest), y


def add(stream: Stream, delta: Tensor, impl: ModuleType = plain) -> Stream:
    """The stream with `delta` added to it."""
    if stream.x.requires_grad or delta.requires_grad:
        return Stream(*_Add.apply(*stream, delta, impl))
    return Stream(*impl.add(*stream, delta))


def split_rotate(
    qkv: Tensor | PartialProjection,
    cos: Tensor,
    sin: Tensor,
    heads: tuple[int, int],
    norms: Norms | None,
    eps: float,
    impl: ModuleType = plain,
) -> tuple[Tensor, Tensor, Tensor]:
    """Split a fused [T, (H+2G)·C] into q_THC, k_TGC, v_TGC; q and k are normalised (if asked) and rotated."""
    if not isinstance(qkv, Tensor):
        return qkv.rotate(cos, sin, heads, norms, eps)
    q_norm, k_norm = norms or (None, None)
    return _SplitRotate.apply(qkv, cos, sin, heads, q_norm, k_norm, eps, impl)


def swiglu(gate_up: Tensor | PartialProjection, impl: ModuleType = plain) -> Tensor:
    """silu(gate) * up of a fused [T, 2F]."""
    if not isinstance(gate_up, Tensor):
        return gate_up.swiglu()
    return _SwiGlu.apply(gate_up, impl) if gate_up.requires_grad else impl.swiglu(gate_up)


def capped(logits: Tensor, cap: float) -> Tensor:
    return (logits / cap).tanh() * cap


_PACK_ROWS = 64  # what the blocked layout is chosen for; any number of rows can use it
_ONEDNN = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def _use_onednn(weight: Tensor) -> bool:
    suits = _ONEDNN and weight.device.type == "cpu" and weight.dtype == torch.float32
    return suits and weight.numel() >= 1 << 16  # below, the call costs more than it saves


def pack(weight: Tensor) -> Tensor | None:
    """A copy of a weight in oneDNN's blocked layout, for `linear`; None where that is of no use.

    Few rows then multiply 1.1 to 1.6 times as fast. Only a oneDNN product can read it.
    """
    if not _use_onednn(weight):
        return None
    return torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _PACK_ROWS)


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


class _AddRmsNorm(Function):
    @staticmethod
    def forward(ctx: Any, x, rest, delta, weight, eps, impl: ModuleType):  # type: ignore[override]
        total, rest, y, rstd = impl.normalise(x, rest, delta, weight, eps)
        ctx.save_for_backward(total, rstd, weight)
        ctx.impl, ctx.adds = impl, delta is not None
        ctx.set_materialize_grads(False)
        if delta is None:
            return None, None, y
        if rest is not None:
            ctx.mark_non_differentiable(rest)
        return total, rest, y

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        total, rstd, weight = ctx.saved_tensors
        grad, _, grad_y = grads
        if grad_y is not None:
            grad = ctx.impl.normalise_backward(grad_y, total, rstd, weight, grad)
        return grad, None, grad if ctx.adds else None, None, None, None


class _Add(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rest: Tensor | None, delta: Tensor, impl: ModuleType) -> Any:
        total, rest = impl.add(x, rest, delta)
        ctx.set_materialize_grads(False)
        if rest is not None:
            ctx.mark_non_differentiable(rest)
        return total, rest

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None, grads[0], None


class _SplitRotate(Function):
    @staticmethod
    def forward(ctx: Any, qkv, cos, sin, heads, q_norm, k_norm, eps, impl: ModuleType):  # type: ignore[override]
        norms = None if q_norm is None else (q_norm, k_norm)
        q, k, v, rstd = impl.rotate(qkv, cos, sin, heads, norms, eps)
        ctx.save_for_backward(None if norms is None else qkv, cos, sin, q_norm, k_norm, rstd)
        ctx.impl = impl
        return q, k, v

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        qkv, cos, sin, q_norm, k_norm, rstd = ctx.saved_tensors
        norms = None if q_norm is None else (q_norm, k_norm)
        grad = ctx.impl.rotate_backward(grads, qkv, cos, sin, norms, rstd)
        return grad, None, None, None, None, None, None, None


class _SwiGlu(Function):
    """Keeps only its input, which the fused projection made."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, impl: ModuleType) -> Tensor:
        ctx.save_for_backward(gate_up)
        ctx.impl = impl
        return impl.swiglu(gate_up)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (gate_up,) = ctx.saved_tensors
        return ctx.impl.swiglu_backward(grads[0], gate_up), None

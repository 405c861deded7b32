# pyright: reportMissingImports=false, reportIndexIssue=false, reportArgumentType=false, reportCallIssue=false
"""Attention whose heads have a gate and are rotated in part: splitting the projection, and gating the result.

Computes what `models.attention.Attention.split` does for norms of whole heads and rotation by halves of their
first dimensions, and o · sigmoid(gate), with one pass over memory each; backward too.

Shapes: T tokens, H query heads, G kv heads, C head dim.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd import Function

from tinkex.engine.cuda.launch import PDL, cdiv, launched, load_fp32, power_of_2, wait_for_previous
from tinkex.engine.torch.hooks import Norms

_HEADS = 4  # of one program
_COLUMNS = 1024  # of one program


class HeadShape(NamedTuple):
    """How the heads lie in a fused projection: each query's gate, if there is one, after the query."""

    heads: int
    kv_heads: int
    head_dim: int
    gate: bool

    @property
    def width(self) -> int:
        return ((1 + self.gate) * self.heads + 2 * self.kv_heads) * self.head_dim


@triton.jit
def _places(head, c, H, G, C: tl.constexpr, PAIRS: tl.constexpr, GATE: tl.constexpr):
    """Where heads begin in the projection; each column's partner in the rotation, and its sign."""
    start = head * C
    if GATE:
        start += tl.minimum(head, H) * C
    partner = tl.where(c < PAIRS, c + PAIRS, c - PAIRS)
    return start[:, None], partner, tl.where(c < PAIRS, -1.0, 1.0)


@triton.jit
def _parts(q, k, v, token, head, inside, H, G, C: tl.constexpr):
    """Where q, k and v would begin if heads were counted through, and which heads belong to each."""
    is_q, is_k = (head < H)[:, None] & inside, ((head >= H) & (head < H + G))[:, None] & inside
    is_v = (head >= H + G)[:, None] & inside
    return q + token * H * C, k + (token * G - H) * C, v + (token * G - H - G) * C, is_q, is_k, is_v


@triton.jit
def _weights(q_norm, k_norm, head, H, at, have):
    q, k = load_fp32(q_norm + at, have)[None, :], load_fp32(k_norm + at, have)[None, :]
    return tl.where((head < H)[:, None], q, k)


@launched
@triton.jit
def _split(
    qkv, cos, sin, q_norm, k_norm, q, k, v, gate, rstd, eps, H, G,
    C: tl.constexpr, PAIRS: tl.constexpr, NORM: tl.constexpr, WIDE: tl.constexpr, GATE: tl.constexpr,
    HEADS: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    wait_for_previous()
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    c = tl.arange(0, BLOCK_C)
    inside = (head < H + 2 * G)[:, None] & (c < C)[None, :]
    start, partner, sign = _places(head, c, H, G, C, PAIRS, GATE)
    base = qkv + token * ((1 + GATE) * H + 2 * G) * C + start
    rotated = c < 2 * PAIRS
    turned = (head < H + G)[:, None] & rotated[None, :]
    x, y = load_fp32(base + c[None, :], inside), load_fp32(base + partner[None, :], inside & turned)
    if NORM:
        r = tl.rsqrt(tl.sum(x * x, 1) / C + eps)
        tl.store(rstd + token * (H + G) + head, r, mask=head < H + G)
        normed, xr, yr = (head < H + G)[:, None], x * r[:, None], y * r[:, None]
        if not WIDE:
            xr, yr = xr.to(qkv.dtype.element_ty).to(tl.float32), yr.to(qkv.dtype.element_ty).to(tl.float32)
        x = tl.where(normed, xr * _weights(q_norm, k_norm, head, H, c, c < C), x)
        y = yr * _weights(q_norm, k_norm, head, H, partner, rotated)
    angle = token * PAIRS + c % PAIRS
    co, si = load_fp32(cos + angle, rotated)[None, :], load_fp32(sin + angle, rotated)[None, :]
    x = tl.where(turned, x * co + sign[None, :] * y * si, x)
    to = head[:, None] * C + c[None, :]
    at_q, at_k, at_v, is_q, is_k, is_v = _parts(q, k, v, token, head, inside, H, G, C)
    tl.store(at_q + to, x, mask=is_q)
    tl.store(at_k + to, x, mask=is_k)
    tl.store(at_v + to, x, mask=is_v)
    if GATE:
        tl.store(gate + token * H * C + to, tl.load(base + C + c[None, :], mask=is_q), mask=is_q)


@launched
@triton.jit
def _split_backward(
    grad_q, grad_k, grad_v, grad_gate, qkv, cos, sin, q_norm, k_norm, rstd, out, H, G,
    C: tl.constexpr, PAIRS: tl.constexpr, NORM: tl.constexpr, GATE: tl.constexpr,
    HEADS: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    wait_for_previous()
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    c = tl.arange(0, BLOCK_C)
    inside = (head < H + 2 * G)[:, None] & (c < C)[None, :]
    start, partner, sign = _places(head, c, H, G, C, PAIRS, GATE)
    place = token * ((1 + GATE) * H + 2 * G) * C + start
    rotated, normed = c < 2 * PAIRS, (head < H + G)[:, None]
    turned = normed & rotated[None, :]
    to, other = head[:, None] * C + c[None, :], head[:, None] * C + partner[None, :]
    at_q, at_k, at_v, is_q, is_k, is_v = _parts(grad_q, grad_k, grad_v, token, head, inside, H, G, C)
    x = load_fp32(at_q + to, is_q) + load_fp32(at_k + to, is_k) + load_fp32(at_v + to, is_v)
    y = load_fp32(at_q + other, is_q & turned) + load_fp32(at_k + other, is_k & turned)
    angle = token * PAIRS + c % PAIRS
    co, si = load_fp32(cos + angle, rotated)[None, :], load_fp32(sin + angle, rotated)[None, :]
    x = tl.where(turned, x * co - sign[None, :] * y * si, x)
    if NORM:
        r = tl.load(rstd + token * (H + G) + head, mask=head < H + G, other=0.0)[:, None]
        raw = load_fp32(qkv + place + c[None, :], inside & normed) * r
        scaled = x * _weights(q_norm, k_norm, head, H, c, c < C)
        along = tl.sum(scaled * raw, 1)[:, None] / C
        x = tl.where(normed, (scaled - raw * along) * r, x)
    tl.store(out + place + c[None, :], x, mask=inside)
    if GATE:
        at_gate = grad_gate + token * H * C + to
        tl.store(out + place + C + c[None, :], tl.load(at_gate, mask=is_q), mask=is_q)


@launched
@triton.jit
def _gate(o, gate, out, N, BLOCK: tl.constexpr):
    wait_for_previous()
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = load_fp32(o + at, at < N) * tl.sigmoid(load_fp32(gate + at, at < N))
    tl.store(out + at, x, mask=at < N)


@launched
@triton.jit
def _gate_backward(grad, o, gate, grad_o, grad_gate, N, BLOCK: tl.constexpr):
    wait_for_previous()
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    g, sig = load_fp32(grad + at, at < N), tl.sigmoid(load_fp32(gate + at, at < N))
    tl.store(grad_o + at, g * sig, mask=at < N)
    tl.store(grad_gate + at, g * load_fp32(o + at, at < N) * sig * (1 - sig), mask=at < N)


# -- launching -----------------------------------------------------------------------------------------


def _constants(shape: HeadShape, pairs: int, norms: Norms | None) -> dict[str, Any]:
    block, warps = max(16, power_of_2(shape.head_dim)), 4
    sizes = {"C": shape.head_dim, "PAIRS": pairs, "NORM": norms is not None, "GATE": int(shape.gate)}
    return {**sizes, "HEADS": _HEADS, "BLOCK_C": block, "num_warps": warps, **PDL}


def split(
    qkv: Tensor, cos: Tensor, sin: Tensor, shape: HeadShape, norms: Norms | None, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """q_THC, k_TGC, v_TGC, the gate [T, H, C] if there is one, and 1 / rms of q's and k's heads."""
    tokens, (h, g, c, gated) = qkv.shape[0], shape
    q, k, v = (qkv.new_empty(tokens, n, c) for n in (h, g, g))
    gate = torch.empty_like(q) if gated else None
    rstd = torch.empty(tokens, h + g, dtype=torch.float32, device=qkv.device) if norms else None
    _split[(tokens, cdiv(h + 2 * g, _HEADS))](
        qkv, cos, sin, *(norms or (cos, cos)), q, k, v, q if gate is None else gate,
        cos if rstd is None else rstd, eps, h, g, WIDE=norms is not None and norms[0].dtype == torch.float32,
        **_constants(shape, cos.shape[1], norms),
    )  # fmt: skip
    return q, k, v, gate, rstd


def split_backward(
    grads: tuple[Tensor, Tensor, Tensor, Tensor | None], qkv: Tensor | None, cos: Tensor, sin: Tensor,
    shape: HeadShape, norms: Norms | None, rstd: Tensor | None,
) -> Tensor:  # fmt: skip
    """The gradient to the fused projection; without norms it does not need its values."""
    q, k, v = (grad.contiguous() for grad in grads[:3] if grad is not None)
    gate = q if grads[3] is None else grads[3].contiguous()
    out = q.new_empty(q.shape[0], shape.width)
    _split_backward[(q.shape[0], cdiv(shape.heads + 2 * shape.kv_heads, _HEADS))](
        q, k, v, gate, out if qkv is None else qkv, cos, sin, *(norms or (cos, cos)),
        cos if rstd is None else rstd, out, shape.heads, shape.kv_heads,
        **_constants(shape, cos.shape[1], norms),
    )  # fmt: skip
    return out


def gate(o: Tensor, gates: Tensor) -> Tensor:
    """o · sigmoid(gates)."""
    out = torch.empty_like(o)
    _gate[(cdiv(o.numel(), _COLUMNS),)](o, gates, out, o.numel(), BLOCK=_COLUMNS, num_warps=4, **PDL)
    return out


def gate_backward(grad: Tensor, o: Tensor, gates: Tensor) -> tuple[Tensor, Tensor]:
    grad_o, grad_gates = torch.empty_like(o), torch.empty_like(o)
    _gate_backward[(cdiv(o.numel(), _COLUMNS),)](
        grad.contiguous(), o, gates, grad_o, grad_gates, o.numel(), BLOCK=_COLUMNS, num_warps=4, **PDL
    )
    return grad_o, grad_gates


class SplitHeads(Function):
    """`split` for autograd: q, k, v and, if there is one, the gate."""

    @staticmethod
    def forward(ctx: Any, qkv, cos, sin, shape: HeadShape, q_norm, k_norm, eps: float):  # type: ignore[override]
        norms = None if q_norm is None else (q_norm, k_norm)
        q, k, v, gates, rstd = split(qkv, cos, sin, shape, norms, eps)
        ctx.save_for_backward(None if norms is None else qkv, cos, sin, q_norm, k_norm, rstd)
        ctx.shape = shape
        return (q, k, v) if gates is None else (q, k, v, gates)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        qkv, cos, sin, q_norm, k_norm, rstd = ctx.saved_tensors
        norms = None if q_norm is None else (q_norm, k_norm)
        grad = split_backward((*grads, None)[:4], qkv, cos, sin, ctx.shape, norms, rstd)
        return grad, None, None, None, None, None, None


class GateHeads(Function):
    @staticmethod
    def forward(ctx: Any, o: Tensor, gates: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(o, gates)
        return gate(o, gates)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return gate_backward(grads[0], *ctx.saved_tensors)

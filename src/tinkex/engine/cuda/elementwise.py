# pyright: reportMissingImports=false, reportIndexIssue=false, reportArgumentType=false, reportCallIssue=false
"""RMSNorm with its residual, head norm with rotation, and SwiGLU: one kernel each for forward and backward.

They compute what `engine.torch.plain` does, in fp32 from loads to stores, with one pass over memory.
Arguments and results are contiguous.

Shapes: T tokens, D width, H query heads, G kv heads, C head dim, F MLP width.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tinkex.engine.cuda.launch import PDL, cdiv, launched, load_fp32, power_of_2, wait_for_previous
from tinkex.engine.torch.hooks import Norms

_HEADS = 16  # of one program
_COLUMNS = 1024  # of one program


# -- RMSNorm -------------------------------------------------------------------------------------------


@launched
@triton.jit
def _norm(
    x, rest, delta, weight, total, left, y, rstd, eps, D, split,
    REST: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.arange(0, BLOCK)
    inside, place = at < D, tl.program_id(0).to(tl.int64) * D + at
    w = load_fp32(weight + at, inside)
    wait_for_previous()
    dtype = x.dtype.element_ty
    v = load_fp32(x + place, inside)
    if REST:
        v += load_fp32(rest + place, inside)
    if PARTS > 0:
        added = load_fp32(delta + place, inside)
        for part in tl.static_range(1, PARTS):
            added += load_fp32(delta + part * split + place, inside)
        v += added.to(dtype).to(tl.float32)  # rounded as if the splits had been summed before
        rounded = v.to(dtype)
        lost = (v - rounded.to(tl.float32)).to(dtype)
        tl.store(total + place, rounded, mask=inside)
        tl.store(left + place, lost, mask=inside)
        v = rounded.to(tl.float32) + lost.to(tl.float32)  # what later layers read
    r = tl.rsqrt(tl.sum(v * v, 0) / D + eps)
    tl.store(rstd + tl.program_id(0), r)
    unit = v * r
    if weight.dtype.element_ty != tl.float32:  # else the product alone is rounded
        unit = unit.to(dtype).to(tl.float32)
    tl.store(y + place, unit * w, mask=inside)


@launched
@triton.jit
def _norm_backward(grad, x, rstd, weight, more, out, D, ADD: tl.constexpr, BLOCK: tl.constexpr):
    wait_for_previous()
    at = tl.arange(0, BLOCK)
    inside, place = at < D, tl.program_id(0).to(tl.int64) * D + at
    r = tl.load(rstd + tl.program_id(0))
    v = load_fp32(x + place, inside) * r
    g = load_fp32(grad + place, inside) * load_fp32(weight + at, inside)
    g = (g - v * (tl.sum(g * v, 0) / D)) * r
    if ADD:
        g += load_fp32(more + place, inside)
    tl.store(out + place, g, mask=inside)


def normalise(
    x: Tensor, rest: Tensor | None, delta: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """x + rest + delta as `add` computes it (x and rest unchanged without delta), its RMSNorm, and 1 / rms.

    `delta` is [T, D], or the splits of a product [S, T, D].
    """
    rows, width = x.shape
    y = torch.empty_like(x)
    total, left = (x, rest) if delta is None else (torch.empty_like(x), torch.empty_like(x))
    rstd = torch.empty(rows, 1, dtype=torch.float32, device=x.device)
    block, parts = power_of_2(width), 0 if delta is None else delta.numel() // x.numel()
    _norm[(rows,)](
        x, x if rest is None else rest, x if delta is None else delta, weight,
        total, x if left is None else left, y, rstd, eps, width, x.numel(),
        REST=rest is not None, PARTS=parts, BLOCK=block, num_warps=_warps(block), **PDL,
    )  # fmt: skip
    return total, left, y, rstd


def add(x: Tensor, rest: Tensor | None, delta: Tensor) -> tuple[Tensor, Tensor | None]:
    """x + rest + delta in x's dtype, and the rounding error."""
    return normalise(x, rest, delta, x[0], 1.0)[:2]  # faster than several operations of torch


def normalise_backward(grad: Tensor, x: Tensor, rstd: Tensor, weight: Tensor, more: Tensor | None) -> Tensor:
    """The gradient to x through its norm, and `more` added to it."""
    rows, width = x.shape
    out, block = torch.empty_like(x), power_of_2(width)
    _norm_backward[(rows,)](
        grad, x, rstd, weight, grad if more is None else more, out, width,
        ADD=more is not None, BLOCK=block, num_warps=_warps(block), **PDL,
    )  # fmt: skip
    return out


def _warps(block: int) -> int:
    return max(1, min(8, block // 512))


# -- rotation ------------------------------------------------------------------------------------------


@triton.jit
def sum_loaded_rows(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Row sums of a loaded tile in an order that does not depend on its layout in threads: neighbours first.

    `tl.sum` adds what one thread holds first; kernels for few and for many rows must be bitwise identical.
    """
    x = tl.sum(tl.reshape(x, (ROWS, COLUMNS // 2, 2)), 2)
    if COLUMNS > 2:
        return sum_loaded_rows(x, ROWS, COLUMNS // 2)
    else:
        return tl.reshape(x, (ROWS,))


@triton.jit
def _heads(q, k, v, token, head, inside, H, G, C: tl.constexpr):
    """Where q, k and v would begin if they lay as in qkv, and which of the heads belong to each."""
    is_q, is_k = (head < H)[:, None] & inside, (head >= H)[:, None] & (head < H + G)[:, None] & inside
    is_v = (head >= H + G)[:, None] & inside
    at_q, at_k, at_v = q + token * H * C, k + token * G * C - H * C, v + token * G * C - (H + G) * C
    return at_q, at_k, at_v, is_q, is_k, is_v


@triton.jit
def _head_norm(q_norm, k_norm, is_q, at, inside):
    return tl.where(is_q, tl.load(q_norm + at, mask=inside), tl.load(k_norm + at, mask=inside)).to(tl.float32)


@launched
@triton.jit
def _rotate(
    qkv, cos, sin, q_norm, k_norm, q, k, v, rstd, eps, H, G,
    C: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    wait_for_previous()
    token = tl.program_id(0).to(tl.int64)
    head, at = tl.program_id(1) * HEADS + tl.arange(0, HEADS), tl.arange(0, HALF)
    inside = (head < H + 2 * G)[:, None] & (at < C // 2)[None, :]
    low, turned = head[:, None] * C + at[None, :], (head < H + G)[:, None]
    half = low + C // 2
    base = qkv + token * (H + 2 * G) * C
    a, b = load_fp32(base + low, inside), load_fp32(base + half, inside)
    if NORM:
        r = tl.rsqrt((sum_loaded_rows(a * a, HEADS, HALF) + sum_loaded_rows(b * b, HEADS, HALF)) / C + eps)
        tl.store(rstd + token * (H + G) + head, r, mask=head < H + G)
        first_q, cols = (head < H)[:, None], at[None, :] + tl.zeros_like(low)
        wa = _head_norm(q_norm, k_norm, first_q, cols, inside)
        wb = _head_norm(q_norm, k_norm, first_q, cols + C // 2, inside)
        dtype = qkv.dtype.element_ty
        a = tl.where(turned, (a * r[:, None]).to(dtype).to(tl.float32) * wa, a)
        b = tl.where(turned, (b * r[:, None]).to(dtype).to(tl.float32) * wb, b)
    c = load_fp32(cos + token * (C // 2) + at, at < C // 2)[None, :]
    s = load_fp32(sin + token * (C // 2) + at, at < C // 2)[None, :]
    out_a, out_b = tl.where(turned, a * c - b * s, a), tl.where(turned, b * c + a * s, b)
    at_q, at_k, at_v, is_q, is_k, is_v = _heads(q, k, v, token, head, inside, H, G, C)
    tl.store(at_q + low, out_a, mask=is_q)
    tl.store(at_q + half, out_b, mask=is_q)
    tl.store(at_k + low, out_a, mask=is_k)
    tl.store(at_k + half, out_b, mask=is_k)
    tl.store(at_v + low, out_a, mask=is_v)
    tl.store(at_v + half, out_b, mask=is_v)


@launched
@triton.jit
def _rotate_backward(
    grad_q, grad_k, grad_v, qkv, cos, sin, q_norm, k_norm, rstd, out, H, G,
    C: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    wait_for_previous()
    token = tl.program_id(0).to(tl.int64)
    head, at = tl.program_id(1) * HEADS + tl.arange(0, HEADS), tl.arange(0, HALF)
    inside = (head < H + 2 * G)[:, None] & (at < C // 2)[None, :]
    low, turned = head[:, None] * C + at[None, :], (head < H + G)[:, None]
    half = low + C // 2
    at_q, at_k, at_v, is_q, is_k, is_v = _heads(grad_q, grad_k, grad_v, token, head, inside, H, G, C)
    ga = load_fp32(at_q + low, is_q) + load_fp32(at_k + low, is_k) + load_fp32(at_v + low, is_v)
    gb = load_fp32(at_q + half, is_q) + load_fp32(at_k + half, is_k) + load_fp32(at_v + half, is_v)
    c = load_fp32(cos + token * (C // 2) + at, at < C // 2)[None, :]
    s = load_fp32(sin + token * (C // 2) + at, at < C // 2)[None, :]
    a, b = tl.where(turned, ga * c + gb * s, ga), tl.where(turned, gb * c - ga * s, gb)
    base, target = qkv + token * (H + 2 * G) * C, out + token * (H + 2 * G) * C
    if NORM:
        r = tl.load(rstd + token * (H + G) + head, mask=head < H + G, other=0.0)[:, None]
        xa, xb = load_fp32(base + low, inside) * r, load_fp32(base + half, inside) * r
        first_q, cols = (head < H)[:, None], at[None, :] + tl.zeros_like(low)
        na = a * _head_norm(q_norm, k_norm, first_q, cols, inside)
        nb = b * _head_norm(q_norm, k_norm, first_q, cols + C // 2, inside)
        along = (tl.sum(tl.where(inside, na * xa, 0.0), 1) + tl.sum(tl.where(inside, nb * xb, 0.0), 1)) / C
        a = tl.where(turned, (na - xa * along[:, None]) * r, a)
        b = tl.where(turned, (nb - xb * along[:, None]) * r, b)
    tl.store(target + low, a, mask=inside)
    tl.store(target + half, b, mask=inside)


def rotate(
    qkv: Tensor, cos: Tensor, sin: Tensor, heads: tuple[int, int], norms: Norms | None, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """q_THC and k_TGC, normalised (if asked) and rotated, v_TGC, and 1 / rms of q's and k's heads."""
    (h, g), tokens = heads, qkv.shape[0]
    c = qkv.shape[1] // (h + 2 * g)
    q, k, v = (qkv.new_empty(tokens, n, c) for n in (h, g, g))
    rstd = torch.empty(tokens, h + g, dtype=torch.float32, device=qkv.device) if norms else None
    _rotate[(tokens, cdiv(h + 2 * g, _HEADS))](
        qkv, cos, sin, *(norms or (cos, cos)), q, k, v, cos if rstd is None else rstd, eps, h, g,
        C=c, HALF=power_of_2(c // 2), NORM=norms is not None, HEADS=_HEADS, num_warps=4, **PDL,
    )  # fmt: skip
    return q, k, v, rstd


def rotate_backward(
    grads: tuple[Tensor, Tensor, Tensor], qkv: Tensor | None, cos: Tensor, sin: Tensor,
    norms: Norms | None, rstd: Tensor | None,
) -> Tensor:  # fmt: skip
    """The gradient to the fused projection; without norms it does not need its values."""
    grad_q, grad_k, grad_v = (grad.contiguous() for grad in grads)
    (tokens, h, c), g = grad_q.shape, grad_k.shape[1]
    out = grad_q.new_empty(tokens, (h + 2 * g) * c)
    _rotate_backward[(tokens, cdiv(h + 2 * g, _HEADS))](
        grad_q, grad_k, grad_v, out if qkv is None else qkv, cos, sin, *(norms or (cos, cos)),
        cos if rstd is None else rstd, out, h, g,
        C=c, HALF=power_of_2(c // 2), NORM=norms is not None, HEADS=_HEADS, num_warps=4, **PDL,
    )  # fmt: skip
    return out


# -- SwiGLU --------------------------------------------------------------------------------------------


@launched
@triton.jit
def _swiglu(gate_up, out, F, BLOCK: tl.constexpr):
    wait_for_previous()
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside, gate = at < F, gate_up + row * 2 * F + at
    g, u = load_fp32(gate, inside), load_fp32(gate + F, inside)
    tl.store(out + row * F + at, g * tl.sigmoid(g) * u, mask=inside)


@launched
@triton.jit
def _swiglu_backward(grad, gate_up, out, F, BLOCK: tl.constexpr):
    wait_for_previous()
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside, gate, to = at < F, gate_up + row * 2 * F + at, out + row * 2 * F + at
    d, g, u = load_fp32(grad + row * F + at, inside), load_fp32(gate, inside), load_fp32(gate + F, inside)
    sig = tl.sigmoid(g)
    tl.store(to, d * u * sig * (1 + g * (1 - sig)), mask=inside)
    tl.store(to + F, d * g * sig, mask=inside)


@launched
@triton.jit
def _add_gated(y, shared, x, gate, out, D, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    inside, place = at < D, tl.program_id(0).to(tl.int64) * D + at
    weight = load_fp32(gate + at, inside)
    dtype = y.dtype.element_ty
    wait_for_previous()
    score = tl.sum(load_fp32(x + place, inside) * weight, 0).to(dtype).to(tl.float32)
    factor = tl.sigmoid(score).to(dtype).to(tl.float32)
    added = (load_fp32(shared + place, inside) * factor).to(dtype).to(tl.float32)
    tl.store(out + place, load_fp32(y + place, inside) + added, mask=inside)


def add_gated(y: Tensor, shared: Tensor, x: Tensor, gate: Tensor) -> Tensor:
    """y + shared · sigmoid(x · gate), each step rounded as by torch."""
    (rows, width), out = y.shape, torch.empty_like(y)
    block = power_of_2(width)
    _add_gated[(rows,)](y, shared, x, gate, out, width, BLOCK=block, num_warps=_warps(block), **PDL)
    return out


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, width)
    _swiglu[(rows, cdiv(width, _COLUMNS))](gate_up, out, width, BLOCK=_COLUMNS, **PDL)
    return out


def swiglu_backward(grad: Tensor, gate_up: Tensor) -> Tensor:
    """The gradient to the fused [T, 2F]."""
    rows, width = grad.shape
    out = torch.empty_like(gate_up)
    grid = (rows, cdiv(width, _COLUMNS))
    _swiglu_backward[grid](grad.contiguous(), gate_up, out, width, BLOCK=_COLUMNS, **PDL)
    return out

# pyright: reportMissingImports=false, reportIndexIssue=false, reportArgumentType=false, reportCallIssue=false
"""RMSNorm with its residual, head norm with rotation, and SwiGLU: one kernel each for forward and backward.

They compute what `engine.torch.plain` does, in fp32 from loads to stores, with one pass over memory.
Arguments and results are contiguous. Knows nothing of autograd.

Shapes: T tokens, D width, H query heads, G kv heads, C head dim, F MLP width.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tinkex.engine.cuda.launch import launched
from tinkex.engine.cuda.pdl import PDL, wait_for_previous
from tinkex.engine.cuda.sizes import cdiv, power_of_2
from tinkex.engine.cuda.sums import sum_loaded_rows
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
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < D
    w = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    wait_for_previous()
    dtype = x.dtype.element_ty
    v = tl.load(x + row * D + at, mask=inside, other=0.0).to(tl.float32)
    if REST:
        v += tl.load(rest + row * D + at, mask=inside, other=0.0).to(tl.float32)
    if PARTS > 0:
        added = tl.load(delta + row * D + at, mask=inside, other=0.0).to(tl.float32)
        for part in tl.static_range(1, PARTS):
            added += tl.load(delta + part * split + row * D + at, mask=inside, other=0.0).to(tl.float32)
        v += added.to(dtype).to(tl.float32)  # rounded as if the splits had been summed before
        rounded = v.to(dtype)
        lost = (v - rounded.to(tl.float32)).to(dtype)
        tl.store(total + row * D + at, rounded, mask=inside)
        tl.store(left + row * D + at, lost, mask=inside)
        v = rounded.to(tl.float32) + lost.to(tl.float32)  # what later layers read
    r = tl.rsqrt(tl.sum(v * v, 0) / D + eps)
    tl.store(rstd + row, r)
    tl.store(y + row * D + at, (v * r).to(dtype).to(tl.float32) * w, mask=inside)


@launched
@triton.jit
def _add(x, rest, delta, total, left, size, REST: tl.constexpr, BLOCK: tl.constexpr):
    wait_for_previous()
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    v = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if REST:
        v += tl.load(rest + at, mask=inside, other=0.0).to(tl.float32)
    v += tl.load(delta + at, mask=inside, other=0.0).to(tl.float32)
    rounded = v.to(x.dtype.element_ty)
    tl.store(total + at, rounded, mask=inside)
    tl.store(left + at, v - rounded.to(tl.float32), mask=inside)


@launched
@triton.jit
def _norm_backward(grad, x, rstd, weight, more, out, D, ADD: tl.constexpr, BLOCK: tl.constexpr):
    wait_for_previous()
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < D
    r = tl.load(rstd + row)
    v = tl.load(x + row * D + at, mask=inside, other=0.0).to(tl.float32) * r
    g = tl.load(grad + row * D + at, mask=inside, other=0.0).to(tl.float32)
    g *= tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    g = (g - v * (tl.sum(g * v, 0) / D)) * r
    if ADD:
        g += tl.load(more + row * D + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * D + at, g, mask=inside)


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


def add(x: Tensor, rest: Tensor | None, delta: Tensor) -> tuple[Tensor, Tensor]:
    """x + rest + delta in x's dtype, and the rounding error."""
    total, left = torch.empty_like(x), torch.empty_like(x)
    grid = (cdiv(x.numel(), _COLUMNS),)
    _add[grid](
        x, x if rest is None else rest, delta, total, left, x.numel(),
        REST=rest is not None, BLOCK=_COLUMNS, **PDL,
    )  # fmt: skip
    return total, left


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


@launched
@triton.jit
def _rotate(
    qkv, cos, sin, q_norm, k_norm, q, k, v, rstd, eps, H, G,
    C: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    wait_for_previous()
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    at = tl.arange(0, HALF)
    inside = (head < H + 2 * G)[:, None] & (at < C // 2)[None, :]
    low = head[:, None] * C + at[None, :]
    base = qkv + token * (H + 2 * G) * C
    a = tl.load(base + low, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(base + low + C // 2, mask=inside, other=0.0).to(tl.float32)
    turned = (head < H + G)[:, None]
    if NORM:
        r = tl.rsqrt((sum_loaded_rows(a * a, HEADS, HALF) + sum_loaded_rows(b * b, HEADS, HALF)) / C + eps)
        tl.store(rstd + token * (H + G) + head, r, mask=head < H + G)
        is_q, cols = (head < H)[:, None], at[None, :] + tl.zeros_like(low)
        wa = tl.where(is_q, tl.load(q_norm + cols, mask=inside), tl.load(k_norm + cols, mask=inside))
        cols += C // 2
        wb = tl.where(is_q, tl.load(q_norm + cols, mask=inside), tl.load(k_norm + cols, mask=inside))
        dtype = qkv.dtype.element_ty
        a = tl.where(turned, (a * r[:, None]).to(dtype).to(tl.float32) * wa.to(tl.float32), a)
        b = tl.where(turned, (b * r[:, None]).to(dtype).to(tl.float32) * wb.to(tl.float32), b)
    c = tl.load(cos + token * (C // 2) + at, mask=at < C // 2, other=0.0).to(tl.float32)[None, :]
    s = tl.load(sin + token * (C // 2) + at, mask=at < C // 2, other=0.0).to(tl.float32)[None, :]
    out_a, out_b = tl.where(turned, a * c - b * s, a), tl.where(turned, b * c + a * s, b)
    is_q, is_k = (head < H)[:, None] & inside, (head >= H)[:, None] & turned & inside
    is_v = (head >= H + G)[:, None] & inside
    at_q, at_k, at_v = q + token * H * C, k + token * G * C - H * C, v + token * G * C - (H + G) * C
    tl.store(at_q + low, out_a, mask=is_q)
    tl.store(at_q + low + C // 2, out_b, mask=is_q)
    tl.store(at_k + low, out_a, mask=is_k)
    tl.store(at_k + low + C // 2, out_b, mask=is_k)
    tl.store(at_v + low, out_a, mask=is_v)
    tl.store(at_v + low + C // 2, out_b, mask=is_v)


@launched
@triton.jit
def _rotate_backward(
    grad_q, grad_k, grad_v, qkv, cos, sin, q_norm, k_norm, rstd, out, H, G,
    C: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    wait_for_previous()
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    at = tl.arange(0, HALF)
    inside = (head < H + 2 * G)[:, None] & (at < C // 2)[None, :]
    low = head[:, None] * C + at[None, :]
    turned = (head < H + G)[:, None]
    is_q, is_k = (head < H)[:, None] & inside, (head >= H)[:, None] & turned & inside
    is_v = (head >= H + G)[:, None] & inside
    at_q, at_k = grad_q + token * H * C, grad_k + token * G * C - H * C
    at_v = grad_v + token * G * C - (H + G) * C
    ga = (tl.load(at_q + low, mask=is_q, other=0.0).to(tl.float32)
          + tl.load(at_k + low, mask=is_k, other=0.0).to(tl.float32)
          + tl.load(at_v + low, mask=is_v, other=0.0).to(tl.float32))  # fmt: skip
    half = low + C // 2
    gb = (tl.load(at_q + half, mask=is_q, other=0.0).to(tl.float32)
          + tl.load(at_k + half, mask=is_k, other=0.0).to(tl.float32)
          + tl.load(at_v + half, mask=is_v, other=0.0).to(tl.float32))  # fmt: skip
    c = tl.load(cos + token * (C // 2) + at, mask=at < C // 2, other=0.0).to(tl.float32)[None, :]
    s = tl.load(sin + token * (C // 2) + at, mask=at < C // 2, other=0.0).to(tl.float32)[None, :]
    a, b = tl.where(turned, ga * c + gb * s, ga), tl.where(turned, gb * c - ga * s, gb)
    if NORM:
        r = tl.load(rstd + token * (H + G) + head, mask=head < H + G, other=0.0)[:, None]
        base = qkv + token * (H + 2 * G) * C
        xa = tl.load(base + low, mask=inside, other=0.0).to(tl.float32) * r
        xb = tl.load(base + half, mask=inside, other=0.0).to(tl.float32) * r
        first_q, cols = (head < H)[:, None], at[None, :] + tl.zeros_like(low)
        wa = tl.where(first_q, tl.load(q_norm + cols, mask=inside), tl.load(k_norm + cols, mask=inside))
        cols += C // 2
        wb = tl.where(first_q, tl.load(q_norm + cols, mask=inside), tl.load(k_norm + cols, mask=inside))
        na, nb = a * wa.to(tl.float32), b * wb.to(tl.float32)
        along = (tl.sum(tl.where(inside, na * xa, 0.0), 1) + tl.sum(tl.where(inside, nb * xb, 0.0), 1)) / C
        a = tl.where(turned, (na - xa * along[:, None]) * r, a)
        b = tl.where(turned, (nb - xb * along[:, None]) * r, b)
    target = out + token * (H + 2 * G) * C
    tl.store(target + low, a, mask=inside)
    tl.store(target + half, b, mask=inside)


def rotate(
    qkv: Tensor, cos: Tensor, sin: Tensor, heads: tuple[int, int], norms: Norms | None, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """q_THC and k_TGC, normalised (if asked) and rotated, v_TGC, and 1 / rms of q's and k's heads."""
    (h, g), tokens = heads, qkv.shape[0]
    c = qkv.shape[1] // (h + 2 * g)
    q, k, v = (torch.empty(tokens, n, c, dtype=qkv.dtype, device=qkv.device) for n in (h, g, g))
    rstd = torch.empty(tokens, h + g, dtype=torch.float32, device=qkv.device) if norms else None
    q_norm, k_norm = norms or (cos, cos)
    _rotate[(tokens, cdiv(h + 2 * g, _HEADS))](
        qkv, cos, sin, q_norm, k_norm, q, k, v, cos if rstd is None else rstd, eps, h, g,
        C=c, HALF=power_of_2(c // 2), NORM=norms is not None, HEADS=_HEADS,
        num_warps=4, **PDL,
    )  # fmt: skip
    return q, k, v, rstd


def rotate_backward(
    grads: tuple[Tensor, Tensor, Tensor],
    qkv: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    norms: Norms | None,
    rstd: Tensor | None,
) -> Tensor:
    """The gradient to the fused projection; without norms it does not need its values."""
    grad_q, grad_k, grad_v = (grad.contiguous() for grad in grads)
    (tokens, h, c), g = grad_q.shape, grad_k.shape[1]
    out = torch.empty(tokens, (h + 2 * g) * c, dtype=grad_q.dtype, device=grad_q.device)
    q_norm, k_norm = norms or (cos, cos)
    _rotate_backward[(tokens, cdiv(h + 2 * g, _HEADS))](
        grad_q, grad_k, grad_v, out if qkv is None else qkv, cos, sin, q_norm, k_norm,
        cos if rstd is None else rstd, out, h, g,
        C=c, HALF=power_of_2(c // 2), NORM=norms is not None, HEADS=_HEADS,
        num_warps=4, **PDL,
    )  # fmt: skip
    return out


# -- SwiGLU --------------------------------------------------------------------------------------------


@launched
@triton.jit
def _swiglu(gate_up, out, F, BLOCK: tl.constexpr):
    wait_for_previous()
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < F
    g = tl.load(gate_up + row * 2 * F + at, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(gate_up + row * 2 * F + F + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * F + at, g * tl.sigmoid(g) * u, mask=inside)


@launched
@triton.jit
def _swiglu_backward(grad, gate_up, out, F, BLOCK: tl.constexpr):
    wait_for_previous()
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < F
    d = tl.load(grad + row * F + at, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(gate_up + row * 2 * F + at, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(gate_up + row * 2 * F + F + at, mask=inside, other=0.0).to(tl.float32)
    sig = tl.sigmoid(g)
    tl.store(out + row * 2 * F + at, d * u * sig * (1 + g * (1 - sig)), mask=inside)
    tl.store(out + row * 2 * F + F + at, d * g * sig, mask=inside)


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(rows, width, dtype=gate_up.dtype, device=gate_up.device)
    _swiglu[(rows, cdiv(width, _COLUMNS))](gate_up, out, width, BLOCK=_COLUMNS, **PDL)
    return out


def swiglu_backward(grad: Tensor, gate_up: Tensor) -> Tensor:
    """The gradient to the fused [T, 2F]."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty_like(gate_up)
    grid = (rows, cdiv(width, _COLUMNS))
    _swiglu_backward[grid](grad.contiguous(), gate_up, out, width, BLOCK=_COLUMNS, **PDL)
    return out

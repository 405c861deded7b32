# pyright: reportMissingImports=false, reportIndexIssue=false, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
"""Kernels of a mixture of experts: grouped products with adapters, their gradients, and combining.

Rows are (token, expert) pairs sorted by expert. A tile is rows of one expert. Products read a token's row
where it lies, so rows are never copied, and no kernel needs a count on the host: tiles that turn out empty do
nothing. A tile may have rows of several adapters; kernels take one adapter after the other.
`engine.torch.models.moe` computes the same in plain torch.

Shapes: T tokens, K experts of a token, N = T·K rows, E experts, D width, F expert width, R rank, P parts.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tinkex.engine.cuda.adapter_table import SiteAdapters
from tinkex.engine.cuda.expert_routing import FEW, ExpertRows
from tinkex.engine.cuda.launch import PDL, cdiv, launched, load, load_fp32, power_of_2, wait_for_previous
from tinkex.engine.cuda.lora_kernels import load_u, scaled

_NONE = tl.constexpr(1 << 30)  # above every slot


class ExpertSite(NamedTuple):
    """Adapters of experts at one site. `slots_T` is each token's slot in the table; -1: none."""

    at: SiteAdapters
    slots_T: Tensor


class Activation(NamedTuple):
    """SwiGLU, or if `clamped` that of `architecture.ClampedSwiGlu`."""

    clamped: bool = False
    alpha: float = 1.0
    limit: float = 0.0


SWIGLU = Activation()


class _Tile(NamedTuple):
    columns: int
    features: int  # of one iteration
    warps: int
    stages: int


# As measured on an H200, by rows of a tile: SwiGLU's two products, and other products.
GATED = {
    16: _Tile(32, 128, 4, 4),
    32: _Tile(64, 128, 4, 3),
    64: _Tile(64, 64, 4, 5),
    128: _Tile(128, 64, 8, 4),
}
PLAIN = {
    16: _Tile(64, 256, 4, 3),
    32: _Tile(64, 128, 4, 3),
    64: _Tile(128, 64, 4, 4),
    128: _Tile(256, 64, 8, 3),
}


# -- parts of the product kernels ----------------------------------------------------------------------


@triton.jit
def tile_at(cells, tiles, tile):
    """A tile's expert, first row and number of rows; no kernel that wrote them is still running."""
    wait_for_previous()
    return tl.load(cells + tile), tl.load(cells + tiles + tile), tl.load(cells + 2 * tiles + tile)


@triton.jit
def _multiply(
    total, x, row, have_m, stride_x, weight, n, have_n, stride_n, stride_k, size,
    EVEN: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """total + x[row] · weight[n]ᵀ. EVEN: the size is a multiple of BLOCK_K."""
    left, right = x + row[:, None] * stride_x, weight + n[None, :] * stride_n
    for k in range(0, size, BLOCK_K):
        at = k + tl.arange(0, BLOCK_K)
        if EVEN:
            a = load(left + at[None, :], have_m[:, None])
            b = load(right + at[:, None] * stride_k, have_n[None, :])
        else:
            have_k = at < size
            a = load(left + at[None, :], have_m[:, None] & have_k[None, :])
            b = load(right + at[:, None] * stride_k, have_n[None, :] & have_k[:, None])
        total = tl.dot(a, b, total)
    return total


@triton.jit
def _next_slot(slot, after):
    """The smallest of the rows' slots above `after`."""
    return tl.min(tl.where(slot > after, slot, _NONE), 0)


@triton.jit
def _matrix(where, part, slot, expert, each, DTYPE: tl.constexpr):
    """The rank of a slot's adapter (0: it has no such matrix), and one expert's matrix of `each` · rank."""
    table, _, columns, column = where
    rank = tl.load(table + slot * columns).to(tl.int32)
    address = tl.load(table + slot * columns + column + part)
    matrix = address.to(tl.pointer_type(DTYPE)) + expert.to(tl.int64) * rank * each
    return tl.where(address != 0, rank, 0), matrix


@triton.jit
def add_lora(
    total, u, token, slot, stride_u, split_u, where, part, expert, each, width, n, have_n,
    SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """total + scale · u[token, part] · the expert's matrix [R, width], by the adapter of each row."""
    _, scales, _, _ = where
    current = _next_slot(slot, -1)
    while current < _NONE:
        rank, matrix = _matrix(where, part, current, expert, each, DTYPE)
        scale, mine = tl.load(scales + current), slot == current
        for r in range(0, rank, BLOCK_R):
            at = r + tl.arange(0, BLOCK_R)
            right = load(matrix + at[:, None] * width + n[None, :], (at < rank)[:, None] & have_n[None, :])
            place = u + token[:, None] * stride_u + part * rank + at[None, :]
            left = load_u(place, mine[:, None] & (at < rank)[None, :], split_u, SPLITS, BLOCK_M, BLOCK_R)
            total = tl.dot(scaled(left, scale, DTYPE), right, total)
        current = _next_slot(slot, current)
    return total


@triton.jit
def add_mixed_lora(
    total, u, token, slot, stride_u, split_u, where, part, expert, each, width, n, have_n,
    SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """`add_lora` for rows of many adapters: every row reads its own matrix, and none waits for another."""
    table, scales, columns, column = where
    mine = slot >= 0
    at = table + tl.where(mine, slot, 0) * columns
    rank = tl.load(at, mask=mine, other=0).to(tl.int32)
    address = tl.load(at + column + part, mask=mine, other=0)
    rank = tl.where(address != 0, rank, 0)
    matrix = address.to(tl.pointer_type(DTYPE)) + expert.to(tl.int64) * rank * each
    scale = tl.load(scales + tl.where(mine, slot, 0), mask=mine, other=0.0)
    added = tl.zeros(total.shape, tl.float32)
    for r in range(tl.max(rank, 0)):
        have = r < rank
        factor = tl.zeros((BLOCK_M,), tl.float32)
        for split in tl.static_range(SPLITS):
            factor += load_fp32(u + split * split_u + token * stride_u + part * rank + r, have)
        factor = scaled(factor, scale, DTYPE).to(tl.float32)
        right = load_fp32(matrix[:, None] + r * width + n[None, :], have[:, None] & have_n[None, :])
        added += factor[:, None] * right
    return total + added


@triton.jit
def shrink_row(
    x, u, row, slot, where, expert, each, width, stride_x, stride_u,
    BLOCK_R: tl.constexpr, BLOCK_F: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """u[row] = x[row] · the expert's matrix [R, width]ᵀ, for one row."""
    rank, matrix = _matrix(where, 0, slot, expert, each, DTYPE)
    for first in range(0, rank, BLOCK_R):
        r = first + tl.arange(0, BLOCK_R)
        total = tl.zeros((BLOCK_R,), tl.float32)
        for k in range(0, width, BLOCK_F):
            at = k + tl.arange(0, BLOCK_F)
            left = load_fp32(x + row * stride_x + at, at < width)
            right = load_fp32(
                matrix + r[:, None] * width + at[None, :], (r < rank)[:, None] & (at < width)[None, :]
            )
            total += tl.sum(left[None, :] * right, 1)
        tl.store(u + row * stride_u + r, total, mask=r < rank)


# -- products ------------------------------------------------------------------------------------------


@triton.jit
def acted(gate, up, alpha, limit, CLAMPED: tl.constexpr):
    """silu(gate) · up, or (up + 1) · gate · sigmoid(alpha · gate) of both within the limit."""
    if CLAMPED:
        gate, up = tl.minimum(gate, limit), tl.minimum(tl.maximum(up, -limit), limit) + 1
        return up * gate * tl.sigmoid(alpha * gate)
    else:
        return gate * tl.sigmoid(gate) * up


@triton.jit
def _acted_backward(gate, up, alpha, limit, CLAMPED: tl.constexpr):
    """The derivatives of `acted` by gate and up."""
    if CLAMPED:
        free_gate, free_up = gate <= limit, (up >= -limit) & (up <= limit)
        gate, up = tl.minimum(gate, limit), tl.minimum(tl.maximum(up, -limit), limit) + 1
        sig = tl.sigmoid(alpha * gate)
        by_gate = tl.where(free_gate, up * sig * (1 + alpha * gate * (1 - sig)), 0.0)
        return by_gate, tl.where(free_up, gate * sig, 0.0)
    else:
        sig = tl.sigmoid(gate)
        return up * sig * (1 + gate * (1 - sig)), gate * sig


@launched
@triton.jit(do_not_specialize=["tiles", "column", "each"])
def _gate_up(
    x, weight, bias, gate_up, h, order, cells, tiles, u, table, scales, slots, columns, column, each, D, F,
    K, stride_x, stride_u, split_u, alpha, limit, BIAS: tl.constexpr, CLAMPED: tl.constexpr,
    KEEP: tl.constexpr, LORA: tl.constexpr, MIXED: tl.constexpr,
    SPLITS: tl.constexpr, EVEN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """h of a tile's rows, for BLOCK_N columns of gate and up; KEEP: and gate and up themselves."""
    first = tl.program_id(0) * BLOCK_N
    expert, start, count = tile_at(cells, tiles, tl.program_id(1))
    if count > 0:
        dtype: tl.constexpr = x.dtype.element_ty
        m, n = tl.arange(0, BLOCK_M), first + tl.arange(0, BLOCK_N)
        row, have_m, have_n = (start + m).to(tl.int64), m < count, n < F
        token = tl.load(order + row, mask=have_m, other=0).to(tl.int64) // K
        matrix = weight + expert.to(tl.int64) * 2 * F * D
        gate, up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32), tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        left = x + token[:, None] * stride_x
        right = matrix + n[None, :] * D
        for k in range(0, D, BLOCK_K):
            at = k + tl.arange(0, BLOCK_K)
            have_k = (at < D) | EVEN
            a = load(left + at[None, :], have_m[:, None] & have_k[None, :])
            both = have_n[None, :] & have_k[:, None]
            gate = tl.dot(a, load(right + at[:, None], both), gate)
            up = tl.dot(a, load(right + F * D + at[:, None], both), up)
        if BIAS:
            place = bias + expert * 2 * F + n
            gate, up = gate + load_fp32(place, have_n)[None, :], up + load_fp32(place + F, have_n)[None, :]
        if LORA:
            slot = tl.load(slots + token, mask=have_m, other=-1)
            where = (table, scales, columns, column)
            if MIXED:
                gate = add_mixed_lora(
                    gate, u, token, slot, stride_u, split_u, where, 0, expert, each, F, n, have_n,
                    SPLITS, BLOCK_M, BLOCK_R, dtype,
                )  # fmt: skip
                up = add_mixed_lora(
                    up, u, token, slot, stride_u, split_u, where, 1, expert, each, F, n, have_n,
                    SPLITS, BLOCK_M, BLOCK_R, dtype,
                )  # fmt: skip
            else:
                gate = add_lora(
                    gate, u, token, slot, stride_u, split_u, where, 0, expert, each, F, n, have_n,
                    SPLITS, BLOCK_M, BLOCK_R, dtype,
                )  # fmt: skip
                up = add_lora(
                    up, u, token, slot, stride_u, split_u, where, 1, expert, each, F, n, have_n,
                    SPLITS, BLOCK_M, BLOCK_R, dtype,
                )  # fmt: skip
        have = have_m[:, None] & have_n[None, :]
        gate, up = gate.to(dtype), up.to(dtype)
        if KEEP:
            place = gate_up + row[:, None] * 2 * F + n[None, :]
            tl.store(place, gate, mask=have)
            tl.store(place + F, up, mask=have)
        gate, up = gate.to(tl.float32), up.to(tl.float32)
        tl.store(h + row[:, None] * F + n[None, :], acted(gate, up, alpha, limit, CLAMPED), mask=have)


@launched
@triton.jit(do_not_specialize=["tiles", "column", "each"])
def _product(
    x, weight, bias, y, order, cells, tiles, u, table, scales, slots, columns, column, each, size, width, K,
    stride_e, stride_n, stride_k, stride_u, BIAS: tl.constexpr, GATHER: tl.constexpr, EXPAND: tl.constexpr,
    SHRINK: tl.constexpr,
    EVEN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
):  # fmt: skip
    """y[rows, n] = x[rows] · the expert's weight [n, k] + its bias. GATHER: x has a row for each token.

    EXPAND adds scale · u[token] · the expert's matrix. SHRINK: a tile's last programs, one for each row,
    write u[row] = x[row] · the expert's matrixᵀ.
    """
    first = tl.program_id(0) * BLOCK_N
    expert, start, count = tile_at(cells, tiles, tl.program_id(1))
    dtype: tl.constexpr = x.dtype.element_ty
    if first < width:
        if count > 0:
            m, n = tl.arange(0, BLOCK_M), first + tl.arange(0, BLOCK_N)
            row, have_m, have_n = (start + m).to(tl.int64), m < count, n < width
            token = row
            if GATHER:
                token = tl.load(order + row, mask=have_m, other=0).to(tl.int64) // K
            total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            matrix = weight + expert.to(tl.int64) * stride_e
            total = _multiply(
                total, x, token, have_m, size, matrix, n, have_n, stride_n, stride_k, size, EVEN, BLOCK_K
            )
            if BIAS:
                total += load_fp32(bias + expert * width + n, have_n)[None, :]
            if EXPAND:
                slot, where = tl.load(slots + token, mask=have_m, other=-1), (table, scales, columns, column)
                total = add_lora(
                    total, u, token, slot, stride_u, 0, where, 0, expert, each, width, n, have_n,
                    1, BLOCK_M, BLOCK_R, dtype,
                )  # fmt: skip
            tl.store(y + row[:, None] * width + n[None, :], total, mask=have_m[:, None] & have_n[None, :])
    elif SHRINK:
        one = tl.program_id(0) - tl.cdiv(width, BLOCK_N)
        if one < count:
            row = (start + one).to(tl.int64)
            slot = tl.load(slots + tl.load(order + row) // K)
            if slot >= 0:
                where = (table, scales, columns, column)
                shrink_row(x, u, row, slot, where, expert, each, size, size, stride_u, BLOCK_R, 256, dtype)


@launched
@triton.jit
def _activate_backward(
    grad, gate_up, weights, order, grad_gate_up, h, dots, F, alpha, limit, CLAMPED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradients to gate and up of one row from that to h before its routing weight; and h again.

    The product of h with that gradient is the gradient to the routing weight.
    """
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    wait_for_previous()
    pair, inside = tl.load(order + row), at < F
    weight = tl.load(weights + pair).to(tl.float32)
    gate, up = (
        load_fp32(gate_up + row * 2 * F + at, inside),
        load_fp32(gate_up + row * 2 * F + F + at, inside),
    )
    total = load_fp32(grad + row * F + at, inside)
    by_gate, by_up = _acted_backward(gate, up, alpha, limit, CLAMPED)
    hidden = acted(gate, up, alpha, limit, CLAMPED).to(h.dtype.element_ty)
    tl.store(h + row * F + at, hidden, mask=inside)
    tl.store(dots + pair, tl.sum(hidden.to(tl.float32) * total, 0))
    total *= weight
    tl.store(grad_gate_up + row * 2 * F + at, total * by_gate, mask=inside)
    tl.store(grad_gate_up + row * 2 * F + F + at, total * by_up, mask=inside)


# -- adapters ------------------------------------------------------------------------------------------


@launched
@triton.jit(do_not_specialize=["tiles", "column", "each"])
def _shrink_rows(
    x, u, order, cells, tiles, table, scales, slots, columns, column, each, width, K, stride_x, stride_u,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """u[rows, part] = x[rows, part's columns] · the expert's matrix [R, width]ᵀ."""
    part, block = tl.program_id(1), tl.program_id(2)
    expert, start, count = tile_at(cells, tiles, tl.program_id(0))
    if count > 0:
        m, r = tl.arange(0, BLOCK_M), block * BLOCK_R + tl.arange(0, BLOCK_R)
        row, have_m = (start + m).to(tl.int64), m < count
        token = tl.load(order + row, mask=have_m, other=0).to(tl.int64) // K
        slot = tl.load(slots + token, mask=have_m, other=-1)
        current = _next_slot(slot, -1)
        while current < _NONE:
            where = (table, scales, columns, column)
            rank, matrix = _matrix(where, part, current, expert, each, x.dtype.element_ty)
            if block * BLOCK_R < rank:
                mine, have_r = slot == current, r < rank
                total = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
                left = x + part * width
                total = _multiply(
                    total, left, row, mine, stride_x, matrix, r, have_r, width, 1, width, False, BLOCK_K
                )
                out = u + row[:, None] * stride_u + part * rank + r[None, :]
                tl.store(out, total, mask=mine[:, None] & have_r[None, :])
            current = _next_slot(slot, current)


@launched
@triton.jit(do_not_specialize=["segments", "column", "each"])
def _outer_rows(
    u, g, weights, order, starts, bounds, of_segments, table, scales, columns, column, each, segments,
    width, K, stride_u, stride_g, WEIGHED: tl.constexpr, ATOMIC: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The expert's matrix [R, width] (fp32) += scale · u[tokens, part]ᵀ · g[rows, part's columns].

    Over the rows of one expert in one segment of tokens. WEIGHED: u times the routing weight.
    """
    blocks = tl.cdiv(width, BLOCK_N)
    part, first = tl.program_id(0) // blocks, tl.program_id(0) % blocks * BLOCK_N
    expert, segment = tl.program_id(1) // segments, tl.program_id(1) % segments
    wait_for_previous()
    start = tl.load(bounds + tl.program_id(1))
    stop = tl.load(starts + expert + 1)
    if segment + 1 < segments:
        stop = tl.load(bounds + tl.program_id(1) + 1)
    slot = tl.load(of_segments + segment)
    if (stop > start) & (slot >= 0):
        rank, matrix = _matrix((table, scales, columns, column), part, slot, expert, each, tl.float32)
        r, n = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M), first + tl.arange(0, BLOCK_N)
        if tl.program_id(2) * BLOCK_M < rank:
            have_r, have_n = r < rank, n < width
            total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
            for k in range(start, stop, BLOCK_K):
                row = (k + tl.arange(0, BLOCK_K)).to(tl.int64)
                have_k = row < stop
                pair = tl.load(order + row, mask=have_k, other=0).to(tl.int64)
                left = load(
                    g + row[:, None] * stride_g + part * width + n[None, :], have_k[:, None] & have_n[None, :]
                )
                place = u + (pair // K)[:, None] * stride_u + part * rank + r[None, :]
                right = load(place, have_k[:, None] & have_r[None, :])
                if WEIGHED:
                    weight = load_fp32(weights + pair, have_k)[:, None]
                    right = (right.to(tl.float32) * weight).to(right.dtype)
                total = tl.dot(tl.trans(left), right, total)
            total = tl.trans(total) * tl.load(scales + slot)
            have = have_r[:, None] & have_n[None, :]
            out = matrix + r[:, None] * width + n[None, :]
            if ATOMIC:
                tl.atomic_add(out, total, mask=have, sem="relaxed")
            else:
                tl.store(out, total + load(out, have), mask=have)


# -- combining -----------------------------------------------------------------------------------------


@launched
@triton.jit(do_not_specialize=["column"])
def _combine(
    y, u, place, weights, out, out_u, table, scales, slots, columns, column, D, width_u, K: tl.constexpr,
    WEIGHED: tl.constexpr, EXPAND: tl.constexpr, BLOCK: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """The sum over a token's K rows of y, and of u: the last programs of a token have u.

    EXPAND: no program has u; all add scale · u · B instead.
    """
    token, blocks = tl.program_id(0).to(tl.int64), tl.cdiv(D, BLOCK)
    wait_for_previous()
    block = tl.program_id(1)
    at = block * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    if block < blocks:
        for k in tl.static_range(K):
            row = tl.load(place + token * K + k).to(tl.int64)
            one = load_fp32(y + row * D + at, at < D)
            total += one * tl.load(weights + token * K + k).to(tl.float32) if WEIGHED else one
        if EXPAND:
            slot = tl.load(slots + token)
            if slot >= 0:
                dtype: tl.constexpr = y.dtype.element_ty
                total = total.to(dtype).to(tl.float32)  # as if it had been stored before
                where = (table, scales, columns, column)
                rank, matrix = _matrix(where, 0, slot, slot * 0, 0, dtype)
                for first in range(0, rank, BLOCK_R):
                    r = first + tl.arange(0, BLOCK_R)
                    factor = tl.zeros((BLOCK_R,), tl.float32)
                    for k in tl.static_range(K):
                        at_u = tl.load(place + token * K + k).to(tl.int64) * width_u
                        of_row = load_fp32(u + at_u + r, r < rank)
                        factor += of_row * tl.load(weights + token * K + k).to(tl.float32)
                    factor = scaled(factor, tl.load(scales + slot), dtype).to(tl.float32)
                    have = (r < rank)[:, None] & (at < D)[None, :]
                    total += tl.sum(
                        factor[:, None] * load_fp32(matrix + r[:, None] * D + at[None, :], have), 0
                    )
        tl.store(out + token * D + at, total, mask=at < D)
    else:
        at -= blocks * BLOCK
        for k in tl.static_range(K):
            row = tl.load(place + token * K + k).to(tl.int64)
            one = load_fp32(u + row * width_u + at, at < width_u)
            total += one * tl.load(weights + token * K + k).to(tl.float32) if WEIGHED else one
        tl.store(out_u + token * width_u + at, total, mask=at < width_u)


# -- launching -----------------------------------------------------------------------------------------


class GivenAdapters(NamedTuple):
    """Adapters as arguments of kernels."""

    where: tuple[object, ...]  # table, scales, slots, columns, column, each
    widest: int
    parts: int

    @property
    def block(self) -> int:
        return max(16, min(64, power_of_2(self.widest)))


def given_adapters(lora: ExpertSite | None, side: str, like: Tensor) -> GivenAdapters:
    if lora is None:
        return GivenAdapters((like, like, like, 0, 0, 0), 16, 1)
    at, table = lora.at, lora.at.table
    of, each = (at.a, at.in_features * len(at.outs)) if side == "A" else (at.b, sum(at.outs))
    where = (table.addresses, table.scales, lora.slots_T, table.addresses.shape[1], of.column, each)
    return GivenAdapters(where, table.widest, len(of.sizes))


def gate_up(
    x_TD: Tensor, weight: Tensor, rows: ExpertRows, u: Tensor | None, lora: ExpertSite | None, keep: bool,
    bias: Tensor | None = None, activation: Activation = SWIGLU,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """h [N, F], the activation of gate and up, and (if asked to keep them) these [N, 2F].

    `u` [S, T, 2R] is the down-projection of the tokens, to be summed over S.
    """
    inner, n = weight.shape[1] // 2, len(rows.order_N)
    h = x_TD.new_empty(n, inner)
    kept = x_TD.new_empty(n, 2 * inner) if keep else None
    given, shape, width = given_adapters(lora, "B", x_TD), GATED[rows.tile], x_TD.shape[1]
    of_u = x_TD[None] if u is None else u
    _gate_up[(cdiv(inner, shape.columns), rows.tiles.shape[1])](
        x_TD, weight, h if bias is None else bias, h if kept is None else kept, h, rows.order_N, rows.tiles,
        rows.tiles.shape[1],
        of_u, *given.where, width, inner, rows.per_token, x_TD.stride(0), of_u.stride(1), of_u.stride(0),
        activation.alpha, activation.limit, BIAS=bias is not None, CLAMPED=activation.clamped,
        KEEP=keep, LORA=lora is not None, MIXED=lora is not None and lora.at.table.mixed and rows.tile <= 32,
        SPLITS=1 if u is None else len(u), EVEN=width % shape.features == 0,
        BLOCK_M=rows.tile, BLOCK_N=shape.columns, BLOCK_K=shape.features, BLOCK_R=given.block,
        num_warps=shape.warps, num_stages=shape.stages, **PDL,
    )  # fmt: skip
    return h, kept


def _multiplied(
    x: Tensor, weight: Tensor, rows: ExpertRows, u: Tensor | None, given: GivenAdapters,
    bias: Tensor | None = None, **flags: bool,
) -> Tensor:  # fmt: skip
    (_, out, size), shape = weight.shape, PLAIN[rows.tile]
    y, of_u = x.new_empty(len(rows.order_N), out), x if u is None else u
    more = rows.tile if flags["SHRINK"] else 0
    _product[(cdiv(out, shape.columns) + more, rows.tiles.shape[1])](
        x, weight, y if bias is None else bias, y, rows.order_N, rows.tiles, rows.tiles.shape[1], of_u,
        *given.where, size, out, rows.per_token, *weight.stride(), of_u.stride(0), BIAS=bias is not None,
        **flags, EVEN=size % shape.features == 0,
        BLOCK_M=rows.tile, BLOCK_N=shape.columns, BLOCK_K=shape.features, BLOCK_R=given.block,
        num_warps=shape.warps, num_stages=shape.stages, **PDL,
    )  # fmt: skip
    return y


def product(x_N: Tensor, weight: Tensor, rows: ExpertRows, bias: Tensor | None = None) -> Tensor:
    """Each row through its expert's weight [out, in], which may be a transposed view, plus its bias."""
    none = given_adapters(None, "A", x_N)
    return _multiplied(x_N, weight, rows, None, none, bias, GATHER=False, EXPAND=False, SHRINK=False)


def shrinks_inside(x_N: Tensor, rows: ExpertRows, lora: ExpertSite) -> bool:
    """Whether u is faster computed beside the product than by a launch of its own."""
    return rows.tile <= 32 and (lora.at.table.mixed or len(x_N) <= FEW)


def product_and_shrink(
    x_N: Tensor, weight: Tensor, rows: ExpertRows, lora: ExpertSite, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`product`, and u [N, R] = each row times its expert's A."""
    given = given_adapters(lora, "A", x_N)
    if not shrinks_inside(x_N, rows, lora):
        return product(x_N, weight, rows, bias), shrink_rows(x_N, rows, lora, "A")
    u = x_N.new_empty(len(x_N), 16 * cdiv(given.widest, 16))
    return _multiplied(x_N, weight, rows, u, given, bias, GATHER=False, EXPAND=False, SHRINK=True), u


def product_of_tokens(
    x_TD: Tensor, weight: Tensor, rows: ExpertRows, u: Tensor | None, lora: ExpertSite | None
) -> Tensor:
    """Each row's token through its expert's weight, and u [1, T, R] of the token through the expert's A."""
    given = given_adapters(lora, "A", x_TD)
    of_u = None if u is None else u[0]
    return _multiplied(x_TD, weight, rows, of_u, given, GATHER=True, EXPAND=lora is not None, SHRINK=False)


def activate_backward(
    grad_NF: Tensor, kept: Tensor, rows: ExpertRows, weight_TK: Tensor, activation: Activation = SWIGLU
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients to gate and up [N, 2F], h [N, F], and the gradients to the routing weights [T, K].

    `grad_NF` is the gradient to h before the routing weights.
    """
    grads, h, dots = torch.empty_like(kept), torch.empty_like(grad_NF), torch.empty_like(weight_TK)
    rows_N, inner = grad_NF.shape
    _activate_backward[(rows_N,)](
        grad_NF, kept, weight_TK, rows.order_N, grads, h, dots, inner, activation.alpha,
        activation.limit, CLAMPED=activation.clamped, BLOCK=power_of_2(inner), num_warps=4, **PDL,
    )  # fmt: skip
    return grads, h, dots


def shrink_rows(x_N: Tensor, rows: ExpertRows, lora: ExpertSite, side: str) -> Tensor:
    """u [N, P·R]: each row times its expert's A, or each part of it times Bᵀ's transpose (side "B")."""
    given = given_adapters(lora, side, x_N)
    u = x_N.new_empty(len(x_N), 16 * cdiv(given.parts * given.widest, 16))
    _shrink_rows[(rows.tiles.shape[1], given.parts, cdiv(given.widest, given.block))](
        x_N, u, rows.order_N, rows.tiles, rows.tiles.shape[1], *given.where, x_N.shape[1] // given.parts,
        rows.per_token, x_N.stride(0), u.stride(0),
        BLOCK_M=rows.tile, BLOCK_K=128 if rows.tile <= 64 else 64, BLOCK_R=given.block,
        num_warps=4, num_stages=3, **PDL,
    )  # fmt: skip
    return u


def add_outer(
    u_T: Tensor, g_N: Tensor, weight_TK: Tensor | None, rows: ExpertRows, bounds: Tensor,
    of_segments: Tensor, into: SiteAdapters, side: str, atomic: bool,
) -> None:  # fmt: skip
    """Add to the gradients of every expert's A or B: u of each row's token times g."""
    given = given_adapters(ExpertSite(into, of_segments), side, g_N)
    addresses, scales, _, columns, column, each = given.where
    width, (experts, segments) = g_N.shape[1] // given.parts, bounds.shape
    _outer_rows[(given.parts * cdiv(width, 128), experts * segments, cdiv(given.widest, given.block))](
        u_T, g_N, u_T if weight_TK is None else weight_TK, rows.order_N, rows.starts_E, bounds, of_segments,
        addresses, scales, columns, column, each, segments, width, rows.per_token, u_T.stride(0),
        g_N.stride(0), WEIGHED=weight_TK is not None, ATOMIC=atomic,
        BLOCK_M=given.block, BLOCK_N=128, BLOCK_K=64, num_warps=4, num_stages=3, **PDL,
    )  # fmt: skip


def combine(
    y_ND: Tensor, weight_TK: Tensor | None, rows: ExpertRows, u_N: Tensor | None = None,
    lora: ExpertSite | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """The sums over each token's rows of y and of u, times the routing weights if given.

    With `lora` the sum of u goes through B and is added to that of y instead.
    """
    per_token, width = rows.per_token, y_ND.shape[1]
    tokens, of_u = len(y_ND) // per_token, 0 if u_N is None else u_N.shape[1]
    y_TD, given = y_ND.new_empty(tokens, width), given_adapters(lora, "B", y_ND)
    u_T = None if u_N is None or lora is not None else u_N.new_empty(tokens, of_u)
    block = min(1024 if lora is None else 256, power_of_2(width))
    _combine[(tokens, cdiv(width, block) + (0 if u_T is None else cdiv(of_u, block)))](
        y_ND, y_ND if u_N is None else u_N, rows.place_N, y_ND if weight_TK is None else weight_TK, y_TD,
        y_TD if u_T is None else u_T, *given.where[:5], width, of_u, K=per_token,
        WEIGHED=weight_TK is not None, EXPAND=lora is not None, BLOCK=block, BLOCK_R=given.block,
        num_warps=4, **PDL,
    )  # fmt: skip
    return y_TD, u_T

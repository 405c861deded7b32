# pyright: reportMissingImports=false, reportIndexIssue=false, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
"""Kernels of a mixture of experts: routing, grouped products with adapters, their gradients, and combining.

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
from tinkex.engine.cuda.launch import PDL, cdiv, launched, load, load_fp32, power_of_2, wait_for_previous
from tinkex.engine.cuda.lora_kernels import load_u, scaled

_NONE = tl.constexpr(1 << 30)  # above every slot
_COMPACT = 128  # rows up to which the tiles in use come first
_SCANNED = 4096  # rows that a program of `place` reads at a time


class ExpertRows(NamedTuple):
    """Where the rows of tokens are in the order of experts."""

    order_N: Tensor  # int32: token · K + k of each sorted row
    place_N: Tensor  # int32: the sorted row of token · K + k
    starts_E: Tensor  # int32 [E + 1]: each expert's first row
    tiles: Tensor  # int32 [3, tiles]: expert, first row, rows; 0 rows in tiles that are not used
    tile: int  # rows of a whole tile
    per_token: int


class ExpertSite(NamedTuple):
    """Adapters of experts at one site. `slots_T` is each token's slot in the table; -1: none."""

    at: SiteAdapters
    slots_T: Tensor


class _Tile(NamedTuple):
    columns: int
    features: int  # of one iteration
    warps: int
    stages: int


# As measured on an H200, by rows of a tile: SwiGLU's two products, its backward, and other products.
GATED = {
    16: _Tile(32, 128, 4, 4),
    32: _Tile(64, 128, 4, 3),
    64: _Tile(64, 64, 4, 5),
    128: _Tile(128, 64, 8, 4),
}
BACKWARD = {
    16: _Tile(64, 128, 4, 3),
    32: _Tile(64, 128, 4, 3),
    64: _Tile(64, 64, 4, 3),
    128: _Tile(64, 64, 8, 3),
}
PLAIN = {
    16: _Tile(64, 256, 4, 3),
    32: _Tile(64, 128, 4, 3),
    64: _Tile(128, 64, 4, 4),
    128: _Tile(256, 64, 8, 3),
}


# -- routing -------------------------------------------------------------------------------------------


@launched
@triton.jit
def _route(
    logits, bias, chosen, weights, scale, E, K, BIAS: tl.constexpr, SCORE: tl.constexpr,
    NORMALISE: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """A token's K best experts and their weights. SCORE 0: softmax; 1: softmax of the best; 2: sigmoid."""
    token, at, k = tl.program_id(0), tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_K)
    inside = at < E
    wait_for_previous()
    logit = tl.load(logits + token * E + at, mask=inside, other=float("-inf")).to(tl.float32)
    if SCORE == 0:
        raised = tl.exp(logit - tl.max(logit, 0))
        score = raised / tl.sum(raised, 0)
    elif SCORE == 1:
        score = logit
    else:
        score = tl.sigmoid(logit)
    liking = score
    if BIAS:
        liking += tl.load(bias + at, mask=inside, other=0.0)
    liking = tl.where(inside, liking, float("-inf"))
    best = tl.zeros((BLOCK_K,), tl.int32)
    weight = tl.full((BLOCK_K,), float("-inf"), tl.float32)
    for i in range(K):
        expert = tl.argmax(liking, 0, tie_break_left=True)
        best = tl.where(k == i, expert, best)
        weight = tl.where(k == i, tl.sum(tl.where(at == expert, score, 0.0), 0), weight)
        liking = tl.where(at == expert, float("-inf"), liking)
    if SCORE == 1:
        raised = tl.exp(weight - tl.max(weight, 0))
        weight = raised / tl.sum(raised, 0)
    elif NORMALISE:
        weight = weight / (tl.sum(tl.where(k < K, weight, 0.0), 0) + 1e-20)
    tl.store(chosen + token * K + k, best, mask=k < K)
    tl.store(weights + token * K + k, weight * scale, mask=k < K)


@launched
@triton.jit(do_not_specialize=["rows"])
def _place(
    chosen, order, place, starts, cells, rows, E, tiles,
    COMPACT: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Count, number and place one expert's rows, in their order; and its tiles.

    COMPACT: tiles in use come first. Otherwise an expert's tiles begin where all before it have room, so that
    no program needs to know the others' counts.
    """
    expert, block = tl.program_id(0), tl.arange(0, BLOCK)
    wait_for_previous()
    before, count = 0, 0
    for first in range(0, rows, BLOCK):
        at = first + block
        one = tl.load(chosen + at, mask=at < rows, other=E)
        before += tl.sum((one < expert).to(tl.int32), 0)
        count += tl.sum((one == expert).to(tl.int32), 0)
    tl.store(starts + expert, before)
    if expert == E - 1:
        tl.store(starts + E, rows)
    done = before
    for first in range(0, rows, BLOCK):
        at = first + block
        mine = tl.load(chosen + at, mask=at < rows, other=E) == expert
        to = done + tl.cumsum(mine.to(tl.int32), 0) - 1
        tl.store(order + to, at, mask=mine)
        tl.store(place + at, to, mask=mine)
        done += tl.sum(mine.to(tl.int32), 0)
    used = (count + TILE - 1) // TILE
    if COMPACT:
        one = tl.load(chosen + block, mask=block < rows, other=E)
        same = (one[:, None] == one[None, :]) & (block[None, :] < block[:, None])
        begins = (tl.sum(same.to(tl.int32), 1) % TILE == 0) & (one < E)
        tile = tl.sum((begins & (one < expert)).to(tl.int32), 0)
        end = tile + used
        if expert == E - 1:
            end = tiles
    else:
        tile = before // TILE + expert
        end = (before + count) // TILE + expert + 1
        if expert == E - 1:
            end = tiles
    for i in range(tile, end):
        rest = tl.minimum(count - (i - tile) * TILE, TILE)
        tl.store(cells + i, expert)
        tl.store(cells + tiles + i, before + (i - tile) * TILE)
        tl.store(cells + 2 * tiles + i, tl.maximum(rest, 0))


@launched
@triton.jit
def _slots(slots, cells, tiles, BLOCK: tl.constexpr):
    """Each row's slot, from tiles of tokens (`RowTiles`)."""
    tile = tl.program_id(0)
    wait_for_previous()
    slot, start = tl.load(cells + tile), tl.load(cells + tiles + tile)
    count = tl.load(cells + 2 * tiles + tile)
    for first in range(0, count, BLOCK):
        at = first + tl.arange(0, BLOCK)
        tl.store(slots + start + at, tl.zeros((BLOCK,), tl.int32) + slot, mask=at < count)


@launched
@triton.jit(do_not_specialize=["segments"])
def _bounds(order, starts, segments_at, bounds, K, segments, STEPS: tl.constexpr, BLOCK: tl.constexpr):
    """The first of an expert's rows whose token is in each segment or a later one, by bisection."""
    expert, at = tl.program_id(0), tl.arange(0, BLOCK)
    wait_for_previous()
    inside = at < segments
    wanted = tl.load(segments_at + at, mask=inside, other=0) * K
    low = tl.zeros((BLOCK,), tl.int32) + tl.load(starts + expert)
    high = tl.zeros((BLOCK,), tl.int32) + tl.load(starts + expert + 1)
    for _ in range(STEPS):
        middle = (low + high) // 2
        less = tl.load(order + middle, mask=low < high, other=0) < wanted
        low, high = (
            tl.where((low < high) & less, middle + 1, low),
            tl.where((low < high) & (less == 0), middle, high),
        )
    tl.store(bounds + expert * segments + at, low, mask=inside)


# -- parts of the product kernels ----------------------------------------------------------------------


@triton.jit
def _tile_at(cells, tiles, tile):
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
def _add_lora(
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


# -- products ------------------------------------------------------------------------------------------


@launched
@triton.jit(do_not_specialize=["tiles", "column", "each"])
def _gate_up(
    x, weight, gate_up, h, order, cells, tiles, u, table, scales, slots, columns, column, each, D, F, K,
    stride_x, stride_u, split_u, KEEP: tl.constexpr, LORA: tl.constexpr, SPLITS: tl.constexpr,
    EVEN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
):  # fmt: skip
    """h = silu(gate) · up of a tile's rows, for BLOCK_N columns of both; KEEP: and gate and up themselves."""
    first = tl.program_id(0) * BLOCK_N
    expert, start, count = _tile_at(cells, tiles, tl.program_id(1))
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
        if LORA:
            slot = tl.load(slots + token, mask=have_m, other=-1)
            where = (table, scales, columns, column)
            gate = _add_lora(
                gate, u, token, slot, stride_u, split_u, where, 0, expert, each, F, n, have_n,
                SPLITS, BLOCK_M, BLOCK_R, dtype,
            )  # fmt: skip
            up = _add_lora(
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
        tl.store(h + row[:, None] * F + n[None, :], gate * tl.sigmoid(gate) * up, mask=have)


@launched
@triton.jit(do_not_specialize=["tiles"])
def _product(
    x, weight, y, cells, tiles, size, width, stride_e, stride_n, stride_k,
    EVEN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """y[rows, n] = x[rows] · the expert's weight [n, k]."""
    first = tl.program_id(0) * BLOCK_N
    expert, start, count = _tile_at(cells, tiles, tl.program_id(1))
    if count > 0:
        m, n = tl.arange(0, BLOCK_M), first + tl.arange(0, BLOCK_N)
        row, have_m, have_n = (start + m).to(tl.int64), m < count, n < width
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        matrix = weight + expert.to(tl.int64) * stride_e
        total = _multiply(
            total, x, row, have_m, size, matrix, n, have_n, stride_n, stride_k, size, EVEN, BLOCK_K
        )
        tl.store(y + row[:, None] * width + n[None, :], total, mask=have_m[:, None] & have_n[None, :])


@launched
@triton.jit(do_not_specialize=["tiles", "column", "each"])
def _down_backward(
    grad, weight, gate_up, grad_gate_up, h, weights, dots, order, cells, tiles, u, table, scales, slots,
    columns, column, each, D, F, K, N, stride_u, split_u, LORA: tl.constexpr, SPLITS: tl.constexpr,
    EVEN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
):  # fmt: skip
    """The gradients to gate and up from those of the tokens' results; h again, for the gradients of A.

    `dots` [blocks, N] are the products of h with its gradient before the routing weight, of BLOCK_N columns:
    their sum is the gradient to that weight.
    """
    first = tl.program_id(0) * BLOCK_N
    expert, start, count = _tile_at(cells, tiles, tl.program_id(1))
    if count > 0:
        dtype: tl.constexpr = grad.dtype.element_ty
        m, n = tl.arange(0, BLOCK_M), first + tl.arange(0, BLOCK_N)
        row, have_m, have_n = (start + m).to(tl.int64), m < count, n < F
        pair = tl.load(order + row, mask=have_m, other=0).to(tl.int64)
        token = pair // K
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        matrix = weight + expert.to(tl.int64) * F * D
        total = _multiply(total, grad, token, have_m, D, matrix, n, have_n, 1, F, D, EVEN, BLOCK_K)
        if LORA:
            slot = tl.load(slots + token, mask=have_m, other=-1)
            where = (table, scales, columns, column)
            total = _add_lora(
                total, u, token, slot, stride_u, split_u, where, 0, expert, each, F, n, have_n,
                SPLITS, BLOCK_M, BLOCK_R, dtype,
            )  # fmt: skip
        have = have_m[:, None] & have_n[None, :]
        place = row[:, None] * 2 * F + n[None, :]
        gate, up = load_fp32(gate_up + place, have), load_fp32(gate_up + place + F, have)
        sig = tl.sigmoid(gate)
        acted = (gate * sig * up).to(dtype)
        tl.store(h + row[:, None] * F + n[None, :], acted, mask=have)
        dot = tl.sum(acted.to(tl.float32) * total, 1)
        tl.store(dots + tl.program_id(0).to(tl.int64) * N + row, dot, mask=have_m)
        total *= load_fp32(weights + pair, have_m)[:, None]
        tl.store(grad_gate_up + place, total * up * sig * (1 + gate * (1 - sig)), mask=have)
        tl.store(grad_gate_up + place + F, total * gate * sig, mask=have)


# -- adapters ------------------------------------------------------------------------------------------


@launched
@triton.jit(do_not_specialize=["tiles", "column", "each"])
def _shrink_rows(
    x, u, order, cells, tiles, table, scales, slots, columns, column, each, width, K, stride_x, stride_u,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """u[rows, part] = x[rows, part's columns] · the expert's matrix [R, width]ᵀ."""
    part, block = tl.program_id(1), tl.program_id(2)
    expert, start, count = _tile_at(cells, tiles, tl.program_id(0))
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
@triton.jit
def _combine(
    y, u, place, weights, out, out_u, D, width_u, K: tl.constexpr, WEIGHED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The sum over a token's K rows of y, and of u: the last programs of a token have u."""
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
        tl.store(out + token * D + at, total, mask=at < D)
    else:
        at -= blocks * BLOCK
        for k in tl.static_range(K):
            row = tl.load(place + token * K + k).to(tl.int64)
            one = load_fp32(u + row * width_u + at, at < width_u)
            total += one * tl.load(weights + token * K + k).to(tl.float32) if WEIGHED else one
        tl.store(out_u + token * width_u + at, total, mask=at < width_u)


# -- launching -----------------------------------------------------------------------------------------

SCORES = {"softmax": 0, "softmax_of_best": 1, "sigmoid": 2}


def route(
    logits_TE: Tensor, bias_E: Tensor | None, best: int, score: str, normalise: bool, scale: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The weights [T, K] in `dtype` and the experts [T, K] (int32) that `ExpertMlp.route` gives."""
    tokens, count = logits_TE.shape
    chosen_TK = torch.empty(tokens, best, dtype=torch.int32, device=logits_TE.device)
    weight_TK = torch.empty(tokens, best, dtype=dtype, device=logits_TE.device)
    _route[(tokens,)](
        logits_TE, logits_TE if bias_E is None else bias_E, chosen_TK, weight_TK, float(scale), count, best,
        BIAS=bias_E is not None, SCORE=SCORES[score], NORMALISE=normalise,
        BLOCK_E=power_of_2(count), BLOCK_K=power_of_2(best), num_warps=4 if count > 128 else 1, **PDL,
    )  # fmt: skip
    return weight_TK, chosen_TK


def tile_rows(rows: int, experts: int) -> int:
    """Rows of a tile where so many are spread over so many experts."""
    each = rows / experts
    return 16 if each <= 12 else 32 if each <= 32 else 64 if each <= 96 else 128


def place(chosen_TK: Tensor, experts: int, tile: int | None = None) -> ExpertRows:
    rows, per_token = chosen_TK.numel(), chosen_TK.shape[1]
    tile = tile or tile_rows(rows, experts)
    compact, device = rows <= _COMPACT, chosen_TK.device
    tiles = min(rows, rows // tile + experts) if compact else rows // tile + experts
    order, placed = torch.empty(2, rows, dtype=torch.int32, device=device)
    starts = torch.empty(experts + 1, dtype=torch.int32, device=device)
    cells = torch.empty(3, tiles, dtype=torch.int32, device=device)
    block = max(16, power_of_2(rows)) if rows <= _SCANNED else _SCANNED
    _place[(experts,)](
        chosen_TK, order, placed, starts, cells, rows, experts, tiles,
        COMPACT=compact, TILE=tile, BLOCK=block, num_warps=1 if block <= 128 else 4, **PDL,
    )  # fmt: skip
    return ExpertRows(order, placed, starts, cells, tile, per_token)


def slots_of(cells: Tensor, rows: int, tile: int) -> Tensor:
    """Each token's slot, -1 where it has none, from the cells of `RowTiles`."""
    slots = torch.full((rows,), -1, dtype=torch.int32, device=cells.device)
    _slots[(cells.shape[1],)](
        slots, cells, cells.shape[1], BLOCK=max(16, power_of_2(tile)), num_warps=1, **PDL
    )
    return slots


def bounds_of(rows: ExpertRows, segments_at: Tensor) -> Tensor:
    """int32 [E, segments]: the first of each expert's rows in each segment of tokens, which begin there."""
    experts, segments = len(rows.starts_E) - 1, len(segments_at)
    bounds = torch.empty(experts, segments, dtype=torch.int32, device=segments_at.device)
    _bounds[(experts,)](
        rows.order_N, rows.starts_E, segments_at, bounds, rows.per_token, segments,
        STEPS=len(rows.order_N).bit_length() + 1, BLOCK=max(16, power_of_2(segments)), num_warps=1, **PDL,
    )  # fmt: skip
    return bounds


def _adapters(lora: ExpertSite | None, side: str, like: Tensor) -> tuple[tuple[object, ...], int, int]:
    """A kernel's arguments table, scales, slots, columns, column, each; the rank and the parts."""
    if lora is None:
        return (like, like, like, 0, 0, 0), 16, 1
    at = lora.at
    of, each = (at.a, at.in_features * len(at.outs)) if side == "A" else (at.b, sum(at.outs))
    table = at.table
    where = (table.addresses, table.scales, lora.slots_T, table.addresses.shape[1], of.column, each)
    return where, table.widest, len(of.sizes)


def _rank_block(widest: int) -> int:
    return max(16, min(64, power_of_2(widest)))


def gate_up(
    x_TD: Tensor, weight: Tensor, rows: ExpertRows, u: Tensor | None, lora: ExpertSite | None, keep: bool
) -> tuple[Tensor, Tensor | None]:
    """h [N, F] = silu(gate) · up, and (if asked to keep them) gate and up [N, 2F].

    `u` [S, T, 2R] is the down-projection of the tokens, to be summed over S.
    """
    inner, n = weight.shape[1] // 2, len(rows.order_N)
    h = x_TD.new_empty(n, inner)
    kept = x_TD.new_empty(n, 2 * inner) if keep else None
    where, widest, _ = _adapters(lora, "B", x_TD)
    shape, width = GATED[rows.tile], x_TD.shape[1]
    of_u = x_TD[None] if u is None else u
    _gate_up[(cdiv(inner, shape.columns), rows.tiles.shape[1])](
        x_TD, weight, h if kept is None else kept, h, rows.order_N, rows.tiles, rows.tiles.shape[1],
        of_u, *where, width, inner, rows.per_token, x_TD.stride(0), of_u.stride(1), of_u.stride(0),
        KEEP=keep, LORA=lora is not None, SPLITS=1 if u is None else len(u), EVEN=width % shape.features == 0,
        BLOCK_M=rows.tile, BLOCK_N=shape.columns, BLOCK_K=shape.features, BLOCK_R=_rank_block(widest),
        num_warps=shape.warps, num_stages=shape.stages, **PDL,
    )  # fmt: skip
    return h, kept


def product(x_NI: Tensor, weight: Tensor, rows: ExpertRows, *, transposed: bool = False) -> Tensor:
    """Each row through its expert's weight [O, I], or the transpose of one."""
    _, out, size = weight.shape if not transposed else weight.transpose(1, 2).shape
    strides = weight.stride() if not transposed else weight.transpose(1, 2).stride()
    y, shape = x_NI.new_empty(len(x_NI), out), PLAIN[rows.tile]
    _product[(cdiv(out, shape.columns), rows.tiles.shape[1])](
        x_NI, weight, y, rows.tiles, rows.tiles.shape[1], size, out, *strides,
        EVEN=size % shape.features == 0, BLOCK_M=rows.tile, BLOCK_N=shape.columns, BLOCK_K=shape.features,
        num_warps=shape.warps, num_stages=shape.stages, **PDL,
    )  # fmt: skip
    return y


def down_backward(
    grad_TD: Tensor, weight: Tensor, rows: ExpertRows, kept: Tensor, weight_TK: Tensor, u: Tensor | None,
    lora: ExpertSite | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients to gate and up [N, 2F], h [N, F], and the gradients to the routing weights [T, K].

    `u` [S, T, R] is the gradient to the sum of the rows' down-projections, without the scale.
    """
    _, width, inner = weight.shape
    n, shape = len(rows.order_N), BACKWARD[rows.tile]
    blocks = cdiv(inner, shape.columns)
    grads, h = torch.empty_like(kept), kept.new_empty(n, inner)
    dots = torch.empty(blocks, n, dtype=torch.float32, device=kept.device)
    where, widest, _ = _adapters(lora, "A", grad_TD)
    of_u = grad_TD[None] if u is None else u
    _down_backward[(blocks, rows.tiles.shape[1])](
        grad_TD, weight, kept, grads, h, weight_TK, dots, rows.order_N, rows.tiles, rows.tiles.shape[1],
        of_u, *where, width, inner, rows.per_token, n, of_u.stride(1), of_u.stride(0),
        LORA=lora is not None, SPLITS=1 if u is None else len(u), EVEN=width % shape.features == 0,
        BLOCK_M=rows.tile, BLOCK_N=shape.columns, BLOCK_K=shape.features, BLOCK_R=_rank_block(widest),
        num_warps=shape.warps, num_stages=shape.stages, **PDL,
    )  # fmt: skip
    by_pair = dots.sum(0)[rows.place_N.view_as(weight_TK)]
    return grads, h, by_pair.to(weight_TK.dtype)


def shrink_rows(x_N: Tensor, rows: ExpertRows, lora: ExpertSite, side: str) -> Tensor:
    """u [N, P·R]: each row times its expert's A, or each part of it times Bᵀ's transpose (side "B")."""
    where, widest, parts = _adapters(lora, side, x_N)
    u = x_N.new_empty(len(x_N), 16 * cdiv(parts * widest, 16))
    width, block = x_N.shape[1] // parts, _rank_block(widest)
    _shrink_rows[(rows.tiles.shape[1], parts, cdiv(widest, block))](
        x_N, u, rows.order_N, rows.tiles, rows.tiles.shape[1], *where, width, rows.per_token,
        x_N.stride(0), u.stride(0), BLOCK_M=rows.tile, BLOCK_K=128 if rows.tile <= 64 else 64, BLOCK_R=block,
        num_warps=4, num_stages=3, **PDL,
    )  # fmt: skip
    return u


def add_outer(
    u_T: Tensor, g_N: Tensor, weight_TK: Tensor | None, rows: ExpertRows, bounds: Tensor,
    of_segments: Tensor, into: SiteAdapters, side: str, atomic: bool,
) -> None:  # fmt: skip
    """Add to the gradients of every expert's A or B: u of each row's token times g."""
    lora = ExpertSite(into, of_segments)
    (addresses, scales, _, columns, column, each), widest, parts = _adapters(lora, side, g_N)
    width = g_N.shape[1] // parts
    block_m = max(16, min(64, power_of_2(widest)))
    experts, segments = bounds.shape
    _outer_rows[(parts * cdiv(width, 128), experts * segments, cdiv(widest, block_m))](
        u_T, g_N, u_T if weight_TK is None else weight_TK, rows.order_N, rows.starts_E, bounds, of_segments,
        addresses, scales, columns, column, each, segments, width, rows.per_token, u_T.stride(0),
        g_N.stride(0),
        WEIGHED=weight_TK is not None, ATOMIC=atomic, BLOCK_M=block_m, BLOCK_N=128, BLOCK_K=64,
        num_warps=4, num_stages=3, **PDL,
    )  # fmt: skip


def combine(
    y_ND: Tensor, weight_TK: Tensor | None, rows: ExpertRows, u_N: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """The sums over each token's rows of y and of u, times the routing weights if given."""
    per_token, width = rows.per_token, y_ND.shape[1]
    tokens = len(y_ND) // per_token
    y_TD, of_u = y_ND.new_empty(tokens, width), 0 if u_N is None else u_N.shape[1]
    u_T = None if u_N is None else u_N.new_empty(tokens, of_u)
    block = min(1024, power_of_2(width))
    _combine[(tokens, cdiv(width, block) + cdiv(of_u, block))](
        y_ND, y_ND if u_N is None else u_N, rows.place_N, y_ND if weight_TK is None else weight_TK, y_TD,
        y_TD if u_T is None else u_T, width, of_u,
        K=per_token, WEIGHED=weight_TK is not None, BLOCK=block, num_warps=4, **PDL,
    )  # fmt: skip
    return y_TD, u_T

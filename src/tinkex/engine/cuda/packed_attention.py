# pyright: reportMissingImports=false, reportIndexIssue=false, reportArgumentType=false, reportCallIssue=false, reportReturnType=false, reportGeneralTypeIssues=false
"""Causal attention within the sequences of a packed batch, forward and backward, with windows and sinks.

A sink is a logit of each query head that takes its share of the softmax and has no value. It is in the
log-sum-exp, so the backward needs no case for it. The backward over keys sums over the query heads that share
a kv head, and stores the slopes (the gradients to the scores) for the backward over queries, unless they take
too much memory. The order of every sum is fixed. The plain implementation is `attention.attend`.

Shapes: T tokens, H query heads, G kv heads, C head dim. Logarithms are to base 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from tinkex.engine.cuda.launch import launched, load, load_fp32, power_of_2
from tinkex.engine.torch.device_copies import all_to_device

TILE = 64  # positions of a tile
LOG2E = 1.4426950408889634  # scores are scaled with it too, for exp2
# Slopes may take this many times the queries' memory: about what the layer's MLP has freed when the backward
# reaches its attention. Sequences of 2,500 tokens reach it with a head dim of 128.
ROOM = 10


class AttentionTiles(NamedTuple):
    """Tiles of queries and of keys, int32 [5, tiles]: those with the most work first.

    A column: its sequence's first row and length, a position, and how many tiles of positions and of slopes
    the sequences before it have. Slopes have a tile where TILE queries see any of TILE keys.
    """

    queries: Tensor
    keys: Tensor
    slopes: int  # tiles of one head


def cut(lengths: Sequence[int], device: torch.device) -> AttentionTiles:
    """The sequences in tiles."""
    n = np.array(lengths)
    counts = -(-n // TILE)
    slopes = counts * (counts + 1) // 2
    before = [np.cumsum(sizes) - sizes for sizes in (n, counts, slopes)]
    of = np.repeat(np.arange(len(n)), counts)
    at = TILE * (np.arange(len(of)) - (np.cumsum(counts) - counts)[of])
    row, tile, slope = (number[of] for number in before)
    cells = np.stack([row, n[of], at, tile, slope]).astype(np.int32)
    # the most work first: late queries, early keys
    orders = [np.argsort(work, kind="stable") for work in (-at, at - n[of])]
    queries, keys = all_to_device([cells.take(order, 1) for order in orders], device)
    return AttentionTiles(queries, keys, int(slopes.sum()))


@triton.jit
def sum_mma_rows(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Row sums of the result of `tl.dot`, at least 16 columns: distant columns first, eight apart last.

    A thread holds two neighbours; columns eight apart may belong to another warp. `tl.sum` adds what one
    thread holds first: with it, kernels of other layouts would not be bitwise identical.
    """
    n: tl.constexpr = COLUMNS // 2
    if COLUMNS > 16:
        return sum_mma_rows(tl.sum(tl.reshape(x, (ROWS, 2, n)), 1), ROWS, n)
    else:
        x = tl.sum(tl.reshape(x, (ROWS, 2, 4, 2)), 3)
        x = tl.sum(tl.reshape(x, (ROWS, 2, 2, 2)), 2)
        return tl.sum(tl.sum(x, 2), 1)


@triton.jit
def _program(cells, tiles, HEADS: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr, BLOCK_C: tl.constexpr):
    """A program's head and tile; its sequence's first row and length; its first position; all its positions,
    and where their vectors of that head are and which there are.
    """
    head, tile = tl.program_id(0), tl.program_id(1)
    first, length = tl.load(cells + tile).to(tl.int64), tl.load(cells + tiles + tile)
    at = tl.load(cells + 2 * tiles + tile)
    position, c = at + tl.arange(0, BLOCK), tl.arange(0, BLOCK_C)
    inside = (position < length)[:, None] & (c < C)[None, :]
    place = (first + position)[:, None] * (HEADS * C) + head * C + c[None, :]
    return head, tile, first, length, at, position, place, inside


@triton.jit
def _vectors(start, length, STRIDE, BLOCK: tl.constexpr, C: tl.constexpr, BLOCK_C: tl.constexpr):
    """Positions from `start` on, where their vectors are after the sequence's first, and which exist."""
    position, c = start + tl.arange(0, BLOCK), tl.arange(0, BLOCK_C)
    place = position.to(tl.int64)[:, None] * STRIDE + c[None, :]
    return position, place, (position < length)[:, None] & (c < C)[None, :]


@triton.jit
def _visible(scores, query, key, length, WINDOW: tl.constexpr):
    """-inf where a query may not attend: `query` and `key` are positions, broadcast against each other."""
    seen = (key <= query) & (query < length)
    if WINDOW > 0:
        seen &= key > query - WINDOW
    return tl.where(seen, scores, float("-inf"))


@triton.jit
def _look(
    total, best, mass, queries, k, v, query, low, high, length, stride, scale,
    MASK: tl.constexpr, WINDOW: tl.constexpr, BLOCK: tl.constexpr, C: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Attend a tile of queries to the keys low:high (online softmax)."""
    for start in range(low, high, BLOCK):
        key, place, inside = _vectors(start, length, stride, BLOCK, C, BLOCK_C)
        keys = load(k + place, inside)
        scores = tl.dot(queries, tl.trans(keys))
        if MASK:
            scores = _visible(scores, query[:, None], key[None, :], length, WINDOW)
        higher = tl.maximum(best, tl.max(scores, 1) * scale)
        level = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(scores * scale - level[:, None])
        fade = tl.exp2(best - level)
        mass = mass * fade + sum_mma_rows(weights, weights.shape[0], BLOCK)
        values = load(v + place, inside)
        total = tl.dot(weights.to(values.dtype), values, total * fade[:, None])
        best = higher
    return total, best, mass


@triton.jit
def start_of_softmax(sinks, head, SHAPE: tl.constexpr, SINKS: tl.constexpr):
    """The highest score so far and the sum of exp2 below it: of the sinks of `head`, or of nothing."""
    if SINKS:
        best = tl.load(sinks + head).to(tl.float32) * 1.4426950408889634 + tl.zeros(SHAPE, tl.float32)
        mass = tl.full(SHAPE, 1.0, tl.float32)
    else:
        best, mass = tl.full(SHAPE, float("-inf"), tl.float32), tl.zeros(SHAPE, tl.float32)
    return best, mass


@launched
@triton.jit
def _forward(
    q, k, v, sinks, out, lse, cells, tiles, T, scale, SINKS: tl.constexpr,
    H: tl.constexpr, G: tl.constexpr, C: tl.constexpr, WINDOW: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    head, _, first, length, at, query, place, inside = _program(cells, tiles, H, C, BLOCK_M, BLOCK_C)
    queries = load(q + place, inside)
    kv = first * (G * C) + head // (H // G) * C
    best, mass = start_of_softmax(sinks, head, (BLOCK_M,), SINKS)
    total = tl.zeros((BLOCK_M, BLOCK_C), tl.float32)
    low, end = 0, tl.minimum(at + BLOCK_M, length)
    whole = at // BLOCK_N * BLOCK_N  # keys before it are seen by every query of the tile
    if WINDOW > 0:
        low = tl.maximum(at - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
        whole = low
    for masked in tl.static_range(2):
        total, best, mass = _look(
            total, best, mass, queries, k + kv, v + kv, query, whole if masked else low,
            end if masked else whole, length, G * C, scale, masked == 1, WINDOW, BLOCK_N, C, BLOCK_C,
        )  # fmt: skip
    tl.store(out + place, total / tl.where(mass == 0, 1.0, mass)[:, None], mask=inside)
    tl.store(lse + head * T + first + query, best + tl.log2(mass), mask=query < length)


@triton.jit
def _halves(both):
    """The two fp32 numbers that one int64 holds."""
    low, high = (both & 0xFFFFFFFF).to(tl.int32), (both >> 32).to(tl.int32)
    return low.to(tl.float32, bitcast=True), high.to(tl.float32, bitcast=True)


@launched
@triton.jit
def _along(
    out, grad, lse, sums, cells, tiles, T,
    H: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Each query's log-sum-exp and Σ out · grad, side by side in one int64, so that one load reads both."""
    head, tile, first, length, _, query, place, inside = _program(cells, tiles, H, C, BLOCK, BLOCK_C)
    o, g = load_fp32(out + place, inside), load_fp32(grad + place, inside)
    level = load(lse + head * T + first + query, query < length)
    cell = 2 * ((head * tiles + tl.load(cells + 3 * tiles + tile)) * BLOCK + query)
    tl.store(sums + cell, level)
    tl.store(sums + cell + 1, tl.sum(o * g, 1))


@triton.jit
def _gather_keys(
    grad_k, grad_v, keys, values, q, grad, sums, slopes, key, low, high, length, scale,
    MASK: tl.constexpr, WINDOW: tl.constexpr, STORE: tl.constexpr, STRIDE: tl.constexpr,
    BLOCK: tl.constexpr, C: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Add the contribution of the queries low:high of one head to a tile of keys and values."""
    row = tl.arange(0, BLOCK)
    for start in range(low, high, BLOCK):
        query, place, inside = _vectors(start, length, STRIDE, BLOCK, C, BLOCK_C)
        queries = load(q + place, inside)
        level, along = _halves(tl.load(sums + query))
        scores = tl.dot(keys, tl.trans(queries))  # [keys, queries]
        if MASK:
            scores = _visible(scores, query[None, :], key[:, None], length, WINDOW)
        weights = tl.exp2(scores * scale - level[None, :])
        grads = load(grad + place, inside)
        grad_v = tl.dot(weights.to(grads.dtype), grads, grad_v)
        slope = weights * tl.dot(values, tl.trans(grads), tl.broadcast_to(-along[None, :], BLOCK, BLOCK))
        slope = slope.to(queries.dtype)
        grad_k = tl.dot(slope, queries, grad_k)
        if STORE:
            tile = start // BLOCK
            to = slopes + (tile * (tile + 1) // 2).to(tl.int64) * (BLOCK * BLOCK)
            to += row[:, None] * BLOCK + row[None, :]
            tl.store(to, slope)
    return grad_k, grad_v


@launched
@triton.jit
def _backward_keys(
    q, k, v, grad, sums, slopes, out_k, out_v, cells, tiles, query_tiles, stored, scale, scale2,
    H: tl.constexpr, G: tl.constexpr, C: tl.constexpr, WINDOW: tl.constexpr, STORE: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    kv, tile, first, length, at, key, place, inside = _program(cells, tiles, G, C, BLOCK, BLOCK_C)
    at = tl.multiple_of(at, BLOCK)
    first_tile, first_slope = tl.load(cells + 3 * tiles + tile), tl.load(cells + 4 * tiles + tile)
    keys, values = load(k + place, inside), load(v + place, inside)
    grad_k, grad_v = tl.zeros((BLOCK, BLOCK_C), tl.float32), tl.zeros((BLOCK, BLOCK_C), tl.float32)
    whole, end = at + BLOCK, length  # queries from `whole` on see every key of the tile
    if WINDOW > 0:
        whole += WINDOW
        end = whole
    for head in range(kv * (H // G), (kv + 1) * (H // G)):
        base = first * (H * C) + head * C
        at_sums = sums + (head * query_tiles + first_tile) * BLOCK
        at_slopes = slopes + (head * stored + first_slope + at // BLOCK).to(tl.int64) * (BLOCK * BLOCK)
        for unmasked in tl.static_range(2):
            grad_k, grad_v = _gather_keys(
                grad_k, grad_v, keys, values, q + base, grad + base, at_sums, at_slopes, key,
                whole if unmasked else at, end if unmasked else tl.minimum(whole, length), length, scale2,
                unmasked == 0, WINDOW, STORE, H * C, BLOCK, C, BLOCK_C,
            )  # fmt: skip
    tl.store(out_k + place, grad_k * scale, mask=inside)
    tl.store(out_v + place, grad_v, mask=inside)


@launched
@triton.jit
def _backward_slopes(
    k, slopes, out_q, cells, tiles, stored, scale,
    H: tl.constexpr, G: tl.constexpr, C: tl.constexpr, HEADS: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """The gradient to a tile of queries, of HEADS heads that share their keys, from stored slopes."""
    group, tile = tl.program_id(0), tl.program_id(1)
    first, length = tl.load(cells + tile).to(tl.int64), tl.load(cells + tiles + tile)
    at = tl.load(cells + 2 * tiles + tile)
    number, c, row = at // BLOCK, tl.arange(0, BLOCK_C), tl.arange(0, BLOCK)
    column = tl.arange(0, HEADS * BLOCK)
    head, query = group * HEADS + column // BLOCK, at + column % BLOCK
    of_head = head * stored + tl.load(cells + 4 * tiles + tile) + number * (number + 1) // 2
    slopes += of_head.to(tl.int64)[None, :] * (BLOCK * BLOCK)
    slopes += row[:, None] * BLOCK + (column % BLOCK)[None, :]
    k += first * (G * C) + group * HEADS // (H // G) * C
    grad_q = tl.zeros((HEADS * BLOCK, BLOCK_C), tl.float32)
    for start in range(0, at + BLOCK, BLOCK):
        key = start + row
        inside = (key < length)[:, None] & (c < C)[None, :]
        slope = tl.load(slopes + start * BLOCK)  # [keys, queries]
        keys = load(k + key.to(tl.int64)[:, None] * (G * C) + c[None, :], inside)
        grad_q = tl.dot(tl.trans(slope), keys, grad_q)
    place = (first + query)[:, None] * (H * C) + head[:, None] * C + c[None, :]
    tl.store(out_q + place, grad_q * scale, mask=(query < length)[:, None] & (c < C)[None, :])


@triton.jit
def _gather_queries(
    grad_q, queries, grads, level, along, k, v, query, low, high, length, scale,
    MASK: tl.constexpr, WINDOW: tl.constexpr, BLOCK: tl.constexpr,
    STRIDE: tl.constexpr, C: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Add the contribution of the keys low:high to a tile of queries."""
    for start in range(low, high, BLOCK):
        key, place, inside = _vectors(start, length, STRIDE, BLOCK, C, BLOCK_C)
        keys, values = load(k + place, inside), load(v + place, inside)
        scores = tl.dot(queries, tl.trans(keys))
        if MASK:
            scores = _visible(scores, query[:, None], key[None, :], length, WINDOW)
        weights = tl.exp2(scores * scale - level[:, None])
        slope = weights * tl.dot(grads, tl.trans(values), tl.broadcast_to(-along[:, None], BLOCK, BLOCK))
        grad_q = tl.dot(slope.to(keys.dtype), keys, grad_q)
    return grad_q


@launched
@triton.jit
def _backward_queries(
    q, k, v, grad, sums, out_q, cells, tiles, scale, scale2,
    H: tl.constexpr, G: tl.constexpr, C: tl.constexpr, WINDOW: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    head, tile, first, length, at, query, place, inside = _program(cells, tiles, H, C, BLOCK, BLOCK_C)
    queries, grads = load(q + place, inside), load(grad + place, inside)
    first_tile = tl.load(cells + 3 * tiles + tile)
    level, along = _halves(tl.load(sums + (head * tiles + first_tile) * BLOCK + query))
    kv = first * (G * C) + head // (H // G) * C
    low, whole, end = 0, at, tl.minimum(at + BLOCK, length)
    if WINDOW > 0:
        low = tl.maximum(at - WINDOW + 1, 0) // BLOCK * BLOCK
        whole = low
    grad_q = tl.zeros((BLOCK, BLOCK_C), tl.float32)
    for masked in tl.static_range(2):
        grad_q = _gather_queries(
            grad_q, queries, grads, level, along, k + kv, v + kv, query, whole if masked else low,
            end if masked else whole, length, scale2, masked == 1, WINDOW, BLOCK, G * C, C, BLOCK_C,
        )  # fmt: skip
    tl.store(out_q + place, grad_q * scale, mask=inside)


# -- launching -----------------------------------------------------------------------------------------


def _warps(head_dim: int) -> int:
    """With fewer, sums of wide heads do not fit in registers."""
    return 4 if head_dim <= 128 else 8


def forward(
    q_THC: Tensor, k_TGC: Tensor, v_TGC: Tensor, tiles: AttentionTiles, window: int | None,
    sinks_H: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The attention's output and, for the backward, each query's log-sum-exp [H, T]."""
    (tokens, h, c), g = q_THC.shape, k_TGC.shape[1]
    out, lse = torch.empty_like(q_THC), torch.empty(h, tokens, dtype=torch.float32, device=q_THC.device)
    count = tiles.queries.shape[1]
    _forward[(h, count)](
        q_THC, k_TGC, v_TGC, q_THC if sinks_H is None else sinks_H, out, lse, tiles.queries, count, tokens,
        c**-0.5 * LOG2E, SINKS=sinks_H is not None, H=h, G=g, C=c, WINDOW=window or 0, BLOCK_M=TILE,
        BLOCK_N=64, BLOCK_C=max(16, power_of_2(c)), num_warps=_warps(c), num_stages=3 if c <= 128 else 2,
    )  # fmt: skip
    return out, lse


def backward(
    grad_THC: Tensor, q_THC: Tensor, k_TGC: Tensor, v_TGC: Tensor, out_THC: Tensor, lse: Tensor,
    tiles: AttentionTiles, window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients to q, k and v."""
    (tokens, h, c), g = q_THC.shape, k_TGC.shape[1]
    blocks = {"BLOCK": TILE, "BLOCK_C": max(16, power_of_2(c))}
    cells, count = tiles.queries, tiles.queries.shape[1]
    sums = torch.empty(h, count * TILE, dtype=torch.int64, device=lse.device)
    both = sums.view(torch.float32)
    _along[(h, count)](out_THC, grad_THC, lse, both, cells, count, tokens, H=h, C=c, **blocks)
    grad_q, grad_k, grad_v = (torch.empty_like(x) for x in (q_THC, k_TGC, v_TGC))
    store = window is None and tiles.slopes * TILE**2 <= ROOM * tokens * c
    slopes = q_THC.new_empty(h, tiles.slopes, TILE, TILE) if store else grad_q  # [keys, queries]
    shape, scales = {"H": h, "G": g, "C": c}, (c**-0.5, c**-0.5 * LOG2E)
    given = (q_THC, k_TGC, v_TGC, grad_THC, sums)
    _backward_keys[(g, tiles.keys.shape[1])](
        *given, slopes, grad_k, grad_v, tiles.keys, tiles.keys.shape[1], count, tiles.slopes, *scales,
        **shape, WINDOW=window or 0, STORE=store, **blocks, num_warps=_warps(c), num_stages=2,
    )  # fmt: skip
    if store:
        heads = 2 - h // g % 2  # that share their keys
        _backward_slopes[(h // heads, count)](
            k_TGC, slopes, grad_q, cells, count, tiles.slopes, scales[0],
            **shape, HEADS=heads, **blocks, num_warps=4 * heads, num_stages=3,
        )  # fmt: skip
    else:
        _backward_queries[(h, count)](
            *given, grad_q, cells, count, *scales,
            **shape, WINDOW=window or 0, **blocks, num_warps=_warps(c), num_stages=2,
        )  # fmt: skip
    return grad_q, grad_k, grad_v

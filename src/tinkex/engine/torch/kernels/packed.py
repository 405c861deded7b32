# pyright: reportMissingImports=false, reportIndexIssue=false, reportArgumentType=false, reportCallIssue=false, reportReturnType=false
"""Causal attention within the sequences of a packed batch, forward and backward, with sliding windows.

Work comes in tiles of one sequence's positions, the longest first, so that ragged batches fill the device.
The backward gathers the gradients of a kv head over the query heads that share it; the order of every sum is
fixed. `attention.attend_plain` is the plain path. Knows nothing of autograd.

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

from tinkex.engine.torch.kernels.launch import launched
from tinkex.engine.torch.kernels.sizes import power_of_2

QUERIES, KEYS = 64, 64  # positions of a tile: of queries where they stay, of keys where those do


class Tiles(NamedTuple):
    """Tiles of queries and of keys, int32 [3, tiles]: the sequence's first row, its length, a position."""

    queries: Tensor
    keys: Tensor


def cut_tiles(lengths: Sequence[int], size: int, *, later_first: bool) -> np.ndarray:
    """Tiles of `size` positions, those with the most work first: late queries, or early keys."""
    starts = np.cumsum([0, *lengths[:-1]]).tolist()
    tiles = [(s, n, at) for s, n in zip(starts, lengths, strict=True) for at in range(0, n, size)]
    tiles.sort(key=lambda tile: -tile[2] if later_first else tile[2] - tile[1])
    return np.ascontiguousarray(np.array(tiles, np.int32).T)


@triton.jit
def _visible(scores, query, key, length, WINDOW: tl.constexpr):
    """-inf where a query may not look: `query` and `key` are positions, broadcast against each other."""
    seen = (key <= query) & (query < length)
    if WINDOW > 0:
        seen &= key > query - WINDOW
    return tl.where(seen, scores, float("-inf"))


@triton.jit
def _look(
    total, best, mass, queries, k, v, query, low, high, length, stride, scale,
    MASK: tl.constexpr, WINDOW: tl.constexpr, BLOCK: tl.constexpr, C: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Let a tile of queries see the keys low:high."""
    c = tl.arange(0, BLOCK_C)
    for start in range(low, high, BLOCK):
        key = start + tl.arange(0, BLOCK)
        inside = (key < length)[:, None] & (c < C)[None, :]
        place = key.to(tl.int64)[:, None] * stride + c[None, :]
        keys = tl.load(k + place, mask=inside, other=0.0)
        scores = tl.dot(queries, tl.trans(keys)) * scale
        if MASK:
            scores = _visible(scores, query[:, None], key[None, :], length, WINDOW)
        higher = tl.maximum(best, tl.max(scores, 1))
        level = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(scores - level[:, None])
        fade = tl.exp2(best - level)
        mass = mass * fade + tl.sum(weights, 1)
        values = tl.load(v + place, mask=inside, other=0.0)
        total = tl.dot(weights.to(values.dtype), values, total * fade[:, None])
        best = higher
    return total, best, mass


@launched
@triton.jit
def _forward(
    q, k, v, out, lse, cells, tiles, T, scale,
    H: tl.constexpr, G: tl.constexpr, C: tl.constexpr, WINDOW: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    tile, head = tl.program_id(0), tl.program_id(1)
    first, length = tl.load(cells + tile).to(tl.int64), tl.load(cells + tiles + tile)
    at = tl.load(cells + 2 * tiles + tile)
    query, c = at + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_C)
    inside = (query < length)[:, None] & (c < C)[None, :]
    place = (first + query)[:, None] * (H * C) + head * C + c[None, :]
    queries = tl.load(q + place, mask=inside, other=0.0)
    kv = first * (G * C) + head // (H // G) * C
    best = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    mass = tl.zeros((BLOCK_M,), tl.float32)
    total = tl.zeros((BLOCK_M, BLOCK_C), tl.float32)
    low, end = 0, tl.minimum(at + BLOCK_M, length)
    whole = at // BLOCK_N * BLOCK_N  # keys before it are seen by every query of the tile
    if WINDOW > 0:
        low = tl.maximum(at - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
        whole = low
    total, best, mass = _look(
        total, best, mass, queries, k + kv, v + kv, query, low, whole, length, G * C, scale,
        MASK=False, WINDOW=WINDOW, BLOCK=BLOCK_N, C=C, BLOCK_C=BLOCK_C,
    )  # fmt: skip
    total, best, mass = _look(
        total, best, mass, queries, k + kv, v + kv, query, whole, end, length, G * C, scale,
        MASK=True, WINDOW=WINDOW, BLOCK=BLOCK_N, C=C, BLOCK_C=BLOCK_C,
    )  # fmt: skip
    tl.store(out + place, total / tl.where(mass == 0, 1.0, mass)[:, None], mask=inside)
    tl.store(lse + head * T + first + query, best + tl.log2(mass), mask=query < length)


@launched
@triton.jit
def _along(out, grad, delta, T, H: tl.constexpr, C: tl.constexpr, HEADS: tl.constexpr, BLOCK_C: tl.constexpr):
    """delta = Σ out · grad of every token and head."""
    token = tl.program_id(0).to(tl.int64)
    head, c = tl.arange(0, HEADS), tl.arange(0, BLOCK_C)
    inside = (head < H)[:, None] & (c < C)[None, :]
    place = token * (H * C) + head[:, None] * C + c[None, :]
    o = tl.load(out + place, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(grad + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(delta + head.to(tl.int64) * T + token, tl.sum(o * g, 1), mask=head < H)


@triton.jit
def _gather_keys(
    grad_k, grad_v, keys, values, q, grad, lse, delta, key, low, high, length, scale,
    MASK: tl.constexpr, WINDOW: tl.constexpr, BLOCK: tl.constexpr,
    STRIDE: tl.constexpr, C: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Add what the queries low:high of one head give to a tile of keys and values."""
    c = tl.arange(0, BLOCK_C)
    for start in range(low, high, BLOCK):
        query = start + tl.arange(0, BLOCK)
        inside = (query < length)[:, None] & (c < C)[None, :]
        place = query.to(tl.int64)[:, None] * STRIDE + c[None, :]
        queries = tl.load(q + place, mask=inside, other=0.0)
        level = tl.load(lse + query, mask=query < length, other=0.0)
        scores = tl.dot(keys, tl.trans(queries)) * scale  # [keys, queries]
        if MASK:
            scores = _visible(scores, query[None, :], key[:, None], length, WINDOW)
        weights = tl.exp2(scores - level[None, :])
        grads = tl.load(grad + place, mask=inside, other=0.0)
        grad_v = tl.dot(weights.to(grads.dtype), grads, grad_v)
        along = tl.load(delta + query, mask=query < length, other=0.0)
        slopes = weights * (tl.dot(values, tl.trans(grads)) - along[None, :])
        grad_k = tl.dot(slopes.to(queries.dtype), queries, grad_k)
    return grad_k, grad_v


@launched
@triton.jit
def _backward_keys(
    q, k, v, grad, lse, delta, out_k, out_v, cells, tiles, T, scale, scale2,
    H: tl.constexpr, G: tl.constexpr, C: tl.constexpr, WINDOW: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    tile, kv = tl.program_id(0), tl.program_id(1)
    first, length = tl.load(cells + tile).to(tl.int64), tl.load(cells + tiles + tile)
    at = tl.load(cells + 2 * tiles + tile)
    key, c = at + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_C)
    inside = (key < length)[:, None] & (c < C)[None, :]
    place = (first + key)[:, None] * (G * C) + kv * C + c[None, :]
    keys = tl.load(k + place, mask=inside, other=0.0)
    values = tl.load(v + place, mask=inside, other=0.0)
    grad_k = tl.zeros((BLOCK_N, BLOCK_C), tl.float32)
    grad_v = tl.zeros((BLOCK_N, BLOCK_C), tl.float32)
    whole, end = tl.minimum(at + BLOCK_N, length), length  # queries from `whole` on see every key of the tile
    if WINDOW > 0:
        whole = tl.minimum(at + BLOCK_N + WINDOW, length)
        end = whole
    for head in range(kv * (H // G), (kv + 1) * (H // G)):
        base = first * (H * C) + head * C
        at_lse, at_delta = lse + head * T + first, delta + head * T + first
        grad_k, grad_v = _gather_keys(
            grad_k, grad_v, keys, values, q + base, grad + base, at_lse, at_delta, key,
            at, whole, length, scale2,
            MASK=True, WINDOW=WINDOW, BLOCK=BLOCK_M, STRIDE=H * C, C=C, BLOCK_C=BLOCK_C,
        )  # fmt: skip
        grad_k, grad_v = _gather_keys(
            grad_k, grad_v, keys, values, q + base, grad + base, at_lse, at_delta, key,
            whole, end, length, scale2,
            MASK=False, WINDOW=WINDOW, BLOCK=BLOCK_M, STRIDE=H * C, C=C, BLOCK_C=BLOCK_C,
        )  # fmt: skip
    tl.store(out_k + place, grad_k * scale, mask=inside)
    tl.store(out_v + place, grad_v, mask=inside)


@triton.jit
def _gather_queries(
    grad_q, queries, grads, level, along, k, v, query, low, high, length, scale,
    MASK: tl.constexpr, WINDOW: tl.constexpr, BLOCK: tl.constexpr,
    STRIDE: tl.constexpr, C: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Add what the keys low:high give to a tile of queries."""
    c = tl.arange(0, BLOCK_C)
    for start in range(low, high, BLOCK):
        key = start + tl.arange(0, BLOCK)
        inside = (key < length)[:, None] & (c < C)[None, :]
        place = key.to(tl.int64)[:, None] * STRIDE + c[None, :]
        keys = tl.load(k + place, mask=inside, other=0.0)
        values = tl.load(v + place, mask=inside, other=0.0)
        scores = tl.dot(queries, tl.trans(keys)) * scale
        if MASK:
            scores = _visible(scores, query[:, None], key[None, :], length, WINDOW)
        weights = tl.exp2(scores - level[:, None])
        slopes = weights * (tl.dot(grads, tl.trans(values)) - along[:, None])
        grad_q = tl.dot(slopes.to(keys.dtype), keys, grad_q)
    return grad_q


@launched
@triton.jit
def _backward_queries(
    q, k, v, grad, lse, delta, out_q, cells, tiles, T, scale, scale2,
    H: tl.constexpr, G: tl.constexpr, C: tl.constexpr, WINDOW: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    tile, head = tl.program_id(0), tl.program_id(1)
    first, length = tl.load(cells + tile).to(tl.int64), tl.load(cells + tiles + tile)
    at = tl.load(cells + 2 * tiles + tile)
    query, c = at + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_C)
    inside = (query < length)[:, None] & (c < C)[None, :]
    place = (first + query)[:, None] * (H * C) + head * C + c[None, :]
    queries = tl.load(q + place, mask=inside, other=0.0)
    grads = tl.load(grad + place, mask=inside, other=0.0)
    level = tl.load(lse + head * T + first + query, mask=query < length, other=0.0)
    along = tl.load(delta + head * T + first + query, mask=query < length, other=0.0)
    kv = first * (G * C) + head // (H // G) * C
    low, end = 0, tl.minimum(at + BLOCK_M, length)
    whole = at // BLOCK_N * BLOCK_N
    if WINDOW > 0:
        low = tl.maximum(at - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
        whole = low
    grad_q = tl.zeros((BLOCK_M, BLOCK_C), tl.float32)
    grad_q = _gather_queries(
        grad_q, queries, grads, level, along, k + kv, v + kv, query, low, whole, length, scale2,
        MASK=False, WINDOW=WINDOW, BLOCK=BLOCK_N, STRIDE=G * C, C=C, BLOCK_C=BLOCK_C,
    )  # fmt: skip
    grad_q = _gather_queries(
        grad_q, queries, grads, level, along, k + kv, v + kv, query, whole, end, length, scale2,
        MASK=True, WINDOW=WINDOW, BLOCK=BLOCK_N, STRIDE=G * C, C=C, BLOCK_C=BLOCK_C,
    )  # fmt: skip
    tl.store(out_q + place, grad_q * scale, mask=inside)


# -- launching -----------------------------------------------------------------------------------------

_LOG2E = 1.4426950408889634


def forward(
    q_THC: Tensor, k_TGC: Tensor, v_TGC: Tensor, tiles: Tiles, window: int | None
) -> tuple[Tensor, Tensor]:
    """The attention's output and, for the backward, each query's logarithm of its mass [H, T]."""
    (tokens, h, c), g = q_THC.shape, k_TGC.shape[1]
    out, lse = torch.empty_like(q_THC), torch.empty(h, tokens, dtype=torch.float32, device=q_THC.device)
    count = tiles.queries.shape[1]
    _forward[(count, h)](
        q_THC, k_TGC, v_TGC, out, lse, tiles.queries, count, tokens, c**-0.5 * _LOG2E,
        H=h, G=g, C=c, WINDOW=window or 0, BLOCK_M=QUERIES, BLOCK_N=64,
        BLOCK_C=_columns(c), num_warps=4, num_stages=3,
    )  # fmt: skip
    return out, lse


def backward(
    grad_THC: Tensor,
    q_THC: Tensor,
    k_TGC: Tensor,
    v_TGC: Tensor,
    out_THC: Tensor,
    lse: Tensor,
    tiles: Tiles,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients to q, k and v."""
    (tokens, h, c), g = q_THC.shape, k_TGC.shape[1]
    delta, block_c = torch.empty_like(lse), _columns(c)
    _along[(tokens,)](out_THC, grad_THC, delta, tokens, H=h, C=c, HEADS=power_of_2(h), BLOCK_C=block_c)
    grad_q, grad_k, grad_v = (torch.empty_like(x) for x in (q_THC, k_TGC, v_TGC))
    shape = {"H": h, "G": g, "C": c, "WINDOW": window or 0, "BLOCK_C": block_c}
    scales = c**-0.5, c**-0.5 * _LOG2E
    given = (q_THC, k_TGC, v_TGC, grad_THC, lse, delta)
    count = tiles.keys.shape[1]
    _backward_keys[(count, g)](
        *given, grad_k, grad_v, tiles.keys, count, tokens, *scales,
        **shape, BLOCK_M=64, BLOCK_N=KEYS, num_warps=4, num_stages=2,
    )  # fmt: skip
    count = tiles.queries.shape[1]
    _backward_queries[(count, h)](
        *given, grad_q, tiles.queries, count, tokens, *scales,
        **shape, BLOCK_M=QUERIES, BLOCK_N=64, num_warps=4, num_stages=2,
    )  # fmt: skip
    return grad_q, grad_k, grad_v


def _columns(c: int) -> int:
    return max(16, power_of_2(c))

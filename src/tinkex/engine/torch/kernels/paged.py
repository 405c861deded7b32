# pyright: reportMissingImports=false, reportIndexIssue=false, reportArgumentType=false, reportCallIssue=false
"""Attention over the paged KV cache: one kernel for decoding and for prefill, by tiles of queries.

A tile is up to `tokens` consecutive queries of one sequence with all the heads that share a kv head, so that
a key is read once for all of them. Keys beyond a query's position are never read into a result, so pages need
no clearing. Few sequences are cut along their keys and joined by a second kernel. With one size of tile
and no cuts a query's result is the same to the last bit, whatever else is in the batch: blocks of keys begin
at multiples of their size. `kv.PagedAttend` is the plain path. Knows nothing of requests.

Shapes: T tokens, H query heads, G kv heads, C head dim, B sequences, N pages of a sequence.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tinkex.engine.torch.kernels.chain import CHAINED, after_previous
from tinkex.engine.torch.kernels.launch import launched
from tinkex.engine.torch.kernels.sizes import power_of_2


class Queries(NamedTuple):
    """Where a step's queries are and what they see."""

    tiles: Tensor  # int32 [4, tiles]: first row, how many, position of the first, sequence
    table_BN: Tensor  # int32: each sequence's pages
    tokens: int  # of a whole tile
    splits: int = 1  # of the keys


@launched
@triton.jit
def _write(k, v, k_pool, v_pool, slots, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    after_previous()
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = (at < WIDTH) & (slot >= 0)
    tl.store(k_pool + slot * WIDTH + at, tl.load(k + token * WIDTH + at, mask=inside), mask=inside)
    tl.store(v_pool + slot * WIDTH + at, tl.load(v + token * WIDTH + at, mask=inside), mask=inside)


def write(k_TGC: Tensor, v_TGC: Tensor, k_pool: Tensor, v_pool: Tensor, slots_T: Tensor) -> None:
    """Put new keys and values into their slots; a slot below 0 is nowhere."""
    tokens, width = k_TGC.shape[0], k_TGC.shape[1] * k_TGC.shape[2]
    _write[(tokens,)](k_TGC, v_TGC, k_pool, v_pool, slots_T, WIDTH=width, BLOCK=power_of_2(width), **CHAINED)


@triton.jit
def _either(condition, yes, no, ALIGNED: tl.constexpr):
    """`yes`, a pointer, or one of `no`; ALIGNED: all are to whole vectors, which a choice would hide."""
    address = tl.where(condition, yes.to(tl.int64), no.to(tl.int64)).to(no.dtype)
    if ALIGNED:
        address = tl.multiple_of(address, 16)
    return address


@launched
@triton.jit(do_not_specialize=["tiles", "stride_table"])
def _attend(
    q, k, v, k_pool, v_pool, out, lse, cells, tiles, table, stride_table, scale,
    H: tl.constexpr, G: tl.constexpr, C: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr,
    SPLITS: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr, KEYS: tl.constexpr,
    BLOCK_C: tl.constexpr,
):  # fmt: skip
    tile, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row, count = tl.load(cells + tile), tl.load(cells + tiles + tile)
    position, sequence = tl.load(cells + 2 * tiles + tile), tl.load(cells + 3 * tiles + tile)
    after_previous()
    scale2 = scale * 1.4426950408889634  # so that exp2 does
    if count > 0:
        m, c, l = tl.arange(0, TOKENS * HEADS), tl.arange(0, BLOCK_C), tl.arange(0, KEYS)
        token, head = m // HEADS, m % HEADS
        have_m, have_c = (token < count) & (head < H // G), c < C
        at_q = ((row + token).to(tl.int64) * H + kv_head * (H // G) + head)[:, None] * C + c[None, :]
        queries = tl.load(q + at_q, mask=have_m[:, None] & have_c[None, :], other=0.0)
        last = position + count  # keys that the last query sees
        first = tl.maximum(position - WINDOW + 1, 0) // KEYS * KEYS if WINDOW > 0 else 0
        span = tl.cdiv(tl.cdiv(last - first, KEYS), SPLITS) * KEYS
        new = (row.to(tl.int64) * G + kv_head) * C
        best = tl.full((TOKENS * HEADS,), float("-inf"), tl.float32)
        mass = tl.zeros((TOKENS * HEADS,), tl.float32)
        total = tl.zeros((TOKENS * HEADS, BLOCK_C), tl.float32)
        for start in range(first + split * span, tl.minimum(first + (split + 1) * span, last), KEYS):
            key = start + l
            page = tl.load(table + sequence * stride_table + key // PAGE, mask=key < last, other=0).to(
                tl.int64
            )
            slot = ((page * PAGE + key % PAGE) * G + kv_head) * C
            at_k, at_v = k_pool + slot, v_pool + slot
            if TOKENS == 1:  # the new one is not there yet
                at_k = _either(key == position, k + new, at_k, ALIGNED=C % 8 == 0)
                at_v = _either(key == position, v + new, at_v, ALIGNED=C % 8 == 0)
            keys = tl.load(
                at_k[None, :] + c[:, None], mask=(key < last)[None, :] & have_c[:, None], other=0.0
            )
            scores = tl.dot(queries, keys) * scale2
            seen = key[None, :] <= position + token[:, None]
            if WINDOW > 0:
                seen &= key[None, :] > position + token[:, None] - WINDOW
            scores = tl.where(seen, scores, float("-inf"))
            higher = tl.maximum(best, tl.max(scores, 1))
            level = tl.where(higher == float("-inf"), 0.0, higher)
            weights = tl.exp2(scores - level[:, None])
            fade = tl.exp2(best - level)
            mass = mass * fade + tl.sum(weights, 1)
            values = tl.load(
                at_v[:, None] + c[None, :], mask=(key < last)[:, None] & have_c[None, :], other=0.0
            )
            total = tl.dot(weights.to(values.dtype), values, total * fade[:, None])
            best = higher
        if TOKENS == 1:
            low = first + split * span
            if (position >= low) & (position < low + span):  # whoever saw the new key puts it into the pools
                page = tl.load(table + sequence * stride_table + position // PAGE).to(tl.int64)
                slot = ((page * PAGE + position % PAGE) * G + kv_head) * C + c
                tl.store(k_pool + slot, tl.load(k + new + c, mask=have_c), mask=have_c)
                tl.store(v_pool + slot, tl.load(v + new + c, mask=have_c), mask=have_c)
        total = total / tl.where(mass == 0, 1.0, mass)[:, None]
        part = ((row + token).to(tl.int64) * H + kv_head * (H // G) + head) * SPLITS + split
        tl.store(out + part[:, None] * C + c[None, :], total, mask=have_m[:, None] & have_c[None, :])
        if SPLITS * TOKENS > 1:
            tl.store(lse + part, tl.where(mass == 0, float("-inf"), best + tl.log2(mass)), mask=have_m)


@launched
@triton.jit
def _join(parts, lse, out, C: tl.constexpr, SPLITS: tl.constexpr, BLOCK_C: tl.constexpr):
    after_previous()
    row = tl.program_id(0).to(tl.int64)
    s, c = tl.arange(0, SPLITS), tl.arange(0, BLOCK_C)
    levels = tl.load(lse + row * SPLITS + s)
    level = tl.max(levels, 0)
    weights = tl.exp2(levels - tl.where(level == float("-inf"), 0.0, level))
    values = tl.load(parts + (row * SPLITS + s)[:, None] * C + c[None, :], mask=(c < C)[None, :], other=0.0)
    whole = tl.sum(tl.where((weights > 0)[:, None], values * weights[:, None], 0.0), 0)
    tl.store(out + row * C + c, whole / tl.maximum(tl.sum(weights, 0), 1e-30), mask=c < C)


def _loop(tokens: int, splits: int, programs: int) -> tuple[int, int, int]:
    """Keys that one round reads, warps, and rounds under way: as measured on an H200."""
    if tokens > 1:
        return 64, 4, 3
    if splits > 1:
        return 32, 2, 2
    return (32, 1, 2) if programs >= 1024 else (64, 2, 3)


def attend(
    q_THC: Tensor,
    k_TGC: Tensor,
    v_TGC: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    queries: Queries,
    kv_heads: int,
    page: int,
    window: int | None,
) -> tuple[Tensor, Tensor]:
    """Every query over the keys of its sequence up to its own, `window` in all if there is one.

    Tiles of one token put their keys and values into the pools on the way; for others `write` has done so,
    and theirs alone is the second result: the logarithm to base 2 of every query's mass [T, H].
    """
    (tokens, h, c), splits = q_THC.shape, queries.splits
    out = torch.empty_like(q_THC)
    parts = torch.empty(tokens, h, splits, c, dtype=torch.float32, device=out.device) if splits > 1 else out
    lse = torch.empty(tokens, h, splits, dtype=torch.float32, device=out.device)
    heads = max(power_of_2(h // kv_heads), 16 // queries.tokens)
    block_c = max(16, power_of_2(c))
    count = queries.tiles.shape[1]
    keys, warps, stages = _loop(queries.tokens, splits, count * kv_heads)
    _attend[(count, kv_heads, splits)](
        q_THC, k_TGC, v_TGC, k_pool, v_pool, parts, lse, queries.tiles, count,
        queries.table_BN, queries.table_BN.stride(0), c**-0.5,
        H=h, G=kv_heads, C=c, PAGE=page, WINDOW=window or 0, SPLITS=splits, TOKENS=queries.tokens,
        HEADS=heads, KEYS=keys, BLOCK_C=block_c, num_warps=warps, num_stages=stages, **CHAINED,
    )  # fmt: skip
    if splits > 1:
        _join[(tokens * h,)](parts, lse, out, C=c, SPLITS=splits, BLOCK_C=block_c, num_warps=1, **CHAINED)
    return out, lse[:, :, 0]

# pyright: reportMissingImports=false, reportIndexIssue=false, reportArgumentType=false, reportCallIssue=false
"""Attention over the paged KV cache, by tiles of queries; many tiles of one token have a kernel of their own.

A tile is up to `tokens` consecutive queries of one sequence with all the heads that share a kv head, so that
a key is read once for all of them. Keys beyond a query's position are never read into a result, so pages need
no clearing. Few sequences are cut along their keys and joined by a further kernel. With one size of tile
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
from tinkex.engine.torch.kernels.packed import added
from tinkex.engine.torch.kernels.sizes import power_of_2

_MANY = 1024  # tiles of one token and a kv head, that keep a large device busy with one warp each


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


@triton.jit
def _see(total, best, mass, queries, at_k, at_v, seen, have_c, scale):
    """Let queries see one page of keys, those that `seen` allows."""
    keys = tl.load(at_k, mask=seen[:, None] & have_c[None, :], other=0.0)
    values = tl.load(at_v, mask=seen[None, :] & have_c[:, None], other=0.0)
    scores = tl.where(seen[:, None], tl.dot(keys, queries) * scale, float("-inf"))
    higher = tl.maximum(best, tl.max(scores, 0))
    level = tl.where(higher == float("-inf"), 0.0, higher)
    weights, fade = tl.exp2(scores - level[None, :]), tl.exp2(best - level)
    total = tl.dot(values, weights.to(values.dtype), total * fade[None, :])
    return total, higher, mass * fade + tl.sum(weights, 0)


@launched
@triton.jit(do_not_specialize=["tiles", "stride_table"])
def _decode(
    q, k, v, k_pool, v_pool, out, cells, tiles, table, stride_table, scale,
    H: tl.constexpr, G: tl.constexpr, C: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr,
    HEADS: tl.constexpr, BLOCK_C: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """`_attend` for tiles of one token, in a third of its instructions.

    Everything is turned round, [keys, heads] and [C, heads], since there may be as few as 8 columns but not
    rows; two pages make a round, each with one address, and their numbers are fetched a round before.
    """
    tile, kv_head = tl.program_id(0), tl.program_id(1)
    row, count = tl.load(cells + tile), tl.load(cells + tiles + tile)
    position, sequence = tl.load(cells + 2 * tiles + tile), tl.load(cells + 3 * tiles + tile)
    after_previous()
    scale2 = scale * 1.4426950408889634  # so that exp2 does
    if count > 0:
        head, c, l = tl.arange(0, HEADS), tl.arange(0, BLOCK_C), tl.arange(0, PAGE)
        have_h, have_c = head < H // G, c < C
        at_q = (row.to(tl.int64) * H + kv_head * (H // G) + head)[None, :] * C + c[:, None]
        queries = tl.load(q + at_q, mask=have_h[None, :] & have_c[:, None], other=0.0)
        pages, newest = table + sequence.to(tl.int64) * stride_table, position // PAGE
        k_pool, v_pool = k_pool + kv_head * C, v_pool + kv_head * C
        down, across = l[:, None] * (G * C) + c[None, :], l[None, :] * (G * C) + c[:, None]
        new = (row.to(tl.int64) * G + kv_head) * C
        low = tl.maximum(position - WINDOW + 1, 0) // (2 * PAGE) * (2 * PAGE) if WINDOW > 0 else 0
        inner, outer = low, low + (position - low) // (2 * PAGE) * (2 * PAGE)
        best = tl.full((HEADS,), float("-inf"), tl.float32)
        mass = tl.zeros((HEADS,), tl.float32)
        total = tl.zeros((BLOCK_C, HEADS), tl.float32)
        if WINDOW > 0:
            if position >= WINDOW:
                inner = tl.minimum(low + 2 * PAGE, outer)
            for start in range(low, inner, PAGE):
                place = tl.load(pages + start // PAGE).to(tl.int64) * (PAGE * G * C)
                total, best, mass = _see(
                    total, best, mass, queries, k_pool + place + down, v_pool + place + across,
                    start + l > position - WINDOW, have_c, scale2,
                )  # fmt: skip
        left = tl.load(pages + tl.minimum(inner // PAGE, newest))
        right = tl.load(pages + tl.minimum(inner // PAGE + 1, newest))
        for start in tl.range(inner, outer, 2 * PAGE, num_stages=STAGES):
            one, two = left.to(tl.int64) * (PAGE * G * C), right.to(tl.int64) * (PAGE * G * C)
            following = start // PAGE + 2
            left = tl.load(pages + tl.minimum(following, newest))
            right = tl.load(pages + tl.minimum(following + 1, newest))
            if C == BLOCK_C:
                k1, k2 = tl.load(k_pool + one + down), tl.load(k_pool + two + down)
                v1, v2 = tl.load(v_pool + one + across), tl.load(v_pool + two + across)
            else:
                k1 = tl.load(k_pool + one + down, mask=have_c[None, :], other=0.0)
                k2 = tl.load(k_pool + two + down, mask=have_c[None, :], other=0.0)
                v1 = tl.load(v_pool + one + across, mask=have_c[:, None], other=0.0)
                v2 = tl.load(v_pool + two + across, mask=have_c[:, None], other=0.0)
            s1, s2 = tl.dot(k1, queries) * scale2, tl.dot(k2, queries) * scale2
            higher = tl.maximum(best, tl.max(tl.maximum(s1, s2), 0))
            w1, w2 = tl.exp2(s1 - higher[None, :]), tl.exp2(s2 - higher[None, :])
            fade = tl.exp2(best - higher)
            mass = mass * fade + tl.sum(w1 + w2, 0)
            total = tl.dot(v1, w1.to(v1.dtype), total * fade[None, :])
            total = tl.dot(v2, w2.to(v2.dtype), total)
            best = higher
        for start in range(outer, position + 1, PAGE):
            key = start + l
            slot = tl.load(pages + start // PAGE).to(tl.int64) * (PAGE * G * C) + l * (G * C)
            at_k = _either(key == position, k + new, k_pool + slot, ALIGNED=C % 8 == 0)
            at_v = _either(key == position, v + new, v_pool + slot, ALIGNED=C % 8 == 0)
            seen = key <= position
            if WINDOW > 0:
                seen &= key > position - WINDOW
            total, best, mass = _see(
                total, best, mass, queries, at_k[:, None] + c[None, :], at_v[None, :] + c[:, None],
                seen, have_c, scale2,
            )  # fmt: skip
        place = tl.load(pages + newest).to(tl.int64) * (PAGE * G * C) + position % PAGE * (G * C) + c
        tl.store(k_pool + place, tl.load(k + new + c, mask=have_c), mask=have_c)
        tl.store(v_pool + place, tl.load(v + new + c, mask=have_c), mask=have_c)
        total = total / mass[None, :]
        tl.store(out + at_q, total, mask=have_h[None, :] & have_c[:, None])


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
            scores = tl.dot(queries, keys)
            seen = key[None, :] <= position + token[:, None]
            if WINDOW > 0:
                seen &= key[None, :] > position + token[:, None] - WINDOW
            scores = tl.where(seen, scores, float("-inf"))
            higher = tl.maximum(best, tl.max(scores, 1) * scale2)
            level = tl.where(higher == float("-inf"), 0.0, higher)
            weights = tl.exp2(scores * scale2 - level[:, None])
            fade = tl.exp2(best - level)
            mass = mass * fade + added(weights, TOKENS * HEADS, KEYS)
            values = tl.load(
                at_v[:, None] + c[None, :], mask=(key < last)[:, None] & have_c[None, :], other=0.0
            )
            total = tl.dot(weights.to(values.dtype), values, total * fade[:, None])
            best = higher
        low = first + split * span
        if TOKENS == 1 and (position >= low) & (position < low + span):  # who saw the new key puts it there
            page = tl.load(table + sequence * stride_table + position // PAGE).to(tl.int64)
            slot = ((page * PAGE + position % PAGE) * G + kv_head) * C + c
            tl.store(k_pool + slot, tl.load(k + new + c, mask=have_c), mask=have_c)
            tl.store(v_pool + slot, tl.load(v + new + c, mask=have_c), mask=have_c)
        total = total / tl.where(mass == 0, 1.0, mass)[:, None]
        part = ((row + token).to(tl.int64) * H + kv_head * (H // G) + head) * SPLITS + split
        tl.store(out + part[:, None] * C + c[None, :], total, mask=have_m[:, None] & have_c[None, :])
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


def _loop(tokens: int, splits: int) -> tuple[int, int, int]:
    """Keys that one round reads, warps, and rounds under way: as measured on an H200."""
    if tokens > 1:
        return 64, 4, 3
    return (32, 2, 2) if splits > 1 else (64, 2, 3)


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
    block_c, count = max(16, power_of_2(c)), queries.tiles.shape[1]
    tensors = (q_THC, k_TGC, v_TGC, k_pool, v_pool)
    seen = (queries.tiles, count, queries.table_BN, queries.table_BN.stride(0), c**-0.5)
    shape = {"H": h, "G": kv_heads, "C": c, "PAGE": page, "WINDOW": window or 0, "BLOCK_C": block_c}
    heads = power_of_2(h // kv_heads)
    if queries.tokens == 1 and count * kv_heads >= _MANY:
        _decode[(count, kv_heads)](
            *tensors, out, *seen, **shape, HEADS=max(8, heads), STAGES=2, num_warps=1, **CHAINED
        )
        return out, lse[:, :, 0]
    keys, warps, stages = _loop(queries.tokens, splits)
    _attend[(count, kv_heads, splits)](
        *tensors, parts, lse, *seen, **shape, SPLITS=splits, TOKENS=queries.tokens,
        HEADS=max(heads, 16 // queries.tokens), KEYS=keys, num_warps=warps, num_stages=stages, **CHAINED,
    )  # fmt: skip
    if splits > 1:
        _join[(tokens * h,)](parts, lse, out, C=c, SPLITS=splits, BLOCK_C=block_c, num_warps=1, **CHAINED)
    return out, lse[:, :, 0]

# pyright: reportMissingImports=false, reportIndexIssue=false, reportArgumentType=false, reportCallIssue=false
"""Attention over the paged KV cache: `_attend` for tiles of queries, `_decode` for many tiles of one token.

A tile is up to `tokens` consecutive queries of one sequence with all heads that share a kv head, so that a
key is loaded once for all of them. Masked keys are never loaded, so pages need no clearing. Few sequences are
split along their keys (split-K), and `_join` combines the splits. With one size of tile and no splits results
are batch-invariant: blocks of keys begin at multiples of their size. The plain implementation is
`kv.PagedAttend`. Knows nothing of requests.

Shapes: T tokens, H query heads, G kv heads, C head dim, B sequences, N pages of a sequence.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tinkex.engine.cuda.launch import launched
from tinkex.engine.cuda.packed_attention import LOG2E
from tinkex.engine.cuda.pdl import PDL, wait_for_previous
from tinkex.engine.cuda.sizes import power_of_2
from tinkex.engine.cuda.sums import sum_mma_columns, sum_mma_rows

_MANY = 1024  # tiles times kv heads that fill the device with programs of one warp


class Queries(NamedTuple):
    """A step's queries and the keys that they attend to."""

    tiles: Tensor  # int32 [4, tiles]: first row, how many, position of the first, sequence
    table_BN: Tensor  # int32: the page table
    tokens: int  # of a whole tile
    splits: int = 1  # of the keys
    min_split_keys: int = 0  # above 0: splits are that long, and unsplit results match the trainer bitwise


@launched
@triton.jit
def _write(k, v, k_pool, v_pool, slots, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    wait_for_previous()
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = (at < WIDTH) & (slot >= 0)
    tl.store(k_pool + slot * WIDTH + at, tl.load(k + token * WIDTH + at, mask=inside), mask=inside)
    tl.store(v_pool + slot * WIDTH + at, tl.load(v + token * WIDTH + at, mask=inside), mask=inside)


def write(k_TGC: Tensor, v_TGC: Tensor, k_pool: Tensor, v_pool: Tensor, slots_T: Tensor) -> None:
    """Store new keys and values in their slots; a negative slot is skipped."""
    tokens, width = k_TGC.shape[0], k_TGC.shape[1] * k_TGC.shape[2]
    _write[(tokens,)](k_TGC, v_TGC, k_pool, v_pool, slots_T, WIDTH=width, BLOCK=power_of_2(width), **PDL)


@triton.jit
def _either(condition, yes, no, ALIGNED: tl.constexpr):
    """The pointer `yes` or one of `no`; ALIGNED: all are multiples of 16 bytes, which `where` would hide."""
    address = tl.where(condition, yes.to(tl.int64), no.to(tl.int64)).to(no.dtype)
    if ALIGNED:
        address = tl.multiple_of(address, 16)
    return address


@triton.jit
def _page(
    pool, new, page, key, first, position,
    MASK: tl.constexpr, TURNED: tl.constexpr, PAGE: tl.constexpr, G: tl.constexpr, C: tl.constexpr,
    BLOCK_C: tl.constexpr,
):  # fmt: skip
    """A page's keys or values [keys, C], or [C, keys] if TURNED, at the positions `key`.

    MASK: zeros outside `first` to `position`; those of `position` are still at `new`, not in the page.
    """
    c = tl.arange(0, BLOCK_C)
    rows = pool + page.to(tl.int64) * (PAGE * G * C) + tl.arange(0, PAGE) * (G * C)
    if MASK:
        rows = _either(key == position, new, rows, ALIGNED=C % 8 == 0)
    have, have_c = (key >= first) & (key <= position), c < C
    if TURNED:
        places, have = rows[None, :] + c[:, None], have[None, :] & have_c[:, None]
        have_c = have_c[:, None]
    else:
        places, have = rows[:, None] + c[None, :], have[:, None] & have_c[None, :]
        have_c = have_c[None, :]
    if MASK:
        return tl.load(places, mask=have, other=0.0)
    elif C == BLOCK_C:
        return tl.load(places)
    else:
        return tl.load(places, mask=have_c, other=0.0)


@triton.jit
def _scores(keys, queries, key, first, position, MASK: tl.constexpr):
    scores = tl.dot(keys, queries)
    if MASK:
        scores = tl.where(((key >= first) & (key <= position))[:, None], scores, float("-inf"))
    return scores


@triton.jit
def _see(
    total, best, mass, queries, k, v, new_k, new_v, p1, p2, p3, p4, start, first, position, scale,
    MASK: tl.constexpr, PAGES: tl.constexpr, PAGE: tl.constexpr, G: tl.constexpr, C: tl.constexpr,
    HEADS: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Attend to the keys of the first PAGES of four pages, from position `start` on (online softmax).

    MASK: only to those from `first` to `position`, at least one.
    """
    key1 = start + tl.arange(0, PAGE)
    key2, key3, key4 = key1 + PAGE, key1 + 2 * PAGE, key1 + 3 * PAGE
    k1 = _page(k, new_k, p1, key1, first, position, MASK, False, PAGE, G, C, BLOCK_C)
    v1 = _page(v, new_v, p1, key1, first, position, MASK, True, PAGE, G, C, BLOCK_C)
    s1 = _scores(k1, queries, key1, first, position, MASK)
    top = s1
    if PAGES > 1:
        k2 = _page(k, new_k, p2, key2, first, position, MASK, False, PAGE, G, C, BLOCK_C)
        v2 = _page(v, new_v, p2, key2, first, position, MASK, True, PAGE, G, C, BLOCK_C)
        s2 = _scores(k2, queries, key2, first, position, MASK)
        top = tl.maximum(top, s2)
    if PAGES > 2:
        k3 = _page(k, new_k, p3, key3, first, position, MASK, False, PAGE, G, C, BLOCK_C)
        k4 = _page(k, new_k, p4, key4, first, position, MASK, False, PAGE, G, C, BLOCK_C)
        v3 = _page(v, new_v, p3, key3, first, position, MASK, True, PAGE, G, C, BLOCK_C)
        v4 = _page(v, new_v, p4, key4, first, position, MASK, True, PAGE, G, C, BLOCK_C)
        s3 = _scores(k3, queries, key3, first, position, MASK)
        s4 = _scores(k4, queries, key4, first, position, MASK)
        top = tl.maximum(top, tl.maximum(s3, s4))
    higher = tl.maximum(best, tl.max(top, 0) * scale)
    fade = tl.exp2(best - higher)
    w1 = tl.exp2(s1 * scale - higher[None, :])
    total = tl.dot(v1, w1.to(v1.dtype), total * fade[None, :])
    if PAGES > 1:
        w2 = tl.exp2(s2 * scale - higher[None, :])
        total = tl.dot(v2, w2.to(v2.dtype), total)
    if PAGES > 2:
        w3, w4 = tl.exp2(s3 * scale - higher[None, :]), tl.exp2(s4 * scale - higher[None, :])
        total = tl.dot(v3, w3.to(v3.dtype), total)
        total = tl.dot(v4, w4.to(v4.dtype), total)
        w1, w2 = w1 + w3, w2 + w4
    if PAGES > 1:
        w1 += w2
    sums = sum_mma_columns(w1, HEADS) if PAGES == 4 else tl.sum(w1, 0)
    return total, higher, mass * fade + sums


@triton.jit
def _pages(pages, start, newest, PAGES: tl.constexpr, PAGE: tl.constexpr):
    """Page numbers of PAGES pages from position `start` on, clamped to the newest; always four."""
    at = start // PAGE
    p1 = tl.load(pages + tl.minimum(at, newest))
    p2, p3, p4 = p1, p1, p1
    if PAGES > 1:
        p2 = tl.load(pages + tl.minimum(at + 1, newest))
    if PAGES > 2:
        p3, p4 = tl.load(pages + tl.minimum(at + 2, newest)), tl.load(pages + tl.minimum(at + 3, newest))
    return p1, p2, p3, p4


@launched
@triton.jit(do_not_specialize=["tiles", "stride_table"])
def _decode(
    q, k, v, k_pool, v_pool, out, cells, tiles, table, stride_table, scale,
    H: tl.constexpr, G: tl.constexpr, C: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr,
    HEADS: tl.constexpr, BLOCK_C: tl.constexpr, PAGES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """`_attend` for tiles of one token, in a third of its instructions.

    Scores are transposed, [keys, heads] and [C, heads]: mma takes as few as 8 columns, but 16 rows. An
    iteration covers two or four PAGES, each with one address, and page numbers are loaded an iteration ahead.
    With four, results are bitwise identical to `_attend`.
    """
    tile, kv_head = tl.program_id(0), tl.program_id(1)
    row, count = tl.load(cells + tile), tl.load(cells + tiles + tile)
    position, sequence = tl.load(cells + 2 * tiles + tile), tl.load(cells + 3 * tiles + tile)
    wait_for_previous()
    if count > 0:
        tl.static_assert(PAGE == 16)
        ROUND: tl.constexpr = PAGES * PAGE
        ENDS: tl.constexpr = 4 if PAGES == 4 else 1  # pages of an iteration with a mask
        head, c = tl.arange(0, HEADS), tl.arange(0, BLOCK_C)
        have_h, have_c = head < H // G, c < C
        at_q = (row.to(tl.int64) * H + kv_head * (H // G) + head)[None, :] * C + c[:, None]
        queries = tl.load(q + at_q, mask=have_h[None, :] & have_c[:, None], other=0.0)
        pages, newest = table + sequence.to(tl.int64) * stride_table, position // PAGE
        k_pool, v_pool = k_pool + kv_head * C, v_pool + kv_head * C
        new_k, new_v = k + (row.to(tl.int64) * G + kv_head) * C, v + (row.to(tl.int64) * G + kv_head) * C
        first = tl.maximum(position - WINDOW + 1, 0) if WINDOW > 0 else 0
        inner = first // ROUND * ROUND
        outer = inner + (position - inner) // ROUND * ROUND
        best = tl.full((HEADS,), float("-inf"), tl.float32)
        mass = tl.zeros((HEADS,), tl.float32)
        total = tl.zeros((BLOCK_C, HEADS), tl.float32)
        if WINDOW > 0:
            whole = tl.minimum(tl.cdiv(first, ROUND) * ROUND, outer)
            for start in range(first // (ENDS * PAGE) * (ENDS * PAGE), whole, ENDS * PAGE):
                p1, p2, p3, p4 = _pages(pages, start, newest, ENDS, PAGE)
                total, best, mass = _see(
                    total, best, mass, queries, k_pool, v_pool, new_k, new_v, p1, p2, p3, p4,
                    start, first, position, scale, True, ENDS, PAGE, G, C, HEADS, BLOCK_C,
                )  # fmt: skip
            inner = whole
        p1, p2, p3, p4 = _pages(pages, inner, newest, PAGES, PAGE)
        for start in tl.range(inner, outer, ROUND, num_stages=STAGES):
            n1, n2, n3, n4 = _pages(pages, start + ROUND, newest, PAGES, PAGE)
            total, best, mass = _see(
                total, best, mass, queries, k_pool, v_pool, new_k, new_v, p1, p2, p3, p4,
                start, first, position, scale, False, PAGES, PAGE, G, C, HEADS, BLOCK_C,
            )  # fmt: skip
            p1, p2, p3, p4 = n1, n2, n3, n4
        if ENDS == 1:
            for start in range(tl.maximum(outer, first // PAGE * PAGE), position + 1, PAGE):
                p1 = tl.load(pages + start // PAGE)
                total, best, mass = _see(
                    total, best, mass, queries, k_pool, v_pool, new_k, new_v, p1, p2, p3, p4,
                    start, first, position, scale, True, ENDS, PAGE, G, C, HEADS, BLOCK_C,
                )  # fmt: skip
        else:
            total, best, mass = _see(
                total, best, mass, queries, k_pool, v_pool, new_k, new_v, p1, p2, p3, p4,
                outer, first, position, scale, True, ENDS, PAGE, G, C, HEADS, BLOCK_C,
            )  # fmt: skip
        place = tl.load(pages + newest).to(tl.int64) * (PAGE * G * C) + position % PAGE * (G * C) + c
        tl.store(k_pool + place, tl.load(new_k + c, mask=have_c), mask=have_c)
        tl.store(v_pool + place, tl.load(new_v + c, mask=have_c), mask=have_c)
        total = total / mass[None, :]
        tl.store(out + at_q, total, mask=have_h[None, :] & have_c[:, None])


@launched
@triton.jit(do_not_specialize=["tiles", "stride_table"])
def _attend(
    q, k, v, k_pool, v_pool, out, lse, cells, tiles, table, stride_table, scale,
    H: tl.constexpr, G: tl.constexpr, C: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr,
    SPLITS: tl.constexpr, MIN_SPLIT: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr,
    KEYS: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    tile, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row, count = tl.load(cells + tile), tl.load(cells + tiles + tile)
    position, sequence = tl.load(cells + 2 * tiles + tile), tl.load(cells + 3 * tiles + tile)
    wait_for_previous()
    if count > 0:
        m, c, l = tl.arange(0, TOKENS * HEADS), tl.arange(0, BLOCK_C), tl.arange(0, KEYS)
        token, head = m // HEADS, m % HEADS
        have_m, have_c = (token < count) & (head < H // G), c < C
        at_q = ((row + token).to(tl.int64) * H + kv_head * (H // G) + head)[:, None] * C + c[None, :]
        queries = tl.load(q + at_q, mask=have_m[:, None] & have_c[None, :], other=0.0)
        last = position + count  # keys of the last query
        first = tl.maximum(position - WINDOW + 1, 0) // KEYS * KEYS if WINDOW > 0 else 0
        span = tl.maximum(tl.cdiv(tl.cdiv(last - first, KEYS), SPLITS) * KEYS, MIN_SPLIT)
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
            if TOKENS == 1:  # the new key is not in its page yet
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
            higher = tl.maximum(best, tl.max(scores, 1) * scale)
            level = tl.where(higher == float("-inf"), 0.0, higher)
            weights = tl.exp2(scores * scale - level[:, None])
            fade = tl.exp2(best - level)
            sums = sum_mma_rows(weights, TOKENS * HEADS, KEYS) if MIN_SPLIT > 0 else tl.sum(weights, 1)
            mass = mass * fade + sums
            values = tl.load(
                at_v[:, None] + c[None, :], mask=(key < last)[:, None] & have_c[None, :], other=0.0
            )
            total = tl.dot(weights.to(values.dtype), values, total * fade[:, None])
            best = higher
        low = first + split * span
        # the split that has the new key stores it
        if TOKENS == 1 and (position >= low) & (position < low + span):
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
    wait_for_previous()
    row = tl.program_id(0).to(tl.int64)
    s, c = tl.arange(0, SPLITS), tl.arange(0, BLOCK_C)
    levels = tl.load(lse + row * SPLITS + s)
    level = tl.max(levels, 0)
    weights = tl.exp2(levels - tl.where(level == float("-inf"), 0.0, level))
    values = tl.load(parts + (row * SPLITS + s)[:, None] * C + c[None, :], mask=(c < C)[None, :], other=0.0)
    whole = tl.sum(tl.where((weights > 0)[:, None], values * weights[:, None], 0.0), 0)
    tl.store(out + row * C + c, whole / tl.maximum(tl.sum(weights, 0), 1e-30), mask=c < C)


def _loop(queries: Queries) -> tuple[int, int, int]:
    """Keys of an iteration, warps, and stages: as measured on an H200."""
    if queries.tokens > 1:
        return 64, 4, 3
    return (32, 2, 2) if queries.splits > 1 and not queries.min_split_keys else (64, 2, 3)


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
    """Attention of every query over its sequence's keys up to its own, `window` of them if given.

    Tiles of one token also store their keys and values in the pools; for larger tiles `write` has done so.
    The second result, for larger tiles only, is every query's log-sum-exp [T, H] to base 2.
    """
    (tokens, h, c), splits = q_THC.shape, queries.splits
    out = torch.empty_like(q_THC)
    parts = torch.empty(tokens, h, splits, c, dtype=torch.float32, device=out.device) if splits > 1 else out
    lse = torch.empty(tokens, h, splits, dtype=torch.float32, device=out.device)
    block_c, count = max(16, power_of_2(c)), queries.tiles.shape[1]
    tensors = (q_THC, k_TGC, v_TGC, k_pool, v_pool)
    seen = (queries.tiles, count, queries.table_BN, queries.table_BN.stride(0), c**-0.5 * LOG2E)
    shape = {"H": h, "G": kv_heads, "C": c, "PAGE": page, "WINDOW": window or 0, "BLOCK_C": block_c}
    heads = power_of_2(h // kv_heads)
    exact = queries.min_split_keys > 0
    if queries.tokens == 1 and count * kv_heads >= _MANY:
        _decode[(count, kv_heads)](
            *tensors, out, *seen, **shape, HEADS=max(8, heads), PAGES=4 if exact else 2, STAGES=2,
            num_warps=2 if exact else 1, **PDL,
        )  # fmt: skip
        return out, lse[:, :, 0]
    keys, warps, stages = _loop(queries)
    _attend[(count, kv_heads, splits)](
        *tensors, parts, lse, *seen, **shape, SPLITS=splits, MIN_SPLIT=queries.min_split_keys,
        TOKENS=queries.tokens, HEADS=max(heads, 16 // queries.tokens), KEYS=keys, num_warps=warps,
        num_stages=stages, **PDL,
    )  # fmt: skip
    if splits > 1:
        _join[(tokens * h,)](parts, lse, out, C=c, SPLITS=splits, BLOCK_C=block_c, num_warps=1, **PDL)
    return out, lse[:, :, 0]

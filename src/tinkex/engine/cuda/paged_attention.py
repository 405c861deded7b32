# pyright: reportMissingImports=false, reportIndexIssue=false, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
"""Attention over the paged KV cache: `_attend` for tiles of queries, `_decode` for many tiles of one token.

A tile has all heads that share a kv head, so that a key is loaded once for all of them. Masked keys are never
loaded, so pages need no clearing. Few sequences are split along their keys, and `_join` combines the splits.
With one size of tile and no splits results are batch-invariant: blocks of keys begin at multiples of their
size. The plain implementation is `kv.PagedAttend`.

Shapes: T tokens, H query heads, G kv heads, C head dim, B sequences, N pages of a sequence.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tinkex.engine.cuda.launch import PDL, launched, load, power_of_2, wait_for_previous
from tinkex.engine.cuda.packed_attention import LOG2E, start_of_softmax, sum_mma_rows

_MANY = 1024  # tiles times kv heads that fill the device with programs of one warp
_FEW_TILES = (4, 4)  # warps and stages of fewer, whose time is what one program takes


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
def sum_mma_columns(x, COLUMNS: tl.constexpr):
    """Column sums of 16 rows, bitwise identical to `sum_mma_rows` of the transpose."""
    x = tl.sum(tl.reshape(x, (2, 4, 2, COLUMNS)), 2)
    x = tl.sum(tl.reshape(x, (2, 2, 2, COLUMNS)), 1)
    return tl.sum(tl.sum(x, 1), 0)


@triton.jit
def _either(condition, yes, no, ALIGNED: tl.constexpr):
    """The pointer `yes` or one of `no`; ALIGNED: all are multiples of 16 bytes, which `where` would hide."""
    address = tl.where(condition, yes.to(tl.int64), no.to(tl.int64)).to(no.dtype)
    if ALIGNED:
        address = tl.multiple_of(address, 16)
    return address


@triton.jit
def _page(
    pool, new, page, key, first, end, position,
    MASK: tl.constexpr, TURNED: tl.constexpr, PAGE: tl.constexpr, G: tl.constexpr, C: tl.constexpr,
    BLOCK_C: tl.constexpr,
):  # fmt: skip
    """A page's keys or values [keys, C], or [C, keys] if TURNED, at the positions `key`.

    MASK: zeros outside `first` to `end`; those of `position` are still at `new`, not in the page.
    """
    c = tl.arange(0, BLOCK_C)
    rows = pool + page.to(tl.int64) * (PAGE * G * C) + tl.arange(0, PAGE) * (G * C)
    if MASK:
        rows = _either(key == position, new, rows, ALIGNED=C % 8 == 0)
    have, have_c = (key >= first) & (key <= end), c < C
    if TURNED:
        places, have, have_c = rows[None, :] + c[:, None], have[None, :], have_c[:, None]
    else:
        places, have, have_c = rows[:, None] + c[None, :], have[:, None], have_c[None, :]
    if MASK:
        return load(places, have & have_c)
    elif C == BLOCK_C:
        return tl.load(places)
    else:
        return load(places, have_c)


@triton.jit
def _see(
    state, queries, pools, pages, start, first, end, position, scale,
    MASK: tl.constexpr, PAGES: tl.constexpr, PAGE: tl.constexpr, G: tl.constexpr, C: tl.constexpr,
    HEADS: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Attend to the keys of PAGES pages, from position `start` on (online softmax).

    MASK: only to those from `first` to `end`, at least one.
    """
    total, best, mass = state
    k, v, new_k, new_v = pools
    keys, values, scores, weights = (), (), (), ()
    for i in tl.static_range(PAGES):
        key = start + i * PAGE + tl.arange(0, PAGE)
        keys += (_page(k, new_k, pages[i], key, first, end, position, MASK, False, PAGE, G, C, BLOCK_C),)
        values += (_page(v, new_v, pages[i], key, first, end, position, MASK, True, PAGE, G, C, BLOCK_C),)
    for i in tl.static_range(PAGES):
        score, key = tl.dot(keys[i], queries), start + i * PAGE + tl.arange(0, PAGE)
        if MASK:
            score = tl.where(((key >= first) & (key <= end))[:, None], score, float("-inf"))
        scores += (score,)
    top = scores[0]
    for i in tl.static_range(1, PAGES):
        top = tl.maximum(top, scores[i])
    higher = tl.maximum(best, tl.max(top, 0) * scale)
    fade = tl.exp2(best - higher)
    total = total * fade[None, :]
    for i in tl.static_range(PAGES):
        weights += (tl.exp2(scores[i] * scale - higher[None, :]),)
        total = tl.dot(values[i], weights[i].to(v.dtype.element_ty), total)
    if PAGES == 4:
        sums = sum_mma_columns((weights[0] + weights[2]) + (weights[1] + weights[3]), HEADS)
    elif PAGES == 2:
        sums = tl.sum(weights[0] + weights[1], 0)
    else:
        sums = tl.sum(weights[0], 0)
    return total, higher, mass * fade + sums


@triton.jit
def _pages(pages, start, newest, PAGES: tl.constexpr, PAGE: tl.constexpr):
    """Page numbers of PAGES pages from position `start` on, clamped to the newest."""
    found = ()
    for i in tl.static_range(PAGES):
        found += (tl.load(pages + tl.minimum(start // PAGE + i, newest)),)
    return found


@launched
@triton.jit(do_not_specialize=["tiles", "stride_table"])
def _decode(
    q, k, v, k_pool, v_pool, sinks, out, lse, cells, tiles, table, stride_table, scale, SINKS: tl.constexpr,
    H: tl.constexpr, G: tl.constexpr, C: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr,
    SPLITS: tl.constexpr, MIN_SPLIT: tl.constexpr, HEADS: tl.constexpr, BLOCK_C: tl.constexpr,
    PAGES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """`_attend` for tiles of one token, in a third of its instructions.

    Scores are transposed, [keys, heads] and [C, heads]: mma takes as few as 8 columns, but 16 rows. An
    iteration covers two or four PAGES, each with one address, and page numbers are loaded an iteration ahead.
    With four, results are bitwise identical to `_attend`.
    """
    tile, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row, count = tl.load(cells + tile), tl.load(cells + tiles + tile)
    position, sequence = tl.load(cells + 2 * tiles + tile), tl.load(cells + 3 * tiles + tile)
    wait_for_previous()
    if count > 0:
        tl.static_assert(PAGE == 16)
        ROUND: tl.constexpr = PAGES * PAGE
        ENDS: tl.constexpr = 4 if PAGES == 4 else 1  # pages of an iteration with a mask
        head, c = tl.arange(0, HEADS), tl.arange(0, BLOCK_C)
        have_h, have_c = head < H // G, c < C
        of_heads = row.to(tl.int64) * H + kv_head * (H // G) + head
        first = tl.maximum(position - WINDOW + 1, 0) if WINDOW > 0 else 0
        inner, end = first // ROUND * ROUND, position
        if SPLITS > 1:
            span = tl.cdiv(tl.cdiv(position + 1 - inner, ROUND), SPLITS) * ROUND
            span = tl.maximum(span, MIN_SPLIT)
            inner += split * span
            end = tl.minimum(position, inner + span - 1)
        if inner <= position:
            at_q = of_heads[None, :] * C + c[:, None]
            queries = load(q + at_q, have_h[None, :] & have_c[:, None])
            pages, newest = table + sequence.to(tl.int64) * stride_table, position // PAGE
            k_pool, v_pool = k_pool + kv_head * C, v_pool + kv_head * C
            at_new = (row.to(tl.int64) * G + kv_head) * C
            new_k, new_v = k + at_new, v + at_new
            outer = inner + (end - inner) // ROUND * ROUND
            of_sinks = kv_head * (H // G) + tl.where(have_h, head, 0)
            best, mass = start_of_softmax(sinks, of_sinks, (HEADS,), SINKS)
            if SINKS and SPLITS > 1:  # the first split has them
                best, mass = tl.where(split == 0, best, float("-inf")), tl.where(split == 0, mass, 0.0)
            state = (tl.zeros((BLOCK_C, HEADS), tl.float32), best, mass)
            pools = (k_pool, v_pool, new_k, new_v)
            if WINDOW > 0:
                low = tl.maximum(first, inner)
                whole = tl.minimum(tl.cdiv(low, ROUND) * ROUND, outer)
                for start in range(low // (ENDS * PAGE) * (ENDS * PAGE), whole, ENDS * PAGE):
                    ends = _pages(pages, start, newest, ENDS, PAGE)
                    state = _see(state, queries, pools, ends, start, first, end, position, scale,
                                 True, ENDS, PAGE, G, C, HEADS, BLOCK_C)  # fmt: skip
                inner = whole
            held = _pages(pages, inner, newest, PAGES, PAGE)
            for start in tl.range(inner, outer, ROUND, num_stages=STAGES):
                ahead = _pages(pages, start + ROUND, newest, PAGES, PAGE)
                state = _see(state, queries, pools, held, start, first, end, position, scale,
                             False, PAGES, PAGE, G, C, HEADS, BLOCK_C)  # fmt: skip
                held = ahead
            if ENDS == 1:
                for start in range(tl.maximum(outer, first // PAGE * PAGE), end + 1, PAGE):
                    ends = _pages(pages, start, newest, ENDS, PAGE)
                    state = _see(state, queries, pools, ends, start, first, end, position, scale,
                                 True, ENDS, PAGE, G, C, HEADS, BLOCK_C)  # fmt: skip
            else:
                state = _see(state, queries, pools, held, outer, first, end, position, scale,
                             True, ENDS, PAGE, G, C, HEADS, BLOCK_C)  # fmt: skip
            if end == position:
                slot = tl.load(pages + newest).to(tl.int64) * PAGE + position % PAGE
                tl.store(k_pool + slot * (G * C) + c, tl.load(new_k + c, mask=have_c), mask=have_c)
                tl.store(v_pool + slot * (G * C) + c, tl.load(new_v + c, mask=have_c), mask=have_c)
            total, best, mass = state
            part = of_heads * SPLITS + split
            at_out = part[None, :] * C + c[:, None]
            tl.store(out + at_out, total / mass[None, :], mask=have_h[None, :] & have_c[:, None])
            if SPLITS > 1:
                tl.store(lse + part, best + tl.log2(mass), mask=have_h)
        elif SPLITS > 1:
            tl.store(
                lse + of_heads * SPLITS + split, tl.full((HEADS,), float("-inf"), tl.float32), mask=have_h
            )


@launched
@triton.jit(do_not_specialize=["tiles", "stride_table"])
def _attend(
    q, k, v, k_pool, v_pool, sinks, out, lse, cells, tiles, table, stride_table, scale, SINKS: tl.constexpr,
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
        queries = load(q + at_q, have_m[:, None] & have_c[None, :])
        last = position + count  # keys of the last query
        first = tl.maximum(position - WINDOW + 1, 0) // KEYS * KEYS if WINDOW > 0 else 0
        span = tl.maximum(tl.cdiv(tl.cdiv(last - first, KEYS), SPLITS) * KEYS, MIN_SPLIT)
        new = (row.to(tl.int64) * G + kv_head) * C
        of_sinks = kv_head * (H // G) + tl.where(head < H // G, head, 0)
        best, mass = start_of_softmax(sinks, of_sinks, (TOKENS * HEADS,), SINKS)
        if SINKS and SPLITS > 1:  # the first split has them
            best, mass = tl.where(split == 0, best, float("-inf")), tl.where(split == 0, mass, 0.0)
        total = tl.zeros((TOKENS * HEADS, BLOCK_C), tl.float32)
        for start in range(first + split * span, tl.minimum(first + (split + 1) * span, last), KEYS):
            key = start + l
            page = tl.load(table + sequence * stride_table + key // PAGE, mask=key < last, other=0)
            slot = ((page.to(tl.int64) * PAGE + key % PAGE) * G + kv_head) * C
            at_k, at_v = k_pool + slot, v_pool + slot
            if TOKENS == 1:  # the new key is not in its page yet
                at_k = _either(key == position, k + new, at_k, ALIGNED=C % 8 == 0)
                at_v = _either(key == position, v + new, at_v, ALIGNED=C % 8 == 0)
            keys = load(at_k[None, :] + c[:, None], (key < last)[None, :] & have_c[:, None])
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
            values = load(at_v[:, None] + c[None, :], (key < last)[:, None] & have_c[None, :])
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
    values = load(parts + (row * SPLITS + s)[:, None] * C + c[None, :], (c < C)[None, :])
    whole = tl.sum(tl.where((weights > 0)[:, None], values * weights[:, None], 0.0), 0)
    tl.store(out + row * C + c, whole / tl.maximum(tl.sum(weights, 0), 1e-30), mask=c < C)


def _loop(queries: Queries, head_dim: int, rows: int) -> tuple[int, int, int]:
    """Keys of an iteration, warps, and stages, for so many rows of queries: as measured on an H200.

    Where results are to match the trainer's bitwise, an iteration has as many keys as the trainer's.
    """
    if head_dim > 128:  # what fits in registers and shared memory
        many = queries.min_split_keys > 0 or (queries.tokens > 1 and rows <= 64)
        return 64 if many else 32, 4 if queries.tokens == 1 else 8, 2
    if queries.tokens > 1:
        return 64, 4, 3
    return (32, 2, 2) if queries.splits > 1 and not queries.min_split_keys else (64, 2, 3)


def attend(
    q_THC: Tensor, k_TGC: Tensor, v_TGC: Tensor, k_pool: Tensor, v_pool: Tensor, queries: Queries,
    slots_T: Tensor, page: int, window: int | None, sinks_H: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attention of every query over its sequence's keys up to its own, `window` of them if given.

    `sinks_H` are the heads' sinks. New keys and values are stored in `slots_T` of the pools: tiles of one
    token do that themselves, into the slot that the page table has. The second result, for larger tiles only,
    is every query's log-sum-exp [T, H] to base 2.
    """
    (tokens, h, c), g, splits = q_THC.shape, k_TGC.shape[1], queries.splits
    if queries.tokens > 1:
        write(k_TGC, v_TGC, k_pool, v_pool, slots_T)
    out = torch.empty_like(q_THC)
    parts = torch.empty(tokens, h, splits, c, dtype=torch.float32, device=out.device) if splits > 1 else out
    lse = torch.empty(tokens, h, splits, dtype=torch.float32, device=out.device)
    block_c, count = max(16, power_of_2(c)), queries.tiles.shape[1]
    tensors = (q_THC, k_TGC, v_TGC, k_pool, v_pool, q_THC if sinks_H is None else sinks_H)
    seen = (queries.tiles, count, queries.table_BN, queries.table_BN.stride(0), c**-0.5 * LOG2E)
    shape = {"H": h, "G": g, "C": c, "PAGE": page, "WINDOW": window or 0, "BLOCK_C": block_c}
    shape["SINKS"] = sinks_H is not None
    heads, exact = power_of_2(h // g), queries.min_split_keys > 0
    shape |= {"SPLITS": splits, "MIN_SPLIT": queries.min_split_keys}
    if queries.tokens == 1 and (exact or count * g >= _MANY):
        warps, stages = _FEW_TILES if count * g < _MANY else (2 if exact else 1, 2)
        _decode[(count, g, splits)](
            *tensors, parts, lse, *seen, **shape, HEADS=max(8, heads), PAGES=4 if exact else 2,
            STAGES=stages, num_warps=warps * (1 if c <= 128 else 2), **PDL,
        )  # fmt: skip
    else:
        heads = max(heads, 16 // queries.tokens)
        keys, warps, stages = _loop(queries, c, queries.tokens * heads)
        _attend[(count, g, splits)](
            *tensors, parts, lse, *seen, **shape, TOKENS=queries.tokens, HEADS=heads, KEYS=keys,
            num_warps=warps, num_stages=stages, **PDL,
        )  # fmt: skip
    if splits > 1:
        _join[(tokens * h,)](parts, lse, out, C=c, SPLITS=splits, BLOCK_C=block_c, num_warps=1, **PDL)
    return out, lse[:, :, 0]

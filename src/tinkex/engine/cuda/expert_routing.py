# pyright: reportMissingImports=false, reportIndexIssue=false, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
"""Which experts tokens go to, and where their rows are once they are sorted by expert.

Everything stays on the device: no kernel needs a count on the host, so that decode steps can be captured.
Tiles are planned for the most that there may be, and those that turn out empty do nothing.
`engine.torch.models.moe` computes the same in plain torch.

Shapes: T tokens, K experts of a token, N = T·K rows, E experts.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tinkex.engine.cuda.elementwise import sum_loaded_rows
from tinkex.engine.cuda.launch import PDL, launched, power_of_2, wait_for_previous

FEW = 128  # rows up to which the tiles in use come first, and one program routes all tokens
_SCANNED = 4096  # rows that a program of `place` reads at a time
_LEAST = tl.constexpr(-1e30)  # stands for NaN and -inf, so that only experts that exist are chosen


class ExpertRows(NamedTuple):
    """Where the rows of tokens are in the order of experts."""

    order_N: Tensor  # int32: token · K + k of each sorted row
    place_N: Tensor  # int32: the sorted row of token · K + k
    starts_E: Tensor  # int32 [E + 1]: each expert's first row
    tiles: Tensor  # int32 [3, tiles]: expert, first row, rows; 0 rows in tiles that are not used
    tile: int  # rows of a whole tile
    per_token: int
    u: Tensor | None = None  # [1, T, P·R]: gate's and up's down-projection, where routing has computed it


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
        score = raised / tl.sum(sum_loaded_rows(raised[None, :], 1, BLOCK_E), 0)
    elif SCORE == 1:
        score = logit
    else:
        score = tl.sigmoid(logit)
    liking = score
    if BIAS:
        liking += tl.load(bias + at, mask=inside, other=0.0)
    liking = tl.where(inside, tl.where(liking > _LEAST, liking, _LEAST), float("-inf"))
    best = tl.zeros((BLOCK_K,), tl.int32)
    weight = tl.full((BLOCK_K,), float("-inf"), tl.float32)
    for i in range(K):
        expert = tl.argmax(liking, 0, tie_break_left=True)
        best = tl.where(k == i, expert, best)
        weight = tl.where(k == i, tl.sum(tl.where(at == expert, score, 0.0), 0), weight)
        liking = tl.where(at == expert, float("-inf"), liking)
    if SCORE == 1:
        raised = tl.exp(weight - tl.max(weight, 0))
        weight = raised / tl.sum(sum_loaded_rows(raised[None, :], 1, BLOCK_K), 0)
    elif NORMALISE:
        chosen_weights = tl.where(k < K, weight, 0.0)[None, :]
        weight = weight / (tl.sum(sum_loaded_rows(chosen_weights, 1, BLOCK_K), 0) + 1e-20)
    tl.store(chosen + token * K + k, best, mask=k < K)
    tl.store(weights + token * K + k, weight * scale, mask=k < K)


@launched
@triton.jit
def _route_few(
    logits, bias, chosen, weights, order, place, starts, cells, scale, T, E, K, tiles,
    BIAS: tl.constexpr, SCORE: tl.constexpr, NORMALISE: tl.constexpr, TILE: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """`_route` and `_place` in one program, for few tokens: every row is compared with every other."""
    at, k, t = tl.arange(0, BLOCK_E)[None, :], tl.arange(0, BLOCK_K)[None, :], tl.arange(0, BLOCK_T)[:, None]
    inside, have = (at < E) & (t < T), (k < K) & (t < T)
    wait_for_previous()
    logit = tl.load(logits + t * E + at, mask=inside, other=float("-inf")).to(tl.float32)
    logit = tl.where(t < T, logit, 0.0)
    if SCORE == 0:
        raised = tl.exp(logit - tl.max(logit, 1)[:, None])
        score = raised / sum_loaded_rows(raised, BLOCK_T, BLOCK_E)[:, None]
    elif SCORE == 1:
        score = logit
    else:
        score = tl.sigmoid(logit)
    liking = score
    if BIAS:
        liking += tl.load(bias + at, mask=at < E, other=0.0)
    liking = tl.where(at < E, tl.where(liking > _LEAST, liking, _LEAST), float("-inf"))
    best = tl.zeros((BLOCK_T, BLOCK_K), tl.int32) + E
    weight = tl.full((BLOCK_T, BLOCK_K), float("-inf"), tl.float32)
    for i in range(K):
        expert = tl.argmax(liking, 1, tie_break_left=True)[:, None]
        best = tl.where((k == i) & (t < T), expert, best)
        weight = tl.where(k == i, tl.sum(tl.where(at == expert, score, 0.0), 1)[:, None], weight)
        liking = tl.where(at == expert, float("-inf"), liking)
    if SCORE == 1:
        raised = tl.exp(weight - tl.max(weight, 1)[:, None])
        weight = raised / sum_loaded_rows(raised, BLOCK_T, BLOCK_K)[:, None]
    elif NORMALISE:
        chosen_weights = tl.where(k < K, weight, 0.0)
        weight = weight / (sum_loaded_rows(chosen_weights, BLOCK_T, BLOCK_K)[:, None] + 1e-20)
    tl.store(chosen + t * K + k, best, mask=have)
    tl.store(weights + t * K + k, weight * scale, mask=have)
    rows: tl.constexpr = BLOCK_T * BLOCK_K
    row = tl.arange(0, rows)
    flat, of = tl.reshape(best, (rows,)), row // BLOCK_K * K + row % BLOCK_K
    mine = flat < E
    lower, same = flat[None, :] < flat[:, None], flat[None, :] == flat[:, None]
    before = tl.sum(lower.to(tl.int32), 1)
    rank = tl.sum((same & (row[None, :] < row[:, None])).to(tl.int32), 1)
    count = tl.sum(same.to(tl.int32), 1)
    tl.store(order + before + rank, of, mask=mine)
    tl.store(place + of, before + rank, mask=mine)
    one = tl.arange(0, BLOCK_E)
    tl.store(starts + one, tl.sum((flat[None, :] < one[:, None]).to(tl.int32), 1), mask=one < E)
    tl.store(starts + E, T * K)
    begins = mine & (rank % TILE == 0)
    # a tile's number: of the rows that begin one, those of lower experts, and the earlier ones of its own
    number = tl.sum((lower & begins[None, :]).to(tl.int32), 1) + rank // TILE
    here = (number[None, :] == row[:, None]) & begins[None, :]  # the one row, or none, that begins each tile
    inside = row < tiles
    tl.store(cells + row, tl.sum(tl.where(here, flat[None, :], 0), 1), mask=inside)
    tl.store(cells + tiles + row, tl.sum(tl.where(here, (before + rank)[None, :], 0), 1), mask=inside)
    left = tl.minimum(count - rank, TILE)
    tl.store(cells + 2 * tiles + row, tl.sum(tl.where(here, left[None, :], 0), 1), mask=inside)


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


# -- launching -----------------------------------------------------------------------------------------

SCORES = {"softmax": 0, "softmax_of_best": 1, "sigmoid": 2}


def route(
    logits_TE: Tensor, bias_E: Tensor | None, best: int, score: str, normalise: bool, scale: float
) -> tuple[Tensor, Tensor, ExpertRows]:
    """The weights [T, K] in fp32, the experts [T, K] (int32), and where their rows are, of fp32 logits."""
    tokens, count = logits_TE.shape
    chosen_TK = torch.empty(tokens, best, dtype=torch.int32, device=logits_TE.device)
    weight_TK = torch.empty(tokens, best, dtype=torch.float32, device=logits_TE.device)
    bias, wide = logits_TE if bias_E is None else bias_E, max(2, power_of_2(best))
    how = {"BIAS": bias_E is not None, "SCORE": SCORES[score], "NORMALISE": normalise}
    blocks = {"BLOCK_E": max(2, power_of_2(count)), "BLOCK_K": wide}
    if power_of_2(tokens) * wide > FEW:
        _route[(tokens,)](
            logits_TE, bias, chosen_TK, weight_TK, float(scale), count, best,
            **how, **blocks, num_warps=4 if count > 128 else 1, **PDL,
        )  # fmt: skip
        return weight_TK, chosen_TK, place(chosen_TK, count)
    rows = _empty_rows(chosen_TK, count, tile_rows(tokens * best, count))
    tiles = rows.tiles.shape[1]
    _route_few[(1,)](
        logits_TE, bias, chosen_TK, weight_TK, rows.order_N, rows.place_N, rows.starts_E, rows.tiles,
        float(scale), tokens, count, best, tiles, **how, TILE=rows.tile, BLOCK_T=power_of_2(tokens), **blocks,
        num_warps=1 if tokens == 1 else 4, **PDL,
    )  # fmt: skip
    return weight_TK, chosen_TK, rows


def tile_rows(rows: int, experts: int) -> int:
    """Rows of a tile where so many are spread over so many experts."""
    each = rows / experts
    return 16 if each <= 12 else 32 if each <= 32 else 64 if each <= 96 else 128


def _empty_rows(chosen_TK: Tensor, experts: int, tile: int) -> ExpertRows:
    (rows, per_token), device = (chosen_TK.numel(), chosen_TK.shape[1]), chosen_TK.device
    tiles = rows // tile + experts
    if rows <= FEW:  # the tiles in use come first
        tiles = min(rows, tiles)
    order, placed = torch.empty(2, rows, dtype=torch.int32, device=device)
    starts = torch.empty(experts + 1, dtype=torch.int32, device=device)
    cells = torch.empty(3, tiles, dtype=torch.int32, device=device)
    return ExpertRows(order, placed, starts, cells, tile, per_token)


def place(chosen_TK: Tensor, experts: int) -> ExpertRows:
    """Where the rows of experts that were chosen already are."""
    count = chosen_TK.numel()
    rows = _empty_rows(chosen_TK, experts, tile_rows(count, experts))
    block = max(16, min(_SCANNED, power_of_2(count)))
    _place[(experts,)](
        chosen_TK, rows.order_N, rows.place_N, rows.starts_E, rows.tiles, count, experts, rows.tiles.shape[1],
        COMPACT=count <= FEW, TILE=rows.tile, BLOCK=block, num_warps=1 if block <= 128 else 4, **PDL,
    )  # fmt: skip
    return rows


def slots_of(cells: Tensor, rows: int, tile: int) -> Tensor:
    """Each token's slot, -1 where it has none, from the cells of `RowTiles`."""
    slots = torch.full((rows,), -1, dtype=torch.int32, device=cells.device)
    block = max(16, power_of_2(tile))
    _slots[(cells.shape[1],)](slots, cells, cells.shape[1], BLOCK=block, num_warps=1, **PDL)
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

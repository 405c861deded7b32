# pyright: reportMissingImports=false, reportIndexIssue=false, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
"""Products of segments of rows with the matrices of many adapters, whatever their ranks, in one launch each.

Adapters are found through a table of addresses on the device, so that a captured graph serves whoever is in
the table when it runs and nothing is copied to bring adapters together. `shrink` reduces over features,
`expand` adds a product of few columns, `write` begins with it, `unite` adds it to the parts of a sum.
`outer` adds up gradients over rows. Rows come in tiles of one adapter.
Knows nothing of sites' meaning, of autograd or of runs; `lora.LoraBatch` is the plain path.

Shapes: T rows, S slots of the table, P parts of a site, R rank, I in-features, O out-features.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from tinkex.engine.cuda.launch import launched
from tinkex.engine.cuda.pdl import CLUSTERS, PDL, wait_for_previous
from tinkex.engine.cuda.sizes import cdiv, power_of_2, shared_bytes

PROGRAMS = 264  # that keep a large device busy: two for each of its multiprocessors
_SHRINKING = 64  # programs that are enough to shrink: each part of a sum is read again by all that expand it
_WRITING = 1000  # programs that keep it busy where all they do is write
_FEW = 64  # tiles whose programs wait for memory; more of them hide it from each other
_ROOM = 215_000  # bytes of shared memory: most of what Hopper has
_VAST = 16384  # features, from which on a sum needs all the programs that there can be
_WIDEST = 128  # columns of u that one program holds
ALIGNED = 128  # rows: no tile lies on both sides of a multiple of it


@dataclass(frozen=True)
class AdapterTable:
    """Where the matrices of each slot lie: [S, columns] addresses after the rank, 0 where there is none.

    `column` of a site holds A's, the columns after it each part's Bᵀ. `widest` is the largest rank.
    `invariant`: a row's result does not depend on how many others there are, and gradients are added up in
    order where an adapter's rows are together. `whole`: every rank is a multiple of 8, which lets kernels
    move 16 bytes of u at once.
    """

    addresses: Tensor  # int64 [S, columns]; column 0 is the rank
    scales: Tensor  # float32 [S]
    widest: int
    invariant: bool = False
    whole: bool = False


class RowTiles(NamedTuple):
    """Rows start:start+count of each tile belong to one slot; `count` 0 is a tile that does nothing."""

    cells: Tensor  # int32 [6, tiles]: slots, starts, counts, and what `cut_tiles` says
    rows: int  # of a whole tile


class TableSite(NamedTuple):
    """A site's place in the table and its sizes."""

    column: int
    in_features: int
    outs: Sequence[int]


def tile_rows(each: int) -> int:
    """How many rows a tile should have where adapters have about `each` of them."""
    return 16 if each < 32 else 32 if each < 96 else 64


def cut_tiles(segments: Sequence[tuple[int, int, int]], rows: int) -> np.ndarray:
    """RowTiles of the segments (slot, start, stop), cut at multiples of `rows`: int32 [6, tiles].

    For larger tiles than these there is also, where tiles hold every row: which tile is the first of each
    ALIGNED rows; from each tile on, how many rows of those have its slot, and the tile after them.
    """
    slots, starts, stops = np.array(segments, np.int32).reshape(-1, 3).T
    firsts = starts // rows
    tiles = np.where(stops > starts, -(-stops // rows) - firsts, 0)
    of = np.repeat(np.arange(len(tiles)), tiles)
    at = (firsts[of] + np.arange(len(of)) - (np.cumsum(tiles) - tiles)[of]) * rows
    slot, start, stop = slots[of], np.maximum(starts[of], at), np.minimum(stops[of], at + rows)
    first = np.searchsorted(start, ALIGNED * np.arange(len(of)))
    goes_on = (slot[1:] == slot[:-1]) & (start[1:] == stop[:-1]) & (start[1:] % ALIGNED > 0)
    ends = np.append(np.flatnonzero(~goes_on), len(of) - 1)
    last = ends[np.searchsorted(ends, np.arange(len(of)))]
    return np.stack([slot, start, stop - start, first, stop[last] - start, last + 1]).astype(np.int32)


def whole_segments(segments: Sequence[tuple[int, int, int]]) -> np.ndarray:
    """Each of the segments (slot, start, stop) as one tile: int32 [3, segments]."""
    slots, starts, stops = np.array(segments, np.int32).reshape(-1, 3).T
    return np.stack([slots, starts, stops - starts])


# -- kernels -------------------------------------------------------------------------------------------


@triton.jit
def tile_at(cells, tiles, tile):
    """A tile's slot, first row and number of rows."""
    return tl.load(cells + tile), tl.load(cells + tiles + tile), tl.load(cells + 2 * tiles + tile)


@triton.jit
def rank_at(table, slot, columns, WHOLE: tl.constexpr):
    """A slot's rank; WHOLE: all of them are multiples of 8, so that 16 bytes of u can be moved at once."""
    rank = tl.load(table + slot * columns).to(tl.int32)
    if WHOLE:
        rank = tl.multiple_of(rank, 8)
    return rank


@triton.jit
def part_at(part, n0, n1, n2, EVEN: tl.constexpr):
    """The width of a part and the columns before it; EVEN: all of them are multiples of 16."""
    width = tl.where(part == 0, n0, tl.where(part == 1, n1, n2))
    before = tl.where(part == 0, 0, tl.where(part == 1, n0, n0 + n1))
    if EVEN:
        width, before = tl.multiple_of(width, 16), tl.multiple_of(before, 16)
    return width, before


@triton.jit
def part_of_block(block, n0, n1, n2, BLOCK: tl.constexpr):
    """Which part the block of output columns lies in, and its first column there."""
    b0, b1 = tl.cdiv(n0, BLOCK), tl.cdiv(n1, BLOCK)
    part = tl.where(block < b0, 0, tl.where(block < b0 + b1, 1, 2))
    first = block - tl.where(part == 0, 0, tl.where(part == 1, b0, b0 + b1))
    return part, first * BLOCK


@triton.jit
def scaled(u, scale, dtype):
    """x · Aᵀ as kernels multiply it with B that go on with a sum which was begun: all with the same bits.

    Rounded, scaled and rounded again, which a power of two does not show.
    """
    return (u.to(dtype).to(tl.float32) * scale).to(dtype)


@launched
@triton.jit(do_not_specialize=["tiles", "column"])
def _shrink(
    x, u, table, cells, tiles, columns, column, n0, n1, n2, stride_x, stride_u, stride_split,
    EVEN: tl.constexpr, WHOLE: tl.constexpr, MULTIPLE: tl.constexpr, BLOCKS: tl.constexpr,
    SPLITS: tl.constexpr, EACH: tl.constexpr, TILE: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """u[rows, part] = x[rows, part's columns] · matrixᵀ, the matrix having MULTIPLE · rank rows.

    A program has BLOCK_M of a tile's rows and EACH of the splits.
    """
    tile = tl.program_id(0) // (TILE // BLOCK_M)
    inside = tl.program_id(0) % (TILE // BLOCK_M) * BLOCK_M
    part, block = tl.program_id(1) // BLOCKS, tl.program_id(1) % BLOCKS
    slot, start, count = tile_at(cells, tiles, tile)
    rank = rank_at(table, slot, columns, WHOLE)
    address = tl.load(table + slot * columns + column + part)
    wait_for_previous()
    if (count > inside) & (address != 0) & (block * BLOCK_N < rank * MULTIPLE):
        width, before = part_at(part, n0, n1, n2, EVEN)
        matrix = tl.multiple_of(address.to(tl.pointer_type(x.dtype.element_ty)), 16)
        m, n = inside + tl.arange(0, BLOCK_M), block * BLOCK_N + tl.arange(0, BLOCK_N)
        row = (start + m).to(tl.int64)
        have_m, have_n = (m < count)[:, None], (n < rank * MULTIPLE)[None, :]
        span = tl.cdiv(tl.cdiv(width, BLOCK_K), SPLITS) * BLOCK_K
        for split in tl.static_range(EACH):
            split += tl.program_id(2) * EACH
            total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            for k in range(split * span, tl.minimum((split + 1) * span, width), BLOCK_K):
                at = k + tl.arange(0, BLOCK_K)
                have_k = at < width
                left = tl.load(
                    x + row[:, None] * stride_x + before + at[None, :],
                    mask=have_m & have_k[None, :], other=0.0,
                )  # fmt: skip
                right = tl.load(
                    matrix + n[None, :] * width + at[:, None], mask=have_n & have_k[:, None], other=0.0
                )
                total = tl.dot(left, right, total)
            out = u + split * stride_split + row[:, None] * stride_u + part * rank + n[None, :]
            tl.store(out, total, mask=have_m & have_n)


@launched
@triton.jit(do_not_specialize=["tiles", "column"])
def _expand(
    u, y, table, scales, cells, tiles, columns, column, n0, n1, n2, stride_u, stride_split, stride_y,
    EVEN: tl.constexpr, WHOLE: tl.constexpr, MULTIPLE: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """y[rows, part's columns] += scale · u[rows, part] · matrix, the matrix having MULTIPLE · rank rows."""
    tile = tl.program_id(1)
    part, first = part_of_block(tl.program_id(0), n0, n1, n2, BLOCK_N)
    slot, start, count = tile_at(cells, tiles, tile)
    rank = rank_at(table, slot, columns, WHOLE)
    address = tl.load(table + slot * columns + column + part)
    wait_for_previous()
    if (count > 0) & (address != 0):
        width, before = part_at(part, n0, n1, n2, EVEN)
        matrix = tl.multiple_of(address.to(tl.pointer_type(y.dtype.element_ty)), 16)
        m, n = tl.arange(0, BLOCK_M), first + tl.arange(0, BLOCK_N)
        row = (start + m).to(tl.int64)
        have_m, have_n = (m < count)[:, None], (n < width)[None, :]
        out = y + row[:, None] * stride_y + before + n[None, :]
        held = tl.load(out, mask=have_m & have_n, other=0.0).to(tl.float32)  # early: all loads are under way
        scale = tl.load(scales + slot)
        total = held
        if SPLITS > 1:
            total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in range(0, rank * MULTIPLE, BLOCK_K):
            at = k + tl.arange(0, BLOCK_K)
            have_k = at < rank * MULTIPLE
            place = u + row[:, None] * stride_u + part * rank + at[None, :]
            right = tl.load(
                matrix + at[:, None] * width + n[None, :], mask=have_n & have_k[:, None], other=0.0
            )
            left = tl.zeros((BLOCK_M, BLOCK_K), tl.float32)
            for split in tl.static_range(SPLITS):
                left += tl.load(place + split * stride_split, mask=have_m & have_k[None, :], other=0.0).to(
                    tl.float32
                )
            if SPLITS > 1:
                left = left.to(y.dtype.element_ty)
            else:
                left = scaled(left, scale, y.dtype.element_ty)
            total = tl.dot(left, right, total)
        if SPLITS > 1:  # whose bits are nobody else's: the quicker way
            total = total * scale + held
        tl.store(out, total, mask=have_m & have_n)


@launched
@triton.jit(do_not_specialize=["tiles", "column"])
def _unite(
    u, parts, y, table, scales, cells, tiles, columns, column, n0, n1, n2, stride_u, split_u,
    stride_parts, split_parts, stride_y, EVEN: tl.constexpr, WHOLE: tl.constexpr, PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """y[rows, part's columns] = the sum of PARTS of (that part of the sum + scale · its u[rows] · matrix)."""
    part, first = part_of_block(tl.program_id(0), n0, n1, n2, BLOCK_N)
    slot, start, count = tile_at(cells, tiles, tl.program_id(1))
    rank = rank_at(table, slot, columns, WHOLE)
    address = tl.load(table + slot * columns + column + part)
    wait_for_previous()
    if count > 0:
        width, before = part_at(part, n0, n1, n2, EVEN)
        dtype = y.dtype.element_ty
        matrix = tl.multiple_of(address.to(tl.pointer_type(dtype)), 16)
        m, n = tl.arange(0, BLOCK_M), first + tl.arange(0, BLOCK_N)
        row = (start + m).to(tl.int64)
        have_m, have_n = (m < count)[:, None], (n < width)[None, :]
        wide, scale = tl.where(address != 0, rank, 0), tl.load(scales + slot)
        united = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for number in tl.static_range(PARTS):
            place = parts + number * split_parts + row[:, None] * stride_parts + before + n[None, :]
            total = tl.load(place, mask=have_m & have_n, other=0.0)
            for k in range(0, wide, BLOCK_K):
                at = k + tl.arange(0, BLOCK_K)
                have_k = at < wide
                of_u = u + number * split_u + row[:, None] * stride_u + part * rank + at[None, :]
                left = tl.load(of_u, mask=have_m & have_k[None, :], other=0.0)
                right = tl.load(
                    matrix + at[:, None] * width + n[None, :], mask=have_n & have_k[:, None], other=0.0
                )
                total = tl.dot(scaled(left, scale, dtype), right, total)
            united += total
        tl.store(y + row[:, None] * stride_y + before + n[None, :], united, mask=have_m & have_n)


@launched
@triton.jit(do_not_specialize=["tiles", "column"])
def _write(
    u, y, table, scales, cells, tiles, columns, column, n0, n1, n2, stride_u, stride_split, stride_y,
    EVEN: tl.constexpr, WHOLE: tl.constexpr, MULTIPLE: tl.constexpr, SPLITS: tl.constexpr,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """y[rows, part's columns] = scale · u[rows, part] · matrix, zeros where there is none.

    A program keeps its rows of u and goes through GROUP columns.
    """
    tile = tl.program_id(1)
    part, first = part_of_block(tl.program_id(0), n0, n1, n2, GROUP)
    slot, start, count = tile_at(cells, tiles, tile)
    rank = rank_at(table, slot, columns, WHOLE)
    address = tl.load(table + slot * columns + column + part)
    wait_for_previous()
    wide = tl.where(address != 0, rank * MULTIPLE, 0)
    width, before = part_at(part, n0, n1, n2, EVEN)
    matrix = tl.multiple_of(address.to(tl.pointer_type(y.dtype.element_ty)), 16)
    m, at = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_K)
    row = (start + m).to(tl.int64)
    have_m, have_k = (m < count)[:, None], at < wide
    place = u + row[:, None] * stride_u + part * rank + at[None, :]
    left = tl.zeros((BLOCK_M, BLOCK_K), tl.float32)
    for split in tl.static_range(SPLITS):
        left += tl.load(place + split * stride_split, mask=have_m & have_k[None, :], other=0.0).to(tl.float32)
    left = left.to(y.dtype.element_ty)
    scale = tl.load(scales + slot)
    for n in range(first, tl.minimum(first + GROUP, width), BLOCK_N):
        col = n + tl.arange(0, BLOCK_N)
        have_n = (col < width)[None, :]
        right = tl.load(matrix + at[:, None] * width + col[None, :], mask=have_n & have_k[:, None], other=0.0)
        out = y + row[:, None] * stride_y + before + col[None, :]
        tl.store(out, tl.dot(left, right) * scale, mask=have_m & have_n)


# -- launching -----------------------------------------------------------------------------------------


def triple(sizes: Sequence[int]) -> tuple[int, int, int]:
    assert len(sizes) <= 3
    n0, n1, n2 = (*sizes, 0, 0)[:3]
    return n0, n1, n2


def even(sizes: Sequence[int]) -> bool:
    return all(size % 16 == 0 for size in sizes)


def _splits(wanted: int, most: int) -> int:
    """A power of two: every sum over splits is unrolled."""
    return 1 << max(0, min(16, wanted, most).bit_length() - 1)


def _warps(tiles: RowTiles) -> int:
    return 4 if tiles.rows <= 64 else 8


class _Cut(NamedTuple):
    """How the work of shrinking is shared out."""

    splits: int  # of every sum
    each: int  # of those that one program does, one after the other
    rows: int
    columns: int  # of u
    features: int  # that one round reads
    warps: int
    stages: int
    pairs: bool = False


def _cut(
    x: Tensor,
    table: AdapterTable,
    tiles: RowTiles,
    sizes: Sequence[int],
    width: int,
    splits: int | None,
    beside: bool,
) -> _Cut:
    """As measured on an H200; `beside` a library's product, which needs most of the device for itself."""
    count, columns = tiles.cells.shape[1], max(16, min(_WIDEST, power_of_2(width)))
    shared, few = shared_bytes(x.device), count <= _SHRINKING // 2
    if table.invariant or (splits is None and tiles.rows > 64):
        splits, beside = 1, False
    if beside and splits and tiles.rows == 64 and count in (2, 4) and width <= _WIDEST and shared >= _ROOM:
        # A product beside takes 128 of 132 multiprocessors, and would wait for as many as this takes more:
        # so it has four, or two, however long, and leaves the product those that belong together.
        stages = min(6, _ROOM // (2 * 128 * (64 + columns)))
        return _Cut(splits, splits, 64, columns, 128, 8, stages, pairs=True)
    if splits is None:
        wanted = _SHRINKING if max(sizes) < _VAST else PROGRAMS
        wanted //= count * len(sizes) * cdiv(width, columns)
        most = max(256 // tiles.rows, max(sizes) // 1024)  # so that a product beside does not wait for it
        splits = _splits(min(wanted, most), max(sizes) // 256)
        few = few and splits == 1
    programs = count * cdiv(tiles.rows, 16) * len(sizes) * cdiv(width, 16) * splits
    if few and programs <= PROGRAMS // 2:  # each with as little as can be, to be done soon
        features = min(1024 if shared >= 140_000 else 256, max(16, power_of_2(max(sizes))))
        if splits > 1:  # each of which is to have as many features, whoever shrinks
            features = math.gcd(features, max(sizes) // splits)
        return _Cut(splits, 1, 16, 16, features, 2, 3)
    if few:  # whole tiles would leave most of the device idle
        stages = max(3, min(6, 1 + 90_000 // (2 * 128 * (16 + columns))))  # in bytes that every device has
        return _Cut(splits, 1, 16, columns, 128, 4, stages)
    return _Cut(splits, 1, tiles.rows, columns, 128, 4, 3)


def _shrunk(
    x: Tensor,
    table: AdapterTable,
    tiles: RowTiles,
    column: int,
    sizes: Sequence[int],
    multiple: int,
    splits: int | None = None,
    beside: bool = False,
) -> Tensor:
    count, parts, width = tiles.cells.shape[1], len(sizes), multiple * table.widest
    cut = _cut(x, table, tiles, sizes, width, splits, beside)
    blocks, dtype = cdiv(width, cut.columns), x.dtype if cut.splits == 1 else torch.float32
    # rows begin at multiples of 16 elements
    u = torch.empty(cut.splits, x.shape[0], 16 * cdiv(parts * width, 16), dtype=dtype, device=x.device)
    _shrink[(count * (tiles.rows // cut.rows), parts * blocks, cut.splits // cut.each)](
        x, u, table.addresses, tiles.cells, count, table.addresses.shape[1], column, *triple(sizes),
        x.stride(0), u.stride(1), u.stride(0),
        EVEN=even(sizes), WHOLE=table.whole, MULTIPLE=multiple, BLOCKS=blocks, SPLITS=cut.splits,
        EACH=cut.each, TILE=tiles.rows, BLOCK_M=cut.rows, BLOCK_N=cut.columns, BLOCK_K=cut.features,
        num_warps=cut.warps, num_stages=cut.stages, **PDL, **(CLUSTERS if cut.pairs else {}),
    )  # fmt: skip
    return u


def _expanded(
    u: Tensor,
    y: Tensor,
    table: AdapterTable,
    tiles: RowTiles,
    column: int,
    sizes: Sequence[int],
    multiple: int,
) -> None:
    count = tiles.cells.shape[1]
    block_n, warps = (64, 8) if count <= _FEW and max(sizes) < _VAST else (128, _warps(tiles))
    wide = 64 if table.invariant else power_of_2(multiple * table.widest)
    block_k = max(16, min(64, wide))
    blocks = sum(cdiv(size, block_n) for size in sizes)
    stages = 2 if count <= _FEW else 1
    _expand[(blocks, count)](
        u, y, table.addresses, table.scales, tiles.cells, count, table.addresses.shape[1], column,
        *triple(sizes), u.stride(1), u.stride(0), y.stride(0),
        EVEN=even(sizes), WHOLE=table.whole, MULTIPLE=multiple, SPLITS=u.shape[0],
        BLOCK_M=tiles.rows, BLOCK_N=block_n, BLOCK_K=block_k,
        num_warps=warps, num_stages=stages, **PDL,
    )  # fmt: skip


def group_for(sizes: Sequence[int], tiles: int, least: int) -> int:
    """How many columns one program writes: fewer where tiles are few, to have more programs."""
    group = 512 if max(sizes) <= 1024 else 1024
    while tiles <= _FEW and group > least and tiles * sum(cdiv(size, group) for size in sizes) < _WRITING:
        group //= 2
    return group


def _written(
    u: Tensor,
    y: Tensor,
    table: AdapterTable,
    tiles: RowTiles,
    column: int,
    sizes: Sequence[int],
    multiple: int,
) -> None:
    count, block_k = tiles.cells.shape[1], max(16, power_of_2(multiple * table.widest))
    columns, warps = (64, 4) if tiles.rows < 64 or block_k > 128 else (128, 8)
    group = group_for(sizes, count, columns)
    _write[(sum(cdiv(size, group) for size in sizes), count)](
        u, y, table.addresses, table.scales, tiles.cells, count, table.addresses.shape[1], column,
        *triple(sizes), u.stride(1), u.stride(0), y.stride(0),
        EVEN=even(sizes), WHOLE=table.whole, MULTIPLE=multiple, SPLITS=u.shape[0], GROUP=group,
        BLOCK_M=tiles.rows, BLOCK_N=columns, BLOCK_K=block_k,
        num_warps=warps, num_stages=3, **PDL,
    )  # fmt: skip


def shrink(
    x: Tensor,
    table: AdapterTable,
    tiles: RowTiles,
    site: TableSite,
    splits: int | None = None,
    *,
    beside: bool = False,
) -> Tensor:
    """x·Aᵀ of all parts side by side, [splits, T, P·R]: to be summed over splits, which `expand` does.

    Sums are cut into as many parts as is quickest, unless `splits` says otherwise; with an invariant table
    they never are. `beside`: a product with the same x runs at the same time.
    """
    return _shrunk(x, table, tiles, site.column, [site.in_features], len(site.outs), splits, beside)


def summed(u: Tensor, dtype: torch.dtype) -> Tensor:
    """What came in splits, as `shrink` gives it, in one: [1, T, P·R]."""
    return u if len(u) == 1 else u.sum(0, keepdim=True).to(dtype)


def shrink_back(grad_y: Tensor, table: AdapterTable, tiles: RowTiles, site: TableSite) -> Tensor:
    """The gradient to u, in parts like u, without the scale."""
    return _shrunk(grad_y, table, tiles, site.column + 1, site.outs, 1)


def expand(u: Tensor, y: Tensor, table: AdapterTable, tiles: RowTiles, site: TableSite) -> None:
    """y += scale · u · Bᵀ in place."""
    _expanded(u, y, table, tiles, site.column + 1, site.outs, 1)


def unite(
    u: Tensor, parts: Tensor, dtype: torch.dtype, table: AdapterTable, tiles: RowTiles, site: TableSite
) -> Tensor:
    """The sum of `parts` (fp32 [S, T, O]) and scale · u · Bᵀ, each part with its own of u's splits.

    The tiles must hold every row.
    """
    assert len(u) == len(parts)
    count = tiles.cells.shape[1]
    block_n, warps = (32, 8) if count <= _FEW else (128, _warps(tiles))
    y = torch.empty(parts.shape[1:], dtype=dtype, device=parts.device)
    _unite[(sum(cdiv(size, block_n) for size in site.outs), count)](
        u, parts, y, table.addresses, table.scales, tiles.cells, count, table.addresses.shape[1],
        site.column + 1, *triple(site.outs), u.stride(1), u.stride(0), parts.stride(1), parts.stride(0),
        y.stride(0), EVEN=even(site.outs), WHOLE=table.whole, PARTS=len(parts),
        BLOCK_M=tiles.rows, BLOCK_N=block_n, BLOCK_K=max(16, min(64, power_of_2(table.widest))),
        num_warps=warps, num_stages=1, **PDL,
    )  # fmt: skip
    return y


def expand_back(
    grad_u: Tensor, grad_x: Tensor, table: AdapterTable, tiles: RowTiles, site: TableSite
) -> None:
    """grad_x += scale · grad_u · A in place; `grad_u` is what `outer.backward` returned."""
    _expanded(grad_u, grad_x, table, tiles, site.column, [site.in_features], len(site.outs))


def writes(table: AdapterTable, site: TableSite) -> bool:
    """Whether `write` and `write_back` can hold so wide a product."""
    return len(site.outs) * table.widest <= 256


def write(u: Tensor, y: Tensor, table: AdapterTable, tiles: RowTiles, site: TableSite) -> None:
    """y = scale · u · Bᵀ; the tiles must hold every row."""
    _written(u, y, table, tiles, site.column + 1, site.outs, 1)


def write_back(grad_u: Tensor, grad_x: Tensor, table: AdapterTable, tiles: RowTiles, site: TableSite) -> None:
    """grad_x = scale · grad_u · A; the tiles must hold every row."""
    _written(grad_u, grad_x, table, tiles, site.column, [site.in_features], len(site.outs))

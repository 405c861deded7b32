# pyright: reportMissingImports=false, reportIndexIssue=false, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
"""LoRA down- and up-projections of many adapters of any ranks, one launch each.

`shrink` is the down-projection u = x·Aᵀ and `expand` the up-projection y += scale·u·Bᵀ; with A and B
exchanged they compute the gradients to u and x. `unite` adds the up-projection to the splits of a split-K
product; `write` stores it. The plain implementation is `engine.torch.lora.LoraBatch`.

Shapes: T rows, S splits, P parts of a site, R rank, O out-features.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tinkex.engine.cuda.adapter_table import SiteMatrices
from tinkex.engine.cuda.launch import (
    CLUSTERS,
    MULTIPROCESSORS,
    PDL,
    cdiv,
    launched,
    load,
    load_fp32,
    power_of_2,
    shared_bytes,
    wait_for_previous,
)

# As measured on an H200:
PROGRAMS = 2 * MULTIPROCESSORS  # that keep the device busy
_SHRINK_PROGRAMS = 64  # enough for `shrink`: every split is read again by all that expand it
_WRITE_PROGRAMS = 1000  # that keep it busy where all they do is write
_FEW = 64  # tiles: their programs wait for memory, and more of them hide that from each other
_SHARED = 215_000  # bytes of shared memory: most of what Hopper has
_VAST = 16384  # features from which on a sum is split over all programs
_MAX_U = 128  # columns of u that one program holds
MAX_WRITTEN = 256  # columns of u of all parts that `write` serves


# -- kernels -------------------------------------------------------------------------------------------


@triton.jit
def tile_at(cells, tiles, tile):
    """A tile's slot, first row and number of rows."""
    return tl.load(cells + tile), tl.load(cells + tiles + tile), tl.load(cells + 2 * tiles + tile)


@triton.jit
def adapter_of(table, cells, tiles, columns, column, tile, part, VECTORS: tl.constexpr):
    """A tile's slot, first row and number of rows; its adapter's rank, and the address of a part's matrix.

    VECTORS: ranks are multiples of 8, so that u is loaded 16 bytes at a time.
    """
    slot, start, count = tile_at(cells, tiles, tile)
    rank = tl.load(table + slot * columns).to(tl.int32)
    if VECTORS:
        rank = tl.multiple_of(rank, 8)
    return slot, start, count, rank, tl.load(table + slot * columns + column + part)


@triton.jit
def adapter_at(table, cells, tiles, columns, column, tile, part, VECTORS: tl.constexpr):
    """`adapter_of`; no kernel before this one is still running."""
    found = adapter_of(table, cells, tiles, columns, column, tile, part, VECTORS)
    wait_for_previous()
    return found


@triton.jit
def part_at(part, n0, n1, n2, n3, EVEN: tl.constexpr):
    """The width of a part and the columns before it; EVEN: both are multiples of 16."""
    width = tl.where(part == 0, n0, tl.where(part == 1, n1, tl.where(part == 2, n2, n3)))
    before = tl.where(part == 0, 0, tl.where(part == 1, n0, tl.where(part == 2, n0 + n1, n0 + n1 + n2)))
    if EVEN:
        width, before = tl.multiple_of(width, 16), tl.multiple_of(before, 16)
    return width, before


@triton.jit
def part_of_block(block, n0, n1, n2, BLOCK: tl.constexpr):
    """The part that a block of output columns lies in, and its first column there."""
    b0 = tl.cdiv(n0, BLOCK)
    b1 = b0 + tl.cdiv(n1, BLOCK)
    b2 = b1 + tl.cdiv(n2, BLOCK)
    part = (block >= b0).to(tl.int32) + (block >= b1).to(tl.int32) + (block >= b2).to(tl.int32)
    first = block - tl.where(part == 0, 0, tl.where(part == 1, b0, tl.where(part == 2, b1, b2)))
    return part, first * BLOCK


@triton.jit
def load_u(place, have, stride, SPLITS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The sum of u's splits."""
    u = tl.zeros((ROWS, COLUMNS), tl.float32)
    for split in tl.static_range(SPLITS):
        u += load_fp32(place + split * stride, have)
    return u


@triton.jit
def scaled(u, scale, dtype):
    """u as every kernel multiplies it with B that continues an fp32 sum, so that all are bitwise identical.

    Rounded, scaled and rounded again; a scale that is a power of two rounds once.
    """
    return (u.to(dtype).to(tl.float32) * scale).to(dtype)


@triton.jit
def b_of(where, part, width, at, col, have_n, DTYPE: tl.constexpr, VECTORS: tl.constexpr = False):
    """Rows `at` and columns `col` of an adapter's Bᵀ at one part, its rank there and its scale."""
    table, scales, slot, columns, column = where
    address = tl.load(table + slot * columns + column + part)
    rank = tl.where(address != 0, tl.load(table + slot * columns).to(tl.int32), 0)
    if VECTORS:
        rank = tl.multiple_of(rank, 8)
    matrix = tl.multiple_of(address.to(tl.pointer_type(DTYPE)), 16)
    have = have_n & ((at >= 0) & (at < rank))[:, None]
    b = load(matrix + at[:, None] * width + col[None, :], have)
    return b, rank, tl.load(scales + slot)


@launched
@triton.jit(do_not_specialize=["tiles", "column"])
def _shrink(
    x, u, table, scales, cells, tiles, columns, column, n0, n1, n2, n3, stride_x, stride_u, stride_split,
    EVEN: tl.constexpr, VECTORS: tl.constexpr, MULTIPLE: tl.constexpr, BLOCKS: tl.constexpr,
    SPLITS: tl.constexpr, EACH: tl.constexpr, TILE: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """u[rows, part] = x[rows, part's columns] · matrixᵀ; the matrix has MULTIPLE · rank rows.

    A program computes BLOCK_M of a tile's rows and EACH of the splits.
    """
    tile = tl.program_id(0) // (TILE // BLOCK_M)
    inside = tl.program_id(0) % (TILE // BLOCK_M) * BLOCK_M
    part, block = tl.program_id(1) // BLOCKS, tl.program_id(1) % BLOCKS
    _, start, count, rank, address = adapter_at(table, cells, tiles, columns, column, tile, part, VECTORS)
    if (count > inside) & (address != 0) & (block * BLOCK_N < rank * MULTIPLE):
        width, before = part_at(part, n0, n1, n2, n3, EVEN)
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
                left = load(x + row[:, None] * stride_x + before + at[None, :], have_m & have_k[None, :])
                right = load(matrix + n[None, :] * width + at[:, None], have_n & have_k[:, None])
                total = tl.dot(left, right, total)
            out = u + split * stride_split + row[:, None] * stride_u + part * rank + n[None, :]
            tl.store(out, total, mask=have_m & have_n)


@launched
@triton.jit(do_not_specialize=["tiles", "column"])
def _expand(
    u, base, y, table, scales, cells, tiles, columns, column, n0, n1, n2, n3, stride_u, split_u, stride_base,
    split_base, stride_y, EVEN: tl.constexpr, VECTORS: tl.constexpr, MULTIPLE: tl.constexpr,
    BASES: tl.constexpr, SPLITS: tl.constexpr, SUMMED: tl.constexpr, IN_PLACE: tl.constexpr,
    EARLY: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """y[rows, part's columns] = the sum of BASES of (base + scale · u[rows, part] · matrix).

    The matrix has MULTIPLE · rank rows. A single base takes the sum of SPLITS of u; several take one split
    each, or if SUMMED their sum takes the sum of as many. EARLY: BLOCK_K rows are all, and are loaded while
    the kernel before this one ends.
    """
    part, first = part_of_block(tl.program_id(0), n0, n1, n2, BLOCK_N)
    slot, start, count, rank, address = adapter_of(
        table, cells, tiles, columns, column, tl.program_id(1), part, VECTORS
    )
    width, before = part_at(part, n0, n1, n2, n3, EVEN)
    dtype = y.dtype.element_ty
    matrix = tl.multiple_of(address.to(tl.pointer_type(dtype)), 16)
    m, n = tl.arange(0, BLOCK_M), first + tl.arange(0, BLOCK_N)
    have_n, wide = (n < width)[None, :], tl.where(address != 0, rank * MULTIPLE, 0)
    if EARLY:
        at = tl.arange(0, BLOCK_K)
        early = load(matrix + at[:, None] * width + n[None, :], have_n & (at < wide)[:, None])
    wait_for_previous()
    work = count > 0
    if IN_PLACE:
        work = work & (address != 0)
    if work:
        row = (start + m).to(tl.int64)
        have_m, scale = (m < count)[:, None], tl.load(scales + slot)
        united = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        if SUMMED:
            place = base + row[:, None] * stride_base + before + n[None, :]
            for number in tl.static_range(BASES):
                united += load_fp32(place + number * split_base, have_m & have_n)
            for k in range(0, wide, BLOCK_K):
                at = k + tl.arange(0, BLOCK_K)
                have_k = at < wide
                if EARLY:
                    right = early
                else:
                    right = load(matrix + at[:, None] * width + n[None, :], have_n & have_k[:, None])
                of_u = u + row[:, None] * stride_u + part * rank + at[None, :]
                left = load_u(of_u, have_m & have_k[None, :], split_u, BASES, BLOCK_M, BLOCK_K)
                united = tl.dot(scaled(left, scale, dtype), right, united)
        else:
            for number in tl.static_range(BASES):
                place = base + number * split_base + row[:, None] * stride_base + before + n[None, :]
                held = load_fp32(place, have_m & have_n)  # early: all loads overlap
                total = held
                if SPLITS > 1:
                    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
                for k in range(0, wide, BLOCK_K):
                    at = k + tl.arange(0, BLOCK_K)
                    have_k = at < wide
                    if EARLY:
                        right = early
                    else:
                        right = load(matrix + at[:, None] * width + n[None, :], have_n & have_k[:, None])
                    of_u = u + number * split_u + row[:, None] * stride_u + part * rank + at[None, :]
                    left = load_u(of_u, have_m & have_k[None, :], split_u, SPLITS, BLOCK_M, BLOCK_K)
                    left = left.to(dtype) if SPLITS > 1 else scaled(left, scale, dtype)
                    total = tl.dot(left, right, total)
                if SPLITS > 1:  # faster; no other kernel must match it bitwise
                    total = total * scale + held
                united += total
        tl.store(y + row[:, None] * stride_y + before + n[None, :], united, mask=have_m & have_n)


@launched
@triton.jit(do_not_specialize=["tiles", "column"])
def _write(
    u, y, table, scales, cells, tiles, columns, column, n0, n1, n2, n3, stride_u, stride_split, stride_y,
    EVEN: tl.constexpr, VECTORS: tl.constexpr, MULTIPLE: tl.constexpr, SPLITS: tl.constexpr,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """y[rows, part's columns] = scale · u[rows, part] · matrix, zeros where there is no matrix.

    A program keeps its rows of u and loops over GROUP columns.
    """
    tile = tl.program_id(1)
    part, first = part_of_block(tl.program_id(0), n0, n1, n2, GROUP)
    slot, start, count, rank, address = adapter_at(table, cells, tiles, columns, column, tile, part, VECTORS)
    wide = tl.where(address != 0, rank, 0)
    width, before = part_at(part, n0, n1, n2, n3, EVEN)
    matrix = tl.multiple_of(address.to(tl.pointer_type(y.dtype.element_ty)), 16)
    m, at = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_K)
    row = (start + m).to(tl.int64)
    have_m, have_k = (m < count)[:, None], at < wide
    place = u + row[:, None] * stride_u + part * rank + at[None, :]
    left = load_u(place, have_m & have_k[None, :], stride_split, SPLITS, BLOCK_M, BLOCK_K)
    left = left.to(y.dtype.element_ty)
    scale = tl.load(scales + slot)
    for n in range(first, tl.minimum(first + GROUP, width), BLOCK_N):
        col = n + tl.arange(0, BLOCK_N)
        have_n = (col < width)[None, :]
        right = load(matrix + at[:, None] * width + col[None, :], have_n & have_k[:, None])
        out = y + row[:, None] * stride_y + before + col[None, :]
        tl.store(out, tl.dot(left, right) * scale, mask=have_m & have_n)


# -- launching -----------------------------------------------------------------------------------------


def split_count(wanted: int, most: int) -> int:
    """Into how many splits a sum is cut: a power of two up to 16, since summing them is unrolled."""
    return 1 << max(0, min(16, wanted, most).bit_length() - 1)


class _ShrinkTile(NamedTuple):
    splits: int
    each: int  # splits that one program computes, one after the other
    rows: int
    columns: int  # of u
    features: int  # of one iteration
    warps: int
    stages: int
    clusters: bool = False


def _shrink_tile(at: SiteMatrices, shared: int, splits: int | None, beside: bool) -> _ShrinkTile:
    """As measured on an H200, for programs with so many bytes of `shared` memory."""
    (cells, rows), parts, features = at.tiles, len(at.sizes), max(at.sizes)
    count, width = cells.shape[1], at.multiple * at.table.widest
    columns, few = max(16, min(_MAX_U, power_of_2(width))), count <= _SHRINK_PROGRAMS // 2
    if at.table.invariant or (splits is None and rows > 64):
        splits, beside = 1, False
    if beside and splits and rows == 64 and count in (2, 4) and width <= _MAX_U and shared >= _SHARED:
        # The library's product has 128 programs in clusters of two, on 132 multiprocessors, and would wait
        # for every further one that this takes. So this takes two or four, in clusters, however long it
        # needs.
        stages = min(6, _SHARED // (2 * 128 * (64 + columns)))
        return _ShrinkTile(splits, splits, 64, columns, 128, 8, stages, clusters=True)
    if splits is None:
        wanted = (_SHRINK_PROGRAMS if features < _VAST else PROGRAMS) // (
            count * parts * cdiv(width, columns)
        )
        most = max(256 // rows, features // 1024)  # so that a product in the same launch does not wait for it
        splits = split_count(min(wanted, most), features // 256)
        few = few and splits == 1
    if few and count * cdiv(rows, 16) * parts * cdiv(width, 16) * splits <= PROGRAMS // 2:
        # the smallest programs finish soonest
        block = min(1024 if shared >= 140_000 else 256, max(16, power_of_2(features)))
        if splits > 1:  # a split has the same features in every shape of tile
            block = math.gcd(block, features // splits)
        return _ShrinkTile(splits, 1, 16, 16, block, 2, 3)
    if few:  # whole tiles would leave most of the device idle
        stages = max(3, min(6, 1 + 90_000 // (2 * 128 * (16 + columns))))  # in bytes that every device has
        return _ShrinkTile(splits, 1, 16, columns, 128, 4, stages)
    return _ShrinkTile(splits, 1, rows, columns, 128, 4, 3)


def shrink(x: Tensor, at: SiteMatrices, splits: int | None = None, *, beside: bool = False) -> Tensor:
    """u = x·Aᵀ of all parts side by side, [S, T, P·R], to be summed over S.

    Without `splits` it takes as many as are fastest; with an invariant table always one. `beside`: a product
    with the same x runs at the same time.
    """
    width, parts = at.multiple * at.table.widest, len(at.sizes)
    tile = _shrink_tile(at, shared_bytes(x.device), splits, beside)
    blocks, dtype = cdiv(width, tile.columns), x.dtype if tile.splits == 1 else torch.float32
    # rows begin at multiples of 16 elements
    u = torch.empty(tile.splits, x.shape[0], 16 * cdiv(parts * width, 16), dtype=dtype, device=x.device)
    programs = (
        at.tiles.cells.shape[1] * (at.tiles.rows // tile.rows),
        parts * blocks,
        tile.splits // tile.each,
    )
    _shrink[programs](
        x, u, *at.where, *at.widths, x.stride(0), u.stride(1), u.stride(0),
        **at.constants, BLOCKS=blocks, SPLITS=tile.splits, EACH=tile.each, TILE=at.tiles.rows,
        BLOCK_M=tile.rows, BLOCK_N=tile.columns, BLOCK_K=tile.features,
        num_warps=tile.warps, num_stages=tile.stages, **PDL, **(CLUSTERS if tile.clusters else {}),
    )  # fmt: skip
    return u


def summed(u: Tensor, dtype: torch.dtype) -> Tensor:
    """The sum of `shrink`'s splits: [1, T, P·R]."""
    return u if len(u) == 1 else u.sum(0, keepdim=True).to(dtype)


def _expanded(u: Tensor, base: Tensor, y: Tensor, at: SiteMatrices, *, summed: bool = False) -> None:
    """`base` is [S, T, O]: y itself, or the splits of a product."""
    count, bases, in_place = at.tiles.cells.shape[1], len(base), base.data_ptr() == y.data_ptr()
    block_n, warps = 64 if in_place else 32, 8
    if count > _FEW or (in_place and max(at.sizes) >= _VAST):
        block_n, warps = 128, 4 if at.tiles.rows <= 64 else 8
    wide = 64 if at.table.invariant else power_of_2(at.multiple * at.table.widest)
    block_k = max(16, min(64, wide))
    _expand[(at.blocks(block_n), count)](
        u, base, y, *at.where, *at.widths,
        u.stride(1), u.stride(0), base.stride(1), base.stride(0), y.stride(0),
        **at.constants, BASES=bases, SPLITS=len(u) if bases == 1 else 1, SUMMED=summed,
        IN_PLACE=in_place, EARLY=count <= 16 and at.multiple * at.table.widest <= block_k,
        BLOCK_M=at.tiles.rows, BLOCK_N=block_n, BLOCK_K=block_k,
        num_warps=warps, num_stages=2 if in_place and count <= _FEW else 1, **PDL,
    )  # fmt: skip


def expand(u: Tensor, y: Tensor, at: SiteMatrices) -> None:
    """y += scale · u · Bᵀ in place."""
    _expanded(u, y[None], y, at)


def unite(u: Tensor, base: Tensor, dtype: torch.dtype, at: SiteMatrices, *, summed: bool = False) -> Tensor:
    """The sum over S of base + scale · u · Bᵀ, both [S, …]; `base` is fp32 and tiles cover every row.

    `summed`: base and u are summed first, which is faster. Otherwise a split of u is rounded for itself, as
    where the trainer splits a sum too.
    """
    assert len(u) == len(base)
    y = torch.empty(base.shape[1:], dtype=dtype, device=base.device)
    _expanded(u, base, y, at, summed=summed)
    return y


def columns_for(at: SiteMatrices, least: int) -> int:
    """How many columns a program of `write` loops over: fewer where tiles are few, for more programs."""
    count, group = at.tiles.cells.shape[1], 512 if max(at.sizes) <= 1024 else 1024
    while count <= _FEW and group > least and count * at.blocks(group) < _WRITE_PROGRAMS:
        group //= 2
    return group


def write(u: Tensor, y: Tensor, at: SiteMatrices) -> None:
    """y = scale · u · Bᵀ; tiles cover every row."""
    (_, rows), count, block_k = at.tiles, at.tiles.cells.shape[1], max(16, power_of_2(at.table.widest))
    columns, warps = (64, 4) if rows < 64 or block_k > 128 else (128, 8)
    group = columns_for(at, columns)
    _write[(at.blocks(group), count)](
        u, y, *at.where, *at.widths, u.stride(1), u.stride(0), y.stride(0),
        **at.constants, SPLITS=len(u), GROUP=group, BLOCK_M=rows, BLOCK_N=columns, BLOCK_K=block_k,
        num_warps=warps, num_stages=3, **PDL,
    )  # fmt: skip

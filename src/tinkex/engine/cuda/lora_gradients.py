# pyright: reportMissingImports=false, reportIndexIssue=false, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
"""Gradients of many adapters' matrices, one launch for all A and one for all B.

Tables, tiles and sites are those of `lora_kernels`; gradients are accumulated in the adapters' fp32 buffers.
Long sums over rows are split. Splits are added by atomics or, with an invariant table and if an adapter's
rows are contiguous, in a fixed order by a second launch. Knows nothing of autograd or of runs.

Shapes: T rows, P parts of a site, R rank, I in-features, O out-features.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tinkex.engine.cuda.adapter_table import AdapterTable, RowTiles, TableSite
from tinkex.engine.cuda.launch import launched
from tinkex.engine.cuda.lora_kernels import (
    PROGRAMS,
    even,
    part_at,
    part_of_block,
    rank_at,
    shrink_back,
    summed,
    tile_at,
    triple,
)
from tinkex.engine.cuda.pdl import PDL, wait_for_previous
from tinkex.engine.cuda.sizes import cdiv, power_of_2


@launched
@triton.jit(do_not_specialize=["tiles", "column", "splits"])
def _outer(
    u, g, partial, table, scales, cells, tiles, columns, column, splits, n0, n1, n2, stride_u, stride_g,
    stride_partial, EVEN: tl.constexpr, VECTORS: tl.constexpr, MULTIPLE: tl.constexpr, PARTIAL: tl.constexpr,
    ATOMIC: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """matrix[:, n] (fp32) += scale · u[rows, part]ᵀ · g[rows, part's columns] over a whole segment of rows.

    PARTIAL: a split's product goes to `partial` [splits, tiles, MULTIPLE · widest, columns of g] instead.
    Computes gᵀ · u and transposes: tensor cores are fast with as few columns as u has, not with as few rows.
    """
    tile, split = tl.program_id(1) // splits, tl.program_id(1) % splits
    part, first = part_of_block(tl.program_id(0), n0, n1, n2, BLOCK_N)
    slot, start, count = tile_at(cells, tiles, tile)
    rank = rank_at(table, slot, columns, VECTORS)
    address = tl.load(table + slot * columns + column + part)
    wait_for_previous()
    m = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    if (address != 0) & (tl.program_id(2) * BLOCK_M < rank * MULTIPLE):
        width, before = part_at(part, n0, n1, n2, EVEN)
        n = first + tl.arange(0, BLOCK_N)
        have_m, have_n = m < rank * MULTIPLE, n < width
        total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        for k in range(split * BLOCK_K, count, splits * BLOCK_K):
            at = k + tl.arange(0, BLOCK_K)
            row, have_k = (start + at).to(tl.int64)[:, None], (at < count)[:, None]
            left = tl.load(g + row * stride_g + before + n[None, :], mask=have_k & have_n[None, :], other=0.0)
            right = tl.load(
                u + row * stride_u + part * rank + m[None, :], mask=have_k & have_m[None, :], other=0.0
            )
            total = tl.dot(tl.trans(left), right, total)
        grad = tl.trans(total) * tl.load(scales + slot)
        have = have_m[:, None] & have_n[None, :]
        matrix = tl.multiple_of(address.to(tl.pointer_type(tl.float32)), 16)
        out = matrix + m[:, None] * width + n[None, :]
        if PARTIAL:
            place = partial + (split * tiles + tile).to(tl.int64) * stride_partial + before
            tl.store(place + m[:, None] * (n0 + n1 + n2) + n[None, :], grad, mask=have)
        elif ATOMIC:
            tl.atomic_add(out, grad, mask=have, sem="relaxed")
        else:
            tl.store(out, grad + tl.load(out, mask=have, other=0.0), mask=have)


@launched
@triton.jit(do_not_specialize=["tiles", "column", "splits"])
def _gather(
    partial, table, cells, tiles, columns, column, splits, n0, n1, n2, stride_partial,
    EVEN: tl.constexpr, MULTIPLE: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """matrix[m, n] (fp32) += the sum of `partial` over its splits, always in the same order."""
    tile, m = tl.program_id(1), tl.program_id(2)
    part, first = part_of_block(tl.program_id(0), n0, n1, n2, BLOCK_N)
    slot, _, _ = tile_at(cells, tiles, tile)
    rank = tl.load(table + slot * columns).to(tl.int32)
    address = tl.load(table + slot * columns + column + part)
    wait_for_previous()
    if (address != 0) & (m < rank * MULTIPLE):
        width, before = part_at(part, n0, n1, n2, EVEN)
        n = first + tl.arange(0, BLOCK_N)
        have_n = n < width
        place = partial + tile.to(tl.int64) * stride_partial + m * (n0 + n1 + n2) + before + n
        total = tl.zeros((BLOCK_S, BLOCK_N), tl.float32)
        for first_split in range(0, splits, BLOCK_S):
            split = (first_split + tl.arange(0, BLOCK_S))[:, None]
            total += tl.load(
                place[None, :] + split.to(tl.int64) * tiles * stride_partial,
                mask=(split < splits) & have_n[None, :],
                other=0.0,
            )
        matrix = tl.multiple_of(address.to(tl.pointer_type(tl.float32)), 16)
        out = matrix + m * width + n
        tl.store(out, tl.load(out, mask=have_n, other=0.0) + tl.sum(total, 0), mask=have_n)


# -- launching -----------------------------------------------------------------------------------------


def _outer_shape(wide: int) -> tuple[int, int, int, int, int]:
    """Columns of u, columns of g, rows, warps, stages: two such programs fit on a multiprocessor."""
    if wide <= 32:
        return max(16, power_of_2(wide)), 256, 64, 8, 3
    return (64, 128, 64, 4, 4) if wide <= 64 else (128, 128, 64, 8, 3)


def _add_outer(
    u: Tensor,
    g: Tensor,
    grads: AdapterTable,
    segments: RowTiles,
    column: int,
    sizes: Sequence[int],
    multiple: int,
    atomic: bool,
) -> None:
    count, wide = segments.cells.shape[1], multiple * grads.widest
    block_m, block_n, block_k, warps, stages = _outer_shape(wide)
    blocks_m, blocks = cdiv(wide, block_m), sum(cdiv(size, block_n) for size in sizes)
    wanted = PROGRAMS // (count * blocks * blocks_m)
    splits = max(1, min(wanted, cdiv(segments.rows, 4 * block_k)))
    in_parts = splits > 1 and grads.invariant and not atomic
    partial = u  # not used
    if in_parts:
        partial = torch.empty(splits, count, wide, sum(sizes), dtype=torch.float32, device=g.device)
    where = (count, grads.addresses.shape[1], column, splits, *triple(sizes))
    _outer[(blocks, count * splits, blocks_m)](
        u, g, partial, grads.addresses, grads.scales, segments.cells, *where,
        u.stride(1), g.stride(0), partial.stride(1),
        EVEN=even(sizes), VECTORS=grads.vectors, MULTIPLE=multiple, PARTIAL=in_parts,
        ATOMIC=atomic or splits > 1, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k,
        num_warps=warps, num_stages=stages, **PDL,
    )  # fmt: skip
    if in_parts:
        _gather[(sum(cdiv(size, 256) for size in sizes), count, wide)](
            partial, grads.addresses, segments.cells, *where, partial.stride(1),
            EVEN=even(sizes), MULTIPLE=multiple, BLOCK_S=min(16, power_of_2(splits)), BLOCK_N=256,
            num_warps=4, **PDL,
        )  # fmt: skip


class GradientTable(NamedTuple):
    """What the backward needs beyond the forward: the table of gradients, and whole segments as tiles."""

    grads: AdapterTable
    segments: RowTiles  # `rows` is the longest
    atomic: bool  # an adapter has several segments


def backward(
    grad_y: Tensor,
    x: Tensor,
    u: Tensor,
    table: AdapterTable,
    tiles: RowTiles,
    back: GradientTable,
    site: TableSite,
) -> Tensor:
    """Add to the adapters' gradients; returns the gradient to u."""
    parts = len(site.outs)
    grad_u = summed(shrink_back(grad_y, table, tiles, site), x.dtype)
    u = summed(u, x.dtype)
    _add_outer(u, grad_y, back.grads, back.segments, site.column + 1, site.outs, 1, back.atomic)
    _add_outer(grad_u, x, back.grads, back.segments, site.column, [site.in_features], parts, back.atomic)
    return grad_u

# pyright: reportMissingImports=false, reportIndexIssue=false, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
"""Gradients of many adapters' matrices, one launch for all A and one for all B.

They are added to the adapters' fp32 buffers, to which a table of gradients points. Long sums over rows are
split. Splits are added by atomics or, with an invariant table and if an adapter's rows are contiguous, in a
fixed order by a second launch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tinkex.engine.cuda.adapter_table import SiteAdapters, SiteMatrices
from tinkex.engine.cuda.launch import PDL, cdiv, launched, load, power_of_2
from tinkex.engine.cuda.lora_kernels import PROGRAMS, adapter_at, part_at, part_of_block, shrink, summed


@launched
@triton.jit(do_not_specialize=["tiles", "column", "splits"])
def _outer(
    u, g, partial, table, scales, cells, tiles, columns, column, splits, n0, n1, n2, n3, stride_u, stride_g,
    stride_partial, EVEN: tl.constexpr, VECTORS: tl.constexpr, MULTIPLE: tl.constexpr, PARTIAL: tl.constexpr,
    ATOMIC: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """matrix[:, n] (fp32) += scale · u[rows, part]ᵀ · g[rows, part's columns] over a whole segment of rows.

    PARTIAL: a split's product goes to `partial` [splits, tiles, MULTIPLE · widest, columns of g] instead.
    Computes gᵀ · u and transposes: tensor cores are fast with as few columns as u has, not with as few rows.
    """
    tile, split = tl.program_id(1) // splits, tl.program_id(1) % splits
    part, first = part_of_block(tl.program_id(0), n0, n1, n2, BLOCK_N)
    slot, start, count, rank, address = adapter_at(table, cells, tiles, columns, column, tile, part, VECTORS)
    m = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    if (address != 0) & (tl.program_id(2) * BLOCK_M < rank * MULTIPLE):
        width, before = part_at(part, n0, n1, n2, n3, EVEN)
        n = first + tl.arange(0, BLOCK_N)
        have_m, have_n = m < rank * MULTIPLE, n < width
        total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        for k in range(split * BLOCK_K, count, splits * BLOCK_K):
            at = k + tl.arange(0, BLOCK_K)
            row, have_k = (start + at).to(tl.int64)[:, None], (at < count)[:, None]
            left = load(g + row * stride_g + before + n[None, :], have_k & have_n[None, :])
            right = load(u + row * stride_u + part * rank + m[None, :], have_k & have_m[None, :])
            total = tl.dot(tl.trans(left), right, total)
        grad = tl.trans(total) * tl.load(scales + slot)
        have = have_m[:, None] & have_n[None, :]
        matrix = tl.multiple_of(address.to(tl.pointer_type(tl.float32)), 16)
        out = matrix + m[:, None] * width + n[None, :]
        if PARTIAL:
            place = partial + (split * tiles + tile).to(tl.int64) * stride_partial + before
            tl.store(place + m[:, None] * (n0 + n1 + n2 + n3) + n[None, :], grad, mask=have)
        elif ATOMIC:
            tl.atomic_add(out, grad, mask=have, sem="relaxed")
        else:
            tl.store(out, grad + load(out, have), mask=have)


@launched
@triton.jit(do_not_specialize=["tiles", "column", "splits"])
def _gather(
    partial, table, scales, cells, tiles, columns, column, splits, n0, n1, n2, n3, stride_partial,
    EVEN: tl.constexpr, VECTORS: tl.constexpr, MULTIPLE: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """matrix[m, n] (fp32) += the sum of `partial` over its splits, always in the same order."""
    tile, m = tl.program_id(1), tl.program_id(2)
    part, first = part_of_block(tl.program_id(0), n0, n1, n2, BLOCK_N)
    _, _, _, rank, address = adapter_at(table, cells, tiles, columns, column, tile, part, VECTORS)
    if (address != 0) & (m < rank * MULTIPLE):
        width, before = part_at(part, n0, n1, n2, n3, EVEN)
        n = first + tl.arange(0, BLOCK_N)
        have_n = n < width
        place = partial + tile.to(tl.int64) * stride_partial + m * (n0 + n1 + n2 + n3) + before + n
        total = tl.zeros((BLOCK_S, BLOCK_N), tl.float32)
        for first_split in range(0, splits, BLOCK_S):
            split = (first_split + tl.arange(0, BLOCK_S))[:, None]
            of_split = place[None, :] + split.to(tl.int64) * tiles * stride_partial
            total += load(of_split, (split < splits) & have_n[None, :])
        matrix = tl.multiple_of(address.to(tl.pointer_type(tl.float32)), 16)
        out = matrix + m * width + n
        tl.store(out, load(out, have_n) + tl.sum(total, 0), mask=have_n)


# -- launching -----------------------------------------------------------------------------------------


def _outer_shape(wide: int) -> tuple[int, int, int, int, int]:
    """Columns of u, columns of g, rows, warps, stages: two such programs fit on a multiprocessor."""
    if wide <= 32:
        return max(16, power_of_2(wide)), 256, 64, 8, 3
    return (64, 128, 64, 4, 4) if wide <= 64 else (128, 128, 64, 8, 3)


def add_outer(u: Tensor, g: Tensor, at: SiteMatrices, atomic: bool) -> None:
    """Add uᵀ·g to the gradients of every adapter's matrix, which `at` has with whole segments as tiles.

    `atomic`: an adapter has several segments.
    """
    count, longest, wide = at.tiles.cells.shape[1], at.tiles.rows, at.multiple * at.table.widest
    block_m, block_n, block_k, warps, stages = _outer_shape(wide)
    blocks_m, blocks = cdiv(wide, block_m), at.blocks(block_n)
    splits = max(1, min(PROGRAMS // (count * blocks * blocks_m), cdiv(longest, 4 * block_k)))
    in_parts = splits > 1 and at.table.invariant and not atomic
    partial = u  # not used
    if in_parts:
        partial = torch.empty(splits, count, wide, sum(at.sizes), dtype=torch.float32, device=g.device)
    given = (*at.where, splits, *at.widths)
    _outer[(blocks, count * splits, blocks_m)](
        u, g, partial, *given, u.stride(1), g.stride(0), partial.stride(1),
        **at.constants, PARTIAL=in_parts, ATOMIC=atomic or splits > 1,
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, num_warps=warps, num_stages=stages, **PDL,
    )  # fmt: skip
    if in_parts:
        _gather[(at.blocks(256), count, wide)](
            partial, *given, partial.stride(1),
            **at.constants, BLOCK_S=min(16, power_of_2(splits)), BLOCK_N=256, num_warps=4, **PDL,
        )  # fmt: skip


def backward(
    grad_y: Tensor, x: Tensor, u: Tensor, at: SiteAdapters, into: SiteAdapters, atomic: bool
) -> Tensor:
    """Add to the adapters' gradients; returns the gradient to u, without the scale.

    `into` has the gradients' addresses, and whole segments as tiles. `atomic`: an adapter has several.
    """
    grad_u = summed(shrink(grad_y, at.b), x.dtype)
    add_outer(summed(u, x.dtype), grad_y, into.b, atomic)
    add_outer(grad_u, x, into.a, atomic)
    return grad_u

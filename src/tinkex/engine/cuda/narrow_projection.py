# pyright: reportMissingImports=false, reportIndexIssue=false, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
"""Products of up to 16 rows with large weights, and the adapters' u = x·Aᵀ in the same launch.

No sum is split: results are bitwise identical to those of a library for many rows, which the trainer uses.
`DeferredExpand` or `expand` adds u·Bᵀ.

Shapes: M rows, I in-features, O out-features, P parts of a site, R rank.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from tinkex.engine.cuda.adapter_table import SiteAdapters
from tinkex.engine.cuda.launch import PDL, cdiv, launched, load, load_fp32, wait_for_previous
from tinkex.engine.cuda.router_kernels import shrink_block

MAX_ROWS = 16


@launched
@triton.jit(do_not_specialize=["tiles", "column", "rows"])
def _product(
    x, weight, bias, y, u, table, scales, cells, tiles, columns, column, rows, I, O, stride_x, stride_k,
    stride_n, stride_u, BIAS: tl.constexpr, MULTIPLE: tl.constexpr, BLOCKS: tl.constexpr,
    EVEN: tl.constexpr, EVEN_U: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, FEATURES_U: tl.constexpr,
):  # fmt: skip
    """BLOCK_N columns of x · weightᵀ + bias. The first programs have u of a tile's rows."""
    program, m = tl.program_id(0), tl.arange(0, BLOCK_M)
    if program < tiles * BLOCKS:
        where = (table, scales, cells, tiles, columns, column)
        shrink_block(x, u, where, program, 0, I, I, stride_x, stride_u, MULTIPLE, BLOCKS, EVEN_U, FEATURES_U)
    else:
        n = (program - tiles * BLOCKS) * BLOCK_N + tl.arange(0, BLOCK_N)
        have_m, have_n = (m < rows)[None, :], (n < O)[:, None]
        left, right = weight + n[:, None] * stride_n, x + m.to(tl.int64)[None, :] * stride_x
        total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)  # transposed: a multiplication has 64 rows at least
        wait_for_previous()
        for k in range(0, I, BLOCK_K):
            at = k + tl.arange(0, BLOCK_K)
            have_k = (at < I) | EVEN
            weights = load(left + at.to(tl.int64)[None, :] * stride_k, have_n & have_k[None, :])
            total = tl.dot(weights, load(right + at[:, None], have_m & have_k[:, None]), total)
        if BIAS:
            total += load_fp32(bias + n, n < O)[:, None]
        tl.store(y + m.to(tl.int64)[None, :] * O + n[:, None], total, mask=have_m & have_n)


class NarrowTile(NamedTuple):
    columns: int
    features: int  # of one iteration
    warps: int
    stages: int


_TILE = NarrowTile(64, 256, 4, 4)  # as measured on an H200


def product_and_shrink(
    x: Tensor, weight: Tensor, bias: Tensor | None, at: SiteAdapters, tile: NarrowTile = _TILE
) -> tuple[Tensor, Tensor]:
    """x · weightᵀ + bias [M, O], rounded, and u [1, M, P·R]."""
    (rows, features), out = x.shape, len(weight)
    y, u = x.new_empty(rows, out), x.new_empty(rows, 16 * cdiv(at.width, 16))
    tiles, blocks, features_u = at.tiles.cells.shape[1], cdiv(at.width, 16), 256
    _product[(tiles * blocks + cdiv(out, tile.columns),)](
        x, weight, y if bias is None else bias, y, u, *at.a.where, rows, features, out, x.stride(0),
        weight.stride(1), weight.stride(0), u.stride(0), BIAS=bias is not None, MULTIPLE=at.a.multiple,
        BLOCKS=blocks, EVEN=features % tile.features == 0, EVEN_U=features % features_u == 0,
        BLOCK_M=MAX_ROWS, BLOCK_N=tile.columns, BLOCK_K=tile.features, FEATURES_U=features_u,
        num_warps=tile.warps, num_stages=tile.stages, **PDL,
    )  # fmt: skip
    return y, u[None]

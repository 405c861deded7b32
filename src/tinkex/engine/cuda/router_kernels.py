# pyright: reportMissingImports=false, reportIndexIssue=false, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
"""A router's logits in fp32 and, in the same launch, the experts' first down-projection u = x·Aᵀ.

Both sum over features in the same order for any tokens: bitwise identical in trainer and sampler. Few tokens
take one launch instead of three. `engine.torch.models.moe` computes the same in plain torch.

Shapes: T tokens, D width, E experts, R rank.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tinkex.engine.cuda.adapter_table import SiteAdapters
from tinkex.engine.cuda.launch import PDL, cdiv, launched, load, load_fp32, wait_for_previous
from tinkex.engine.cuda.lora_kernels import tile_at

MAX_SHRUNK = 16  # tokens up to which the same launch computes u


class _LogitsTile(NamedTuple):
    tokens: int
    experts: int
    features: int  # of one iteration
    warps: int
    stages: int


_FEW, _MANY = _LogitsTile(16, 16, 1024, 4, 2), _LogitsTile(64, 64, 64, 4, 4)
_SOME = 2048  # tokens up to which small tiles are enough programs


@triton.jit
def multiply_rows(x, right, have_m, have_n, D, stride, EVEN: tl.constexpr, BLOCK_K: tl.constexpr):
    """x · rightᵀ, where both have addresses of rows, [M, 1] and [1, N]; `right` never changes.

    `stride`: elements between a row's features in `right`. Sums are in the order of features.
    """
    at = tl.arange(0, BLOCK_K)
    first = load(right + at.to(tl.int64)[:, None] * stride, have_n & (at < D)[:, None])
    wait_for_previous()
    total = tl.dot(load(x + at[None, :], have_m & (at < D)[None, :]), first)
    for k in range(BLOCK_K, D, BLOCK_K):
        at = k + tl.arange(0, BLOCK_K)
        have_k = (at < D) | EVEN
        left = load(x + at[None, :], have_m & have_k[None, :])
        feature = load(right + at.to(tl.int64)[:, None] * stride, have_n & have_k[:, None])
        total = tl.dot(left, feature, total)
    return total


@triton.jit
def shrink_block(
    x, u, where, program, low, count, width, stride_x, stride_u, MULTIPLE: tl.constexpr,
    BLOCKS: tl.constexpr, EVEN: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """16 columns of u = x · Aᵀ of the rows of one tile, over `count` of `width` features from `low` on.

    Tiles have at most 16 rows; of each, BLOCKS programs. EVEN: the features are a multiple of BLOCK_K.
    """
    table, _, cells, tiles, columns, column = where
    slot, start, rows = tile_at(cells, tiles, program // BLOCKS)
    address = tl.load(table + slot * columns + column)
    wide = tl.where(address != 0, tl.load(table + slot * columns).to(tl.int32) * MULTIPLE, 0)
    m, r = tl.arange(0, 16), program % BLOCKS * 16 + tl.arange(0, 16)
    row, have_m, have_r = (start + m).to(tl.int64)[:, None], (m < rows)[:, None], (r < wide)[None, :]
    matrix = tl.multiple_of(address.to(tl.pointer_type(x.dtype.element_ty)), 16) + r[None, :] * width + low
    total = multiply_rows(x + row * stride_x + low, matrix, have_m, have_r, count, 1, EVEN, BLOCK_K)
    tl.store(u + row * stride_u + r[None, :], total, mask=have_m & have_r)


@launched
@triton.jit(do_not_specialize=["tokens", "tiles", "column"])
def _logits(
    x, weight, bias, logits, u, table, scales, cells, tiles, columns, column, tokens, D, E, stride_x,
    stride_u, BIAS: tl.constexpr, LORA: tl.constexpr, MULTIPLE: tl.constexpr, BLOCKS: tl.constexpr,
    EVEN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """BLOCK_N logits of BLOCK_M tokens; LORA: the last programs have u of a tile's rows."""
    blocks, program = tl.cdiv(E, BLOCK_N), tl.program_id(0)
    m, n = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    last = program - tl.cdiv(tokens, BLOCK_M) * blocks
    if last < 0:
        row, col = (program // blocks * BLOCK_M + m).to(tl.int64), program % blocks * BLOCK_N + n
        have_m, have_n = (row < tokens)[:, None], (col < E)[None, :]
        left, right = x + row[:, None] * stride_x, weight + col[None, :] * D
        total = multiply_rows(left, right, have_m, have_n, D, 1, EVEN, BLOCK_K)
        if BIAS:
            total += load_fp32(bias + col, col < E)[None, :]
        tl.store(logits + row[:, None] * E + col[None, :], total, mask=have_m & have_n)
    elif LORA:
        where = (table, scales, cells, tiles, columns, column)
        shrink_block(x, u, where, last, 0, D, D, stride_x, stride_u, MULTIPLE, BLOCKS, EVEN, BLOCK_K)


def logits(
    x_TD: Tensor, weight_ED: Tensor, bias_E: Tensor | None, at: SiteAdapters | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """x · weightᵀ + bias [T, E] in `dtype`, and u [1, T, P·R] of at most 16 tokens at a site."""
    (tokens, width), experts = x_TD.shape, len(weight_ED)
    found = torch.empty(tokens, experts, dtype=dtype, device=x_TD.device)
    tile = _FEW if tokens <= _SOME else _MANY
    where, u, wide, tiles, multiple = (x_TD, x_TD, x_TD, 0, 0, 0), found, 16, 0, 1
    if at is not None:
        assert tokens <= MAX_SHRUNK
        where, wide, tiles, multiple = at.a.where, at.width, at.tiles.cells.shape[1], at.a.multiple
        u = x_TD.new_empty(tokens, 16 * cdiv(wide, 16))
    blocks = cdiv(wide, 16)
    _logits[(cdiv(tokens, tile.tokens) * cdiv(experts, tile.experts) + tiles * blocks,)](
        x_TD, weight_ED, weight_ED if bias_E is None else bias_E, found, u, *where, tokens, width, experts,
        x_TD.stride(0), u.stride(0), BIAS=bias_E is not None, LORA=at is not None, MULTIPLE=multiple,
        BLOCKS=blocks, EVEN=width % tile.features == 0, BLOCK_M=tile.tokens, BLOCK_N=tile.experts,
        BLOCK_K=tile.features, num_warps=tile.warps, num_stages=tile.stages, **PDL,
    )  # fmt: skip
    return found, None if at is None else u[None]

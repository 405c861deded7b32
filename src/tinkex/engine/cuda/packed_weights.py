# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportIndexIssue=false, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
"""Products with weights in 4 or 8 bits: dequantised to bf16 as a whole, or in the product's registers.

`dequantise` writes a matrix, or a stack of them, for a library's product of many rows, and reuses its memory
from matrix to matrix. `product` multiplies few rows and reads only the codes. Both compute the same weight:
the code's value and its block's scale, in bf16 each, multiplied and rounded to bf16. So trainer and sampler
have the same weights. `engine.torch.quantised` is the plain implementation.

Shapes: M rows, I in-features, O out-features, S splits, E matrices of a stack.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd import Function

from tinkex.engine.cuda.adapter_table import SiteAdapters
from tinkex.engine.cuda.launch import (
    MULTIPROCESSORS,
    PDL,
    cdiv,
    launched,
    load,
    power_of_2,
    wait_for_previous,
)
from tinkex.engine.cuda.lora_kernels import tile_at
from tinkex.engine.cuda.packed_codes import (
    PTX,
    WHOLE_ROW,
    columns_at,
    eight_bits,
    four_bits,
    of_rows,
    place_of,
    rows_at,
    weights_at,
)
from tinkex.engine.cuda.router_kernels import multiply_rows
from tinkex.engine.torch.quantised import ALIGNED, TILE, QuantisedMatrix, QuantisedWeight

KINDS = ("nf4", "fp4", "fp8", "int8", "table")
_TABLE = KINDS.index("table")
_TILES = 4  # of a row that a program of `dequantise` writes
MAX_ROWS = 256  # of `product`: more are faster through `dequantise` and a library


@triton.jit
def _shrink_block(
    x, u, where, program, multiple, blocks, low, count, width, stride_x, stride_u,
    TILE: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """BLOCK_R columns of u = x · Aᵀ of 16 of a tile's TILE rows, over `count` features from `low` on."""
    table, _, cells, tiles, columns, column = where
    block, sixteen = program % blocks, program // blocks
    slot, start, rows = tile_at(cells, tiles, sixteen // (TILE // 16))
    address = tl.load(table + slot * columns + column)
    wide = tl.where(address != 0, tl.load(table + slot * columns).to(tl.int32) * multiple, 0)
    m = sixteen % (TILE // 16) * 16 + tl.arange(0, 16)
    r = block * BLOCK_R + tl.arange(0, BLOCK_R)
    if (sixteen % (TILE // 16) * 16 < rows) & (block * BLOCK_R < wide):
        row, have_m, have_r = (start + m).to(tl.int64)[:, None], (m < rows)[:, None], (r < wide)[None, :]
        matrix = tl.multiple_of(address.to(tl.pointer_type(x.dtype.element_ty)), 16)
        left, right = x + row * stride_x + low, matrix + r[None, :] * width + low
        total = multiply_rows(left, right, have_m, have_r, count, 1, False, BLOCK_K)
        tl.store(u + row * stride_u + r[None, :], total, mask=have_m & have_r)


@launched
@triton.jit(do_not_specialize=["rows", "tiles", "column", "shrinks", "splits", "multiple", "blocks_u"])
def _product(
    x, codes, scale, values, y, u, table, scales, cells, tiles, columns, column, rows, K, O, splits, shrinks,
    multiple, blocks_u, stride_x,
    stride_codes, stride_scale, split_y, stride_u, split_u,
    KIND: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr, TILES: tl.constexpr, EVEN: tl.constexpr,
    PTX: tl.constexpr, LORA: tl.constexpr, TILE: tl.constexpr, BLOCK_R: tl.constexpr,
    FEATURES_U: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """y[split] = x · weightᵀ over one split of the features, for BLOCK_N columns of BLOCK_M rows.

    LORA: the first programs, `shrinks` of each split, have u[split] = x · Aᵀ of 16 rows each. They are short,
    so the product waits for them less than it would for few long ones.
    """
    program = tl.program_id(0)
    if LORA:
        program -= shrinks * splits
    if program >= 0:
        row_blocks, blocks = tl.cdiv(rows, BLOCK_M), tl.cdiv(O, BLOCK_N)
        # one after the other, programs read the same codes
        m = program % row_blocks * BLOCK_M + tl.arange(0, BLOCK_M)
        block, split = program // row_blocks % blocks, program // row_blocks // blocks
        first = block * BLOCK_N
        GROUPS: tl.constexpr = BLOCK_N // 64
        STEP: tl.constexpr = 64 * TILES
        col = first + tl.arange(0, BLOCK_N)
        n = tl.minimum(col, O - 1)[:, None]
        at_codes = codes + rows_at(first, n, O, KIND, GROUPS).to(tl.int64) * stride_codes
        span = tl.cdiv(tl.cdiv(K, STEP), splits) * STEP
        start, end = split * span, tl.minimum((split + 1) * span, K)
        held = of_rows(scale + n // HIGH * stride_scale, KIND, WIDE)
        have_m = (m < rows)[:, None]
        left = x + m.to(tl.int64)[:, None] * stride_x
        total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        dtype: tl.constexpr = x.dtype.element_ty
        wait_for_previous()
        for k in range(start, end, STEP):
            weights = weights_at(at_codes, held, values, k, K, KIND, WIDE, TILES, GROUPS, EVEN, dtype, PTX)
            # one multiplication an iteration: with two, whose left factors are registers, some sizes gave NaN
            total = tl.dot(weights, columns_at(left, have_m, k, K, KIND, WIDE, TILES, EVEN), total)
        out = y + split * split_y + m.to(tl.int64)[:, None] * O + col[None, :]
        tl.store(out, tl.trans(total), mask=have_m & (col < O)[None, :])
    elif LORA:
        where = (table, scales, cells, tiles, columns, column)
        one = program + shrinks * splits
        split = one // shrinks
        features = tl.cdiv(tl.cdiv(K, FEATURES_U), splits) * FEATURES_U
        low = split * features
        _shrink_block(
            x, u + split * split_u, where, one % shrinks, multiple, blocks_u, low,
            tl.minimum(features, K - low), K, stride_x, stride_u, TILE, BLOCK_R, FEATURES_U,
        )  # fmt: skip


@launched
@triton.jit
def _dequantise_tiles(
    codes, scale, table, out, K, O, stride_codes, stride_scale,
    KIND: tl.constexpr, WIDE: tl.constexpr, TILES: tl.constexpr, EVEN: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """64 rows of 64·TILES columns."""
    wait_for_previous()
    first, k = tl.program_id(1) * 64, tl.program_id(0) * 64 * TILES
    dtype: tl.constexpr = out.dtype.element_ty
    row = (first + tl.arange(0, 64)).to(tl.int64)[:, None]
    groups = codes + rows_at(first, row, O, KIND, 1).to(tl.int64) * stride_codes
    weights = weights_at(
        groups, scale + row * stride_scale, table, k, K, KIND, WIDE, TILES, 1, EVEN, dtype, PTX
    )
    column = k + place_of(KIND, WIDE, TILES)[None, :]
    tl.store(out + row * K + column, weights, mask=column < K)


@launched
@triton.jit
def _dequantise(
    codes, scale, table, zero, out, K, O, stride_codes, stride_scale,
    KIND: tl.constexpr, ZERO: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr,
    STEP: tl.constexpr, PTX: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """BLOCK_N rows of STEP columns."""
    wait_for_previous()
    row = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.program_id(0) * STEP
    dtype: tl.constexpr = out.dtype.element_ty
    if KIND == 2 or KIND == 3:
        n, col = row[:, None], k + tl.arange(0, STEP)[None, :]
        have = (n < O) & (col < K)
        byte = tl.load(codes + n.to(tl.int64) * stride_codes + col, mask=have, other=0)
        factor = load(scale + n // HIGH * stride_scale + col // WIDE, have).to(dtype)
        place = out + n.to(tl.int64) * K + col
        tl.store(place, eight_bits(byte, factor, KIND, dtype), mask=have)
    else:
        n, at = row[:, None], k // 2 + tl.arange(0, STEP // 2)[None, :]
        have = (n < O) & (2 * at < K)
        byte = tl.load(codes + n.to(tl.int64) * stride_codes + at, mask=have, other=0)
        of_block = n // HIGH * stride_scale + 2 * at // WIDE
        factor = load(scale + of_block, have).to(dtype)
        if ZERO:
            minus = load(zero + of_block, have).to(tl.float32)
            low = (tl.load(table + (byte & 15)) - minus).to(dtype) * factor
            high = (tl.load(table + (byte >> 4)) - minus).to(dtype) * factor
        else:
            low, high = four_bits(byte, factor, table, KIND, dtype, PTX)
        place = out + n.to(tl.int64) * K + 2 * at
        tl.store(place, low, mask=have)
        tl.store(place + 1, high, mask=have)


# -- launching -----------------------------------------------------------------------------------------


def dequantise(weight: QuantisedWeight, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    """All values of a matrix [O, I] or a stack [E, O, I] in `dtype`, into `out` if given."""
    out = torch.empty(weight.shape, dtype=dtype, device=weight.device) if out is None else out
    (high, _), (*_, count, columns) = weight.block, weight.shape
    if weight.kind == "other" or weight.transposed or (weight.codes.dim() == 3 and count % high):
        return out.copy_(weight.dequantise())
    codes, scale = rows_of(weight.codes), rows_of(weight.scale)
    zero, table = scale if weight.zero is None else rows_of(weight.zero), codes
    if weight.table is not None:
        table = weight.table
    total, kind = out.numel() // columns, KINDS.index(weight.kind)
    strides = columns, total, codes.stride(0), scale.stride(0)
    if weight.tiled:
        _dequantise_tiles[(cdiv(columns, 64 * _TILES), cdiv(total, TILE))](
            codes, scale, table, out, *strides, KIND=kind, WIDE=width_of(weight), TILES=_TILES,
            EVEN=columns % (64 * _TILES) == 0, PTX=PTX, num_warps=4, **PDL,
        )  # fmt: skip
    else:
        step, block = min(512, power_of_2(columns)), 8
        _dequantise[(cdiv(columns, step), cdiv(total, block))](
            codes, scale, table, zero, out, *strides, KIND=kind, ZERO=weight.zero is not None, HIGH=high,
            WIDE=width_of(weight), STEP=step, PTX=PTX, BLOCK_N=block, num_warps=4, **PDL,
        )  # fmt: skip
    # A product may load weights before it waits for the kernel before it (`launch`), but not for this one.
    torch.empty(1, device=out.device).zero_()
    return out


def rows_of(part: Tensor) -> Tensor:
    """The rows of all matrices; codes as bytes."""
    part = part.flatten(0, -2) if part.dim() == 3 else part
    return part.view(torch.uint8) if part.dtype in (torch.int8, torch.float8_e4m3fn) else part


def dense(matrix: QuantisedMatrix, dtype: torch.dtype) -> Tensor:
    """All values of a projection's weight, [O, I]."""
    if matrix.whole is not None:
        return dequantise(matrix.whole, dtype)
    first = matrix.parts[0]
    out, start = torch.empty(matrix.shape, dtype=dtype, device=first.device), 0
    for part in matrix.parts:
        rows = out[start : start + part.shape[0]]
        start += part.shape[0]
        rows.copy_(part) if isinstance(part, Tensor) else dequantise(part, dtype, rows)
    return out


def as_tensor(weight: Tensor | QuantisedMatrix, dtype: torch.dtype) -> Tensor:
    return weight if isinstance(weight, Tensor) else dense(weight, dtype)


class PackedTile(NamedTuple):
    """The tile sizes of a product."""

    rows: int
    columns: int
    tiles: int  # steps of 64 features of one iteration
    splits: int
    warps: int
    stages: int


def suits(weight: QuantisedWeight | None) -> bool:
    """Whether `product` can multiply with it: whole tiles, or of 8 bits whole steps within blocks."""
    if weight is None or weight.kind not in KINDS[:_TABLE] or weight.codes.data_ptr() % 16:
        return False
    if weight.kind in ("nf4", "fp4"):
        return weight.tiled and weight.scale.stride(-2) % ALIGNED == 0
    columns, wide = weight.shape[-1], weight.block[1]
    return columns % TILE == 0 and (wide >= columns or wide % TILE == 0)


def width_of(weight: QuantisedWeight) -> int:
    """Columns of a block; one number for all that are whole rows of 8 bits, so that kernels are few."""
    wide = weight.block[1]
    return WHOLE_ROW.value if weight.table is None and wide >= weight.shape[-1] else wide


def tiles_of(weight: QuantisedWeight, most: int) -> int:
    """Steps of an iteration: up to `most`; of 8 bits no more than a block has, and a divisor of all."""
    if weight.table is not None:
        return most
    wide = min(width_of(weight), weight.shape[-1]) // TILE
    return next(count for count in (4, 2, 1) if count <= most and wide % count == 0)


def tile_for(rows: int, weight: QuantisedWeight) -> PackedTile:
    """As measured on an H200 with the matrices of a model of 8B parameters."""
    count, columns = weight.shape
    tile, four = max(16, power_of_2(rows)), weight.table is not None
    if tile == 16:
        shape, wanted = (16, 64, 4 if four else 2, 4, 3), 800
    elif tile <= 64:
        shape, wanted = ((tile, 128, 2, 8, 3) if count >= 16384 else (tile, 64, 2, 4, 3)), 400
    else:
        shape, wanted = (tile, 128, 1, 8, 4), MULTIPROCESSORS
    programs = cdiv(count, shape[1]) * cdiv(rows, shape[0])
    splits = next((s for s in (8, 4, 2) if s * programs <= wanted and (s < 8 or tile == 16)), 1)
    tiles = tiles_of(weight, shape[2])
    rounds = columns // (TILE * tiles)
    return PackedTile(*shape[:2], tiles, max(1, min(splits, rounds // 2)), *shape[3:])


def product(x: Tensor, weight: QuantisedWeight, tile: PackedTile | None = None) -> Tensor:
    """[S, M, O]: x · weightᵀ, to be summed over S; in fp32 if there are several splits."""
    return product_and_shrink(x, weight, tile or tile_for(x.shape[0], weight), None)[0]


class _BlockOfU(NamedTuple):
    columns: int  # of u; and 16 rows
    features: int  # of one iteration


def shrink_tile_for(rows: int, width: int) -> _BlockOfU:
    """Of u in the product's launch."""
    return _BlockOfU(16, 128) if rows <= 16 or width <= 16 else _BlockOfU(32, 256)


def shrinks_inside(rows: int, weight: QuantisedWeight) -> bool:
    """Whether u is faster in the product's launch than beside it; 64 rows of 4 bits need its registers."""
    return rows <= 16 or rows > 64 or weight.table is None


def product_and_shrink(
    x: Tensor, weight: QuantisedWeight, tile: PackedTile, at: SiteAdapters | None
) -> tuple[Tensor, Tensor]:
    """`product`, and in the same launch u [S, M, P·R] of the adapters at a site."""
    rows, (count, columns) = x.shape[0], weight.shape
    codes, scale, splits = rows_of(weight.codes), weight.scale, tile.splits
    dtype = x.dtype if splits == 1 else torch.float32
    y = torch.empty(splits, rows, count, dtype=dtype, device=x.device)
    where, u, blocks, shrinks, multiple, high, of_u = (x, x, x, 0, 0, 0), y, 1, 0, 1, 16, _BlockOfU(16, 256)
    if at is not None:
        where, multiple, high = at.a.where, at.a.multiple, at.tiles.rows
        of_u = shrink_tile_for(rows, at.width)
        blocks = cdiv(at.width, of_u.columns)
        shrinks = at.tiles.cells.shape[1] * (high // 16) * blocks
        u = torch.empty(splits, rows, 16 * cdiv(at.width, 16), dtype=dtype, device=x.device)
    programs = splits * (shrinks + cdiv(count, tile.columns) * cdiv(rows, tile.rows))
    _product[(programs,)](
        x, codes, scale, codes if weight.table is None else weight.table, y, u, *where, rows, columns, count,
        splits, shrinks, multiple, blocks, x.stride(0), codes.stride(0), scale.stride(0), y.stride(0),
        u.stride(1), u.stride(0),
        KIND=KINDS.index(weight.kind), HIGH=weight.block[0], WIDE=width_of(weight),
        TILES=tile.tiles, EVEN=columns % (TILE * tile.tiles) == 0, PTX=PTX, LORA=at is not None,
        TILE=high, BLOCK_R=of_u.columns,
        FEATURES_U=of_u.features, BLOCK_M=tile.rows, BLOCK_N=tile.columns, num_warps=tile.warps,
        num_stages=tile.stages, **PDL,
    )  # fmt: skip
    return y, u


def linear(x: Tensor, matrix: QuantisedMatrix, bias: Tensor | None = None) -> Tensor:
    """x · matrixᵀ + bias; autograd computes a gradient only to x."""
    if x.requires_grad:
        return _PackedLinear.apply(x, matrix, bias)  # type: ignore[return-value]
    if matrix.whole is not None and len(x) <= MAX_ROWS and suits(matrix.whole):
        y = product(x, matrix.whole)
        y = y[0] if len(y) == 1 else y.sum(0).to(x.dtype)
        return y if bias is None else y + bias
    return F.linear(x, dense(matrix, x.dtype), bias)


class _PackedLinear(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, matrix: QuantisedMatrix, bias: Tensor | None) -> Tensor:
        ctx.matrix = matrix
        return F.linear(x, dense(matrix, x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] @ dense(ctx.matrix, grads[0].dtype), None, None

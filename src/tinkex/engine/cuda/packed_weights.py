# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportIndexIssue=false, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
"""Products with weights that stay in 4 or 8 bits: expanded to bf16 as a whole, or in the product's registers.

`expand` writes a matrix, or a stack of them, for a library's product of many rows; memory for it is reused
from matrix to matrix. `product` multiplies few rows and reads the codes alone. Both compute one weight: the
code's value and its block's scale, in bf16 each, multiplied and rounded to bf16. So trainer and sampler have
the same weights. `engine.torch.quantised` is the plain implementation.

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

from tinkex.engine.cuda.launch import (
    PDL,
    cdiv,
    launched,
    load,
    power_of_2,
    wait_for_previous,
)
from tinkex.engine.torch.quantised import TILE, QuantisedMatrix, QuantisedWeight

KINDS = ("nf4", "fp4", "fp8", "int8", "table")
_TABLE = KINDS.index("table")
_TILES = 4  # of a row that a program of `expand` writes
WHOLE_ROW = tl.constexpr(1 << 20)  # columns of a block that is a row of 8 bits
PTX = not triton.knobs.runtime.interpret
MAX_ROWS = 256  # of `product`: more are faster through `expand` and a library

# -- values of codes -------------------------------------------------------------------------------------
#
# Four bytes of codes at a time. `prmt` looks four codes up in a table of eight bytes: one table has the high
# bytes of the values in bf16, another the low bytes. Codes from 8 on have tables of their own in nf4; in fp4
# they are the negatives. Then bytes are put together to pairs of values, which a product scales.

_LOOK_UP_NF4 = """
    prmt.b32 n, 0x0000ff00, 0, m;
    prmt.b32 a, 0xbebfbfbf, 0x00bdbebe, c;
    prmt.b32 b, 0x3e3e3e3d, 0x3f3f3f3e, c;
    lop3.b32 h, n, b, a, 0xca;
    prmt.b32 a, 0xca063280, 0x00ba3d92, c;
    prmt.b32 b, 0xad7c25a3, 0x803910e2, c;
    lop3.b32 l, n, b, a, 0xca;
"""
_LOOK_UP_FP4 = """
    prmt.b32 n, 0x00008000, 0, m;
    prmt.b32 h, 0x3f3f3f00, 0x40404040, c;
    or.b32 h, h, n;
    prmt.b32 l, 0xc0800000, 0xc0804000, c;
"""
_FOUR_BITS = """{{
    .reg .b32 c, m, n, a, b, h, l;
    and.b32 c, $4, 0x77777777;
    shr.b32 m, $4, 3;
    and.b32 m, m, 0x11111111;
    {look_up}
    prmt.b32 a, l, h, 0x6240;
    prmt.b32 b, l, h, 0x7351;
    mul.rn.bf16x2 $0, a, $5;
    mul.rn.bf16x2 $2, b, $5;
    shr.b32 c, c, 16;
    shr.b32 m, m, 16;
    {look_up}
    prmt.b32 a, l, h, 0x6240;
    prmt.b32 b, l, h, 0x7351;
    mul.rn.bf16x2 $1, a, $6;
    mul.rn.bf16x2 $3, b, $6;
}}"""
_PAIR = tl.constexpr((tl.bfloat16, tl.bfloat16))
_NF4_PTX = tl.constexpr(_FOUR_BITS.format(look_up=_LOOK_UP_NF4))
_FP4_PTX = tl.constexpr(_FOUR_BITS.format(look_up=_LOOK_UP_FP4))
# Exponent and mantissa of e4m3 in those of bf16 are the value times 2^-120.
_FP8_PTX = tl.constexpr("""{
    .reg .b32 t, m, f;
    mov.b32 f, 0x7b807b80;
    prmt.b32 t, $2, 0, 0x1404;
    shr.b32 m, t, 4;
    and.b32 m, m, 0x07f007f0;
    lop3.b32 m, t, 0x80008000, m, 0xea;
    mul.rn.bf16x2 m, m, f;
    mul.rn.bf16x2 $0, m, $3;
    prmt.b32 t, $2, 0, 0x3424;
    shr.b32 m, t, 4;
    and.b32 m, m, 0x07f007f0;
    lop3.b32 m, t, 0x80008000, m, 0xea;
    mul.rn.bf16x2 m, m, f;
    mul.rn.bf16x2 $1, m, $4;
}""")
# 128 plus the low seven bits is exact in bf16; 128 or, if it is negative, 256 is taken from it.
_INT8_PTX = tl.constexpr("""{
    .reg .b32 t, a, b;
    prmt.b32 t, $2, 0, 0x4140;
    lop3.b32 a, t, 0x007f007f, 0x43004300, 0xea;
    lop3.b32 b, t, 0x00800080, 0x43004300, 0xea;
    sub.rn.bf16x2 a, a, b;
    mul.rn.bf16x2 $0, a, $3;
    prmt.b32 t, $2, 0, 0x4342;
    lop3.b32 a, t, 0x007f007f, 0x43004300, 0xea;
    lop3.b32 b, t, 0x00800080, 0x43004300, 0xea;
    sub.rn.bf16x2 a, a, b;
    mul.rn.bf16x2 $1, a, $4;
}""")


@triton.jit
def four_bits(codes, scale, table, KIND: tl.constexpr, DTYPE: tl.constexpr, PTX: tl.constexpr):
    """The weights of the low and of the high halves of bytes; `scale` has the shape of `codes`."""
    if PTX and KIND == 0:
        return tl.inline_asm_elementwise(_NF4_PTX, "=r,=r,=r,=r,r,r,r", [codes, scale], _PAIR, True, 4)
    elif PTX and KIND == 1:
        return tl.inline_asm_elementwise(_FP4_PTX, "=r,=r,=r,=r,r,r,r", [codes, scale], _PAIR, True, 4)
    else:
        low, high = tl.load(table + (codes & 15)).to(DTYPE), tl.load(table + (codes >> 4)).to(DTYPE)
        return low * scale, high * scale


@triton.jit
def eight_bits(codes, scale, KIND: tl.constexpr, DTYPE: tl.constexpr, PTX: tl.constexpr):
    """The weights of bytes; `scale` has the shape of `codes`."""
    if PTX and KIND == 2:
        return tl.inline_asm_elementwise(_FP8_PTX, "=r,=r,r,r,r", [codes, scale], tl.bfloat16, True, 4)
    elif PTX:
        return tl.inline_asm_elementwise(_INT8_PTX, "=r,=r,r,r,r", [codes, scale], tl.bfloat16, True, 4)
    elif KIND == 2:
        bits = codes.to(tl.int32)
        bits = ((bits & 0x80) << 24) | ((bits & 0x7F) << 20)
        return (bits.to(tl.float32, bitcast=True) * 1.329227995784916e36).to(DTYPE) * scale
    else:
        return codes.to(tl.int8, bitcast=True).to(DTYPE) * scale


# -- kernels -------------------------------------------------------------------------------------------


@triton.jit
def tiled_bytes(codes, tile, left, TILES: tl.constexpr, GROUPS: tl.constexpr, EVEN: tl.constexpr):
    """The bytes [64·GROUPS, 32·TILES] of tiles that lie one after the other, zeros from `left` tiles on.

    `codes` has the addresses [GROUPS, 1] of groups of 64 rows. Tiles are stored in the order in which a
    multiplication reads its left factor from registers (`quantised._tile`), so that no byte changes places.
    """
    at = tl.arange(0, TILES * 2048)[None, :]
    place = codes + tile * 2048 + at
    if EVEN:
        raw = tl.load(place)
    else:
        raw = tl.load(place, mask=at < tl.multiple_of(left * 2048, 2048), other=0)
    raw = tl.reshape(raw, (GROUPS, TILES, 4, 8, 4, 2, 2, 2, 2))
    return tl.reshape(tl.permute(raw, (0, 2, 7, 3, 1, 5, 6, 4, 8)), (64 * GROUPS, 32 * TILES))


@triton.jit
def weights_at(
    codes, scale, table, k, K, KIND: tl.constexpr, WIDE: tl.constexpr, TILES: tl.constexpr,
    GROUPS: tl.constexpr, EVEN: tl.constexpr, DTYPE: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """The weights of 64·TILES columns from `k` on, of 64·GROUPS rows, in the order of `place_of`.

    `codes` has addresses: of 4 bits as in `tiled_bytes`, of 8 bits those of the rows, [N, 1]. `scale` has the
    addresses of the rows' scales, or, of 8 bits in one block for each row, the scales themselves.
    """
    N: tl.constexpr = 64 * GROUPS
    if KIND == 2 or KIND == 3:
        byte = tl.load(codes + k + tl.arange(0, 64 * TILES)[None, :])
        found = eight_bits(byte, _spread(scale, k, KIND, WIDE, 64 * TILES, N, DTYPE), KIND, DTYPE, PTX)
    else:
        HALF: tl.constexpr = WIDE // 2
        BLOCKS: tl.constexpr = 32 * TILES // HALF
        byte, block = tiled_bytes(codes, k // 64, (K - k) // 64, TILES, GROUPS, EVEN), tl.arange(0, BLOCKS)
        if EVEN:
            of_block = tl.load(scale + k // WIDE + block[None, :])
        else:
            of_block = load(scale + k // WIDE + block[None, :], (k // WIDE + block < K // WIDE)[None, :])
        of_block = tl.broadcast_to(of_block.to(DTYPE)[:, :, None], (N, BLOCKS, HALF))
        low, high = four_bits(byte, tl.reshape(of_block, (N, 32 * TILES)), table, KIND, DTYPE, PTX)
        found = tl.reshape(tl.permute(tl.join(low, high), (0, 2, 1)), (N, 64 * TILES))
    return found


@triton.jit
def _spread(
    scale, k, KIND: tl.constexpr, WIDE: tl.constexpr, STEP: tl.constexpr, N: tl.constexpr, DTYPE: tl.constexpr
):  # fmt: skip
    """The scales of 8 bits for [N, STEP] codes, all of one block of columns."""
    if WIDE < WHOLE_ROW:
        scale = tl.load(scale + k // WIDE)
    return tl.broadcast_to(scale.to(DTYPE), (N, STEP))


@triton.jit
def of_rows(scale, KIND: tl.constexpr, WIDE: tl.constexpr):
    """What `weights_at` takes as `scale`, given the addresses of the rows' first scales [N, 1]."""
    return tl.load(scale) if (KIND == 2 or KIND == 3) and WIDE == WHOLE_ROW else scale


@triton.jit
def place_of(KIND: tl.constexpr, WIDE: tl.constexpr, TILES: tl.constexpr):
    """Which columns `weights_at` returns, counted from the first: of 4 bits, all low halves come first."""
    at = tl.arange(0, 64 * TILES)
    if KIND == 2 or KIND == 3:
        found = at
    else:
        HALF: tl.constexpr = WIDE // 2
        byte = at % (32 * TILES)
        found = byte // HALF * WIDE + at // (32 * TILES) * HALF + byte % HALF
        found = tl.max_contiguous(tl.multiple_of(found, HALF), HALF)  # which Triton does not see by itself
    return found


@triton.jit
def columns_at(
    x, have_m, k, K, KIND: tl.constexpr, WIDE: tl.constexpr, TILES: tl.constexpr, EVEN: tl.constexpr
):  # fmt: skip
    """The columns of x, transposed, that `weights_at` multiplies; `x` has the rows' addresses [M, 1]."""
    column = place_of(KIND, WIDE, TILES)[None, :]
    if not EVEN:
        have_m = have_m & (column < tl.multiple_of(K - k, 64))
    return tl.trans(load(x + k + column, have_m))


@launched
@triton.jit(do_not_specialize=["rows"])
def _product(
    x, codes, scale, table, y, rows, K, O, stride_x, stride_codes, stride_scale, split_y,
    KIND: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr, TILES: tl.constexpr, EVEN: tl.constexpr,
    PTX: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """y[split] = x · weightᵀ over one split of the features, for BLOCK_N columns."""
    split, m = tl.program_id(1), tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    first = tl.program_id(0) * BLOCK_N
    GROUPS: tl.constexpr = BLOCK_N // 64
    STEP: tl.constexpr = 64 * TILES
    col = first + tl.arange(0, BLOCK_N)
    n = tl.minimum(col, O - 1)[:, None]
    codes += rows_at(first, n, O, KIND, GROUPS).to(tl.int64) * stride_codes
    span = tl.cdiv(tl.cdiv(K, STEP), tl.num_programs(1)) * STEP
    start, end = split * span, tl.minimum((split + 1) * span, K)
    held = of_rows(scale + n // HIGH * stride_scale, KIND, WIDE)
    have_m = (m < rows)[:, None]
    x += m.to(tl.int64)[:, None] * stride_x
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    dtype: tl.constexpr = x.dtype.element_ty
    wait_for_previous()
    for k in range(start, end, STEP):
        weights = weights_at(codes, held, table, k, K, KIND, WIDE, TILES, GROUPS, EVEN, dtype, PTX)
        # one multiplication an iteration: with two, whose left factors are registers, some sizes gave NaN
        total = tl.dot(weights, columns_at(x, have_m, k, K, KIND, WIDE, TILES, EVEN), total)
    out = y + split * split_y + m.to(tl.int64)[:, None] * O + col[None, :]
    tl.store(out, tl.trans(total), mask=have_m & (col < O)[None, :])


@triton.jit
def rows_at(first, n, O, KIND: tl.constexpr, GROUPS: tl.constexpr):
    """The rows at whose codes `weights_at` begins: `n` [N, 1], or the first ones of groups of 64."""
    if KIND == 2 or KIND == 3:
        found = n
    else:
        found = tl.minimum(first + 64 * tl.arange(0, GROUPS)[:, None], O - 64)
    return found


@launched
@triton.jit
def _expand_tiles(
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
def _expand(
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
        tl.store(place, eight_bits(byte, factor, KIND, dtype, PTX), mask=have)
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


def expand(weight: QuantisedWeight, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    """All values of a matrix [O, I] or a stack [E, O, I] in `dtype`, into `out` if given."""
    out = torch.empty(weight.shape, dtype=dtype, device=weight.device) if out is None else out
    (high, _), (*_, count, columns) = weight.block, weight.shape
    if weight.kind == "other" or weight.transposed or (weight.codes.dim() == 3 and count % high):
        return out.copy_(weight.expand())
    codes, scale = rows_of(weight.codes), rows_of(weight.scale)
    zero, table = scale if weight.zero is None else rows_of(weight.zero), codes
    if weight.table is not None:
        table = weight.table
    total, kind = out.numel() // columns, KINDS.index(weight.kind)
    strides = columns, total, codes.stride(0), scale.stride(0)
    if weight.tiled:
        _expand_tiles[(cdiv(columns, 64 * _TILES), cdiv(total, TILE))](
            codes, scale, table, out, *strides, KIND=kind, WIDE=width_of(weight), TILES=_TILES,
            EVEN=columns % (64 * _TILES) == 0, PTX=PTX, num_warps=4, **PDL,
        )  # fmt: skip
    else:
        step, block = min(512, power_of_2(columns)), 8
        _expand[(cdiv(columns, step), cdiv(total, block))](
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
        return expand(matrix.whole, dtype)
    first = matrix.parts[0]
    out, start = torch.empty(matrix.shape, dtype=dtype, device=first.device), 0
    for part in matrix.parts:
        rows = out[start : start + part.shape[0]]
        start += part.shape[0]
        rows.copy_(part) if isinstance(part, Tensor) else expand(part, dtype, rows)
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
        return weight.tiled
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
        shape, wanted = (tile, 128, 1, 8, 4), 400
    programs = cdiv(count, shape[1]) * cdiv(rows, shape[0])
    splits = next((s for s in (8, 4, 2) if s * programs <= wanted and (s < 8 or tile == 16)), 1)
    tiles = tiles_of(weight, shape[2])
    rounds = columns // (TILE * tiles)
    return PackedTile(*shape[:2], tiles, max(1, min(splits, rounds // 2)), *shape[3:])


def product(x: Tensor, weight: QuantisedWeight, tile: PackedTile | None = None) -> Tensor:
    """[S, M, O]: x · weightᵀ, to be summed over S; in fp32 if there are several splits."""
    rows, (count, columns) = x.shape[0], weight.shape
    tile = tile or tile_for(rows, weight)
    codes, scale = rows_of(weight.codes), weight.scale
    dtype = x.dtype if tile.splits == 1 else torch.float32
    y = torch.empty(tile.splits, rows, count, dtype=dtype, device=x.device)
    _product[(cdiv(count, tile.columns), tile.splits, cdiv(rows, tile.rows))](
        x, codes, scale, codes if weight.table is None else weight.table, y, rows, columns, count,
        x.stride(0), codes.stride(0), scale.stride(0), y.stride(0),
        KIND=KINDS.index(weight.kind), HIGH=weight.block[0], WIDE=width_of(weight),
        TILES=tile.tiles, EVEN=columns % (TILE * tile.tiles) == 0, PTX=PTX, BLOCK_M=tile.rows,
        BLOCK_N=tile.columns, num_warps=tile.warps, num_stages=tile.stages, **PDL,
    )  # fmt: skip
    return y


def linear(x: Tensor, matrix: QuantisedMatrix, bias: Tensor | None = None) -> Tensor:
    """x · matrixᵀ + bias; autograd sees a gradient to x alone."""
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

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportIndexIssue=false, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
"""Codes of 4 or 8 bits as weights in a kernel's registers: their values, scaled, in the order of a product.

`engine.torch.quantised` stores the codes; a weight is the code's value and its block's scale, in bf16 each,
multiplied and rounded to bf16. Knows no product; `packed_weights` and `packed_experts` have them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tinkex.engine.cuda.launch import load

WHOLE_ROW = tl.constexpr(1 << 20)  # columns of a block that is a row of 8 bits
PTX = not triton.knobs.runtime.interpret

# -- values of codes -------------------------------------------------------------------------------------
#
# Of 4 bits, four bytes of codes at a time. `prmt` looks four codes up in a table of eight bytes: one table
# has the high bytes of the values in bf16, another the low bytes. Codes from 8 on have tables of their own in
# nf4; in fp4 they are the negatives. Then bytes are put together to pairs of values, which a product scales.

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
# Of 8 bits, pairs of codes that lie in the 16 bits that a thread reads at a time.
# Exponent and mantissa of e4m3 in those of bf16 are the value times 2^-120.
_FP8_PTX = tl.constexpr("""{
    .reg .b32 t, m, f;
    mov.b32 f, 0x7b807b80;
    cvt.u32.u16 t, $2;
    prmt.b32 t, t, 0, 0x1100;
    shl.b32 m, t, 4;
    and.b32 m, m, 0x07f007f0;
    lop3.b32 m, t, 0x80008000, m, 0xea;
    mul.rn.bf16x2 m, m, f;
    mul.rn.bf16x2 m, m, $3;
    mov.b32 {$0, $1}, m;
}""")
# 128 plus the low seven bits is exact in bf16; 128 or, if it is negative, 256 is taken from it.
_INT8_PTX = tl.constexpr("""{
    .reg .b32 t, a, b;
    cvt.u32.u16 t, $2;
    prmt.b32 t, t, 0, 0x4140;
    lop3.b32 a, t, 0x007f007f, 0x43004300, 0xea;
    lop3.b32 b, t, 0x00800080, 0x43004300, 0xea;
    sub.rn.bf16x2 a, a, b;
    mul.rn.bf16x2 a, a, $3;
    mov.b32 {$0, $1}, a;
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
def eight_bits(codes, scale, KIND: tl.constexpr, DTYPE: tl.constexpr):
    """The weights of bytes; `scale` has the shape of `codes`, or spreads to it."""
    if KIND == 3:
        return codes.to(tl.int8, bitcast=True).to(DTYPE) * scale
    else:
        bits = codes.to(tl.int32)
        bits = ((bits & 0x80) << 24) | ((bits & 0x7F) << 20)
        return (bits.to(tl.float32, bitcast=True) * 1.329227995784916e36).to(DTYPE) * scale


@triton.jit
def _of_pairs(
    codes, scale, k, KIND: tl.constexpr, TILES: tl.constexpr, N: tl.constexpr, DTYPE: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    """The weights of 64·TILES columns of 8 bits from `k` on; `scale` [N, 1] is of all of them."""
    pair = tl.load(codes.to(tl.pointer_type(tl.int16)) + k // 2 + tl.arange(0, 32 * TILES)[None, :])
    if PTX:
        bits = scale.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        both = tl.broadcast_to(bits | (bits << 16), (N, 32 * TILES))
        if KIND == 2:
            low, high = tl.inline_asm_elementwise(_FP8_PTX, "=h,=h,h,r", [pair, both], _PAIR, True, 1)
        else:
            low, high = tl.inline_asm_elementwise(_INT8_PTX, "=h,=h,h,r", [pair, both], _PAIR, True, 1)
    else:
        low = eight_bits((pair & 255).to(tl.uint8), scale, KIND, DTYPE)
        high = eight_bits((pair >> 8 & 255).to(tl.uint8), scale, KIND, DTYPE)
    return tl.reshape(tl.join(low, high), (N, 64 * TILES))


# -- tiles of a weight ---------------------------------------------------------------------------------


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
        found = _of_pairs(codes, _spread(scale, k, WIDE, DTYPE), k, KIND, TILES, N, DTYPE, PTX)
    else:
        HALF: tl.constexpr = WIDE // 2
        BLOCKS: tl.constexpr = 32 * TILES // HALF
        byte, block = tiled_bytes(codes, k // 64, (K - k) // 64, TILES, GROUPS, EVEN), tl.arange(0, BLOCKS)
        of_block = tl.load(scale + k // WIDE + block[None, :])  # beyond the last there are zeros
        of_block = tl.broadcast_to(of_block.to(DTYPE)[:, :, None], (N, BLOCKS, HALF))
        low, high = four_bits(byte, tl.reshape(of_block, (N, 32 * TILES)), table, KIND, DTYPE, PTX)
        found = tl.reshape(tl.permute(tl.join(low, high), (0, 2, 1)), (N, 64 * TILES))
    return found


@triton.jit
def _spread(scale, k, WIDE: tl.constexpr, DTYPE: tl.constexpr):
    """The scales [N, 1] of 8 bits from column `k` on."""
    if WIDE < WHOLE_ROW:
        scale = tl.load(scale + k // WIDE)
    return scale.to(DTYPE)


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


@triton.jit
def rows_at(first, n, O, KIND: tl.constexpr, GROUPS: tl.constexpr):
    """The rows at whose codes `weights_at` begins: `n` [N, 1], or the first ones of groups of 64."""
    if KIND == 2 or KIND == 3:
        found = n
    else:
        found = tl.minimum(first + 64 * tl.arange(0, GROUPS)[:, None], O - 64)
    return found

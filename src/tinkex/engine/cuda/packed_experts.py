# pyright: reportMissingImports=false, reportIndexIssue=false, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
"""Experts whose weights stay in 4 or 8 bits, for few rows of each: decode steps.

The products of `expert_kernels` with the weights expanded in registers, as in `packed_weights`. Passes with
many rows expand a layer's weights instead.

Shapes: T tokens, N rows, E experts, D width, F expert width, I in-features, O out-features, R rank.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tinkex.engine.cuda.expert_kernels import (
    Activation,
    ExpertRows,
    ExpertSite,
    acted,
    add_lora,
    add_mixed_lora,
    given_adapters,
    shrink_row,
    shrink_rows,
    shrinks_inside,
    tile_at,
)
from tinkex.engine.cuda.launch import PDL, cdiv, launched, load_fp32
from tinkex.engine.cuda.packed_weights import (
    KINDS,
    PTX,
    columns_at,
    dense,
    expand,
    of_rows,
    rows_at,
    rows_of,
    suits,
    tiles_of,
    weights_at,
    width_of,
)
from tinkex.engine.torch.quantised import TILE, QuantisedStack, QuantisedWeight

MAX_TILE = 64  # rows of an expert; where there are more, weights are expanded first
_COLUMNS = TILE  # of one program


@launched
@triton.jit(do_not_specialize=["tiles", "column", "each"])
def _gate_up(
    x, codes, scale, values, bias, h, order, cells, tiles, u, table, scales, slots, columns, column, each,
    D, F, K, stride_x, stride_u, split_u, stride_codes, stride_scale, alpha, limit,
    KIND: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr, TILES: tl.constexpr, EVEN: tl.constexpr,
    BIAS: tl.constexpr, CLAMPED: tl.constexpr, LORA: tl.constexpr, MIXED: tl.constexpr,
    SPLITS: tl.constexpr, ASM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """h = the activation of gate and up of a tile's rows, for BLOCK_N columns of both."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    expert, start, count = tile_at(cells, tiles, tl.program_id(1))
    if count > 0:
        dtype: tl.constexpr = x.dtype.element_ty
        m = tl.arange(0, BLOCK_M)
        row, have_m, have_n = (start + m).to(tl.int64), m < count, n < F
        token = tl.load(order + row, mask=have_m, other=0).to(tl.int64) // K
        of_gate = expert.to(tl.int64) * 2 * F + tl.minimum(n, F - 1)[:, None]
        at = expert.to(tl.int64) * 2 * F + rows_at(tl.program_id(0) * BLOCK_N, n[:, None], F, KIND, 1)
        gate_codes, up_codes = codes + at * stride_codes, codes + (at + F) * stride_codes
        gate_scale = of_rows(scale + of_gate // HIGH * stride_scale, KIND, WIDE)
        up_scale = of_rows(scale + (of_gate + F) // HIGH * stride_scale, KIND, WIDE)
        gate, up = tl.zeros((BLOCK_N, BLOCK_M), tl.float32), tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        left = x + token[:, None] * stride_x
        for k in range(0, D, 64 * TILES):
            right = columns_at(left, have_m[:, None], k, D, KIND, WIDE, TILES, EVEN)
            weights = weights_at(gate_codes, gate_scale, values, k, D, KIND, WIDE, TILES, 1, EVEN, dtype, ASM)
            gate = tl.dot(weights, right, gate)
            weights = weights_at(up_codes, up_scale, values, k, D, KIND, WIDE, TILES, 1, EVEN, dtype, ASM)
            up = tl.dot(weights, right, up)
        gate, up = tl.trans(gate), tl.trans(up)
        if BIAS:
            place = bias + expert * 2 * F + n
            gate, up = gate + load_fp32(place, have_n)[None, :], up + load_fp32(place + F, have_n)[None, :]
        if LORA:
            slot = tl.load(slots + token, mask=have_m, other=-1)
            where = (table, scales, columns, column)
            if MIXED:
                gate = add_mixed_lora(
                    gate, u, token, slot, stride_u, split_u, where, 0, expert, each, F, n, have_n,
                    SPLITS, BLOCK_M, BLOCK_R, dtype,
                )  # fmt: skip
                up = add_mixed_lora(
                    up, u, token, slot, stride_u, split_u, where, 1, expert, each, F, n, have_n,
                    SPLITS, BLOCK_M, BLOCK_R, dtype,
                )  # fmt: skip
            else:
                gate = add_lora(
                    gate, u, token, slot, stride_u, split_u, where, 0, expert, each, F, n, have_n,
                    SPLITS, BLOCK_M, BLOCK_R, dtype,
                )  # fmt: skip
                up = add_lora(
                    up, u, token, slot, stride_u, split_u, where, 1, expert, each, F, n, have_n,
                    SPLITS, BLOCK_M, BLOCK_R, dtype,
                )  # fmt: skip
        gate, up = gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32)
        place = h + row[:, None] * F + n[None, :]
        tl.store(place, acted(gate, up, alpha, limit, CLAMPED), mask=have_m[:, None] & have_n[None, :])


@launched
@triton.jit(do_not_specialize=["tiles", "column", "each"])
def _product(
    x, codes, scale, values, bias, y, order, cells, tiles, u, table, scales, slots, columns, column, each,
    size, width, K, stride_u, stride_codes, stride_scale,
    KIND: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr, TILES: tl.constexpr, EVEN: tl.constexpr,
    BIAS: tl.constexpr, SHRINK: tl.constexpr, ASM: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """y[rows, n] = x[rows] · the expert's weight [n, k] + its bias.

    SHRINK: a tile's last programs, one for each row, write u[row] = x[row] · the adapter's matrixᵀ.
    """
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    expert, start, count = tile_at(cells, tiles, tl.program_id(1))
    dtype: tl.constexpr = x.dtype.element_ty
    if tl.program_id(0) * BLOCK_N < width:
        if count > 0:
            m = tl.arange(0, BLOCK_M)
            row, have_m, have_n = (start + m).to(tl.int64), m < count, n < width
            of = expert.to(tl.int64) * width + tl.minimum(n, width - 1)[:, None]
            at = expert.to(tl.int64) * width + rows_at(tl.program_id(0) * BLOCK_N, n[:, None], width, KIND, 1)
            at_codes = codes + at * stride_codes
            at_scale = of_rows(scale + of // HIGH * stride_scale, KIND, WIDE)
            total, left = tl.zeros((BLOCK_N, BLOCK_M), tl.float32), x + row[:, None] * size
            for k in range(0, size, 64 * TILES):
                right = columns_at(left, have_m[:, None], k, size, KIND, WIDE, TILES, EVEN)
                weights = weights_at(
                    at_codes, at_scale, values, k, size, KIND, WIDE, TILES, 1, EVEN, dtype, ASM
                )
                total = tl.dot(weights, right, total)
            total = tl.trans(total)
            if BIAS:
                total += load_fp32(bias + expert * width + n, have_n)[None, :]
            tl.store(y + row[:, None] * width + n[None, :], total, mask=have_m[:, None] & have_n[None, :])
    elif SHRINK:
        one = tl.program_id(0) - tl.cdiv(width, BLOCK_N)
        if one < count:
            row = (start + one).to(tl.int64)
            slot = tl.load(slots + tl.load(order + row) // K)
            if slot >= 0:
                where = (table, scales, columns, column)
                shrink_row(x, u, row, slot, where, expert, each, size, size, stride_u, BLOCK_R, 256, dtype)


# -- launching -----------------------------------------------------------------------------------------


def read_in_place(weight: Tensor | QuantisedStack, rows: ExpertRows) -> QuantisedWeight | None:
    """The codes, if they are best expanded in registers: few rows of each expert, and a form that is read."""
    if not isinstance(weight, QuantisedStack) or rows.tile > MAX_TILE:
        return None
    return weight.whole if suits(weight.whole) else None


def _packed(
    weight: QuantisedWeight, rows: ExpertRows
) -> tuple[tuple[Tensor, Tensor, Tensor], tuple[int, int], dict[str, int]]:
    """A kernel's codes, scale and values; their strides; and its constants, as measured on an H200."""
    codes, scale = rows_of(weight.codes), rows_of(weight.scale)
    tiles = tiles_of(weight, 2 if rows.tile <= 16 else 1)
    constants = {
        "KIND": KINDS.index(weight.kind),
        "HIGH": weight.block[0],
        "WIDE": width_of(weight),
        "TILES": tiles,
        "EVEN": weight.shape[-1] % (TILE * tiles) == 0,
    }
    tensors = codes, scale, codes if weight.table is None else weight.table
    return tensors, (codes.stride(0), scale.stride(0)), constants


def gate_up(
    x_TD: Tensor, weight: QuantisedWeight, bias: Tensor | None, activation: Activation, rows: ExpertRows,
    u: Tensor | None, lora: ExpertSite | None,
) -> Tensor:  # fmt: skip
    """h [N, F]; `u` [S, T, 2R] is the down-projection of the tokens, to be summed over S."""
    (tensors, strides, constants), inner = _packed(weight, rows), weight.shape[1] // 2
    h = x_TD.new_empty(len(rows.order_N), inner)
    given, of_u = given_adapters(lora, "B", x_TD), x_TD[None] if u is None else u
    _gate_up[(cdiv(inner, _COLUMNS), rows.tiles.shape[1])](
        x_TD, *tensors, h if bias is None else bias, h, rows.order_N, rows.tiles, rows.tiles.shape[1], of_u,
        *given.where, x_TD.shape[1], inner, rows.per_token, x_TD.stride(0), of_u.stride(1), of_u.stride(0),
        *strides, activation.alpha, activation.limit, **constants, BIAS=bias is not None,
        CLAMPED=activation.clamped, LORA=lora is not None,
        MIXED=lora is not None and lora.at.table.mixed and rows.tile <= 32,
        SPLITS=1 if u is None else len(u), ASM=PTX, BLOCK_M=rows.tile, BLOCK_N=_COLUMNS, BLOCK_R=given.block,
        num_warps=4, num_stages=3, **PDL,
    )  # fmt: skip
    return h


def product(
    x_NI: Tensor, weight: QuantisedWeight, bias: Tensor | None, rows: ExpertRows, lora: ExpertSite | None
) -> tuple[Tensor, Tensor | None]:
    """Each row through its expert's weight [O, I], plus its bias; and u [N, R], each row times its A."""
    (tensors, strides, constants), (_, out, size) = _packed(weight, rows), weight.shape
    y, given = x_NI.new_empty(len(x_NI), out), given_adapters(lora, "A", x_NI)
    u = None
    if lora is not None and shrinks_inside(x_NI, rows, lora):
        u = x_NI.new_empty(len(x_NI), 16 * cdiv(given.widest, 16))
    of_u, more = y if u is None else u, 0 if u is None else rows.tile
    _product[(cdiv(out, _COLUMNS) + more, rows.tiles.shape[1])](
        x_NI, *tensors, y if bias is None else bias, y, rows.order_N, rows.tiles, rows.tiles.shape[1], of_u,
        *given.where, size, out, rows.per_token, of_u.stride(0), *strides,
        **constants, BIAS=bias is not None, SHRINK=u is not None, ASM=PTX, BLOCK_M=rows.tile,
        BLOCK_N=_COLUMNS, BLOCK_R=given.block, num_warps=4, num_stages=3, **PDL,
    )  # fmt: skip
    return y, shrink_rows(x_NI, rows, lora, "A") if lora is not None and u is None else u


def expanded(stack: Tensor | QuantisedStack, dtype: torch.dtype) -> Tensor:
    """The weights [E, O, I] of a layer's experts; memory is reused from layer to layer."""
    if isinstance(stack, Tensor):
        return stack
    if stack.whole is not None:
        return expand(stack.whole, dtype)
    return torch.stack([dense(matrix, dtype) for matrix in stack])

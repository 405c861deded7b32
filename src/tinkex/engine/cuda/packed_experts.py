# pyright: reportMissingImports=false, reportIndexIssue=false, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
"""Experts whose weights stay in 4 or 8 bits, for few rows of each: decode steps.

The products of `expert_kernels`, with weights dequantised in registers as in `packed_weights`. Passes with
many rows dequantise a layer's weights instead.

Shapes: T tokens, N rows, E experts, D width, F expert width, I in-features, O out-features, R rank.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tinkex.engine.cuda.expert_kernels import Activation, acted, shrinks_inside
from tinkex.engine.cuda.expert_lora import (
    ExpertSite,
    biased_and_adapted,
    given_adapters,
    only_adapter,
    shrink_beside,
    shrink_only,
    shrink_rows,
    tile_at,
)
from tinkex.engine.cuda.expert_routing import ExpertRows
from tinkex.engine.cuda.launch import PDL, cdiv, launched, load_fp32
from tinkex.engine.cuda.packed_codes import PTX, columns_at, of_rows, rows_at, weights_at
from tinkex.engine.cuda.packed_weights import KINDS, dense, dequantise, rows_of, suits, tiles_of, width_of
from tinkex.engine.torch.quantised import TILE, QuantisedStack, QuantisedWeight

MAX_TILE = 64  # rows of an expert; where there are more, weights are dequantised first
_COLUMNS = TILE  # of one program
_PROGRAMS = 720  # that keep the device busy


@launched
@triton.jit(do_not_specialize=["tiles", "column", "each"])
def _gate_up(
    x, codes, scale, values, bias, h, order, cells, tiles, u, table, scales, slots, columns, column, each,
    D, F, K, stride_x, stride_u, split_u, split_h, stride_codes, stride_scale, alpha, limit,
    KIND: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr, TILES: tl.constexpr, EVEN: tl.constexpr,
    BIAS: tl.constexpr, CLAMPED: tl.constexpr, LORA: tl.constexpr, MIXED: tl.constexpr,
    SPLITS: tl.constexpr, PARTS: tl.constexpr, ASM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """h = the activation of gate and up of a tile's rows, for BLOCK_N columns of both.

    PARTS > 1: gate and up [N, 2F] themselves, over one split of the features each.
    """
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
        split = tl.program_id(2)
        span = tl.cdiv(tl.cdiv(D, 64 * TILES), PARTS) * 64 * TILES
        for k in range(split * span, tl.minimum((split + 1) * span, D), 64 * TILES):
            right = columns_at(left, have_m[:, None], k, D, KIND, WIDE, TILES, EVEN)
            weights = weights_at(gate_codes, gate_scale, values, k, D, KIND, WIDE, TILES, 1, EVEN, dtype, ASM)
            gate = tl.dot(weights, right, gate)
            weights = weights_at(up_codes, up_scale, values, k, D, KIND, WIDE, TILES, 1, EVEN, dtype, ASM)
            up = tl.dot(weights, right, up)
        gate, up = tl.trans(gate), tl.trans(up)
        have = have_m[:, None] & have_n[None, :]
        if PARTS > 1:
            place = h + split * split_h + row[:, None] * 2 * F + n[None, :]
            tl.store(place, gate, mask=have)
            tl.store(place + F, up, mask=have)
        else:
            where, strides = (table, scales, columns, column), (stride_u, split_u)
            gate, up = biased_and_adapted(
                gate, up, bias, u, slots, token, have_m, where, strides, expert, each, F, n, have_n,
                BIAS, LORA, MIXED, SPLITS, BLOCK_M, BLOCK_R, dtype,
            )  # fmt: skip
            gate, up = gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32)
            tl.store(h + row[:, None] * F + n[None, :], acted(gate, up, alpha, limit, CLAMPED), mask=have)


@launched
@triton.jit(do_not_specialize=["tiles", "column", "each"])
def _activate(
    parts, bias, h, order, cells, tiles, u, table, scales, slots, columns, column, each, F, K, stride_u,
    split_u, split_h, alpha, limit, BIAS: tl.constexpr, CLAMPED: tl.constexpr, LORA: tl.constexpr,
    MIXED: tl.constexpr, SPLITS: tl.constexpr, PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """h of a tile's rows from the splits of gate and up."""
    n, m = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_M)
    expert, start, count = tile_at(cells, tiles, tl.program_id(1))
    if count > 0:
        dtype: tl.constexpr = h.dtype.element_ty
        row, have_m, have_n = (start + m).to(tl.int64), m < count, n < F
        have = have_m[:, None] & have_n[None, :]
        token = tl.load(order + row, mask=have_m, other=0).to(tl.int64) // K
        gate, up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32), tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for part in tl.static_range(PARTS):
            place = parts + part * split_h + row[:, None] * 2 * F + n[None, :]
            gate, up = gate + load_fp32(place, have), up + load_fp32(place + F, have)
        where, strides = (table, scales, columns, column), (stride_u, split_u)
        gate, up = biased_and_adapted(
            gate, up, bias, u, slots, token, have_m, where, strides, expert, each, F, n, have_n,
            BIAS, LORA, MIXED, SPLITS, BLOCK_M, BLOCK_R, dtype,
        )  # fmt: skip
        gate, up = gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32)
        tl.store(h + row[:, None] * F + n[None, :], acted(gate, up, alpha, limit, CLAMPED), mask=have)


@launched
@triton.jit(do_not_specialize=["tiles", "row_tiles", "column", "each"])
def _product(
    x, codes, scale, values, bias, y, order, cells, tiles, u, table, scales, slots, columns, column, each,
    row_cells, row_tiles, size, width, K, stride_u, split_y, stride_codes, stride_scale,
    KIND: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr, TILES: tl.constexpr, EVEN: tl.constexpr,
    BIAS: tl.constexpr, SHRINK: tl.constexpr, MIXED: tl.constexpr, HELD: tl.constexpr,
    PARTS: tl.constexpr, ASM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """y[rows, n] = x[rows] · the expert's weight [n, k] + its bias.

    SHRINK: a tile's last programs write u[row] = x[row] · the adapter's matrixᵀ.
    """
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    dtype: tl.constexpr = x.dtype.element_ty
    if HELD > 0:
        where = (table, scales, columns, column)
        slot, rank, matrix_a, _, _ = only_adapter(where, (row_cells, row_tiles), 1, HELD, dtype)
    expert, start, count = tile_at(cells, tiles, tl.program_id(1))
    if tl.program_id(0) * BLOCK_N < width:
        if count > 0:
            m = tl.arange(0, BLOCK_M)
            row, have_m, have_n = (start + m).to(tl.int64), m < count, n < width
            of = expert.to(tl.int64) * width + tl.minimum(n, width - 1)[:, None]
            at = expert.to(tl.int64) * width + rows_at(tl.program_id(0) * BLOCK_N, n[:, None], width, KIND, 1)
            at_codes = codes + at * stride_codes
            at_scale = of_rows(scale + of // HIGH * stride_scale, KIND, WIDE)
            total, left = tl.zeros((BLOCK_N, BLOCK_M), tl.float32), x + row[:, None] * size
            split = tl.program_id(2)
            span = tl.cdiv(tl.cdiv(size, 64 * TILES), PARTS) * 64 * TILES
            for k in range(split * span, tl.minimum((split + 1) * span, size), 64 * TILES):
                right = columns_at(left, have_m[:, None], k, size, KIND, WIDE, TILES, EVEN)
                weights = weights_at(
                    at_codes, at_scale, values, k, size, KIND, WIDE, TILES, 1, EVEN, dtype, ASM
                )
                total = tl.dot(weights, right, total)
            total = tl.trans(total)
            if BIAS:
                total += load_fp32(bias + expert * width + n, have_n & (split == 0))[None, :]
            place = y + split * split_y + row[:, None] * width + n[None, :]
            tl.store(place, total, mask=have_m[:, None] & have_n[None, :])
    elif SHRINK and tl.program_id(2) == 0:
        one = tl.program_id(0) - tl.cdiv(width, BLOCK_N)
        if HELD > 0:
            if count > 0:
                shrink_only(
                    x, u, order, slots, slot, rank, matrix_a, one, expert, start, count, each, size, K,
                    stride_u, BLOCK_M, BLOCK_R,
                )  # fmt: skip
        else:
            shrink_beside(
                x, u, order, slots, (table, scales, columns, column), one, expert, start, count, each, size,
                K, stride_u, MIXED, BLOCK_M, BLOCK_R,
            )  # fmt: skip


# -- launching -----------------------------------------------------------------------------------------


def read_in_place(weight: Tensor | QuantisedStack, rows: ExpertRows) -> QuantisedWeight | None:
    """The codes, if it is best to dequantise them in registers: few rows of each expert, a form we read."""
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


def _parts(programs: int, rows: ExpertRows) -> int:
    """Splits of a sum: where programs are few, dequantising codes takes longer than reading them."""
    return 1 if rows.tile > 16 else next((parts for parts in (4, 2) if parts * programs <= _PROGRAMS), 1)


def gate_up(
    x_TD: Tensor, weight: QuantisedWeight, bias: Tensor | None, activation: Activation, rows: ExpertRows,
    u: Tensor | None, lora: ExpertSite | None,
) -> Tensor:  # fmt: skip
    """h [N, F]; `u` [S, T, 2R] is the down-projection of the tokens, to be summed over S."""
    (tensors, strides, constants), inner = _packed(weight, rows), weight.shape[1] // 2
    count, grid = len(rows.order_N), (cdiv(inner, _COLUMNS), rows.tiles.shape[1])
    h, parts = x_TD.new_empty(count, inner), _parts(grid[0] * grid[1], rows)
    split = h if parts == 1 else x_TD.new_empty(parts, count, 2 * inner, dtype=torch.float32)
    given, of_u = given_adapters(lora, "B", x_TD), x_TD[None] if u is None else u
    of_bias, of_rows = h if bias is None else bias, (rows.order_N, rows.tiles, rows.tiles.shape[1])
    adapted = {
        "BIAS": bias is not None,
        "CLAMPED": activation.clamped,
        "LORA": lora is not None,
        "MIXED": given.mixed and rows.tile <= 32,
        "SPLITS": 1 if u is None else len(u),
        "PARTS": parts,
    }
    blocks = {"BLOCK_M": rows.tile, "BLOCK_N": _COLUMNS, "BLOCK_R": given.block, "num_warps": 4, **PDL}
    acting = activation.alpha, activation.limit
    _gate_up[(*grid, parts)](
        x_TD, *tensors, of_bias, split, *of_rows, of_u, *given.where, x_TD.shape[1], inner, rows.per_token,
        x_TD.stride(0), of_u.stride(1), of_u.stride(0), split.stride(0), *strides, *acting, **constants,
        **adapted, ASM=PTX, **blocks, num_stages=3,
    )  # fmt: skip
    if parts > 1:
        _activate[grid](
            split, of_bias, h, *of_rows, of_u, *given.where, inner, rows.per_token, of_u.stride(1),
            of_u.stride(0), split.stride(0), *acting, **adapted, **blocks,
        )  # fmt: skip
    return h


def product(
    x_NI: Tensor, weight: QuantisedWeight, bias: Tensor | None, rows: ExpertRows, lora: ExpertSite | None
) -> tuple[Tensor, Tensor | None]:
    """Each row through its expert's weight [O, I], plus its bias; and u [N, R], each row times its A.

    The result may be in splits [S, N, O] in fp32, to be summed over S.
    """
    (tensors, strides, constants), (_, out, size) = _packed(weight, rows), weight.shape
    given, u, blocks, tiles = given_adapters(lora, "A", x_NI), None, cdiv(out, _COLUMNS), rows.tiles.shape[1]
    parts, more = _parts(blocks * tiles, rows), 0
    y = x_NI.new_empty(parts, len(x_NI), out, dtype=x_NI.dtype if parts == 1 else torch.float32)
    if lora is not None and shrinks_inside(x_NI, rows, lora):
        u = x_NI.new_empty(len(x_NI), 16 * cdiv(given.widest, 16))
        more = rows.tile if given.mixed else cdiv(given.widest, given.block)
    of_u = y[0] if u is None else u
    _product[(blocks + more, tiles, parts)](
        x_NI, *tensors, y if bias is None else bias, y, rows.order_N, rows.tiles, tiles, of_u,
        *given.where, *given.of_rows, size, out, rows.per_token, of_u.stride(0), y.stride(0), *strides,
        **constants, BIAS=bias is not None, SHRINK=u is not None, MIXED=given.mixed,
        HELD=0 if u is None else given.held(rows), PARTS=parts, ASM=PTX, BLOCK_M=rows.tile,
        BLOCK_N=_COLUMNS, BLOCK_R=given.block, num_warps=4, num_stages=3, **PDL,
    )  # fmt: skip
    u = shrink_rows(x_NI, rows, lora, "A") if lora is not None and u is None else u
    return y[0] if parts == 1 else y, u


def dequantised(stack: Tensor | QuantisedStack, dtype: torch.dtype) -> Tensor:
    """The weights [E, O, I] of a layer's experts; memory is reused from layer to layer."""
    if isinstance(stack, Tensor):
        return stack
    if stack.whole is not None:
        return dequantise(stack.whole, dtype)
    return torch.stack([dense(matrix, dtype) for matrix in stack])

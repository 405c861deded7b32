# pyright: reportMissingImports=false, reportIndexIssue=false, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
"""Kernels of a mixture of experts: grouped products with adapters, and combining.

Rows are (token, expert) pairs sorted by expert. A tile is rows of one expert. Products read a token's row
where it lies, so rows are never copied, and no kernel needs a count on the host: tiles that turn out empty do
nothing. `engine.torch.models.moe` computes the same in plain torch.

Shapes: T tokens, K experts of a token, N = T·K rows, E experts, D width, F expert width, R rank.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tinkex.engine.cuda.expert_lora import (
    ExpertSite,
    GivenAdapters,
    add_lora,
    biased_and_adapted,
    given_adapters,
    matrix_of,
    multiply,
    only_adapter,
    shrink_beside,
    shrink_only,
    shrink_rows,
    tile_at,
)
from tinkex.engine.cuda.expert_routing import FEW, ExpertRows
from tinkex.engine.cuda.launch import PDL, cdiv, launched, load, load_fp32, power_of_2, wait_for_previous
from tinkex.engine.cuda.lora_kernels import scaled


class Activation(NamedTuple):
    """SwiGLU, or if `clamped` that of `architecture.ClampedSwiGlu`."""

    clamped: bool = False
    alpha: float = 1.0
    limit: float = 0.0


SWIGLU = Activation()


class _Tile(NamedTuple):
    columns: int
    features: int  # of one iteration
    warps: int
    stages: int


# As measured on an H200, by rows of a tile: SwiGLU's two products, and other products.
GATED = {
    16: _Tile(32, 128, 4, 4),
    32: _Tile(64, 128, 4, 3),
    64: _Tile(64, 64, 4, 5),
    128: _Tile(128, 64, 8, 4),
}
PLAIN = {
    16: _Tile(64, 256, 4, 3),
    32: _Tile(64, 128, 4, 3),
    64: _Tile(128, 64, 4, 4),
    128: _Tile(256, 64, 8, 3),
}


# -- kernels -------------------------------------------------------------------------------------------


@triton.jit
def acted(gate, up, alpha, limit, CLAMPED: tl.constexpr):
    """silu(gate) · up, or (up + 1) · gate · sigmoid(alpha · gate) of both within the limit."""
    if CLAMPED:
        gate, up = tl.minimum(gate, limit), tl.minimum(tl.maximum(up, -limit), limit) + 1
        return up * gate * tl.sigmoid(alpha * gate)
    else:
        return gate * tl.sigmoid(gate) * up


@launched
@triton.jit(do_not_specialize=["tiles", "row_tiles", "column", "each"])
def _gate_up(
    x, weight, bias, gate_up, h, order, cells, tiles, u, table, scales, slots, columns, column, each,
    row_cells, row_tiles, D, F, K, stride_x, stride_u, split_u, alpha, limit, BIAS: tl.constexpr,
    CLAMPED: tl.constexpr, KEEP: tl.constexpr, LORA: tl.constexpr, MIXED: tl.constexpr, HELD: tl.constexpr,
    SPLITS: tl.constexpr, EVEN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """h of a tile's rows, for BLOCK_N columns of gate and up; KEEP: and gate and up themselves."""
    first = tl.program_id(0) * BLOCK_N
    dtype: tl.constexpr = x.dtype.element_ty
    where, strides = (table, scales, columns, column), (stride_u, split_u)
    if HELD > 0:
        slot, rank, gate_b, up_b, scale = only_adapter(where, (row_cells, row_tiles), 2, HELD, dtype)
    expert, start, count = tile_at(cells, tiles, tl.program_id(1))
    if count > 0:
        m, n = tl.arange(0, BLOCK_M), first + tl.arange(0, BLOCK_N)
        row, have_m, have_n = (start + m).to(tl.int64), m < count, n < F
        token = tl.load(order + row, mask=have_m, other=0).to(tl.int64) // K
        matrix = weight + expert.to(tl.int64) * 2 * F * D
        gate, up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32), tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        left = x + token[:, None] * stride_x
        right = matrix + n[None, :] * D
        if HELD > 0:  # what is loaded here is there when the product ends
            r, step = tl.arange(0, BLOCK_R), expert.to(tl.int64) * rank * each
            have_r, have_u = (r < rank)[:, None] & have_n[None, :], have_m[:, None] & (r < rank)[None, :]
            b_gate = load(gate_b + step + r[:, None] * F + n[None, :], have_r)
            b_up = load(up_b + step + r[:, None] * F + n[None, :], have_r)
            place = u + token[:, None] * stride_u + r[None, :]
            of_gate, of_up = load(place, have_u), load(place + rank, have_u)
            of_rows = tl.load(slots + token, mask=have_m, other=-1)
        for k in range(0, D, BLOCK_K):
            at = k + tl.arange(0, BLOCK_K)
            have_k = (at < D) | EVEN
            a = load(left + at[None, :], have_m[:, None] & have_k[None, :])
            both = have_n[None, :] & have_k[:, None]
            gate = tl.dot(a, load(right + at[:, None], both), gate)
            up = tl.dot(a, load(right + F * D + at[:, None], both), up)
        gate, up = biased_and_adapted(
            gate, up, bias, u, slots, token, have_m, where, strides, expert, each, F, n, have_n,
            BIAS, LORA and HELD == 0, MIXED, SPLITS, BLOCK_M, BLOCK_R, dtype,
        )  # fmt: skip
        if HELD > 0:
            mine = (of_rows == slot)[:, None]
            gate = tl.dot(scaled(tl.where(mine, of_gate.to(tl.float32), 0.0), scale, dtype), b_gate, gate)
            up = tl.dot(scaled(tl.where(mine, of_up.to(tl.float32), 0.0), scale, dtype), b_up, up)
        have = have_m[:, None] & have_n[None, :]
        gate, up = gate.to(dtype), up.to(dtype)
        if KEEP:
            place = gate_up + row[:, None] * 2 * F + n[None, :]
            tl.store(place, gate, mask=have)
            tl.store(place + F, up, mask=have)
        gate, up = gate.to(tl.float32), up.to(tl.float32)
        tl.store(h + row[:, None] * F + n[None, :], acted(gate, up, alpha, limit, CLAMPED), mask=have)


@launched
@triton.jit(do_not_specialize=["tiles", "row_tiles", "column", "each"])
def _product(
    x, weight, bias, y, order, cells, tiles, u, table, scales, slots, columns, column, each, row_cells,
    row_tiles, size, width, K, stride_e, stride_n, stride_k, stride_u, BIAS: tl.constexpr,
    GATHER: tl.constexpr, EXPAND: tl.constexpr, SHRINK: tl.constexpr, MIXED: tl.constexpr, HELD: tl.constexpr,
    EVEN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
):  # fmt: skip
    """y[rows, n] = x[rows] · the expert's weight [n, k] + its bias. GATHER: x has a row for each token.

    EXPAND adds scale · u[token] · the expert's matrix. SHRINK: a tile's last programs write
    u[row] = x[row] · the expert's matrixᵀ.
    """
    first = tl.program_id(0) * BLOCK_N
    dtype: tl.constexpr = x.dtype.element_ty
    if HELD > 0:
        where = (table, scales, columns, column)
        slot, rank, matrix_a, _, _ = only_adapter(where, (row_cells, row_tiles), 1, HELD, dtype)
    expert, start, count = tile_at(cells, tiles, tl.program_id(1))
    if first < width:
        if count > 0:
            m, n = tl.arange(0, BLOCK_M), first + tl.arange(0, BLOCK_N)
            row, have_m, have_n = (start + m).to(tl.int64), m < count, n < width
            token = row
            if GATHER:
                token = tl.load(order + row, mask=have_m, other=0).to(tl.int64) // K
            total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            matrix = weight + expert.to(tl.int64) * stride_e
            total = multiply(
                total, x, token, have_m, size, matrix, n, have_n, stride_n, stride_k, size, EVEN, BLOCK_K
            )
            if BIAS:
                total += load_fp32(bias + expert * width + n, have_n)[None, :]
            if EXPAND:
                slot, where = tl.load(slots + token, mask=have_m, other=-1), (table, scales, columns, column)
                total = add_lora(
                    total, u, token, slot, stride_u, 0, where, 0, expert, each, width, n, have_n,
                    1, BLOCK_M, BLOCK_R, dtype,
                )  # fmt: skip
            tl.store(y + row[:, None] * width + n[None, :], total, mask=have_m[:, None] & have_n[None, :])
    elif SHRINK:
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


@launched
@triton.jit(do_not_specialize=["column"])
def _combine(
    y, u, place, weights, out, out_u, table, scales, slots, columns, column, D, width_u, split,
    K: tl.constexpr, PARTS: tl.constexpr, WEIGHED: tl.constexpr, EXPAND: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """The sum over a token's K rows of y, and of u: the last programs of a token have u.

    EXPAND: no program has u; all add scale · u · B instead.
    """
    token, blocks = tl.program_id(0).to(tl.int64), tl.cdiv(D, BLOCK)
    wait_for_previous()
    block = tl.program_id(1)
    at = block * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    if block < blocks:
        if EXPAND:  # first: what is loaded waits for three loads before it
            dtype: tl.constexpr = out.dtype.element_ty
            slot, where, m = tl.load(slots + token), (table, scales, columns, column), tl.arange(0, 16)
            have, r = slot >= 0, tl.arange(0, BLOCK_R)
            slot = tl.where(have, slot, 0)
            rank, matrix = matrix_of(where, 0, slot, slot * 0, 0, dtype)
            rank, scale = tl.where(have, rank, 0), tl.load(scales + slot)
            held = load(matrix + r[:, None] * D + at[None, :], (r < rank)[:, None] & (at < D)[None, :])
        for k in tl.static_range(K):
            row = tl.load(place + token * K + k).to(tl.int64)
            one = load_fp32(y + row * D + at, at < D)
            for part in tl.static_range(1, PARTS):
                one += load_fp32(y + part * split + row * D + at, at < D)
            if PARTS > 1:  # rounded as if the splits had been summed before
                one = one.to(out.dtype.element_ty).to(tl.float32)
            total += one * tl.load(weights + token * K + k).to(tl.float32) if WEIGHED else one
        if EXPAND:
            # a product as in `lora_kernels.expand`, whose first row is used: summed in the same order
            added = tl.where(m[:, None] == 0, total.to(dtype).to(tl.float32)[None, :], 0.0)
            for first in range(0, rank, BLOCK_R):
                r = first + tl.arange(0, BLOCK_R)
                if first > 0:
                    held = load(
                        matrix + r[:, None] * D + at[None, :], (r < rank)[:, None] & (at < D)[None, :]
                    )
                factor = tl.zeros((BLOCK_R,), tl.float32)
                for k in tl.static_range(K):
                    at_u = tl.load(place + token * K + k).to(tl.int64) * width_u
                    of_row = load_fp32(u + at_u + r, r < rank)
                    factor += of_row * tl.load(weights + token * K + k).to(tl.float32)
                left = tl.where(m[:, None] == 0, scaled(factor, scale, dtype)[None, :], 0.0).to(dtype)
                added = tl.dot(left, held, added)
            total = tl.sum(tl.where(m[:, None] == 0, added, 0.0), 0)
        tl.store(out + token * D + at, total, mask=at < D)
    else:
        at -= blocks * BLOCK
        for k in tl.static_range(K):
            row = tl.load(place + token * K + k).to(tl.int64)
            one = load_fp32(u + row * width_u + at, at < width_u)
            total += one * tl.load(weights + token * K + k).to(tl.float32) if WEIGHED else one
        tl.store(out_u + token * width_u + at, total, mask=at < width_u)


# -- launching -----------------------------------------------------------------------------------------


def gate_up(
    x_TD: Tensor, weight: Tensor, rows: ExpertRows, u: Tensor | None, lora: ExpertSite | None, keep: bool,
    bias: Tensor | None = None, activation: Activation = SWIGLU,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """h [N, F], the activation of gate and up, and (if asked to keep them) these [N, 2F].

    `u` [S, T, 2R] is the down-projection of the tokens, to be summed over S.
    """
    inner, n = weight.shape[1] // 2, len(rows.order_N)
    h = x_TD.new_empty(n, inner)
    kept = x_TD.new_empty(n, 2 * inner) if keep else None
    given, shape, width = given_adapters(lora, "B", x_TD), GATED[rows.tile], x_TD.shape[1]
    of_u = x_TD[None] if u is None else u
    _gate_up[(cdiv(inner, shape.columns), rows.tiles.shape[1])](
        x_TD, weight, h if bias is None else bias, h if kept is None else kept, h, rows.order_N, rows.tiles,
        rows.tiles.shape[1],
        of_u, *given.where, *given.of_rows, width, inner, rows.per_token, x_TD.stride(0), of_u.stride(1),
        of_u.stride(0), activation.alpha, activation.limit, BIAS=bias is not None,
        CLAMPED=activation.clamped, KEEP=keep, LORA=lora is not None, MIXED=given.mixed and rows.tile <= 32,
        HELD=given.held(rows) if given.widest <= given.block and of_u.dim() == 3 and len(of_u) == 1 else 0,
        SPLITS=1 if u is None else len(u), EVEN=width % shape.features == 0,
        BLOCK_M=rows.tile, BLOCK_N=shape.columns, BLOCK_K=shape.features, BLOCK_R=given.block,
        num_warps=shape.warps, num_stages=shape.stages, **PDL,
    )  # fmt: skip
    return h, kept


def _multiplied(
    x: Tensor, weight: Tensor, rows: ExpertRows, u: Tensor | None, given: GivenAdapters,
    bias: Tensor | None = None, **flags: bool,
) -> Tensor:  # fmt: skip
    (_, out, size), shape = weight.shape, PLAIN[rows.tile]
    y, of_u = x.new_empty(len(rows.order_N), out), x if u is None else u
    mixed, more = flags["SHRINK"] and given.mixed, 0
    if flags["SHRINK"]:
        more = rows.tile if mixed else cdiv(given.widest, given.block)
    _product[(cdiv(out, shape.columns) + more, rows.tiles.shape[1])](
        x, weight, y if bias is None else bias, y, rows.order_N, rows.tiles, rows.tiles.shape[1], of_u,
        *given.where, *given.of_rows, size, out, rows.per_token, *weight.stride(), of_u.stride(0),
        BIAS=bias is not None, **flags, MIXED=mixed, HELD=given.held(rows) if flags["SHRINK"] else 0,
        EVEN=size % shape.features == 0,
        BLOCK_M=rows.tile, BLOCK_N=shape.columns, BLOCK_K=shape.features, BLOCK_R=given.block,
        num_warps=shape.warps, num_stages=shape.stages, **PDL,
    )  # fmt: skip
    return y


def product(x_N: Tensor, weight: Tensor, rows: ExpertRows, bias: Tensor | None = None) -> Tensor:
    """Each row through its expert's weight [out, in], which may be a transposed view, plus its bias."""
    none = given_adapters(None, "A", x_N)
    return _multiplied(x_N, weight, rows, None, none, bias, GATHER=False, EXPAND=False, SHRINK=False)


def shrinks_inside(x_N: Tensor, rows: ExpertRows, lora: ExpertSite) -> bool:
    """Whether u is faster computed in the product's launch than in a separate one."""
    return rows.tile <= 32 and (lora.at.table.mixed or len(x_N) <= FEW)


def product_and_shrink(
    x_N: Tensor, weight: Tensor, rows: ExpertRows, lora: ExpertSite, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`product`, and u [N, R] = each row times its expert's A."""
    given = given_adapters(lora, "A", x_N)
    if not shrinks_inside(x_N, rows, lora):
        return product(x_N, weight, rows, bias), shrink_rows(x_N, rows, lora, "A")
    u = x_N.new_empty(len(x_N), 16 * cdiv(given.widest, 16))
    return _multiplied(x_N, weight, rows, u, given, bias, GATHER=False, EXPAND=False, SHRINK=True), u


def product_of_tokens(
    x_TD: Tensor, weight: Tensor, rows: ExpertRows, u: Tensor | None, lora: ExpertSite | None
) -> Tensor:
    """Each row's token through its expert's weight, and u [1, T, R] of the token through the expert's A."""
    given = given_adapters(lora, "A", x_TD)
    of_u = None if u is None else u[0]
    return _multiplied(x_TD, weight, rows, of_u, given, GATHER=True, EXPAND=lora is not None, SHRINK=False)


def combine(
    y_ND: Tensor, weight_TK: Tensor | None, rows: ExpertRows, u_N: Tensor | None = None,
    lora: ExpertSite | None = None, dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """The sums over each token's rows of y, which may be in splits [S, N, D], and of u, times the routing
    weights if given.

    With `lora` the sum of u goes through B and is added to that of y instead.
    """
    per_token, (rows_N, width) = rows.per_token, y_ND.shape[-2:]
    tokens, of_u = rows_N // per_token, 0 if u_N is None else u_N.shape[1]
    y_TD = y_ND.new_empty(tokens, width, dtype=dtype or y_ND.dtype)
    given, parts = given_adapters(lora, "B", y_TD), len(y_ND) if y_ND.dim() == 3 else 1
    u_T = None if u_N is None or lora is not None else u_N.new_empty(tokens, of_u)
    block = min(1024 if lora is None else 256, power_of_2(width))
    _combine[(tokens, cdiv(width, block) + (0 if u_T is None else cdiv(of_u, block)))](
        y_ND, y_ND if u_N is None else u_N, rows.place_N, y_ND if weight_TK is None else weight_TK, y_TD,
        y_TD if u_T is None else u_T, *given.where[:5], width, of_u, rows_N * width, K=per_token, PARTS=parts,
        WEIGHED=weight_TK is not None, EXPAND=lora is not None, BLOCK=block, BLOCK_R=given.block,
        num_warps=4, **PDL,
    )  # fmt: skip
    return y_TD, u_T

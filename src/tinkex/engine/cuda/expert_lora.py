# pyright: reportMissingImports=false, reportIndexIssue=false, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
"""Adapters on experts: the parts of kernels that multiply with an expert's A and B, and u of every row.

A tile is rows of one expert. It may have rows of several adapters, which are taken one after the other.
Knows no frozen weight; `expert_kernels` and `packed_experts` have the products.

Shapes: T tokens, K experts of a token, N = T·K rows, F expert width, R rank, P parts.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from tinkex.engine.cuda.adapter_table import SiteAdapters
from tinkex.engine.cuda.expert_routing import ExpertRows
from tinkex.engine.cuda.launch import PDL, cdiv, launched, load, load_fp32, power_of_2, wait_for_previous
from tinkex.engine.cuda.lora_kernels import load_u, scaled

_NONE = tl.constexpr(1 << 30)  # above every slot


class ExpertSite(NamedTuple):
    """Adapters of experts at one site. `slots_T` is each token's slot in the table; -1: none."""

    at: SiteAdapters
    slots_T: Tensor


class GivenAdapters(NamedTuple):
    """Adapters as arguments of kernels."""

    where: tuple[object, ...]  # table, scales, slots, columns, column, each
    widest: int
    parts: int
    mixed: bool
    of_rows: tuple[object, int]  # the cells of `RowTiles`, and how many there are

    @property
    def block(self) -> int:
        return max(16, min(64, power_of_2(self.widest)))

    def held(self, rows: ExpertRows) -> int:
        """BLOCK of `only_adapter` where rows are few and have one adapter, else 0."""
        tiles = power_of_2(max(1, self.of_rows[1]))
        return tiles if self.of_rows[1] and not self.mixed and rows.tile <= 16 and tiles <= 64 else 0


def given_adapters(lora: ExpertSite | None, side: str, like: Tensor) -> GivenAdapters:
    if lora is None:
        return GivenAdapters((like, like, like, 0, 0, 0), 16, 1, False, (like, 0))
    at, table = lora.at, lora.at.table
    of, each = (at.a, at.in_features * len(at.outs)) if side == "A" else (at.b, sum(at.outs))
    where = (table.addresses, table.scales, lora.slots_T, table.addresses.shape[1], of.column, each)
    cells = at.tiles.cells
    return GivenAdapters(where, table.widest, len(of.sizes), table.mixed, (cells, cells.shape[1]))


# -- parts of kernels ----------------------------------------------------------------------------------


@triton.jit
def tile_at(cells, tiles, tile):
    """A tile's expert, first row and number of rows; no kernel that wrote them is still running."""
    wait_for_previous()
    return tl.load(cells + tile), tl.load(cells + tiles + tile), tl.load(cells + 2 * tiles + tile)


@triton.jit
def multiply(
    total, x, row, have_m, stride_x, weight, n, have_n, stride_n, stride_k, size,
    EVEN: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """total + x[row] · weight[n]ᵀ. EVEN: the size is a multiple of BLOCK_K."""
    left, right = x + row[:, None] * stride_x, weight + n[None, :] * stride_n
    for k in range(0, size, BLOCK_K):
        at = k + tl.arange(0, BLOCK_K)
        if EVEN:
            a = load(left + at[None, :], have_m[:, None])
            b = load(right + at[:, None] * stride_k, have_n[None, :])
        else:
            have_k = at < size
            a = load(left + at[None, :], have_m[:, None] & have_k[None, :])
            b = load(right + at[:, None] * stride_k, have_n[None, :] & have_k[:, None])
        total = tl.dot(a, b, total)
    return total


@triton.jit
def _next_slot(slot, after):
    """The smallest of the rows' slots above `after`."""
    return tl.min(tl.where(slot > after, slot, _NONE), 0)


@triton.jit
def matrix_of(where, part, slot, expert, each, DTYPE: tl.constexpr):
    """The rank of a slot's adapter (0: it has no such matrix), and one expert's matrix of `each` · rank."""
    table, _, columns, column = where
    rank = tl.load(table + slot * columns).to(tl.int32)
    address = tl.load(table + slot * columns + column + part)
    matrix = address.to(tl.pointer_type(DTYPE)) + expert.to(tl.int64) * rank * each
    return tl.where(address != 0, rank, 0), matrix


@triton.jit
def add_lora(
    total, u, token, slot, stride_u, split_u, where, part, expert, each, width, n, have_n,
    SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """total + scale · u[token, part] · the expert's matrix [R, width], by the adapter of each row."""
    _, scales, _, _ = where
    current = _next_slot(slot, -1)
    while current < _NONE:
        rank, matrix = matrix_of(where, part, current, expert, each, DTYPE)
        scale, mine = tl.load(scales + current), slot == current
        for r in range(0, rank, BLOCK_R):
            at = r + tl.arange(0, BLOCK_R)
            right = load(matrix + at[:, None] * width + n[None, :], (at < rank)[:, None] & have_n[None, :])
            place = u + token[:, None] * stride_u + part * rank + at[None, :]
            left = load_u(place, mine[:, None] & (at < rank)[None, :], split_u, SPLITS, BLOCK_M, BLOCK_R)
            total = tl.dot(scaled(left, scale, DTYPE), right, total)
        current = _next_slot(slot, current)
    return total


@triton.jit
def add_mixed_lora(
    total, u, token, slot, stride_u, split_u, where, part, expert, each, width, n, have_n,
    SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """`add_lora` for rows of many adapters: every row reads its own matrix, and none waits for another."""
    table, scales, columns, column = where
    mine = slot >= 0
    at = table + tl.where(mine, slot, 0) * columns
    rank = tl.load(at, mask=mine, other=0).to(tl.int32)
    address = tl.load(at + column + part, mask=mine, other=0)
    rank = tl.where(address != 0, rank, 0)
    matrix = address.to(tl.pointer_type(DTYPE)) + expert.to(tl.int64) * rank * each
    scale = tl.load(scales + tl.where(mine, slot, 0), mask=mine, other=0.0)
    added = tl.zeros(total.shape, tl.float32)
    for r in range(tl.max(rank, 0)):
        have = r < rank
        factor = tl.zeros((BLOCK_M,), tl.float32)
        for split in tl.static_range(SPLITS):
            factor += load_fp32(u + split * split_u + token * stride_u + part * rank + r, have)
        factor = scaled(factor, scale, DTYPE).to(tl.float32)
        right = load_fp32(matrix[:, None] + r * width + n[None, :], have[:, None] & have_n[None, :])
        added += factor[:, None] * right
    return total + added


@triton.jit
def only_adapter(where, of_rows, PARTS: tl.constexpr, BLOCK: tl.constexpr, DTYPE: tl.constexpr):
    """The slot, rank, matrices of expert 0 and scale of the one adapter that rows have, or have not.

    `of_rows` are the cells of `RowTiles` and how many there are, at most BLOCK. They and the tables do not
    change within a step: so a kernel calls this before it waits, and has less to wait for afterwards.
    """
    cells, tiles = of_rows
    _, scales, _, _ = where
    at = tl.arange(0, BLOCK)
    slot = tl.load(cells + at, mask=at < tiles, other=0)
    used = tl.load(cells + 2 * tiles + at, mask=at < tiles, other=0) > 0
    slot = tl.min(tl.where(used, slot, _NONE), 0)  # rows without an adapter have the last slot, or none
    slot = tl.where(slot < _NONE, slot, 0)
    rank, first = matrix_of(where, 0, slot, slot * 0, 0, DTYPE)
    second = first
    if PARTS > 1:
        _, second = matrix_of(where, 1, slot, slot * 0, 0, DTYPE)
    return slot, rank, first, second, tl.load(scales + slot)


@triton.jit
def shrink_only(
    x, u, order, slots, slot, rank, matrix, block, expert, start, count, each, width, K, stride_u,
    BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """`shrink_tile` of the one adapter that `only_adapter` has found."""
    m, r = tl.arange(0, BLOCK_M), block * BLOCK_R + tl.arange(0, BLOCK_R)
    row, have_m, have_r = (start + m).to(tl.int64), m < count, r < rank
    token = tl.load(order + row, mask=have_m, other=0).to(tl.int64) // K
    of_rows = tl.load(slots + token, mask=have_m, other=-1)
    matrix += expert.to(tl.int64) * rank * each
    total = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
    total = multiply(total, x, row, have_m, width, matrix, r, have_r, width, 1, width, False, 256)
    mine = (of_rows == slot)[:, None] & have_r[None, :]
    tl.store(u + row[:, None] * stride_u + r[None, :], total, mask=mine)


@triton.jit
def biased_and_adapted(
    gate, up, bias, u, slots, token, have_m, where, strides, expert, each, F, n, have_n,
    BIAS: tl.constexpr, LORA: tl.constexpr, MIXED: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """The frozen products of gate and up, plus an expert's biases, plus the adapters' part."""
    if BIAS:
        place = bias + expert * 2 * F + n
        gate, up = gate + load_fp32(place, have_n)[None, :], up + load_fp32(place + F, have_n)[None, :]
    if LORA:
        slot = tl.load(slots + token, mask=have_m, other=-1)
        stride_u, split_u = strides
        if MIXED:
            gate = add_mixed_lora(
                gate, u, token, slot, stride_u, split_u, where, 0, expert, each, F, n, have_n,
                SPLITS, BLOCK_M, BLOCK_R, DTYPE,
            )  # fmt: skip
            up = add_mixed_lora(
                up, u, token, slot, stride_u, split_u, where, 1, expert, each, F, n, have_n,
                SPLITS, BLOCK_M, BLOCK_R, DTYPE,
            )  # fmt: skip
        else:
            gate = add_lora(
                gate, u, token, slot, stride_u, split_u, where, 0, expert, each, F, n, have_n,
                SPLITS, BLOCK_M, BLOCK_R, DTYPE,
            )  # fmt: skip
            up = add_lora(
                up, u, token, slot, stride_u, split_u, where, 1, expert, each, F, n, have_n,
                SPLITS, BLOCK_M, BLOCK_R, DTYPE,
            )  # fmt: skip
    return gate, up


@triton.jit
def shrink_row(
    x, u, row, slot, where, expert, each, width, stride_x, stride_u,
    BLOCK_R: tl.constexpr, BLOCK_F: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """u[row] = x[row] · the expert's matrix [R, width]ᵀ, for one row."""
    rank, matrix = matrix_of(where, 0, slot, expert, each, DTYPE)
    for first in range(0, rank, BLOCK_R):
        r = first + tl.arange(0, BLOCK_R)
        total = tl.zeros((BLOCK_R,), tl.float32)
        for k in range(0, width, BLOCK_F):
            at = k + tl.arange(0, BLOCK_F)
            left = load_fp32(x + row * stride_x + at, at < width)
            right = load_fp32(
                matrix + r[:, None] * width + at[None, :], (r < rank)[:, None] & (at < width)[None, :]
            )
            total += tl.sum(left[None, :] * right, 1)
        tl.store(u + row * stride_u + r, total, mask=r < rank)


@triton.jit
def shrink_tile(
    x, u, order, slots, where, part, block, expert, start, count, each, width, K, stride_x, stride_u,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """BLOCK_R columns of u[rows, part] = x[rows, part's columns] · the expert's matrix [R, width]ᵀ."""
    m, r = tl.arange(0, BLOCK_M), block * BLOCK_R + tl.arange(0, BLOCK_R)
    row, have_m = (start + m).to(tl.int64), m < count
    token = tl.load(order + row, mask=have_m, other=0).to(tl.int64) // K
    slot = tl.load(slots + token, mask=have_m, other=-1)
    current = _next_slot(slot, -1)
    while current < _NONE:
        rank, matrix = matrix_of(where, part, current, expert, each, x.dtype.element_ty)
        if block * BLOCK_R < rank:
            mine, have_r = slot == current, r < rank
            total = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
            total = multiply(
                total, x + part * width, row, mine, stride_x, matrix, r, have_r, width, 1, width, False,
                BLOCK_K,
            )  # fmt: skip
            out = u + row[:, None] * stride_u + part * rank + r[None, :]
            tl.store(out, total, mask=mine[:, None] & have_r[None, :])
        current = _next_slot(slot, current)


@triton.jit
def shrink_beside(
    x, u, order, slots, where, one, expert, start, count, each, width, K, stride_u,
    MIXED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """u of a tile's rows in the last programs of a product: of one adapter in blocks of columns, as
    `shrink_rows` sums it; of several by one program for each row.
    """
    if MIXED:
        if one < count:
            row = (start + one).to(tl.int64)
            slot = tl.load(slots + tl.load(order + row) // K)
            if slot >= 0:
                dtype: tl.constexpr = x.dtype.element_ty
                shrink_row(x, u, row, slot, where, expert, each, width, width, stride_u, BLOCK_R, 256, dtype)
    elif count > 0:
        shrink_tile(
            x, u, order, slots, where, 0, one, expert, start, count, each, width, K, width, stride_u,
            BLOCK_M, 256, BLOCK_R,
        )  # fmt: skip


# -- u of every row ------------------------------------------------------------------------------------


@launched
@triton.jit(do_not_specialize=["tiles", "column", "each"])
def _shrink_rows(
    x, u, order, cells, tiles, table, scales, slots, columns, column, each, width, K, stride_x, stride_u,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """u[rows, part] = x[rows, part's columns] · the expert's matrix [R, width]ᵀ."""
    expert, start, count = tile_at(cells, tiles, tl.program_id(0))
    if count > 0:
        where = (table, scales, columns, column)
        shrink_tile(
            x, u, order, slots, where, tl.program_id(1), tl.program_id(2), expert, start, count, each, width,
            K, stride_x, stride_u, BLOCK_M, BLOCK_K, BLOCK_R,
        )  # fmt: skip


def shrink_rows(x_N: Tensor, rows: ExpertRows, lora: ExpertSite, side: str) -> Tensor:
    """u [N, P·R]: each row times its expert's A, or each part of it times Bᵀ's transpose (side "B")."""
    given = given_adapters(lora, side, x_N)
    u = x_N.new_empty(len(x_N), 16 * cdiv(given.parts * given.widest, 16))
    _shrink_rows[(rows.tiles.shape[1], given.parts, cdiv(given.widest, given.block))](
        x_N, u, rows.order_N, rows.tiles, rows.tiles.shape[1], *given.where, x_N.shape[1] // given.parts,
        rows.per_token, x_N.stride(0), u.stride(0),
        BLOCK_M=rows.tile, BLOCK_K=128 if rows.tile <= 64 else 64, BLOCK_R=given.block,
        num_warps=4, num_stages=3, **PDL,
    )  # fmt: skip
    return u

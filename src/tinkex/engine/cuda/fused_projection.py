# pyright: reportMissingImports=false, reportIndexIssue=false, reportArgumentType=false, reportCallIssue=false, reportReturnType=false, reportGeneralTypeIssues=false
"""A decoding step's projection with its adapters in one launch, for rows of few adapters.

Every program multiplies its rows with its columns of the weight and with all of A, and adds what that gives
by B before it writes: x·Aᵀ is computed anew for every block of columns, which costs less than a launch and a
wait. A sum that is cut into parts needs no exchange: each part adds its own (x·Aᵀ)·Bᵀ, and the norm that
follows adds up. SwiGLU and rotation are done on the way. Large weights' results have the bits that
`grouped.product_with` gives many rows. Rows come in the tiles of `lora`, which must hold every row. Knows
nothing of sites' meaning or of graphs.

Shapes: M rows, I in-features, O out-features, F MLP width, S parts of a sum, H query heads, G kv heads,
C head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tinkex.engine.cuda import elementwise
from tinkex.engine.cuda.launch import launched
from tinkex.engine.cuda.lora_kernels import part_at, part_of_block, scaled, summed, tile_at, triple
from tinkex.engine.cuda.pdl import PDL, wait_for_previous
from tinkex.engine.cuda.sizes import cdiv, power_of_2, shared_bytes
from tinkex.engine.cuda.split_k_projection import SiteAdapters, b_of, parts_of
from tinkex.engine.cuda.sums import close

_MULTIPROCESSORS = 132
_SHARED = 160_000  # bytes of a multiprocessor's own memory that are enough for every shape
_STAGES = 4  # rounds on their way, if there is memory
MOST = 256  # rows
_WIDEST = 64  # rank
LARGEST = 1 << 23  # numbers of a weight that is soon read
MOST_OF_LARGER = 64  # rows
_WIDEST_OF_LARGER = 8192  # out-features: for more of them x·Aᵀ is computed too often
LONGEST = 6144  # features of a sum that is never cut where it is to have a trainer's bits


def large(weight: Tensor) -> bool:
    """Whether a weight's products have the same bits in a trainer and in a sampler, however many rows."""
    return weight.numel() > LARGEST


def halved(weight: Tensor) -> bool:
    """Whether a large weight's product is the sum of two, of half the features each, in both.

    With few rows one program alone takes too long over so many features, and sums that are cut elsewhere have
    other bits.
    """
    columns, features = weight.shape
    return large(weight) and features > LONGEST and features % 256 == 0 and columns <= _WIDEST_OF_LARGER


@triton.jit
def _block(place, have, at, EVEN: tl.constexpr):
    """Some features of some rows or columns; EVEN: there are as many as the block has room for."""
    if EVEN:
        return tl.load(place)
    else:
        return tl.load(place, mask=have & at, other=0.0)


@launched
@triton.jit(do_not_specialize=["tiles", "column"])
def _adapted(
    x, w, y, table, scales, cells, tiles, columns, column, K, n0, n1, n2,
    stride_x, stride_k, stride_n, stride_y, split_y,
    EVEN: tl.constexpr, ROUNDED: tl.constexpr, SPLITS: tl.constexpr, RANK: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """x · wᵀ + scale · (x · Aᵀ) · Bᵀ over one part of the features: the sum of these is the whole of it.

    ROUNDED: the first product is, before the second one is added to it.
    """
    tile, split = tl.program_id(1), tl.program_id(2)
    part, first = part_of_block(tl.program_id(0), n0, n1, n2, BLOCK_N)
    slot, start, count = tile_at(cells, tiles, tile)
    if count > 0:
        width, before = part_at(part, n0, n1, n2, EVEN)
        dtype = x.dtype.element_ty
        m, n, r = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, RANK)
        row, col = (start + m).to(tl.int64), first + n
        have_m, have_n = (m < count)[:, None], (col < width)[None, :]
        b, rank, scale = b_of(
            table, scales, slot, columns, column + 1, part, width, r, col, have_n, DTYPE=dtype
        )
        address = tl.load(table + slot * columns + column)
        matrix = tl.multiple_of(address.to(tl.pointer_type(dtype)), 16) + part * rank * K
        have_r = (r < rank)[None, :]
        span = tl.cdiv(tl.cdiv(K, BLOCK_K), SPLITS) * BLOCK_K
        low, high = split * span, tl.minimum((split + 1) * span, K)
        at = low + tl.arange(0, BLOCK_K)
        weights, places = w + (before + col)[None, :] * stride_n, x + row[:, None] * stride_x
        right = _block(weights + at[:, None] * stride_k, have_n, (at < high)[:, None], EVEN)
        down = _block(matrix + r[None, :] * K + at[:, None], have_r, (at < high)[:, None], False)
        wait_for_previous()
        left = _block(places + at[None, :], have_m, (at < high)[None, :], False)
        total, u = tl.dot(left, right), tl.dot(left, down)
        for k in range(low + BLOCK_K, high, BLOCK_K):
            at = k + tl.arange(0, BLOCK_K)
            left = _block(places + at[None, :], have_m, (at < high)[None, :], False)
            right = _block(weights + at[:, None] * stride_k, have_n, (at < high)[:, None], EVEN)
            down = _block(matrix + r[None, :] * K + at[:, None], have_r, (at < high)[:, None], False)
            total, u = tl.dot(left, right, total), tl.dot(left, down, u)
        if ROUNDED:
            total = total.to(dtype).to(tl.float32)
        total = tl.dot(scaled(u, scale, dtype), b, total)
        out = y + split * split_y + row[:, None] * stride_y + before + col[None, :]
        tl.store(out, total, mask=have_m & have_n)


@launched
@triton.jit(do_not_specialize=["tiles", "column"])
def _gated(
    x, w, y, table, scales, cells, tiles, columns, column, K, F, stride_x, stride_k, stride_n,
    EVEN: tl.constexpr, RANK: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """silu(gate) · up of the same columns of both, each as `_adapted` has it, and rounded as it would be."""
    slot, start, count = tile_at(cells, tiles, tl.program_id(1))
    if count > 0:
        dtype = x.dtype.element_ty
        m, r = tl.arange(0, BLOCK_M), tl.arange(0, 2 * RANK)  # both parts' ranks side by side
        row, col = (start + m).to(tl.int64), tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        have_m, have_n = (m < count)[:, None], (col < F)[None, :]
        b_gate, rank_gate, scale = b_of(
            table, scales, slot, columns, column + 1, 0, F, r, col, have_n, DTYPE=dtype
        )
        b_up, rank_up, _ = b_of(
            table, scales, slot, columns, column + 1, 1, F, r - RANK, col, have_n, DTYPE=dtype
        )
        address = tl.load(table + slot * columns + column)
        a = tl.multiple_of(address.to(tl.pointer_type(dtype)), 16)
        a += tl.where(r < RANK, r, r - RANK + rank_up)[None, :] * K
        have_r = (tl.where(r < RANK, r < rank_gate, r - RANK < rank_up))[None, :]
        w_gate, places = w + col[None, :] * stride_n, x + row[:, None] * stride_x
        w_up = w_gate + F * stride_n
        at = tl.arange(0, BLOCK_K)
        here = (at < K)[:, None]
        right_gate = _block(w_gate + at[:, None] * stride_k, have_n, here, EVEN)
        right_up = _block(w_up + at[:, None] * stride_k, have_n, here, EVEN)
        down = _block(a + at[:, None], have_r, here, False)
        wait_for_previous()
        left = _block(places + at[None, :], have_m, (at < K)[None, :], False)
        gate, up, u = tl.dot(left, right_gate), tl.dot(left, right_up), tl.dot(left, down)
        for k in range(BLOCK_K, K, BLOCK_K):
            at = k + tl.arange(0, BLOCK_K)
            here = (at < K)[:, None]
            left = _block(places + at[None, :], have_m, (at < K)[None, :], False)
            right_gate = _block(w_gate + at[:, None] * stride_k, have_n, here, EVEN)
            right_up = _block(w_up + at[:, None] * stride_k, have_n, here, EVEN)
            down = _block(a + at[:, None], have_r, here, False)
            gate, up, u = tl.dot(left, right_gate, gate), tl.dot(left, right_up, up), tl.dot(left, down, u)
        u = scaled(u, scale, dtype)
        gate, up = tl.dot(u, b_gate, gate), tl.dot(u, b_up, up)
        gate, up = gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32)
        tl.store(y + row[:, None] * F + col[None, :], gate * tl.sigmoid(gate) * up, mask=have_m & have_n)


@launched
@triton.jit(do_not_specialize=["tiles", "column"])
def _rotated(
    x, w, cos, sin, q_norm, k_norm, q, k, v, table, scales, cells, tiles, columns, column, K, H, G, eps,
    stride_x, stride_k, stride_n,
    EVEN: tl.constexpr, RANK: tl.constexpr, TILE: tl.constexpr, C: tl.constexpr, NORM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One head of some rows of a tile: as `_adapted` has it, rounded, then as `elementwise` rotates it.

    BLOCK_N columns hold half of a head, since rotation needs both halves of every pair.
    """
    head, inside = tl.program_id(0), tl.program_id(1) % (TILE // BLOCK_M) * BLOCK_M
    slot, start, count = tile_at(cells, tiles, tl.program_id(1) // (TILE // BLOCK_M))
    if count > inside:
        part = tl.where(head < H, 0, tl.where(head < H + G, 1, 2))
        before = tl.where(part == 0, 0, tl.where(part == 1, H, H + G)) * C
        width = tl.where(part == 0, H, G) * C
        dtype = x.dtype.element_ty
        m, n, r = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, RANK)
        row, col = (start + inside + m).to(tl.int64), head * C - before + n
        have_m, have_n = (inside + m < count)[:, None], (n < C // 2)[None, :]
        b_low, rank, scale = b_of(
            table, scales, slot, columns, column + 1, part, width, r, col, have_n, DTYPE=dtype
        )
        b_high, _, _ = b_of(
            table, scales, slot, columns, column + 1, part, width, r, col + C // 2, have_n, DTYPE=dtype
        )
        address = tl.load(table + slot * columns + column)
        matrix = tl.multiple_of(address.to(tl.pointer_type(dtype)), 16) + part * rank * K
        have_r = (r < rank)[None, :]
        w_low, places = w + (head * C + n)[None, :] * stride_n, x + row[:, None] * stride_x
        w_high = w_low + C // 2 * stride_n
        at = tl.arange(0, BLOCK_K)
        here = (at < K)[:, None]
        right_low = _block(w_low + at[:, None] * stride_k, have_n, here, EVEN)
        right_high = _block(w_high + at[:, None] * stride_k, have_n, here, EVEN)
        down = _block(matrix + r[None, :] * K + at[:, None], have_r, here, False)
        wait_for_previous()
        angle, turned = row[:, None] * (C // 2) + n[None, :], have_m & have_n & (part < 2)
        c, s = tl.load(cos + angle, mask=turned, other=0.0), tl.load(sin + angle, mask=turned, other=0.0)
        left = _block(places + at[None, :], have_m, (at < K)[None, :], False)
        low, high, u = tl.dot(left, right_low), tl.dot(left, right_high), tl.dot(left, down)
        for first in range(BLOCK_K, K, BLOCK_K):
            at = first + tl.arange(0, BLOCK_K)
            here = (at < K)[:, None]
            left = _block(places + at[None, :], have_m, (at < K)[None, :], False)
            right_low = _block(w_low + at[:, None] * stride_k, have_n, here, EVEN)
            right_high = _block(w_high + at[:, None] * stride_k, have_n, here, EVEN)
            down = _block(matrix + r[None, :] * K + at[:, None], have_r, here, False)
            low, high = tl.dot(left, right_low, low), tl.dot(left, right_high, high)
            u = tl.dot(left, down, u)
        u = scaled(u, scale, dtype)
        low, high = tl.dot(u, b_low, low), tl.dot(u, b_high, high)
        a, b = low.to(dtype).to(tl.float32), high.to(dtype).to(tl.float32)
        c, s = c.to(tl.float32), s.to(tl.float32)
        if part < 2:
            if NORM:
                norm = tl.where(part == 0, q_norm, k_norm)
                a2, b2 = tl.where(have_n, a * a, 0.0), tl.where(have_n, b * b, 0.0)
                sums = close(a2, BLOCK_M, BLOCK_N) + close(b2, BLOCK_M, BLOCK_N)
                rstd = tl.rsqrt(sums / C + eps)[:, None]
                w_a = tl.load(norm + n[None, :], mask=have_n, other=0.0).to(tl.float32)
                w_b = tl.load(norm + C // 2 + n[None, :], mask=have_n, other=0.0).to(tl.float32)
                a, b = (a * rstd).to(dtype).to(tl.float32) * w_a, (b * rstd).to(dtype).to(tl.float32) * w_b
            a, b = a * c - b * s, b * c + a * s
        out = tl.where(part == 0, q, tl.where(part == 1, k, v)) + row[:, None] * width + col[None, :]
        tl.store(out, a, mask=have_m & have_n)
        tl.store(out + C // 2, b, mask=have_m & have_n)


# -- launching -----------------------------------------------------------------------------------------


class ProductTile(NamedTuple):
    """How a product is cut."""

    columns: int
    features: int  # that one round reads
    splits: int = 1
    warps: int = 4


class HeadTile(NamedTuple):
    """How a product that is rotated at once is cut: always into heads."""

    rows: int  # of one program
    features: int
    warps: int = 4


def shape_for(rows: int, tile: int, outs: Sequence[int], in_features: int) -> ProductTile:
    """As measured on an H200."""
    if len(outs) > 1:  # a block lies in one part
        if tile > 64:
            return ProductTile(64, 64, warps=8)
        if rows > 128:
            return ProductTile(128, 64)
        return ProductTile(32 if rows <= 64 and sum(outs) <= 4096 else 64, 128)
    columns = 64 if tile > 64 or rows <= 64 else 128
    wanted = _MULTIPROCESSORS * (2 if rows <= 64 else 1) // (cdiv(rows, tile) * cdiv(outs[0], columns))
    splits = parts_of(wanted, min(8, in_features // 256))
    features = 128 if rows <= 64 and in_features // splits <= 512 else 64
    return ProductTile(columns, features, splits, warps=8 if tile > 64 else 4)


def large_shape_for(weight: Tensor) -> ProductTile:
    """Of a large weight: the sums that a trainer has, as measured on an H200."""
    return ProductTile(64, 128, 2 if halved(weight) else 1)


def gated_shape_for(rows: int, tile: int) -> ProductTile:
    """As measured on an H200."""
    return ProductTile(64, 64, warps=8) if tile > 64 else ProductTile(32 if rows <= 64 else 64, 64)


def head_shape_for(rows: int, tile: int, heads: int) -> HeadTile | None:
    """None where heads would make too few programs: then rotation is better left alone."""
    return HeadTile(64, 64) if tile > 64 and heads * cdiv(rows, 64) >= 96 else None


@dataclass(frozen=True)
class FusedProjection:
    """x · weightᵀ with every adapter's part, computed by whatever reads it: a `hooks.Pending`."""

    x_MI: Tensor
    weight_OI: Tensor
    adapters: SiteAdapters

    def swiglu(self) -> Tensor:
        """silu(gate) * up of a fused [M, 2F]."""
        if large(self.weight_OI):
            return elementwise.swiglu(self.total())
        return self.gated(gated_shape_for(self.x_MI.shape[0], self.adapters.tiles.rows))

    def rotate(
        self,
        cos: Tensor,
        sin: Tensor,
        heads: tuple[int, int],
        norms: tuple[Tensor, Tensor] | None,
        eps: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q_MHC and k_MGC, normalised (if asked) and rotated, and v_MGC."""
        (h, g), rows = heads, self.x_MI.shape[0]
        shape = head_shape_for(rows, self.adapters.tiles.rows, h + 2 * g)
        if shape is None:
            return elementwise.rotate(self.total(), cos, sin, heads, norms, eps)[:3]
        return self.rotated(cos, sin, heads, norms, eps, shape)

    def total(self) -> Tensor:
        shape = self._shape if large(self.weight_OI) else self._shape._replace(splits=1)
        return summed(self.parts(shape), self.x_MI.dtype)[0]

    def addend(self) -> Tensor:
        """In parts [S, M, O] if that keeps the device busy."""
        return self.parts(self._shape)

    @property
    def _shape(self) -> ProductTile:
        (rows, k), (_, tiles, site) = self.x_MI.shape, self.adapters
        if large(self.weight_OI):
            return large_shape_for(self.weight_OI)
        return shape_for(rows, tiles.rows, site.outs, k)

    def parts(self, shape: ProductTile) -> Tensor:
        """SplitKProjection [S, M, O] of the result, in fp32 if there are several."""
        x, w, (table, tiles, site) = self.x_MI, self.weight_OI, self.adapters
        (rows, k), count = x.shape, tiles.cells.shape[1]
        dtype = torch.float32 if shape.splits > 1 else x.dtype
        y = torch.empty(shape.splits, rows, sum(site.outs), dtype=dtype, device=x.device)
        even = k % (shape.features * shape.splits) == 0 and all(n % shape.columns == 0 for n in site.outs)
        blocks = sum(cdiv(n, shape.columns) for n in site.outs)
        _adapted[(blocks, count, shape.splits)](
            x, w, y, table.addresses, table.scales, tiles.cells, count, table.addresses.shape[1], site.column,
            k, *triple(site.outs), x.stride(0), w.stride(1), w.stride(0), y.stride(1), y.stride(0),
            EVEN=even, ROUNDED=large(w) and shape.splits == 1, SPLITS=shape.splits,
            BLOCK_M=tiles.rows, BLOCK_N=shape.columns,
            **self._constants(shape, tiles.rows, shape.columns),
        )  # fmt: skip
        return y

    def gated(self, shape: ProductTile) -> Tensor:
        x, w, (table, tiles, site) = self.x_MI, self.weight_OI, self.adapters
        (rows, k), (width, _), count = x.shape, site.outs, tiles.cells.shape[1]
        y = torch.empty(rows, width, dtype=x.dtype, device=x.device)
        _gated[(cdiv(width, shape.columns), count)](
            x, w, y, table.addresses, table.scales, tiles.cells, count, table.addresses.shape[1], site.column,
            k, width, x.stride(0), w.stride(1), w.stride(0),
            EVEN=k % shape.features == 0 and width % shape.columns == 0,
            BLOCK_M=tiles.rows, BLOCK_N=shape.columns,
            **self._constants(shape, tiles.rows, 2 * shape.columns, parts=2),
        )  # fmt: skip
        return y

    def rotated(
        self,
        cos: Tensor,
        sin: Tensor,
        heads: tuple[int, int],
        norms: tuple[Tensor, Tensor] | None,
        eps: float,
        shape: HeadTile,
    ) -> tuple[Tensor, Tensor, Tensor]:
        x, w, (table, tiles, site), (h, g) = self.x_MI, self.weight_OI, self.adapters, heads
        (rows, features), count, c = x.shape, tiles.cells.shape[1], sum(site.outs) // (h + 2 * g)
        q, k, v = (torch.empty(rows, n, c, dtype=x.dtype, device=x.device) for n in (h, g, g))
        (q_norm, k_norm), half = norms or (cos, cos), max(16, power_of_2(c // 2))
        _rotated[(h + 2 * g, count * (tiles.rows // shape.rows))](
            x, w, cos, sin, q_norm, k_norm, q, k, v, table.addresses, table.scales, tiles.cells, count,
            table.addresses.shape[1], site.column, features, h, g, eps,
            x.stride(0), w.stride(1), w.stride(0),
            EVEN=features % shape.features == 0 and c == 2 * half, TILE=tiles.rows, C=c,
            NORM=norms is not None, BLOCK_M=shape.rows, BLOCK_N=half,
            **self._constants(shape, shape.rows, 2 * half),
        )  # fmt: skip
        return q, k, v

    def _constants(
        self, shape: ProductTile | HeadTile, rows: int, columns: int, parts: int = 1
    ) -> dict[str, int]:
        """For so many rows and columns of one program, which lie in so many parts of the site."""
        rank = max(16, power_of_2(self.adapters.table.widest))
        # in bytes: what one round reads, of which the first one's is apart, and B; a little is Triton's
        each = 2 * shape.features * (rows + columns + parts * rank)
        left = shared_bytes(self.x_MI.device) - 448 - 2 * parts * rank * columns
        return {
            "RANK": rank,
            "BLOCK_K": shape.features,
            "num_warps": shape.warps,
            "num_stages": max(2, min(_STAGES, left // each - 1)),
            **PDL,
        }


def tile_rows(rows: int) -> int:
    """How many rows a tile should have where one adapter has them all."""
    return 16 if rows <= 16 else 64 if rows <= 128 else 128


def suits(rows: int, weight: Tensor, adapters: SiteAdapters) -> bool:
    """Whether this is quicker than a product and what follows it: few tiles, and weights that are soon read.

    Of larger ones those with few columns, and then with the sums that a trainer has, since in a model of 8B
    with random weights others would show.
    """
    table, tiles, site = adapters
    count, fits = tiles.cells.shape[1], table.widest <= _WIDEST and shared_bytes(weight.device) >= _SHARED
    if large(weight):
        few = count == 1 and rows <= MOST_OF_LARGER and sum(site.outs) <= _WIDEST_OF_LARGER
    else:
        few = rows <= MOST and tiles.rows * count < 2 * max(rows, 64)
    return fits and few and tiles.rows >= 64

# pyright: reportMissingImports=false, reportIndexIssue=false, reportArgumentType=false, reportCallIssue=false, reportReturnType=false, reportGeneralTypeIssues=false
"""Projections with adapters in decode steps, as `hooks.PartialProjection`. Tiles must cover every row.

`FusedProjection`, for rows of few adapters, takes one launch: every program computes all of x·Aᵀ for its rows
again, which costs less than a second launch. With split-K each split adds its own (x·Aᵀ)·Bᵀ, and the norm
that follows sums the splits. Results of large weights are bitwise identical to `grouped_lora.product_with`,
which the trainer uses.

Shapes: M rows, I in-features, O out-features, F MLP width, S splits, P parts of a site, R rank.
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
from tinkex.engine.cuda.adapter_table import SiteAdapters
from tinkex.engine.cuda.launch import (
    MULTIPROCESSORS,
    PDL,
    cdiv,
    launched,
    power_of_2,
    shared_bytes,
    wait_for_previous,
)
from tinkex.engine.cuda.lora_kernels import (
    b_of,
    part_at,
    part_of_block,
    scaled,
    split_count,
    summed,
    tile_at,
)
from tinkex.engine.torch.hooks import Norms

# As measured on an H200:
_SHARED = 160_000  # bytes of shared memory that are enough for every tile
_STAGES = 4
MAX_ROWS = 256
_MAX_RANK = 64
LARGE = (1 << 23) - 1  # weights with more elements are multiplied bitwise identically in trainer and sampler
MAX_ROWS_LARGE = 64
_MAX_COLUMNS_LARGE = 8192  # beyond, x·Aᵀ would be computed too often
MAX_FEATURES = 6144  # of a sum without split-K


def tile_rows(rows: int) -> int:
    """Rows of a tile where one adapter has all rows."""
    return 16 if rows <= 16 else 64 if rows <= 128 else 128


def large(weight: Tensor) -> bool:
    return weight.numel() > LARGE


def exact(weight: Tensor, at: SiteAdapters) -> bool:
    """Whether products with `weight` are bitwise identical in trainer and sampler for any rows.

    A shared expert's are at any size, as those of routed experts: what differs there flips the next layer's
    experts.
    """
    return large(weight) or at.shared_expert


def split_in_two(weight: Tensor) -> bool:
    """Whether trainer and sampler both compute a large weight's product with split-K of two.

    For few rows, a single program takes too long over so many features.
    """
    columns, features = weight.shape
    return large(weight) and features > MAX_FEATURES and features % 256 == 0 and columns <= _MAX_COLUMNS_LARGE


@triton.jit
def _block(place, have, at, EVEN: tl.constexpr):
    """Load a tile; EVEN: it lies wholly inside the matrix."""
    if EVEN:
        return tl.load(place)
    else:
        return tl.load(place, mask=have & at, other=0.0)


@triton.jit
def _sums(
    x, weights, a, have_m, have_n, have_r, low, high, stride_k,
    COUNT: tl.constexpr, EVEN: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """x times each of COUNT weights, and times A, over the features low:high."""
    at = low + tl.arange(0, BLOCK_K)
    rights, totals = (), ()
    for i in tl.static_range(COUNT):
        rights += (_block(weights[i] + at[:, None] * stride_k, have_n, (at < high)[:, None], EVEN),)
    down = _block(a + at[:, None], have_r, (at < high)[:, None], False)
    wait_for_previous()
    left = _block(x + at[None, :], have_m, (at < high)[None, :], False)
    for i in tl.static_range(COUNT):
        totals += (tl.dot(left, rights[i]),)
    u = tl.dot(left, down)
    for k in range(low + BLOCK_K, high, BLOCK_K):
        at = k + tl.arange(0, BLOCK_K)
        left = _block(x + at[None, :], have_m, (at < high)[None, :], False)
        rights, sums = (), ()
        for i in tl.static_range(COUNT):
            rights += (_block(weights[i] + at[:, None] * stride_k, have_n, (at < high)[:, None], EVEN),)
        down = _block(a + at[:, None], have_r, (at < high)[:, None], False)
        for i in tl.static_range(COUNT):
            sums += (tl.dot(left, rights[i], totals[i]),)
        totals, u = sums, tl.dot(left, down, u)
    return totals, u


@launched
@triton.jit(do_not_specialize=["tiles", "column"])
def _fused(
    x, w, y, table, scales, cells, tiles, columns, column, K, n0, n1, n2, n3,
    stride_x, stride_k, stride_n, stride_y, split_y,
    EVEN: tl.constexpr, ROUNDED: tl.constexpr, SPLITS: tl.constexpr, RANK: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """x · wᵀ + scale · (x · Aᵀ) · Bᵀ over one split of the features.

    ROUNDED: the frozen product is rounded before the adapter's part is added to it, as in the trainer.
    """
    tile, split = tl.program_id(1), tl.program_id(2)
    part, first = part_of_block(tl.program_id(0), n0, n1, n2, BLOCK_N)
    slot, start, count = tile_at(cells, tiles, tile)
    if count > 0:
        width, before = part_at(part, n0, n1, n2, n3, EVEN)
        dtype = x.dtype.element_ty
        m, n, r = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, RANK)
        row, col = (start + m).to(tl.int64), first + n
        have_m, have_n = (m < count)[:, None], (col < width)[None, :]
        where = (table, scales, slot, columns, column + 1)
        b, rank, scale = b_of(where, part, width, r, col, have_n, dtype)
        address = tl.load(table + slot * columns + column)
        matrix = tl.multiple_of(address.to(tl.pointer_type(dtype)), 16) + part * rank * K
        span = tl.cdiv(tl.cdiv(K, BLOCK_K), SPLITS) * BLOCK_K
        low, high = split * span, tl.minimum((split + 1) * span, K)
        left, right = x + row[:, None] * stride_x, w + (before + col)[None, :] * stride_n
        totals, u = _sums(left, (right,), matrix + r[None, :] * K, have_m, have_n, (r < rank)[None, :],
                          low, high, stride_k, 1, EVEN, BLOCK_K)  # fmt: skip
        total = totals[0]
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
    """silu(gate) · up of the same columns of both, each computed and rounded as `_fused` does."""
    slot, start, count = tile_at(cells, tiles, tl.program_id(1))
    if count > 0:
        dtype = x.dtype.element_ty
        m, r = tl.arange(0, BLOCK_M), tl.arange(0, 2 * RANK)  # both parts' ranks side by side
        row, col = (start + m).to(tl.int64), tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        have_m, have_n = (m < count)[:, None], (col < F)[None, :]
        where = (table, scales, slot, columns, column + 1)
        b_gate, rank, scale = b_of(where, 0, F, r, col, have_n, dtype)
        b_up, rank_up, _ = b_of(where, 1, F, r - RANK, col, have_n, dtype)
        address = tl.load(table + slot * columns + column)
        a = tl.multiple_of(address.to(tl.pointer_type(dtype)), 16)
        a += tl.where(r < RANK, r, r - RANK + rank_up)[None, :] * K
        have_r = (tl.where(r < RANK, r < rank, r - RANK < rank_up))[None, :]
        left, right = x + row[:, None] * stride_x, w + col[None, :] * stride_n
        totals, u = _sums(left, (right, right + F * stride_n), a, have_m, have_n, have_r,
                          0, K, stride_k, 2, EVEN, BLOCK_K)  # fmt: skip
        u = scaled(u, scale, dtype)
        gate = tl.dot(u, b_gate, totals[0]).to(dtype).to(tl.float32)
        up = tl.dot(u, b_up, totals[1]).to(dtype).to(tl.float32)
        tl.store(y + row[:, None] * F + col[None, :], gate * tl.sigmoid(gate) * up, mask=have_m & have_n)


# -- launching -----------------------------------------------------------------------------------------


class ProductTile(NamedTuple):
    """The tile sizes and the grid of a product."""

    columns: int
    features: int  # of one iteration
    splits: int = 1
    warps: int = 4


def tile_for(rows: int, tile: int, outs: Sequence[int], in_features: int) -> ProductTile:
    """As measured on an H200."""
    if len(outs) > 1:  # a block of columns lies in one part
        if tile > 64:
            return ProductTile(64, 64, warps=8)
        if rows > 128:
            return ProductTile(128, 64)
        return ProductTile(32 if rows <= 64 and sum(outs) <= 4096 else 64, 128)
    columns = 64 if tile > 64 or rows <= 64 else 128
    wanted = MULTIPROCESSORS * (2 if rows <= 64 else 1) // (cdiv(rows, tile) * cdiv(outs[0], columns))
    splits = split_count(wanted, min(8, in_features // 256))
    features = 128 if rows <= 64 and in_features // splits <= 512 else 64
    return ProductTile(columns, features, splits, warps=8 if tile > 64 else 4)


def gated_tile_for(rows: int, tile: int) -> ProductTile:
    """As measured on an H200."""
    return ProductTile(64, 64, warps=8) if tile > 64 else ProductTile(32 if rows <= 64 else 64, 64)


@dataclass(frozen=True)
class FusedProjection:
    """x · weightᵀ with every adapter's part, computed when it is read: a `hooks.PartialProjection`."""

    x_MI: Tensor
    weight_OI: Tensor
    adapters: SiteAdapters

    def swiglu(self) -> Tensor:
        """silu(gate) * up of a fused [M, 2F]."""
        if exact(self.weight_OI, self.adapters):
            return elementwise.swiglu(self.total())
        return self.gated(gated_tile_for(self.x_MI.shape[0], self.adapters.tiles.rows))

    def rotate(
        self, cos: Tensor, sin: Tensor, heads: tuple[int, int], norms: Norms | None, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q and k, normalised (if asked) and rotated, and v."""
        return elementwise.rotate(self.total(), cos, sin, heads, norms, eps)[:3]

    def total(self) -> Tensor:
        tile = self._tile if exact(self.weight_OI, self.adapters) else self._tile._replace(splits=1)
        return summed(self.splits(tile), self.x_MI.dtype)[0]

    def addend(self) -> Tensor:
        """[S, M, O]: with split-K if that keeps the device busy."""
        return self.splits(self._tile)

    @property
    def _tile(self) -> ProductTile:
        (rows, k), at = self.x_MI.shape, self.adapters
        if exact(self.weight_OI, at):
            return ProductTile(64, 128, 2 if split_in_two(self.weight_OI) else 1)
        return tile_for(rows, at.tiles.rows, at.outs, k)

    def splits(self, tile: ProductTile) -> Tensor:
        """[S, M, O] to be summed over S; in fp32 if there are several."""
        x, w, at, (rows, k) = self.x_MI, self.weight_OI, self.adapters, self.x_MI.shape
        dtype = torch.float32 if tile.splits > 1 else x.dtype
        y = torch.empty(tile.splits, rows, sum(at.outs), dtype=dtype, device=x.device)
        even = k % (tile.features * tile.splits) == 0 and all(n % tile.columns == 0 for n in at.outs)
        _fused[(at.b.blocks(tile.columns), at.tiles.cells.shape[1], tile.splits)](
            x, w, y, *at.a.where, k, *at.b.widths,
            x.stride(0), w.stride(1), w.stride(0), y.stride(1), y.stride(0),
            EVEN=even, ROUNDED=exact(w, at) and tile.splits == 1, SPLITS=tile.splits,
            **self._constants(tile, tile.columns),
        )  # fmt: skip
        return y

    def gated(self, tile: ProductTile) -> Tensor:
        """silu(gate) * up in one launch."""
        x, w, at, (rows, k) = self.x_MI, self.weight_OI, self.adapters, self.x_MI.shape
        y = x.new_empty(rows, at.outs[0])
        even = k % tile.features == 0 and at.outs[0] % tile.columns == 0
        _gated[(cdiv(at.outs[0], tile.columns), at.tiles.cells.shape[1])](
            x, w, y, *at.a.where, k, at.outs[0], x.stride(0), w.stride(1), w.stride(0),
            EVEN=even, **self._constants(tile, 2 * tile.columns, parts=2),
        )  # fmt: skip
        return y

    def _constants(self, tile: ProductTile, columns: int, parts: int = 1) -> dict[str, int]:
        """For so many columns of one program, which lie in so many parts of the site."""
        rank = max(16, power_of_2(self.adapters.table.widest))
        # in bytes: what one stage holds (the first iteration is peeled off) and B; Triton needs a little
        each = 2 * tile.features * (self.adapters.tiles.rows + columns + parts * rank)
        left = shared_bytes(self.x_MI.device) - 448 - 2 * parts * rank * columns
        return {
            "RANK": rank,
            "BLOCK_M": self.adapters.tiles.rows,
            "BLOCK_N": tile.columns,
            "BLOCK_K": tile.features,
            "num_warps": tile.warps,
            "num_stages": max(2, min(_STAGES, left // each - 1)),
            **PDL,
        }


def suits(rows: int, weight: Tensor, at: SiteAdapters) -> bool:
    """Whether this is faster than a library's product and what follows it: few tiles and a small weight.

    A large weight's product runs without the speed-up of split-K, as the trainer's does, so few columns only:
    in a model of 8B parameters any difference in the last bit shows in the logprobs.
    """
    count, tile = at.tiles.cells.shape[1], at.tiles.rows
    fits = at.table.widest <= _MAX_RANK and shared_bytes(weight.device) >= _SHARED
    if exact(weight, at):
        few = count == 1 and rows <= MAX_ROWS_LARGE and sum(at.outs) <= _MAX_COLUMNS_LARGE
        return fits and few and tile >= 64
    # Every tile reads the whole weight: tiles of 16 rows pay only where the step has no more rows.
    few = rows <= MAX_ROWS and tile * count < 2 * max(rows, 64)
    return fits and few and (tile >= 64 or rows <= 16)

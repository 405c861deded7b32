# pyright: reportMissingImports=false, reportIndexIssue=false, reportArgumentType=false, reportCallIssue=false, reportReturnType=false, reportGeneralTypeIssues=false
"""A decoding step's projections, left as summands, and what adds them up.

With few rows a launch costs as much as its work. So `project` is one launch for a frozen product (its sum cut
into parts, to keep the device busy) and all adapters' x·Aᵀ, and whatever reads the result (rotation, SwiGLU)
adds up the parts and the adapters' u·Bᵀ on the way, rounding where `ops` rounds. Kernels fetch what no kernel
of the step has written (weights, tables, angles) before they wait for the one before them. Rows come in the
tiles of `lora`, which must hold every row. Knows nothing of sites' meaning or of graphs.

Shapes: M rows, I in-features, O out-features, F MLP width, S parts of a sum, P parts of a site, R rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tinkex.engine.cuda.launch import launched
from tinkex.engine.cuda.lora_kernels import AdapterTable, RowTiles, TableSite, scaled, tile_at
from tinkex.engine.cuda.pdl import PDL, wait_for_previous
from tinkex.engine.cuda.sizes import cdiv, power_of_2
from tinkex.engine.cuda.sums import close

_WIDEST = 128  # columns of x·Aᵀ, of all parts, that one program computes
# as measured on an H200
_ROWS = 16  # of a product
_COLUMNS = 64  # that one program computes or adds up
_FEATURES, _SHRUNK = 64, 128  # that one round of a product reads, and one of x·Aᵀ
_PROGRAMS = 400  # that keep a large device busy with weights


class SiteAdapters(NamedTuple):
    """The adapters of a step's rows at one site."""

    table: AdapterTable
    tiles: RowTiles
    site: TableSite


# -- projection ----------------------------------------------------------------------------------------


@triton.jit
def _shrink(
    pid, x, u, table, cells, tiles, columns, column, K, stride_x, stride_u, stride_split,
    MULTIPLE: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """u[rows of a tile] = x · Aᵀ over one part of the features."""
    tile, split = pid // SPLITS, pid % SPLITS
    slot, start, count = tile_at(cells, tiles, tile)
    wide = tl.load(table + slot * columns).to(tl.int32) * MULTIPLE
    address = tl.load(table + slot * columns + column)
    matrix = tl.multiple_of(address.to(tl.pointer_type(x.dtype.element_ty)), 16)
    m, n, at = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    row = (start + m).to(tl.int64)
    have_m, have_n = (m < count)[:, None], ((n < wide) & (address != 0))[None, :]
    span = tl.cdiv(tl.cdiv(K, BLOCK_K), SPLITS) * BLOCK_K
    low, high = split * span, tl.minimum((split + 1) * span, K)
    at += low
    right = tl.load(matrix + n[None, :] * K + at[:, None], mask=have_n & (at < high)[:, None], other=0.0)
    wait_for_previous()
    left = tl.load(x + row[:, None] * stride_x + at[None, :], mask=have_m & (at < high)[None, :], other=0.0)
    total = tl.dot(left, right)
    for k in tl.range(low + BLOCK_K, high, BLOCK_K, num_stages=2):
        at = k + tl.arange(0, BLOCK_K)
        left = tl.load(
            x + row[:, None] * stride_x + at[None, :], mask=have_m & (at < high)[None, :], other=0.0
        )
        right = tl.load(matrix + n[None, :] * K + at[:, None], mask=have_n & (at < high)[:, None], other=0.0)
        total = tl.dot(left, right, total)
    tl.store(u + split * stride_split + row[:, None] * stride_u + n[None, :], total, mask=have_m & have_n)


@triton.jit
def _tile_of(
    x, w, m, n, at, M, N, high, stride_x, stride_k, stride_n, EVEN: tl.constexpr, WEIGHTS: tl.constexpr
):
    """The features `at` of some weights, or of some rows."""
    if WEIGHTS:
        place = w + at[:, None] * stride_k + n[None, :] * stride_n
        if EVEN:
            return tl.load(place)
        return tl.load(place, mask=(n < N)[None, :] & (at < high)[:, None], other=0.0)
    else:
        have = (m < M)[:, None]
        if not EVEN:
            have &= (at < high)[None, :]
        return tl.load(x + m[:, None] * stride_x + at[None, :], mask=have, other=0.0)


@triton.jit
def _product(
    pid, x, w, y, M, N, K, stride_x, stride_k, stride_n,
    EVEN: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One part of the sums of some columns of x · wᵀ; there are at most BLOCK_M rows."""
    split = pid % SPLITS
    m, n = tl.arange(0, BLOCK_M), pid // SPLITS * BLOCK_N + tl.arange(0, BLOCK_N)
    span = tl.cdiv(tl.cdiv(K, BLOCK_K), SPLITS) * BLOCK_K
    low, high = split * span, tl.minimum((split + 1) * span, K)
    at = low + tl.arange(0, BLOCK_K)
    right = _tile_of(x, w, m, n, at, M, N, high, stride_x, stride_k, stride_n, EVEN, True)
    wait_for_previous()
    left = _tile_of(x, w, m, n, at, M, N, high, stride_x, stride_k, stride_n, EVEN, False)
    total = tl.dot(left, right)
    for k in range(low + BLOCK_K, high, BLOCK_K):
        at = k + tl.arange(0, BLOCK_K)
        left = _tile_of(x, w, m, n, at, M, N, high, stride_x, stride_k, stride_n, EVEN, False)
        right = _tile_of(x, w, m, n, at, M, N, high, stride_x, stride_k, stride_n, EVEN, True)
        total = tl.dot(left, right, total)
    out = y + (split * M + m).to(tl.int64)[:, None] * N + n[None, :]
    tl.store(out, total, mask=(m < M)[:, None] & (n < N)[None, :])


@launched
@triton.jit(do_not_specialize=["shrinks", "tiles", "column"])
def _project(
    x, w, y, u, table, cells, shrinks, tiles, columns, column, M, N, K,
    stride_x, stride_k, stride_n, stride_u, stride_split,
    EVEN: tl.constexpr, SPLITS: tl.constexpr, MULTIPLE: tl.constexpr, U_SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    U_ROWS: tl.constexpr, U_COLUMNS: tl.constexpr, U_FEATURES: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    if pid < shrinks:
        _shrink(
            pid, x, u, table, cells, tiles, columns, column, K, stride_x, stride_u, stride_split,
            MULTIPLE=MULTIPLE, SPLITS=U_SPLITS, BLOCK_M=U_ROWS, BLOCK_N=U_COLUMNS, BLOCK_K=U_FEATURES,
        )  # fmt: skip
    else:
        _product(
            pid - shrinks, x, w, y, M, N, K, stride_x, stride_k, stride_n,
            EVEN=EVEN, SPLITS=SPLITS, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, BLOCK_K=BLOCK_K,
        )  # fmt: skip


# -- what reads the sums -------------------------------------------------------------------------------


@triton.jit
def b_of(
    table, scales, slot, columns, column, part, width, at, col, have_n,
    DTYPE: tl.constexpr, WHOLE: tl.constexpr = False,
):  # fmt: skip
    """Rows `at` and columns `col` of an adapter's B at one part, its rank there and its scale.

    WHOLE: every rank is a multiple of 8, which shows in how u can be read.
    """
    address = tl.load(table + slot * columns + column + part)
    rank = tl.where(address != 0, tl.load(table + slot * columns).to(tl.int32), 0)
    if WHOLE:
        rank = tl.multiple_of(rank, 8)
    matrix = tl.multiple_of(address.to(tl.pointer_type(DTYPE)), 16)
    have = have_n & ((at >= 0) & (at < rank))[:, None]
    b = tl.load(matrix + at[:, None] * width + col[None, :], mask=have, other=0.0)
    return b, rank, tl.load(scales + slot)


@triton.jit
def _summed(
    y, u, b, rank, scale, part, row, have_m, before, col, have_n, stride_y, split_y, stride_u, split_u,
    SPLITS: tl.constexpr, U_SPLITS: tl.constexpr, RANK: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Columns `col` of a part of the projection, rounded to the model's dtype."""
    place = y + row[:, None] * stride_y + before + col[None, :]
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for split in tl.static_range(SPLITS):
        total += tl.load(place + split * split_y, mask=have_m & have_n, other=0.0).to(tl.float32)
    at = tl.arange(0, RANK)
    place = u + row[:, None] * stride_u + part * rank + at[None, :]
    have = have_m & (at < rank)[None, :]
    left = tl.zeros((BLOCK_M, RANK), tl.float32)
    for split in tl.static_range(U_SPLITS):
        left += tl.load(place + split * split_u, mask=have, other=0.0).to(tl.float32)
    if U_SPLITS == 1:
        total = tl.dot(scaled(left, scale, DTYPE), b, total)
    else:  # whose bits are nobody else's: the quicker way
        total += tl.dot(left.to(DTYPE), b) * scale
    return total.to(DTYPE)


@launched
@triton.jit(do_not_specialize=["tiles", "column"])
def _total(
    y, u, out, table, scales, cells, tiles, columns, column, N, split_y, stride_u, split_u,
    SPLITS: tl.constexpr, U_SPLITS: tl.constexpr, RANK: tl.constexpr, WHOLE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    slot, start, count = tile_at(cells, tiles, tl.program_id(1))
    m, col = tl.arange(0, BLOCK_M), tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = (start + m).to(tl.int64)
    have_m, have_n = (m < count)[:, None], (col < N)[None, :]
    dtype = out.dtype.element_ty
    ranks = tl.arange(0, RANK)
    b, rank, scale = b_of(
        table, scales, slot, columns, column, 0, N, ranks, col, have_n, DTYPE=dtype, WHOLE=WHOLE
    )
    wait_for_previous()
    total = _summed(
        y, u, b, rank, scale, 0, row, have_m, 0, col, have_n, N, split_y, stride_u, split_u,
        SPLITS=SPLITS, U_SPLITS=U_SPLITS, RANK=RANK,
        BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, DTYPE=dtype,
    )  # fmt: skip
    tl.store(out + row[:, None] * N + col[None, :], total, mask=have_m & have_n)


@launched
@triton.jit(do_not_specialize=["tiles", "column"])
def _swiglu(
    y, u, out, table, scales, cells, tiles, columns, column, F, split_y, stride_u, split_u,
    SPLITS: tl.constexpr, U_SPLITS: tl.constexpr, RANK: tl.constexpr, WHOLE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    slot, start, count = tile_at(cells, tiles, tl.program_id(1))
    m, col = tl.arange(0, BLOCK_M), tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = (start + m).to(tl.int64)
    have_m, have_n = (m < count)[:, None], (col < F)[None, :]
    dtype = out.dtype.element_ty
    ranks = tl.arange(0, RANK)
    b_gate, rank, scale = b_of(
        table, scales, slot, columns, column, 0, F, ranks, col, have_n, DTYPE=dtype, WHOLE=WHOLE
    )
    b_up, rank_up, _ = b_of(
        table, scales, slot, columns, column, 1, F, ranks, col, have_n, DTYPE=dtype, WHOLE=WHOLE
    )
    wait_for_previous()
    gate = _summed(
        y, u, b_gate, rank, scale, 0, row, have_m, 0, col, have_n, 2 * F, split_y, stride_u, split_u,
        SPLITS=SPLITS, U_SPLITS=U_SPLITS, RANK=RANK,
        BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, DTYPE=dtype,
    ).to(tl.float32)  # fmt: skip
    up = _summed(
        y, u, b_up, rank_up, scale, 1, row, have_m, F, col, have_n, 2 * F, split_y, stride_u, split_u,
        SPLITS=SPLITS, U_SPLITS=U_SPLITS, RANK=RANK,
        BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, DTYPE=dtype,
    ).to(tl.float32)  # fmt: skip
    tl.store(out + row[:, None] * F + col[None, :], gate * tl.sigmoid(gate) * up, mask=have_m & have_n)


@launched
@triton.jit(do_not_specialize=["tiles", "column"])
def _rotate(
    y, u, cos, sin, q_norm, k_norm, q, k, v, table, scales, cells, tiles, columns, column, H, G, eps,
    split_y, stride_u, split_u,
    SPLITS: tl.constexpr, U_SPLITS: tl.constexpr, RANK: tl.constexpr, WHOLE: tl.constexpr,
    BLOCK_M: tl.constexpr, C: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    slot, start, count = tile_at(cells, tiles, tl.program_id(1))
    head = tl.program_id(0)
    part = tl.where(head < H, 0, tl.where(head < H + G, 1, 2))
    first = tl.where(part == 0, 0, tl.where(part == 1, H, H + G))  # the part's first head
    width = tl.where(part == 0, H, G) * C
    m, at = tl.arange(0, BLOCK_M), tl.arange(0, HALF)
    row = (start + m).to(tl.int64)
    have_m, have_n = (m < count)[:, None], (at < C // 2)[None, :]
    low = (head - first) * C + at
    dtype = q.dtype.element_ty
    ranks = tl.arange(0, RANK)
    b_low, rank, scale = b_of(
        table, scales, slot, columns, column, part, width, ranks, low, have_n, DTYPE=dtype, WHOLE=WHOLE
    )
    b_high, _, _ = b_of(
        table, scales, slot, columns, column, part, width, ranks, low + C // 2, have_n,
        DTYPE=dtype, WHOLE=WHOLE,
    )  # fmt: skip
    angle = row[:, None] * (C // 2) + at[None, :]
    c = tl.load(cos + angle, mask=have_m & have_n, other=0.0).to(tl.float32)
    s = tl.load(sin + angle, mask=have_m & have_n, other=0.0).to(tl.float32)
    wait_for_previous()
    a = _summed(
        y, u, b_low, rank, scale, part, row, have_m, first * C, low, have_n,
        (H + 2 * G) * C, split_y, stride_u, split_u, SPLITS=SPLITS, U_SPLITS=U_SPLITS,
        RANK=RANK, BLOCK_M=BLOCK_M, BLOCK_N=HALF, DTYPE=dtype,
    ).to(tl.float32)  # fmt: skip
    b = _summed(
        y, u, b_high, rank, scale, part, row, have_m, first * C, low + C // 2, have_n,
        (H + 2 * G) * C, split_y, stride_u, split_u, SPLITS=SPLITS, U_SPLITS=U_SPLITS,
        RANK=RANK, BLOCK_M=BLOCK_M, BLOCK_N=HALF, DTYPE=dtype,
    ).to(tl.float32)  # fmt: skip
    if part < 2:
        if NORM:
            if U_SPLITS == 1:  # nothing is cut: a trainer's bits
                squares = close(a * a, BLOCK_M, HALF) + close(b * b, BLOCK_M, HALF)
            else:
                squares = tl.sum(a * a, 1) + tl.sum(b * b, 1)
            r = tl.rsqrt(squares / C + eps)[:, None]
            norm = k_norm
            if part == 0:
                norm = q_norm
            wa = tl.load(norm + at, mask=at < C // 2, other=0.0).to(tl.float32)
            wb = tl.load(norm + C // 2 + at, mask=at < C // 2, other=0.0).to(tl.float32)
            a = (a * r).to(dtype).to(tl.float32) * wa[None, :]
            b = (b * r).to(dtype).to(tl.float32) * wb[None, :]
        turned = a * c - b * s
        b = b * c + a * s
        a = turned
    out = v
    if part == 0:
        out = q
    elif part == 1:
        out = k
    place = out + row[:, None] * width + low[None, :]
    tl.store(place, a, mask=have_m & have_n)
    tl.store(place + C // 2, b, mask=have_m & have_n)


# -- launching -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SplitKProjection:
    """A projection's result before it is added up: a `hooks.Pending`."""

    y_SMO: Tensor  # fp32, or the model's dtype
    u_SMR: Tensor  # [S, M, P·R]: x·Aᵀ, in parts too
    adapters: SiteAdapters
    dtype: torch.dtype

    def swiglu(self) -> Tensor:
        """silu(gate) * up of a fused [M, 2F]."""
        (_, rows, width), y = self.y_SMO.shape, self.y_SMO
        given, strides, constants = self._given()
        out = torch.empty(rows, width // 2, dtype=self.dtype, device=y.device)
        _swiglu[(cdiv(width // 2, _COLUMNS), self._tiles)](
            y, self.u_SMR, out, *given, width // 2, *strides,
            **constants, BLOCK_N=_COLUMNS, num_warps=4, **PDL,
        )  # fmt: skip
        return out

    def rotate(
        self,
        cos: Tensor,
        sin: Tensor,
        heads: tuple[int, int],
        norms: tuple[Tensor, Tensor] | None,
        eps: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q_MHC and k_MGC, normalised (if asked) and rotated, and v_MGC."""
        (h, g), (_, rows, width), y = heads, self.y_SMO.shape, self.y_SMO
        given, strides, constants = self._given()
        c = width // (h + 2 * g)
        q, k, v = (torch.empty(rows, n, c, dtype=self.dtype, device=y.device) for n in (h, g, g))
        q_norm, k_norm = norms or (cos, cos)
        _rotate[(h + 2 * g, self._tiles)](
            y, self.u_SMR, cos, sin, q_norm, k_norm, q, k, v, *given, h, g, eps, *strides,
            **constants, C=c, HALF=max(16, power_of_2(c // 2)),
            NORM=norms is not None, num_warps=4, **PDL,
        )  # fmt: skip
        return q, k, v

    def total(self) -> Tensor:
        """The sum [M, O]."""
        (_, rows, width), y = self.y_SMO.shape, self.y_SMO
        given, strides, constants = self._given()
        out = torch.empty(rows, width, dtype=self.dtype, device=y.device)
        _total[(cdiv(width, _COLUMNS), self._tiles)](
            y, self.u_SMR, out, *given, width, *strides,
            **constants, BLOCK_N=_COLUMNS, num_warps=4, **PDL,
        )  # fmt: skip
        return out

    def addend(self) -> Tensor:
        return self.total()

    @property
    def _tiles(self) -> int:
        return self.adapters.tiles.cells.shape[1]

    def _given(self) -> tuple[tuple, tuple[int, int, int], dict[str, int]]:
        """What every kernel is told: tables, tiles and the site's column; strides; constants."""
        y, u, (table, tiles, site) = self.y_SMO, self.u_SMR, self.adapters
        columns = table.addresses.shape[1]
        given = table.addresses, table.scales, tiles.cells, self._tiles, columns, site.column + 1
        constants = {"SPLITS": y.shape[0], "U_SPLITS": u.shape[0], "BLOCK_M": tiles.rows}
        constants |= {"RANK": max(16, power_of_2(table.widest)), "WHOLE": table.whole}
        return given, (y.stride(0), u.stride(1), u.stride(0)), constants


def suits(rows: int, weight: Tensor) -> bool:
    """Whether `project` is quicker than the library's product: few rows, and a launch's worth of weights."""
    return rows <= _ROWS and weight.numel() <= 1 << 22


def holds(table: AdapterTable, site: TableSite) -> bool:
    """Whether `project` and the sums can hold adapters so wide."""
    return len(site.outs) * table.widest <= _WIDEST


def parts_of(wanted: int, most: int) -> int:
    """Into how many parts a sum is cut: a power of two, since adding them up is unrolled."""
    return 1 << max(0, min(most, wanted).bit_length() - 1)


def project(x_MI: Tensor, weight_OI: Tensor, adapters: SiteAdapters) -> SplitKProjection:
    """x · weightᵀ and every adapter's x · Aᵀ, of at most _ROWS rows."""
    (rows, k), outs, (table, tiles, site) = x_MI.shape, weight_OI.shape[0], adapters
    splits = min(parts_of(_PROGRAMS * _COLUMNS // outs, 8), max(1, k // (2 * _FEATURES)))
    wide, u_splits = len(site.outs) * table.widest, parts_of(k // _SHRUNK, 4)
    y = torch.empty(splits, rows, outs, dtype=torch.float32, device=x_MI.device)
    u = torch.empty(u_splits, rows, wide, dtype=torch.float32, device=x_MI.device)
    count = tiles.cells.shape[1]
    shrinks, products = count * u_splits, cdiv(outs, _COLUMNS) * splits
    _project[(shrinks + products,)](
        x_MI, weight_OI, y, u, table.addresses, tiles.cells, shrinks, count, table.addresses.shape[1],
        site.column, rows, outs, k, x_MI.stride(0), weight_OI.stride(1), weight_OI.stride(0),
        u.stride(1), u.stride(0),
        EVEN=k % (_FEATURES * splits) == 0 and outs % _COLUMNS == 0, SPLITS=splits,
        MULTIPLE=len(site.outs), U_SPLITS=u_splits, BLOCK_M=_ROWS, BLOCK_N=_COLUMNS, BLOCK_K=_FEATURES,
        U_ROWS=tiles.rows, U_COLUMNS=max(16, power_of_2(wide)), U_FEATURES=_SHRUNK,
        num_warps=4, num_stages=4, **PDL,
    )  # fmt: skip
    return SplitKProjection(y, u, adapters, x_MI.dtype)

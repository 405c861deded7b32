# pyright: reportMissingImports=false, reportIndexIssue=false, reportArgumentType=false, reportCallIssue=false, reportReturnType=false, reportGeneralTypeIssues=false
"""Defers LoRA's up-projection in decode: the following rotary or SwiGLU kernel adds u·Bᵀ.

A projection returns `DeferredExpand`, a `hooks.PartialProjection` of qkv or gate-up: the frozen product and
u = x·Aᵀ. With one split of u, results are bitwise identical to `lora_kernels.expand` and what follows it.
Tiles must cover every row.

Shapes: M rows, O out-features, F MLP width, S splits, R rank of all parts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from tinkex.engine.cuda.adapter_table import SiteAdapters
from tinkex.engine.cuda.elementwise import sum_loaded_rows
from tinkex.engine.cuda.launch import PDL, cdiv, launched, load_fp32, power_of_2, wait_for_previous
from tinkex.engine.cuda.lora_kernels import b_of, expand, load_u, scaled, tile_at
from tinkex.engine.torch.hooks import Norms

_COLUMNS = 64  # of one program, as measured on an H200
MAX_DEFERRED = 128  # columns of u, of all parts, that a program can hold


@triton.jit
def _projected(
    y, u, b, rank, scale, part, row, have_m, before, col, have_n, stride_y, stride_u, split_u,
    SPLITS: tl.constexpr, RANK: tl.constexpr, BLOCK_M: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Columns `col` of a part of the projection, rounded to the model's dtype."""
    place = y + row[:, None] * stride_y + before + col[None, :]
    total = load_fp32(place, have_m & have_n)
    at = tl.arange(0, RANK)
    place = u + row[:, None] * stride_u + part * rank + at[None, :]
    left = load_u(place, have_m & (at < rank)[None, :], split_u, SPLITS, BLOCK_M, RANK)
    if SPLITS == 1:
        total = tl.dot(scaled(left, scale, DTYPE), b, total)
    else:  # faster; no other kernel must match it bitwise
        total += tl.dot(left.to(DTYPE), b) * scale
    return total.to(DTYPE).to(tl.float32)


@launched
@triton.jit(do_not_specialize=["tiles", "column"])
def _swiglu(
    y, u, out, table, scales, cells, tiles, columns, column, F, stride_u, split_u,
    SPLITS: tl.constexpr, RANK: tl.constexpr, VECTORS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    slot, start, count = tile_at(cells, tiles, tl.program_id(1))
    m, col = tl.arange(0, BLOCK_M), tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = (start + m).to(tl.int64)
    have_m, have_n = (m < count)[:, None], (col < F)[None, :]
    dtype = out.dtype.element_ty
    r = tl.arange(0, RANK)
    where = (table, scales, slot, columns, column)
    b_gate, rank, scale = b_of(where, 0, F, r, col, have_n, dtype, VECTORS)
    b_up, rank_up, _ = b_of(where, 1, F, r, col, have_n, dtype, VECTORS)
    wait_for_previous()
    gate = _projected(y, u, b_gate, rank, scale, 0, row, have_m, 0, col, have_n, 2 * F, stride_u, split_u,
                      SPLITS, RANK, BLOCK_M, dtype)  # fmt: skip
    up = _projected(y, u, b_up, rank_up, scale, 1, row, have_m, F, col, have_n, 2 * F, stride_u, split_u,
                    SPLITS, RANK, BLOCK_M, dtype)  # fmt: skip
    tl.store(out + row[:, None] * F + col[None, :], gate * tl.sigmoid(gate) * up, mask=have_m & have_n)


@launched
@triton.jit(do_not_specialize=["tiles", "column"])
def _rotate(
    y, u, cos, sin, q_norm, k_norm, q, k, v, table, scales, cells, tiles, columns, column, H, G, eps,
    stride_u, split_u, SPLITS: tl.constexpr, RANK: tl.constexpr, VECTORS: tl.constexpr,
    BLOCK_M: tl.constexpr, C: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """One head of a tile's rows; HALF columns hold half of it, since rotation pairs the two halves."""
    slot, start, count = tile_at(cells, tiles, tl.program_id(1))
    head = tl.program_id(0)
    part = tl.where(head < H, 0, tl.where(head < H + G, 1, 2))
    first = tl.where(part == 0, 0, tl.where(part == 1, H, H + G))  # the part's first head
    width = tl.where(part == 0, H, G) * C
    m, at = tl.arange(0, BLOCK_M), tl.arange(0, HALF)
    row = (start + m).to(tl.int64)
    have_m, have_n = (m < count)[:, None], (at < C // 2)[None, :]
    low = (head - first) * C + at
    high = low + C // 2
    dtype = q.dtype.element_ty
    r = tl.arange(0, RANK)
    where = (table, scales, slot, columns, column)
    b_low, rank, scale = b_of(where, part, width, r, low, have_n, dtype, VECTORS)
    b_high, _, _ = b_of(where, part, width, r, high, have_n, dtype, VECTORS)
    angle = row[:, None] * (C // 2) + at[None, :]
    c, s = load_fp32(cos + angle, have_m & have_n), load_fp32(sin + angle, have_m & have_n)
    wait_for_previous()
    a = _projected(y, u, b_low, rank, scale, part, row, have_m, first * C, low, have_n, (H + 2 * G) * C,
                   stride_u, split_u, SPLITS, RANK, BLOCK_M, dtype)  # fmt: skip
    b = _projected(y, u, b_high, rank, scale, part, row, have_m, first * C, high, have_n, (H + 2 * G) * C,
                   stride_u, split_u, SPLITS, RANK, BLOCK_M, dtype)  # fmt: skip
    if part < 2:
        if NORM:
            if SPLITS == 1:  # bitwise identical to the trainer
                squares = sum_loaded_rows(a * a, BLOCK_M, HALF) + sum_loaded_rows(b * b, BLOCK_M, HALF)
            else:
                squares = tl.sum(a * a, 1) + tl.sum(b * b, 1)
            rstd = tl.rsqrt(squares / C + eps)[:, None]
            norm = k_norm
            if part == 0:
                norm = q_norm
            wa, wb = load_fp32(norm + at, at < C // 2), load_fp32(norm + C // 2 + at, at < C // 2)
            a = (a * rstd).to(dtype).to(tl.float32) * wa[None, :]
            b = (b * rstd).to(dtype).to(tl.float32) * wb[None, :]
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
class DeferredExpand:
    """A product y and its adapters' u = x·Aᵀ, not added yet: a `hooks.PartialProjection` of qkv, gate-up."""

    y_MO: Tensor
    u_SMR: Tensor  # as `lora_kernels.shrink` returns it
    adapters: SiteAdapters

    def swiglu(self) -> Tensor:
        """silu(gate) * up of a fused [M, 2F]."""
        width = self.adapters.outs[0]
        out = self.y_MO.new_empty(len(self.y_MO), width)
        given, strides, constants = self._arguments()
        _swiglu[(cdiv(width, _COLUMNS), self.adapters.tiles.cells.shape[1])](
            self.y_MO, self.u_SMR, out, *given, width, *strides, **constants, BLOCK_N=_COLUMNS
        )
        return out

    def rotate(
        self, cos: Tensor, sin: Tensor, heads: tuple[int, int], norms: Norms | None, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q and k, normalised (if asked) and rotated, and v."""
        (h, g), (rows, width), y = heads, self.y_MO.shape, self.y_MO
        c = width // (h + 2 * g)
        q, k, v = (y.new_empty(rows, n, c) for n in (h, g, g))
        given, strides, constants = self._arguments()
        _rotate[(h + 2 * g, self.adapters.tiles.cells.shape[1])](
            y, self.u_SMR, cos, sin, *(norms or (cos, cos)), q, k, v, *given, h, g, eps, *strides,
            **constants, C=c, HALF=max(16, power_of_2(c // 2)), NORM=norms is not None,
        )  # fmt: skip
        return q, k, v

    def total(self) -> Tensor:
        expand(self.u_SMR, self.y_MO, self.adapters.b)
        return self.y_MO

    addend = total

    def _arguments(self) -> tuple[tuple[Any, ...], tuple[int, int], dict[str, Any]]:
        """What both kernels are given: tables, tiles and the site's column; strides; constants."""
        u, (table, tiles) = self.u_SMR, (self.adapters.table, self.adapters.tiles)
        rank = max(16, power_of_2(table.widest))
        constants = {"SPLITS": len(u), "RANK": rank, "VECTORS": table.vectors, "BLOCK_M": tiles.rows}
        return self.adapters.b.where, (u.stride(1), u.stride(0)), {**constants, "num_warps": 4, **PDL}

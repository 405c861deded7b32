# pyright: reportMissingImports=false, reportIndexIssue=false, reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false, reportOperatorIssue=false, reportAssignmentType=false, reportGeneralTypeIssues=false
"""A frozen product and its adapters' up-projection in one launch, for many rows: training and long prompts.

u·Bᵀ is one more iteration of every sum. Each program computes one tile after another, and TMA loads operands
three iterations ahead, also from the next tile. Results are batch-invariant; a large weight's product is
rounded before adapters are added to it, bitwise identical to a sampler's captured steps. Written in Gluon for
Hopper; elsewhere `grouped_lora.product_with` takes other paths.

Shapes: M rows, N out-features, K in-features, of this product: a gradient's are the other way round.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tinkex.engine.cuda.adapter_table import ALIGNED, SiteMatrices
from tinkex.engine.cuda.fused_projection import MAX_FEATURES
from tinkex.engine.cuda.launch import MULTIPROCESSORS, cdiv, launched

# renamed in Triton 3.7
wait_for_all = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier

MIN_ROWS = 512  # fewer do not fill the device in such tiles
_COLUMNS = 256  # of a tile of ALIGNED rows
_FEATURES = 64  # of one iteration
_SLICE = 64  # columns of one store
_FINITE: gl.constexpr = gl.constexpr(3.38e38)  # about the largest bf16
_FIRST_ROUNDS: gl.constexpr = gl.constexpr(5)  # of a tile: adapters' operands are loaded in them


@gluon.jit
def _tile_at(index, tiles_m, tiles_n, TOGETHER: gl.constexpr):
    """Row and column of a tile: column by column through bands of TOGETHER rows, which share L2."""
    band = index // (TOGETHER * tiles_n)
    high = gl.maximum(gl.minimum(tiles_m - band * TOGETHER, TOGETHER), 1)  # there may be none
    inside = index % (TOGETHER * tiles_n)
    return band * TOGETHER + inside % high, inside // high


@gluon.jit
def _fetch(ahead, ring, sizes, TURNED: gl.constexpr, TOGETHER: gl.constexpr):
    """Start the loads of iteration `ahead` into its stage; returns the iteration after it."""
    stage, index, m, n, k = ahead
    x, w, left, right, full = ring
    tiles_m, tiles_n, rounds = sizes
    ROWS: gl.constexpr = x.block_type.shape[0]
    FEATURES: gl.constexpr = x.block_type.shape[1]
    COLUMNS: gl.constexpr = w.block_type.shape[1] if TURNED else w.block_type.shape[0]
    there, bar = index < tiles_m * tiles_n, full.index(stage)
    mbarrier.expect(bar, 2 * FEATURES * (ROWS + COLUMNS), pred=there)
    tma.async_copy_global_to_shared(x, [m * ROWS, k * FEATURES], bar, left.index(stage), pred=there)
    at = [k * FEATURES, n * COLUMNS] if TURNED else [n * COLUMNS, k * FEATURES]
    tma.async_copy_global_to_shared(w, at, bar, right.index(stage), pred=there)
    k += 1
    if k == rounds:
        k = 0
        index += gl.num_programs(0)
        m, n = _tile_at(index, tiles_m, tiles_n, TOGETHER)
    return (stage + 1) % left.shape[0], index, m, n, k


@gluon.jit
def _round(total, goes_on, now, ahead, ring, sizes, TURNED: gl.constexpr, TOGETHER: gl.constexpr):
    """Multiply one stage while the product before it ends; then load into the stage before it."""
    stage, phase = now
    _, _, left, right, full = ring
    mbarrier.wait(full.index(stage), phase)
    other = right.index(stage)
    if not TURNED:
        other = other.permute((1, 0))
    total = warpgroup_mma(left.index(stage), other, total, use_acc=goes_on, is_async=True)
    total = warpgroup_mma_wait(1, deps=[total])
    wait_for_all()  # all warps have read the stage before this one
    ahead = _fetch(ahead, ring, sizes, TURNED, TOGETHER)
    stage += 1
    if stage == left.shape[0]:
        stage = 0
        phase = phase ^ 1
    return total, (stage, phase), ahead


@gluon.jit
def _adapter_at(cells, tiles, at, end):
    """The slot of tile `at`, its first row, the number of rows with that slot, and the tile after them."""
    have = at < end
    slot, start = gl.load(cells + at, mask=have, other=0), gl.load(cells + tiles + at, mask=have, other=0)
    count = gl.load(cells + 4 * tiles + at, mask=have, other=0)
    after = gl.load(cells + 5 * tiles + at, mask=have, other=0)
    return slot, start, count, gl.maximum(after, at + 1)  # an empty tile says 0


@gluon.jit
def _matrix_at(table, scales, columns, column, part, slot):
    """A slot's rank, the address of its matrix, and its scale."""
    rank = gl.load(table + slot * columns).to(gl.int32)
    return rank, gl.load(table + slot * columns + column + part), gl.load(scales + slot)


@gluon.jit
def _operands(u, address, row, col, start, count, width, left_of, k, wide, scale, stride_u,
              STEP: gl.constexpr, by_row: gl.constexpr, by_col: gl.constexpr):  # fmt: skip
    """Columns k:k+STEP of scale · u and these rows of an adapter's matrix; zeros in other adapters' rows."""
    matrix = address.to(gl.pointer_type(u.dtype.element_ty))
    r = k + gl.arange(0, STEP, layout=gl.SliceLayout(0, by_row))
    mine = ((row >= start) & (row < start + count))[:, None] & (r < wide)[None, :]
    low = gl.load(u + row.to(gl.int64)[:, None] * stride_u + left_of + r[None, :], mask=mine, other=0.0)
    r = k + gl.arange(0, STEP, layout=gl.SliceLayout(1, by_col))
    have = (r < wide)[:, None] & (col < width)[None, :]
    up = gl.load(matrix + r[:, None] * width + col[None, :], mask=have, other=0.0).to(gl.float32)
    # other adapters' rows are zeros here, and zero times inf would be NaN
    up = gl.where((up >= -_FINITE) & (up <= _FINITE), up, _FINITE)
    return (low.to(gl.float32) * scale).to(low.dtype), up.to(low.dtype)


@gluon.jit
def _halves(x):
    """The left and the right half of a tile's columns; no data moves."""
    return x.reshape([x.shape[0], 2, x.shape[1] // 2]).permute((0, 2, 1)).split()


@gluon.jit
def _store(y, buffers, x, m, n, number: gl.constexpr):
    """Store one slice of a tile's columns; TMA drops rows beyond the last."""
    ROWS: gl.constexpr = y.block_type.shape[0]
    SLICE: gl.constexpr = y.block_type.shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, SLICE, 16])
    buffer = buffers.index(number % 2)
    tma.store_wait(1)  # the last store from this buffer is done
    wait_for_all()
    buffer.store(gl.convert_layout(x, layout))
    fence_async_shared()
    wait_for_all()
    tma.async_copy_shared_to_global(y, [m * ROWS, n * 4 * SLICE + number * SLICE], buffer)


@launched
@gluon.jit(do_not_specialize=["tiles", "column", "tiles_m", "tiles_n", "rounds"])
def _project(
    x, w, y, u, table, scales, cells, tiles, columns, column, n0, n1, n2, n3, stride_u, tiles_m, tiles_n,
    rounds, TURNED: gl.constexpr, ROUNDED: gl.constexpr, MULTIPLE: gl.constexpr, STAGES: gl.constexpr,
    STEP: gl.constexpr, TOGETHER: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = x.dtype
    ROWS: gl.constexpr = x.block_type.shape[0]
    COLUMNS: gl.constexpr = 4 * y.block_type.shape[1]
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, COLUMNS, 16])
    by_row: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [gl.num_warps(), 1], [1, 0])
    by_col: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [gl.num_warps(), 1], [1, 0])
    left = gl.allocate_shared_memory(dtype, [STAGES, ROWS, x.block_type.shape[1]], x.layout)
    right = gl.allocate_shared_memory(dtype, [STAGES, w.block_type.shape[0], w.block_type.shape[1]], w.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    buffers = gl.allocate_shared_memory(dtype, [2, y.block_type.shape[0], y.block_type.shape[1]], y.layout)
    # between two tiles' stores the buffers hold the adapters' operands
    low_shared = buffers.index(0)._reinterpret(
        dtype, [ROWS, STEP], gl.NVMMASharedLayout.get_default_for([ROWS, STEP], dtype)
    )
    up_shared = buffers.index(1)._reinterpret(
        dtype, [STEP, COLUMNS], gl.NVMMASharedLayout.get_default_for([STEP, COLUMNS], dtype)
    )
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
    fence_async_shared()
    wait_for_all()

    ring, sizes, now = (x, w, left, right, full), (tiles_m, tiles_n, rounds), (0, 0)
    m, n = _tile_at(gl.program_id(0), tiles_m, tiles_n, TOGETHER)
    ahead = (0, gl.program_id(0), m, n, 0)
    for _ in range(STAGES - 1):
        ahead = _fetch(ahead, ring, sizes, TURNED, TOGETHER)
    total = gl.zeros([ROWS, COLUMNS], gl.float32, sums)
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        m, n = _tile_at(tile, tiles_m, tiles_n, TOGETHER)
        b0 = gl.cdiv(n0, COLUMNS)
        b1 = b0 + gl.cdiv(n1, COLUMNS)
        b2 = b1 + gl.cdiv(n2, COLUMNS)
        part = gl.where(n < b0, 0, gl.where(n < b1, 1, gl.where(n < b2, 2, 3)))
        width = gl.where(part == 0, n0, gl.where(part == 1, n1, gl.where(part == 2, n2, n3)))
        first = (n - gl.where(part == 0, 0, gl.where(part == 1, b0, gl.where(part == 2, b1, b2)))) * COLUMNS
        row = m * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, by_row))
        col = first + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, by_col))
        # one iteration between dependent loads, so that none waits for memory
        at = gl.load(cells + 3 * tiles + m, mask=m < tiles, other=tiles)
        end = gl.load(cells + 3 * tiles + m + 1, mask=m + 1 < tiles, other=tiles)
        total, now, ahead = _round(total, False, now, ahead, ring, sizes, TURNED, TOGETHER)
        slot, start, count, at = _adapter_at(cells, tiles, at, end)
        total, now, ahead = _round(total, True, now, ahead, ring, sizes, TURNED, TOGETHER)
        rank, address, scale = _matrix_at(table, scales, columns, column, part, slot)
        total, now, ahead = _round(total, True, now, ahead, ring, sizes, TURNED, TOGETHER)
        wide = gl.where((address != 0) & (count > 0), rank * MULTIPLE, 0)
        low, up = _operands(
            u, address, row, col, start, count, width, part * rank, 0, wide, scale, stride_u, STEP,
            by_row, by_col,
        )  # fmt: skip
        for _ in gl.static_range(2):
            total, now, ahead = _round(total, True, now, ahead, ring, sizes, TURNED, TOGETHER)
        tma.store_wait(0)  # of the tile before, long done
        wait_for_all()
        low_shared.store(low)
        up_shared.store(up)
        fence_async_shared()
        for _ in range(_FIRST_ROUNDS, rounds):
            total, now, ahead = _round(total, True, now, ahead, ring, sizes, TURNED, TOGETHER)
        wait_for_all()
        if ROUNDED:
            total = warpgroup_mma_wait(0, deps=[total]).to(dtype).to(gl.float32)
        total = warpgroup_mma(low_shared, up_shared, total, is_async=True)
        total = warpgroup_mma_wait(0, deps=[total])
        done = STEP
        more = (done < wide) | (at < end)
        while more:  # wider or further adapters
            if done >= wide:
                done = 0
                slot, start, count, at = _adapter_at(cells, tiles, at, end)
                rank, address, scale = _matrix_at(table, scales, columns, column, part, slot)
                wide = gl.where((address != 0) & (count > 0), rank * MULTIPLE, 0)
            low, up = _operands(
                u, address, row, col, start, count, width, part * rank, done, wide, scale, stride_u, STEP,
                by_row, by_col,
            )  # fmt: skip
            wait_for_all()
            low_shared.store(low)
            up_shared.store(up)
            fence_async_shared()
            wait_for_all()
            total = warpgroup_mma_wait(0, deps=[warpgroup_mma(low_shared, up_shared, total, is_async=True)])
            done += STEP
            more = (done < wide) | (at < end)
        one, two = _halves(total.to(dtype))
        slices = _halves(one) + _halves(two)
        for number in gl.static_range(4):
            _store(y, buffers, slices[number], m, n, number)
    tma.store_wait(0)


@cache
def _hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def suits(rows: int, weight: Tensor, sizes: Sequence[int]) -> bool:
    """Whether the kernel can compute such a product faster than others: whole tiles that fill the device.

    A library is faster at long sums, where adapters add little time.
    """
    columns = sum(sizes)
    features, whole = weight.numel() // columns, all(size % _COLUMNS == 0 for size in sizes[:-1])
    aligned = max(weight.stride()) % 8 == 0 and sizes[-1] % 8 == 0 and features % 8 == 0
    fits = whole and aligned and 5 * _FEATURES < features <= MAX_FEATURES
    many = cdiv(rows, ALIGNED) * cdiv(columns, _COLUMNS) >= MULTIPROCESSORS
    return rows >= MIN_ROWS and many and fits and _hopper(weight.device)


@cache
def _layout(*block: int) -> Any:
    return gl.NVMMASharedLayout.get_default_for(list(block), gl.bfloat16)


def _descriptor(x: Tensor, *block: int) -> TensorDescriptor:
    return TensorDescriptor(x, x.shape, x.stride(), list(block), _layout(*block))


def project(
    x: Tensor, w_NK: Tensor, u: Tensor, at: SiteMatrices, y: Tensor | None = None, *, rounded: bool = False
) -> Tensor:
    """x · wᵀ + scale · u · matrix, into `y` if given; `u` is one split, and tiles cover every row.

    `rounded`: the product is, before the rest is added to it.
    """
    (rows, k), turned = x.shape, w_NK.stride(0) == 1
    y = x.new_empty(rows, w_NK.shape[0]) if y is None else y
    weight = _descriptor(w_NK.t(), _FEATURES, _COLUMNS) if turned else _descriptor(w_NK, _COLUMNS, _FEATURES)
    tiles_m, tiles_n = cdiv(rows, ALIGNED), cdiv(y.shape[1], _COLUMNS)
    _project[(min(MULTIPROCESSORS, tiles_m * tiles_n),)](
        _descriptor(x, ALIGNED, _FEATURES), weight, _descriptor(y, ALIGNED, _SLICE),
        u, *at.where, *at.widths, u.stride(0), tiles_m, tiles_n, cdiv(k, _FEATURES),
        TURNED=turned, ROUNDED=rounded, MULTIPLE=at.multiple, STAGES=4, STEP=32, TOGETHER=8, num_warps=8,
    )  # fmt: skip
    return y

# pyright: reportMissingImports=false, reportIndexIssue=false, reportArgumentType=false, reportCallIssue=false
"""A batch-invariant frozen product: a row's result does not depend on how many other rows there are.

Each sum runs over the features in order, without split-K, so the tile shape (chosen by the number of rows)
does not change the result. A library's product is faster and promises no such thing.

Shapes: M rows, N out-features, K in-features.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tinkex.engine.cuda.launch import PDL, cdiv, launched, load, wait_for_previous

_TOGETHER = 8  # tiles of rows that share weights in L2


def _tile(rows: int) -> tuple[int, int, int, int, int]:
    """Rows, columns, features of an iteration, warps, stages."""
    if rows <= 16:
        return 16, 64, 128, 4, 4
    if rows <= 64:
        return 64, 64, 128, 4, 3
    return (64, 128, 64, 4, 4) if rows <= 512 else (128, 128, 64, 8, 3)


@launched
@triton.jit(do_not_specialize=["M"])
def _product(
    x, weight, bias, y, M, N, K, stride_x, stride_n, stride_k, stride_y,
    BIAS: tl.constexpr, EVEN: tl.constexpr, TOGETHER: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    wait_for_previous()
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    band = tl.program_id(0) // (TOGETHER * tiles_n)
    high = tl.minimum(tiles_m - band * TOGETHER, TOGETHER)
    inside = tl.program_id(0) % (TOGETHER * tiles_n)
    m = (band * TOGETHER + inside % high) * BLOCK_M + tl.arange(0, BLOCK_M)
    n, k = inside // high * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    have_m, have_n = (m < M)[:, None], (n < N)[None, :]
    at_x = x + m.to(tl.int64)[:, None] * stride_x + k[None, :]
    at_weight = weight + n.to(tl.int64)[None, :] * stride_n + k.to(tl.int64)[:, None] * stride_k
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        if EVEN:
            left, right = load(at_x, have_m), load(at_weight, have_n)
        else:
            have_k = start + k < K
            left, right = load(at_x, have_m & have_k[None, :]), load(at_weight, have_n & have_k[:, None])
        total = tl.dot(left, right, total)
        at_x += BLOCK_K
        at_weight += BLOCK_K * stride_k
    if BIAS:
        total += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    tl.store(y + m.to(tl.int64)[:, None] * stride_y + n[None, :], total, mask=have_m & have_n)


def product(x_MK: Tensor, weight_NK: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """x · weightᵀ + bias, [M, N] in x's dtype; the weight may be row- or column-major."""
    (rows, k), n = x_MK.shape, weight_NK.shape[0]
    block_m, block_n, block_k, warps, stages = _tile(rows)
    y_MN = x_MK.new_empty(rows, n)
    _product[(cdiv(rows, block_m) * cdiv(n, block_n),)](
        x_MK, weight_NK, x_MK if bias_N is None else bias_N, y_MN, rows, n, k,
        x_MK.stride(0), *weight_NK.stride(), y_MN.stride(0),
        BIAS=bias_N is not None, EVEN=k % 128 == 0, TOGETHER=_TOGETHER,
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, num_warps=warps, num_stages=stages, **PDL,
    )  # fmt: skip
    return y_MN


class InvariantLinear(torch.autograd.Function):
    """`product` with a gradient to x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(weight)
        return product(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (weight,) = ctx.saved_tensors
        return grads[0] @ weight, None, None

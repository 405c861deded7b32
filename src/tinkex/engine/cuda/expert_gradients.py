# pyright: reportMissingImports=false, reportIndexIssue=false, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
"""The backward of experts: through SwiGLU, and the gradients of every expert's A and B.

Rows are (token, expert) pairs sorted by expert. `engine.torch.models.moe` in plain torch is the oracle.

Shapes: T tokens, K experts of a token, N = T·K rows, E experts, F expert width, R rank, P parts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tinkex.engine.cuda.adapter_table import SiteAdapters
from tinkex.engine.cuda.expert_kernels import SWIGLU, Activation, acted
from tinkex.engine.cuda.expert_lora import ExpertSite, given_adapters, matrix_of
from tinkex.engine.cuda.expert_routing import ExpertRows
from tinkex.engine.cuda.launch import PDL, cdiv, launched, load, load_fp32, power_of_2, wait_for_previous


@triton.jit
def _acted_backward(gate, up, alpha, limit, CLAMPED: tl.constexpr):
    """The derivatives of `acted` by gate and up."""
    if CLAMPED:
        free_gate, free_up = gate <= limit, (up >= -limit) & (up <= limit)
        gate, up = tl.minimum(gate, limit), tl.minimum(tl.maximum(up, -limit), limit) + 1
        sig = tl.sigmoid(alpha * gate)
        by_gate = tl.where(free_gate, up * sig * (1 + alpha * gate * (1 - sig)), 0.0)
        return by_gate, tl.where(free_up, gate * sig, 0.0)
    else:
        sig = tl.sigmoid(gate)
        return up * sig * (1 + gate * (1 - sig)), gate * sig


@launched
@triton.jit
def _activate_backward(
    grad, gate_up, weights, order, grad_gate_up, h, dots, F, alpha, limit, CLAMPED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradients to gate and up of one row from that to h before its routing weight; and h again.

    The product of h with that gradient is the gradient to the routing weight.
    """
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    wait_for_previous()
    pair, inside = tl.load(order + row), at < F
    weight = tl.load(weights + pair).to(tl.float32)
    gate, up = (
        load_fp32(gate_up + row * 2 * F + at, inside),
        load_fp32(gate_up + row * 2 * F + F + at, inside),
    )
    total = load_fp32(grad + row * F + at, inside)
    by_gate, by_up = _acted_backward(gate, up, alpha, limit, CLAMPED)
    hidden = acted(gate, up, alpha, limit, CLAMPED).to(h.dtype.element_ty)
    tl.store(h + row * F + at, hidden, mask=inside)
    tl.store(dots + pair, tl.sum(hidden.to(tl.float32) * total, 0))
    total *= weight
    tl.store(grad_gate_up + row * 2 * F + at, total * by_gate, mask=inside)
    tl.store(grad_gate_up + row * 2 * F + F + at, total * by_up, mask=inside)


@launched
@triton.jit(do_not_specialize=["segments", "column", "each"])
def _outer_rows(
    u, g, weights, order, starts, bounds, of_segments, table, scales, columns, column, each, segments,
    width, K, stride_u, stride_g, WEIGHED: tl.constexpr, ATOMIC: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The expert's matrix [R, width] (fp32) += scale · u[tokens, part]ᵀ · g[rows, part's columns].

    Over the rows of one expert in one segment of tokens. WEIGHED: u times the routing weight.
    """
    blocks = tl.cdiv(width, BLOCK_N)
    part, first = tl.program_id(0) // blocks, tl.program_id(0) % blocks * BLOCK_N
    expert, segment = tl.program_id(1) // segments, tl.program_id(1) % segments
    wait_for_previous()
    start = tl.load(bounds + tl.program_id(1))
    stop = tl.load(starts + expert + 1)
    if segment + 1 < segments:
        stop = tl.load(bounds + tl.program_id(1) + 1)
    slot = tl.load(of_segments + segment)
    if (stop > start) & (slot >= 0):
        rank, matrix = matrix_of((table, scales, columns, column), part, slot, expert, each, tl.float32)
        r, n = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M), first + tl.arange(0, BLOCK_N)
        if tl.program_id(2) * BLOCK_M < rank:
            have_r, have_n = r < rank, n < width
            total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
            for k in range(start, stop, BLOCK_K):
                row = (k + tl.arange(0, BLOCK_K)).to(tl.int64)
                have_k = row < stop
                pair = tl.load(order + row, mask=have_k, other=0).to(tl.int64)
                left = load(
                    g + row[:, None] * stride_g + part * width + n[None, :], have_k[:, None] & have_n[None, :]
                )
                place = u + (pair // K)[:, None] * stride_u + part * rank + r[None, :]
                right = load(place, have_k[:, None] & have_r[None, :])
                if WEIGHED:
                    weight = load_fp32(weights + pair, have_k)[:, None]
                    right = (right.to(tl.float32) * weight).to(right.dtype)
                total = tl.dot(tl.trans(left), right, total)
            total = tl.trans(total) * tl.load(scales + slot)
            have = have_r[:, None] & have_n[None, :]
            out = matrix + r[:, None] * width + n[None, :]
            if ATOMIC:
                tl.atomic_add(out, total, mask=have, sem="relaxed")
            else:
                tl.store(out, total + load(out, have), mask=have)


# -- launching -----------------------------------------------------------------------------------------


def activate_backward(
    grad_NF: Tensor, kept: Tensor, rows: ExpertRows, weight_TK: Tensor, activation: Activation = SWIGLU
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients to gate and up [N, 2F], h [N, F], and the gradients to the routing weights [T, K].

    `grad_NF` is the gradient to h before the routing weights.
    """
    grads, h, dots = torch.empty_like(kept), torch.empty_like(grad_NF), torch.empty_like(weight_TK)
    rows_N, inner = grad_NF.shape
    _activate_backward[(rows_N,)](
        grad_NF, kept, weight_TK, rows.order_N, grads, h, dots, inner, activation.alpha,
        activation.limit, CLAMPED=activation.clamped, BLOCK=power_of_2(inner), num_warps=4, **PDL,
    )  # fmt: skip
    return grads, h, dots


def add_outer(
    u_T: Tensor, g_N: Tensor, weight_TK: Tensor | None, rows: ExpertRows, bounds: Tensor,
    of_segments: Tensor, into: SiteAdapters, side: str, atomic: bool,
) -> None:  # fmt: skip
    """Add to the gradients of every expert's A or B: u of each row's token times g."""
    given = given_adapters(ExpertSite(into, of_segments), side, g_N)
    addresses, scales, _, columns, column, each = given.where
    width, (experts, segments) = g_N.shape[1] // given.parts, bounds.shape
    _outer_rows[(given.parts * cdiv(width, 128), experts * segments, cdiv(given.widest, given.block))](
        u_T, g_N, u_T if weight_TK is None else weight_TK, rows.order_N, rows.starts_E, bounds, of_segments,
        addresses, scales, columns, column, each, segments, width, rows.per_token, u_T.stride(0),
        g_N.stride(0), WEIGHED=weight_TK is not None, ATOMIC=atomic,
        BLOCK_M=given.block, BLOCK_N=128, BLOCK_K=64, num_warps=4, num_stages=3, **PDL,
    )  # fmt: skip

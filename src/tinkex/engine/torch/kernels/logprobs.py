# pyright: reportMissingImports=false, reportIndexIssue=false, reportArgumentType=false, reportCallIssue=false
"""Rows of logits to their normaliser, and in place to their gradient.

The logits stay in bf16 and are read once for each of the two; everything in between is fp32 in registers.
Knows nothing of adapters or losses.

Shapes: N rows, V padded vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tinkex.engine.torch.kernels.chain import CHAINED, after_previous

_COLUMNS = 4096  # of a row that one round reads


@triton.jit
def _normaliser(logits, out, V, stride, BLOCK: tl.constexpr):
    after_previous()
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    mass = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, V, BLOCK):
        z = tl.load(logits + row * stride + start + at, mask=start + at < V, other=float("-inf")).to(
            tl.float32
        )
        higher = tl.maximum(best, z)
        level = tl.where(higher == float("-inf"), 0.0, higher)
        mass = mass * tl.exp(best - level) + tl.exp(z - level)
        best = higher
    level = tl.max(best, 0)
    tl.store(out + row, level + tl.log(tl.sum(mass * tl.exp(best - level), 0)))


@triton.jit
def _gradient(logits, normaliser, ids, grads, V, stride, BLOCK: tl.constexpr):
    after_previous()
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place = logits + row * stride + at
    grad, target = tl.load(grads + row), tl.load(ids + row)
    p = tl.exp(tl.load(place, mask=at < V, other=float("-inf")).to(tl.float32) - tl.load(normaliser + row))
    tl.store(place, grad * (tl.where(at == target, 1.0, 0.0) - p), mask=at < V)


def normaliser(logits_NV: Tensor) -> Tensor:
    """log Σ exp of each row, fp32 [N]."""
    rows, v = logits_NV.shape
    out = torch.empty(rows, dtype=torch.float32, device=logits_NV.device)
    _normaliser[(rows,)](logits_NV, out, v, logits_NV.stride(0), BLOCK=_COLUMNS, num_warps=8, **CHAINED)
    return out


def gradient_(logits_NV: Tensor, normaliser_N: Tensor, ids_N: Tensor, grads_N: Tensor) -> Tensor:
    """In place: grads · (onehot(ids) − softmax(logits)). An id below 0 is no target: −grads · softmax."""
    rows, v = logits_NV.shape
    grid = rows, triton.cdiv(v, _COLUMNS)
    _gradient[grid](
        logits_NV,
        normaliser_N,
        ids_N,
        grads_N,
        v,
        logits_NV.stride(0),
        BLOCK=_COLUMNS,
        num_warps=8,
        **CHAINED,
    )
    return logits_NV

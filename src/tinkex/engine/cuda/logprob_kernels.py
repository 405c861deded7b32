# pyright: reportMissingImports=false, reportIndexIssue=false, reportArgumentType=false, reportCallIssue=false
"""Log-sum-exp of rows of logits, and their gradient in place.

Logits stay in bf16 and are read once for each; everything between is fp32 in registers. `normaliser` with
temperatures and `chosen` are batch-invariant, so a sampler and a trainer that both use them agree bitwise.
Knows nothing of adapters or losses.

Shapes: N rows, V padded vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tinkex.engine.cuda.launch import launched
from tinkex.engine.cuda.pdl import PDL, wait_for_previous
from tinkex.engine.cuda.sizes import cdiv
from tinkex.engine.torch.next_tokens import COLDEST

_COLUMNS = 4096  # of a row in one iteration, in four parts


@triton.jit
def _scaled(z, temperature, COLDEST: tl.constexpr):
    """`sample.scaled`: correctly rounded, so that a temperature of 1 changes nothing."""
    return tl.div_rn(z, tl.where(temperature == 0, 1.0, tl.maximum(temperature, COLDEST)))


@triton.jit
def _logits(row, temperature, at, V, SCALED: tl.constexpr, COLDEST: tl.constexpr):
    """Some of a row's logits; -inf past its end."""
    z = tl.load(row + at, mask=at < V, other=float("-inf")).to(tl.float32)
    if SCALED:
        z = _scaled(z, tl.load(temperature), COLDEST)
    return z


@launched
@triton.jit
def _normaliser(
    logits, temperatures, out, V, stride,
    SCALED: tl.constexpr, COLDEST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A thread's four logits share one running maximum: five exponentials, not eight."""
    wait_for_previous()
    row = tl.program_id(0).to(tl.int64)
    best = tl.full((BLOCK // 4,), float("-inf"), tl.float32)
    mass = tl.zeros((BLOCK // 4,), tl.float32)
    for start in range(0, V, BLOCK):
        at = start + tl.arange(0, BLOCK // 4)
        a = _logits(logits + row * stride, temperatures + row, at, V, SCALED, COLDEST)
        b = _logits(logits + row * stride, temperatures + row, at + BLOCK // 4, V, SCALED, COLDEST)
        c = _logits(logits + row * stride, temperatures + row, at + BLOCK // 2, V, SCALED, COLDEST)
        d = _logits(logits + row * stride, temperatures + row, at + 3 * BLOCK // 4, V, SCALED, COLDEST)
        higher = tl.maximum(tl.maximum(best, tl.maximum(a, b)), tl.maximum(c, d))
        level = tl.where(higher == float("-inf"), 0.0, higher)
        more = (tl.exp(a - level) + tl.exp(b - level)) + (tl.exp(c - level) + tl.exp(d - level))
        mass = mass * tl.exp(best - level) + more
        best = higher
    level = tl.max(best, 0)
    tl.store(out + row, level + tl.log(tl.sum(mass * tl.exp(best - level), 0)))


@launched
@triton.jit
def _chosen(logits, temperatures, normaliser, ids, out, stride, COLDEST: tl.constexpr):
    wait_for_previous()
    row = tl.program_id(0).to(tl.int64)
    z = tl.load(logits + row * stride + tl.load(ids + row)).to(tl.float32)
    tl.store(out + row, _scaled(z, tl.load(temperatures + row), COLDEST) - tl.load(normaliser + row))


@launched
@triton.jit
def _gradient(logits, normaliser, ids, grads, V, stride, BLOCK: tl.constexpr):
    wait_for_previous()
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place = logits + row * stride + at
    grad, target = tl.load(grads + row), tl.load(ids + row)
    p = tl.exp(tl.load(place, mask=at < V, other=float("-inf")).to(tl.float32) - tl.load(normaliser + row))
    tl.store(place, grad * (tl.where(at == target, 1.0, 0.0) - p), mask=at < V)


def normaliser(logits_NV: Tensor, temperature_N: Tensor | None = None) -> Tensor:
    """log Σ exp of each row of logits / temperature (0 counts as 1; none: 1); fp32 [N]."""
    rows, v = logits_NV.shape
    out = torch.empty(rows, dtype=torch.float32, device=logits_NV.device)
    _normaliser[(rows,)](
        logits_NV, out if temperature_N is None else temperature_N, out, v, logits_NV.stride(0),
        SCALED=temperature_N is not None, COLDEST=COLDEST, BLOCK=_COLUMNS, num_warps=4, **PDL,
    )  # fmt: skip
    return out


def chosen(logits_NV: Tensor, temperature_N: Tensor, ids_N: Tensor, out_N: Tensor) -> None:
    """The logprob of each row's id at its temperature."""
    _chosen[(len(logits_NV),)](
        logits_NV, temperature_N, normaliser(logits_NV, temperature_N), ids_N, out_N, logits_NV.stride(0),
        COLDEST=COLDEST, num_warps=1, **PDL,
    )  # fmt: skip


def gradient_(logits_NV: Tensor, normaliser_N: Tensor, ids_N: Tensor, grads_N: Tensor) -> Tensor:
    """In place: grads · (onehot(ids) − softmax(logits)). An id below 0 is no target: −grads · softmax."""
    rows, v = logits_NV.shape
    _gradient[(rows, cdiv(v, _COLUMNS))](
        logits_NV, normaliser_N, ids_N, grads_N, v, logits_NV.stride(0), BLOCK=_COLUMNS, num_warps=8, **PDL
    )  # fmt: skip
    return logits_NV

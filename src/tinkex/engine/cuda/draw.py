# pyright: reportMissingImports=false, reportIndexIssue=false, reportArgumentType=false, reportCallIssue=false
"""Drawing tokens on the device: `next_tokens.scaled_logprobs` and `draw` without top-k or top-p.

Two launches: one pass over the logits for the log-sum-exp and the maximum of every block of ids, then one
program per row that picks a block, an id in it, and computes its logprob. Random numbers are those of
`engine.rng`, from the same keys, so a row draws the same token as on the host. Knows nothing of requests.

Shapes: B rows, V padded vocabulary, N blocks.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tinkex.engine.cuda import logprob_kernels as logprobs
from tinkex.engine.cuda.launch import launched
from tinkex.engine.cuda.pdl import PDL, wait_for_previous
from tinkex.engine.cuda.sizes import cdiv, power_of_2
from tinkex.engine.torch.next_tokens import BLOCK, COLDEST

_AT_ONCE = 16  # blocks of one program
_PICKING = 16  # warps of `_pick`: logarithms in fp64 are slow, and a thread computes its own one by one


@triton.jit
def _scaled(logits, temperature, COLDEST: tl.constexpr):
    return logits.to(tl.float32) * (1.0 / tl.where(temperature == 0, 1.0, tl.maximum(temperature, COLDEST)))


@triton.jit
def _mix(x):
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _log_exponentials(key, first, COUNT: tl.constexpr):
    """Logarithms of the exponentials first, first + 1, … of a key's stream."""
    counter = (first + 1 + tl.arange(0, COUNT)).to(tl.uint64) * 0x9E3779B97F4A7C15
    bits = (_mix(key + counter) >> 12).to(tl.float64)
    return tl.log(-tl.log((bits + 0.5) * 2.220446049250313e-16)).to(tl.float32)


@triton.jit
def _log_sum_exp(z, level):
    level = tl.where(level == float("-inf"), 0.0, level)
    return level, tl.sum(tl.exp(z - level[:, None]), 1)


@launched
@triton.jit
def _blocks(
    logits, temperatures, best, mass, whole, N, V, vocab, stride,
    COLDEST: tl.constexpr, BLOCK: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    wait_for_previous()
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * AT_ONCE + tl.arange(0, AT_ONCE)
    ids = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    z = tl.load(logits + row * stride + ids, mask=ids < V, other=float("-inf"))
    z = _scaled(z, tl.load(temperatures + row), COLDEST)
    top = tl.max(z, 1)
    level, total = _log_sum_exp(z, top)
    sums = level + tl.log(total)
    tl.store(whole + row * N + block, sums, mask=block < N)
    if (tl.program_id(1) + 1) * AT_ONCE * BLOCK > vocab:  # ids of the padded vocabulary are never drawn
        z = tl.where(ids < vocab, z, float("-inf"))
        top = tl.max(z, 1)
        level, total = _log_sum_exp(z, top)
        sums = level + tl.log(total)
    tl.store(mass + row * N + block, sums, mask=block < N)
    tl.store(best + row * N + block, top, mask=block < N)


@launched
@triton.jit
def _pick(
    logits, temperatures, keys, best, mass, whole, tokens, logprobs, N, V, vocab, stride,
    COLDEST: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures + row)
    key = tl.load(keys + row).to(tl.uint64, bitcast=True)
    noise, inside = tl.zeros((BLOCKS,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    if temperature != 0:  # most of the work, and independent of the logits
        noise, inside = _log_exponentials(key, 0, BLOCKS), _log_exponentials(key, N, BLOCK)
    wait_for_previous()
    n = tl.arange(0, BLOCKS)
    masses = tl.load(whole + row * N + n, mask=n < N, other=float("-inf"))
    scores = tl.load(tl.where(temperature == 0, best, mass) + row * N + n, mask=n < N, other=float("-inf"))
    level = tl.max(masses, 0)
    normaliser = level + tl.log(tl.sum(tl.exp(masses - level), 0))
    scores -= noise
    block = tl.minimum(tl.argmax(scores, 0), N - 1)
    ids = block * BLOCK + tl.arange(0, BLOCK)
    z = _scaled(tl.load(logits + row * stride + ids, mask=ids < V, other=float("-inf")), temperature, COLDEST)
    scores = tl.where(ids < vocab, z, float("-inf")) - inside
    token = tl.minimum(block * BLOCK + tl.argmax(scores, 0), vocab - 1)
    chosen = _scaled(tl.load(logits + row * stride + token), temperature, COLDEST)
    tl.store(tokens + row, token.to(tl.int64))
    tl.store(logprobs + row, chosen - normaliser)


def draw(
    logits_BV: Tensor,
    temperature_B: Tensor,
    keys_B: Tensor,
    vocab: int,
    tokens_B: Tensor,
    logprobs_B: Tensor,
    invariant: bool = False,
) -> None:
    """One token id (int64) and its logprob (float32) per row, from the random stream of the row's key.

    `invariant`: logprobs are bitwise identical to those of a batch-invariant trainer.
    """
    (rows, v), n = logits_BV.shape, cdiv(logits_BV.shape[1], BLOCK)
    best, mass, whole = torch.empty(3, rows, n, dtype=torch.float32, device=logits_BV.device)
    sizes = (n, v, vocab, logits_BV.stride(0))
    _blocks[(rows, cdiv(n, _AT_ONCE))](
        logits_BV, temperature_B, best, mass, whole, *sizes,
        COLDEST=COLDEST, BLOCK=BLOCK, AT_ONCE=_AT_ONCE, **PDL,
    )  # fmt: skip
    _pick[(rows,)](
        logits_BV, temperature_B, keys_B, best, mass, whole, tokens_B, logprobs_B, *sizes,
        COLDEST=COLDEST, BLOCK=BLOCK, BLOCKS=power_of_2(n), num_warps=_PICKING, **PDL,
    )  # fmt: skip
    if invariant:
        logprobs.chosen(logits_BV, temperature_B, tokens_B, logprobs_B)

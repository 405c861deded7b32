# pyright: reportMissingImports=false, reportIndexIssue=false, reportArgumentType=false, reportCallIssue=false
"""The kernels at both ends of a step: its inputs, tokens drawn from its logits, and logprobs with gradients.

Drawing does what `next_tokens.scaled_logprobs` and `draw` do without top-k and top-p, and uses the random
numbers of `engine.rng` from the same keys: a row draws the same token as on the host. Logits stay in bf16;
everything between is fp32 in registers. Ids from `vocab` on are padding: kernels read their logits as -inf.
`normaliser` with temperatures is batch-invariant.

Shapes: B, N rows, V padded vocabulary, P positions, C head dim.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tinkex.engine.cuda.launch import PDL, cdiv, launched, power_of_2, wait_for_previous
from tinkex.engine.torch.next_tokens import BLOCK, COLDEST

ORDERS = 6  # rows of the orders: source, token, position, slot, key, slot of the recurrent state
_AT_ONCE = 16  # blocks of ids of one program
_PICKING = 16  # warps of `_pick`: logarithms in fp64 are slow, and a thread computes its own one by one
_COLUMNS = 4096  # of a row of logits in one iteration, in four parts


# -- a step's inputs -----------------------------------------------------------------------------------


@launched
@triton.jit
def _begin(
    orders, last, tokens, slots, tiles, table, known_cos, known_sin, cos, sin, rows, stride, stride_table,
    PAGE: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    wait_for_previous()
    row = tl.program_id(0)
    source, token = tl.load(orders + row), tl.load(orders + stride + row)
    if source >= 0:
        token = tl.load(last + source)
    position, slot = tl.load(orders + 2 * stride + row), tl.load(orders + 3 * stride + row)
    active = slot >= 0
    tl.store(tokens + row, tl.maximum(token, 0))
    tl.store(slots + row, slot)
    tl.store(tiles + row, row)
    tl.store(tiles + rows + row, active.to(tl.int32))
    tl.store(tiles + 2 * rows + row, position.to(tl.int32))
    tl.store(tiles + 3 * rows + row, row)
    at = tl.arange(0, BLOCK)
    place, half = tl.maximum(position, 0) * HALF + at, at < HALF
    tl.store(cos + row * HALF + at, tl.load(known_cos + place, mask=half), mask=half)
    tl.store(sin + row * HALF + at, tl.load(known_sin + place, mask=half), mask=half)
    if active:
        tl.store(table + row * stride_table + position // PAGE, (slot // PAGE).to(tl.int32))


def begin(
    orders: Tensor, last: Tensor, tokens: Tensor, slots: Tensor, tiles: Tensor, table: Tensor, page: int,
    known: tuple[Tensor, Tensor], angles: tuple[Tensor, Tensor],
) -> None:  # fmt: skip
    """Distribute the orders (int64 [ORDERS, capacity]) over the rows of a decode step.

    A row's token is the last token of row `source`, or `token` if `source` is negative; a row with a negative
    slot does nothing. The page that a row writes to is entered in the page table. `known` is cos and sin of
    every position, [P, C / 2] each; those of the rows go to `angles`. A torch operation (the embedding) comes
    next, so that later kernels may read the results before they wait (PDL).
    """
    rows, half = angles[0].shape
    _begin[(rows,)](
        orders, last, tokens, slots, tiles, table, *known, *angles, rows, orders.stride(0), table.stride(0),
        PAGE=page, HALF=half, BLOCK=power_of_2(half), num_warps=1, **PDL,
    )  # fmt: skip


# -- drawing -------------------------------------------------------------------------------------------


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
def _top_and_sum(z):
    """Each row's maximum and log-sum-exp."""
    top = tl.max(z, 1)
    level = tl.where(top == float("-inf"), 0.0, top)
    return top, level + tl.log(tl.sum(tl.exp(z - level[:, None]), 1))


@launched
@triton.jit
def _blocks(
    logits, temperatures, best, mass, N, V, vocab, stride,
    COLDEST: tl.constexpr, BLOCK: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """The maximum and the log-sum-exp of every block of ids."""
    wait_for_previous()
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * AT_ONCE + tl.arange(0, AT_ONCE)
    ids = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    z = tl.load(logits + row * stride + ids, mask=ids < V, other=float("-inf"))
    z = _scaled(z, tl.load(temperatures + row), COLDEST)
    if (tl.program_id(1) + 1) * AT_ONCE * BLOCK > vocab:
        z = tl.where(ids < vocab, z, float("-inf"))
    top, sums = _top_and_sum(z)
    tl.store(mass + row * N + block, sums, mask=block < N)
    tl.store(best + row * N + block, top, mask=block < N)


@launched
@triton.jit
def _pick(
    logits, temperatures, keys, best, mass, tokens, logprobs, N, V, vocab, stride,
    COLDEST: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Pick a block for a row, then an id in it, and compute its logprob."""
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures + row)
    key = tl.load(keys + row).to(tl.uint64, bitcast=True)
    noise, inside = tl.zeros((BLOCKS,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    if temperature != 0:  # most of the work, and independent of the logits
        noise, inside = _log_exponentials(key, 0, BLOCKS), _log_exponentials(key, N, BLOCK)
    wait_for_previous()
    n = tl.arange(0, BLOCKS)
    masses = tl.load(mass + row * N + n, mask=n < N, other=float("-inf"))
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
    logits_BV: Tensor, temperature_B: Tensor, keys_B: Tensor, vocab: int,
    tokens_B: Tensor, logprobs_B: Tensor, invariant: bool = False,
) -> None:  # fmt: skip
    """One token id (int64) and its logprob (float32) per row, from the random stream of the row's key.

    All but the logits may have further rows, which are not touched.
    `invariant`: logprobs are bitwise identical to those of a batch-invariant trainer.
    """
    (rows, v), n = logits_BV.shape, cdiv(logits_BV.shape[1], BLOCK)
    best, mass = torch.empty(2, rows, n, dtype=torch.float32, device=logits_BV.device)
    sizes = (n, v, vocab, logits_BV.stride(0))
    _blocks[(rows, cdiv(n, _AT_ONCE))](
        logits_BV, temperature_B, best, mass, *sizes,
        COLDEST=COLDEST, BLOCK=BLOCK, AT_ONCE=_AT_ONCE, **PDL,
    )  # fmt: skip
    _pick[(rows,)](
        logits_BV, temperature_B, keys_B, best, mass, tokens_B, logprobs_B, *sizes,
        COLDEST=COLDEST, BLOCK=BLOCK, BLOCKS=power_of_2(n), num_warps=_PICKING, **PDL,
    )  # fmt: skip
    if invariant:
        # `next_tokens.scaled` without a number from the host, which no graph can capture
        divisor_B = temperature_B[:rows].clamp_min(COLDEST).masked_fill(temperature_B[:rows] == 0, 1.0)
        logits_B = logits_BV.gather(1, tokens_B[:rows, None])[:, 0].float()
        logprobs_B[:rows].copy_(logits_B / divisor_B - normaliser(logits_BV, vocab, temperature_B))


# -- logprobs ------------------------------------------------------------------------------------------


@triton.jit
def _logits(row, temperature, at, V, vocab, TAIL: tl.constexpr, SCALED: tl.constexpr, COLDEST: tl.constexpr):
    """Some of a row's logits, scaled as by `next_tokens.scaled`; in the tail -inf from `vocab` on.

    Loads are masked by V, not by vocab: a width that is a multiple of 16 leaves them vectorised.
    """
    if TAIL:
        z = tl.load(row + at, mask=at < V, other=float("-inf")).to(tl.float32)
        z = tl.where(at < vocab, z, float("-inf"))
    else:
        z = tl.load(row + at).to(tl.float32)
    if SCALED:
        temperature = tl.load(temperature)
        z = tl.div_rn(z, tl.where(temperature == 0, 1.0, tl.maximum(temperature, COLDEST)))
    return z


@triton.jit
def _add_logits(
    best, mass, row, temperature, start, V, vocab,
    TAIL: tl.constexpr, SCALED: tl.constexpr, COLDEST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A thread's four logits share one running maximum: five exponentials, not eight."""
    at = start + tl.arange(0, BLOCK // 4)
    a = _logits(row, temperature, at, V, vocab, TAIL, SCALED, COLDEST)
    b = _logits(row, temperature, at + BLOCK // 4, V, vocab, TAIL, SCALED, COLDEST)
    c = _logits(row, temperature, at + BLOCK // 2, V, vocab, TAIL, SCALED, COLDEST)
    d = _logits(row, temperature, at + 3 * BLOCK // 4, V, vocab, TAIL, SCALED, COLDEST)
    higher = tl.maximum(tl.maximum(best, tl.maximum(a, b)), tl.maximum(c, d))
    level = tl.where(higher == float("-inf"), 0.0, higher)
    more = (tl.exp(a - level) + tl.exp(b - level)) + (tl.exp(c - level) + tl.exp(d - level))
    return higher, mass * tl.exp(best - level) + more


@launched
@triton.jit
def _normaliser(
    logits, temperatures, out, V, vocab, stride,
    SCALED: tl.constexpr, COLDEST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    wait_for_previous()
    row = tl.program_id(0).to(tl.int64)
    best, mass = tl.full((BLOCK // 4,), float("-inf"), tl.float32), tl.zeros((BLOCK // 4,), tl.float32)
    logits, temperature, tail = logits + row * stride, temperatures + row, vocab // BLOCK * BLOCK
    for start in range(0, tail, BLOCK):
        best, mass = _add_logits(
            best, mass, logits, temperature, start, V, vocab, False, SCALED, COLDEST, BLOCK
        )
    best, mass = _add_logits(best, mass, logits, temperature, tail, V, vocab, True, SCALED, COLDEST, BLOCK)
    level = tl.max(best, 0)
    tl.store(out + row, level + tl.log(tl.sum(mass * tl.exp(best - level), 0)))


@launched
@triton.jit
def _gradient(logits, normaliser, ids, grads, V, vocab, stride, BLOCK: tl.constexpr):
    wait_for_previous()
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place = logits + row * stride + at
    grad, target = tl.load(grads + row), tl.load(ids + row)
    z = tl.load(place, mask=at < V, other=float("-inf")).to(tl.float32)
    if (tl.program_id(1) + 1) * BLOCK > vocab:
        z = tl.where(at < vocab, z, float("-inf"))
    p = tl.exp(z - tl.load(normaliser + row))
    tl.store(place, grad * (tl.where(at == target, 1.0, 0.0) - p), mask=at < V)


def normaliser(logits_NV: Tensor, vocab: int, temperature_N: Tensor | None = None) -> Tensor:
    """log Σ exp of each row of logits / temperature (0 counts as 1; none: 1) before `vocab`; fp32 [N]."""
    rows, v = logits_NV.shape
    out = torch.empty(rows, dtype=torch.float32, device=logits_NV.device)
    _normaliser[(rows,)](
        logits_NV, out if temperature_N is None else temperature_N, out, v, vocab, logits_NV.stride(0),
        SCALED=temperature_N is not None, COLDEST=COLDEST, BLOCK=_COLUMNS, num_warps=4, **PDL,
    )  # fmt: skip
    return out


def gradient_(logits_NV: Tensor, vocab: int, normaliser_N: Tensor, ids_N: Tensor, grads_N: Tensor) -> Tensor:
    """In place: grads · (onehot(ids) − softmax(logits)), 0 from `vocab` on.

    An id below 0 is no target: −grads · softmax.
    """
    rows, v = logits_NV.shape
    _gradient[(rows, cdiv(v, _COLUMNS))](
        logits_NV, normaliser_N, ids_N, grads_N, v, vocab, logits_NV.stride(0),
        BLOCK=_COLUMNS, num_warps=8, **PDL,
    )  # fmt: skip
    return logits_NV

# pyright: reportMissingImports=false, reportIndexIssue=false, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
"""The backward of `delta_kernels`: it recomputes the forward from the saved results of the projections.

It does so in chunks, whose tokens depend on each other through a triangular system: `_pairs` inverts it, then
`_scan` walks over the chunks. What tensor cores multiply is rounded to the model's dtype, the state too.

With o a token's result, n what it adds to the state, and r the right side of its chunk's triangular system,
the gradient to the running sum of the decays is o·∂o − v·∂v, and that to the chunk's last one also has
⟨S, ∂S⟩ of the state after it; the gradient to β is n·∂r / β. The first two nearly cancel over a chunk, so o
and ∂r are kept in fp32.

Shapes: as in `delta_kernels`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd import Function

from tinkex.engine.cuda import delta_kernels as kernel
from tinkex.engine.cuda.delta_kernels import (
    ChunkLayout,
    DeltaInputs,
    DeltaWeights,
    channels_of,
    chunk_at,
    convolved,
    softplus,
)
from tinkex.engine.cuda.launch import PDL, cdiv, launched, load, load_fp32, power_of_2, wait_for_previous

# -- the forward in chunks -----------------------------------------------------------------------------


@launched
@triton.jit(do_not_specialize=["chunks", "T"])
def _decays(
    rates, a_log, dt_bias, decayed, cells, chunks, T, stride,
    H: tl.constexpr, C: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Running sums of the logarithms of the decays in each chunk: [H, T]."""
    wait_for_previous()
    first, count, _, _, _ = chunk_at(cells, chunks, tl.program_id(0), C)
    t, h = tl.arange(0, C), tl.arange(0, BLOCK_H)
    have = (t < count)[:, None] & (h < H)[None, :]
    place = rates + (first + t)[:, None] * stride + h[None, :]
    slope = -tl.exp(load_fp32(a_log + h, h < H))
    step = softplus(load_fp32(place + H, have) + load_fp32(dt_bias + h, h < H)[None, :])
    g = tl.where(have, slope[None, :] * step, 0.0)
    to = h.to(tl.int64)[None, :] * T + (first + t)[:, None]
    tl.store(decayed + to, tl.cumsum(g, 0), mask=have)


@triton.jit
def heads_of(qkv, first, t, count, head, WHICH: tl.constexpr, K: tl.constexpr, H: tl.constexpr,
             D: tl.constexpr, V: tl.constexpr, BLOCK_D: tl.constexpr):  # fmt: skip
    """q (WHICH 0) or k (1) of a key head: [C, D]."""
    d = tl.arange(0, BLOCK_D)
    place = qkv + (first + t)[:, None] * (2 * K * D + H * V) + (WHICH * K + head) * D + d[None, :]
    return load(place, (t < count)[:, None] & (d < D)[None, :])


@triton.jit
def decay_between(decayed, t, count):
    """e^(sum of the decays after token j up to token i), 0 for j > i."""
    seen = (t[:, None] >= t[None, :]) & (t < count)[:, None]
    return tl.exp(tl.where(seen, decayed[:, None] - decayed[None, :], float("-inf")))


@triton.jit
def inverse(a, C: tl.constexpr):
    """(I + a)⁻¹ of a strictly lower triangular matrix [C, C], C = 64.

    Blocks of 16 on the diagonal by substitution. With B their inverse and L what is below them,
    (I + a)⁻¹ = (I + X)⁻¹·B, X = B·L, and X⁴ = 0.
    """
    tl.static_assert(C == 64)
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    same = (i // 16) == (j // 16)
    inside = tl.where(same, a, 0.0)
    turned = tl.trans(inside)
    b = tl.where(i == j, 1.0, 0.0)
    for row in range(1, 16):  # of all blocks at once: tensors of single blocks do not fit in registers
        of_row = tl.sum(tl.where(j % 16 == row, turned, 0.0), 1)
        solved = -tl.sum(of_row[:, None] * b, 0)
        b = tl.where((i % 16 == row) & (j % 16 < row) & same, solved[None, :], b)
    x = tl.dot(b, a - inside, input_precision="tf32x3")
    y = b + tl.dot(tl.dot(x, x, input_precision="tf32x3"), b, input_precision="tf32x3")
    return y - tl.dot(x, y, input_precision="tf32x3")


@launched
@triton.jit(do_not_specialize=["chunks", "T"])
def _pairs(
    qkv, decayed, beta, solve, seen, cells, chunks, T,
    K: tl.constexpr, H: tl.constexpr, D: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Of a chunk and a value head: the inverse of its system, and what each query sees of each token."""
    wait_for_previous()
    chunk, head = tl.program_id(0), tl.program_id(1)
    first, count, _, _, _ = chunk_at(cells, chunks, chunk, C)
    t = tl.arange(0, C)
    dtype = qkv.dtype.element_ty
    if count > 0:
        q = heads_of(qkv, first, t, count, head // (H // K), 0, K, H, D, V, BLOCK_D)
        k = heads_of(qkv, first, t, count, head // (H // K), 1, K, H, D, V, BLOCK_D)
        row = head.to(tl.int64) * T + first + t
        between = decay_between(load(decayed + row, t < count), t, count)
        system = tl.dot(k, tl.trans(k)) * between * load(beta + row, t < count)[:, None]
        place = ((chunk.to(tl.int64) * H + head) * C + t)[:, None] * C + t[None, :]
        tl.store(seen + place, (tl.dot(q, tl.trans(k)) * between).to(dtype))
        system = tl.where(t[:, None] > t[None, :], system, 0.0)
        tl.store(solve + place, inverse(system, C).to(dtype))


@launched
@triton.jit(do_not_specialize=["sequences", "T"])
def _scan(
    qkv, decayed, beta, solve, seen, o, held, news, cells, sequences, T,
    K: tl.constexpr, H: tl.constexpr, D: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Walk over the chunks of a sequence with some columns of one head's state.

    The states at the chunks' starts go to `held` [N, H, D, V], what tokens add to them to `news` [T, H, V],
    and the result to `o`.
    """
    wait_for_previous()
    block, head, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first, count = tl.load(cells + sequence).to(tl.int64), tl.load(cells + sequences + sequence)
    chunk = tl.load(cells + 2 * sequences + sequence).to(tl.int64)
    F: tl.constexpr = 2 * K * D + H * V
    t, d, c = tl.arange(0, C), tl.arange(0, BLOCK_D), block * BLOCK_V + tl.arange(0, BLOCK_V)
    dtype = qkv.dtype.element_ty
    have_c = c < V
    have_s, at_s = (d < D)[:, None] & have_c[None, :], d[:, None] * V + c[None, :]
    state = tl.zeros((BLOCK_D, BLOCK_V), tl.float32)
    for at in tl.range(0, count, C, num_stages=STAGES):
        left, row = count - at, first + at + t
        q = heads_of(qkv, first + at, t, left, head // (H // K), 0, K, H, D, V, BLOCK_D)
        k = heads_of(qkv, first + at, t, left, head // (H // K), 1, K, H, D, V, BLOCK_D)
        have_v = (t < left)[:, None] & have_c[None, :]
        v = load_fp32(qkv + row[:, None] * F + 2 * K * D + head * V + c[None, :], have_v)
        of_head = head.to(tl.int64) * T + row
        g, b = load(decayed + of_head, t < left), load(beta + of_head, t < left)
        end = tl.load(decayed + head.to(tl.int64) * T + first + tl.minimum(at + C, count) - 1)
        pair = ((chunk * H + head) * C + t)[:, None] * C + t[None, :]
        rounded = state.to(dtype)
        tl.store(held + (chunk * H + head) * D * V + at_s, rounded, mask=have_s)
        grown = tl.exp(g)[:, None]
        right = b[:, None] * (v - grown * tl.dot(k, rounded))
        new = tl.dot(tl.load(solve + pair), right.to(dtype))
        added = new.to(dtype)
        to = (row * H + head)[:, None] * V + c[None, :]
        tl.store(news + to, added, mask=have_v)
        out = tl.dot(tl.load(seen + pair), added, grown * tl.dot(q, rounded))
        tl.store(o + to, out, mask=have_v)
        faded = new * tl.exp(end - g)[:, None]
        state = tl.dot(tl.trans(k), faded.to(dtype), state * tl.exp(end))
        chunk += 1


# -- the backward --------------------------------------------------------------------------------------


@launched
@triton.jit(do_not_specialize=["T"])
def _gate_backward(
    grad, o, z, norm, grad_o, grad_z, eps, T, stride_z, stride_grad,
    H: tl.constexpr, V: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    wait_for_previous()
    row, head = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T), tl.program_id(1)
    c = tl.arange(0, BLOCK_V)
    have = (row < T)[:, None] & (c < V)[None, :]
    place = (row * H + head)[:, None] * V + c[None, :]
    x, g = load_fp32(o + place, have), load_fp32(grad + place, have)
    gate = load_fp32(z + row[:, None] * stride_z + head * V + c[None, :], have)
    w = load_fp32(norm + c, c < V)[None, :]
    r = tl.rsqrt(tl.sum(x * x, 1) / V + eps)[:, None]
    sig = tl.sigmoid(gate)
    to_gate = g * x * r * w * sig * (1 + gate * (1 - sig))
    tl.store(grad_z + row[:, None] * stride_grad + head * V + c[None, :], to_gate, mask=have)
    g = g * gate * sig * w
    tl.store(grad_o + place, r * (g - x * r * r * (tl.sum(g * x, 1) / V)[:, None]), mask=have)


@launched
@triton.jit(do_not_specialize=["sequences", "T"])
def _scan_backward(
    qkv, decayed, beta, solve, seen, grad_o, grad_right, grad_ends, cells, sequences, T,
    K: tl.constexpr, H: tl.constexpr, D: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Walk back over the chunks of a sequence with some columns of the gradient to one head's state.

    Stores the gradients to the right sides [T, H, V] and to the states after the chunks [N, H, D, V].
    """
    wait_for_previous()
    block, head, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first, count = tl.load(cells + sequence).to(tl.int64), tl.load(cells + sequences + sequence)
    chunk = tl.load(cells + 2 * sequences + sequence).to(tl.int64)
    t, d, c = tl.arange(0, C), tl.arange(0, BLOCK_D), block * BLOCK_V + tl.arange(0, BLOCK_V)
    dtype = qkv.dtype.element_ty
    have_c = c < V
    have_s, at_s = (d < D)[:, None] & have_c[None, :], d[:, None] * V + c[None, :]
    grad = tl.zeros((BLOCK_D, BLOCK_V), tl.float32)
    chunks = tl.cdiv(count, C)
    for turn in tl.range(0, chunks, num_stages=STAGES):
        number = chunks - 1 - turn
        at = number * C
        left, row = count - at, first + at + t
        q = heads_of(qkv, first + at, t, left, head // (H // K), 0, K, H, D, V, BLOCK_D)
        k = heads_of(qkv, first + at, t, left, head // (H // K), 1, K, H, D, V, BLOCK_D)
        have_v, to = (t < left)[:, None] & have_c[None, :], (row * H + head)[:, None] * V + c[None, :]
        grad_out = load(grad_o + to, have_v)
        of_head = head.to(tl.int64) * T + row
        g, b = load(decayed + of_head, t < left), load(beta + of_head, t < left)
        end = tl.load(decayed + head.to(tl.int64) * T + first + tl.minimum(at + C, count) - 1)
        pair = (((chunk + number) * H + head) * C + t)[:, None] * C + t[None, :]
        rounded = grad.to(dtype)
        tl.store(grad_ends + ((chunk + number) * H + head) * D * V + at_s, rounded, mask=have_s)
        new = tl.dot(k, rounded) * tl.exp(end - g)[:, None]
        new = tl.dot(tl.trans(tl.load(seen + pair)), grad_out, new)
        right = tl.dot(tl.trans(tl.load(solve + pair)), new.to(dtype))
        tl.store(grad_right + to, right, mask=have_v)
        grown = tl.exp(g)[:, None]
        grad = tl.dot(tl.trans(q), (grown * grad_out.to(tl.float32)).to(dtype), grad * tl.exp(end))
        grad = tl.dot(tl.trans(k), (-b[:, None] * grown * right).to(dtype), grad)


@launched
@triton.jit(do_not_specialize=["chunks", "T"])
def _pairs_backward(
    qkv, decayed, beta, rates, a_log, dt_bias, o, grad_o, grad_right, held, grad_ends, news,
    grad_qkv, grad_rates, cells, chunks, T, stride_rates,
    K: tl.constexpr, H: tl.constexpr, D: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """The gradients to q, k and v of a chunk and a key head, and to the rates of its value heads."""
    wait_for_previous()
    chunk, key_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first, count, _, left, _ = chunk_at(cells, chunks, chunk, C)
    if count > 0:
        F: tl.constexpr = 2 * K * D + H * V
        R: tl.constexpr = H // K
        t, d = tl.arange(0, C), tl.arange(0, BLOCK_D)
        dtype = qkv.dtype.element_ty
        have_t, row = t < count, first + t
        q = heads_of(qkv, first, t, count, key_head, 0, K, H, D, V, BLOCK_D)
        k = heads_of(qkv, first, t, count, key_head, 1, K, H, D, V, BLOCK_D)
        grad_q, grad_k = tl.zeros((C, BLOCK_D), tl.float32), tl.zeros((C, BLOCK_D), tl.float32)
        for head in range(key_head * R, (key_head + 1) * R):
            of_head = tl.cast(head, tl.int64) * T + row
            g, b = load(decayed + of_head, have_t), load(beta + of_head, have_t)
            end = tl.load(decayed + tl.cast(head, tl.int64) * T + first + count - 1)
            grown = tl.exp(g)[:, None]
            to_seen, to_system = tl.zeros((C, C), tl.float32), tl.zeros((C, C), tl.float32)
            of_decay, of_beta, of_end = tl.zeros((C,), tl.float32), tl.zeros((C,), tl.float32), 0.0
            for start in range(0, V, BLOCK_V):
                c = start + tl.arange(0, BLOCK_V)
                have, place = have_t[:, None] & (c < V)[None, :], (row * H + head)[:, None] * V + c[None, :]
                at_s = ((chunk * H + head) * D + d)[:, None] * V + c[None, :]
                have_s = (d < D)[:, None] & (c < V)[None, :]
                out, right, new = (
                    load(grad_o + place, have),
                    load(grad_right + place, have),
                    load(news + place, have),
                )
                before, after = load(held + at_s, have_s), load(grad_ends + at_s, have_s)
                next_state = load_fp32(held + at_s + H * D * V, have_s & (left > C))
                of_end += tl.sum(next_state * after.to(tl.float32))
                to_seen = tl.dot(out, tl.trans(new), to_seen)
                to_system = tl.dot(right.to(dtype), tl.trans(new), to_system)
                out, right, new = out.to(tl.float32), right.to(tl.float32), new.to(tl.float32)
                at_v = row[:, None] * F + 2 * K * D + head * V + c[None, :]
                grad_v = b[:, None] * right
                tl.store(grad_qkv + at_v, grad_v, mask=have)
                of_decay += tl.sum(out * load_fp32(o + place, have), 1)
                of_decay -= tl.sum(grad_v * load_fp32(qkv + at_v, have), 1)
                of_beta += tl.sum(right * new, 1)
                grad_q = tl.dot((grown * out).to(dtype), tl.trans(before), grad_q)
                grad_k = tl.dot((-grown * grad_v).to(dtype), tl.trans(before), grad_k)
                grad_k = tl.dot((tl.exp(end - g)[:, None] * new).to(dtype), tl.trans(after), grad_k)
            between = decay_between(g, t, count)
            pairs = (to_seen * between).to(dtype)
            grad_q = tl.dot(pairs, k, grad_q)
            grad_k = tl.dot(tl.trans(pairs), q, grad_k)
            pairs = tl.where(t[:, None] > t[None, :], -b[:, None] * to_system * between, 0.0).to(dtype)
            grad_k = tl.dot(pairs, k, grad_k)
            grad_k = tl.dot(tl.trans(pairs), k, grad_k)
            step = load_fp32(rates + row * stride_rates + H + head, have_t) + tl.load(dt_bias + head).to(
                tl.float32
            )
            slope = -tl.exp(tl.load(a_log + head).to(tl.float32))
            of_decay = tl.where(have_t, of_decay, 0.0) + tl.where(t == count - 1, of_end, 0.0)
            decay = tl.cumsum(of_decay, 0, reverse=True)
            tl.store(grad_rates + row * (2 * H) + head, of_beta * (1 - b), mask=have_t)
            tl.store(grad_rates + row * (2 * H) + H + head, decay * slope * tl.sigmoid(step), mask=have_t)
        place = row[:, None] * F + key_head * D + d[None, :]
        tl.store(grad_qkv + place, grad_q, mask=have_t[:, None] & (d < D)[None, :])
        tl.store(grad_qkv + place + K * D, grad_k, mask=have_t[:, None] & (d < D)[None, :])


@launched
@triton.jit(do_not_specialize=["chunks"])
def _prepare_backward(
    u, conv, grad, cells, chunks, stride_u,
    W: tl.constexpr,
    K: tl.constexpr, H: tl.constexpr, D: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """In place: from the gradient to a head of q, k or v to that to the convolution's result."""
    wait_for_previous()
    F: tl.constexpr = 2 * K * D + H * V
    first, count, before, _, _ = chunk_at(cells, chunks, tl.program_id(0), C)
    head, t = tl.program_id(1), tl.arange(0, C)
    channel, have_c, is_key = channels_of(head, K, H, D, V, BLOCK)
    y, have = convolved(u, conv, u, first, before, count, t, channel, have_c, stride_u, F, W, False)
    sig, place = tl.sigmoid(y), grad + (first + t)[:, None] * F + channel[None, :]
    a, g = y * sig, load_fp32(place, have)
    if is_key:
        r = tl.rsqrt(tl.sum(a * a, 1) + 1e-6)[:, None]
        g = r * tl.where(head < K, D**-0.5, 1.0) * (g - a * r * r * tl.sum(g * a, 1)[:, None])
    tl.store(place, g * sig * (1 + y * (1 - sig)), mask=have)


@launched
@triton.jit(do_not_specialize=["chunks"])
def _conv_backward(
    grad, conv, out, cells, chunks, stride_out,
    F: tl.constexpr, W: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    wait_for_previous()
    first, count, _, left, _ = chunk_at(cells, chunks, tl.program_id(0), C)
    t, c = tl.arange(0, C), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    have = (t < count)[:, None] & (c < F)[None, :]
    total = tl.zeros((C, BLOCK), tl.float32)
    for ahead in tl.static_range(W):
        later = have & (t + ahead < left)[:, None]
        weight = load_fp32(conv + c * W + W - 1 - ahead, c < F)
        total += load_fp32(grad + (first + t + ahead)[:, None] * F + c[None, :], later) * weight[None, :]
    tl.store(out + (first + t)[:, None] * stride_out + c[None, :], total, mask=have)


# -- launching -----------------------------------------------------------------------------------------


class ChunkInputs(NamedTuple):
    """What the walks over the chunks read."""

    qkv: Tensor  # [T, F]: q and k as units, v
    decayed: Tensor  # fp32 [H, T]
    beta: Tensor  # fp32 [H, T]
    solve: Tensor  # [N, H, C, C]
    seen: Tensor  # [N, H, C, C]


class ScanTile(NamedTuple):
    """As measured on an H200."""

    columns: int = 32  # of a state
    warps: int = 4
    stages: int = 2


def chunk_inputs(
    prepared: DeltaInputs, rates: Tensor, weights: DeltaWeights, layout: ChunkLayout
) -> ChunkInputs:
    (qkv, (_, beta)), h, tokens, cells = prepared, weights.config.value_heads, len(rates), layout.chunks
    chunks = cells.shape[1]
    decayed, (solve, seen) = torch.empty_like(beta), qkv.new_empty(2, chunks, h, kernel.CHUNK, kernel.CHUNK)
    _decays[(chunks,)](
        rates, weights.a_log, weights.dt_bias, decayed, cells, chunks, tokens, rates.stride(0),
        H=h, C=kernel.CHUNK, BLOCK_H=max(16, power_of_2(h)), num_warps=4, **PDL,
    )  # fmt: skip
    _pairs[(chunks, h)](
        qkv, decayed, beta, solve, seen, cells, chunks, tokens, **weights.sizes, **weights.blocks,
        num_warps=4, **PDL,
    )  # fmt: skip
    return ChunkInputs(qkv, decayed, beta, solve, seen)


def scan(
    inputs: ChunkInputs, weights: DeltaWeights, layout: ChunkLayout, tile: ScanTile = ScanTile()
) -> tuple[Tensor, Tensor, Tensor]:
    """o_THV in fp32, the states at the chunks' starts, and what the tokens add to them."""
    c, cells, qkv = weights.config, layout.sequences, inputs.qkv
    tokens, sequences, chunks = len(qkv), cells.shape[1], len(inputs.solve)
    o = torch.empty(tokens, c.value_heads, c.value_dim, dtype=torch.float32, device=qkv.device)
    held = qkv.new_empty(chunks, c.value_heads, c.key_dim, c.value_dim)
    news = torch.empty_like(o, dtype=qkv.dtype)
    block = min(tile.columns, weights.blocks["BLOCK_V"])
    _scan[(cdiv(c.value_dim, block), c.value_heads, sequences)](
        *inputs, o, held, news, cells, sequences, tokens, **weights.sizes,
        BLOCK_D=weights.blocks["BLOCK_D"], BLOCK_V=block, STAGES=tile.stages, num_warps=tile.warps, **PDL,
    )  # fmt: skip
    return o, held, news


def backward(
    grad: Tensor, qkvz: Tensor, rates: Tensor, weights: DeltaWeights, layout: ChunkLayout,
    tile: ScanTile = ScanTile(), pairs: tuple[int, int] = (32, 8),
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The gradients to `qkvz` and `rates` of sequences that start from nothing.

    `pairs`: columns of a state at once, and warps, of `_pairs_backward`.
    """
    c, (tokens, width), sizes = weights.config, qkvz.shape, weights.sizes
    h, v, chunks = c.value_heads, c.value_dim, layout.chunks.shape[1]
    prepared = chunk_inputs(kernel.prepare(qkvz, rates, weights, layout, None), rates, weights, layout)
    o, held, news = scan(prepared, weights, layout)
    grad_qkvz, grad_rates = torch.empty_like(qkvz), torch.empty_like(rates)
    grad_o, grad_right, grad_ends = torch.empty_like(news), torch.empty_like(o), torch.empty_like(held)
    z, grad_z, rows = qkvz[:, c.channels :], grad_qkvz[:, c.channels :], 16
    _gate_backward[(cdiv(tokens, rows), h)](
        grad, o, z, weights.norm, grad_o, grad_z, weights.eps, tokens, width, width,
        H=h, V=v, BLOCK_T=rows, BLOCK_V=weights.blocks["BLOCK_V"], num_warps=4, **PDL,
    )  # fmt: skip
    sequences, block = layout.sequences, min(tile.columns, weights.blocks["BLOCK_V"])
    _scan_backward[(cdiv(v, block), h, sequences.shape[1])](
        *prepared, grad_o, grad_right, grad_ends, sequences, sequences.shape[1], tokens,
        **sizes, BLOCK_D=weights.blocks["BLOCK_D"], BLOCK_V=block, STAGES=tile.stages,
        num_warps=tile.warps, **PDL,
    )  # fmt: skip
    grad_qkv, (columns, warps) = torch.empty_like(prepared.qkv), pairs
    _pairs_backward[(chunks, c.key_heads)](
        *prepared[:3], rates, weights.a_log, weights.dt_bias, o, grad_o, grad_right, held, grad_ends, news,
        grad_qkv, grad_rates, layout.chunks, chunks, tokens, rates.stride(0),
        **sizes, BLOCK_D=weights.blocks["BLOCK_D"], BLOCK_V=min(columns, weights.blocks["BLOCK_V"]),
        num_warps=warps, num_stages=1, **PDL,
    )  # fmt: skip
    widest = max(c.key_dim, v)
    _prepare_backward[(chunks, 2 * c.key_heads + h)](
        qkvz, weights.conv, grad_qkv, layout.chunks, chunks, width,
        W=c.conv_width, **sizes, BLOCK=max(16, power_of_2(widest)), num_warps=8, **PDL,
    )  # fmt: skip
    _conv_backward[(chunks, cdiv(c.channels, 128))](
        grad_qkv, weights.conv, grad_qkvz, layout.chunks, chunks, width,
        F=c.channels, W=c.conv_width, C=kernel.CHUNK, BLOCK=128, num_warps=8, **PDL,
    )  # fmt: skip
    return grad_qkvz, grad_rates


class DeltaMixed(Function):
    """`delta_kernels.mixed` for autograd."""

    @staticmethod
    def forward(ctx: Any, qkvz: Tensor, rates: Tensor, weights: DeltaWeights, layout: ChunkLayout) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(qkvz, rates)
        ctx.weights, ctx.layout = weights, layout
        return kernel.mixed(qkvz, rates, weights, layout)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        qkvz, rates = ctx.saved_tensors
        return *backward(grads[0].contiguous(), qkvz, rates, ctx.weights, ctx.layout), None, None

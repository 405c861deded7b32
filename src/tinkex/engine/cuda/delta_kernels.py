# pyright: reportMissingImports=false, reportIndexIssue=false, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
"""The gated delta net over packed sequences, in chunks, and one token of each sequence in place.

Computes what `models.delta_net.DeltaNet.mixed` does: the short convolution, unit norms, the delta rule, and
the gated norm. Sums and states are fp32; q, k, v and what tensor cores multiply are rounded to the model's
dtype. A chunk's tokens depend on each other through a triangular system: `_pairs` inverts it, then `_scan`
walks over the chunks. `delta_gradients` is the backward.

Shapes: T tokens, N chunks, C tokens of a chunk, B sequences, H value heads, K key heads, D key dim,
V value dim, F conv channels, W conv width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from tinkex.engine.cuda.launch import PDL, cdiv, launched, load, load_fp32, power_of_2, wait_for_previous
from tinkex.engine.torch.device_copies import all_to_device
from tinkex.engine.torch.models.architecture import DeltaConfig

CHUNK = 64  # tokens
_CHANNELS = 1024  # of one program of `_keep`
PAIRS_WARPS = 4


class ChunkLayout(NamedTuple):
    """Packed sequences in chunks, int32. A column of zero tokens does nothing."""

    # [4, N]: first row, tokens of the sequence before it and from it on, and the number of the sequence
    chunks: Tensor
    sequences: Tensor  # [3, B]: first row, tokens, first chunk; the longest first


class SlotStates(NamedTuple):
    """Where the sequences' states are, of one layer; each sequence has a slot, -1 for none."""

    inputs: Tensor  # fp32 [slots, W - 1, F]
    matrices: Tensor  # fp32 [slots, H, D, V]
    slots_B: Tensor  # in the layout's order


class DeltaWeights(NamedTuple):
    """A layer's weights other than its projections."""

    config: DeltaConfig
    conv: Tensor  # [F, 1, W]
    a_log: Tensor  # [H]
    dt_bias: Tensor  # [H]
    norm: Tensor  # [V]
    eps: float

    @property
    def sizes(self) -> dict[str, int]:
        """Constants of every kernel."""
        c = self.config
        return {"K": c.key_heads, "H": c.value_heads, "D": c.key_dim, "V": c.value_dim, "C": CHUNK}

    @property
    def blocks(self) -> dict[str, int]:
        return {"BLOCK_D": _block(self.config.key_dim), "BLOCK_V": _block(self.config.value_dim)}


def _block(size: int) -> int:
    return max(16, power_of_2(size))


def cells_of(lengths: Sequence[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The tensors of a `ChunkLayout`, and the index of each of its sequences in the batch."""
    lengths_B = np.asarray(lengths, np.int64)
    order = np.argsort(-lengths_B, kind="stable")
    first, tokens = (np.cumsum(lengths_B) - lengths_B)[order], lengths_B[order]
    counts = -(-tokens // CHUNK)
    first_chunk = np.cumsum(counts) - counts
    of = np.repeat(np.arange(len(tokens)), counts)
    before = CHUNK * (np.arange(len(of)) - first_chunk[of])
    chunks = np.stack([first[of] + before, before, tokens[of] - before, of])
    return chunks.astype(np.int32), np.stack([first, tokens, first_chunk]).astype(np.int32), order


def lay_out(lengths: Sequence[int], device: torch.device) -> ChunkLayout:
    chunks, sequences, _ = cells_of(lengths)
    return ChunkLayout(*all_to_device([chunks, sequences], device))


# -- decays, convolution, norms ------------------------------------------------------------------------


@triton.jit
def chunk_at(cells, chunks, chunk, C: tl.constexpr):
    """A chunk's first row and tokens; tokens of its sequence before it and from it on; its sequence."""
    first, before = tl.load(cells + chunk).to(tl.int64), tl.load(cells + chunks + chunk)
    left, sequence = tl.load(cells + 2 * chunks + chunk), tl.load(cells + 3 * chunks + chunk)
    return first, tl.minimum(left, C), before, left, sequence


@triton.jit
def softplus(x):
    return tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x)))


@launched
@triton.jit(do_not_specialize=["chunks", "T"])
def _rates(
    rates, a_log, dt_bias, decayed, beta, cells, chunks, T, stride,
    H: tl.constexpr, C: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Running sums of the decays in each chunk, and the rates β: [H, T] both."""
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
    tl.store(beta + to, tl.sigmoid(load_fp32(place, have)), mask=have)


@triton.jit
def channels_of(
    head, K: tl.constexpr, H: tl.constexpr, D: tl.constexpr, V: tl.constexpr, BLOCK: tl.constexpr
):
    """The channels of head `head` of q, then k, then v, and which of the block there are."""
    at, is_key = tl.arange(0, BLOCK), head < 2 * K
    start = tl.where(is_key, head * D, 2 * K * D + (head - 2 * K) * V)
    return start + at, at < tl.where(is_key, D, V), is_key


@triton.jit
def convolved(
    u, conv, inputs, first, before, count, t, channel, have_c, stride_u,
    F: tl.constexpr, W: tl.constexpr, STATES: tl.constexpr,
):  # fmt: skip
    """The convolution at tokens `t` of a chunk; `inputs` are the W - 1 before the sequence's first."""
    have = (t < count)[:, None] & have_c[None, :]
    total = tl.zeros(have.shape, tl.float32)
    for i in tl.static_range(W):
        at = t - (W - 1 - i)
        inside = (before + at >= 0)[:, None]
        x = load_fp32(u + (first + at)[:, None] * stride_u + channel[None, :], have & inside)
        if STATES:
            x += load(inputs + (before + at + W - 1)[:, None] * F + channel[None, :], have & ~inside)
        total += x * load_fp32(conv + channel * W + i, have_c)[None, :]
    return total, have


@launched
@triton.jit(do_not_specialize=["chunks"])
def _prepare(
    u, conv, inputs, qkv, cells, chunks, slots, stride_u, stride_slot,
    W: tl.constexpr, STATES: tl.constexpr,
    K: tl.constexpr, H: tl.constexpr, D: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One head of q, k or v of a chunk: convolution, silu and, of q and k, the unit norm."""
    wait_for_previous()
    F: tl.constexpr = 2 * K * D + H * V
    first, count, before, _, sequence = chunk_at(cells, chunks, tl.program_id(0), C)
    head, t = tl.program_id(1), tl.arange(0, C)
    channel, have_c, is_key = channels_of(head, K, H, D, V, BLOCK)
    if STATES:
        inputs += tl.maximum(tl.load(slots + sequence), 0).to(tl.int64) * stride_slot
    y, have = convolved(u, conv, inputs, first, before, count, t, channel, have_c, stride_u, F, W, STATES)
    y = y * tl.sigmoid(y)
    if is_key:
        y *= tl.rsqrt(tl.sum(y * y, 1) + 1e-6)[:, None] * tl.where(head < K, D**-0.5, 1.0)
    tl.store(qkv + (first + t)[:, None] * F + channel[None, :], y, mask=have)


@launched
@triton.jit(do_not_specialize=["sequences"])
def _keep(
    u, inputs, cells, sequences, slots, stride_u, stride_slot,
    F: tl.constexpr, W: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The last W - 1 inputs of each sequence into its slot."""
    wait_for_previous()
    sequence, c = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    first, count = tl.load(cells + sequence).to(tl.int64), tl.load(cells + sequences + sequence)
    slot = tl.load(slots + sequence).to(tl.int64)
    if (count > 0) & (slot >= 0):
        inputs += slot * stride_slot
        for i in tl.static_range(
            W - 1
        ):  # a thread has the same channel of all: what it reads is not written yet
            at = count - (W - 1) + i
            new = load_fp32(u + (first + at) * stride_u + c, (c < F) & (at >= 0))
            old = load(inputs + (count + i) * F + c, (c < F) & (at < 0))
            tl.store(inputs + i * F + c, new + old, mask=c < F)


# -- the delta rule in chunks --------------------------------------------------------------------------


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
    qkv, decayed, beta, solve, seen, o, matrices, held, news, cells, sequences, slots, T, stride_slot,
    STATES: tl.constexpr, STORE: tl.constexpr,
    K: tl.constexpr, H: tl.constexpr, D: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Walk over the chunks of a sequence with some columns of one head's state.

    STATES: it starts from its slot's and is left there. STORE: the states at the chunks' starts go to `held`
    [N, H, D, V] and what tokens add to them to `news` [T, H, V], for the backward.
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
    if STATES:
        slot = tl.load(slots + sequence).to(tl.int64)
        matrices += tl.maximum(slot, 0) * stride_slot + head * D * V
        state = load(matrices + at_s, have_s & (count > 0))
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
        if STORE:
            tl.store(held + (chunk * H + head) * D * V + at_s, rounded, mask=have_s)
        grown = tl.exp(g)[:, None]
        right = b[:, None] * (v - grown * tl.dot(k, rounded))
        new = tl.dot(tl.load(solve + pair), right.to(dtype))
        added = new.to(dtype)
        to = (row * H + head)[:, None] * V + c[None, :]
        if STORE:
            tl.store(news + to, added, mask=have_v)
        out = tl.dot(tl.load(seen + pair), added, grown * tl.dot(q, rounded))
        tl.store(o + to, out, mask=have_v)
        faded = new * tl.exp(end - g)[:, None]
        state = tl.dot(tl.trans(k), faded.to(dtype), state * tl.exp(end))
        chunk += 1
    if STATES:
        tl.store(matrices + at_s, state, mask=have_s & (count > 0) & (slot >= 0))


@launched
@triton.jit(do_not_specialize=["T"])
def _gate(
    o, z, norm, out, eps, T, stride_z,
    H: tl.constexpr, V: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """The norm of each head's result, times silu(z)."""
    wait_for_previous()
    row, head = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T), tl.program_id(1)
    c = tl.arange(0, BLOCK_V)
    have = (row < T)[:, None] & (c < V)[None, :]
    place = (row * H + head)[:, None] * V + c[None, :]
    x = load_fp32(o + place, have)
    gate = load_fp32(z + row[:, None] * stride_z + head * V + c[None, :], have)
    x *= tl.rsqrt(tl.sum(x * x, 1) / V + eps)[:, None] * load_fp32(norm + c, c < V)[None, :]
    tl.store(out + place, x * gate * tl.sigmoid(gate), mask=have)


# -- one token of each sequence ------------------------------------------------------------------------


@launched
@triton.jit
def _conv_step(
    u, conv, inputs, qkv, slots, stride_u, stride_slot,
    W: tl.constexpr, K: tl.constexpr, H: tl.constexpr, D: tl.constexpr, V: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`_prepare` and `_keep` of one token: of a row, the channels of one head."""
    wait_for_previous()
    F: tl.constexpr = 2 * K * D + H * V
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    channel, have, is_key = channels_of(head, K, H, D, V, BLOCK)
    slot = tl.load(slots + row)
    if slot >= 0:
        inputs += slot * stride_slot
        y, new = tl.zeros((BLOCK,), tl.float32), load_fp32(u + row * stride_u + channel, have)
        for i in tl.static_range(W):
            x = new
            if i < W - 1:
                x = load(inputs + i * F + channel, have)
            if i > 0:
                tl.store(inputs + (i - 1) * F + channel, x, mask=have)
            y += x * load_fp32(conv + channel * W + i, have)
        y = y * tl.sigmoid(y)
        if is_key:
            y *= tl.rsqrt(tl.sum(y * y, 0) + 1e-6) * tl.where(head < K, D**-0.5, 1.0)
        tl.store(qkv + row * F + channel, y, mask=have)


@launched
@triton.jit
def _step(
    qkv, rates, z, a_log, dt_bias, norm, matrices, out, slots, eps, stride_rates, stride_z, stride_slot,
    K: tl.constexpr, H: tl.constexpr, D: tl.constexpr, V: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """The delta rule, the norm and the gate of a row's token in one head, whose state changes in place."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    F: tl.constexpr = 2 * K * D + H * V
    d, c = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    have = (d < D)[:, None] & (c < V)[None, :]
    slope, bias = -tl.exp(tl.load(a_log + head).to(tl.float32)), tl.load(dt_bias + head).to(tl.float32)
    weight = load_fp32(norm + c, c < V)
    wait_for_previous()
    slot = tl.load(slots + row)
    result = tl.zeros((BLOCK_V,), tl.float32)
    if slot >= 0:
        place = matrices + slot * stride_slot + head * D * V + d[:, None] * V + c[None, :]
        state = load(place, have)
        beta = tl.sigmoid(tl.load(rates + row * stride_rates + head).to(tl.float32))
        step = tl.load(rates + row * stride_rates + H + head).to(tl.float32)
        key = qkv + row * F + head // (H // K) * D + d
        q, k = load_fp32(key, d < D), load_fp32(key + K * D, d < D)
        v = load_fp32(qkv + row * F + 2 * K * D + head * V + c, c < V)
        gate = load_fp32(z + row * stride_z + head * V + c, c < V)
        state *= tl.exp(slope * softplus(step + bias))
        new = beta * (v - tl.sum(state * k[:, None], 0))
        state += k[:, None] * new[None, :]
        tl.store(place, state, mask=have)
        o = tl.sum(state * q[:, None], 0).to(out.dtype.element_ty).to(tl.float32)  # rounded as in chunks
        result = o * tl.rsqrt(tl.sum(o * o, 0) / V + eps) * weight * gate * tl.sigmoid(gate)
    tl.store(out + (row * H + head) * V + c, result, mask=c < V)


# -- launching -----------------------------------------------------------------------------------------


class ChunkInputs(NamedTuple):
    """What the walk over the chunks reads."""

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


def prepare(
    qkvz: Tensor, rates: Tensor, weights: DeltaWeights, layout: ChunkLayout, states: SlotStates | None
) -> ChunkInputs:
    """`qkvz` is [T, F + H·V] and `rates` [T, 2·H], as the projections give them."""
    c, cells, tokens = weights.config, layout.chunks, qkvz.shape[0]
    chunks, h = cells.shape[1], c.value_heads
    qkv = qkvz.new_empty(tokens, c.channels)
    decayed, beta = torch.empty(2, h, tokens, dtype=torch.float32, device=qkvz.device)
    solve, seen = qkvz.new_empty(2, chunks, h, CHUNK, CHUNK)
    _rates[(chunks,)](
        rates, weights.a_log, weights.dt_bias, decayed, beta, cells, chunks, tokens, rates.stride(0),
        H=h, C=CHUNK, BLOCK_H=_block(h), num_warps=4, **PDL,
    )  # fmt: skip
    inputs, slots, stride = (qkvz, cells, 0) if states is None else (
        states.inputs, states.slots_B, states.inputs.stride(0))  # fmt: skip
    _prepare[(chunks, 2 * c.key_heads + h)](
        qkvz, weights.conv, inputs, qkv, cells, chunks, slots, qkvz.stride(0), stride,
        W=c.conv_width, STATES=states is not None, **weights.sizes, BLOCK=_block(max(c.key_dim, c.value_dim)),
        num_warps=8, **PDL,
    )  # fmt: skip
    _pairs[(chunks, h)](
        qkv,
        decayed,
        beta,
        solve,
        seen,
        cells,
        chunks,
        tokens,
        **weights.sizes,
        **weights.blocks,
        num_warps=PAIRS_WARPS,
        **PDL,
    )
    return ChunkInputs(qkv, decayed, beta, solve, seen)


def scan(
    prepared: ChunkInputs, weights: DeltaWeights, layout: ChunkLayout, states: SlotStates | None,
    store: bool = False, tile: ScanTile = ScanTile(),
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """o_THV and, to `store`, the states at the chunks' starts and what the tokens add; then o is fp32."""
    c, cells, qkv = weights.config, layout.sequences, prepared.qkv
    tokens, sequences, chunks = qkv.shape[0], cells.shape[1], prepared.solve.shape[0]
    o = torch.empty(tokens, c.value_heads, c.value_dim, dtype=torch.float32 if store else qkv.dtype,
                    device=qkv.device)  # fmt: skip
    held = qkv.new_empty(chunks, c.value_heads, c.key_dim, c.value_dim) if store else o
    news = torch.empty_like(o, dtype=qkv.dtype) if store else o
    matrices, slots, stride = (o, cells, 0) if states is None else (
        states.matrices, states.slots_B, states.matrices.stride(0))  # fmt: skip
    block = min(tile.columns, _block(c.value_dim))
    _scan[(cdiv(c.value_dim, block), c.value_heads, sequences)](
        *prepared, o, matrices, held, news, cells, sequences, slots, tokens, stride,
        STATES=states is not None, STORE=store, **weights.sizes, BLOCK_D=_block(c.key_dim), BLOCK_V=block,
        STAGES=tile.stages, num_warps=tile.warps, **PDL,
    )  # fmt: skip
    return o, held, news


def keep_inputs(qkvz: Tensor, weights: DeltaWeights, layout: ChunkLayout, states: SlotStates) -> None:
    """Leave each sequence's last inputs in its slot."""
    c, cells = weights.config, layout.sequences
    _keep[(cells.shape[1], cdiv(c.channels, _CHANNELS))](
        qkvz, states.inputs, cells, cells.shape[1], states.slots_B, qkvz.stride(0), states.inputs.stride(0),
        F=c.channels, W=c.conv_width, BLOCK=min(_CHANNELS, _block(c.channels)), num_warps=4, **PDL,
    )  # fmt: skip


def gate(o_THV: Tensor, qkvz: Tensor, weights: DeltaWeights) -> Tensor:
    """[T, H·V], normed and gated."""
    tokens, h, v = o_THV.shape
    z, out, rows = qkvz[:, weights.config.channels :], o_THV.new_empty(tokens, h * v), 16
    _gate[(cdiv(tokens, rows), h)](
        o_THV, z, weights.norm, out, weights.eps, tokens, z.stride(0),
        H=h, V=v, BLOCK_T=rows, BLOCK_V=_block(v), num_warps=4, **PDL,
    )  # fmt: skip
    return out


def mixed(
    qkvz: Tensor, rates: Tensor, weights: DeltaWeights, layout: ChunkLayout, states: SlotStates | None = None
) -> Tensor:
    """The layer's result before its last projection, [T, H·V]; states go on from `states`, if given."""
    prepared = prepare(qkvz, rates, weights, layout, states)
    o = scan(prepared, weights, layout, states)[0]
    if states is not None:
        keep_inputs(qkvz, weights, layout, states)
    return gate(o, qkvz, weights)


def step(qkvz: Tensor, rates: Tensor, weights: DeltaWeights, states: SlotStates, warps: int = 8) -> Tensor:
    """The same of one token of each slot's sequence; a row without a slot gives zeros."""
    c, rows = weights.config, qkvz.shape[0]
    qkv, z = qkvz.new_empty(rows, c.channels), qkvz[:, c.channels :]
    out, sizes = qkvz.new_empty(rows, c.widths[3]), dict[str, Any](weights.sizes)
    del sizes["C"]
    _conv_step[(rows, 2 * c.key_heads + c.value_heads)](
        qkvz, weights.conv, states.inputs, qkv, states.slots_B, qkvz.stride(0), states.inputs.stride(0),
        W=c.conv_width, **sizes, BLOCK=_block(max(c.key_dim, c.value_dim)), num_warps=1, **PDL,
    )  # fmt: skip
    _step[(rows, c.value_heads)](
        qkv, rates, z, weights.a_log, weights.dt_bias, weights.norm, states.matrices, out, states.slots_B,
        weights.eps, rates.stride(0), z.stride(0), states.matrices.stride(0),
        **sizes, **weights.blocks, num_warps=warps, **PDL,
    )  # fmt: skip
    return out

# pyright: reportMissingImports=false, reportIndexIssue=false, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
"""The gated delta net over packed sequences, and over one token of each sequence in place.

Computes what `models.delta_net.DeltaNet.mixed` does: the short convolution, unit norms, the delta rule, and
the gated norm. q, k, v and the result before the norm are rounded to the model's dtype; sums and states are
fp32. `_walk` goes token by token. All sums have one order for any number of tokens, and nothing is contracted
(`EXACT`): training, prefill and decode are bitwise identical. `delta_gradients` is the backward, in chunks.

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

from tinkex.engine.cuda.elementwise import sum_loaded_rows
from tinkex.engine.cuda.launch import PDL, cdiv, launched, load, load_fp32, power_of_2, wait_for_previous
from tinkex.engine.torch.device_copies import all_to_device
from tinkex.engine.torch.models.architecture import DeltaConfig

CHUNK = 64  # tokens
_CHANNELS = 1024  # of one program of `_keep`
_ROWS = 32  # of a tile of a state
_EACH = 8  # columns of a state that a warp has in a tile
_BUSY = 4096  # warps of `_walk` from which on one may have several tiles of columns
EXACT = {"enable_fp_fusion": False}  # else each kernel of a sum may contract other products and additions


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


@triton.jit
def _factors(factors, rates, a_log, dt_bias, row, have, head, T, stride, H: tl.constexpr):
    """Store what a head's tokens multiply the state with, and their rates β: [2, H, T]."""
    place, to = rates + row * stride + head, factors + head.to(tl.int64) * T + row
    slope, bias = -tl.exp(tl.load(a_log + head).to(tl.float32)), tl.load(dt_bias + head).to(tl.float32)
    decay = tl.exp(slope * softplus(load_fp32(place + H, have) + bias))
    tl.store(to, decay, mask=have)
    tl.store(to + tl.cast(H, tl.int64) * T, tl.sigmoid(load_fp32(place, have)), mask=have)


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
        total = tl.fma(x, load_fp32(conv + channel * W + i, have_c)[None, :] + tl.zeros_like(x), total)
    return total, have


@triton.jit
def _activated(y, head, is_key, K: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """silu and, of q and k, the unit norm."""
    y = y * tl.sigmoid(y)
    if is_key:
        along = sum_loaded_rows(y * y, ROWS, BLOCK)
        y = y * (tl.rsqrt(along + 1e-6) * tl.where(head < K, D**-0.5, 1.0))[:, None]
    return y


@launched
@triton.jit(do_not_specialize=["chunks", "T"])
def _prepare(
    u, rates, conv, a_log, dt_bias, inputs, qkv, factors, cells, chunks, slots, T,
    stride_u, stride_rates, stride_slot, W: tl.constexpr, STATES: tl.constexpr,
    K: tl.constexpr, H: tl.constexpr, D: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One head of q, k or v of a chunk: convolution, silu and, of q and k, the unit norm, of v the rates."""
    wait_for_previous()
    F: tl.constexpr = 2 * K * D + H * V
    first, count, before, _, sequence = chunk_at(cells, chunks, tl.program_id(0), C)
    head, t = tl.program_id(1), tl.arange(0, C)
    channel, have_c, is_key = channels_of(head, K, H, D, V, BLOCK)
    if STATES:
        inputs += tl.maximum(tl.load(slots + sequence), 0).to(tl.int64) * stride_slot
    y, have = convolved(u, conv, inputs, first, before, count, t, channel, have_c, stride_u, F, W, STATES)
    y = _activated(y, head, is_key, K, D, C, BLOCK)
    tl.store(qkv + (first + t)[:, None] * F + channel[None, :], y, mask=have)
    if head >= 2 * K:
        _factors(factors, rates, a_log, dt_bias, first + t, t < count, head - 2 * K, T, stride_rates, H)


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


# -- the delta rule ------------------------------------------------------------------------------------


@triton.jit
def _down(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Column sums in an order that does not depend on the layout in threads: neighbours first."""
    x = tl.sum(tl.reshape(x, (ROWS // 2, 2, COLUMNS)), 1)
    if ROWS > 2:
        return _down(x, ROWS // 2, COLUMNS)
    else:
        return tl.reshape(x, (COLUMNS,))


@triton.jit
def _along(states, x, PARTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Stateᵀ · x of COLUMNS columns, both in PARTS tiles of ROWS: parts first, then within them."""
    total = states[0] * x[0]
    for i in tl.static_range(1, PARTS):
        total = tl.fma(states[i], x[i], total)
    return _down(total, ROWS, COLUMNS)


@triton.jit
def _parts_at(place, d, D: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """q or k of a token in PARTS tiles, the same in each column: no thread needs another's."""
    tiles = ()
    for i in tl.static_range(PARTS):
        at = d[:, None] + (i * ROWS + tl.zeros((ROWS, COLUMNS), tl.int32))
        if D == PARTS * ROWS:
            tiles += (tl.load(place + at),)
        else:
            tiles += (load(place + at, at < D),)
    return tiles


@triton.jit
def _token_at(
    qkv, factors, row, head, c, d, T, K: tl.constexpr, H: tl.constexpr, D: tl.constexpr, V: tl.constexpr,
    GROUPS: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """What a token needs: its factor and its rate, then q, k and v of a head in tiles."""
    at, of_head = qkv + row * (2 * K * D + H * V), factors + head.to(tl.int64) * T + row
    token = (tl.load(of_head), tl.load(of_head + tl.cast(H, tl.int64) * T))
    token += _parts_at(at + head // (H // K) * D, d, D, PARTS, ROWS, COLUMNS)
    token += _parts_at(at + (K + head // (H // K)) * D, d, D, PARTS, ROWS, COLUMNS)
    for g in tl.static_range(GROUPS):
        token += (load(at + 2 * K * D + head * V + g * COLUMNS + c, g * COLUMNS + c < V),)
    return token


@triton.jit
def _go_on(
    states, token, GROUPS: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """The state after a token, and the token's result: of each of GROUPS tiles of columns."""
    q, k, after, results = (), (), (), ()
    for i in tl.static_range(PARTS):
        q += (token[2 + i].to(tl.float32),)
        k += (token[2 + PARTS + i].to(tl.float32),)
    for g in tl.static_range(GROUPS):
        faded, grown = (), ()
        for i in tl.static_range(PARTS):
            faded += (states[g * PARTS + i] * token[0],)
        v = token[2 + 2 * PARTS + g].to(tl.float32)
        new = token[1] * (v - _along(faded, k, PARTS, ROWS, COLUMNS))
        new = tl.broadcast_to(new[None, :], ROWS, COLUMNS)
        for i in tl.static_range(PARTS):
            grown += (tl.fma(k[i], new, faded[i]),)
        results += (_along(grown, q, PARTS, ROWS, COLUMNS),)
        after += grown
    return after, results


@launched
@triton.jit(do_not_specialize=["sequences", "T"])
def _walk(
    qkv, factors, o, matrices, cells, sequences, slots, T, stride_slot,
    STATES: tl.constexpr, ONE: tl.constexpr,
    K: tl.constexpr, H: tl.constexpr, D: tl.constexpr, V: tl.constexpr,
    GROUPS: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The delta rule, token by token, in GROUPS · COLUMNS columns of a head's state of one sequence.

    Columns do not depend on each other. Each warp holds eight columns of a tile, so it sums over their rows
    alone. The next token is loaded while one is computed. STATES: the state starts from its slot's and is
    left there. ONE: a sequence is one row; without a slot its result is zeros.
    """
    wait_for_previous()
    block, head, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    d, c = tl.arange(0, ROWS), block * (GROUPS * COLUMNS) + tl.arange(0, COLUMNS)
    slot = tl.full((), 0, tl.int64)
    if STATES:
        slot = tl.load(slots + sequence).to(tl.int64)
    if ONE:
        first, count = sequence.to(tl.int64), 1
    else:
        first, count = tl.load(cells + sequence).to(tl.int64), tl.load(cells + sequences + sequence)
    if count > 0:
        states = ()
        if STATES:
            matrices += tl.maximum(slot, 0) * stride_slot + head * D * V
        for g in tl.static_range(GROUPS):
            for i in tl.static_range(PARTS):
                if STATES:
                    at_d, at_c = i * ROWS + d[:, None], g * COLUMNS + c[None, :]
                    states += (load(matrices + at_d * V + at_c, (at_d < D) & (at_c < V) & (slot >= 0)),)
                else:
                    states += (tl.zeros((ROWS, COLUMNS), tl.float32),)
        token = _token_at(qkv, factors, first, head, c, d, T, K, H, D, V, GROUPS, PARTS, ROWS, COLUMNS)
        if ONE:
            states, results = _go_on(states, token, GROUPS, PARTS, ROWS, COLUMNS)
            for g in tl.static_range(GROUPS):
                result = tl.where(slot >= 0, results[g], 0.0)
                tl.store(o + (first * H + head) * V + g * COLUMNS + c, result, mask=g * COLUMNS + c < V)
        else:
            for at in range(count):
                row = first + at
                ahead = _token_at(
                    qkv, factors, first + tl.minimum(at + 1, count - 1), head, c, d, T,
                    K, H, D, V, GROUPS, PARTS, ROWS, COLUMNS,
                )  # fmt: skip
                states, results = _go_on(states, token, GROUPS, PARTS, ROWS, COLUMNS)
                for g in tl.static_range(GROUPS):
                    to = o + (row * H + head) * V + g * COLUMNS + c
                    tl.store(to, results[g], mask=g * COLUMNS + c < V)
                token = ahead
        if STATES:
            for g in tl.static_range(GROUPS):
                for i in tl.static_range(PARTS):
                    at_d, at_c = i * ROWS + d[:, None], g * COLUMNS + c[None, :]
                    have = (at_d < D) & (at_c < V) & (slot >= 0)
                    tl.store(matrices + at_d * V + at_c, states[g * PARTS + i], mask=have)


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
    along = sum_loaded_rows(x * x, BLOCK_T, BLOCK_V)
    x *= tl.rsqrt(along / V + eps)[:, None] * load_fp32(norm + c, c < V)[None, :]
    tl.store(out + place, x * gate * tl.sigmoid(gate), mask=have)


# -- one token of each sequence ------------------------------------------------------------------------


@launched
@triton.jit(do_not_specialize=["T"])
def _prepare_one(
    u, rates, conv, a_log, dt_bias, inputs, qkv, factors, slots, T, stride_u, stride_rates, stride_slot,
    W: tl.constexpr, K: tl.constexpr, H: tl.constexpr, D: tl.constexpr, V: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`_prepare` and `_keep` of one token: of a row, the channels of one head."""
    wait_for_previous()
    F: tl.constexpr = 2 * K * D + H * V
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    channel, have, is_key = channels_of(head, K, H, D, V, BLOCK)
    slot = tl.load(slots + row)
    y, new = tl.zeros((BLOCK,), tl.float32), load_fp32(u + row * stride_u + channel, have)
    if slot >= 0:
        inputs += slot * stride_slot
        for i in tl.static_range(W):
            x = new
            if i < W - 1:
                x = load(inputs + i * F + channel, have)
            if i > 0:
                tl.store(inputs + (i - 1) * F + channel, x, mask=have)
            y = tl.fma(x, load_fp32(conv + channel * W + i, have), y)
    y = tl.reshape(_activated(y[None, :], head, is_key, K, D, 1, BLOCK), (BLOCK,))
    tl.store(qkv + row * F + channel, y, mask=have)
    if head >= 2 * K:
        _factors(factors, rates, a_log, dt_bias, row, True, head - 2 * K, T, stride_rates, H)


# -- launching -----------------------------------------------------------------------------------------


class DeltaInputs(NamedTuple):
    """What the delta rule reads."""

    qkv: Tensor  # [T, F]: q and k as units, v
    factors: Tensor  # fp32 [2, H, T]: of the state, and β


class WalkTile(NamedTuple):
    warps: int
    groups: int  # tiles of columns that a warp has


def walk_tile(value_dim: int, heads: int, tokens: int) -> WalkTile:
    """For so many heads, and tokens of heads, of all sequences; as measured on an H200.

    Four groups share each load of q and k: faster where the device is full, slower where it waits for the
    longest sequence. With one warp in a program, no warp waits for another.
    """
    tiles = cdiv(value_dim, _EACH)
    if tiles % 4 == 0 and heads * tiles >= _BUSY and tokens > heads:
        return WalkTile(1, 4)
    return WalkTile(min(4, power_of_2(tiles)), 1)


def prepare(
    qkvz: Tensor, rates: Tensor, weights: DeltaWeights, layout: ChunkLayout, states: SlotStates | None
) -> DeltaInputs:
    """`qkvz` is [T, F + H·V] and `rates` [T, 2·H], as the projections give them."""
    c, cells, tokens = weights.config, layout.chunks, qkvz.shape[0]
    chunks, h = cells.shape[1], c.value_heads
    made = _unfilled(qkvz, weights)
    inputs, slots, stride = (qkvz, cells, 0) if states is None else (
        states.inputs, states.slots_B, states.inputs.stride(0))  # fmt: skip
    _prepare[(chunks, 2 * c.key_heads + h)](
        qkvz, rates, weights.conv, weights.a_log, weights.dt_bias, inputs, *made, cells, chunks, slots,
        tokens, qkvz.stride(0), rates.stride(0), stride, W=c.conv_width, STATES=states is not None,
        **weights.sizes, BLOCK=_block(max(c.key_dim, c.value_dim)), num_warps=8, **EXACT, **PDL,
    )  # fmt: skip
    return made


def _unfilled(qkvz: Tensor, weights: DeltaWeights) -> DeltaInputs:
    tokens, c = qkvz.shape[0], weights.config
    factors = torch.empty(2, c.value_heads, tokens, dtype=torch.float32, device=qkvz.device)
    return DeltaInputs(qkvz.new_empty(tokens, c.channels), factors)


def walk(
    prepared: DeltaInputs, weights: DeltaWeights, sequences: Tensor | None, states: SlotStates | None,
    tile: WalkTile | None = None,
) -> Tensor:  # fmt: skip
    """The delta rule's result, [T, H, V]. Without `sequences` each row is one token of its slot."""
    (qkv, _), c, sizes = prepared, weights.config, dict[str, Any](weights.sizes)
    del sizes["C"]
    tokens, count = len(qkv), len(qkv) if sequences is None else sequences.shape[1]
    o = qkv.new_empty(tokens, c.value_heads, c.value_dim)
    matrices, slots, stride = (o, o, 0) if states is None else (
        states.matrices, states.slots_B, states.matrices.stride(0))  # fmt: skip
    tile = tile or walk_tile(c.value_dim, c.value_heads * count, c.value_heads * tokens)
    columns, block_d = _EACH * tile.warps, _block(c.key_dim)
    rows = min(_ROWS, block_d)
    _walk[(cdiv(c.value_dim, tile.groups * columns), c.value_heads, count)](
        *prepared, o, matrices, slots if sequences is None else sequences, count, slots, tokens, stride,
        STATES=states is not None, ONE=sequences is None, **sizes, GROUPS=tile.groups, PARTS=block_d // rows,
        ROWS=rows, COLUMNS=columns, num_warps=tile.warps, **EXACT, **PDL,
    )  # fmt: skip
    return o


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
        H=h, V=v, BLOCK_T=rows, BLOCK_V=_block(v), num_warps=4, **EXACT, **PDL,
    )  # fmt: skip
    return out


def mixed(
    qkvz: Tensor, rates: Tensor, weights: DeltaWeights, layout: ChunkLayout, states: SlotStates | None = None
) -> Tensor:
    """The layer's result before its last projection, [T, H·V]; states go on from `states`, if given."""
    prepared = prepare(qkvz, rates, weights, layout, states)
    o = walk(prepared, weights, layout.sequences, states)
    if states is not None:
        keep_inputs(qkvz, weights, layout, states)
    return gate(o, qkvz, weights)


def step(qkvz: Tensor, rates: Tensor, weights: DeltaWeights, states: SlotStates) -> Tensor:
    """The same of one token of each slot's sequence; a row without a slot gives zeros."""
    c, rows, sizes = weights.config, qkvz.shape[0], dict[str, Any](weights.sizes)
    del sizes["C"]
    made = _unfilled(qkvz, weights)
    _prepare_one[(rows, 2 * c.key_heads + c.value_heads)](
        qkvz, rates, weights.conv, weights.a_log, weights.dt_bias, states.inputs, *made, states.slots_B,
        rows, qkvz.stride(0), rates.stride(0), states.inputs.stride(0), W=c.conv_width, **sizes,
        BLOCK=_block(max(c.key_dim, c.value_dim)), num_warps=1, **EXACT, **PDL,
    )  # fmt: skip
    return gate(walk(made, weights, None, states), qkvz, weights)

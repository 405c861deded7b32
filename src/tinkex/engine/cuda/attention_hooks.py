"""The decoder's attention hooks on CUDA: over the paged cache, and within packed sequences.

`KernelAttend` computes what `kv.PagedAttend` does, `RaggedAttend` what `attention.PackedAttend` does.
Knows nothing of requests or adapters.

Shapes: T tokens of the step, H query heads, G kv heads, C head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd import Function

from tinkex.engine.cuda import packed_attention as packed
from tinkex.engine.cuda import paged_attention as paged
from tinkex.engine.cuda.paged_layout import layout_of
from tinkex.engine.torch.kv import PAGE, KVCache, TokenSpan
from tinkex.engine.torch.upload import all_to_device

TOKENS = 16  # queries of a tile where some sequence has several
MIN_SPLIT_KEYS = 2048  # of one split, where decoding is to be bitwise identical to the trainer


class KernelAttend:
    """Writes the step's keys and values into `slots_T` and attends as `queries` say."""

    def __init__(
        self, cache: KVCache, windows: Sequence[int | None], queries: paged.Queries, slots_T: Tensor
    ) -> None:
        self._cache, self._windows, self._queries, self._slots_T = cache, windows, queries, slots_T

    def __call__(self, layer: int, q_THC: Tensor, k_TGC: Tensor, v_TGC: Tensor) -> Tensor:
        k_pool, v_pool = self._cache.layer(layer)
        if self._queries.tokens > 1:
            paged.write(k_TGC, v_TGC, k_pool, v_pool, self._slots_T)
        return paged.attend(
            q_THC, k_TGC, v_TGC, k_pool, v_pool, self._queries, self._cache.heads, PAGE, self._windows[layer]
        )[0]


def attend_pieces(
    cache: KVCache,
    pieces: Sequence[TokenSpan],
    windows: Sequence[int | None],
    invariant: bool = False,
    min_split_keys: int = 0,
) -> KernelAttend:
    """Attention for any mix of prompts and single tokens; with one size of tile alone if `invariant`.

    `min_split_keys` is that of `paged_attention.Queries`.
    """
    tokens = tile_tokens(pieces, invariant)
    queries, slots_T = lay_out(pieces, tokens, splits_for(len(pieces) * cache.heads, tokens), cache.device)
    return KernelAttend(cache, windows, queries._replace(min_split_keys=min_split_keys), slots_T)


def tile_tokens(pieces: Sequence[TokenSpan], invariant: bool = False) -> int:
    """Queries of a tile of a step."""
    return TOKENS if invariant or any(piece.new > 1 for piece in pieces) else 1


def lay_out(
    pieces: Sequence[TokenSpan], tokens: int, splits: int, device: torch.device
) -> tuple[paged.Queries, Tensor]:
    """The pieces' new tokens in tiles, and the slots of their keys."""
    layout = layout_of(pieces, tokens)
    cells, pages, slots_T = all_to_device([layout.tiles, layout.pages, layout.slots], device)
    return paged.Queries(cells, pages[:, None], tokens, splits), slots_T


class PackedForward:
    """Attention within packed sequences by the sampler's kernel and in its tiles: bitwise identical to it.

    Returns what `packed_attention.forward` does, each query's log-sum-exp [H, T] included.
    """

    def __init__(self, lengths: Sequence[int], device: torch.device) -> None:
        widths = [-(-length // PAGE) for length in lengths]
        firsts = np.cumsum([0, *widths]).tolist()
        pieces = [
            TokenSpan(range(first, first + width), 0, length)
            for first, width, length in zip(firsts, widths, lengths, strict=False)
        ]
        self._slots = firsts[-1] * PAGE
        self._queries, self._slots_T = lay_out(pieces, TOKENS, 1, device)

    def __call__(
        self, q_THC: Tensor, k_TGC: Tensor, v_TGC: Tensor, window: int | None
    ) -> tuple[Tensor, Tensor]:
        g, c = k_TGC.shape[1:]
        k_pool, v_pool = torch.empty(2, self._slots, g * c, dtype=q_THC.dtype, device=q_THC.device)
        paged.write(k_TGC, v_TGC, k_pool, v_pool, self._slots_T)
        out, lse_TH = paged.attend(q_THC, k_TGC, v_TGC, k_pool, v_pool, self._queries, g, PAGE, window)
        return out, lse_TH.t().contiguous()


class RaggedAttend:
    """Attention within each of the packed sequences of `lengths`; `windows` is one entry per layer.

    `invariant`: the forward is bitwise identical to the sampler's attention, whatever else is packed.
    """

    def __init__(
        self, lengths: Sequence[int], windows: Sequence[int | None], device: torch.device, invariant: bool
    ) -> None:
        self._lengths, self._windows, self._device = lengths, windows, device
        self._tiles: packed.AttentionTiles | None = None
        self._forward = PackedForward(lengths, device) if invariant else None

    def __call__(self, layer: int, q_THC: Tensor, k_TGC: Tensor, v_TGC: Tensor) -> Tensor:
        if self._tiles is None:
            self._tiles = packed.cut(self._lengths, self._device)
        window = self._windows[layer]
        if self._forward is None and window is not None and window >= max(self._lengths):
            window = None
        return _Ragged.apply(q_THC, k_TGC, v_TGC, self._tiles, window, self._forward)  # type: ignore[return-value]


class _Ragged(Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        tiles: packed.AttentionTiles,
        window: int | None,
        forward: Any,
    ) -> Tensor:
        out, lse = forward(q, k, v, window) if forward else packed.forward(q, k, v, tiles, window)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.tiles, ctx.window = tiles, window
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        q, k, v, out, lse = ctx.saved_tensors
        back = packed.backward(grads[0].contiguous(), q, k, v, out, lse, ctx.tiles, ctx.window)
        return *back, None, None, None


def splits_for(programs: int, tokens: int) -> int:
    """Into how many splits keys are cut, so that few sequences fill the device."""
    if tokens > 1:
        return 1
    return max(1, min(16, 1 << (256 // programs).bit_length() >> 1)) if programs < 256 else 1

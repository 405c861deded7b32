"""The decoder's attention hooks on CUDA: over the paged cache, and within packed sequences.

`KernelAttend` computes what `kv.PagedAttend` does, `RaggedAttend` what `attention.PackedAttend` does.

Shapes: T tokens of the step, H query heads, G kv heads, C head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd import Function

from tinkex.engine.cuda import packed_attention as packed
from tinkex.engine.cuda import paged_attention as paged
from tinkex.engine.torch.device_copies import all_to_device
from tinkex.engine.torch.kv import PAGE, KVCache, TokenSpan

TOKENS = 16  # queries of a tile where some sequence has several


# -- over the paged cache ------------------------------------------------------------------------------


class PagedLayout(NamedTuple):
    """A step's tokens as the paged kernels read them; all int32, one piece after the other.

    The last row of `tiles` says where in `pages` their sequence begins: the page table is one list, not a
    table as wide as the longest sequence. Kernels read it as rows of one page.
    """

    positions: np.ndarray  # [T]
    slots: np.ndarray  # [T]
    tiles: np.ndarray  # [4, tiles]: first row, how many, position of the first, first page
    pages: np.ndarray
    tile: int  # tokens of a whole tile


def layout_of(pieces: Sequence[TokenSpan], tile: int) -> PagedLayout:
    """`pieces` in tiles of up to `tile` tokens of one piece; on whole arrays: tiles may be thousands."""
    new, start, held = np.array([(p.new, p.start, len(p.pages)) for p in pieces]).T
    pages = np.fromiter(chain.from_iterable(p.pages for p in pieces), np.int32, held.sum())
    first_row, first_page = np.cumsum(new) - new, np.cumsum(held) - held
    positions = np.arange(new.sum()) + np.repeat(start - first_row, new)
    slots = pages[positions // PAGE + np.repeat(first_page, new)] * PAGE + positions % PAGE
    tiles = -(-new // tile)
    of = np.repeat(np.arange(len(pieces)), tiles)
    done = tile * (np.arange(len(of)) - (np.cumsum(tiles) - tiles)[of])
    cells = first_row[of] + done, np.minimum(tile, new[of] - done), start[of] + done, first_page[of]
    positions, slots, tiles = (x.astype(np.int32) for x in (positions, slots, np.stack(cells)))
    return PagedLayout(positions, slots, tiles, pages, tile)


def tile_tokens(pieces: Sequence[TokenSpan], invariant: bool = False) -> int:
    """Queries of a tile of a step: always the same number if `invariant`."""
    return TOKENS if invariant or any(piece.new > 1 for piece in pieces) else 1


def splits_for(programs: int, tokens: int) -> int:
    """Into how many splits keys are cut, so that few sequences fill the device."""
    if tokens > 1 or programs >= 256:
        return 1
    return max(1, min(16, 1 << (256 // programs).bit_length() >> 1))


class KernelAttend:
    """Writes the step's keys and values into `slots_T` and attends as `queries` say."""

    def __init__(
        self, cache: KVCache, windows: Sequence[int | None], queries: paged.Queries, slots_T: Tensor
    ) -> None:
        self._cache, self._windows, self._queries, self._slots_T = cache, windows, queries, slots_T

    def __call__(
        self, layer: int, q_THC: Tensor, k_TGC: Tensor, v_TGC: Tensor, sinks: Tensor | None = None,
        whole_images: bool = False,
    ) -> Tensor:  # fmt: skip
        assert not whole_images
        pools, window = self._cache.layer(layer), self._windows[layer]
        of_step = self._queries, self._slots_T, PAGE
        return paged.attend(q_THC, k_TGC, v_TGC, *pools, *of_step, window, sinks)[0]


def lay_out(
    pieces: Sequence[TokenSpan], tokens: int, device: torch.device, splits: int = 1, min_split_keys: int = 0
) -> tuple[paged.Queries, Tensor]:
    """The pieces' new tokens in tiles of `tokens`, and the slots of their keys."""
    layout = layout_of(pieces, tokens)
    cells, pages, slots_T = all_to_device([layout.tiles, layout.pages, layout.slots], device)
    return paged.Queries(cells, pages[:, None], tokens, splits, min_split_keys), slots_T


# -- within packed sequences ---------------------------------------------------------------------------


class PackedForward:
    """Attention within packed sequences by the sampler's kernel and in its tiles: bitwise identical to it.

    Returns what `packed_attention.forward` does, each query's log-sum-exp [H, T] included.
    """

    def __init__(self, lengths: Sequence[int], device: torch.device) -> None:
        ends = np.cumsum([-(-length // PAGE) for length in lengths]).tolist()
        pages = map(range, [0, *ends], ends)
        pieces = [TokenSpan(held, 0, length) for held, length in zip(pages, lengths, strict=True)]
        self._slots = ends[-1] * PAGE
        self._queries, self._slots_T = lay_out(pieces, TOKENS, device)

    def __call__(
        self, q_THC: Tensor, k_TGC: Tensor, v_TGC: Tensor, window: int | None, sinks: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        k_pool, v_pool = q_THC.new_empty(2, self._slots, k_TGC[0].numel())
        out, lse_TH = paged.attend(
            q_THC, k_TGC, v_TGC, k_pool, v_pool, self._queries, self._slots_T, PAGE, window, sinks
        )
        return out, lse_TH.t().contiguous()


class RaggedAttend:
    """Attention within each of the packed sequences of `lengths`; `windows` is one entry per layer.

    `invariant`: the forward is bitwise identical to the sampler's attention in any packing.
    """

    def __init__(
        self, lengths: Sequence[int], windows: Sequence[int | None], device: torch.device, invariant: bool
    ) -> None:
        self._lengths, self._windows, self._device = lengths, windows, device
        self._forward = PackedForward(lengths, device) if invariant else None

    @cached_property
    def _tiles(self) -> packed.AttentionTiles:
        """Cut at the first layer, while the device multiplies."""
        return packed.cut(self._lengths, self._device)

    def __call__(
        self, layer: int, q_THC: Tensor, k_TGC: Tensor, v_TGC: Tensor, sinks: Tensor | None = None,
        whole_images: bool = False,
    ) -> Tensor:  # fmt: skip
        assert not whole_images
        window = self._windows[layer]
        if self._forward is None and window is not None and window >= max(self._lengths):
            window = None
        return _Ragged.apply(q_THC, k_TGC, v_TGC, self._tiles, window, sinks, self._forward)  # type: ignore[return-value]


class _Ragged(Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, tiles: packed.AttentionTiles, window: int | None,
        sinks: Tensor | None, forward: Callable[..., tuple[Tensor, Tensor]] | None,
    ) -> Tensor:  # fmt: skip
        if forward is None:
            out, lse = packed.forward(q, k, v, tiles, window, sinks)
        else:
            out, lse = forward(q, k, v, window, sinks)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.tiles, ctx.window = tiles, window
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        q, k, v, out, lse = ctx.saved_tensors
        back = packed.backward(grads[0].contiguous(), q, k, v, out, lse, ctx.tiles, ctx.window)
        return *back, None, None, None, None

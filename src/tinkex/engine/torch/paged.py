"""The step's attention over the paged cache on CUDA: what `kv.PagedAttend` does, through the kernels.

Knows nothing of requests or adapters.

Shapes: T tokens of the step, H query heads, G kv heads, C head dim.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from tinkex.engine.torch.kernels import paged as kernel
from tinkex.engine.torch.kv import PAGE, KVCache, Piece, slots_of

_TOKENS = 16  # queries of a tile where some sequence has several


class KernelAttend:
    """Writes the step's keys and values into `slots_T` and attends as `queries` say."""

    def __init__(
        self, cache: KVCache, windows: Sequence[int | None], queries: kernel.Queries, slots_T: Tensor
    ) -> None:
        self._cache, self._windows, self._queries, self._slots_T = cache, windows, queries, slots_T

    def __call__(self, layer: int, q_THC: Tensor, k_TGC: Tensor, v_TGC: Tensor) -> Tensor:
        k_pool, v_pool = self._cache.layer(layer)
        if self._queries.tokens > 1:
            kernel.write(k_TGC, v_TGC, k_pool, v_pool, self._slots_T)
        return kernel.attend(
            q_THC, k_TGC, v_TGC, k_pool, v_pool, self._queries, self._cache.heads, PAGE, self._windows[layer]
        )


def attend_pieces(
    cache: KVCache, pieces: Sequence[Piece], windows: Sequence[int | None], device: torch.device
) -> KernelAttend:
    """Attention for any mix of prompts and single tokens."""
    tokens = _TOKENS if any(piece.new > 1 for piece in pieces) else 1
    tiles, row = [], 0
    for i, piece in enumerate(pieces):
        for at in range(0, piece.new, tokens):
            tiles.append((row + at, min(tokens, piece.new - at), piece.start + at, i))
        row += piece.new
    table = np.zeros((len(pieces), max(len(piece.pages) for piece in pieces)), np.int32)
    for held, piece in zip(table, pieces, strict=True):
        held[: len(piece.pages)] = piece.pages
    slots = np.concatenate([slots_of(piece) for piece in pieces])
    on_device = [
        torch.from_numpy(array).pin_memory().to(device, non_blocking=True)
        for array in (np.ascontiguousarray(np.array(tiles, np.int32).T), table, slots)
    ]
    queries = kernel.Queries(
        on_device[0], on_device[1], tokens, splits_for(len(pieces) * cache.heads, tokens)
    )
    return KernelAttend(cache, windows, queries, on_device[2])


def splits_for(programs: int, tokens: int) -> int:
    """Into how many parts the keys are cut so that few sequences keep a whole device busy."""
    if tokens > 1:
        return 1
    return max(1, min(16, 1 << (256 // programs).bit_length() >> 1)) if programs < 256 else 1

"""Causal grouped-query attention over dense blocks and over a packed batch, with optional sliding windows.

`attend` is the fast path (torch's fused kernel, little work on what a query cannot see) and `attend_plain`
the plain one; a test holds them equal, forward and backward. Queries are the last S of L positions, so the
same function serves training (S = L), prefill after a cached prefix and decoding (S = 1).
Does not know caches, pages or adapters.

Shapes: B sequences, S queries of each, L keys of each, T tokens, H query heads, G kv heads, C head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch
import torch.nn.functional as F
from torch import Tensor


def attend_plain(q_BSHC: Tensor, k_BLGC: Tensor, v_BLGC: Tensor, window: int | None = None) -> Tensor:
    """softmax(q·k / √C)·v written out. A query sees itself and what came before, `window` in all."""
    (b, s, h, c), (_, l, g, _) = q_BSHC.shape, k_BLGC.shape
    q = q_BSHC.reshape(b, s, g, h // g, c)
    scores = torch.einsum("bsgrc,blgc->bgrsl", q.float(), k_BLGC.float()) / c**0.5
    scores = scores.masked_fill(~visible(s, l, window, q.device), float("-inf"))
    o = torch.einsum("bgrsl,blgc->bsgrc", scores.softmax(dim=-1), v_BLGC.float())
    return o.reshape(b, s, h, c).to(q_BSHC.dtype)


def attend(q_BSHC: Tensor, k_BLGC: Tensor, v_BLGC: Tensor, window: int | None = None) -> Tensor:
    """The same, through torch's fused kernel."""
    s, l = q_BSHC.shape[1], k_BLGC.shape[1]
    if window is not None and window < l:
        return _attend_window(q_BSHC, k_BLGC, v_BLGC, window)
    mask = None if s in (1, l) else visible(s, l, None, q_BSHC.device)
    return _fused(q_BSHC, k_BLGC, v_BLGC, mask, causal=s == l)


def visible(s: int, l: int, window: int | None, device: torch.device) -> Tensor:
    """[S, L]: which of L positions each of the last S sees."""
    query = torch.arange(l - s, l, device=device)[:, None]
    key = torch.arange(l, device=device)
    seen = key <= query
    return seen if window is None else seen & (key > query - window)


def _fused(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    grouped = q.shape[1] != k.shape[1]
    o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=grouped)
    return o.transpose(1, 2)


def _attend_window(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """Queries in blocks of a window's length, each with only the keys that some query of it sees."""
    s, l = q.shape[1], k.shape[1]
    blocks = []
    for start in range(0, s, window):
        stop = min(start + window, s)
        first, last = max(0, l - s + start - window + 1), l - s + stop
        mask = visible(stop - start, last - first, window, q.device)
        blocks.append(_fused(q[:, start:stop], k[:, first:last], v[:, first:last], mask, causal=False))
    return torch.cat(blocks, dim=1)


class PackedAttend:
    """Attention within each of the packed sequences of `lengths`; `windows` is one entry per layer."""

    def __init__(self, lengths: Sequence[int], windows: Sequence[int | None]) -> None:
        self.windows = windows
        # neighbours of equal length share one call: (how many, how long)
        self.groups = [(len(list(group)), length) for length, group in groupby(lengths)]

    def __call__(self, layer: int, q_THC: Tensor, k_TGC: Tensor, v_TGC: Tensor) -> Tensor:
        sizes = [count * length for count, length in self.groups]
        pieces = [
            attend(*(x.unflatten(0, group) for x in qkv), window=self.windows[layer]).flatten(0, 1)
            for group, *qkv in zip(
                self.groups, q_THC.split(sizes), k_TGC.split(sizes), v_TGC.split(sizes), strict=True
            )
        ]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

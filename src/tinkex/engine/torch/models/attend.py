"""Softmax attention as arithmetic: rotation, windows, sinks, and attention within packed sequences.

Shapes: B sequences, L tokens of each, S keys, T tokens in all, H query heads, G kv heads, C head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch
import torch.nn.functional as F
from torch import Tensor

Spans = Sequence[tuple[int, int]]  # (start, stop) of positions that see each other, later ones too
_QUERIES = 1024  # whose masks are in memory at once


def turn(x_TNC: Tensor, cos: Tensor, sin: Tensor, adjacent: bool) -> Tensor:
    """Rotate the first dimensions of every head, as many as there are angles; the rest pass through."""
    cos, sin, count = cos[:, None], sin[:, None], 2 * cos.shape[-1]
    turned, rest = x_TNC[..., :count], x_TNC[..., count:]
    a, b = (turned[..., 0::2], turned[..., 1::2]) if adjacent else turned.chunk(2, dim=-1)
    a, b = a * cos - b * sin, b * cos + a * sin
    pairs = torch.stack((a, b), dim=-1).flatten(-2) if adjacent else torch.cat((a, b), dim=-1)
    return torch.cat((pairs, rest), dim=-1) if rest.shape[-1] else pairs


class Chunk(int):
    """A window that restarts every so many positions: a query attends within its own chunk."""


def visible(query: Tensor, key: Tensor, window: int | None, spans: Spans = ()) -> Tensor:
    """Which keys each query sees: its own, earlier ones by `window` or `Chunk`, later ones of its span."""
    last = query
    for start, stop in spans:
        last = torch.where((query >= start) & (query < stop), stop - 1, last)
    if window is None:
        return key <= last
    begin = query - query % window if isinstance(window, Chunk) else query - window + 1
    return (key <= last) & (key >= begin)


def attend(
    q_BLHC: Tensor, k_BLGC: Tensor, v_BLGC: Tensor, window: int | None = None, sinks: Tensor | None = None,
    spans: Spans = (),
) -> Tensor:  # fmt: skip
    """softmax(q·k / √C)·v over the keys that are `visible`."""
    length = q_BLHC.shape[1]
    if not spans and (window is None or window >= length):
        return _fused(q_BLHC, k_BLGC, v_BLGC, sinks=sinks)
    if isinstance(window, Chunk) and not spans:
        chunks = zip(*(x.split(window, dim=1) for x in (q_BLHC, k_BLGC, v_BLGC)), strict=True)
        return torch.cat([_fused(*chunk, sinks=sinks) for chunk in chunks], dim=1)
    blocks, size = [], window or _QUERIES
    for start in range(0, length, size):  # queries in blocks, each with the keys that any of them sees
        stop, first = min(start + size, length), 0 if window is None else max(0, start - window + 1)
        last = max([stop, *(end for begin, end in spans if begin < stop)])
        query = torch.arange(start, stop, device=q_BLHC.device)[:, None]
        key = torch.arange(first, last, device=q_BLHC.device)
        keys, mask = (k_BLGC[:, first:last], v_BLGC[:, first:last]), visible(query, key, window, spans)
        blocks.append(_fused(q_BLHC[:, start:stop], *keys, mask, sinks))
    return torch.cat(blocks, dim=1)


def _fused(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, sinks: Tensor | None = None
) -> Tensor:
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    return softmax_attention(q, k, v, mask, sinks).transpose(1, 2)


def softmax_attention(
    q_BHLC: Tensor, k_BGSC: Tensor, v_BGSC: Tensor, mask: Tensor | None, sinks: Tensor | None = None
) -> Tensor:
    """Attention under a mask, or causal without one; each query head may have a sink.

    A sink is one more key in front of the others, with a value of zero. A key is shared by a group of query
    heads, so further dimensions, one for each head of the group, pick the head's own sink.
    """
    causal, grouped, scale = mask is None, q_BHLC.shape[1] != k_BGSC.shape[1], q_BHLC.shape[-1] ** -0.5
    if sinks is None:
        return F.scaled_dot_product_attention(
            q_BHLC, k_BGSC, v_BGSC, attn_mask=mask, is_causal=causal, enable_gqa=grouped
        )
    b, h, length, c = q_BHLC.shape
    g, width = k_BGSC.shape[1], v_BGSC.shape[-1]
    each = h // g
    own = torch.eye(each, dtype=q_BHLC.dtype, device=q_BHLC.device).repeat(g, 1)  # [H, each]
    q = torch.cat((q_BHLC, own[None, :, None].expand(b, -1, length, -1)), dim=-1)
    sink = F.pad((sinks / scale).view(1, g, 1, each), (c, 0)).expand(b, -1, -1, -1).to(q.dtype)
    k = torch.cat((sink, F.pad(k_BGSC, (0, each))), dim=2)
    v = F.pad(v_BGSC, (0, c + each - width, 1, 0))
    if mask is None:  # a query in front too keeps the diagonal in place
        q = F.pad(q, (0, 0, 1, 0))
    else:
        mask = F.pad(mask, (1, 0), value=1.0 if mask.dtype == torch.bool else 0.0)
    o = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=grouped, scale=scale
    )
    return o[:, :, -length:, :width]


class PackedAttend:
    """Attention within each of the packed sequences of `lengths`; `windows` is one entry per layer.

    `spans` are those of each sequence's images, if any has one.
    """

    def __init__(
        self, lengths: Sequence[int], windows: Sequence[int | None], spans: Sequence[Spans] = ()
    ) -> None:
        self.windows, self._spans = windows, spans
        # Neighbours of equal length share one call: (count, length).
        self.groups = [(len(list(group)), length) for length, group in groupby(lengths)]
        if spans:
            self.groups = [(1, length) for length in lengths]

    def __call__(
        self, layer: int, q_THC: Tensor, k_TGC: Tensor, v_TGC: Tensor, sinks: Tensor | None = None,
        whole_images: bool = False,
    ) -> Tensor:  # fmt: skip
        of_groups = self._spans if whole_images and self._spans else [()] * len(self.groups)
        sizes = [count * length for count, length in self.groups]
        split = zip(*(x.split(sizes) for x in (q_THC, k_TGC, v_TGC)), strict=True)
        pieces: list[Tensor] = []
        for group, spans, qkv in zip(self.groups, of_groups, split, strict=True):
            q, k, v = (x.unflatten(0, group) for x in qkv)
            pieces.append(attend(q, k, v, self.windows[layer], sinks, spans).flatten(0, 1))
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

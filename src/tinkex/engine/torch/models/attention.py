"""Grouped-query attention: the block of a decoder layer, and attention over packed sequences.

The block projects and rotates; what its queries attend to comes in through the `Attend` hook, packed for
training and paged for sampling. `attend` goes through torch's fused kernel and skips most of what a query
cannot see; `attend_plain` writes the formula out and is its oracle. Queries are the last S of L positions.
Does not know caches, pages or adapters.

Shapes: B sequences, S queries of each, L keys of each, T tokens, H query heads, G kv heads, C head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tinkex.engine.torch.functions import split_rotate
from tinkex.engine.torch.hooks import ForwardContext, Part, PartialProjection, Site, Sites
from tinkex.engine.torch.models.architecture import ModelConfig
from tinkex.engine.torch.models.projection import Projection, frozen_parameter


class Attention(nn.Module):
    """Grouped-query attention with rotated, optionally normalised, queries and keys."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        c, self.layer, self.eps = config, layer, config.norm_eps
        self.heads = (c.heads, c.kv_heads)
        self.name = f"model.layers.{layer}.self_attn"
        sizes = {"q_proj": c.heads, "k_proj": c.kv_heads, "v_proj": c.kv_heads}
        parts = tuple(Part(f"{self.name}.{name}", n * c.head_dim, "attn") for name, n in sizes.items())
        self.qkv = Projection(Site(layer, "qkv"), c.width, parts, c.qkv_bias)
        out = Part(f"{self.name}.o_proj", c.width, "attn")
        self.o = Projection(Site(layer, "o"), c.heads * c.head_dim, (out,), c.o_bias)
        self.q_norm = frozen_parameter(c.head_dim) if c.qk_norm else None
        self.k_norm = frozen_parameter(c.head_dim) if c.qk_norm else None

    def forward(self, x: Tensor, context: ForwardContext) -> Tensor | PartialProjection:
        qkv, impl = self.qkv(x, context), context.backend.elementwise
        q_THC, k_TGC, v_TGC = split_rotate(qkv, *context.angles, self.heads, self._norms(), self.eps, impl)
        o_THC = context.attend(self.layer, q_THC, k_TGC, v_TGC)
        return self.o(o_THC.reshape(o_THC.shape[0], -1), context)

    def _norms(self) -> tuple[Tensor, Tensor] | None:
        return None if self.q_norm is None or self.k_norm is None else (self.q_norm, self.k_norm)

    def weights(self) -> dict[str, Tensor]:
        named = self.qkv.weights() | self.o.weights()
        for name, norm in (("q_norm", self.q_norm), ("k_norm", self.k_norm)):
            if norm is not None:
                named[f"{self.name}.{name}.weight"] = norm.detach()
        return named

    def sites(self) -> Sites:
        return {p.site: (p.in_features, p.parts) for p in (self.qkv, self.o)}


def attend_plain(q_BSHC: Tensor, k_BLGC: Tensor, v_BLGC: Tensor, window: int | None = None) -> Tensor:
    """softmax(q·k / √C)·v written out. A query sees itself and earlier positions, `window` in all."""
    (b, s, h, c), (_, l, g, _) = q_BSHC.shape, k_BLGC.shape
    q = q_BSHC.reshape(b, s, g, h // g, c)
    scores = torch.einsum("bsgrc,blgc->bgrsl", q.float(), k_BLGC.float()) / c**0.5
    scores = scores.masked_fill(~visible(s, l, window, q.device), float("-inf"))
    o = torch.einsum("bgrsl,blgc->bsgrc", scores.softmax(dim=-1), v_BLGC.float())
    return o.reshape(b, s, h, c).to(q_BSHC.dtype)


def attend(q_BSHC: Tensor, k_BLGC: Tensor, v_BLGC: Tensor, window: int | None = None) -> Tensor:
    """`attend_plain` through torch's fused kernel."""
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
    """Queries in blocks of a window's length, each with the keys that any of its queries sees."""
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
        # Neighbours of equal length share one call: (count, length).
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

"""Grouped-query attention: the block of a decoder layer, and attention over packed sequences.

The block projects and rotates; what its queries attend to comes in through the `Attend` hook, packed for
training and paged for sampling.

Shapes: B sequences, L tokens of each, T tokens in all, H query heads, G kv heads, C head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch
import torch.nn.functional as F
from torch import Tensor

from tinkex.engine.torch.functions import split_rotate
from tinkex.engine.torch.hooks import ForwardContext, Part, PartialProjection, Site
from tinkex.engine.torch.models.architecture import AttentionConfig, ModelConfig
from tinkex.engine.torch.models.projection import Block, Projection, frozen_parameter


class Attention(Block):
    """Grouped-query attention with rotated, optionally normalised, queries and keys."""

    def __init__(self, model: ModelConfig, config: AttentionConfig, layer: int) -> None:
        super().__init__()
        c, self.layer, self.eps = config, layer, model.norm.eps
        self.norm = model.norm
        self.heads = (c.heads, c.kv_heads)
        assert c.rope is not None
        self.rope = model.ropes.index(c.rope)
        self.name = f"model.layers.{layer}.self_attn"
        sizes = {"q_proj": c.heads, "k_proj": c.kv_heads, "v_proj": c.kv_heads}
        parts = tuple(Part(f"{self.name}.{name}", n * c.head_dim, "attn") for name, n in sizes.items())
        self.qkv = Projection(Site(layer, "qkv"), model.width, parts, c.qkv_bias)
        out = Part(f"{self.name}.o_proj", model.width, "attn")
        self.o = Projection(Site(layer, "o"), c.heads * c.head_dim, (out,), c.o_bias)
        self.q_norm = frozen_parameter(c.head_dim) if c.qk_norm else None
        self.k_norm = frozen_parameter(c.head_dim) if c.qk_norm else None

    def forward(self, x: Tensor, context: ForwardContext) -> Tensor | PartialProjection:
        qkv, impl = self.qkv(x, context), context.backend.elementwise
        q_THC, k_TGC, v_TGC = split_rotate(
            qkv, *context.angles[self.rope], self.heads, self._norms(), self.eps, impl
        )
        o_THC = context.attend(self.layer, q_THC, k_TGC, v_TGC)
        return self.o(o_THC.reshape(o_THC.shape[0], -1), context)

    def _norms(self) -> tuple[Tensor, Tensor] | None:
        return (
            None
            if self.q_norm is None or self.k_norm is None
            else (
                self.norm.factor(self.q_norm),
                self.norm.factor(self.k_norm),
            )
        )

    def weights(self) -> dict[str, Tensor]:
        norms = (("q_norm", self.q_norm), ("k_norm", self.k_norm))
        return {f"{self.name}.{name}.weight": norm.detach() for name, norm in norms if norm is not None}


def attend(q_BLHC: Tensor, k_BLGC: Tensor, v_BLGC: Tensor, window: int | None = None) -> Tensor:
    """softmax(q·k / √C)·v. A query sees itself and earlier positions, `window` in all."""
    length = q_BLHC.shape[1]
    if window is None or window >= length:
        return _fused(q_BLHC, k_BLGC, v_BLGC)
    blocks = []
    for start in range(0, length, window):  # queries in blocks, each with the keys that any of them sees
        stop, first = min(start + window, length), max(0, start - window + 1)
        query = torch.arange(start, stop, device=q_BLHC.device)[:, None]
        key = torch.arange(first, stop, device=q_BLHC.device)
        keys = k_BLGC[:, first:stop], v_BLGC[:, first:stop]
        blocks.append(_fused(q_BLHC[:, start:stop], *keys, (key <= query) & (key > query - window)))
    return torch.cat(blocks, dim=1)


def _fused(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    grouped, causal = q.shape[1] != k.shape[1], mask is None
    o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=grouped)
    return o.transpose(1, 2)


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

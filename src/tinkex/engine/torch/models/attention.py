"""Grouped-query attention: the block of a decoder layer, and attention over packed sequences.

The block projects and rotates; what its queries attend to comes in through the `Attend` hook, packed for
training and paged for sampling.

Shapes: B sequences, L tokens of each, S keys of each, T tokens in all, H query heads, G kv heads, C head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from tinkex.engine.torch.functions import Stream, rms_norm, split_rotate
from tinkex.engine.torch.hooks import ForwardContext, Part, PartialProjection, SinkAttend, Site
from tinkex.engine.torch.models.architecture import AttentionConfig, ModelConfig
from tinkex.engine.torch.models.projection import Block, Projection, frozen_parameter, total


class Attention(Block):
    """Grouped-query attention as its `AttentionConfig` says."""

    def __init__(self, model: ModelConfig, config: AttentionConfig, layer: int) -> None:
        super().__init__()
        c, self.config, self.layer, self.norm = config, config, layer, model.norm
        self.name = f"model.layers.{layer}.self_attn"
        self.rope = None if c.rope is None else model.ropes.index(c.rope)
        # what `split_rotate` does in one step
        self.direct = c.rope is not None and c.rope.whole(c.head_dim) and c.qk_norm != "whole"
        self.direct = self.direct and not (c.gate or c.v_norm or c.k_as_v) and c.share is None
        kv = c.head_dim * c.kv_heads if c.share is None else 0
        self.sizes = c.heads * c.head_dim * (1 + c.gate), kv, 0 if c.k_as_v else kv
        self.lends = any(getattr(other.mixer, "share", None) == layer for other in model.stack)
        names = ("q_proj", "k_proj", "v_proj")
        parts = tuple(
            Part(f"{self.name}.{name}", size, "attn")
            for name, size in zip(names, self.sizes, strict=True)
            if size
        )
        if c.fused:
            parts = (Part(f"{self.name}.qkv_proj", sum(self.sizes), "attn"),)
        self.qkv = Projection(Site(layer, "qkv"), model.width, parts, c.qkv_bias)
        out = Part(f"{self.name}.o_proj", model.width, "attn")
        self.o = Projection(Site(layer, "o"), c.heads * c.head_dim, (out,), c.o_bias)
        q_width, k_width = (c.heads, c.kv_heads) if c.qk_norm == "whole" else (1, 1)
        self.q_norm = frozen_parameter(q_width * c.head_dim) if c.qk_norm else None
        self.k_norm = frozen_parameter(k_width * c.head_dim) if c.qk_norm and kv else None
        self.sinks = frozen_parameter(c.heads) if c.sinks else None

    def forward(self, x: Tensor, context: ForwardContext) -> Tensor | PartialProjection:
        qkv, gate_THC = self.qkv(x, context), None
        if self.direct and self.rope is not None:
            heads, impl = (self.config.heads, self.config.kv_heads), context.backend.elementwise
            angles, norms = context.angles[self.rope], self._norms()
            q_THC, k_TGC, v_TGC = split_rotate(qkv, *angles, heads, norms, self.norm.eps, impl)
        else:
            q_THC, k_TGC, v_TGC, gate_THC = self._split(qkv, context)
        if (factor := self._query_factor(context)) is not None:
            q_THC = q_THC * factor
        if self.lends:
            context.lent[self.layer] = k_TGC, v_TGC
        if self.sinks is None:
            at = self.layer if self.config.share is None else self.config.share
            o_THC = context.attend(at, q_THC, k_TGC, v_TGC)
        else:
            o_THC = cast(SinkAttend, context.attend)(self.layer, q_THC, k_TGC, v_TGC, self.sinks)
        if gate_THC is not None:
            o_THC = o_THC * gate_THC.sigmoid()
        return self.o(o_THC.reshape(o_THC.shape[0], -1), context)

    def _split(
        self, qkv: Tensor | PartialProjection, context: ForwardContext
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """q, k, v and the gate, step by step."""
        c, gate_THC = self.config, None
        q, k, v = total(qkv).split(self.sizes, dim=-1)
        if c.gate:
            q, gate_THC = q.unflatten(-1, (c.heads, -1)).chunk(2, dim=-1)
        q_THC = self._rotated(q, self.q_norm, context)
        if c.share is not None:
            return q_THC, *context.lent[c.share], gate_THC
        k_TGC, v_TGC = (
            self._rotated(k, self.k_norm, context),
            (k if c.k_as_v else v).unflatten(-1, (-1, c.head_dim)),
        )
        if c.v_norm:
            ones = torch.ones(c.head_dim, device=v_TGC.device)
            v_TGC = rms_norm(Stream(v_TGC), ones, self.norm.eps, context.backend.elementwise)
        return q_THC, k_TGC, v_TGC, gate_THC

    def _rotated(self, x: Tensor, norm: Tensor | None, context: ForwardContext) -> Tensor:
        """Heads [T, n, C], normalised if there is a norm, and rotated if there is a rope."""
        c, impl = self.config, context.backend.elementwise
        if c.qk_norm != "whole" and x.dim() == 2:
            x = x.unflatten(-1, (-1, c.head_dim))
        if norm is not None:
            x = rms_norm(Stream(x), self.norm.factor(norm), self.norm.eps, impl)
        x = x if x.dim() == 3 else x.unflatten(-1, (-1, c.head_dim))
        return (
            x if c.rope is None or self.rope is None else turn(x, *context.angles[self.rope], c.rope.adjacent)
        )

    def _query_factor(self, context: ForwardContext) -> Tensor | float | None:
        """What q is multiplied with, so that attention may scale by C^-½ always."""
        c = self.config
        factor = None if c.scale is None else c.scale * c.head_dim**0.5
        if c.temperature is None:
            return factor
        beta, length = c.temperature
        assert context.positions is not None
        hotter_T = 1 + beta * torch.log1p((context.positions.float() / length).floor())
        return (hotter_T * (factor or 1.0))[:, None, None].to(context.angles[0][0].dtype)

    def _norms(self) -> tuple[Tensor, Tensor] | None:
        if self.q_norm is None or self.k_norm is None:
            return None
        return self.norm.factor(self.q_norm), self.norm.factor(self.k_norm)

    def weights(self) -> dict[str, Tensor]:
        own = {"q_norm.weight": self.q_norm, "k_norm.weight": self.k_norm, "sinks": self.sinks}
        return {f"{self.name}.{name}": weight.detach() for name, weight in own.items() if weight is not None}


def turn(x_TNC: Tensor, cos: Tensor, sin: Tensor, adjacent: bool) -> Tensor:
    """Rotate the first dimensions of every head, as many as there are angles, and leave the others."""
    cos, sin, count = cos[:, None], sin[:, None], 2 * cos.shape[-1]
    turned, rest = x_TNC[..., :count], x_TNC[..., count:]
    a, b = (turned[..., 0::2], turned[..., 1::2]) if adjacent else turned.chunk(2, dim=-1)
    a, b = a * cos - b * sin, b * cos + a * sin
    pairs = torch.stack((a, b), dim=-1).flatten(-2) if adjacent else torch.cat((a, b), dim=-1)
    return torch.cat((pairs, rest), dim=-1) if rest.shape[-1] else pairs


def attend(
    q_BLHC: Tensor, k_BLGC: Tensor, v_BLGC: Tensor, window: int | None = None, sinks: Tensor | None = None
) -> Tensor:
    """softmax(q·k / √C)·v. A query sees itself and earlier positions, `window` in all."""
    length = q_BLHC.shape[1]
    if window is None or window >= length:
        return _fused(q_BLHC, k_BLGC, v_BLGC, sinks=sinks)
    blocks = []
    for start in range(0, length, window):  # queries in blocks, each with the keys that any of them sees
        stop, first = min(start + window, length), max(0, start - window + 1)
        query = torch.arange(start, stop, device=q_BLHC.device)[:, None]
        key = torch.arange(first, stop, device=q_BLHC.device)
        keys, mask = (k_BLGC[:, first:stop], v_BLGC[:, first:stop]), (key <= query) & (key > query - window)
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
    """Attention within each of the packed sequences of `lengths`; `windows` is one entry per layer."""

    def __init__(self, lengths: Sequence[int], windows: Sequence[int | None]) -> None:
        self.windows = windows
        # Neighbours of equal length share one call: (count, length).
        self.groups = [(len(list(group)), length) for length, group in groupby(lengths)]

    def __call__(
        self, layer: int, q_THC: Tensor, k_TGC: Tensor, v_TGC: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        sizes = [count * length for count, length in self.groups]
        pieces = [
            attend(*(x.unflatten(0, group) for x in qkv), window=self.windows[layer], sinks=sinks).flatten(
                0, 1
            )
            for group, *qkv in zip(
                self.groups, q_THC.split(sizes), k_TGC.split(sizes), v_TGC.split(sizes), strict=True
            )
        ]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

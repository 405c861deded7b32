"""Grouped-query attention, the block of a decoder layer.

The block projects and rotates; what its queries attend to comes in through the `Attend` hook, packed for
training and paged for sampling.

Shapes: T tokens, H query heads, G kv heads, C head dim.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from tinkex.engine.torch.functions import Stream, rms_norm, split_rotate
from tinkex.engine.torch.hooks import ForwardContext, Part, PartialProjection, SinkAttend, Site
from tinkex.engine.torch.models.architecture import AttentionConfig, ModelConfig
from tinkex.engine.torch.models.attend import turn
from tinkex.engine.torch.models.block import Block, frozen_parameter
from tinkex.engine.torch.models.projection import Projection, total


class Attention(Block):
    """Grouped-query attention as its `AttentionConfig` says."""

    def __init__(self, model: ModelConfig, config: AttentionConfig, layer: int) -> None:
        super().__init__()
        c, self.config, self.layer, self.norm = config, config, layer, model.norm
        self.name = f"model.layers.{layer}.{c.name}"
        self.rope = None if c.rope is None else model.ropes.index(c.rope)
        # what `split_rotate` does in one step
        self.direct = c.rope is not None and c.rope.whole(c.head_dim) and c.qk_norm in (None, "head")
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
        weighted = c.qk_norm in ("head", "whole")
        self.q_norm = frozen_parameter(q_width * c.head_dim) if weighted else None
        self.k_norm = frozen_parameter(k_width * c.head_dim) if weighted and kv else None
        self.sinks = frozen_parameter(c.heads) if c.sinks else None

    def forward(self, x: Tensor, context: ForwardContext) -> Tensor | PartialProjection:
        qkv, gate_THC = self.qkv(x, context), None
        if self.direct and self.rope is not None:
            heads, impl = (self.config.heads, self.config.kv_heads), context.backend.elementwise
            angles, norms = context.angles[self.rope], self.norms()
            q_THC, k_TGC, v_TGC = split_rotate(qkv, *angles, heads, norms, self.norm.eps, impl)
        else:
            q_THC, k_TGC, v_TGC, gate_THC = context.backend.split_heads(self, qkv, context)
        if (factor := self._query_factor(context)) is not None:
            q_THC = q_THC * factor
        if self.lends:
            context.lent[self.layer] = k_TGC, v_TGC
        at, whole = self.layer if self.config.share is None else self.config.share, self.config.whole_images
        if self.sinks is None and not whole:
            o_THC = context.attend(at, q_THC, k_TGC, v_TGC)
        else:
            o_THC = cast(SinkAttend, context.attend)(at, q_THC, k_TGC, v_TGC, self.sinks, whole)
        if gate_THC is not None:
            o_THC = context.backend.gated_heads(o_THC, gate_THC)
        return self.o(o_THC.reshape(o_THC.shape[0], -1), context)

    def split(
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
            v_TGC = self._unit(v_TGC, context)
        return q_THC, k_TGC, v_TGC, gate_THC

    def _rotated(self, x: Tensor, norm: Tensor | None, context: ForwardContext) -> Tensor:
        """Heads [T, n, C], normalised if there is a norm, and rotated if there is a rope."""
        c, impl = self.config, context.backend.elementwise
        if c.qk_norm != "whole" and x.dim() == 2:
            x = x.unflatten(-1, (-1, c.head_dim))
        if norm is not None and c.qk_norm == "whole" and context.shards is not None:
            x = context.shards.rms_norm(x, self.norm.factor(norm), self.norm.eps)
        elif norm is not None:
            x = rms_norm(Stream(x), self.norm.factor(norm), self.norm.eps, impl)
        x = x if x.dim() == 3 else x.unflatten(-1, (-1, c.head_dim))
        if c.rope is not None and self.rope is not None:
            x = turn(x, *context.angles[self.rope], c.rope.adjacent)
        return self._unit(x, context) if c.qk_norm == "rotated" else x

    def _unit(self, x_TNC: Tensor, context: ForwardContext) -> Tensor:
        """The norm of every head, without a weight."""
        ones = torch.ones(self.config.head_dim, device=x_TNC.device)
        return rms_norm(Stream(x_TNC), ones, self.norm.eps, context.backend.elementwise)

    def _query_factor(self, context: ForwardContext) -> Tensor | float | None:
        """What q is multiplied with, so that attention may scale by C^-½ always."""
        c = self.config
        factor = None if c.scale is None else c.scale * c.head_dim**0.5
        if c.temperature is None:
            return factor
        beta, length, offset = c.temperature
        assert context.positions is not None
        hotter_T = 1 + beta * torch.log1p(((context.positions + offset).float() / length).floor())
        return (hotter_T * (factor or 1.0))[:, None, None].to(context.angles[0][0].dtype)

    def norms(self) -> tuple[Tensor, Tensor] | None:
        """What q's and k's heads are multiplied with, if they are normalised."""
        if self.q_norm is None or self.k_norm is None:
            return None
        return self.norm.factor(self.q_norm), self.norm.factor(self.k_norm)

    def weights(self) -> dict[str, Tensor]:
        own = {"q_norm.weight": self.q_norm, "k_norm.weight": self.k_norm, "sinks": self.sinks}
        return {f"{self.name}.{name}": weight.detach() for name, weight in own.items() if weight is not None}

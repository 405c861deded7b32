"""Latent attention (MLA): keys and values are projections of one short vector per token, which is cached.

Training projects that vector to every head's key and value. Sampling keeps it and one rotated key for all
heads and attends in the latent space: queries are multiplied with the half of `kv_b_proj` that makes keys,
results with the half that makes values. That is exact: `q_b_proj` and `kv_b_proj` carry no adapters.

Shapes: T tokens, H heads, N unrotated and R rotated dimensions of a head, V value dimensions, C latent width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tinkex.engine.torch.functions import Stream, rms_norm
from tinkex.engine.torch.hooks import ForwardContext, Part, PartialProjection, Site
from tinkex.engine.torch.models.architecture import LatentConfig, ModelConfig
from tinkex.engine.torch.models.attend import PackedAttend, turn
from tinkex.engine.torch.models.block import Block, frozen_parameter
from tinkex.engine.torch.models.projection import Projection, total

_EPS = 1e-6  # of the inner norms; the model's other norms may differ


class LatentAttention(Block):
    """Attention over a latent key-value vector; adapters are on the down-projections and the output."""

    def __init__(self, model: ModelConfig, config: LatentConfig, layer: int) -> None:
        super().__init__()
        c, self.config, self.layer = config, config, layer
        self.name, self.rope = f"model.layers.{layer}.self_attn", model.ropes.index(config.rope)
        q_width = c.heads * c.head_dim
        query = ("q_proj", q_width) if c.query_rank is None else ("q_a_proj", c.query_rank)
        self.sizes = query[1], c.rank, c.rope_dim
        parts = (
            Part(f"{self.name}.{query[0]}", query[1], "attn"),
            Part(f"{self.name}.kv_a_proj_with_mqa", c.rank + c.rope_dim, "attn"),
        )
        self.down = Projection(Site(layer, "qkv"), model.width, parts, c.bias)
        self.q_norm = None if c.query_rank is None else frozen_parameter(c.query_rank)
        self.q_up = None if c.query_rank is None else frozen_parameter(q_width, c.query_rank)
        self.kv_norm = frozen_parameter(c.rank)
        self.kv_up = frozen_parameter(c.heads * (c.nope_dim + c.value_dim), c.rank)
        out = Part(f"{self.name}.o_proj", model.width, "attn")
        self.o = Projection(Site(layer, "o"), c.heads * c.value_dim, (out,), c.bias)

    def forward(self, x_TD: Tensor, context: ForwardContext) -> Tensor | PartialProjection:
        c, backend, angles = self.config, context.backend, context.angles[self.rope]
        q, latent_TC, k_rope = total(self.down(x_TD, context)).split(self.sizes, dim=-1)
        if self.q_norm is not None and self.q_up is not None:
            q = rms_norm(Stream(q), self.q_norm, _EPS, backend.elementwise)
            q = backend.linear(q, self.q_up, None, None)
        q_nope, q_rope = q.unflatten(-1, (c.heads, -1)).split((c.nope_dim, c.rope_dim), dim=-1)
        latent_TC = rms_norm(Stream(latent_TC), self.kv_norm, _EPS, backend.elementwise)
        q_rope, k_rope = (turn(part, *angles, c.rope.adjacent) for part in (q_rope, k_rope[:, None]))
        if isinstance(context.attend, PackedAttend):
            kv = backend.linear(latent_TC, self.kv_up, None, None).unflatten(-1, (c.heads, -1))
            k_nope, v_THV = kv.split((c.nope_dim, c.value_dim), dim=-1)
            q, k = torch.cat((q_nope, q_rope), -1), torch.cat((k_nope, k_rope.expand(-1, c.heads, -1)), -1)
            o_THV = context.attend(self.layer, q * self._factor(q), k, v_THV)
        else:
            keys_HNC, values_HVC = self.kv_up.unflatten(0, (c.heads, -1)).split((c.nope_dim, c.value_dim), 1)
            q = torch.cat((torch.einsum("thn,hnc->thc", q_nope, keys_HNC), q_rope), -1)
            latent = latent_TC[:, None]
            o_THC = context.attend(self.layer, q * self._factor(q), torch.cat((latent, k_rope), -1), latent)
            o_THV = torch.einsum("thc,hvc->thv", o_THC, values_HVC)
        return self.o(o_THV.flatten(1), context)

    def _factor(self, q: Tensor) -> float:
        """Attention itself scales by the root of the queries' width."""
        return self.config.scale * q.shape[-1] ** 0.5

    def weights(self) -> dict[str, Tensor]:
        own = {
            "q_a_layernorm": self.q_norm,
            "q_b_proj": self.q_up,
            "kv_a_layernorm": self.kv_norm,
            "kv_b_proj": self.kv_up,
        }
        return {f"{self.name}.{name}.weight": w.detach() for name, w in own.items() if w is not None}

"""Our decoder: Llama 2/3.x, Mistral, Qwen2/2.5, Qwen3, SmolLM2 and Qwen3-MoE over one ragged packed batch.

One code path trains and samples. Attention comes in through the `Attend` hook (packed for training, paged for
sampling) and adapters through the `LoraHook`, so this file knows neither sequences nor tenants. The weights
are frozen: they never get gradients. q, k and v are one matrix, gate and up another; `weights()` gives views
of the parts under their Hugging Face names, which is how a loader fills them in place.

Shapes: T tokens, N rows, D width, H query heads, G kv heads, P = H + G, C head dim, V padded vocabulary.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as recompute

from tinkex.engine.torch.architecture import ModelConfig
from tinkex.engine.torch.hooks import (
    Attend,
    ForwardContext,
    Frozen,
    LoraHook,
    Part,
    Pending,
    Projecting,
    Site,
    Sites,
)
from tinkex.engine.torch.moe import ExpertMlp
from tinkex.engine.torch.ops import Stream, add, add_rms_norm, pack, rms_norm, split_rotate, swiglu

if TYPE_CHECKING:
    from tinkex.engine.torch.backend import Backend

__all__ = ["Attend", "Decoder", "LoraHook", "ModelConfig", "Part", "Site", "Sites"]

UNEMBED = Site(-1, "unembed")


class Projection(nn.Module):
    """A frozen Linear made of one or more Hugging Face modules stacked along the output."""

    def __init__(self, site: Site, in_features: int, parts: tuple[Part, ...], bias: bool) -> None:
        super().__init__()
        self.site, self.in_features, self.parts = site, in_features, parts
        out_features = sum(part.out_features for part in parts)
        # [O, I] laid out with O contiguous: on CPU few rows then multiply up to twice as fast
        self.weight = nn.Parameter(_frozen(in_features, out_features).t(), requires_grad=False)
        self.bias = _frozen(out_features) if bias else None
        self.packed: Tensor | None = None

    def forward(self, x_NI: Tensor, context: ForwardContext) -> Tensor | Pending:
        frozen, lora = Frozen(self.weight, self.bias, self.packed, context.backend.linear), context.lora
        if isinstance(lora, Projecting):
            return lora.project(self.site, x_NI, frozen)
        y_NO = frozen(x_NI)
        return y_NO if lora is None else lora(self.site, x_NI, y_NO)

    def weights(self) -> dict[str, Tensor]:
        sizes = [part.out_features for part in self.parts]
        named = {}
        for kind, fused in (("weight", self.weight), ("bias", self.bias)):
            if fused is not None:
                views = fused.detach().split(sizes)
                named |= {f"{part.name}.{kind}": view for part, view in zip(self.parts, views, strict=True)}
        return named


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
        self.q_norm = _frozen(c.head_dim) if c.qk_norm else None
        self.k_norm = _frozen(c.head_dim) if c.qk_norm else None

    def forward(self, x: Tensor, context: ForwardContext) -> Tensor | Pending:
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


class Mlp(nn.Module):
    """The dense SwiGLU MLP."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        name, width, bias = f"model.layers.{layer}.mlp", config.mlp_width, config.mlp_bias
        parts = tuple(Part(f"{name}.{part}", width, "mlp") for part in ("gate_proj", "up_proj"))
        self.gate_up = Projection(Site(layer, "gate_up"), config.width, parts, bias)
        down = Part(f"{name}.down_proj", config.width, "mlp")
        self.down = Projection(Site(layer, "down"), width, (down,), bias)

    def forward(self, x_TD: Tensor, context: ForwardContext) -> Tensor | Pending:
        return self.down(swiglu(self.gate_up(x_TD, context), context.backend.elementwise), context)

    def weights(self) -> dict[str, Tensor]:
        return self.gate_up.weights() | self.down.weights()

    def sites(self) -> Sites:
        return {p.site: (p.in_features, p.parts) for p in (self.gate_up, self.down)}


class Layer(nn.Module):
    """One block. The residual is passed as (stream, what to add to it), so that adding joins the norm."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.name, self.eps = f"model.layers.{layer}", config.norm_eps
        self.attention_norm, self.mlp_norm = _frozen(config.width), _frozen(config.width)
        self.attention = Attention(config, layer)
        sparse = config.experts is not None and layer in config.experts.layers
        self.mlp = ExpertMlp(config, layer) if sparse else Mlp(config, layer)

    def forward(
        self, stream: Stream, delta_TD: Tensor | Pending | None, context: ForwardContext
    ) -> tuple[Stream, Tensor | Pending]:
        impl = context.backend.elementwise
        if delta_TD is None:
            h_TD = rms_norm(stream, self.attention_norm, self.eps, impl)
        else:
            stream, h_TD = add_rms_norm(stream, delta_TD, self.attention_norm, self.eps, impl)
        stream, h_TD = add_rms_norm(stream, self.attention(h_TD, context), self.mlp_norm, self.eps, impl)
        return stream, self.mlp(h_TD, context)

    def recomputed(self, stream: Stream, context: ForwardContext) -> Stream:
        """The block with only its input kept for the backward, without what rounding took from that."""
        rest = [stream.rest]  # for the first time alone: a gradient is not worth the memory

        def block(x_TD: Tensor) -> Stream:
            after, delta_TD = self(Stream(x_TD, rest.pop() if rest else None), None, context)
            return add(after, delta_TD, context.backend.elementwise)

        return recompute(block, stream.x, use_reentrant=False, preserve_rng_state=False)  # type: ignore[return-value]

    def weights(self) -> dict[str, Tensor]:
        norms = {"input_layernorm": self.attention_norm, "post_attention_layernorm": self.mlp_norm}
        named = {f"{self.name}.{name}.weight": weight.detach() for name, weight in norms.items()}
        return named | self.attention.weights() | self.mlp.weights()


class Decoder(nn.Module):
    """A frozen decoder, its memory not yet filled; `load.load_decoder` makes a whole one.

    `backend` computes everything that has a faster implementation on some device.
    """

    def __init__(self, config: ModelConfig, backend: Backend) -> None:
        super().__init__()
        self.config, self.backend = config, backend
        self.embedding = _frozen(config.padded_vocab, config.width)
        self.layers = nn.ModuleList(Layer(config, i) for i in range(config.layers))
        self.norm = _frozen(config.width)
        self.head = None if config.tied else _frozen(config.padded_vocab, config.width)
        self.packed_head: Tensor | None = None

    @property
    def unembed_weight(self) -> Tensor:
        """[V, D]: the embedding itself when tied."""
        return self.embedding if self.head is None else self.head

    def forward(
        self,
        tokens_T: Tensor,
        positions_T: Tensor,
        attend: Attend,
        lora: LoraHook | None = None,
        *,
        checkpoint: bool = False,
    ) -> Tensor:
        """The final-normed hidden states [T, D]; `checkpoint` recomputes each layer in the backward."""
        angles = self.config.rope.angles(positions_T, self.embedding.dtype)
        return self.at_angles(tokens_T, angles, attend, lora, checkpoint=checkpoint)

    def at_angles(
        self,
        tokens_T: Tensor,
        angles: tuple[Tensor, Tensor],
        attend: Attend,
        lora: LoraHook | None = None,
        *,
        checkpoint: bool = False,
    ) -> Tensor:
        """The same where cos and sin of the positions are at hand: [T, C / 2] each, as `Rope` gives them."""
        stream, delta_TD = Stream(F.embedding(tokens_T, self.embedding)), None
        context, eps = ForwardContext(self.backend, angles, attend, lora), self.config.norm_eps
        for layer in self.layers:
            assert isinstance(layer, Layer)
            if checkpoint:
                stream = layer.recomputed(stream, context)
            else:
                stream, delta_TD = layer(stream, delta_TD, context)
        if delta_TD is None:
            return rms_norm(stream, self.norm, eps, self.backend.elementwise)
        return add_rms_norm(stream, delta_TD, self.norm, eps, self.backend.elementwise)[1]

    def logits(self, h_ND: Tensor, lora: LoraHook | None = None, rows: Tensor | None = None) -> Tensor:
        """[N, V] in the model's dtype; `rows` are the tokens that h_ND belongs to, if not the first N."""
        frozen = Frozen(self.unembed_weight, None, self.packed_head, self.backend.linear)
        if isinstance(lora, Projecting) and rows is None:
            y_NV = lora.project(UNEMBED, h_ND, frozen)
            return y_NV if isinstance(y_NV, Tensor) else y_NV.total()
        return frozen(h_ND) if lora is None else lora(UNEMBED, h_ND, frozen(h_ND), rows=rows)

    def with_backend(self, backend: Backend) -> Decoder:
        """The same weights, computed with by `backend`."""
        other = copy.copy(self)
        other.backend = backend
        return other

    def pack(self, room: float) -> None:
        """Keep a second copy of the weights in a layout that samples faster, if it fits in `room` bytes.

        For a decoder on the CPU whose weights will not change any more; elsewhere there is nothing to gain.
        """
        if self.multiplied_bytes > room:
            return
        for projection in self._projections():
            projection.packed = pack(projection.weight)
        self.packed_head = pack(self.unembed_weight)

    def _projections(self) -> list[Projection]:
        return [module for module in self.modules() if isinstance(module, Projection)]

    @property
    def multiplied_bytes(self) -> int:
        """Of the weights that tokens are multiplied with, experts aside."""
        return self.unembed_weight.nbytes + sum(p.weight.nbytes for p in self._projections())

    @property
    def packed_bytes(self) -> int:
        """What `pack` took."""
        packed = [self.packed_head, *(projection.packed for projection in self._projections())]
        return sum(copy.numel() * copy.dtype.itemsize for copy in packed if copy is not None)

    def sites(self) -> Sites:
        """Every site that an adapter can sit on."""
        sites: Sites = {}
        for layer in self.layers:
            assert isinstance(layer, Layer)
            sites |= layer.attention.sites() | layer.mlp.sites()
        return sites | {UNEMBED: (self.config.width, (Part("lm_head", self.config.padded_vocab, "unembed"),))}

    def weights(self) -> dict[str, Tensor]:
        """Every weight by its Hugging Face name, as a view of where it lives. A tied head has no entry."""
        named = {
            "model.embed_tokens.weight": self.embedding.detach(),
            "model.norm.weight": self.norm.detach(),
        }
        if self.head is not None:
            named["lm_head.weight"] = self.head.detach()
        for layer in self.layers:
            assert isinstance(layer, Layer)
            named |= layer.weights()
        return named


def _frozen(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape), requires_grad=False)

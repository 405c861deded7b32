"""Our decoder: Llama 2/3.x, Mistral, Qwen2/2.5, Qwen3, SmolLM2 and Qwen3-MoE over one ragged packed batch.

The same modules train and sample. Attention comes in through the `Attend` hook and adapters through the
`LoraHook`, so this file knows neither sequences nor tenants. The weights are frozen.

Shapes: T tokens, N rows, D width, C head dim, V padded vocabulary.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as recompute

from tinkex.engine.torch.functions import Stream, add, add_rms_norm, pack, rms_norm
from tinkex.engine.torch.hooks import (
    Attend,
    ForwardContext,
    Frozen,
    LoraHook,
    Part,
    PartialProjection,
    Site,
    Sites,
)
from tinkex.engine.torch.models.architecture import ModelConfig
from tinkex.engine.torch.models.attention import Attention
from tinkex.engine.torch.models.mlp import Mlp
from tinkex.engine.torch.models.moe import ExpertMlp
from tinkex.engine.torch.models.projection import Block, Projection, frozen_parameter

if TYPE_CHECKING:
    from tinkex.engine.torch.backend import Backend

UNEMBED = Site(-1, "unembed")


class DecoderLayer(Block):
    """One block. The residual is a pair (stream, term to add), so that one kernel adds and norms."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.name, self.eps = f"model.layers.{layer}", config.norm_eps
        self.attention_norm, self.mlp_norm = frozen_parameter(config.width), frozen_parameter(config.width)
        self.attention = Attention(config, layer)
        sparse = config.experts is not None and layer in config.experts.layers
        self.mlp = ExpertMlp(config, layer) if sparse else Mlp(config, layer)

    def forward(
        self, stream: Stream, delta_TD: Tensor | PartialProjection | None, context: ForwardContext
    ) -> tuple[Stream, Tensor | PartialProjection]:
        impl = context.backend.elementwise
        if delta_TD is None:
            h_TD = rms_norm(stream, self.attention_norm, self.eps, impl)
        else:
            stream, h_TD = add_rms_norm(stream, delta_TD, self.attention_norm, self.eps, impl)
        stream, h_TD = add_rms_norm(stream, self.attention(h_TD, context), self.mlp_norm, self.eps, impl)
        return stream, self.mlp(h_TD, context)

    def recomputed(self, stream: Stream, context: ForwardContext) -> Stream:
        """The block under activation checkpointing: only its input is saved, without the rounding error."""
        rest = [stream.rest]  # used in the forward alone: gradients do not need it

        def block(x_TD: Tensor) -> Stream:
            after, delta_TD = self(Stream(x_TD, rest.pop() if rest else None), None, context)
            return add(after, delta_TD, context.backend.elementwise)

        return recompute(block, stream.x, use_reentrant=False, preserve_rng_state=False)  # type: ignore[return-value]

    def weights(self) -> dict[str, Tensor]:
        norms = {"input_layernorm": self.attention_norm, "post_attention_layernorm": self.mlp_norm}
        return {f"{self.name}.{name}.weight": weight.detach() for name, weight in norms.items()}


class Decoder(Block):
    """A frozen decoder with uninitialised weights; `load.load_decoder` loads one.

    `backend` computes everything that has a faster implementation on some device.
    """

    def __init__(self, config: ModelConfig, backend: Backend) -> None:
        super().__init__()
        self.config, self.backend = config, backend
        self.embedding = frozen_parameter(config.padded_vocab, config.width)
        self.layers = nn.ModuleList(DecoderLayer(config, i) for i in range(config.layers))
        self.norm = frozen_parameter(config.width)
        self.head = None if config.tied else frozen_parameter(config.padded_vocab, config.width)
        self.packed_head: Tensor | None = None

    @property
    def unembed_weight(self) -> Tensor:
        """[V, D]: the embedding itself when tied."""
        return self.embedding if self.head is None else self.head

    def forward(
        self,
        tokens_T: Tensor,
        positions: Tensor | tuple[Tensor, Tensor],
        attend: Attend,
        lora: LoraHook | None = None,
        *,
        checkpoint: bool = False,
    ) -> Tensor:
        """The final-normed hidden states [T, D] of tokens at `positions`, or at their cos and sin [T, C / 2].

        `checkpoint` recomputes each layer in the backward.
        """
        if isinstance(positions, Tensor):
            positions = self.config.rope.angles(positions, self.embedding.dtype)
        stream, delta_TD = Stream(F.embedding(tokens_T, self.embedding)), None
        context, eps = ForwardContext(self.backend, positions, attend, lora), self.config.norm_eps
        for layer in self.layers:
            assert isinstance(layer, DecoderLayer)
            if checkpoint:
                stream = layer.recomputed(stream, context)
            else:
                stream, delta_TD = layer(stream, delta_TD, context)
        if delta_TD is None:
            return rms_norm(stream, self.norm, eps, self.backend.elementwise)
        return add_rms_norm(stream, delta_TD, self.norm, eps, self.backend.elementwise)[1]

    def logits(self, h_ND: Tensor, lora: LoraHook | None = None) -> Tensor:
        """[N, V] in the model's dtype."""
        frozen = Frozen(self.unembed_weight, None, self.packed_head, self.backend.linear)
        y_NV = frozen(h_ND) if lora is None else lora.project(UNEMBED, h_ND, frozen)
        return y_NV if isinstance(y_NV, Tensor) else y_NV.total()

    def with_backend(self, backend: Backend) -> Decoder:
        other = copy.copy(self)
        other.backend = backend
        return other

    def pack(self, room: float) -> None:
        """Keep a second copy of the weights in a layout that samples faster, if it fits in `room` bytes.

        For a decoder on the CPU whose weights will not change any more; elsewhere there is nothing to gain.
        """
        if self.multiplied_bytes <= room:
            for projection in self._projections():
                projection.packed = pack(projection.weight)
            self.packed_head = pack(self.unembed_weight)

    def _projections(self) -> list[Projection]:
        return [module for module in self.modules() if isinstance(module, Projection)]

    @property
    def multiplied_bytes(self) -> int:
        """Bytes of the weights that are multiplied with tokens, without experts."""
        return self.unembed_weight.nbytes + sum(p.weight.nbytes for p in self._projections())

    @property
    def packed_bytes(self) -> int:
        packed = [self.packed_head, *(projection.packed for projection in self._projections())]
        return sum(copy.numel() * copy.dtype.itemsize for copy in packed if copy is not None)

    def sites(self) -> Sites:
        """Every site that an adapter can train."""
        sites = {site: shape for block in self._blocks() for site, shape in block.sites().items()}
        return sites | {UNEMBED: (self.config.width, (Part("lm_head", self.config.padded_vocab, "unembed"),))}

    def weights(self) -> dict[str, Tensor]:
        """Views of all weights by their Hugging Face names. A tied head has no entry."""
        own = {"model.embed_tokens": self.embedding, "model.norm": self.norm, "lm_head": self.head}
        named = {f"{name}.weight": weight.detach() for name, weight in own.items() if weight is not None}
        return named | {name: view for block in self._blocks() for name, view in block.weights().items()}

    def _blocks(self) -> list[Block]:
        return [block for block in self.modules() if isinstance(block, Block) and block is not self]

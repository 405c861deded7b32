"""Our decoder, assembled as a `ModelConfig` says, over one ragged packed batch.

The same modules train and sample. Attention comes in through the `Attend` hook and adapters through the
`LoraHook`, so this file knows neither sequences nor tenants. The weights are frozen.

Shapes: T tokens, N rows, D width, C head dim, V padded vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as recompute

from tinkex.engine.torch.functions import Stream, add, add_rms_norm, capped, rms_norm
from tinkex.engine.torch.hooks import Attend, ForwardContext, Frozen, LoraHook, PartialProjection
from tinkex.engine.torch.models.architecture import (
    AttentionConfig,
    DeltaConfig,
    ExpertsConfig,
    LatentConfig,
    MambaConfig,
    MlpConfig,
    ModelConfig,
)
from tinkex.engine.torch.models.attention import Attention
from tinkex.engine.torch.models.block import Block, frozen_parameter
from tinkex.engine.torch.models.delta_net import DeltaNet
from tinkex.engine.torch.models.latent import LatentAttention
from tinkex.engine.torch.models.mamba import Mamba
from tinkex.engine.torch.models.mlp import Mlp
from tinkex.engine.torch.models.moe import ExpertMlp
from tinkex.engine.torch.models.per_layer import LayerInputGate, LayerInputs
from tinkex.engine.torch.models.projection import total
from tinkex.engine.torch.models.weights import UNEMBED, DecoderWeights

if TYPE_CHECKING:
    from tinkex.engine.torch.backend import Backend
    from tinkex.engine.torch.images import FeatureRows
    from tinkex.engine.torch.states import StateGroup
    from tinkex.engine.torch.tensor_parallel.shards import Shards

# The block of each kind of configuration, made by (model, configuration, layer).
_BLOCKS: dict[type, Callable[[ModelConfig, Any, int], Block]] = {
    AttentionConfig: Attention,
    LatentConfig: LatentAttention,
    DeltaConfig: DeltaNet,
    MambaConfig: Mamba,
    MlpConfig: Mlp,
    ExpertsConfig: ExpertMlp,
}


class DecoderLayer(Block):
    """A mixer and an MLP. The residual is a pair (stream, term to add), so that one kernel adds and norms."""

    def __init__(self, model: ModelConfig, layer: int) -> None:
        super().__init__()
        config, self.name, self.norm = model.stack[layer], f"model.layers.{layer}", model.norm
        self.placement, self.scale = config.norms, model.residual_scale

        def norm(name: str | None) -> nn.Parameter | None:
            return None if name is None else frozen_parameter(model.width)

        self.mixer_norm, self.mixer_post_norm, self.mlp_norm, self.mlp_post_norm = map(norm, config.norms)
        self.mixer, self.mlp = (
            None if one is None else _BLOCKS[type(one)](model, one, layer)
            for one in (config.mixer, config.mlp)
        )
        self.input_gate = LayerInputGate(model, layer) if model.layer_inputs else None
        self.scalar = frozen_parameter(1) if model.layer_scalars else None

    def forward(
        self, stream: Stream, delta_TD: Tensor | PartialProjection | None, context: ForwardContext
    ) -> tuple[Stream, Tensor | PartialProjection | None]:
        mixer = self.mixer, self.mixer_norm, self.mixer_post_norm
        for block, before, after in (mixer, (self.mlp, self.mlp_norm, self.mlp_post_norm)):
            if block is None:
                continue
            stream, h_TD = self.norm_input(stream, delta_TD, before, context)
            y_TD = context.shards.block(block, h_TD, context) if context.shards else block(h_TD, context)
            if after is not None:
                y_TD = self.norm_input(Stream(total(y_TD)), None, after, context)[1]
            if self.scale != 1.0:
                y_TD = self.scale * total(y_TD)
            delta_TD = y_TD
        if self.input_gate is not None:
            stream, h_TD = self.norm_input(stream, delta_TD, None, context)
            delta_TD = self.input_gate(h_TD, context)
        if self.scalar is not None:
            (x_TD, rest), _ = self.norm_input(stream, delta_TD, None, context)
            stream, delta_TD = Stream(x_TD * self.scalar, None if rest is None else rest * self.scalar), None
        return stream, delta_TD

    def norm_input(
        self, stream: Stream, delta: Tensor | PartialProjection | None, weight: Tensor | None,
        context: ForwardContext,
    ) -> tuple[Stream, Tensor]:  # fmt: skip
        """The stream with `delta` added to it, and its norm, if it has one."""
        impl = context.backend.elementwise
        if weight is None:
            if delta is not None:
                stream = add(stream, total(delta), impl)
            return stream, stream.x
        if delta is None:
            return stream, rms_norm(stream, self.norm.factor(weight), self.norm.eps, impl)
        return add_rms_norm(stream, delta, self.norm.factor(weight), self.norm.eps, impl)

    def recomputed(self, stream: Stream, context: ForwardContext) -> Stream:
        """The block under activation checkpointing: only its input is saved, without the rounding error."""
        rest = [stream.rest]  # used only in the forward: gradients do not need it
        changed = self.mlp_post_norm is not None or self.input_gate is not None or self.scalar is not None
        last = self.mlp.down.site if isinstance(self.mlp, Mlp) and not changed else None

        def block(x_TD: Tensor) -> Stream:
            unread = nullcontext()
            if not rest and last is not None and context.lora is not None:
                unread = context.lora.unread(last)  # gradients need what goes into the last product alone
            with unread:
                after, delta_TD = self(Stream(x_TD, rest.pop() if rest else None), None, context)
            return after if delta_TD is None else add(after, delta_TD, context.backend.elementwise)

        return recompute(block, stream.x, use_reentrant=False, preserve_rng_state=False)  # type: ignore[return-value]

    def weights(self) -> dict[str, Tensor]:
        weights = self.mixer_norm, self.mixer_post_norm, self.mlp_norm, self.mlp_post_norm
        norms = zip(self.placement, weights, strict=True)
        scalar = {} if self.scalar is None else {f"{self.name}.layer_scalar": self.scalar.detach()}
        named = {f"{self.name}.{name}.weight": weight for name, weight in norms if weight is not None}
        return {name: weight.detach() for name, weight in named.items()} | scalar


class Decoder(DecoderWeights):
    """A frozen decoder with uninitialised weights; `load.load_decoder` loads one.

    `backend` computes what has a faster implementation on some device. With `shards` it is one rank's.
    """

    def __init__(self, config: ModelConfig, backend: Backend, shards: Shards | None = None) -> None:
        super().__init__(config, shards)
        self.backend = backend
        self.layers = nn.ModuleList(DecoderLayer(config, i) for i in range(config.layers))
        self.layer_inputs = LayerInputs(config) if config.layer_inputs else None

    def forward(
        self,
        tokens_T: Tensor,
        positions: Tensor | tuple[Tensor, Tensor],
        attend: Attend,
        lora: LoraHook | None = None,
        *,
        states: Sequence[StateGroup] = (),
        images: FeatureRows | None = None,
        checkpoint: bool = False,
    ) -> Tensor:
        """The hidden states [T, D] that the head takes, of tokens at `positions` (or their cos and sin).

        `checkpoint` recomputes each layer in the backward. Gradients do not flow to `images`.
        """
        if isinstance(positions, Tensor):
            at, angles = positions, [r.angles(positions, self.embedding.dtype) for r in self.config.ropes]
        else:
            at, angles = None, [positions]
        stream, delta_TD = Stream(self.embed(tokens_T, images)), None
        of = attend, lora, {}, at, states, None, self.shards, {} if checkpoint else None
        context = ForwardContext(self.backend, angles, *of)
        norm = self.config.norm
        if self.layer_inputs is not None:
            context = context._replace(layer_inputs=self.layer_inputs(tokens_T, stream.x, context))
        for i, layer in enumerate(self.layers):
            assert isinstance(layer, DecoderLayer)
            if checkpoint:
                stream = layer.recomputed(stream, context)
            else:
                stream, delta_TD = layer(stream, delta_TD, context)
            if images is not None and i < len(images.deeper):
                stream = add(stream, images.dense(i, stream.x), self.backend.elementwise)
        weight, impl = norm.factor(self.norm), self.backend.elementwise
        if delta_TD is None:
            h_TD = rms_norm(stream, weight, norm.eps, impl)
        else:
            h_TD = add_rms_norm(stream, delta_TD, weight, norm.eps, impl)[1]
        return h_TD if self.config.logit_scale == 1.0 else h_TD * self.config.logit_scale

    def embed(self, tokens_T: Tensor, images: FeatureRows | None = None) -> Tensor:
        """[T, D]: the tokens' embeddings, scaled, and in the rows of `images` their features as they are."""
        split, table_VD = self.shards, self.embedding
        x_TD = F.embedding(tokens_T, table_VD) if split is None else split.embed(tokens_T, table_VD)
        if self.config.embedding_scale != 1.0:  # rounded as stored
            x_TD = x_TD * float(torch.tensor(self.config.embedding_scale, dtype=x_TD.dtype))
        return x_TD if images is None else x_TD.index_copy_(0, images.rows_N, images.features_ND)

    def logits(self, h_ND: Tensor, lora: LoraHook | None = None) -> Tensor:
        """[N, V] in the model's dtype; of a rank those of its part of the vocabulary."""
        frozen = Frozen(self.unembed_weight, None, self.packed_head, self.backend.linear)
        y_NV = frozen(h_ND) if lora is None else lora.project(UNEMBED, h_ND, frozen)
        return total(y_NV) if (cap := self.config.logit_softcap) is None else capped(total(y_NV), cap)

    def with_backend(self, backend: Backend) -> Decoder:
        other = copy.copy(self)
        other.backend = backend
        return other

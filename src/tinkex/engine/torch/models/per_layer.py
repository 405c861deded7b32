"""Inputs of single layers (Gemma 4): each gets another short vector of the token, and adds a projection.

All of it is frozen and carries no adapters.

Shapes: T tokens, D width, L layers, P width of a layer's input, V ids of the separate table.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tinkex.engine.torch.functions import Stream, rms_norm
from tinkex.engine.torch.hooks import ForwardContext
from tinkex.engine.torch.models.architecture import ModelConfig
from tinkex.engine.torch.models.block import Block, frozen_parameter


class LayerInputs(Block):
    """The vectors of all layers, from the tokens and from their embeddings."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.layers, self.norm, (vocab, self.width) = model.layers, model.norm, model.layer_inputs or (0, 0)
        self.table = frozen_parameter(vocab, model.layers * self.width)
        self.projection = frozen_parameter(model.layers * self.width, model.width)
        self.projection_norm = frozen_parameter(self.width)

    def forward(self, tokens_T: Tensor, x_TD: Tensor, context: ForwardContext) -> Tensor:
        """[T, L, P]."""
        own = F.embedding(tokens_T, self.table) * float(torch.tensor(self.width**0.5, dtype=x_TD.dtype))
        projected = F.linear(x_TD, self.projection) * x_TD.shape[-1] ** -0.5
        projected = Stream(projected.unflatten(-1, (self.layers, self.width)))
        factor, impl = self.norm.factor(self.projection_norm), context.backend.elementwise
        normed = rms_norm(projected, factor, self.norm.eps, impl)
        return (normed + own.unflatten(-1, (self.layers, self.width))) * 2**-0.5

    def weights(self) -> dict[str, Tensor]:
        return {
            "model.embed_tokens_per_layer.weight": self.table.detach(),
            "model.per_layer_model_projection.weight": self.projection.detach(),
            "model.per_layer_projection_norm.weight": self.projection_norm.detach(),
        }


class LayerInputGate(Block):
    """norm(projection(gelu(gate(h)) · p)) of one layer."""

    def __init__(self, model: ModelConfig, layer: int) -> None:
        super().__init__()
        self.name, self.layer, self.norm = f"model.layers.{layer}", layer, model.norm
        _, width = model.layer_inputs or (0, 0)
        self.gate, self.projection = (
            frozen_parameter(width, model.width),
            frozen_parameter(model.width, width),
        )
        self.post_norm = frozen_parameter(model.width)

    def forward(self, x_TD: Tensor, context: ForwardContext) -> Tensor:
        assert context.layer_inputs is not None
        gated = F.gelu(F.linear(x_TD, self.gate), approximate="tanh") * context.layer_inputs[:, self.layer]
        projected, factor = Stream(F.linear(gated, self.projection)), self.norm.factor(self.post_norm)
        return rms_norm(projected, factor, self.norm.eps, context.backend.elementwise)

    def weights(self) -> dict[str, Tensor]:
        own = {
            "per_layer_input_gate": self.gate,
            "per_layer_projection": self.projection,
            "post_per_layer_input_norm": self.post_norm,
        }
        return {f"{self.name}.{name}.weight": weight.detach() for name, weight in own.items()}

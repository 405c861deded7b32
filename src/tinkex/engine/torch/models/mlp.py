"""The dense SwiGLU MLP of a decoder layer."""

from __future__ import annotations

from torch import Tensor

from tinkex.engine.torch.functions import swiglu
from tinkex.engine.torch.hooks import ForwardContext, Part, PartialProjection, Site
from tinkex.engine.torch.models.architecture import MlpConfig, ModelConfig
from tinkex.engine.torch.models.projection import Block, Projection


class Mlp(Block):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, model: ModelConfig, config: MlpConfig, layer: int) -> None:
        super().__init__()
        name, width, bias = f"model.layers.{layer}.mlp", config.width, config.bias
        parts = tuple(Part(f"{name}.{part}", width, "mlp") for part in ("gate_proj", "up_proj"))
        self.gate_up = Projection(Site(layer, "gate_up"), model.width, parts, bias)
        down = Part(f"{name}.down_proj", model.width, "mlp")
        self.down = Projection(Site(layer, "down"), width, (down,), bias)

    def forward(self, x_TD: Tensor, context: ForwardContext) -> Tensor | PartialProjection:
        return self.down(swiglu(self.gate_up(x_TD, context), context.backend.elementwise), context)

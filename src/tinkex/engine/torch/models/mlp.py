"""The dense MLP of a decoder layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch.nn.functional as F
from torch import Tensor

from tinkex.engine.torch.functions import swiglu
from tinkex.engine.torch.hooks import ForwardContext, Part, PartialProjection, Site
from tinkex.engine.torch.models.architecture import MlpConfig, ModelConfig
from tinkex.engine.torch.models.block import Block
from tinkex.engine.torch.models.projection import Projection, total

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu2": lambda x: F.relu(x).square(),
}


class Mlp(Block):
    """down(act(gate(x)) * up(x)), or without the gate; `sites` begins its sites' names."""

    def __init__(self, model: ModelConfig, config: MlpConfig, layer: int, sites: str = "") -> None:
        super().__init__()
        self.config, width, bias = config, config.width, config.bias
        name, (both, last) = f"model.layers.{layer}.{config.name}", config.matrices
        named = ("gate_proj", "up_proj") if config.gated else ("up_proj",)
        parts = tuple(Part(f"{name}.{part}", width, "mlp") for part in named)
        if config.fused:
            parts = (Part(f"{name}.{both}", 2 * width, "mlp"),)
        self.gate_up = Projection(Site(layer, f"{sites}gate_up"), model.width, parts, bias)
        down = Part(f"{name}.{last if config.fused else 'down_proj'}", model.width, "mlp")
        self.down = Projection(Site(layer, f"{sites}down"), width, (down,), bias)

    def forward(self, x_TD: Tensor, context: ForwardContext) -> Tensor | PartialProjection:
        gate_up = self.gate_up(x_TD, context)
        return self.down(activated(gate_up, self.config.activation, self.config.gated, context), context)

    def stacked(self) -> dict[str, tuple[int, ...]]:
        return {self.gate_up.parts[0].name: (self.config.width,) * 2} if self.config.fused else {}


def activated(
    gate_up: Tensor | PartialProjection,
    activation: Literal["silu", "gelu_tanh", "relu2"],
    gated: bool,
    context: ForwardContext,
) -> Tensor:
    """act(gate) * up of a fused [T, 2F], or act(up) of [T, F] without a gate."""
    if activation == "silu" and gated:
        return swiglu(gate_up, context.backend.elementwise)
    gate, *up = total(gate_up).chunk(2, dim=-1) if gated else (total(gate_up),)
    acted = _ACTIVATIONS[activation](gate)
    return acted * up[0] if gated else acted

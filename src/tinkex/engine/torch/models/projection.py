"""A frozen Linear of the decoder, made of one or more Hugging Face modules stacked along the output.

q, k and v are one matrix, gate and up another. `weights()` gives views of the parts under their Hugging Face
names: a loader fills them in place. Frozen weights never get gradients.

Shapes: N rows, I in-features, O out-features.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tinkex.engine.torch.hooks import ForwardContext, Frozen, Part, PartialProjection, Site


class Projection(nn.Module):
    """One `Site`: the frozen product, and the adapters of the pass on it."""

    def __init__(self, site: Site, in_features: int, parts: tuple[Part, ...], bias: bool) -> None:
        super().__init__()
        self.site, self.in_features, self.parts = site, in_features, parts
        out_features = sum(part.out_features for part in parts)
        # [O, I] laid out with O contiguous: on CPU few rows then multiply up to twice as fast
        self.weight = nn.Parameter(frozen_parameter(in_features, out_features).t(), requires_grad=False)
        self.bias = frozen_parameter(out_features) if bias else None
        self.packed: Tensor | None = None

    def forward(self, x_NI: Tensor, context: ForwardContext) -> Tensor | PartialProjection:
        frozen, lora = Frozen(self.weight, self.bias, self.packed, context.backend.linear), context.lora
        return frozen(x_NI) if lora is None else lora.project(self.site, x_NI, frozen)

    def weights(self) -> dict[str, Tensor]:
        sizes = [part.out_features for part in self.parts]
        named = {}
        for kind, fused in (("weight", self.weight), ("bias", self.bias)):
            if fused is not None:
                views = fused.detach().split(sizes)
                named |= {f"{part.name}.{kind}": view for part, view in zip(self.parts, views, strict=True)}
        return named


def frozen_parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape), requires_grad=False)

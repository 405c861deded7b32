"""A frozen Linear of the decoder, made of one or more Hugging Face modules stacked along the output.

q, k and v are one matrix, gate and up another. Frozen weights never get gradients.

Shapes: N rows, I in-features, O out-features.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tinkex.engine.torch.hooks import ForwardContext, Frozen, Part, PartialProjection, Site, Sites


class Block(nn.Module):
    """A module of the decoder."""

    def weights(self) -> dict[str, Tensor]:
        """Views of its own weights by their Hugging Face names: a loader fills them in place."""
        return {}

    def sites(self) -> Sites:
        """Its own sites that an adapter can train."""
        return {}


class Projection(Block):
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
        sizes, named = [part.out_features for part in self.parts], {}
        for kind, fused in (("weight", self.weight), ("bias", self.bias)):
            if fused is not None:
                views = zip(self.parts, fused.detach().split(sizes), strict=True)
                named |= {f"{part.name}.{kind}": view for part, view in views}
        return named

    def sites(self) -> Sites:
        return {self.site: (self.in_features, self.parts)}


def frozen_parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape), requires_grad=False)


def total(y: Tensor | PartialProjection) -> Tensor:
    """The result of a projection, added up if it is in parts."""
    return y if isinstance(y, Tensor) else y.total()

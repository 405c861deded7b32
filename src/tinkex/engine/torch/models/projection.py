"""A frozen Linear of the decoder, made of one or more Hugging Face modules stacked along the output.

q, k and v are one matrix, gate and up another. Frozen weights never get gradients.

Shapes: N rows, I in-features, O out-features.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tinkex.engine.torch.hooks import ForwardContext, Frozen, Part, PartialProjection, Site, Sites
from tinkex.engine.torch.models.block import Block, Slot, frozen_parameter
from tinkex.engine.torch.quantised import QuantisedMatrix


class Projection(Block):
    """One `Site`: the frozen product, and the adapters of the pass on it."""

    def __init__(
        self,
        site: Site,
        in_features: int,
        parts: tuple[Part, ...],
        bias: bool,
        stored: tuple[Part, ...] | None = None,
    ) -> None:
        """`stored`: what the files have, where that is not a matrix for each part."""
        super().__init__()
        self.site, self.in_features, self.parts, self.stored = site, in_features, parts, stored or parts
        out_features = sum(part.out_features for part in parts)
        # [O, I] laid out with O contiguous: on CPU few rows then multiply up to twice as fast
        weight = nn.Parameter(frozen_parameter(in_features, out_features).t(), requires_grad=False)
        self.weight: Any = weight  # or a `QuantisedMatrix`
        self.bias = frozen_parameter(out_features) if bias else None
        self.packed: Tensor | None = None

    def forward(self, x_NI: Tensor, context: ForwardContext) -> Tensor | PartialProjection:
        frozen, lora = Frozen(self.weight, self.bias, self.packed, context.backend.linear), context.lora
        return frozen(x_NI) if lora is None else lora.project(self.site, x_NI, frozen)

    def weights(self) -> dict[str, Tensor]:
        sizes, named = [part.out_features for part in self.stored], {}
        for kind, fused in (("weight", self.weight), ("bias", self.bias)):
            if isinstance(fused, Tensor):
                views = zip(self.stored, fused.detach().split(sizes), strict=True)
                named |= {f"{part.name}.{kind}": view for part, view in views}
        return named

    def quantise(self, dtype: torch.dtype) -> None:
        del self.weight
        self.weight = QuantisedMatrix([part.out_features for part in self.stored], self.in_features, dtype)

    def slots(self) -> dict[str, Slot]:
        if isinstance(self.weight, Tensor):
            return {}
        return {f"{part.name}.weight": (self.weight, i) for i, part in enumerate(self.stored)}

    def settle(self, for_kernels: bool = False) -> None:
        if isinstance(self.weight, Tensor):
            return
        if (plain := self.weight.plain()) is not None:
            del self.weight
            self.weight = nn.Parameter(plain.t().contiguous().t(), requires_grad=False)
        elif for_kernels:
            self.weight.unite()

    def sites(self) -> Sites:
        return {self.site: (self.in_features, self.parts)}


def total(y: Tensor | PartialProjection) -> Tensor:
    """The result of a projection, added up if it is in parts."""
    return y if isinstance(y, Tensor) else y.total()

"""A frozen product with its adapters as one thing, for hooks that can do both at once.

The decoder asks a hook that is `Projecting` for whole projections; any other is given the frozen product.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from tinkex.engine.torch.hooks import Site
from tinkex.engine.torch.ops import linear


class Frozen(NamedTuple):
    """A frozen Linear."""

    weight: Tensor
    bias: Tensor | None
    packed: Tensor | None  # what `ops.pack` made of the weight

    def __call__(self, x: Tensor) -> Tensor:
        return linear(x, *self)


class Projecting:
    """A `LoraHook` that does whole projections."""

    def project(self, site: Site, x: Tensor, frozen: Frozen) -> Tensor:
        """frozen(x) with the adapters' contribution."""
        raise NotImplementedError

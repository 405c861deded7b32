"""A frozen product with its adapters as one thing, for hooks that can do both at once.

The decoder asks a hook that is `Projecting` for whole projections; any other is given the frozen product.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from tinkex.engine.torch.hooks import Pending, Site
from tinkex.engine.torch.ops import linear


class Frozen(NamedTuple):
    """A frozen Linear."""

    weight: Tensor
    bias: Tensor | None
    packed: Tensor | None  # what `ops.pack` made of the weight
    invariant: bool = False  # a row's result does not depend on how many others there are

    def __call__(self, x: Tensor) -> Tensor:
        return linear(x, *self)


class Projecting:
    """A `LoraHook` that does whole projections."""

    def project(self, site: Site, x: Tensor, frozen: Frozen) -> Tensor | Pending:
        """frozen(x) with the adapters' contribution; pending where nobody asks for gradients."""
        raise NotImplementedError

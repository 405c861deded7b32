"""The base class of the decoder's modules: names, sizes and sites of their weights."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tinkex.engine.torch.hooks import Sites
from tinkex.engine.torch.quantised import QuantisedMatrix

Slot = tuple[QuantisedMatrix, int]  # a part of a matrix


class Block(nn.Module):
    """A module of the decoder."""

    def weights(self) -> dict[str, Tensor]:
        """Views of its own weights by their Hugging Face names: a loader fills them in place."""
        return {}

    def sites(self) -> Sites:
        """Its own sites that an adapter can train."""
        return {}

    def stacked(self) -> dict[str, tuple[int, ...]]:
        """Of modules whose rows are several matrices' with heads or widths of their own: how many of each."""
        return {}

    def quantise(self, dtype: torch.dtype) -> None:
        """Have quantised matrices, which a loader fills, in place of weights that are multiplied."""

    def slots(self) -> dict[str, Slot]:
        """Where those matrices take each weight, by their Hugging Face names."""
        return {}

    def settle(self, for_kernels: bool = False) -> None:
        """Replace matrices whose parts are all plain by plain weights.

        `for_kernels`: other matrices are kept as kernels read them.
        """


def frozen_parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape), requires_grad=False)

"""LoRA in plain autograd operations: slow, readable, and the oracle of `LoraBatch` and the kernels."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tinkex.engine.torch.adapters import Adapter
from tinkex.engine.torch.hooks import Frozen, LoraHook, Site
from tinkex.engine.torch.lora import LoraBatch
from tinkex.engine.torch.models.decoder import Decoder


class PlainLora(LoraBatch):
    """The same hook in plain autograd operations; `collect` after the backward adds up the gradients."""

    def __init__(
        self, adapters: Sequence[Adapter | None], lengths: Sequence[int], *, train: bool = False
    ) -> None:
        super().__init__(adapters, lengths, train=train)
        self._leaves = {a: a.flat.clone().requires_grad_(train) for a in adapters if a is not None}

    def __call__(
        self, site: Site, x: Tensor, y: Tensor, *, rows: Tensor | None = None, experts: Tensor | None = None
    ) -> Tensor:
        pieces, done = [], 0
        for start, stop, adapter, expert in self.jobs(site, rows=rows, experts=experts):
            shape = adapter.shapes[site]
            a_E, b_t_E = shape.views(self._leaves[adapter])  # one matrix on the side that experts share
            a, b_t = a_E[expert % len(a_E)], [part[expert % len(part)] for part in b_t_E]
            deltas = [
                adapter.scale * (x[start:stop] @ a_part.t().to(x.dtype)) @ b_part.to(x.dtype)
                for a_part, b_part in zip(a.split(shape.rank), b_t, strict=True)
            ]
            pieces += [y[done:start], y[start:stop] + torch.cat(deltas, dim=1)]
            done = stop
        return torch.cat([*pieces, y[done:]])

    def project(self, site: Site, x: Tensor, frozen: Frozen) -> Tensor:
        return self(site, x, frozen(x))

    def collect(self) -> None:
        """Add the gradients of this pass to the adapters'."""
        for adapter, leaf in self._leaves.items():
            if leaf.grad is not None and adapter.grad is not None:
                adapter.grad += leaf.grad


class FullMatrices(LoraHook):
    """Adds x @ deltaᵀ at every site: at delta = 0 its gradient is the frozen weight's own."""

    def __init__(self, decoder: Decoder) -> None:
        self.deltas: dict[Site, Tensor] = {}
        for site, (in_features, parts) in decoder.sites().items():
            shape = (sum(part.out_features for part in parts), in_features)
            shape = shape if parts[0].experts == 1 else (parts[0].experts, *shape)
            self.deltas[site] = torch.zeros(shape, requires_grad=True)

    def __call__(
        self, site: Site, x: Tensor, y: Tensor, *, rows: Tensor | None = None, experts: Tensor | None = None
    ) -> Tensor:
        delta = self.deltas[site]
        return y + (x @ delta.T if experts is None else torch.einsum("ni,noi->no", x, delta[experts]))

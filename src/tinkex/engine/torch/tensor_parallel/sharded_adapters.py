"""Adapters over the ranks of a tensor-parallel group: splitting, gradient sums, and gathering.

Where a projection's output is split, B is split and A replicated; where its input is split, the reverse. A
replicated matrix gets a partial gradient on each rank: `sync` sums those once per optimizer step. Files and
exports hold whole adapters. Shapes: E experts, R rank, I in-features, O out-features.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from tinkex.engine.torch.adapters import Adapter, SiteShape, lay_out
from tinkex.engine.torch.hooks import Site
from tinkex.engine.torch.tensor_parallel.sharding import ShardPlan
from tinkex.engine.torch.tensor_parallel.shards import Shards
from tinkex.types.params import LoraConfig

CPU = torch.device("cpu")


class AdapterShards:
    """Splits and gathers adapters by `plan`."""

    def __init__(self, plan: ShardPlan, shards: Shards, device: torch.device) -> None:
        self._plan, self._shards, self._device = plan, shards, device

    def whole_shapes(self, lora: LoraConfig, shared: bool) -> Mapping[Site, SiteShape]:
        return lay_out(self._plan.sites, lora, shared=shared)

    def empty(self, lora: LoraConfig, shared: bool = True) -> Adapter:
        """An adapter with this rank's part of the parameters, all zero."""
        return Adapter(lora, lay_out(self._plan.part.sites(), lora, shared=shared), self._device)

    def fresh(self, lora: LoraConfig, seed: int) -> Adapter:
        """This rank's part of what `Adapter.fresh` makes, the same numbers."""
        return self.part(Adapter.fresh(lora, self._plan.sites, seed=seed))

    def part(self, whole: Adapter) -> Adapter:
        """This rank's part of a whole adapter on the CPU, with its optimizer state if it has one."""
        adapter = self.empty(whole.lora, whole.shared)
        adapter.step = whole.step
        self._take(whole, whole.flat, adapter, adapter.flat)
        if whole.exp_avg is not None:
            for source, target in zip(whole.moments(), adapter.moments(), strict=True):
                self._take(whole, source, adapter, target)
        adapter.changed()
        return adapter

    def _take(self, whole: Adapter, source: Tensor, part: Adapter, target: Tensor) -> None:
        views, rank = whole.named(source), self._plan.rank
        for name, (a, b) in part.named(target).items():
            whole_a, whole_b = views[name]
            a.copy_(whole_a[..., self._plan.columns(name, rank)])
            for rows, own in self._plan.stacked_rows(name, rank):
                b[..., own, :].copy_(whole_b[..., rows, :])

    def whole(self, part: Adapter, *, optimizer: bool = False) -> Adapter:
        """The adapter of which all ranks have a part, on rank 0's CPU. All call it; others get zeros."""
        whole = Adapter(part.lora, self.whole_shapes(part.lora, part.shared))
        whole.step = part.step
        self._put_together(part, part.flat, whole, whole.flat)
        if optimizer:
            for source, target in zip(part.moments(), whole.moments(), strict=True):
                self._put_together(part, source, whole, target)
        return whole

    def _put_together(self, part: Adapter, source: Tensor, whole: Adapter, target: Tensor) -> None:
        pieces = self._shards.gather(source.cpu())
        if self._shards.rank:
            return
        views = whole.named(target)
        for rank, piece in enumerate(pieces):
            for name, (a, b) in part.named(piece).items():
                whole_a, whole_b = views[name]
                whole_a[..., self._plan.columns(name, rank)] = a
                for rows, own in self._plan.stacked_rows(name, rank):
                    whole_b[..., rows, :] = b[..., own, :]

    # -- gradients ---------------------------------------------------------------------------------------

    def sync(self, adapter: Adapter) -> None:
        """Sum the gradients of what several ranks have, in one collective."""
        if adapter.grad is None:
            return
        shared = self._shared(adapter, adapter.grad)
        if not shared:
            return
        spread = [self._spread(name, view).flatten() for name, view in shared]
        packed = torch.cat(spread)
        self._shards.reduce(packed)
        for (name, view), summed in zip(shared, packed.split([len(one) for one in spread]), strict=True):
            self._collect(name, view, summed)

    def norm(self, adapter: Adapter, grad: Tensor) -> Tensor:
        """The norm of the whole gradient, in fp64; every parameter counts once."""
        ours = torch.zeros(1, dtype=torch.float64, device=grad.device)
        once = torch.zeros_like(ours)
        for name, (a, b) in adapter.named(grad).items():
            for mine, view in ((self._plan.a_is_ours(name), a), (self._plan.b_is_ours(name), b)):
                square = torch.linalg.vector_norm(view, dtype=torch.float64).square()
                if mine:
                    ours += square
                elif view is b and (share := self._share_of(name, view)) is not None:
                    ours += share
                else:
                    once += square
        return (self._shards.reduce(ours) + once).sqrt()[0]

    def _share_of(self, name: str, b: Tensor) -> Tensor | None:
        """The squares of rows that this rank is the first to have; None: every rank has all rows."""
        if self._plan.halves[name][1] == b.shape[-2]:
            return None
        total = b.new_zeros((), dtype=torch.float64)
        for i, (rows, own) in enumerate(self._plan.stacked_rows(name, self._plan.rank)):
            first = next(r for r in range(self._plan.count) if self._plan.rows(name, r)[i] == rows)
            if first == self._plan.rank:
                total = total + torch.linalg.vector_norm(b[..., own, :], dtype=torch.float64).square()
        return total

    def _shared(self, adapter: Adapter, flat: Tensor) -> list[tuple[str | None, Tensor]]:
        """Views of what other ranks have too; those of B that are split as well have the part's name."""
        found: list[tuple[str | None, Tensor]] = []
        for name, (a, b) in adapter.named(flat).items():
            if not self._plan.a_is_ours(name):
                found.append((None, a))
            if not self._plan.b_is_ours(name):
                every = self._plan.halves[name][1] == b.shape[-2]
                found.append((None if every else name, b))
        return found

    def _spread(self, name: str | None, view: Tensor) -> Tensor:
        """In the shape that all ranks sum: as it is, or in its rows of the whole B."""
        if name is None:
            return view
        whole = view.new_zeros(*view.shape[:-2], self._plan.halves[name][1], view.shape[-1])
        for rows, own in self._plan.stacked_rows(name, self._plan.rank):
            whole[..., rows, :] = view[..., own, :]
        return whole

    def _collect(self, name: str | None, view: Tensor, summed: Tensor) -> None:
        if name is None:
            view.copy_(summed.view(view.shape))
            return
        whole = summed.view(*view.shape[:-2], self._plan.halves[name][1], view.shape[-1])
        for rows, own in self._plan.stacked_rows(name, self._plan.rank):
            view[..., own, :].copy_(whole[..., rows, :])

"""Many adapters in one pass on CUDA: `CudaLora` is `lora.LoraBatch` by kernels.

Segments of tokens become tiles, and adapters become rows of a table of addresses. Each site then takes a
fixed number of launches, however many adapters there are and whatever their ranks. Gradients go straight into
each adapter's buffer. Knows nothing of losses, of runs or of experts.

Shapes: T tokens, I in-features, O out-features, R rank, P parts of a site.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tinkex.engine.cuda import fused_projection as fused
from tinkex.engine.cuda import gluon_projection as projection
from tinkex.engine.cuda import lora_gradients
from tinkex.engine.cuda import lora_kernels as kernel
from tinkex.engine.cuda.adapter_table import (
    AdapterTable,
    RowTiles,
    TableSite,
    cut_tiles,
    tile_rows,
    whole_segments,
)
from tinkex.engine.cuda.invariant_product import product
from tinkex.engine.torch.adapters import Adapter
from tinkex.engine.torch.hooks import Frozen, Site
from tinkex.engine.torch.lora import LoraBatch
from tinkex.engine.torch.upload import all_to_device, to_device

_GROUPS = {"qkv": 0, "o": 1, "gate_up": 2, "down": 3, "unembed": 0}
_COLUMNS = 4  # of a site: the addresses of A and of up to three parts' Bᵀ
_HEAD = 1 << 16  # out-features that only an unembedding has
_SOME = 8192  # rows whose fp32 result stays in L2
_ALIGNED = 8  # elements: every matrix begins at a multiple of 16 bytes


def column_of(site: Site) -> int:
    """A site's first column in a table of addresses; column 0 is the rank."""
    return 1 + _COLUMNS * (len(_GROUPS) - 1) * (site.layer + 1) + _COLUMNS * _GROUPS[site.group]


def offsets_of(adapter: Adapter) -> np.ndarray:
    """Where in an adapter's flat buffer each column's matrix begins; -1 where it has none."""
    if adapter.offsets is None:
        dense = {site: shape for site, shape in adapter.shapes.items() if site.group in _GROUPS}
        last = max((site.layer for site in dense), default=-1)
        offsets = np.full(column_of(Site(last + 1, "qkv")), -1, np.int64)
        for site, shape in dense.items():
            sizes = [len(shape.parts) * shape.in_features, *shape.outs[:-1]]
            starts = shape.start + shape.rank * np.cumsum([0, *sizes])
            offsets[column_of(site) : column_of(site) + len(starts)] = starts
        adapter.offsets = offsets
    return adapter.offsets


def usable(adapters: Sequence[Adapter | None]) -> bool:
    """Whether the kernels can read these adapters' matrices."""
    return all(a is None or not (np.maximum(offsets_of(a), 0) % _ALIGNED).any() for a in adapters)


def table_rows(
    adapters: Sequence[Adapter], flats: Sequence[Tensor], columns: int | None = None
) -> np.ndarray:
    """Each adapter's rank and the addresses of its matrices in its buffer of `flats`; 0 where it has none."""
    columns = columns or max(len(offsets_of(adapter)) for adapter in adapters)
    rows = np.zeros((len(adapters), columns), np.int64)
    for row, adapter, flat in zip(rows, adapters, flats, strict=True):
        offsets = offsets_of(adapter)
        row[: len(offsets)] = np.where(offsets < 0, 0, flat.data_ptr() + flat.itemsize * offsets)
        row[0] = adapter.lora.rank
    return rows


def kernel_site(adapter: Adapter, site: Site) -> TableSite:
    shape = adapter.shapes[site]
    return TableSite(column_of(site), shape.in_features, shape.outs)


def product_with(
    x: Tensor, weight: Tensor, table: AdapterTable, tiles: RowTiles, site: TableSite
) -> tuple[Tensor, Tensor]:
    """The frozen product plus the adapters' part, and u = x·Aᵀ; tiles cover every row.

    Every branch rounds as a sampler's captured steps do. A large weight's product is rounded to bf16, or
    split in two, before adapters are added; a small weight's sum is accumulated in fp32 and rounded once to
    bf16. An unembedding's product is added to the adapters' part by the library, which reads the result while
    it multiplies: one pass over the logits less.
    """
    large, rows = fused.large(weight), x.shape[0]
    if fused.split_in_two(weight):
        u = kernel.shrink(x, table, tiles, site, splits=2)
        return kernel.unite(u, split_product(2, x, weight), x.dtype, table, tiles, site), u
    u = kernel.shrink(x, table, tiles, site, splits=1 if large else None)
    if projection.suits(rows, weight, site.outs):
        u = kernel.summed(u, x.dtype)
        return projection.project(x, weight, u[0], table, tiles, site), u
    if not large and rows <= _SOME:
        u = kernel.summed(u, x.dtype)
        return kernel.unite(u, split_product(1, x, weight), x.dtype, table, tiles, site), u
    if large and weight.shape[0] < _HEAD:
        y = F.linear(x, weight)
        kernel.expand(u, y, table, tiles, site)
        return y, u
    y = x.new_empty(x.shape[0], weight.shape[0])
    kernel.write(u, y, table, tiles, site)
    return y.addmm_(x, weight.t()), u


def split_product(parts: int, x: Tensor, weight: Tensor) -> Tensor:
    """x · weightᵀ with split-K over equal parts of the features, in fp32: [parts, T, O]."""
    left, right = x.unflatten(1, (parts, -1)).transpose(0, 1), weight.t().unflatten(0, (parts, -1))
    if x.is_cuda:
        return torch.bmm(left, right, torch.float32)
    return torch.bmm(left.float(), right.float())  # the interpreter's device has no such product


class GroupedLora:
    """The adapters of one pass; `segments` are (adapter or None, first token, past the last)."""

    def __init__(
        self,
        segments: Sequence[tuple[Adapter | None, int, int]],
        device: torch.device,
        dtype: torch.dtype,
        invariant: bool = False,
    ) -> None:
        self._adapters = list(dict.fromkeys(adapter for adapter, _, _ in segments if adapter is not None))
        self._device, self._invariant = device, invariant
        self._grads: list[AdapterTable] = []  # at most one, made when needed, shared by all parts
        self._sites: dict[Site, TableSite | None] = {}
        matrices = table_rows(self._adapters, [a.flat_as(dtype) for a in self._adapters])
        scales = np.array([adapter.scale for adapter in self._adapters], np.float32)
        ranks = [adapter.lora.rank for adapter in self._adapters]
        cells, rows = self._lay_out(segments)
        sent, vectors = all_to_device([matrices, scales, cells], device), all(rank % 8 == 0 for rank in ranks)
        self._table = AdapterTable(sent[0], sent[1], max(ranks), invariant, vectors)
        self._tiles = RowTiles(sent[2], rows)

    def _lay_out(self, segments: Sequence[tuple[Adapter | None, int, int]]) -> tuple[np.ndarray, int]:
        """Lay the segments out in tiles; returns them, and the rows of a whole tile."""
        slots = {adapter: slot for slot, adapter in enumerate(self._adapters)}
        self._places = [(slots[a], start, stop) for a, start, stop in segments if a is not None]
        self._whole = len(self._places) == len(segments)
        tokens = max(stop for _, _, stop in segments)
        rows = tile_rows(tokens // max(1, len(self._places)))
        self._back: lora_gradients.GradientTable | None = None
        return cut_tiles(self._places, rows), rows

    def part(self, segments: Sequence[tuple[Adapter | None, int, int]]) -> GroupedLora:
        """The same adapters, or some of them, over other rows."""
        other = copy(self)
        cells, rows = other._lay_out(segments)
        other._tiles = RowTiles(to_device(cells, self._device), rows)
        return other

    def site(self, site: Site) -> TableSite | None:
        """`site` in the table; None if no adapter has it."""
        if site not in self._sites:
            self._sites[site] = next((kernel_site(a, site) for a in self._adapters if site in a.shapes), None)
        return self._sites[site]

    def add_to(self, site: Site, x: Tensor, y: Tensor) -> Tensor:
        """y plus the contribution of the adapters that have `site`, in place."""
        if (place := self.site(site)) is not None:
            self.add(place, x, y)
        return y

    def add(self, site: TableSite, x: Tensor, y: Tensor) -> Tensor:
        """y += scale·x·Aᵀ·Bᵀ in place; returns u, which the backward needs."""
        u = kernel.shrink(x, self._table, self._tiles, site)
        kernel.expand(u, y, self._table, self._tiles, site)
        return u

    def project(
        self, site: TableSite, x: Tensor, weight: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The frozen product plus the adapters' contribution, and u."""
        writes = kernel.writes(self._table, site) or (fused.large(weight) and weight.shape[0] < _HEAD)
        if self._invariant or bias is not None or not (self._whole and writes):
            y = product(x, weight, bias) if self._invariant else F.linear(x, weight, bias)
            return y, self.add(site, x, y)
        return product_with(x, weight, self._table, self._tiles, site)

    def backward(self, site: TableSite, grad_y: Tensor, x: Tensor, u: Tensor) -> Tensor:
        """Accumulate the adapters' gradients; returns the gradient to u, for `grad_x`."""
        if self._back is None:
            self._back = self._gradient_table()
        return lora_gradients.backward(grad_y, x, u, self._table, self._tiles, self._back, site)

    def grad_x(
        self,
        site: TableSite,
        grad_y: Tensor,
        grad_u: Tensor,
        weight: Tensor,
        out: Tensor | None = None,
    ) -> Tensor:
        """The gradient to x through the frozen product and the adapters, into `out` if given."""
        out = grad_y.new_empty(grad_y.shape[0], weight.shape[1]) if out is None else out
        if self._whole and projection.suits(out.shape[0], weight, [site.in_features]):
            projection.project_back(grad_y, weight, grad_u[0], out, self._table, self._tiles, site)
            return out
        torch.mm(grad_y, weight, out=out)
        kernel.expand_back(grad_u, out, self._table, self._tiles, site)
        return out

    def _gradient_table(self) -> lora_gradients.GradientTable:
        if not self._grads:
            grads = [adapter.grad for adapter in self._adapters if adapter.grad is not None]
            assert len(grads) == len(self._adapters)
            addresses = to_device(table_rows(self._adapters, grads), self._device)
            self._grads.append(replace(self._table, addresses=addresses))
        longest = max(stop - start for _, start, stop in self._places)
        segments = RowTiles(to_device(whole_segments(self._places), self._device), longest)
        atomic = len(self._places) > len({slot for slot, _, _ in self._places})
        return lora_gradients.GradientTable(self._grads[0], segments, atomic)


class CudaLora(LoraBatch):
    """`LoraBatch` by kernels; adapters that they cannot read, and experts, take the plain path."""

    def __init__(
        self,
        adapters: Sequence[Adapter | None],
        lengths: Sequence[int],
        device: torch.device,
        dtype: torch.dtype,
        *,
        train: bool = False,
        invariant: bool = False,
    ) -> None:
        super().__init__(adapters, lengths, train=train)
        self._device, self._dtype, self.invariant = device, dtype, invariant
        self._grouped: GroupedLora | None = None
        owners = [adapter for adapter, _, _ in self.segments]
        self._readable = any(owner is not None for owner in owners) and usable(owners)

    @property
    def grouped(self) -> GroupedLora | None:
        """Made when first used: captured steps have tables of their own."""
        if self._grouped is None and self._readable:
            self._grouped = GroupedLora(self.segments, self._device, self._dtype, self.invariant)
        return self._grouped

    def __call__(
        self, site: Site, x: Tensor, y: Tensor, *, rows: Tensor | None = None, experts: Tensor | None = None
    ) -> Tensor:
        if rows is None and not self.train and self.grouped is not None:
            return self.grouped.add_to(site, x, y)
        return super().__call__(site, x, y, rows=rows, experts=experts)

    def project(self, site: Site, x: Tensor, frozen: Frozen) -> Tensor:
        grouped = self.grouped
        place = None if grouped is None else grouped.site(site)
        if grouped is None or place is None:
            return super().project(site, x, frozen)
        if not (self.train and torch.is_grad_enabled()):
            return grouped.project(place, x, frozen.weight, frozen.bias)[0]
        return GroupedProjection.apply(x, self._anchor, frozen.weight, frozen.bias, grouped, site)  # type: ignore[return-value]

    def part(self, start: int, stop: int) -> CudaLora:
        """The same adapters over the tokens start:stop alone; the table of addresses is shared."""
        inside = [(a, max(i, start), min(j, stop)) for a, i, j in self.segments if i < stop and j > start]
        part = copy(self)
        part.segments, part.tokens = [(a, i - start, j - start) for a, i, j in inside], stop - start
        part._grouped = None
        if self.grouped is not None and any(a is not None for a, _, _ in inside):
            part._grouped = self.grouped.part(part.segments)
        else:
            part._readable = False
        return part


class GroupedProjection(torch.autograd.Function):
    """A frozen product and its adapters for autograd; adapters' gradients go to their buffers."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, anchor: Tensor, weight: Tensor, bias: Any, grouped: GroupedLora, site: Site
    ) -> Tensor:
        place = grouped.site(site)
        assert place is not None
        y, u = grouped.project(place, x, weight, bias)
        ctx.save_for_backward(x, u, weight)
        ctx.grouped, ctx.place = grouped, place
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, u, weight = ctx.saved_tensors
        grad_y = grads[0].contiguous()
        grad_u = ctx.grouped.backward(ctx.place, grad_y, x, u)
        grad_x = ctx.grouped.grad_x(ctx.place, grad_y, grad_u, weight) if ctx.needs_input_grad[0] else None
        return grad_x, None, None, None, None, None

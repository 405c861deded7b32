"""Many adapters in one pass on CUDA: `CudaLora` is `lora.LoraBatch` by kernels.

Segments of tokens become tiles, and adapters become rows of a table of addresses. Each site then takes a
fixed number of launches, for any number of adapters of any ranks. Gradients go straight into
each adapter's buffer. `AdapterSlots` is the table that captured graphs read.

Shapes: T tokens, O out-features, R rank, P parts of a site.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tinkex.engine.cuda import fused_projection as fused
from tinkex.engine.cuda import gluon_projection, lora_gradients, packed_weights
from tinkex.engine.cuda import lora_kernels as kernel
from tinkex.engine.cuda.adapter_table import (
    AdapterTable,
    RowTiles,
    SiteAdapters,
    column_of,
    cut_tiles,
    site_adapters,
    table_rows,
    tile_rows,
    usable,
)
from tinkex.engine.cuda.expert_routing import slots_of
from tinkex.engine.cuda.invariant_product import product
from tinkex.engine.cuda.launch import power_of_2
from tinkex.engine.torch.adapters import Adapter
from tinkex.engine.torch.device_copies import all_to_device, fill, to_device
from tinkex.engine.torch.hooks import Frozen, Site
from tinkex.engine.torch.lora import LoraBatch
from tinkex.engine.torch.models.decoder import Decoder

_HEAD = 1 << 16  # out-features that only an unembedding has
_SOME = 8192  # rows whose fp32 result stays in L2
_FEW = 128  # rows up to which a library may split a small weight's sums over its features
MIN_SPLIT_KEYS = 2048  # of one split of attention, where decoding is to be bitwise identical to the trainer


def product_with(x: Tensor, weight: Tensor, at: SiteAdapters, read: bool = True) -> tuple[Tensor, Tensor]:
    """The frozen product plus the adapters' part, and u = x·Aᵀ; tiles cover every row.

    Without `read` the first is left as it was allocated: only u is wanted.

    Every branch rounds as a sampler's captured steps do. A large weight's product is rounded to bf16, or
    split in two, before adapters are added; a small weight's sum is accumulated in fp32 and rounded once to
    bf16. An unembedding's product is added to the adapters' part by the library, which reads the result while
    it multiplies: one pass over the logits less.
    """
    exact, rows = fused.exact(weight, at), x.shape[0]
    halves = fused.split_in_two(weight)
    u = kernel.shrink(x, at.a, splits=2 if halves else 1 if exact else None)
    in_one_launch = not halves and gluon_projection.suits(rows, weight, at.outs)
    if in_one_launch or (not exact and rows <= _SOME):
        u = kernel.summed(u, x.dtype)
    if not read:
        return x.new_empty(rows, weight.shape[0]), u
    if halves:
        return kernel.unite(u, split_product(2, x, weight), x.dtype, at.b), u
    if in_one_launch:
        return gluon_projection.project(x, weight, u[0], at.b, rounded=exact), u
    if not exact and rows <= _SOME:
        return kernel.unite(u, split_product(1, x, weight), x.dtype, at.b), u
    if exact and weight.shape[0] < _HEAD:
        few = rows <= _FEW and not fused.large(weight)
        y = product(x, weight) if few else F.linear(x, weight)
        kernel.expand(u, y, at.b)
        return y, u
    y = x.new_empty(rows, weight.shape[0])
    kernel.write(u, y, at.b)
    return y.addmm_(x, weight.t()), u


def split_product(parts: int, x: Tensor, weight: Tensor) -> Tensor:
    """x · weightᵀ with split-K over equal parts of the features, in fp32: [parts, T, O]."""
    left, right = x.unflatten(1, (parts, -1)).transpose(0, 1), weight.t().unflatten(0, (parts, -1))
    if x.is_cuda:
        return torch.bmm(left, right, torch.float32)
    return torch.bmm(left.float(), right.float())  # the interpreter's device has no such product


# -- eager passes --------------------------------------------------------------------------------------


class CudaLora(LoraBatch):
    """`LoraBatch` by kernels; adapters that they cannot read take the plain path."""

    def __init__(
        self, adapters: Sequence[Adapter | None], lengths: Sequence[int], device: torch.device,
        dtype: torch.dtype, *, train: bool = False, invariant: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(adapters, lengths, train=train)
        self._device, self._dtype, self._invariant = device, dtype, invariant
        self._adapters = list(dict.fromkeys(a for a, _, _ in self.segments if a is not None))
        self.readable = bool(self._adapters) and usable(self._adapters)
        self._table: AdapterTable | None = None
        self._grads: list[AdapterTable] = []  # at most one, made when needed, shared by all parts
        self._unread: Site | None = None
        self._forget_rows()

    def _forget_rows(self) -> None:
        self._tiles: RowTiles | None = None
        self._whole_segments: RowTiles | None = None
        self._sites: dict[Site, SiteAdapters | None] = {}
        self._back: dict[int, SiteAdapters] = {}  # by column

    def part(self, start: int, stop: int) -> CudaLora:
        """The same adapters over the tokens start:stop only; the table of addresses is shared."""
        inside = [(a, max(i, start), min(j, stop)) for a, i, j in self.segments if i < stop and j > start]
        if self.readable:
            self._on_device()
        part = copy(self)
        part.segments, part.tokens = [(a, i - start, j - start) for a, i, j in inside], stop - start
        part.readable = self.readable and any(a is not None for a, _, _ in inside)
        for cached in ("slots_T", "_device_segments"):
            part.__dict__.pop(cached, None)
        part._forget_rows()
        return part

    def _on_device(self) -> tuple[AdapterTable, RowTiles]:
        """The table and the tiles, made when first used: captured steps have their own."""
        if self._table is None or self._tiles is None:
            slots = {adapter: slot for slot, adapter in enumerate(self._adapters)}
            self._places = [(slots[a], start, stop) for a, start, stop in self.segments if a is not None]
            rows = tile_rows(self.tokens // max(1, len(self._places)))
            cells = cut_tiles(self._places, rows)
            if self._table is None:
                matrices = table_rows(self._adapters, [a.flat_as(self._dtype) for a in self._adapters])
                sent = all_to_device([matrices, _scales(self._adapters), cells], self._device)
                ranks = [adapter.lora.rank for adapter in self._adapters]
                vectors = all(rank % 8 == 0 for rank in ranks)
                self._table = AdapterTable(
                    sent[0], sent[1], max(ranks), self._invariant, vectors, len(ranks) > 1
                )
                self._tiles = RowTiles(sent[2], rows)
            else:
                self._tiles = RowTiles(to_device(cells, self._device), rows)
        return self._table, self._tiles

    def site(self, site: Site) -> SiteAdapters | None:
        """The adapters at `site`; None if there is none that the kernels can read."""
        if site not in self._sites:
            shapes = (a.shapes[site] for a in self._adapters if self.readable and site in a.shapes)
            self._sites[site] = None
            if (shape := next(shapes, None)) is not None:
                table, tiles = self._on_device()
                self._sites[site] = site_adapters(table, tiles, site, shape.in_features, shape.outs)
        return self._sites[site]

    @cached_property
    def slots_T(self) -> Tensor:
        """int32: each token's slot in the table; -1: none."""
        cells, rows = self._on_device()[1]
        return slots_of(cells, self.tokens, rows)

    @cached_property
    def _device_segments(self) -> tuple[Tensor, Tensor]:
        """int32: each segment's first token, and its slot."""
        self._on_device()
        slots = {adapter: slot for slot, adapter in enumerate(self._adapters)}
        starts = np.array([start for _, start, _ in self.segments], np.int32)
        of = np.array([-1 if a is None else slots[a] for a, _, _ in self.segments], np.int32)
        starts_S, slots_S = all_to_device([starts, of], self._device)
        return starts_S, slots_S

    @property
    def segments_at(self) -> Tensor:
        return self._device_segments[0]

    @property
    def of_segments(self) -> Tensor:
        return self._device_segments[1]

    @property
    def atomic(self) -> bool:
        """Whether an adapter has several segments, whose gradients are then added atomically."""
        return len(self._places) > len({slot for slot, _, _ in self._places})

    @property
    def _whole(self) -> bool:
        """Whether every row has an adapter."""
        return len(self._places) == len(self.segments)

    def project(self, site: Site, x: Tensor, frozen: Frozen) -> Tensor:
        if (at := self.site(site)) is None:
            return super().project(site, x, frozen)
        if not (self.train and torch.is_grad_enabled()):
            return self.product(at, x, frozen.weight, frozen.bias)[0]
        read = site != self._unread
        return GroupedProjection.apply(x, self._anchor, frozen.weight, frozen.bias, self, at, read)  # type: ignore[return-value]

    @contextmanager
    def unread(self, site: Site) -> Iterator[None]:
        self._unread = site
        try:
            yield
        finally:
            self._unread = None

    def product(
        self, at: SiteAdapters, x: Tensor, weight: Any, bias: Tensor | None = None, read: bool = True
    ) -> tuple[Tensor, Tensor]:
        """The frozen product plus the adapters' contribution, if it is `read`, and u for the backward."""
        weight = packed_weights.as_tensor(weight, x.dtype)
        writes = at.width <= kernel.MAX_WRITTEN or (fused.exact(weight, at) and len(weight) < _HEAD)
        if not self._invariant and bias is None and self._whole and writes:
            return product_with(x, weight, at, read)
        u = kernel.shrink(x, at.a)
        if not read:
            return x.new_empty(x.shape[0], weight.shape[0]), u
        y = product(x, weight, bias) if self._invariant else F.linear(x, weight, bias)
        kernel.expand(u, y, at.b)
        return y, u

    def backward(self, at: SiteAdapters, grad_y: Tensor, x: Tensor, u: Tensor) -> Tensor:
        """Accumulate the adapters' gradients; returns the gradient to u, for `grad_x`."""
        return lora_gradients.backward(grad_y, x, u, at, self.into(at), self.atomic)

    def into(self, at: SiteAdapters) -> SiteAdapters:
        """The addresses of the gradients of `at`, and whole segments as tiles."""
        if at.column not in self._back:
            self._back[at.column] = replace(at, table=self._gradients(), tiles=self._segment_tiles())
        return self._back[at.column]

    def grad_x(
        self, at: SiteAdapters, grad_y: Tensor, grad_u: Tensor, weight: Any, out: Tensor | None = None
    ) -> Tensor:
        """The gradient to x through the frozen product and the adapters, into `out` if given."""
        weight = packed_weights.as_tensor(weight, grad_y.dtype)
        out = grad_y.new_empty(grad_y.shape[0], weight.shape[1]) if out is None else out
        if self._whole and gluon_projection.suits(out.shape[0], weight, [at.in_features]):
            return gluon_projection.project(grad_y, weight.t(), grad_u[0], at.a, out)
        torch.mm(grad_y, weight, out=out)
        kernel.expand(grad_u, out, at.a)
        return out

    def _gradients(self) -> AdapterTable:
        if not self._grads:
            grads = [adapter.grad for adapter in self._adapters if adapter.grad is not None]
            assert len(grads) == len(self._adapters)
            addresses = to_device(table_rows(self._adapters, grads), self._device)
            self._grads.append(replace(self._on_device()[0], addresses=addresses))
        return self._grads[0]

    def _segment_tiles(self) -> RowTiles:
        """Each segment as one tile; `rows` is the longest."""
        if self._whole_segments is None:
            slots, starts, stops = np.array(self._places, np.int32).T
            cells = to_device(np.stack([slots, starts, stops - starts]), self._device)
            self._whole_segments = RowTiles(cells, int((stops - starts).max()))
        return self._whole_segments


class GroupedProjection(torch.autograd.Function):
    """A frozen product and its adapters for autograd; adapters' gradients go to their buffers."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, anchor: Tensor, weight: Any, bias: Any, lora: CudaLora, at: SiteAdapters,
        read: bool,
    ) -> Tensor:  # fmt: skip
        y, u = lora.product(at, x, weight, bias, read)
        ctx.save_for_backward(x, u)
        ctx.weight, ctx.lora, ctx.at = weight, lora, at
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, u = ctx.saved_tensors
        grad_y = grads[0].contiguous()
        grad_u = ctx.lora.backward(ctx.at, grad_y, x, u)
        grad_x = ctx.lora.grad_x(ctx.at, grad_y, grad_u, ctx.weight) if ctx.needs_input_grad[0] else None
        return grad_x, None, None, None, None, None, None


def _scales(adapters: Sequence[Adapter]) -> np.ndarray:
    return np.array([adapter.scale for adapter in adapters], np.float32)


# -- captured graphs -----------------------------------------------------------------------------------


def _weight_sizes(decoder: Decoder) -> list[int]:
    """The elements of each weight but the head's and the experts', whose products agree at any size."""
    sites = ((site.group, of) for site, of in decoder.sites().items())
    other = ("unembed", "experts_gate_up", "experts_down", "shared_gate_up", "shared_down")
    return [i * sum(p.out_features for p in parts) for group, (i, parts) in sites if group not in other]


def matches_trainer(decoder: Decoder) -> bool:
    """Whether captured steps round as the trainer does: all weights are large, in bf16 and without a bias.

    An invariant decoder does so by other means. The kernels of experts and of recurrent layers do so at any
    size.
    """
    config = decoder.config
    other = config.qkv_bias or config.o_bias or config.mlp_bias
    other = other or decoder.backend.invariant or bool(decoder.slots())
    return not other and min(_weight_sizes(decoder)) > fused.LARGE


class SlotShape(NamedTuple):
    """What a captured graph depends on in the adapters that it serves, rounded up so that graphs are few."""

    tiles: int = 0  # 0: no adapter
    rows: int = 0  # of a whole tile
    rank: int = 0  # the largest
    vectors: bool = False  # every rank is a multiple of 8
    mixed: bool = False  # there are several


class AdapterSlots:
    """A table of adapters that never moves: one captured graph serves whichever were placed last."""

    def __init__(self, decoder: Decoder, capacity: int) -> None:
        device, columns = decoder.unembed_weight.device, column_of(Site(decoder.config.layers, "qkv"))
        self._dtype, self._invariant = decoder.unembed_weight.dtype, decoder.backend.invariant
        self._none = capacity  # the slot of rows without an adapter: its rank and addresses stay 0
        self._addresses = torch.zeros(capacity + 1, columns, dtype=torch.int64, device=device)
        self._scales = torch.zeros(capacity + 1, dtype=torch.float32, device=device)
        self._slots: dict[Adapter, int] = {}
        self._matches_trainer = matches_trainer(decoder)
        self.min_split_keys = MIN_SPLIT_KEYS if self._matches_trainer else 0
        large = max(_weight_sizes(decoder)) > fused.LARGE
        self._max_fused_rows = fused.MAX_ROWS_LARGE if large else fused.MAX_ROWS
        if decoder.backend.invariant:
            self._max_fused_rows = 0

    def table(self, shape: SlotShape) -> AdapterTable:
        """The table for kernels of a graph of this shape."""
        settings = shape.rank, self._invariant, shape.vectors, shape.mixed
        return AdapterTable(self._addresses, self._scales, *settings)

    def place(self, segments: Sequence[tuple[Adapter | None, int, int]]) -> tuple[np.ndarray, SlotShape]:
        """Put the adapters of `segments` (adapter, first row, past the last; at least one) into the table.

        Returns the cells of `RowTiles`, which cover every row, and what a graph needs to serve them.
        """
        used = list(dict.fromkeys(adapter for adapter, _, _ in segments if adapter is not None))
        if any(adapter not in self._slots for adapter in used):
            self._slots = {adapter: slot for slot, adapter in enumerate(used)}
            # whole rows of the table, so that nothing of a slot's last adapter stays
            flats, columns = [adapter.flat_as(self._dtype) for adapter in used], self._addresses.shape[1]
            fill(self._addresses[: len(used)], table_rows(used, flats, columns))
            fill(self._scales[: len(used)], _scales(used))
        places = [(self._none if a is None else self._slots[a], start, stop) for a, start, stop in segments]
        total = segments[-1][2]
        rows = tile_rows(total // len(places))
        if len(used) == 1 and total <= self._max_fused_rows:
            rows = fused.MAX_ROWS_LARGE if self._matches_trainer else fused.tile_rows(total)
        tiles = cut_tiles(places, rows)
        cells = np.zeros((6, power_of_2(tiles.shape[1])), np.int32)
        cells[:, : tiles.shape[1]] = tiles
        cells[3, tiles.shape[1] :] = tiles.shape[1]  # further rows have no tile
        ranks = [adapter.lora.rank for adapter in self._slots]
        vectors = all(rank % 8 == 0 for rank in ranks)
        return cells, SlotShape(cells.shape[1], rows, power_of_2(max(ranks)), vectors, len(used) > 1)

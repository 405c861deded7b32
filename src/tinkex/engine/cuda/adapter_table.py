"""Adapters and rows as kernels see them: a table of addresses on the device, and tiles of one adapter's rows.

A table has a row (slot) for each adapter. Its columns are the adapter's rank and, for each site, the address
of A and of each part's Bᵀ; of experts, of the first expert's. Knows no kernel; `grouped_lora` fills the
tables.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from tinkex.engine.torch.adapters import Adapter, SiteShape
from tinkex.engine.torch.hooks import Site

ALIGNED = 128  # rows: no tile crosses a multiple of it
# Where a site's columns are among its layer's. A layer has one mixer, and an MLP or experts and a shared one.
_GROUPS = {
    "qkv": 0, "qkvz": 0, "o": 1, "delta_out": 1, "gate_up": 2, "experts_gate_up": 2, "down": 3,
    "experts_down": 3, "shared_gate_up": 4, "shared_down": 5, "unembed": 0,
}  # fmt: skip
_SITES = 6  # of a layer, at most
_COLUMNS = 5  # of a site: the addresses of A and of up to four parts' Bᵀ
_VECTOR = 8  # elements: every matrix begins at a multiple of 16 bytes


@dataclass(frozen=True)
class AdapterTable:
    """`invariant`: a row's result does not depend on other rows, and gradients are summed in a fixed order
    where an adapter's rows are contiguous. `vectors`: every rank is a multiple of 8, so kernels load 16 bytes
    of u at a time. `mixed`: there are several adapters.
    """

    addresses: Tensor  # int64 [slots, columns]; 0 where an adapter has no such matrix
    scales: Tensor  # float32 [slots]
    widest: int  # the largest rank
    invariant: bool = False
    vectors: bool = False
    mixed: bool = False


class RowTiles(NamedTuple):
    """Rows start:start+count of each tile belong to one slot; a tile with `count` 0 does nothing."""

    cells: Tensor  # int32 [6, tiles]: slots, starts, counts, and what `cut_tiles` adds
    rows: int  # of a whole tile


@dataclass
class SiteMatrices:
    """The matrices of one site that a kernel multiplies with: every adapter's A, or its Bᵀ of each part."""

    table: AdapterTable
    tiles: RowTiles
    column: int
    sizes: Sequence[int]  # columns of the matrix of each part
    multiple: int  # of an adapter's rank: rows of its matrix

    @cached_property
    def where(self) -> tuple[Any, ...]:
        """A kernel's arguments table, scales, cells, tiles, columns, column."""
        addresses, cells = self.table.addresses, self.tiles.cells
        return addresses, self.table.scales, cells, cells.shape[1], addresses.shape[1], self.column

    @cached_property
    def widths(self) -> tuple[int, ...]:
        """A kernel's arguments n0, n1, n2, n3."""
        return (*self.sizes, 0, 0, 0)[:4]

    @cached_property
    def constants(self) -> dict[str, Any]:
        even = all(size % 16 == 0 for size in self.sizes)
        return {"EVEN": even, "VECTORS": self.table.vectors, "MULTIPLE": self.multiple}

    def blocks(self, columns: int) -> int:
        """Blocks of so many columns; none lies in two parts."""
        return sum(-(-size // columns) for size in self.sizes)


@dataclass
class SiteAdapters:
    """The adapters of a step's rows at one site, which begins at `column` of the table."""

    table: AdapterTable
    tiles: RowTiles
    column: int
    in_features: int
    outs: Sequence[int]  # out-features of each part
    shared_expert: bool = False

    @property
    def width(self) -> int:
        """Columns of u, of all parts."""
        return len(self.outs) * self.table.widest

    @cached_property
    def a(self) -> SiteMatrices:
        return SiteMatrices(self.table, self.tiles, self.column, [self.in_features], len(self.outs))

    @cached_property
    def b(self) -> SiteMatrices:
        return SiteMatrices(self.table, self.tiles, self.column + 1, self.outs, 1)


def site_adapters(
    table: AdapterTable, tiles: RowTiles, site: Site, in_features: int, outs: Sequence[int]
) -> SiteAdapters:
    shared = site.group in ("shared_gate_up", "shared_down")
    return SiteAdapters(table, tiles, column_of(site), in_features, outs, shared)


def column_of(site: Site) -> int:
    """A site's first column in a table of addresses; column 0 is the rank."""
    return 1 + _COLUMNS * (_SITES * (site.layer + 1) + _GROUPS[site.group])


def has_column(site: Site, shape: SiteShape) -> bool:
    """Whether a table has the site; of experts that share no factor it has none."""
    return site.group in _GROUPS and (shape.experts == 1 or bool(shape.shared))


def offsets_of(adapter: Adapter) -> np.ndarray:
    """Where in an adapter's flat buffer each column's matrix begins; -1 where it has none."""
    if adapter.offsets is None:
        read = {site: shape for site, shape in adapter.shapes.items() if has_column(site, shape)}
        last = max((site.layer for site in read), default=-1)
        offsets = np.full(column_of(Site(last + 1, "qkv")), -1, np.int64)
        for site, shape in read.items():
            starts = shape.start + np.cumsum(
                [0, shape.a_size, *(shape.rank * out for out in shape.outs[:-1])]
            )
            offsets[column_of(site) : column_of(site) + len(starts)] = starts
        adapter.offsets = offsets
    return adapter.offsets


def usable(adapters: Iterable[Adapter | None]) -> bool:
    """Whether the kernels can read all of these adapters' matrices."""
    return all(a is None or _readable(a) for a in adapters)


def _readable(adapter: Adapter) -> bool:
    known = all(has_column(site, shape) for site, shape in adapter.shapes.items())
    return known and not (np.maximum(offsets_of(adapter), 0) % _VECTOR).any()


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


def tile_rows(each: int) -> int:
    """Rows of a tile where adapters have about `each` of them."""
    return 16 if each < 32 else 32 if each < 96 else 64


def cut_tiles(segments: Sequence[tuple[int, int, int]], rows: int) -> np.ndarray:
    """Tiles of the segments (slot, start, stop), cut at multiples of `rows`: int32 [6, tiles].

    The last three rows let a kernel with tiles of ALIGNED rows find the tiles inside each of its own, if
    tiles cover every row: the first tile of each ALIGNED rows; the rows from each tile on, up to the end of
    those ALIGNED, that have its slot; and the tile after them.
    """
    slots, starts, stops = np.array(segments, np.int32).reshape(-1, 3).T
    firsts = starts // rows
    tiles = np.where(stops > starts, -(-stops // rows) - firsts, 0)
    of = np.repeat(np.arange(len(tiles)), tiles)
    at = (firsts[of] + np.arange(len(of)) - (np.cumsum(tiles) - tiles)[of]) * rows
    slot, start, stop = slots[of], np.maximum(starts[of], at), np.minimum(stops[of], at + rows)
    first = np.searchsorted(start, ALIGNED * np.arange(len(of)))
    goes_on = (slot[1:] == slot[:-1]) & (start[1:] == stop[:-1]) & (start[1:] % ALIGNED > 0)
    ends = np.append(np.flatnonzero(~goes_on), len(of) - 1)
    last = ends[np.searchsorted(ends, np.arange(len(of)))]
    return np.stack([slot, start, stop - start, first, stop[last] - start, last + 1]).astype(np.int32)

"""Adapters and rows as kernels see them: a table of addresses on the device, and tiles of one adapter's rows.

Knows no kernel. `grouped_lora` fills tables for training passes, `adapter_slots` for captured graphs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from torch import Tensor

ALIGNED = 128  # rows: no tile crosses a multiple of it


@dataclass(frozen=True)
class AdapterTable:
    """Addresses of the matrices in each slot: A's in a site's `column`, each part's Bᵀ in those after it.

    `invariant`: a row's result does not depend on other rows, and gradients are summed in a fixed order where
    an adapter's rows are contiguous. `vectors`: every rank is a multiple of 8, so kernels load 16 bytes of u.
    """

    addresses: Tensor  # int64 [slots, columns]; column 0 is the rank; 0 where there is no matrix
    scales: Tensor  # float32 [slots]
    widest: int  # the largest rank
    invariant: bool = False
    vectors: bool = False


class RowTiles(NamedTuple):
    """Rows start:start+count of each tile belong to one slot; a tile with `count` 0 does nothing."""

    cells: Tensor  # int32 [6, tiles]: slots, starts, counts, and what `cut_tiles` adds
    rows: int  # of a whole tile


class TableSite(NamedTuple):
    """A site's first column in the table and its sizes."""

    column: int
    in_features: int
    outs: Sequence[int]


class SiteAdapters(NamedTuple):
    """The adapters of a step's rows at one site."""

    table: AdapterTable
    tiles: RowTiles
    site: TableSite


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


def whole_segments(segments: Sequence[tuple[int, int, int]]) -> np.ndarray:
    """Each of the segments (slot, start, stop) as one tile: int32 [3, segments]."""
    slots, starts, stops = np.array(segments, np.int32).reshape(-1, 3).T
    return np.stack([slots, starts, stops - starts])

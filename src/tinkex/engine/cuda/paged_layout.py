"""A step's tokens as the paged kernels read them: positions, slots, tiles of queries, and a list of pages.

Computed on whole arrays, since a step may have thousands of tiles. Knows no tensors.

Shapes: T tokens of the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np

from tinkex.engine.torch.kv import PAGE, TokenSpan


class PagedLayout(NamedTuple):
    """All int32, one piece after the other.

    The last row of `tiles` says where in `pages` their sequence begins: the page table is one list, not a
    table as wide as the longest sequence. Kernels read it as rows of one page.
    """

    positions: np.ndarray  # [T]
    slots: np.ndarray  # [T]
    tiles: np.ndarray  # [4, tiles]: first row, how many, position of the first, first page
    pages: np.ndarray
    tile: int  # tokens of a whole tile


def layout_of(pieces: Sequence[TokenSpan], tile: int) -> PagedLayout:
    """The layout of `pieces` in tiles of up to `tile` tokens of one piece."""
    new, start, held = np.array([(p.new, p.start, len(p.pages)) for p in pieces]).T
    pages = np.fromiter(chain.from_iterable(p.pages for p in pieces), np.int32, held.sum())
    first_row, first_page = np.cumsum(new) - new, np.cumsum(held) - held
    positions = np.arange(new.sum()) + np.repeat(start - first_row, new)
    slots = pages[positions // PAGE + np.repeat(first_page, new)] * PAGE + positions % PAGE
    tiles = -(-new // tile)
    of = np.repeat(np.arange(len(pieces)), tiles)
    done = tile * (np.arange(len(of)) - (np.cumsum(tiles) - tiles)[of])
    cells = first_row[of] + done, np.minimum(tile, new[of] - done), start[of] + done, first_page[of]
    return PagedLayout(
        positions.astype(np.int32), slots.astype(np.int32), np.stack(cells).astype(np.int32), pages, tile
    )

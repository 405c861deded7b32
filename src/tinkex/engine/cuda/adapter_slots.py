"""Adapters in the slots of a table that captured steps read: whose matrices are where, and whose rows.

The table never moves, so that a graph serves whichever adapters were seated last. What a graph depends on is
rounded up, so that few graphs serve all. Knows nothing of sequences or of graphs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from tinkex.engine.cuda import fused_projection as adapted
from tinkex.engine.cuda import grouped_lora as grouped
from tinkex.engine.cuda import lora_kernels as kernel
from tinkex.engine.cuda.attention_hooks import UNCUT
from tinkex.engine.torch.adapters import Adapter
from tinkex.engine.torch.hooks import Site
from tinkex.engine.torch.model import Decoder
from tinkex.engine.torch.upload import fill


def _sizes(decoder: Decoder) -> list[int]:
    """The numbers of each weight but the head's."""
    sites = decoder.sites().items()
    return [i * sum(p.out_features for p in parts) for site, (i, parts) in sites if site.group != "unembed"]


def in_order(decoder: Decoder) -> bool:
    """Whether captured steps have a trainer's bits: all weights are large, and no product has a bias.

    An invariant decoder has them by other means.
    """
    config = decoder.config
    other = config.experts is not None or config.qkv_bias or config.o_bias or config.mlp_bias
    return not (decoder.backend.invariant or other) and min(_sizes(decoder)) > adapted.LARGEST


class SlotTiles(NamedTuple):
    """Tiles of rows of one adapter each: `kernel.RowTiles` on the host, and what is true of all ranks."""

    cells: np.ndarray  # int32 [6, tiles]
    rows: int
    rank: int  # the widest, rounded up
    whole: bool  # each is a multiple of 8


class AdapterSlots:
    """The table, and who has which slot."""

    def __init__(self, decoder: Decoder, capacity: int) -> None:
        device, columns = decoder.unembed_weight.device, grouped.column_of(Site(decoder.config.layers, "qkv"))
        self._dtype, self._invariant = decoder.unembed_weight.dtype, decoder.backend.invariant
        self._none = capacity  # the slot of rows without an adapter: its rank and addresses stay 0
        self._addresses = torch.zeros(capacity + 1, columns, dtype=torch.int64, device=device)
        self._scales = torch.zeros(capacity + 1, dtype=torch.float32, device=device)
        self._slots: dict[Adapter, int] = {}
        self._in_order = in_order(decoder)
        self.least = UNCUT if self._in_order else 0  # keys of a split of a token's attention
        self._most = adapted.MOST if max(_sizes(decoder)) <= adapted.LARGEST else adapted.MOST_OF_LARGER
        if decoder.backend.invariant:
            self._most = 0

    def table(self, rank: int, whole: bool) -> kernel.AdapterTable:
        """Where the kernels look adapters up, `rank` and `whole` being as `seat` said."""
        return kernel.AdapterTable(self._addresses, self._scales, rank, self._invariant, whole)

    def seat(self, segments: Sequence[tuple[Adapter | None, int, int]]) -> SlotTiles:
        """Have the adapters of `segments` in the table, at least one; (adapter, first row, past the last).

        The tiles hold every row.
        """
        used = list(dict.fromkeys(adapter for adapter, _, _ in segments if adapter is not None))
        if any(adapter not in self._slots for adapter in used):
            self._name(used)
        places = [(self._none if a is None else self._slots[a], start, stop) for a, start, stop in segments]
        total = segments[-1][2]
        alone = len(used) == 1 and total <= self._most
        rows = kernel.tile_rows(total // len(places))
        if alone:
            rows = adapted.MOST_OF_LARGER if self._in_order else adapted.tile_rows(total)
        tiles = kernel.cut_tiles(places, rows)
        cells = np.zeros((6, round_up(tiles.shape[1])), np.int32)
        cells[:, : tiles.shape[1]] = tiles
        cells[3, tiles.shape[1] :] = tiles.shape[1]  # further rows have no tile
        ranks = [adapter.lora.rank for adapter in self._slots]
        return SlotTiles(cells, rows, round_up(max(ranks)), all(rank % 8 == 0 for rank in ranks))

    def _name(self, adapters: list[Adapter]) -> None:
        """Fill the table anew: whole rows, so that nothing of a slot's last owner stays."""
        self._slots = {adapter: slot for slot, adapter in enumerate(adapters)}
        flats = [adapter.flat_as(self._dtype) for adapter in adapters]
        rows = grouped.table_rows(adapters, flats, columns=self._addresses.shape[1])
        fill(self._addresses[: len(adapters)], rows)
        fill(self._scales[: len(adapters)], np.array([a.scale for a in adapters], np.float32))


def round_up(number: int) -> int:
    """The next power of two."""
    return 1 << (number - 1).bit_length()

"""Adapters in the slots of a device-side table that captured graphs read.

The table never moves, so one graph serves whichever adapters were placed last. Sizes that a graph depends on
are rounded up, so that few graphs serve all batches. Knows nothing of sequences or of graphs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from tinkex.engine.cuda import fused_projection as fused
from tinkex.engine.cuda import grouped_lora as grouped
from tinkex.engine.cuda.adapter_table import AdapterTable, cut_tiles, tile_rows
from tinkex.engine.cuda.attention_hooks import MIN_SPLIT_KEYS
from tinkex.engine.cuda.sizes import power_of_2
from tinkex.engine.torch.adapters import Adapter
from tinkex.engine.torch.hooks import Site
from tinkex.engine.torch.models.decoder import Decoder
from tinkex.engine.torch.upload import fill


def _sizes(decoder: Decoder) -> list[int]:
    """The elements of each weight but the head's."""
    sites = decoder.sites().items()
    return [i * sum(p.out_features for p in parts) for site, (i, parts) in sites if site.group != "unembed"]


def matches_trainer(decoder: Decoder) -> bool:
    """Whether captured steps are bitwise identical to the trainer: all weights are large, none has a bias.

    An invariant decoder is so by other means.
    """
    config = decoder.config
    other = config.experts is not None or config.qkv_bias or config.o_bias or config.mlp_bias
    return not (decoder.backend.invariant or other) and min(_sizes(decoder)) > fused.LARGE


class SlotTiles(NamedTuple):
    """`RowTiles` on the host, and what holds for all ranks."""

    cells: np.ndarray  # int32 [6, tiles]
    rows: int
    rank: int  # the widest, rounded up
    vectors: bool  # every rank is a multiple of 8


class AdapterSlots:
    """The table, and which adapter has which slot."""

    def __init__(self, decoder: Decoder, capacity: int) -> None:
        device, columns = decoder.unembed_weight.device, grouped.column_of(Site(decoder.config.layers, "qkv"))
        self._dtype, self._invariant = decoder.unembed_weight.dtype, decoder.backend.invariant
        self._none = capacity  # the slot of rows without an adapter: its rank and addresses stay 0
        self._addresses = torch.zeros(capacity + 1, columns, dtype=torch.int64, device=device)
        self._scales = torch.zeros(capacity + 1, dtype=torch.float32, device=device)
        self._slots: dict[Adapter, int] = {}
        self._matches_trainer = matches_trainer(decoder)
        self.min_split_keys = MIN_SPLIT_KEYS if self._matches_trainer else 0
        self._max_fused_rows = fused.MAX_ROWS if max(_sizes(decoder)) <= fused.LARGE else fused.MAX_ROWS_LARGE
        if decoder.backend.invariant:
            self._max_fused_rows = 0

    def table(self, rank: int, vectors: bool) -> AdapterTable:
        """The table for kernels; `rank` and `vectors` are those that `place` returned."""
        return AdapterTable(self._addresses, self._scales, rank, self._invariant, vectors)

    def place(self, segments: Sequence[tuple[Adapter | None, int, int]]) -> SlotTiles:
        """Put the adapters of `segments` (adapter, first row, past the last) into the table.

        At least one is needed. The tiles cover every row.
        """
        used = list(dict.fromkeys(adapter for adapter, _, _ in segments if adapter is not None))
        if any(adapter not in self._slots for adapter in used):
            self._fill(used)
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
        return SlotTiles(cells, rows, power_of_2(max(ranks)), all(rank % 8 == 0 for rank in ranks))

    def _fill(self, adapters: list[Adapter]) -> None:
        """Write whole rows of the table, so that nothing of a slot's last adapter stays."""
        self._slots = {adapter: slot for slot, adapter in enumerate(adapters)}
        flats = [adapter.flat_as(self._dtype) for adapter in adapters]
        rows = grouped.table_rows(adapters, flats, columns=self._addresses.shape[1])
        fill(self._addresses[: len(adapters)], rows)
        fill(self._scales[: len(adapters)], np.array([a.scale for a in adapters], np.float32))

"""The decoder's part of prefill and mixed steps as captured CUDA graphs.

Serves what `DecodePipeline` does not: prompts, chunks of prompts, single tokens beside them, and requests
with top-k or top-p. Everything that differs between steps lies in tensors that never move, so one graph
serves every step of about its size, and the host launches one graph instead of hundreds of kernels. A step of
a new size runs eagerly the first time and is captured the second, unless a larger graph serves it. Knows
tokens, pages and adapters; nothing of requests or of logits.

Shapes: T tokens of the step, D width.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from tinkex.engine.cuda import grouped_lora as grouped
from tinkex.engine.cuda import paged_attention as paged
from tinkex.engine.cuda.adapter_slots import AdapterSlots, SlotTiles
from tinkex.engine.cuda.adapter_table import AdapterTable, RowTiles
from tinkex.engine.cuda.attention_hooks import KernelAttend, splits_for, tile_tokens
from tinkex.engine.cuda.paged_layout import PagedLayout, layout_of
from tinkex.engine.cuda.sizes import power_of_2
from tinkex.engine.torch.continuous_batch import StepLimits
from tinkex.engine.torch.hooks import LoraHook
from tinkex.engine.torch.kv import PAGE, KVCache, TokenSpan
from tinkex.engine.torch.lora import LoraBatch
from tinkex.engine.torch.models.decoder import Decoder
from tinkex.engine.torch.upload import fill

log = logging.getLogger(__name__)

_HOST_FLOPS = 2.4e13  # of a large GPU in the time that the host takes to launch a step (40 ms)
_GRAPHS = 64  # kept, least recently used first out
_PATIENCE = 2  # steps of a size that a larger graph serves before the size gets its own
_PADDED = 2  # times the rows of a step: with more padding, launching eagerly is faster

Numbers = TypeVar("Numbers", Tensor, np.ndarray)


class PrefillGraphKey(NamedTuple):
    """What a prefill graph was captured for."""

    rows: int
    tile: int  # tokens of a whole tile of queries
    tiles: int
    splits: int  # of their keys
    cells: int = 0  # tiles of `lora_kernels.RowTiles`; 0: no adapter
    cell_rows: int = 0
    rank: int = 0  # the widest adapter's
    vectors: bool = False  # every rank is a multiple of 8

    def serves(self, other: PrefillGraphKey) -> bool:
        """Whether this graph can serve a step of `other`, with padding rows and tiles."""
        same = (self.tile, self.splits, self.cell_rows) == (other.tile, other.splits, other.cell_rows)
        mine, others = ((key.rows, key.tiles, key.cells, key.rank) for key in (self, other))
        fits = all(a >= b for a, b in zip(mine, others, strict=True))
        return same and fits and self.vectors <= other.vectors


def size(tokens: int) -> int:
    """The rows of the graph that serves so many tokens: beyond 512 at most an eighth more."""
    step = max(64, 1 << (tokens - 1).bit_length() >> 4)
    return -(-tokens // step) * step


def largest(parameters: int, tokens: int) -> int:
    """The rows of the largest graph worth having where steps have up to `tokens`.

    Larger steps keep the device busy while the host launches them; padding would cost time.
    """
    return min(size(tokens), int(_HOST_FLOPS / (2 * parameters)))


def cut(orders: Numbers, key: PrefillGraphKey) -> list[Numbers]:
    """Views of a step's orders: tokens, positions, slots, tiles, cells [rows, columns] each, and pages."""
    parts, stop = [], 0
    for rows, columns in ((1, key.rows), (1, key.rows), (1, key.rows), (4, key.tiles), (6, key.cells)):
        start, stop = stop, stop + -(-rows * columns // 4) * 4  # each begins at a multiple of 16 bytes
        parts.append(orders[start : start + rows * columns].reshape(rows, columns))
    return [*parts, orders[stop:]]


def write_orders(
    orders: np.ndarray,
    key: PrefillGraphKey,
    tokens: np.ndarray,
    layout: PagedLayout,
    placed: SlotTiles | None,
) -> int:
    """Write a step into `orders`; returns the length used. Rows and tiles beyond the step do nothing."""
    at_tokens, positions, slots, tiles, cells, pages = cut(orders, key)
    used = len(orders) - len(pages) + len(layout.pages)
    assert used <= len(orders)
    orders[: len(orders) - len(pages)] = 0
    slots.fill(-1)
    at_tokens[0, : len(tokens)] = tokens
    positions[0, : len(tokens)] = layout.positions
    slots[0, : len(tokens)] = layout.slots
    tiles[:, : layout.tiles.shape[1]] = layout.tiles
    if placed is not None:
        cells[:, : placed.cells.shape[1]] = placed.cells
        cells[3, placed.cells.shape[1] :] = np.count_nonzero(placed.cells[2])  # padding has no tile
    pages[: len(layout.pages)] = layout.pages
    return used


class CapturedGraph(Protocol):
    """A captured step."""

    def replay(self) -> None: ...


class Captures(Protocol):
    """What `DecodeGraphs` provides: the memory pool that all graphs share, and the LoRA hook."""

    def capture(self, step: Callable[[], None]) -> CapturedGraph: ...

    def hook(self, table: AdapterTable, tiles: RowTiles) -> LoraHook: ...


class CapturedPrefill:
    """Captured steps of up to `rows` tokens."""

    def __init__(self, decoder: Decoder, cache: KVCache, limits: StepLimits, captures: Captures) -> None:
        self._decoder, self._cache, self._captures = decoder, cache, captures
        self._sequences = limits.sequences
        weight, parameters = decoder.unembed_weight, sum(p.numel() for p in decoder.parameters())
        self.rows = largest(parameters, limits.tokens)
        self._slots = AdapterSlots(decoder, limits.sequences)
        self.min_split_keys = self._slots.min_split_keys
        # at most one tile of either kind for 16 rows and one for each sequence, before rounding up
        room = 8 * self.rows + (16 + -(-limits.context // PAGE)) * limits.sequences
        self._host = np.zeros(room, np.int32)
        self._orders = torch.zeros(room, dtype=torch.int32, device=weight.device)
        self._hidden = torch.zeros(self.rows, decoder.config.width, dtype=weight.dtype, device=weight.device)
        self._captured: OrderedDict[PrefillGraphKey, CapturedGraph] = OrderedDict()
        self._asked: Counter[PrefillGraphKey] = Counter()
        self._warm: set[PrefillGraphKey] = set()
        self._refused: set[PrefillGraphKey] = set()
        self.replayed = 0  # steps that a graph has served

    @torch.inference_mode()
    def __call__(
        self, tokens: np.ndarray, pieces: Sequence[TokenSpan], lora: LoraBatch | None
    ) -> Tensor | None:
        """The final hidden states [T, D] of the pieces' tokens, valid until the next call.

        None if no graph can serve them: too many tokens, or adapters that the kernels cannot read.
        """
        if size(len(tokens)) > self.rows or (lora is not None and not _readable(lora)):
            return None
        layout = layout_of(pieces, tile_tokens(pieces, self._decoder.backend.invariant))
        placed = None if lora is None else self._slots.place(lora.segments)
        key = self._choose(self._key(len(tokens), len(pieces), layout.tile, placed))
        used = write_orders(self._host, key, tokens, layout, placed)
        fill(self._orders[:used], self._host[:used])
        self._run(key)
        return self._hidden[: len(tokens)]

    def _key(self, tokens: int, pieces: int, tile: int, placed: SlotTiles | None) -> PrefillGraphKey:
        rows = size(tokens)
        tiles = power_of_2(pieces) if tile == 1 else rows // tile + min(rows, self._sequences)
        key = PrefillGraphKey(rows, tile, tiles, splits_for(pieces * self._cache.heads, tile))
        if placed is None:
            return key
        cells, cell_rows, rank, vectors = placed
        return key._replace(cells=cells.shape[1], cell_rows=cell_rows, rank=rank, vectors=vectors)

    def _choose(self, key: PrefillGraphKey) -> PrefillGraphKey:
        """The graph to use: the key's own or, the first few times, a larger one that was captured already."""
        if key in self._captured:
            return key
        self._asked[key] += 1
        if key not in self._refused and self._asked[key] > _PATIENCE:
            return key
        larger = (one for one in self._captured if one.serves(key) and one.rows <= _PADDED * key.rows)
        return min(larger, default=key)

    def _run(self, key: PrefillGraphKey) -> None:
        graph = self._captured.get(key)
        if graph is None and key in self._warm:
            graph = self._capture(key)
        if graph is None:
            self._step(key)
            if key not in self._refused:
                self._warm.add(key)
            return
        self._captured.move_to_end(key)
        graph.replay()
        self.replayed += 1

    def _capture(self, key: PrefillGraphKey) -> CapturedGraph | None:
        """Capture a step that has run before. None, and the key is never tried again, if that fails."""
        try:
            graph = self._captures.capture(lambda: self._step(key))
        except RuntimeError as error:  # most likely out of memory
            log.warning("a step of %d rows could not be captured: %s", key.rows, error)
            self._warm.discard(key)
            self._refused.add(key)
            return None
        self._captured[key] = graph
        if len(self._captured) > _GRAPHS:
            self._captured.popitem(last=False)  # capturing has synchronised: no graph is running
        return graph

    def _step(self, key: PrefillGraphKey) -> None:
        tokens, positions, slots, tiles, cells, pages = cut(self._orders, key)
        queries = paged.Queries(tiles, pages[:, None], key.tile, key.splits, self.min_split_keys)
        attend = KernelAttend(self._cache, self._decoder.config.windows, queries, slots[0])
        lora = None
        if key.cells:
            lora = self._captures.hook(
                self._slots.table(key.rank, key.vectors), RowTiles(cells, key.cell_rows)
            )
        self._hidden[: key.rows].copy_(self._decoder(tokens[0], positions[0], attend, lora))


def _readable(lora: LoraBatch) -> bool:
    return grouped.usable(list({adapter for adapter, _, _ in lora.segments}))

"""The decoder's part of a step as CUDA graphs, for whatever the pipeline does not decode ahead.

Prompts, their chunks, and single tokens beside them or whose draws are cut: any mix that `Batch` plans. All
that differs from step to step is in tensors that never move, so a graph serves every plan of about its size,
and the host launches one thing in place of hundreds. Where no graph is large enough yet, steps of a size run
as they are the first time, as they must before they can be captured, and are captured the second.
Knows tokens, pages and adapters; nothing of requests, of logits or of how a graph is made.

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
from tinkex.engine.cuda import lora_kernels as lora_kernel
from tinkex.engine.cuda import paged_attention as paged
from tinkex.engine.cuda.adapter_slots import AdapterSlots, SlotTiles, round_up
from tinkex.engine.cuda.attention_hooks import KernelAttend, splits_for, tile_tokens
from tinkex.engine.cuda.paged_layout import Layout, layout_of
from tinkex.engine.torch.hooks import LoraHook
from tinkex.engine.torch.kv import PAGE, KVCache, Piece
from tinkex.engine.torch.lora import LoraBatch
from tinkex.engine.torch.model import Decoder
from tinkex.engine.torch.sampler import Limits
from tinkex.engine.torch.upload import fill

log = logging.getLogger(__name__)

_HOST_FLOPS = 2.4e13  # what a large GPU does in the time that the host takes to launch a step (40 ms)
_GRAPHS = 64  # kept, the last used ones
_PATIENCE = 2  # steps of a size that a larger graph does before the size gets its own
_PADDED = 2  # times the rows of a step: where a graph has more, launching is quicker

Numbers = TypeVar("Numbers", Tensor, np.ndarray)


class PrefillGraphKey(NamedTuple):
    """What a graph was captured for."""

    rows: int
    tile: int  # tokens of a whole tile of queries
    tiles: int
    splits: int  # of their keys
    cells: int = 0  # tiles of adapters' rows; 0: the base model alone
    cell_rows: int = 0
    rank: int = 0  # the widest adapter's
    whole: bool = False  # whether every rank is a multiple of 8

    def serves(self, other: PrefillGraphKey) -> bool:
        """Whether this graph can do a step of `other`'s, if with more rows and tiles that do nothing."""
        same = (self.tile, self.splits, self.cell_rows) == (other.tile, other.splits, other.cell_rows)
        mine, others = ((key.rows, key.tiles, key.cells, key.rank) for key in (self, other))
        return same and self.whole <= other.whole and all(a >= b for a, b in zip(mine, others, strict=True))


def size(tokens: int) -> int:
    """The rows of the graph that serves so many tokens: beyond 512 at most an eighth more than there are."""
    step = max(64, 1 << (tokens - 1).bit_length() >> 4)
    return -(-tokens // step) * step


def largest(parameters: int, tokens: int) -> int:
    """The rows of the largest graph worth having where steps have up to `tokens`.

    Larger steps keep the device busy for as long as the host takes to launch them: padding would cost time.
    """
    return min(size(tokens), int(_HOST_FLOPS / (2 * parameters)))


def cut(orders: Numbers, key: PrefillGraphKey) -> list[Numbers]:
    """The views of a step's orders: tokens, positions, slots, tiles, cells, each by rows, and the pages."""
    parts, stop = [], 0
    for rows, columns in ((1, key.rows), (1, key.rows), (1, key.rows), (4, key.tiles), (6, key.cells)):
        start, stop = stop, stop + -(-rows * columns // 4) * 4  # each begins at a multiple of 16 bytes
        parts.append(orders[start : start + rows * columns].reshape(rows, columns))
    return [*parts, orders[stop:]]


def write_orders(
    orders: np.ndarray, key: PrefillGraphKey, tokens: np.ndarray, layout: Layout, seated: SlotTiles | None
) -> int:
    """Write a step into `orders`; how much of that is used. Rows and tiles beyond the step's do nothing."""
    at_tokens, positions, slots, tiles, cells, pages = cut(orders, key)
    used = len(orders) - len(pages) + len(layout.pages)
    assert used <= len(orders)
    orders[: len(orders) - len(pages)] = 0
    slots.fill(-1)
    at_tokens[0, : len(tokens)] = tokens
    positions[0, : len(tokens)] = layout.positions
    slots[0, : len(tokens)] = layout.slots
    tiles[:, : layout.tiles.shape[1]] = layout.tiles
    if seated is not None:
        cells[:, : seated.cells.shape[1]] = seated.cells
        cells[3, seated.cells.shape[1] :] = np.count_nonzero(seated.cells[2])  # no tile is theirs
    pages[: len(layout.pages)] = layout.pages
    return used


class CapturedGraph(Protocol):
    """A step that was captured."""

    def replay(self) -> None: ...


class Captures(Protocol):
    """What `decode.DecodeGraphs` does for us."""

    def capture(self, step: Callable[[], None]) -> CapturedGraph: ...

    def hook(self, table: lora_kernel.AdapterTable, tiles: lora_kernel.RowTiles) -> LoraHook: ...


class CapturedPrefill:
    """Captured steps within `limits`, by the number of their tokens."""

    def __init__(self, decoder: Decoder, cache: KVCache, limits: Limits, captures: Captures) -> None:
        self._decoder, self._cache, self._captures = decoder, cache, captures
        self._sequences = limits.sequences
        weight, parameters = decoder.unembed_weight, sum(p.numel() for p in decoder.parameters())
        self.rows = largest(parameters, limits.tokens)
        self._seats = AdapterSlots(decoder, limits.sequences)
        self.least = self._seats.least
        # tiles of either kind are at most one for 16 rows and one for each sequence, before they are rounded
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
    def __call__(self, tokens: np.ndarray, pieces: Sequence[Piece], lora: LoraBatch | None) -> Tensor | None:
        """The final hidden states [T, D] of the pieces' tokens, good until the next call.

        None if no graph can serve them: too many, or adapters that the kernels cannot read.
        """
        if size(len(tokens)) > self.rows or (lora is not None and not _readable(lora)):
            return None
        layout = layout_of(pieces, tile_tokens(pieces, self._decoder.backend.invariant))
        seated = None if lora is None else self._seats.seat(lora.segments)
        key = self._choose(self._key(len(tokens), len(pieces), layout.tile, seated))
        used = write_orders(self._host, key, tokens, layout, seated)
        fill(self._orders[:used], self._host[:used])
        self._run(key)
        return self._hidden[: len(tokens)]

    def _key(self, tokens: int, pieces: int, tile: int, seated: SlotTiles | None) -> PrefillGraphKey:
        rows = size(tokens)
        tiles = round_up(pieces) if tile == 1 else rows // tile + min(rows, self._sequences)
        key = PrefillGraphKey(rows, tile, tiles, splits_for(pieces * self._cache.heads, tile))
        if seated is None:
            return key
        cells, cell_rows, rank, whole = seated
        return key._replace(cells=cells.shape[1], cell_rows=cell_rows, rank=rank, whole=whole)

    def _choose(self, key: PrefillGraphKey) -> PrefillGraphKey:
        """Whose graph to take: the key's own or, for the first few times, a larger one's that is there."""
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
        """The graph of a step that has run before; None, now and for good, if it cannot be had."""
        try:
            graph = self._captures.capture(lambda: self._step(key))
        except RuntimeError as error:  # out of memory, most likely
            log.warning("a step of %d rows could not be captured: %s", key.rows, error)
            self._warm.discard(key)
            self._refused.add(key)
            return None
        self._captured[key] = graph
        if len(self._captured) > _GRAPHS:
            self._captured.popitem(last=False)  # capturing has waited for the device: none of them runs
        return graph

    def _step(self, key: PrefillGraphKey) -> None:
        tokens, positions, slots, tiles, cells, pages = cut(self._orders, key)
        queries = paged.Queries(tiles, pages[:, None], key.tile, key.splits, self.least)
        attend = KernelAttend(self._cache, self._decoder.config.windows, queries, slots[0])
        lora = None
        if key.cells:
            lora = self._captures.hook(
                self._seats.table(key.rank, key.whole), lora_kernel.RowTiles(cells, key.cell_rows)
            )
        self._hidden[: key.rows].copy_(self._decoder(tokens[0], positions[0], attend, lora))


def _readable(lora: LoraBatch) -> bool:
    return grouped.usable(list({adapter for adapter, _, _ in lora.segments}))

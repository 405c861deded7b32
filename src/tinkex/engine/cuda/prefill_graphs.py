"""The decoder's part of prefill and mixed steps as captured CUDA graphs.

Serves what `DecodePipeline` does not: prompts, chunks of prompts, single tokens among them, and requests
with top-k or top-p. What differs between steps lies in tensors that never move, so one graph serves every
step of about its size. A new size runs eagerly first and is captured the second time, unless a larger graph
serves it.

Shapes: T tokens of the step, D width.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from tinkex.engine.cuda import paged_attention as paged
from tinkex.engine.cuda.adapter_table import usable
from tinkex.engine.cuda.attention_hooks import KernelAttend, PagedLayout, layout_of, splits_for, tile_tokens
from tinkex.engine.cuda.decode_graphs import DecodeGraphs
from tinkex.engine.cuda.delta_kernels import CHUNK, ChunkLayout, cells_of
from tinkex.engine.cuda.grouped_lora import AdapterSlots, SlotShape
from tinkex.engine.cuda.launch import power_of_2
from tinkex.engine.cuda.recurrence import KernelStates
from tinkex.engine.torch.continuous_batch import StepLimits
from tinkex.engine.torch.device_copies import fill
from tinkex.engine.torch.kv import PAGE, KVCache, TokenSpan
from tinkex.engine.torch.lora import LoraBatch
from tinkex.engine.torch.models.decoder import Decoder

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
    adapters: SlotShape = SlotShape()
    sequences: int = 0  # whose recurrent states go on; 0: the model has none

    def serves(self, other: PrefillGraphKey) -> bool:
        """Whether this graph can serve a step of `other`, with padding rows and tiles."""
        mine, theirs = self.adapters, other.adapters
        same = (self.tile, self.splits, mine.rows) == (other.tile, other.splits, theirs.rows)
        fits = self.rows >= other.rows and self.tiles >= other.tiles
        adapters_fit = mine.tiles >= theirs.tiles and mine.rank >= theirs.rank
        fits = fits and self.sequences >= other.sequences
        return (
            same and fits and adapters_fit and mine.vectors <= theirs.vectors and mine.mixed >= theirs.mixed
        )

    @property
    def chunks(self) -> int:
        """Of recurrent layers, at most."""
        return self.sequences and self.rows // CHUNK + self.sequences


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
    """Views of a step's orders, [rows, columns] each, and the pages.

    Tokens, positions, slots, tiles, cells, and of recurrent states the layout's two tensors and the slots.
    """
    parts, stop, recurrent = [], 0, ((4, key.chunks), (3, key.sequences), (1, key.sequences))
    for rows, columns in (*[(1, key.rows)] * 3, (4, key.tiles), (6, key.adapters.tiles), *recurrent):
        start, stop = stop, stop + -(-rows * columns // 4) * 4  # each begins at a multiple of 16 bytes
        parts.append(orders[start : start + rows * columns].reshape(rows, columns))
    return [*parts, orders[stop:]]


def write_orders(
    orders: np.ndarray, key: PrefillGraphKey, tokens: np.ndarray, layout: PagedLayout,
    placed: np.ndarray | None, states: Sequence[np.ndarray] = (),
) -> int:  # fmt: skip
    """Write a step into `orders`; returns the length used. Rows and tiles beyond the step do nothing.

    `states` are the cells of recurrent states, as `cut` has them.
    """
    at_tokens, positions, slots, tiles, cells, *recurrent, pages = cut(orders, key)
    used = len(orders) - len(pages) + len(layout.pages)
    assert used <= len(orders)
    orders[: len(orders) - len(pages)] = 0
    slots.fill(-1)
    at_tokens[0, : len(tokens)] = tokens
    positions[0, : len(tokens)] = layout.positions
    slots[0, : len(tokens)] = layout.slots
    tiles[:, : layout.tiles.shape[1]] = layout.tiles
    if placed is not None:
        cells[:, : placed.shape[1]] = placed
        cells[3, placed.shape[1] :] = np.count_nonzero(placed[2])  # padding has no tile
    for part, given in zip(recurrent, states, strict=False):
        part[:, : given.shape[1]] = given
    pages[: len(layout.pages)] = layout.pages
    return used


class CapturedPrefill:
    """Captured steps of up to `rows` tokens."""

    def __init__(self, decoder: Decoder, cache: KVCache, limits: StepLimits, graphs: DecodeGraphs) -> None:
        self._decoder, self._cache, self._graphs = decoder, cache, graphs
        self._sequences = limits.sequences
        weight, parameters = decoder.unembed_weight, decoder.parameter_count
        self.rows = largest(parameters, limits.tokens)
        self._slots = AdapterSlots(decoder, limits.sequences)
        self.min_split_keys = self._slots.min_split_keys
        # at most one tile of either kind for 16 rows and one for each sequence, before rounding up
        room = 8 * self.rows + (32 + -(-limits.context // PAGE)) * limits.sequences
        self._host = np.zeros(room, np.int32)
        self._orders = torch.zeros(room, dtype=torch.int32, device=weight.device)
        self._hidden = torch.zeros(self.rows, decoder.config.width, dtype=weight.dtype, device=weight.device)
        self._captured: OrderedDict[PrefillGraphKey, torch.cuda.CUDAGraph] = OrderedDict()
        self._asked: Counter[PrefillGraphKey] = Counter()
        self._warm: set[PrefillGraphKey] = set()
        self._refused: set[PrefillGraphKey] = set()
        self.replayed = 0  # steps that a graph has served

    @torch.inference_mode()
    def __call__(
        self,
        tokens: np.ndarray,
        pieces: Sequence[TokenSpan],
        lora: LoraBatch | None,
        states: Sequence[int] = (),
    ) -> Tensor | None:
        """The final hidden states [T, D] of the pieces' tokens, valid until the next call.

        `states` are the slots of the pieces' recurrent states.
        None if no graph can serve them: too many tokens, or adapters that the kernels cannot read.
        """
        if size(len(tokens)) > self.rows or not (lora is None or usable({a for a, _, _ in lora.segments})):
            return None
        layout = layout_of(pieces, tile_tokens(pieces, self._decoder.backend.invariant))
        placed, shape = (None, SlotShape()) if lora is None else self._slots.place(lora.segments)
        rows, tile = size(len(tokens)), layout.tile
        tiles = power_of_2(len(pieces)) if tile == 1 else rows // tile + min(rows, self._sequences)
        splits = splits_for(len(pieces) * self._cache.heads, tile)
        recurrent, sequences = (), 0
        if states:
            *laid, order = cells_of([piece.new for piece in pieces])
            recurrent, sequences = [*laid, np.array(states)[None, order]], power_of_2(len(pieces))
        key = self._choose(PrefillGraphKey(rows, tile, tiles, splits, shape, sequences))
        used = write_orders(self._host, key, tokens, layout, placed, recurrent)
        fill(self._orders[:used], self._host[:used])
        self._run(key)
        return self._hidden[: len(tokens)]

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

    def _capture(self, key: PrefillGraphKey) -> torch.cuda.CUDAGraph | None:
        """Capture a step that has run before. None, and the key is never tried again, if that fails."""
        try:
            graph = self._graphs.capture(lambda: self._step(key))
        except RuntimeError as error:  # most likely out of memory
            if self._decoder.shards is not None:
                raise  # the other ranks replay theirs
            log.warning("a step of %d rows could not be captured: %s", key.rows, error)
            self._warm.discard(key)
            self._refused.add(key)
            return None
        self._captured[key] = graph
        if len(self._captured) > _GRAPHS:
            self._captured.popitem(last=False)  # capturing has synchronised: no graph is running
        return graph

    def _step(self, key: PrefillGraphKey) -> None:
        tokens, positions, slots, tiles, cells, chunks, sequences, held, pages = cut(self._orders, key)
        queries = paged.Queries(tiles, pages[:, None], key.tile, key.splits, self.min_split_keys)
        attend = KernelAttend(self._cache, self._decoder.config.windows, queries, slots[0])
        lora = self._graphs.hook(self._slots, key.adapters, cells, key.rows)
        states = (
            [KernelStates(ChunkLayout(chunks, sequences), self._graphs.states, held[0])]
            if key.sequences
            else ()
        )
        hidden = self._decoder(tokens[0], positions[0], attend, lora, states=states)
        self._hidden[: key.rows].copy_(hidden)

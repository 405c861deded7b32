"""Decode steps as captured CUDA graphs, launched one step ahead of the host.

`DecodeGraphs` captures a whole step (decoder, adapters, attention, drawing) for every batch size that occurs.
`DecodePipeline` launches the next step before the last step's tokens have reached the host: the device reads
them from its own memory, and tokens computed past a stop are dropped. A row with rules (cuts, penalties,
bias, a grammar, a list of likely tokens) is drawn again outside the graph, by the code of plain steps, once
its last token has reached the host. The host does so while the device computes the step's logits.

Shapes: B rows of a step, N rows with rules, D width, V padded vocabulary.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from collections.abc import Sequence as Several
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tinkex.engine.cuda import fused_projection as fused
from tinkex.engine.cuda import grouped_lora as grouped
from tinkex.engine.cuda import lora_kernels, narrow_projection, packed_weights, token_kernels
from tinkex.engine.cuda import paged_attention as paged
from tinkex.engine.cuda.adapter_table import AdapterTable, RowTiles, SiteAdapters, site_adapters, usable
from tinkex.engine.cuda.attention_hooks import KernelAttend, splits_for, tile_tokens
from tinkex.engine.cuda.deferred_expand import MAX_DEFERRED, DeferredExpand
from tinkex.engine.cuda.expert_routing import slots_of
from tinkex.engine.cuda.recurrence import KernelStates
from tinkex.engine.rng import stream_keys
from tinkex.engine.torch.backend import PlacedRows, StepLead
from tinkex.engine.torch.device_copies import fill, from_device, to_device
from tinkex.engine.torch.hooks import Frozen, LoraHook, PartialProjection, Site, Sites
from tinkex.engine.torch.kv import PAGE, KVCache
from tinkex.engine.torch.models.decoder import Decoder
from tinkex.engine.torch.next_tokens import draw_by_rules, listed
from tinkex.engine.torch.sequences import Landed, RunningRequest, RunningSequence, Top
from tinkex.engine.torch.states import StatePool

# As measured on an H200:
_SOME = 64  # rows up to which a launch costs more than reading and writing the result once more
_MANY = 512  # rows from which on `grouped_lora.product_with` is faster
_HEAD = 1 << 16  # out-features that only an unembedding has
_DEFERRED = ("qkv", "gate_up", "shared_gate_up")  # what reads them can add the up-projection
_PATIENCE = 16  # steps after which too large a graph has cost as much as capturing a smaller one
_RING = 4  # pinned buffers: more than there are steps in flight


def bucket(rows: int) -> int:
    """The rows of the graph that serves so many: a power of two, or beyond 32 a multiple of 32."""
    return -(-rows // 32) * 32 if rows > 32 else 1 << (rows - 1).bit_length()


class DecodeGraphKey(NamedTuple):
    """What a decode graph was captured for."""

    rows: int
    adapters: grouped.SlotShape = grouped.SlotShape()
    keeps_logits: bool = False  # in `DecodeGraphs.logits`, for rows with rules


class Results(NamedTuple):
    """Tokens and logprobs (float32) of every row in one tensor, so that one copy brings both to the host."""

    whole: Tensor  # int64 [2, rows]; half of the second row is used
    tokens: Tensor
    logprobs: Tensor

    @classmethod
    def of(cls, whole: Tensor) -> Results:
        tokens, rest = whole
        return cls(whole, tokens, rest.view(torch.float32)[: len(tokens)])


class CapturedLora(LoraHook):
    """The `LoraHook` inside a graph: it applies the adapters that the table holds when it is replayed."""

    def __init__(
        self, sites: Sites, table: AdapterTable, tiles: RowTiles, rows: int, beside: torch.cuda.Stream
    ) -> None:
        self._sites, self._table, self._tiles, self._rows, self._beside = sites, table, tiles, rows, beside

    def site(self, site: Site) -> SiteAdapters:
        in_features, parts = self._sites[site]
        outs = [part.out_features for part in parts]
        return site_adapters(self._table, self._tiles, site, in_features, outs)

    @cached_property
    def slots_T(self) -> Tensor:
        """int32: each row's slot in the table."""
        return slots_of(self._tiles.cells, self._rows, self._tiles.rows)

    def project(self, site: Site, x: Tensor, frozen: Frozen) -> Tensor | PartialProjection:
        at, rows = self.site(site), x.shape[0]
        if not isinstance(frozen.weight, Tensor):
            if packed_weights.suits(frozen.weight.whole) and rows <= packed_weights.MAX_ROWS:
                return self._packed(at, site, x, frozen)
            frozen = frozen._replace(weight=packed_weights.dense(frozen.weight, x.dtype))
        free = frozen.bias is None and not self._table.invariant  # sums may be ordered as is fastest
        many = rows >= _MANY or (rows > _SOME and site.group == "unembed")
        if free and many and at.width <= lora_kernels.MAX_WRITTEN:
            return grouped.product_with(x, frozen.weight, at)[0]
        if self._narrow(frozen.weight, at, rows):
            y, u = narrow_projection.product_and_shrink(x, frozen.weight, frozen.bias, at)
            return self._expanded(at, site, y, u)
        partial = free and at.width <= MAX_DEFERRED
        if partial and fused.suits(rows, frozen.weight, at):
            return fused.FusedProjection(x, frozen.weight, at)
        exact = free and fused.exact(frozen.weight, at)  # bitwise identical to the trainer: split-K as there
        if exact and fused.split_in_two(frozen.weight):
            u, splits = self._overlapped(at, x, 2, lambda: grouped.split_product(2, x, frozen.weight))
            return lora_kernels.unite(u, splits, x.dtype, at.b)
        u, y = self._overlapped(at, x, 1 if exact else None, lambda: frozen(x))
        if partial and rows > _SOME and site.group in _DEFERRED:
            return DeferredExpand(y, u, at)
        lora_kernels.expand(u, y, at.b)
        return y

    def _packed(self, at: SiteAdapters, site: Site, x: Tensor, frozen: Frozen) -> Tensor | PartialProjection:
        """With a weight in 4 or 8 bits that is dequantised in registers."""
        weight = frozen.weight.whole
        tile = packed_weights.tile_for(x.shape[0], weight)
        if not self._table.invariant and packed_weights.shrinks_inside(x.shape[0], weight):
            y, u = packed_weights.product_and_shrink(x, weight, tile, at)
        else:
            u, y = self._overlapped(at, x, tile.splits, lambda: packed_weights.product(x, weight, tile))
        if tile.splits > 1:
            y = lora_kernels.unite(u, y, x.dtype, at.b, summed=True)
            return y if frozen.bias is None else y.add_(frozen.bias)
        y = y[0] if frozen.bias is None else y[0].add_(frozen.bias)
        return self._expanded(at, site, y, u)

    def _narrow(self, weight: Tensor, at: SiteAdapters, rows: int) -> bool:
        """Whether few columns for each program are faster than what else rounds as the trainer does."""
        exact = fused.exact(weight, at) and not fused.split_in_two(weight) and len(weight) < _HEAD
        return exact and rows <= narrow_projection.MAX_ROWS and not self._table.invariant

    def _expanded(self, at: SiteAdapters, site: Site, y: Tensor, u: Tensor) -> Tensor | PartialProjection:
        """y + u·Bᵀ, by what reads it if that can."""
        if at.width <= MAX_DEFERRED and site.group in _DEFERRED:
            return DeferredExpand(y, u, at)
        lora_kernels.expand(u, y, at.b)
        return y

    def _overlapped(
        self, at: SiteAdapters, x: Tensor, splits: int | None, product: Callable[[], Tensor]
    ) -> tuple[Tensor, Tensor]:
        """u = x·Aᵀ and, on another stream at the same time, the frozen product."""
        here = torch.cuda.current_stream()
        self._beside.wait_stream(here)
        with torch.cuda.stream(self._beside):
            u = lora_kernels.shrink(x, at.a, splits, beside=True)
        y = product()
        here.wait_stream(self._beside)
        return u, y


class DecodeGraphs:
    """Captured steps over tensors that never move: the host fills `orders`, replays, and reads `results`."""

    def __init__(
        self, decoder: Decoder, cache: KVCache, capacity: int, context: int, states: StatePool | None = None
    ) -> None:
        self._decoder, self._cache, self.backend, self.states = decoder, cache, decoder.backend, states
        device = decoder.unembed_weight.device
        self.device, self.capacity, self.width = device, bucket(capacity), -(-context // PAGE)
        self.vocab = decoder.config.vocab_size

        def static(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        everywhere = torch.arange(self.width * PAGE, device=device)
        self._angles = decoder.config.rope.angles(everywhere, decoder.unembed_weight.dtype)
        self.orders = static(token_kernels.ORDERS, self.capacity)
        self.table = static(self.capacity, self.width, dtype=torch.int32)
        self.temperature = static(self.capacity, dtype=torch.float32)
        self.slots = grouped.AdapterSlots(decoder, self.capacity)
        self.results = Results.of(static(2, self.capacity))
        self._cells: dict[int, Tensor] = {}
        self._graphs: dict[DecodeGraphKey, torch.cuda.CUDAGraph] = {}
        self._key = DecodeGraphKey(1)  # of the rows that were placed last
        self._memory, self._beside = torch.cuda.graph_pool_handle(), torch.cuda.Stream(device)

    @cached_property
    def logits(self) -> Tensor:
        """[capacity, V]: the logits of the last step, if its graph keeps them."""
        weight = self._decoder.unembed_weight
        shape = self.capacity, self._decoder.config.padded_vocab
        return torch.zeros(shape, dtype=weight.dtype, device=self.device)

    def cells(self, tiles: int) -> Tensor:
        """The tensor from which graphs of so many tiles read them: int32 [6, tiles]."""
        if tiles not in self._cells:
            self._cells[tiles] = torch.zeros(6, tiles, dtype=torch.int32, device=self.device)
        return self._cells[tiles]

    def has(self, rows: int) -> bool:
        return any(key.rows == rows for key in self._graphs)

    def place(self, rows: PlacedRows) -> None:
        """Upload what stays constant from step to step."""
        count, shape = len(rows.temperature), grouped.SlotShape()
        fill(self.table[:count], rows.pages)
        fill(self.temperature[:count], rows.temperature)
        if any(rows.adapters):
            cells, shape = self.slots.place(self.backend.lora(rows.adapters, [1] * count).segments)
            fill(self.cells(shape.tiles), cells)
        self._key = DecodeGraphKey(bucket(count), shape, rows.keeps_logits)

    def launch(self, orders: Tensor) -> None:
        self.orders.copy_(orders, non_blocking=True)
        self.replay(self._key)

    def share_tokens(self) -> None:
        if self._decoder.shards is not None:
            self._decoder.shards.broadcast(self.results.tokens)

    def replay(self, key: DecodeGraphKey) -> None:
        if key not in self._graphs:
            self._graphs[key] = self._capture(key)
        self._graphs[key].replay()

    @torch.inference_mode()
    def _capture(self, key: DecodeGraphKey) -> torch.cuda.CUDAGraph:
        # Compile kernels and allocate workspaces outside the graph. No row is active, so nothing is written.
        saved = self.orders.clone(), self.results.tokens.clone()
        self.orders[3:].fill_(-1)
        for _ in range(2):
            self._step(key)
        self.orders.copy_(saved[0])
        self.results.tokens.copy_(saved[1])
        return self.capture(lambda: self._step(key))

    def capture(self, step: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """Capture `step`, which must have run before; of a rank, with its collectives.

        Graphs share one memory pool: one runs at a time, and results lie outside the pool.
        """
        shards = self._decoder.shards
        return self._record(step) if shards is None else shards.captured(step, self._record)

    def _record(self, step: Callable[[], None]) -> torch.cuda.CUDAGraph:
        torch.cuda.synchronize(self.device)
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self.device)
        collects = gc.isenabled()
        gc.disable()  # freeing a CUDA object would abort the capture
        try:
            # thread_local: other threads may use the device meanwhile
            with torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"):
                step()
        finally:
            torch.cuda.set_stream(stream)  # a failed capture leaves its own stream current
            if collects:
                gc.enable()
        return graph

    def hook(
        self, slots: grouped.AdapterSlots, shape: grouped.SlotShape, cells: Tensor, rows: int
    ) -> LoraHook | None:
        """The hook for a step to be captured, with adapters of `shape` in `slots` and in tiles of `cells`."""
        if not shape.tiles:
            return None
        tiles = RowTiles(cells, shape.rows)
        return CapturedLora(self._decoder.sites(), slots.table(shape), tiles, rows, self._beside)

    def _step(self, key: DecodeGraphKey) -> None:
        tokens, slots = torch.empty(2, key.rows, dtype=torch.int64, device=self.device)
        cells = torch.empty(4, key.rows, dtype=torch.int32, device=self.device)
        cos, sin = self._angles[0].new_empty(2, key.rows, self._angles[0].shape[1])
        _, last, logprobs = self.results
        invariant, known = self.backend.invariant, self._angles
        token_kernels.begin(self.orders, last, tokens, slots, cells, self.table, PAGE, known, (cos, sin))
        tile = tile_tokens((), invariant)
        splits = splits_for(key.rows * self._cache.heads, tile)
        queries = paged.Queries(cells, self.table, tile, splits, self.slots.min_split_keys)
        attend = KernelAttend(self._cache, self._decoder.config.windows, queries, slots)
        lora = self.hook(self.slots, key.adapters, self.cells(key.adapters.tiles), key.rows)
        states = () if self.states is None else [KernelStates(None, self.states, self.orders[5, : key.rows])]
        h_BD = self._decoder(tokens, (cos, sin), attend, lora, states=states)
        logits_BV = self._decoder.logits(h_BD, lora)
        if self._decoder.shards is not None:  # every rank draws, and all draw the same
            logits_BV = self._decoder.shards.joined(logits_BV, self._decoder.config.padded_vocab)
        if key.keeps_logits:
            self.logits[: key.rows].copy_(logits_BV)
        token_kernels.draw(logits_BV, self.temperature, self.orders[4], self.vocab, last, logprobs, invariant)


Rows = list[tuple[int, RunningSequence]]


class StepInFlight(NamedTuple):
    """A launched step: its rows' sequences, and where the results will be."""

    rows: Rows
    results: Results
    done: torch.cuda.Event
    undrawn: Rows  # have rules, and wait for `DecodePipeline.draw`
    lists: Callable[[], dict[RunningSequence, Top | None]] = dict  # of likely tokens

    def land(self) -> Landed:
        assert not self.undrawn
        self.done.synchronize()
        tokens, logprobs, tops = self.results.tokens.tolist(), self.results.logprobs.tolist(), self.lists()
        for _, sequence in self.rows:
            sequence.in_flight -= 1
        return [(sequence, tokens[row], logprobs[row], tops.get(sequence)) for row, sequence in self.rows]


class DecodePipeline:
    """Running sequences in rows, with at most one step in flight when `step` returns."""

    def __init__(self, graphs: DecodeGraphs, lead: StepLead | None = None) -> None:
        """`lead`: of rank 0, where the decoder is over several."""
        self.steps = self._graphs = graphs
        self._lead = lead or StepLead()
        self._row: dict[RunningSequence, int] = {}
        self._flight: StepInFlight | None = None
        self._launched = 0
        capacity = graphs.capacity

        def pinned(*shape: int) -> Tensor:
            return torch.zeros((_RING, *shape), dtype=torch.int64).pin_memory()

        self._orders = pinned(token_kernels.ORDERS, capacity)
        self._results = [Results.of(turn) for turn in pinned(2, capacity)]
        self._seed, self._index = np.zeros(capacity, np.uint64), np.zeros(capacity, np.int64)
        self._rows, self._spare = 1, 0  # of the graph in use; steps for which it was too large

    def serves(self, request: RunningRequest) -> bool:
        """Whether captured steps can serve `request`."""
        return request.published is None or usable([request.published.adapter])

    def step(self, sequences: Several[RunningSequence]) -> Landed:
        """Launch the next step of `sequences`, which hold their pages; returns the last step's results."""
        before = self._flight
        sources = {sequence: row for row, sequence in before.rows} if before else {}
        if any(s not in self._row for s in sequences) or self._shrinks(bucket(len(sequences))):
            self._assign_rows(sequences)
        self._flight = self._launch(sequences, sources)
        return before.land() if before else []

    @torch.inference_mode()
    def draw(self) -> None:
        """Draw for rows with rules in the step in flight: the tokens before are in their sequences now."""
        if self._flight is None or not self._flight.undrawn:
            return
        graphs, flight = self._graphs, self._flight
        if undrawn := [(row, s) for row, s in flight.undrawn if s.pages and not s.reason]:
            rows_N = to_device(np.array([row for row, _ in undrawn]), graphs.logits.device)
            some = [sequence for _, sequence in undrawn]
            drawn = draw_by_rules(some, graphs.logits[rows_N], graphs.vocab, graphs.backend)
            graphs.results.tokens.index_copy_(0, rows_N, drawn.tokens_N)
            graphs.results.logprobs.index_copy_(0, rows_N, drawn.logprobs_N)
            with self._lead.share_tokens():
                graphs.share_tokens()
            if drawn.top_NK is not None:
                ids, logprobs = (from_device(part) for part in drawn.top_NK)
                flight = flight._replace(
                    lists=lambda: dict(zip(some, listed(some, ids(), logprobs()), strict=True))
                )
        flight.results.whole.copy_(graphs.results.whole, non_blocking=True)
        flight.done.record()
        self._flight = flight._replace(undrawn=[])

    def land(self) -> Landed:
        """Wait for the step in flight; returns its results."""
        flight, self._flight = self._flight, None
        return flight.land() if flight else []

    def drop(self) -> None:
        """Forget the step in flight: its sequences have failed."""
        self._flight, self._row = None, {}

    def _shrinks(self, rows: int) -> bool:
        """Whether to take a smaller graph: at once if there is one, else if rows stay few."""
        self._spare = self._spare + 1 if 4 * rows <= 3 * self._rows else 0
        return self._spare > _PATIENCE or (self._spare > 0 and self._graphs.has(rows))

    def _assign_rows(self, sequences: Several[RunningSequence]) -> None:
        """Give every sequence a row, grouped by adapter."""
        placed = sorted(sequences, key=lambda s: s.request.root)
        self._row = {sequence: row for row, sequence in enumerate(placed)}
        rows, self._spare = len(placed), 0
        table = np.zeros((rows, self._graphs.width), np.int32)
        for held, sequence in zip(table, placed, strict=True):
            held[: len(sequence.pages)] = sequence.pages
        temperature = np.array([s.request.work.params.temperature for s in placed], np.float32)
        self._seed[:rows] = [s.request.seed for s in placed]
        self._index[:rows] = [s.index for s in placed]
        ruled = not all(s.request.draws_plainly for s in placed)
        constant = PlacedRows(table, temperature, [s.request.adapter for s in placed], ruled)
        self._rows = bucket(rows)
        with self._lead.place(constant):
            self._graphs.place(constant)

    def _launch(
        self, sequences: Several[RunningSequence], sources: dict[RunningSequence, int]
    ) -> StepInFlight:
        turn, graphs, n = self._launched % _RING, self._graphs, self._rows
        self._launched += 1
        rows = np.array([self._row[s] for s in sequences])
        positions = np.array([s.computed + s.in_flight for s in sequences])
        orders = self._orders[turn].numpy()
        orders[:, :n] = -1
        orders[0, rows] = [sources.get(s, -1) for s in sequences]
        orders[1, rows] = [0 if s in sources else s.last for s in sequences]
        orders[2, rows] = positions
        pages = np.array([s.pages[p // PAGE] for s, p in zip(sequences, positions.tolist(), strict=True)])
        orders[3, rows] = pages * PAGE + positions % PAGE
        keys = stream_keys(self._seed[rows], self._index[rows], positions + 1)
        orders[4, rows] = keys.view(np.int64)
        orders[5, rows] = [-1 if s.slot is None else s.slot for s in sequences]
        with self._lead.launch(self._orders[turn]):
            graphs.launch(self._orders[turn])
        results, done = self._results[turn], torch.cuda.Event()
        for sequence in sequences:
            sequence.in_flight += 1
        placed = list(zip(rows.tolist(), sequences, strict=True))
        undrawn = [(row, s) for row, s in placed if not s.request.draws_plainly]
        if not undrawn:
            results.whole.copy_(graphs.results.whole, non_blocking=True)
            done.record()
        return StepInFlight(placed, results, done, undrawn)

"""Decode steps as captured CUDA graphs, launched one step ahead of the host.

`DecodeGraphs` captures a whole step (decoder, adapters, attention, drawing) for every batch size that occurs.
`DecodePipeline` launches the next step before the last step's tokens have reached the host: the device reads
them from its own memory, and tokens computed past a stop are dropped. Serves requests without top-k, top-p
and lists of likely tokens; the sampler's plain step serves the others. Knows nothing of a request's lifetime.

Shapes: B rows of a step, V padded vocabulary.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from collections.abc import Sequence as Several
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tinkex.engine.cuda import draw
from tinkex.engine.cuda import fused_projection as adapted
from tinkex.engine.cuda import grouped_lora as grouped
from tinkex.engine.cuda import lora_kernels as lora_kernel
from tinkex.engine.cuda import paged_attention as paged
from tinkex.engine.cuda import split_k_projection as step
from tinkex.engine.cuda import step_inputs as begin
from tinkex.engine.cuda.adapter_slots import AdapterSlots
from tinkex.engine.cuda.attention_hooks import KernelAttend, splits_for, tile_tokens
from tinkex.engine.rng import stream_keys
from tinkex.engine.torch.drawing import lora_of
from tinkex.engine.torch.hooks import Frozen, LoraHook, Pending, Projecting, Site
from tinkex.engine.torch.kv import PAGE, KVCache
from tinkex.engine.torch.model import Decoder
from tinkex.engine.torch.sequences import Request, Sequence
from tinkex.engine.torch.upload import fill

# As measured on an H200:
_SOME = 64  # rows up to which launches cost more than reading and writing once more
_MANY = 512  # rows from which on products add what adapters give, instead of what follows them
_PATIENCE = 16  # steps that cost about as much as a graph in rows that nobody needs
_RING = 4  # buffers in pinned memory: more than there are steps in flight


def bucket(rows: int) -> int:
    """The size of the graph that serves so many rows: a power of two, or beyond 32 a multiple of 32."""
    return -(-rows // 32) * 32 if rows > 32 else 1 << (rows - 1).bit_length()


class DecodeGraphKey(NamedTuple):
    """What a graph was captured for."""

    rows: int
    tiles: int = 0  # of adapters' rows; 0: the base model alone
    tile_rows: int = 0
    rank: int = 0  # the largest, rounded up
    whole: bool = False  # whether every rank is a multiple of 8


class Results(NamedTuple):
    """Tokens and logprobs (float32) of every row, in one piece of memory: one copy brings both."""

    whole: Tensor  # int64 [2, rows], of which the second half's half is used
    tokens: Tensor
    logprobs: Tensor

    @classmethod
    def of(cls, whole: Tensor) -> Results:
        tokens, rest = whole
        return cls(whole, tokens, rest.view(torch.float32)[: len(tokens)])


class CapturedLora(Projecting):
    """The `LoraHook` inside a graph: whichever adapters the table names when it is replayed."""

    def __init__(
        self,
        sites: dict[Site, lora_kernel.TableSite],
        table: lora_kernel.AdapterTable,
        tiles: lora_kernel.RowTiles,
        beside: torch.cuda.Stream,
    ) -> None:
        self._sites, self._table, self._tiles, self._beside = sites, table, tiles, beside

    def project(self, site: Site, x: Tensor, frozen: Frozen) -> Tensor | Pending:
        place, rows = self._sites[site], x.shape[0]
        many = rows >= _MANY or (rows > _SOME and site.group == "unembed")
        if many and self._ours(frozen) and lora_kernel.writes(self._table, place):
            return grouped.product_with(x, frozen.weight, self._table, self._tiles, place)[0]
        adapters = step.SiteAdapters(self._table, self._tiles, place)
        pending = self._ours(frozen) and step.holds(self._table, place)
        if pending and step.suits(rows, frozen.weight):
            return step.project(x, frozen.weight, adapters)
        if pending and adapted.suits(rows, frozen.weight, adapters):
            return adapted.FusedProjection(x, frozen.weight, adapters)
        large = self._ours(frozen) and adapted.large(frozen.weight)  # as a trainer has them: no sum is cut
        if large and adapted.halved(frozen.weight):
            u, parts = self._beside_x_a(place, x, 2, lambda: grouped.product_in(2, x, frozen.weight))
            return lora_kernel.unite(u, parts, x.dtype, self._table, self._tiles, place)
        u, y = self._beside_x_a(place, x, 1 if large else None, lambda: frozen(x))
        if pending and rows > _SOME and site.group in ("qkv", "gate_up"):
            return step.SplitKProjection(y[None], u, adapters, x.dtype)
        lora_kernel.expand(u, y, self._table, self._tiles, place)
        return y

    def _ours(self, frozen: Frozen) -> bool:
        """Whether it is for us in which order parts are added: the quickest, or a trainer's."""
        return frozen.bias is None and not self._table.invariant

    def _beside_x_a(
        self, place: lora_kernel.TableSite, x: Tensor, splits: int | None, product: Callable[[], Tensor]
    ) -> tuple[Tensor, Tensor]:
        """x·Aᵀ and beside it, on another stream, the frozen product: both need only x."""
        here = torch.cuda.current_stream()
        self._beside.wait_stream(here)
        with torch.cuda.stream(self._beside):
            u = lora_kernel.shrink(x, self._table, self._tiles, place, splits, beside=True)
        y = product()
        here.wait_stream(self._beside)
        return u, y

    def __call__(
        self, site: Site, x: Tensor, y: Tensor, *, rows: Tensor | None = None, experts: Tensor | None = None
    ) -> Tensor:
        raise NotImplementedError("a captured step projects rows in their order")


class DecodeGraphs:
    """Captured steps over tensors that never move: the host fills `orders`, replays, and reads results."""

    def __init__(self, decoder: Decoder, cache: KVCache, capacity: int, context: int) -> None:
        self._decoder, self._cache, self.backend = decoder, cache, decoder.backend
        device = decoder.unembed_weight.device
        self.device, self.capacity = device, bucket(capacity)
        self.width = -(-context // PAGE)
        self._sites = {
            site: lora_kernel.TableSite(grouped.column_of(site), i, [part.out_features for part in parts])
            for site, (i, parts) in decoder.sites().items()
        }

        def static(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        everywhere = torch.arange(self.width * PAGE, device=device)
        self._angles = decoder.config.rope.angles(everywhere, decoder.unembed_weight.dtype)
        self.orders = static(begin.ORDERS, self.capacity)
        self.table = static(self.capacity, self.width, dtype=torch.int32)
        self.temperature = static(self.capacity, dtype=torch.float32)
        self.seats = AdapterSlots(decoder, self.capacity)
        self.results = Results.of(static(2, self.capacity))
        self._cells: dict[int, Tensor] = {}
        self._graphs: dict[DecodeGraphKey, torch.cuda.CUDAGraph] = {}
        self._memory, self._beside = torch.cuda.graph_pool_handle(), torch.cuda.Stream(device)

    def cells(self, tiles: int) -> Tensor:
        """Where the graphs of so many tiles look for them: int32 [6, tiles]."""
        if tiles not in self._cells:
            self._cells[tiles] = torch.zeros(6, tiles, dtype=torch.int32, device=self.device)
        return self._cells[tiles]

    def has(self, rows: int) -> bool:
        return any(key.rows == rows for key in self._graphs)

    def replay(self, key: DecodeGraphKey) -> None:
        if key not in self._graphs:
            self._graphs[key] = self._capture(key)
        self._graphs[key].replay()

    @torch.inference_mode()
    def _capture(self, key: DecodeGraphKey) -> torch.cuda.CUDAGraph:
        # compiles kernels and sizes workspaces outside the graph, and must leave no trace: no row is active
        saved = self.orders.clone(), self.results.tokens.clone()
        self.orders[3].fill_(-1)
        for _ in range(2):
            self._step(key)
        self.orders.copy_(saved[0])
        self.results.tokens.copy_(saved[1])
        return self.capture(lambda: self._step(key))

    def capture(self, step: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """`step`, which has run before, as a graph.

        All of them share their memory: one runs at a time, and results are where nothing is allocated.
        """
        torch.cuda.synchronize(self.device)
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self.device)
        collects = gc.isenabled()
        gc.disable()  # what it collects may be CUDA's, and to end that would end the capture
        try:
            # other threads may use the device meanwhile
            with torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"):
                step()
        finally:
            torch.cuda.set_stream(stream)  # a capture that fails would leave us on its own
            if collects:
                gc.enable()
        return graph

    def hook(self, table: lora_kernel.AdapterTable, tiles: lora_kernel.RowTiles) -> LoraHook:
        """Whichever adapters `table` and `tiles` name when a captured step is replayed."""
        return CapturedLora(self._sites, table, tiles, self._beside)

    def _step(self, key: DecodeGraphKey) -> None:
        tokens, slots = torch.empty(2, key.rows, dtype=torch.int64, device=self.device)
        cells = torch.empty(4, key.rows, dtype=torch.int32, device=self.device)
        cos, sin = self._angles[0].new_empty(2, key.rows, self._angles[0].shape[1])
        _, last, logprobs = self.results
        begin.begin(self.orders, last, tokens, slots, cells, self.table, PAGE, self._angles, (cos, sin))
        tile = tile_tokens((), self.backend.invariant)
        splits = splits_for(key.rows * self._cache.heads, tile)
        queries = paged.Queries(cells, self.table, tile, splits, self.seats.least)
        attend = KernelAttend(self._cache, self._decoder.config.windows, queries, slots)
        lora = None
        if key.tiles:
            tiles = lora_kernel.RowTiles(self.cells(key.tiles), key.tile_rows)
            lora = self.hook(self.seats.table(key.rank, key.whole), tiles)
        h_BD = self._decoder.at_angles(tokens, (cos, sin), attend, lora)
        logits_BV = self._decoder.logits(h_BD, lora)
        vocab, invariant = self._decoder.config.vocab_size, self.backend.invariant
        draw.draw(logits_BV, self.temperature, self.orders[4], vocab, last, logprobs, invariant)


@dataclass
class StepInFlight:
    """A step that was launched: its rows' sequences, and where the results will be."""

    rows: list[tuple[int, Sequence]]
    results: Results
    done: torch.cuda.Event


Landed = list[tuple[Sequence, int, float]]  # a sequence, its new token and its logprob


class DecodePipeline:
    """Sequences in rows, and at most one step of theirs in flight when `step` returns."""

    def __init__(self, graphs: DecodeGraphs) -> None:
        self._graphs = graphs
        self._row: dict[Sequence, int] = {}
        self._flight: StepInFlight | None = None
        self._launched = 0
        capacity = graphs.capacity

        def pinned(*shape: int) -> Tensor:
            return torch.zeros((_RING, *shape), dtype=torch.int64).pin_memory()

        self._orders = pinned(begin.ORDERS, capacity)
        self._results = [Results.of(turn) for turn in pinned(2, capacity)]
        self._seed, self._index = np.zeros(capacity, np.uint64), np.zeros(capacity, np.int64)
        self._key, self._spare = (
            DecodeGraphKey(1),
            0,
        )  # what graph serves the rows, and for how many steps too large

    def serves(self, request: Request) -> bool:
        """Whether a captured step can do all that `request` asks for."""
        published = request.published
        return request.draws_plainly and (published is None or grouped.usable([published.adapter]))

    def step(self, sequences: Several[Sequence]) -> Landed:
        """Launch the next step of `sequences`; the results of the step before. Their pages must be there."""
        before = self._flight
        sources = {sequence: row for row, sequence in before.rows} if before else {}
        if any(s not in self._row for s in sequences) or self._shrinks(bucket(len(sequences))):
            self._seat(sequences)
        self._flight = self._launch(sequences, sources)
        return _land(before) if before else []

    def land(self) -> Landed:
        """The results of what is in flight; nothing is, afterwards."""
        flight, self._flight = self._flight, None
        return _land(flight) if flight else []

    def drop(self) -> None:
        """Forget what is in flight: its sequences have failed."""
        self._flight, self._row = None, {}

    # -- rows ------------------------------------------------------------------------------------------

    def _shrinks(self, rows: int) -> bool:
        """Whether so few rows are worth a smaller graph: at once if there is one, else if they stay few."""
        self._spare = self._spare + 1 if 4 * rows <= 3 * self._key.rows else 0
        return self._spare > _PATIENCE or (self._spare > 0 and self._graphs.has(rows))

    def _seat(self, sequences: Several[Sequence]) -> None:
        """Give every sequence a row, neighbours sharing an adapter; tell the device all that is constant."""
        seated = sorted(sequences, key=lambda s: s.request.root)
        self._row = {sequence: row for row, sequence in enumerate(seated)}
        rows, graphs, self._spare = len(seated), self._graphs, 0
        table = np.zeros((rows, graphs.width), np.int32)
        for held, sequence in zip(table, seated, strict=True):
            held[: len(sequence.pages)] = sequence.pages
        temperature = np.array([s.request.work.params.temperature for s in seated], np.float32)
        fill(graphs.table[:rows], table)
        fill(graphs.temperature[:rows], temperature)
        self._seed[:rows] = [s.request.seed for s in seated]
        self._index[:rows] = [s.index for s in seated]
        self._key = self._key_for(seated)

    def _key_for(self, seated: Several[Sequence]) -> DecodeGraphKey:
        """What graph serves them, their adapters being seated."""
        rows, lora = bucket(len(seated)), lora_of(self._graphs.backend, seated, [1] * len(seated))
        if lora is None:
            return DecodeGraphKey(rows)
        cells, tile, rank, whole = self._graphs.seats.seat(lora.segments)
        fill(self._graphs.cells(cells.shape[1]), cells)
        return DecodeGraphKey(rows, cells.shape[1], tile, rank, whole)

    # -- steps -----------------------------------------------------------------------------------------

    def _launch(self, sequences: Several[Sequence], sources: dict[Sequence, int]) -> StepInFlight:
        turn, graphs, n = self._launched % _RING, self._graphs, self._key.rows
        self._launched += 1
        rows = np.array([self._row[s] for s in sequences])
        positions = np.array([s.computed + s.flying for s in sequences])
        orders = self._orders[turn].numpy()
        orders[:, :n] = -1
        orders[0, rows] = [sources.get(s, -1) for s in sequences]
        orders[1, rows] = [0 if s in sources else s.last for s in sequences]
        orders[2, rows] = positions
        pages = np.array([s.pages[p // PAGE] for s, p in zip(sequences, positions.tolist(), strict=True)])
        orders[3, rows] = pages * PAGE + positions % PAGE
        keys = stream_keys(self._seed[rows], self._index[rows], positions + 1)
        orders[4, rows] = keys.view(np.int64)
        graphs.orders.copy_(self._orders[turn], non_blocking=True)
        graphs.replay(self._key)
        results = self._results[turn]
        results.whole.copy_(graphs.results.whole, non_blocking=True)
        done = torch.cuda.Event()
        done.record()
        for sequence in sequences:
            sequence.flying += 1
        seated = list(zip(rows.tolist(), sequences, strict=True))
        return StepInFlight(seated, results, done)


def _land(flight: StepInFlight) -> Landed:
    flight.done.synchronize()
    tokens, logprobs = flight.results.tokens.tolist(), flight.results.logprobs.tolist()
    for _, sequence in flight.rows:
        sequence.flying -= 1
    return [(sequence, tokens[row], logprobs[row]) for row, sequence in flight.rows]

"""The paged KV cache: page allocation with prefix caching, the tensors, and attention over page tables.

A page holds the keys and values of PAGE consecutive tokens of every layer. Pages are reference-counted: a
page with two owners is only read. A full page stays in the prefix cache, keyed by a hash chained over the
adapter and all tokens so far, until it is evicted, least recently used first.

Shapes: T tokens in the step, H query heads, G kv heads, C head dim, B sequences of a group, L padded length.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tinkex.engine.torch.models.architecture import KvShape
from tinkex.engine.torch.models.attend import Chunk, Spans, softmax_attention, visible

PAGE = 16  # tokens


def chain(
    root: bytes, tokens: np.ndarray, links: list[bytes], extras: Mapping[int, bytes] | None = None
) -> list[bytes]:
    """Extend `links` by one digest per full page of `tokens`, the tokens after those that it covers.

    Each digest covers all tokens up to its page's end, and what `extras` has for those pages.
    """
    content, size = tokens.astype(np.int32).tobytes(), 4 * PAGE
    for end in range(size, len(content) + 1, size):
        parent = links[-1] if links else root
        page = parent + content[end - size : end] + (extras.get(len(links), b"") if extras else b"")
        links.append(hashlib.blake2b(page, digest_size=16).digest())
    return links


class Pages:
    """The bookkeeping of `count` pages: no tensors here."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._refs = [0] * count
        self._free = list(range(count - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()  # cached and without owner; oldest first
        self._by_digest: dict[bytes, int] = {}
        self._digest: dict[int, bytes] = {}

    @property
    def available(self) -> int:
        """Pages that `take` could allocate: free ones, and cached ones without owner."""
        return len(self._free) + len(self._idle)

    def take(self, n: int) -> list[int] | None:
        """Allocate `n` pages, evicting cached ones as needed; None if there are not as many."""
        return None if n > self.available else [self._take_one() for _ in range(n)]

    def _take_one(self) -> int:
        if self._free:
            page = self._free.pop()
        else:
            page, _ = self._idle.popitem(last=False)
            del self._by_digest[self._digest.pop(page)]
        self._refs[page] = 1
        return page

    def share(self, pages: Iterable[int]) -> None:
        for page in pages:
            self._refs[page] += 1
            self._idle.pop(page, None)

    def release(self, pages: Sequence[int]) -> None:
        """Remove an owner from each; a page without owner is free, or idle if it is cached."""
        for page in reversed(pages):  # the end of a sequence is evicted before its prefix
            assert self._refs[page] > 0, f"page {page} released twice"
            self._refs[page] -= 1
            if self._refs[page] == 0 and page in self._digest:
                self._idle[page] = None
            elif self._refs[page] == 0:
                self._free.append(page)

    def find(self, links: Sequence[bytes]) -> list[int]:
        """The cached pages of the longest known prefix of `links`; the caller becomes an owner."""
        found = [self._by_digest[digest] for digest in takewhile(self._by_digest.__contains__, links)]
        self.share(found)
        return found

    def holds(self, digest: bytes) -> bool:
        return digest in self._by_digest

    def remember(self, page: int, digest: bytes) -> None:
        """Enter a full page into the prefix cache, unless one with the same content is there."""
        if digest not in self._by_digest and page not in self._digest:
            self._by_digest[digest] = page
            self._digest[page] = digest


class KVCache:
    """The pages' tensors: the keys and the values of every layer that has any, [pages, PAGE * G * C] each."""

    def __init__(
        self,
        shapes: Sequence[KvShape | None],
        pages: int,
        device: torch.device,
        dtype: torch.dtype,
        *,
        clears: bool = True,
    ) -> None:
        """`shapes` are those of the layers; `clears`: `Backend.clears_pages`."""
        self.pages, self.device, self._clears = Pages(pages), device, clears
        self._shapes = shapes
        self.heads = next((shape.heads for shape in shapes if shape is not None), 0)  # the same, if uniform
        # Keys and values of equal width are in one pool, in the order of their layers.
        kept = [(i, shape) for i, shape in enumerate(shapes) if shape is not None]
        widths = {(0, i): shape.heads * shape.head_dim for i, shape in kept}
        widths |= {(1, i): s.heads * s.value_dim for i, s in kept if not s.values_in_keys}
        self._pools: list[Tensor] = []
        self._k, self._v = halves = ({}, {})
        for width in dict.fromkeys(widths.values()):
            members = [key for key, other in widths.items() if other == width]
            self._pools.append(zeros((len(members), pages, PAGE * width), device, dtype))
            for (half, layer), part in zip(members, self._pools[-1].unbind(), strict=True):
                halves[half][layer] = part
        self._used: set[int] = set()  # pages written to before: all others are still zero

    def take(self, n: int) -> list[int] | None:
        """Allocate pages as `Pages.take` does, and zero reused ones if `clears`.

        Attention multiplies masked values by 0, and 0 · NaN is NaN: an adapter that has diverged would
        otherwise spoil the sequences that get its pages next.
        """
        taken = self.pages.take(n)
        if self._clears and taken:
            if stale := self._used.intersection(taken):
                self.clear(sorted(stale))
            self._used.update(taken)
        return taken

    def clear(self, pages: list[int]) -> None:
        at = torch.tensor(pages, device=self.device)
        for pool in self._pools:
            pool[:, at] = 0.0

    def write(self, layer: int, slots_T: Tensor, k_TGC: Tensor, v_TGC: Tensor) -> None:
        given = ((self._k, k_TGC), (self._v, v_TGC))
        for pool, new in ((half[layer], new) for half, new in given if layer in half):
            rows = new.flatten(1)
            pool.view(-1, rows.shape[1]).index_copy_(0, slots_T, rows)

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """One layer's keys and values, [pages, PAGE * G * C] each."""
        return self._k[layer], self._v[layer]

    def read(self, layer: int, table_BN: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of B sequences, [B, G, L, C] each, given their page tables."""
        shape, pages = self.shape(layer), table_BN.flatten()

        def read(pool: Tensor, width: int) -> Tensor:
            return pool.index_select(0, pages).view(len(table_BN), -1, shape.heads, width).transpose(1, 2)

        k = read(self._k[layer], shape.head_dim)
        return k, k[..., : shape.value_dim] if shape.values_in_keys else read(self._v[layer], shape.value_dim)

    def shape(self, layer: int) -> KvShape:
        shape = self._shapes[layer]
        assert shape is not None, f"layer {layer} keeps no keys"
        return shape

    def copy_page(self, source: int, target: int) -> None:
        for pool in self._pools:
            pool[:, target] = pool[:, source]


def page_bytes(shapes: Sequence[KvShape | None], dtype: torch.dtype) -> int:
    values = sum(s.heads * (s.head_dim + s.value_dim * (not s.values_in_keys)) for s in shapes if s)
    return PAGE * values * dtype.itemsize


def zeros(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    if device.type == "cpu" and dtype == torch.float32:  # numpy's take memory when first written to
        return torch.from_numpy(np.zeros(shape, np.float32))
    return torch.zeros(shape, device=device, dtype=dtype)


class TokenSpan(NamedTuple):
    """The `new` tokens of one sequence, from position `start` on; `pages` is its whole page table."""

    pages: Sequence[int]
    start: int
    new: int
    images: Spans = ()  # of the sequence, where tokens of an image see each other; none is in two steps


class _SpanGroup:
    """Spans of `new` tokens each that attend in one call, padded to the longest."""

    def __init__(self, pieces: Sequence[TokenSpan], firsts: Sequence[int], device: torch.device) -> None:
        self.new, self.first = pieces[0].new, firsts[0]
        self.rows_B = torch.tensor(firsts, device=device)
        widths = [-(-(p.start + p.new) // PAGE) for p in pieces]
        table = np.empty((len(pieces), max(widths)), np.int64)
        for row, (piece, width) in enumerate(zip(pieces, widths, strict=True)):
            table[row, :width] = piece.pages[:width]
            table[row, width:] = piece.pages[0]  # masked but read: a page of another sequence might hold NaN
        self.table_BN = torch.from_numpy(table).to(device)
        self.starts_B = torch.tensor([p.start for p in pieces], device=device)
        self.no_history = max(p.start for p in pieces) == 0
        # A single token is at most the last of an image, and attends to no later one.
        self.images = pieces[0].images if self.new > 1 else ()
        self._masks: dict[tuple[int | None, bool, bool], Tensor] = {}

    def mask(self, window: int | None, dtype: torch.dtype, spans: Spans = ()) -> Tensor:
        """0 at visible positions, -inf elsewhere: [B, 1, new, L]. `spans` are `images` or none."""
        key = window, isinstance(window, Chunk), bool(spans)
        if key not in self._masks:
            device = self.starts_B.device
            at = self.starts_B[:, None, None, None] + torch.arange(self.new, device=device)[:, None]
            seen = torch.arange(self.table_BN.shape[1] * PAGE, device=device)
            hidden = ~visible(at, seen, window, spans)
            shown = torch.zeros(hidden.shape, dtype=dtype, device=device)
            self._masks[key] = shown.masked_fill_(hidden, float("-inf"))
        return self._masks[key]


class PagedAttend:
    """Attention of one step's tokens, its spans' one after the other; writes their keys and values first."""

    def __init__(
        self, cache: KVCache, pieces: Sequence[TokenSpan], windows: Sequence[int | None], device: torch.device
    ) -> None:
        self._cache, self._windows = cache, windows
        firsts = np.cumsum([0, *(p.new for p in pieces)]).tolist()
        slots = np.concatenate([slots_of(p) for p in pieces])
        self._slots_T = torch.from_numpy(slots).to(device)
        self._groups = [
            _SpanGroup([pieces[i] for i in members], [firsts[i] for i in members], device)
            for members in group_pieces(pieces)
        ]

    def __call__(
        self, layer: int, q_THC: Tensor, k_TGC: Tensor, v_TGC: Tensor, sinks: Tensor | None = None,
        whole_images: bool = False,
    ) -> Tensor:  # fmt: skip
        self._cache.write(layer, self._slots_T, k_TGC, v_TGC)
        o_THC = q_THC.new_empty(*q_THC.shape[:2], v_TGC.shape[-1])
        for group in self._groups:
            if group.new == 1:
                o_THC[group.rows_B] = self._decode(group, layer, q_THC[group.rows_B], sinks)
            else:
                at = slice(group.first, group.first + group.new)
                qkv, spans = (q_THC[at], k_TGC[at], v_TGC[at]), group.images if whole_images else ()
                o_THC[at] = self._prefill(group, layer, *qkv, sinks, spans)
        return o_THC

    def _decode(self, group: _SpanGroup, layer: int, q_BHC: Tensor, sinks: Tensor | None) -> Tensor:
        """One query per sequence. Heads that share a kv head are rows of one product: keys are read once."""
        k_BGLC, v_BGLC = self._cache.read(layer, group.table_BN)
        B, H, C = q_BHC.shape
        mask = group.mask(self._windows[layer], q_BHC.dtype)
        if sinks is not None:
            return softmax_attention(q_BHC[:, :, None], k_BGLC, v_BGLC, mask, sinks)[:, :, 0]
        q = q_BHC.view(B, k_BGLC.shape[1], -1, C)
        return F.scaled_dot_product_attention(q, k_BGLC, v_BGLC, attn_mask=mask).reshape(B, H, -1)

    def _prefill(
        self, group: _SpanGroup, layer: int, q_THC: Tensor, k_TGC: Tensor, v_TGC: Tensor,
        sinks: Tensor | None, spans: Spans,
    ) -> Tensor:  # fmt: skip
        """Many queries of one sequence; earlier keys and values are read from the cache."""
        window, (q, k, v) = self._windows[layer], (x.transpose(0, 1)[None] for x in (q_THC, k_TGC, v_TGC))
        causal, mask = group.no_history and (window is None or group.new <= window), None
        if spans or not causal:
            k, v = self._cache.read(layer, group.table_BN)
            mask = group.mask(window, q.dtype, spans)
        return softmax_attention(q, k, v, mask, sinks)[0].transpose(0, 1)


def slots_of(piece: TokenSpan) -> np.ndarray:
    at = np.arange(piece.start, piece.start + piece.new)
    return np.asarray(piece.pages, np.int64)[at // PAGE] * PAGE + at % PAGE


def group_pieces(pieces: Sequence[TokenSpan]) -> list[list[int]]:
    """Which spans attend in one call: a prefill span alone, decoding ones grouped by similar length.

    A group costs a few calls per layer; it ends where padding would waste more than a third of it.
    """
    groups = [[i] for i, piece in enumerate(pieces) if piece.new > 1]
    singles = sorted((i for i, p in enumerate(pieces) if p.new == 1), key=lambda i: -pieces[i].start)
    members: list[int] = []
    used = 0
    for i in singles:
        longest = pieces[members[0]].start + 1 if members else 0
        if members and longest * (len(members) + 1) > 1.5 * (used + pieces[i].start + 1) + 8 * PAGE:
            groups.append(members)
            members, used = [], 0
        members.append(i)
        used += pieces[i].start + 1
    return [*groups, members] if members else groups

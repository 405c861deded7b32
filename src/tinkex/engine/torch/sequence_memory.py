"""What running sequences hold: their KV pages, the slots of their states, and the prefixes that they share.

A page that became full, and a state at the end of one, can be found by later sequences with the same prefix.
Knows no queue: `ContinuousBatch` decides which sequences wait and which are preempted.
"""

from __future__ import annotations

from tinkex.engine.torch.kv import PAGE, KVCache, chain
from tinkex.engine.torch.sequences import RunningSequence
from tinkex.engine.torch.states import GRID, StatePool, snapshot_after


class SequenceMemory:
    """Hands out the pages of a cache and, to hybrids, the slots of `states`."""

    def __init__(self, cache: KVCache, states: StatePool | None) -> None:
        self.cache, self.pages, self.states = cache, cache.pages, states

    def start(self, sequence: RunningSequence, spare: int) -> bool:
        """Give a sequence its pages, cached ones first; False: fewer than `spare` would be left."""
        reusable = (sequence.first_needed - 1) // PAGE
        links = self._links(sequence, sequence.length)[:reusable]
        found = self.pages.find(links)
        if self.states is not None:  # a prefix is reused as far as there is a state, too
            reusable = self.states.reusable(links[: len(found)])
            self.pages.release(found[reusable:])
            del found[reusable:]
        fresh = -(-sequence.length // PAGE) - len(found)
        enough = self.pages.available >= fresh + spare
        if enough and self.states is not None:
            sequence.slot = self.states.start(links[: len(found)])
            enough = sequence.slot is not None
        if not enough:
            self.pages.release(found)
            return False
        sequence.pages = found + (self.cache.take(fresh) or [])
        sequence.computed = len(found) * PAGE
        return True

    def has_room(self, sequence: RunningSequence, tokens: int) -> bool:
        """Whether a sequence has, or can be given, the pages of its first `tokens`."""
        while len(sequence.pages) * PAGE < tokens and (page := self.cache.take(1)):
            sequence.pages += page
        return len(sequence.pages) * PAGE >= tokens

    def bounded(self, sequence: RunningSequence, count: int) -> int:
        """At most so many next tokens that the state after them, if it is to be kept, is at their end."""
        if self.states is None:
            return count
        return min(count, snapshot_after(sequence.computed, sequence.length) - sequence.computed)

    def copy_ahead(self, sequence: RunningSequence) -> None:
        """Copy a state that `computed` is to keep: when that step lands, the next has changed the state."""
        due = sequence.in_flight and (sequence.computed + sequence.in_flight) % GRID == 0
        if self.states is not None and due and sequence.slot is not None:
            sequence.copied = self.states.fork(sequence.slot)

    def computed(self, sequence: RunningSequence, count: int) -> None:
        """Note `count` computed tokens, and enter the pages that became full into the prefix cache."""
        before = sequence.computed
        sequence.computed += count
        first, full = before // PAGE, sequence.computed // PAGE
        if first < full:
            links = self._links(sequence, full * PAGE)
            for page in range(first, full):
                self.pages.remember(sequence.pages[page], links[page])
            if self.states is not None and sequence.computed == snapshot_after(before, sequence.length):
                assert sequence.slot is not None
                if sequence.copied is not None:
                    self.states.enter(sequence.copied, links[full - 1])
                elif not sequence.in_flight:
                    self.states.remember(sequence.slot, links[full - 1])
                sequence.copied = None

    def _links(self, sequence: RunningSequence, stop: int) -> list[bytes]:
        fresh = sequence.ids(len(sequence.links) * PAGE, stop)
        return chain(sequence.request.root, fresh, sequence.links, sequence.request.extras)

    def fork(self, first: RunningSequence, sequence: RunningSequence) -> bool:
        """Share the full pages of `first`, and copy its last one if more is to be written into it."""
        full = first.computed // PAGE
        partial = len(first.pages) - full
        if self.pages.available < partial:
            return False
        if self.states is not None:
            assert first.slot is not None
            sequence.slot = self.states.fork(first.slot)
            if sequence.slot is None:
                return False
        copies = self.cache.take(partial) or []
        for source, target in zip(first.pages[full:], copies, strict=True):
            self.cache.copy_page(source, target)
        self.pages.share(first.pages[:full])
        sequence.pages, sequence.computed = first.pages[:full] + copies, first.computed
        sequence.links = first.links[:full]
        return True

    def free(self, sequence: RunningSequence) -> None:
        self.pages.release(sequence.pages)
        for slot in (sequence.slot, sequence.copied):
            if self.states is not None and slot is not None:
                self.states.release(slot)
        sequence.pages, sequence.slot, sequence.copied, sequence.computed = [], None, None, 0

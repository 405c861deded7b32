"""The states of recurrent layers: a slot for each running sequence, and snapshots of prefixes for reuse.

A state covers all tokens so far, so it cannot be cut into pages. A snapshot is a copy of a state at the end
of a full page, in a separate slot under that page's digest, until evicted, least recently used first.

Shapes: T tokens in the step, B sequences of a group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from tinkex.engine.torch.kv import PAGE, Pages, zeros
from tinkex.engine.torch.models.delta_net import Chunks

GRID = 512  # tokens between snapshots inside a sequence
StateShapes = Mapping[int, tuple[tuple[int, ...], ...]]  # by recurrent layer: the tensors of one sequence


def slot_bytes(shapes: StateShapes) -> int:
    return sum(4 * int(np.prod(shape)) for layer in shapes.values() for shape in layer)


def snapshot_after(computed: int, prompt: int) -> int:
    """The next length whose state is kept: on the grid, or of the last page before the prompt's end."""
    last = (prompt - 1) // PAGE * PAGE
    on_grid = (computed // GRID + 1) * GRID
    return min(on_grid, last) if computed < last else on_grid


class StateGroup:
    """Sequences of a packed batch whose recurrent layers compute together; all start at zero here.

    `rows_T` are the rows of their tokens, one sequence after the other; None: all rows.
    """

    def __init__(self, lengths: Sequence[int], device: torch.device, rows_T: Tensor | None = None) -> None:
        self.lengths, self.rows_T, self._device = list(lengths), rows_T, device

    @cached_property
    def chunks(self) -> Chunks:
        return Chunks(self.lengths, self._device)

    def read(self, layer: int) -> Sequence[Tensor] | None:
        """The states [B, …] before the tokens; None: zeros. They may be written to."""
        return None

    def write(self, layer: int, states: Sequence[Tensor]) -> None:
        """Keep the states after the tokens."""


class StatePool:
    """The slots' tensors, fp32, and who holds them. A slot with a digest is a snapshot."""

    def __init__(self, shapes: StateShapes, slots: int, device: torch.device) -> None:
        self.slots, self.device = Pages(slots), device
        # Tensors of equal shape are in one, in the order of their layers: few launches copy a slot.
        places = [(layer, i, shape) for layer, of in shapes.items() for i, shape in enumerate(of)]
        self._pools: list[Tensor] = []
        found: dict[tuple[int, int], Tensor] = {}
        for shape in dict.fromkeys(shape for _, _, shape in places):
            members = [(layer, i) for layer, i, other in places if other == shape]
            self._pools.append(zeros((len(members), slots, *shape), device, torch.float32))
            found |= dict(zip(members, self._pools[-1].unbind(), strict=True))
        self.tensors = {layer: tuple(found[layer, i] for i in range(len(of))) for layer, of in shapes.items()}

    def reusable(self, links: Sequence[bytes]) -> int:
        """How many pages of a prefix the longest snapshot of it covers."""
        return next((n for n in range(len(links), 0, -1) if self.slots.holds(links[n - 1])), 0)

    def start(self, links: Sequence[bytes]) -> int | None:
        """A slot with the state after a prefix, empty or with a snapshot; None: none is free."""
        snapshot = self.slots.find(links[-1:])
        taken = self.slots.take(1)
        if not snapshot:
            for slot in taken or ():
                self.copy_state(slot, None)
        elif taken is None:  # nothing but the snapshot is left, so it becomes the sequence's own
            self.slots.release(snapshot)
            taken = self.slots.take(1)
        else:
            self.copy_state(taken[0], snapshot[0])
            self.slots.release(snapshot)
        return taken[0] if taken else None

    def fork(self, slot: int) -> int | None:
        """A slot with a copy of another's state; None: none is free."""
        taken = self.slots.take(1)
        if taken:
            self.copy_state(taken[0], slot)
        return taken[0] if taken else None

    def remember(self, slot: int, digest: bytes) -> None:
        """Keep a snapshot of a slot under `digest`, if there is room for one."""
        if not self.slots.holds(digest) and (copy := self.fork(slot)) is not None:
            self.enter(copy, digest)

    def enter(self, slot: int, digest: bytes) -> None:
        """Make a slot a snapshot, which no sequence owns."""
        self.slots.remember(slot, digest)
        self.slots.release([slot])

    def release(self, slot: int) -> None:
        self.slots.release([slot])

    def copy_state(self, target: int, source: int | None) -> None:
        """Give a slot another's state, or zeros."""
        for pool in self._pools:
            if source is None:
                pool[:, target] = 0.0
            else:
                pool[:, target] = pool[:, source]

    def groups(self, slots: Sequence[int], counts: Sequence[int]) -> list[StateGroup]:
        """Of one step in which sequence i advances by counts[i] tokens: decoding sequences, and the rest."""
        firsts = np.cumsum([0, *counts])
        groups: list[StateGroup] = []
        for decoding in (True, False):
            members = [i for i in range(len(slots)) if (counts[i] == 1) == decoding]
            members.sort(key=lambda i: slots[i])
            if members:
                rows = np.concatenate([np.arange(firsts[i], firsts[i] + counts[i]) for i in members])
                groups.append(
                    _SlotGroup(self, [slots[i] for i in members], [counts[i] for i in members], rows)
                )
        return groups


class _SlotGroup(StateGroup):
    """Sequences whose states are in the slots of a pool, ascending."""

    def __init__(
        self, pool: StatePool, slots: Sequence[int], lengths: Sequence[int], rows: np.ndarray
    ) -> None:
        super().__init__(lengths, pool.device, torch.from_numpy(rows).to(pool.device))
        self._tensors = pool.tensors
        dense = slots[-1] - slots[0] == len(slots) - 1
        self._dense = slice(slots[0], slots[-1] + 1) if dense else None  # then states are read in place
        self._slots_B = torch.tensor(slots, device=pool.device)

    def read(self, layer: int) -> Sequence[Tensor]:
        if self._dense is not None:
            return [tensor[self._dense] for tensor in self._tensors[layer]]
        return [tensor.index_select(0, self._slots_B) for tensor in self._tensors[layer]]

    def write(self, layer: int, states: Sequence[Tensor]) -> None:
        for tensor, state in zip(self._tensors[layer], states, strict=True):
            if self._dense is None:
                tensor.index_copy_(0, self._slots_B, state)
            elif (held := tensor[self._dense]).data_ptr() != state.data_ptr():
                held.copy_(state)

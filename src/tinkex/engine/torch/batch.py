"""Examples of several passes, laid end to end in packed micro-batches.

A micro-batch has about as many tokens as it is given a budget for and never cuts a datum; each run's tokens
are contiguous in it. Every item keeps its place in its pass, so results go back in the order given.
Knows nothing of adapters, of models or of what a loss does with its inputs.

Shapes: T tokens of a batch, M target cells of a batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tinkex.engine.torch.examples import Example, Work
from tinkex.engine.torch.logprobs import Targets
from tinkex.engine.torch.upload import to_device


@dataclass(frozen=True)
class Item:
    """An example in a batch, and where it came from."""

    work: int  # which pass of the command
    index: int  # which datum of the pass
    run: str
    example: Example


@dataclass(frozen=True)
class MicroBatch:
    """Examples laid end to end; the cells of item i are cells[i]:cells[i + 1]."""

    items: list[Item]
    backward: bool
    lengths: list[int]
    tokens_T: Tensor
    positions_T: Tensor
    targets: Targets
    cells: list[int]


@dataclass(frozen=True)
class ItemGroup:
    """The items of one micro-batch."""

    items: list[Item]
    backward: bool


def cut(works: Mapping[int, Work], budget: int) -> Iterator[ItemGroup]:
    """Cut passes into micro-batches of about `budget` tokens (a longer datum is one of its own).

    Passes with and without a backward do not mix. A run's items are neighbours, long ones first, so that
    equal lengths meet: attention takes equal neighbours at once.
    """
    for backward in (False, True):
        items = [
            Item(w, i, work.run, example)
            for w, work in works.items()
            if work.backward == backward
            for i, example in enumerate(work.examples)
        ]
        runs = {run: place for place, run in enumerate(dict.fromkeys(item.run for item in items))}
        items.sort(key=lambda item: (runs[item.run], item.work, -item.example.tokens.size))
        for group in _cut(items, budget):
            yield ItemGroup(group, backward)


def _cut(items: Iterable[Item], budget: int) -> Iterator[list[Item]]:
    group: list[Item] = []
    size = 0
    for item in items:
        length = item.example.tokens.size
        if group and size + length > budget:
            yield group
            group, size = [], 0
        group.append(item)
        size += length
    if group:
        yield group


def halves(batch: MicroBatch) -> Iterator[MicroBatch]:
    """The same items in two micro-batches."""
    middle = len(batch.items) // 2
    for items in (batch.items[:middle], batch.items[middle:]):
        yield micro_batch(items, batch.backward, batch.tokens_T.device)


def micro_batch(items: list[Item], backward: bool, device: torch.device) -> MicroBatch:
    examples = [item.example for item in items]
    lengths = [example.tokens.size for example in examples]
    tokens, counting = sum(lengths), np.arange(sum(lengths) + 1)
    per_row = [example.targets.size // len(example.targets) for example in examples]
    rows, starts = counting[:-1], counting  # as they are with one target in a row, nearly always
    if max(per_row) > 1:
        each = np.repeat(per_row, lengths)
        rows, starts = np.repeat(rows, each), np.concatenate([[0], np.cumsum(each)])
    positions = [counting[:length] for length in lengths]
    ids, read = [e.targets.reshape(-1) for e in examples], [e.tokens for e in examples]
    sent = to_device(np.concatenate([*read, *positions, rows, *ids], dtype=np.int64), device)  # in one go
    tokens_T, positions_T, rows_M, ids_M = sent.split([tokens, tokens, len(rows), len(rows)])
    return MicroBatch(
        items=items,
        backward=backward,
        lengths=lengths,
        tokens_T=tokens_T,
        positions_T=positions_T,
        targets=Targets(rows_M, ids_M, torch.from_numpy(starts)),
        cells=np.cumsum([0, *(example.targets.size for example in examples)]).tolist(),
    )


def flat_inputs(examples: Sequence[Example], device: torch.device) -> dict[str, Tensor]:
    """A built-in loss's inputs over the examples' cells, end to end, and each cell's example as "datum"."""
    sizes = [example.targets.size for example in examples]
    keys = examples[0].inputs
    inputs = {
        key: to_device(np.concatenate([e.inputs[key].reshape(-1) for e in examples]), device) for key in keys
    }
    return inputs | {"datum": to_device(np.repeat(np.arange(len(sizes)), sizes), device)}

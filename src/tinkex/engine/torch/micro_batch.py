"""From passes to packed micro-batches: check the datums, cut them by a token budget, lay them end to end.

A refusal is an EngineError of category "user" that names the datum, the key, what was given and what is
allowed. Defaults are filled in, so that a loss finds every input it may read. A micro-batch never splits a
datum, and each run's tokens are contiguous in it. Knows nothing of adapters or of what a loss does.

Shapes: N positions of a datum, K candidates of a position, T tokens and M target cells of a micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from tinkex.engine.protocol import EngineError, Pass
from tinkex.engine.request import user_error
from tinkex.engine.torch.logprobs import Targets
from tinkex.engine.torch.loss_graph import LossGraph, read_loss_graph
from tinkex.engine.torch.losses import LOSSES, Loss
from tinkex.engine.torch.upload import to_device
from tinkex.errors import InvalidInputError
from tinkex.types.data import Datum, EncodedTextChunk
from tinkex.types.losses import check_finite, check_inputs, filled_inputs, loss_settings, unknown_loss

_MOST_CELLS = 1 << 26  # of all inputs of a pass: a few bytes of a sparse tensor may stand for gigabytes


# -- checking ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TrainingExample:
    """One checked datum: what the model reads, and the loss's inputs for each target cell."""

    tokens: np.ndarray  # int32 [N]
    targets: np.ndarray  # int64 [N] or [N, K]
    inputs: Mapping[str, np.ndarray]  # built-in losses: float32, of the targets' shape; a graph's: as given


@dataclass(frozen=True)
class CheckedPass:
    """One pass whose content was checked."""

    run: str
    backward: bool
    examples: list[TrainingExample]
    loss: Loss | None  # None: `graph` is the loss
    settings: Mapping[str, float] = field(default_factory=dict)
    graph: LossGraph | None = None

    @property
    def local(self) -> bool:
        return self.loss is not None and self.loss.local


def read_pass(work: Pass, vocab: int, context: int) -> CheckedPass:
    """Check a pass; raises EngineError (category "user") at the first thing wrong."""
    if not work.data:
        raise user_error("a pass needs at least one datum, got none")
    cells = sum(math.prod(t.dense_shape) for datum in work.data for t in datum.loss_fn_inputs.values())
    if cells > _MOST_CELLS:
        raise user_error(
            f"the pass's loss_fn_inputs hold {cells} numbers, zeros included; allowed: {_MOST_CELLS}"
        )
    if work.loss_fn == "custom":
        return _read_custom(work, vocab, context)
    if work.loss_fn not in LOSSES:
        raise user_error(unknown_loss(work.loss_fn, [*LOSSES, "custom"]))
    with _refusing():
        settings = loss_settings(work.loss_fn, work.loss_fn_config)
    examples = []
    for i, datum in enumerate(work.data):
        with _refusing(i):
            tokens, targets = _tokens_and_targets(datum, work.loss_fn, vocab, context)
            inputs = filled_inputs(work.loss_fn, datum.loss_fn_inputs, settings)
        examples.append(TrainingExample(tokens, targets, inputs))
    return CheckedPass(work.run, work.backward, examples, LOSSES[work.loss_fn], settings)


def _read_custom(work: Pass, vocab: int, context: int) -> CheckedPass:
    if work.custom_loss is None:
        raise user_error("loss_fn 'custom' needs an uploaded loss graph, and this pass has none")
    if extra := [key for key in work.loss_fn_config if key != "loss_id"]:
        raise user_error(f"loss_fn_config has {extra[0]!r}; 'custom' takes: loss_id")
    graph = read_loss_graph(work.custom_loss)
    examples = []
    for i, datum in enumerate(work.data):
        inputs = {}
        with _refusing(i):
            tokens, targets = _tokens_and_targets(datum, "custom", vocab, context)
            for key in graph.inputs[1:]:
                if key not in datum.loss_fn_inputs:
                    raise InvalidInputError(f"loss_fn_inputs has no {key!r}, which the custom loss reads")
                check_finite(key, datum.loss_fn_inputs[key])
                inputs[key] = datum.loss_fn_inputs[key].to_numpy()
            graph.check(targets.shape, {key: (value.shape, value.dtype) for key, value in inputs.items()})
        examples.append(TrainingExample(tokens, targets, inputs))
    return CheckedPass(work.run, work.backward, examples, None, graph=graph)


def _tokens_and_targets(
    datum: Datum, loss_fn: str, vocab: int, context: int
) -> tuple[np.ndarray, np.ndarray]:
    for chunk in datum.model_input.chunks:
        if not isinstance(chunk, EncodedTextChunk):
            raise InvalidInputError(
                f"model_input holds {type(chunk).__name__}; this base model reads text only"
            )
    tokens = datum.model_input.to_numpy()
    if not tokens.size:
        raise InvalidInputError("model_input is empty")
    if tokens.size > context:
        raise InvalidInputError(f"model_input has {tokens.size} tokens; the model's context is {context}")
    # A chunk's token ids are never negative.
    if tokens.max() >= vocab:
        at = int(np.argmax(tokens >= vocab))
        raise InvalidInputError(f"model_input[{at}] is {tokens[at]}; token ids are 0..{vocab - 1}")
    check_inputs(loss_fn, datum.loss_fn_inputs, tokens.size, vocab, strict=True)
    return tokens, datum.loss_fn_inputs["target_tokens"].to_numpy()


@contextmanager
def _refusing(index: int | None = None) -> Iterator[None]:
    """Turn a refusal of the user's input into the engine's error, naming the datum."""
    try:
        yield
    except (InvalidInputError, EngineError) as error:
        raise user_error(str(error) if index is None else f"datum {index}: {error}") from None


# -- packing -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PackedExample:
    """An example in a micro-batch, and where it came from."""

    pass_index: int  # in its command
    index: int  # in its pass
    run: str
    example: TrainingExample


@dataclass(frozen=True)
class ExampleGroup:
    """The examples of one micro-batch."""

    items: list[PackedExample]
    backward: bool


@dataclass(frozen=True)
class MicroBatch:
    """Examples laid end to end on the device; the target cells of item i are cells[i]:cells[i + 1]."""

    items: list[PackedExample]
    backward: bool
    lengths: list[int]
    tokens_T: Tensor
    positions_T: Tensor
    targets: Targets
    cells: list[int]


def cut(passes: Mapping[int, CheckedPass], budget: int) -> Iterator[ExampleGroup]:
    """Groups of about `budget` tokens; a longer datum is a group of its own.

    Passes with and without a backward do not mix. Within a pass the longest datums come first, so that equal
    lengths are neighbours: attention computes those in one call.
    """
    for backward in (False, True):
        items = [
            PackedExample(p, i, one.run, example)
            for p, one in passes.items()
            if one.backward == backward
            for i, example in enumerate(one.examples)
        ]
        runs = {run: place for place, run in enumerate(dict.fromkeys(item.run for item in items))}
        items.sort(key=lambda item: (runs[item.run], item.pass_index, -item.example.tokens.size))
        for group in _cut(items, budget):
            yield ExampleGroup(group, backward)


def _cut(items: Iterable[PackedExample], budget: int) -> Iterator[list[PackedExample]]:
    group: list[PackedExample] = []
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
    """The same examples in two micro-batches."""
    middle = len(batch.items) // 2
    for items in (batch.items[:middle], batch.items[middle:]):
        yield micro_batch(items, batch.backward, batch.tokens_T.device)


def micro_batch(items: list[PackedExample], backward: bool, device: torch.device) -> MicroBatch:
    examples = [item.example for item in items]
    lengths = [example.tokens.size for example in examples]
    tokens, counting = sum(lengths), np.arange(sum(lengths) + 1)
    per_row = [example.targets.size // len(example.targets) for example in examples]
    rows, starts = counting[:-1], counting  # one target in each row
    if max(per_row) > 1:
        each = np.repeat(per_row, lengths)
        rows, starts = np.repeat(rows, each), np.concatenate([[0], np.cumsum(each)])
    positions = [counting[:length] for length in lengths]
    ids, read = [e.targets.reshape(-1) for e in examples], [e.tokens for e in examples]
    sent = to_device(np.concatenate([*read, *positions, rows, *ids], dtype=np.int64), device)  # one copy
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


def flat_inputs(examples: Sequence[TrainingExample], device: torch.device) -> dict[str, Tensor]:
    """A built-in loss's inputs over the examples' cells, end to end, and each cell's example as "datum"."""
    sizes = [example.targets.size for example in examples]
    keys = examples[0].inputs
    inputs = {
        key: to_device(np.concatenate([e.inputs[key].reshape(-1) for e in examples]), device) for key in keys
    }
    return inputs | {"datum": to_device(np.repeat(np.arange(len(sizes)), sizes), device)}

"""The trainer: micro-batches of many runs through one decoder, their losses, gradients and adapters.

`engine.command_trainer` executes the commands with it. Knows no sessions, order, file names or sampling.

Shapes: T tokens and M target cells of a micro-batch, D width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tinkex.engine import protocol as p
from tinkex.engine.command_trainer import CommandTrainer, PackedExample, RunningPass
from tinkex.engine.pass_content import TrainingExample, check_size, read_pass
from tinkex.engine.request import user_error
from tinkex.engine.torch import adapter_files, memory
from tinkex.engine.torch.adapters import Adapter, AdapterExport, lay_out
from tinkex.engine.torch.cpu_threads import SHARED, shared
from tinkex.engine.torch.device_copies import from_device, to_device
from tinkex.engine.torch.images import FeatureRows, feature_rows, spans_of
from tinkex.engine.torch.logprobs import GradOf, Targets, logprob_chunk, target_logprobs
from tinkex.engine.torch.lora import LoraBatch
from tinkex.engine.torch.loss_graph import (
    LOSS_SECONDS,
    SLICE_COST,
    LossClock,
    LossGraph,
    LossInputs,
)
from tinkex.engine.torch.loss_graph_reader import read_loss_graph
from tinkex.engine.torch.losses import TORCH_LOSSES, Inputs, Loss, gradient, per_datum
from tinkex.engine.torch.models.attend import PackedAttend
from tinkex.engine.torch.models.decoder import Decoder
from tinkex.engine.torch.optim import adamw_step
from tinkex.engine.torch.sampler_files import SamplerCopy
from tinkex.types.outputs import ForwardBackwardOutput
from tinkex.types.params import AdamParams, LoraConfig
from tinkex.types.tensor import TensorData

SUPPORTED_LOSSES = (*TORCH_LOSSES, "custom")


@dataclass(eq=False)
class TrainingPass(RunningPass):
    """The results so far, by datum. Losses and metrics are kept only for an uploaded loss (`graph`)."""

    graph: LossGraph | None = None
    costs: Sequence[int] = ()  # of an uploaded loss
    clock: LossClock | None = None
    logprobs: dict[int, np.ndarray] = field(default_factory=dict)
    losses: dict[int, float] = field(default_factory=dict)
    metrics: dict[int, dict[str, float]] = field(default_factory=dict)

    def results(self) -> tuple[dict[int, Any], ...]:
        return self.logprobs, self.losses, self.metrics

    @property
    def loss(self) -> Loss | None:
        return TORCH_LOSSES.get(self.work.loss_fn)

    def size(self, datum: int, budget: int) -> int:
        """A micro-batch also holds no more of uploaded losses than others may wait for."""
        tokens = super().size(datum, budget)
        return max(tokens, self.costs[datum] * budget // SLICE_COST) if self.costs else tokens

    def gradient(self, lp: Tensor, inputs: Inputs) -> Tensor:
        assert self.loss is not None
        return gradient(self.loss, lp, inputs, self.settings)


def read_training_pass(
    work: p.Pass, vocab: int, context: int, new_clock: Callable[[], LossClock], rest: Callable[[], None]
) -> Generator[None, None, TrainingPass]:
    if work.loss_fn != "custom":
        return TrainingPass(work, *(yield from read_pass(work, SUPPORTED_LOSSES, vocab, context)))
    check_size(work)
    if work.custom_loss is None:
        raise user_error("loss_fn 'custom' needs an uploaded loss graph, and this pass has none")
    if extra := [key for key in work.loss_fn_config if key != "loss_id"]:
        raise user_error(f"loss_fn_config has {extra[0]!r}; 'custom' takes: loss_id")
    inputs = LossInputs(graph := read_loss_graph(work.custom_loss), clock := new_clock(), rest, work.finished)
    checked = yield from read_pass(work, SUPPORTED_LOSSES, vocab, context, inputs.read)
    return TrainingPass(work, *checked, graph, inputs.costs, clock)


@dataclass(frozen=True)
class MicroBatch:
    """Examples laid end to end on the device; the target cells of item i are cells[i]:cells[i + 1]."""

    items: list[PackedExample[TrainingPass]]
    lengths: list[int]
    tokens_T: Tensor
    positions_T: Tensor
    targets: Targets
    cells: list[int]
    images: FeatureRows | None

    @property
    def backward(self) -> bool:
        return self.items[0].training.work.backward


def micro_batch(items: list[PackedExample[TrainingPass]], device: torch.device) -> MicroBatch:
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
    targets = Targets(rows_M, ids_M, torch.from_numpy(starts))
    cells = np.cumsum([0, *(example.targets.size for example in examples)]).tolist()
    images = feature_rows(((example.images, 0, example.tokens.size) for example in examples), device)
    return MicroBatch(items, lengths, tokens_T, positions_T, targets, cells, images)


def flat_inputs(examples: Sequence[TrainingExample], device: torch.device) -> dict[str, Tensor]:
    """A built-in loss's inputs over the examples' cells, end to end, and each cell's example as "datum"."""
    sizes = [example.targets.size for example in examples]
    inputs = {key: [e.inputs[key].reshape(-1) for e in examples] for key in examples[0].inputs}
    inputs["datum"] = [np.repeat(np.arange(len(sizes)), sizes)]
    return {key: to_device(np.concatenate(arrays), device) for key, arrays in inputs.items()}


class TorchTrainer(CommandTrainer[Adapter, TrainingPass]):
    """Trains adapters on `decoder`; `base_model` is its name in checkpoints."""

    def __init__(
        self,
        decoder: Decoder,
        base_model: str,
        *,
        max_context: int | None = None,
        max_pass_tokens: int | None = None,
        recompute: bool | None = None,  # layers in the backward; None: if memory is short
        share_from: int = SHARED,  # multiplications from which on CPU threads share the work
        loss_seconds: float = LOSS_SECONDS,
        stopping: Callable[[], str] = lambda: "",  # why to abort an uploaded loss now; "": continue
        rest: Callable[[], None] = lambda: None,  # called between two checks of uploaded losses
    ) -> None:
        super().__init__()
        self._loss_seconds, self._stopping, self._rest = loss_seconds, stopping, rest
        self.decoder, self._share_from = decoder, share_from
        self.base = adapter_files.BaseIdentity.of(decoder, base_model)
        config, weight = decoder.config, decoder.unembed_weight
        self._context = min(max_context or config.max_context, config.max_context)
        self._device, self._itemsize = weight.device, weight.dtype.itemsize
        self._max_pass_tokens, self._recompute = max_pass_tokens, recompute
        cap, chunk = config.logit_softcap, decoder.backend.logprob_chunk
        self._chunk: Callable[..., Tensor] = chunk if cap is None else partial(logprob_chunk, softcap=cap)
        memory.keep_pages(config, self._itemsize, self.pass_tokens(), self._device)

    @property
    def adapter_bytes(self) -> int:
        """Memory of the live adapters with gradients and moments. Any thread may ask."""
        return sum(adapter.nbytes for adapter in list(self.adapters.values()))

    def _fresh(self, lora: LoraConfig) -> Adapter:
        self._check_room(lora)
        return Adapter.fresh(lora, self.decoder.sites(), self._device)

    def _check_room(self, lora: LoraConfig) -> None:
        size = sum(shape.size for shape in lay_out(self.decoder.sites(), lora).values())
        needed, free = 4 * 4 * size, memory.free_bytes(self._device)  # parameters, gradients, two moments
        if needed > free:
            raise user_error(
                f"an adapter of rank {lora.rank} takes {needed / 2**30:.1f} GiB with its gradients and "
                f"optimizer state, and {free / 2**30:.1f} GiB are free"
            )

    def _step(self, adapter: Adapter, params: AdamParams) -> dict[str, float]:
        with shared(4 * adapter.flat.numel(), self._share_from):  # an element is four products' work
            return adamw_step(adapter, params)

    def sampler_copy(self, command: p.SaveAdapter) -> SamplerCopy:
        """What a save for sampling is to write, taken now."""
        dtype = self.decoder.unembed_weight.dtype
        return SamplerCopy(self.adapter(command.run), self.base, dtype, command)

    def _save(self, adapter: Adapter, command: p.SaveAdapter) -> int:
        if command.sampling:
            return self.sampler_copy(command).write()
        options = {"optimizer": command.optimizer, "overwrite": command.overwrite, "sync": command.sync}
        return adapter_files.save_adapter(adapter, command.location, self.base, **options)

    def load(self, location: p.Location, *, optimizer: bool = False) -> Adapter:
        with adapter_files.reading(location) as directory:
            return adapter_files.load_adapter(directory, self.decoder, self.base, optimizer=optimizer)

    def _export(self, adapter: Adapter) -> AdapterExport:
        return AdapterExport(adapter.snapshot(), self.base.fingerprint, adapter.shared)

    def published(self, source: p.Location | p.ExportedAdapter) -> Adapter:
        """The adapter that a sampler is to publish, on this device; nothing will change it."""
        if not isinstance(source, AdapterExport):
            assert isinstance(source, str), f"{type(source).__name__} is of another kind of engine"
            return self.load(source)
        self._check_fingerprint(source)
        shapes = lay_out(self.decoder.sites(), source.lora, shared=source.shared)
        return source.on(shapes, self._device)

    def _check_fingerprint(self, source: AdapterExport) -> None:
        if source.fingerprint != self.base.fingerprint:
            raise user_error(
                f"the adapter was trained on the base model {source.fingerprint}, and this one is "
                f"{self.base.name!r} ({self.base.fingerprint})"
            )

    def _check_loss(self, loss: p.CustomLoss) -> None:
        read_loss_graph(loss)

    def _read(self, work: p.Pass) -> Generator[None, None, TrainingPass]:
        vocab, seconds = self.decoder.config.vocab_size, math.inf if work.finished else self._loss_seconds
        clock = partial(LossClock, seconds, self._stopping)
        return read_training_pass(work, vocab, self._context, clock, self._rest)

    def pass_tokens(self) -> int:
        return self._max_pass_tokens or memory.pass_tokens(self.decoder.config, self._itemsize, self._device)

    def _compute(self, batch: list[PackedExample[TrainingPass]]) -> None:
        tokens = sum(item.example.tokens.size for item in batch)
        with shared(tokens * self.decoder.config.width**2, self._share_from):
            self._compute_packed(micro_batch(batch, self._device))

    def _compute_packed(self, batch: MicroBatch) -> None:
        """Compute a micro-batch; in halves if memory runs out in its forward, which changes nothing yet."""
        try:
            computed = self._forward(batch)
            if computed is not None:
                return self._backward(batch, *computed)
        except (RuntimeError, MemoryError) as error:  # out of memory, or a bug: other passes go on
            for item in batch.items:
                item.training.fail("server", f"the pass failed: {error}")
            return
        torch.cuda.empty_cache()  # does nothing without CUDA
        middle = len(batch.items) // 2
        for half in (batch.items[:middle], batch.items[middle:]):
            self._compute_packed(micro_batch(half, self._device))

    def _forward(self, batch: MicroBatch) -> tuple[Tensor, LoraBatch] | None:
        """The hidden states and the adapters' hook; None if memory is short for so many tokens at once."""
        backend, windows = self.decoder.backend, self.decoder.config.windows
        adapters = [self.adapter(item.training.run) for item in batch.items]
        lora = backend.lora(adapters, batch.lengths, train=batch.backward)
        attend = backend.packed_attend(batch.lengths, windows)
        if batch.images is not None and self.decoder.config.whole_images:  # of which kernels do not know
            attend = PackedAttend(batch.lengths, windows, [spans_of(i.example.images) for i in batch.items])
        try:
            with torch.set_grad_enabled(batch.backward):
                read = batch.tokens_T, batch.positions_T
                states = backend.packed_states(self.decoder.config, batch.lengths, self._device)
                more = {"images": batch.images, "checkpoint": self._recomputes(batch)}
                return self.decoder(*read, attend, lora, states=states, **more), lora
        except torch.OutOfMemoryError:
            if len(batch.items) == 1:
                raise
            return None

    def _recomputes(self, batch: MicroBatch) -> bool:
        if not batch.backward or self._recompute is not None:
            return batch.backward and bool(self._recompute)
        tokens = sum(batch.lengths)
        return memory.must_recompute(self.decoder.config, self._itemsize, self._device, tokens)

    def _backward(self, batch: MicroBatch, h_TD: Tensor, lora: LoraBatch) -> None:
        parts = self._pass_cells(batch)
        vocab = self.decoder.config.vocab_size
        of = (h_TD.detach(), self.decoder.unembed_weight, batch.targets, lora, vocab)
        compute = self._chunk
        if batch.backward and all(part.loss is not None and part.loss.local for part, *_ in parts):
            lp_M, grad_TD = target_logprobs(*of, _local_gradient(parts), compute=compute)
        else:
            lp_M, grad_TD = target_logprobs(*of, compute=compute)
            grad_M = torch.cat([_pass_gradient(part, lp_M, batch) for part in parts])
            if batch.backward:
                _, grad_TD = target_logprobs(*of, lambda lp, first, last: grad_M[first:last], compute=compute)
        landed = from_device(lp_M)  # copied while the device computes the backward
        if grad_TD is not None and h_TD.requires_grad:
            h_TD.backward(grad_TD)
        lp = landed()
        for i, item in enumerate(batch.items):
            cells = lp[batch.cells[i] : batch.cells[i + 1]]
            item.training.logprobs[item.datum] = cells.reshape(item.example.targets.shape)

    def _pass_cells(self, batch: MicroBatch) -> list[_PassCells]:
        parts, start = [], 0
        for training, group in groupby(batch.items, key=lambda item: item.training):
            examples = [item.example for item in group]
            stop = start + len(examples)
            inputs = flat_inputs(examples, self._device) if training.loss is not None else {}
            parts.append((training, range(start, stop), batch.cells[start], batch.cells[stop], inputs))
            start = stop
        return parts

    def _finish(self, training: TrainingPass) -> ForwardBackwardOutput:
        examples = training.examples
        logprobs = [training.logprobs[i] for i in range(len(examples))]
        if training.loss is not None:
            lp = torch.from_numpy(np.concatenate([lp.reshape(-1) for lp in logprobs]))
            inputs = flat_inputs(examples, torch.device("cpu"))
            terms = training.loss.terms(lp, inputs, training.settings)
            total = float(per_datum(terms, inputs["datum"], len(examples)).sum())
            metrics = training.loss.metrics(lp, inputs)
        else:
            total, metrics = sum(training.losses.values()), _reduce(list(training.metrics.values()))
        tokens = float(sum(example.tokens.size for example in examples))
        sizes = {"tokens:sum": tokens, "datums:sum": float(len(examples))}
        outputs = [{"logprobs": TensorData.from_numpy(lp)} for lp in logprobs]
        return ForwardBackwardOutput("TorchLossReturn", outputs, {"loss:sum": total} | sizes | metrics)


# -- gradients of the loss by the logprobs -------------------------------------------------------------

# One pass's part of a micro-batch: its items, its target cells first:last, and its loss's inputs.
_PassCells = tuple[TrainingPass, range, int, int, Inputs]


def _local_gradient(parts: list[_PassCells]) -> GradOf:
    """The gradient of any range of cells, where each cell's depends only on that cell."""

    def grad_of(lp: Tensor, first: int, last: int) -> Tensor:
        grads = []
        for training, _, start, stop, inputs in parts:
            a, b = max(first, start), min(last, stop)
            if a < b:
                some = {key: value[a - start : b - start] for key, value in inputs.items()}
                grads.append(training.gradient(lp[a - first : b - first], some))
        return torch.cat(grads) if grads else lp

    return grad_of


def _pass_gradient(part: _PassCells, lp_M: Tensor, batch: MicroBatch) -> Tensor:
    """The gradient of one pass's cells, from all their logprobs; zeros if the pass has failed."""
    training, items, first, last, inputs = part
    lp = lp_M[first:last]
    if training.graph is None:
        return training.gradient(lp, inputs) if training.work.backward else lp
    # On the CPU: a bad index in an uploaded loss is an error there, but loses a CUDA device.
    cells_M = lp_M.cpu()
    try:
        grads = [_graph_gradient(training.graph, cells_M, batch, i) for i in items]
        return torch.cat(grads).to(lp.device)
    except p.EngineLost:
        raise
    except p.EngineError as error:
        training.fail(error.category, error.message)
        return torch.zeros_like(lp)


def _graph_gradient(graph: LossGraph, lp_M: Tensor, batch: MicroBatch, i: int) -> Tensor:
    training, index = batch.items[i]
    example, clock = training.examples[index], training.clock
    assert clock is not None
    lp = lp_M[batch.cells[i] : batch.cells[i + 1]].reshape(example.targets.shape)
    try:
        with clock:
            outcome = graph.gradient(lp, example.inputs, clock.check)
        training.losses[index], grad, training.metrics[index] = outcome
    except p.EngineLost:
        raise
    except p.EngineError as error:
        raise p.EngineError(f"datum {index}: {error.message}", error.category) from None
    return grad.reshape(-1)


def _reduce(of_datums: list[dict[str, float]]) -> dict[str, float]:
    """A loss graph's metrics over datums: sums of `:sum`, means of `:mean`."""
    totals = {key: sum(metrics[key] for metrics in of_datums) for key in of_datums[0]}
    return {key: n / len(of_datums) if key.endswith(":mean") else n for key, n in totals.items()}

"""The trainer: executes commands on one decoder and the adapters that live on it.

Passes of many runs share each micro-batch, and a command computes at most one, so that an engine can decode
between two. A pass with wrong content fails alone, before anything of it is computed. Executes on the
caller's thread. Knows nothing of sessions, order, names on disk or sampling.

Shapes: T tokens and M target cells of a micro-batch, D width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from tinkex.engine import protocol as p
from tinkex.engine.pass_tickets import PassTickets
from tinkex.engine.request import user_error
from tinkex.engine.torch import adapter_files, memory
from tinkex.engine.torch.adapters import Adapter, AdapterExport, lay_out
from tinkex.engine.torch.cpu_threads import SHARED, shared
from tinkex.engine.torch.logprobs import GradOf, target_logprobs
from tinkex.engine.torch.lora import LoraBatch
from tinkex.engine.torch.loss_graph import read_loss_graph
from tinkex.engine.torch.losses import LOSSES, gradient, per_datum
from tinkex.engine.torch.micro_batch import (
    CheckedPass,
    ExampleGroup,
    MicroBatch,
    cut,
    flat_inputs,
    halves,
    micro_batch,
    read_pass,
)
from tinkex.engine.torch.models.decoder import Decoder
from tinkex.engine.torch.optim import adamw_step
from tinkex.engine.torch.upload import from_device
from tinkex.types.outputs import ForwardBackwardOutput
from tinkex.types.params import AdamParams, LoraConfig
from tinkex.types.tensor import TensorData

R = TypeVar("R")
SUPPORTED_LOSSES = (*LOSSES, "custom")


@dataclass
class _TrainingPass:
    """A `RunningPass`: the results so far, by datum. Loss and metrics are kept for loss graphs alone."""

    checked: CheckedPass
    logprobs: dict[int, np.ndarray] = field(default_factory=dict)
    losses: dict[int, float] = field(default_factory=dict)
    metrics: dict[int, dict[str, float]] = field(default_factory=dict)
    failure: p.Failure | None = None

    @property
    def run(self) -> str:
        return self.checked.run

    def fail(self, category: Any, message: str) -> None:
        self.failure = self.failure or p.Failure(category, message)


@dataclass(frozen=True)
class _PassCells:
    """One pass's part of a micro-batch: items start:stop, target cells first:last, its loss's inputs."""

    training: _TrainingPass
    start: int
    stop: int
    first: int
    last: int
    inputs: Mapping[str, Tensor]


class TorchTrainer:
    """Trains adapters on `decoder`; `base_model` is its name in checkpoints.

    >>> trainer = TorchTrainer(load_decoder("models/SmolLM2"), "SmolLM2")       # doctest: +SKIP
    >>> trainer.execute(CreateAdapter("run", LoraConfig(rank=8)))                # doctest: +SKIP
    """

    def __init__(
        self,
        decoder: Decoder,
        base_model: str,
        *,
        max_context: int | None = None,
        max_pass_tokens: int | None = None,
        recompute: bool | None = None,  # layers in the backward; None: if memory is short
        share_from: int = SHARED,  # multiplications from which on CPU threads share the work
    ) -> None:
        self.decoder, self._share_from = decoder, share_from
        self.base = adapter_files.BaseIdentity.of(decoder, base_model)
        config = decoder.config
        self._context = min(max_context or config.max_context, config.max_context)
        self._device, self._dtype = decoder.unembed_weight.device, decoder.unembed_weight.dtype
        self._max_pass_tokens, self._recompute = max_pass_tokens, recompute
        self._adapters: dict[str, Adapter] = {}
        self._passes: PassTickets[_TrainingPass, ExampleGroup] = PassTickets(self._compute, self._outcome)
        if self._device.type == "cpu":
            memory.keep_pages(config, self._dtype.itemsize, self._pass_tokens())

    def execute(self, command: p.Command[R]) -> R:
        """Execute one command; its type says what it returns."""
        try:
            return cast(R, self._execute(command))
        except OSError as error:  # a disk that is full or gone
            raise p.EngineError(f"{type(command).__name__} failed: {error}") from error

    def run_passes(self, passes: Sequence[p.Pass]) -> list[p.PassOutcome]:
        """Execute passes to their end."""
        outcome = self.execute(p.ForwardBackward(tuple(passes)))
        while isinstance(outcome, p.PassProgress):
            outcome = self.execute(p.ContinuePasses(outcome.ticket))
        return outcome

    def _execute(self, command: p.Command[Any]) -> Any:
        match command:
            case p.CreateAdapter(run, lora):
                return self._create(run, lora)
            case p.ForwardBackward(passes):
                return self._begin(passes)
            case p.ContinuePasses(ticket):
                return self._passes.advance(ticket)
            case p.OptimStep(run, params):
                return self._step(run, params)
            case p.ClearGradients(run):
                self.adapter(run).take_grad()
                return self._passes.abandon(run)
            case p.SaveAdapter(run, location, optimizer, overwrite, sync):
                options = {"optimizer": optimizer, "overwrite": overwrite, "sync": sync}
                return adapter_files.save_adapter(self.adapter(run), Path(location), self.base, **options)
            case p.LoadAdapter(run, location, optimizer):
                return self._load(run, Path(location), optimizer)
            case p.ExportAdapter(run):
                return AdapterExport(self.adapter(run).snapshot(), self.base.fingerprint)
            case p.DropAdapter(run):
                self._adapters.pop(run, None)
                return self._passes.abandon(run)
            case p.CheckLoss(loss):
                read_loss_graph(loss)
                return None
        raise p.EngineError(f"{type(command).__name__} is not a command this trainer knows")

    # -- adapters --------------------------------------------------------------------------------------

    def adapter(self, run: str) -> Adapter:
        """The live adapter of `run`."""
        if run not in self._adapters:
            raise p.EngineError(f"run {run!r} has no adapter on this engine")
        return self._adapters[run]

    def load(self, location: Path, *, optimizer: bool = False) -> Adapter:
        """A saved adapter that belongs to no run."""
        sites, head = self.decoder.sites(), self.decoder.unembed_weight
        return adapter_files.load_adapter(
            location, sites, self._experts, self.base, head, optimizer=optimizer
        )

    def published(self, source: p.Location | p.ExportedAdapter) -> Adapter:
        """The adapter that a sampler is to publish, on this device; nothing will change it."""
        if not isinstance(source, AdapterExport):
            assert isinstance(source, str), f"{type(source).__name__} is of another kind of engine"
            return self.load(Path(source))
        if source.fingerprint != self.base.fingerprint:
            raise user_error(
                f"the adapter was trained on the base model {source.fingerprint}, and this one is "
                f"{self.base.name!r} ({self.base.fingerprint})"
            )
        return source.on(lay_out(self.decoder.sites(), source.lora, self._experts), self._device)

    @property
    def adapter_bytes(self) -> int:
        """Memory of the live adapters with gradients and moments. Any thread may ask."""
        return sum(adapter.nbytes for adapter in list(self._adapters.values()))

    @property
    def adapters(self) -> int:
        return len(self._adapters)

    @property
    def _experts(self) -> int:
        return self.decoder.config.experts.count if self.decoder.config.experts else 1

    def _create(self, run: str, lora: LoraConfig) -> None:
        if run in self._adapters:
            raise user_error(f"run {run!r} already has an adapter")
        sites = self.decoder.sites()
        size = sum(shape.size for shape in lay_out(sites, lora, self._experts).values())
        needed, free = 4 * 4 * size, memory.free_bytes(self._device)  # parameters, gradients, two moments
        if needed > free:
            raise user_error(
                f"an adapter of rank {lora.rank} takes {needed / 2**30:.1f} GiB with its gradients and "
                f"optimizer state, and {free / 2**30:.1f} GiB are free"
            )
        self._adapters[run] = Adapter.fresh(lora, sites, self._device, self._experts)

    def _load(self, run: str, location: Path, optimizer: bool) -> LoraConfig:
        adapter = self.load(location, optimizer=optimizer)
        if run in self._adapters:
            adapter_files.check_fits(self._adapters[run].lora, adapter.lora, location)
        self._adapters[run] = adapter
        self._passes.abandon(run)
        return adapter.lora

    def _step(self, run: str, params: AdamParams) -> dict[str, float]:
        adapter = self.adapter(run)
        if self._passes.under_way(run):
            raise p.EngineError(f"run {run!r} has a pass under way: its gradients are not complete yet")
        with shared(4 * adapter.flat.numel(), self._share_from):  # an element is four products' work
            return adamw_step(adapter, params)

    # -- passes ----------------------------------------------------------------------------------------

    def _begin(self, passes: tuple[p.Pass, ...]) -> p.PassProgress | list[p.PassOutcome]:
        running: list[_TrainingPass | p.Failure] = []
        for one in passes:
            try:
                self.adapter(one.run)
                running.append(_TrainingPass(read_pass(one, self.decoder.config.vocab_size, self._context)))
            except p.EngineError as error:
                running.append(p.Failure(error.category, error.message))
        checked = {i: one.checked for i, one in enumerate(running) if isinstance(one, _TrainingPass)}
        return self._passes.begin(running, list(cut(checked, self._pass_tokens())))

    def _outcome(self, training: _TrainingPass) -> p.PassOutcome:
        if training.failure is None:
            return _output(training)
        if training.checked.backward and training.run in self._adapters:
            self._adapters[training.run].take_grad()  # part of a pass's gradient must never be applied
        return training.failure

    def _pass_tokens(self) -> int:
        """Tokens of a micro-batch."""
        config, itemsize = self.decoder.config, self._dtype.itemsize
        return self._max_pass_tokens or memory.pass_tokens(config, itemsize, self._device)

    def _compute(self, passes: Sequence[_TrainingPass | p.Failure], group: ExampleGroup) -> None:
        """One micro-batch, without the passes that have failed."""
        going = {i: one for i, one in enumerate(passes) if isinstance(one, _TrainingPass) and not one.failure}
        items = [item for item in group.items if item.pass_index in going]
        if items:
            batch = micro_batch(items, group.backward, self._device)
            with shared(len(batch.tokens_T) * self.decoder.config.width**2, self._share_from):
                self._micro_batch(batch, going)

    def _micro_batch(self, batch: MicroBatch, passes: Mapping[int, _TrainingPass]) -> None:
        """Compute a micro-batch; in halves if memory runs out in its forward, which changes nothing yet."""
        try:
            computed = self._forward(batch)
            if computed is not None:
                return self._backward(batch, passes, *computed)
        except (RuntimeError, MemoryError) as error:  # out of memory, or a bug: other passes go on
            for item in batch.items:
                passes[item.pass_index].fail("server", f"the pass failed: {error}")
            return
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        for half in halves(batch):
            self._micro_batch(half, passes)

    def _forward(self, batch: MicroBatch) -> tuple[Tensor, LoraBatch] | None:
        """The hidden states and the adapters' hook; None if memory is short for so many tokens at once."""
        adapters = [self.adapter(item.run) for item in batch.items]
        backend = self.decoder.backend
        lora = backend.lora(adapters, batch.lengths, train=batch.backward)
        attend = backend.packed_attend(batch.lengths, self.decoder.config.windows)
        try:
            with torch.set_grad_enabled(batch.backward):
                h_TD = self.decoder(
                    batch.tokens_T, batch.positions_T, attend, lora, checkpoint=self._recomputes(batch)
                )
        except torch.OutOfMemoryError:
            if len(batch.items) == 1:
                raise
            return None
        return h_TD, lora

    def _recomputes(self, batch: MicroBatch) -> bool:
        if not batch.backward or self._recompute is not None:
            return batch.backward and bool(self._recompute)
        config, itemsize = self.decoder.config, self._dtype.itemsize
        return memory.must_recompute(config, itemsize, self._device, sum(batch.lengths))

    def _backward(
        self, batch: MicroBatch, passes: Mapping[int, _TrainingPass], h_TD: Tensor, lora: LoraBatch
    ) -> None:
        """Logprobs, losses and gradients."""
        parts = self._pass_cells(batch, passes)
        of = (h_TD.detach(), self.decoder.unembed_weight, batch.targets, lora)
        compute = self.decoder.backend.logprob_chunk
        if batch.backward and all(part.training.checked.local for part in parts):
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
            passes[item.pass_index].logprobs[item.index] = cells.reshape(item.example.targets.shape)

    def _pass_cells(self, batch: MicroBatch, passes: Mapping[int, _TrainingPass]) -> list[_PassCells]:
        parts, start = [], 0
        for index, group in groupby(batch.items, key=lambda item: item.pass_index):
            examples = [item.example for item in group]
            stop = start + len(examples)
            inputs = flat_inputs(examples, self._device) if passes[index].checked.loss is not None else {}
            cells = batch.cells[start], batch.cells[stop]
            parts.append(_PassCells(passes[index], start, stop, *cells, inputs))
            start = stop
        return parts


# -- gradients of the loss by the logprobs -------------------------------------------------------------


def _local_gradient(parts: list[_PassCells]) -> GradOf:
    """The gradient of any range of cells, when every cell's depends on that cell alone."""

    def grad_of(lp: Tensor, first: int, last: int) -> Tensor:
        grads = []
        for part in parts:
            a, b = max(first, part.first), min(last, part.last)
            if a < b:
                checked = part.training.checked
                inputs = {key: value[a - part.first : b - part.first] for key, value in part.inputs.items()}
                assert checked.loss is not None
                grads.append(gradient(checked.loss, lp[a - first : b - first], inputs, checked.settings))
        return torch.cat(grads) if grads else lp

    return grad_of


def _pass_gradient(part: _PassCells, lp_M: Tensor, batch: MicroBatch) -> Tensor:
    """The gradient of one pass's cells, from all their logprobs; zeros if the pass has failed."""
    checked, lp = part.training.checked, lp_M[part.first : part.last]
    if checked.graph is None:
        assert checked.loss is not None
        return gradient(checked.loss, lp, part.inputs, checked.settings) if checked.backward else lp
    # On the CPU: a bad index in an uploaded loss is an error there, but loses a CUDA device.
    cells_M = lp_M.cpu()
    try:
        grads = [_graph_gradient(part.training, cells_M, batch, i) for i in range(part.start, part.stop)]
        return torch.cat(grads).to(lp.device)
    except p.EngineError as error:
        part.training.fail(error.category, error.message)
        return torch.zeros_like(lp)


def _graph_gradient(training: _TrainingPass, lp_M: Tensor, batch: MicroBatch, i: int) -> Tensor:
    """Run the uploaded loss on one datum; keeps its loss and metrics."""
    item, graph = batch.items[i], training.checked.graph
    assert graph is not None
    lp = lp_M[batch.cells[i] : batch.cells[i + 1]].reshape(item.example.targets.shape)
    try:
        loss, grad, training.metrics[item.index] = graph.gradient(lp, item.example.inputs)
    except p.EngineError as error:
        raise p.EngineError(f"datum {item.index}: {error.message}", error.category) from None
    training.losses[item.index] = loss
    return grad.reshape(-1)


# -- outcomes ------------------------------------------------------------------------------------------


def _output(training: _TrainingPass) -> ForwardBackwardOutput:
    checked = training.checked
    logprobs = [training.logprobs[i] for i in range(len(checked.examples))]
    metrics = {
        "tokens:sum": float(sum(example.tokens.size for example in checked.examples)),
        "datums:sum": float(len(checked.examples)),
    }
    if checked.loss is not None:
        lp = torch.from_numpy(np.concatenate([lp.reshape(-1) for lp in logprobs]))
        inputs = flat_inputs(checked.examples, torch.device("cpu"))
        terms = checked.loss.terms(lp, inputs, checked.settings)
        losses = per_datum(terms, inputs["datum"], len(checked.examples))
        metrics = {"loss:sum": float(losses.sum())} | metrics | checked.loss.metrics(lp, inputs)
    else:
        reduced = _reduce(list(training.metrics.values()))
        metrics = {"loss:sum": sum(training.losses.values())} | metrics | reduced
    outputs = [{"logprobs": TensorData.from_numpy(lp)} for lp in logprobs]
    return ForwardBackwardOutput("TorchLossReturn", outputs, metrics)


def _reduce(of_datums: list[dict[str, float]]) -> dict[str, float]:
    """A loss graph's metrics over datums: sums of `:sum`, means of `:mean`."""
    metrics = {}
    for key in of_datums[0]:
        total = sum(metrics[key] for metrics in of_datums)
        metrics[key] = total / len(of_datums) if key.endswith(":mean") else total
    return metrics

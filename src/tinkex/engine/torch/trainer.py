"""The trainer: runs commands on one decoder and the adapters that live on it.

Passes of many runs share each micro-batch; a pass with wrong content fails alone, before anything of it is
computed. A command computes at most one micro-batch, so that an engine can decode between two. Executes on
the caller's thread. Knows nothing of sessions, order, names on disk or sampling.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from tinkex.engine import protocol as p
from tinkex.engine.torch import checkpoint, memory
from tinkex.engine.torch.adapters import Adapter, AdapterExport, lay_out
from tinkex.engine.torch.batch import ItemGroup, MicroBatch, cut, flat_inputs, halves, micro_batch
from tinkex.engine.torch.examples import Limits, Work, read_pass
from tinkex.engine.torch.logprobs import GradOf, target_logprobs
from tinkex.engine.torch.lora import LoraBatch
from tinkex.engine.torch.loss_graph import read_loss_graph
from tinkex.engine.torch.losses import LOSSES, gradient, per_datum
from tinkex.engine.torch.model import Decoder
from tinkex.engine.torch.optim import adamw_step
from tinkex.engine.torch.threads import SHARED, shared
from tinkex.engine.torch.upload import from_device
from tinkex.types.outputs import ForwardBackwardOutput
from tinkex.types.params import AdamParams, LoraConfig
from tinkex.types.tensor import TensorData

R = TypeVar("R")
SUPPORTED_LOSSES = (*LOSSES, "custom")


@dataclass
class _State:
    """What a pass has given so far: by datum, logprobs, and for a graph its loss and metrics too."""

    work: Work
    logprobs: dict[int, np.ndarray] = field(default_factory=dict)
    losses: dict[int, float] = field(default_factory=dict)
    metrics: dict[int, dict[str, float]] = field(default_factory=dict)
    failure: p.Failure | None = None


@dataclass
class _Ticket:
    """A batch of passes under way: `done` of its micro-batches are computed."""

    states: list[_State | p.Failure]
    groups: list[ItemGroup]
    done: int = 0

    @property
    def going(self) -> list[_State]:
        return [state for state in self.states if isinstance(state, _State) and state.failure is None]


class TorchTrainer:
    """Trains adapters on `decoder`; `base_model` is its name for the checkpoints' sake.

    >>> trainer = TorchTrainer(load_decoder("models/SmolLM2"), "SmolLM2")       # doctest: +SKIP
    >>> trainer.execute(CreateAdapter("run", LoraConfig(rank=8)))                    # doctest: +SKIP
    """

    def __init__(
        self,
        decoder: Decoder,
        base_model: str,
        *,
        max_context: int | None = None,
        max_pass_tokens: int | None = None,
        recompute: bool | None = None,  # layers in the backward; None: as memory asks for
        share_from: int = SHARED,  # work from which on threads share it
    ) -> None:
        self.decoder, self._share_from = decoder, share_from
        self.base = checkpoint.BaseModel.of(decoder, base_model)
        config = decoder.config
        self._limits = Limits(config.vocab_size, min(max_context or config.max_context, config.max_context))
        self._device, self._dtype = decoder.unembed_weight.device, decoder.unembed_weight.dtype
        self._max_pass_tokens, self._recompute = max_pass_tokens, recompute
        self._adapters: dict[str, Adapter] = {}
        self._tickets: dict[str, _Ticket] = {}
        self._serial = itertools.count()
        if self._device.type == "cpu":
            memory.keep_pages(config, self._dtype.itemsize, self._pass_tokens())

    def execute(self, command: p.Command[R]) -> R:
        """Execute one command; its type says what it returns."""
        try:
            return cast(R, self._dispatch(command))
        except OSError as error:  # a disk that is full or gone
            raise p.EngineError(f"{type(command).__name__} failed: {error}") from error

    def run(self, command: p.Command[Any]) -> Any:
        """Execute a command, and passes to their end."""
        outcome = self.execute(command)
        while isinstance(outcome, p.PassProgress):
            outcome = self.execute(p.ContinuePasses(outcome.ticket))
        return outcome

    def _dispatch(self, command: p.Command[Any]) -> Any:
        match command:
            case p.CreateAdapter(run, lora):
                return self._create(run, lora)
            case p.ForwardBackward(passes):
                return self._begin(passes)
            case p.ContinuePasses(ticket):
                return self._continue(ticket)
            case p.OptimStep(run, params):
                return self._step(run, params)
            case p.ClearGradients(run):
                self.adapter(run).take_grad()
                return self._abandon(run)
            case p.SaveAdapter(run, location, optimizer, overwrite, sync):
                return checkpoint.save_adapter(
                    self.adapter(run),
                    Path(location),
                    self.base,
                    optimizer=optimizer,
                    overwrite=overwrite,
                    sync=sync,
                )
            case p.LoadAdapter(run, location, optimizer):
                return self._load(run, Path(location), optimizer)
            case p.ExportAdapter(run):
                return AdapterExport(self.adapter(run).snapshot(), self.base.fingerprint)
            case p.DropAdapter(run):
                self._adapters.pop(run, None)
                return self._abandon(run)
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

    def load(self, directory: Path, *, optimizer: bool = False) -> Adapter:
        """A saved adapter, belonging to no run."""
        return checkpoint.load_adapter(
            directory,
            self.decoder.sites(),
            self._experts,
            self.base,
            self.decoder.unembed_weight,
            optimizer=optimizer,
        )

    @property
    def adapter_bytes(self) -> int:
        """What the live adapters hold: parameters, gradients and moments. Any thread may ask."""
        return sum(adapter.nbytes for adapter in list(self._adapters.values()))

    @property
    def adapters(self) -> int:
        return len(self._adapters)

    @property
    def _experts(self) -> int:
        return self.decoder.config.experts.count if self.decoder.config.experts else 1

    def _create(self, run: str, lora: LoraConfig) -> None:
        if run in self._adapters:
            raise p.EngineError(f"run {run!r} already has an adapter", "user")
        sites = self.decoder.sites()
        size = sum(shape.size for shape in lay_out(sites, lora, self._experts).values())
        needed, free = 4 * 4 * size, memory.free_bytes(self._device)  # parameters, gradients, two moments
        if needed > free:
            raise p.EngineError(
                f"an adapter of rank {lora.rank} takes {needed / 2**30:.1f} GiB with its gradients and "
                f"optimizer state, and {free / 2**30:.1f} GiB are free",
                "user",
            )
        self._adapters[run] = Adapter.fresh(lora, sites, self._device, self._experts)

    def _load(self, run: str, directory: Path, optimizer: bool) -> LoraConfig:
        adapter = self.load(directory, optimizer=optimizer)
        if run in self._adapters:
            checkpoint.check_fits(self._adapters[run].lora, adapter.lora, directory)
        self._adapters[run] = adapter
        self._abandon(run)
        return adapter.lora

    def _step(self, run: str, params: AdamParams) -> dict[str, float]:
        adapter = self.adapter(run)
        if any(state.work.run == run for ticket in self._tickets.values() for state in ticket.going):
            raise p.EngineError(f"run {run!r} has a pass under way: its gradients are not whole yet")
        with shared(4 * adapter.flat.numel(), self._share_from):  # an element is four products' work
            return adamw_step(adapter, params)

    def published(self, source: p.Location | p.ExportedAdapter) -> Adapter:
        """The adapter that a sampler is to publish, on this device; nothing will change it."""
        if not isinstance(source, AdapterExport):
            assert isinstance(source, str), f"{type(source).__name__} is of another kind of engine"
            return self.load(Path(source))
        if source.fingerprint != self.base.fingerprint:
            raise p.EngineError(
                f"the adapter was trained on the base model {source.fingerprint}, and this one is "
                f"{self.base.name!r} ({self.base.fingerprint})",
                "user",
            )
        return source.on(lay_out(self.decoder.sites(), source.lora, self._experts), self._device)

    # -- passes ----------------------------------------------------------------------------------------

    def _begin(self, passes: tuple[p.Pass, ...]) -> p.PassProgress | list[p.PassOutcome]:
        states: list[_State | p.Failure] = []
        for one in passes:
            try:
                self.adapter(one.run)
                states.append(_State(read_pass(one, self._limits)))
            except p.EngineError as error:
                states.append(p.Failure(error.category, error.message))
        works = {i: state.work for i, state in enumerate(states) if isinstance(state, _State)}
        name = f"pass-{next(self._serial)}"
        self._tickets[name] = _Ticket(states, list(cut(works, self._pass_tokens())))
        return self._continue(name)

    def _continue(self, name: str) -> p.PassProgress | list[p.PassOutcome]:
        ticket = self._tickets.get(name)
        if ticket is None:
            raise p.EngineError(f"no passes with the ticket {name!r} are under way")
        if ticket.groups:
            self._compute(ticket)
        if ticket.done < len(ticket.groups):
            return p.PassProgress(name, ticket.done, len(ticket.groups))
        del self._tickets[name]
        return [self._outcome(state) for state in ticket.states]

    def _compute(self, ticket: _Ticket) -> None:
        """The next micro-batch, without the passes that have failed."""
        group = ticket.groups[ticket.done]
        states = {i: state for i, state in enumerate(ticket.states) if isinstance(state, _State)}
        items = [item for item in group.items if states[item.work].failure is None]
        if items:
            batch = micro_batch(items, group.backward, self._device)
            with shared(len(batch.tokens_T) * self.decoder.config.width**2, self._share_from):
                self._micro_batch(batch, states)
        ticket.done += 1

    def _outcome(self, state: _State | p.Failure) -> p.PassOutcome:
        if isinstance(state, p.Failure):
            return state
        if state.failure is None:
            return _output(state)
        if state.work.backward and state.work.run in self._adapters:
            self._adapters[state.work.run].take_grad()  # some of it may be in, and half must not count
        return state.failure

    def _abandon(self, run: str) -> None:
        """Fail the passes of `run` that are under way; a ticket without others is forgotten."""
        for name, ticket in list(self._tickets.items()):
            for state in ticket.going:
                if state.work.run == run:
                    state.failure = p.Failure("server", f"the pass of run {run!r} was abandoned")
            if not ticket.going:
                del self._tickets[name]

    def _pass_tokens(self) -> int:
        """How many tokens a micro-batch has."""
        config, itemsize = self.decoder.config, self._dtype.itemsize
        return self._max_pass_tokens or memory.pass_tokens(config, itemsize, self._device)

    def _micro_batch(self, batch: MicroBatch, states: Mapping[int, _State]) -> None:
        """Compute one micro-batch; in halves if memory runs out in its forward, where nothing counts yet."""
        try:
            computed = self._forward(batch)
            if computed is not None:
                return self._count(batch, states, *computed)
        except (RuntimeError, MemoryError) as error:  # out of memory, or a bug: the others go on
            failure = p.Failure("server", f"the pass failed: {error}")
            for item in batch.items:
                states[item.work].failure = states[item.work].failure or failure
            return
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        for half in halves(batch):
            self._micro_batch(half, states)

    def _forward(self, batch: MicroBatch) -> tuple[Tensor, LoraBatch] | None:
        """Hidden states and the adapters they came through; None if memory is short for so many at once."""
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

    def _count(self, batch: MicroBatch, states: Mapping[int, _State], h_TD: Tensor, lora: LoraBatch) -> None:
        """Logprobs, losses and gradients."""
        spans = self._spans(batch, states)
        of = (h_TD.detach(), self.decoder.unembed_weight, batch.targets, lora)
        compute = self.decoder.backend.logprob_chunk
        if batch.backward and all(span.state.work.local for span in spans):
            lp_M, grad_TD = target_logprobs(*of, _local_gradient(spans), compute=compute)
        else:
            lp_M, grad_TD = target_logprobs(*of, compute=compute)
            grad_M = torch.cat([self._span_gradient(span, lp_M, batch) for span in spans])
            if batch.backward:
                _, grad_TD = target_logprobs(*of, lambda lp, first, last: grad_M[first:last], compute=compute)
        landed = from_device(lp_M)  # so that results are made up while the device is at the backward
        if grad_TD is not None and h_TD.requires_grad:
            h_TD.backward(grad_TD)
        lp = landed()
        for i, item in enumerate(batch.items):
            cells = lp[batch.cells[i] : batch.cells[i + 1]]
            states[item.work].logprobs[item.index] = cells.reshape(item.example.targets.shape)

    def _recomputes(self, batch: MicroBatch) -> bool:
        if not batch.backward or self._recompute is not None:
            return batch.backward and bool(self._recompute)
        config, itemsize = self.decoder.config, self._dtype.itemsize
        return memory.must_recompute(config, itemsize, self._device, sum(batch.lengths))

    def _spans(self, batch: MicroBatch, states: Mapping[int, _State]) -> list[_Span]:
        spans, start = [], 0
        for work, group in groupby(batch.items, key=lambda item: item.work):
            items = list(group)
            stop = start + len(items)
            examples = [item.example for item in items]
            inputs = flat_inputs(examples, self._device) if states[work].work.loss is not None else {}
            spans.append(_Span(states[work], start, stop, batch.cells[start], batch.cells[stop], inputs))
            start = stop
        return spans

    def _span_gradient(self, span: _Span, lp_M: Tensor, batch: MicroBatch) -> Tensor:
        """The gradient of one pass's cells, from all their logprobs; zeros if the pass has failed."""
        work, lp = span.state.work, lp_M[span.first : span.last]
        if work.graph is None:
            assert work.loss is not None
            return gradient(work.loss, lp, span.inputs, work.settings) if work.backward else lp
        # on the CPU: what an uploaded loss does wrong is an error there, and on a GPU the end of the device
        cells_M = lp_M.cpu()
        try:
            grads = [_graph_gradient(span.state, cells_M, batch, i) for i in range(span.start, span.stop)]
            return torch.cat(grads).to(lp.device)
        except p.EngineError as error:
            span.state.failure = span.state.failure or p.Failure(error.category, error.message)
            return torch.zeros_like(lp)


@dataclass(frozen=True)
class _Span:
    """One pass's part of a micro-batch: items start:stop, cells first:last, its loss's inputs."""

    state: _State
    start: int
    stop: int
    first: int
    last: int
    inputs: Mapping[str, Tensor]


def _local_gradient(spans: list[_Span]) -> GradOf:
    """The gradient of any range of cells, when every cell's depends on that cell alone."""

    def grad_of(lp: Tensor, first: int, last: int) -> Tensor:
        grads = []
        for span in spans:
            a, b = max(first, span.first), min(last, span.last)
            if a < b:
                work = span.state.work
                inputs = {key: value[a - span.first : b - span.first] for key, value in span.inputs.items()}
                assert work.loss is not None
                grads.append(gradient(work.loss, lp[a - first : b - first], inputs, work.settings))
        return torch.cat(grads) if grads else lp

    return grad_of


def _graph_gradient(state: _State, lp_M: Tensor, batch: MicroBatch, i: int) -> Tensor:
    """Run the uploaded loss on one datum; keeps its loss and metrics."""
    item, graph = batch.items[i], state.work.graph
    assert graph is not None
    lp = lp_M[batch.cells[i] : batch.cells[i + 1]].reshape(item.example.targets.shape)
    leaf = lp.detach().requires_grad_()
    with torch.enable_grad():
        try:
            loss, state.metrics[item.index] = graph.run(leaf, item.example.inputs)
        except p.EngineError as error:
            raise p.EngineError(f"datum {item.index}: {error.message}", error.category) from None
        state.losses[item.index] = float(loss.detach())
        if not loss.requires_grad:
            return torch.zeros_like(lp).reshape(-1)
        try:
            (grad,) = torch.autograd.grad(loss, leaf, allow_unused=True)
        except RuntimeError as error:  # not every operation has a derivative
            reason = str(error).split("\n")[0]
            raise p.EngineError(
                f"datum {item.index}: the custom loss has no gradient: {reason}", "user"
            ) from None
    return (torch.zeros_like(lp) if grad is None else grad.to(lp.dtype)).reshape(-1)


def _output(state: _State) -> ForwardBackwardOutput:
    work = state.work
    logprobs = [state.logprobs[i] for i in range(len(work.examples))]
    metrics = {
        "tokens:sum": float(sum(example.tokens.size for example in work.examples)),
        "datums:sum": float(len(work.examples)),
    }
    if work.loss is not None:
        lp, inputs = _flat(logprobs), flat_inputs(work.examples, torch.device("cpu"))
        terms = work.loss.terms(lp, inputs, work.settings)
        losses = per_datum(terms, inputs["datum"], len(work.examples))
        metrics = {"loss:sum": float(losses.sum())} | metrics | work.loss.metrics(lp, inputs)
    else:
        metrics = {"loss:sum": sum(state.losses.values())} | metrics | _reduce(list(state.metrics.values()))
    outputs = [{"logprobs": TensorData.from_numpy(lp)} for lp in logprobs]
    return ForwardBackwardOutput("TorchLossReturn", outputs, metrics)


def _flat(logprobs: list[np.ndarray]) -> Tensor:
    return torch.from_numpy(np.concatenate([lp.reshape(-1) for lp in logprobs]))


def _reduce(per_datum_metrics: list[dict[str, float]]) -> dict[str, float]:
    """A graph's metrics over datums: sums of `:sum`, means of `:mean`."""
    metrics = {}
    for key in per_datum_metrics[0]:
        total = sum(metrics[key] for metrics in per_datum_metrics)
        metrics[key] = total / len(per_datum_metrics) if key.endswith(":mean") else total
    return metrics

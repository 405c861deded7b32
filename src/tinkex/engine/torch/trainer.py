"""The trainer: runs commands on one decoder and the adapters that live on it.

Passes of many runs share each micro-batch; a pass with wrong content fails alone, before anything of it is
computed. Between micro-batches it calls `between`, so that an engine can decode meanwhile. One command at a
time, on the caller's thread. Knows nothing of sessions, order, names on disk or sampling.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from tinkex.engine import protocol as p
from tinkex.engine.torch import checkpoint, memory
from tinkex.engine.torch.adapters import Adapter, lay_out
from tinkex.engine.torch.attention import PackedAttend
from tinkex.engine.torch.batch import MicroBatch, flat_inputs, halves, pack
from tinkex.engine.torch.examples import Limits, Work, read_pass
from tinkex.engine.torch.logprobs import GradOf, target_logprobs
from tinkex.engine.torch.lora import LoraBatch
from tinkex.engine.torch.losses import LOSSES, gradient, per_datum
from tinkex.engine.torch.model import Decoder
from tinkex.engine.torch.optim import adamw_step
from tinkex.engine.torch.threads import SHARED, shared
from tinkex.engine.torch.upload import from_device
from tinkex.types.outputs import ForwardBackwardOutput
from tinkex.types.params import LoraConfig
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


class TorchTrainer:
    """Trains adapters on `decoder`; `base_model` is its name for the checkpoints' sake.

    >>> trainer = TorchTrainer(load_decoder("models/SmolLM2"), "SmolLM2")       # doctest: +SKIP
    >>> trainer.run(CreateAdapter("run", LoraConfig(rank=8)))                    # doctest: +SKIP
    """

    def __init__(
        self,
        decoder: Decoder,
        base_model: str,
        *,
        max_context: int | None = None,
        max_pass_tokens: int | None = None,
        recompute: bool | None = None,  # layers in the backward; None: as memory asks for
        between: Callable[[], None] = lambda: None,
    ) -> None:
        self.decoder, self.between = decoder, between
        self.share_from = SHARED  # work from which on threads share it
        self.base = checkpoint.BaseModel.of(decoder, base_model)
        config = decoder.config
        self._limits = Limits(config.vocab_size, min(max_context or config.max_context, config.max_context))
        self._device, self._dtype = decoder.unembed_weight.device, decoder.unembed_weight.dtype
        self._max_pass_tokens, self._recompute = max_pass_tokens, recompute
        self._adapters: dict[str, Adapter] = {}
        if self._device.type == "cpu":
            memory.keep_pages(config, self._dtype.itemsize, self._pass_tokens())

    def run(self, command: p.Command[R], progress: p.Progress | None = None) -> R:
        """Do one command; what it returns is said by the command's type."""
        try:
            return cast(R, self._dispatch(command, progress or (lambda fraction: None)))
        except OSError as error:  # a disk that is full or gone
            raise p.EngineError(f"{type(command).__name__} failed: {error}") from error

    def _dispatch(self, command: p.Command[Any], progress: p.Progress) -> Any:
        match command:
            case p.CreateAdapter(run, lora):
                return self._create(run, lora)
            case p.ForwardBackward(passes):
                return self._forward_backward(passes, progress)
            case p.OptimStep(run, params):
                adapter = self.adapter(run)
                with shared(4 * adapter.flat.numel(), self.share_from):  # an element is four products' work
                    return adamw_step(adapter, params)
            case p.ClearGradients(run):
                self.adapter(run).take_grad()
                return None
            case p.SaveAdapter(run, directory, optimizer, overwrite, sync):
                return checkpoint.save_adapter(
                    self.adapter(run),
                    Path(directory),
                    self.base,
                    optimizer=optimizer,
                    overwrite=overwrite,
                    sync=sync,
                )
            case p.LoadAdapter(run, directory, optimizer):
                return self._load(run, Path(directory), optimizer)
            case p.DropAdapter(run):
                self._adapters.pop(run, None)
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
        return adapter.lora

    # -- passes ----------------------------------------------------------------------------------------

    def _forward_backward(
        self, passes: tuple[p.Pass, ...], progress: p.Progress
    ) -> list[ForwardBackwardOutput | p.Failure]:
        outcomes: list[ForwardBackwardOutput | p.Failure | None] = [None] * len(passes)
        states: dict[int, _State] = {}
        for i, one in enumerate(passes):
            try:
                self.adapter(one.run)
                states[i] = _State(read_pass(one, self._limits))
            except p.EngineError as error:
                outcomes[i] = p.Failure(error.category, error.message)
        self._compute(states, progress)
        for i, state in states.items():
            outcomes[i] = state.failure or _output(state)
            if state.failure and state.work.backward:
                self.adapter(state.work.run).take_grad()  # some of it may be in, and half must not count
        return cast(list[ForwardBackwardOutput | p.Failure], outcomes)

    def _compute(self, states: Mapping[int, _State], progress: p.Progress) -> None:
        works = {i: state.work for i, state in states.items()}
        batches = list(pack(works, self._pass_tokens(), self._device))
        for done, batch in enumerate(batches):
            if done:
                self.between()
            with shared(len(batch.tokens_T) * self.decoder.config.width**2, self.share_from):
                self._micro_batch(batch, states)
            progress((done + 1) / len(batches))

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
        invariant = self.decoder.invariant
        lora = LoraBatch(adapters, batch.lengths, train=batch.backward, invariant=invariant)
        attend = PackedAttend(batch.lengths, self.decoder.config.windows, invariant=invariant)
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
        if batch.backward and all(span.state.work.local for span in spans):
            lp_M, grad_TD = target_logprobs(*of, _local_gradient(spans))
        else:
            lp_M, grad_TD = target_logprobs(*of)
            grad_M = torch.cat([self._span_gradient(span, lp_M, batch) for span in spans])
            if batch.backward:
                _, grad_TD = target_logprobs(*of, lambda lp, first, last: grad_M[first:last])
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

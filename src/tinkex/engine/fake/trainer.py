"""The fake engine's trainer: every command, on adapters of a few dozen numbers."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from tinkex.engine import protocol
from tinkex.engine.fake.files import FakeExport, load, save
from tinkex.engine.fake.losses import FORMULAS
from tinkex.engine.fake.model import UNEMBED, VOCAB, Adapter, D, features, log_softmax
from tinkex.engine.protocol import (
    EngineError,
    EngineLost,
    Failure,
    Pass,
    PassOutcome,
    PassProgress,
    Progress,
    R,
    run_to_the_end,
)
from tinkex.engine.request import user_error
from tinkex.errors import InvalidInputError
from tinkex.types.data import Datum, EncodedTextChunk
from tinkex.types.losses import check_inputs, filled_inputs, loss_settings, unknown_loss
from tinkex.types.outputs import ForwardBackwardOutput
from tinkex.types.params import LoraConfig
from tinkex.types.tensor import TensorData

_PASS_TOKENS = 1 << 20  # of a micro-batch


class Example(NamedTuple):
    """One datum, checked."""

    tokens: np.ndarray
    targets: np.ndarray  # [N] or [N, K]
    inputs: Mapping[str, np.ndarray]


@dataclass
class _Running:
    """One checked pass on its way: what its examples have given so far."""

    work: Pass
    settings: Mapping[str, float]
    examples: list[Example]
    total: float = 0.0
    outputs: list[dict[str, TensorData]] = field(default_factory=list)
    grad: np.ndarray = field(default_factory=lambda: np.zeros((D, D)))


@dataclass
class _Ticket:
    """A batch of passes under way: the micro-batches left, as (pass, example) pairs."""

    passes: list[_Running | Failure]
    batches: list[list[tuple[int, Example]]]
    done: int = 0


class FakeTrainer:
    """Executes commands on a thread of its own, one at a time."""

    def __init__(self, model: str, context: int, pass_tokens: int | None = None) -> None:
        self.model, self.context = model, context
        self._pass_tokens = pass_tokens or _PASS_TOKENS
        self.adapters: dict[str, Adapter] = {}
        self.closed = False
        self._tickets: dict[str, _Ticket] = {}
        self._serial = itertools.count()
        self._thread = ThreadPoolExecutor(1, "tinkex-fake-engine")
        self._lock = threading.Lock()

    def submit(self, command: protocol.Command[R]) -> Future[R]:
        with self._lock:
            self.check_open()
            return self._thread.submit(self._execute, command)

    def run(self, command: protocol.Command[Any], progress: Progress | None = None) -> Any:
        return run_to_the_end(self, command, progress)

    def check_open(self) -> None:
        if self.closed:
            raise EngineLost("the engine was closed")

    def close(self) -> None:
        """Commands that wait fail with EngineLost."""
        with self._lock:
            self.closed = True
            self._thread.shutdown(wait=False)

    def _execute(self, command: Any) -> Any:
        self.check_open()
        match command:
            case protocol.CreateAdapter(run, lora):
                if run in self.adapters:
                    raise user_error(f"run {run!r} is already there")
                self.adapters[run] = Adapter(lora)
            case protocol.ForwardBackward(passes):
                return self._begin(passes)
            case protocol.ContinuePasses(ticket):
                return self._continue(ticket)
            case protocol.OptimStep(run, params):
                return self.adapter(run).adamw(params)
            case protocol.ClearGradients(run):
                self.adapter(run).grad = None
                self._abandon(run)
            case protocol.SaveAdapter(run, location, optimizer, overwrite, sync):
                adapter = self.adapter(run)
                return save(
                    adapter, self.model, location, optimizer=optimizer, overwrite=overwrite, sync=sync
                )
            case protocol.LoadAdapter(run, location, optimizer):
                return self._load(run, location, optimizer=optimizer)
            case protocol.ExportAdapter(run):
                adapter = self.adapter(run)
                return FakeExport(adapter.lora, self.model, adapter.params.copy())
            case protocol.DropAdapter(run):
                self.adapters.pop(run, None)
                self._abandon(run)
            case protocol.CheckLoss():
                return None  # uploaded losses are refused when a pass names one
            case _:
                raise user_error(f"{type(command).__name__} is not a command that this engine knows")

    def adapter(self, run: str) -> Adapter:
        if run not in self.adapters:
            raise user_error(f"there is no run {run!r} on this engine")
        return self.adapters[run]

    def _load(self, run: str, location: str, *, optimizer: bool) -> LoraConfig:
        loaded = load(location, self.model, optimizer=optimizer)
        live = self.adapters.get(run)
        for name in ("rank", "train_attn", "train_mlp", "train_unembed"):
            if live and getattr(live.lora, name) != getattr(loaded.lora, name):
                raise user_error(
                    f"{location} has {name} {getattr(loaded.lora, name)}, and run {run!r} "
                    f"has {getattr(live.lora, name)}"
                )
        self.adapters[run] = loaded
        self._abandon(run)
        return loaded.lora

    # -- passes ----------------------------------------------------------------------------------------

    def _begin(self, passes: tuple[Pass, ...]) -> PassProgress | list[PassOutcome]:
        running = [self._read_pass(work) for work in passes]
        batches: list[list[tuple[int, Example]]] = []
        left = 0
        for i, one in enumerate(running):
            for example in one.examples if isinstance(one, _Running) else ():
                if left < len(example.tokens):
                    batches.append([])
                    left = self._pass_tokens
                batches[-1].append((i, example))
                left -= len(example.tokens)
        name = f"pass-{next(self._serial)}"
        self._tickets[name] = _Ticket(running, batches)
        return self._continue(name)

    def _continue(self, name: str) -> PassProgress | list[PassOutcome]:
        if name not in self._tickets:
            raise EngineError(f"no passes with the ticket {name!r} are under way")
        ticket = self._tickets[name]
        for i, example in ticket.batches[ticket.done] if ticket.batches else ():
            running = ticket.passes[i]
            if isinstance(running, _Running):
                self._compute(running, example)
        ticket.done += 1
        if ticket.done < len(ticket.batches):
            return PassProgress(name, ticket.done, len(ticket.batches))
        del self._tickets[name]
        return [self._finish(one) if isinstance(one, _Running) else one for one in ticket.passes]

    def _abandon(self, run: str) -> None:
        """Fail the passes of `run` that are under way; a ticket with none left is forgotten."""
        for name, ticket in list(self._tickets.items()):
            for i, one in enumerate(ticket.passes):
                if isinstance(one, _Running) and one.work.run == run:
                    ticket.passes[i] = Failure("server", f"the pass of run {run!r} was abandoned")
            if not any(isinstance(one, _Running) for one in ticket.passes):
                del self._tickets[name]

    def _read_pass(self, work: Pass) -> _Running | Failure:
        try:
            self.adapter(work.run)
            settings, examples = _read_pass(work, self.context)
        except EngineError as error:
            return Failure(error.category, error.message)
        return _Running(work, settings, examples)

    def _compute(self, running: _Running, example: Example) -> None:
        adapter = self.adapter(running.work.run)
        terms, lp, grad_matrix = _forward_backward(adapter, example, running.work.loss_fn, running.settings)
        running.total += float(terms.sum())
        running.grad += grad_matrix
        running.outputs.append({"logprobs": TensorData.from_numpy(lp.astype(np.float32))})

    def _finish(self, running: _Running) -> ForwardBackwardOutput:
        if running.work.backward:
            self.adapter(running.work.run).add_gradient(running.grad)
        tokens = float(sum(len(example.tokens) for example in running.examples))
        metrics = {"loss:sum": running.total, "tokens:sum": tokens}
        return ForwardBackwardOutput("TorchLossReturn", running.outputs, metrics)


def _forward_backward(
    adapter: Adapter, example: Example, loss_fn: str, settings: Mapping[str, float]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Loss terms and logprobs of the targets' shape, and the gradient of the sum by the matrix."""
    x_ND = features(example.tokens)
    logprobs_NV = log_softmax(x_ND @ adapter.matrix().T @ UNEMBED.T)
    targets_NK = example.targets.reshape(len(x_ND), -1)
    lp = np.take_along_axis(logprobs_NV, targets_NK, 1).reshape(example.targets.shape)
    terms, slopes = FORMULAS[loss_fn](lp, example.inputs, settings)
    slopes_NK = slopes.reshape(targets_NK.shape)
    expected_ND = np.exp(logprobs_NV) @ UNEMBED
    pull_ND = (slopes_NK[:, :, None] * (UNEMBED[targets_NK] - expected_ND[:, None])).sum(1)
    return terms, lp, pull_ND.T @ x_ND


def _read_pass(work: Pass, context: int) -> tuple[dict[str, float], list[Example]]:
    """The loss's settings and the datums, checked."""
    if work.loss_fn not in FORMULAS:
        raise user_error(unknown_loss(work.loss_fn, FORMULAS))
    if not work.data:
        raise user_error("a pass needs at least one datum, got none")
    where = ""
    try:
        settings = loss_settings(work.loss_fn, work.loss_fn_config)
        examples: list[Example] = []
        for i, datum in enumerate(work.data):
            where = f"datum {i}: "
            examples.append(_read(datum, work.loss_fn, settings, context))
    except InvalidInputError as error:
        raise user_error(f"{where}{error}") from None
    return settings, examples


def _read(datum: Datum, loss_fn: str, settings: Mapping[str, float], context: int) -> Example:
    if any(not isinstance(chunk, EncodedTextChunk) for chunk in datum.model_input.chunks):
        raise InvalidInputError("model_input holds more than text; this base model reads text only")
    tokens, given = datum.model_input.to_numpy(), datum.loss_fn_inputs
    if not 0 < tokens.size <= context:
        raise InvalidInputError(f"model_input has {tokens.size} tokens; allowed: 1..{context}")
    if tokens.min() < 0 or tokens.max() >= VOCAB:
        raise InvalidInputError(f"model_input has a token id outside 0..{VOCAB - 1}")
    check_inputs(loss_fn, given, tokens.size, VOCAB, strict=True)
    return Example(tokens, given["target_tokens"].to_numpy(), filled_inputs(loss_fn, given, settings))

"""The fake engine's trainer: every command, on adapters of a few dozen numbers."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from tinkex.engine import protocol as p
from tinkex.engine.fake.bigram import UNEMBED, VOCAB, D, FakeAdapter, features, log_softmax
from tinkex.engine.fake.files import FakeExport, load, save
from tinkex.engine.fake.losses import FORMULAS
from tinkex.engine.pass_tickets import PassTickets
from tinkex.engine.request import user_error
from tinkex.errors import InvalidInputError
from tinkex.types.data import Datum, EncodedTextChunk
from tinkex.types.losses import check_inputs, filled_inputs, loss_settings, unknown_loss
from tinkex.types.outputs import ForwardBackwardOutput
from tinkex.types.params import LoraConfig
from tinkex.types.tensor import TensorData

_PASS_TOKENS = 1 << 20  # of a micro-batch


class _FakeExample(NamedTuple):
    """One checked datum, and the index of its pass in the command."""

    pass_index: int
    tokens: np.ndarray
    targets: np.ndarray  # [N] or [N, K]
    inputs: Mapping[str, np.ndarray]


@dataclass
class _FakePass:
    """A `RunningPass`: what its examples have given so far."""

    work: p.Pass
    settings: Mapping[str, float]
    examples: list[_FakeExample]
    total: float = 0.0
    outputs: list[dict[str, TensorData]] = field(default_factory=list)
    grad: np.ndarray = field(default_factory=lambda: np.zeros((D, D)))
    failure: p.Failure | None = None

    @property
    def run(self) -> str:
        return self.work.run


class FakeTrainer:
    """Executes commands on a thread of its own, one at a time."""

    def __init__(self, model: str, context: int, pass_tokens: int | None = None) -> None:
        self.model, self.context = model, context
        self._pass_tokens = pass_tokens or _PASS_TOKENS
        self.adapters: dict[str, FakeAdapter] = {}
        self.closed = False
        self._passes = PassTickets(self._compute, self._finish)
        self._thread = ThreadPoolExecutor(1, "tinkex-fake-engine")
        self._lock = threading.Lock()

    def submit(self, command: p.Command[p.R]) -> Future[p.R]:
        with self._lock:
            self.check_open()
            return self._thread.submit(self._execute, command)

    def check_open(self) -> None:
        if self.closed:
            raise p.EngineLost("the engine was closed")

    def close(self) -> None:
        """Commands that wait fail with EngineLost."""
        with self._lock:
            self.closed = True
            self._thread.shutdown(wait=False)

    def _execute(self, command: Any) -> Any:
        self.check_open()
        match command:
            case p.CreateAdapter(run, lora):
                if run in self.adapters:
                    raise user_error(f"run {run!r} is already there")
                self.adapters[run] = FakeAdapter(lora)
            case p.ForwardBackward(passes):
                running = [self._read_pass(i, work) for i, work in enumerate(passes)]
                return self._passes.begin(running, list(self._cut(running)))
            case p.ContinuePasses(ticket):
                return self._passes.advance(ticket)
            case p.OptimStep(run, params):
                return self._adapter(run).adamw(params)
            case p.ClearGradients(run):
                self._adapter(run).grad = None
                self._passes.abandon(run)
            case p.SaveAdapter(run):
                return save(self._adapter(run), self.model, command)
            case p.LoadAdapter(run):
                return self._load(run, command)
            case p.ExportAdapter(run):
                adapter = self._adapter(run)
                return FakeExport(adapter.lora, self.model, adapter.params.copy())
            case p.DropAdapter(run):
                self.adapters.pop(run, None)
                self._passes.abandon(run)
            case p.CheckLoss():
                return None  # uploaded losses are refused when a pass names one
            case _:
                raise user_error(f"{type(command).__name__} is not a command that this engine knows")

    def _adapter(self, run: str) -> FakeAdapter:
        if run not in self.adapters:
            raise user_error(f"there is no run {run!r} on this engine")
        return self.adapters[run]

    def _load(self, run: str, command: p.LoadAdapter) -> LoraConfig:
        loaded = load(command.location, self.model, optimizer=command.optimizer)
        if run in self.adapters:
            have = self.adapters[run].lora
            for name in ("rank", "train_attn", "train_mlp", "train_unembed"):
                if getattr(have, name) != getattr(loaded.lora, name):
                    raise user_error(f"{command.location} has another {name} than run {run!r}")
        self.adapters[run] = loaded
        self._passes.abandon(run)
        return loaded.lora

    # -- passes ----------------------------------------------------------------------------------------

    def _read_pass(self, index: int, work: p.Pass) -> _FakePass | p.Failure:
        where = ""
        try:
            self._adapter(work.run)
            if work.loss_fn not in FORMULAS:
                raise InvalidInputError(unknown_loss(work.loss_fn, FORMULAS))
            if not work.data:
                raise InvalidInputError("a pass needs at least one datum, got none")
            settings, examples = loss_settings(work.loss_fn, work.loss_fn_config), []
            for i, datum in enumerate(work.data):
                where = f"datum {i}: "
                examples.append(_read(index, datum, work.loss_fn, settings, self.context))
        except (InvalidInputError, p.EngineError) as error:
            return p.Failure("user", f"{where}{error}")
        return _FakePass(work, settings, examples)

    def _cut(self, passes: Iterable[_FakePass | p.Failure]) -> Iterable[list[_FakeExample]]:
        """Micro-batches of at most so many tokens, or of one longer example."""
        batch: list[_FakeExample] = []
        size = 0
        for example in (e for one in passes if isinstance(one, _FakePass) for e in one.examples):
            if batch and size + len(example.tokens) > self._pass_tokens:
                yield batch
                batch, size = [], 0
            batch.append(example)
            size += len(example.tokens)
        if batch:
            yield batch

    def _compute(self, passes: Sequence[_FakePass | p.Failure], batch: list[_FakeExample]) -> None:
        for example in batch:
            running = passes[example.pass_index]
            if isinstance(running, _FakePass) and running.failure is None:
                terms, lp, grad = _forward_backward(self._adapter(running.run), running, example)
                running.total += float(terms.sum())
                running.grad += grad
                running.outputs.append({"logprobs": TensorData.from_numpy(lp.astype(np.float32))})

    def _finish(self, running: _FakePass) -> p.PassOutcome:
        if running.failure:
            return running.failure
        if running.work.backward:
            self._adapter(running.run).add_gradient(running.grad)
        tokens = float(sum(len(example.tokens) for example in running.examples))
        metrics = {"loss:sum": running.total, "tokens:sum": tokens}
        return ForwardBackwardOutput("TorchLossReturn", running.outputs, metrics)


def _forward_backward(
    adapter: FakeAdapter, running: _FakePass, example: _FakeExample
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Loss terms and logprobs of the targets' shape, and the gradient of the sum by the matrix."""
    x_ND = features(example.tokens)
    logprobs_NV = log_softmax(x_ND @ adapter.matrix().T @ UNEMBED.T)
    targets_NK = example.targets.reshape(len(x_ND), -1)
    lp = np.take_along_axis(logprobs_NV, targets_NK, 1).reshape(example.targets.shape)
    terms, slopes = FORMULAS[running.work.loss_fn](lp, example.inputs, running.settings)
    slopes_NK = slopes.reshape(targets_NK.shape)
    expected_ND = np.exp(logprobs_NV) @ UNEMBED
    pull_ND = (slopes_NK[:, :, None] * (UNEMBED[targets_NK] - expected_ND[:, None])).sum(1)
    return terms, lp, pull_ND.T @ x_ND


def _read(
    index: int, datum: Datum, loss_fn: str, settings: Mapping[str, float], context: int
) -> _FakeExample:
    if any(not isinstance(chunk, EncodedTextChunk) for chunk in datum.model_input.chunks):
        raise InvalidInputError("model_input holds more than text; this base model reads text only")
    tokens, given = datum.model_input.to_numpy(), datum.loss_fn_inputs
    if not 0 < tokens.size <= context:
        raise InvalidInputError(f"model_input has {tokens.size} tokens; allowed: 1..{context}")
    if tokens.min() < 0 or tokens.max() >= VOCAB:
        raise InvalidInputError(f"model_input has a token id outside 0..{VOCAB - 1}")
    check_inputs(loss_fn, given, tokens.size, VOCAB, strict=True)
    targets = given["target_tokens"].to_numpy()
    return _FakeExample(index, tokens, targets, filled_inputs(loss_fn, given, settings))

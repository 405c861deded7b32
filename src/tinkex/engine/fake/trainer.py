"""The fake engine's trainer: every command, on adapters of a few dozen numbers."""

from __future__ import annotations

import threading
from collections.abc import Generator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tinkex.engine import protocol as p
from tinkex.engine.command_trainer import CommandTrainer, PackedExample, RunningPass
from tinkex.engine.fake.bigram import UNEMBED, VOCAB, D, FakeAdapter, FakeExport, features, log_softmax
from tinkex.engine.pass_content import TrainingExample, read_pass
from tinkex.types.losses import FORMULAS
from tinkex.types.outputs import ForwardBackwardOutput
from tinkex.types.params import AdamParams, LoraConfig
from tinkex.types.tensor import TensorData


@dataclass(eq=False)
class _FakePass(RunningPass):
    losses: dict[int, float] = field(default_factory=dict)
    outputs: dict[int, dict[str, TensorData]] = field(default_factory=dict)
    grad: np.ndarray = field(default_factory=lambda: np.zeros((D, D)))

    def results(self) -> tuple[dict[int, Any], ...]:
        return self.losses, self.outputs


class FakeTrainer(CommandTrainer[FakeAdapter, _FakePass]):
    """Executes commands on its own thread, one at a time."""

    def __init__(self, model: str, context: int, pass_tokens: int | None = None) -> None:
        super().__init__()
        self.model, self.context, self._most_tokens = model, context, pass_tokens or 1 << 20
        self.closed = False
        self._thread = ThreadPoolExecutor(1, "tinkex-fake-engine")
        self._lock = threading.Lock()

    def submit(self, command: p.Command[p.R]) -> Future[p.R]:
        with self._lock:
            self.check_open()
            return self._thread.submit(self._on_thread, command)

    def _on_thread(self, command: p.Command[p.R]) -> p.R:
        self.check_open()
        return self.execute(command)

    def check_open(self) -> None:
        if self.closed:
            raise p.EngineLost("the engine was closed")

    def close(self) -> None:
        """Commands that wait fail with EngineLost."""
        with self._lock:
            self.closed = True
            self._thread.shutdown(wait=False)

    def _fresh(self, lora: LoraConfig) -> FakeAdapter:
        return FakeAdapter(lora)

    def _step(self, adapter: FakeAdapter, params: AdamParams) -> dict[str, float]:
        return adapter.adamw(params)

    def _save(self, adapter: FakeAdapter, command: p.SaveAdapter) -> int:
        return adapter.save(self.model, command)

    def load(self, location: p.Location, *, optimizer: bool = False) -> FakeAdapter:
        return FakeAdapter.load(location, self.model, optimizer)

    def _export(self, adapter: FakeAdapter) -> FakeExport:
        return FakeExport(adapter.lora, self.model, adapter.params.copy())

    def _check_loss(self, loss: p.CustomLoss) -> None:
        """Nothing: uploaded losses are refused when a pass names one."""

    def _read(self, work: p.Pass) -> Generator[None, None, _FakePass]:
        return _FakePass(work, *(yield from read_pass(work, tuple(FORMULAS), VOCAB, self.context)))

    def pass_tokens(self) -> int:
        return self._most_tokens

    def _compute(self, batch: list[PackedExample[_FakePass]]) -> None:
        for training, index in batch:
            terms, lp, grad = _forward_backward(
                self.adapter(training.run), training, training.examples[index]
            )
            training.losses[index] = float(terms.sum())
            training.grad += grad
            training.outputs[index] = {"logprobs": TensorData.from_numpy(lp.astype(np.float32))}

    def _finish(self, training: _FakePass) -> p.PassOutcome:
        if training.work.backward:
            self.adapter(training.run).add_gradient(training.grad)
        tokens = float(sum(example.tokens.size for example in training.examples))
        outputs = [training.outputs[i] for i in range(len(training.examples))]
        metrics = {"loss:sum": sum(training.losses.values()), "tokens:sum": tokens}
        return ForwardBackwardOutput("TorchLossReturn", outputs, metrics)


def _forward_backward(
    adapter: FakeAdapter, training: _FakePass, example: TrainingExample
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Loss terms and logprobs of the targets' shape, and the gradient of the sum by the matrix."""
    x_ND = features(example.tokens)
    logprobs_NV = log_softmax(x_ND @ adapter.matrix().T @ UNEMBED.T)
    targets_NK = example.targets.reshape(len(x_ND), -1)
    lp = np.take_along_axis(logprobs_NV, targets_NK, 1).reshape(example.targets.shape)
    terms, slopes = FORMULAS[training.work.loss_fn](lp, example.inputs, training.settings)
    slopes_NK = slopes.reshape(targets_NK.shape)
    expected_ND = np.exp(logprobs_NV) @ UNEMBED
    pull_ND = (slopes_NK[:, :, None] * (UNEMBED[targets_NK] - expected_ND[:, None])).sum(1)
    return terms, lp, pull_ND.T @ x_ND

"""The fake engine's trainer: every command, on adapters of a few dozen numbers."""

from __future__ import annotations

import copy
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tinkex.engine import protocol
from tinkex.engine.fake.files import load, save
from tinkex.engine.fake.losses import FORMULAS
from tinkex.engine.fake.model import UNEMBED, VOCAB, Adapter, D, features, log_softmax
from tinkex.engine.protocol import EngineError, Failure, Pass, Progress, R
from tinkex.engine.request import user_error
from tinkex.errors import InvalidInputError
from tinkex.types.data import Datum, EncodedTextChunk
from tinkex.types.losses import check_inputs, filled_inputs, loss_settings, unknown_loss
from tinkex.types.outputs import ForwardBackwardOutput
from tinkex.types.params import LoraConfig
from tinkex.types.tensor import TensorData


class Example(NamedTuple):
    """One datum, checked."""

    tokens: np.ndarray
    targets: np.ndarray  # [N] or [N, K]
    inputs: Mapping[str, np.ndarray]


class FakeTrainer:
    """Commands on adapters kept in memory; one at a time."""

    def __init__(self, model: str, context: int) -> None:
        self.model, self.context = model, context
        self.adapters: dict[str, Adapter] = {}
        self.closed = False
        self._lock = threading.Lock()

    def run(self, command: protocol.Command[R], progress: Progress | None = None) -> R:
        with self._lock:
            if self.closed:
                raise EngineError("the engine is closed")
            result: Any = self._do(command)
            if progress:
                progress(1.0)
            return result

    def _do(self, command: Any) -> Any:
        match command:
            case protocol.CreateAdapter(run, lora):
                if run in self.adapters:
                    raise user_error(f"run {run!r} is already there")
                self.adapters[run] = Adapter(lora)
            case protocol.ForwardBackward(passes):
                return [self._pass(work) for work in passes]
            case protocol.OptimStep(run, params):
                return self.adapter(run).adamw(params)
            case protocol.ClearGradients(run):
                self.adapter(run).grad = None
            case protocol.SaveAdapter(run, directory, optimizer, overwrite):
                return save(
                    self.adapter(run), self.model, directory, optimizer=optimizer, overwrite=overwrite
                )
            case protocol.LoadAdapter(run, directory, optimizer):
                return self._load(run, directory, optimizer=optimizer)
            case protocol.DropAdapter(run):
                self.adapters.pop(run, None)
            case _:
                raise user_error(f"{type(command).__name__} is not a command that this engine knows")

    def adapter(self, run: str) -> Adapter:
        if run not in self.adapters:
            raise user_error(f"there is no run {run!r} on this engine")
        return self.adapters[run]

    def snapshot(self, run: str) -> Adapter:
        """A copy that no later command changes."""
        with self._lock:
            return copy.deepcopy(self.adapter(run))

    def _load(self, run: str, directory: Path, *, optimizer: bool) -> LoraConfig:
        loaded = load(directory, self.model, optimizer=optimizer)
        live = self.adapters.get(run)
        for name in ("rank", "train_attn", "train_mlp", "train_unembed"):
            if live and getattr(live.lora, name) != getattr(loaded.lora, name):
                raise user_error(
                    f"{directory} has {name} {getattr(loaded.lora, name)}, and run {run!r} "
                    f"has {getattr(live.lora, name)}"
                )
        self.adapters[run] = loaded
        return loaded.lora

    def _pass(self, work: Pass) -> ForwardBackwardOutput | Failure:
        try:
            adapter = self.adapter(work.run)
            settings, examples = _read_pass(work, self.context)
        except EngineError as error:
            return Failure(error.category, error.message)
        total, outputs, grad = 0.0, [], np.zeros((D, D))
        for example in examples:
            terms, lp, grad_matrix = _forward_backward(adapter, example, work.loss_fn, settings)
            total += float(terms.sum())
            grad += grad_matrix
            outputs.append({"logprobs": TensorData.from_numpy(lp.astype(np.float32))})
        if work.backward:
            adapter.add_gradient(grad)
        metrics = {"loss:sum": total, "tokens:sum": float(sum(len(e.tokens) for e in examples))}
        return ForwardBackwardOutput("TorchLossReturn", outputs, metrics)


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

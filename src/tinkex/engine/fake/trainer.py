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
from tinkex.engine.fake.losses import LOSSES, Loss
from tinkex.engine.fake.model import UNEMBED, VOCAB, Adapter, D, features, log_softmax
from tinkex.engine.protocol import EngineError, Failure, Pass, Progress, R
from tinkex.engine.request import user_error
from tinkex.types.data import LIST_DTYPES, Datum, EncodedTextChunk
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
            loss, settings = _loss_of(work)
            examples = [_read(i, d, work.loss_fn, loss, self.context) for i, d in enumerate(work.data)]
            if not examples:
                raise user_error("a pass needs at least one datum, got none")
        except EngineError as error:
            return Failure(error.category, error.message)
        total, outputs, grad = 0.0, [], np.zeros((D, D))
        for example in examples:
            terms, lp, grad_matrix = _forward_backward(adapter, example, loss, settings)
            total += float(terms.sum())
            grad += grad_matrix
            outputs.append({"logprobs": TensorData.from_numpy(lp.astype(np.float32))})
        if work.backward:
            adapter.add_gradient(grad)
        metrics = {"loss:sum": total, "tokens:sum": float(sum(len(e.tokens) for e in examples))}
        return ForwardBackwardOutput("TorchLossReturn", outputs, metrics)


def _forward_backward(
    adapter: Adapter, example: Example, loss: Loss, settings: Mapping[str, float]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Loss terms and logprobs of the targets' shape, and the gradient of the sum by the matrix."""
    x_ND = features(example.tokens)
    logprobs_NV = log_softmax(x_ND @ adapter.matrix().T @ UNEMBED.T)
    targets_NK = example.targets.reshape(len(x_ND), -1)
    lp = np.take_along_axis(logprobs_NV, targets_NK, 1).reshape(example.targets.shape)
    terms, slopes = loss.terms(lp, example.inputs, **settings)
    slopes_NK = slopes.reshape(targets_NK.shape)
    expected_ND = np.exp(logprobs_NV) @ UNEMBED
    pull_ND = (slopes_NK[:, :, None] * (UNEMBED[targets_NK] - expected_ND[:, None])).sum(1)
    return terms, lp, pull_ND.T @ x_ND


def _loss_of(work: Pass) -> tuple[Loss, dict[str, float]]:
    if work.loss_fn not in LOSSES:
        raise user_error(f"loss_fn {work.loss_fn!r} is not known; allowed: {', '.join(LOSSES)}")
    loss = LOSSES[work.loss_fn]
    for key, value in work.loss_fn_config.items():
        if key not in loss.settings:
            raise user_error(
                f"loss_fn_config has {key!r}; {work.loss_fn} takes: {', '.join(loss.settings) or 'nothing'}"
            )
        if isinstance(value, str) or not np.isfinite(value):
            raise user_error(f"loss_fn_config[{key!r}] must be a finite number, got {value!r}")
    settings = {**loss.settings, **work.loss_fn_config}
    if missing := [key for key, value in settings.items() if value is None]:
        raise user_error(f"{work.loss_fn} needs loss_fn_config[{missing[0]!r}], and it was not given")
    return loss, settings  # type: ignore[return-value]


def _read(i: int, datum: Datum, name: str, loss: Loss, context: int) -> Example:
    if any(not isinstance(chunk, EncodedTextChunk) for chunk in datum.model_input.chunks):
        raise user_error(f"datum {i}: model_input holds more than text; this base model reads text only")
    tokens, given = datum.model_input.to_numpy(), datum.loss_fn_inputs
    if not 0 < tokens.size <= context:
        raise user_error(f"datum {i}: model_input has {tokens.size} tokens; allowed: 1..{context}")
    for key in ("target_tokens", *loss.needs):
        if key not in given:
            raise user_error(f"datum {i}: loss_fn_inputs has no {key!r}, which {name} needs")
    if unknown := [key for key in given if key not in LIST_DTYPES]:
        raise user_error(f"datum {i}: loss_fn_inputs has {unknown[0]!r}, which {name} does not take")
    targets = given["target_tokens"].to_numpy()
    if targets.dtype != np.int64 or len(targets) != tokens.size or targets.ndim > 1 + loss.wide:
        raise user_error(
            f"datum {i}: loss_fn_inputs['target_tokens'] is {targets.dtype} {list(targets.shape)}; {name} "
            f"takes int64 of length {tokens.size}"
        )
    for where, ids in (("model_input", tokens), ("loss_fn_inputs['target_tokens']", targets)):
        if ((ids < 0) | (ids >= VOCAB)).any():
            raise user_error(f"datum {i}: {where} has a token id outside 0..{VOCAB - 1}")
    inputs = {"weights": np.ones(targets.shape, np.float32)}
    for key in ("weights", *loss.needs):
        if key in given:
            inputs[key] = given[key].to_numpy()
        if inputs[key].shape != targets.shape:
            raise user_error(
                f"datum {i}: loss_fn_inputs[{key!r}] has shape {list(inputs[key].shape)}, target_tokens "
                f"{list(targets.shape)}: they must be the same"
            )
        if not np.isfinite(inputs[key]).all():
            raise user_error(f"datum {i}: loss_fn_inputs[{key!r}] is not finite everywhere")
    return Example(tokens, targets, inputs)

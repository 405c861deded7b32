"""The fake engine's model: a bigram model of one 8x8 matrix, with a LoRA pair on it and its files.

Gradients are exact, in float64. The files are those of a PEFT directory, though no PEFT model fits them.

Shapes: N positions, K candidates, V vocabulary, D features, R rank.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from tinkex import store
from tinkex.engine.protocol import Location, SaveAdapter
from tinkex.engine.request import user_error
from tinkex.types.params import AdamParams, LoraConfig

VOCAB, EOS, CONTEXT = 512, 2, 2048
D, ALPHA = 8, 32.0
_RNG = np.random.default_rng(0)
_EMBED = _RNG.normal(size=(VOCAB, D))
UNEMBED = _RNG.normal(size=(VOCAB, D))
BASE = _RNG.normal(size=(D, D)) * 0.3
_MOST_ROWS = 64  # cached for one head: a megabyte
_WEIGHTS, _OPTIMIZER, _CONFIG = "adapter_model.safetensors", "optimizer.safetensors", "adapter_config.json"


def features(tokens: np.ndarray) -> np.ndarray:
    """[N, D]: the features of each token, independent of earlier tokens."""
    return _EMBED[tokens]


def log_softmax(z: np.ndarray) -> np.ndarray:
    z = z - z.max(-1, keepdims=True)
    return z - np.log(np.exp(z).sum(-1, keepdims=True))


class Head:
    """From a token to the distribution of the next one. Rows are computed once and cached."""

    def __init__(self, matrix: np.ndarray) -> None:
        self._head_DV = matrix.T @ UNEMBED.T
        self._rows: dict[int, tuple[np.ndarray, list[float]]] = {}

    def logits(self, tokens: np.ndarray) -> np.ndarray:
        """[N, V]: of the token after each of `tokens`."""
        return features(tokens) @ self._head_DV

    def logprobs(self, tokens: np.ndarray) -> np.ndarray:
        return log_softmax(self.logits(tokens))

    def after(self, token: int) -> tuple[np.ndarray, list[float]]:
        """[V] and [V]: the logprobs of the token after `token`, and their cumulative probabilities."""
        row = self._rows.get(token)
        if row is None:
            if len(self._rows) >= _MOST_ROWS:
                self._rows.clear()
            logprobs_V = self.logprobs(np.array([token]))[0]
            row = self._rows[token] = logprobs_V, np.exp(logprobs_V).cumsum().tolist()
        return row


class FakeAdapter:
    """LoRA on the one matrix, with AdamW's state: A [R, D] and B [D, R], flat in `params`."""

    def __init__(self, lora: LoraConfig) -> None:
        self.lora, self.scale = lora, ALPHA / lora.rank
        bound = D**-0.5
        rng = np.random.default_rng(None if lora.seed is None else lora.seed % 2**64)
        a = rng.uniform(-bound, bound, (lora.rank, D))
        self.params = np.concatenate([a.ravel(), np.zeros(lora.rank * D)])
        self.grad: np.ndarray | None = None
        self.moments, self.squares, self.step = np.zeros_like(self.params), np.zeros_like(self.params), 0

    @property
    def pair(self) -> tuple[np.ndarray, np.ndarray]:
        a, b = np.split(self.params, 2)
        return a.reshape(self.lora.rank, D), b.reshape(D, self.lora.rank)

    def matrix(self) -> np.ndarray:
        a, b = self.pair
        return BASE + self.scale * b @ a

    def add_gradient(self, grad_matrix: np.ndarray) -> None:
        a, b = self.pair
        grad = self.scale * np.concatenate([(b.T @ grad_matrix).ravel(), (grad_matrix @ a.T).ravel()])
        grad[np.abs(grad) > np.finfo(np.float32).max] = np.inf  # as an engine in float32 would have it
        self.grad = grad if self.grad is None else self.grad + grad

    def take_grad(self) -> np.ndarray | None:
        grad, self.grad = self.grad, None
        return grad

    def sum_gradient(self, total: Callable[[np.ndarray], None]) -> None:
        mine = np.zeros_like(self.params) if self.grad is None else self.grad
        row = np.append(mine, self.grad is not None)  # how many have any
        total(row)
        self.grad = row[:-1] if row[-1] else None

    def adamw(self, p: AdamParams) -> dict[str, float]:
        metrics = {"grad_norm": 0.0, "learning_rate": p.learning_rate, "grad_clipped": 0.0, "skipped": 1.0}
        if (grad := self.take_grad()) is None:
            return metrics | {"optimizer_step": float(self.step)}
        norm = float(np.linalg.norm(grad))
        if not np.isfinite(norm):
            raise user_error(f"the gradient is not finite (global norm {norm}); the step was not applied")
        shrink = min(1.0, p.grad_clip_norm / (norm + 1e-6)) if p.grad_clip_norm > 0 else 1.0
        grad = grad * shrink
        self.step += 1
        self.moments = p.beta1 * self.moments + (1 - p.beta1) * grad
        self.squares = p.beta2 * self.squares + (1 - p.beta2) * grad**2
        mean, square = self.moments / (1 - p.beta1**self.step), self.squares / (1 - p.beta2**self.step)
        decayed = self.params * (1 - p.learning_rate * p.weight_decay)
        self.params = decayed - p.learning_rate * mean / (np.sqrt(square) + max(p.eps, 1e-37))
        done = {"grad_norm": norm, "grad_clipped": float(shrink < 1.0), "skipped": 0.0}
        return metrics | done | {"optimizer_step": float(self.step)}

    def save(self, model: str, command: SaveAdapter) -> int:
        from safetensors.numpy import save_file

        pair = zip("AB", self.pair, strict=True)
        weights = {f"base_model.model.fake.lora_{side}.weight": matrix for side, matrix in pair}
        state = {"exp_avg": self.moments, "exp_avg_sq": self.squares, "step": np.array([self.step])}
        peft = {"peft_type": "LORA", "base_model_name_or_path": model, "r": self.lora.rank}
        options = {"overwrite": command.overwrite, "sync": command.sync or command.sampling}
        try:
            with store.atomic_directory(command.location, **options) as directory:
                config = peft | {"lora_alpha": ALPHA, "tinkex": asdict(self.lora)}
                (directory / _CONFIG).write_text(json.dumps(config, indent=2))
                save_file(weights, directory / _WEIGHTS)
                if command.optimizer:
                    save_file(state, directory / _OPTIMIZER)
        except store.LocationExistsError as error:
            raise user_error(str(error)) from None
        return store.directory_bytes(command.location)

    @classmethod
    def load(cls, location: Location, model: str, optimizer: bool) -> FakeAdapter:
        try:
            with store.local_copy(location) as directory:
                return cls._read(directory, model, optimizer)
        except (store.DamagedError, FileNotFoundError) as error:
            raise user_error(str(error)) from None

    @classmethod
    def _read(cls, directory: Path, model: str, optimizer: bool) -> FakeAdapter:
        from safetensors.numpy import load_file

        try:
            store.verify(directory, (_CONFIG, _WEIGHTS, *([_OPTIMIZER] if optimizer else [])))
            config = json.loads((directory / _CONFIG).read_text())
            tensors = load_file(directory / _WEIGHTS)
        except store.DamagedError as error:
            raise user_error(str(error)) from None
        except OSError:
            raise user_error(f"{directory} holds no adapter") from None
        if (base := config["base_model_name_or_path"]) != model:
            raise user_error(f"{directory} is for base model {base!r}, not {model!r}")
        adapter = cls(LoraConfig(**config["tinkex"]))
        adapter.params = np.concatenate([tensors[key].ravel() for key in sorted(tensors)])
        if optimizer:
            if not (directory / _OPTIMIZER).exists():
                raise user_error(f"{directory} was saved without its optimizer state")
            state = load_file(directory / _OPTIMIZER)
            adapter.moments, adapter.squares = state["exp_avg"], state["exp_avg_sq"]
            adapter.step = int(state["step"][0])
        return adapter


@dataclass(frozen=True)
class FakeExport:
    """The fake engine's `ExportedAdapter`."""

    lora: LoraConfig
    model: str
    params: np.ndarray

    @property
    def nbytes(self) -> int:
        return self.params.nbytes

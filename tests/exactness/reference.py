"""What the answers must be: transformers and peft for logits, plain numpy for what is made of them.

Knows nothing of our code but the PEFT directories that it exports.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from tests.compat.reference import adapted
from tests.engine.tiny import reference_model

Table = np.ndarray  # float64 [length, vocabulary]: logprobs of every token after each position
Slopes = list[np.ndarray]


class Reference:
    """A base model, with an exported adapter or without."""

    def __init__(self, model: Path, adapter: Path | None = None) -> None:
        self.model: Any = adapted(model, adapter) if adapter else reference_model(model)
        self.parameters = {
            name.replace(".default", ""): parameter
            for name, parameter in self.model.named_parameters()
            if parameter.requires_grad
        }

    def logits(self, ids: Sequence[int]) -> torch.Tensor:
        return self.model(torch.tensor([list(ids)]), use_cache=False).logits[0]

    def table(self, ids: Sequence[int], temperature: float = 1.0) -> Table:
        with torch.no_grad():
            return log_softmax(self.logits(ids).double().numpy() / temperature)

    def scores(self, ids: Sequence[int], temperature: float = 1.0) -> np.ndarray:
        """Of each token after the first, given those before it."""
        return self.table(ids, temperature)[np.arange(len(ids) - 1), ids[1:]]

    def targets(self, ids: Sequence[int], targets: np.ndarray) -> np.ndarray:
        """Logprobs of targets [N] or [N, K] at the positions of `ids`."""
        return np.take_along_axis(self.table(ids), targets.reshape(len(ids), -1), 1).reshape(targets.shape)

    def accumulate(self, ids: Sequence[int], targets: np.ndarray, slopes: np.ndarray) -> None:
        """Add the gradient of a loss whose derivatives by the targets' logprobs are `slopes`."""
        logprobs = self.logits(ids).log_softmax(-1)
        chosen = logprobs.gather(1, torch.tensor(targets.reshape(len(ids), -1)))
        (chosen * torch.tensor(slopes.reshape(len(ids), -1), dtype=torch.float32)).sum().backward()

    def accumulate_nll(self, sequences: list[list[int]]) -> None:
        for ids in sequences:
            self.accumulate(ids[:-1], np.array(ids[1:]), np.full(len(ids) - 1, -1.0))

    def gradient_norm(self) -> float:
        squares = (p.grad.double().square().sum() for p in self.parameters.values() if p.grad is not None)
        return float(torch.stack(list(squares)).sum().sqrt())

    def difference(self, adapter: Path) -> float:
        """The largest one between our exported adapter's numbers and these; both have the same tensors."""
        exported = load_file(adapter / "adapter_model.safetensors")
        assert exported.keys() == self.parameters.keys()
        return max(float((exported[n] - p.detach()).abs().max()) for n, p in self.parameters.items())


def log_softmax(logits: np.ndarray) -> np.ndarray:
    top = logits.max(-1, keepdims=True)
    return logits - top - np.log(np.exp(logits - top).sum(-1, keepdims=True))


def slopes_of(formula: Callable[[list[np.ndarray]], float], logprobs: Sequence[np.ndarray]) -> Slopes:
    """Derivatives of a formula by every logprob, by central differences in double precision."""
    out = [np.zeros_like(lp) for lp in logprobs]
    step = 1e-6
    for i, lp in enumerate(logprobs):
        for cell in np.ndindex(lp.shape):
            sides = []
            for sign in (1, -1):
                moved = [x.copy() for x in logprobs]
                moved[i][cell] += sign * step
                sides.append(formula(moved))
            out[i][cell] = (sides[0] - sides[1]) / (2 * step)
    return out


# -- drawing ---------------------------------------------------------------------------------------------


def kept(probabilities: np.ndarray, top_k: int = -1, top_p: float = 1.0) -> np.ndarray:
    """What a draw chooses from: the top_k likeliest, of those the fewest that hold top_p, renormalised."""
    order = np.argsort(-probabilities, kind="stable")
    if top_k > 0:
        order = order[:top_k]
    mass = probabilities[order] / probabilities[order].sum()
    enough = int(np.searchsorted(np.cumsum(mass), top_p)) + 1 if top_p < 1 else len(order)
    out = np.zeros_like(probabilities)
    out[order[:enough]] = probabilities[order[:enough]]
    return out / out.sum()


def surprise(counts: Mapping[Any, int], probabilities: Mapping[Any, float]) -> float:
    """Chi-square of counts: by how many of its standard deviations it is above its mean.

    Cells that are expected fewer than ten times are taken together. What cannot be drawn must not be.
    """
    draws = sum(counts.values())
    assert all(probabilities.get(cell, 0.0) > 0 for cell in counts), "something impossible was drawn"
    groups, few = [], [0.0, 0.0]
    for cell, p in probabilities.items():
        if p * draws >= 10:
            groups.append((counts.get(cell, 0), p * draws))
        else:
            few = [few[0] + counts.get(cell, 0), few[1] + p * draws]
    if few[1] >= 1:
        groups.append((few[0], few[1]))
    observed, expected = np.array(groups).T
    degrees = len(groups) - 1
    assert degrees >= 1
    return float((((observed - expected) ** 2 / expected).sum() - degrees) / np.sqrt(2 * degrees))

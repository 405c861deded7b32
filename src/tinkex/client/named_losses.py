"""The server's losses by name, in numpy: what each comes to, and its derivative by the target logprobs.

So that one of them can be a part of a loss that is computed here (tinkex.regularizers). Promises: the values
and gradients of the engine's, whose formulas are in docs/engine.md; a cell whose weight or advantage is zero
adds nothing, whatever its logprobs are. Knows nothing of passes, servers or torch.

For one cell: lp the trainer's logprob of the target, lq the input `logprobs`, A `advantages`, w `weights`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from tinkex.client import passes
from tinkex.errors import InvalidInputError
from tinkex.types.data import Datum

Inputs = Mapping[str, np.ndarray]  # float64, of the logprobs' shape
# Each cell's term of the loss, and the loss's derivative by each cell's logprob.
Terms = tuple[np.ndarray, np.ndarray]
Formula = Callable[[np.ndarray, Inputs, Mapping[str, float]], Terms]

_PPO = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
_CISPO = {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0}
_WIDE = ("cross_entropy", "kl_divergence")  # take several candidates a position


def _cross_entropy(lp: np.ndarray, x: Inputs, config: Mapping[str, float]) -> Terms:
    return -x["weights"] * lp, -x["weights"]


def _kl_divergence(lp: np.ndarray, x: Inputs, config: Mapping[str, float]) -> Terms:
    mass = np.where(x["weights"] != 0, x["weights"] * np.exp(x["logprobs"]), 0.0)
    return mass * np.where(mass != 0, x["logprobs"] - lp, 0.0), -mass


def _importance_sampling(lp: np.ndarray, x: Inputs, config: Mapping[str, float]) -> Terms:
    gain = np.exp(_lag(lp, x)) * x["advantages"]
    return -gain, -gain


def _ppo(lp: np.ndarray, x: Inputs, config: Mapping[str, float]) -> Terms:
    return _clipped(_lag(lp, x), x)


def _cispo(lp: np.ndarray, x: Inputs, config: Mapping[str, float]) -> Terms:
    ratio = np.clip(np.exp(_lag(lp, x)), x["clip_low_threshold"], x["clip_high_threshold"])
    return -ratio * x["advantages"] * lp, -ratio * x["advantages"]


def _dro(lp: np.ndarray, x: Inputs, config: Mapping[str, float]) -> Terms:
    lag = _lag(lp, x)
    return 0.5 * config["beta"] * lag**2 - lp * x["advantages"], config["beta"] * lag - x["advantages"]


def _gspo(lp: np.ndarray, x: Inputs, config: Mapping[str, float]) -> Terms:
    mask = x.get("sequence_ratio_mask", x["advantages"]) != 0
    share = mask / max(1, mask.sum())
    terms, slopes = _clipped(np.full(lp.shape, np.sum(share * np.where(mask, lp - x["logprobs"], 0.0))), x)
    return terms, slopes.sum() * share  # every cell moves the one ratio that all of them have


def _lag(lp: np.ndarray, x: Inputs) -> np.ndarray:
    """lp - lq where there is an advantage: prompts have made-up logprobs."""
    return np.where(x["advantages"] != 0, lp - x["logprobs"], 0.0)


def _clipped(log_ratio: np.ndarray, x: Inputs) -> Terms:
    """-min(r·A, clip(r, lo, hi)·A), and its derivative by log r: none where the bound is what counts."""
    ratio, advantages = np.exp(log_ratio), x["advantages"]
    low, high = x["clip_low_threshold"], x["clip_high_threshold"]
    above, below = (advantages > 0) & (ratio > high), (advantages < 0) & (ratio < low)
    terms = -advantages * np.where(above, high, np.where(below, low, ratio))
    return terms, np.where(above | below, 0.0, terms)


# Each loss, and its settings: their defaults, None where there is none.
FORMULAS: dict[str, tuple[Formula, Mapping[str, float | None]]] = {
    "cross_entropy": (_cross_entropy, {}),
    "importance_sampling": (_importance_sampling, {}),
    "ppo": (_ppo, _PPO),
    "cispo": (_cispo, _CISPO),
    "dro": (_dro, {"beta": None}),
    "gspo": (_gspo, _PPO),
    "kl_divergence": (_kl_divergence, {}),
}


@dataclass(frozen=True)
class NamedLoss:
    """One of the server's losses, with its `loss_fn_config`: an ArrayLoss."""

    name: str
    config: Mapping[str, float] = field(default_factory=dict[str, float])

    def __post_init__(self) -> None:
        if self.name not in FORMULAS:
            raise InvalidInputError(
                f"the loss {self.name!r} cannot be computed here; those that can: {', '.join(FORMULAS)}. For "
                "another of the server's, call forward_backward with it, then forward_backward_custom with "
                "regularized(None, terms): the gradients add up"
            )
        defaults = FORMULAS[self.name][1]
        for key, value in self.config.items():
            if key not in defaults:
                raise InvalidInputError(
                    f"loss_fn_config has {key!r}; {self.name} takes: {', '.join(defaults) or 'nothing'}"
                )
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < np.inf:
                raise InvalidInputError(f"loss_fn_config[{key!r}] must be a number from 0 on, got {value!r}")
        if missing := [key for key, value in defaults.items() if value is None and key not in self.config]:
            raise InvalidInputError(f"{self.name} needs loss_fn_config[{missing[0]!r}]")

    def check(self, data: Sequence[Datum]) -> None:
        """Refuse datums that it cannot be computed on."""
        passes.check_pass(data, self.name, self.config)
        for index, datum in enumerate(data):
            wanted = datum.loss_fn_inputs["target_tokens"].dense_shape
            if len(wanted) > 1 and self.name not in _WIDE:
                raise InvalidInputError(
                    f"data[{index}].loss_fn_inputs['target_tokens'] has shape {list(wanted)}; {self.name} "
                    "takes one target a position"
                )
            for key in self._reads(datum):
                if (shape := datum.loss_fn_inputs[key].dense_shape) != wanted:
                    raise InvalidInputError(
                        f"data[{index}].loss_fn_inputs[{key!r}] has shape {list(shape)}, target_tokens has "
                        f"{list(wanted)}"
                    )

    def _reads(self, datum: Datum) -> list[str]:
        needed, optional = passes.INPUTS[self.name]
        return [key for key in (*needed[1:], *optional) if key in datum.loss_fn_inputs]

    def value_and_gradients(
        self, data: Sequence[Datum], logprobs: Sequence[np.ndarray]
    ) -> tuple[float, list[np.ndarray], dict[str, float]]:
        """The loss, its derivative by each datum's logprobs, and no metrics."""
        self.check(data)
        formula, defaults = FORMULAS[self.name]
        config = {key: float(self.config.get(key, value or 0.0)) for key, value in defaults.items()}
        total = 0.0
        gradients: list[np.ndarray] = []
        for datum, given in zip(data, logprobs, strict=True):
            inputs = {key: np.full(given.shape, value) for key, value in {"weights": 1.0, **config}.items()}
            inputs |= {k: datum.loss_fn_inputs[k].to_numpy().astype(np.float64) for k in self._reads(datum)}
            with np.errstate(over="ignore"):  # a ratio may be infinite, and clipped
                terms, slopes = formula(given.astype(np.float64), inputs, config)
            total += float(terms.sum())
            gradients.append(slopes)
        return total, gradients, {}

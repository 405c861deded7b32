"""Regularizers: weighted terms that are added to a loss of the target logprobs.

A term maps a batch's datums and logprobs to a value and its gradient by the logprobs. The built-in terms do
so in closed form, in numpy, without torch. The gradient is that of the weighted sum; the metrics have each
term's value and gradient norm. A term sees the logprobs of target tokens only: no model weights and no other
token's probability. docs/client.md has the formulas.

    >>> loss = regularized("cross_entropy", [0.01 * l2(around="ref_logprobs"), -0.001 * entropy()])
    >>> run.forward_backward_custom(data, loss).result().metrics["reg/l2/value"]      # doctest: +SKIP
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from tinkex.client import passes
from tinkex.client.custom_loss import ArrayLoss, CustomLossFnV1, LossChecks, LossHandle, torch_gradients
from tinkex.errors import InvalidInputError
from tinkex.types.data import Datum
from tinkex.types.losses import FORMULAS, Terms, filled_inputs, loss_settings
from tinkex.types.params import LossFnType

Batch = Sequence[Datum]
Arrays = Sequence[np.ndarray]
TermFn = Callable[[Batch, Arrays], tuple[float, list[np.ndarray]]]
Computed = tuple[float, list[np.ndarray], dict[str, float]]  # a loss, its gradients and its metrics
# Maps a datum's logprobs and the reference's to each position's value and derivative.
Formula = Callable[[np.ndarray, Any], Terms]
OfPair = Callable[[np.ndarray, np.ndarray], tuple[float, np.ndarray, np.ndarray]]
Pairs = Sequence[tuple[int, int]]
Targets = Literal["sampled", "enumerated"]


@dataclass(frozen=True)
class Term:
    """One term of a regularized loss: `compute(data, logprobs)` returns its value and its gradients.

    Multiply it by a number to set its weight: `0.1 * l2()`.
    """

    name: str
    compute: TermFn
    weight: float = 1.0

    def __rmul__(self, factor: float) -> Term:
        if isinstance(factor, bool) or not isinstance(factor, int | float | np.number):
            return NotImplemented
        return replace(self, weight=self.weight * float(factor))

    __mul__ = __rmul__

    def named(self, name: str) -> Term:
        """The same under another name, where one loss has two of a kind."""
        return replace(self, name=name)


class _NamedLoss:
    """A named loss, computed by the client."""

    def __init__(self, name: str, config: Mapping[str, float]) -> None:
        if name not in FORMULAS:
            raise InvalidInputError(
                f"the client cannot compute the loss {name!r}; it can compute: {', '.join(FORMULAS)}. For "
                "another of the server's, call forward_backward with it, then forward_backward_custom with "
                "regularized(None, terms): the gradients add up"
            )
        self._name, self._formula, self._settings = name, FORMULAS[name], loss_settings(name, config)

    def check(self, data: Batch) -> None:
        passes.check_pass(data, self._name, self._settings)

    def value_and_gradients(self, data: Batch, logprobs: Arrays) -> Computed:
        self.check(data)
        total = 0.0
        gradients: list[np.ndarray] = []
        for datum, given in zip(data, logprobs, strict=True):
            filled = filled_inputs(self._name, datum.loss_fn_inputs, self._settings)
            inputs = {key: value.astype(np.float64) for key, value in filled.items()}
            with np.errstate(over="ignore"):  # a clipped ratio may be infinite
                terms, slopes = self._formula(given.astype(np.float64), inputs, self._settings)
            total += float(terms.sum())
            gradients.append(slopes)
        return total, gradients, {}


class Regularized:
    """A loss plus weighted terms, for `forward_backward_custom`.

    `loss` is a loss's name (with its `loss_fn_config`), a torch function, a LossHandle or an ArrayLoss, which
    the client computes; or None, for the terms alone, added to a pass that the server computes.
    """

    def __init__(
        self,
        loss: LossFnType | CustomLossFnV1 | LossHandle | ArrayLoss | None,
        terms: Sequence[Term],
        loss_fn_config: Mapping[str, float] | None = None,
    ) -> None:
        if isinstance(loss, str):
            loss = _NamedLoss(loss, loss_fn_config or {})
        elif loss_fn_config is not None:
            raise InvalidInputError(f"loss_fn_config is for a loss given by its name, not for {loss!r}")
        self._loss = loss
        self._base = _base(loss)
        self.terms = tuple(terms)
        names = [term.name for term in self.terms if isinstance(term, Term)]
        if len(names) < len(self.terms):
            raise InvalidInputError(f"terms must be Term objects (l2(), 0.1 * kl(), …), got {list(terms)!r}")
        if len(set(names)) < len(names):
            raise InvalidInputError(f"terms must have different names, got {names}; see Term.named")

    def check(self, data: Batch) -> None:
        """Raise InvalidInputError for datums that do not fit the loss itself."""
        if isinstance(self._loss, LossChecks):
            self._loss.check(data)

    def value_and_gradients(self, data: Batch, logprobs: Arrays) -> Computed:
        """The weighted sum, its gradient by the logprobs, and each part's value and gradient norm."""
        total, slopes, metrics = self._base(data, logprobs)
        gradients = [np.array(slope, np.float64) for slope in slopes]
        metrics = {**metrics, "base/value": float(total), "base/grad_norm": _norm(gradients)}
        for term in self.terms:
            value, slopes = term.compute(data, logprobs)
            weighted = [term.weight * np.asarray(slope, np.float64) for slope in slopes]
            if [w.shape for w in weighted] != [g.shape for g in gradients]:
                raise InvalidInputError(
                    f"the term {term.name!r} gave gradients of shapes {[list(w.shape) for w in weighted]}; "
                    f"the logprobs have {[list(g.shape) for g in gradients]}"
                )
            total += term.weight * value
            gradients = [g + w for g, w in zip(gradients, weighted, strict=True)]
            metrics[f"reg/{term.name}/value"] = float(value)
            metrics[f"reg/{term.name}/grad_norm"] = _norm(weighted)
        return float(total), gradients, metrics


regularized = Regularized


def _base(loss: CustomLossFnV1 | LossHandle | ArrayLoss | None) -> Callable[[Batch, Arrays], Computed]:
    if loss is None:
        return lambda data, logprobs: (0.0, [np.zeros_like(x) for x in logprobs], {})
    if isinstance(loss, ArrayLoss):
        return loss.value_and_gradients
    if isinstance(loss, LossHandle) or callable(loss):
        function = loss.run_here if isinstance(loss, LossHandle) else loss
        return lambda data, logprobs: torch_gradients(function, data, logprobs)
    raise InvalidInputError(
        f"regularized takes a loss's name, a function, a LossHandle, an ArrayLoss or None, got {loss!r}"
    )


def _norm(arrays: Arrays) -> float:
    return float(np.sqrt(sum(float(np.sum(a.astype(np.float64) ** 2)) for a in arrays)))


# -- terms of single tokens ------------------------------------------------------------------------------


def l1(*, around: str | None = None, mask: str | None = "weights", mean: bool = False) -> Term:
    """Σ |d|, d the logprobs, or their distance from those in `loss_fn_inputs[around]`."""
    return elastic_net(1.0, around=around, mask=mask, mean=mean).named("l1")


def l2(*, around: str | None = None, mask: str | None = "weights", mean: bool = False) -> Term:
    """Σ d², d as for l1."""
    return elastic_net(0.0, around=around, mask=mask, mean=mean).named("l2")


def elastic_net(
    l1_ratio: float = 0.5, *, around: str | None = None, mask: str | None = "weights", mean: bool = False
) -> Term:
    """Σ l1_ratio·|d| + (1 - l1_ratio)·d², d as for l1."""
    if not 0 <= l1_ratio <= 1:
        raise InvalidInputError(f"l1_ratio must be in [0, 1], got {l1_ratio!r}")

    def formula(x: np.ndarray, reference: np.ndarray | float) -> Terms:
        d = x - reference
        rest = 1 - l1_ratio
        return l1_ratio * np.abs(d) + rest * d**2, l1_ratio * np.sign(d) + rest * 2 * d

    return _per_token("elastic_net", formula, around, mask, mean)


def entropy(targets: Targets = "sampled", *, mask: str | None = "weights", mean: bool = False) -> Term:
    """The model's entropy; a negative weight raises it.

    sampled: targets were sampled from the model. Value -x, with the score-function gradient -x.
    enumerated: targets list the candidates ([N, K]). Value -eˣx.
    """
    _check_choice("targets", targets, ("sampled", "enumerated"))
    divergence = _KL["reverse", targets]  # from a reference of logprob 0

    def formula(x: np.ndarray, reference: np.ndarray | float) -> Terms:
        value, slope = divergence(x, 0.0)
        return -value, -slope

    return _per_token("entropy", formula, None, mask, mean)


def kl(
    direction: Literal["reverse", "forward"] = "reverse",
    targets: Targets = "sampled",
    *,
    reference: str = "ref_logprobs",
    mask: str | None = "weights",
    mean: bool = False,
) -> Term:
    """The divergence from a reference whose logprobs r of the same targets are in `loss_fn_inputs`.

    reverse is KL(model‖reference), forward KL(reference‖model). sampled: targets were sampled from the first
    of the two; reverse x - r with the score-function gradient x - r, forward r - x. enumerated: targets list
    the candidates ([N, K]); reverse eˣ(x - r), forward eʳ(r - x).
    """
    _check_choice("direction", direction, ("reverse", "forward"))
    _check_choice("targets", targets, ("sampled", "enumerated"))
    return _per_token(f"kl_{direction}", _KL[direction, targets], reference, mask, mean)


# Value and derivative by x, for logprobs x of the model and r of the reference.
_KL: dict[tuple[str, str], Formula] = {
    ("reverse", "sampled"): lambda x, r: (x - r, x - r),
    ("forward", "sampled"): lambda x, r: (r - x, -np.ones_like(x)),
    ("reverse", "enumerated"): lambda x, r: (np.exp(x) * (x - r), np.exp(x) * (x - r + 1)),
    ("forward", "enumerated"): lambda x, r: (np.exp(r) * (r - x), -np.exp(r)),
}


def _per_token(name: str, formula: Formula, reference: str | None, mask: str | None, mean: bool) -> Term:
    """A term that is a sum or mean over the positions that count."""

    def compute(data: Batch, logprobs: Arrays) -> tuple[float, list[np.ndarray]]:
        total, count = 0.0, 0
        gradients: list[np.ndarray] = []
        for index, (datum, given) in enumerate(zip(data, logprobs, strict=True)):
            keep = _counted(datum, mask, given)
            value, slope = formula(given.astype(np.float64), _reference(index, datum, reference, given))
            total += float(np.sum(value, where=keep))
            count += int(keep.sum())
            gradients.append(np.where(keep, slope, 0.0))
        scale = 1.0 / max(count, 1) if mean else 1.0
        return total * scale, [gradient * scale for gradient in gradients]

    return Term(name, compute)


def _counted(datum: Datum, mask: str | None, logprobs: np.ndarray) -> np.ndarray:
    """The positions that count: those with a nonzero `mask`, or all if the datum has none."""
    if mask is None or mask not in datum.loss_fn_inputs:
        return np.ones(logprobs.shape, bool)
    return np.broadcast_to(datum.loss_fn_inputs[mask].to_numpy() != 0, logprobs.shape)


def _reference(index: int, datum: Datum, key: str | None, x: np.ndarray) -> np.ndarray | float:
    if key is None:
        return 0.0
    if key not in datum.loss_fn_inputs:
        raise InvalidInputError(
            f"data[{index}].loss_fn_inputs has no {key!r}, the reference logprobs that a regularizer reads"
        )
    reference = datum.loss_fn_inputs[key].to_numpy()
    if reference.shape != x.shape:
        raise InvalidInputError(
            f"data[{index}].loss_fn_inputs[{key!r}] has shape {list(reference.shape)}, the logprobs have "
            f"{list(x.shape)}"
        )
    return reference.astype(np.float64)


def _check_choice(name: str, given: str, allowed: tuple[str, ...]) -> None:
    if given not in allowed:
        raise InvalidInputError(f"{name} must be one of {', '.join(allowed)}, got {given!r}")


# -- terms of pairs of datums ----------------------------------------------------------------------------


def consistency(
    pairs: Pairs | None = None, *, per: Literal["token", "sequence"] = "token", mask: str | None = "weights"
) -> Term:
    """Σ over pairs of (x - y)², token by token, or of the two mean logprobs (`per="sequence"`).

    `pairs` are indices of datums; by default each datum is paired with the next: 0-1, 2-3, …
    """
    _check_choice("per", per, ("token", "sequence"))

    def of_pair(x: np.ndarray, y: np.ndarray) -> tuple[float, np.ndarray, np.ndarray]:
        if per == "sequence":
            gap = x.mean() - y.mean()
            return gap**2, np.full(x.shape, 2 * gap / x.size), np.full(y.shape, -2 * gap / y.size)
        return float(np.sum((x - y) ** 2)), 2 * (x - y), 2 * (y - x)

    return _per_pair("consistency", of_pair, pairs, mask, neighbours=True, equal=per == "token")


def orthogonality(pairs: Pairs | None = None, *, mask: str | None = "weights") -> Term:
    """Σ over pairs of cos²(x, y) of two datums' logprobs; without `pairs`, over all pairs of the batch."""

    def of_pair(x: np.ndarray, y: np.ndarray) -> tuple[float, np.ndarray, np.ndarray]:
        lengths = float(np.linalg.norm(x) * np.linalg.norm(y))
        if lengths == 0:
            return 0.0, np.zeros_like(x), np.zeros_like(y)
        cosine = float(x @ y) / lengths
        slope_x, slope_y = y / lengths - cosine * x / (x @ x), x / lengths - cosine * y / (y @ y)
        return cosine**2, 2 * cosine * slope_x, 2 * cosine * slope_y

    return _per_pair("orthogonality", of_pair, pairs, mask, neighbours=False, equal=True)


def _per_pair(
    name: str, of_pair: OfPair, pairs: Pairs | None, mask: str | None, *, neighbours: bool, equal: bool
) -> Term:
    """A term that is a sum over pairs of datums, of the logprobs that count in each."""

    def compute(data: Batch, logprobs: Arrays) -> tuple[float, list[np.ndarray]]:
        keeps = [_counted(datum, mask, x) for datum, x in zip(data, logprobs, strict=True)]
        counted = [x.astype(np.float64)[keep] for x, keep in zip(logprobs, keeps, strict=True)]
        gradients, total = [np.zeros(x.shape) for x in logprobs], 0.0
        for i, j in _pairs(name, pairs, len(logprobs), neighbours):
            sizes = counted[i].size, counted[j].size
            if 0 in sizes or (equal and sizes[0] != sizes[1]):
                wanted = "as many of both must" if equal else "some of both must"
                raise InvalidInputError(
                    f"{name} compares data[{i}] and data[{j}], of which {sizes[0]} and {sizes[1]} positions "
                    f"count; {wanted}"
                )
            value, slope_i, slope_j = of_pair(counted[i], counted[j])
            total += value
            gradients[i][keeps[i]] += slope_i
            gradients[j][keeps[j]] += slope_j
        return total, gradients

    return Term(name, compute)


def _pairs(name: str, pairs: Pairs | None, count: int, neighbours: bool) -> list[tuple[int, int]]:
    if pairs is None and not neighbours:
        return list(itertools.combinations(range(count), 2))
    if pairs is None and count % 2:
        raise InvalidInputError(f"{name} pairs each datum with the next, but there are {count}; give pairs")
    if pairs is None:
        return [(i, i + 1) for i in range(0, count, 2)]
    for i, j in pairs:
        if not (0 <= i < count and 0 <= j < count and i != j):
            raise InvalidInputError(f"{name}: the pair ({i}, {j}) is not two of the {count} datums")
    return list(pairs)


def from_torch(name: str, fn: Callable[[Batch, Sequence[Any]], Any]) -> Term:
    """A term from a torch function `fn(data, logprobs) -> scalar`; its gradient is autograd's."""

    def compute(data: Batch, logprobs: Arrays) -> tuple[float, list[np.ndarray]]:
        value, gradients, _ = torch_gradients(lambda d, x: (fn(d, x), {}), data, logprobs)
        return value, gradients

    return Term(name, compute)

"""Gradients of losses written in numpy: no torch.

A loss that is made of numpy's own functions is run once on arrays that remember what was done to them, and
once backwards. Promises: a loss is differentiated exactly or refused, naming the function that it cannot be
differentiated through; nothing is turned into plain numbers unseen. Knows what a loss of logprobs needs, and
is no more than that: no devices, no second derivatives, no arrays changed in place.

    >>> @loss
    ... def nearer(data, logprobs):
    ...     return sum(np.logaddexp(0, -x).sum() for x in logprobs), {}
    >>> value, (slope,), _ = nearer.value_and_gradients([None], [np.zeros(2)])
    >>> slope
    array([-0.5, -0.5])
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from tinkex.errors import InvalidInputError

# What an input adds to a gradient: given the output's, the input's own.
Back = Callable[[np.ndarray], np.ndarray]
# fn(data, logprobs) -> (loss, metrics), as of forward_backward_custom.
ArrayLossFn = Callable[[Sequence[Any], list["Tracked"]], tuple["Tracked", Mapping[str, Any] | None]]


class Tracked(NDArrayOperatorsMixin):
    """An array that remembers how it was made. `value` is the plain array, through which no gradient goes."""

    def __init__(self, value: Any, made_of: Sequence[tuple[Tracked, Back]] = ()) -> None:
        self.value: np.ndarray = np.asarray(value, np.float64)
        self._made_of = made_of

    @property
    def shape(self) -> tuple[int, ...]:
        return self.value.shape

    @property
    def size(self) -> int:
        return self.value.size

    def __len__(self) -> int:
        return len(self.value)

    def __repr__(self) -> str:
        return f"Tracked({self.value})"

    def __getitem__(self, key: Any) -> Tracked:
        def back(slope: np.ndarray) -> np.ndarray:
            whole = np.zeros(self.shape)
            np.add.at(whole, key, slope)
            return whole

        return Tracked(self.value[key], [(self, back)])

    def sum(self, axis: Any = None, keepdims: bool = False) -> Tracked:
        def back(slope: np.ndarray) -> np.ndarray:
            if axis is not None and not keepdims:
                slope = np.expand_dims(slope, axis)
            return np.broadcast_to(slope, self.shape)

        return Tracked(self.value.sum(axis=axis, keepdims=keepdims), [(self, back)])

    def mean(self, axis: Any = None, keepdims: bool = False) -> Tracked:
        total = self.sum(axis, keepdims)
        return total * (total.size / max(self.size, 1))

    # x += y makes another array, so that nothing which was made of x is changed behind its back.
    __iadd__ = NDArrayOperatorsMixin.__add__
    __isub__ = NDArrayOperatorsMixin.__sub__
    __imul__ = NDArrayOperatorsMixin.__mul__
    __itruediv__ = NDArrayOperatorsMixin.__truediv__

    # -- what numpy calls --------------------------------------------------------------------------------

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any) -> Any:
        name = ufunc.__name__
        if method != "__call__" or options or (name not in _SLOPES and name not in _PLAIN):
            raise _no_way(f"np.{name}" + ("" if method == "__call__" else f".{method}"))
        values = [np.asarray(_plain(x)) for x in inputs]
        output = ufunc(*values)
        if name in _PLAIN:
            return output
        return _made(output, inputs, _SLOPES[name](output, *values))

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if function not in _FUNCTIONS:
            raise _no_way(f"np.{function.__name__}")
        return _FUNCTIONS[function](*args, **kwargs)

    def __array__(self, *_: Any, **__: Any) -> np.ndarray:
        raise _no_way("turning it into a plain array (x.value is that, with no gradient)")

    def __float__(self) -> float:
        raise _no_way("float() (float(x.value) has no gradient)")


def _no_way(what: str) -> InvalidInputError:
    known = ", ".join(sorted([*_SLOPES, *(f.__name__ for f in _FUNCTIONS)]))
    return InvalidInputError(f"a loss in numpy cannot be differentiated through {what}. Known: {known}")


def _plain(x: Any) -> Any:
    return x.value if isinstance(x, Tracked) else x


def _made(output: np.ndarray, inputs: Sequence[Any], slopes: Sequence[Any]) -> Tracked:
    """`output` of a function that goes cell by cell, with its derivative by each input."""

    def back(slope: Any, shape: tuple[int, ...]) -> Back:
        return lambda after: _summed_to(after * slope, shape)

    pairs = zip(inputs, slopes, strict=True)
    return Tracked(output, [(x, back(slope, x.shape)) for x, slope in pairs if isinstance(x, Tracked)])


def _summed_to(slope: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """The gradient of what was broadcast: summed over what it was broadcast to."""
    slope = slope.sum(axis=tuple(range(slope.ndim - len(shape))))
    stretched = tuple(i for i, n in enumerate(shape) if n == 1 and slope.shape[i] != 1)
    return slope.sum(axis=stretched, keepdims=True) if stretched else slope


# -- what can be differentiated --------------------------------------------------------------------------


Slopes = tuple[Any, ...]
_OF_ONE: dict[str, Callable[[np.ndarray, np.ndarray], Slopes]] = {
    "negative": lambda y, a: (-1.0,),
    "positive": lambda y, a: (1.0,),
    "absolute": lambda y, a: (np.sign(a),),
    "square": lambda y, a: (2.0 * a,),
    "sqrt": lambda y, a: (0.5 / y,),
    "exp": lambda y, a: (y,),
    "expm1": lambda y, a: (y + 1.0,),
    "log": lambda y, a: (1.0 / a,),
    "log1p": lambda y, a: (1.0 / (1.0 + a),),
    "tanh": lambda y, a: (1.0 - y**2,),
}


def _power(y: np.ndarray, a: np.ndarray, b: np.ndarray) -> Slopes:
    with np.errstate(divide="ignore", invalid="ignore"):  # of a slope that nobody may ask for
        return b * np.power(a, b - 1.0), y * np.log(a)


_OF_TWO: dict[str, Callable[[np.ndarray, np.ndarray, np.ndarray], Slopes]] = {
    "add": lambda y, a, b: (1.0, 1.0),
    "subtract": lambda y, a, b: (1.0, -1.0),
    "multiply": lambda y, a, b: (b, a),
    "divide": lambda y, a, b: (1.0 / b, -y / b),
    "power": _power,
    "minimum": lambda y, a, b: ((a < b) + 0.5 * (a == b), (b < a) + 0.5 * (a == b)),
    "maximum": lambda y, a, b: ((a > b) + 0.5 * (a == b), (b > a) + 0.5 * (a == b)),
    "logaddexp": lambda y, a, b: (np.exp(a - y), np.exp(b - y)),
}
# The derivative by each input, from the output and the inputs.
_SLOPES: dict[str, Callable[..., Slopes]] = {**_OF_ONE, **_OF_TWO}
# These have no slope anywhere: what they give is plain.
_PLAIN = ("greater", "greater_equal", "less", "less_equal", "equal", "not_equal", "sign", "isfinite", "isnan")


def _where(condition: Any, a: Any, b: Any) -> Tracked:
    taken: np.ndarray = np.asarray(_plain(condition), bool)
    chosen = np.where(taken, np.asarray(_plain(a)), np.asarray(_plain(b)))
    return _made(chosen, (a, b), (taken, ~taken))


def _clip(x: Any, low: Any, high: Any) -> Tracked:
    """Within its bounds x, outside none; at a bound x, as torch has it."""
    value, least, most = (np.asarray(_plain(part)) for part in (x, low, high))
    bound: np.ndarray = np.where(value > most, most, least)
    return _where((value >= least) & (value <= most), x, bound)


def _concatenate(arrays: Sequence[Any], axis: int = 0) -> Tracked:
    cuts = np.cumsum([_plain(x).shape[axis] for x in arrays])[:-1]

    def back(i: int) -> Back:
        return lambda slope: np.split(slope, cuts, axis)[i]

    value = np.concatenate([_plain(x) for x in arrays], axis)
    return Tracked(value, [(x, back(i)) for i, x in enumerate(arrays) if isinstance(x, Tracked)])


def _stack(arrays: Sequence[Any]) -> Tracked:
    return _concatenate([x[None] if isinstance(x, Tracked) else np.asarray(x)[None] for x in arrays])


def _zeros_like(x: Tracked) -> np.ndarray:
    return np.zeros(x.shape)


def _ones_like(x: Tracked) -> np.ndarray:
    return np.ones(x.shape)


_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    np.sum: Tracked.sum,
    np.mean: Tracked.mean,
    np.where: _where,
    np.clip: _clip,
    np.concatenate: _concatenate,
    np.stack: _stack,
    np.zeros_like: _zeros_like,
    np.ones_like: _ones_like,
}


# -- backwards -------------------------------------------------------------------------------------------


def gradients(of: Tracked, by: Sequence[Tracked]) -> list[np.ndarray]:
    """The derivative of a single number by each of some arrays that it was made of."""
    slopes: dict[int, np.ndarray] = {id(of): np.ones(of.shape)}
    for node in _latest_first(of):
        slope = slopes.get(id(node))
        for origin, back in node._made_of if slope is not None else ():
            assert slope is not None
            slopes[id(origin)] = slopes.get(id(origin), 0.0) + back(slope)
    return [np.array(slopes.get(id(x), np.zeros(x.shape))) for x in by]


def _latest_first(of: Tracked) -> list[Tracked]:
    """Everything it was made of, each before what that was made of. No recursion: loops make long chains."""
    order, seen, todo = list[Tracked](), set[int](), [(of, False)]
    while todo:
        node, done = todo.pop()
        if done:
            order.append(node)
        elif id(node) not in seen:
            seen.add(id(node))
            todo += [(node, True), *((origin, False) for origin, _ in node._made_of)]
    return order[::-1]


@dataclass(frozen=True)
class NumpyLoss:
    """What `loss` makes of a function: forward_backward_custom and tinkex.regularizers take it."""

    fn: ArrayLossFn

    def value_and_gradients(
        self, data: Sequence[Any], logprobs: Sequence[np.ndarray]
    ) -> tuple[float, list[np.ndarray], dict[str, float]]:
        """The loss, its derivative by each datum's logprobs, and metrics."""
        leaves = [Tracked(x) for x in logprobs]
        returned: Any = self.fn(list(data), leaves)
        if not isinstance(returned, tuple) or len(pair := cast(tuple[Any, ...], returned)) != 2:
            raise InvalidInputError(
                f"a custom loss returns (loss, metrics); this one returned {returned!r:.80}"
            )
        value, metrics = pair
        if not isinstance(value, Tracked) or value.size != 1:
            raise InvalidInputError(
                f"a custom loss's first value must be one number of the logprobs, got {value!r:.80}"
            )
        told = {str(key): float(np.asarray(_plain(x))) for key, x in dict(metrics or {}).items()}
        return float(value.value.reshape(())), gradients(value, leaves), told


def loss(fn: ArrayLossFn) -> NumpyLoss:
    """A loss written in numpy, `fn(data, logprobs) -> (loss, metrics)`, for `forward_backward_custom`."""
    return NumpyLoss(fn)

"""Uploaded custom losses, run from an allow-list of operations, once per datum with (logprobs, *inputs).

loss_graph_reader.py makes a `LossGraph` of what a client sent, which is never executed as code. Costs are
bounded: before anything is computed, `LossInputs` runs the graph of each datum on the meta device, which
computes only shapes, and adds up what each operation costs (loss_graph_costs.py). Knows no batches.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tinkex.engine.protocol import EngineLost
from tinkex.engine.request import user_error
from tinkex.engine.torch import loss_graph_costs as costs
from tinkex.engine.torch import loss_graph_ops as ops
from tinkex.errors import InvalidInputError
from tinkex.types.losses import check_finite
from tinkex.types.tensor import TensorData

MAX_ELEMENTS = 1 << 24  # of one result: a [4096, 4096] matrix
MAX_TOTAL = 1 << 26  # of all results of one datum
# In units of loss_graph_costs: about a second for one datum, and half a minute for all datums of a pass.
DATUM_COST = 1 << 30
PASS_COST = 1 << 35
SLICE_COST = 1 << 28  # in one micro-batch, unless a datum takes more
LOSS_SECONDS = 30.0  # for all datums of a pass: the check and the computation


@dataclass(frozen=True)
class NodeRef:
    """An argument that is another node's result."""

    name: str


@dataclass(frozen=True)
class LossNode:
    """One operation, its target looked up and its arguments decoded."""

    name: str
    target: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


Between = Callable[[], None]


class LossClock:
    """Counts the time that one pass's uploaded loss takes; `check` ends it, between two nodes.

    >>> with clock:                                                              # doctest: +SKIP
    ...     graph.gradient(logprobs, inputs, clock.check)
    """

    def __init__(self, seconds: float = LOSS_SECONDS, stopping: Callable[[], str] = lambda: "") -> None:
        self._seconds, self._stopping = seconds, stopping
        self._spent = self._since = 0.0

    def __enter__(self) -> None:
        self._since = time.monotonic()

    def __exit__(self, *_: object) -> None:
        self._spent += time.monotonic() - self._since

    def check(self) -> None:
        """Raise an error of the user's if the time is up, and EngineLost if the engine is `stopping`."""
        if why := self._stopping():
            raise EngineLost(why)
        if self._spent + time.monotonic() - self._since > self._seconds:
            raise user_error(
                f"the custom loss took more than {self._seconds:g} s, which is what a pass may take: send "
                "fewer datums in a pass, or take fewer or cheaper operations"
            )


@dataclass(frozen=True)
class LossGraph:
    inputs: tuple[str, ...]
    placeholders: tuple[str, ...]  # the node names that hold the inputs, in the same order
    nodes: tuple[LossNode, ...]
    loss: NodeRef
    metrics: dict[str, Any]

    def check(
        self,
        shape: tuple[int, ...],
        inputs: Mapping[str, np.ndarray],
        between: Between = lambda: None,
        *,
        bounded: bool = True,
    ) -> int:
        """What a datum of these shapes costs; refuses those that the graph cannot compute."""
        given = [torch.empty(shape, device="meta")]
        for key in self.inputs[1:]:
            dtype = torch.float32 if inputs[key].dtype.kind == "f" else torch.int64
            given.append(torch.empty(inputs[key].shape, dtype=dtype, device="meta"))
        bounds = _DatumBounds(bounded)
        self._run(given, between, bounds.add)
        return bounds.cost

    def gradient(
        self, logprobs: Tensor, inputs: Mapping[str, np.ndarray], between: Between
    ) -> tuple[float, Tensor, dict[str, float]]:
        """The loss of one datum, its gradient by `logprobs`, and its metrics; `between` may end it."""
        leaf, grad = logprobs.detach().requires_grad_(), None
        with torch.enable_grad():
            loss, metrics = self.run(leaf, inputs, between)
            if loss.requires_grad:
                try:
                    (grad,) = torch.autograd.grad(loss, leaf, allow_unused=True)
                except RuntimeError as error:  # not every operation has a derivative
                    reason = str(error).splitlines()[0]
                    raise user_error(f"the custom loss has no gradient: {reason}") from None
        grad = torch.zeros_like(logprobs) if grad is None else grad.to(logprobs.dtype)
        return float(loss.detach()), grad, metrics

    def run(
        self, logprobs: Tensor, inputs: Mapping[str, np.ndarray], between: Between = lambda: None
    ) -> tuple[Tensor, dict[str, float]]:
        """The loss of one datum (a scalar that carries gradients to `logprobs`) and its metrics."""
        given = [torch.from_numpy(np.array(inputs[key])).to(logprobs.device) for key in self.inputs[1:]]
        loss, metrics = self._run([logprobs, *given], between)
        return loss, {key: float(torch.as_tensor(value).detach()) for key, value in metrics.items()}

    def _run(
        self, given: list[Tensor], between: Between, called: Callable[..., None] = lambda *_: None
    ) -> tuple[Tensor, dict[str, Any]]:
        """The loss and its metrics; `called` gets each call and its result."""
        values: dict[str, Any] = dict(zip(self.placeholders, given, strict=True))
        device = given[0].device
        for node in self.nodes:
            args, kwargs = _resolve(node.args, values, device), _resolve(node.kwargs, values, device)
            try:
                values[node.name] = value = ops.call(node.function, args, kwargs)
                called(node.function, args, kwargs, value)
            except Exception as error:  # torch's complaint about a client's arguments is a user error
                reason = str(error).split("\n")[0][:300]
                raise user_error(f"custom loss node {node.name!r} ({node.target}): {reason}") from None
            between()
            for tensor in costs.tensors(value):
                if tensor.requires_grad:
                    tensor.register_hook(lambda _: between())  # also between two nodes of the backward
        loss = values[self.loss.name]
        if not isinstance(loss, Tensor) or loss.dim() != 0 or not loss.is_floating_point():
            raise user_error(f"the custom loss must be a scalar tensor, got {_describe(loss)}")
        metrics = {key: _resolve(value, values, device) for key, value in self.metrics.items()}
        for key, value in metrics.items():
            if not isinstance(value, int | float) and not (isinstance(value, Tensor) and value.dim() == 0):
                raise user_error(f"the metric {key!r} must be a scalar, got {_describe(value)}")
        return loss, metrics


class _DatumBounds:
    """Adds up one datum's results, which take memory, and its cost; refuses too much of either."""

    def __init__(self, bounded: bool) -> None:
        self._bounded = bounded
        self.elements = self.cost = 0

    def add(self, function: Callable[..., Any], args: Any, kwargs: Any, value: Any) -> None:
        size = sum(t.numel() for t in costs.tensors(value))
        self.elements += size
        if self._bounded and (size > MAX_ELEMENTS or self.elements > MAX_TOTAL):
            raise user_error(
                f"too large: {size} elements, {self.elements} in all so far; allowed: {MAX_ELEMENTS} in one "
                f"result, {MAX_TOTAL} in all"
            )
        cost = costs.cost(function, args, kwargs, value)
        self.cost += cost
        if self._bounded and self.cost > DATUM_COST:
            raise user_error(
                f"too costly: {cost} units, {self.cost} for this datum so far; allowed: {DATUM_COST}. A unit "
                "is about a nanosecond of one core, forward and backward together"
            )


class LossInputs:
    """Reads what a graph needs of each datum of one pass, and adds up what they cost: `costs`, by datum.

    Between two checks it calls `rest`, so that others are served meanwhile. A pass that was computed before
    (`finished`) may cost anything: its costs only say how it is cut.
    """

    def __init__(
        self, graph: LossGraph, clock: LossClock, rest: Between = lambda: None, finished: bool = False
    ) -> None:
        self._graph, self._clock, self._rest, self._bounded = graph, clock, rest, not finished
        self._known: dict[Any, int] = {}  # the cost of datums of these shapes
        self.costs: list[int] = []
        self._total = 0

    def read(self, given: Mapping[str, TensorData], shape: tuple[int, ...]) -> dict[str, np.ndarray]:
        """The next datum's inputs, with targets of `shape`; refuses what is missing, wrong or too costly."""
        inputs = {}
        for key in self._graph.inputs[1:]:
            if key not in given:
                raise InvalidInputError(f"loss_fn_inputs has no {key!r}, which the custom loss reads")
            check_finite(key, given[key])
            inputs[key] = given[key].to_numpy()
        shapes = (shape, *((array.shape, array.dtype.kind) for array in inputs.values()))
        if shapes not in self._known:
            self._rest()
            with self._clock:
                self._known[shapes] = self._graph.check(
                    shape, inputs, self._clock.check, bounded=self._bounded
                )
        self.costs.append(self._known[shapes])
        self._total += self.costs[-1]
        if self._bounded and self._total > PASS_COST:
            raise user_error(
                f"the custom loss is too costly for so many datums: {self.costs[-1]} units for this one, "
                f"{self._total} with those before it; allowed: {PASS_COST} in one pass. A unit is about a "
                "nanosecond of one core: send fewer datums in a pass, or take fewer or cheaper operations"
            )
        return inputs


def _resolve(value: Any, values: Mapping[str, Any], device: torch.device) -> Any:
    """Arguments with references replaced by results, and devices by `device`."""
    match value:
        case NodeRef(name):
            return values[name]
        case torch.device():
            return device
        case slice():
            return slice(*(_resolve(part, values, device) for part in (value.start, value.stop, value.step)))
        case list() | tuple():
            return type(value)(_resolve(item, values, device) for item in value)
        case dict():
            return {key: _resolve(item, values, device) for key, item in value.items()}
    return value


def _describe(value: Any) -> str:
    return f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__

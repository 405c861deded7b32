"""Uploaded custom losses: a torch.fx graph in wire form, checked node by node and run from an allow-list.

Nothing that a client sends is executed as code: a node names an operation of a fixed table
(loss_graph_ops.py), and anything else is refused by name. Costs are bounded: before anything is computed,
`LossInputs` runs the graph of each datum on the meta device, which computes shapes alone, and adds up what
each operation costs (loss_graph_costs.py).
Runs once per datum with (logprobs, *inputs); knows nothing of models or batches.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tinkex.engine.protocol import CustomLoss, EngineError, EngineLost
from tinkex.engine.request import user_error
from tinkex.engine.torch import loss_graph_costs as costs
from tinkex.engine.torch import loss_graph_ops as ops
from tinkex.errors import InvalidInputError
from tinkex.types.losses import check_finite
from tinkex.types.tensor import TensorData

MAX_NODES = 2000
MAX_INPUTS = 16
MAX_DEPTH = 8  # of nested arguments
MAX_ITEMS = 256  # in one list of arguments
MAX_TEXT = 64
MAX_ELEMENTS = 1 << 24  # of one result: a [4096, 4096] matrix
MAX_TOTAL = 1 << 26  # of all results of one datum
# In units of loss_graph_costs: about a second for one datum, and half a minute for all datums of a pass.
DATUM_COST = 1 << 30
PASS_COST = 1 << 35
SLICE_COST = 1 << 28  # in one micro-batch, unless a datum takes more
LOSS_SECONDS = 30.0  # for all datums of a pass: the check and the computation

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
_INPUT = re.compile(r"[a-z_][a-z0-9_]{0,63}")
_METRIC = re.compile(r"custom/[a-z0-9_./-]{1,64}:(sum|mean)")

_ANY_DEVICE = torch.device("cpu")  # replaced by the device that the loss runs on


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


def read_loss_graph(custom: CustomLoss) -> LossGraph:
    """The graph of an uploaded loss; raises EngineError (category "user") for anything not allowed."""
    _check_inputs(custom.inputs)
    if not 0 < len(custom.nodes) <= MAX_NODES:
        raise user_error(f"a custom loss has 1 to {MAX_NODES} nodes, got {len(custom.nodes)}")
    seen: set[str] = set()
    placeholders, nodes = [], []
    *body, output = custom.nodes
    for raw in body:
        name, node = _read_node(raw, seen)
        if node is not None:
            nodes.append(node)
        elif nodes:
            raise user_error(f"custom loss node {name!r}: placeholders come before anything else")
        else:
            placeholders.append(name)
        seen.add(name)
    if len(placeholders) != len(custom.inputs):
        raise user_error(
            f"the custom loss has {len(placeholders)} placeholders for {len(custom.inputs)} inputs"
        )
    loss, metrics = _output(output, seen)
    return LossGraph(tuple(custom.inputs), tuple(placeholders), tuple(nodes), loss, metrics)


def _check_inputs(inputs: tuple[str, ...]) -> None:
    if not inputs or inputs[0] != "logprobs":
        raise user_error(f"a custom loss's first input is 'logprobs', got {list(inputs)}")
    if len(inputs) > MAX_INPUTS or len(set(inputs)) != len(inputs):
        raise user_error(
            f"a custom loss has up to {MAX_INPUTS} inputs of different names, got {list(inputs)}"
        )
    for name in inputs:
        if not isinstance(name, str) or not _INPUT.fullmatch(name):
            raise user_error(f"custom loss input {name!r} does not match {_INPUT.pattern}")


def _output(raw: Mapping[str, Any], seen: set[str]) -> tuple[NodeRef, dict[str, Any]]:
    args = raw.get("args", ())
    if raw.get("op") != "output" or not isinstance(args, list | tuple) or len(args) != 1:
        raise user_error("a custom loss ends with one output node of one argument, (loss, metrics)")
    result = _Arguments("output", seen).read(args[0])
    if not isinstance(result, list | tuple) or len(result) != 2:
        raise user_error("a custom loss's output is (loss, metrics)")
    loss, metrics = result
    if not isinstance(loss, NodeRef) or not isinstance(metrics, dict):
        raise user_error("a custom loss's output is (a node, an object of metrics)")
    for key, value in metrics.items():
        if not _METRIC.fullmatch(key):
            raise user_error(f"the metric name {key!r} does not match {_METRIC.pattern}")
        if not isinstance(value, NodeRef | int | float):
            raise user_error(f"the metric {key!r} must be a node or a number, got {value!r}")
    return loss, metrics


@dataclass(frozen=True)
class _Arguments:
    """Decodes the arguments of node `name`, which may refer to the nodes `seen` before it."""

    name: str
    seen: set[str]

    def error(self, message: str) -> EngineError:
        return user_error(f"custom loss node {self.name!r}: {message}")

    def read(self, value: Any, depth: int = 0) -> Any:
        if depth > MAX_DEPTH:
            raise self.error(f"arguments are nested more than {MAX_DEPTH} deep")
        match value:
            case None | bool() | float():
                return value
            case int():
                if abs(value) >= 2**63:
                    raise self.error(f"the number {value} is too large")
                return value
            case str():
                return self.text(value)
            case list() | tuple():
                return self._list(value, depth)
            case Mapping() if len(value) == 1:
                ((tag, content),) = value.items()
                return self._tagged(tag, content, depth)
        raise self.error(f"an argument is {str(value)[:80]!r}, which is no known form")

    def _tagged(self, tag: str, content: Any, depth: int) -> Any:
        match tag, content:
            case "ref", str() if content in self.seen:
                return NodeRef(content)
            case "tuple", list() | tuple():
                return tuple(self._list(content, depth))
            case "dict", Mapping():
                values = self._list(list(content.values()), depth)
                return dict(zip(map(self.text, content), values, strict=True))
            case "slice", [_, _, _]:
                return slice(*self._list(content, depth))
            case "ellipsis", True:
                return ...
            case "float", "inf" | "-inf" | "nan":
                return float(content)
            case "dtype", str() if content in ops.DTYPES:
                return ops.DTYPES[content]
            case "layout" | "memory_format", str() if content in ops.LAYOUTS:
                return ops.LAYOUTS[content]
            case "device", str():
                return _ANY_DEVICE
        raise self.error(f"{{{tag!r}: {str(content)[:80]!r}}} is not an argument we know")

    def _list(self, values: Sequence[Any], depth: int) -> list[Any]:
        if len(values) > MAX_ITEMS:
            raise self.error(f"{len(values)} arguments in one list; allowed: {MAX_ITEMS}")
        return [self.read(value, depth + 1) for value in values]

    def text(self, value: Any) -> str:
        limit = 128 if isinstance(value, str) and value.startswith("custom/") else MAX_TEXT
        if not isinstance(value, str) or len(value) > limit:
            raise self.error(f"{str(value)[:80]!r} is not a text of up to {limit} characters")
        return value


def _read_node(raw: Mapping[str, Any], seen: set[str]) -> tuple[str, LossNode | None]:
    """A node's name, and what it computes; None for a placeholder."""
    op, name, target = raw.get("op"), raw.get("name"), raw.get("target")
    if op not in ("placeholder", "call_function", "call_method"):
        raise user_error(
            f"custom loss node {name!r} has op {op!r}; allowed: placeholder, call_function, call_method, and "
            "output once, at the end"
        )
    if not isinstance(name, str) or not _NAME.fullmatch(name) or name in seen:
        raise user_error(f"custom loss node name {name!r} is not a new name that matches {_NAME.pattern}")
    if not isinstance(target, str):
        raise user_error(f"custom loss node {name!r} needs a target name, got {target!r}")
    if op == "placeholder":
        return name, None
    arguments = _Arguments(name, seen)
    table, kind = (ops.FUNCTIONS, "function") if op == "call_function" else (ops.METHODS, "tensor method")
    if target not in table:
        raise arguments.error(f"the {kind} {target!r} is not on the allow-list")
    args, kwargs = raw.get("args", []), raw.get("kwargs", {})
    if not isinstance(args, list | tuple) or not isinstance(kwargs, Mapping):
        raise arguments.error("args must be a list and kwargs an object")
    if target.endswith("getattr") and (len(args) != 2 or kwargs or args[1] not in ops.ATTRIBUTES):
        raise arguments.error(f"only {', '.join(ops.ATTRIBUTES)} may be read, got {args[1:]!r}")
    for key in ("out", "generator", "pin_memory", "names"):
        if kwargs.get(key) is not None:
            raise arguments.error(f"the argument {key!r} of {target} is not allowed")
    named = {arguments.text(key): arguments.read(value) for key, value in kwargs.items()}
    if "device" in named or target.removeprefix("torch.") in ops.FACTORIES:
        named["device"] = _ANY_DEVICE
    return name, LossNode(name, target, table[target], tuple(map(arguments.read, args)), named)

"""Uploaded custom losses: a torch.fx graph in wire form, checked node by node and run from an allow-list.

Nothing that a client sends is executed as code: a node names an operation of a fixed table
(loss_graph_ops.py), and anything else is refused by name. Costs are bounded: `check` runs the graph on the
meta device, which computes shapes alone, and refuses results or products that are too large.
Runs once per datum with (logprobs, *inputs); knows nothing of models or batches.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tinkex.engine.protocol import CustomLoss
from tinkex.engine.request import user_error
from tinkex.engine.torch.loss_graph_ops import (
    ATTRIBUTES,
    DTYPES,
    FACTORIES,
    FUNCTIONS,
    LAYOUTS,
    METHODS,
    call,
    product_work,
)
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
WORK_PER_ELEMENT = 64  # multiplications of a matrix product that count as one element

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
_INPUT = re.compile(r"[a-z_][a-z0-9_]{0,63}")
_METRIC = re.compile(r"custom/[a-z0-9_./-]{1,64}:(sum|mean)")

_ANY_DEVICE = torch.device("cpu")  # replaced by the device that the loss runs on

Shapes = Mapping[str, tuple[tuple[int, ...], np.dtype]]


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


@dataclass(frozen=True)
class LossGraph:
    """A checked loss graph."""

    inputs: tuple[str, ...]
    placeholders: tuple[str, ...]  # the node names that hold the inputs, in the same order
    nodes: tuple[LossNode, ...]
    loss: NodeRef
    metrics: dict[str, Any]

    def check(self, logprobs: tuple[int, ...], inputs: Shapes) -> None:
        """Refuse shapes that the graph cannot compute or that are too costly; runs on the meta device."""
        given = [torch.empty(logprobs, device="meta")]
        for key in self.inputs[1:]:
            shape, dtype = inputs[key]
            given.append(torch.empty(shape, dtype=_torch_dtype(dtype), device="meta"))
        total = 0

        def bound(node: LossNode, value: Any, work: int) -> None:
            nonlocal total
            size = sum(t.numel() for t in _tensors(value))
            total += size + work // WORK_PER_ELEMENT
            if size > MAX_ELEMENTS or total > MAX_TOTAL:
                raise user_error(
                    f"too large: {size} elements, {total} in all so far; allowed: {MAX_ELEMENTS} in one "
                    f"result, {MAX_TOTAL} in all"
                )

        self._run(given, bound)

    def read_inputs(
        self, given: Mapping[str, TensorData], shape: tuple[int, ...]
    ) -> Mapping[str, np.ndarray]:
        """What the graph reads of a datum's `loss_fn_inputs`, checked with targets of `shape`."""
        inputs = {}
        for key in self.inputs[1:]:
            if key not in given:
                raise InvalidInputError(f"loss_fn_inputs has no {key!r}, which the custom loss reads")
            check_finite(key, given[key])
            inputs[key] = given[key].to_numpy()
        self.check(shape, {key: (value.shape, value.dtype) for key, value in inputs.items()})
        return inputs

    def gradient(
        self, logprobs: Tensor, inputs: Mapping[str, np.ndarray]
    ) -> tuple[float, Tensor, dict[str, float]]:
        """The loss of one datum, its gradient by `logprobs`, and its metrics."""
        leaf = logprobs.detach().requires_grad_()
        with torch.enable_grad():
            loss, metrics = self.run(leaf, inputs)
            grad = None
            if loss.requires_grad:
                try:
                    (grad,) = torch.autograd.grad(loss, leaf, allow_unused=True)
                except RuntimeError as error:  # not every operation has a derivative
                    raise user_error(
                        f"the custom loss has no gradient: {str(error).splitlines()[0]}"
                    ) from None
        grad = torch.zeros_like(logprobs) if grad is None else grad.to(logprobs.dtype)
        return float(loss.detach()), grad, metrics

    def run(self, logprobs: Tensor, inputs: Mapping[str, np.ndarray]) -> tuple[Tensor, dict[str, float]]:
        """The loss of one datum (a scalar that carries gradients to `logprobs`) and its metrics."""
        given = [logprobs]
        for key in self.inputs[1:]:
            given.append(torch.from_numpy(np.array(inputs[key])).to(logprobs.device))
        loss, metrics = self._run(given)
        return loss, {key: _number(value) for key, value in metrics.items()}

    def _run(
        self, given: list[Tensor], on_result: Callable[[LossNode, Any, int], None] | None = None
    ) -> tuple[Tensor, dict[str, Any]]:
        values: dict[str, Any] = dict(zip(self.placeholders, given, strict=True))
        device = given[0].device
        for node in self.nodes:
            values[node.name] = _call_node(node, values, device, on_result)
        loss = values[self.loss.name]
        if not isinstance(loss, Tensor) or loss.dim() != 0 or not loss.is_floating_point():
            raise user_error(f"the custom loss must be a scalar tensor, got {_describe(loss)}")
        metrics = {key: _resolve(value, values, device) for key, value in self.metrics.items()}
        for key, value in metrics.items():
            if not isinstance(value, int | float) and not (isinstance(value, Tensor) and value.dim() == 0):
                raise user_error(f"the metric {key!r} must be a scalar, got {_describe(value)}")
        return loss, metrics


def _call_node(
    node: LossNode,
    values: Mapping[str, Any],
    device: torch.device,
    on_result: Callable[[LossNode, Any, int], None] | None,
) -> Any:
    args, kwargs = _resolve(node.args, values, device), _resolve(node.kwargs, values, device)
    try:
        value = call(node.function, args, kwargs)
        if on_result:
            on_result(node, value, product_work(node.function, args, kwargs))
        return value
    except Exception as error:  # torch's complaint about a client's arguments is a user error
        reason = str(error).split("\n")[0][:300]
        raise user_error(f"custom loss node {node.name!r} ({node.target}): {reason}") from None


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [t for item in value for t in _tensors(item)] if isinstance(value, tuple | list) else []


def _resolve(value: Any, values: Mapping[str, Any], device: torch.device) -> Any:
    """Arguments with references replaced by results, and devices by `device`."""
    match value:
        case NodeRef(name):
            return values[name]
        case torch.device():
            return device
        case slice():
            return slice(*(_resolve(part, values, device) for part in (value.start, value.stop, value.step)))
        case list():
            return [_resolve(item, values, device) for item in value]
        case tuple():
            return tuple(_resolve(item, values, device) for item in value)
        case dict():
            return {key: _resolve(item, values, device) for key, item in value.items()}
    return value


def _number(value: Any) -> float:
    return float(value.detach() if isinstance(value, Tensor) else value)


def _torch_dtype(dtype: np.dtype) -> torch.dtype:
    return torch.float32 if dtype.kind == "f" else torch.int64


def _describe(value: Any) -> str:
    return f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


# -- reading -------------------------------------------------------------------------------------------


def read_loss_graph(custom: CustomLoss) -> LossGraph:
    """The graph of an uploaded loss; raises EngineError (category "user") for anything not allowed."""
    _check_inputs(custom.inputs)
    if not 0 < len(custom.nodes) <= MAX_NODES:
        raise user_error(f"a custom loss has 1 to {MAX_NODES} nodes, got {len(custom.nodes)}")
    seen: set[str] = set()
    placeholders, nodes = [], []
    *body, output = custom.nodes
    for raw in body:
        op, name, target = _node_head(raw, seen)
        if op == "placeholder":
            if nodes:
                raise user_error(f"custom loss node {name!r}: placeholders come before anything else")
            placeholders.append(name)
        else:
            nodes.append(_node(raw, op, name, target, seen))
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


def _node_head(raw: Mapping[str, Any], seen: set[str]) -> tuple[str, str, str]:
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
    return op, name, target


def _node(raw: Mapping[str, Any], op: str, name: str, target: str, seen: set[str]) -> LossNode:
    function = (FUNCTIONS if op == "call_function" else METHODS).get(target)
    if function is None:
        kind = "function" if op == "call_function" else "tensor method"
        raise user_error(f"custom loss node {name!r}: the {kind} {target!r} is not on the allow-list")
    args, kwargs = raw.get("args", []), raw.get("kwargs", {})
    if not isinstance(args, list | tuple) or not isinstance(kwargs, Mapping):
        raise user_error(f"custom loss node {name!r}: args must be a list and kwargs an object")
    if target.endswith("getattr") and (len(args) != 2 or kwargs or args[1] not in ATTRIBUTES):
        raise user_error(
            f"custom loss node {name!r}: only {', '.join(ATTRIBUTES)} may be read, got {args[1:]!r}"
        )
    for key in ("out", "generator", "pin_memory", "names"):
        if kwargs.get(key) is not None:
            raise user_error(f"custom loss node {name!r}: the argument {key!r} of {target} is not allowed")
    decoded = tuple(_argument(value, name, seen) for value in args)
    named = {_text(key, name): _argument(value, name, seen) for key, value in kwargs.items()}
    if "device" in named or target.removeprefix("torch.") in FACTORIES:
        named["device"] = _ANY_DEVICE
    return LossNode(name, target, function, decoded, named)


def _output(raw: Mapping[str, Any], seen: set[str]) -> tuple[NodeRef, dict[str, Any]]:
    args = raw.get("args", ())
    if raw.get("op") != "output" or not isinstance(args, list | tuple) or len(args) != 1:
        raise user_error("a custom loss ends with one output node of one argument, (loss, metrics)")
    result = _argument(args[0], "output", seen)
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


def _argument(value: Any, node: str, seen: set[str], depth: int = 0) -> Any:
    """One argument in wire form, decoded."""
    if depth > MAX_DEPTH:
        raise user_error(f"custom loss node {node!r}: arguments are nested more than {MAX_DEPTH} deep")
    match value:
        case None | bool() | float():
            return value
        case int():
            if abs(value) >= 2**63:
                raise user_error(f"custom loss node {node!r}: the number {value} is too large")
            return value
        case str():
            return _text(value, node)
        case list() | tuple():
            return [_argument(item, node, seen, depth + 1) for item in _some(value, node)]
        case Mapping() if len(value) == 1:
            ((tag, content),) = value.items()
            return _tagged(tag, content, node, seen, depth)
    raise user_error(f"custom loss node {node!r}: an argument is {str(value)[:80]!r}, which is no known form")


def _tagged(tag: str, content: Any, node: str, seen: set[str], depth: int) -> Any:
    match tag, content:
        case "ref", str() if content in seen:
            return NodeRef(content)
        case "tuple", list() | tuple():
            return tuple(_argument(item, node, seen, depth + 1) for item in _some(content, node))
        case "dict", Mapping():
            return {
                _text(key, node): _argument(content[key], node, seen, depth + 1)
                for key in _some(content, node)
            }
        case "slice", [start, stop, step]:
            return slice(*(_argument(part, node, seen, depth + 1) for part in (start, stop, step)))
        case "ellipsis", True:
            return ...
        case "float", "inf" | "-inf" | "nan":
            return float(content)
        case "dtype", str() if content in DTYPES:
            return DTYPES[content]
        case "layout" | "memory_format", str() if content in LAYOUTS:
            return LAYOUTS[content]
        case "device", str():
            return _ANY_DEVICE
    raise user_error(
        f"custom loss node {node!r}: {{{tag!r}: {str(content)[:80]!r}}} is not an argument we know"
    )


def _some(content: Any, node: str) -> Any:
    if len(content) > MAX_ITEMS:
        raise user_error(
            f"custom loss node {node!r}: {len(content)} arguments in one list; allowed: {MAX_ITEMS}"
        )
    return content


def _text(value: Any, node: str) -> str:
    limit = 128 if isinstance(value, str) and value.startswith("custom/") else MAX_TEXT
    if not isinstance(value, str) or len(value) > limit:
        raise user_error(
            f"custom loss node {node!r}: {str(value)[:80]!r} is not a text of up to {limit} characters"
        )
    return value

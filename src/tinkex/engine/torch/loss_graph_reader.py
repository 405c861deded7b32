"""Reads an uploaded loss: a torch.fx graph in wire form, checked node by node.

A node names an operation of a fixed table (loss_graph_ops.py); anything else is refused by name, as are
arguments of unknown forms. What is read is a value: `loss_graph.LossGraph` runs it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tinkex.engine.protocol import CustomLoss, EngineError
from tinkex.engine.request import user_error
from tinkex.engine.torch import loss_graph_ops as ops
from tinkex.engine.torch.loss_graph import LossGraph, LossNode, NodeRef
from tinkex.types.losses import MAX_INPUTS, MAX_NODES

MAX_DEPTH = 8  # of nested arguments
MAX_ITEMS = 256  # in one list of arguments
MAX_TEXT = 64

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
_INPUT = re.compile(r"[a-z_][a-z0-9_]{0,63}")
_METRIC = re.compile(r"custom/[a-z0-9_./-]{1,64}:(sum|mean)")

_ANY_DEVICE = torch.device("cpu")  # replaced by the device that the loss runs on


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

"""Traces a user's torch function with torch.fx, checks the graph, and converts it to the wire format.

Promises: an untraceable function is refused with the operation, its source line and what to write instead.
Imports torch, so the client imports this module only when a loss is created.
"""

from __future__ import annotations

import inspect
import linecache
import math
import os
import re
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import EllipsisType, FrameType
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import torch
from torch import fx
from torch.fx.node import _get_qualified_name

from tinkex.errors import InvalidInputError
from tinkex.types.losses import MAX_INPUTS
from tinkex.types.training import CustomLossGraph, CustomLossInput, CustomLossNode

if TYPE_CHECKING:
    _Plain = str | float | tuple[Any, ...] | list[Any] | Mapping[Any, Any] | slice[Any, Any, Any] | None
    _Torch = fx.Node | torch.dtype | torch.layout | torch.memory_format | torch.device
    _Argument = _Plain | _Torch | EllipsisType

_INPUT = re.compile(r"[a-z_][a-z0-9_]{0,63}")
_METRIC = re.compile(r"custom/[a-z0-9_./-]{1,64}:(sum|mean)")
_OURS = (str(Path(torch.__file__).parent) + os.sep, __file__)
_LEAVE_TORCH = {
    "item": "keep it a tensor: losses and metrics are tensors",
    "tolist": "keep it a tensor: use whole-tensor operations",
    "numpy": "keep it a tensor: torch has the same functions",
    "backward": "return the loss; forward_backward_custom does the rest",
}
# torch.fx patches modules while it traces, and inspects them when a tracer is created: one trace at a time.
_tracing = threading.Lock()


class Untraceable(Exception):
    """Raised while tracing: what the function does that a graph cannot, and what to do instead."""


def trace(fn: Callable[..., Any], input_ranks: Mapping[str, int]) -> tuple[str, list[CustomLossInput], Any]:
    """The function's name, its inputs, and its graph: a GraphModule whose nodes carry their source lines."""
    name = getattr(fn, "__name__", type(fn).__name__)
    inputs = _inputs(name, fn, input_ranks)
    try:
        with _tracing:
            tracer = _Tracer()
            graph = tracer.trace(fn)
    except Exception as error:
        frames = [(f.f_code.co_filename, line) for f, line in traceback.walk_tb(error.__traceback__)]
        theirs = [_line(*frame) for frame in frames if not frame[0].startswith(_OURS)]
        _refuse(name, str(error) or type(error).__name__, theirs[-1] if theirs else "", error)
    _check_output(name, graph)
    return name, inputs, fx.GraphModule(tracer.root, graph, class_name=re.sub(r"\W", "_", name))


def _refuse(name: str, reason: str, line: str = "", cause: BaseException | None = None) -> NoReturn:
    at = f" at {line}" if line else ""
    raise InvalidInputError(
        f"create_custom_loss: {name} cannot be traced{at}: {reason}. A function that cannot be traced still "
        "works untraced: give forward_backward_custom a function of (data, logprobs)"
    ) from (None if isinstance(cause, Untraceable) else cause)


# -- the function ----------------------------------------------------------------------------------------


def _wrong(reason: str) -> NoReturn:
    raise InvalidInputError(f"create_custom_loss: {reason}")


def _inputs(name: str, fn: Callable[..., Any], ranks: Mapping[str, int]) -> list[CustomLossInput]:
    if not inspect.isfunction(fn):
        raise InvalidInputError(
            f"create_custom_loss takes a function (def or lambda), got {type(fn).__name__}; wrap it in one"
        )
    parameters = inspect.signature(fn).parameters
    for key, parameter in parameters.items():
        which = f"parameter {key!r} of {name}"
        if parameter.kind is not inspect.Parameter.POSITIONAL_OR_KEYWORD:
            _wrong(
                f"{which} must be a plain parameter: no *args, **kwargs, keyword-only or positional-only ones"
            )
        if parameter.default is not inspect.Parameter.empty:
            _wrong(f"{which} has a default; every parameter is read from the datum's loss_fn_inputs")
        if not _INPUT.fullmatch(key):
            _wrong(f"{which} must be small letters, digits and '_', at most 64")
    names = list(parameters)
    if names[:1] != ["logprobs"]:
        _wrong(
            f"{name} must take logprobs first, then the loss_fn_inputs it reads, as in "
            f"def loss(logprobs, advantages); it takes ({', '.join(names)})"
        )
    if len(names) > MAX_INPUTS:
        _wrong(f"{name} takes {len(names)} inputs, at most {MAX_INPUTS}")
    if not isinstance(ranks, Mapping) or set(ranks) != set(names):
        given = list(ranks) if isinstance(ranks, Mapping) else ranks
        _wrong(f"input_ranks must give a rank for each of {', '.join(names)}, got {given!r}")
    for key, rank in ranks.items():
        allowed = (1, 2) if key == "logprobs" else (0, 1, 2)
        if isinstance(rank, bool) or rank not in allowed:
            _wrong(
                f"input_ranks[{key!r}] is {rank!r}; allowed: {allowed} "
                "(0: a number, 1: one value a token, 2: several)"
            )
    return [CustomLossInput(name=key, rank=ranks[key]) for key in names]  # type: ignore[arg-type]


def _check_output(name: str, graph: fx.Graph) -> None:
    output: Any = next(node for node in graph.nodes if node.op == "output")
    returned: tuple[Any, ...] | list[Any] | fx.Node = output.args[0]
    if not isinstance(returned, tuple | list) or len(returned) != 2 or not isinstance(returned[1], Mapping):
        _wrong(f"{name} must return (loss, metrics), a tensor and a dict; got {returned!r}")
    loss, metrics = returned
    if not isinstance(loss, fx.Node):
        _wrong(f"{name} must return its loss as a tensor, got {loss!r}")
    for key, value in metrics.items():
        if not isinstance(key, str) or not _METRIC.fullmatch(key):
            _wrong(
                f"the metric {key!r} of {name} must be called custom/NAME:sum or "
                "custom/NAME:mean, NAME in small letters; the suffix says how datums are put together"
            )
        if not isinstance(value, fx.Node):
            _wrong(f"the metric {key!r} of {name} must be a tensor, got {value!r}")


# -- tracing ---------------------------------------------------------------------------------------------


def _refusing(reason: str) -> Any:
    def refuse(*_: Any) -> NoReturn:
        raise Untraceable(reason)

    return refuse


class _Value(fx.Proxy):
    """A proxy for a tensor; operations that need its value raise Untraceable."""

    __len__ = _refusing("len() of a tensor is not known yet; use its .shape[0]")
    __float__ = _refusing("float() of a tensor needs its value; keep it a tensor")
    __int__ = _refusing("int() of a tensor needs its value; keep it a tensor (.long())")
    __index__ = _refusing("a tensor cannot count a Python loop or index a list; use whole-tensor operations")
    __setitem__ = _refusing("item assignment changes a tensor in place; use torch.where or masked_fill")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__array") or name == "__cuda_array_interface__":
            raise Untraceable("numpy needs the tensor's values; torch has the same functions")
        return super().__getattr__(name)


class _Tracer(fx.Tracer):
    """A torch.fx tracer that raises Untraceable at the offending line, and records every node's line."""

    def __init__(self) -> None:
        super().__init__()
        self._grad = torch.is_grad_enabled()

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Value(node, self)

    to_bool = _refusing("it branches on a tensor's value; use torch.where to choose between two results")
    iter = _refusing("it loops over a tensor, whose length is not known yet; use whole-tensor operations")

    def call_module(self, m: torch.nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        raise Untraceable(f"it calls the module {type(m).__name__}; use a function of torch.nn.functional")

    def create_arg(self, a: Any) -> Any:
        if isinstance(a, torch.Tensor):
            raise Untraceable(
                "it uses a tensor that is not one of its inputs; put it into loss_fn_inputs, write it as a "
                "Python number, or make it from an input (torch.zeros_like(logprobs), logprobs.new_full(…))"
            )
        kind = type(a).__name__
        try:
            return super().create_arg(a.item() if isinstance(a, np.generic) else a)
        except NotImplementedError:
            raise Untraceable(f"an argument is a {kind}, which a graph cannot hold") from None

    def create_node(self, kind: str, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        if torch.is_grad_enabled() != self._grad:
            raise Untraceable("torch.no_grad() leaves no mark in a graph; use .detach() on what it covers")
        if kind == "call_method":
            if target in _LEAVE_TORCH:
                raise Untraceable(f"it calls .{target}(), which needs the values; {_LEAVE_TORCH[target]}")
            if not callable(getattr(torch.Tensor, target, None)):
                raise Untraceable(f"tensors have no method {target!r}")
        elif kind == "call_function":
            _function_name(target)
        node = super().create_node(kind, target, *args, **kwargs)
        node.meta["line"] = _line_of_frame(sys._getframe(1))
        return node


def _function_name(function: Callable[..., Any]) -> str:
    name = _get_qualified_name(function)
    if name == "getattr":
        return name
    name = name.replace("_operator.", "operator.", 1) if name.startswith("_operator.") else name
    if name.partition(".")[0] not in ("torch", "math", "operator"):
        raise Untraceable(f"it calls {name}; a graph has functions of torch, math and operator alone")
    return name


def _line_of_frame(frame: FrameType) -> str:
    """The innermost line of user code, at or above a frame."""
    stack = ((each.f_code.co_filename, line) for each, line in traceback.walk_stack(frame))
    return next((_line(file, line) for file, line in stack if not file.startswith(_OURS)), "")


def _line(file: str, number: int) -> str:
    source = linecache.getline(file, number).strip()
    return f"{Path(file).name}:{number}" + (f" ({source})" if source else "")


# -- the wire format -------------------------------------------------------------------------------------


def to_wire(name: str, graph: fx.GraphModule) -> CustomLossGraph:
    nodes: list[CustomLossNode] = []
    for node in graph.graph.nodes:
        try:
            target = _function_name(node.target) if node.op == "call_function" else str(node.target)
            args = [_argument(value) for value in node.args]
            kwargs = {key: _argument(value) for key, value in node.kwargs.items()}
        except Untraceable as error:
            _refuse(name, str(error), node.meta.get("line", ""), error)
        nodes.append(CustomLossNode(op=node.op, name=node.name, target=target, args=args, kwargs=kwargs))
    return CustomLossGraph(nodes=nodes)


def _argument(value: _Argument) -> Any:
    match value:
        case fx.Node():
            return {"ref": value.name}
        case None | bool() | str():
            return value
        case int():
            return int(value)
        case float():
            return float(value) if math.isfinite(value) else {"float": str(float(value))}
        case tuple():
            return {"tuple": [_argument(item) for item in value]}
        case list():
            return [_argument(item) for item in value]
        case Mapping():
            return {"dict": {str(key): _argument(item) for key, item in value.items()}}
        case slice():
            return {"slice": [_argument(part) for part in (value.start, value.stop, value.step)]}
        case torch.dtype() | torch.layout() | torch.memory_format():
            return {type(value).__name__: str(value).removeprefix("torch.")}
        case torch.device():
            return {"device": str(value)}
        case _ if value is ...:
            return {"ellipsis": True}
        case _:
            kind = type(value).__name__
            raise Untraceable(f"the argument {value!r} is a {kind}, which has no form on the wire")


# -- local execution -------------------------------------------------------------------------------------


class _Interpreter(fx.Interpreter):
    def __init__(self, name: str, graph: fx.GraphModule) -> None:
        super().__init__(graph)
        self.extra_traceback = False
        self._name = name

    def run_node(self, n: fx.Node) -> Any:
        try:
            return super().run_node(n)
        except Exception as error:
            reason = str(error).split("\n")[0]
            raise InvalidInputError(
                f"the custom loss {self._name} failed at {n.meta.get('line') or n.name}: {reason}"
            ) from error


def run(name: str, graph: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, Any]:
    """Execute the graph on one datum; returns its loss and metrics."""
    loss, metrics = _Interpreter(name, graph).run(*inputs)
    if not isinstance(loss, torch.Tensor) or loss.dim() != 0:
        shape = list(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise InvalidInputError(f"the custom loss {name} must be a scalar tensor, got {shape}")
    for key, value in metrics.items():
        if not isinstance(value, torch.Tensor) or value.dim() != 0:
            raise InvalidInputError(f"the metric {key!r} of the custom loss {name} must be a scalar tensor")
    return loss, metrics

"""Whether an uploaded loss can be one at all: its graph's form, as the wire has it (wire-protocol §7.9).

What may be called in it is the engine's to decide, when the loss is used. Evaluates nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from tinkex.types.base import AnyJson
from tinkex.types.training import CreateCustomLossRequest

MAX_NODES = 2000
MAX_DEPTH = 32
_INPUT = re.compile(r"[a-z_][a-z0-9_]{0,63}")


def check_loss(request: CreateCustomLossRequest) -> str:
    """Why this cannot be a loss; "" if it can."""
    names, nodes = [item.name for item in request.inputs], request.graph.nodes
    if not names or names[0] != "logprobs" or request.inputs[0].rank == 0:
        return "a custom loss's first input is logprobs, of rank 1 or 2"
    for name in names:
        if not _INPUT.fullmatch(name):
            return f"input {name!r} must be small letters, digits and '_', at most 64"
    if len(set(names)) < len(names):
        return f"inputs must have different names, got {names}"
    if not 0 < len(nodes) <= MAX_NODES:
        return f"a custom loss has 1 to {MAX_NODES} nodes, got {len(nodes)}"
    placeholders = [node.target for node in nodes if node.op == "placeholder"]
    if placeholders != names:
        return f"the graph's placeholders are {placeholders}, its inputs {names}: they must be the same"
    if [node.op for node in nodes].count("output") != 1 or nodes[-1].op != "output":
        return "a custom loss's graph ends with its one output"
    return _check_nodes(request)


def _check_nodes(request: CreateCustomLossRequest) -> str:
    known: set[str] = set()
    for node in request.graph.nodes:
        if node.op in ("get_attr", "call_module"):
            return f"node {node.name!r} is a {node.op}: a custom loss is a function of its inputs alone"
        if node.name in known:
            return f"two nodes are called {node.name!r}"
        try:
            unknown = [ref for ref in _refs([node.args, node.kwargs], 0) if ref not in known]
        except RecursionError:
            return f"the arguments of node {node.name!r} are nested too deeply"
        if unknown:
            return f"node {node.name!r} refers to {unknown[0]!r}, which is not before it"
        known.add(node.name)
    return ""


def _refs(value: AnyJson, depth: int) -> Iterator[str]:
    if depth > MAX_DEPTH:
        raise RecursionError
    if isinstance(value, dict):
        if set(value) == {"ref"} and isinstance(value["ref"], str):
            yield value["ref"]
        else:
            for item in value.values():
                yield from _refs(item, depth + 1)
    elif isinstance(value, list):
        for item in value:
            yield from _refs(item, depth + 1)

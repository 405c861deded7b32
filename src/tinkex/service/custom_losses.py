"""Losses that clients upload as graphs: checked, kept in the ledger, found again by their ids.

The form of a graph is checked here, without evaluating it. What may be called in it is the engine's decision.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from tinkex.engine.protocol import CheckLoss, CustomLoss, EngineError
from tinkex.service.access import Access
from tinkex.service.futures import Future, Futures, failure
from tinkex.service.home import Home
from tinkex.service.ledger import Ledger
from tinkex.service.refusal import Caller, Refusal
from tinkex.service.rows import CustomLossRow
from tinkex.service.served_models import ServedModels, execute
from tinkex.types import training
from tinkex.types.base import AnyJson
from tinkex.types.futures import UntypedAPIFuture
from tinkex.types.losses import MAX_NODES

MAX_DEPTH = 32
_INPUT = re.compile(r"[a-z_][a-z0-9_]{0,63}")


@dataclass(eq=False)
class CustomLosses:
    """Uploaded losses, by id."""

    ledger: Ledger
    home: Home
    access: Access
    models: ServedModels
    futures: Futures

    async def create_custom_loss(
        self, request: training.CreateCustomLossRequest, caller: Caller
    ) -> UntypedAPIFuture:
        """Keep a loss under an id."""
        self.access.active_session(request.session_id, caller)
        loss_id = f"{request.session_id}:loss:{request.custom_loss_seq_id}"
        row = CustomLossRow(
            loss_id, request.session_id, caller.user, request.name,
            [item.model_dump() for item in request.inputs],
            [node.model_dump() for node in request.graph.nodes],
        )  # fmt: skip
        why = _check_form(request) or await self._refused_by_engines(row)
        if self.ledger.custom_loss(loss_id) is None:
            size = len(repr(row))
            why = why or await self.home.over_quota(size, caller.user)
            self.home.count(caller.user, 0 if why else size)
        if why:
            failed = self.futures.create_resolved(caller.user, failure(why, "user"))
            return UntypedAPIFuture(failed.request_id)
        kept, _ = self.ledger.add_custom_loss(row)
        if kept != row:
            raise Refusal(422, f"custom_loss_seq_id {request.custom_loss_seq_id} was another loss")
        self.find_future(loss_id)
        return UntypedAPIFuture(loss_id)

    async def _refused_by_engines(self, row: CustomLossRow) -> str:
        """Why an engine would not run this loss. One that is not loaded yet says so on first use."""
        for model in self.models:
            try:
                if model.engine is not None:
                    await execute(model.engine, CheckLoss(_graph(row)))
            except EngineError as error:
                if error.category == "user":  # else the engine is in trouble, and the loss may be good
                    return error.message
        return ""

    def find_future(self, request_id: str) -> Future | None:
        """A loss's id is also the id of its future: after a restart it is found in the ledger."""
        if (row := self.ledger.custom_loss(request_id)) is None:
            return None
        created = training.CreateCustomLossResponse(loss_id=row.loss_id)
        return self.futures.create_resolved(row.owner, created, row.loss_id)


def find_loss(ledger: Ledger, loss_id: str, owner: str) -> CustomLoss | None:
    row = ledger.custom_loss(loss_id)
    return None if row is None or row.owner != owner else _graph(row)


def _graph(row: CustomLossRow) -> CustomLoss:
    return CustomLoss(tuple(item["name"] for item in row.inputs), tuple(row.nodes))


def _check_form(request: training.CreateCustomLossRequest) -> str:
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


def _check_nodes(request: training.CreateCustomLossRequest) -> str:
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
    if isinstance(value, dict) and set(value) == {"ref"} and isinstance(value["ref"], str):
        yield value["ref"]
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _refs(item, depth + 1)

"""Saved checkpoints: which came from which, download, publish, expiry, deletion."""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass
from typing import NamedTuple
from urllib.parse import urlencode

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from tinkex.server.console.console_data import ConsoleData, sees
from tinkex.server.console.site import ConsoleSite, page_of
from tinkex.server.console.visitors import Visitor
from tinkex.service.refusal import Refusal
from tinkex.service.rows import CheckpointRow, RunRow
from tinkex.service.service import Service
from tinkex.types.checkpoints import CheckpointRequest, ParsedCheckpointTinkerPath, SetCheckpointTTLRequest
from tinkex.wire import ops

PAGE = 50  # checkpoints of one page
_DAY = 86400
_VERBS = {
    "publish": ops.PUBLISH_CHECKPOINT, "unpublish": ops.UNPUBLISH_CHECKPOINT, "delete": ops.DELETE_CHECKPOINT,
}  # fmt: skip


@dataclass
class LineageNode:
    """A run, what it saved, and by each checkpoint the runs that were made from it."""

    row: RunRow
    saved: list[SavedNode]


class SavedNode(NamedTuple):
    """A checkpoint, and the runs that were made from it."""

    row: CheckpointRow
    children: list[LineageNode]


class CheckpointPages:
    """The page of checkpoints, read-only."""

    def __init__(self, site: ConsoleSite, data: ConsoleData) -> None:
        self._site, self._data = site, data
        site.add("/console/checkpoints", self.list)

    async def list(self, request: Request, visitor: Visitor) -> Response:
        run_id, ledger = request.query_params.get("run", ""), self._data.ledger
        number, offset = page_of(request, PAGE)
        if run_id:
            saved = self._data.checkpoints(self._data.row(run_id, visitor))
            found, total = saved[offset : offset + PAGE], len(saved)
        else:
            found, total = ledger.checkpoints(visitor.scope, limit=PAGE, offset=offset, now=time.time())
        rows = {i: run for i in {one.run_id: 0 for one in found} if (run := ledger.run(i)) is not None}
        for child in ledger.runs_made_from([one.tinker_path for one in found], visitor.scope, limit=PAGE):
            rows.setdefault(child.run_id, child)
        tree = _lineage([row for row in rows.values() if sees(visitor, row.owner, row.project_id)], found)
        return self._site.render(
            "checkpoints.html", visitor, tree=tree, run_id=run_id, count=total, page=number,
            pages=max(1, -(-total // PAGE)), size=sum(one.size_bytes for one in found),
            owns=visitor.caller.owns,
        )  # fmt: skip


def _lineage(rows: list[RunRow], found: list[CheckpointRow]) -> list[LineageNode]:
    """The runs that began without a checkpoint of these, each with all that descends from it."""
    nodes = {row.run_id: LineageNode(row, []) for row in rows}
    children: defaultdict[str, list[LineageNode]] = defaultdict(list)
    paths = {one.tinker_path for one in found}
    for node in nodes.values():
        if node.row.parent in paths:
            children[node.row.parent or ""].append(node)
    for one in found:
        if one.run_id in nodes:
            nodes[one.run_id].saved.append(SavedNode(one, children[one.tinker_path]))
    nested = {id(node) for many in children.values() for node in many}
    return [node for node in nodes.values() if id(node) not in nested]


class CheckpointChanges:
    """What is done to a checkpoint: each by the service's own operation."""

    def __init__(self, site: ConsoleSite, service: Service) -> None:
        self._site, self._service = site, service
        site.add("/console/checkpoints/download", self.download)
        site.add("/console/checkpoints/{verb:str}", self.change, "POST")

    async def download(self, request: Request, visitor: Visitor) -> Response:
        which = _which(request.query_params.get("path", ""))
        found = await self._service.call(ops.GET_CHECKPOINT_ARCHIVE_URL, which, visitor.caller)
        return RedirectResponse(found.url, 303)

    async def change(self, request: Request, visitor: Visitor) -> Response:
        form, call = await self._site.form(request), self._service.call
        which = _which(form.get("path", ""))
        match request.path_params["verb"]:
            case "publish" | "unpublish" | "delete" as verb:
                await call(_VERBS[verb], which, visitor.caller)
            case "expire":
                days = form.get("days", "").strip()
                if days and not (days.isdecimal() and 1 <= int(days) <= 3650):
                    raise Refusal(422, f"days must be 1 to 3650, or nothing for ever; got {days!r:.40}")
                ttl = int(days) * _DAY if days else None
                ids = which.model_dump(include={"training_run_id", "checkpoint_id"})
                expiry = SetCheckpointTTLRequest(**ids, ttl_seconds=ttl)
                await call(ops.SET_CHECKPOINT_TTL, expiry, visitor.caller)
            case other:
                raise Refusal(404, f"nothing called {other!r:.40} can be done to a checkpoint")
        only = f"?{urlencode({'run': run})}" if (run := form.get("run")) else ""
        return self._site.redirect(f"/console/checkpoints{only}", request)


def _which(path: str) -> CheckpointRequest:
    parsed = ParsedCheckpointTinkerPath.from_tinker_path(path)
    return CheckpointRequest(training_run_id=parsed.training_run_id, checkpoint_id=parsed.checkpoint_id)

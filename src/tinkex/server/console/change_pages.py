"""Forms that rename, tag and delete runs, through the service's own operations."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from tinkex.server.console.formats import short
from tinkex.server.console.site import ConsoleSite
from tinkex.server.console.visitors import Visitor
from tinkex.service.refusal import Refusal
from tinkex.service.service import Service
from tinkex.types.training import DeleteRunRequest, UpdateRunRequest
from tinkex.wire import ops


class RunChanges:
    """Forms about runs."""

    def __init__(self, site: ConsoleSite, service: Service) -> None:
        self._site, self._service = site, service
        site.add("/console/runs/{run_id}/rename", self.rename, "POST")
        site.add("/console/runs/{run_id}/delete", self.delete, "POST")

    async def rename(self, request: Request, visitor: Visitor) -> Response:
        run_id, form = request.path_params["run_id"], await self._site.form(request)
        tags = [tag.strip() for tag in form.get("tags", "").split(",") if tag.strip()]
        try:
            changes = UpdateRunRequest(training_run_id=run_id, name=form.get("name", ""), tags=tags)
        except ValueError as error:
            raise Refusal(422, f"this cannot be a run's name or tags: {error}") from None
        await self._service.call(ops.UPDATE_RUN, changes, visitor.caller)
        return self._site.redirect(f"/console/runs/{run_id}", request)

    async def delete(self, request: Request, visitor: Visitor) -> Response:
        run_id, form = request.path_params["run_id"], await self._site.form(request)
        if form.get("confirm", "").strip() not in (short(run_id), run_id):
            raise Refusal(422, f"type {short(run_id)} to confirm that run {run_id} is deleted for good")
        everything = DeleteRunRequest(training_run_id=run_id, checkpoints=True)
        await self._service.call(ops.DELETE_RUN, everything, visitor.caller)
        return self._site.redirect("/console/runs", request)

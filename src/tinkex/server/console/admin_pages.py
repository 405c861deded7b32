"""Pages for administrators' keys alone: keys, usage, the audit log, and disk space by run."""

from __future__ import annotations

import asyncio
import csv
import io
import time
from collections.abc import AsyncGenerator
from datetime import UTC, datetime
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from tinkex.server.api_keys import hash_key, new_key
from tinkex.server.console.console_data import ConsoleData
from tinkex.server.console.formats import short
from tinkex.server.console.site import ConsoleSite, page_of
from tinkex.server.console.visitors import Visitor
from tinkex.service.peers import Elsewhere
from tinkex.service.refusal import Caller, Refusal
from tinkex.service.rows import KeyRow, Scope
from tinkex.service.service import Service
from tinkex.store import directory_bytes
from tinkex.types.training import DeleteRunRequest
from tinkex.wire import ops

DAYS = 30  # of usage
MOST_RUNS = 2000  # whose space on the disk is measured
MEASURED, PATIENCE = 60.0, 0.05  # seconds for which a measurement holds, and for which a page waits for more
SHOWN, MOST_LETTERS = 100, 100
CURVES = {  # of usage: what of it they sum up
    "Trained tokens": ("training",), "Sampled tokens": ("sampling_sample",),
    "Prompt tokens": ("sampling_prefill", "sampling_prefill_cached"), "Saves": ("checkpoint",),
}  # fmt: skip
EVERYBODY = Scope(None)


class AdminPages:
    """Pages about all users, read-only."""

    def __init__(self, site: ConsoleSite, data: ConsoleData) -> None:
        self._site, self._data = site, data
        self._sizes: dict[str, tuple[float, int]] = {}  # when a run was measured, and its bytes
        self._measuring: asyncio.Future[None] | None = None
        site.add("/console/admin", self.show)
        site.add("/console/admin/usage.csv", self.usage_csv)
        site.add("/console/admin/disk", self.disk)
        site.add("/console/admin/disk/clean-up", self.confirm)

    async def show(self, request: Request, visitor: Visitor) -> Response:
        must_be_admin(visitor)
        ledger, (number, offset) = self._data.ledger, page_of(request, SHOWN, "audit")
        if self._data.live is not None:
            self._data.live.flush()
        usage = ledger.usage_by_day(time.time() - DAYS * 86400, limit=SHOWN)
        audit = ledger.latest_audit(limit=SHOWN + 1, offset=offset)
        return self._site.render(
            "admin.html", visitor, keys=ledger.keys(), days=DAYS, storage=ledger.storage(EVERYBODY),
            curves=_by_day(ledger.usage_totals(time.time() - DAYS * 86400)),
            usage=[(datetime.fromtimestamp(day, UTC).date(), owner, kinds) for day, owner, kinds in usage],
            projects=_members(ledger.keys()),
            audit=audit[:SHOWN], audit_page=number, audit_more=len(audit) > SHOWN,
        )  # fmt: skip

    async def usage_csv(self, request: Request, visitor: Visitor) -> Response:
        must_be_admin(visitor)
        named = {"content-disposition": "attachment; filename=usage.csv"}
        return StreamingResponse(self._usage_by_day(), 200, named, "text/csv")

    async def _usage_by_day(self) -> AsyncGenerator[str]:
        """A year's rows, a day at a time: others have their turn in between."""
        yield "hour,owner,project,base_model,session,kind,amount\r\n"
        end = time.time() + 3600
        for days in range(365, 0, -1):
            out = io.StringIO()
            writer, start = csv.writer(out), end - days * 86400
            for row in self._data.ledger.usage(start, start + 86400, EVERYBODY):
                hour = datetime.fromtimestamp(row.hour, UTC).isoformat()
                amount = row.kind, row.amount
                fields = [hour, row.owner, row.project_id, row.base_model, row.session_id, *amount]
                writer.writerow([_harmless(field) for field in fields])
            if text := out.getvalue():
                yield text
            await asyncio.sleep(0)

    async def disk(self, request: Request, visitor: Visitor) -> Response:
        must_be_admin(visitor)
        ledger, run_ids = self._data.ledger, self._data.ledger.run_ids(limit=MOST_RUNS)
        if self._measuring is None or self._measuring.done():
            old = time.monotonic() - MEASURED
            missing = [run_id for run_id in run_ids if self._sizes.get(run_id, (old, 0))[0] <= old]
            self._measuring = asyncio.ensure_future(self._site.off_loop(self._measure, missing))
        await asyncio.wait([self._measuring], timeout=PATIENCE)
        sizes = {run_id: self._sizes[run_id][1] for run_id in run_ids if run_id in self._sizes}
        largest = sorted(sizes, key=sizes.__getitem__, reverse=True)[:SHOWN]
        rows = [row for run_id in largest if (row := ledger.run(run_id)) is not None]
        return self._site.render(
            "disk.html", visitor, runs=[(sizes[one.row.run_id], one) for one in self._data.shown(rows)],
            total=sum(sizes.values()), count=len(run_ids), measured=len(sizes),
        )  # fmt: skip

    async def confirm(self, request: Request, visitor: Visitor) -> Response:
        """What is about to be deleted, with the question whether it shall be."""
        must_be_admin(visitor)
        given = dict.fromkeys(request.query_params.getlist("run"))
        rows = [row for run_id in given if (row := self._data.ledger.run(run_id)) is not None][:SHOWN]
        await self._site.off_loop(self._measure, [row.run_id for row in rows])
        runs = [
            (self._sizes[one.row.run_id][1], len(self._data.checkpoints(one.row)), one)
            for one in self._data.shown(rows)
        ]
        return self._site.render("clean_up.html", visitor, runs=runs, total=sum(size for size, _, _ in runs))

    def _measure(self, run_ids: list[str]) -> None:
        for run_id in run_ids:
            self._sizes[run_id] = time.monotonic(), _size(self._data.home.run_dir(run_id))


def _members(keys: list[KeyRow]) -> dict[str, list[str]]:
    """The projects, and the names of the keys of each."""
    found: dict[str, list[str]] = {}
    for key in sorted(keys, key=lambda key: key.project_id or ""):
        if key.project_id and key.revoked_at is None:
            found.setdefault(key.project_id, []).append(key.name)
    return found


def _by_day(totals: list[tuple[float, str, float]]) -> dict[str, list[float]]:
    """What was used on each of the last DAYS days, by curve."""
    used = {(int(day // 86400), kind): amount for day, kind, amount in totals}
    today = int(time.time() // 86400)
    return {
        title: [
            sum(used.get((day, kind), 0.0) for kind in kinds) for day in range(today - DAYS + 1, today + 1)
        ]
        for title, kinds in CURVES.items()
    }


class AdminChanges:
    """What an administrator does: make and revoke keys, put them into projects, delete runs."""

    def __init__(self, site: ConsoleSite, service: Service) -> None:
        self._site, self._service = site, service
        site.add("/console/admin/keys", self.add_key, "POST")
        site.add("/console/admin/keys/revoke", self.revoke, "POST")
        site.add("/console/admin/keys/assign", self.assign, "POST")
        site.add("/console/admin/runs/delete", self.delete_runs, "POST")

    async def add_key(self, request: Request, visitor: Visitor) -> Response:
        must_be_admin(visitor)
        form, ledger = await self._site.form(request), self._service.ledger
        name, key = form.get("name", "").strip(), new_key()
        taken = {row.name for row in ledger.keys() if row.revoked_at is None}  # noqa: SIM118
        if not name or name in taken:
            raise Refusal(422, "a key needs a name that no other key has")
        owner, project = form.get("owner", "").strip() or name, form.get("project", "").strip() or None
        ledger.add_key(
            name=name, note=form.get("note", ""), hash=hash_key(key), owner=owner, project_id=project,
            created_at=time.time(), admin=bool(form.get("admin")),
        )  # fmt: skip
        self._audit(visitor, "keys.add", name)
        return self._site.render("new_key.html", visitor, name=name, key=key)

    async def revoke(self, request: Request, visitor: Visitor) -> Response:
        must_be_admin(visitor)
        given = (await self._site.form(request)).get("key_id", "")
        names = {str(row.key_id): row.name for row in self._service.ledger.keys()}  # noqa: SIM118
        if given not in names or not self._service.ledger.revoke_key(int(given), time.time()):
            raise Refusal(404, f"there is no key {given!r:.20}, or it was revoked before")
        self._audit(visitor, "keys.revoke", names[given])
        return self._site.redirect("/console/admin", request)

    async def assign(self, request: Request, visitor: Visitor) -> Response:
        """Put keys into a project, which exists from then on; or into none."""
        must_be_admin(visitor)
        form, given = await self._site.form(request), await self._site.chosen(request, "key_id")
        project = form.get("project", "").strip() or None
        if project is not None and not (project.isprintable() and len(project) <= MOST_LETTERS):
            raise Refusal(422, f"the name of a project is a line of at most {MOST_LETTERS} characters")
        ledger = self._service.ledger
        names = {str(row.key_id): row.name for row in ledger.keys() if row.revoked_at is None}  # noqa: SIM118
        if not given or not names.keys() >= {*given}:
            raise Refusal(422, "choose keys that are in use: a project is what its keys belong to")
        with ledger.transaction():
            for key_id in given:
                ledger.assign_key(int(key_id), project)
        self._audit(visitor, "keys.assign", f"{', '.join(names[key] for key in given)}: {project or 'none'}")
        return self._site.redirect("/console/admin", request)

    async def delete_runs(self, request: Request, visitor: Visitor) -> Response:
        """Delete runs one after the other. Those that cannot be deleted are told."""
        must_be_admin(visitor)
        problems, elsewhere, given = list[str](), list[Elsewhere](), await self._site.chosen(request, "run")
        rows = [row for run_id in given if (row := self._service.ledger.run(run_id)) is not None]
        if not rows:
            raise Refusal(404, "none of the runs exists" if given else "no run was selected")
        for row in rows:
            everything = DeleteRunRequest(training_run_id=row.run_id, checkpoints=True)
            try:
                await self._site.check_here(row.run_id)
                await self._service.call(ops.DELETE_RUN, everything, Caller(row.owner, row.project_id))
                self._audit(visitor, "runs.clean-up", short(row.run_id))
            except Elsewhere as there:
                elsewhere.append(there)
            except Refusal as refusal:
                problems.append(refusal.message)
        if problems:
            stay = len(problems) + len(elsewhere)
            raise Refusal(422, f"{stay} of {len(rows)} runs were not deleted: {'; '.join(problems):.500}")
        if elsewhere:
            raise elsewhere[0]
        return self._site.redirect("/console/admin/disk", request)

    def _audit(self, visitor: Visitor, event: str, what: str) -> None:
        self._service.activity.audit(visitor.caller, event, details={"what": what})


def must_be_admin(visitor: Visitor) -> None:
    if not visitor.admin:
        raise Refusal(403, "this page is for keys that may administer: `tinkex server keys add NAME --admin`")


def _harmless(field: object) -> object:
    """A spreadsheet takes a text that begins so for a formula."""
    return f"'{field}" if isinstance(field, str) and field[:1] in "=+-@\t\r\n" else field


def _size(directory: Path) -> int:
    return directory_bytes(directory) if directory.is_dir() else 0

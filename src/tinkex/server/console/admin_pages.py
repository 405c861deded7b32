"""Pages for administrators' keys alone: keys, usage, the audit log, and disk space by run."""

from __future__ import annotations

import asyncio
import csv
import io
import time
from collections import defaultdict
from datetime import UTC, datetime
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

from tinkex.server.api_keys import hash_key, new_key
from tinkex.server.console.console_data import ConsoleData
from tinkex.server.console.formats import short
from tinkex.server.console.site import ConsoleSite
from tinkex.server.console.visitors import Visitor
from tinkex.service.refusal import Caller, Refusal
from tinkex.service.rows import RunQuery, Scope, UsageRow
from tinkex.service.service import Service
from tinkex.store import directory_bytes
from tinkex.types.training import DeleteRunRequest
from tinkex.wire import ops

DAYS = 30  # of usage and of the audit log
MOST_RUNS = 2000  # whose space on the disk is measured
SHOWN = 100
EVERYBODY = Scope(None)


class AdminPages:
    """Pages about all users, read-only."""

    def __init__(self, site: ConsoleSite, data: ConsoleData) -> None:
        self._site, self._data = site, data
        site.add("/console/admin", self.show)
        site.add("/console/admin/usage.csv", self.usage_csv)
        site.add("/console/admin/disk", self.disk)

    async def show(self, request: Request, visitor: Visitor) -> Response:
        must_be_admin(visitor)
        ledger, now = self._data.ledger, time.time()
        if self._data.live is not None:
            self._data.live.flush()
        usage = ledger.usage(now - DAYS * 86400, now + 3600, EVERYBODY)
        return self._site.render(
            "admin.html", visitor, keys=ledger.keys(), usage=_by_day(usage), days=DAYS,
            storage=ledger.storage(EVERYBODY),
            projects=sorted({key.project_id for key in ledger.keys() if key.project_id}),  # noqa: SIM118
            audit=ledger.audit(EVERYBODY, start=now - DAYS * 86400)[-SHOWN:][::-1],
        )  # fmt: skip

    async def usage_csv(self, request: Request, visitor: Visitor) -> Response:
        must_be_admin(visitor)
        now, out = time.time(), io.StringIO()
        writer = csv.writer(out)
        writer.writerow(["hour", "owner", "project", "base_model", "session", "kind", "amount"])
        for row in self._data.ledger.usage(now - 365 * 86400, now + 3600, EVERYBODY):
            hour = datetime.fromtimestamp(row.hour, UTC).isoformat()
            fields = [hour, row.owner, row.project_id, row.base_model, row.session_id, row.kind, row.amount]
            writer.writerow([_harmless(field) for field in fields])
        named = {"content-disposition": "attachment; filename=usage.csv"}
        return Response(out.getvalue(), 200, named, "text/csv")

    async def disk(self, request: Request, visitor: Visitor) -> Response:
        must_be_admin(visitor)
        rows = self._data.ledger.find_runs(RunQuery(), EVERYBODY, limit=MOST_RUNS).rows
        sizes = await asyncio.to_thread(lambda: [_size(self._data.directory(row)) for row in rows])
        largest = sorted(zip(sizes, rows, strict=True), key=lambda pair: pair[0], reverse=True)
        shown = [(size, self._data.shown(row)) for size, row in largest[:SHOWN]]
        return self._site.render("disk.html", visitor, runs=shown, total=sum(sizes), count=len(rows))


class AdminChanges:
    """What an administrator does: make and revoke keys, delete runs."""

    def __init__(self, site: ConsoleSite, service: Service) -> None:
        self._site, self._service = site, service
        site.add("/console/admin/keys", self.add_key, "POST")
        site.add("/console/admin/keys/revoke", self.revoke, "POST")
        site.add("/console/admin/runs/delete", self.delete_run, "POST")

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

    async def delete_run(self, request: Request, visitor: Visitor) -> Response:
        must_be_admin(visitor)
        form = await self._site.form(request)
        row = self._service.ledger.run(form.get("run", ""))
        if row is None:
            raise Refusal(404, "there is no such run")
        everything = DeleteRunRequest(training_run_id=row.run_id, checkpoints=True)
        await self._service.call(ops.DELETE_RUN, everything, Caller(row.owner, row.project_id))
        self._audit(visitor, "runs.clean-up", short(row.run_id))
        return self._site.redirect("/console/admin/disk", request)

    def _audit(self, visitor: Visitor, event: str, what: str) -> None:
        self._service.activity.audit(visitor.caller, event, details={"what": what})


def must_be_admin(visitor: Visitor) -> None:
    if not visitor.admin:
        raise Refusal(403, "this page is for keys that may administer: `tinkex server keys add NAME --admin`")


def _by_day(usage: list[UsageRow]) -> list[tuple[str, str, dict[str, float]]]:
    """Amounts of each kind, by day and owner, newest first."""
    days: defaultdict[tuple[str, str], defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
    for row in usage:
        day = datetime.fromtimestamp(row.hour, UTC).date().isoformat()
        days[day, row.owner][row.kind] += row.amount
    return [(day, owner, dict(days[day, owner])) for day, owner in sorted(days, reverse=True)][:SHOWN]


def _harmless(field: object) -> object:
    """A spreadsheet takes a text that begins so for a formula."""
    return f"'{field}" if isinstance(field, str) and field[:1] in "=+-@\t" else field


def _size(directory: Path) -> int:
    return directory_bytes(directory) if directory.is_dir() else 0

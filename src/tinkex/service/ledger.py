"""The ledger: sessions, runs, samplers, checkpoints, usage and keys, in one SQLite file. Plain SQL.

ledger_file.py opens the file and says what survives. A repeated insert returns what is there. Statements are
short. Knows nothing of who may see what.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, cast

from tinkex.service import ledger_schema, rows
from tinkex.service.ledger_file import BIGGEST, MAX_PAGE, LedgerError, LedgerFile
from tinkex.service.ledger_queries import (
    ADD_TO_USAGE,
    CHECKPOINT,
    LISTED,
    UNEXPIRED,
    listed,
    run_clauses,
    search_clauses,
    within,
)
from tinkex.service.rows import CheckpointRow, KeyRow, RunRow, SamplerRow, Scope, SessionRow
from tinkex.store import sync_path
from tinkex.types.sessions import SessionSearchRequest

FILES = ("ledger.sqlite", "ledger.sqlite-wal", "ledger.sqlite-shm")  # in a home


class Ledger(LedgerFile):
    """The rows of an open ledger.

    >>> ledger = Ledger(home / "ledger.sqlite")
    >>> with ledger.transaction():
    ...     ledger.add_run(run)
    ...     ledger.add_audit(event)
    """

    def __init__(self, path: Path, wrote: Callable[[Path], None] | None = None, *, new: bool = False) -> None:
        super().__init__(path, wrote, new=new)
        if self.keys():
            with suppress(OSError):  # of a home that an older version served
                self._mark_keyed()

    # -- sessions ----------------------------------------------------------------------------------------

    def add_session(self, row: SessionRow) -> None:
        self._insert(SessionRow, vars(row))

    def sessions_of(self, owner: str) -> list[str]:
        return [name for (name,) in self._read("SELECT session_id FROM sessions WHERE owner = ?", [owner])]

    def session(self, session_id: str) -> SessionRow | None:
        return self._one(SessionRow, "session_id = ?", session_id)

    def update_session(self, session_id: str, **changes: Any) -> bool:
        return self._update(SessionRow, "session_id = ?", [session_id], changes)

    def move_session(self, session_id: str, project_id: str) -> bool:
        """Put a session into a project, with its runs and their checkpoints."""
        with self.transaction():
            its_runs = "run_id IN (SELECT run_id FROM runs WHERE session_id = ?)"
            self._update(CheckpointRow, its_runs, [session_id], {"project_id": project_id})
            self._update(RunRow, "session_id = ?", [session_id], {"project_id": project_id})
            return self.update_session(session_id, project_id=project_id)

    def delete_session(self, session_id: str) -> None:
        """With its samplers, uploaded losses and runs; what it used stays."""
        with self.transaction():
            for table in ("samplers", "custom_losses", "runs", "leases", "sessions"):
                self._do(f"DELETE FROM {table} WHERE session_id = ?", [session_id])

    def sessions(self, scope: Scope, *, limit: int, offset: int = 0) -> rows.RowPage[SessionRow]:
        return self._page(SessionRow, *within(scope), "session_id", limit, offset)

    def last_seen(self) -> float | None:
        """The last time at which any client was heard of."""
        return self._read("SELECT max(last_seen_at) FROM sessions")[0][0]

    def active_sessions(self, *, seen_before: float) -> list[SessionRow]:
        """Active sessions that were last heard of before then."""
        where = "json_extract(status, '$.type') = 'active' AND last_seen_at < ?"
        return self._select(SessionRow, f"WHERE {where} ORDER BY last_seen_at", [seen_before])

    def search_sessions(
        self, query: SessionSearchRequest, scope: Scope
    ) -> tuple[list[rows.FoundSession], bool]:
        """At most `query.limit` that match everything in it, newest first; and whether there are more.

        `scope` is what the caller may see; of `query.owner` only `user`'s list is looked at here.
        """
        where, values = within(scope)
        for clause, *given in search_clauses(query):
            where, values = f"{where} AND {clause}", [*values, *given]
        saved = "FROM checkpoints JOIN runs USING (run_id) WHERE runs.session_id = sessions.session_id"
        found = self._read(
            f"SELECT (SELECT count(*) {saved}), (SELECT ifnull(sum(size_bytes), 0) {saved}), "
            f"{self._checked(SessionRow)} FROM sessions WHERE {where} "
            f"ORDER BY created_at DESC, session_id DESC LIMIT ?",
            [*values, query.limit + 1],
        )
        sessions = [
            rows.FoundSession(self._decode(SessionRow, rest), count, size) for count, size, *rest in found
        ]
        return sessions[: query.limit], len(sessions) > query.limit

    # -- runs --------------------------------------------------------------------------------------------

    def add_run(self, row: RunRow) -> tuple[RunRow, bool]:
        return self._add_once(row, "run_id")

    def run(self, run_id: str) -> RunRow | None:
        return self._one(RunRow, "run_id = ?", run_id)

    def update_run(self, run_id: str, **changes: Any) -> bool:
        return self._update(RunRow, "run_id = ?", [run_id], changes)

    def delete_run(self, run_id: str) -> bool:
        """With its unnamed samplers; its checkpoints must be gone."""
        session_id, _, number = run_id.rpartition(":train:")
        place = f"runs/{session_id}/train-{number}/"  # as Home.run_dir names it
        with self.transaction():
            beneath = "session_id = ? AND substr(adapter_dir, 1, ?) = ?"
            self._do(f"DELETE FROM samplers WHERE {beneath}", [session_id, len(place), place])
            return self._do("DELETE FROM runs WHERE run_id = ?", [run_id])

    def runs(
        self, scope: Scope, *, limit: int, offset: int = 0, project_id: str | None = None
    ) -> rows.RowPage[RunRow]:
        return self._page(RunRow, *within(scope, project_id), "rowid", limit, offset)

    def find_runs(
        self, query: rows.RunQuery, scope: Scope, *, limit: int, offset: int = 0
    ) -> rows.RowPage[RunRow]:
        """Those that match, in the order that is asked for."""
        where, values = within(scope)
        for clause, *given in run_clauses(query):
            where, values = f"{where} AND {clause}", [*values, *given]
        assert query.order in rows.RUN_ORDERS, query.order
        way = "DESC" if query.descending else "ASC"
        ((total,),) = self._read(f"SELECT count(*) FROM runs WHERE {where}", values)
        order = f"{query.order} IS NULL, {query.order} {way}, created_at DESC, run_id DESC"
        # First the ids, then their columns: checksums are computed only for what is shown.
        chosen = f"SELECT run_id FROM runs WHERE {where} ORDER BY {order} LIMIT ? OFFSET ?"
        rest = f"WHERE run_id IN ({chosen}) ORDER BY {order}"
        found = self._select(RunRow, rest, [*values, min(limit, MAX_PAGE), min(offset, BIGGEST)])
        return rows.RowPage(found, total)

    def run_ids(self, *, limit: int) -> list[str]:
        """Everybody's, newest first."""
        found = self._read("SELECT run_id FROM runs ORDER BY created_at DESC, run_id DESC LIMIT ?", [limit])
        return [run_id for (run_id,) in found]

    def run_models(self, scope: Scope) -> list[str]:
        """The base models that there are runs of."""
        where, values = within(scope)
        found = self._read(f"SELECT DISTINCT base_model FROM runs WHERE {where} ORDER BY base_model", values)
        return [name for (name,) in found]

    def runs_made_from(self, paths: Iterable[str], scope: Scope, *, limit: int) -> list[RunRow]:
        """Those that were made from one of these checkpoints, newest first."""
        where, values = within(scope)
        rest = f"WHERE {where} AND parent IN {LISTED} ORDER BY created_at DESC LIMIT ?"
        return self._select(RunRow, rest, [*values, listed(paths), limit])

    def runs_called(self, text: str, scope: Scope) -> list[RunRow]:
        """Those with that name, or whose id starts with it; at most two, which shows whether it is one."""
        where, values = within(scope)
        where = f"{where} AND (name = ? OR substr(run_id, 1, ?) = ?)"
        rest = f"WHERE {where} ORDER BY created_at DESC LIMIT 2"
        return self._select(RunRow, rest, [*values, text, len(text), text])

    def end_runs(self, session_id: str, ended: rows.RunEnd, why: str) -> None:
        """The session of these runs is over."""
        changes = {"ended": ended, "ended_why": why}
        self._update(RunRow, "session_id = ? AND ended = ''", [session_id], changes)

    def runs_of_session(self, session_id: str) -> list[RunRow]:
        """In the order of their numbers."""
        return self._select(RunRow, "WHERE session_id = ? ORDER BY model_seq_id", [session_id])

    def count_live_runs(self, owner: str) -> int:
        ((count,),) = self._read("SELECT count(*) FROM runs WHERE state = 'live' AND owner = ?", [owner])
        return count

    def runs_in_state(self, *states: rows.StoredRunState) -> list[RunRow]:
        """Oldest first: those to restore at start."""
        return self._select(RunRow, f"WHERE state IN {LISTED} ORDER BY created_at, rowid", [listed(states)])

    # -- which server owns a session (where several share a ledger) --------------------------------------

    def lease(self, session_id: str) -> rows.LeaseRow | None:
        return self._one(rows.LeaseRow, "session_id = ?", session_id)

    # -- samplers and custom losses ----------------------------------------------------------------------

    def add_sampler(self, row: SamplerRow) -> tuple[SamplerRow, bool]:
        return self._add_once(row, "sampler_id")

    def sampler(self, sampler_id: str) -> SamplerRow | None:
        return self._one(SamplerRow, "sampler_id = ?", sampler_id)

    def join_sampler(self, sampler_id: str) -> int | None:
        """Count one more clone: its number, from 1; None if there is no such sampler."""
        with self.transaction():
            self._do("UPDATE samplers SET clones = clones + 1 WHERE sampler_id = ?", [sampler_id])
            row = self.sampler(sampler_id)
        return row and row.clones

    def samplers_of_session(self, session_id: str) -> list[SamplerRow]:
        return self._select(SamplerRow, "WHERE session_id = ? ORDER BY created_at, rowid", [session_id])

    def delete_sampler(self, sampler_id: str) -> bool:
        return self._do("DELETE FROM samplers WHERE sampler_id = ?", [sampler_id])

    def add_custom_loss(self, row: rows.CustomLossRow) -> tuple[rows.CustomLossRow, bool]:
        return self._add_once(row, "loss_id")

    def custom_loss(self, loss_id: str) -> rows.CustomLossRow | None:
        return self._one(rows.CustomLossRow, "loss_id = ?", loss_id)

    # -- checkpoints -------------------------------------------------------------------------------------

    def add_checkpoint(self, row: CheckpointRow, *, overwrite: bool = False) -> bool:
        """False, and nothing changed, if there is one of that name and it is not to be overwritten."""
        with self.transaction():
            if overwrite:
                self.delete_checkpoint(*row.key)
            return self._insert(CheckpointRow, vars(row), "ON CONFLICT (run_id, kind, name) DO NOTHING")

    def checkpoint(self, run_id: str, kind: str, name: str) -> CheckpointRow | None:
        return self._one(CheckpointRow, CHECKPOINT, run_id, kind, name)

    def update_checkpoint(self, run_id: str, kind: str, name: str, **changes: Any) -> bool:
        return self._update(CheckpointRow, CHECKPOINT, [run_id, kind, name], changes)

    def delete_checkpoint(self, run_id: str, kind: str, name: str) -> bool:
        return self._do(f"DELETE FROM checkpoints WHERE {CHECKPOINT}", [run_id, kind, name])

    def checkpoints_of_run(self, run_id: str) -> list[CheckpointRow]:
        """Newest first."""
        return self._select(CheckpointRow, "WHERE run_id = ? ORDER BY created_at DESC, rowid DESC", [run_id])

    def checkpoints(
        self, scope: Scope, *, limit: int, offset: int = 0, now: float = 0.0
    ) -> rows.RowPage[CheckpointRow]:
        """Those that have not expired by `now`."""
        where, values = within(scope)
        return self._page(CheckpointRow, f"{where} AND {UNEXPIRED}", [*values, now], "rowid", limit, offset)

    def latest_checkpoints(
        self, run_ids: Sequence[str], now: float = 0.0
    ) -> dict[tuple[str, str], CheckpointRow]:
        """The newest of each kind of each run that has not expired by `now`, by (run id, kind)."""
        rest = f"WHERE run_id IN {LISTED} AND {UNEXPIRED} ORDER BY created_at, rowid"
        found = self._select(CheckpointRow, rest, [listed(run_ids), now])
        return {(row.run_id, row.kind): row for row in found}

    def expired_checkpoints(self, now: float) -> list[CheckpointRow]:
        return self._select(CheckpointRow, "WHERE expires_at <= ? ORDER BY expires_at", [now])

    def storage(self, scope: Scope, *, project_id: str | None = None) -> list[rows.Storage]:
        """What checkpoints take up, by owner and project."""
        where, values = within(scope, project_id)
        totals = self._read(
            f"SELECT owner, project_id, count(*), sum(size_bytes) FROM checkpoints WHERE {where} "
            f"GROUP BY owner, project_id ORDER BY owner, project_id",
            values,
        )
        return [rows.Storage(*total) for total in totals]

    def checkpoint_bytes(self, user: str) -> int:
        """What the checkpoints of a user take; "": everybody's."""
        return sum(one.size_bytes for one in self.storage(Scope(user or None)))

    # -- usage and audit ---------------------------------------------------------------------------------

    def add_usage(self, used: Iterable[rows.UsageRow]) -> None:
        """Add to what was used; rows that differ only in the amount become one."""
        with self.transaction():
            for row in used:
                self._insert(rows.UsageRow, vars(row), ADD_TO_USAGE)

    def usage(self, start: float, end: float, scope: Scope) -> list[rows.UsageRow]:
        """Usage of the hours that begin in [start, end), summed over runs (`run_id` is None)."""
        where, values = within(scope)
        group = "hour, owner, kind, project_id, session_id, base_model"
        found = self._read(
            f"SELECT hour, owner, kind, sum(amount), project_id, session_id, NULL, base_model FROM usage "
            f"WHERE {where} AND hour >= ? AND hour < ? GROUP BY {group} ORDER BY {group}",
            [*values, start, end],
        )
        return [rows.decode(rows.UsageRow, row) for row in found]

    def usage_by_day(self, start: float, *, limit: int) -> list[tuple[float, str, dict[str, float]]]:
        """A day's begin, an owner and the amounts by kind: the newest days, and owners by name."""
        found = self._read(
            "SELECT day, owner, json_group_object(kind, used) FROM (SELECT hour - hour % 86400 AS day, "
            "owner, kind, sum(amount) AS used FROM usage WHERE hour >= ? GROUP BY day, owner, kind) "
            "GROUP BY day, owner ORDER BY day DESC, owner LIMIT ?",
            [start, limit],
        )
        return [(at, owner, json.loads(amounts)) for at, owner, amounts in found]

    def usage_totals(self, start: float) -> list[tuple[float, str, float]]:
        """A day's begin, a kind, and the amount of all owners."""
        return self._read(
            "SELECT hour - hour % 86400 AS day, kind, sum(amount) FROM usage WHERE hour >= ? GROUP BY 1, 2",
            [start],
        )

    def add_audit(self, row: rows.AuditRow) -> None:
        self._insert(rows.AuditRow, vars(row))

    def audit(
        self, scope: Scope, *, kind: str = "", start: float | None = None, end: float | None = None
    ) -> list[rows.AuditRow]:
        """What was done in [start, end), oldest first; of one kind (`event` begins with "KIND.") if given."""
        where, values = within(scope)
        prefix = f"{kind}." if kind else None
        for clause, value in (("at >= ?", start), ("at < ?", end), ("instr(event, ?) = 1", prefix)):
            if value is not None:
                where, values = f"{where} AND {clause}", [*values, value]
        return self._select(rows.AuditRow, f"WHERE {where} ORDER BY at, audit_id", values)

    def audit_after(self, number: int, event: str, *, start: float) -> list[tuple[int, str]]:
        """What this file has had since that number (of its own): numbers, and details as JSON."""
        where = "audit_id > ? AND event = ? AND +at >= ?"  # `+`: found by number, so nothing is read twice
        return self._read(
            f"SELECT audit_id, details FROM audit WHERE {where} ORDER BY 1", [number, event, start]
        )

    def latest_audit(self, *, limit: int, offset: int) -> list[rows.AuditRow]:
        """What anybody did, newest first."""
        rest = "ORDER BY at DESC, audit_id DESC LIMIT ? OFFSET ?"
        return self._select(rows.AuditRow, rest, [limit, min(offset, BIGGEST)])

    # -- API keys ----------------------------------------------------------------------------------------

    def _mark_keyed(self) -> None:
        if not self._keyed.exists():
            self._keyed.touch(0o600)
            sync_path(self.path.parent)

    @property
    def had_keys(self) -> bool:
        """Was a key ever made here? Then every caller needs one, even if all of them are lost."""
        return bool(self.keys()) or self._keyed.exists()

    def add_key(self, **fields: Any) -> KeyRow:
        """Keep a key, given all of KeyRow's fields but its number."""
        try:
            self._mark_keyed()
        except OSError as error:
            raise self._error(error) from error
        with self.transaction():
            self._insert(KeyRow, fields)
            key = self.find_key(fields["hash"])
        assert key is not None
        return key

    def find_key(self, hash: str) -> KeyRow | None:
        """The key with this hash, unless it was revoked."""
        return self._one(KeyRow, "hash = ? AND revoked_at IS NULL", hash)

    def keys(self) -> list[KeyRow]:
        """All of them, revoked ones too, oldest first."""
        return self._select(KeyRow, "ORDER BY key_id")

    def revoke_key(self, key_id: int, at: float) -> bool:
        """False if there is no such key, or it was revoked before."""
        return self._update(KeyRow, "key_id = ? AND revoked_at IS NULL", [key_id], {"revoked_at": at})

    def assign_key(self, key_id: int, project_id: str | None) -> bool:
        """Let a key's new sessions belong to a project, or to none. False if there is no such key."""
        return self._update(KeyRow, "key_id = ? AND revoked_at IS NULL", [key_id], {"project_id": project_id})


def salvage(damaged: Path, ledger: Ledger) -> Iterator[str]:
    """Copy what can still be read of a damaged file into a new ledger; yields what was done, line by line.

    A session whose row is damaged gets the owner of its runs or samplers.
    """
    if not damaged.exists():
        return
    with closing(ledger_schema.connect(str(damaged))) as old:
        for kind, table in rows.TABLES.items():
            found = 0
            try:
                columns = {name for _, name, *_ in old.execute(f"PRAGMA table_info({table})")}
                is_whole = (
                    f"checksum IS {ledger_schema.checksum(old, table)}" if "checksum" in columns else "1"
                )
                names = ", ".join([is_whole, "rowid", *rows.columns(kind)])
                for whole, rowid, *values in old.execute(f"SELECT {names} FROM {table}"):
                    if not whole:
                        yield f"left out: row {rowid} of {table}, which does not match its checksum"
                        continue
                    with suppress(LedgerError, ValueError, TypeError, KeyError):  # a row that makes no sense
                        row = cast("object", rows.decode(kind, values))
                        if isinstance(row, RunRow | SamplerRow | rows.CustomLossRow):
                            ledger.take(SessionRow(row.session_id, row.owner, now := time.time(), now))
                        found += ledger.take(row)
            except (sqlite3.Error, UnicodeError):
                pass  # the rows after it cannot be reached
            if found:
                yield f"from the old file: {found} {table}"

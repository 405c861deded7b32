"""The ledger: sessions, runs, samplers, checkpoints, usage and keys, in one SQLite file. Plain SQL.

A write that returned survives a killed process (WAL), and a power cut once the file that `wrote` is told of
is synced; without `wrote` SQLite syncs it at once. A repeated insert returns what is there. A file that is
damaged, of another program or of a newer version is refused and left as it is; so is an empty one where there
was more. Every error is a LedgerError.
One connection, used by one thread at a time; statements are short. Knows nothing of who may see what.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar, cast

from tinkex.errors import TinkerError
from tinkex.service import ledger_schema, rows
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
BUSY_SECONDS = 5.0  # how long a write waits for another process's (the CLI's) to be done
MAX_PAGE = 10_000  # rows of one page, whatever is asked for
_BIGGEST = 2**63 - 1  # SQLite's largest integer

Row = TypeVar("Row")


class LedgerError(TinkerError):
    """The ledger cannot be read or written; the message names the file and what to do."""


class LedgerFullError(LedgerError):
    """There is no space for the write. Nothing was changed, and what was there is intact."""


class Ledger:
    """The open file.

    >>> ledger = Ledger(home / "ledger.sqlite")
    >>> with ledger.transaction():
    ...     ledger.add_run(run)
    ...     ledger.add_audit(event)
    """

    KEYED = "has-keys"  # a file beside the ledger: API keys were made, so that a lost ledger lets nobody in

    def __init__(self, path: Path, wrote: Callable[[Path], None] | None = None, *, new: bool = False) -> None:
        """Open or create, and bring to this version. LedgerError if it cannot be trusted.

        `new`: it is to replace one that was lost.
        """
        self.path = path
        self._wrote, self._wal = wrote, path.with_name(f"{path.name}-wal")
        try:
            if path.exists() and path.stat().st_size:
                self._check()
            elif not new:
                self._refuse_if_lost()
            if path.parent.is_dir():
                os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
                for file in (path, *path.parent.glob(f"{path.name}-*")):  # its -wal and -shm
                    with suppress(OSError):  # another user's
                        file.chmod(0o600)
            self._db = ledger_schema.connect(str(path), timeout=BUSY_SECONDS, check_same_thread=False)
        except (sqlite3.Error, OSError, UnicodeError) as error:
            raise self._error(error) from error
        try:
            synchronous = f"synchronous = {'FULL' if wrote is None else 'NORMAL'}"
            for pragma in ("journal_mode = WAL", synchronous, "foreign_keys = ON", "temp_store = MEMORY"):
                self._db.execute(f"PRAGMA {pragma}")
            ledger_schema.migrate(self._db)
            ledger_schema.keep_checksums(self._db)
            self._is_whole = {
                kind: f"checksum IS {ledger_schema.checksum(self._db, table)}"
                for kind, table in rows.TABLES.items()
            }
            self._note_write()
        except sqlite3.Error as error:
            self._db.close()
            raise self._error(error) from error
        if self.keys():
            with suppress(OSError):  # of a home that an older version served
                self._mark_keyed()

    def _refuse_if_lost(self) -> None:
        """An empty or missing ledger is a new home's, and no other's."""
        had_runs = any((self.path.parent / "runs").glob("*/train-*"))
        if had_runs or self._keyed.exists():
            what = "runs" if had_runs else "API keys"
            raise LedgerError(
                f"{self.path} is empty or missing, though this home has {what}: put a backup in its place, "
                "or rebuild it from the run directories with "
                f"`tinkex server repair --home {self.path.parent}`"
            )

    @property
    def _keyed(self) -> Path:
        return self.path.with_name(self.KEYED)

    def _mark_keyed(self) -> None:
        if not self._keyed.exists():
            self._keyed.touch(0o600)
            sync_path(self.path.parent)

    @property
    def had_keys(self) -> bool:
        """Was a key ever made here? Then nobody comes in without one, even if they are all lost."""
        return bool(self.keys()) or self._keyed.exists()

    def _check(self) -> None:
        # Read-only: even closing a writable connection would fold the write-ahead log into a damaged file.
        uri = f"{self.path.absolute().as_uri()}?mode=ro"
        with closing(ledger_schema.connect(uri, uri=True, timeout=BUSY_SECONDS)) as db:
            ours = db.execute("PRAGMA application_id").fetchone()[0] == ledger_schema.APPLICATION_ID
            if not ours and db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
                raise LedgerError(f"{self.path} is another program's database: give Tinkex a home of its own")
            if (seen := ledger_schema.version(db)) > (known := len(ledger_schema.MIGRATIONS)):
                raise LedgerError(
                    f"{self.path} was written by a newer Tinkex (schema {seen}; this one knows up to "
                    f"{known}): upgrade Tinkex, or use another home"
                )
            if not seen:  # the first page is there, and what followed it is not
                self._refuse_if_lost()
            if not ledger_schema.has_our_schema(db):
                raise sqlite3.DatabaseError("its tables are not those of its version")
            (verdict,) = db.execute("PRAGMA integrity_check(1)").fetchone()
            if verdict != "ok":
                raise sqlite3.DatabaseError(verdict)
            for table, rowid in ledger_schema.damaged_rows(db):
                raise sqlite3.DatabaseError(f"row {rowid} of {table} does not match its checksum")

    def close(self) -> None:
        self._db.close()

    @contextmanager
    def transaction(self) -> Generator[None]:
        """All or nothing. May be nested (the outermost counts); must not span an await."""
        if self._db.in_transaction:
            yield
            return
        self._do("BEGIN IMMEDIATE")
        try:
            yield
            self._do("COMMIT")
        except BaseException:
            if self._db.in_transaction:  # SQLite has ended it itself when the disk was full
                self._db.execute("ROLLBACK")
            raise

    # -- plumbing ----------------------------------------------------------------------------------------

    def _do(self, sql: str, values: Sequence[Any] = ()) -> bool:
        """Execute a statement; did it change a row?"""
        try:
            changed = self._db.execute(sql, values).rowcount > 0
        except sqlite3.Error as error:
            raise self._error(error) from error
        self._note_write()
        return changed

    def _note_write(self) -> None:
        if self._wrote is not None and not self._db.in_transaction:
            self._wrote(self._wal)

    def _read(self, sql: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        try:
            return self._db.execute(sql, values).fetchall()
        except sqlite3.Error as error:
            raise self._error(error) from error

    def _error(self, error: Exception) -> LedgerError:
        if getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_FULL:  # without the extended part
            return LedgerFullError(f"no space left to write {self.path}: free some; nothing of it was lost")
        usable = sqlite3.OperationalError | sqlite3.IntegrityError | sqlite3.ProgrammingError
        if isinstance(error, sqlite3.DatabaseError | UnicodeError) and not isinstance(error, usable):
            why = " ".join(str(error).replace("*** in database main ***", "").split())  # one line
            return LedgerError(
                f"{self.path} is damaged ({why}) and was left as it is: put a backup in its place, or "
                f"rebuild what can be with `tinkex server repair --home {self.path.parent}`"
            )
        return LedgerError(f"{self.path} cannot be used: {error}")

    def _select(self, kind: type[Row], rest: str, values: Sequence[Any] = ()) -> list[Row]:
        found = self._read(f"SELECT {self._checked(kind)} FROM {rows.TABLES[kind]} {rest}", values)
        return [self._decode(kind, row) for row in found]

    def _checked(self, kind: type) -> str:
        """The columns that `_decode` takes."""
        return ", ".join([self._is_whole[kind], "rowid", *rows.columns(kind)])

    def _decode(self, kind: type[Row], stored: Sequence[Any]) -> Row:
        is_whole, rowid, *values = stored
        if not is_whole:
            why = f"row {rowid} of {rows.TABLES[kind]} does not match its checksum"
            raise self._error(sqlite3.DatabaseError(why))
        return rows.decode(kind, values)

    def _one(self, kind: type[Row], where: str, *values: Any) -> Row | None:
        return next(iter(self._select(kind, f"WHERE {where}", values)), None)

    def _page(
        self, kind: type[Row], where: str, values: Sequence[Any], tie: str, limit: int, offset: int
    ) -> rows.RowPage[Row]:
        ((total,),) = self._read(f"SELECT count(*) FROM {rows.TABLES[kind]} WHERE {where}", values)
        rest = f"WHERE {where} ORDER BY created_at DESC, {tie} DESC LIMIT ? OFFSET ?"
        page = [*values, min(limit, MAX_PAGE), min(offset, _BIGGEST)]
        return rows.RowPage(self._select(kind, rest, page), total)

    def _insert(self, kind: type, fields: dict[str, Any], on_conflict: str = "") -> bool:
        names, marks = ", ".join(fields), ", ".join("?" * len(fields))
        return self._do(
            f"INSERT INTO {rows.TABLES[kind]} ({names}) VALUES ({marks}) {on_conflict}",
            [rows.encode(name, value) for name, value in fields.items()],
        )

    def _add_once(self, row: Row, key: str) -> tuple[Row, bool]:
        """The row as it is kept, and whether it is new: one of the same key changes nothing."""
        with self.transaction():
            new = self._insert(type(row), vars(row), f"ON CONFLICT ({key}) DO NOTHING")
            kept = self._one(type(row), f"{key} = ?", getattr(row, key))
        assert kept is not None
        return kept, new

    def _update(self, kind: type, where: str, key: Sequence[Any], changes: dict[str, Any]) -> bool:
        """Set some columns; False if there is no such row."""
        assert set(changes) <= set(rows.columns(kind)), f"{kind.__name__} lacks one of: {', '.join(changes)}"
        values = [rows.encode(name, value) for name, value in changes.items()]
        assignments = ", ".join(f"{name} = ?" for name in changes)
        return self._do(f"UPDATE {rows.TABLES[kind]} SET {assignments} WHERE {where}", [*values, *key])

    def take(self, row: object) -> bool:
        """Keep a row of another ledger, unless there is one like it."""
        return self._insert(type(row), vars(row), "ON CONFLICT DO NOTHING")

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
        # First which ones, then their columns: a checksum is computed of what is shown alone.
        chosen = f"SELECT run_id FROM runs WHERE {where} ORDER BY {order} LIMIT ? OFFSET ?"
        rest = f"WHERE run_id IN ({chosen}) ORDER BY {order}"
        found = self._select(RunRow, rest, [*values, min(limit, MAX_PAGE), min(offset, _BIGGEST)])
        return rows.RowPage(found, total)

    def run_models(self, scope: Scope) -> list[str]:
        """The base models that there are runs of."""
        where, values = within(scope)
        found = self._read(f"SELECT DISTINCT base_model FROM runs WHERE {where} ORDER BY base_model", values)
        return [name for (name,) in found]

    def runs_with_parents(self, scope: Scope, *, limit: int) -> list[RunRow]:
        """Those that were made from a checkpoint, newest first."""
        where, values = within(scope)
        rest = f"WHERE {where} AND parent IS NOT NULL ORDER BY created_at DESC LIMIT ?"
        return self._select(RunRow, rest, [*values, limit])

    def runs_called(self, text: str, scope: Scope) -> list[RunRow]:
        """Those of that name, or whose id begins so: two at most, to tell whether it is one."""
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

    # -- usage and audit ---------------------------------------------------------------------------------

    def add_usage(self, used: Iterable[rows.UsageRow]) -> None:
        """Add to what was used; rows that differ in the amount alone become one."""
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

    # -- API keys ----------------------------------------------------------------------------------------

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


def salvage(damaged: Path, ledger: Ledger) -> Iterator[str]:
    """Copy what can still be read of a damaged file into a new ledger; yields what was done, line by line.

    A session whose row is damaged is its runs' and samplers' owner's.
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

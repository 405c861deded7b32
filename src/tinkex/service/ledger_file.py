"""The file of the ledger: opened, checked, written in transactions, its rows encoded and decoded.

A write that returned survives a killed process (WAL). It survives a power cut once the file that is passed to
`wrote` is synced; without `wrote` SQLite syncs it at once. A file is refused and left as it is if it is
damaged, of another program or of a newer version, or if it is empty though the home has runs or keys. Every
error is a LedgerError. One connection, used by one thread at a time. Knows nothing of what rows mean.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Generator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from tinkex.errors import TinkerError
from tinkex.service import ledger_schema, rows

BUSY_SECONDS = 5.0  # how long a write waits for another process's (the CLI's) to be done
MAX_PAGE = 10_000  # rows of one page, also if more are asked for
BIGGEST = 2**63 - 1  # SQLite's largest integer

Row = TypeVar("Row")


class LedgerError(TinkerError):
    """The ledger cannot be read or written; the message names the file and what to do."""


class LedgerFullError(LedgerError):
    """There is no space for the write. Nothing was changed, and what was there is intact."""


class LedgerFile:
    """The open file, and statements on the tables of `rows.TABLES`."""

    KEYED = "has-keys"  # a file next to the ledger: API keys exist, so an empty ledger admits nobody

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
            self._is_whole = whole_rows(self._db)
            self._note_write()
        except sqlite3.Error as error:
            self._db.close()
            raise self._error(error) from error

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
        page = [*values, min(limit, MAX_PAGE), min(offset, BIGGEST)]
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


def whole_rows(db: sqlite3.Connection) -> dict[type, str]:
    """For each kind of row the condition that it matches its checksum."""
    return {kind: f"checksum IS {ledger_schema.checksum(db, table)}" for kind, table in rows.TABLES.items()}

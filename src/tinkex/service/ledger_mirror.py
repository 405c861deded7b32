"""A server's copy of a shared ledger, in SQLite: reads are local, and never wait.

A session has one owner, and only its owner writes its rows. So a write is made here first and is sent to the
shared database with the next group commit, before it is acknowledged. What other servers write
arrives with `apply`. The file is made anew by each process: it promises nothing after a restart.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tinkex.service.ledger import FILES, Ledger
from tinkex.service.ledger_postgres import Change, SharedDatabase, Statement
from tinkex.service.rows import TABLES, LeaseRow, SessionRow

UNNUMBERED = {"audit"}  # tables whose row numbers differ between databases


class MirroredLedger(Ledger):
    """The ledger of one of several servers; `outbox` is given the statements of each transaction."""

    def __init__(self, directory: Path, server: str, outbox: Callable[[list[Statement]], None]) -> None:
        for name in FILES:
            with suppress(FileNotFoundError):
                (directory / name).unlink()
        self._server, self._outbox = server, outbox
        self._unsent: list[Statement] = []
        super().__init__(directory / FILES[0], lambda path: None, new=True)
        self._db.execute("PRAGMA synchronous = OFF")
        self._columns = {table: self._describe(table) for table in TABLES.values()}

    def _describe(self, table: str) -> tuple[list[str], list[str]]:
        """Its columns, and those of its key; without a key, those that identify a row."""
        found = self._db.execute(f"PRAGMA table_info({table})").fetchall()
        names = [name for _, name, *_ in found if name != "checksum"]
        keys = [name for _, name, _, _, _, part in found if part]
        return names, keys or [name for name in names if name != "amount"]

    @property
    def had_keys(self) -> bool:
        """Asks for keys, revoked ones too: the database is not lost with a file."""
        return bool(self.keys())

    def _mark_keyed(self) -> None:
        """Nothing: see `had_keys`."""

    # -- writing -----------------------------------------------------------------------------------------

    def _do(self, sql: str, values: Sequence[Any] = ()) -> bool:
        changed = super()._do(sql, values)
        if changed and sql != "COMMIT":
            self._unsent.append((sql, tuple(values)))
        if self._unsent and not self._db.in_transaction:
            sent, self._unsent = self._unsent, []
            self._outbox(sent)
        return changed

    @contextmanager
    def transaction(self) -> Generator[None]:
        outermost = not self._db.in_transaction
        try:
            with super().transaction():
                yield
        except BaseException:
            if outermost:
                self._unsent.clear()
            raise

    def add_session(self, row: SessionRow, server: str = "") -> None:
        """A session is its maker's from the beginning, unless it is said to be another server's."""
        with self.transaction():
            super().add_session(row)
            self._insert(LeaseRow, vars(LeaseRow(row.session_id, server or self._server, 1)))

    # -- following ---------------------------------------------------------------------------------------

    def fill(self, rows: dict[str, list[dict[str, Any]]]) -> None:
        """Take all rows of the shared database, and no others."""
        for table in reversed(TABLES.values()):
            self._db.execute(f"DELETE FROM {table}")
        self.apply(Change(table, False, row) for table in TABLES.values() for row in rows[table])

    def apply(self, changes: Iterable[Change]) -> None:
        """Follow what other servers, or commands, have written."""
        self._db.execute("BEGIN IMMEDIATE")
        try:
            for change in changes:
                self._apply(change)
            self._db.execute("COMMIT")
        except BaseException:
            self._db.execute("ROLLBACK")
            raise

    def _apply(self, change: Change) -> None:
        if change.table not in self._columns:
            return  # of a newer version's
        names, keys = self._columns[change.table]
        if change.table in UNNUMBERED:
            names = [name for name in names if name not in keys]
        elif change.deleted or "amount" in names:
            same = " AND ".join(f"{key} IS ?" for key in keys)
            self._db.execute(f"DELETE FROM {change.table} WHERE {same}", [change.row[key] for key in keys])
        if change.deleted:
            return
        values = [change.row[name] for name in names]
        marks, rest = ", ".join("?" * len(names)), ""
        if change.table not in UNNUMBERED and "amount" not in names:
            assignments = ", ".join(f"{name} = excluded.{name}" for name in names if name not in keys)
            rest = f"ON CONFLICT ({', '.join(keys)}) DO UPDATE SET {assignments}"
        self._db.execute(f"INSERT INTO {change.table} ({', '.join(names)}) VALUES ({marks}) {rest}", values)


@contextmanager
def visiting(url: str) -> Generator[MirroredLedger]:
    """The shared ledger for a command, while servers run: what it writes is committed at the end."""
    database, written = SharedDatabase(url), list[Statement]()
    try:
        with tempfile.TemporaryDirectory(prefix="tinkex-") as place:
            ledger = MirroredLedger(Path(place), "", written.extend)
            try:
                ledger.fill(database.load()[0])
                yield ledger
            finally:
                ledger.close()
        database.write(written)
    finally:
        database.close()

"""The ledger's tables: one schema for every database it can be kept in, and the migrations that make it.

A migration is a function that executes statements in SQLite's dialect; another database translates them. A
database's version is how many migrations it has seen. To change the schema, append a function to MIGRATIONS;
a new table also needs a row class in `rows.TABLES`.

In SQLite every row has a checksum over all its other columns. Triggers of the connection keep it: what a
write changes is added to it, so that a damaged row stays recognisable after later writes.
"""

from __future__ import annotations

import re
import sqlite3
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import cache, partial
from typing import Any

from tinkex.service.rows import TABLES

APPLICATION_ID = 0x54494E4B  # "TINK": how a SQLite file says that it is ours


Execute = Callable[[str], object]
Migration = Callable[[Execute], None]


def _first_tables(execute: Execute) -> None:
    for statement in (
        """CREATE TABLE sessions (
            session_id TEXT PRIMARY KEY, owner TEXT NOT NULL, created_at REAL NOT NULL,
            last_seen_at REAL NOT NULL, project_id TEXT, tags TEXT NOT NULL, user_metadata TEXT,
            display_name TEXT, sdk_version TEXT NOT NULL, status TEXT NOT NULL)""",
        "CREATE INDEX sessions_by_owner ON sessions (owner, created_at)",
        "CREATE INDEX sessions_by_project ON sessions (project_id, created_at)",
        """CREATE TABLE runs (
            run_id TEXT PRIMARY KEY, session_id TEXT NOT NULL REFERENCES sessions,
            model_seq_id INTEGER NOT NULL, owner TEXT NOT NULL, base_model TEXT NOT NULL, lora TEXT NOT NULL,
            created_at REAL NOT NULL, last_request_at REAL NOT NULL, project_id TEXT,
            optimizer_config TEXT NOT NULL, user_metadata TEXT, corrupted INTEGER NOT NULL,
            state TEXT NOT NULL, UNIQUE (session_id, model_seq_id))""",
        "CREATE INDEX runs_by_owner ON runs (owner, created_at)",
        "CREATE INDEX runs_by_project ON runs (project_id, created_at)",
        "CREATE INDEX runs_by_state ON runs (state)",
        """CREATE TABLE samplers (
            sampler_id TEXT PRIMARY KEY, session_id TEXT NOT NULL REFERENCES sessions, owner TEXT NOT NULL,
            base_model TEXT NOT NULL, created_at REAL NOT NULL, model_path TEXT, adapter TEXT,
            adapter_dir TEXT, clones INTEGER NOT NULL)""",
        "CREATE INDEX samplers_by_session ON samplers (session_id)",
        "CREATE INDEX samplers_by_adapter ON samplers (adapter)",
        """CREATE TABLE checkpoints (
            run_id TEXT NOT NULL REFERENCES runs, kind TEXT NOT NULL, name TEXT NOT NULL,
            owner TEXT NOT NULL, base_model TEXT NOT NULL, lora TEXT NOT NULL, directory TEXT NOT NULL,
            size_bytes INTEGER NOT NULL, created_at REAL NOT NULL, with_optimizer INTEGER NOT NULL,
            project_id TEXT, expires_at REAL, public INTEGER NOT NULL, user_metadata TEXT,
            encrypted INTEGER NOT NULL, PRIMARY KEY (run_id, kind, name))""",
        "CREATE INDEX checkpoints_by_owner ON checkpoints (owner, created_at)",
        "CREATE INDEX checkpoints_by_project ON checkpoints (project_id, created_at)",
        "CREATE INDEX checkpoints_by_expiry ON checkpoints (expires_at) WHERE expires_at IS NOT NULL",
        """CREATE TABLE custom_losses (
            loss_id TEXT PRIMARY KEY, session_id TEXT NOT NULL REFERENCES sessions, owner TEXT NOT NULL,
            name TEXT NOT NULL, inputs TEXT NOT NULL, nodes TEXT NOT NULL)""",
        """CREATE TABLE usage (
            hour REAL NOT NULL, owner TEXT NOT NULL, kind TEXT NOT NULL, amount REAL NOT NULL,
            project_id TEXT, session_id TEXT, run_id TEXT, base_model TEXT)""",
        # NULLs are never equal to each other, so the index that makes a row one of its kind spells them "".
        """CREATE UNIQUE INDEX usage_by_all ON usage (
            hour, owner, kind, ifnull(project_id, ''), ifnull(session_id, ''), ifnull(run_id, ''),
            ifnull(base_model, ''))""",
        "CREATE INDEX usage_by_run ON usage (run_id)",
        """CREATE TABLE audit (
            audit_id INTEGER PRIMARY KEY, at REAL NOT NULL, owner TEXT NOT NULL, project_id TEXT,
            event TEXT NOT NULL, details TEXT NOT NULL, run_id TEXT, tinker_path TEXT, purpose TEXT)""",
        "CREATE INDEX audit_by_time ON audit (at)",
        """CREATE TABLE keys (
            key_id INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT NOT NULL, note TEXT NOT NULL,
            hash TEXT NOT NULL UNIQUE, owner TEXT NOT NULL, project_id TEXT, created_at REAL NOT NULL,
            revoked_at REAL)""",
    ):
        execute(statement)


def _runs_know_their_base_weights(execute: Execute) -> None:
    execute("ALTER TABLE runs ADD COLUMN fingerprint TEXT NOT NULL DEFAULT ''")


def _runs_know_their_problem(execute: Execute) -> None:
    execute("ALTER TABLE runs ADD COLUMN problem TEXT NOT NULL DEFAULT ''")


_CHECKED_FIRST = ("sessions", "runs", "samplers", "checkpoints", "custom_losses", "usage", "audit", "keys")


def _rows_have_checksums(execute: Execute) -> None:
    for table in _CHECKED_FIRST:
        execute(f"ALTER TABLE {table} ADD COLUMN checksum INTEGER")


def _runs_have_names_states_and_totals(execute: Execute) -> None:
    for column in (
        "name TEXT NOT NULL DEFAULT ''", "tags TEXT NOT NULL DEFAULT '[]'", "parent TEXT",
        "ended TEXT NOT NULL DEFAULT ''", "ended_why TEXT NOT NULL DEFAULT ''",
        "steps INTEGER NOT NULL DEFAULT 0", "tokens INTEGER NOT NULL DEFAULT 0",
        "seconds REAL NOT NULL DEFAULT 0", "loss REAL", "curve TEXT NOT NULL DEFAULT '[]'",
    ):  # fmt: skip
        execute(f"ALTER TABLE runs ADD COLUMN {column}")
    execute(
        """UPDATE runs SET
            ended = (SELECT CASE json_extract(s.status, '$.reason.type') WHEN 'success' THEN 'finished'
                     WHEN 'errored' THEN 'failed' ELSE 'interrupted' END
                     FROM sessions s WHERE s.session_id = runs.session_id),
            ended_why = (SELECT coalesce(json_extract(s.status, '$.detail'),
                         json_extract(s.status, '$.message'), '')
                         FROM sessions s WHERE s.session_id = runs.session_id)
            WHERE session_id IN (SELECT session_id FROM sessions
                                 WHERE json_extract(status, '$.type') != 'active')"""
    )


def _keys_may_be_admins(execute: Execute) -> None:
    execute("ALTER TABLE keys ADD COLUMN admin INTEGER NOT NULL DEFAULT 0")


def _runs_know_their_trainer(execute: Execute) -> None:
    execute("ALTER TABLE runs ADD COLUMN trainer INTEGER NOT NULL DEFAULT -1")


def _sessions_have_leases(execute: Execute) -> None:
    execute(
        """CREATE TABLE leases (
            session_id TEXT PRIMARY KEY REFERENCES sessions, server TEXT NOT NULL, epoch INTEGER NOT NULL,
            checksum INTEGER)"""
    )
    execute("CREATE INDEX leases_by_server ON leases (server)")


# Append to it; never edit what is there: it was applied to ledgers that exist. A table made later has its
# `checksum INTEGER` column from the beginning.
MIGRATIONS: tuple[Migration, ...] = (
    _first_tables,
    _runs_know_their_base_weights,
    _runs_know_their_problem,
    _rows_have_checksums,
    _runs_have_names_states_and_totals,
    _keys_may_be_admins,
    _runs_know_their_trainer,
    _sessions_have_leases,
)


def version(db: sqlite3.Connection) -> int:
    """How many migrations this database has seen."""
    return db.execute("PRAGMA user_version").fetchone()[0]


def migrate(db: sqlite3.Connection, migrations: Sequence[Migration] = MIGRATIONS) -> None:
    """Apply what this database has not seen, each in its own transaction."""
    while (seen := version(db)) < len(migrations):
        db.execute("BEGIN IMMEDIATE")
        try:
            if version(db) == seen:  # else another process was first
                migrations[seen](db.execute)
                db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
                for table in _checked_tables(db):
                    db.execute(f"UPDATE {table} SET checksum = {checksum(db, table)}")
                db.execute(f"PRAGMA user_version = {seen + 1}")
            db.execute("COMMIT")
        except BaseException:
            if db.in_transaction:
                db.execute("ROLLBACK")
            raise


# -- checksums -------------------------------------------------------------------------------------------


def connect(database: str, **options: Any) -> sqlite3.Connection:
    """A connection whose SQL knows `row_checksum` and `folded`, and that reads damaged text too."""
    db = sqlite3.connect(database, isolation_level=None, **options)
    db.text_factory = partial(str, encoding="utf-8", errors="replace")
    db.create_function("row_checksum", -1, _checksum, deterministic=True)
    db.create_function("folded", -1, _folded, deterministic=True)
    return db


def _folded(*stored: str) -> str:
    """Texts to search in, in any language; the escapes of stored JSON as the letters they stand for."""
    text = re.sub(r"\\u([0-9a-f]{4})", lambda found: chr(int(found[1], 16)), " ".join(stored))
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").casefold()


def _checksum(*stored: Any) -> int:
    return zlib.crc32(repr(stored).encode())


def checksum(db: sqlite3.Connection, table: str, row: str = "") -> str:
    """SQL for what the checksum of a row is to be; `row` is "NEW." or "OLD." in a trigger."""
    names = [
        (row + name, kind)
        for _, name, kind, *_ in db.execute(f"PRAGMA table_info({table})")
        if name != "checksum"
    ]
    # Text as bytes, since damaged text may be no text any more; and its type, which one bit can change.
    values = (f"CAST({name} AS BLOB)" if kind == "TEXT" else name for name, kind in names)
    types = " || ".join(f"typeof({name})" for name, kind in names if kind == "TEXT")
    return f"row_checksum({types}, {', '.join(values)})"


def _checked_tables(db: sqlite3.Connection) -> Iterator[str]:
    for table in TABLES.values():
        if any(name == "checksum" for _, name, *_ in db.execute(f"PRAGMA table_info({table})").fetchall()):
            yield table


def keep_checksums(db: sqlite3.Connection) -> None:
    """From here on, writes of this connection keep the checksums."""
    for table in _checked_tables(db):
        new, old = checksum(db, table, "NEW."), checksum(db, table, "OLD.")
        watched = ", ".join(n for _, n, *_ in db.execute(f"PRAGMA table_info({table})") if n != "checksum")
        for event, value in (("INSERT", new), (f"UPDATE OF {watched}", f"OLD.checksum + {new} - {old}")):
            db.execute(
                f"CREATE TEMP TRIGGER {table}_{event[:6]} AFTER {event} ON main.{table} BEGIN "
                f"UPDATE {table} SET checksum = {value} WHERE rowid = NEW.rowid; END"
            )


def damaged_rows(db: sqlite3.Connection) -> Iterator[tuple[str, int]]:
    """The table and the rowid of each row that does not match its checksum."""
    for table in _checked_tables(db):
        for (rowid,) in db.execute(f"SELECT rowid FROM {table} WHERE checksum IS NOT {checksum(db, table)}"):
            yield table, rowid


def has_our_schema(db: sqlite3.Connection) -> bool:
    """Are tables and indexes those that its version has? Others may be there too."""
    ours = {name for name, _ in _schema(len(MIGRATIONS))}
    return _schema(version(db)) == frozenset(row for row in db.execute(_SCHEMA) if row[0] in ours)


_SCHEMA = "SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL"


@cache
def _schema(version: int) -> frozenset[tuple[str, str]]:
    with closing(connect(":memory:")) as db:
        migrate(db, MIGRATIONS[:version])
        return frozenset(db.execute(_SCHEMA))

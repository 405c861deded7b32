"""The ledger's schema, as the list of functions that made it. Append to the list; never edit what is in it.

Each is applied once, in order, whole or not at all. A database's version (`PRAGMA user_version`) is how many
it has seen.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence

Migration = Callable[[sqlite3.Connection], None]

APPLICATION_ID = 0x54494E4B  # "TINK": how a file says that it is ours


def _the_first(db: sqlite3.Connection) -> None:
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
        f"PRAGMA application_id = {APPLICATION_ID}",
    ):
        db.execute(statement)


def _fingerprints(db: sqlite3.Connection) -> None:
    db.execute("ALTER TABLE runs ADD COLUMN fingerprint TEXT NOT NULL DEFAULT ''")


def _problems(db: sqlite3.Connection) -> None:
    db.execute("ALTER TABLE runs ADD COLUMN problem TEXT NOT NULL DEFAULT ''")


MIGRATIONS: tuple[Migration, ...] = (_the_first, _fingerprints, _problems)


def version(db: sqlite3.Connection) -> int:
    """How many migrations this database has seen."""
    return db.execute("PRAGMA user_version").fetchone()[0]


def migrate(db: sqlite3.Connection, migrations: Sequence[Migration] = MIGRATIONS) -> None:
    """Apply what this database has not seen, each in a transaction of its own."""
    while (seen := version(db)) < len(migrations):
        db.execute("BEGIN IMMEDIATE")
        try:
            if version(db) == seen:  # else another process was first
                migrations[seen](db)
                db.execute(f"PRAGMA user_version = {seen + 1}")
            db.execute("COMMIT")
        except BaseException:
            if db.in_transaction:
                db.execute("ROLLBACK")
            raise

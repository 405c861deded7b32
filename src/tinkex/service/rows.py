"""The ledger's rows, answers and tables.

A row's fields are its table's columns. Times are unix seconds, kept to the microsecond so that one survives a
datetime; a dict or a list is kept as JSON. A database's version is how many migrations it has seen.

Every row has a checksum over all its other columns. Triggers of the connection keep it: what a write changes
is added to it, so that the row of a damaged column stays damaged whatever else is written to it.
"""

from __future__ import annotations

import json
import sqlite3
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, fields
from functools import cache, partial
from typing import Any, Generic, Literal, NamedTuple, TypeVar

from tinkex.types.params import LoraConfig

CheckpointKind = Literal["weights", "sampler_weights", "external_weights"]
StoredRunState = Literal["live", "evicted", "closed"]
UsageKind = Literal[
    "training", "sampling_prefill", "sampling_prefill_cached", "sampling_sample", "checkpoint", "storage"
]


@dataclass(frozen=True)
class SessionRow:
    """A client process's lease. `status` is a SessionStatus as JSON."""

    session_id: str
    owner: str
    created_at: float
    last_seen_at: float
    project_id: str | None = None
    tags: list[str] = field(default_factory=list[str])
    user_metadata: dict[str, Any] | None = None
    display_name: str | None = None
    sdk_version: str = ""
    status: dict[str, Any] = field(default_factory=lambda: {"type": "active"})


@dataclass(frozen=True)
class RunRow:
    """A run: `run_id` is "SESSION:train:N", N its `model_seq_id`."""

    run_id: str
    session_id: str
    model_seq_id: int
    owner: str
    base_model: str
    lora: LoraConfig
    created_at: float
    last_request_at: float
    project_id: str | None = None
    optimizer_config: dict[str, Any] = field(default_factory=lambda: {"type": "adamw"})
    user_metadata: dict[str, Any] | None = None
    corrupted: bool = False
    state: StoredRunState = "live"
    fingerprint: str = ""  # of the base model's weights that it was made with, once that is known
    problem: str = ""  # why it is `corrupted`


@dataclass(frozen=True)
class SamplerRow:
    """A sampling session: "SESSION:sample:N". `clones` counts how often it was joined."""

    sampler_id: str
    session_id: str
    owner: str
    base_model: str
    created_at: float
    model_path: str | None = None  # the tinker:// path it was made from
    adapter: str | None = None  # the published adapter's name; None: the base model
    adapter_dir: str | None = None  # where that adapter is, relative to the home
    clones: int = 0

    @property
    def unnamed(self) -> bool:
        """It samples a run's adapter that has no name."""
        return self.adapter is not None and self.model_path is None


@dataclass(frozen=True)
class CheckpointRow:
    """Saved weights: one directory, relative to the home."""

    run_id: str
    kind: CheckpointKind
    name: str
    owner: str
    base_model: str
    lora: LoraConfig
    directory: str
    size_bytes: int
    created_at: float
    with_optimizer: bool = False
    project_id: str | None = None
    expires_at: float | None = None  # None: never
    public: bool = False
    user_metadata: dict[str, Any] | None = None
    encrypted: bool = False

    @property
    def key(self) -> tuple[str, str, str]:
        return self.run_id, self.kind, self.name

    @property
    def expired(self) -> bool:
        return self.expires_at is not None and self.expires_at <= time.time()

    @property
    def checkpoint_id(self) -> str:
        return f"{self.kind}/{self.name}"

    @property
    def tinker_path(self) -> str:
        return f"tinker://{self.run_id}/{self.kind}/{self.name}"


@dataclass(frozen=True)
class CustomLossRow:
    """An uploaded loss: its inputs and its graph's nodes as they came on the wire."""

    loss_id: str
    session_id: str
    owner: str
    name: str
    inputs: list[dict[str, Any]]
    nodes: list[dict[str, Any]]


@dataclass(frozen=True)
class UsageRow:
    """How much of one kind was used in one hour: tokens, checkpoints, or gigabyte hours."""

    hour: float  # any time within it; read back, its start
    owner: str
    kind: UsageKind
    amount: float
    project_id: str | None = None
    session_id: str | None = None
    run_id: str | None = None
    base_model: str | None = None


@dataclass(frozen=True)
class AuditRow:
    """Something that was done. `event` is "KIND.VERB", as in "checkpoints.publish"."""

    at: float
    owner: str
    event: str
    project_id: str | None = None
    details: dict[str, Any] = field(default_factory=dict[str, Any])
    run_id: str | None = None
    tinker_path: str | None = None
    purpose: str | None = None


@dataclass(frozen=True)
class KeyRow:
    """An API key, without the key: only its hash is kept."""

    key_id: int
    name: str
    note: str
    hash: str
    owner: str
    project_id: str | None
    created_at: float
    revoked_at: float | None = None


Row = TypeVar("Row")


class RowPage(NamedTuple, Generic[Row]):
    """Some rows, newest first, and how many there are in all."""

    rows: list[Row]
    total: int


class Scope(NamedTuple):
    """Whose rows are asked for: `owner`'s (None: everybody's), and with `project` all of that project too."""

    owner: str | None
    project: str | None = None


class FoundSession(NamedTuple):
    """A session with what its runs have saved."""

    session: SessionRow
    checkpoints: int
    checkpoint_bytes: int


class Storage(NamedTuple):
    """What the checkpoints of one owner in one project take up."""

    owner: str
    project_id: str | None
    checkpoints: int
    size_bytes: int


def texts(metadata: dict[str, Any] | None) -> dict[str, str]:
    """Metadata as clients read it back: they accept strings alone."""
    return {key: str(value) for key, value in (metadata or {}).items()}


# -- tables ----------------------------------------------------------------------------------------------

TABLES: dict[type, str] = {
    SessionRow: "sessions", RunRow: "runs", SamplerRow: "samplers", CheckpointRow: "checkpoints",
    CustomLossRow: "custom_losses", UsageRow: "usage", AuditRow: "audit", KeyRow: "keys",
}  # fmt: skip
_JSON = frozenset({"tags", "user_metadata", "status", "optimizer_config", "inputs", "nodes", "details"})
_FLAGS = frozenset({"corrupted", "with_optimizer", "public", "encrypted"})
_TIMES = frozenset({"created_at", "last_seen_at", "last_request_at", "expires_at", "revoked_at", "at"})


def columns(kind: type) -> list[str]:
    return [f.name for f in fields(kind)]


def encode(name: str, value: Any) -> Any:
    """A field's value as its column keeps it."""
    if value is None:
        return None
    if name == "lora":
        return json.dumps(value.model_dump())
    if name in _JSON:
        return json.dumps(value, allow_nan=False)
    if name in _TIMES:
        return round(value, 6)
    return value // 3600 * 3600 if name == "hour" else value


def decode(kind: type[Row], stored: Sequence[Any]) -> Row:
    """The row of these columns' values."""
    values = {}
    for name, value in zip(columns(kind), stored, strict=True):
        if value is not None:
            if name == "lora":
                value = LoraConfig(**json.loads(value))
            elif name in _JSON:
                value = json.loads(value)
            elif name in _FLAGS:
                value = bool(value)
        values[name] = value
    return kind(**values)


APPLICATION_ID = 0x54494E4B  # "TINK": how a file says that it is ours
# Lists of statements. Append to them; never edit what is there: it was applied to homes that exist.
MIGRATIONS: tuple[Sequence[str], ...] = (
    (
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
    ),
    ("ALTER TABLE runs ADD COLUMN fingerprint TEXT NOT NULL DEFAULT ''",),
    ("ALTER TABLE runs ADD COLUMN problem TEXT NOT NULL DEFAULT ''",),
    tuple(f"ALTER TABLE {table} ADD COLUMN checksum INTEGER" for table in TABLES.values()),
)


def version(db: sqlite3.Connection) -> int:
    """How many migrations this database has seen."""
    return db.execute("PRAGMA user_version").fetchone()[0]


def migrate(db: sqlite3.Connection, migrations: Sequence[Sequence[str]] = MIGRATIONS) -> None:
    """Apply what this database has not seen, each in a transaction of its own."""
    while (seen := version(db)) < len(migrations):
        db.execute("BEGIN IMMEDIATE")
        try:
            if version(db) == seen:  # else another process was first
                for statement in migrations[seen]:
                    db.execute(statement)
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
    """A connection whose SQL knows `row_checksum`, and that reads damaged text too."""
    db = sqlite3.connect(database, isolation_level=None, **options)
    db.text_factory = partial(str, encoding="utf-8", errors="replace")
    db.create_function("row_checksum", -1, _checksum, deterministic=True)
    return db


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

"""The ledger's rows and answers, and which table each kind of row is in.

A row's fields are its table's columns. Times are unix seconds, kept to the microsecond so that one survives a
datetime; a dict or a list is kept as JSON. Knows no database; the tables are made in ledger_schema.py.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Generic, Literal, NamedTuple, TypeVar

from tinkex.types.params import LoraConfig

CheckpointKind = Literal["weights", "sampler_weights", "external_weights"]
StoredRunState = Literal["live", "evicted", "closed"]
RunEnd = Literal["", "finished", "interrupted", "failed"]
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
    # Its type, the settings of the last step, and the loss of the last pass (`loss_fn`).
    optimizer_config: dict[str, Any] = field(default_factory=lambda: {"type": "adamw"})
    user_metadata: dict[str, Any] | None = None
    corrupted: bool = False
    state: StoredRunState = "live"
    fingerprint: str = ""  # of the base model's weights that it was made with, once that is known
    problem: str = ""  # why it is `corrupted`
    name: str = ""
    tags: list[str] = field(default_factory=list[str])
    parent: str | None = None  # the tinker:// path that it was made from
    ended: RunEnd = ""  # how, once its session is over
    ended_why: str = ""
    steps: int = 0  # what it has done so far, written every few seconds
    tokens: int = 0
    seconds: float = 0.0  # of the engine
    loss: float | None = None  # of the last step
    curve: list[float] = field(default_factory=list[float])  # of the loss, a few dozen means
    trainer: int = -1  # of those of its base model, the one that it was on last; -1: none yet


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
    admin: bool = False  # it sees what is everybody's


@dataclass(frozen=True)
class LeaseRow:
    """Which server owns a session, where several share a ledger; `epoch` counts its owners."""

    session_id: str
    server: str
    epoch: int


Row = TypeVar("Row")


class RowPage(NamedTuple, Generic[Row]):
    """Some rows, newest first, and how many there are in all."""

    rows: list[Row]
    total: int


class Scope(NamedTuple):
    """The owner of the rows asked for (None: everybody); with `project`, all rows of that project too.

    `also` is another owner, whose rows count as the first one's.
    """

    owner: str | None
    project: str | None = None
    also: str | None = None


RUN_ORDERS = (
    "created_at", "name", "base_model", "steps", "tokens", "loss", "last_request_at", "seconds", "owner",
)  # fmt: skip


@dataclass(frozen=True)
class RunQuery:
    """Which runs a list shows; everything that is given must match."""

    text: str = ""  # part of a name, an id, a model, a tag or an owner
    state: str = ""  # running, idle, finished, interrupted or failed
    model: str = ""
    tag: str = ""
    order: str = "created_at"  # one of RUN_ORDERS
    descending: bool = True
    active_since: float = 0.0  # a run that has not ended is running if it was asked something since then
    heard_since: float = 0.0  # and interrupted if nothing was heard of its client since then
    busy: tuple[str, ...] = ()  # runs that count as running in any case


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
    """Metadata as clients read it back: they accept only strings."""
    return {key: str(value) for key, value in (metadata or {}).items()}


# -- tables ----------------------------------------------------------------------------------------------

TABLES: dict[type, str] = {
    SessionRow: "sessions", RunRow: "runs", SamplerRow: "samplers", CheckpointRow: "checkpoints",
    CustomLossRow: "custom_losses", UsageRow: "usage", AuditRow: "audit", KeyRow: "keys",
    LeaseRow: "leases",
}  # fmt: skip
_JSON = frozenset(
    {"tags", "user_metadata", "status", "optimizer_config", "inputs", "nodes", "details", "curve"}
)
_FLAGS = frozenset({"corrupted", "with_optimizer", "public", "encrypted", "admin"})
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

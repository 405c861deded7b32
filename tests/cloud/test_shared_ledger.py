"""The ledger on a real Postgres: one schema, what is committed and what is refused, mirrors that follow."""

from __future__ import annotations

import json
import random
from contextlib import closing
from pathlib import Path

import psycopg
import pytest

from tinkex.errors import InvalidInputError
from tinkex.service import ledger_connection
from tinkex.service.ledger_file import LedgerError
from tinkex.service.ledger_mirror import MirroredLedger
from tinkex.service.ledger_postgres import _SHARED, Fenced, SharedDatabase, translate
from tinkex.service.ledger_schema import MIGRATIONS
from tinkex.service.rows import (
    TABLES,
    AuditRow,
    CheckpointRow,
    CustomLossRow,
    RunRow,
    SamplerRow,
    Scope,
    SessionRow,
    UsageRow,
)
from tinkex.types.params import LoraConfig

pytestmark = pytest.mark.slow


class Member:
    """A server, as far as the ledger goes: it sends its writes when told."""

    def __init__(self, url: str, directory: Path, name: str, lease: float = 60.0) -> None:
        directory.mkdir()
        self.database, self.name, self.lease = SharedDatabase(url), name, lease
        self.unsent, self.batch = [], 0
        self.ledger = MirroredLedger(directory, name, self.unsent.extend)
        rows, self.since = self.database.load()
        self.ledger.fill(rows)
        self.database.register(name, f"http://{name}", lease)

    def send(self) -> None:
        sent, self.unsent[:] = list(self.unsent), []
        self.database.ship(self.name, self.batch + 1, sent)
        self.batch += 1

    def follow(self) -> None:
        changes, self.since = self.database.changes(self.name, self.since)
        self.ledger.apply(changes)

    def close(self) -> None:
        self.ledger.close()
        self.database.close()


@pytest.fixture
def members(postgres, tmp_path):
    made = [Member(postgres, tmp_path / name, name) for name in ("a", "b")]
    yield made
    for member in made:
        member.close()


def everything(ledger: MirroredLedger) -> dict[str, list[tuple]]:
    found = {}
    for table in TABLES.values():
        columns = ", ".join(name for name in ledger._columns[table][0] if name != "audit_id")
        found[table] = sorted(ledger._read(f"SELECT {columns} FROM {table}"), key=repr)
    return found


def write_much(ledger: MirroredLedger, owner: str, seed: int) -> None:
    """Rows of every kind, with text that databases stumble over."""
    draw, lora = random.Random(seed), LoraConfig(rank=4, seed=2**62)
    for n in range(12):
        session, now = f"{owner}-s{n}", 1e9 + draw.random() * 1e6
        metadata = {"k": "v'\";%s?", "nul": "a\0b", "n": n}
        ledger.add_session(SessionRow(session, owner, now, now, "p", ["ä", "🙂"], metadata, "name % ?"))
        run = f"{session}:train:0"
        ledger.add_run(RunRow(run, session, 0, owner, "m", lora, now, now, corrupted=bool(n % 2)))
        ledger.add_sampler(SamplerRow(f"{session}:sample:0", session, owner, "m", now))
        ledger.join_sampler(f"{session}:sample:0")
        ledger.add_custom_loss(
            CustomLossRow(f"{session}:loss:0", session, owner, "l", [{"a": 1}], [{"b": [1.5]}])
        )
        for name in ("one", "two", "one"):
            row = CheckpointRow(
                run, "weights", name, owner, "m", lora, f"runs/{name}", 2**40, now, public=True
            )
            ledger.add_checkpoint(row, overwrite=True)
        ledger.add_usage(UsageRow(now, owner, "training", 0.1 * k, "p", session) for k in range(3))
        ledger.add_audit(AuditRow(now, owner, "checkpoints.save", details={"x": n}))
        ledger.update_run(run, state="evicted")
    ledger.delete_checkpoint(f"{owner}-s0:train:0", "weights", "one")
    ledger.delete_checkpoint(f"{owner}-s0:train:0", "weights", "two")
    ledger.delete_session(f"{owner}-s0")


def test_what_one_server_writes_every_mirror_has_and_so_has_the_database(members, postgres, tmp_path):
    a, b = members
    write_much(a.ledger, "ann", 1)
    write_much(b.ledger, "bob", 2)
    for member in (a, b):
        member.send()
    for member in (a, b):
        member.follow()
    with closing(Member(postgres, tmp_path / "c", "c")) as late:
        assert everything(a.ledger) == everything(b.ledger)
        assert everything(late.ledger) == everything(a.ledger)
        assert late.ledger.sessions(Scope("ann"), limit=100).total == 11
        assert late.ledger.lease("bob-s3").server == "b"
    with psycopg.connect(postgres) as db:  # by somebody else's eyes
        assert db.execute("SELECT count(*), max(amount) FROM usage").fetchone() == (24, pytest.approx(0.3))
        assert db.execute("SELECT size_bytes FROM checkpoints LIMIT 1").fetchone() == (2**40,)
        assert db.execute("SELECT sum(corrupted) FROM runs").fetchone() == (12,)
        assert db.execute("SELECT value FROM meta WHERE name = 'version'").fetchone() == (
            str(len(MIGRATIONS)),
        )


def test_a_transaction_that_fails_is_not_sent(members):
    a, _ = members

    def fail() -> None:
        with a.ledger.transaction():
            a.ledger.add_session(SessionRow("s", "ann", 1.0, 1.0))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert a.unsent == []
    assert a.ledger.session("s") is None


def test_a_batch_sent_twice_counts_once(members):
    a, b = members
    a.ledger.add_session(SessionRow("s", "ann", 1.0, 1.0))
    a.ledger.add_usage([UsageRow(1.0, "ann", "training", 5.0)])
    statements = list(a.unsent)
    a.send()
    a.database.ship("a", 1, statements)  # its answer had been lost
    b.follow()
    assert [row.amount for row in b.ledger.usage(0.0, 9999.0, Scope(None))] == [5.0]


def test_an_owner_that_was_taken_over_can_commit_nothing(postgres, tmp_path):
    zombie = Member(postgres, tmp_path / "z", "z", lease=-1.0)  # as after a long sleep
    heir = Member(postgres, tmp_path / "h", "h")
    zombie.ledger.add_session(SessionRow("s", "ann", 1.0, 1.0))
    zombie.send()
    assert heir.database.fence("h") == ["z"]
    heir.follow()
    assert heir.ledger.lease("s").server == "z"  # until its files are with the heir
    heir.database.take_over("h", ["z"])
    heir.follow()
    assert (heir.ledger.lease("s").server, heir.ledger.lease("s").epoch) == ("h", 2)
    zombie.ledger.update_session("s", display_name="from the grave")
    for attempt in (zombie.send, lambda: zombie.database.renew("z", 60.0)):
        with pytest.raises(Fenced, match="start it again"):
            attempt()
    heir.follow()
    assert heir.ledger.session("s").display_name is None
    assert heir.database.fence("h") == ["z"]  # until its log is had, it is named again
    heir.database.forget("z")
    assert heir.database.fence("h") == []
    heir.database.expire("h")
    last = Member(postgres, tmp_path / "l", "l")
    assert heir.database.fence("h") == []  # nobody fences with an expired lease of one's own
    assert last.database.fence("l") == ["h"]
    with pytest.raises(Fenced):
        heir.database.take_over("h", ["z"])
    for member in (zombie, heir, last):
        member.close()


def test_databases_that_cannot_be_used_are_told(postgres, monkeypatch):
    with pytest.raises(InvalidInputError, match="postgresql://USER@HOST/DATABASE"):
        SharedDatabase("postgresql://?nonsense=1")
    monkeypatch.setitem(ledger_connection.DEFAULTS, "connect_timeout", 1)
    with pytest.raises(LedgerError, match=r"the database x at 127.0.0.1 cannot be reached"):
        SharedDatabase("postgresql://127.0.0.1:1/x")
    SharedDatabase(postgres).close()
    with psycopg.connect(postgres) as db:
        db.execute("UPDATE meta SET value = '999' WHERE name = 'version'")
    with pytest.raises(LedgerError, match="newer Tinkex"):
        SharedDatabase(postgres)


@pytest.mark.parametrize("seen", [1, 4, len(MIGRATIONS) - 1])
def test_rows_of_an_older_version_are_there_after_an_upgrade(postgres, tmp_path, seen):
    """A database as an older version left it, with rows: servers of this one read them, and go on."""
    with psycopg.connect(postgres) as db:
        db.execute(_SHARED)
        for migration in MIGRATIONS[:seen]:
            migration(lambda sql: db.execute(translate(sql).replace("%%", "%")))
        db.execute("INSERT INTO meta VALUES ('version', %s)", [str(seen)])
        db.execute(
            "INSERT INTO sessions (session_id, owner, created_at, last_seen_at, tags, display_name, "
            "sdk_version, status) VALUES ('s', 'ann', 1, 2, '[]', 'old', '', '{\"type\": \"active\"}')"
        )
        db.execute(
            "INSERT INTO runs (run_id, session_id, model_seq_id, owner, base_model, lora, created_at, "
            "last_request_at, optimizer_config, corrupted, state) VALUES ('s:train:0', 's', 0, 'ann', 'm', "
            "%s, 1, 2, '{}', 0, 'evicted')",
            [json.dumps(vars(LoraConfig(rank=4, seed=1)))],
        )
    a, b = [Member(postgres, tmp_path / name, name) for name in ("a", "b")]
    for member in (a, b):
        assert member.ledger.session("s").display_name == "old"
        assert member.ledger.run("s:train:0").lora.rank == 4
        assert member.ledger.run("s:train:0").trainer == -1
    a.ledger.update_session("s", display_name="new")
    a.send()
    b.follow()  # its triggers are there too
    assert b.ledger.session("s").display_name == "new"
    with psycopg.connect(postgres) as db:
        found = db.execute("SELECT value FROM meta WHERE name = 'version'").fetchone()
        assert found == (str(len(MIGRATIONS)),)
    for member in (a, b):
        member.close()

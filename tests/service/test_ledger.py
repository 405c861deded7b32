"""The ledger: each table, its searches against plain Python, and files that cannot be trusted."""

from __future__ import annotations

import random
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tinkex.service.ledger import Ledger
from tinkex.service.ledger_file import LedgerError, LedgerFullError
from tinkex.service.ledger_schema import MIGRATIONS, migrate, version
from tinkex.service.rows import (
    TABLES,
    AuditRow,
    CheckpointRow,
    CustomLossRow,
    LeaseRow,
    RunQuery,
    RunRow,
    SamplerRow,
    Scope,
    SessionRow,
    Storage,
    UsageRow,
)
from tinkex.types.params import LoraConfig
from tinkex.types.sessions import (
    ActiveSessionStatusQuery,
    ClientFinishedSessionStatusQuery,
    FailedSessionStatusQuery,
    SessionSearchCursor,
    SessionSearchRequest,
    UserSearchOwner,
)

EVERYBODY = Scope(None)
ANN, BOB = Scope("ann"), Scope("bob")
FINISHED = {"type": "client_finished", "reason": {"type": "success"}, "detail": "bye"}


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "ledger.sqlite"


@pytest.fixture
def ledger(path) -> Iterator[Ledger]:
    ledger = Ledger(path)
    yield ledger
    ledger.close()


def session(n: int, owner: str = "ann", **more: Any) -> SessionRow:
    return SessionRow(f"s{n}", owner, created_at=1000.0 + n, last_seen_at=1000.0 + n, **more)


def run(session_id: str, n: int = 0, owner: str = "ann", at: float = 2000.0, **more: Any) -> RunRow:
    run_id = f"{session_id}:train:{n}"
    return RunRow(run_id, session_id, n, owner, "tiny", LoraConfig(rank=4, seed=7), at, at, **more)


def checkpoint(run_id: str, name: str, at: float = 3000.0, **more: Any) -> CheckpointRow:
    more = {"kind": "weights", "owner": "ann", "size_bytes": 10, **more}
    directory = f"runs/x/{more['kind']}/{name}"
    return CheckpointRow(
        run_id,
        name=name,
        base_model="tiny",
        lora=LoraConfig(rank=4),
        directory=directory,
        created_at=at,
        **more,
    )


# -- rows ------------------------------------------------------------------------------------------------


def test_every_row_comes_back_as_it_was_even_after_reopening(ledger, path):
    rows = {
        "session": session(
            1, tags=["a", "ä"], user_metadata={"k": "v", "n": 1}, display_name="x", sdk_version="0.36.0",
            status=FINISHED, project_id="p",
        ),
        "run": run(
            "s1", 3, project_id="p", optimizer_config={"type": "adamw"}, user_metadata={"a": "b"},
            corrupted=True, state="evicted",
        ),
        "sampler": SamplerRow(
            "s1:sample:0", "s1", "ann", "tiny", 5.5, model_path="tinker://s1:train:3/sampler_weights/x",
            adapter="pub", adapter_dir="ephemeral/pub", clones=2,
        ),
        "checkpoint": checkpoint(
            "s1:train:3", "one", with_optimizer=True, project_id="p", expires_at=99.25, public=True,
            user_metadata={"step": "1"}, encrypted=True,
        ),
        "custom_loss": CustomLossRow(
            "loss", "s1", "ann", "mine", [{"name": "logprobs", "rank": 1}],
            [{"op": "output", "args": [{"float": "inf"}]}],
        ),
    }  # fmt: skip
    ledger.add_session(rows["session"])
    assert ledger.add_run(rows["run"]) == (rows["run"], True)
    assert ledger.add_sampler(rows["sampler"]) == (rows["sampler"], True)
    assert ledger.add_checkpoint(rows["checkpoint"])
    assert ledger.add_custom_loss(rows["custom_loss"]) == (rows["custom_loss"], True)
    ledger.close()

    with closing(Ledger(path)) as again:
        assert again.session("s1") == rows["session"]
        assert again.run("s1:train:3") == rows["run"]
        assert again.sampler("s1:sample:0") == rows["sampler"]
        assert again.checkpoint("s1:train:3", "weights", "one") == rows["checkpoint"]
        assert again.custom_loss("loss") == rows["custom_loss"]
        assert again.session("s2") is None
        assert again.checkpoint("s1:train:3", "sampler_weights", "one") is None


def test_a_checkpoint_knows_its_path():
    row = checkpoint("s1:train:0", "step-10", kind="sampler_weights")
    assert row.checkpoint_id == "sampler_weights/step-10"
    assert row.tinker_path == "tinker://s1:train:0/sampler_weights/step-10"


def test_a_repeated_insert_returns_what_is_there(ledger):
    ledger.add_session(session(1))
    ledger.add_run(run("s1"))
    ledger.update_run("s1:train:0", state="closed")
    kept, new = ledger.add_run(run("s1", at=9999.0, state="live"))
    assert not new
    assert (kept.state, kept.created_at) == ("closed", 2000.0)

    sampler = SamplerRow("s1:sample:0", "s1", "ann", "tiny", 1.0)
    ledger.add_sampler(sampler)
    assert ledger.add_sampler(replace(sampler, base_model="other")) == (sampler, False)
    loss = CustomLossRow("l", "s1", "ann", "n", [], [])
    ledger.add_custom_loss(loss)
    assert ledger.add_custom_loss(replace(loss, name="other")) == (loss, False)


def test_updates_change_what_they_name_and_nothing_else(ledger):
    ledger.add_session(session(1))
    ledger.add_session(session(2))
    assert ledger.update_session("s1", last_seen_at=5000.0, status=FINISHED)
    assert ledger.session("s1") == replace(session(1), last_seen_at=5000.0, status=FINISHED)
    assert ledger.session("s2") == session(2)
    assert not ledger.update_session("s3", last_seen_at=1.0)

    ledger.add_run(run("s1"))
    assert ledger.update_run("s1:train:0", lora=LoraConfig(rank=16), corrupted=True)
    assert ledger.run("s1:train:0") == replace(run("s1"), lora=LoraConfig(rank=16), corrupted=True)
    with pytest.raises(AssertionError):
        ledger.update_run("s1:train:0", nonsense=1)


def test_a_run_needs_its_session_and_the_error_is_the_ledgers(ledger):
    with pytest.raises(LedgerError, match="FOREIGN KEY"):
        ledger.add_run(run("nobody"))
    assert ledger.run("nobody:train:0") is None


def test_a_transaction_is_all_or_nothing(ledger):
    def fail_halfway() -> None:
        with ledger.transaction():
            ledger.add_session(session(1))
            with ledger.transaction():
                ledger.add_run(run("s1"))
            1 / 0

    with pytest.raises(ZeroDivisionError):
        fail_halfway()
    assert ledger.session("s1") is None
    with ledger.transaction():
        ledger.add_session(session(1))
    assert ledger.session("s1") == session(1)


# -- lists -----------------------------------------------------------------------------------------------


def test_lists_are_paged_newest_first_within_the_scope(ledger):
    for n in range(5):
        ledger.add_session(session(n))
    ledger.add_session(session(5, "bob", project_id="p"))
    page = ledger.sessions(ANN, limit=2, offset=1)
    assert [row.session_id for row in page.rows] == ["s3", "s2"]
    assert page.total == 5
    assert ledger.sessions(ANN, limit=2, offset=50).rows == []
    assert ledger.sessions(BOB, limit=10).total == 1
    assert [r.session_id for r in ledger.sessions(Scope("ann", "p"), limit=2).rows] == ["s5", "s4"]
    assert ledger.sessions(EVERYBODY, limit=2**70, offset=0).total == 6
    assert ledger.sessions(Scope("carol"), limit=10).total == 0


def test_runs_of_all_kinds_of_lists(ledger):
    ledger.add_session(session(1))
    ledger.add_session(session(2, "bob"))
    for n in (2, 0, 1):
        ledger.add_run(run("s1", n, at=2000.0))
    ledger.add_run(run("s2", 0, "bob", at=1999.0, project_id="p", state="evicted"))
    ledger.update_run("s1:train:0", state="closed", project_id="p")

    assert [r.model_seq_id for r in ledger.runs_of_session("s1")] == [0, 1, 2]
    assert [r.run_id for r in ledger.runs_in_state("live", "evicted")] == [
        "s2:train:0",
        "s1:train:2",
        "s1:train:1",
    ]
    assert [r.run_id for r in ledger.runs(ANN, limit=10).rows] == ["s1:train:1", "s1:train:0", "s1:train:2"]
    assert [r.run_id for r in ledger.runs(ANN, limit=10, project_id="p").rows] == ["s1:train:0"]
    assert ledger.runs(EVERYBODY, limit=0).total == 4


def test_lapsed_sessions_are_those_active_and_silent(ledger):
    for n in range(4):
        ledger.add_session(session(n))
    ledger.update_session("s1", status=FINISHED)
    ledger.update_session("s2", last_seen_at=9999.0)
    assert [row.session_id for row in ledger.active_sessions(seen_before=1003.5)] == ["s0", "s3"]


def test_moving_a_session_moves_its_runs_and_checkpoints(ledger):
    for n in (1, 2):
        ledger.add_session(session(n))
        ledger.add_run(run(f"s{n}"))
        ledger.add_checkpoint(checkpoint(f"s{n}:train:0", "x"))
    assert ledger.move_session("s1", "p")
    assert [s.project_id for s in ledger.sessions(ANN, limit=9).rows] == [None, "p"]
    assert [r.project_id for r in (ledger.run("s1:train:0"), ledger.run("s2:train:0")) if r] == ["p", None]
    assert ledger.storage(EVERYBODY) == [Storage("ann", None, 1, 10), Storage("ann", "p", 1, 10)]
    assert not ledger.move_session("s9", "p")


def test_clones_are_counted(ledger):
    ledger.add_session(session(1))
    ledger.add_sampler(SamplerRow("s1:sample:1", "s1", "ann", "tiny", 2.0, adapter="a"))
    ledger.add_sampler(SamplerRow("s1:sample:0", "s1", "ann", "tiny", 1.0))
    assert [ledger.join_sampler("s1:sample:0") for _ in range(3)] == [1, 2, 3]
    assert ledger.join_sampler("s1:sample:9") is None
    assert [s.sampler_id for s in ledger.samplers_of_session("s1")] == ["s1:sample:0", "s1:sample:1"]
    assert ledger.delete_sampler("s1:sample:1")
    assert not ledger.delete_sampler("s1:sample:1")


# -- checkpoints -----------------------------------------------------------------------------------------


@pytest.fixture
def saved(ledger) -> Ledger:
    ledger.add_session(session(1))
    ledger.add_session(session(2, "bob"))
    ledger.add_run(run("s1", 0))
    ledger.add_run(run("s1", 1))
    ledger.add_run(run("s2", 0, "bob"))
    ledger.add_checkpoint(checkpoint("s1:train:0", "a", 3001.0, expires_at=4000.0))
    ledger.add_checkpoint(checkpoint("s1:train:0", "b", 3002.0, size_bytes=2**40, expires_at=5000.0))
    ledger.add_checkpoint(checkpoint("s1:train:0", "a", 3003.0, kind="sampler_weights"))
    ledger.add_checkpoint(checkpoint("s1:train:1", "a", 3004.0, project_id="p"))
    ledger.add_checkpoint(checkpoint("s2:train:0", "a", 3005.0, owner="bob"))
    return ledger


def names(rows: list[CheckpointRow]) -> list[str]:
    return [f"{row.run_id}/{row.checkpoint_id}" for row in rows]


def test_checkpoints_by_run_and_by_owner(saved):
    assert names(saved.checkpoints_of_run("s1:train:0")) == [
        "s1:train:0/sampler_weights/a",
        "s1:train:0/weights/b",
        "s1:train:0/weights/a",
    ]
    page = saved.checkpoints(ANN, limit=2)
    assert names(page.rows) == ["s1:train:1/weights/a", "s1:train:0/sampler_weights/a"]
    assert page.total == 4
    latest = saved.latest_checkpoints(["s1:train:0", "s2:train:0", "s9:train:0"])
    assert {key: row.name for key, row in latest.items()} == {
        ("s1:train:0", "weights"): "b",
        ("s1:train:0", "sampler_weights"): "a",
        ("s2:train:0", "weights"): "a",
    }


def test_a_name_is_taken_until_it_is_overwritten_or_deleted(saved):
    anew = checkpoint("s1:train:0", "a", 9000.0, size_bytes=77)
    assert not saved.add_checkpoint(anew)
    assert saved.checkpoint("s1:train:0", "weights", "a").size_bytes == 10
    assert saved.add_checkpoint(anew, overwrite=True)
    assert saved.checkpoint("s1:train:0", "weights", "a") == anew
    assert saved.delete_checkpoint("s1:train:0", "weights", "a")
    assert not saved.delete_checkpoint("s1:train:0", "weights", "a")
    assert saved.add_checkpoint(anew)


def test_expiry_and_publishing(saved):
    assert names(saved.expired_checkpoints(3999.9)) == []
    assert names(saved.expired_checkpoints(4000.0)) == ["s1:train:0/weights/a"]
    assert saved.update_checkpoint("s1:train:0", "weights", "a", expires_at=None, public=True)
    assert names(saved.expired_checkpoints(1e12)) == ["s1:train:0/weights/b"]
    assert saved.checkpoint("s1:train:0", "weights", "a").public
    assert not saved.update_checkpoint("s1:train:0", "weights", "zzz", public=True)


def test_storage_by_owner_and_project(saved):
    assert saved.storage(EVERYBODY) == [
        Storage("ann", None, 3, 2**40 + 20),
        Storage("ann", "p", 1, 10),
        Storage("bob", None, 1, 10),
    ]
    assert saved.storage(ANN, project_id="p") == [Storage("ann", "p", 1, 10)]


# -- searching sessions ----------------------------------------------------------------------------------

STATUSES: list[dict[str, Any]] = [
    {"type": "active"},
    {"type": "cancelled", "detail": None},
    {"type": "failed", "category": "user", "reason": {"type": "request"}, "message": "m"},
    *({"type": "client_finished", "reason": {"type": r}} for r in ("success", "errored", "interrupted")),
]
words = st.sampled_from(["a", "b", "it's", '"', "ü"])
some_sessions = st.lists(
    st.builds(
        dict,
        owner=st.sampled_from(["ann", "bob"]),
        created_at=st.sampled_from([10.0, 10.000001, 11.1234567, 12.0]),
        project_id=st.sampled_from([None, "p", "q"]),
        display_name=st.none() | words,
        user_metadata=st.none() | st.dictionaries(words, words, max_size=3),
        status=st.sampled_from(STATUSES),
    ),
    max_size=12,
)
queries = st.builds(
    SessionSearchRequest,
    session_id=st.none() | st.sampled_from(["s0", "s3"]),
    project_ids=st.none() | st.lists(st.sampled_from(["p", "q", "z"]), max_size=2),
    user_metadata=st.dictionaries(words, words, max_size=2),
    display_name=st.none() | words,
    owner=st.just(UserSearchOwner(owner_urns=["bob", "carol"])) | st.just(SessionSearchRequest().owner),
    statuses=st.none()
    | st.lists(
        st.sampled_from(
            [
                ActiveSessionStatusQuery(),
                FailedSessionStatusQuery(),
                ClientFinishedSessionStatusQuery(),
                ClientFinishedSessionStatusQuery(reasons=["errored", "success"]),
                ClientFinishedSessionStatusQuery(reasons=[]),
            ]
        ),
        min_size=1,
        max_size=3,
    ),
    limit=st.integers(1, 4),
)


def matches(row: SessionRow, query: SessionSearchRequest, scope: Scope) -> bool:
    def has(status: Any) -> bool:
        if status.type != row.status["type"]:
            return False
        reasons = getattr(status, "reasons", None)
        return reasons is None or row.status["reason"]["type"] in reasons

    return (
        (scope.owner in (None, row.owner) or (scope.project is not None and row.project_id == scope.project))
        and query.session_id in (None, row.session_id)
        and (query.project_ids is None or row.project_id in query.project_ids)
        and query.user_metadata.items() <= (row.user_metadata or {}).items()
        and query.display_name in (None, row.display_name)
        and (not isinstance(query.owner, UserSearchOwner) or row.owner in query.owner.owner_urns)
        and (query.statuses is None or any(map(has, query.statuses)))
    )


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(some_sessions, queries, st.sampled_from([EVERYBODY, ANN, Scope("bob", "p")]))
def test_search_finds_what_plain_python_finds_page_by_page(rows, query, scope):
    with TemporaryDirectory() as home, closing(Ledger(Path(home) / "ledger.sqlite")) as ledger:
        for n, fields in enumerate(rows):
            ledger.add_session(SessionRow(f"s{n}", last_seen_at=0.0, **fields))
        kept = [row for row in ledger.sessions(EVERYBODY, limit=99).rows if matches(row, query, scope)]
        expected = sorted(kept, key=lambda row: (row.created_at, row.session_id), reverse=True)
        found: list[SessionRow] = []
        for _ in range(len(rows) + 1):
            page, more = ledger.search_sessions(query, scope)
            assert len(page) == query.limit or not more
            found += [item.session for item in page]
            if not more:
                break
            at = datetime.fromtimestamp(found[-1].created_at, UTC)  # as a cursor travels
            cursor = SessionSearchCursor(last_created_at=at, last_session_id=found[-1].session_id)
            query = query.model_copy(update={"cursor": cursor})
        assert found == expected


def test_search_counts_what_was_saved_and_takes_any_number_of_conditions(saved):
    found, _ = saved.search_sessions(SessionSearchRequest(), EVERYBODY)
    counts = {f.session.session_id: (f.checkpoints, f.checkpoint_bytes) for f in found}
    assert counts == {"s1": (4, 2**40 + 30), "s2": (1, 10)}
    big = SessionSearchRequest(
        user_metadata={str(n): "x" for n in range(5000)}, project_ids=[str(n) for n in range(50_000)]
    )
    assert saved.search_sessions(big, EVERYBODY) == ([], False)


def test_numbers_in_metadata_are_found_as_text(ledger):
    ledger.add_session(session(1, user_metadata={"step": 10}))
    query = SessionSearchRequest(user_metadata={"step": "10"})
    assert [f.session.session_id for f in ledger.search_sessions(query, ANN)[0]] == ["s1"]


# -- usage, audit, keys ----------------------------------------------------------------------------------


def test_usage_adds_up_by_the_hour_and_over_runs(ledger):
    of = UsageRow(7200.0, "ann", "training", 10, "p", "s1", "s1:train:0", "tiny")
    bare = UsageRow(7200.0, "ann", "sampling_sample", 1)
    ledger.add_usage([of, replace(of, hour=10799.9), replace(of, hour=10800.0), bare, bare])
    ledger.add_usage([replace(of, run_id="s1:train:1", amount=5), replace(of, owner="bob", amount=2.5)])
    total = replace(of, run_id=None)
    assert ledger.usage(0, 1e9, ANN) == [
        replace(bare, amount=2),
        replace(total, amount=25),
        replace(total, hour=10800.0),
    ]
    assert ledger.usage(7200.0, 10800.0, BOB) == [replace(total, owner="bob", amount=2.5)]
    assert ledger.usage(7200.5, 10800.0, EVERYBODY) == []


def test_audit_by_day_and_kind(ledger):
    rows = [
        AuditRow(100.0, "ann", "checkpoints.save", None, {"bytes": 1}, "r", "tinker://r/weights/x", "why"),
        AuditRow(50.0, "ann", "projects.assign"),
        AuditRow(200.0, "ann", "checkpoints_of_another_kind"),
        AuditRow(60.0, "bob", "checkpoints.delete", "p"),
    ]
    for row in rows:
        ledger.add_audit(row)
    assert ledger.audit(ANN) == [rows[1], rows[0], rows[2]]
    assert ledger.audit(EVERYBODY, kind="checkpoints") == [rows[3], rows[0]]
    assert ledger.audit(Scope("ann", "p"), start=60.0, end=100.0) == [rows[3]]


def test_keys_are_found_until_they_are_revoked(ledger):
    given = {"name": "laptop", "note": "", "owner": "ann", "project_id": None, "created_at": 1.0}
    one, two = (ledger.add_key(hash=h, **given) for h in ("h1", "h2"))
    assert (one.key_id, two.key_id) == (1, 2)
    assert ledger.find_key("h1") == one
    assert ledger.find_key("h3") is None
    assert ledger.revoke_key(1, at=9.0)
    assert not ledger.revoke_key(1, at=10.0)
    assert not ledger.revoke_key(7, at=10.0)
    assert ledger.find_key("h1") is None
    assert ledger.keys() == [replace(one, revoked_at=9.0), two]
    with pytest.raises(LedgerError):
        ledger.add_key(hash="h2", **given)


def test_another_process_may_write_at_the_same_time(ledger, path):
    with closing(Ledger(path)) as cli:
        cli.add_key(name="k", note="", hash="h", owner="ann", project_id=None, created_at=1.0)
    assert ledger.find_key("h") is not None


# -- files that cannot be trusted ------------------------------------------------------------------------


def contents(directory: Path) -> dict[str, bytes]:
    # The -shm file is an index that SQLite makes anew; it holds nothing.
    return {p.name: p.read_bytes() for p in directory.iterdir() if not p.name.endswith("-shm")}


def test_a_file_that_is_no_database_is_left_as_it_is(path):
    path.write_bytes(b"precious notes, not a database" * 100)
    before = contents(path.parent)
    with pytest.raises(LedgerError, match=r"is damaged .* left as it is"):
        Ledger(path)
    assert contents(path.parent) == before


def test_a_damaged_file_is_left_as_it_is_with_its_log(ledger, path, tmp_path):
    for n in range(300):
        ledger.add_session(session(n, user_metadata={"k": "v" * 50}))
    ledger._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    ledger.add_session(session(1000))  # this one is in the log alone
    for home in ("whole", "damaged"):  # as a killed process leaves them
        (tmp_path / home).mkdir()
        for suffix in ("", "-wal"):
            shutil.copy(f"{path}{suffix}", tmp_path / home / f"copy.sqlite{suffix}")
    with closing(Ledger(tmp_path / "whole" / "copy.sqlite")) as whole:
        assert whole.session("s1000") is not None

    damaged = tmp_path / "damaged" / "copy.sqlite"
    with damaged.open("r+b") as file:
        for page in range(2, damaged.stat().st_size // 4096):
            file.seek(page * 4096)
            file.write(b"\xff" * 200)
    before = contents(damaged.parent)
    with pytest.raises(LedgerError, match=r"is damaged .* left as it is"):
        Ledger(damaged)
    assert contents(damaged.parent) == before


def test_a_file_cut_short_is_reported(ledger, path):
    for n in range(300):
        ledger.add_session(session(n))
    ledger.close()
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)
    with pytest.raises(LedgerError, match="is damaged"):
        Ledger(path)


def everything(ledger: Ledger) -> list[Any]:
    run = "s1:train:0"
    return [
        ledger.sessions(EVERYBODY, limit=99),
        ledger.active_sessions(seen_before=1e12),
        ledger.runs(EVERYBODY, limit=99),
        ledger.runs_in_state("live"),
        ledger.samplers_of_session("s1"),
        ledger.sampler("s1:sample:0"),
        ledger.custom_loss("loss"),
        ledger.checkpoints(EVERYBODY, limit=99),
        ledger.checkpoints_of_run(run),
        ledger.expired_checkpoints(1e12),
        ledger.usage(0, 1e12, EVERYBODY),
        ledger.audit(EVERYBODY),
        ledger.keys(),
        ledger.find_key("h" * 64),
        ledger.find_key("i" * 64),
        ledger.lease("s1"),
    ]


@pytest.fixture
def full(saved: Ledger, path: Path) -> tuple[bytes, list[Any]]:
    """A file with rows in every table, and what is in it."""
    saved.add_sampler(SamplerRow("s1:sample:0", "s1", "ann", "tiny", 1.0))
    saved.join_sampler("s1:sample:0")
    saved.add_custom_loss(CustomLossRow("loss", "s1", "ann", "mine", [{"a": 1}], [{"b": 2}]))
    saved.add_usage([UsageRow(7200.0, "ann", "training", 10, "p", "s1"), UsageRow(0.0, "bob", "training", 1)])
    saved.add_audit(AuditRow(100.0, "ann", "checkpoints.save", details={"bytes": 1}))
    for key in "hi":
        saved.add_key(name="ü", note="", hash=key * 64, owner="ann", project_id=None, created_at=1.0)
    saved.revoke_key(1, 5.0)
    saved.take(LeaseRow("s1", "here", 1))
    assert all(everything(saved)[n] for n in range(13))
    seen = everything(saved)
    saved.close()
    return path.read_bytes(), seen


@pytest.mark.slow
def test_a_flipped_bit_anywhere_is_refused_or_changes_nothing(full, path):
    """In every byte of the rows, and in many others."""
    content, seen = full
    places = {n for n in range(0, len(content), 7) if content[n]}
    for word in (b"ann", b"bob", b"tiny", b"hhhh", b"iiii", b"mine", b'{"', b"s1:train:1", "ü".encode()):
        at = -1
        while (at := content.find(word, at + 1)) >= 0:
            places.update(range(at, at + len(word)))
    draw, refused = random.Random(0), list[str]()
    for place in sorted(draw.sample(sorted(places), 600)):
        bit = 1 << draw.randrange(8)
        path.write_bytes(content[:place] + bytes([content[place] ^ bit]) + content[place + 1 :])
        try:
            with closing(Ledger(path)) as ledger:
                assert everything(ledger) == seen, f"bit {bit} of byte {place} is believed"
        except LedgerError as error:
            refused.append(str(error))
    assert len(refused) > 400
    expected = re.compile("damaged .* server repair|another program|newer")  # of bits of the file's header
    assert [message for message in refused if not expected.search(message)] == []


@pytest.mark.parametrize("table", TABLES.values())
def test_a_row_that_does_not_match_its_checksum_is_named(full, path, table):
    with closing(sqlite3.connect(path)) as db:  # not by a Ledger: the checksums stay
        columns = {"checkpoints": "expires_at", "usage": "amount", "audit": "details", "leases": "server"}
        column = columns.get(table, "owner")
        db.execute(f"UPDATE {table} SET {column} = '17' WHERE rowid = 1")
        db.commit()
    damaged = rf"is damaged \(row 1 of {table} does not match its checksum\) and was left .* server repair"
    with pytest.raises(LedgerError, match=damaged):
        Ledger(path)


def test_a_damaged_row_is_refused_when_it_is_read_whatever_is_written_to_it(ledger, path):
    key = ledger.add_key(name="k", note="", hash="h", owner="ann", project_id=None, created_at=1.0)
    ledger.add_session(session(1))
    assert ledger.find_key("h") == key
    with closing(sqlite3.connect(path)) as db:  # not by a Ledger: the checksums stay
        db.execute("UPDATE keys SET owner = 'eve'")
        db.execute("UPDATE sessions SET owner = CAST(x'ff' AS TEXT)")
        db.commit()
    ledger.update_session("s1", last_seen_at=17.0)
    for read in (
        lambda: ledger.find_key("h"),
        ledger.keys,
        lambda: ledger.session("s1"),
        lambda: ledger.search_sessions(SessionSearchRequest(), EVERYBODY),
    ):
        with pytest.raises(LedgerError, match=r"row 1 of (keys|sessions) does not match its checksum"):
            read()


def test_a_newer_database_is_refused(ledger, path):
    ledger._db.execute(f"PRAGMA user_version = {len(MIGRATIONS) + 3}")
    ledger.close()
    with pytest.raises(LedgerError, match=rf"newer Tinkex \(schema {len(MIGRATIONS) + 3}; .*upgrade"):
        Ledger(path)


def test_another_programs_database_is_refused(path):
    with closing(sqlite3.connect(path)) as db:
        db.execute("CREATE TABLE recipes (name TEXT)")
        db.commit()
    before = contents(path.parent)
    with pytest.raises(LedgerError, match="another program's"):
        Ledger(path)
    assert contents(path.parent) == before


def test_a_directory_that_is_not_there_is_reported(tmp_path):
    with pytest.raises(LedgerError, match="cannot be used: unable to open"):
        Ledger(tmp_path / "no" / "where.sqlite")


def test_a_full_disk_has_its_own_error_and_loses_nothing(ledger):
    ledger.add_session(session(1))
    pages = ledger._db.execute("PRAGMA page_count").fetchone()[0]
    ledger._db.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(LedgerFullError, match="no space left"):
        ledger.add_usage(UsageRow(0.0, "x" * n, "training", 1) for n in range(2000))
    assert ledger.usage(0, 1e9, EVERYBODY) == []
    assert ledger.sessions(EVERYBODY, limit=10).rows == [session(1)]
    ledger._db.execute(f"PRAGMA max_page_count = {pages + 1000}")
    ledger.add_session(session(2))
    assert ledger.session("s2") is not None


# -- migrations ------------------------------------------------------------------------------------------


def test_migrations_are_applied_once_in_order_and_whole():
    def first(execute):
        execute("CREATE TABLE t (a)")

    def second(execute):
        execute("INSERT INTO t VALUES (1)")

    def fails(execute):
        execute("INSERT INTO t VALUES (2)")
        execute("INSERT INTO halfway VALUES (3)")

    with closing(sqlite3.connect(":memory:", isolation_level=None)) as db:
        migrate(db, [first])
        assert version(db) == 1
        migrate(db, [first, second])
        migrate(db, [first, second])
        with pytest.raises(sqlite3.OperationalError, match="halfway"):
            migrate(db, [first, second, fails])
        assert version(db) == 2
        assert db.execute("SELECT a FROM t").fetchall() == [(1,)]


_WRITER = """
    import sys
    from pathlib import Path
    from tinkex.service.ledger import Ledger
    from tinkex.service.rows import SessionRow
    ledger = Ledger(Path(sys.argv[1]))
    for n in range(10**6):
        ledger.add_session(SessionRow(f"s{n}", "ann", 1.0, 1.0))
        print(n, flush=True)
"""


def test_what_was_written_survives_a_kill(path):
    command = [sys.executable, "-c", textwrap.dedent(_WRITER), str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        for _ in range(100):
            next(writer.stdout)
        writer.send_signal(signal.SIGKILL)
        last = [100, *(int(line) for line in writer.stdout if line.endswith("\n"))][-1]
    with closing(Ledger(path)) as ledger:
        assert ledger.sessions(ANN, limit=1).total >= last


def test_runs_are_found_by_what_is_known_of_them_and_in_any_order(ledger: Ledger):
    now = 1000.0
    ledger.add_session(SessionRow("s", "ann", 1.0, 950.0))
    ledger.add_session(SessionRow("t", "ann", 1.0, 100.0))
    ledger.add_session(SessionRow("u", "bob", 1.0, 950.0))
    ledger.add_run(run("s", 0, at=990.0, name="first 100%", tags=["math", "é"], steps=7))
    ledger.add_run(run("s", 1, at=500.0, name="first_100x", steps=3, loss=0.5))
    ledger.add_run(run("t", 0, at=100.0, tags=["maths"], steps=9, loss=0.1))
    ledger.add_run(run("u", 0, at=990.0, owner="bob"))
    for number, end in enumerate(("finished", "interrupted", "failed"), 2):
        ledger.add_run(run("s", number, at=10.0 * number, ended=end))
    ledger.add_run(run("s", 9, at=1.0, ended="finished", corrupted=True))

    def found(**query: Any) -> list[str]:
        asked = RunQuery(active_since=now - 60, heard_since=now - 300, **query)
        page = ledger.find_runs(asked, Scope("ann"), limit=50)
        assert page.total == len(page.rows)
        return [row.run_id for row in page.rows]

    assert found(text="00%") == ["s:train:0"], "a wildcard is a character like any other"
    assert found(text="T_100") == ["s:train:1"]
    assert found(tag="math") == ["s:train:0"]
    assert found(tag="é") == ["s:train:0"]
    assert found(state="running") == ["s:train:0"]
    assert found(state="idle") == ["s:train:1"]
    assert found(state="idle", busy=("s:train:1",)) == []
    assert found(state="interrupted") == ["t:train:0", "s:train:3"], "one of them is not heard of any more"
    assert found(state="finished") == ["s:train:2"]
    assert found(state="failed") == ["s:train:4", "s:train:9"]
    assert found(order="steps")[:3] == ["t:train:0", "s:train:0", "s:train:1"]
    assert found(order="loss", descending=False)[:2] == ["t:train:0", "s:train:1"], "those without come last"
    second = ledger.find_runs(RunQuery(order="steps"), Scope("ann"), limit=1, offset=1)
    assert ([row.run_id for row in second.rows], second.total) == (["s:train:0"], 7)


def test_a_run_is_called_by_its_name_or_by_the_beginning_of_its_id(ledger: Ledger):
    for session, owner in (("abc", "ann"), ("abd", "ann"), ("xyz", "bob")):
        ledger.add_session(SessionRow(session, owner, 1.0, 1.0))
        ledger.add_run(run(session, 0, owner=owner, name="mine"))
    called = ledger.runs_called
    assert [row.run_id for row in called("abc", Scope("ann"))] == ["abc:train:0"]
    assert len(called("ab", Scope("ann"))) == len(called("mine", Scope("ann"))) == 2
    assert called("xyz", Scope("ann")) == []
    assert [row.run_id for row in called("mine", Scope("bob"))] == ["xyz:train:0"]


def test_a_run_is_deleted_with_its_unnamed_samplers_alone(ledger: Ledger):
    ledger.add_session(SessionRow("s", "ann", 1.0, 1.0))
    for number in (1, 11):
        ledger.add_run(run("s", number))
        place = f"runs/s/train-{number}/ephemeral/0"
        ledger.add_sampler(SamplerRow(f"s:sample:{number}", "s", "ann", "tiny", 1.0, adapter_dir=place))
    assert ledger.delete_run("s:train:1")
    assert [row.sampler_id for row in ledger.samplers_of_session("s")] == ["s:sample:11"]

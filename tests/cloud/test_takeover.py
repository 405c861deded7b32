"""Several services on one Postgres and one store: whose session it is, takeovers, and owners that wake up."""

from __future__ import annotations

import asyncio

import psycopg
import pytest

from tests.cloud.shared_services import LEASE, dead, end, member, stall
from tests.service.harness import MODEL, User, config, datum, serving, until
from tinkex import store
from tinkex.engine.fake import FakeEngine
from tinkex.errors import InvalidInputError
from tinkex.service import shared_commit
from tinkex.service.commit_log import CommitLog, Piece, SealedError, forget, seal, write_pieces
from tinkex.service.peers import Elsewhere
from tinkex.service.refusal import Refusal
from tinkex.service.service import Service
from tinkex.types import checkpoints, sessions, training
from tinkex.wire import ops

pytestmark = [pytest.mark.slow, pytest.mark.anyio]


async def test_a_session_is_its_owners_and_everybody_sees_what_was_acknowledged(tmp_path, postgres, root):
    async with member(tmp_path / "a", postgres, root) as a, member(tmp_path / "b", postgres, root) as b:
        ann, there = User(a), User(b)
        session = await ann.session(display_name="mine")
        run = await ann.run(session)
        await ann.train(run, 1, 2)
        path = await ann.save(run, 5, "one")
        found = await there.call(ops.SEARCH_SESSIONS, sessions.SessionSearchRequest())
        assert [row.display_name for row in found.sessions] == ["mine"]
        listed = await there.call(ops.LIST_USER_CHECKPOINTS, checkpoints.ListUserCheckpointsRequest())
        assert [row.tinker_path for row in listed.checkpoints] == [path]
        assert a.peers is not None
        await until(lambda: a.peers.server in b.peers._live)
        with pytest.raises(Elsewhere):
            await there.forward_backward(run, 6)
        other = await there.run()  # a session of b's own may load what a's has saved
        await there.load(other, 1, path, optimizer=True)
        assert await there.loss(other, 2) == await ann.loss(run, 6)


async def test_a_dead_servers_runs_go_on_as_if_nothing_had_happened(tmp_path, postgres, root):
    async with serving(tmp_path / "calm") as calm:
        someone = User(calm)
        run = await someone.run(seed=7)
        expected = await someone.train(run, 1, 6)
    a = await dead(tmp_path / "a", postgres, root, snapshot_steps=2)
    ann = User(a)
    run = await ann.run(seed=7)
    losses = await ann.train(run, 1, 3)
    promise = await ann.forward_backward(run, 7, datum(3))  # acknowledged, and perhaps never executed
    stall(a)
    async with member(tmp_path / "b", postgres, root) as b:
        there = User(b)
        began = asyncio.get_running_loop().time()
        await until(lambda: b.peers.owns(run.partition(":")[0]), LEASE + 5)
        assert asyncio.get_running_loop().time() - began < LEASE + 5
        losses.append((await there.result(promise)).metrics["loss:sum"])
        for n, seq in ((4, 8), (5, 10)):
            await there.step(run, seq)
            passed = await there.result(await there.forward_backward(run, seq + 1, datum(n)))
            losses.append(passed.metrics["loss:sum"])
        assert losses == expected
        assert b.ledger.lease(run.partition(":")[0]).epoch == 2
    await end(a)


@pytest.mark.parametrize("first", ["log", "ledger"])
async def test_an_owner_that_wakes_up_is_refused_and_changes_nothing(tmp_path, postgres, root, first):
    a = await dead(tmp_path / "a", postgres, root)
    ann = User(a)
    session = await ann.session()
    run = await ann.run(session)
    losses = await ann.train(run, 1, 2)
    path = await ann.save(run, 5, "one")
    stall(a)
    async with member(tmp_path / "b", postgres, root) as b:
        await until(lambda: b.peers.owns(session), LEASE + 5)
        # It does not know yet: its mirror says that the session is its own.
        assert a.peers.owns(session)
        with pytest.raises(Refusal, match="start it again") as refused:
            await (ann.forward_backward(run, 6) if first == "log" else ann.session())
        assert refused.value.status == 503
        assert await ann.status_of(ops.SET_CHECKPOINT_TTL, _ttl(path)) == 503
        await until(a.peers.lost.is_set)
        assert "start it again" in a.peers.why_lost
        there = User(b)
        assert await there.loss(run, 6) < losses[0]  # the seq id is free: nothing of a's was taken
        listed = await there.call(ops.LIST_USER_CHECKPOINTS, checkpoints.ListUserCheckpointsRequest())
        assert [row.expires_at for row in listed.checkpoints] == [None]
    await end(a)


def _ttl(path: str) -> checkpoints.SetCheckpointTTLRequest:
    run, _, name = path.removeprefix("tinker://").partition("/")
    return checkpoints.SetCheckpointTTLRequest(training_run_id=run, checkpoint_id=name, ttl_seconds=7200)


async def test_a_server_that_starts_again_on_its_home_goes_on_at_once(tmp_path, postgres, root):
    for n in range(3):  # and one that stopped in good order leaves nothing to wait for
        async with member(tmp_path / "a", postgres, root, lease=600.0) as a:
            ann = User(a)
            if not n:
                run = await ann.run()
            before = await ann.loss(run, 1 + 4 * n)
            await ann.train(run, 2 + 4 * n, 1)
            assert await ann.loss(run, 4 + 4 * n) < before
    async with member(tmp_path / "other", postgres, root) as b:
        await until(lambda: b.peers.owns(run.partition(":")[0]), 5)
        got = await User(b).call(ops.GET_TRAINING_RUN, training.GetTrainingRunRequest(training_run_id=run))
        assert got.base_model == MODEL
    assert [name for name in store.files(root) if name.startswith("journal/")] != []


async def test_samples_of_a_dead_server_are_reported_so_that_clients_sample_again(tmp_path, postgres, s3):
    a = await dead(tmp_path / "a", postgres, s3)
    ann = User(a)
    sampler = await ann.sampler(await ann.session())
    promise = await ann.sample(sampler)
    await ann.session()  # the next commit has the list of samples too
    stall(a)
    async with member(tmp_path / "b", postgres, s3) as b:
        await until(lambda: b.peers.owns(sampler.partition(":")[0]), LEASE + 5)
        await until(lambda: b.completions.is_open(f"{sampler}#0"), 5)
        with pytest.raises(Refusal) as refused:
            await User(b).result(promise)
        assert refused.value.status == 410
        assert (await User(b).result(await User(b).sample(sampler))).sequences
    await end(a)


async def test_one_database_has_one_store(tmp_path, postgres):
    async with member(tmp_path / "a", postgres, str(tmp_path / "one")):
        with pytest.raises(InvalidInputError, match="belongs to another store"):
            Service(config(tmp_path / "b", ledger=postgres, store=str(tmp_path / "two")), FakeEngine)
        with pytest.raises(InvalidInputError, match="needs --store"):
            Service(config(tmp_path / "c", ledger=postgres), FakeEngine)


def _fails_the_second_time():
    remove, calls = store.remove_file, []

    def remove_file(location: str) -> None:
        calls.append(location)
        if len(calls) > 1:
            raise InterruptedError
        remove(location)

    return remove_file


def test_a_log_that_is_sealed_takes_nothing_more(root, tmp_path, monkeypatch):
    log = CommitLog(root, "a")
    log.append([Piece("runs/x", 0, b"abc"), Piece("runs/y", 0, b"1")])
    log.append([Piece("runs/x", 3, b"def")])
    log.begin_anew([Piece("runs/x", 0, b"abcdef")])
    log.append([Piece("runs/x", 6, b"ghi"), Piece("runs/z", 0, b"2")])
    log.append([Piece("runs/z", -1, b"")])
    pieces = seal(root, "a", "b")
    assert write_pieces(tmp_path / "home", pieces) == {tmp_path / "home/runs/x"}
    assert (tmp_path / "home/runs/x").read_bytes() == b"abcdefghi"
    assert not (tmp_path / "home/runs/y").exists()
    with pytest.raises(SealedError):
        log.append([Piece("runs/x", 9, b"late")])
    assert seal(root, "a", "c") == pieces  # whoever reads it later reads the same
    assert seal(root, "never-wrote", "b") == []
    with monkeypatch.context() as killed:  # while it deletes
        killed.setattr(store, "remove_file", _fails_the_second_time())
        with pytest.raises(InterruptedError):
            forget(root, "a")
    assert seal(root, "a", "c") == []  # it is on another log by then
    forget(root, "a")
    with pytest.raises(SealedError):  # however late it comes
        log.append([Piece("runs/x", 9, b"late")])
    assert seal(root, "a", "c") == []


async def test_a_log_begins_anew_and_loses_nothing(tmp_path, postgres, monkeypatch):
    monkeypatch.setattr(shared_commit, "LOG_BYTES", 2_000)
    root = str(tmp_path / "store")
    a = await dead(tmp_path / "a", postgres, root, snapshot_steps=3)
    ann = User(a)
    run = await ann.run()
    for n in range(30):
        await ann.train(run, 1 + 2 * n, 1)
    before = await ann.loss(run, 61)
    numbers = [int(name[-8:]) for name in store.files(root) if name.startswith("journal/")]
    assert min(numbers) > 1
    stall(a)
    async with member(tmp_path / "b", postgres, root) as b:
        await until(lambda: b.peers.owns(run.partition(":")[0]), LEASE + 5)
        assert await User(b).loss(run, 62) == before
    await end(a)


async def test_the_event_loop_never_waits_for_the_database(tmp_path, postgres):
    async with member(tmp_path / "a", postgres, str(tmp_path / "store"), lease=60.0) as a:
        ann = User(a)
        session = await ann.session()
        with psycopg.connect(postgres) as held:
            held.execute("SELECT pg_advisory_xact_lock(%s)", [0x54494E4C])  # what every writer waits for
            waiting = asyncio.create_task(ann.session())
            gaps, last = [], asyncio.get_running_loop().time()
            for _ in range(100):
                await asyncio.sleep(0.01)
                await ann.call(ops.SESSION_HEARTBEAT, sessions.SessionHeartbeatRequest(session_id=session))
                now = asyncio.get_running_loop().time()
                gaps.append(now - last)
                last = now
            assert not waiting.done()  # nobody is told before it is committed
            assert sorted(gaps)[len(gaps) // 2] < 0.1
            held.rollback()
        assert await asyncio.wait_for(waiting, 30)

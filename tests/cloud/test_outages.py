"""Services on one Postgres and one store that are away, slow or silent: nobody ends, and nothing is lost."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack, closing
from pathlib import Path

import psycopg
import pytest

from tests.cloud.servers import Relay
from tests.cloud.shared_services import LEASE, dead, end, member, stall
from tests.service.harness import User, config, datum, until
from tinkex import store
from tinkex.errors import InvalidInputError
from tinkex.service import commit_log, peers
from tinkex.service.commit_log import CommitLog, Piece, SealedError, seal, write_pieces
from tinkex.service.ledger_postgres import Fenced, SharedDatabase
from tinkex.service.refusal import Refusal
from tinkex.service.service import Service
from tinkex.service.shared_commit import SharedCommit
from tinkex.store import StoreError
from tinkex.types import checkpoints
from tinkex.wire import ops

pytestmark = [pytest.mark.slow, pytest.mark.anyio]


@pytest.fixture
def relay(postgres) -> Iterator[Relay]:
    with closing(Relay(postgres)) as made:
        yield made


def session_of(run: str) -> str:
    return run.partition(":")[0]


def delayed(function, seconds: float):
    def slow(*arguments, **more):
        time.sleep(seconds)
        return function(*arguments, **more)

    return slow


def failing(function, times: int):
    """`function`, which the store does not answer for the first few times."""
    left = list(range(times))

    def flaky(*arguments, **more):
        if left:
            left.pop()
            raise StoreError("the store is away for a moment")
        return function(*arguments, **more)

    return flaky


def cut_short(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


async def keep_asking(service: Service, run: str, seq: int, seconds: float) -> list[str]:
    """Ask for a pass until it is accepted, as clients do; returns the refusals that were not 503."""
    user, wrong = User(service), list[str]()
    for _ in range(int(seconds / 0.02)):
        try:
            await user.result(await user.forward_backward(run, seq, datum(3)))
        except Exception as error:
            if not isinstance(error, Refusal) or error.status != 503:
                wrong.append(repr(error))
            await asyncio.sleep(0.02)
        else:
            return wrong
    return [*wrong, "it was never accepted"]


# -- takeovers -------------------------------------------------------------------------------------------


async def test_a_takeover_whose_first_try_fails_loses_no_run(tmp_path, postgres, root, monkeypatch):
    a = await dead(tmp_path / "a", postgres, root)
    run = await User(a).run()
    losses = await User(a).train(run, 1, 3)
    async with member(tmp_path / "b", postgres, root) as b:
        monkeypatch.setattr(commit_log, "seal", failing(seal, 2))
        stall(a)
        assert await keep_asking(b, run, 7, LEASE + 10) == []
        row = b.ledger.run(run)
        assert (row.corrupted, row.problem) == (False, "")
        assert await User(b).loss(run, 8) < losses[0]
    await end(a)


async def test_clients_that_ask_during_a_takeover_open_nothing_too_early(tmp_path, postgres, monkeypatch):
    root = str(tmp_path / "store")
    a = await dead(tmp_path / "a", postgres, root)
    run = await User(a).run()
    await User(a).train(run, 1, 3)
    monkeypatch.setattr(commit_log, "seal", delayed(seal, 0.4))
    for name in ("changes", "fence", "take_over"):
        monkeypatch.setattr(SharedDatabase, name, delayed(getattr(SharedDatabase, name), 0.1))
    async with member(tmp_path / "b", postgres, root) as b:
        stall(a)
        wrong = await asyncio.gather(*(keep_asking(b, run, 7, LEASE + 10) for _ in range(8)))
        assert wrong == [[]] * 8
        assert not b.ledger.run(run).corrupted
    await end(a)


async def test_a_run_whose_files_are_not_here_is_asked_for_again(tmp_path, postgres):
    """Should a session ever be owned before its files are here, its runs are not given up for that."""
    async with member(tmp_path / "a", postgres, str(tmp_path / "store")) as a:
        ann = User(a)
        run = await ann.run()
        await ann.train(run, 1, 1)
        await a.runs.evict(a.runs.get(run))
        journal = a.home.run_dir(run) / "journal"
        journal.rename(away := journal.with_name("away"))
        with pytest.raises(Refusal) as refused:
            await ann.forward_backward(run, 3)
        assert refused.value.status == 503
        assert not a.ledger.run(run).corrupted
        away.rename(journal)
        assert await ann.loss(run, 3) > 0


async def test_a_slow_takeover_costs_neither_the_heir_its_lease_nor_others_their_time(
    tmp_path, postgres, monkeypatch
):
    root = str(tmp_path / "store")
    a = await dead(tmp_path / "a", postgres, root)
    run = await User(a).run()
    losses = await User(a).train(run, 1, 2)
    restoring = threading.Event()

    def slow(*arguments):
        restoring.set()
        time.sleep(3 * LEASE)
        return seal(*arguments)

    monkeypatch.setattr(commit_log, "seal", slow)
    async with AsyncExitStack() as stack:
        others = [await stack.enter_async_context(member(tmp_path / n, postgres, root)) for n in "bc"]
        runs = [await User(one).run() for one in others]
        stall(a)
        await asyncio.to_thread(restoring.wait, LEASE + 5)
        began = time.monotonic()
        for n in range(5):
            for one, its_run in zip(others, runs, strict=True):
                await User(one).train(its_run, 1 + 2 * n, 1)
        assert time.monotonic() - began < 2 * LEASE  # nobody's own session waited for it
        await until(lambda: any(one.peers.owns(session_of(run)) for one in others), 4 * LEASE + 10)
        assert not any(one.peers.lost.is_set() for one in others)
        heir = next(one for one in others if one.peers.owns(session_of(run)))
        assert await User(heir).loss(run, 5) < losses[0]
    await end(a)


async def test_a_log_that_is_damaged_holds_up_no_other_and_loses_no_run(tmp_path, postgres, monkeypatch):
    root = str(tmp_path / "store")
    damaged, good = [await dead(tmp_path / name, postgres, root) for name in "ab"]
    runs = [await User(one).run() for one in (damaged, good)]
    for one, run in zip((damaged, good), runs, strict=True):
        await User(one).train(run, 1, 2)
    first = Path(commit_log.log_place(root, damaged.peers.server), "00000001")
    cut_short(first)
    async with member(tmp_path / "c", postgres, root) as c:
        for one in (damaged, good):
            stall(one)
        assert await keep_asking(c, runs[1], 5, LEASE + 10) == []
        with pytest.raises(Refusal) as refused:
            await User(c).forward_backward(runs[0], 5)
        assert refused.value.status == 503
        assert not c.ledger.run(runs[0]).corrupted
    for one in (damaged, good):
        await end(one)


# -- rows and journals -----------------------------------------------------------------------------------


@pytest.mark.parametrize("named", [True, False])
async def test_an_outcome_that_the_journal_has_has_its_row(tmp_path, postgres, root, monkeypatch, named):
    """The transaction with a save's row fails: then the heir saves again, before it says that it has."""
    a = await dead(tmp_path / "a", postgres, root)
    ann = User(a)
    run = await ann.run()
    await ann.train(run, 1, 2)
    ship, refused = SharedDatabase.ship, threading.Event()

    def fail(self, server, number, statements):
        if any("checkpoints" in sql or "samplers" in sql for sql, _ in statements):
            time.sleep(0.3)  # whatever is not in order is on the log by then
            refused.set()
            raise Fenced("it was taken over just now")
        return ship(self, server, number, statements)

    monkeypatch.setattr(SharedDatabase, "ship", fail)
    saving = asyncio.create_task(ann.save(run, 5, "one") if named else ann.unnamed_sampler(run, 5, 0))
    await until(refused.is_set, 5)
    await asyncio.wait([saving], timeout=5)
    assert saving.exception() is not None
    monkeypatch.setattr(SharedDatabase, "ship", ship)
    stall(a)
    async with member(tmp_path / "b", postgres, root) as b:
        there = User(b)
        await until(lambda: b.futures.get(f"{run}#5") is not None, LEASE + 5)
        told = await there.result(f"{run}#5")
        if named:
            listed = await there.call(ops.LIST_USER_CHECKPOINTS, checkpoints.ListUserCheckpointsRequest())
            assert [one.tinker_path for one in listed.checkpoints] == [told.path]
        else:
            assert b.ledger.sampler(told.sampling_session_id) is not None
            assert (await there.result(await there.sample(told.sampling_session_id))).sequences
    await end(a)


def test_what_is_written_while_a_round_begins_is_shipped_with_its_rows(tmp_path):
    """A file is read later than its round begins: with it go the rows that were written by then."""
    order: list[tuple[str, object]] = []

    class Database:
        def ship(self, server, number, statements):
            order.append(("rows", list(statements)))

    class Log:
        size = 0

        def append(self, pieces):
            order.append(("log", [piece.data for piece in pieces]))

    commit = SharedCommit(tmp_path, Log(), Database(), "a", pytest.fail)  # type: ignore[arg-type]
    file = tmp_path / "runs/x"
    file.parent.mkdir()
    file.write_bytes(b"accepted ")
    commit.wrote(file)
    work = commit._take()
    commit.statements([("INSERT …", [])])
    file.write_bytes(b"accepted saved")
    work()
    assert order == [("rows", [("INSERT …", [])]), ("log", [b"accepted saved"])]
    commit.close()


def test_a_deleted_file_is_told_before_its_name_is_used_again(tmp_path):
    kept = list[Piece]()

    class Log:
        size = 0
        append = kept.extend

    commit = SharedCommit(tmp_path, Log(), None, "a", pytest.fail)  # type: ignore[arg-type]
    file = tmp_path / "requests-000001.log"
    file.write_bytes(b"old")
    commit.wrote(file)
    commit._take()()
    file.unlink()
    commit.wrote(file)
    assert commit.names(file)
    commit._take()()
    assert not commit.names(file)
    file.write_bytes(b"longer than before")
    commit.wrote(file)
    commit._take()()
    assert write_pieces(tmp_path / "heir", kept) == {tmp_path / "heir" / file.name}
    assert (tmp_path / "heir" / file.name).read_bytes() == b"longer than before"
    commit.close()


async def test_segments_that_a_snapshot_covers_are_not_brought_back(tmp_path, postgres):
    root = str(tmp_path / "store")
    a = await dead(tmp_path / "a", postgres, root, snapshot_steps=2)
    ann = User(a)
    run = await ann.run()
    await ann.train(run, 1, 8)
    await a.runs.get(run).committed()
    await a.disk.synced()
    journal = a.home.run_dir(run) / "journal"
    there = {path.name for path in journal.glob("*.log")}
    stall(a)
    pieces = await asyncio.to_thread(seal, root, a.peers.server, "b")
    write_pieces(tmp_path / "heir", pieces)
    heir = tmp_path / "heir" / journal.relative_to(a.home.root)
    assert {path.name for path in heir.glob("*.log")} == there
    await end(a)


# -- outages ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("what", ["database", "store"])
async def test_an_outage_longer_than_the_lease_ends_nobody(tmp_path, relay, monkeypatch, what, count):
    root = str(tmp_path / "store")
    async with AsyncExitStack() as stack:
        services = [
            await stack.enter_async_context(member(tmp_path / f"s{n}", relay.url, root)) for n in range(count)
        ]
        runs = [await User(one).run() for one in services]
        create, away = store.create_file, threading.Event()

        def create_file(*arguments, **more):
            if away.is_set():
                raise StoreError("the store is away")
            return create(*arguments, **more)

        monkeypatch.setattr(store, "create_file", create_file)
        relay.cut() if what == "database" else away.set()
        waiting = [asyncio.create_task(User(one).session()) for one in services]
        waiting += [
            asyncio.create_task(User(one).forward_backward(run, 1))
            for one, run in zip(services, runs, strict=True)
        ]
        await asyncio.sleep(3 * LEASE)
        relay.mend()
        away.clear()
        await asyncio.wait_for(asyncio.gather(*waiting), 20)
        await asyncio.sleep(2 * LEASE)  # time enough to take over from each other
        assert not any(one.peers.lost.is_set() for one in services)
        for one, run in zip(services, runs, strict=True):
            assert one.peers.owns(session_of(run))
            assert await User(one).loss(run, 2) > 0


async def test_connections_on_which_nothing_comes_are_given_up(tmp_path, relay):
    """A network that drops packets ends no connection: it is noticed before the lease runs out."""
    async with member(tmp_path / "a", relay.url, str(tmp_path / "store"), lease=3.0) as a:
        session = await User(a).session()
        others = SharedDatabase(relay.url, silence=0.5)
        relay.silence()
        began = time.monotonic()
        assert others.live() == [""]  # its pool's connection is given up, and another one asked
        assert time.monotonic() - began < 5
        await asyncio.sleep(3.5)
        assert others.live() == [""]  # and so has the server renewed its lease
        others.close()
        assert not a.peers.lost.is_set()
        assert a.peers.owns(session)


async def test_who_stands_still_in_a_transaction_holds_nobody_up_for_long(postgres):
    database = SharedDatabase(postgres)
    with database._transaction(60.0) as db:  # as a server that was stopped in the middle of its commit
        db.execute("SELECT pg_advisory_xact_lock(%s)", [0x54494E4C])
        with closing(SharedDatabase(postgres)) as other:
            began = time.monotonic()
            other.write([("INSERT INTO sessions SELECT 's', 'ann', 1, 1, NULL, '', NULL, NULL, '', ''", [])])
            assert time.monotonic() - began < 6
        with pytest.raises(psycopg.Error):
            db.execute("SELECT 1")
    database.close()


# -- starting --------------------------------------------------------------------------------------------


async def test_two_servers_at_one_url_are_told(tmp_path, postgres, monkeypatch):
    monkeypatch.setattr(peers, "TICK", 0.05)
    with closing(SharedDatabase(postgres)) as database:
        assert database.register("a", "http://127.0.0.1:8000", 0.2)
        assert not database.register("b", "http://127.0.0.1:8000", 60.0)
        assert database.register("b", "http://127.0.0.1:8001", 60.0)
        await asyncio.sleep(0.3)  # a's lease has run out
        assert database.register("c", "http://127.0.0.1:8000", 60.0)
        assert database.register("d", "http://127.0.0.1:8000", 60.0, before="c")


async def test_a_server_at_the_url_of_a_live_one_does_not_start(tmp_path, postgres, monkeypatch):
    monkeypatch.setattr(peers, "TICK", 0.05)
    settings = config(tmp_path / "b", ledger=postgres, store=str(tmp_path / "store"), lease=0.3)
    with closing(SharedDatabase(postgres)) as database:
        assert database.register("a", "http://127.0.0.1:8000", 60.0)
    late = peers.Peers(settings, "http://127.0.0.1:8000")
    with pytest.raises(InvalidInputError, match="--peer-url"):
        await late.start()
    late.close()


async def test_a_copy_of_the_ledger_that_followed_nothing_for_long_is_read_anew(
    tmp_path, postgres, monkeypatch
):
    """Loading models took so long that changes were dropped which this server never saw."""
    root = str(tmp_path / "store")
    async with member(tmp_path / "a", postgres, root) as a:
        kept, gone = await User(a).session(), await User(a).session()
        late = peers.Peers(config(tmp_path / "b", ledger=postgres, store=root, lease=LEASE), "")
        a.ledger.delete_session(gone)
        new = await User(a).session()
        with psycopg.connect(postgres) as db:
            db.execute("DELETE FROM changes")
        monkeypatch.setattr(peers, "STALE", 0.0)
        await late.start()
        assert [late.ledger.session(one) is not None for one in (kept, gone, new)] == [True, False, True]
        await late.stop()
        late.commit.close()
        late.ledger.close()
        late.close()


# -- the log ---------------------------------------------------------------------------------------------


def test_an_append_of_several_objects_is_taken_up_where_an_answer_was_lost(tmp_path, monkeypatch):
    root, create, calls = str(tmp_path), store.create_file, []

    def create_file(location, content, **more):
        create(location, content, **more)
        calls.append(location)
        if len(calls) == 2:
            raise StoreError("the answer was lost")

    monkeypatch.setattr(store, "create_file", create_file)
    monkeypatch.setattr(commit_log, "OBJECT_BYTES", 4)
    log, pieces = CommitLog(root, "a"), [Piece(f"runs/{n}", 0, b"12345") for n in range(3)]
    log.append(pieces)
    assert seal(root, "a", "b") == pieces
    with pytest.raises(SealedError):
        log.append(pieces)


def test_a_log_begins_anew_without_having_all_files_in_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(commit_log, "OBJECT_BYTES", 1000)
    log, held, most = CommitLog(str(tmp_path), "a"), [], []
    written = log._create

    def create(pieces):
        most.append(len(held))
        written(pieces)
        held.clear()

    def pieces():
        for n in range(100):
            held.append(n)
            yield Piece(f"runs/{n}", 0, b"x" * 100)

    monkeypatch.setattr(log, "_create", create)
    log.begin_anew(pieces())
    assert max(most) <= 11
    assert len(seal(str(tmp_path), "a", "b")) == 100


# -- a run that is opened ----------------------------------------------------------------------------------


async def test_a_request_that_comes_just_as_a_run_was_looked_at_opens_it(tmp_path, postgres):
    async with member(tmp_path / "a", postgres, str(tmp_path / "store")) as a:
        run = await User(a).run()
        await a.runs.evict(a.runs.get(run))

        async def left_on_disk() -> None:
            pass

        looking = asyncio.create_task(left_on_disk())
        a.runs._opening[run] = looking
        looking.add_done_callback(lambda _: a.runs._opening.pop(run))
        found = await asyncio.create_task(a.runs.find(a.ledger.run(run)))
        assert found.id == run

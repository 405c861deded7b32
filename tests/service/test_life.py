"""How sessions, runs and what they leave come and go while a service lives."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.service.harness import MODEL, Failed, Slow, User, datum, found, serving, until
from tinkex.engine.fake import FakeEngine
from tinkex.errors import TinkerError
from tinkex.service.refusal import Refusal
from tinkex.service.rows import SamplerRow
from tinkex.service.service import Service
from tinkex.types import futures, sessions, training
from tinkex.types.config import EmptyRequest
from tinkex.wire import ops

pytestmark = pytest.mark.anyio


def live(service: Service) -> int:
    engine = service.models.find(MODEL).engine
    return 0 if engine is None else int(engine.heartbeat().stats["adapters_live"])


def silence(service: Service, session: str, seconds: float) -> None:
    """As if the session had not been heard of for that long."""
    service.activity.flush()
    service.activity.seen[session] = time.time() - seconds
    service.ledger.update_session(session, last_seen_at=time.time() - seconds)


async def test_a_home_has_one_owner(home: Path):
    async with serving(home):
        with pytest.raises(TinkerError, match="in use by another process"):
            async with serving(home):
                pass
    async with serving(home):
        pass


async def test_what_was_half_written_is_removed_and_nothing_else(home: Path):
    async with serving(home):
        run = home / "runs" / "s" / "train-0"
    kept = [run / "weights" / "mid", run / "weights" / ".hidden", run / "journal" / "part-000001-3"]
    for path in (*kept, run / "ephemeral" / ".0.660c9216.tmp", run / "weights" / ".mid.part"):
        path.mkdir(parents=True)
        (path / "adapter_config.json").write_text("{}")
    async with serving(home):
        assert sorted(path.parent for path in run.rglob("*.json")) == sorted(kept)


async def test_what_an_overwriting_save_was_killed_in_is_there_again(home: Path):
    """The engine moves the old one aside, and the new one into its place: two renames."""
    async with serving(home):
        run = home / "runs" / "s" / "train-0" / "weights"
    names = {".a.660c9216.old": "old", ".b.c.12ab34cd.old": "old", "b.c": "new"}
    for name, content in names.items():
        (run / name).mkdir(parents=True)
        (run / name / "adapter_config.json").write_text(content)
    async with serving(home):
        kept = {path.parent.name: path.read_text() for path in run.rglob("*.json")}
    assert kept == {"a": "old", "b.c": "new"}


async def test_a_damaged_journal_goes_with_its_session(home: Path):
    async with serving(home) as service:
        user = User(service)
        run, other = await user.run(), await user.run()
        await user.result(await user.forward_backward(run, 1))
    for segment in (home / "runs" / run.split(":")[0]).rglob("requests-*.log"):
        segment.write_bytes(b"nonsense")
    async with serving(home) as service:
        user = User(service)
        for name in (run, other):
            await user.finish(name.split(":")[0])
        await service.upkeep.tick()
        assert found(home, "journal*") == []


async def test_a_service_that_cannot_start_lets_go_of_its_home(tmp_path: Path):
    home = tmp_path
    (home / "ledger.sqlite").write_bytes(b"not a database" * 100)
    with pytest.raises(TinkerError, match=r"ledger\.sqlite"):
        async with serving(home):
            pass
    (home / "ledger.sqlite").unlink()
    async with serving(home):
        pass


@pytest.mark.parametrize("with_gradients", [False, True])
async def test_a_lapsed_sessions_runs_go_to_disk_and_come_back(
    user: User, service: Service, with_gradients: bool
):
    run, twin = await user.run(), await user.run()
    promises = []
    for name in (run, twin):
        await user.train(name, 1, 3)
        if with_gradients:
            promises.append(await user.forward_backward(name, 7, datum(9)))
            await user.result(promises[-1])
    silence(service, run.split(":")[0], 1000)
    await service.upkeep.tick()
    assert live(service) == 1
    assert service.ledger.run(run).state == "evicted"  # type: ignore[union-attr]
    first = 8 if with_gradients else 7
    outcomes = []
    for name in (run, twin):
        outcomes.append((await user.result(await user.step(name, first))).metrics)
        outcomes.append(await user.train(name, first + 1, 2))
    assert outcomes[:2] == outcomes[2:]
    assert live(service) == 2
    if with_gradients:  # and its older results are where they were
        assert (await user.forward_backward(run, 7, datum(9))).request_id == promises[0].request_id


async def test_results_of_a_run_on_disk_can_be_fetched(user: User, service: Service):
    run = await user.run()
    promise = await user.forward_backward(run, 1)
    loss = (await user.result(promise)).metrics
    silence(service, run.split(":")[0], 1000)
    await service.upkeep.tick()
    service.futures.drop([promise.request_id])
    assert (await user.result(promise)).metrics == loss


async def test_a_heartbeat_keeps_a_session(user: User, service: Service):
    run = await user.run()
    session = run.split(":")[0]
    silence(service, session, 1000)
    await user.call(ops.SESSION_HEARTBEAT, sessions.SessionHeartbeatRequest(session_id=session))
    await service.upkeep.tick()
    assert live(service) == 1


async def test_when_a_session_ends_its_runs_and_unnamed_samplers_are_cleaned_away(
    user: User, service: Service, home: Path
):
    run = await user.run()
    session = run.split(":")[0]
    await user.train(run, 1, 2)
    sampler = await user.unnamed_sampler(run, 5, 0)
    path = await user.save(run, 6, "kept")
    assert found(home, "ephemeral/*")
    await user.call(ops.EXPORT_SESSION_TRACE, sessions.ExportSessionTraceRequest(session_id=session))
    assert found(home, "traces/*")
    await user.finish(session)
    heartbeat = sessions.SessionHeartbeatRequest(session_id=session)
    assert await user.status_of(ops.SESSION_HEARTBEAT, heartbeat) == 410
    await service.upkeep.tick()
    assert live(service) == 0
    assert found(home, "ephemeral/*") == []
    assert found(home, "journal") == []
    assert found(home, "traces/*") == []
    with pytest.raises(Refusal, match="ended with its session") as refused:
        await user.forward_backward(run, 7)
    assert refused.value.status == 410
    with pytest.raises(Refusal):
        await user.sample(sampler)
    fresh = await user.run()
    await user.load(fresh, 1, path)


async def test_what_was_asked_before_the_end_is_still_done(home: Path):
    async with serving(home, Slow) as service:
        user = User(service)
        run = await user.run()
        promise = await user.forward_backward(run, 1)
        saving = asyncio.ensure_future(user.save(run, 2, "last"))
        await asyncio.sleep(0.01)
        await user.finish(run.split(":")[0])
        await service.upkeep.tick()  # too early to clean up
        await user.result(promise)
        assert await saving == f"tinker://{run}/weights/last"
        await service.upkeep.tick()
        assert service.ledger.run(run).state == "closed"  # type: ignore[union-attr]


async def test_a_session_not_heard_of_for_days_ends(home: Path):
    async with serving(home, session_lapse=0.0, session_expiry=3600.0) as service:
        user = User(service)
        run = await user.run()
        silence(service, run.split(":")[0], 4000)
        await service.upkeep.tick()
        found = await user.call(
            ops.SEARCH_SESSIONS, sessions.SessionSearchRequest(session_id=run.split(":")[0])
        )
        assert found.sessions[0].status.type == "cancelled"
        assert service.ledger.run(run).state == "closed"  # type: ignore[union-attr]


async def test_a_laptop_that_slept_for_long_finds_its_sessions_and_samplers(
    user: User, service: Service, monkeypatch: pytest.MonkeyPatch
):
    """Its clients slept with it: when it wakes up, they have not been heard of for days, and will be."""
    run = await user.run()
    losses = await user.train(run, 1, 2)
    samplers = [await user.unnamed_sampler(run, 5 + n, n) for n in range(2)]
    clock = time.time
    monkeypatch.setattr(time, "time", lambda: clock() + 30 * 24 * 3600.0)
    await service.upkeep.tick()
    await service.upkeep.tick()
    heartbeat = sessions.SessionHeartbeatRequest(session_id=run.split(":")[0])
    assert await user.status_of(ops.SESSION_HEARTBEAT, heartbeat) == 200
    assert (await user.train(run, 7, 1))[0] < losses[0]
    for sampler in samplers:
        assert (await user.result(await user.sample(sampler))).sequences


async def test_adapters_of_a_base_model_that_is_gone_are_removed_too(home: Path):
    async with serving(home) as service:
        user = User(service)
        run = await user.run()
        await user.unnamed_sampler(run, 1, 0)
        await user.unnamed_sampler(run, 2, 1)
    async with serving(home, models={"m/other": "fake"}) as service:
        await User(service).finish(run.split(":")[0])
        await service.upkeep.tick()
        assert found(home, "ephemeral/*") == []


async def test_unused_samplers_are_removed_superseded_ones_sooner(home: Path):
    async with serving(home, keep_superseded=100.0, keep_unused=1000.0) as service:
        user = User(service)
        run = await user.run()
        samplers = [await user.unnamed_sampler(run, n + 1, n) for n in range(3)]
        await user.result(await user.sample(samplers[0]))
        ago = time.time() - 500
        for sampler in samplers:
            service.ledger._update(SamplerRow, "sampler_id = ?", [sampler], {"created_at": ago})
        service.activity.awake_since = ago
        await service.upkeep.tick()
        left = [row.sampler_id for row in service.ledger.samplers_of_session(run.split(":")[0])]
        assert left == [samplers[0], samplers[2]]  # used just now; the newest
        assert len(found(home, "ephemeral/*")) == 2


class Small(FakeEngine):
    """Has room for two adapters."""

    def heartbeat(self):
        beat = super().heartbeat()
        stats = {**beat.stats, "adapter_bytes": 1000 * beat.stats["adapters_live"]}
        return replace(beat, stats=stats, memory={"adapters": 2000})


async def test_adapters_beyond_the_plan_go_to_disk_least_used_first(home: Path):
    async with serving(home, Small) as service:
        user = User(service)
        runs = []
        for _ in range(4):
            runs.append(await user.run())
            await user.train(runs[-1], 1, 1)
            assert live(service) <= 2
        states = [service.ledger.run(run).state for run in runs]  # type: ignore[union-attr]
        assert states == ["evicted", "evicted", "live", "live"]
        # All go on as if nothing had been, in whatever order.
        losses = [await user.train(run, 3, 2) for run in (runs[1], runs[3], runs[0], runs[2])]
        assert all(loss == losses[0] for loss in losses)
        assert live(service) <= 2


async def test_the_adapter_of_a_failed_run_counts_until_it_is_evicted(home: Path):
    async with serving(home, Small) as service:
        user = User(service)
        failed, other = await user.run(), await user.run()
        service.runs.get(failed).cannot_restore("a replayed pass failed", "server")  # type: ignore[union-attr]
        await user.train(other, 1, 1)
        await user.run()
        assert live(service) <= 2
        assert service.runs.get(failed) is None
        assert service.runs.get(other) is not None


async def test_many_runs_at_once_on_a_small_device(home: Path):
    async with serving(home, Small) as service:
        users = [User(service, f"user {n}") for n in range(5)]
        runs = [await user.run() for user in users]
        losses = await asyncio.gather(*(user.train(run, 1, 6) for user, run in zip(users, runs, strict=True)))
        assert all(loss == losses[0] for loss in losses)


async def test_requests_and_evictions_may_cross(home: Path):
    async with serving(home) as service:
        user = User(service)
        run, twin = await user.run(), await user.run()
        at_hand = service.runs.get
        stop = False

        async def keep_evicting() -> None:
            while not stop:
                if (found := at_hand(run)) is not None:
                    await service.runs.evict(found)
                await asyncio.sleep(0)

        evicting = asyncio.ensure_future(keep_evicting())
        losses = []
        for n in range(12):
            losses += await user.train(run, 1 + 4 * n, 2)
        stop = True
        await evicting
        expected = []
        for n in range(12):
            expected += await user.train(twin, 1 + 4 * n, 2)
        assert losses == expected


async def test_unloading_frees_the_device_and_loses_nothing(user: User, service: Service):
    run = await user.run()
    losses = await user.train(run, 1, 2)
    await user.result(await user.step(run, 4))  # the last one, which was sent before
    request = training.UnloadModelRequest(model_id=run)
    assert (await user.result(await user.call(ops.UNLOAD_MODEL, request))).model_id == run
    assert live(service) == 0
    assert (await user.train(run, 5, 1))[0] < losses[0]


async def test_results_are_kept_until_they_expire(home: Path):
    async with serving(home, keep_results=1000.0, keep_delivered=10.0) as service:
        user = User(service)
        run = await user.run()
        fetched, unfetched = await user.forward_backward(run, 1), await user.forward_backward(run, 2)
        await user.result(fetched)
        await until(lambda: service.futures.get(unfetched.request_id).done)  # type: ignore[union-attr]
        await user.step(run, 3)
        now = time.monotonic()
        service.expire_results(now + 5)
        await user.result(fetched)  # the first answer may have been lost
        service.expire_results(now + 100)
        assert (
            await user.status_of(ops.RETRIEVE_FUTURE, futures.FutureRetrieveRequest(fetched.request_id))
            == 410
        )
        await user.result(unfetched)
        service.expire_results(now + 2000)
        gone = futures.FutureRetrieveRequest(unfetched.request_id)
        assert await user.status_of(ops.RETRIEVE_FUTURE, gone) == 410


async def test_a_model_that_cannot_be_loaded_says_why(home: Path):
    def broken(config):
        raise OSError("no such weights")

    async with serving(home, broken) as service:
        user = User(service)
        session = await user.session()
        await user.call(ops.GET_HEALTH, EmptyRequest())  # nobody has tried yet
        request = training.CreateModelRequest(session_id=session, model_seq_id=0, base_model=MODEL)
        with pytest.raises(Failed, match="m/base could not be loaded: no such weights") as failed:
            await user.result(await user.call(ops.CREATE_MODEL, request))
        assert failed.value.category == "server"
        sampler = await user.sampler(session)
        with pytest.raises(Failed, match="could not be loaded"):
            await user.result(await user.sample(sampler))
        with pytest.raises(Refusal, match="m/base could not be loaded: no such weights") as sick:
            await user.call(ops.GET_HEALTH, EmptyRequest())
        assert sick.value.status == 503


async def test_while_a_model_loads_its_futures_say_so(home: Path):
    def slow(config):
        time.sleep(0.3)
        return FakeEngine(config)

    async with serving(home, slow, long_poll=0.05) as service:
        user = User(service)
        request = training.CreateModelRequest(
            session_id=await user.session(), model_seq_id=0, base_model=MODEL
        )
        promise = await user.call(ops.CREATE_MODEL, request)
        pending = await user.call(ops.RETRIEVE_FUTURE, futures.FutureRetrieveRequest(promise.request_id))
        assert pending.queue_state == "paused_capacity"
        assert pending.queue_state_reason == "the base model m/base is being loaded"

"""What a killed process leaves is enough: runs, results and samplers are as if nothing had happened.

A home that is copied while a service works is what a `kill -9` at that moment would leave.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import random
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.service.harness import (
    MODEL,
    Failed,
    Slow,
    User,
    datum,
    found,
    killed_copy,
    serving,
    until,
    usage_of_run,
)
from tinkex import store
from tinkex.engine.fake import FakeEngine
from tinkex.engine.protocol import EngineConfig, EngineError, LoadAdapter, OptimStep
from tinkex.service.refusal import Refusal
from tinkex.service.runs import execution, segments, snapshots
from tinkex.service.runs import journal as journal_module
from tinkex.service.runs.journal import Journal, JournalFullError, restore
from tinkex.types import checkpoints, futures, sessions, training
from tinkex.wire import ops

pytestmark = pytest.mark.anyio


async def undisturbed(tmp_path: Path, steps: int) -> list[float]:
    async with serving(tmp_path / "undisturbed") as service:
        user = User(service)
        return await user.train(await user.run(), 1, steps)


# 1: every pass is written and freed as large ones are.
@pytest.mark.parametrize("many", [256, pytest.param(1, marks=pytest.mark.slow)])
async def test_pipelined_work_goes_on_where_it_was_and_keeps_its_ids(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, many: int
):
    monkeypatch.setattr(execution, "MANY_DATUMS", many)
    expected = await undisturbed(tmp_path, 12)
    async with serving(home, Slow, snapshot_steps=3) as service:
        user = User(service)
        run = await user.run()
        promises = []
        for n in range(12):
            promises.append(await user.forward_backward(run, 1 + 2 * n, datum(n)))
            await user.step(run, 2 + 2 * n)
        for n, moment in enumerate((0, 0.3, 0.45, 0.7)):
            await asyncio.sleep(moment)
            copy = killed_copy(home, str(n))
            async with serving(copy, snapshot_steps=3) as second:
                again = User(second)
                losses = [(await again.result(promise)).metrics["loss:sum"] for promise in promises]
                assert losses == expected
                assert (await again.forward_backward(run, 1, datum(0))).request_id == promises[0].request_id


async def test_a_clean_stop_keeps_results_and_what_was_not_begun(home: Path, tmp_path: Path):
    expected = await undisturbed(tmp_path, 8)
    async with serving(home, Slow) as service:
        user = User(service)
        run = await user.run()
        promises = []
        for n in range(8):
            promises.append(await user.forward_backward(run, 1 + 2 * n, datum(n)))
            await user.step(run, 2 + 2 * n)
        await user.result(promises[2])
    async with serving(home) as service:
        user = User(service)
        assert [(await user.result(p)).metrics["loss:sum"] for p in promises] == expected


async def test_snapshots_are_taken_and_journals_trimmed(home: Path):
    async with serving(home, snapshot_steps=2) as service:
        user = User(service)
        run = await user.run()
        await user.train(run, 1, 9)
        journal = service.runs.get(run).journal  # type: ignore[union-attr]
        await until(lambda: journal.next_seq == 17)
        assert journal.snapshot is not None
    async with serving(home, snapshot_steps=2) as service:
        user = User(service)
        await user.loss(run, 19)
        engine = service.models.find(MODEL).engine
        assert isinstance(engine, FakeEngine)
        assert engine.trainer.adapters[run].step == 9


async def test_training_does_not_wait_for_a_snapshot_to_reach_the_disk(
    home: Path, monkeypatch: pytest.MonkeyPatch
):
    disk = threading.Event()
    monkeypatch.setattr(snapshots, "sync_tree", lambda path: disk.wait(10))
    async with serving(home, snapshot_steps=2) as service:
        user = User(service)
        run = await user.run()
        await user.train(run, 1, 3)
        journal = service.runs.get(run).journal  # type: ignore[union-attr]
        assert journal.snapshot is None  # what is not on the disk does not count
        copy = killed_copy(home)
        disk.set()
        await until(lambda: journal.next_seq == 5)
        losses = await user.train(run, 7, 2)
    async with serving(copy) as service:  # killed before: as if it had not been begun
        assert await User(service).train(run, 7, 2) == losses


async def test_a_snapshot_that_the_disk_does_not_take_is_taken_anew(
    home: Path, monkeypatch: pytest.MonkeyPatch
):
    def broken(path: Path) -> None:
        raise OSError(5, "Input/output error")

    async with serving(home, snapshot_steps=2) as service:
        user = User(service)
        run = await user.run()
        with monkeypatch.context() as patched:
            patched.setattr(snapshots, "sync_tree", broken)
            await user.train(run, 1, 2)
            at_hand = service.runs.get(run)
            assert at_hand is not None
            await until(lambda: at_hand.committing is not None and at_hand.committing.done())
            assert at_hand.journal.snapshot is None
        await user.train(run, 5, 1)
        await until(lambda: at_hand.journal.next_seq == 7)


async def test_a_snapshot_is_on_the_disk_once_before_it_has_its_name(
    home: Path, monkeypatch: pytest.MonkeyPatch
):
    synced: list[Path] = []
    for module in (segments, journal_module, store):
        monkeypatch.setattr(module, "sync_path", lambda path: synced.append(Path(path)))
    async with serving(home, durability="power", snapshot_steps=2) as service:
        user = User(service)
        run = await user.run()
        await user.train(run, 1, 2)
        kept = service.runs.get(run).journal  # type: ignore[union-attr]
        await until(lambda: kept.next_seq == 5)
        assert kept.snapshot is not None
        part = kept.snapshot.with_name(kept.snapshot.name.replace("snapshot", "part"))
        inside = [path for path in synced if path.is_relative_to(part)]
        files = {part / path.relative_to(kept.snapshot) for path in kept.snapshot.rglob("*")}
        assert sorted(inside) == sorted([part, *files])
        assert kept.directory in synced[synced.index(inside[-1]) :]  # where its name is


async def test_results_that_were_fetched_do_not_stay_in_the_journal(home: Path):
    async with serving(home, snapshot_steps=2) as service:
        user = User(service)
        run = await user.run()
        await user.train(run, 1, 3)
        await user.result(f"{run}#6")
        service.drop_results([f"{run}#{n}" for n in range(1, 7)])
        await user.train(run, 7, 1)
        journal = service.runs.get(run).journal  # type: ignore[union-attr]
        await until(lambda: journal.next_seq == 9)
    outcomes = restore(journal.directory).outcomes
    assert {request_id.rpartition("#")[2] for request_id in outcomes} == {"0", "7", "8"}


async def test_what_was_forgotten_before_a_snapshot_covers_it_is_done_again(home: Path):
    async with serving(home, snapshot_steps=100) as service:
        user = User(service)
        run, twin = await user.run(), await user.run()
        await user.train(run, 1, 3)
        journal = service.runs.get(run).journal  # type: ignore[union-attr]
        journal.forget([f"{run}#{n}" for n in (0, 1, 2, 5)])
        left = killed_copy(home)
        await user.train(twin, 1, 3)
        expected = await user.loss(twin, 7)
    async with serving(left) as service:
        assert await User(service).loss(run, 7) == expected


async def test_a_failed_window_stays_failed(home: Path):
    async with serving(home) as service:
        user = User(service)
        run = await user.run()
        await user.result(await user.forward_backward(run, 1))
        bad = await user.forward_backward(run, 2, datum(2, weights=np.array([np.nan] * 6, np.float32)))
        with pytest.raises(Failed):
            await user.result(bad)
        async with serving(killed_copy(home)) as second:
            again = User(second)
            with pytest.raises(Failed, match="no step was taken"):
                await again.result(await again.step(run, 3))


async def test_a_pass_that_we_do_not_offer_stays_failed_with_its_window(home: Path):
    async with serving(home) as service:
        user = User(service)
        run = await user.run()
        await user.result(await user.forward_backward(run, 1))
        with pytest.raises(Failed, match="no loss 'stable_reinforce'"):
            await user.result(await user.forward_backward(run, 2, loss_fn="stable_reinforce"))
        async with serving(killed_copy(home)) as second:
            again = User(second)
            with pytest.raises(Failed, match="no step was taken"):
                await again.result(await again.step(run, 3))


class Flaky(FakeEngine):
    """Fails once, for no reason that a replay would see again."""

    armed = True

    def __init__(self, config) -> None:
        super().__init__(config)
        run = self.trainer._execute

        def maybe(command):
            if Flaky.armed and type(command).__name__ == "ForwardBackward":
                Flaky.armed = False
                raise RuntimeError("out of memory")
            return run(command)

        self.trainer._execute = maybe  # type: ignore[method-assign]


async def test_what_was_answered_is_never_answered_differently(home: Path):
    Flaky.armed = True
    async with serving(home, Flaky) as service:
        user = User(service)
        run, twin = await user.run(), await user.run()
        failed, step = await user.forward_backward(run, 1), await user.step(run, 2)
        for promise in (failed, step):
            with pytest.raises(Failed):
                await user.result(promise)
        async with serving(killed_copy(home)) as second:  # whose engine would not fail
            again = User(second)
            assert await again.train(run, 3, 2) == await again.train(twin, 1, 2)
            with pytest.raises(Failed, match="out of memory"):
                await again.result(failed)


async def test_saves_are_not_done_twice_and_deleted_ones_stay_deleted(home: Path):
    async with serving(home) as service:
        user = User(service)
        run = await user.run()
        kept, deleted = await user.save(run, 1, "kept"), await user.save(run, 2, "deleted")
        one = {"training_run_id": run, "checkpoint_id": "weights/deleted"}
        await user.call(ops.DELETE_CHECKPOINT, checkpoints.CheckpointRequest(**one))
        await user.train(run, 3, 2)
        async with serving(killed_copy(home)) as second:
            again = User(second)
            await again.train(run, 7, 1)
            other = await again.run()
            await again.load(other, 1, kept)
            with pytest.raises(Refusal) as refused:
                await again.load(other, 2, deleted)
            assert refused.value.status == 404
            with pytest.raises(Failed, match="exists already"):
                await again.save(run, 9, "kept")


async def test_a_save_that_was_written_and_not_answered_is_answered(home: Path):
    async with serving(home) as service:
        user = User(service)
        run = await user.run()
        live = service.runs.get(run)
        assert live is not None
        live.journal.resolve = lambda *_: None  # type: ignore[method-assign]  # killed before each answer
        request = checkpoints.SaveWeightsRequest(model_id=run, path="c", seq_id=1)
        promise = await user.call(ops.SAVE_WEIGHTS, request)
        await user.result(promise)
        async with serving(killed_copy(home)) as second:
            assert (await User(second).result(promise)).path == f"tinker://{run}/weights/c"


async def test_a_load_survives_the_deletion_of_what_was_loaded(home: Path):
    async with serving(home) as service:
        user = User(service)
        run = await user.run()
        await user.train(run, 1, 3)
        path = await user.save(run, 7, "c")
        other = await user.run(seed=99)
        await user.load(other, 1, path)
        await until(lambda: service.runs.get(other).journal.next_seq == 2)  # type: ignore[union-attr]
        one = {"training_run_id": run, "checkpoint_id": "weights/c"}
        await user.call(ops.DELETE_CHECKPOINT, checkpoints.CheckpointRequest(**one))
        async with serving(killed_copy(home)) as second:
            again = User(second)
            assert await again.loss(other, 2) == await again.loss(run, 8)


@pytest.mark.slow
async def test_a_load_survives_that_its_run_saves_over_what_was_loaded(
    home: Path, monkeypatch: pytest.MonkeyPatch
):
    """A disk that is slow: the run goes on, and is killed, before the snapshot after the load is there."""
    sync, go_on = snapshots.sync_tree, threading.Event()

    def slowly(directory: Path) -> None:
        go_on.wait(1.0)
        sync(directory)

    async with serving(home) as service:
        user = User(service)
        run = await user.run()
        await user.train(run, 1, 2)
        path = await user.save(run, 5, "latest")
        monkeypatch.setattr(snapshots, "sync_tree", slowly)
        await user.load(run, 6, path, optimizer=True)
        await user.train(run, 7, 1)
        await user.save(run, 9, "latest", overwrite=True)
        copy = killed_copy(home)
        go_on.set()
        expected = await user.loss(run, 10)
    async with serving(copy) as service:
        assert await User(service).loss(run, 10) == expected


async def test_unnamed_samplers_survive(home: Path):
    async with serving(home) as service:
        user = User(service)
        run = await user.run()
        await user.train(run, 1, 3)
        sampler = await user.unnamed_sampler(run, 7, 0)
        first = (await user.result(await user.sample(sampler))).sequences[0]
        async with serving(killed_copy(home)) as second:
            again = User(second)
            assert (await again.result(await again.sample(sampler))).sequences[0].logprobs == first.logprobs


async def test_gaps_that_were_given_up_stay_given_up(home: Path):
    async with serving(home, gap_patience=0.05) as service:
        user = User(service)
        run = await user.run()
        await user.result(await user.forward_backward(run, 2))
        async with serving(killed_copy(home), gap_patience=1000.0) as second:
            again = User(second)
            await again.result(await again.step(run, 3))
            with pytest.raises(Failed, match="given up"):
                await again.result(await again.forward_backward(run, 1))


async def test_a_seq_id_far_ahead_costs_no_time_after_a_restart(home: Path):
    far = 2**31 - 10  # what a client makes of a clock, say; counting up to it would take minutes
    async with serving(home, gap_patience=0.05) as service:
        user = User(service)
        run = await user.run()
        await user.result(await user.forward_backward(run, far))
        async with serving(killed_copy(home), gap_patience=1000.0) as second:
            again = User(second)
            assert (await again.result(await again.step(run, far + 1))).metrics
            with pytest.raises(Failed, match="given up"):
                await again.result(await again.forward_backward(run, far - 1))


@pytest.mark.parametrize("broken", [LoadAdapter, OptimStep])
async def test_an_engine_in_trouble_costs_no_run_its_life(home: Path, broken: type):
    """The device was lost, say: what is on disk is as good as before, and a restart finds it."""

    class Lost(FakeEngine):
        def __init__(self, config: EngineConfig) -> None:
            super().__init__(config)
            run = self.trainer._execute

            def fail(command: Any) -> Any:
                if isinstance(command, broken):
                    raise EngineError("the device has failed, and only a restart helps")
                return run(command)

            self.trainer._execute = fail  # type: ignore[method-assign]

    async with serving(home, snapshot_steps=2) as service:
        user = User(service)
        run = await user.run()
        await user.train(run, 1, 3)  # two in a snapshot, one in the journal
        await until(lambda: service.runs.get(run).journal.next_seq == 5)  # type: ignore[union-attr]
        expected = await user.loss(run, 7)
        copy = killed_copy(home)
    async with serving(copy, Lost) as second:
        again = User(second)
        with pytest.raises(Failed, match="only a restart helps"):
            await again.loss(run, 8)
        shown = await again.call(ops.GET_TRAINING_RUN, training.GetTrainingRunRequest(training_run_id=run))
        assert not shown.corrupted
    async with serving(copy) as third:
        assert await User(third).loss(run, 9) == expected


async def test_a_run_that_takes_no_steps_keeps_a_short_journal(home: Path):
    """A reference model is only looked at, for days."""
    data = [datum(n, length=60) for n in range(20)]

    def journaled() -> int:
        total = 0
        for path in found(home, "requests-*.log"):
            with contextlib.suppress(FileNotFoundError):  # it goes this very moment
                total += path.stat().st_size
        return total

    async with serving(home, snapshot_bytes=50_000) as service:
        user = User(service)
        run = await user.run()
        losses = [await user.loss(run, seq_id, *data) for seq_id in range(1, 30)]
        # What comes while a snapshot is on its way to a slow disk waits for the next one, and each pass may
        # bring that: a journal that is never cut would only grow.
        for seq_id in range(30, 130):
            if journaled() < 100_000:
                break
            losses.append(await user.loss(run, seq_id, *data))
            await asyncio.sleep(0.05)
        assert journaled() < 100_000
        async with serving(killed_copy(home)) as second:
            again = User(second)
            assert await again.loss(run, len(losses) + 1, *data) == losses[0]


async def test_runs_that_owe_nothing_wait_on_disk(home: Path):
    async with serving(home) as service:
        user = User(service)
        run = await user.run()
        promise = await user.forward_backward(run, 1)
        await user.result(promise)
    async with serving(home) as service:
        assert service.models.find(MODEL).engine is None  # nothing was loaded for it
        assert (await User(service).result(promise)).metrics


async def test_a_damaged_journal_marks_its_run_and_no_other(home: Path):
    async with serving(home) as service:
        user = User(service)
        good, bad = await user.run(), await user.run()
        promise = await user.forward_backward(bad, 1)
        await user.result(promise)
        path = await user.save(bad, 2, "c")
        copy = killed_copy(home)
    session = bad.split(":")[0]
    (segment,) = (copy / "runs" / session / "train-0" / "journal").glob("requests-*")
    content = bytearray(segment.read_bytes())
    content[len(content) // 2] ^= 0xFF
    segment.write_bytes(content)
    async with serving(copy) as service:
        user = User(service)
        with pytest.raises(Refusal, match="could not be restored") as refused:
            await user.forward_backward(bad, 3)
        assert refused.value.status == 422
        with pytest.raises(Failed, match="could not be restored"):
            await user.result(promise)
        shown = await user.call(ops.GET_TRAINING_RUN, training.GetTrainingRunRequest(training_run_id=bad))
        assert shown.corrupted
        await user.train(good, 1, 1)
        await user.load(good, 3, path)


async def test_what_cannot_be_read_for_a_moment_is_not_damaged(home: Path, monkeypatch: pytest.MonkeyPatch):
    """Too many files are open, say: a 503, on which clients ask again, and the run is as it was."""
    async with serving(home) as service:
        user = User(service)
        run = await user.run()
        losses = await user.train(run, 1, 2)
        promise = await user.forward_backward(run, 5)
        await user.result(promise)
    file_open = Path.open

    def too_many(path: Path, *args: Any, **kwargs: Any) -> Any:
        if path.suffix == ".log":
            raise OSError(errno.EMFILE, "Too many open files")
        return file_open(path, *args, **kwargs)

    async with serving(home) as service:
        user = User(service)
        with monkeypatch.context() as patched:
            patched.setattr(Path, "open", too_many)
            with pytest.raises(Refusal, match="Too many open files") as refused:
                await user.loss(run, 6)
        assert refused.value.status == 503
        assert await user.loss(run, 6) < losses[0]


async def test_a_run_whose_outcomes_were_not_kept_stays_at_hand(home: Path, monkeypatch: pytest.MonkeyPatch):
    """On a full disk outcomes are told and not journaled: they must not be lost on the way to the disk."""

    def full(*_: object) -> None:
        raise JournalFullError("no space left")

    async with serving(home, snapshot_steps=2) as service:
        user = User(service)
        run = await user.run()
        unload = training.UnloadModelRequest(model_id=run)
        with monkeypatch.context() as patched:
            patched.setattr(Journal, "resolve", full)
            await user.result(await user.forward_backward(run, 1))
            await user.result(await user.step(run, 2))
            await user.call(ops.UNLOAD_MODEL, unload)
        await user.train(run, 3, 3)
        await until(lambda: service.runs.get(run).journal.next_seq > 3)  # type: ignore[union-attr]


async def test_a_damaged_snapshot_is_reported(home: Path):
    async with serving(home, snapshot_steps=1) as service:
        user = User(service)
        run = await user.run()
        await user.train(run, 1, 2)
        await until(lambda: service.runs.get(run).journal.next_seq == 5)  # type: ignore[union-attr]
    for file in found(home, "snapshot-*/adapter/adapter_model.safetensors"):
        file.unlink()
    async with serving(home) as service:
        user = User(service)
        with pytest.raises(Failed, match="could not be restored"):
            await user.result(await user.forward_backward(run, 5))
        shown = await user.call(ops.GET_TRAINING_RUN, training.GetTrainingRunRequest(training_run_id=run))
        assert shown.corrupted
        other = await user.session()
    async with serving(home, resume=False) as service:  # both sessions were abandoned, and one had failed
        query = [{"type": "failed"}]
        found_ones = await User(service).call(
            ops.SEARCH_SESSIONS, sessions.SessionSearchRequest(statuses=query)
        )
        (failed,) = found_ones.sessions
        assert failed.session_id == run.split(":")[0] != other
        assert failed.status.reason.training_run_id == run
        assert failed.status.category == "internal"


async def test_usage_is_not_counted_twice(home: Path):
    async with serving(home) as service:
        user = User(service)
        run = await user.run()
        await user.train(run, 1, 3)
        service.activity.flush()
        async with serving(killed_copy(home)) as second:
            again = User(second)
            await again.loss(run, 7)
            assert usage_of_run(second, run)["training"] == 6 * 4


async def test_a_service_whose_clients_died_with_it_cleans_up(home: Path):
    async with serving(home, Slow) as service:
        user = User(service)
        run = await user.run()
        await user.forward_backward(run, 1)
        copy = killed_copy(home)
    async with serving(copy, resume=False) as service:
        await service.upkeep.tick()
        assert service.ledger.run(run).state == "closed"  # type: ignore[union-attr]
        assert found(copy, "journal") == []
        assert service.models.find(MODEL).engine is None


@pytest.mark.slow
async def test_killed_again_and_again_at_any_moment(home: Path, tmp_path: Path):
    """Twenty lives of a pipelined loop, each ended at a random moment by copying the home away."""
    expected, random_ = await undisturbed(tmp_path, 30), random.Random(5)
    sent: dict[int, futures.UntypedAPIFuture] = {}
    run = ""
    for life in range(20):
        async with serving(home, snapshot_steps=random_.randint(1, 6)) as service:
            user = User(service)
            run = run or await user.run()
            for seq_id in range(1, 61):
                if seq_id not in sent:
                    n = (seq_id - 1) // 2
                    send = (
                        user.forward_backward(run, seq_id, datum(n)) if seq_id % 2 else user.step(run, seq_id)
                    )
                    sent[seq_id] = await send
                    if random_.random() < 0.25:
                        break
            await asyncio.sleep(random_.random() * 0.01)
            home = killed_copy(home, f"{life}")
    async with serving(home) as service:
        user = User(service)
        for seq_id in range(1, 61):
            if seq_id not in sent:
                n = (seq_id - 1) // 2
                send = user.forward_backward(run, seq_id, datum(n)) if seq_id % 2 else user.step(run, seq_id)
                sent[seq_id] = await send
        losses = [(await user.result(sent[seq_id])).metrics["loss:sum"] for seq_id in range(1, 61, 2)]
        assert losses == expected

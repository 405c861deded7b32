"""The home's quota: what would go beyond it is refused by name, and nothing that was accepted is lost."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest

from tests.service.harness import MODEL, Failed, User, datum, found, killed_copy, name_of, serving
from tinkex.service.home import Home
from tinkex.service.refusal import Refusal
from tinkex.service.service import Service
from tinkex.store import directory_bytes
from tinkex.types import checkpoints, sampling, sessions, training
from tinkex.types.data import Datum
from tinkex.wire import ops

pytestmark = pytest.mark.anyio


def quota(service: Service, beyond: int) -> int:
    """A quota of what is there now and `beyond`, from now on."""
    files = [file for file in service.home.root.rglob("*") if file.is_file()]
    size = sum(file.stat().st_size for file in files) + beyond
    service.home.quota = size
    return size


async def test_the_quota_is_honoured_and_deleting_makes_room(home: Path):
    async with serving(home) as service:
        user = User(service)
        run = await user.run(rank=1024)  # its checkpoints are far larger than what the ledger may grow by
        first = await user.save(run, 1, "a")
        size = sum(file.stat().st_size for file in found(home, "weights/a/*"))
        allowed = quota(service, beyond=3 * size // 2)
        await user.save(run, 2, "b")
        with pytest.raises(Failed, match=f"of the {allowed} bytes allowed") as failed:
            await user.save(run, 3, "c")
        assert failed.value.category == "user"
        assert [p.name for p in found(home, "weights/*")] == ["a", "b"]
        await user.save(run, 4, "b", overwrite=True)  # takes no more than before
        copying = checkpoints.CopyWeightsRequest(source_path=first, destination_project_id="p")
        assert await user.status_of(ops.COPY_WEIGHTS, copying) == 422
        await user.call(ops.DELETE_CHECKPOINT, checkpoints.CheckpointRequest(**name_of(first)))
        await user.save(run, 5, "c")


async def test_the_first_checkpoint_of_a_run_is_measured_too(home: Path):
    async with serving(home) as service:
        user = User(service)
        run = await user.run(rank=1024)
        quota(service, beyond=200_000)
        with pytest.raises(Failed, match="bytes allowed"):
            await user.save(run, 1, "a")
        assert found(home, "weights/*") == []


async def test_an_unnamed_adapter_is_measured_too(home: Path):
    async with serving(home) as service:
        user = User(service)
        run = await user.run(rank=1024)
        await user.train(run, 1, 1)
        quota(service, beyond=100_000)
        with pytest.raises(Failed, match="bytes allowed") as failed:
            await user.unnamed_sampler(run, 3, 0)
        assert failed.value.category == "user"
        assert found(home, "ephemeral/*") == []
        quota(service, beyond=1_000_000)
        await user.result(await user.sample(await user.unnamed_sampler(run, 4, 1)))


def big(number: int) -> list[Datum]:
    """About a megabyte on the wire and in a journal."""
    return [datum(1000 * number + n, 60) for n in range(1000)]


@pytest.mark.slow
async def test_passes_that_do_not_fit_fail_with_their_step_and_cost_nothing_else(home: Path):
    async with serving(home) as service:
        user = User(service)
        run, twin = await user.run(), await user.run()
        await user.result(await user.forward_backward(run, 1))
        await user.result(await user.step(run, 2))
        await user.save(run, 3, "a")
        quota(service, beyond=1_500_000)
        first = await user.forward_backward(run, 4, *big(1))  # what it takes in the journal counts
        second = await user.forward_backward(run, 5, *big(2))
        step = await user.step(run, 6)
        assert (await user.result(first)).metrics["tokens:sum"] == 60_000
        with pytest.raises(Failed, match=r"bytes allowed, \d+ more do not fit") as failed:
            await user.result(second)
        assert failed.value.category == "user"
        with pytest.raises(Failed):  # nothing is ever applied to part of a batch
            await user.result(step)
        again = await user.forward_backward(run, 5, *big(2))  # its answer was lost, say
        assert again.request_id == second.request_id
        # What was done before it and what is done after it is as if nothing had been refused.
        service.home.quota = None
        await user.result(await user.forward_backward(twin, 1))
        await user.result(await user.step(twin, 2))
        assert await user.loss(run, 7) == await user.loss(twin, 3)


@pytest.mark.slow
async def test_a_refused_pass_stays_refused_over_a_restart(home: Path):
    async with serving(home) as service:
        user = User(service)
        run = await user.run()
        quota(service, beyond=500_000)
        refused = await user.forward_backward(run, 1, *big(1))
        copy = killed_copy(home)
    async with serving(copy) as service:
        user = User(service)
        with pytest.raises(Failed, match="bytes allowed"):
            await user.result(refused.request_id)
        assert (await user.forward_backward(run, 1, *big(1))).request_id == refused.request_id
        await user.result(await user.forward_backward(run, 2, *big(1)))  # this one has no quota


async def test_deleting_makes_room_for_passes(home: Path):
    async with serving(home) as service:
        user = User(service)
        run = await user.run(rank=1024)
        path = await user.save(run, 1, "large")
        quota(service, beyond=1_000)
        with pytest.raises(Failed, match="delete some checkpoints"):
            await user.result(await user.forward_backward(run, 2, *[datum(n) for n in range(100)]))
        await user.call(ops.DELETE_CHECKPOINT, checkpoints.CheckpointRequest(**name_of(path)))
        await user.result(await user.forward_backward(run, 3, *[datum(n) for n in range(100)]))


async def test_uploaded_losses_count_too(home: Path):
    async with serving(home) as service:
        user = User(service)
        session = await user.session()

        def upload(number: int) -> training.CreateCustomLossRequest:
            nodes = [{"op": "placeholder", "name": "logprobs", "target": "logprobs"}]
            for n in range(500):
                ref = nodes[-1]["name"]
                nodes.append({"op": "call_method", "name": f"n{n}", "target": "exp", "args": [{"ref": ref}]})  # type: ignore[dict-item]
            result = {"tuple": [{"ref": nodes[-1]["name"]}, {"dict": {}}]}
            nodes.append({"op": "output", "name": "output", "target": "output", "args": [result]})  # type: ignore[dict-item]
            return training.CreateCustomLossRequest(
                session_id=session, custom_loss_seq_id=number, name="mine", graph={"nodes": nodes},  # type: ignore[arg-type]
                inputs=[{"name": "logprobs", "rank": 1}],  # type: ignore[list-item]
            )  # fmt: skip

        kept = await user.call(ops.CREATE_CUSTOM_LOSS, upload(0))
        quota(service, beyond=10_000)
        with pytest.raises(Failed, match="bytes allowed") as failed:
            await user.result(await user.call(ops.CREATE_CUSTOM_LOSS, upload(1)))
        assert failed.value.category == "user"
        again = await user.call(ops.CREATE_CUSTOM_LOSS, upload(0))  # what is there takes no more room
        assert again.request_id == kept.request_id
        assert (await user.result(again)).loss_id == f"{session}:loss:0"


async def test_rows_of_the_ledger_count_too(home: Path):
    async with serving(home) as service:
        user = User(service)
        session = await user.session()
        quota(service, beyond=600_000)
        large = sessions.CreateSessionRequest(user_metadata={"notes": "x" * 60_000})
        answers = [await user.status_of(ops.CREATE_SESSION, large) for _ in range(20)]
        assert answers[0] == 200
        assert answers[-1] == 422
        new_run = training.CreateModelRequest(session_id=session, model_seq_id=0, base_model=MODEL)
        service.home.quota = 1000
        assert await user.status_of(ops.CREATE_MODEL, new_run) == 422
        quota(service, beyond=500_000)
        assert await user.status_of(ops.CREATE_MODEL, new_run) == 200


async def test_a_session_can_be_deleted_with_its_runs_but_not_with_checkpoints(home: Path):
    async with serving(home) as service:
        user, ben = User(service), User(service, "ben")
        run = await user.run()
        session = run.split(":")[0]
        sampler = await user.sampler(session)
        await user.unnamed_sampler(run, 1, 7)
        path = await user.save(run, 2, "a")
        await user.train(run, 3, 1)
        delete = sessions.DeleteSessionRequest(session_id=session)
        assert await ben.status_of(ops.DELETE_SESSION, delete) == 404
        with pytest.raises(Refusal, match="delete them first") as refused:
            await user.call(ops.DELETE_SESSION, delete)
        assert refused.value.status == 422
        await user.train(run, 5, 1)  # nothing was ended
        await user.call(ops.DELETE_CHECKPOINT, checkpoints.CheckpointRequest(**name_of(path)))
        await user.call(ops.DELETE_SESSION, delete)
        assert not (home / "runs" / session).exists()
        listed = await user.call(ops.LIST_SESSIONS, sessions.ListSessionsRequest())
        assert session not in listed.sessions
        for op, asked in (
            (ops.GET_SESSION, sessions.GetSessionRequest(session_id=session)),
            (ops.GET_TRAINING_RUN, training.GetTrainingRunRequest(training_run_id=run)),
            (ops.GET_SAMPLER, sampling.GetSamplerRequest(sampler_id=sampler)),
            (ops.DELETE_SESSION, delete),
        ):
            assert await user.status_of(op, asked) == 404
    async with serving(home) as service:  # and a restart finds nothing of it
        assert service.ledger.session(session) is None


async def test_one_user_cannot_take_the_whole_disk(home: Path):
    async with serving(home, disk_per_user=100_000) as service:
        ann, ben = User(service, "ann"), User(service, "ben")
        run = await ann.run(rank=1024)
        with pytest.raises(Failed, match="the files of ann take"):
            await ann.save(run, 1, "a")
        other = await ben.run()
        await ben.save(other, 1, "a")


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The places whose files were measured for a quota."""
    places: list[str] = []

    def watched(place: Path) -> int:
        places.append(str(place))
        return directory_bytes(place)

    monkeypatch.setattr("tinkex.service.home.directory_bytes", watched)
    return places


async def test_saves_are_counted_and_not_measured_each_time(home: Path, measured: list[str]):
    async with serving(home, disk_per_user=10**9, disk_quota=10**9) as service:
        user = User(service)
        run = await user.run()
        began = time.monotonic()
        for n in range(10):
            await user.save(run, 2 * n + 1, f"s{n}")
            await user.unnamed_sampler(run, 2 * n + 2, n)
        assert len(measured) <= 2 + 2 * (time.monotonic() - began)


async def test_files_are_measured_before_a_save_is_refused(home: Path):
    async with serving(home, disk_per_user=10**9) as service:
        user = User(service)
        run = await user.run(rank=1024)
        await user.save(run, 1, "a")
        size = sum(file.stat().st_size for file in found(home, "weights/a/*"))
        service.home.per_user = service.home._measure("ann") + 5 * size // 2
        await user.save(run, 2, "b")
        await user.save(run, 3, "c")
        for number in range(4, 10, 2):
            with pytest.raises(Failed, match="bytes allowed"):
                await user.save(run, number, "too much")
            # Not by the server.
            shutil.rmtree(found(home, f"weights/{'c' if number == 4 else number - 1}")[0])
            await user.save(run, number + 1, str(number + 1))


async def test_what_is_written_while_files_are_measured_is_not_counted_twice(tmp_path: Path):
    (tmp_path / "runs" / "s").mkdir(parents=True)
    writes = iter([b"x" * 60, b"", b""])

    def sessions_of(user: str) -> list[str]:
        if content := next(writes):  # measuring has begun
            (tmp_path / "runs" / "s" / "file").write_bytes(content)
            home.count(user, len(content))
        return ["s"]

    home = Home(tmp_path, per_user=100, sessions_of=sessions_of)
    assert await home.over_quota(40, "ann") == ""
    assert await home.over_quota(40, "ann") == ""
    assert "take 60 of the 100 bytes allowed, 41 more" in await home.over_quota(41, "ann")


async def test_live_runs_of_one_user_are_bounded(home: Path):
    async with serving(home, runs_per_user=2) as service:
        ann, ben = User(service, "ann"), User(service, "ben")
        first, second = await ann.run(), await ann.run()
        third = training.CreateModelRequest(session_id=await ann.session(), model_seq_id=0, base_model=MODEL)
        assert await ann.status_of(ops.CREATE_MODEL, third) == 429
        await ben.run()
        await ann.train(second, 1, 1)
        await ann.finish(first.split(":")[0])
        await service.upkeep.tick()
        assert await ann.status_of(ops.CREATE_MODEL, third) == 200

"""A pass with an uploaded loss that ends the process which computes it: tried again once, then failed."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.service.harness import Failed, User, datum, killed_copy, serving, until
from tinkex.engine.fake import FakeEngine
from tinkex.engine.protocol import EngineConfig, ForwardBackward, Pass
from tinkex.service.runs.journal import Journal, JournalEntry, restore
from tinkex.types import futures, training
from tinkex.types import sessions as sessions_
from tinkex.types.training import ForwardBackwardInput
from tinkex.wire import ops

pytestmark = pytest.mark.anyio

NODES = [
    {"op": "placeholder", "name": "logprobs", "target": "logprobs"},
    {"op": "call_method", "name": "total", "target": "sum", "args": [{"ref": "logprobs"}]},
    {"op": "output", "name": "output", "target": "output", "args": [{"tuple": [{"ref": "total"}, {}]}]},
]


class Stuck(FakeEngine):
    """Computes uploaded losses (as cross entropy) once it is let; those that are replayed, at once."""

    let = threading.Event()
    begun: list[Pass]

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        execute, type(self).begun = self.trainer._execute, []

        def stuck(command: Any) -> Any:
            if isinstance(command, ForwardBackward):
                uploaded = [work for work in command.passes if work.custom_loss is not None]
                self.begun.extend(uploaded)
                if any(not work.finished for work in uploaded):
                    self.let.wait(60)
                built_in = {"loss_fn": "cross_entropy", "loss_fn_config": {}, "custom_loss": None}
                known = (replace(w, **built_in) if w in uploaded else w for w in command.passes)
                command = ForwardBackward(tuple(known))
            return execute(command)

        self.trainer._execute = stuck  # type: ignore[method-assign]


@pytest.fixture(autouse=True)
def held() -> Iterator[None]:
    Stuck.let = threading.Event()
    yield
    Stuck.let.set()


async def uploaded_pass(user: User, run: str, seq_id: int, loss_id: str) -> futures.UntypedAPIFuture:
    work = ForwardBackwardInput([datum(seq_id)], "custom", {"loss_id": loss_id})
    return await user.call(ops.FORWARD_BACKWARD, training.ForwardBackwardRequest(work, run, seq_id, False))


async def upload(user: User, session: str) -> str:
    request = training.CreateCustomLossRequest(
        session_id=session, custom_loss_seq_id=0, name="mine",
        inputs=[{"name": "logprobs", "rank": 1}], graph={"nodes": NODES},
    )  # fmt: skip
    return (await user.result(await user.call(ops.CREATE_CUSTOM_LOSS, request))).loss_id


async def test_a_pass_that_two_processes_died_of_fails_its_run_and_not_the_server(home: Path):
    async with serving(home, Stuck) as service:
        user = User(service)
        session = await user.session()
        run = await user.run(session)
        promise = await uploaded_pass(user, run, 1, await upload(user, session))
        step = await user.step(run, 2)
        await until(lambda: Stuck.begun)
        once = killed_copy(home, "once")
        Stuck.let.set()
        assert (await user.result(promise)).metrics["loss:sum"]  # as if nothing had happened

    Stuck.let = threading.Event()
    Stuck.begun.clear()
    async with serving(once, Stuck) as service:  # it may have been somebody else's fault: tried again
        await until(lambda: Stuck.begun)
        twice = killed_copy(once, "twice")
        Stuck.let.set()

    Stuck.begun.clear()
    async with serving(twice, Stuck) as service:
        user = User(service)
        with pytest.raises(Failed, match="ended 2 times while it computed this pass") as failed:
            await user.result(promise)
        assert failed.value.category == "user"
        with pytest.raises(Failed, match="no step was taken"):
            await user.result(step)
        assert not Stuck.begun
        assert await user.train(run, 3, 2)  # the run goes on
    async with serving(twice, Stuck) as service:  # and the answer stays
        with pytest.raises(Failed, match="ended 2 times"):
            await User(service).result(promise)


async def test_what_happens_between_its_parts_is_not_held_against_a_pass(tmp_path: Path):
    entry = JournalEntry(1, "r1", "forward_backward", None, 0.0)
    journal = Journal(tmp_path)
    journal.accept(entry)
    for _ in range(3):
        journal.begin("r1")
        journal.interrupt("r1")
        journal.close()
        journal = Journal(tmp_path)
        assert journal.restored().tries == {"r1": 0}
    journal.begin("r1")
    journal.close()
    assert restore(tmp_path).tries == {"r1": 1}
    journal = Journal(tmp_path)
    journal.begin("r1")
    journal.interrupt("r1")
    assert restore(tmp_path).tries == {"r1": 1}
    journal.resolve("r1", "done")
    assert restore(tmp_path).tries.get("r1", 0) == 0
    journal.close()


async def test_a_finished_pass_is_replayed_without_limits(home: Path):
    Stuck.let.set()
    async with serving(home, Stuck) as service:
        user = User(service)
        session = await user.session()
        run = await user.run(session)
        loss_id = await upload(user, session)
        first = await user.result(await uploaded_pass(user, run, 1, loss_id))
        assert [work.finished for work in Stuck.begun] == [False]
        copy = killed_copy(home)
        await user.result(await user.step(run, 2))
        expected = await user.loss(run, 3)
    async with serving(copy, Stuck) as service:
        user = User(service)
        await user.result(await user.step(run, 2))
        assert await user.loss(run, 3) == expected
        assert [work.finished for work in Stuck.begun] == [True]
        assert first.metrics["loss:sum"]


async def test_a_pass_that_shared_a_batch_with_the_guilty_one_is_not_quarantined_with_it(home: Path):
    """Who was guilty is not known the first time; the second time each is computed alone."""
    async with serving(home, Stuck) as service:
        users = [User(service, name) for name in ("ann", "ben")]
        sessions = [await user.session() for user in users]
        runs = [await user.run(session) for user, session in zip(users, sessions, strict=True)]
        losses = [await upload(user, session) for user, session in zip(users, sessions, strict=True)]
        blocked = await uploaded_pass(users[0], runs[0], 1, losses[0])
        await until(lambda: Stuck.begun)
        promises = [await uploaded_pass(users[i], runs[i], 2 - i, losses[i]) for i in (0, 1)]
        Stuck.begun.clear()
        Stuck.let.set()
        Stuck.let = threading.Event()
        await users[0].result(blocked)
        await until(lambda: Stuck.begun)
        assert len(Stuck.begun) == 2  # together
        once = killed_copy(home, "once")
        Stuck.let.set()

    Stuck.let = threading.Event()
    async with serving(once, Stuck) as service:
        await until(lambda: len([work for work in Stuck.begun if not work.finished]) == 1)
        Stuck.let.set()
        Stuck.let = threading.Event()
        await until(lambda: len([work for work in Stuck.begun if not work.finished]) == 2)
        guilty = runs.index(Stuck.begun[-1].run)
        twice = killed_copy(once, "twice")
        Stuck.let.set()

    async with serving(twice, Stuck) as service:
        users = [User(service, name) for name in ("ann", "ben")]
        with pytest.raises(Failed, match="ended 2 times"):
            await users[guilty].result(promises[guilty])
        innocent = await users[1 - guilty].result(promises[1 - guilty])
        assert innocent.metrics["loss:sum"]


async def test_a_pass_is_not_blamed_for_what_happens_between_its_parts(home: Path):
    """Others have their turns there, and one of those may have ended the process."""
    Stuck.let.set()
    async with serving(home, Stuck, engine=EngineConfig("", kind="fake", max_pass_tokens=1)) as service:
        user = User(service)
        session = await user.session()
        run = await user.run(session)
        work = ForwardBackwardInput(
            [datum(i) for i in range(50)], "custom", {"loss_id": await upload(user, session)}
        )
        request = training.ForwardBackwardRequest(work, run, 1, False)
        promise = await user.call(ops.FORWARD_BACKWARD, request)
        journal = service.runs.get(run).journal  # type: ignore[union-attr]
        await until(lambda: journal.restored().tries == {promise.request_id: 0})
        await user.result(promise)


async def test_deleting_a_session_ends_its_pass_between_two_micro_batches(home: Path):
    engine = EngineConfig("", kind="fake", max_pass_tokens=1)
    async with serving(home, engine=engine) as service:
        user, other = User(service), User(service, "ben")
        run, kept = await user.run(), await other.run()
        huge = await user.forward_backward(run, 1, *[datum(i) for i in range(1000)])
        waiting = [await user.step(run, 2), await user.forward_backward(run, 3)]
        mine = service.runs.get(run)
        assert mine is not None
        await until(lambda: mine.queue.running)
        assert await other.train(kept, 1, 2)
        delete = sessions_.DeleteSessionRequest(session_id=run.split(":")[0])
        polls = [asyncio.create_task(user.result(promise)) for promise in (huge, *waiting)]
        await asyncio.sleep(0)
        await user.call(ops.DELETE_SESSION, delete)
        for poll in polls:
            with pytest.raises(Failed, match=r"session .* was deleted") as failed:
                await poll
            assert failed.value.category == "user"
        assert mine.idle
        assert not (home / "runs" / run.split(":")[0]).exists()
        assert await other.train(kept, 5, 2)

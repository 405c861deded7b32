"""A run's requests: in order whatever order they come in, once however often, and nothing half applied."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import numpy as np
import pytest

from tests.service.harness import MODEL, Failed, User, datum, killed_copy, serving
from tinkex.engine.fake import FakeEngine
from tinkex.engine.protocol import Engine, EngineConfig, EngineError, ForwardBackward, OptimStep
from tinkex.service.refusal import Refusal
from tinkex.service.runs import request_content
from tinkex.service.runs.journal import Journal, JournalEntry
from tinkex.service.service import Service
from tinkex.types import training
from tinkex.types.checkpoints import LoadWeightsRequest
from tinkex.types.futures import FutureRetrieveRequest, PendingFuture
from tinkex.types.optimizers import DimuonParams
from tinkex.types.params import LoraConfig
from tinkex.wire import ops

pytestmark = pytest.mark.anyio


@pytest.mark.slow
async def test_chunks_that_come_backwards_are_executed_forwards(user: User):
    run = await user.run()
    promises = {}
    for seq_id in (3, 2, 4, 1):  # two chunks of a pass last one first, then a step, then the first chunk
        if seq_id == 4:
            await user.step(run, 4)
        else:
            promises[seq_id] = await user.forward_backward(run, seq_id, datum(seq_id))
    after = await user.loss(run, 5, datum(1))
    before = (await user.result(promises[1])).metrics["loss:sum"]
    assert after < before  # the step came after all three

    other = await user.run(seed=1)
    for seq_id in (1, 2, 3):
        await user.forward_backward(other, seq_id, datum(seq_id))
    await user.step(other, 4)
    assert await user.loss(other, 5, datum(1)) == after


async def test_a_repeated_request_is_the_same_promise_and_is_executed_once(user: User):
    run = await user.run()
    first = await user.forward_backward(run, 1)
    again = await user.forward_backward(run, 1)
    assert first.request_id == again.request_id
    step = await user.step(run, 2)
    assert (await user.step(run, 2)).request_id == step.request_id
    assert (await user.result(step)).metrics["optimizer_step"] == 1
    assert (await user.forward_backward(run, 1)).request_id == first.request_id  # long after it was done


async def test_a_seq_id_with_another_body_is_a_422(user: User):
    run = await user.run()
    await user.forward_backward(run, 1, datum(1))
    with pytest.raises(Refusal) as refused:
        await user.forward_backward(run, 1, datum(2))
    assert refused.value.status == 422


async def test_creating_the_same_run_twice_is_one_run(user: User):
    session = await user.session()
    assert await user.run(session) == await user.run(session) == f"{session}:train:0"
    with pytest.raises(Refusal) as refused:
        await user.run(session, rank=8)
    assert refused.value.status == 422


async def test_a_gap_is_waited_for_then_given_up_and_what_comes_late_fails(home: Path):
    async with serving(home, gap_patience=0.2) as service:
        user = User(service)
        run = await user.run()
        waiting = await user.forward_backward(run, 2)
        service.long_poll = 0.05
        pending = await user.call(ops.RETRIEVE_FUTURE, FutureRetrieveRequest(waiting.request_id))
        assert isinstance(pending, PendingFuture)
        assert pending.queue_state == "paused_capacity"
        assert "request 1" in (pending.queue_state_reason or "")
        service.long_poll = 5.0
        await user.result(waiting)
        late = await user.forward_backward(run, 1)
        with pytest.raises(Failed, match="came after its place was given up") as failed:
            await user.result(late)
        assert failed.value.category == "user"
        await user.result(await user.step(run, 3))


async def test_a_missing_request_that_comes_in_time_goes_first(user: User):
    run = await user.run()
    step = await user.step(run, 2)
    await asyncio.sleep(0.02)
    await user.forward_backward(run, 1)
    assert (await user.result(step)).metrics["skipped"] == 0


async def test_a_failed_pass_fails_its_step_and_clears_the_gradients(user: User):
    run, twin = await user.run(), await user.run()
    good = await user.forward_backward(run, 1, datum(1))
    bad = await user.forward_backward(run, 2, datum(2, weights=np.array([np.nan] * 6, np.float32)))
    step = await user.step(run, 3)
    await user.result(good)
    with pytest.raises(Failed) as failed:
        await user.result(bad)
    assert failed.value.category == "user"
    with pytest.raises(Failed, match="no step was taken: a pass before it failed"):
        await user.result(step)
    # As if none of it had happened:
    assert await user.train(run, 4, 3) == await user.train(twin, 1, 3)


async def test_a_failed_forward_only_pass_costs_no_step(user: User):
    run = await user.run()
    await user.forward_backward(run, 1)
    bad = await user.forward_backward(run, 2, loss_fn="no such loss", forward_only=True)
    with pytest.raises(Failed, match="no such loss"):
        await user.result(bad)
    assert (await user.result(await user.step(run, 3))).metrics["optimizer_step"] == 1


async def test_a_request_that_cannot_be_read_fails_in_its_turn(user: User):
    run = await user.run()
    await user.forward_backward(run, 1)
    promise = await user.service.training.fail("forward_backward", run, 2, "datum 3: tokens …", user.caller)
    step = await user.step(run, 3)
    with pytest.raises(Failed, match="datum 3: tokens"):
        await user.result(promise)
    with pytest.raises(Failed, match="no step was taken"):
        await user.result(step)
    again = await user.service.training.fail("forward_backward", run, 2, "datum 3: tokens …", user.caller)
    assert again.request_id == promise.request_id


async def test_too_many_datums_are_accepted_and_fail(user: User):
    run = await user.run()
    promise = await user.forward_backward(run, 1, *[datum(1)] * 4097)
    with pytest.raises(Failed, match="4097 datums; at most 4096"):
        await user.result(promise)


async def test_a_loss_that_we_do_not_have_is_accepted_and_fails(user: User):
    run = await user.run()
    before = await user.loss(run, 1)
    promises = [await user.forward_backward(run, n, loss_fn="stable_reinforce") for n in (2, 3)]
    step = await user.step(run, 4)
    for promise in promises:  # two chunks of one call: a 4xx on either would leave official clients stuck
        with pytest.raises(Failed, match="no loss 'stable_reinforce'") as failed:
            await user.result(promise)
        assert failed.value.category == "user"
    with pytest.raises(Failed, match="no step was taken"):
        await user.result(step)
    only_forward = await user.forward_backward(run, 5, loss_fn="stable_reinforce", forward_only=True)
    with pytest.raises(Failed, match="no loss 'stable_reinforce'"):
        await user.result(only_forward)
    assert (await user.result(await user.step(run, 6))).metrics["skipped"] == 1  # it broke no window
    assert await user.loss(run, 7) == before


async def test_a_refused_request_is_not_waited_for_and_changes_nothing(home: Path):
    async with serving(home, gap_patience=1000.0) as service:
        user = User(service)
        run = await user.run()
        await user.forward_backward(run, 1)
        dimuon = DimuonParams(learning_rate=0.1)
        refused = training.OptimStepRequest(model_id=run, seq_id=2, optim_params=dimuon)
        for _ in range(2):  # asked again, it is refused again
            with pytest.raises(Refusal, match="no optimizer 'dimuon'") as refusal:
                await user.call(ops.OPTIM_STEP, refused)
            assert refusal.value.status == 422
        left = killed_copy(home)
        metrics = (await user.result(await user.step(run, 3))).metrics
        assert (metrics["skipped"], metrics["grad_norm"] > 0) == (0, True)  # the gradients were still there
    async with serving(left, gap_patience=1000.0) as service:  # nor after a restart
        again = User(service)
        assert (await again.result(await again.step(run, 3))).metrics == metrics


async def test_a_step_with_nothing_to_do_says_so(user: User):
    run = await user.run()
    before = await user.loss(run, 1)
    assert (await user.result(await user.step(run, 2))).metrics["skipped"] == 1
    assert await user.loss(run, 3) == before


async def test_a_save_sees_exactly_what_was_before_it(user: User):
    run = await user.run()
    promises = [await user.forward_backward(run, 1), await user.step(run, 2)]
    saving = asyncio.ensure_future(user.save(run, 3, "one"))
    await asyncio.sleep(0)
    promises += [await user.forward_backward(run, 4), await user.step(run, 5)]
    for promise in promises:
        await user.result(promise)
    path, after_two = await saving, await user.loss(run, 6)
    await user.load(run, 7, path)
    after_one = await user.loss(run, 8)
    assert after_one != after_two
    await user.forward_backward(run, 9, datum(4))
    await user.step(run, 10)  # the optimizer came back too: so this is the second step again
    assert await user.loss(run, 11) == after_two


async def test_a_run_that_could_not_be_made_fails_everything_after(user: User):
    session = await user.session()
    run = await user.run(session)
    path = await user.save_for_sampler(run, 1, "s")
    request = {"session_id": session, "model_seq_id": 1, "path": path, "optimizer": True}
    promise = await user.call(ops.LOAD_WEIGHTS, LoadWeightsRequest(**request))
    with pytest.raises(Failed, match="without optimizer state"):
        await user.result(promise)
    with pytest.raises(Failed, match="could not be made"):
        await user.result(await user.forward_backward(f"{session}:train:1", 1))


async def test_a_run_that_could_not_be_made_is_listed_as_failed(home: Path):
    """Also where there is no engine at all, and after its process was killed before anybody had asked."""

    def broken(config: EngineConfig) -> Engine:
        raise EngineError("no such weights")

    async with serving(home, broken) as service:
        user = User(service)
        session = await user.session()
        request = training.CreateModelRequest(session_id=session, model_seq_id=0, base_model=MODEL)
        promise = await user.call(ops.CREATE_MODEL, request)
        with pytest.raises(Failed, match="no such weights") as first:
            await user.result(promise)
        listed = await user.call(ops.LIST_TRAINING_RUNS, training.ListTrainingRunsRequest())
        assert [run.corrupted for run in listed.training_runs] == [True]
        copy = killed_copy(home)
    async with serving(copy) as second:
        again = User(second)
        with pytest.raises(Failed) as told:
            await again.result(promise)
        assert (str(told.value), told.value.category) == (str(first.value), first.value.category)
        with pytest.raises(Refusal, match=r"could not be made: .*no such weights"):
            await again.forward_backward(f"{session}:train:0", 1)
        good = await again.run(session, number=1)
        listed = await again.call(ops.LIST_TRAINING_RUNS, training.ListTrainingRunsRequest())
        failed = {run.training_run_id: run.corrupted for run in listed.training_runs}
        assert failed == {good: False, f"{session}:train:0": True}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"lora_config": LoraConfig(rank=5000)}, "rank must be at most 1024"),
        ({"base_model": "no/such"}, "no base model is called 'no/such'; there are: m/base"),
        ({"optimizer_config": {"type": "dimuon", "version": 1}}, "no optimizer 'dimuon'"),
    ],
)
async def test_what_is_not_offered_is_refused_by_name(user: User, change: dict, says: str):
    fields = {"session_id": await user.session(), "model_seq_id": 0, "base_model": MODEL, **change}
    with pytest.raises(Refusal, match=says):
        await user.call(ops.CREATE_MODEL, training.CreateModelRequest(**fields))


async def test_a_suffix_of_a_base_models_name_is_understood(user: User):
    fields = {"session_id": await user.session(), "model_seq_id": 0, "base_model": f"{MODEL}:peft:131072"}
    promise = await user.call(ops.CREATE_MODEL, training.CreateModelRequest(**fields))
    run = (await user.result(promise)).model_id
    info = await user.call(ops.GET_INFO, training.GetInfoRequest(model_id=run))
    assert info.model_data.model_name == MODEL


async def test_runs_of_different_users_share_a_batch(service: Service):
    users = [User(service, name) for name in ("ann", "bob", "cy")]
    runs = [await user.run() for user in users]
    seen: list[int] = []
    engine = service.models.find(MODEL).engine
    assert engine is not None
    execute = engine.trainer._execute

    def watched(command):
        seen.append(len(getattr(command, "passes", ())))
        return execute(command)

    engine.trainer._execute = watched  # type: ignore[method-assign]
    promises = [await user.forward_backward(run, 1) for user, run in zip(users, runs, strict=True)]
    for user, promise in zip(users, promises, strict=True):
        await user.result(promise)
    assert sum(seen) == 3
    assert max(seen) >= 2  # the first may have gone alone


async def test_of_steps_done_together_only_those_fail_that_do(home: Path):
    """A pass of one run holds the trainer up until all the steps are there."""
    held, failing = threading.Event(), []

    class Held(FakeEngine):
        def __init__(self, config: EngineConfig) -> None:
            super().__init__(config)
            execute = self.trainer._execute

            def run(command):
                if isinstance(command, ForwardBackward):
                    assert held.wait(10)
                if isinstance(command, OptimStep) and command.run in failing:
                    raise EngineError("out of memory")
                return execute(command)

            self.trainer._execute = run  # type: ignore[method-assign]

    async with serving(home, Held) as service:
        user = User(service)
        runs = [await user.run() for _ in range(4)]
        failing.append(runs[1])
        for run in runs:
            await user.forward_backward(run, 1)
        steps = [await user.step(run, 2) for run in runs]
        held.set()
        with pytest.raises(Failed, match="out of memory"):
            await user.result(steps.pop(1))
        for promise in steps:
            assert (await user.result(promise)).metrics["optimizer_step"] == 1
        failing.clear()
        assert (await user.result(await user.step(runs[1], 3))).metrics["skipped"] == 1  # nothing is left


async def test_a_gap_is_not_given_up_while_what_it_waits_for_is_written_down(
    home: Path, monkeypatch: pytest.MonkeyPatch
):
    """A large request takes its time on the way to the disk, and the patience with its absence ends."""
    keep, begun, go_on = Journal.accept, threading.Event(), threading.Event()

    def slowly(journal: Journal, entry: JournalEntry) -> None:
        if entry.seq_id == 1:
            begun.set()
            go_on.wait(30)
        keep(journal, entry)

    async with serving(home, gap_patience=0.05) as service:
        user = User(service)
        run = await user.run()
        monkeypatch.setattr(request_content, "LARGE_PASS", 0)
        monkeypatch.setattr(Journal, "accept", slowly)
        second = await user.forward_backward(run, 2)
        first = asyncio.create_task(user.forward_backward(run, 1))
        await asyncio.to_thread(begun.wait, 30)
        await asyncio.sleep(0.5)  # ten times the patience
        go_on.set()
        losses = [(await user.result(promise)).metrics["loss:sum"] for promise in (await first, second)]
        assert all(losses)

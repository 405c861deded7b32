"""Runs are named, tagged, found, measured and deleted."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from tests.service.harness import MODEL, User, serving
from tinkex.service.refusal import Caller, Refusal
from tinkex.service.rows import RunRow, SessionRow
from tinkex.service.run_listing import run_status
from tinkex.service.service import Service
from tinkex.types import training
from tinkex.types.data import Datum, ModelInput
from tinkex.types.params import LoraConfig
from tinkex.types.training import ForwardBackwardInput, ForwardBackwardRequest
from tinkex.wire import ops

pytestmark = pytest.mark.anyio


async def shown(user: User, run: str) -> training.TrainingRun:
    return await user.call(ops.GET_TRAINING_RUN, training.GetTrainingRunRequest(training_run_id=run))


async def test_a_run_has_the_name_and_tags_that_it_was_given_and_others_later(service: Service):
    user = User(service)
    session = await user.session()
    create = training.CreateModelRequest(
        session_id=session, model_seq_id=0, base_model=MODEL, lora_config=LoraConfig(4, 1), name="first",
        tags=["a", "b"],
    )  # fmt: skip
    run = (await user.result(await user.call(ops.CREATE_MODEL, create))).model_id
    found = await shown(user, run)
    assert (found.name, found.tags, found.status) == ("first", ["a", "b"], "running")
    update = training.UpdateRunRequest(training_run_id=run, name="  second \n one", tags=["c", "c", " "])
    await user.call(ops.UPDATE_RUN, update)
    found = await shown(user, "second one")
    assert (found.training_run_id, found.name, found.tags) == (run, "second one", ["c"])
    await user.call(ops.UPDATE_RUN, training.UpdateRunRequest(training_run_id=run, tags=[]))
    assert (await shown(user, run[:8])).name == "second one", "by the beginning of its id"
    with pytest.raises(Refusal, match="does not exist"):
        await shown(user, "no such run")
    with pytest.raises(Refusal, match="does not exist"):
        await shown(User(service, "bob"), "second one")


async def test_an_id_that_is_several_runs_is_refused_by_name(service: Service):
    user = User(service)
    session = await user.session()
    for number in (0, 1):
        create = training.CreateModelRequest(session_id=session, model_seq_id=number, base_model=MODEL)
        await user.result(await user.call(ops.CREATE_MODEL, create))
    with pytest.raises(Refusal, match=r"may be several runs, as .*:train:1 and .*:train:0"):
        await shown(user, session)


async def test_a_deleted_run_leaves_nothing_and_its_requests_end(service: Service):
    user = User(service)
    run = await user.run()
    await user.train(run, 1, 3)
    saved = await user.save(run, 7, "kept")
    with pytest.raises(Refusal, match=f"has 1 checkpoints, as {saved}"):
        await user.call(ops.DELETE_RUN, training.DeleteRunRequest(training_run_id=run))
    assert (await shown(user, run)).steps == 3
    await user.call(ops.DELETE_RUN, training.DeleteRunRequest(training_run_id=run, checkpoints=True))
    with pytest.raises(Refusal, match="does not exist"):
        await shown(user, run)
    assert not service.home.run_dir(run).exists()
    assert service.ledger.checkpoints_of_run(run) == []
    with pytest.raises(Refusal, match="does not exist"):
        await user.loss(run, 8)
    other = await user.run()
    assert await user.loss(other, 1) > 0, "others go on"


async def test_another_process_deletes_no_run_that_is_in_use(home: Path):
    async with serving(home) as service:
        run = await User(service).run()
        service.flush()
        beside = Service(service.config)
        await beside.look()
        try:
            everything = training.DeleteRunRequest(training_run_id=run, checkpoints=True)
            with pytest.raises(Refusal, match="in use by another process"):
                await beside.call(ops.DELETE_RUN, everything, Caller(User(service).caller.user))
        finally:
            beside.ledger.close()
        assert await User(service).loss(run, 1) > 0


@pytest.mark.slow
async def test_totals_of_a_run_are_those_of_its_requests_and_survive_a_restart(home: Path):
    async with serving(home) as service:
        user = User(service)
        run = await user.run()
        await user.train(run, 1, 300)
        first = service.ledger.run(run)
    assert first is None or first.steps <= 300
    async with serving(home) as service:
        row = service.ledger.run(run)
        assert row is not None
        lines = (await User(service).call(
            ops.GET_RUN_METRICS, training.GetTrainingRunRequest(training_run_id=run)
        )).splitlines()  # fmt: skip
        losses = [json.loads(line)["loss"] for line in lines]
        tokens = sum(json.loads(line)["tokens:sum"] for line in lines)
        assert (row.steps, row.tokens, row.loss) == (300, tokens, pytest.approx(losses[-1]))
        assert row.seconds > 0
        assert 48 <= len(row.curve) < 96
        mean = sum(row.curve) / len(row.curve)
        assert mean == pytest.approx(sum(losses) / len(losses), rel=0.1), "means of equal parts of the loss"


async def test_what_a_client_logs_is_kept_with_its_step(service: Service):
    user = User(service)
    run = await user.run()
    await user.train(run, 1, 2)
    await user.loss(run, 5)  # after the last step
    for step, reward in ((None, 0.5), (1, 0.25)):
        logged = training.LogRunMetricsRequest(training_run_id=run, metrics={"reward": reward}, step=step)
        await user.call(ops.LOG_RUN_METRICS, logged)
    lines = await user.call(ops.GET_RUN_METRICS, training.GetTrainingRunRequest(training_run_id=run))
    by_step = {line["step"]: line["reward"] for line in map(json.loads, lines.splitlines())}
    assert by_step == {1: 0.25, 2: 0.5}


async def test_a_step_tells_entropy_and_advantages_and_where_its_time_went(service: Service):
    user = User(service)
    run = await user.run()
    advantages = ([0.0, 2.0, 2.0], [0.0, -1.0, -1.0], [0.0, 0.0, 0.0])
    data = [
        Datum(ModelInput.from_ints([5, 6, 7]),
              {"target_tokens": [6, 7, 8], "logprobs": [0.0, -1.0, -1.0], "advantages": given})
        for given in advantages
    ]  # fmt: skip
    work = ForwardBackwardInput(data, "importance_sampling", None)
    promise = await user.call(ops.FORWARD_BACKWARD, ForwardBackwardRequest(work, run, 1))
    output = await user.result(promise)
    await user.result(await user.step(run, 2))
    await user.result(await user.step(run, 3))
    (line, *_) = (
        await user.call(ops.GET_RUN_METRICS, training.GetTrainingRunRequest(training_run_id=run))
    ).splitlines()
    line = json.loads(line)
    sampled = [lp for record in output.loss_fn_outputs for lp in record["logprobs"].tolist()[1:]]
    assert line["entropy:mean"] == pytest.approx(-sum(sampled) / len(sampled))
    assert line["advantage:mean"] == pytest.approx((2.0 - 1.0) / 3)
    assert line["positive_advantages:mean"] == pytest.approx(1 / 3)
    assert line["answer_tokens:mean"] == 2
    assert line["reward_spread:mean"] == pytest.approx(3.0)
    assert "better_answers:mean" not in line  # three rewards, and not centred
    assert line["seconds"] > 0
    assert line["waiting_seconds"] >= 0
    assert line["publishing_seconds"] == 0


def test_a_state_tells_the_truth():
    now = time.time()

    def state(last: float, seen: float, **more: object) -> tuple[str, str | None]:
        busy = bool(more.pop("busy", False))
        row = RunRow("s:train:0", "s", 0, "ann", MODEL, LoraConfig(4, 1), 0.0, now - last, **more)  # type: ignore[arg-type]
        return run_status(row, now - seen, 300.0, busy=busy)

    assert state(5, 5) == ("running", None)
    assert state(130, 5) == ("idle", "its client has sent nothing for 2 min")
    assert state(130, 5, busy=True) == ("running", None)
    assert state(9000, 7300) == ("interrupted", "its client was last heard of 2 h ago")
    assert state(5, 5, ended="finished") == ("finished", None)
    assert state(5, 5, ended="failed", ended_why="boom") == ("failed", "boom")
    assert state(5, 5, ended="finished", corrupted=True, problem="no disk") == ("failed", "no disk")


async def test_without_keys_the_runs_of_scripts_on_this_machine_are_seen_and_with_keys_not(service: Service):
    ledger = service.ledger
    ledger.add_session(SessionRow("e", "local", 1.0, 1.0))
    ledger.add_run(RunRow("e:train:0", "e", 0, "local", MODEL, LoraConfig(4, 1), 1.0, 1.0))
    asking = training.GetTrainingRunRequest(training_run_id="e:train:0")
    listing = training.ListTrainingRunsRequest()
    keyless, keyed = Caller("ann", sees_local=True), Caller("ann")
    assert (await service.call(ops.GET_TRAINING_RUN, asking, keyless)).model_owner == "local"
    assert len((await service.call(ops.LIST_TRAINING_RUNS, listing, keyless)).training_runs) == 1
    assert (await service.call(ops.LIST_TRAINING_RUNS, listing, keyed)).training_runs == []
    with pytest.raises(Refusal, match="not yours"):
        await service.call(ops.GET_TRAINING_RUN, asking, keyed)

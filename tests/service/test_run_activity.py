"""What a run's state and page say while its samples are drawn, and how runs are searched and thinned out."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest

from tests.service.harness import MODEL, User, serving, until
from tinkex.engine.fake import FakeEngine
from tinkex.server.console.live_service import LiveService
from tinkex.service import run_metrics
from tinkex.service.refusal import Refusal
from tinkex.service.rows import RunQuery, RunRow, Scope, SessionRow
from tinkex.service.run_series import LOGGED
from tinkex.service.service import Service
from tinkex.types.data import ModelInput
from tinkex.types.params import LoraConfig, SamplingParams
from tinkex.types.sampling import SampleRequest
from tinkex.types.training import GetTrainingRunRequest, LogRunMetricsRequest
from tinkex.wire import ops

pytestmark = pytest.mark.anyio


class HeldSampling(FakeEngine):
    """Samples once it is told to."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.go_on = asyncio.Event()
        sample = self.sampler.sample

        async def held(work: Any) -> Any:
            await self.go_on.wait()
            return await sample(work)

        self.sampler.sample = held  # type: ignore[method-assign]


async def test_a_run_whose_samples_are_drawn_is_running_and_says_so(home: Path):
    engines = list[HeldSampling]()

    def build(config: Any) -> HeldSampling:
        engines.append(HeldSampling(config))
        return engines[-1]

    async with serving(home, build, samples_in_flight=8) as service:
        user, other = User(service), User(service, "bob")
        run, idle = await user.run(), await user.run(number=1)
        sampler, held = await user.unnamed_sampler(run, 1, 0), await other.sampler(await other.session())

        def as_of_long_ago(name: str) -> RunRow:
            service.flush()
            service.ledger.update_run(name, last_request_at=time.time() - 600)
            row = service.ledger.run(name)
            assert row is not None
            return row

        async def status(name: str) -> str:
            row = as_of_long_ago(name)
            asked = GetTrainingRunRequest(training_run_id=row.run_id)
            return (await user.call(ops.GET_TRAINING_RUN, asked)).status

        def says(name: str) -> str:
            row = service.ledger.run(name)
            assert row is not None
            return LiveService(service).waits_for(row, user.caller.owns)

        assert (await status(run), says(run)) == ("idle", "")
        promise = await user.sample(sampler, num_samples=6)
        await asyncio.sleep(0)
        assert (await status(run), says(run)) == ("running", "draws 6 samples")
        assert run in LiveService(service).busy()
        assert (await status(idle), says(idle)) == ("idle", "")
        last = service.ledger.run(run)
        assert last is not None
        await user.sample(sampler, 1)
        service.flush()
        row = service.ledger.run(run)
        assert row is not None
        assert row.last_request_at > time.time() - 60, "a sample is a request of the run"
        engines[0].go_on.set()
        await user.result(promise)
        await until(lambda: not service.samplers.running)
        assert (await status(run), says(run)) == ("idle", "")
        engines[0].go_on.clear()
        await other.sample(held, num_samples=8)
        await asyncio.sleep(0.01)
        waiting = await user.sample(sampler, 2)
        await until(lambda: says(run) == "its samples wait: 1 requests wait for room to be sampled", 5)
        engines[0].go_on.set()
        await user.result(waiting)


async def test_samples_from_a_checkpoint_in_another_session_are_no_activity_of_its_run(service: Service):
    user = User(service)
    run = await user.run()
    path = await user.save_for_sampler(run, 1, "one")
    service.flush()
    service.ledger.update_run(run, last_request_at=1.0)
    await user.result(await user.sample(await user.sampler(await user.session(), path=path)))
    service.flush()
    row = service.ledger.run(run)
    assert row is not None
    assert row.last_request_at == 1.0


async def test_a_search_finds_letters_of_any_language_in_either_case(service: Service):
    ledger = service.ledger
    ledger.add_session(SessionRow("s", "ann", 1.0, 1.0))
    for n, (name, tags) in enumerate([("Übung macht", ["été"]), ("STRASSE", ["ΣΊΣΥΦΟΣ"]), ("plain 50%", [])]):
        row = RunRow(f"s:train:{n}", "s", n, "ann", "m", LoraConfig(4, 1), 1.0, 1.0, name=name, tags=tags)
        ledger.add_run(row)

    def found(text: str, **more: Any) -> list[int]:
        page = ledger.find_runs(RunQuery(text, order="name", descending=False, **more), Scope("ann"), limit=9)
        return [row.model_seq_id for row in page.rows]

    assert found("übung") == found("ÜBUNG") == found("Übung") == found("ÉTÉ") == found("été") == [0]
    assert found("straße") == found("σίσυφος") == found("strasse") == [1]
    assert (found("0%"), found("é%"), found("", tag="été")) == ([2], [], [0])


async def test_a_run_may_log_only_so_many_metrics(service: Service, monkeypatch: pytest.MonkeyPatch):
    user = User(service)
    run = await user.run()

    async def log(*names: str) -> None:
        request = LogRunMetricsRequest(training_run_id=run, metrics=dict.fromkeys(names, 1.0), step=1)
        await user.call(ops.LOG_RUN_METRICS, request)

    for first in range(0, 500, 100):
        await log(*(f"m{n}" for n in range(first, first + 100)))
    await log("m7", "m499")
    with pytest.raises(Refusal, match="500") as refused:
        await log("m7", "one more")
    assert refused.value.status == 422
    service.metrics._logged.clear()  # as after a restart
    with pytest.raises(Refusal, match="500"):
        await log("one more")
    lines = (service.home.run_dir(run) / LOGGED).read_text().splitlines()
    assert len(lines) == 6


async def test_a_long_run_is_thinned_out_beside_what_is_written(
    service: Service, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(run_metrics, "MAX_BYTES", 4000)
    user = User(service)
    run = await user.run()
    for step in range(400):
        value = 99.0 if step == 123 else 1.0
        request = LogRunMetricsRequest(training_run_id=run, metrics={"reward": value}, step=step)
        await user.call(ops.LOG_RUN_METRICS, request)
        if step % 25 == 24:  # on a busy machine the thread may come to nothing meanwhile
            await until(lambda: not service.metrics._thinned)
    await until(lambda: not service.metrics._thinned)
    path = service.home.run_dir(run) / LOGGED
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert path.stat().st_size < 6000
    assert lines[-1]["step"] == 399
    assert [line["reward"] for line in lines].count(99.0) == 1
    steps = [line["step"] for line in lines]
    assert steps == sorted(set(steps))
    assert not list(path.parent.glob("*.part"))


async def test_a_run_tells_its_settings_and_how_long_its_samples_were_drawn(home: Path):
    engines = list[HeldSampling]()

    def build(config: Any) -> HeldSampling:
        engines.append(HeldSampling(config))
        return engines[-1]

    async with serving(home, build) as service:
        user = User(service)
        run = await user.run()
        sampler = await user.unnamed_sampler(run, 1, 0)
        await user.train(run, 2, 1)
        drawn = [await user.sample(sampler, n) for n in range(3)]
        await asyncio.sleep(0.3)
        engines[0].go_on.set()
        for promise in drawn:
            await user.result(promise)
        await user.forward_backward(run, 4)
        await user.result(await user.step(run, 5, learning_rate=0.125))
        service.flush()
        row = service.ledger.run(run)
        assert row is not None
        settings = row.optimizer_config
        found = {name: settings[name] for name in ("type", "learning_rate", "beta2", "loss_fn")}
        assert found == {"type": "adamw", "learning_rate": 0.125, "beta2": 0.95, "loss_fn": "cross_entropy"}
        asked = GetTrainingRunRequest(training_run_id=run)
        first, second = (
            json.loads(one) for one in (await user.call(ops.GET_RUN_METRICS, asked)).splitlines()
        )
        assert "sampling_seconds" not in first
        assert 0.25 < second["sampling_seconds"] <= second["wall_seconds"], "three at once count once"


async def test_samples_without_a_session_are_counted_as_usage(service: Service):
    """As the playground draws them."""
    user, params = User(service), SamplingParams(max_tokens=4, seed=1, stop=[])
    request = SampleRequest(ModelInput.from_ints([5, 6, 7]), params, 1, base_model=MODEL)
    await user.result(await user.call(ops.SAMPLE, request))
    service.flush()
    used = service.ledger.usage(0.0, time.time() + 3600, Scope("ann"))
    assert {row.kind: row.amount for row in used} == {"sampling_prefill": 3, "sampling_sample": 4}
    assert {(row.session_id, row.run_id) for row in used} == {(None, None)}

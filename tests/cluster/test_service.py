"""A service on a cluster: where runs go; that clients do not notice when a trainer or a sampler dies."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.cluster.nodes import Nodes, actors
from tests.cluster.work import sample_work
from tests.service.harness import MODEL, User, datum, serving, until
from tinkex.engine.cluster.cluster_engine import ClusterEngine
from tinkex.engine.cluster.remote_trainer import RemoteExport
from tinkex.engine.fake import FakeEngine
from tinkex.engine.fake.bigram import FakeExport
from tinkex.engine.protocol import CreateAdapter, Engine, EngineConfig, ExportAdapter, Placement, build_engine
from tinkex.service.refusal import Caller
from tinkex.service.sample_events import SampleEvents
from tinkex.service.service import Service
from tinkex.types.config import EmptyRequest
from tinkex.types.data import ModelInput
from tinkex.types.outputs import NewTokens
from tinkex.types.params import LoraConfig, SamplingParams
from tinkex.types.sampling import SampleRequest
from tinkex.wire import ops

ray = pytest.importorskip("ray")

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.xdist_group("ray")]


@contextlib.asynccontextmanager
async def clustered(home: Path, nodes: Nodes, **changes: Any) -> AsyncIterator[Service]:
    """A service whose one base model has two trainers and two samplers."""
    wanted = {"trainers": 2, "samplers": 2, "max_samplers": 2, **changes.pop("placement", {})}
    placements = {MODEL: Placement(nodes.address, **wanted)}
    # Processes take their time on a busy machine.
    async with serving(home, build_engine, placements=placements, long_poll=80.0, **changes) as service:
        yield service


async def alone(home: Path, runs: int, steps: int) -> list[list[float]]:
    """What each of some runs should report: losses of an engine in this process."""
    async with serving(home) as service:
        user = User(service)
        return [await user.train(await user.run(seed=n), 1, steps) for n in range(runs)]


async def drawn_by(
    user: User, sampler: str, prompts: list[tuple[int, ...]], **params: Any
) -> list[list[int]]:
    """The tokens that a sampler draws after each prompt, one after the other."""
    tokens: list[list[int]] = []
    for n, prompt in enumerate(prompts):
        response = await user.result(await user.sample(sampler, n, prompt, **params))
        tokens.append(response.sequences[0].tokens)
    return tokens


async def test_runs_are_spread_over_trainers_and_stay_there(tmp_path: Path, ray_nodes: Nodes):
    expected = await alone(tmp_path / "alone", 4, 3)
    async with clustered(tmp_path / "home", ray_nodes) as service:
        user = User(service)
        runs = [await user.run(seed=n) for n in range(4)]
        assert [await user.train(run, 1, 3) for run in runs] == expected
        where = {run: service.ledger.run(run).trainer for run in runs}  # type: ignore[union-attr]
        assert Counter(where.values()) == {0: 2, 1: 2}
        for run in runs:
            assert await service.runs.evict(service.runs.get(run))  # type: ignore[arg-type]
        await user.train(runs[2], 7, 1)
        await user.train(runs[0], 7, 1)
        assert service.ledger.run(runs[0]).trainer == where[runs[0]]  # type: ignore[union-attr]
    async with clustered(tmp_path / "home", ray_nodes, placement={"trainers": 1}) as service:
        user = User(service)
        assert await user.train(runs[1], 7, 1), "one trainer has all runs of the two"
        assert len(actors("TrainerActor")) == 1


async def test_only_an_evicted_run_moves_to_a_trainer_with_fewer(tmp_path: Path, ray_nodes: Nodes):
    expected = await alone(tmp_path / "alone", 5, 2)
    async with clustered(tmp_path / "home", ray_nodes) as service:
        user = User(service)
        runs = [await user.run(seed=n) for n in range(5)]

        def where() -> list[int]:
            return [service.ledger.run(run).trainer for run in runs]  # type: ignore[union-attr]

        assert where() == [0, 1, 0, 1, 0]
        for n in (1, 3, 4):
            assert await service.runs.evict(service.runs.get(runs[n]))  # type: ignore[arg-type]
        for n in (0, 2):  # they are in memory: the empty trainer gets none of them
            assert await user.train(runs[n], 1, 2) == expected[n]
        assert where() == [0, 1, 0, 1, 0]
        assert await user.train(runs[4], 1, 2) == expected[4]
        assert where() == [0, 1, 0, 1, 1]


async def test_a_run_published_by_one_trainer_is_sampled_on_every_sampler(tmp_path: Path, ray_nodes: Nodes):
    async with clustered(tmp_path / "home", ray_nodes) as service:
        user = User(service)
        runs = [await user.run(seed=n) for n in range(2)]
        for run in runs:
            await user.train(run, 1, 2)
        samplers = [await user.unnamed_sampler(run, 5, n) for n, run in enumerate(runs)]
        prompts = [(5 + n, 6, 7) for n in range(12)]
        drawn = [
            [
                (await user.result(await user.sample(sampler, n, prompt))).sequences[0].tokens
                for sampler in samplers
            ]
            for n, prompt in enumerate(prompts)
        ]
        assert any(first != second for first, second in drawn)
        engine = service.models.find(MODEL).engine
        assert isinstance(engine, ClusterEngine)
        held = [len(sampler.adapters) for sampler in engine.sampler.samplers.values()]
        assert held == [2, 2], "each pulled both on first use"


async def test_a_killed_trainer_is_replaced_and_no_future_fails(tmp_path: Path, ray_nodes: Nodes):
    expected = await alone(tmp_path / "alone", 4, 6)
    async with clustered(tmp_path / "home", ray_nodes, snapshot_steps=2) as service:
        user = User(service)
        runs = [await user.run(seed=n) for n in range(4)]
        first = [await user.train(run, 1, 3) for run in runs]
        working = [asyncio.create_task(user.train(run, 7, 3)) for run in runs]
        victim, other = actors("TrainerActor")
        victim.kill()
        again = await asyncio.gather(*working)
        # The steps are those of an undisturbed run, datum for datum.
        wanted = await _continued(tmp_path / "calm")
        assert first == [losses[:3] for losses in expected]
        assert again == wanted
        assert other.is_running()
        assert len(actors("TrainerActor")) == 2
        assert (await user.call(ops.GET_HEALTH, EmptyRequest())).status == "ok"


async def _continued(home: Path) -> list[list[float]]:
    async with serving(home) as service:
        user = User(service)
        losses = []
        for n in range(4):
            run = await user.run(seed=n)
            await user.train(run, 1, 3)
            losses.append(await user.train(run, 7, 3))
        return losses


async def test_samples_of_a_killed_sampler_are_drawn_elsewhere(tmp_path: Path, ray_nodes: Nodes):
    async with clustered(tmp_path / "home", ray_nodes) as service:
        user = User(service)
        run = await user.run()
        await user.train(run, 1, 2)
        sampler = await user.unnamed_sampler(run, 5, 0)
        prompts = [(5 + n, 6, 7) for n in range(40)]
        calm = await drawn_by(user, sampler, prompts, max_tokens=40)
        asked = [await user.sample(sampler, 100 + n, p, max_tokens=40) for n, p in enumerate(prompts)]
        for process in actors("SamplerActor"):  # both: they wait for the next
            process.kill()
        again = [await user.result(promise) for promise in asked]
        assert [r.sequences[0].tokens for r in again] == calm
        await until(lambda: len(actors("SamplerActor")) == 2)
        assert await user.train(run, 6, 1), "the trainers noticed nothing"


async def test_a_sample_is_streamed(tmp_path: Path, ray_nodes: Nodes):
    async with clustered(tmp_path / "home", ray_nodes, placement={"samplers": 1}) as service:
        user = User(service)
        session = (await user.run()).split(":")[0]
        prompt = ModelInput.from_ints([5, 6, 7])
        request = SampleRequest(
            prompt, SamplingParams(max_tokens=20, seed=3, stop=[]), 1, await user.sampler(session), 0
        )
        events = [event async for event in SampleEvents(service.samplers, request, Caller("ann"))]
        streamed = [int(token) for event in events if isinstance(event, NewTokens) for token in event.tokens]
        assert streamed == events[-1].sequences[0].tokens  # type: ignore[union-attr]
        assert len(streamed) == 20


async def test_samplers_come_when_requests_wait_and_go_when_they_are_idle(
    ray_nodes: Nodes, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("tinkex.engine.cluster.routing.BUSY_SECONDS", 0.3)
    monkeypatch.setattr("tinkex.engine.cluster.routing.IDLE_SECONDS", 1.0)
    placement = Placement(ray_nodes.address, samplers=1, max_samplers=2)
    config = EngineConfig("fake", kind="fake", max_context=2048, max_batch=2, placement=placement)
    engine = build_engine(config)
    try:
        crowd = [asyncio.create_task(engine.sampler.sample(sample_work(n, 2000))) for n in range(40)]
        await until(lambda: engine.heartbeat().stats["samplers"] == 2)
        for response in await asyncio.gather(*crowd):
            assert len(response.sequences[0].tokens) == 2000
        await until(lambda: engine.heartbeat().stats["samplers"] == 1)
        assert (await engine.sampler.sample(sample_work(0, 3))).sequences[0].tokens
    finally:
        await asyncio.to_thread(engine.close)


async def test_a_lost_export_is_read_from_where_it_was_saved(tmp_path: Path, ray_nodes: Nodes):
    async with clustered(tmp_path / "home", ray_nodes, placement={"trainers": 1, "samplers": 1}) as service:
        user = User(service)
        run = await user.run()
        await user.train(run, 1, 2)
        sampler = await user.unnamed_sampler(run, 5, 0)
        calm = await user.result(await user.sample(sampler, 0))
        for process in actors("TrainerActor"):  # it owns the exported bytes
            process.kill()
        await user.loss(run, 6, datum(0))
        for process in actors("SamplerActor"):
            process.kill()
        again = await user.result(await user.sample(sampler, 1))
        assert again.sequences[0].tokens == calm.sequences[0].tokens


@dataclass(frozen=True)
class LargeExport(FakeExport):
    """An exported adapter that goes through the object store, as real ones do."""

    payload: np.ndarray


def telling(marks: Path, config: EngineConfig) -> Engine:
    """An engine that exports much, whose sampler marks each: its node, and if the memory is its own."""
    engine = FakeEngine(config)
    export, publish = engine.trainer._export, engine.sampler.publish

    async def told(name: str, source: Any) -> None:
        node, own = ray.get_runtime_context().get_node_id(), source.payload.flags.owndata
        await asyncio.to_thread((marks / f"{node}.{os.getpid()}.{own}").touch)
        await publish(name, source)

    def large(adapter: Any) -> LargeExport:
        made = export(adapter)
        return LargeExport(made.lora, made.model, made.params, np.ones(1 << 20, np.uint8))

    engine.trainer._export, engine.sampler.publish = large, told  # type: ignore[method-assign]
    return engine


async def test_an_adapter_goes_to_each_node_once(tmp_path: Path, ray_nodes: Nodes):
    placement = Placement(ray_nodes.address, samplers=6, max_samplers=6)
    config = EngineConfig("fake", kind="fake", max_context=64, placement=placement)
    engine = await asyncio.to_thread(ClusterEngine, config, partial(telling, tmp_path))
    try:
        await asyncio.wrap_future(engine.trainer.submit(CreateAdapter("run", LoraConfig(rank=4, seed=1))))
        exported = await asyncio.wrap_future(engine.trainer.submit(ExportAdapter("run")))
        await engine.sampler.publish("adapter", exported)
        for n in range(1000):
            await engine.sampler.sample(sample_work(n, 1, adapter="adapter"))
            if len(marks := await asyncio.to_thread(lambda: list(tmp_path.iterdir()))) == 6:
                break
        nodes = Counter(mark.name.split(".")[0] for mark in marks)
        assert sum(nodes.values()) == 6
        assert max(nodes.values()) > 1, "some nodes have several samplers"
        assert all(mark.name.endswith(".False") for mark in marks), "they read the node's one copy"
        assert isinstance(exported, RemoteExport)
        places = ray.experimental.get_object_locations(exported.stored.refs)
        (copies,) = [place["node_ids"] for place in places.values()]
        assert sorted(copies) == sorted(nodes), "one copy on each"
    finally:
        await asyncio.to_thread(engine.close)

"""Recovery: what it does not wait for, what it repeats, and what it leaves alone."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.nodes import CPUS, Nodes, actors
from tests.cluster.work import sample_work
from tests.service.harness import until
from tinkex.engine.cluster.actors import BytesLost, StoredExport
from tinkex.engine.cluster.cluster_engine import ClusterEngine
from tinkex.engine.cluster.remote_trainer import RemoteExport
from tinkex.engine.cluster.sampler_pool import RemoteSampler, SamplerPool
from tinkex.engine.fake import FakeEngine
from tinkex.engine.protocol import (
    CreateAdapter,
    Engine,
    EngineConfig,
    EngineError,
    EngineLost,
    ExportAdapter,
    Heartbeat,
    Placement,
    SampledTokens,
    SampleWork,
)
from tinkex.types.params import LoraConfig

pytestmark = [pytest.mark.slow, pytest.mark.anyio, pytest.mark.xdist_group("ray")]


async def built(nodes: Nodes, build: Any = FakeEngine, **placed: int) -> ClusterEngine:
    placement = Placement(nodes.address, **placed)
    config = EngineConfig("fake", kind="fake", max_context=2048, max_batch=2, placement=placement)
    return await asyncio.to_thread(ClusterEngine, config, build)


async def keep_sampling(engine: ClusterEngine) -> None:
    while True:
        await engine.sampler.sample(sample_work(1, 2000))


async def test_a_lost_sampler_is_replaced_while_another_waits_for_room(
    ray_nodes: Nodes, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("tinkex.engine.cluster.routing.BUSY_SECONDS", 0.2)
    # An actor takes a node: the three hold a trainer's processes and a sampler, and another one has no room.
    monkeypatch.setattr("tinkex.engine.cluster.cluster_engine._share", lambda *_: {"CPU": float(CPUS)})
    engine = await built(ray_nodes, data=2, samplers=1, max_samplers=2)
    try:
        crowd = [asyncio.create_task(engine.sampler.sample(sample_work(n, 2000))) for n in range(100)]
        await asyncio.sleep(1.5)  # another one is asked for
        assert not all(one.done() for one in crowd)
        for process in actors("SamplerActor"):
            process.kill()
        for response in await asyncio.wait_for(asyncio.gather(*crowd), 60.0):
            assert len(response.sequences[0].tokens) == 2000
        assert engine.heartbeat().alive
    finally:
        await asyncio.to_thread(engine.close)


async def test_a_sampler_that_finds_no_room_is_given_up_and_asked_for_again(
    ray_nodes: Nodes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr("tinkex.engine.cluster.routing.BUSY_SECONDS", 0.2)
    monkeypatch.setattr("tinkex.engine.cluster.cluster_engine.PLACING", 1.0)
    engine = await built(ray_nodes, samplers=1, max_samplers=2)
    try:
        engine._share["CPU"] = CPUS + 1.0  # more than any node has
        busy = [asyncio.create_task(keep_sampling(engine)) for _ in range(8)]
        await until(lambda: caplog.text.count("the cluster had no room for it") == 2)
        engine._share["CPU"] = 0.1
        await until(lambda: engine.heartbeat().stats["samplers"] == 2)
        assert not any(one.done() for one in busy)
        for one in busy:
            one.cancel()
    finally:
        await asyncio.to_thread(engine.close)


async def test_processes_that_are_silent_are_lost(ray_nodes: Nodes, monkeypatch: pytest.MonkeyPatch):
    engine = await built(ray_nodes)
    try:
        monkeypatch.setattr("tinkex.engine.cluster.heartbeats.SILENCE", 2.0)
        stopped = [*actors("SamplerActor"), *actors("TrainerActor")]
        assert len(stopped) == 2
        for process in stopped:
            process.suspend()
        command = engine.trainer.submit(CreateAdapter("run", LoraConfig(rank=4)))
        sampled = await asyncio.wait_for(engine.sampler.sample(sample_work(1, 20)), 60.0)
        assert len(sampled.sequences[0].tokens) == 20
        with pytest.raises(EngineLost, match="no report for"):
            await asyncio.wait_for(asyncio.wrap_future(command), 60.0)
        part = await asyncio.to_thread(engine.partition, 0)
        await asyncio.wrap_future(part.trainer.submit(CreateAdapter("run", LoraConfig(rank=4))))
        await until(lambda: not any(process.is_running() for process in stopped))
    finally:
        await asyncio.to_thread(engine.close)


def stuttering(mark: Path, pieces: int, config: EngineConfig) -> Engine:
    """An engine whose first stream of all stops after so many pieces."""
    engine = FakeEngine(config)
    stream = engine.sampler.stream

    def is_first() -> bool:
        with contextlib.suppress(FileExistsError):
            mark.touch(exist_ok=False)
            return True
        return False

    async def stutter(work: SampleWork) -> AsyncGenerator[Any, None]:
        first, sent = is_first(), 0
        async for piece in stream(work):
            if first and sent == pieces:
                await asyncio.sleep(600)
            yield piece
            sent += 1

    engine.sampler.stream = stutter  # type: ignore[method-assign]
    return engine


@pytest.mark.parametrize("pieces", [0, 3])
async def test_a_stream_is_repeated_unless_something_was_delivered(
    tmp_path: Path, ray_nodes: Nodes, pieces: int
):
    inside = partial(stuttering, tmp_path / "begun", pieces)
    engine = await built(ray_nodes, inside, samplers=2, max_samplers=2)
    got: list[int] = []

    async def read() -> list[int]:
        async for piece in engine.sampler.stream(sample_work(1, 20)):
            if not isinstance(piece, SampledTokens):
                return piece.sequences[0].tokens
            got.extend(int(token) for token in piece.tokens)
        raise AssertionError("it has no end")

    try:
        reading = asyncio.create_task(read())
        await until((tmp_path / "begun").exists)
        await until(lambda: len(got) == pieces)
        for process in actors("SamplerActor"):
            process.kill()
        if pieces:
            with pytest.raises(EngineLost, match="is gone"):
                await asyncio.wait_for(reading, 60.0)
            assert len(got) == pieces
        else:
            assert await asyncio.wait_for(reading, 60.0) == got
            assert len(got) == 20
    finally:
        await asyncio.to_thread(engine.close)


async def test_another_base_model_does_not_notice(ray_nodes: Nodes):
    mine = await built(ray_nodes)
    victims = [*actors("TrainerActor"), *actors("SamplerActor")]
    other = await built(ray_nodes)
    theirs = [one for one in [*actors("TrainerActor"), *actors("SamplerActor")] if one not in victims]
    trainer, samplers = other.trainer, dict(other.sampler.samplers)
    try:
        other.trainer.submit(CreateAdapter("theirs", LoraConfig(rank=4, seed=1))).result(60)
        calm = await other.sampler.sample(sample_work(1, 200))
        sampling = asyncio.create_task(other.sampler.sample(sample_work(1, 2000)))
        for process in victims:
            process.kill()
        with pytest.raises(EngineLost):
            await asyncio.wrap_future(mine.trainer.submit(CreateAdapter("mine", LoraConfig(rank=4))))
        again = await other.sampler.sample(sample_work(1, 200))
        assert again.sequences[0].tokens == calm.sequences[0].tokens
        assert len((await sampling).sequences[0].tokens) == 2000
        await asyncio.wrap_future(other.trainer.submit(ExportAdapter("theirs")))  # its run is still there
        await asyncio.to_thread(mine.partition, 0)
        assert (await mine.sampler.sample(sample_work(1, 3))).sequences[0].tokens
        assert other.partition(0).trainer is trainer
        assert other.sampler.samplers == samplers
        assert len(theirs) == 2
        assert all(process.is_running() for process in theirs)
    finally:
        await asyncio.to_thread(mine.close)
        await asyncio.to_thread(other.close)


class SlowToRefuse:
    """An actor that refuses every adapter, once it may."""

    def __init__(self) -> None:
        self.may, self.publish = asyncio.Event(), self

    async def remote(self, name: str, source: Any) -> EngineError:
        await self.may.wait()
        return EngineError(f"{name} is no adapter", "user")


async def test_who_publishes_a_name_at_the_same_time_hears_the_same():
    pool, actor = SamplerPool(8, lambda: None), SlowToRefuse()
    pool.add(RemoteSampler(0, actor, Heartbeat(True, "", {}, {})))
    both = [asyncio.create_task(pool.publish("x", "nowhere")) for _ in range(2)]
    await asyncio.sleep(0.1)
    assert not any(one.done() for one in both)
    actor.may.set()
    for one in both:
        with pytest.raises(EngineError, match="x is no adapter"):
            await one


class WithoutItsBytes:
    """An actor for which an export has gone with its trainer's process, once it may say so."""

    def __init__(self) -> None:
        self.may, self.publish, self.retire = asyncio.Event(), self, self

    async def remote(self, name: str, source: Any = None) -> EngineError | None:
        await self.may.wait()
        return None if source is None else BytesLost(f"the bytes of {name} are lost")


async def test_an_export_that_was_lost_before_it_was_saved_is_retired(monkeypatch: pytest.MonkeyPatch):
    """A save that its trainer's end cut off takes back what it published: no other error hides that end."""

    def missing(source: Any) -> Any:
        raise FileNotFoundError(f"there is nothing at {source}")

    monkeypatch.setattr("tinkex.engine.cluster.sampler_pool._stored", missing)
    pool, actor = SamplerPool(8, lambda: None), WithoutItsBytes()
    sampler = RemoteSampler(0, actor, Heartbeat(True, "", {}, {}))
    pool.add(sampler)
    exports = [RemoteExport(StoredExport([], LoraConfig(rank=4), 1, "s3://b/p", "run")) for _ in range(2)]
    await pool.publish("old", exports[0])
    sampler.adapters["old"] = Future()
    sampler.adapters["old"].set_result(None)
    await pool.publish("new", exports[1])  # which the sampler fetches early
    await asyncio.sleep(0.05)
    assert not sampler.adapters["new"].done()
    retiring = asyncio.create_task(pool.retire("new"))
    await asyncio.sleep(0.05)
    actor.may.set()
    await asyncio.wait_for(retiring, 10)
    assert "new" not in sampler.adapters

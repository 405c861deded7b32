"""An engine of two ranks (`tensor=2`, gloo) behind Ray actors: trains, samples, and is replaced when it dies.

The oracle is one engine in this process, whose model is whole.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from tests.cluster.nodes import Nodes, actors
from tests.engine.tiny import tiny_model
from tests.service.harness import MODEL, User, serving
from tests.service.harness import datum as harness_datum
from tinkex.engine.protocol import (
    CreateAdapter,
    Engine,
    EngineConfig,
    ExportAdapter,
    OptimStep,
    Pass,
    Placement,
    SampleWork,
    build_engine,
    run_passes,
)
from tinkex.types.data import Datum, ModelInput
from tinkex.types.outputs import ForwardBackwardOutput
from tinkex.types.params import AdamParams, LoraConfig, SamplingParams

pytestmark = [pytest.mark.slow, pytest.mark.anyio, pytest.mark.xdist_group("ray")]

WORKER = "tinkex.engine.torch.tensor_parallel.worker"


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    model = tiny_model(tmp_path_factory.mktemp("model"), "qwen3_moe")
    return EngineConfig(str(model), device="cpu", dtype="float32", name="m/tiny", kv_bytes=1 << 20, threads=1)


@pytest.fixture(scope="module")
def engines(config: EngineConfig, ray_nodes: Nodes) -> Iterator[tuple[Engine, Engine]]:
    """One in this process, and one whose trainer and whose sampler have two ranks each."""
    ranks = build_engine(replace(config, tensor=2, placement=Placement(ray_nodes.address)))
    alone = build_engine(config)
    yield alone, ranks
    alone.close()
    ranks.close()


def do(engine: Engine, command: Any) -> Any:
    return engine.trainer.submit(command).result(60)


def datum(seed: int, length: int) -> Datum:
    ids = np.random.default_rng(seed).integers(3, 90, length + 1)
    return Datum(ModelInput.from_ints(ids[:-1]), {"target_tokens": ids[1:]})


def ranks_of(actor: psutil.Process) -> list[psutil.Process]:
    """The processes of an actor's other ranks."""
    found = []
    for child in actor.children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if WORKER in child.cmdline():
                found.append(child)
    return found


def test_two_ranks_behind_ray_compute_what_one_engine_does(engines: tuple[Engine, Engine]) -> None:
    for run, rank in {"narrow": 4, "wide": 16}.items():
        for engine in engines:
            do(engine, CreateAdapter(run, LoraConfig(rank=rank, seed=rank)))
    for step in range(3):
        passes = [
            Pass(run, [datum(10 * step + n, length) for n, length in enumerate((5, 17))], "cross_entropy")
            for run in ("narrow", "wide")
        ]
        for expected, got in zip(*(run_passes(e.trainer, passes) for e in engines), strict=True):
            assert isinstance(expected, ForwardBackwardOutput)
            assert isinstance(got, ForwardBackwardOutput)
            for a, b in zip(expected.loss_fn_outputs, got.loss_fn_outputs, strict=True):
                np.testing.assert_allclose(b["logprobs"].to_numpy(), a["logprobs"].to_numpy(), atol=1e-5)
        for run, clip in {"narrow": 1.0, "wide": 0.0}.items():
            first, second = (do(e, OptimStep(run, AdamParams(1e-3, grad_clip_norm=clip))) for e in engines)
            assert second == pytest.approx(first, rel=1e-5)
    one, two = (asyncio.run(sampled(engine)) for engine in engines)
    assert two[0] == one[0]
    np.testing.assert_allclose(two[1], one[1], atol=1e-4)


async def sampled(engine: Engine) -> tuple[list[int], list[float]]:
    await engine.sampler.publish("wide", do(engine, ExportAdapter("wide")))
    params = SamplingParams(max_tokens=8, temperature=0.0, stop=[])
    answer = await engine.sampler.sample(SampleWork(np.arange(4, 20, dtype=np.int32), params, "wide"))
    return list(answer.sequences[0].tokens), list(answer.sequences[0].logprobs)


@pytest.mark.timeout(300)  # three engines of two processes each, one after the other
async def test_a_run_is_restored_when_a_rank_or_its_actor_dies(
    config: EngineConfig, tmp_path: Path, ray_nodes: Nodes
) -> None:
    others, told = actors("TrainerActor"), []
    for placements in ({}, {MODEL: Placement(ray_nodes.address)}):  # undisturbed in this process, and on Ray
        more = {
            "placements": placements, "snapshot_steps": 2, "long_poll": 120.0, "tensor": {MODEL: 2},
            "models": {MODEL: config.model}, "engine": replace(config, model=""),
        }  # fmt: skip
        losses: list[float] = []
        async with serving(tmp_path / f"home-{len(told)}", build_engine, **more) as service:
            user = User(service)
            run = await user.run(seed=3)
            for step in range(5):
                if placements and step in (1, 3):
                    (actor,) = [one for one in actors("TrainerActor") if one not in others]
                    (rank,) = ranks_of(actor)
                    (rank if step == 1 else actor).kill()
                    gone_within(rank, 10.0)  # a rank does not outlive its actor
                data = [harness_datum(10 * step + n) for n in range(3)]
                passed = await user.forward_backward(run, 2 * step + 1, *data)
                await user.result(await user.step(run, 2 * step + 2))
                losses.append((await user.result(passed)).metrics["loss:sum"])
        told.append(losses)
    assert told[1] == told[0], "the losses of an undisturbed run, to the last bit"
    assert len(set(told[0])) == 5


def gone_within(process: psutil.Process, seconds: float) -> None:
    until = time.monotonic() + seconds
    while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < until
        time.sleep(0.05)

"""A trainer of several processes that share the datums of a pass: as one process, but for rounding."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.cluster.nodes import Nodes, actors
from tests.engine.tiny import tiny_model
from tests.service.harness import MODEL, User, serving
from tests.service.harness import datum as harness_datum
from tinkex.engine.cluster import gradient_group
from tinkex.engine.cluster.gradient_group import GradientGroup, host_store, store_at
from tinkex.engine.cluster.remote_trainer import fetch
from tinkex.engine.protocol import (
    ClearGradients,
    ContinuePasses,
    CreateAdapter,
    DropAdapter,
    Engine,
    EngineConfig,
    EngineError,
    EngineLost,
    Failure,
    ForwardBackward,
    LoadAdapter,
    OptimStep,
    Pass,
    PassProgress,
    Placement,
    SaveAdapter,
    build_engine,
    run_passes,
)
from tinkex.types.data import Datum, ModelInput
from tinkex.types.outputs import ForwardBackwardOutput
from tinkex.types.params import AdamParams, LoraConfig

pytestmark = [pytest.mark.slow, pytest.mark.anyio, pytest.mark.xdist_group("ray")]

STEP = AdamParams(learning_rate=1e-3, grad_clip_norm=1.0)
NEAR = {"rtol": 2e-5, "atol": 2e-6}  # sums of fp32 in another order


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    model = tiny_model(tmp_path_factory.mktemp("model"), "llama3")
    small = {"max_pass_tokens": 40, "kv_bytes": 1 << 20, "threads": 1}
    return EngineConfig(str(model), device="cpu", dtype="float32", name="m/tiny", **small)


@pytest.fixture(scope="module")
def engines(config: EngineConfig, ray_nodes: Nodes) -> Iterator[tuple[Engine, Engine]]:
    """One in this process, and one whose trainer has three processes."""
    shared = build_engine(replace(config, placement=Placement(ray_nodes.address, data=3)))
    alone = build_engine(config)
    yield alone, shared
    alone.close()
    shared.close()


def datum(seed: int, length: int, **inputs: Any) -> Datum:
    ids = np.random.default_rng(seed).integers(3, 90, length + 1)
    return Datum(ModelInput.from_ints(ids[:-1]), {"target_tokens": ids[1:], **inputs})


def do(engine: Engine, command: Any) -> Any:
    return engine.trainer.submit(command).result(60)


def weights(engine: Engine, run: str, place: Path) -> dict[str, np.ndarray]:
    do(engine, SaveAdapter(run, str(place), optimizer=True))
    return load_file(place / "adapter_model.safetensors") | load_file(place / "optimizer.safetensors")


@pytest.mark.parametrize("command", [ClearGradients, DropAdapter])
def test_passes_that_are_abandoned_leave_nothing_behind(engines: tuple[Engine, Engine], command: Any) -> None:
    _, shared = engines
    for run in ("left", "kept"):
        do(shared, CreateAdapter(run, LoraConfig(rank=4, seed=1)))
    passes = [Pass(run, [datum(n, 30) for n in range(12)], "cross_entropy") for run in ("left", "kept")]
    alone, both = do(shared, ForwardBackward((passes[0],))), do(shared, ForwardBackward(tuple(passes)))
    assert isinstance(alone, PassProgress)
    assert isinstance(both, PassProgress)
    do(shared, command("left"))
    assert [*shared.trainer._group._tickets] == [both.ticket]  # type: ignore[attr-defined]
    with pytest.raises(EngineError, match="no passes with the ticket"):
        do(shared, ContinuePasses(alone.ticket))
    outcome: Any = both
    while isinstance(outcome, PassProgress):
        outcome = do(shared, ContinuePasses(both.ticket))
    assert isinstance(outcome[0], Failure)
    assert isinstance(outcome[1], ForwardBackwardOutput)
    assert not shared.trainer._group._tickets  # type: ignore[attr-defined]
    for run in ("left", "kept"):
        do(shared, DropAdapter(run))


def test_steps_of_runs_of_any_rank_are_those_of_one_process(
    engines: tuple[Engine, Engine], tmp_path: Path
) -> None:
    for run, rank in {"narrow": 4, "wide": 16}.items():
        for engine in engines:
            do(engine, CreateAdapter(run, LoraConfig(rank=rank, seed=rank)))
    for step in range(5):
        # Eleven datums and one: the pass of one datum leaves two processes without work.
        lengths = (5, 9, 30, 7, 7, 2, 17, 12, 3, 8, 5)
        wide = [datum(100 * step + n, length) for n, length in enumerate(lengths)]
        passes = [Pass("wide", wide, "cross_entropy"), Pass("narrow", [datum(step, 6)], "cross_entropy")]
        one, several = (run_passes(engine.trainer, passes) for engine in engines)
        for expected, got in zip(one, several, strict=True):
            assert isinstance(expected, ForwardBackwardOutput)
            assert isinstance(got, ForwardBackwardOutput)
            assert got.metrics == pytest.approx(expected.metrics, rel=1e-5)
            for a, b in zip(expected.loss_fn_outputs, got.loss_fn_outputs, strict=True):
                np.testing.assert_allclose(b["logprobs"].to_numpy(), a["logprobs"].to_numpy(), **NEAR)
        for run in ("wide", "narrow"):
            first, second = (do(engine, OptimStep(run, STEP)) for engine in engines)
            assert second == pytest.approx(first, rel=1e-5)
    for run in ("wide", "narrow"):
        first, second = (weights(e, run, tmp_path / f"{n}-{run}") for n, e in enumerate(engines))
        assert first.keys() == second.keys()
        for name, expected in first.items():
            np.testing.assert_allclose(second[name], expected, rtol=2e-4, atol=2e-6, err_msg=name)
            apart = np.linalg.norm(second[name] - expected) / np.linalg.norm(expected)
            assert apart <= 1e-5, f"{name}: {apart}"


def test_every_process_has_what_the_first_one_saves(engines: tuple[Engine, Engine], tmp_path: Path) -> None:
    """What is loaded is trained on by all of them, moments included."""
    saved = tmp_path / "saved"
    for engine in engines:
        do(engine, CreateAdapter("saved", LoraConfig(rank=4, seed=1)))
    data = [datum(n, 5 + n) for n in range(6)]
    run_passes(engines[1].trainer, [Pass("saved", data, "cross_entropy")])
    do(engines[1], OptimStep("saved", STEP))
    do(engines[1], SaveAdapter("saved", str(saved), optimizer=True))
    for n, engine in enumerate(engines):
        do(engine, LoadAdapter("loaded", str(saved), optimizer=True))
        run_passes(engine.trainer, [Pass("loaded", data, "cross_entropy")])
        do(engine, OptimStep("loaded", STEP))
        weights(engine, "loaded", tmp_path / str(n))
    first, second = (load_file(tmp_path / str(n) / "adapter_model.safetensors") for n in range(2))
    for name, expected in first.items():
        np.testing.assert_allclose(second[name], expected, rtol=2e-4, atol=2e-6, err_msg=name)


def test_a_wrong_datum_is_named_by_its_place_and_leaves_earlier_gradients(
    engines: tuple[Engine, Engine], tmp_path: Path
) -> None:
    good = [datum(n, 8) for n in range(4)]
    bad = [*good[:3], datum(9, 8, weights=np.ones(3, np.float32))]
    for n, engine in enumerate(engines):
        do(engine, CreateAdapter("mixed", LoraConfig(rank=4, seed=2)))
        run_passes(engine.trainer, [Pass("mixed", good, "cross_entropy")])
        (failed,) = run_passes(engine.trainer, [Pass("mixed", bad, "cross_entropy")])
        assert isinstance(failed, Failure)
        assert failed.category == "user"
        assert failed.message.startswith("datum 3:")
        assert do(engine, OptimStep("mixed", STEP))["skipped"] == 0.0
        assert do(engine, OptimStep("mixed", STEP))["skipped"] == 1.0
        weights(engine, "mixed", tmp_path / str(n))
    first, second = (load_file(tmp_path / str(n) / "adapter_model.safetensors") for n in range(2))
    for name, expected in first.items():
        np.testing.assert_allclose(second[name], expected, rtol=2e-4, atol=2e-6, err_msg=name)


def test_all_processes_have_the_same_bits(engines: tuple[Engine, Engine], tmp_path: Path) -> None:
    _, shared = engines
    do(shared, CreateAdapter("same", LoraConfig(rank=8, seed=3)))
    for step in range(3):
        run_passes(
            shared.trainer, [Pass("same", [datum(10 * step + n, 20 - n) for n in range(7)], "cross_entropy")]
        )
        do(shared, OptimStep("same", STEP))
    saved: list[dict[str, bytes]] = []
    for n, actor in enumerate(shared.trainer.actors):  # type: ignore[attr-defined]
        fetch(actor.execute.remote(SaveAdapter("same", str(tmp_path / str(n)), optimizer=True)))
        saved.append({file.name: file.read_bytes() for file in (tmp_path / str(n)).glob("*.safetensors")})
    assert len(saved[0]) == 2
    assert saved[0] == saved[1] == saved[2]


def test_a_step_sums_the_whole_gradient_once(engines: tuple[Engine, Engine]) -> None:
    """The gradients of two trainers in one row, with how many have any; a step of none is skipped."""
    alone, _ = engines
    rows: list[np.ndarray] = []

    def double(row: Any) -> None:
        rows.append(row.numpy().copy())
        row += row

    for run in ("once", "twice"):
        do(alone, CreateAdapter(run, LoraConfig(rank=4, seed=5)))
        run_passes(alone.trainer, [Pass(run, [datum(5, 9)], "cross_entropy")])
    free = AdamParams(learning_rate=1e-3)
    whole, doubled = do(alone, OptimStep("once", free)), do(alone, OptimStep("twice", free, double))
    assert doubled["grad_norm"] == pytest.approx(2 * whole["grad_norm"], rel=1e-6)
    assert do(alone, OptimStep("twice", free, double))["skipped"] == 1.0
    assert [row[-1] for row in rows] == [1.0, 0.0]
    assert not rows[1].any()


@contextmanager
def groups(count: int) -> Iterator[list[GradientGroup]]:
    """The parts of the processes of a group, here in one process."""
    store, address = host_store("127.0.0.1")
    with ThreadPoolExecutor(count) as threads:

        def join(rank: int) -> GradientGroup:
            its = store_at(address) if rank else store
            return GradientGroup(rank, count, its, "127.0.0.1", gpus=False)

        yield [*threads.map(join, range(count))]


@pytest.mark.parametrize("kind", [np.float32, np.float64])
def test_sums_are_the_same_everywhere(kind: Any) -> None:
    rows = [np.random.default_rng(n).normal(size=100_003).astype(kind) for n in range(3)]
    expected = np.sum(np.array(rows, np.float64), 0)
    with groups(3) as made, ThreadPoolExecutor(3) as threads:
        list(threads.map(lambda group, row: group.total(row), made, rows))
    assert rows[0].tobytes() == rows[1].tobytes() == rows[2].tobytes()
    np.testing.assert_allclose(rows[0], expected, rtol=0, atol=1e-6 if kind is np.float32 else 1e-14)


def test_a_process_that_ends_is_noticed_at_once() -> None:
    store, address = host_store("127.0.0.1")
    code = (
        "import sys; from tinkex.engine.cluster.gradient_group import *\n"
        "GradientGroup(1, 2, store_at((sys.argv[1], int(sys.argv[2]))), '127.0.0.1', gpus=False)"
    )
    other = subprocess.Popen([sys.executable, "-c", code, *map(str, address)])
    group = GradientGroup(0, 2, store, "127.0.0.1", gpus=False)
    assert other.wait(30) == 0
    begun = time.monotonic()
    with pytest.raises(EngineLost, match="could not sum their gradients"):
        group.total(np.ones(5, np.float32))
    assert time.monotonic() - begun < 10


def test_a_silent_process_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradient_group, "TIMEOUT", timedelta(seconds=2))
    with groups(2) as (group, _), pytest.raises(EngineLost, match="could not sum their gradients"):
        group.total(np.ones(5, np.float32))


async def test_a_run_is_restored_when_one_of_its_processes_dies(tmp_path: Path, ray_nodes: Nodes) -> None:
    placements = {MODEL: Placement(ray_nodes.address, data=2)}
    more = {"placements": placements, "snapshot_steps": 2, "long_poll": 80.0}
    others = actors("TrainerActor")
    told: list[list[float]] = []
    for victim, moment in ((0, ""), (0, "pass"), (1, "pass"), (0, "step"), (1, "step"), (1, "in it")):
        async with serving(tmp_path / f"home-{victim}-{moment}", build_engine, **more) as service:
            user = User(service)
            run = await user.run(seed=3)
            losses: list[float] = []
            for step in range(6):
                processes = [one for one in actors("TrainerActor") if one not in others]
                dies = moment if step == 3 else ""
                if dies == "pass":
                    processes[victim].kill()
                data = [harness_datum(10 * step + n) for n in range(5)]
                passed = await user.forward_backward(run, 2 * step + 1, *data)
                losses.append((await user.result(passed)).metrics["loss:sum"])
                if dies == "step":  # the other one has its gradient, and waits for nobody
                    processes[victim].kill()
                if dies == "in it":  # it does not answer the other, who waits in the all-reduce
                    processes[victim].suspend()
                stepped = await user.step(run, 2 * step + 2)
                if dies == "in it":
                    await asyncio.sleep(1.0)
                    processes[victim].kill()
                await user.result(stepped)
            told.append(losses)
            assert len(actors("TrainerActor")) == len(others) + 2
    assert all(one == told[0] for one in told), "the losses of an undisturbed run, to the last bit"
    assert len(set(told[0])) == 6

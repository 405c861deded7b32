"""What Ray costs and what more actors bring, with a fake device of fixed time: `make bench-cluster`.

    python bench/cluster.py                                   one table, on this machine
    python bench/cluster.py --model DIR [--device cuda]       also a real engine, through Ray and in process

Two cores cannot show that compute scales. So a device is a clock here: a request holds its sampler, and a
datum its trainer, for a fixed time, and what is measured is everything around it: routing, queues, Ray, the
service. Rows with a real model say so. A missed goal does not fail the run; a crash does.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the tests' service harness and tiny models

from tests.service.harness import MODEL, User, datum, serving  # noqa: E402
from tinkex.engine.cluster.connection import connect  # noqa: E402

connect("auto")

from tinkex.engine.cluster.cluster_engine import ClusterEngine  # noqa: E402
from tinkex.engine.fake import FakeEngine  # noqa: E402
from tinkex.engine.fake.bigram import FakeExport  # noqa: E402
from tinkex.engine.protocol import (  # noqa: E402
    CreateAdapter,
    Engine,
    EngineConfig,
    ExportAdapter,
    Pass,
    Placement,
    SampleWork,
    SaveAdapter,
    build_engine,
    run_passes,
)
from tinkex.store import atomic_directory  # noqa: E402
from tinkex.types.data import Datum, ModelInput  # noqa: E402
from tinkex.types.params import LoraConfig, SamplingParams  # noqa: E402

REQUEST = 0.25  # seconds that a sample holds its place on the fake device
DATUM = 0.020  # seconds that a datum holds the fake device of a trainer
BATCH = 8  # samples at once on a fake device
RUNS = 64
PAYLOAD = 32 << 20  # bytes of a published adapter


# -- the fake device ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LargeExport(FakeExport):
    """An exported adapter of a realistic size."""

    payload: np.ndarray

    @property
    def nbytes(self) -> int:
        return self.payload.nbytes


class TimedEngine(FakeEngine):
    """The fake engine on a device that takes a fixed time."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        sample, compute, export = self.sampler.sample, self.trainer._compute, self.trainer._export
        publish = self.sampler.publish

        async def sample_in_time(work: SampleWork) -> Any:
            if work.params.max_tokens != 1:
                await asyncio.sleep(REQUEST)
            return await sample(replace(work, params=replace(work.params, max_tokens=1)))

        def compute_in_time(batch: list[Any]) -> None:
            time.sleep(DATUM * len(batch))
            compute(batch)

        def save_all(adapter: Any, command: SaveAdapter) -> int:
            with atomic_directory(command.location) as directory:
                (directory / "payload").write_bytes(bytes(PAYLOAD))
            return PAYLOAD

        def large(adapter: Any) -> LargeExport:
            made = export(adapter)
            return LargeExport(made.lora, made.model, made.params, np.ones(PAYLOAD, np.uint8))

        async def copied(name: str, source: Any) -> None:
            if isinstance(source, LargeExport):
                source.payload.copy()  # to the device
            await publish(name, source)

        self.sampler.sample = sample_in_time  # type: ignore[method-assign]
        self.sampler.publish = copied  # type: ignore[method-assign]
        self.trainer._compute = compute_in_time  # type: ignore[method-assign]
        self.trainer._save = save_all  # type: ignore[method-assign]
        self.trainer._export = large  # type: ignore[method-assign]


def timed_engine(config: EngineConfig) -> Engine:
    """On a cluster the same engine in every actor; else here."""
    return TimedEngine(config) if config.placement is None else ClusterEngine(config, TimedEngine)


@contextlib.contextmanager
def engine(build: Callable[[EngineConfig], Engine] = timed_engine, **placed: int) -> Iterator[Engine]:
    placement = Placement("auto", max_samplers=placed.get("samplers", 1), **placed) if placed else None
    config = EngineConfig("fake", kind="fake", max_context=512, max_batch=BATCH, placement=placement)
    built = build(config)
    try:
        yield built
    finally:
        built.close()


def work(seed: int, tokens: int, adapter: str | None = None) -> SampleWork:
    prompt = np.random.default_rng(seed).integers(3, 500, 16).astype(np.int32)
    return SampleWork(prompt, SamplingParams(max_tokens=tokens, seed=seed, stop=[]), adapter)


# -- rows --------------------------------------------------------------------------------------------------


async def one_token(served: Engine, count: int = 200) -> float:
    """The median milliseconds of a one-token sample, one after the other."""
    times: list[float] = []
    for n in range(count):
        begun = time.perf_counter()
        await served.sampler.sample(work(n, 1))
        times.append(1e3 * (time.perf_counter() - begun))
    return statistics.median(times[count // 10 :])


async def added_latency() -> float:
    with engine() as here:
        alone = await one_token(here)
    with engine(trainers=1, samplers=1) as there:
        return await one_token(there) - alone


async def sampled_a_second(samplers: int, rounds: int = 8) -> float:
    """Requests a second, as many at a time as the samplers hold."""
    with engine(trainers=1, samplers=samplers) as served:
        await asyncio.gather(*(served.sampler.sample(work(n, 1)) for n in range(64)))
        count, begun = rounds * BATCH * samplers, time.perf_counter()
        turn = asyncio.Semaphore(BATCH * samplers)

        async def one(n: int) -> None:
            async with turn:
                await served.sampler.sample(work(n, 2))

        await asyncio.gather(*(one(n) for n in range(count)))
        return count / (time.perf_counter() - begun)


async def trained_a_second(trainers: int, steps: int = 3) -> float:
    """Passes a second of many runs, through the whole service."""
    placements = {MODEL: Placement("auto", trainers=trainers)}
    with tempfile.TemporaryDirectory(prefix="tinkex-bench-") as home:
        async with serving(Path(home), timed_engine, placements=placements, long_poll=120.0) as service:
            user = User(service)
            runs = [await user.run(seed=n) for n in range(RUNS)]
            await asyncio.gather(*(user.loss(run, 1, datum(0)) for run in runs))
            begun = time.perf_counter()
            await asyncio.gather(*(user.train(run, 2, steps) for run in runs))
            return RUNS * steps / (time.perf_counter() - begun)


async def first_tokens(served: Engine, samplers: int, place: Path) -> float:
    """Seconds from the end of a step until every sampler has drawn a token with the new adapter.

    As the service does it: the adapter is on the disk first.
    """
    times: list[float] = []
    await asyncio.wrap_future(served.trainer.submit(CreateAdapter("run", LoraConfig(rank=4, seed=1))))
    for n in range(8):
        begun = time.perf_counter()
        saving = SaveAdapter("run", str(place / f"{samplers}-{n}"))
        await asyncio.wrap_future(served.trainer.submit(saving))
        export = await asyncio.wrap_future(served.trainer.submit(ExportAdapter("run")))
        await served.sampler.publish(f"adapter-{n}", export)
        # Eight different prompts for each sampler: all of them get some.
        asked = [served.sampler.sample(work(i, 1, f"adapter-{n}")) for i in range(8 * samplers)]
        await asyncio.gather(*asked)
        times.append(time.perf_counter() - begun)
        await served.sampler.retire(f"adapter-{n}")
    return statistics.median(times[1:])


async def publish_ratio() -> float:
    with tempfile.TemporaryDirectory(prefix="tinkex-bench-") as place:
        with engine() as here:
            alone = await first_tokens(here, 1, Path(place))
        with engine(trainers=1, samplers=4) as there:
            return await first_tokens(there, 4, Path(place)) / alone


async def cached_tokens(samplers: int, *, affinity: bool) -> float:
    """The share of prompt tokens that tiny real engines found in their KV caches."""
    from tests.engine.tiny import tiny_model

    with tempfile.TemporaryDirectory(prefix="tinkex-bench-") as place:
        model = tiny_model(Path(place), "llama3", max_position_embeddings=512)
        placement = Placement("auto", samplers=samplers, max_samplers=samplers, gpus=0)
        # Room for a quarter of all prefixes on each sampler.
        config = EngineConfig(str(model), device="cpu", kv_bytes=1 << 20, threads=1, placement=placement)
        served = build_engine(config)
        turns = iter(range(1 << 30))

        def round_robin(key: bytes, loads: dict[int, int], size: int, capacity: int) -> int:
            return sorted(loads)[next(turns) % len(loads)]

        routed = contextlib.nullcontext()
        if not affinity:
            routed = mock.patch("tinkex.engine.cluster.sampler_pool.choose", round_robin)
        chance, found, asked = np.random.default_rng(1), 0, 0
        prefixes = chance.integers(3, 90, (32, 160)).astype(np.int32)
        with routed:
            for n in range(256):
                prompt = np.concatenate([prefixes[chance.integers(32)], chance.integers(3, 90, 16)]).astype(
                    np.int32
                )
                got = await served.sampler.sample(SampleWork(prompt, SamplingParams(max_tokens=2, seed=n)))
                found, asked = found + got.prompt_cache_hit_tokens, asked + len(prompt)
        served.close()
        return found / asked


async def through_ray(model: str, device: str) -> tuple[float, float]:
    """Passes and decoded tokens a second through Ray, over those of an engine in this process."""
    figures: list[tuple[float, float]] = []
    for placement in (None, Placement("auto", gpus=0.5 if device.startswith("cuda") else 0)):
        served = build_engine(EngineConfig(model, device=device, max_context=2048, placement=placement))
        try:
            figures.append(await asyncio.to_thread(_passes, served) + await _decoded(served))
        finally:
            served.close()
    (passes, decoded), (passes_there, decoded_there) = figures
    return passes_there / passes, decoded_there / decoded


def _passes(served: Engine, seconds: float = 10.0) -> tuple[float]:
    ids = np.random.default_rng(0).integers(3, 1000, 513)
    data = [Datum(ModelInput.from_ints(ids[:-1]), {"target_tokens": ids[1:]}) for _ in range(16)]
    served.trainer.submit(CreateAdapter("bench", LoraConfig(rank=32, seed=1))).result()
    run_passes(served.trainer, [Pass("bench", data, "cross_entropy")])
    count, begun = 0, time.perf_counter()
    while time.perf_counter() - begun < seconds:
        run_passes(served.trainer, [Pass("bench", data, "cross_entropy")])
        count += 1
    return (count / (time.perf_counter() - begun),)


async def _decoded(served: Engine, sequences: int = 64, tokens: int = 256) -> tuple[float]:
    async def draw() -> float:
        params = SamplingParams(max_tokens=tokens, seed=1, stop=[])
        prompts = [np.arange(5 + n, 69 + n, dtype=np.int32) for n in range(sequences)]
        begun = time.perf_counter()
        await asyncio.gather(*(served.sampler.sample(SampleWork(p, params)) for p in prompts))
        return sequences * tokens / (time.perf_counter() - begun)

    await draw()
    return (max([await draw() for _ in range(3)]),)


# -- the table ---------------------------------------------------------------------------------------------


def row(measure: str, got: str, goal: str) -> None:
    print(f"| {measure} | {got} | {goal} |", flush=True)


async def measure(model: str, device: str, most: int) -> None:
    row("added p50 of a one-token sample, fake device", f"{await added_latency():.2f} ms", "≤ 3 ms")
    alone, many = await sampled_a_second(1), await sampled_a_second(most)
    row(f"samplers 1 → {most}, fake device", f"{many / alone:.2f} ×", f"≥ {0.9 * most:.1f} ×")
    alone, many = await trained_a_second(1), await trained_a_second(4)
    row(f"trainers 1 → 4 with {RUNS} runs, fake device", f"{many / alone:.2f} ×", "≥ 3.6 ×")
    ratio = await publish_ratio()
    row(f"step → first token, 4 samplers / 1 engine, {PAYLOAD >> 20} MiB", f"{ratio:.2f} ×", "≤ 1.5 ×")
    hits, blind = await cached_tokens(4, affinity=True), await cached_tokens(4, affinity=False)
    row("prefix-cache hits, 4 samplers of a tiny model: affinity", f"{hits:.0%}", "")
    row("the same over round robin", f"{hits / max(1e-9, blind):.2f} ×", "≥ 2 ×")
    if model:
        passes, decoded = await through_ray(model, device)
        row(f"passes through Ray / in process, {Path(model).name} on {device}", f"{passes:.3f}", "≥ 0.95")
        row(f"decoding through Ray / in process, {Path(model).name} on {device}", f"{decoded:.3f}", "≥ 0.95")


def main() -> None:
    parser = argparse.ArgumentParser(description="What Ray costs and what more actors bring.")
    parser.add_argument("--model", default="", help="a model directory, for the rows with a real engine")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--samplers", type=int, default=8, help="how many at most")
    given = parser.parse_args()
    load = os.getloadavg()[0]
    print(f"{os.cpu_count()} cores, load {load:.1f}{': a loaded machine' if load > 3 else ''}\n")
    print("| measure | got | goal |\n|---|---|---|")
    asyncio.run(measure(given.model, given.device, given.samplers))


if __name__ == "__main__":
    main()

"""What Ray costs and what more actors bring, with a fake device of fixed time: `make bench-cluster`.

    python bench/cluster.py [--only ROW ...]

`bench/cluster_device.py` has the rows of a GPU.

Two cores cannot show that compute scales. So a device is a clock here: a request holds its sampler, and a
datum its trainer, for a fixed time, and what is measured is everything around it: routing, queues, Ray, the
service. Rows with a real model say so. A missed goal does not fail the run; a crash does.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
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
from tinkex.engine.cluster.routing import ranked, route_key  # noqa: E402
from tinkex.engine.fake import FakeEngine  # noqa: E402
from tinkex.engine.fake.bigram import FakeExport  # noqa: E402
from tinkex.engine.protocol import (  # noqa: E402
    Engine,
    EngineConfig,
    Placement,
    SampleWork,
    SaveAdapter,
    build_engine,
)
from tinkex.types.params import SamplingParams  # noqa: E402

REQUEST = 0.25  # seconds that a sample holds its place on the fake device
DATUM = 0.020  # seconds that a datum holds the fake device of a trainer: less than any real pass takes
PASS = 0.070  # seconds that it holds it like a pass of 16 datums of 512 tokens of a 0.6B model on an H200
BATCH = 8  # samples at once on a fake device
RUNS = 64
PAYLOAD = 1 << 20  # bytes of a published adapter, for each of its rank
LARGE = 32  # the rank of an adapter of a realistic size
LIVE, TENANTS = 1536, 8  # runs whose adapters are in memory; their users, who may have 256 each


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

    def __init__(self, config: EngineConfig, datum: float = DATUM) -> None:
        super().__init__(config)
        sample, compute, export = self.sampler.sample, self.trainer._compute, self.trainer._export
        publish, save = self.sampler.publish, self.trainer._save

        async def sample_in_time(work: SampleWork) -> Any:
            if work.params.max_tokens != 1:
                await asyncio.sleep(REQUEST)
            return await sample(replace(work, params=replace(work.params, max_tokens=1)))

        def compute_in_time(batch: list[Any]) -> None:
            time.sleep(datum * len(batch))
            compute(batch)

        def save_all(adapter: Any, command: SaveAdapter) -> int:
            size = save(adapter, command)
            (Path(command.location) / "payload").write_bytes(bytes(PAYLOAD * adapter.lora.rank))
            return size + PAYLOAD * adapter.lora.rank

        def large(adapter: Any) -> LargeExport:
            made = export(adapter)
            payload = np.ones(PAYLOAD * adapter.lora.rank, np.uint8)
            return LargeExport(made.lora, made.model, made.params, payload)

        async def copied(name: str, source: Any) -> None:
            if isinstance(source, LargeExport):
                source.payload.copy()  # to the device
            await publish(name, source)

        self.sampler.sample = sample_in_time  # type: ignore[method-assign]
        self.sampler.publish = copied  # type: ignore[method-assign]
        self.trainer._compute = compute_in_time  # type: ignore[method-assign]
        self.trainer._save = save_all  # type: ignore[method-assign]
        self.trainer._export = large  # type: ignore[method-assign]


def timed_engine(config: EngineConfig, datum: float = DATUM) -> Engine:
    """On a cluster the same engine in every actor; else here."""
    build = partial(TimedEngine, datum=datum)
    return build(config) if config.placement is None else ClusterEngine(config, build)


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


async def trained_a_second(trainers: int, seconds: float, steps: int = 3) -> float:
    """Passes a second of many runs, each of which takes so long, through the whole service."""
    build = partial(timed_engine, datum=seconds)
    placements = {MODEL: Placement("auto", trainers=trainers)}
    with tempfile.TemporaryDirectory(prefix="tinkex-bench-") as home:
        async with serving(Path(home), build, placements=placements, long_poll=120.0) as service:
            user = User(service)
            runs = [await user.run(seed=n) for n in range(RUNS)]
            await asyncio.gather(*(user.loss(run, 1, datum(0)) for run in runs))
            begun = time.perf_counter()
            await asyncio.gather(*(user.train(run, 2, steps) for run in runs))
            return RUNS * steps / (time.perf_counter() - begun)


async def first_token(samplers: int) -> float:
    """Seconds from the end of a step until every sampler has drawn a token with the new adapter.

    Through the whole service: the adapter is saved, published and used.
    """
    placements = {MODEL: Placement("auto", samplers=samplers, max_samplers=samplers)} if samplers else {}
    times: list[float] = []
    with tempfile.TemporaryDirectory(prefix="tinkex-bench-") as home:
        async with serving(Path(home), timed_engine, placements=placements, long_poll=120.0) as service:
            user = User(service)
            run = await user.run(rank=LARGE)
            for n in range(8):
                await user.train(run, 1 + 3 * n, 1)
                begun = time.perf_counter()
                sampler = await user.unnamed_sampler(run, 3 + 3 * n, n)
                prompts = one_prompt_each(sampler, service.models.find(MODEL).engine)
                asked = [await user.sample(sampler, i, p, max_tokens=1) for i, p in enumerate(prompts)]
                await asyncio.gather(*map(user.result, asked))
                times.append(time.perf_counter() - begun)
    return statistics.median(times[2:])


def one_prompt_each(adapter: str, served: Engine | None) -> list[tuple[int, ...]]:
    """A prompt for each sampler, which is its first choice with this adapter."""
    if not isinstance(served, ClusterEngine):
        return [(5, 6, 7)]
    prompts: dict[int, tuple[int, ...]] = {}
    for i in itertools.count(5):
        key = route_key(adapter, np.array((i, 6, 7)))
        prompts.setdefault(ranked(key, list(served.sampler.samplers))[0], (i, 6, 7))
        if len(prompts) == len(served.sampler.samplers):
            break
    return list(prompts.values())


async def zipf_rate(adapters: int, samplers: int = 4, seconds: float = 6.0) -> float:
    """Requests a second on published adapters, the n-th of which is asked for 1/n as often as the first."""
    placements = {MODEL: Placement("auto", samplers=samplers, max_samplers=samplers)}
    chance = np.random.default_rng(1)
    shares = 1 / np.arange(1, adapters + 1)
    with tempfile.TemporaryDirectory(prefix="tinkex-bench-") as home:
        async with serving(Path(home), timed_engine, placements=placements, long_poll=120.0) as service:
            user = User(service)
            run = await user.run(rank=1)
            paths = [await user.save_for_sampler(run, 1 + n, f"a{n}") for n in range(adapters)]
            session = run.split(":")[0]
            opened = [await user.sampler(session, n, path) for n, path in enumerate(paths)]
            numbers, until, done = iter(range(1 << 30)), time.perf_counter() + 2 * seconds, 0

            async def one() -> None:
                nonlocal done
                while (now := time.perf_counter()) < until:
                    n, which = next(numbers), int(chance.choice(adapters, p=shares / shares.sum()))
                    await user.result(await user.sample(opened[which], n, (5 + n % 97, 6, 7), max_tokens=2))
                    done += now > until - seconds  # the first half is for adapters to be loaded

            await asyncio.gather(*(one() for _ in range(samplers * BATCH)))
    return done / seconds


async def live_runs(count: int, trainers: int = 4) -> tuple[float, float, float]:
    """Seconds of a pass and a step of many runs; GiB of adapters; trainers' memory over that, real engine."""
    from shapes import write_model

    placements = {MODEL: Placement("auto", trainers=trainers, gpus=0)}
    with tempfile.TemporaryDirectory(prefix="tinkex-bench-") as place:
        model = write_model("line", Path(place), "cpu")
        config = EngineConfig(model, device="cpu", max_context=64, adapter_bytes=16 << 30, threads=1)
        changes = {"models": {MODEL: model}, "engine": config, "placements": placements}
        async with serving(Path(place, "home"), build_engine, long_poll=600.0, **changes) as service:
            users = [User(service, f"user-{n}") for n in range(TENANTS)]
            first = [await users[0].run(rank=4, seed=n) for n in range(trainers)]
            await asyncio.gather(*(_pass_and_step(users[0], run) for run in first))  # what a pass takes once
            served = service.models.find(MODEL).engine
            assert isinstance(served, ClusterEngine)
            before, had = _trainer_memory(), await _adapter_bytes(served)
            begun = time.perf_counter()
            runs: list[tuple[User, str]] = []
            for n in range(count - trainers):
                user = users[n % TENANTS]
                runs.append((user, await user.run(rank=4, seed=n)))
            await asyncio.gather(*(_pass_and_step(user, run) for user, run in runs))
            took = time.perf_counter() - begun
            grown = await _adapter_bytes(served) - had
            live = served.heartbeat().stats["adapters_live"]
            assert live == count, f"{live} of {count} runs are in memory"
            return took, grown / 2**30, (_trainer_memory() - before) / grown


async def _pass_and_step(user: User, run: str) -> None:
    """To the end of the step, which `User.train` does not wait for."""
    await user.forward_backward(run, 1, datum(0))
    await user.result(await user.step(run, 2))


def _trainer_memory() -> int:
    """Bytes of the trainers' processes."""
    import psutil

    found = psutil.Process().children(recursive=True)
    return sum(one.memory_info().rss for one in found if one.name().startswith("ray::TrainerAct"))


async def _adapter_bytes(served: ClusterEngine) -> float:
    await asyncio.sleep(2.0)  # reports of trainers are a second old
    return served.heartbeat().stats["adapter_bytes"]


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


# -- the table ---------------------------------------------------------------------------------------------


def row(measure: str, got: str, goal: str) -> None:
    print(f"| {measure} | {got} | {goal} |", flush=True)


async def latency_row() -> None:
    row("added p50 of a one-token sample, fake device", f"{await added_latency():.2f} ms", "≤ 3 ms")


async def samplers_row() -> None:
    alone, many = await sampled_a_second(1), await sampled_a_second(8)
    row("samplers 1 → 8, fake device", f"{many / alone:.2f} ×", "≥ 7.2 ×")


async def trainers_row() -> None:
    for seconds in (DATUM, PASS):
        alone, many = await trained_a_second(1, seconds), await trained_a_second(4, seconds)
        name = f"trainers 1 → 4 with {RUNS} runs, fake device, passes of {1e3 * seconds:.0f} ms"
        row(name, f"{many:.0f} / {alone:.0f} passes/s = {many / alone:.2f} ×", "≥ 3.6 ×")


async def publish_row() -> None:
    alone, four = await first_token(0), await first_token(4)
    name = f"step → first token, 4 samplers / 1 engine, {LARGE * PAYLOAD >> 20} MiB saved and published"
    row(name, f"{1e3 * four:.0f} / {1e3 * alone:.0f} ms = {four / alone:.2f} ×", "≤ 1.5 ×")


async def prefix_row() -> None:
    hits, blind = await cached_tokens(4, affinity=True), await cached_tokens(4, affinity=False)
    row("prefix-cache hits, 4 samplers of a tiny model: affinity", f"{hits:.0%}", "")
    row("the same over round robin", f"{hits / max(1e-9, blind):.2f} ×", "≥ 2 ×")


async def adapters_row() -> None:
    few, many = await zipf_rate(16), await zipf_rate(1024)
    name = "1,024 published adapters, Zipf traffic, against 16, 4 samplers, fake device"
    row(name, f"{many:.0f} / {few:.0f} requests/s = {many / few:.2f}", "≥ 0.8")


async def live_row() -> None:
    took, size, ratio = await live_runs(LIVE)
    row(f"{LIVE:,} live runs, a pass and a step each, 4 trainers of a small model", f"{took:.0f} s", "")
    row(f"memory of the trainers / {size:.2f} GiB of adapters with their optimizers", f"{ratio:.3f}", "≤ 1.1")


ROWS = {
    "latency": latency_row, "samplers": samplers_row, "trainers": trainers_row, "publish": publish_row,
    "prefix": prefix_row, "adapters": adapters_row, "live": live_row,
}  # fmt: skip


async def measure(only: list[str]) -> None:
    for name, make in ROWS.items():
        if name in (only or ROWS):
            begun = time.perf_counter()
            await make()
            print(f"{name}: {time.perf_counter() - begun:.0f} s", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="*", default=[], choices=ROWS, metavar="ROW", help=", ".join(ROWS))
    given = parser.parse_args()
    load = os.getloadavg()[0]
    print(f"{os.cpu_count()} cores, load {load:.1f}{': a loaded machine' if load > 3 else ''}\n")
    print("| measure | got | goal |\n|---|---|---|")
    sys.setswitchinterval(0.001)  # as `tinkex serve` does
    asyncio.run(measure(given.only))


if __name__ == "__main__":
    main()

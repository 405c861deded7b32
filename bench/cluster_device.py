"""What Ray costs a real engine: passes and decoding in process and through it, and many published adapters.

    python bench/cluster_device.py --shape qwen3-8b --device cuda

Weights are random: speed does not depend on their values. A missed goal does not fail the run; a crash does.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
from shapes import SHAPES, write_model

from tinkex.engine.protocol import (
    CreateAdapter,
    DropAdapter,
    Engine,
    EngineConfig,
    ExportAdapter,
    Pass,
    Placement,
    SampleWork,
    build_engine,
    run_passes,
)
from tinkex.types.data import Datum, ModelInput
from tinkex.types.params import LoraConfig, SamplingParams


def row(measure: str, got: str, goal: str) -> None:
    print(f"| {measure} | {got} | {goal} |", flush=True)


async def through_ray(shape: str, device: str, rounds: int) -> None:
    """Passes and decoded tokens a second, in this process and through Ray in turn; there, many adapters."""
    with tempfile.TemporaryDirectory(prefix="tinkex-bench-") as place:
        here, there = engines(write_model(shape, Path(place), device), device)
        try:
            await compare(f"{shape} on {device}", here, there, rounds)
            few, many = await _decoded_adapters(there, 16), await _decoded_adapters(there, 1024)
            name = f"{shape}, 1,024 published adapters of rank 1, Zipf traffic, against 16"
            row(name, f"{many:.0f} / {few:.0f} tokens/s = {many / few:.3f}", "≥ 0.8")
        finally:
            here.close()
            there.close()


def engines(model: str, device: str) -> tuple[Engine, Engine]:
    """Of the same model: in this process, and through Ray."""
    on_gpu = device.startswith("cuda")
    room = {"kv_bytes": 8 << 30, "adapter_bytes": 8 << 30} if on_gpu else {}
    config = EngineConfig(model, device=device, max_context=2048, **room)
    remote = replace(config, placement=Placement("auto", gpus=0.5 if on_gpu else 0))
    both = build_engine(config), build_engine(remote)
    for engine in both:
        engine.trainer.submit(CreateAdapter("bench", LoraConfig(rank=32, seed=1))).result()
    return both


async def compare(name: str, here: Engine, there: Engine, rounds: int) -> None:
    """Rates of both, a round each in turn, after one that warms up; the ratio is of medians."""
    found = [(await _rates(here), await _rates(there)) for _ in range(rounds + 1)][1:]
    for at, what in enumerate(("passes", "decoding")):
        ours, rays = (statistics.median(of[at] for of in side) for side in zip(*found, strict=True))
        each = ", ".join(f"{ray[at] / own[at]:.3f}" for own, ray in found)
        unit = f"{what.replace('decoding', 'tokens')}/s"
        row(f"{what}, {name}: through Ray, in process", f"{rays:.2f}, {ours:.2f} {unit}", "")
        row(f"{what} through Ray / in process, {name}", f"{rays / ours:.3f} (rounds: {each})", "≥ 0.95")


async def _rates(served: Engine) -> tuple[float, float]:
    """Passes and decoded tokens a second."""
    return await asyncio.to_thread(_passes, served), await _decoded(served)


def _passes(served: Engine, seconds: float = 3.0) -> float:
    ids = np.random.default_rng(0).integers(3, 1000, 513)
    data = [Datum(ModelInput.from_ints(ids[:-1]), {"target_tokens": ids[1:]}) for _ in range(16)]
    for _ in range(3):
        run_passes(served.trainer, [Pass("bench", data, "cross_entropy")])
    count, begun = 0, time.perf_counter()
    while time.perf_counter() - begun < seconds:
        run_passes(served.trainer, [Pass("bench", data, "cross_entropy")])
        count += 1
    return count / (time.perf_counter() - begun)


async def _draw(served: Engine, adapters: list[str | None], tokens: int) -> float:
    """Tokens a second of one request for each of these adapters, at the same time."""
    params = SamplingParams(max_tokens=tokens, seed=1, stop=[])
    prompts = [np.arange(5 + n, 69 + n, dtype=np.int32) for n in range(len(adapters))]
    begun = time.perf_counter()
    asked = [SampleWork(p, params, adapter) for p, adapter in zip(prompts, adapters, strict=True)]
    await asyncio.gather(*map(served.sampler.sample, asked))
    return len(adapters) * tokens / (time.perf_counter() - begun)


async def _decoded(served: Engine, sequences: int = 64, tokens: int = 256) -> float:
    return max([await _draw(served, [None] * sequences, tokens) for _ in range(3)])


async def _decoded_adapters(served: Engine, count: int, sequences: int = 64, tokens: int = 128) -> float:
    """Tokens a second, the n-th of the adapters asked for 1/n as often as the first."""
    names = [f"zipf-{n}" for n in range(count)]
    for name in names:
        await asyncio.wrap_future(served.trainer.submit(CreateAdapter(name, LoraConfig(rank=1, seed=1))))
        await served.sampler.publish(
            name, await asyncio.wrap_future(served.trainer.submit(ExportAdapter(name)))
        )
        await asyncio.wrap_future(served.trainer.submit(DropAdapter(name)))
    chance, shares = np.random.default_rng(1), 1 / np.arange(1, count + 1)
    rates: list[float] = []
    for n in range(5):
        asked = chance.choice(names, sequences, p=shares / shares.sum()).tolist()
        if not n:
            await asyncio.gather(*(_draw(served, names[at : at + 64], 2) for at in range(0, count, 64)))
        rates.append(await _draw(served, asked, tokens))
    await asyncio.gather(*map(served.sampler.retire, names))
    return statistics.median(rates[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description="What Ray costs a real engine.")
    parser.add_argument("--shape", default="qwen3-0.6b", choices=SHAPES)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    print("| measure | got | goal |\n|---|---|---|", flush=True)
    asyncio.run(through_ray(given.shape, given.device, given.rounds))


if __name__ == "__main__":
    main()

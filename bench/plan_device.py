"""What `tinkex plan` reckons beside the memory that a process really takes.

    python bench/plan_device.py --device cpu [--shapes small small-moe smollm2-135m]
    python bench/plan_device.py --device cuda [--shapes qwen3-0.6b qwen3-8b qwen3-30b-a3b]

Random weights. On CPUs: resident memory of a process of its own for each shape, and fp32. On CUDA: torch's
count of allocated bytes, and for a pass its peak, in bf16. Goal: within 10 %. A missed goal does not fail the
run; a crash does.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import gc
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from shapes import SHAPES, write_model

from tinkex.engine.protocol import (
    CreateAdapter,
    EngineConfig,
    OptimStep,
    Pass,
    SampleWork,
    build_engine,
    run_passes,
)
from tinkex.engine.torch.sizing import ModelSizes, model_sizes
from tinkex.engine.torch.trainer import TorchTrainer
from tinkex.types.data import Datum, ModelInput
from tinkex.types.params import AdamParams, LoraConfig, SamplingParams

RANK, CONTEXT = 32, 512
RUNS = {"cpu": 8, "cuda": 2}
SEQUENCES = 64  # that fill the KV pages
DEFAULT = {"cpu": ("small", "small-moe", "smollm2-135m"), "cuda": ("qwen3-0.6b", "qwen3-8b", "qwen3-30b-a3b")}


@dataclass
class Measure:
    """Bytes: what was planned, what was taken."""

    name: str
    planned: float
    measured: float

    def row(self, shape: str) -> str:
        ratio = self.planned / self.measured
        mib = f"{self.planned / 2**20:,.0f} | {self.measured / 2**20:,.0f}"
        return f"| {shape} | {self.name} | {mib} | {ratio:.3f} |"


def config_of(path: str, device: str, **more: Any) -> EngineConfig:
    dtype: Any = "float32" if device == "cpu" else "bfloat16"
    return EngineConfig(path, device=device, dtype=dtype, max_context=CONTEXT, **more)


def passes(run: str, length: int, count: int = 1) -> list[Pass]:
    ids = np.random.default_rng(1).integers(3, 4000, length + 1)
    data = [Datum(ModelInput.from_ints(ids[:-1]), {"target_tokens": ids[1:]}) for _ in range(count)]
    return [Pass(run, data, "cross_entropy")]


def total(parts: list[Measure]) -> Measure:
    return Measure("together", sum(p.planned for p in parts), sum(p.measured for p in parts))


# -- on CPUs ---------------------------------------------------------------------------------------------


def resident() -> int:
    """Bytes of this process in memory, without what malloc keeps for later."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("VmRSS")).split()[1])


def on_cpu(shape: str) -> list[Measure]:
    with tempfile.TemporaryDirectory(prefix="tinkex-bench-") as place:
        small, path = write_model("line", Path(place), "cpu"), write_model(shape, Path(place), "cpu")
        warm = build_engine(config_of(small, "cpu", threads=1, kv_bytes=1 << 24))  # what libraries take once
        train(warm, "warm")
        fill(warm, 1, 64)
        warm.close()
        del warm
        pages = SEQUENCES * CONTEXT
        sizes = model_sizes(Path(path), config_of(path, "cpu"), RANK)
        room = int(1.1 * pages * sizes.kv_token)
        before = resident()
        engine = build_engine(config_of(path, "cpu", threads=1, kv_bytes=room))
        loaded = resident()
        # On CPUs the C step has a copy of the weights: the engine's figure, not the plan's.
        copy = engine.heartbeat().memory["weights"] - sizes.facts.weight_bytes
        fill(engine, 1, 64)
        copied = resident()
        for n in range(RUNS["cpu"]):
            train(engine, f"run{n}")
        trained = resident()
        fill(engine, SEQUENCES, CONTEXT - 8)
        filled = resident()
        engine.close()
    parts = [
        Measure("weights", sizes.facts.weight_bytes, loaded - before),
        Measure(f"{RUNS['cpu']} runs", RUNS["cpu"] * sizes.run, trained - copied),
        Measure(f"KV of {pages:,} tokens", pages * sizes.kv_token, filled - trained),
    ]
    return [*parts, total(parts), Measure("copy of the weights for decoding", copy, copied - loaded)]


def train(engine: Any, run: str) -> None:
    engine.trainer.submit(CreateAdapter(run, LoraConfig(rank=RANK, seed=1))).result()
    run_passes(engine.trainer, passes(run, 32))
    engine.trainer.submit(OptimStep(run, AdamParams())).result()


def fill(engine: Any, count: int, length: int) -> None:
    """Sample from so many different prompts, whose KV entries stay in the cache."""

    async def ask() -> None:
        for n in range(count):
            ids = np.random.default_rng(n).integers(3, 4000, length).astype(np.int32)
            await engine.sampler.sample(SampleWork(ids, SamplingParams(max_tokens=4, seed=n, stop=[])))

    asyncio.run(ask())


# -- on a GPU --------------------------------------------------------------------------------------------


def on_cuda(shape: str) -> list[Measure]:
    from engine_cuda import random_decoder

    from tinkex.engine.torch.engine import TorchEngine

    sizes = sizes_of(shape)
    before = torch.cuda.memory_allocated()
    decoder = random_decoder(shape)
    loaded = allocated()
    tokens = 16 * 1024
    trainer = TorchTrainer(decoder, shape, max_pass_tokens=tokens, recompute=True)
    for n in range(RUNS["cuda"]):
        trainer.execute(CreateAdapter(f"run{n}", LoraConfig(rank=RANK, seed=n)))
        compute(trainer, f"run{n}", 64, 1)
    trained = allocated()
    compute(trainer, "run0", 1024, 16)  # kernels are compiled
    torch.cuda.reset_peak_memory_stats()
    compute(trainer, "run0", 1024, 16)
    peak = torch.cuda.max_memory_allocated()
    trainer.adapters.clear()
    begun = allocated()
    room = 8 << 30
    engine = TorchEngine(config_of(shape, "cuda", kv_bytes=room), decoder)
    pages = engine.heartbeat().stats["kv_pages_total"]
    from tinkex.engine.torch.kv import PAGE

    cached = allocated()
    engine.close()
    parts = [
        Measure("weights", sizes.facts.weight_bytes, loaded - before),
        Measure(f"{RUNS['cuda']} runs", RUNS["cuda"] * sizes.run, trained - loaded),
        Measure(f"a pass of {tokens:,} tokens", tokens * sizes.activation_token, peak - trained),
    ]
    kv = Measure(f"KV of {pages * PAGE:,.0f} tokens", pages * PAGE * sizes.kv_token, cached - begun)
    return [*parts, total(parts), kv]


def sizes_of(shape: str) -> ModelSizes:
    with tempfile.TemporaryDirectory(prefix="tinkex-bench-") as place:
        Path(place, "config.json").write_text(json.dumps(SHAPES[shape]))
        return model_sizes(Path(place), config_of(place, "cuda"), RANK)


def allocated() -> int:
    gc.collect()
    return torch.cuda.memory_allocated()


def compute(trainer: TorchTrainer, run: str, length: int, count: int) -> None:
    from engine_cuda import run_bare

    run_bare(trainer, passes(run, length, count))
    trainer.execute(OptimStep(run, AdamParams()))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=DEFAULT, default="cpu")
    parser.add_argument("--shapes", nargs="*", choices=SHAPES, metavar="SHAPE")
    given = parser.parse_args()
    shapes = given.shapes or DEFAULT[given.device]
    if len(shapes) == 1:
        for measure in (on_cpu if given.device == "cpu" else on_cuda)(shapes[0]):
            print(measure.row(shapes[0]), flush=True)
        return
    print(
        "| shape | what | planned, MiB | measured, MiB | planned / measured |\n|---|---|---|---|---|",
        flush=True,
    )
    for shape in shapes:  # a process each, whose memory is its own
        command = [sys.executable, __file__, "--device", given.device, "--shapes", shape]
        subprocess.run(command, check=True)


if __name__ == "__main__":
    main()

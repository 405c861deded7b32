"""Our engine's side of the engine benchmark: every measure uses only the engine's contract."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from engine_child import Figures, PeakMemory, Round, Task, Timer

from tinkex.engine.protocol import (
    CreateAdapter,
    Engine,
    EngineConfig,
    ExportAdapter,
    OptimStep,
    Pass,
    SampledTokens,
    SampleWork,
    build_engine,
    run_passes,
)
from tinkex.types.data import Datum, ModelInput
from tinkex.types.params import AdamParams, LoraConfig, SamplingParams
from tinkex.types.tensor import TensorData

KV_BYTES = 64 << 20  # for measures that sample next to nothing
ADAM = AdamParams(learning_rate=1e-4)


def _engine(task: Task, **settings: Any) -> Engine:
    """The way may say how the base model is kept."""
    kept = {"quantize": task.way} if task.way in ("nf4", "fp8", "int8") else {}
    return build_engine(
        EngineConfig(task.model, device=task.device, threads=task.threads or None, **kept, **settings)
    )


def _trainer(task: Task) -> Engine:
    """An engine with `task.adapters` runs and little KV cache."""
    engine = _engine(task, kv_bytes=KV_BYTES)
    for i in range(task.adapters):
        engine.trainer.submit(CreateAdapter(f"run{i}", LoraConfig(rank=task.rank, seed=i))).result()
    return engine


def _datums(sequences: Sequence[np.ndarray]) -> list[Datum]:
    return [
        Datum(
            ModelInput.from_ints(ids),
            {"target_tokens": TensorData.from_numpy(np.append(ids[1:], np.int32(3)))},
        )
        for ids in sequences
    ]


def _passes(task: Task, turn: int) -> tuple[Pass, ...]:
    """The round's sequences, split evenly over the runs."""
    datums = _datums(task.sequences(turn))
    share = len(datums) // task.adapters
    return tuple(
        Pass(f"run{i}", datums[i * share : (i + 1) * share], "cross_entropy") for i in range(task.adapters)
    )


def train(task: Task) -> Round:
    """One command with every run's pass, and a step for each."""
    engine = _trainer(task)

    def one(turn: int) -> Figures:
        passes = _passes(task, turn)
        with Timer(task.device) as timer:
            run_passes(engine.trainer, passes)
            for each in passes:
                engine.trainer.submit(OptimStep(each.run, ADAM)).result()
        return timer.figures(sum(task.lengths))

    return one


def sharing(task: Task) -> Round:
    """The pass alone, without steps."""
    engine = _trainer(task)

    def one(turn: int) -> Figures:
        passes = _passes(task, turn)
        with Timer(task.device) as timer:
            run_passes(engine.trainer, passes)
        for each in passes:
            engine.trainer.submit(OptimStep(each.run, ADAM)).result()
        return timer.figures(sum(task.lengths))

    return one


def memory(task: Task) -> Round:
    """The way says whether the engine may cut the pass as it likes, or computes it in one piece."""
    pieces = {} if task.way == "as planned" else {"max_pass_tokens": sum(task.lengths)}
    engine = _engine(task, kv_bytes=KV_BYTES, **pieces)
    peak = PeakMemory(task.device)
    engine.trainer.submit(CreateAdapter("run0", LoraConfig(rank=task.rank))).result()

    def one(turn: int) -> Figures:
        run_passes(engine.trainer, _passes(task, turn))
        engine.trainer.submit(OptimStep("run0", ADAM)).result()
        return peak.figures()

    return one


def sample(task: Task) -> Round:
    """All prompts at once, split over the adapters, as requests that do not stream.

    `decode_*` is since the last prompt's first token, of a second, untimed turn that streams.
    """
    engine = _engine(task)
    for i in range(task.adapters):
        engine.trainer.submit(CreateAdapter(f"run{i}", LoraConfig(rank=task.rank, seed=i))).result()
        asyncio.run(
            engine.sampler.publish(f"published{i}", engine.trainer.submit(ExportAdapter(f"run{i}")).result())
        )
    params = SamplingParams(max_tokens=task.new_tokens, stop=[], temperature=1.0)

    def one(turn: int) -> Figures:
        works = [
            SampleWork(ids, params, adapter=f"published{i % task.adapters}")
            for i, ids in enumerate(task.sequences(turn))
        ]

        async def everything() -> int:
            responses = await asyncio.gather(*map(engine.sampler.sample, works))
            return sum(len(sequence.tokens) for response in responses for sequence in response.sequences)

        with Timer(task.device) as timer:
            total = asyncio.run(everything())
        assert total == task.new_tokens * len(works)
        return timer.figures(total, **asyncio.run(_decoding(engine, works)))

    return one


async def _decoding(engine: Engine, works: Sequence[SampleWork]) -> Figures:
    times: list[list[float]] = [[] for _ in works]

    async def listen(work: SampleWork, arrived: list[float]) -> None:
        async for piece in engine.sampler.stream(work):
            if isinstance(piece, SampledTokens):
                arrived.extend([time.perf_counter()] * len(piece.tokens))

    await asyncio.gather(*map(listen, works, times))
    begin, end = max(t[0] for t in times), max(t[-1] for t in times)
    decoded = sum(1 for t in times for when in t if when > begin)
    return {"decode_tokens": decoded, "decode_seconds": end - begin}


def publish(task: Task) -> Round:
    """Seconds from the end of a step to the first token from the new weights."""
    engine = _trainer(task)

    def one(turn: int) -> Figures:
        run_passes(engine.trainer, _passes(task, turn))
        engine.trainer.submit(OptimStep("run0", ADAM)).result()
        work = SampleWork(
            task.sequences(turn + 1)[0], SamplingParams(max_tokens=1, stop=[]), adapter=f"step{turn}"
        )

        async def first_token() -> None:
            await engine.sampler.publish(f"step{turn}", engine.trainer.submit(ExportAdapter("run0")).result())
            await engine.sampler.sample(work)

        with Timer(task.device) as timer:
            asyncio.run(first_token())
        return timer.figures(1)

    return one


MEASURES = {
    "train": train,
    "tenants": train,
    "sharing": sharing,
    "threads": train,
    "memory": memory,
    "sample": sample,
    "publish": publish,
}

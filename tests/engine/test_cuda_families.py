"""Every family on a GPU in bf16, by kernels or plain torch: it trains as in fp32, and samples so."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.engine.tiny import EXPERTS, FAMILIES, HYBRIDS, MORE, UNKNOWN, tiny_model
from tinkex.engine.protocol import (
    CreateAdapter,
    EngineConfig,
    ExportAdapter,
    OptimStep,
    Pass,
    SampleWork,
    run_passes,
)
from tinkex.engine.torch.engine import TorchEngine
from tinkex.types.data import Datum, ModelInput
from tinkex.types.outputs import ForwardBackwardOutput
from tinkex.types.params import AdamParams, LoraConfig, SamplingParams

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

pytestmark = pytest.mark.gpu
LENGTHS = [40, 3, 17]
# Nats. bf16 moves these weights, far larger than a real model's, by 0.01 to 0.12; a wrong sum by 0.5 or more.
BOUND = 0.15


@pytest.fixture(params=[*FAMILIES, *MORE, *HYBRIDS, *EXPERTS, *UNKNOWN])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return tiny_model(tmp_path, request.param)


@pytest.fixture
def engine(path: Path) -> Iterator[TorchEngine]:
    engine = TorchEngine(EngineConfig(str(path), device="cuda", kv_bytes=64 << 20, max_context=256))
    yield engine
    engine.close()


@pytest.fixture
def exact(path: Path) -> Iterator[TorchEngine]:
    engine = TorchEngine(EngineConfig(str(path), device="cpu", kv_bytes=16 << 20, max_context=256))
    yield engine
    engine.close()


def pass_of(sequences: list[np.ndarray], backward: bool = True) -> Pass:
    datums = [
        Datum(ModelInput.from_ints(ids[:-1]), {"target_tokens": ids[1:].astype(np.int64)})
        for ids in sequences
    ]
    return Pass("run", datums, "cross_entropy", backward=backward)


def logprobs(engine: TorchEngine, work: Pass) -> np.ndarray:
    (output,) = run_passes(engine.trainer, [work])
    assert isinstance(output, ForwardBackwardOutput), output
    return np.concatenate([one["logprobs"].to_numpy() for one in output.loss_fn_outputs])


def test_it_trains_as_in_fp32_and_samples_what_it_trains(engine: TorchEngine, exact: TorchEngine) -> None:
    draw = np.random.default_rng(0)
    sequences = [draw.integers(4, 250, n).astype(np.int32) for n in LENGTHS]
    for one in (engine, exact):
        one.trainer.submit(CreateAdapter("run", LoraConfig(rank=8, seed=1))).result()
    got, want = (logprobs(one, pass_of(sequences)) for one in (engine, exact))
    assert np.abs(got - want).mean() < BOUND

    engine.trainer.submit(OptimStep("run", AdamParams(learning_rate=1e-3))).result()

    async def sampled() -> list[np.ndarray]:
        exported = engine.trainer.submit(ExportAdapter("run")).result()
        await engine.sampler.publish("trained", exported)
        params = SamplingParams(max_tokens=12, stop=[], seed=3)
        works = [SampleWork(ids, params, adapter="trained") for ids in sequences]
        responses = await asyncio.gather(*(engine.sampler.sample(work) for work in works))
        return [response.sequences[0] for response in responses]

    answers = asyncio.run(sampled())
    whole = [np.append(ids, one.tokens_np) for ids, one in zip(sequences, answers, strict=True)]
    trained, differences, start = logprobs(engine, pass_of(whole, backward=False)), [], 0
    for ids, one in zip(whole, answers, strict=True):
        start += len(ids) - 1
        differences.append(trained[start - 12 : start] - one.logprobs_np)
    assert np.abs(np.concatenate(differences)).mean() < BOUND

"""What the kernels of engine/cuda promise as an engine: in bf16 on a GPU, fast and deterministic.

The other tests here run CUDA in fp32, which the kernels do not serve. bf16 rounds to 2⁻⁹ of a value, and the
tiny model's weights are far larger than a real model's, so that a logprob is off by about 0.03; the bounds
are on the mean, against the same engine or, with twice the room for rounded weights, against fp32 on the CPU.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.contract.conftest import (
    datum,
    do,
    forward_backward,
    logprobs,
    new_run,
    tokens,
    train,
    write_tokenizer,
)
from tests.engine.tiny import tiny_model
from tinkex.engine.protocol import (
    Engine,
    EngineConfig,
    ExportAdapter,
    LoadAdapter,
    OptimStep,
    Pass,
    SampleWork,
    SaveAdapter,
    build_engine,
    run_passes,
)
from tinkex.types.outputs import SampleResponse
from tinkex.types.params import AdamParams, LoraConfig, SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.anyio,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
LORA = LoraConfig(rank=8, seed=7)
NEAR = 0.05  # mean difference of logprobs


@pytest.fixture(scope="module", params=[False, True], ids=["fast", "deterministic"])
def config(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    sizes = {"max_position_embeddings": 256, "intermediate_size": 128}
    path = tiny_model(tmp_path_factory.mktemp("model"), "qwen3", **sizes)
    tokenizer = str(write_tokenizer(tmp_path_factory.mktemp("tokenizer")))
    return EngineConfig(
        str(path), device="cuda", dtype="bfloat16", deterministic=request.param, kv_bytes=2 << 20,
        name="m/tiny", tokenizer=tokenizer,
    )  # fmt: skip


@pytest.fixture(scope="module")
def exact(config: EngineConfig) -> Iterator[Engine]:
    """The same model in fp32 on the CPU."""
    engine = build_engine(replace(config, device="cpu", dtype="float32", deterministic=False, threads=1))
    yield engine
    engine.close()


def off(got: np.ndarray, want: np.ndarray) -> float:
    return float(np.abs(got - want).mean())


async def sample(engine: Engine, prompt: np.ndarray, adapter: str | None, seed: int) -> SampleResponse:
    params = SamplingParams(max_tokens=12, stop=[], seed=seed)
    return await engine.sampler.sample(SampleWork(prompt, params, adapter=adapter, prompt_logprobs=True))


def test_a_trained_adapter_has_the_logprobs_of_fp32(engine: Engine, exact: Engine, tmp_path: Path):
    there, here = new_run(exact, LORA), new_run(engine, LORA)
    train(exact, there, tokens(exact, 9, 40), steps=3)
    do(exact, SaveAdapter(there, str(tmp_path / "saved")))
    do(engine, LoadAdapter(here, str(tmp_path / "saved")))
    for seed, length in enumerate((2, 17, 65, 200)):
        ids = tokens(engine, seed, length)
        assert off(logprobs(engine, here, ids), logprobs(exact, there, ids)) < 2 * NEAR


def test_a_datum_does_not_notice_company(engine: Engine, config: EngineConfig):
    run = new_run(engine, LORA)
    train(engine, run, tokens(engine, 9, 40), steps=2)
    sequences = [tokens(engine, seed, length) for seed, length in enumerate((9, 3, 130, 2))]
    out = forward_backward(engine, run, [datum(ids) for ids in sequences], backward=False)
    for ids, output in zip(sequences, out.loss_fn_outputs, strict=True):
        among, alone = output["logprobs"].to_numpy(), logprobs(engine, run, ids)
        assert np.array_equal(among, alone) if config.deterministic else off(among, alone) < NEAR


def test_gradients_lower_the_loss_as_in_fp32(engine: Engine, exact: Engine):
    ids, losses = tokens(engine, 4, 100), []
    for one in (engine, exact):
        run = new_run(one, LORA)
        train(one, run, ids, steps=8)
        losses.append(-logprobs(one, run, ids).mean())
        before = -logprobs(one, new_run(one, LORA), ids).mean()
        assert losses[-1] < before - 0.3
    assert losses[0] == pytest.approx(losses[1], abs=0.2)


def test_runs_in_one_command_keep_apart(engine: Engine):
    ids, wide, step = tokens(engine, 3, 60), LoraConfig(rank=16, seed=8), AdamParams(learning_rate=1e-2)
    together, apart = [[new_run(engine, lora) for lora in (LORA, wide)] for _ in range(2)]
    run_passes(engine.trainer, [Pass(run, [datum(ids)], "cross_entropy") for run in together])
    for run in apart:
        forward_backward(engine, run, [datum(ids)])
    for one, other in zip(together, apart, strict=True):
        do(engine, OptimStep(one, step))
        do(engine, OptimStep(other, step))
        assert off(logprobs(engine, one, ids), logprobs(engine, other, ids)) < NEAR


async def test_samples_have_the_trainers_logprobs(engine: Engine, config: EngineConfig):
    """Of captured steps and eager ones, alone and among others, with and without an adapter."""
    run = new_run(engine, LORA)
    train(engine, run, tokens(engine, 9, 40), steps=3)
    await engine.sampler.publish(run, do(engine, ExportAdapter(run)))
    fresh = new_run(engine, LORA)
    prompts = [tokens(engine, i, 3 + 7 * i) for i in range(12)]
    asked = [sample(engine, ids, run if i % 2 else None, i) for i, ids in enumerate(prompts)]
    for i, response in enumerate(await asyncio.gather(*asked)):
        (sequence,) = response.sequences
        assert sequence.tokens_np is not None
        assert sequence.logprobs_np is not None
        assert response.prompt_logprobs_np is not None
        got = np.concatenate([response.prompt_logprobs_np[1:], sequence.logprobs_np])
        want = logprobs(engine, run if i % 2 else fresh, np.append(prompts[i], sequence.tokens_np))
        assert off(got, want) < NEAR
        assert i % 2 == 0 or not config.deterministic or np.array_equal(got, want)
    await engine.sampler.retire(run)


async def test_a_seed_gives_the_same_tokens_again(engine: Engine):
    prompt = tokens(engine, 0, 30)
    first, again = [(await sample(engine, prompt, None, 1)).sequences[0] for _ in range(2)]
    assert first.tokens == again.tokens

"""Kernels and captured steps with the widths of ranks: two shards in one process, on one GPU.

The oracle is plain torch in fp32 on the whole model. On a GPU ranks compute in bf16, and may be half as far
again from it as plain torch in bf16 is. Without a GPU they compute in fp32 by Triton's interpreter, tiny
shapes alone. NCCL between several GPUs is not tested here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.engine.by_kernels import DEVICE, INTERPRETED, MARKS
from tests.engine.thread_ranks import OneGpuShards, ThreadShards, threaded
from tests.engine.tiny import tiny_model
from tests.engine.uncaptured import without_device
from tinkex.engine.cuda.cuda_backend import CudaBackend
from tinkex.engine.cuda.decode_graphs import DecodePipeline
from tinkex.engine.cuda.prefill_graphs import CapturedPrefill
from tinkex.engine.protocol import (
    CreateAdapter,
    Engine,
    EngineConfig,
    ExportAdapter,
    LoadAdapter,
    OptimStep,
    Pass,
    SampleWork,
    SaveAdapter,
    run_passes,
)
from tinkex.engine.torch import engine as engine_module
from tinkex.engine.torch.backend import Backend, choose_backend
from tinkex.engine.torch.engine import TorchEngine
from tinkex.engine.torch.tensor_parallel import sharding
from tinkex.types.data import Datum, ModelInput
from tinkex.types.outputs import ForwardBackwardOutput
from tinkex.types.params import AdamParams, LoraConfig, SamplingParams

pytestmark = [*MARKS, pytest.mark.slow, *([] if INTERPRETED else [pytest.mark.gpu])]

QWEN3_0_6B = {
    "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "tied": True,
}  # fmt: skip
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("qwen3", {"head_dim": 32, "intermediate_size": 128}),
    "experts": ("qwen3_moe", {"head_dim": 32}),
    "hybrid": ("qwen3_5", {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}),
}
if not INTERPRETED:
    SHAPES["qwen3_0_6b"] = ("qwen3", QWEN3_0_6B)
DTYPE = "float32" if INTERPRETED else "bfloat16"  # what kernels compute in here
RANKS = {"a": 4, "b": 8}  # of the adapters in a pass
# Tokens of each datum, of a prompt and of a sample; the interpreter takes a second for a step.
DATUMS, PROMPT, TOKENS = ((4, 9), 6, 3) if INTERPRETED else ((19, 40), 21, 12)
ALLOWED, LEAST = 1.5, 4e-5 if INTERPRETED else 1e-3  # times plain torch's error; and what is none at all


class Seen(NamedTuple):
    """What an engine computed."""

    logprobs: np.ndarray  # of the targets of a pass over both adapters
    grad: np.ndarray  # of adapter "a"
    samples: list[tuple[str | None, list[int], np.ndarray]]  # adapter, tokens and logprobs; greedy ones first


class Case(NamedTuple):
    kind: str
    path: Path
    adapters: Path
    exact: TorchEngine  # plain torch, fp32, one device
    want: Seen
    plain: Callable[[], TorchEngine]  # as kernels round, one device


def config_of(path: Path, dtype: str, tensor: int = 1) -> EngineConfig:
    device = "cpu" if INTERPRETED else "cuda"
    sizes = {"kv_bytes": 64 << 20, "max_batch": 8, "max_context": 128, "threads": 1}
    return EngineConfig(
        str(path), device=device, dtype=dtype, tensor=tensor, name="m", warm_up=False, **sizes
    )  # type: ignore[arg-type]


def alone(config: EngineConfig, choose: Callable[..., Backend] = choose_backend) -> TorchEngine:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_module, "choose_backend", choose)
        return TorchEngine(config)


def plain(*_: Any, **__: Any) -> Backend:
    return Backend()


def by_kernels(device: Any, dtype: torch.dtype, **_: Any) -> Backend:
    return CudaBackend(DEVICE, dtype)


def over_ranks(config: EngineConfig) -> TorchEngine:
    """An engine of several ranks, all on one device."""
    with pytest.MonkeyPatch.context() as patch:
        if INTERPRETED:  # on a GPU it is what a rank chooses itself
            patch.setattr(sharding, "choose_backend", by_kernels)
        return threaded(config, ThreadShards if INTERPRETED else OneGpuShards)


def tokens(seed: int, count: int, vocab: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(4, vocab, count).astype(np.int32)


def datum(ids: np.ndarray) -> Datum:
    return Datum(ModelInput.from_ints(ids[:-1]), {"target_tokens": ids[1:].astype(np.int64)})


def do(engine: Engine, command: Any) -> Any:
    return engine.trainer.submit(command).result(300)


def write_adapters(engine: Engine, place: Path) -> None:
    """Adapters with no zero in them, so that no gradient is zero."""
    for seed, (name, rank) in enumerate(RANKS.items()):
        do(engine, CreateAdapter(f"new-{name}", LoraConfig(rank=rank, seed=seed)))
        do(engine, SaveAdapter(f"new-{name}", str(place / name)))
        file, random = place / name / "adapter_model.safetensors", torch.Generator().manual_seed(seed)
        shapes = {name: tensor.shape for name, tensor in sorted(load_file(file).items())}
        noise = {name: torch.randn(shape, generator=random) for name, shape in shapes.items()}
        rounded = {name: (0.3 * x / x.shape[-1] ** 0.5).bfloat16().float() for name, x in noise.items()}
        save_file(rounded, file, {"format": "pt"})
        (place / name / "SHA256SUMS").unlink()


def seen(engine: TorchEngine, adapters: Path, place: Path) -> Seen:
    vocab = engine.info.vocab_size
    for name in RANKS:
        do(engine, LoadAdapter(name, str(adapters / name)))
    export = do(engine, ExportAdapter("b"))
    passes = [
        Pass(name, [datum(tokens(seed, n, vocab)) for n in DATUMS], "cross_entropy")
        for seed, name in enumerate(RANKS)
    ]
    logprobs = []
    for out in run_passes(engine.trainer, passes):
        assert isinstance(out, ForwardBackwardOutput), out
        logprobs += [one["logprobs"].to_numpy() for one in out.loss_fn_outputs]
    do(engine, OptimStep("a", AdamParams(learning_rate=1e-3)))
    do(engine, SaveAdapter("a", str(place), optimizer=True))
    moments = load_file(place / "optimizer.safetensors")  # the first one is the gradient, scaled
    grads = [moments[name].flatten() for name in sorted(moments) if name.startswith("exp_avg.")]
    return Seen(np.concatenate(logprobs), torch.cat(grads).numpy(), asyncio.run(sample(engine, export)))


async def sample(engine: Engine, export: Any) -> list[tuple[str | None, list[int], np.ndarray]]:
    await engine.sampler.publish("b", export)
    greedy, cut = {"temperature": 0.0}, {"top_k": 20, "top_p": 0.95, "seed": 5}
    prompt, works = tokens(9, PROMPT, engine.info.vocab_size), []
    for rules in (greedy, cut):
        params = SamplingParams(max_tokens=TOKENS, stop=[], **rules)
        works += [SampleWork(prompt, params, adapter) for adapter in ("b", None)]
    if INTERPRETED:
        works = [works[0], works[3]]
    answers = list(await asyncio.gather(*map(engine.sampler.sample, works)))
    if not INTERPRETED:  # and one by one, twice: what was captured is replayed
        works *= 3
        answers += [await engine.sampler.sample(work) for work in works[4:]]
    return [
        (work.adapter, list(answer.sequences[0].tokens), np.array(answer.sequences[0].logprobs))
        for work, answer in zip(works, answers, strict=True)
    ]


def scored(engine: Engine, adapter: str | None, ids: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Of a sampled sequence, by one prefill: each token's logprob, and that of the likeliest token there."""
    prompt = np.concatenate([tokens(9, PROMPT, engine.info.vocab_size), np.array(ids, np.int32)])
    params = SamplingParams(max_tokens=1, stop=[])
    work = SampleWork(prompt, params, adapter, prompt_logprobs=True, topk_prompt_logprobs=1)
    answer = asyncio.run(engine.sampler.sample(work))
    assert answer.prompt_logprobs_np is not None
    assert answer.topk_prompt_logprobs is not None
    best = [row[0][1] for row in answer.topk_prompt_logprobs[-len(ids) :] if row]
    return answer.prompt_logprobs_np[-len(ids) :], np.array(best)


def rms(x: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(x, dtype=np.float64))))


def median(x: np.ndarray) -> float:
    return float(np.median(np.abs(x)))


@pytest.fixture(scope="module", params=SHAPES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    family, sizes = SHAPES[request.param]
    place = tmp_path_factory.mktemp(request.param)
    path = tiny_model(place / "model", family, **sizes)
    for file in path.glob("*.safetensors"):  # what bf16 can hold, so that all engines have the same weights
        save_file({k: t.bfloat16().float() for k, t in load_file(file).items()}, file, {"format": "pt"})
    exact = alone(config_of(path, "float32"), plain)
    write_adapters(exact, place / "adapters")
    want = seen(exact, place / "adapters", place / "exact")
    kind = request.param
    yield Case(kind, path, place / "adapters", exact, want, lambda: alone(config_of(path, DTYPE), plain))
    exact.close()


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    if INTERPRETED:
        without_device(monkeypatch)


def test_two_shards_compute_what_one_device_does(case: Case, tmp_path: Path) -> None:
    rounded = case.plain()
    try:
        near = seen(rounded, case.adapters, tmp_path / "plain")
        ranks = over_ranks(config_of(case.path, DTYPE, 2))
        try:
            found = seen(ranks, case.adapters, tmp_path / "ranks")
            check_captured(ranks)
        finally:
            ranks.close()
        want = case.want
        check("logprobs", rms(found.logprobs - want.logprobs), rms(near.logprobs - want.logprobs))
        norm = rms(want.grad)
        check("gradient", rms(found.grad - want.grad) / norm, rms(near.grad - want.grad) / norm)
        check_samples(case, found, rounded)
    finally:
        rounded.close()


def check(what: str, ours: float, plain: float) -> None:
    print(f"{what}: ranks by kernels {ours:.2e}, plain torch {plain:.2e}")
    assert ours <= ALLOWED * plain + LEAST, what


def check_samples(case: Case, found: Seen, rounded: Engine) -> None:
    """Every token's logprob is the oracle's for the same tokens; a greedy token is one of the likeliest."""
    ours, plains, gaps = [], [], []
    for i, (adapter, ids, logprobs) in enumerate(found.samples):
        assert len(ids) == TOKENS
        want, best = scored(case.exact, adapter, ids)
        ours.append(logprobs - want)
        plains.append(scored(rounded, adapter, ids)[0] - want)
        if i == 0 if INTERPRETED else i % 4 < 2:  # greedy
            gaps.append(best - want)
    plain = rms(np.concatenate(plains))
    check("samples", rms(np.concatenate(ours)), plain)
    assert rms(np.concatenate(gaps)) <= 2 * plain + LEAST


def check_captured(engine: TorchEngine) -> None:
    pipeline, prefill = engine._batch._pipeline, engine._batch._runner._prefill
    assert isinstance(pipeline, DecodePipeline)
    assert pipeline._graphs._graphs, "decode steps were captured"
    assert pipeline._graphs._decoder.shards is not None
    if not INTERPRETED:
        assert isinstance(prefill, CapturedPrefill)
        assert prefill.replayed


@pytest.mark.skipif(INTERPRETED, reason="needs a CUDA device")
def test_two_shards_draw_what_one_device_draws(case: Case, tmp_path: Path) -> None:
    """By kernels on both sides: the same tokens, up to where two are as likely as rounding can tell."""
    one = alone(config_of(case.path, DTYPE), by_kernels)
    try:
        want = seen(one, case.adapters, tmp_path / "one")
    finally:
        one.close()
    two = over_ranks(config_of(case.path, DTYPE, 2))
    try:
        found = seen(two, case.adapters, tmp_path / "two")
    finally:
        two.close()
    partings, apart = 0, []
    for (_, ids, logprobs), (_, others, their) in zip(found.samples, want.samples, strict=True):
        parted = next((i for i, pair in enumerate(zip(ids, others, strict=True)) if len(set(pair)) > 1), None)
        partings += parted is not None
        apart.append(logprobs[:parted] - their[:parted])
    same = sum(map(len, apart))
    print(f"{same} tokens are the same, {partings} of {len(found.samples)} samples part")
    # With a large vocabulary and random weights many tokens are nearly as likely, so whole samples seldom
    # agree. Draws that had nothing to do with each other would agree in about one token of a thousand.
    assert same >= 0.8 * (same + partings)
    size = median if case.kind == "experts" else rms  # a close router may choose other experts
    assert size(np.concatenate(apart)) <= 0.1

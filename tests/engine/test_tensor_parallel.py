"""Tensor parallelism: ranks that are real processes over gloo, or threads, against one device.

The oracle is the engine on one device, in fp32. `test_tensor_parallel_oracle` has transformers for one.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from torch.multiprocessing.reductions import StorageWeakRef

from tests.engine.thread_ranks import ThreadShards, threaded
from tests.engine.tiny import tiny_model
from tinkex.engine.protocol import (
    CreateAdapter,
    Engine,
    EngineConfig,
    EngineError,
    EngineLost,
    ExportAdapter,
    ForwardBackward,
    LoadAdapter,
    OptimStep,
    Pass,
    SampleWork,
    SaveAdapter,
    build_engine,
    run_passes,
)
from tinkex.engine.torch.adapters import Adapter
from tinkex.engine.torch.engine import TorchEngine
from tinkex.engine.torch.load import fill, load_decoder, read_config, read_tensors
from tinkex.engine.torch.lora import LoraBatch
from tinkex.engine.torch.models.attend import PackedAttend
from tinkex.engine.torch.tensor_parallel.sharding import LoadedPart, local_config
from tinkex.engine.torch.tensor_parallel.shards import Shards
from tinkex.errors import InvalidInputError
from tinkex.types.data import Datum, ModelInput
from tinkex.types.outputs import ForwardBackwardOutput
from tinkex.types.params import AdamParams, LoraConfig, SamplingParams

pytestmark = pytest.mark.slow

# Of logprobs (relative, if they are beyond 1), of gradients' norms, and of the norms of the differences of
# the adapter and the moments, relative to theirs.
NEAR = 1e-5
RANKS = {"a": 4, "b": 8}  # of the adapters that train together
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
gpu = pytest.param("cuda", marks=[pytest.mark.gpu, needs_gpu])


def config_of(path: Path, tensor: int = 1, **more: Any) -> EngineConfig:
    given = {"device": "cpu", "dtype": "float32", "kv_bytes": 2 << 20, "threads": 1, "name": "m/tiny"} | more
    return EngineConfig(str(path), tensor=tensor, **given)


def datum(ids: np.ndarray) -> Datum:
    return Datum(ModelInput.from_ints(ids[:-1]), {"target_tokens": ids[1:].astype(np.int64)})


class Trained:
    """What two runs of mixed ranks, trained together for some steps, came to."""

    def __init__(self, engine: Engine, place: Path, steps: int, loss_fn: str = "cross_entropy") -> None:
        def do(command: Any) -> Any:
            return engine.trainer.submit(command).result(120)

        random, vocab = np.random.default_rng(0), engine.info.vocab_size
        for seed, (name, rank) in enumerate(RANKS.items()):
            do(CreateAdapter(name, LoraConfig(rank=rank, seed=seed)))
        self.logprobs: list[np.ndarray] = []
        self.norms: list[float] = []
        for _ in range(steps):
            passes = [
                Pass(name, [datum(random.integers(4, vocab, n)) for n in (9, 17)], loss_fn) for name in RANKS
            ]
            for out in run_passes(engine.trainer, passes):
                assert isinstance(out, ForwardBackwardOutput), out
                self.logprobs += [one["logprobs"].to_numpy() for one in out.loss_fn_outputs]
            for name in RANKS:  # the first is clipped in every step
                # Without this eps Adam makes a whole step of rounding errors, where a gradient is else zero.
                params = AdamParams(learning_rate=1e-3, eps=1e-2, grad_clip_norm=1.0 if name == "a" else 0.0)
                metrics = do(OptimStep(name, params))
                assert metrics["grad_clipped"] == (1.0 if name == "a" else 0.0)
                self.norms.append(metrics["grad_norm"])
        do(SaveAdapter("a", str(place), optimizer=True))
        self.adapter = load_file(place / "adapter_model.safetensors")
        self.moments = load_file(place / "optimizer.safetensors")
        self.samples = asyncio.run(self._sample(engine, do(ExportAdapter("b")), random, vocab))

    async def _sample(self, engine: Engine, export: Any, random: Any, vocab: int) -> list[tuple[Any, Any]]:
        await engine.sampler.publish("b", export)
        prompt, found = random.integers(4, vocab, 20).astype(np.int32), []
        for rules in ({}, {"temperature": 0.0}, {"top_k": 5, "top_p": 0.9}):
            params = SamplingParams(max_tokens=10, seed=3, stop=[], **rules)
            for adapter in ("b", None):
                work = SampleWork(prompt, params, adapter, num_samples=2, prompt_logprobs=True)
                answer = await engine.sampler.sample(work)
                found += [(list(one.tokens), np.array(one.logprobs)) for one in answer.sequences]
        return found

    def check_near(self, other: Trained, near: float = NEAR, norms: float = 0.0) -> None:
        """`norms`: for the norms of gradients, where it is not `near`."""
        for ours, theirs in zip(self.logprobs, other.logprobs, strict=True):
            assert distance(ours, theirs) <= near
        np.testing.assert_allclose(self.norms, other.norms, rtol=norms or near)
        for (tokens, logprobs), (others, their) in zip(self.samples, other.samples, strict=True):
            assert tokens == others
            assert distance(logprobs, their) <= near
        assert relative(self.adapter, other.adapter) <= near
        for moment in ("exp_avg.", "exp_avg_sq."):  # of the gradients so far
            ours, theirs = (
                {name: tensor for name, tensor in one.moments.items() if name.startswith(moment)}
                for one in (self, other)
            )
            assert relative(ours, theirs) <= near


def distance(ours: np.ndarray, theirs: np.ndarray) -> float:
    """Of logprobs: the largest difference, relative to those beyond 1."""
    return float((np.abs(ours - theirs) / np.maximum(1.0, np.abs(theirs))).max())


def relative(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> float:
    """The norm of the difference of all tensors, relative to theirs."""
    assert ours.keys() == theirs.keys()
    norm = lambda tensors: np.sqrt(sum(np.square(t, dtype=np.float64).sum() for t in tensors))  # noqa: E731
    return float(norm(ours[name] - theirs[name] for name in theirs) / norm(theirs.values()))


def trained(engine: Engine, place: Path, steps: int) -> Trained:
    try:
        return Trained(engine, place, steps)
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("family", "tensor", "steps"),
    [
        ("llama3", 2, 20),
        ("qwen3", 4, 20),  # two kv heads for four ranks
        ("qwen3_moe", 2, 20),
        ("qwen3_moe", 4, 20),
        ("qwen3_5_moe", 2, 20),
        ("qwen3_5_moe", 4, 20),  # delta nets with two key heads, gated attention, a shared expert
        ("granite4", 2, 3),  # Mamba, normed over the ranks
    ],
)
def test_ranks_compute_what_one_device_does(family: str, tensor: int, steps: int, tmp_path: Path) -> None:
    path = tiny_model(tmp_path / "model", family)
    alone = trained(build_engine(config_of(path)), tmp_path / "alone", steps)
    together = trained(build_engine(config_of(path, tensor)), tmp_path / "together", steps)
    # 9.1e-6 on one kind of CPU, 1.10e-5 on another
    together.check_near(alone, norms=2e-5 if (family, tensor) == ("qwen3_5_moe", 4) else NEAR)


@pytest.mark.parametrize("device", ["cpu", gpu])
@pytest.mark.parametrize(
    "family",
    ["llama3", "qwen3_moe", "qwen3_5", "deepseek_v3", "nemotron3 latent", "olmoe", "gemma4 with experts",
     "gemma4 E", "gpt_oss", "phi4", "qwen3_next"],
)  # fmt: skip
def test_every_kind_of_layer_is_split(family: str, device: str, tmp_path: Path) -> None:
    path = tiny_model(tmp_path / "model", family)
    alone = trained(build_engine(config_of(path, device=device)), tmp_path / "alone", 2)
    together = trained(threaded(config_of(path, 2, device=device)), tmp_path / "together", 2)
    near = 2e-5 if family == "gemma4 E" else NEAR  # 1.11e-5, of the head's first moments
    together.check_near(alone, near if device == "cpu" else 1e-3)


@pytest.mark.parametrize("quantize", ["nf4", "int8"])
def test_quantised_weights_are_split_after_they_are_read(quantize: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "head_dim": 32}
    path = tiny_model(tmp_path / "model", "qwen3", **sizes)
    alone = trained(build_engine(config_of(path, quantize=quantize)), tmp_path / "alone", 1)
    together = trained(threaded(config_of(path, 2, quantize=quantize)), tmp_path / "together", 1)
    together.check_near(alone)


def test_files_are_the_same_with_and_without_ranks(tmp_path: Path) -> None:
    """What one engine saved, with the optimizer's state, the other goes on with."""
    path = tiny_model(tmp_path / "model", "qwen3_moe")
    ids = np.random.default_rng(1).integers(4, 250, 30)

    def go_on(engine: Engine, source: Path | None, target: Path) -> list[float]:
        def do(command: Any) -> Any:
            return engine.trainer.submit(command).result(120)

        do(
            CreateAdapter("r", LoraConfig(rank=4, seed=5))
            if source is None
            else LoadAdapter("r", str(source), True)
        )
        losses = []
        for _ in range(2):
            (out,) = run_passes(engine.trainer, [Pass("r", [datum(ids)], "cross_entropy")])
            assert isinstance(out, ForwardBackwardOutput)
            losses.append(out.metrics["loss:sum"])
            do(OptimStep("r", AdamParams(learning_rate=1e-2)))
        do(SaveAdapter("r", str(target), optimizer=True))
        return losses

    alone, ranks = build_engine(config_of(path)), threaded(config_of(path, 2))
    try:
        straight = go_on(alone, None, tmp_path / "1") + go_on(alone, tmp_path / "1", tmp_path / "2")
        mixed = go_on(ranks, None, tmp_path / "3") + go_on(alone, tmp_path / "3", tmp_path / "4")
        back = go_on(ranks, tmp_path / "1", tmp_path / "5")
    finally:
        alone.close()
        ranks.close()
    np.testing.assert_allclose(mixed, straight, rtol=1e-4)
    np.testing.assert_allclose(back, straight[2:], rtol=1e-4)
    first, second = (load_file(tmp_path / n / "adapter_model.safetensors") for n in ("1", "3"))
    assert {k: v.shape for k, v in first.items()} == {k: v.shape for k, v in second.items()}


def parts_of(path: Path, count: int, work: Callable[[Any, LoadedPart, Shards], Any]) -> list[Any]:
    """What `work` gives for each rank's decoder, one thread for each."""

    def rank(shards: Shards) -> Any:
        part = LoadedPart(shards)
        return work(load_decoder(path, part=part), part, shards)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(rank, ThreadShards.group(count)))


@pytest.mark.parametrize("family", ["llama3", "qwen3_moe", "qwen3_5"])
def test_a_rank_has_its_part_of_the_weights(family: str, tmp_path: Path) -> None:
    path = tiny_model(tmp_path, family)
    whole = load_decoder(path).weight_bytes
    for tensor, most in ((2, 0.55), (4, 0.32)):
        sizes = parts_of(path, tensor, lambda decoder, part, shards: decoder.weight_bytes)
        assert max(sizes) <= most * whole


@pytest.mark.parametrize("family", ["llama3", "qwen3_moe", "qwen3_5"])
def test_a_rank_has_one_tensor_of_the_whole_model_at_a_time(family: str, tmp_path: Path) -> None:
    path, kept = tiny_model(tmp_path, family), []

    def one_by_one() -> Iterator[tuple[str, torch.Tensor]]:
        for name, stored in read_tensors(path):
            tensor = stored.clone()
            kept.append(StorageWeakRef(tensor.untyped_storage()))
            yield name, tensor
            del tensor, stored
            assert sum(not one.expired() for one in kept) <= 2, "this one, and what the caller's loop holds"

    part = LoadedPart(ThreadShards.group(2)[1])
    fill(read_config(path), one_by_one(), "cpu", torch.float32, source=path, part=part)
    assert len(kept) > 20
    assert all(one.expired() for one in kept)


@pytest.mark.parametrize("family", ["llama3", "qwen3_moe", "qwen3_5"])
def test_adapters_add_no_collective_to_a_pass(family: str, tmp_path: Path) -> None:
    path = tiny_model(tmp_path, family)
    ids = torch.arange(4, 24)

    def count(decoder: Any, part: LoadedPart, shards: Shards) -> tuple[int, int]:
        calls = []
        for adapted in (False, True):
            before, lora = shards.calls, None
            if adapted:
                lora = LoraBatch([Adapter.fresh(LoraConfig(rank=4, seed=1), decoder.sites())], [len(ids)])
            windows, states = (
                decoder.config.windows,
                decoder.backend.packed_states(decoder.config, [20], "cpu"),
            )
            with torch.no_grad():
                decoder(ids, torch.arange(20), PackedAttend([20], windows), lora, states=states)
            calls.append(shards.calls - before)
        return calls[0], calls[1]

    for without, with_adapters in parts_of(path, 2, count):
        assert with_adapters == without == 1 + 2 * read_config(path).layers


@pytest.mark.parametrize(
    ("family", "tensor", "message"),
    [
        ("smollm2", 2, "tensor=2 does not divide the 3 heads of llama; these do: 3"),
        ("qwen3", 3, "tensor=3 does not divide the 4 heads of qwen3; these do: 2, 4"),
    ],
)
def test_what_cannot_be_split_is_refused(family: str, tensor: int, message: str, tmp_path: Path) -> None:
    config = read_config(tiny_model(tmp_path, family))
    with pytest.raises(InvalidInputError, match=message):
        local_config(config, tensor)


def test_a_model_that_cannot_be_split_ends_its_ranks(tmp_path: Path) -> None:
    path = tiny_model(tmp_path, "smollm2")
    with pytest.raises(EngineError, match="tensor=2 does not divide the 3 heads"):
        build_engine(config_of(path, 2))


def test_a_dead_rank_is_a_lost_engine(tmp_path: Path) -> None:
    engine = build_engine(config_of(tiny_model(tmp_path, "llama3"), 2))
    assert isinstance(engine, TorchEngine)
    try:
        engine.trainer.submit(CreateAdapter("a", LoraConfig(rank=4))).result(60)
        (process, _), *_ = engine._ranks._team._ranks  # type: ignore[union-attr]
        os.kill(process.pid, signal.SIGKILL)
        until = time.monotonic() + 10
        while engine.heartbeat().alive and time.monotonic() < until:
            time.sleep(0.01)
        assert "rank 1 ended with exit code -9" in engine.heartbeat().trouble
        with pytest.raises(EngineLost, match="rank 1 ended"):
            engine.trainer.submit(CreateAdapter("b", LoraConfig(rank=4))).result(10)
    finally:
        engine.close()


def test_a_rank_that_dies_in_a_pass_fails_it(tmp_path: Path) -> None:
    engine = build_engine(config_of(tiny_model(tmp_path, "llama3"), 2))
    assert isinstance(engine, TorchEngine)
    try:
        engine.trainer.submit(CreateAdapter("a", LoraConfig(rank=4))).result(60)
        (process, _), *_ = engine._ranks._team._ranks  # type: ignore[union-attr]
        os.kill(process.pid, signal.SIGSTOP)  # rank 0 waits for it in its first collective
        passed = engine.trainer.submit(
            ForwardBackward((Pass("a", [datum(np.arange(4, 20))], "cross_entropy"),))
        )
        with pytest.raises(TimeoutError):
            passed.result(1.0)
        os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(EngineLost):
            passed.result(20)
    finally:
        engine.close()

"""Models with gated delta nets on a GPU in bf16: kernels and captured steps against plain fp32."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.engine.commands import do
from tests.engine.stepping import finish
from tests.engine.tiny import tiny_model
from tinkex.engine.protocol import CreateAdapter, ForwardBackward, Pass
from tinkex.engine.torch.backend import Backend
from tinkex.engine.torch.load import load_decoder
from tinkex.engine.torch.models.decoder import Decoder
from tinkex.engine.torch.sequences import PublishedAdapter
from tinkex.engine.torch.trainer import TorchTrainer
from tinkex.types.data import Datum, ModelInput
from tinkex.types.outputs import ForwardBackwardOutput
from tinkex.types.params import LoraConfig

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from tests.engine.cuda_batch import exact_decoder, new_batch, prompt, published, submit
from tinkex.engine.cuda.cuda_backend import CudaBackend

pytestmark = pytest.mark.gpu

SHAPE = {"linear_value_head_dim": 16, "max_position_embeddings": 1024}


@pytest.fixture(scope="module", params=["qwen3_5", "qwen3_next"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), request.param, **SHAPE)


@pytest.fixture(scope="module")
def decoder(path: Path) -> Decoder:
    decoder = load_decoder(path, "cuda", torch.bfloat16)
    assert isinstance(decoder.backend, CudaBackend)
    return decoder


@pytest.fixture(scope="module")
def exact(path: Path) -> Decoder:
    return exact_decoder(path)


def one_pass(decoder: Decoder, adapter: PublishedAdapter | None, ids: list[np.ndarray]) -> list[np.ndarray]:
    trainer = TorchTrainer(decoder, "tiny")
    do(trainer, CreateAdapter("run", adapter.adapter.lora if adapter else LoraConfig(rank=4)))
    if adapter:
        trainer.adapter("run").flat.copy_(adapter.adapter.flat)
    datums = [Datum(ModelInput.from_ints(x[:-1]), {"target_tokens": x[1:].astype(np.int64)}) for x in ids]
    (output,) = do(trainer, ForwardBackward((Pass("run", datums, "cross_entropy", backward=False),)))
    assert isinstance(output, ForwardBackwardOutput)
    return [one["logprobs"].to_numpy() for one in output.loss_fn_outputs]


class Scores:
    """How far logprobs are from those of fp32, and how far plain torch in bf16 is for the same tokens.

    Weights are far larger than a real model's, and bf16 may send a token to another expert. So a bound for
    all models would say little: kernels may be off twice as far as plain torch.
    """

    def __init__(self, decoder: Decoder, exact: Decoder) -> None:
        self._plain, self._exact = decoder.with_backend(Backend()), exact
        self._off: list[np.ndarray] = []
        self._plain_off: list[np.ndarray] = []

    def add(
        self, adapter: PublishedAdapter | None, ids: np.ndarray, tokens: list[int], got: np.ndarray
    ) -> None:
        whole = [np.append(ids, tokens).astype(np.int32)]
        (want,), (plain,) = one_pass(self._exact, adapter, whole), one_pass(self._plain, adapter, whole)
        self._off.append(np.abs(got - want[len(ids) - 1 :]))
        self._plain_off.append(np.abs(plain - want)[len(ids) - 1 :])

    def check(self) -> None:
        off, plain = (np.concatenate(found).mean() for found in (self._off, self._plain_off))
        assert off < max(0.02, 2 * plain), (off, plain)


def test_sampled_logprobs_are_those_of_fp32(decoder: Decoder, exact: Decoder) -> None:
    """Base and adapters, prompts of many lengths in chunks, several samples, and all of it from the cache."""
    batch = new_batch(decoder, prefill_alone=96, prefill_beside=64)
    adapters = [None, published(decoder, 8, 1), published(decoder, 32, 2, train_mlp=False)]
    asked = [(prompt(i, 3 + 13 * i), adapters[i % 3]) for i in range(9)]
    scores = Scores(decoder, exact)
    for turn in range(2):
        futures = [
            submit(batch, ids, adapter, {"num_samples": 2}, seed=i)[0]
            for i, (ids, adapter) in enumerate(asked)
        ]
        finish(batch)
        for (ids, adapter), future in zip(asked, futures, strict=True):
            response = future.result(timeout=0)
            assert response.prompt_cache_hit_tokens == turn * ((len(ids) - 1) // 16 * 16)
            for sequence in response.sequences:
                assert len(sequence.tokens) == 24
                scores.add(adapter, ids, sequence.tokens, sequence.logprobs_np)
    scores.check()
    assert batch._pipeline is not None
    assert batch._pipeline._launched > 20
    assert batch._runner._prefill is not None
    assert batch._runner._prefill.replayed > 0


def test_a_snapshot_of_a_step_in_flight_is_that_of_its_tokens(decoder: Decoder, exact: Decoder) -> None:
    """An answer crosses 512 tokens while steps are launched ahead; the next turn goes on from there."""
    batch = new_batch(decoder)
    asked = [prompt(seed, 497 + 3 * seed) for seed in range(3)]
    futures = [submit(batch, ids, max_tokens=60, seed=i)[0] for i, ids in enumerate(asked)]
    finish(batch)
    whole = [
        np.append(ids, future.result(timeout=0).sequences[0].tokens).astype(np.int32)[:530]
        for ids, future in zip(asked, futures, strict=True)
    ]
    futures = [submit(batch, ids, seed=9)[0] for ids in whole]
    finish(batch)
    scores = Scores(decoder, exact)
    for ids, future in zip(whole, futures, strict=True):
        response = future.result(timeout=0)
        assert response.prompt_cache_hit_tokens == 512
        scores.add(None, ids, response.sequences[0].tokens, response.sequences[0].logprobs_np)
    scores.check()


def gradients(decoder: Decoder, recompute: bool) -> tuple[list[np.ndarray], Tensor]:
    trainer = TorchTrainer(decoder, "tiny", recompute=recompute)
    do(trainer, CreateAdapter("run", LoraConfig(rank=8, seed=1)))
    flat = trainer.adapter("run").flat
    flat.copy_((0.1 * torch.randn(flat.shape, generator=torch.Generator().manual_seed(1))).bfloat16())
    datums = [
        Datum(ModelInput.from_ints(ids[:-1]), {"target_tokens": ids[1:].astype(np.int64)})
        for ids in (prompt(i, n) for i, n in enumerate((60, 3, 190, 17, 65)))
    ]
    (output,) = do(trainer, ForwardBackward((Pass("run", datums, "cross_entropy"),)))
    assert isinstance(output, ForwardBackwardOutput)
    grad = trainer.adapter("run").grad
    assert grad is not None
    return [one["logprobs"].to_numpy() for one in output.loss_fn_outputs], grad.double().cpu()


@pytest.mark.parametrize("recompute", [False, True])
def test_a_pass_is_that_of_fp32(decoder: Decoder, exact: Decoder, recompute: bool) -> None:
    (got, mine), (want, other) = gradients(decoder, recompute), gradients(exact, False)
    rounded, plain = gradients(decoder.with_backend(Backend()), recompute)
    off, plain_off = (
        np.mean([np.abs(a - b).mean() for a, b in zip(found, want, strict=True)]) for found in (got, rounded)
    )
    assert off < max(0.02, 2 * plain_off), (off, plain_off)
    off, plain_off = ((grad - other).norm() / other.norm() for grad in (mine, plain))
    assert off < max(0.03, 2 * plain_off), (off, plain_off)

"""Quantised bases and gpt-oss on a GPU: captured steps and the trainer's kernels against plain torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

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

from tests.engine.cuda_batch import new_batch, published, submit
from tinkex.engine.cuda.cuda_backend import CudaBackend

pytestmark = pytest.mark.gpu

MODELS = [("qwen3", "nf4"), ("qwen2", "fp8"), ("qwen3", "int8"), ("gpt_oss", "none"), ("gpt_oss", "nf4")]


@pytest.fixture(scope="module", params=MODELS, ids=" ".join)
def decoder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    family, quantize = request.param
    path = tiny_model(tmp_path_factory.mktemp("model"), family, hidden_size=128, intermediate_size=128)
    found = load_decoder(path, "cuda", torch.bfloat16, quantize)
    assert isinstance(found.backend, CudaBackend)
    assert bool(found.slots()) == (quantize != "none")
    return found


def trained(
    decoder: Decoder, whole: np.ndarray, adapter: PublishedAdapter | None
) -> tuple[np.ndarray, torch.Tensor]:
    """The logprobs of all tokens but the first, and the adapter's gradients."""
    trainer = TorchTrainer(decoder, "tiny")
    do(trainer, CreateAdapter("run", adapter.adapter.lora if adapter else LoraConfig(rank=8, seed=3)))
    if adapter is not None:
        trainer.adapter("run").flat.copy_(adapter.adapter.flat)
    datum = Datum(ModelInput.from_ints(whole[:-1].astype(np.int32)), {"target_tokens": whole[1:]})
    (output,) = do(trainer, ForwardBackward((Pass("run", [datum], "cross_entropy"),)))
    assert isinstance(output, ForwardBackwardOutput)
    grad = trainer.adapter("run").grad
    assert grad is not None
    return output.loss_fn_outputs[0]["logprobs"].to_numpy(), grad.clone()


def test_sampler_and_trainer_compute_what_plain_torch_does(decoder: Decoder) -> None:
    """Most tokens nearly alike; of experts, bf16 may choose others for a few."""
    batch, adapters = new_batch(decoder), [None, published(decoder, 8, 1), published(decoder, 32, 2)]
    draw = np.random.default_rng(0)
    prompts = [draw.integers(4, 256, 3 + 9 * i).astype(np.int32) for i in range(9)]
    futures = [submit(batch, ids, adapters[i % 3], seed=i)[0] for i, ids in enumerate(prompts)]
    finish(batch)
    answers = [future.result(timeout=0) for future in futures]
    assert batch._pipeline is not None
    assert batch._pipeline._launched > 20  # it was the pipeline that decoded
    plain = decoder.with_backend(Backend())
    for i, (ids, answer) in enumerate(zip(prompts, answers, strict=True)):
        (sequence,) = answer.sequences
        whole = np.append(ids, sequence.tokens).astype(np.int64)
        want, want_grad = trained(plain, whole, adapters[i % 3])
        got, grad = trained(decoder, whole, adapters[i % 3])
        assert np.median(np.abs(got - want)) < 0.1
        assert np.median(np.abs(sequence.logprobs_np - want[len(ids) - 1 :])) < 0.1
        assert torch.nn.functional.cosine_similarity(grad, want_grad, dim=0) > 0.97

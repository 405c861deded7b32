"""A whole pass by the kernels, in fp32 by Triton's interpreter, against the plain path.

What bf16 rounds away on a GPU shows here: biases, norms of heads, windows and adapters of several ranks.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.engine.commands import do
from tests.engine.tiny import tiny_model, tiny_tokenizer
from tinkex.engine.cuda import grouped_lora
from tinkex.engine.cuda.cuda_backend import CudaBackend
from tinkex.engine.protocol import CreateAdapter, ForwardBackward, Pass
from tinkex.engine.torch.backend import Backend
from tinkex.engine.torch.load import load_decoder
from tinkex.engine.torch.trainer import TorchTrainer
from tinkex.types.data import Datum, ModelInput
from tinkex.types.outputs import ForwardBackwardOutput
from tinkex.types.params import LoraConfig

if importlib.util.find_spec("triton") is None or not os.environ.get("TRITON_INTERPRET"):
    pytest.skip("needs Triton's interpreter", allow_module_level=True)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning:triton", "ignore::RuntimeWarning:triton"),
    pytest.mark.timeout(600),  # the interpreter takes seconds for what a GPU does in microseconds
]
RUNS = {"a": LoraConfig(rank=8, seed=1), "b": LoraConfig(rank=4, seed=2, train_attn=False)}
LENGTHS = {"a": [66, 2], "b": [5]}


def datums(seed: int, lengths: list[int], vocab: int) -> list[Datum]:
    rng = np.random.default_rng(seed)
    return [
        Datum(
            ModelInput.from_ints(rng.integers(4, vocab, n).astype(np.int32)),
            {"target_tokens": rng.integers(4, vocab, n), "weights": rng.normal(size=n).astype(np.float32)},
        )
        for n in lengths
    ]


def logprobs_and_gradients(
    path: Path, backend: Backend | None = None, quantize: str = "none", recompute: bool = False
) -> tuple[list[np.ndarray], dict[str, Tensor]]:
    decoder = load_decoder(path, quantize=quantize)
    if backend is not None:
        decoder.settle(backend.reads_codes)
    decoder = decoder.with_backend(backend) if backend else decoder
    trainer = TorchTrainer(decoder, "tiny", recompute=recompute)
    for run, lora in RUNS.items():
        do(trainer, CreateAdapter(run, lora))
        flat = trainer.adapter(run).flat
        flat.copy_(0.1 * torch.randn(flat.shape, generator=torch.Generator().manual_seed(lora.seed or 0)))
    data = [datums(i, lengths, decoder.config.vocab_size) for i, lengths in enumerate(LENGTHS.values())]
    work = tuple(Pass(run, some, "cross_entropy") for run, some in zip(RUNS, data, strict=True))
    logprobs = []
    for output in do(trainer, ForwardBackward(work)):
        assert isinstance(output, ForwardBackwardOutput), output
        logprobs += [one["logprobs"].to_numpy() for one in output.loss_fn_outputs]
    grads = {run: trainer.adapter(run).grad for run in RUNS}
    return logprobs, {run: grad.clone() for run, grad in grads.items() if grad is not None}


CASES = [("mistral", False), ("qwen2", False), ("qwen3", True)]


@pytest.mark.parametrize(
    ("family", "padded", "invariant"),
    [
        *((*case, invariant) for case in CASES for invariant in (False, True)),
        (
            "qwen3_5_moe",
            False,
            False,
        ),  # gated delta nets, gated and partly rotated attention, a shared expert
    ],
)
def test_a_pass_is_the_plain_one(
    family: str, padded: bool, invariant: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny_model(tmp_path, family, intermediate_size=128)
    if padded:
        tiny_tokenizer(path)  # of 259 ids: the other rows are padding
    want, want_grads = logprobs_and_gradients(path)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)  # there is no device to pin it for
    backend = CudaBackend(torch.device("cpu"), torch.float32, invariant=invariant)
    got, got_grads = logprobs_and_gradients(path, backend)
    for one, other in zip(got, want, strict=True):
        np.testing.assert_allclose(one, other, atol=4e-5)
    assert set(got_grads) == set(want_grads) == set(RUNS)
    for run, grad in want_grads.items():
        assert (got_grads[run] - grad).norm() / grad.norm() < 2e-5


@pytest.mark.parametrize("family", ["qwen3"])
def test_recomputing_leaves_out_the_last_product(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its result is never written when a layer is computed again: what reads it would find NaN."""
    path = tiny_model(tmp_path, family, intermediate_size=128)
    want, want_grads = logprobs_and_gradients(path)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)  # there is no device to pin it for
    products: list[bool] = []
    plain = grouped_lora.product_with

    def counted(x: Tensor, weight: Any, at: Any, read: bool = True) -> tuple[Tensor, Tensor]:
        products.append(read)
        return plain(x, weight, at, read)

    monkeypatch.setattr(grouped_lora, "product_with", counted)
    backend = CudaBackend(torch.device("cpu"), torch.float32)
    torch.use_deterministic_algorithms(True, warn_only=True)  # new memory is filled with NaN
    try:
        got, got_grads = logprobs_and_gradients(path, backend, recompute=True)
    finally:
        torch.use_deterministic_algorithms(False)
    assert products.count(False) == 2  # one a layer
    for one, other in zip(got, want, strict=True):
        np.testing.assert_allclose(one, other, atol=4e-5)
    for run, grad in want_grads.items():
        assert (got_grads[run] - grad).norm() / grad.norm() < 2e-5


@pytest.mark.parametrize(
    ("family", "quantize"), [("qwen3", "nf4"), ("qwen2", "fp8"), ("gpt_oss", "none"), ("gpt_oss", "nf4")]
)
def test_a_pass_with_quantised_weights_and_sinks_is_the_plain_one(
    family: str, quantize: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sinks, windows, biases everywhere, clamped experts; matrices that the kernels dequantise."""
    path = tiny_model(tmp_path, family, hidden_size=128, intermediate_size=128)
    want, want_grads = logprobs_and_gradients(path, quantize=quantize)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)  # there is no device to pin it for
    backend = CudaBackend(torch.device("cpu"), torch.float32)
    got, got_grads = logprobs_and_gradients(path, backend, quantize)
    for one, other in zip(got, want, strict=True):
        np.testing.assert_allclose(one, other, atol=5e-5)
    for run, grad in want_grads.items():
        assert (got_grads[run] - grad).norm() / grad.norm() < 1e-4

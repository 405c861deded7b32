"""Every further family against transformers: one row in `tiny.MORE`, and all of this is asked of it.

So are architectures that transformers computes for us, `tiny.UNKNOWN`.
"""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from torch import Tensor

from tests.engine.commands import do
from tests.engine.forward import hidden, logprobs_of, sequences
from tests.engine.oracle import randomise
from tests.engine.plain_lora import FullMatrices
from tests.engine.stepping import finish
from tests.engine.tiny import MORE, UNKNOWN, reference_logits, reference_model, tiny_model
from tinkex.engine.protocol import CreateAdapter, LoadAdapter, SampleWork, SaveAdapter
from tinkex.engine.torch.continuous_batch import ContinuousBatch, StepLimits
from tinkex.engine.torch.hooks import Part
from tinkex.engine.torch.kv import KVCache
from tinkex.engine.torch.load import load_decoder
from tinkex.engine.torch.lora import LoraBatch
from tinkex.engine.torch.merge import merge_adapter
from tinkex.engine.torch.models.decoder import Decoder
from tinkex.engine.torch.models.families import our_name
from tinkex.engine.torch.peft_export import export_peft
from tinkex.engine.torch.sequences import PublishedAdapter
from tinkex.engine.torch.states import StatePool
from tinkex.engine.torch.trainer import TorchTrainer
from tinkex.types.outputs import SampleResponse
from tinkex.types.params import LoraConfig, SamplingParams

pytestmark = [pytest.mark.slow, pytest.mark.parametrize("family", MORE | UNKNOWN)]


def data_of(decoder: Decoder, *lengths: int) -> list[list[int]]:
    return sequences(lengths, decoder.config.vocab_size)


def test_logits_equal_transformers(tmp_path: Path, family: str) -> None:
    path = tiny_model(tmp_path, family)
    decoder = load_decoder(path)
    data = data_of(decoder, 5, 1, 40, 40, 17, 90)
    ours = decoder.logits(hidden(decoder, data))
    theirs = torch.cat(reference_logits(path, data))
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


# -- gradients -----------------------------------------------------------------------------------------


def weight_gradient(gradients: dict[str, Tensor], parts: tuple[Part, ...]) -> Tensor:
    if parts[0].experts == 1:
        return torch.cat([gradients[f"{part.name}.weight"] for part in parts])
    stem = parts[0].name.rpartition(".")[0]
    return gradients[f"{stem}.gate_up_proj" if len(parts) == 2 else f"{stem}.down_proj"]


@pytest.mark.parametrize("checkpoint", [False, True])
def test_gradients_of_every_site_equal_transformers(tmp_path: Path, family: str, checkpoint: bool) -> None:
    path = tiny_model(tmp_path, family)
    decoder = load_decoder(path)
    data, hook = data_of(decoder, 9, 30, 30, 4), FullMatrices(decoder)
    logits = decoder.logits(hidden(decoder, data, hook, checkpoint=checkpoint), hook)
    cotangent = torch.randn(logits.shape, generator=torch.Generator().manual_seed(2))
    (logits * cotangent).sum().backward()
    assert all(weight.grad is None for weight in decoder.parameters())

    model = reference_model(path).requires_grad_(True)
    # a tied head's own gradient, apart from the embedding's
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    theirs = torch.cat([model(torch.tensor([ids]), use_cache=False).logits[0] for ids in data])
    (theirs * cotangent).sum().backward()
    gradients = {our_name(name): weight.grad for name, weight in model.named_parameters()}
    for site, (_, parts) in decoder.sites().items():
        want, ours = weight_gradient(gradients, parts), hook.deltas[site].grad
        assert ours is not None
        torch.testing.assert_close(ours, want, atol=1e-3 * float(want.abs().max()), rtol=1e-3)


# -- sampling ------------------------------------------------------------------------------------------


def trained(path: Path) -> TorchTrainer:
    """A trainer with one run whose adapter does something."""
    trainer = TorchTrainer(load_decoder(path), str(path))
    do(trainer, CreateAdapter("run", LoraConfig(4, seed=1)))
    randomise(trainer.adapter("run").flat, seed=1)
    return trainer


def test_sampled_logprobs_equal_the_trainers(tmp_path: Path, family: str) -> None:
    """Prompts in chunks, forks of one prompt, and a prefix that is cached, of the base and of an adapter."""
    trainer = trained(tiny_model(tmp_path, family))
    config, adapter = trainer.decoder.config, trainer.adapter("run")
    cache = KVCache(config.kv_shapes, 100, torch.device("cpu"), torch.float32)
    limits = StepLimits(context=config.max_context, sequences=16, prefill_alone=40, prefill_beside=9)
    states = StatePool(config.state_shapes, 40, torch.device("cpu")) if config.state_shapes else None
    batch = ContinuousBatch(trainer.decoder, cache, limits, states=states)
    prompts = [np.array(ids, np.int32) for ids in data_of(trainer.decoder, 1, 3, 15, 16, 17, 47, 80)]
    prompts.append(np.concatenate([prompts[-1][:64], prompts[0]]))
    for published in (None, PublishedAdapter("run", adapter, b"run")):
        futures = []
        for seed, ids in enumerate(prompts):
            params = SamplingParams(max_tokens=20, stop=[], seed=seed)
            work, future = SampleWork(ids, params, num_samples=2), Future[SampleResponse]()
            batch.submit(work, batch.check_work(work), published, future)
            futures.append(future)
        finish(batch)
        for ids, future in zip(prompts, futures, strict=True):
            for sequence in future.result(timeout=0).sequences:
                text = np.concatenate([ids, np.array(sequence.tokens, np.int32)])
                want = logprobs_of(trainer, None if published is None else "run", text)
                np.testing.assert_allclose(sequence.logprobs_np, want[len(ids) - 1 :], atol=1e-4)


# -- files ---------------------------------------------------------------------------------------------


def with_adapter(trainer: TorchTrainer, run: str, ids: list[int]) -> Tensor:
    lora = LoraBatch([trainer.adapter(run)], [len(ids)])
    with torch.no_grad():
        return trainer.decoder.logits(hidden(trainer.decoder, [ids], lora), lora)


def test_saved_adapters_load_here_in_peft_and_merged(tmp_path: Path, family: str) -> None:
    path = tiny_model(tmp_path, family)
    trainer = trained(path)
    (ids,) = data_of(trainer.decoder, 12)
    ours = with_adapter(trainer, "run", ids)
    base = trainer.decoder.logits(hidden(trainer.decoder, [ids]))
    assert (ours - base).abs().max() > 0.01
    do(trainer, SaveAdapter("run", tmp_path / "adapter"))
    do(trainer, LoadAdapter("again", tmp_path / "adapter", False))
    assert torch.equal(with_adapter(trainer, "again", ids), ours)
    export_peft(
        tmp_path / "adapter", tmp_path / "peft", nested="vision_config" in (MORE | UNKNOWN)[family][1]
    )
    model: Any = peft.PeftModel.from_pretrained(reference_model(path), str(tmp_path / "peft"))
    assert not any("lora" in name and ".vision" in name for name, _ in model.named_parameters())
    with torch.no_grad():
        theirs = model(torch.tensor([ids]), use_cache=False).logits[0]
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    merge_adapter(path, tmp_path / "adapter", tmp_path / "merged")
    (merged,) = reference_logits(tmp_path / "merged", [ids])
    torch.testing.assert_close(ours, merged, atol=3e-4, rtol=1e-4)  # merged weights round once more

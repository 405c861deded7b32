"""Models that transformers computes for us: adapters of several runs, what is said and what is refused.

`test_families` asks `tiny.UNKNOWN` what it asks of every family; here is what is theirs alone.
"""

from __future__ import annotations

import asyncio
import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from tests.engine.commands import do
from tests.engine.forward import hidden, logprobs_of, sequences, through_transformers
from tests.engine.oracle import PeftOracle, make_datum, randomise
from tests.engine.plain_lora import FullMatrices
from tests.engine.tiny import UNKNOWN, reference_logits, tiny_model
from tinkex.engine.protocol import (
    CreateAdapter,
    EngineConfig,
    ForwardBackward,
    LoadAdapter,
    Pass,
    SampleWork,
    SaveAdapter,
)
from tinkex.engine.torch.adapter_files import BaseIdentity
from tinkex.engine.torch.engine import TorchEngine
from tinkex.engine.torch.load import load_decoder
from tinkex.engine.torch.models.decoder import Decoder
from tinkex.engine.torch.models.transformers_model import TransformersDecoder
from tinkex.engine.torch.sizing import model_facts
from tinkex.engine.torch.trainer import TorchTrainer
from tinkex.errors import InvalidInputError
from tinkex.types.params import LoraConfig, SamplingParams

pytestmark = pytest.mark.slow

RANKS = {"small": 2, "large": 5}


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("family", [name for name in UNKNOWN if "experts" not in name])
def test_runs_of_different_ranks_in_one_pass_equal_peft(tmp_path: Path, family: str, recompute: bool) -> None:
    path = tiny_model(tmp_path, family)
    trainer = TorchTrainer(load_decoder(path), str(path), recompute=recompute)
    rng, vocab = np.random.default_rng(3), trainer.decoder.config.vocab_size
    data = {run: [make_datum(rng, n, vocab) for n in (9, 31, 4)] for run in RANKS}
    for seed, (run, rank) in enumerate(RANKS.items()):
        do(trainer, CreateAdapter(run, LoraConfig(rank, seed=seed)))
        randomise(trainer.adapter(run).flat, seed=seed)
    passes = tuple(Pass(run, data[run], "cross_entropy", backward=True) for run in RANKS)
    outputs = do(trainer, ForwardBackward(passes))
    for (run, rank), output in zip(RANKS.items(), outputs, strict=True):
        adapter = trainer.adapter(run)
        targets = sorted({name.rpartition(".")[2] for name in adapter.named()})
        oracle = PeftOracle(path, rank, targets=targets)
        oracle.copy_from(adapter.named())
        for datum, out in zip(data[run], output.loss_fn_outputs, strict=True):
            theirs = oracle.logprobs(datum)
            ours = out["logprobs"].to_numpy()
            np.testing.assert_allclose(ours, theirs.detach().numpy(), atol=1e-4)
            (-theirs * datum.loss_fn_inputs["weights"].to_torch()).sum().backward()
        wanted = oracle.gradients()
        assert adapter.grad is not None
        for name, pair in adapter.named(adapter.grad).items():
            for side, ours in zip("AB", pair, strict=True):
                want = wanted[f"{name}.lora_{side}"]
                torch.testing.assert_close(ours, want, atol=1e-3 * float(want.abs().max()), rtol=1e-3)


@pytest.mark.parametrize("family", ["stablelm", "starcoder2", "jamba with experts"])
@pytest.mark.parametrize("quantize", ["nf4", "int8", "file"])
def test_matrices_may_stay_quantised(tmp_path: Path, quantize: str, family: str) -> None:
    path = tiny_model(tmp_path, family)
    plain, packed = load_decoder(path), load_decoder(path, quantize=quantize)
    views = plain.weights()
    for name, (matrix, part) in packed.slots().items():
        views[name].copy_(matrix._parts[part].dequantise())  # type: ignore[union-attr]
    data = sequences((5, 12))
    dequantised = plain.logits(hidden(plain, data))
    torch.testing.assert_close(packed.logits(hidden(packed, data)), dequantised, atol=1e-4, rtol=0)
    assert (packed.weight_bytes < plain.weight_bytes) == (quantize != "file")
    facts = model_facts(path, EngineConfig("", device="cpu", quantize=quantize))  # type: ignore[arg-type]
    assert facts.parameters == packed.parameter_count
    assert facts.weight_bytes == pytest.approx(packed.weight_bytes, rel=0.06)
    assert isinstance(packed, TransformersDecoder)
    assert facts.limits == packed.limits != ()


def test_an_engine_samples_what_it_says_when_it_loads(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tiny_model(tmp_path, "starcoder2")
    with caplog.at_level(logging.WARNING, "tinkex"):
        engine = TorchEngine(EngineConfig(str(path), device="cpu", kv_bytes=1 << 20))
    assert "'starcoder2' is not one of our families, so transformers" in caplog.text
    assert "no fast path" in caplog.text
    try:
        prompt = np.array(sequences((30,))[0], np.int32)
        work = SampleWork(prompt, SamplingParams(max_tokens=10, temperature=0.0, stop=[]))
        (sampled,) = asyncio.run(engine.sampler.sample(work)).sequences
    finally:
        engine.close()
    text = [*prompt.tolist(), *sampled.tokens]
    (logits,) = reference_logits(path, [text])
    assert sampled.tokens == logits[29:-1].argmax(-1).tolist()


# -- against our own decoder ---------------------------------------------------------------------------


def gradients(decoder: Decoder, hook: FullMatrices) -> dict[str, torch.Tensor]:
    """Of every part's matrix, whichever site it is in."""
    found = {}
    for site, (_, parts) in decoder.sites().items():
        grad = hook.deltas[site].grad
        assert grad is not None
        pieces = grad.split([part.out_features for part in parts], dim=-2)
        found |= {part.name: piece for part, piece in zip(parts, pieces, strict=True)}
    return found


@pytest.mark.parametrize("family", ["llama3", "qwen3_moe", "olmoe", "mixtral", "gpt_oss"])
def test_a_family_of_ours_is_the_same_through_transformers(tmp_path: Path, family: str) -> None:
    """Logits, the gradients of every part, also of experts, and the fingerprint: adapters load in both."""
    path = tiny_model(tmp_path, family)
    decoders = load_decoder(path), through_transformers(path)
    results = []
    for decoder in decoders:
        hook = FullMatrices(decoder)
        logits = decoder.logits(hidden(decoder, sequences((9, 30, 4), 256), hook, checkpoint=True), hook)
        logits.square().mean().backward()
        results.append((logits.detach(), gradients(decoder, hook)))
    (ours, our_gradients), (theirs, their_gradients) = results
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)
    assert our_gradients.keys() == their_gradients.keys()
    for name, want in our_gradients.items():
        torch.testing.assert_close(
            their_gradients[name], want, atol=1e-3 * float(want.abs().max()), rtol=1e-3, msg=name
        )
    own, other = (BaseIdentity.of(decoder, "base") for decoder in decoders)
    assert (own == other) == (family != "gpt_oss")  # we call its router by another name
    assert (decoders[0].config.experts is None) == (decoders[1].config.experts is None)


@pytest.mark.parametrize("family", ["qwen3_5", "granite4", "gemma4 E", "deepseek_v3"])
def test_other_layers_of_ours_are_the_same_through_transformers(tmp_path: Path, family: str) -> None:
    """Recurrent ones, shared keys and latent attention: of which we name parts in our own way."""
    path = tiny_model(tmp_path, family)
    own, other = load_decoder(path), through_transformers(path)
    data = sequences((9, 1, 30), 256)
    logits = other.logits(hidden(other, data))
    torch.testing.assert_close(own.logits(hidden(own, data)), logits, atol=1e-4, rtol=0)
    assert len(other.config.state_shapes) == len(own.config.state_shapes)


def test_runs_with_experts_train_in_one_pass_and_sample(tmp_path: Path) -> None:
    """Runs of different ranks: saved by our own decoder, loaded through transformers, trained in both."""
    path = tiny_model(tmp_path, "olmoe")
    own = TorchTrainer(load_decoder(path), "olmoe")
    config = EngineConfig(str(path), name="olmoe", device="cpu", threads=1, kv_bytes=1 << 20)
    engine = TorchEngine(config, through_transformers(path))
    other, rng = engine._trainer, np.random.default_rng(3)
    try:
        for seed, (run, rank) in enumerate(RANKS.items()):
            do(own, CreateAdapter(run, LoraConfig(rank, seed=seed)))
            randomise(own.adapter(run).flat, seed=seed)
            do(own, SaveAdapter(run, str(tmp_path / run)))
            do(other, LoadAdapter(run, str(tmp_path / run)))
        passes = tuple(
            Pass(run, [make_datum(rng, n, 320) for n in (9, 31)], "cross_entropy") for run in RANKS
        )
        for ours, theirs in zip(
            do(own, ForwardBackward(passes)), do(other, ForwardBackward(passes)), strict=True
        ):
            for one, two in zip(ours.loss_fn_outputs, theirs.loss_fn_outputs, strict=True):
                np.testing.assert_allclose(one["logprobs"].to_numpy(), two["logprobs"].to_numpy(), atol=1e-4)
        for run in RANKS:
            wanted, found = (t.adapter(run).named(t.adapter(run).grad) for t in (own, other))
            for name, pair in wanted.items():
                for want, grad in zip(pair, found[name], strict=True):
                    torch.testing.assert_close(grad, want, atol=1e-3 * float(want.abs().max()), rtol=1e-3)

        async def sample() -> Any:
            await engine.sampler.publish("one", other._export(other.adapter("large")))
            params = SamplingParams(max_tokens=12, stop=[], seed=1)
            prompts = [np.array(ids, np.int32) for ids in sequences((3, 40))]
            works = [SampleWork(ids, params, adapter="one", num_samples=2) for ids in prompts]
            return zip(prompts, await asyncio.gather(*map(engine.sampler.sample, works)), strict=True)

        for prompt, response in asyncio.run(sample()):
            for sequence in response.sequences:
                want = logprobs_of(own, "large", np.concatenate([prompt, sequence.tokens]))
                np.testing.assert_allclose(sequence.logprobs_np, want[len(prompt) - 1 :], atol=1e-4)
    finally:
        engine.close()


# -- refusals ------------------------------------------------------------------------------------------


def saved(path: Path, kind: str, **fields: Any) -> Path:
    config = getattr(transformers, f"{kind}Config")(**fields)
    model: Any = transformers.AutoModelForCausalLM.from_config(config)
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.1)
    model.save_pretrained(path)
    return path


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        ("GPT2", {"n_embd": 32, "n_layer": 2, "n_head": 2}, "it has no Linear layers for adapters"),
        ("Mamba", {"hidden_size": 32, "num_hidden_layers": 2}, "attention of layer 0 does not go through"),
        ("Gemma2", {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 32, "head_dim": 16,
                    "num_attention_heads": 2, "num_key_value_heads": 2}, "its attention has softcap"),
        ("Bloom", {"hidden_size": 32, "n_layer": 2, "n_head": 2}, "does not go through"),
        ("Doge", {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 32,
                  "num_attention_heads": 2, "num_key_value_heads": 2}, "mask of its own"),
        ("Phi", {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 32,
                 "num_attention_heads": 2}, "its head has a bias"),
    ],
)  # fmt: skip
def test_what_we_cannot_run_is_refused_in_one_sentence(
    tmp_path: Path, kind: str, fields: dict[str, Any], message: str
) -> None:
    path = saved(tmp_path / "model", kind, vocab_size=64, bos_token_id=1, eos_token_id=2, **fields)
    with pytest.raises(InvalidInputError, match=message) as caught:
        load_decoder(path)
    assert "is not one of our families" in str(caught.value)
    assert "\n" not in str(caught.value)
    with pytest.raises(InvalidInputError, match=message):
        model_facts(path, EngineConfig("", device="cpu"))


def test_missing_weights_are_named(tmp_path: Path) -> None:
    path = tiny_model(tmp_path, "stablelm", num_hidden_layers=2)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    with pytest.raises(InvalidInputError, match=r"its files have no model.layers.2.\S+ \(\d+ weights"):
        load_decoder(path)


def test_the_engine_imports_without_transformers() -> None:
    code = "import sys; sys.modules['transformers'] = None; import tinkex.engine.torch.engine; "
    code += "import tinkex.engine.torch.models.transformers_model"
    assert subprocess.run([sys.executable, "-c", code], timeout=100).returncode == 0


def test_the_decoder_is_transformers_own(tmp_path: Path) -> None:
    decoder = load_decoder(tiny_model(tmp_path, "stablelm"))
    assert isinstance(decoder, TransformersDecoder)
    assert not decoder.uniform
    kinds = {part.name: part.kind for _, parts in decoder.sites().values() for part in parts}
    assert kinds["model.layers.1.self_attn.o_proj"] == "attn"
    assert kinds["model.layers.1.mlp.up_proj"] == "mlp"
    assert kinds["lm_head"] == "unembed"

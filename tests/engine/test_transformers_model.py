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
from tests.engine.forward import hidden, sequences
from tests.engine.oracle import PeftOracle, make_datum, randomise
from tests.engine.tiny import UNKNOWN, reference_logits, tiny_model
from tinkex.engine.protocol import CreateAdapter, EngineConfig, ForwardBackward, Pass, SampleWork
from tinkex.engine.torch.engine import TorchEngine
from tinkex.engine.torch.load import load_decoder
from tinkex.engine.torch.model_facts import model_facts
from tinkex.engine.torch.models.transformers_model import TransformersDecoder
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


@pytest.mark.parametrize("quantize", ["nf4", "int8", "file"])
def test_matrices_may_stay_quantised(tmp_path: Path, quantize: str) -> None:
    path = tiny_model(tmp_path, "stablelm")
    plain, packed = load_decoder(path), load_decoder(path, quantize=quantize)
    data = sequences((5, 12))
    torch.testing.assert_close(
        packed.logits(hidden(packed, data)),
        plain.logits(hidden(plain, data)),
        atol={"nf4": 2.0, "int8": 0.1, "file": 1e-5}[quantize],
        rtol=0,
    )
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

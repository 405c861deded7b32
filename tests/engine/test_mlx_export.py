"""What is exported for MLX: mlx-lm loads it and draws what transformers draws; codes are those of MLX."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.engine.commands import do
from tests.engine.llama_cpp import merging_tokenizer
from tests.engine.oracle import randomise
from tests.engine.tiny import reference_model, tiny_model
from tinkex.engine.protocol import CreateAdapter, EngineError, SaveAdapter
from tinkex.engine.torch.export_formats import write_export
from tinkex.engine.torch.load import load_decoder
from tinkex.engine.torch.mlx_quantised import quantise
from tinkex.engine.torch.trainer import TorchTrainer
from tinkex.types.params import LoraConfig

pytestmark = pytest.mark.slow
mx = pytest.importorskip("mlx.core")
mlx_lm = pytest.importorskip("mlx_lm")
IDS = [5, 9, 200, 31, 7, 7, 120, 64, 3]
FAMILIES = (
    "llama2", "llama3", "smollm2", "smollm3", "mistral", "ministral3", "mixtral", "qwen2", "qwen3",
    "qwen3_moe", "qwen3_next", "gemma3", "phi4", "granite3", "glm4", "glm4_moe_lite", "deepseek_v3", "olmo3",
    "olmoe", "nemotron3",
)  # fmt: skip


def adapted(tmp_path: Path, family: str, **shape: Any) -> tuple[Path, Path]:
    """A tiny model, and an adapter of it."""
    path = merging_tokenizer(tiny_model(tmp_path / "base", family, **shape))
    trainer = TorchTrainer(load_decoder(path), str(path))
    do(trainer, CreateAdapter("run", LoraConfig(4, seed=1)))
    randomise(trainer.adapter("run").flat, seed=1)
    do(trainer, SaveAdapter("run", str(tmp_path / "adapter")))
    return path, tmp_path / "adapter"


def mlx_logits(directory: Path, ids: list[int]) -> np.ndarray:
    model, _ = mlx_lm.load(str(directory))
    return np.array(model(mx.array([ids]))[0].astype(mx.float32))


def torch_logits(model: Any, ids: list[int]) -> np.ndarray:
    with torch.no_grad():
        return model(torch.tensor([ids]), use_cache=False).logits[0].numpy()


@pytest.mark.parametrize("family", FAMILIES)
def test_mlx_lm_draws_what_transformers_draws(tmp_path: Path, family: str) -> None:
    path, adapter = adapted(tmp_path, family, **({"sliding_window": None} if family == "mistral" else {}))
    write_export(adapter, path, tmp_path / "mlx", format="mlx")
    write_export(adapter, path, tmp_path / "merged", format="merged")
    theirs = torch_logits(reference_model(tmp_path / "merged"), IDS)
    ours = mlx_logits(tmp_path / "mlx", IDS)[:, : theirs.shape[1]]
    np.testing.assert_allclose(ours, theirs, atol=1e-3, rtol=1e-3)
    assert (ours.argmax(-1) == theirs.argmax(-1)).all()


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_codes_are_those_of_mlx(bits: int, dtype: str) -> None:
    weight = torch.randn(24, 256, generator=torch.Generator().manual_seed(0)).to(getattr(torch, dtype))
    weight[0] = 0.0
    weight[1] = 0.25
    weight[2, 7] = 40.0
    weight[3] = weight[3].abs()
    weight[4] = -weight[4].abs()
    theirs = mx.quantize(
        mx.array(weight.float().numpy()).astype(getattr(mx, dtype)), group_size=64, bits=bits
    )
    packed, *rest = quantise(weight, bits)
    assert np.array_equal(packed.numpy(), np.array(theirs[0]))
    for ours, their in zip(rest, theirs[1:], strict=True):
        assert np.array_equal(ours.float().numpy(), np.array(their.astype(mx.float32)))


@pytest.mark.parametrize("quantize", ["q4", "q8"])
def test_mlx_lm_reads_quantised_weights(tmp_path: Path, quantize: str) -> None:
    """The logits are those of transformers with the weights that MLX dequantises."""
    path, adapter = adapted(
        tmp_path,
        "smollm2",
        hidden_size=128,
        intermediate_size=192,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    write_export(adapter, path, tmp_path / "mlx", format="mlx", quantize=quantize)
    write_export(adapter, path, tmp_path / "merged", format="merged")
    scheme = json.loads((tmp_path / "mlx" / "config.json").read_text())["quantization"]
    assert scheme == {"group_size": 64, "bits": int(quantize[1]), "mode": "affine"}
    stored = mx.load(str(tmp_path / "mlx" / "model.safetensors"))
    model = reference_model(tmp_path / "merged")
    changed = 0
    for name, weight in model.state_dict().items():
        stem = name.removesuffix("weight")
        if f"{stem}scales" in stored:
            parts = (stored[f"{stem}{part}"] for part in ("weight", "scales", "biases"))
            weight.copy_(torch.tensor(np.array(mx.dequantize(*parts, group_size=64, bits=scheme["bits"]))))
            changed += 1
    assert changed > 10
    theirs, ours = torch_logits(model, IDS), mlx_logits(tmp_path / "mlx", IDS)
    np.testing.assert_allclose(ours, theirs, atol=2e-3, rtol=2e-3)
    assert (ours.argmax(-1) == theirs.argmax(-1)).all()


def test_what_mlx_cannot_have_quantised_is_said(tmp_path: Path) -> None:
    path, adapter = adapted(tmp_path, "qwen3_moe")
    with pytest.raises(EngineError, match=r"mlx_lm\.convert -q"):
        write_export(adapter, path, tmp_path / "mlx", format="mlx", quantize="q4")
    path, adapter = adapted(tmp_path / "dense", "llama3")
    with pytest.raises(EngineError, match="q4, q8"):
        write_export(adapter, path, tmp_path / "mlx", format="mlx", quantize="q3")

"""Quantised safetensors files: every format gives the values that it stands for, wherever its tensors lie."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.engine.packers import FORMATS, FP4
from tests.engine.tiny import tiny_model
from tinkex.engine.torch.load import load_decoder
from tinkex.engine.torch.quantised import quantise
from tinkex.engine.torch.quantised_files import QuantisedFiles
from tinkex.errors import InvalidInputError

pytestmark = pytest.mark.slow

GOLDEN = (
    "01369ce01369ce0136ace0136ade0147ade0247ade0247bdf1247bdf1258bdf1258bef1258cef1359cef1369"
    "ce01369ce01369ce0136ade0147ade0247ade0247bdf0247bdf1248bdf1258bef1258cef1259cef1359ce013"
    "69ce01369ce0136ade0136ade0147ade0247adf0247bdf1248bdf1258bef1258bef1258cef1359ce"
)
SHAPE = {"hidden_size": 160, "intermediate_size": 224, "num_attention_heads": 4, "head_dim": 40}


def quantised_model(directory: Path, name: str, **overrides: Any) -> tuple[Path, dict[str, Tensor]]:
    """A model whose projections are quantised but one, over three shards, and the weights it stands for."""
    path = tiny_model(directory, "qwen3", **(SHAPE | overrides))
    scheme, pack = FORMATS[name]
    torch.manual_seed(0)
    stored, values = {}, {}
    for key, tensor in load_file(path / "model.safetensors").items():
        stored[key] = values[key] = tensor
        if key.endswith("_proj.weight") and "layers.1.mlp.down" not in key:
            del stored[key]
            tensors, values[key] = pack(tensor)
            stored |= {key.removesuffix(".weight") + ending: part for ending, part in tensors.items()}
    (path / "model.safetensors").unlink()
    shards = {f"model-{i}.safetensors": {} for i in range(3)}
    for i, (key, tensor) in enumerate(sorted(stored.items(), key=lambda item: item[0][::-1])):
        shards[f"model-{i % 3}.safetensors"][key] = tensor.contiguous()
    for file, tensors in shards.items():
        save_file(tensors, path / file)
    places = {key: file for file, tensors in shards.items() for key in tensors}
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": scheme}))
    return path, values


@pytest.mark.parametrize("name", FORMATS)
def test_a_quantised_model_has_the_weights_it_stands_for(tmp_path: Path, name: str) -> None:
    """Sizes are multiples of 32 and not of 128, and scales lie in other files than their weights."""
    path, values = quantised_model(tmp_path, name)
    weights = load_decoder(path).weights()
    assert weights.keys() == values.keys()
    for key, weight in weights.items():
        assert torch.allclose(weight, values[key], rtol=1e-6, atol=1e-7), key


@pytest.mark.parametrize("name", ["fp8 blocks", "nvfp4 modelopt", "int4", "awq", "gptq", "nf4 nested"])
def test_formats_are_known_by_their_tensors_alone(tmp_path: Path, name: str) -> None:
    path, values = quantised_model(tmp_path, name)
    config = json.loads((path / "config.json").read_text())
    del config["quantization_config"]
    (path / "config.json").write_text(json.dumps(config))
    weights = load_decoder(path).weights()
    assert all(torch.allclose(weights[key], values[key], rtol=1e-6, atol=1e-7) for key in weights)


def read(
    directory: Path, tensors: dict[str, Tensor], scheme: dict[str, Any] | None = None
) -> dict[str, Tensor]:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / "file.safetensors")
    found = QuantisedFiles([directory / "file.safetensors"], scheme or {}).tensors()
    return {name: weight if isinstance(weight, Tensor) else weight.dequantise() for name, weight in found}


def test_experts_in_mxfp4_are_those_of_transformers(tmp_path: Path) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    blocks = torch.randint(0, 256, (3, 10, 2, 16), dtype=torch.uint8)
    scales = torch.randint(110, 130, (3, 10, 2), dtype=torch.uint8)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    found = read(
        tmp_path, {f"{name}_blocks": blocks, f"{name}_scales": scales, f"{name}_bias": torch.ones(3, 10)}
    )
    assert found.keys() == {name, f"{name}_bias"}
    theirs = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    assert torch.equal(found[name], theirs)
    assert found[name].shape == (3, 64, 10)
    low = FP4[blocks[1, 4, 1, 5].item() & 15] * 2.0 ** (scales[1, 4, 1].item() - 127)
    assert found[name][1, 32 + 2 * 5, 4].item() == np.float32(low)


@pytest.mark.parametrize("kind", [torch.float32, torch.uint8, torch.float8_e8m0fnu])
def test_fp8_blocks_are_those_of_transformers(tmp_path: Path, kind: torch.dtype) -> None:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    codes = torch.randn(256, 384).to(torch.float8_e4m3fn)
    scale = torch.rand(2, 3) + 0.5
    if kind != torch.float32:
        scale = torch.randint(120, 130, (2, 3), dtype=torch.uint8).view(kind)
    found = read(tmp_path, {"x.weight": codes, "x.weight_scale_inv": scale}, {"quant_method": "fp8"})[
        "x.weight"
    ]
    theirs = Fp8Dequantize(None)._dequantize_one(codes, scale, torch.float32)
    assert torch.equal(found, theirs)


def test_fp8_experts_in_one_tensor(tmp_path: Path) -> None:
    codes, scale = torch.randn(2, 130, 256).to(torch.float8_e4m3fn), torch.rand(2, 2, 2)
    found = read(tmp_path, {"experts.down_proj": codes, "experts.down_proj_scale_inv": scale})
    wide = scale.repeat_interleave(128, 1)[:, :130].repeat_interleave(128, 2)
    assert torch.equal(found["experts.down_proj"], codes.float() * wide)


COMPRESSED: dict[str, dict[str, Any]] = {
    "pack-quantized": {"num_bits": 4, "strategy": "group", "group_size": 32},
    "int-quantized": {"num_bits": 8, "strategy": "channel"},
    "float-quantized": {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]},
    "nvfp4-pack-quantized": {
        "num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16,
        "scale_dtype": "float8_e4m3fn",
    },
    "mxfp8-quantized": {
        "num_bits": 8, "type": "float", "strategy": "group", "group_size": 32, "scale_dtype": "uint8",
    },
}  # fmt: skip


@pytest.mark.parametrize("name", COMPRESSED)
def test_weights_are_those_of_compressed_tensors(tmp_path: Path, name: str) -> None:
    compressors = pytest.importorskip("compressed_tensors.compressors")
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme  # type: ignore

    arguments, w = COMPRESSED[name], torch.randn(140, 192)
    grid = {"pack-quantized": (140, 6), "int-quantized": (140, 1), "float-quantized": (2, 2)}
    state = {
        "weight": w,
        "weight_scale": torch.rand(grid.get(name, (140, 192 // arguments.get("group_size", 1)))),
    }
    if name == "nvfp4-pack-quantized":
        state["weight_scale"] = state["weight_scale"].mul(40).to(torch.float8_e4m3fn).float()
        state["weight_global_scale"] = torch.tensor([90.0])
    if name == "mxfp8-quantized":
        state["weight_scale"] = torch.exp2(torch.randint(-8, -5, (140, 6)).float())
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**arguments, symmetric=True))
    compressor = compressors.BaseCompressor.get_value_from_registry(name)
    stored = compressor.compress(state, scheme)
    theirs = compressor.decompress(stored, scheme)["weight"].float()
    ours = read(tmp_path, {f"x.{key}": part for key, part in stored.items()})["x.weight"]
    assert torch.allclose(ours, theirs, rtol=2**-7, atol=1e-6)  # theirs may be rounded to bfloat16


def test_nf4_is_bitsandbytes_own(tmp_path: Path) -> None:
    """The bytes are what bitsandbytes 0.50.2 makes of these numbers."""
    w = (torch.arange(256) * 37 % 256 - 127.5).view(4, 64) / 100
    codes = torch.tensor(list(bytes.fromhex(GOLDEN)), dtype=torch.uint8)
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": [4, 64]}
    ours = quantise(w, "nf4")
    tensors = {
        "x.weight": codes.view(-1, 1),
        "x.weight.absmax": w.abs().amax(1),
        "x.weight.quant_map": ours.table,
        "x.weight.quant_state.bitsandbytes__nf4": torch.tensor(
            list(json.dumps(state).encode()), dtype=torch.uint8
        ),
    }
    assert torch.equal(read(tmp_path, tensors)["x.weight"], ours.dequantise())


@pytest.mark.parametrize(
    ("scheme", "message"),
    [
        (
            {"quant_method": "hqq"},
            r"is quantised \(hqq, by its config\.json\), which is not read; what loads: .*GPTQ",
        ),
        ({"quant_method": "awq", "version": "gemv"}, "awq, version 'gemv'"),
        ({"quant_method": "gptq", "bits": 3}, "gptq with 3 bits"),
        ({"quant_method": "gptq", "checkpoint_format": "marlin"}, "gptq, checkpoint_format 'marlin'"),
        ({"quant_method": "compressed-tensors", "format": "marlin-24"}, "format 'marlin-24'"),
    ],
)
@pytest.mark.parametrize("nested", [False, True])
def test_other_schemes_are_refused(
    tmp_path: Path, scheme: dict[str, Any], message: str, nested: bool
) -> None:
    path = tiny_model(tmp_path, "qwen3")
    config = json.loads((path / "config.json").read_text())
    place = {"text_config": {"quantization_config": scheme}} if nested else {"quantization_config": scheme}
    (path / "config.json").write_text(json.dumps(config | place))
    with pytest.raises(InvalidInputError, match=message):
        load_decoder(path)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"x.weight": torch.ones(2, 2).to(torch.float8_e4m3fn)}, "x.weight is float8_e4m3fn) without scales"),
        (
            {"x.weight": torch.ones(256, 2).to(torch.float8_e4m3fn), "x.weight_scale_inv": torch.ones(3, 1)},
            "x.weight is quantised, and scales of shape [3, 1] do not fit",
        ),
        (
            {"x.weight_packed": torch.ones(2, 2, dtype=torch.int32), "x.weight_shape": torch.tensor([2, 16])},
            "x.weight is quantised, and has no _scale beside it",
        ),
    ],
)
def test_incomplete_weights_are_named(tmp_path: Path, tensors: dict[str, Tensor], message: str) -> None:
    with pytest.raises(InvalidInputError, match=re.escape(message)):
        read(tmp_path, tensors)

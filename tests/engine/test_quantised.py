"""Frozen matrices that stay quantised: numbers, gradients, memory, and engines on them."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.engine.commands import do
from tests.engine.forward import hidden, sequences
from tests.engine.oracle import randomise
from tests.engine.packers import FORMATS
from tests.engine.tiny import tiny_model
from tinkex.engine.protocol import (
    CreateAdapter,
    Engine,
    EngineConfig,
    EngineError,
    ExportAdapter,
    ForwardBackward,
    Pass,
    SampleWork,
    build_engine,
)
from tinkex.engine.torch.adapters import Adapter
from tinkex.engine.torch.load import load_decoder
from tinkex.engine.torch.lora import LoraBatch
from tinkex.engine.torch.merge import merge_adapter
from tinkex.engine.torch.models.architecture import ExpertsConfig
from tinkex.engine.torch.models.decoder import Decoder
from tinkex.engine.torch.models.moe import per_expert
from tinkex.engine.torch.quantised import SCHEMES, QuantisedMatrix, QuantisedWeight, quantise
from tinkex.errors import InvalidInputError
from tinkex.types.data import Datum, ModelInput
from tinkex.types.params import LoraConfig, SamplingParams

pytestmark = pytest.mark.slow

SHAPE = {"hidden_size": 128, "intermediate_size": 192, "head_dim": 32}


def dequantised(decoder: Decoder, path: Path) -> Decoder:
    """A plain decoder with the weights that a quantised one stands for."""
    plain = load_decoder(path)
    places = plain.weights()
    for name, (matrix, index) in decoder.slots().items():
        eye = torch.eye(matrix.shape[1])
        first = sum(matrix.part_shape(i)[0] for i in range(index))
        places[name].copy_(matrix.product(eye).t()[first : first + matrix.part_shape(index)[0]])
    return plain


def check_that_it_computes_as_dequantised(packed: Decoder, path: Path) -> None:
    """Logits and gradients of a quantised model are those of its weights dequantised."""
    plain, data = dequantised(packed, path), sequences((5, 1, 40))
    found = []
    for decoder in (packed, plain):
        adapter = Adapter.fresh(LoraConfig(4, seed=1), decoder.sites(), torch.device("cpu"))
        randomise(adapter.flat, 2)
        lora = LoraBatch([adapter, None], [6, 40], train=True)
        logits = decoder.logits(hidden(decoder, data, lora), lora)
        logits.square().mean().backward()
        assert adapter.grad is not None
        found.append((logits.detach(), adapter.grad.clone()))
    (logits, gradient), (wanted, wanted_gradient) = found
    assert torch.allclose(logits, wanted, rtol=1e-4, atol=1e-4)
    assert torch.allclose(gradient, wanted_gradient, rtol=1e-3, atol=1e-3 * wanted_gradient.abs().max())


def quantised_file(path: Path, name: str) -> None:
    """Quantise the projections of a model in place, all but one."""
    scheme, pack = FORMATS[name]
    stored = {}
    for key, tensor in load_file(path / "model.safetensors").items():
        chosen = key.endswith("_proj.weight") and "layers.1.mlp.up" not in key
        parts = pack(tensor)[0] if chosen else {".weight": tensor}
        stored |= {key.removesuffix(".weight") + end: part.contiguous() for end, part in parts.items()}
    save_file(stored, path / "model.safetensors")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": scheme}))


KEPT = ["fp8 blocks", "fp8 channels", "nvfp4", "mxfp4", "int4 zeros", "gptq", "awq", "nf4 nested"]


@pytest.mark.parametrize("scheme", [*SCHEMES, *KEPT])
def test_logits_and_gradients_are_those_of_the_dequantised_model(tmp_path: Path, scheme: str) -> None:
    path = tiny_model(tmp_path, "qwen3", **SHAPE)
    if scheme not in SCHEMES:
        quantised_file(path, scheme)
    packed = load_decoder(path, quantize=scheme if scheme in SCHEMES else "file")
    assert packed.slots()
    check_that_it_computes_as_dequantised(packed, path)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_first_numbers_keep_nothing_else(tmp_path: Path, scheme: str) -> None:
    """A base with thousands of experts has as many: with a tile of each they would not fit."""
    decoder = load_decoder(tiny_model(tmp_path, "qwen3"), quantize=scheme)
    for matrix, part in decoder.slots().values():
        head, whole = matrix.head(part), matrix.parts[part]
        plain = whole if isinstance(whole, torch.Tensor) else whole.dequantise()
        assert torch.equal(head, plain[0, :16])
        assert head.untyped_storage().nbytes() == head.nbytes


def test_experts_are_kept_quantised_too(tmp_path: Path) -> None:
    path = tiny_model(tmp_path, "qwen3_moe", hidden_size=128, moe_intermediate_size=64)
    packed, whole = load_decoder(path, quantize="nf4"), load_decoder(path)
    plain, data = dequantised(packed, path), sequences((5, 40))
    assert "model.layers.0.mlp.experts.5.down_proj.weight" in packed.slots()
    assert packed.parameter_count == whole.parameter_count
    ours, wanted = (decoder.logits(hidden(decoder, data)) for decoder in (packed, plain))
    assert torch.allclose(ours, wanted, rtol=1e-4, atol=1e-4)
    assert not load_decoder(path, quantize="file").slots()


@pytest.mark.parametrize("family", ["glm4_moe_lite", "deepseek_v3", "gpt_oss"])
def test_latent_attention_and_experts_with_biases_train_and_sample_packed(
    tmp_path: Path, family: str
) -> None:
    """Logits and gradients are those of the dequantised model; sampled logprobs are the trainer's."""
    path = tiny_model(tmp_path, family, hidden_size=128, vocab_size=320)
    packed = load_decoder(path, quantize="nf4")
    names = packed.slots()
    assert any(".experts." in name for name in names)
    assert any("self_attn.o_proj" in name for name in names)
    check_that_it_computes_as_dequantised(packed, path)
    engine = build_engine(EngineConfig(str(path), device="cpu", kv_bytes=1 << 20, quantize="nf4"))
    try:
        check_that_samples_are_as_trained(engine)
    finally:
        engine.close()


@pytest.mark.parametrize("interleaved", [False, True])
def test_stacked_experts_are_split_without_dequantising(interleaved: bool) -> None:
    codes = torch.randint(0, 256, (3, 12, 32), dtype=torch.uint8)
    scale = torch.rand(3, 12, 2)
    stack = QuantisedWeight(codes, scale, (1, 32), torch.arange(16.0), transposed=True)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    experts = ExpertsConfig(3, 1, 6, transposed=True, interleaved=interleaved)
    ours = dict(per_expert(name, stack, experts))
    wanted = dict(per_expert(name, stack.dequantise(), experts))
    assert ours.keys() == wanted.keys()
    assert all(isinstance(part, QuantisedWeight) for part in ours.values())
    assert all(torch.equal(ours[key].dequantise(), wanted[key]) for key in wanted)


def test_a_file_is_kept_as_it_is(tmp_path: Path) -> None:
    path = tiny_model(tmp_path, "qwen3", **SHAPE)
    quantised_file(path, "int4")
    kept, whole = load_decoder(path, quantize="file"), load_decoder(path)
    data = sequences((5, 9))
    assert torch.allclose(
        kept.logits(hidden(kept, data)), whole.logits(hidden(whole, data)), rtol=1e-4, atol=1e-4
    )
    assert kept.weight_bytes < 0.6 * whole.weight_bytes
    assert "model.layers.1.mlp.up_proj.weight" in kept.slots()  # plain, beside a quantised gate
    plain = load_decoder(tiny_model(tmp_path / "plain", "qwen3"), quantize="file")
    assert not plain.slots()


@pytest.mark.parametrize(("scheme", "share"), [("nf4", 0.35), ("fp8", 0.51), ("int8", 0.51)])
def test_memory(scheme: str, share: float) -> None:
    weight = torch.randn(1024, 512)
    packed = quantise(weight, scheme)
    assert packed.nbytes <= share * weight.to(torch.bfloat16).nbytes
    error = (packed.dequantise() - weight).abs().mean() / weight.abs().mean()
    assert error < {"nf4": 0.1, "fp8": 0.03, "int8": 0.015}[scheme]


def test_tiles_do_not_change_the_product(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = QuantisedMatrix([70, 33], 96, torch.float32)
    for index, rows in enumerate((70, 33)):
        matrix.put(index, torch.randn(rows, 96), "nf4", torch.device("cpu"))
    x, back = torch.randn(7, 96), torch.randn(7, 103)
    whole = matrix.product(x), matrix.t().product(back)
    monkeypatch.setattr("tinkex.engine.torch.quantised._DEQUANTISED", 96 * 16)
    assert torch.allclose(matrix.product(x), whole[0], atol=1e-5)
    assert torch.allclose(matrix.t().product(back), whole[1], atol=1e-5)


def check_that_samples_are_as_trained(engine: Engine) -> None:
    do(engine.trainer, CreateAdapter("run", LoraConfig(rank=4)))
    ids = np.arange(10, 30, dtype=np.int32)
    asyncio.run(engine.sampler.publish("now", do(engine.trainer, ExportAdapter("run"))))
    work = SampleWork(ids, SamplingParams(max_tokens=8, stop=[], temperature=1.0, seed=1), adapter="now")
    drawn = asyncio.run(engine.sampler.sample(work)).sequences[0]
    tokens = np.append(ids, drawn.tokens)
    datum = Datum(ModelInput.from_ints(tokens[:-1]), {"target_tokens": tokens[1:].astype(np.int64)})
    (result,) = do(engine.trainer, ForwardBackward((Pass("run", [datum], "cross_entropy"),)))
    logprobs = np.asarray(result.loss_fn_outputs[0]["logprobs"].to_numpy())[-8:]
    assert np.allclose(logprobs, drawn.logprobs, atol=1e-4)


def test_an_engine_trains_and_samples_on_it(tmp_path: Path) -> None:
    path = tiny_model(tmp_path, "llama3", hidden_size=64)
    plain = build_engine(EngineConfig(str(path), device="cpu", kv_bytes=1 << 20))
    engine = build_engine(EngineConfig(str(path), device="cpu", kv_bytes=1 << 20, quantize="nf4"))
    try:
        assert engine.info.parameters == plain.info.parameters
        assert engine.info.fingerprint != plain.info.fingerprint
        assert engine.heartbeat().memory["weights"] < plain.heartbeat().memory["weights"]
        check_that_samples_are_as_trained(engine)
    finally:
        engine.close()
        plain.close()


def test_refusals(tmp_path: Path) -> None:
    path = tiny_model(tmp_path, "llama3")
    with pytest.raises(InvalidInputError, match="quantize is 'int3'; allowed: none, nf4, fp8, int8, file"):
        load_decoder(path, quantize="int3")
    quantised_file(path, "fp8 blocks")
    (tmp_path / "adapter").mkdir()
    with pytest.raises(EngineError, match=r"is quantised \(fp8\), and an adapter can be merged into plain"):
        merge_adapter(path, tmp_path / "adapter", tmp_path / "merged")


@pytest.mark.parametrize("scheme", SCHEMES)
def test_rows_of_a_matrix_are_views_of_its_codes(scheme: str) -> None:
    whole = quantise(torch.randn(24, 128), scheme)
    part = whole.select(slice(8, 20))
    assert isinstance(part, QuantisedWeight)
    assert part.codes.untyped_storage().data_ptr() == whole.codes.untyped_storage().data_ptr()
    assert torch.equal(part.dequantise(), whole.dequantise()[8:20])


def test_parts_of_a_stored_matrix_are_quantised_one_by_one(tmp_path: Path) -> None:
    """Mamba's in_proj, of which we keep the first rows packed."""
    path = tiny_model(tmp_path, "granite4 dense")
    decoder, data = load_decoder(path, quantize="nf4"), sequences()
    assert any(name.endswith(".mamba.x_proj.weight") for name in decoder.slots())
    plain = dequantised(decoder, path)
    with torch.no_grad():
        got, want = (each.logits(hidden(each, data)) for each in (decoder, plain))
    torch.testing.assert_close(got, want, rtol=0, atol=1e-4)

"""Reading Hugging Face directories: what is read, what is refused, and what the refusal says."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.engine.tiny import FAMILIES, reference_model, tiny_model, tiny_tokenizer
from tinkex.engine.torch.backend import Backend, choose_backend
from tinkex.engine.torch.load import load_decoder, read_config
from tinkex.errors import InvalidInputError

pytestmark = pytest.mark.slow


def edit_json(file: Path, **changes: Any) -> None:
    """Set fields of a JSON file; None removes one."""
    fields = json.loads(file.read_text()) if file.exists() else {}
    fields |= changes
    file.write_text(json.dumps({key: value for key, value in fields.items() if value is not None}))


def edit_weights(file: Path, changes: Mapping[str, torch.Tensor | None]) -> None:
    tensors = {**load_file(file), **changes}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, file)


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_are_those_of_transformers(tmp_path: Path, family: str) -> None:
    path = tiny_model(tmp_path, family)
    ours, theirs = load_decoder(path).weights(), reference_model(path).state_dict()
    fused = {name for name in theirs if ".experts." in name}  # kept in another shape; logits compare them
    tied = {"lm_head.weight"} - ours.keys()
    for name in theirs.keys() - fused - tied:
        assert torch.equal(ours[name], theirs[name]), name
    assert {name for name in ours.keys() - theirs.keys() if ".experts." not in name} == set()


def test_one_file_and_shards_are_the_same(tmp_path: Path) -> None:
    one = load_decoder(tiny_model(tmp_path / "one", "qwen3", shards=False)).weights()
    path = tiny_model(tmp_path / "many", "qwen3", shards=True)
    assert len(list(path.glob("*.safetensors"))) > 2
    many = load_decoder(path).weights()
    assert one.keys() == many.keys()
    assert all(torch.equal(one[name], many[name]) for name in one)


def test_dtype_is_converted(tmp_path: Path) -> None:
    path = tiny_model(tmp_path, "qwen2")
    decoder, whole = load_decoder(path, "cpu", torch.bfloat16), load_decoder(path)
    assert {weight.dtype for weight in decoder.parameters()} == {torch.bfloat16}
    name = "model.layers.1.self_attn.k_proj.bias"
    assert torch.equal(decoder.weights()[name], whole.weights()[name].to(torch.bfloat16))


def test_bfloat16_files_are_read_as_float32(tmp_path: Path) -> None:
    path = tiny_model(tmp_path, "llama3")
    name, file = "model.norm.weight", path / "model.safetensors"
    edit_weights(file, {key: tensor.to(torch.bfloat16) for key, tensor in load_file(file).items()})
    weight = load_decoder(path).weights()[name]
    assert weight.dtype == torch.float32
    assert torch.equal(weight, load_file(file)[name].float())


def test_nothing_asks_for_gradients(tmp_path: Path) -> None:
    decoder = load_decoder(tiny_model(tmp_path, "qwen3_moe"))
    assert not any(weight.requires_grad for weight in decoder.parameters())


def test_shape_of_the_model(tmp_path: Path) -> None:
    config = load_decoder(tiny_model(tmp_path, "qwen3_moe")).config
    (heads, *_) = config.attention
    assert (config.arch, config.layers, config.width) == ("qwen3_moe", 2, 64)
    assert (heads.heads, heads.kv_heads, heads.head_dim) == (4, 2, 24)
    assert (config.max_context, config.tied) == (256, False)
    assert config.experts is not None
    assert (config.experts.count, config.experts.per_token, config.experts.width) == (6, 2, 32)


def test_yarn_stretches_the_context(tmp_path: Path) -> None:
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 256}
    assert load_decoder(tiny_model(tmp_path, "qwen3", rope_parameters=rope)).config.max_context == 1024


# -- files beside the weights --------------------------------------------------------------------------


def test_eos_ids_come_from_the_generation_config(tmp_path: Path) -> None:
    path = tiny_model(tmp_path, "qwen3")
    edit_json(path / "generation_config.json", eos_token_id=[7, 9])
    assert load_decoder(path).config.eos_ids == (7, 9)
    edit_json(path / "generation_config.json", eos_token_id=8)
    assert load_decoder(path).config.eos_ids == (8,)


def test_eos_ids_come_from_the_config_otherwise(tmp_path: Path) -> None:
    path = tiny_model(tmp_path, "llama3")
    (path / "generation_config.json").unlink()
    assert load_decoder(path).config.eos_ids == (2, 3)
    edit_json(path / "config.json", eos_token_id=None)
    assert load_decoder(path).config.eos_ids == ()


def test_real_vocabulary_comes_from_the_tokenizer(tmp_path: Path) -> None:
    path = tiny_model(tmp_path, "qwen3")
    assert (load_decoder(path).config.vocab_size, load_decoder(path).config.padded_vocab) == (320, 320)
    tiny_tokenizer(path)
    config = load_decoder(path).config
    assert (config.vocab_size, config.padded_vocab) == (259, 320)


def test_a_tokenizer_larger_than_the_embedding_does_not_widen_it(tmp_path: Path) -> None:
    path = tiny_tokenizer(tiny_model(tmp_path, "qwen3", vocab_size=200))
    config = load_decoder(path).config
    assert (config.vocab_size, config.padded_vocab) == (200, 200)


def test_tensors_that_say_nothing_new_are_ignored(tmp_path: Path) -> None:
    path = tiny_model(tmp_path, "smollm2")
    copy = load_file(path / "model.safetensors")["model.embed_tokens.weight"].clone()
    rotary = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    edit_weights(path / "model.safetensors", {"lm_head.weight": copy} | rotary)
    assert load_decoder(path).config.tied


def test_a_text_model_inside_another_is_read_without_what_is_around_it(tmp_path: Path) -> None:
    path = tiny_model(tmp_path, "qwen3", shards=False)
    plain, file = load_decoder(path), path / "model.safetensors"
    fields = json.loads((path / "config.json").read_text())
    around = {"model_type": "qwen3", "text_config": fields, "vision_config": {"depth": 2}}
    (path / "config.json").write_text(json.dumps(around))
    weights = load_file(file)
    save_file(
        {name.replace("model.", "model.language_model.", 1): weights[name] for name in weights}
        | {"model.visual.blocks.0.norm1.weight": torch.ones(3)},
        file,
    )
    nested = load_decoder(path)
    assert nested.config.vision_config == {"depth": 2}
    assert all(torch.equal(weight, nested.weights()[name]) for name, weight in plain.weights().items())


def test_kernels_suit_the_families_that_they_were_made_for_alone(tmp_path: Path) -> None:
    """The others run in plain torch, on CUDA too."""
    for family in (*FAMILIES, "gpt_oss", "qwen3_5", "qwen3_5_moe", "qwen3_next"):
        assert load_decoder(tiny_model(tmp_path, family)).kernels_serve
    for family in ("gemma3", "phi4", "granite3", "smollm3", "glm4", "ministral3", "olmo3", "granite4"):
        assert not load_decoder(tiny_model(tmp_path, family)).kernels_serve
    assert type(choose_backend("cuda", torch.bfloat16, kernels=False)) is Backend


# -- refusals ------------------------------------------------------------------------------------------


def test_unknown_architecture_is_refused_by_name(tmp_path: Path) -> None:
    path = tiny_model(tmp_path, "qwen2")
    edit_json(path / "config.json", model_type="llama9", architectures=["Llama9ForCausalLM"])
    message = (
        r"'llama9' \(Llama9ForCausalLM\) is not one of our families, and transformers \S+ does not know it"
    )
    with pytest.raises(InvalidInputError, match=message + ".*pip install -U transformers"):
        load_decoder(path)
    with pytest.raises(InvalidInputError, match=r"llama9.*supported: llama, .*qwen3_moe"):
        read_config(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"hidden_size": None}, "hidden_size must be a positive integer, got None"),
        ({"rope_parameters": {"rope_type": "spiral", "rope_theta": 1e4}}, "rope_type 'spiral'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "linear_attention"),
    ],
)
def test_settings_we_do_not_have_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    path = tiny_model(tmp_path, "qwen2")
    edit_json(path / "config.json", **changes)
    with pytest.raises(InvalidInputError, match=message):
        load_decoder(path)


def test_missing_and_unexpected_tensors_are_named(tmp_path: Path) -> None:
    path = tiny_model(tmp_path, "llama3")
    edit_weights(path / "model.safetensors", {"model.norm.weight": None, "model.extra.weight": torch.ones(2)})
    with pytest.raises(
        InvalidInputError, match=r"missing: model\.norm\.weight; unexpected: model\.extra\.weight"
    ):
        load_decoder(path)


def test_a_tensor_of_another_shape_is_named(tmp_path: Path) -> None:
    path = tiny_model(tmp_path, "llama3")
    edit_weights(path / "model.safetensors", {"model.norm.weight": torch.ones(63)})
    with pytest.raises(InvalidInputError, match=r"model\.norm\.weight has shape \[63\].*\[64\]"):
        load_decoder(path)


@pytest.mark.parametrize("left", [0, 100, 20_000])
def test_a_file_that_was_cut_short_is_named(tmp_path: Path, left: int) -> None:
    """As a download that was broken off leaves it."""
    path = tiny_model(tmp_path, "llama3")
    weights = path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:left])
    with pytest.raises(InvalidInputError, match=r"model\.safetensors is corrupted or cut short"):
        load_decoder(path)


def test_quantised_weights_are_called_so(tmp_path: Path) -> None:
    path = tiny_model(tmp_path, "llama3")
    name = "model.layers.0.mlp.up_proj.weight"
    fp8 = load_file(path / "model.safetensors")[name].to(torch.float8_e4m3fn)
    edit_weights(path / "model.safetensors", {name: fp8})
    with pytest.raises(InvalidInputError, match=r"is quantised .*up_proj.*float8_e4m3fn.*\.gguf"):
        load_decoder(path)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    path = tiny_model(tmp_path, "llama2")
    shard = min(path.glob("*.safetensors"))
    shard.unlink()
    with pytest.raises(InvalidInputError, match=shard.name):
        load_decoder(path)


def test_paths_without_a_model_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="does not exist"):
        load_decoder(tmp_path / "nowhere")
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(InvalidInputError, match=r"notes\.txt is not a \.gguf file"):
        load_decoder(tmp_path / "notes.txt")
    with pytest.raises(InvalidInputError, match=r"has no config\.json"):
        load_decoder(tmp_path)
    path = tiny_model(tmp_path, "llama3")
    (path / "model.safetensors").unlink()
    with pytest.raises(InvalidInputError, match=r"no model\.safetensors"):
        load_decoder(path)
    shutil.copy(tmp_path / "notes.txt", path / "config.json")
    with pytest.raises(InvalidInputError, match=r"config\.json is not valid JSON"):
        load_decoder(path)

"""Write tiny GGUF files as the converter of llama.cpp lays them out, with `gguf`'s own writer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from tests.engine.tiny import reference_model

# For tokenizers.
TEXTS = [
    "",
    " ",
    "Hello, world! It's a test; don't you think?",
    "Σ naïve café — “quotes” … 日本語 한국어 🎉👩‍👩‍👧",
    "def f(x):\n    return x + 1\n\n\n# end\t\ttabs  and   spaces   ",
    "Numbers: 3.14159 and 1,000,000 and 2024-01-02",
    "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n",
    "MixedCASE WORDS and_snake_case, URLs: https://example.org/a?b=c&d=%20",
]
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
}
# Names that differ from these, by architecture.
_POST_NORM = {"post_attention_layernorm": "post_attention_norm"}
_SANDWICH = {"pre_feedforward_layernorm": "ffn_norm", "post_feedforward_layernorm": "post_ffw_norm"}
_SHARED = {"gate_proj": "ffn_gate_shexp", "up_proj": "ffn_up_shexp", "down_proj": "ffn_down_shexp"}
_DELTA = {
    "in_proj_qkv": "attn_qkv",
    "in_proj_z": "attn_gate",
    "in_proj_a": "ssm_alpha",
    "in_proj_b": "ssm_beta",
    "conv1d": "ssm_conv1d",
    "norm": "ssm_norm",
    "out_proj": "ssm_out",
}
_QWEN35 = _POST_NORM | {f"linear_attn.{ours}": stored for ours, stored in _DELTA.items()}
OWN_NAMES: dict[str, dict[str, str]] = {
    "gemma3": _POST_NORM | _SANDWICH,
    "gpt-oss": _POST_NORM | {"mlp.router": "ffn_gate_inp", "self_attn": "attn_sinks"},
    "glm4": {
        "post_self_attn_layernorm": "post_attention_norm",
        "post_mlp_layernorm": "post_ffw_norm",
        "mlp.gate_up_proj": "ffn_up",
    },
    "glm4moe": _POST_NORM | {f"mlp.shared_experts.{ours}": stored for ours, stored in _SHARED.items()},
    "qwen35": _QWEN35,
    "qwen35moe": _QWEN35
    | {f"mlp.shared_expert.{ours}": stored for ours, stored in _SHARED.items()}
    | {"mlp.shared_expert_gate": "ffn_gate_inp_shexp"},
}


def write_gguf(
    file: Path,
    arch: str,
    model: Path | None,
    blocks: dict[str, tuple[np.ndarray, gguf.GGMLQuantizationType]] | None = None,
    **metadata: Any,
) -> Path:
    """A GGUF of a tiny Hugging Face model (or of no model at all), laid out as llama.cpp's converter does.

    `blocks` are tensors to write as these bytes of these types.
    """
    writer = gguf.GGUFWriter(file, arch)
    if model is not None:
        fields = json.loads((model / "config.json").read_text())
        fields = (fields.get("text_config") or {}) | fields
        for key, value in shape_metadata(fields, arch).items():
            add(writer, f"{arch}.{key}", value)
        for name, tensor in gguf_tensors(model, arch, fields).items():
            array, kind = (blocks or {}).get(name, (tensor, None))
            writer.add_tensor(name, array, raw_dtype=kind)
        count = fields["vocab_size"]
        defaults = {"tokens": [f"t{i}" for i in range(count)], "token_type": [1] * count, "eos_token_id": 2}
        metadata = {f"tokenizer.ggml.{key}": value for key, value in defaults.items()} | metadata
    for key, value in metadata.items():
        add(writer, key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    match value:
        case np.ndarray():
            writer.add_tensor(key, value)
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case list():
            writer.add_array(key, value)


def shape_metadata(fields: dict[str, Any], arch: str) -> dict[str, Any]:
    values = {
        "block_count": fields["num_hidden_layers"],
        "context_length": fields["max_position_embeddings"],
        "embedding_length": fields["hidden_size"],
        "feed_forward_length": fields.get("intermediate_size"),
        "attention.head_count": fields["num_attention_heads"],
        "attention.head_count_kv": fields["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": fields["rms_norm_eps"],
        "vocab_size": fields["vocab_size"],
    }
    if arch.startswith(("qwen3", "gemma3", "gpt-oss", "glm4")):
        values |= {"attention.key_length": fields["head_dim"], "attention.value_length": fields["head_dim"]}
    rope = fields["rope_parameters"].get("full_attention", fields["rope_parameters"])
    values["rope.freq_base"] = rope["rope_theta"]
    if arch in ("gemma3", "gpt-oss"):
        values |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": rope["factor"]}
        values["attention.sliding_window"] = fields["sliding_window"]
    if arch == "gpt-oss":
        values["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    if part := rope.get("partial_rotary_factor"):
        values["rope.dimension_count"] = int(part * fields["head_dim"])
    counts = ("num_local_experts", "num_experts", "n_routed_experts")
    if (count := next((fields[key] for key in counts if key in fields), None)) is not None:
        width = fields.get("moe_intermediate_size", fields.get("intermediate_size"))
        values |= {"expert_count": count, "expert_used_count": fields["num_experts_per_tok"]}
        values["expert_feed_forward_length"] = width
    if arch == "glm4moe":
        values |= {
            "expert_shared_count": fields["n_shared_experts"],
            "leading_dense_block_count": fields["first_k_dense_replace"],
            "expert_weights_scale": fields["routed_scaling_factor"],
            "expert_weights_norm": fields["norm_topk_prob"],
        }
    if arch.startswith("qwen35"):
        values |= {
            "full_attention_interval": 4,
            "rope.dimension_sections": [*rope["mrope_section"], 0],
            "ssm.conv_kernel": fields["linear_conv_kernel_dim"],
            "ssm.state_size": fields["linear_key_head_dim"],
            "ssm.group_count": fields["linear_num_key_heads"],
            "ssm.time_step_rank": fields["linear_num_value_heads"],
            "ssm.inner_size": fields["linear_num_value_heads"] * fields["linear_value_head_dim"],
            "expert_shared_feed_forward_length": fields.get("shared_expert_intermediate_size"),
        }
    return {key: value for key, value in values.items() if value is not None}


def gguf_tensors(model: Path, arch: str, fields: dict[str, Any]) -> dict[str, np.ndarray]:
    """A model's weights under the names and in the shapes of llama.cpp's converter."""
    tensors: dict[str, np.ndarray] = {}
    names = NAMES | OWN_NAMES.get(arch, {})
    for name, tensor in _stored(reference_model(model).state_dict()):
        if name == "lm_head.weight" and fields["tie_word_embeddings"]:
            continue
        array = tensor.numpy()
        layer, part = name.removeprefix("model.layers.").split(".", 1) if ".layers." in name else ("", name)
        block = f"blk.{layer}." if layer else ""
        if part.startswith("mlp.experts."):
            for stored, one in _experts(arch, part, array).items():
                tensors[block + stored] = one
        elif part.endswith(("e_score_correction_bias", "A_log", "dt_bias")):
            stored = {"A_log": "ssm_a", "dt_bias": "ssm_dt.bias"}.get(part[12:], "exp_probs_b.bias")
            array = (
                _tiled(fields, -np.exp(array) if stored == "ssm_a" else array, 0)
                if "ssm" in stored
                else array
            )
            tensors[block + stored] = array
        else:
            stem, _, kind = part.rpartition(".")
            kind = "weight" if kind == "sinks" else kind
            stored = f"{names[stem]}.{kind}"
            tensors[block + stored] = _as_converted(arch, fields, stem, stored, array)
    return {name: np.ascontiguousarray(array) for name, array in tensors.items()}


def _stored(state: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The text alone of a model that sees."""
    for name, tensor in state.items():
        if ".visual." not in name:
            yield name.replace("model.language_model.", "model."), tensor


def _experts(arch: str, part: str, array: np.ndarray) -> dict[str, np.ndarray]:
    kind = "bias" if part.endswith("_bias") else "weight"
    if arch == "gpt-oss" and kind == "weight":
        array = array.swapaxes(1, 2)
    if "down" in part:
        return {f"ffn_down_exps.{kind}": array}
    gate, up = (array[:, ::2], array[:, 1::2]) if arch == "gpt-oss" else np.split(array, 2, axis=1)
    return {f"ffn_gate_exps.{kind}": gate, f"ffn_up_exps.{kind}": up}


def _as_converted(arch: str, fields: dict[str, Any], stem: str, stored: str, array: np.ndarray) -> np.ndarray:
    if arch == "llama" and stem in ("self_attn.q_proj", "self_attn.k_proj"):
        heads = fields["num_attention_heads" if "q_proj" in stem else "num_key_value_heads"]
        return array.reshape(heads, 2, -1, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)
    if arch.startswith(("gemma3", "qwen35")) and stem.endswith("norm") and stem != "linear_attn.norm":
        return array + 1
    if not stem.startswith("linear_attn."):
        return array[0] if stem == "mlp.shared_expert_gate" else array
    if stored in ("attn_qkv.weight", "ssm_conv1d.weight"):
        keys = 2 * fields["linear_num_key_heads"] * fields["linear_key_head_dim"]
        array = np.concatenate([array[:keys], _tiled(fields, array[keys:], 0)])
        return array.squeeze(1) if "conv1d" in stored else array
    if stored == "ssm_norm.weight":
        return array
    return _tiled(fields, array, 1 if stored == "ssm_out.weight" else 0)


def _tiled(fields: dict[str, Any], array: np.ndarray, axis: int) -> np.ndarray:
    """Value heads: first the first of every key head, then the second of every key head …"""
    keys, values = fields["linear_num_key_heads"], fields["linear_num_value_heads"]
    heads = np.split(array, values, axis)
    return np.concatenate(
        [heads[key * (values // keys) + i] for i in range(values // keys) for key in range(keys)], axis
    )


def byte_bpe_metadata(pre: str, arch: str) -> dict[str, Any]:
    """Bytes in GPT-2's printable form, a few merges, two marks."""
    from tokenizers import pre_tokenizers

    merges = ["Ġ t", "h e", "Ġt he", "1 2", "12 3", "Ġ Ġ", "i n", "Ċ Ċ", "' s", "l l"]
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(merge.replace(" ", "") for merge in merges)]
    marks = ["<|begin|>", "<|im_end|>"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [*tokens, *marks],
        "tokenizer.ggml.token_type": [1] * len(tokens) + [3] * 2,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": len(tokens),
        "tokenizer.ggml.eos_token_id": len(tokens) + 1,
        f"{arch}.context_length": 128,
    }

"""Write tiny GGUF files as the converter of llama.cpp lays them out, with `gguf`'s own writer."""

from __future__ import annotations

import json
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
SANDWICH = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
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
        "feed_forward_length": fields["intermediate_size"],
        "attention.head_count": fields["num_attention_heads"],
        "attention.head_count_kv": fields["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": fields["rms_norm_eps"],
        "rope.freq_base": fields["rope_parameters"].get("rope_theta"),
        "vocab_size": fields["vocab_size"],
    }
    if arch.startswith(("qwen3", "gemma3")):
        values |= {"attention.key_length": fields["head_dim"], "attention.value_length": fields["head_dim"]}
    if arch == "qwen3moe":
        values["expert_count"] = fields["num_local_experts"]
        values["expert_used_count"] = fields["num_experts_per_tok"]
        values["expert_feed_forward_length"] = fields["moe_intermediate_size"]
    if arch == "gemma3":
        full = fields["rope_parameters"]["full_attention"]
        values |= {"rope.freq_base": full["rope_theta"], "rope.scaling.type": full["rope_type"],
                   "rope.scaling.factor": full["factor"]}  # fmt: skip
        values["attention.sliding_window"] = fields["sliding_window"]
    return values


def gguf_tensors(model: Path, arch: str, fields: dict[str, Any]) -> dict[str, np.ndarray]:
    tensors: dict[str, np.ndarray] = {}
    state = reference_model(model).state_dict()
    if fields["tie_word_embeddings"]:
        del state["lm_head.weight"]
    for name, tensor in state.items():
        array = tensor.numpy()
        layer, part = name.removeprefix("model.layers.").split(".", 1) if ".layers." in name else ("", name)
        if part == "mlp.experts.gate_up_proj":
            gate, up = np.split(array, 2, axis=1)
            tensors[f"blk.{layer}.ffn_gate_exps.weight"] = gate
            tensors[f"blk.{layer}.ffn_up_exps.weight"] = up
        elif part == "mlp.experts.down_proj":
            tensors[f"blk.{layer}.ffn_down_exps.weight"] = array
        else:
            stem, _, kind = part.rpartition(".")
            if arch == "llama" and stem in ("self_attn.q_proj", "self_attn.k_proj"):
                heads = fields["num_attention_heads" if "q_proj" in stem else "num_key_value_heads"]
                array = array.reshape(heads, 2, -1, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)
            if arch == "gemma3" and stem.endswith("norm"):
                array = array + 1
            stored = (NAMES | SANDWICH if arch == "gemma3" else NAMES)[stem]
            tensors[f"{f'blk.{layer}.' if layer else ''}{stored}.{kind}"] = array
    return {name: np.ascontiguousarray(array) for name, array in tensors.items()}


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

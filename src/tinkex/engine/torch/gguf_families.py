"""What the GGUF files of each architecture say in their own way: fields of a `config.json`, and tensors.

An entry of `GGUF_FAMILIES` is an architecture (`general.architecture`) that we read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, cat


class GgufMetadata(Protocol):
    """Metadata by key, in which `{arch}` stands for the architecture's name, and which tensors there are."""

    def get(self, key: str, default: Any = None) -> Any: ...
    def require(self, key: str) -> Any: ...
    def has(self, tensor: str) -> bool: ...


def _nothing_more(file: GgufMetadata) -> dict[str, Any]:
    return {}


def _as_stored(file: GgufMetadata, name: str, tensor: Tensor) -> Tensor:
    return tensor


@dataclass(frozen=True)
class GgufFamily:
    """How to read one architecture."""

    model_type: str
    class_name: str  # in transformers
    fields: Callable[[GgufMetadata], dict[str, Any]] = _nothing_more  # in addition to those of every file
    undo: Callable[[GgufMetadata, str, Tensor], Tensor] = _as_stored  # what the converter did to a tensor
    partial: bool = False  # a head may be rotated in part
    bias_of: str = "blk.0.attn_output.bias"  # the tensor by which attention has biases


def _halves(file: GgufMetadata, name: str, tensor: Tensor) -> Tensor:
    """Rotary pairs from neighbours (0, 1), (2, 3) … of a head back to halves (0, C/2), (1, C/2 + 1) …"""
    if ".attn_q." not in name and ".attn_k." not in name:
        return tensor
    heads = file.require("{arch}.attention.head_count")
    if ".attn_k." in name:
        heads = file.get("{arch}.attention.head_count_kv", heads)
    return tensor.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)


def _offset_norms(file: GgufMetadata, name: str, tensor: Tensor) -> Tensor:
    """Norms that multiply by 1 + w are stored as that."""
    return tensor - 1.0 if name.endswith("norm.weight") else tensor


def _experts(file: GgufMetadata, count: str = "num_experts") -> dict[str, Any]:
    return {
        count: file.require("{arch}.expert_count"),
        "num_experts_per_tok": file.require("{arch}.expert_used_count"),
        "moe_intermediate_size": file.require("{arch}.expert_feed_forward_length"),
    }


def _qwen3moe(file: GgufMetadata) -> dict[str, Any]:
    # The file does not say that weights sum to one; every qwen3moe file is read so.
    return _experts(file) | {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}


def _qwen35(file: GgufMetadata) -> dict[str, Any]:
    heads, turned = file.require("{arch}.ssm.time_step_rank"), file.require("{arch}.rope.dimension_count")
    rope = {
        "rope_type": "default",
        "rope_theta": file.require("{arch}.rope.freq_base"),
        "partial_rotary_factor": turned / file.require("{arch}.attention.key_length"),
        "mrope_section": [size for size in file.get("{arch}.rope.dimension_sections", ()) if size],
        "mrope_interleaved": True,
    }
    return {
        "rope_parameters": rope,
        "full_attention_interval": file.require("{arch}.full_attention_interval"),
        "linear_conv_kernel_dim": file.require("{arch}.ssm.conv_kernel"),
        "linear_key_head_dim": file.require("{arch}.ssm.state_size"),
        "linear_num_key_heads": file.require("{arch}.ssm.group_count"),
        "linear_num_value_heads": heads,
        "linear_value_head_dim": file.require("{arch}.ssm.inner_size") // heads,
    }


def _qwen35moe(file: GgufMetadata) -> dict[str, Any]:
    shared = file.require("{arch}.expert_shared_feed_forward_length")
    return _qwen35(file) | _experts(file) | {"shared_expert_intermediate_size": shared}


# What holds value heads of a delta net: the rows before them, in heads of keys, and their axis.
_VALUE_HEADS = {
    "attn_qkv.weight": (2, 0),
    "ssm_conv1d.weight": (2, 0),
    "attn_gate.weight": (0, 0),
    "ssm_alpha.weight": (0, 0),
    "ssm_beta.weight": (0, 0),
    "ssm_a": (0, 0),
    "ssm_dt.bias": (0, 0),
    "ssm_out.weight": (0, 1),
}


def _grouped(file: GgufMetadata, name: str, tensor: Tensor) -> Tensor:
    """Value heads of delta nets grouped by their key heads again; norms, decays and shapes as they were."""
    part = name.split(".", 2)[-1]
    if part == "ssm_a":
        tensor = (-tensor).log()
    elif part == "ffn_gate_inp_shexp.weight" and tensor.dim() == 1:
        tensor = tensor[None]
    elif part != "ssm_norm.weight":
        tensor = _offset_norms(file, name, tensor)
    if part not in _VALUE_HEADS:
        return tensor
    keys, values = file.require("{arch}.ssm.group_count"), file.require("{arch}.ssm.time_step_rank")
    before, axis = _VALUE_HEADS[part]
    rows = before * keys * file.require("{arch}.ssm.state_size")
    first, tiled = tensor.split([rows, tensor.shape[axis] - rows], axis)
    turned = tiled.unflatten(axis, (values // keys, keys, -1)).transpose(axis, axis + 1)
    tensor = cat([first, turned.flatten(axis, axis + 2)], axis)
    return tensor[:, None] if part == "ssm_conv1d.weight" else tensor


def _gpt_oss(file: GgufMetadata) -> dict[str, Any]:
    width = file.require("{arch}.expert_feed_forward_length")
    original = file.get("{arch}.rope.scaling.original_context_length", 4096)
    rope = {
        "rope_type": "yarn",
        "rope_theta": file.require("{arch}.rope.freq_base"),
        "factor": file.require("{arch}.rope.scaling.factor"),
        "original_max_position_embeddings": original,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,  # the file does not say it; the released models were trained so
    }
    window = file.require("{arch}.attention.sliding_window")
    sizes = {"intermediate_size": width, "sliding_window": window, "rope_parameters": rope}
    return _experts(file, "num_local_experts") | sizes


def _glm4moe(file: GgufMetadata) -> dict[str, Any]:
    return _experts(file, "n_routed_experts") | {
        "n_shared_experts": file.get("{arch}.expert_shared_count", 0),
        "first_k_dense_replace": file.require("{arch}.leading_dense_block_count"),
        "n_group": file.get("{arch}.expert_group_count", 1),
        "topk_group": file.get("{arch}.expert_group_used_count", 1),
        "norm_topk_prob": file.get("{arch}.expert_weights_norm", True),
        "routed_scaling_factor": file.get("{arch}.expert_weights_scale", 1.0),
        "use_qk_norm": file.has("blk.0.attn_q_norm.weight"),
    }


def _gemma3(file: GgufMetadata) -> dict[str, Any]:
    heads, width = file.require("{arch}.attention.head_count"), file.require("{arch}.embedding_length")
    # The file does not say it; of the released models only the largest, of 62 layers, has another.
    largest = file.require("{arch}.block_count") == 62
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": width // heads if largest else file.require("{arch}.attention.key_length"),
        "sliding_window": file.require("{arch}.attention.sliding_window"),
        "rope_local_base_freq": file.get("{arch}.rope.freq_base_swa", 10000.0),
        "final_logit_softcapping": file.get("{arch}.final_logit_softcapping"),
    }


# By general.architecture. Mistral files call themselves "llama".
GGUF_FAMILIES: dict[str, GgufFamily] = {
    "llama": GgufFamily("llama", "LlamaForCausalLM", undo=_halves),
    "qwen2": GgufFamily("qwen2", "Qwen2ForCausalLM"),
    "qwen3": GgufFamily("qwen3", "Qwen3ForCausalLM"),
    "qwen3moe": GgufFamily("qwen3_moe", "Qwen3MoeForCausalLM", _qwen3moe),
    "qwen3vl": GgufFamily("qwen3", "Qwen3ForCausalLM"),  # text model; the vision tower is another file
    "qwen3vlmoe": GgufFamily("qwen3_moe", "Qwen3MoeForCausalLM", _qwen3moe),
    "qwen35": GgufFamily("qwen3_5_text", "Qwen3_5ForCausalLM", _qwen35, _grouped, partial=True),
    "qwen35moe": GgufFamily("qwen3_5_moe_text", "Qwen3_5MoeForCausalLM", _qwen35moe, _grouped, partial=True),
    "gpt-oss": GgufFamily("gpt_oss", "GptOssForCausalLM", _gpt_oss),
    "glm4": GgufFamily("glm4", "Glm4ForCausalLM", partial=True, bias_of="blk.0.attn_q.bias"),
    "glm4moe": GgufFamily(
        "glm4_moe", "Glm4MoeForCausalLM", _glm4moe, partial=True, bias_of="blk.0.attn_q.bias"
    ),
    "gemma3": GgufFamily("gemma3_text", "Gemma3ForCausalLM", _gemma3, _offset_norms),
}

"""What a GGUF file says of a model, and how llama.cpp wants its tensors: from config.json, family by family.

The other direction of `gguf_families`. A setting that changes the numbers and that llama.cpp does not know
for the architecture is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tinkex.engine.request import user_error
from tinkex.engine.torch.gguf_families import _VALUE_HEADS
from tinkex.engine.torch.models.rotary import llama3_frequencies

Fields = Mapping[str, Any]
Turn = Callable[[Fields, str, Tensor], Tensor]  # config.json, the GGUF name, the tensor as it is stored


def _as_stored(fields: Fields, name: str, tensor: Tensor) -> Tensor:
    return tensor


def _neighbours(fields: Fields, name: str, tensor: Tensor) -> Tensor:
    """Rotary pairs from halves (0, C/2), (1, C/2 + 1) … of a head to neighbours (0, 1), (2, 3) …"""
    if ".attn_q." not in name and ".attn_k." not in name:
        return tensor
    heads = fields["num_attention_heads"]
    if ".attn_k." in name:
        heads = fields.get("num_key_value_heads") or heads
    return tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def _plus_one(fields: Fields, name: str, tensor: Tensor) -> Tensor:
    return tensor.float() + 1.0 if name.endswith("norm.weight") else tensor


def _tiled(fields: Fields, name: str, tensor: Tensor) -> Tensor:
    """Value heads of delta nets: the first of every key head, then the second …; norms with 1 added."""
    part = name.split(".", 2)[-1]
    if part == "ssm_a":
        tensor = -tensor.float().exp()
    elif part == "ffn_gate_inp_shexp.weight":
        tensor = tensor[0]
    elif part == "ssm_conv1d.weight":
        tensor = tensor[:, 0]
    elif part != "ssm_norm.weight":
        tensor = _plus_one(fields, name, tensor)
    if part not in _VALUE_HEADS:
        return tensor
    keys, values = fields["linear_num_key_heads"], fields["linear_num_value_heads"]
    before, axis = _VALUE_HEADS[part]
    rows = before * keys * fields["linear_key_head_dim"]
    first, grouped = tensor.split([rows, tensor.shape[axis] - rows], axis)
    turned = grouped.unflatten(axis, (keys, values // keys, -1)).transpose(axis, axis + 1)
    return torch.cat([first, turned.flatten(axis, axis + 2)], axis)


def _nothing_more(fields: Fields) -> dict[str, Any]:
    return {}


@dataclass(frozen=True)
class GgufLayout:
    """One architecture of llama.cpp's."""

    arch: str
    more: Callable[[Fields], dict[str, Any]] = _nothing_more  # beside what every architecture has
    turn: Turn = _as_stored


def _experts(fields: Fields) -> dict[str, Any]:
    counts = ("num_local_experts", "num_experts", "n_routed_experts")
    return {
        "expert_count": next(fields[key] for key in counts if fields.get(key)),
        "expert_used_count": fields["num_experts_per_tok"],
        "expert_feed_forward_length": fields.get("moe_intermediate_size") or fields["intermediate_size"],
    }


def _llama(fields: Fields) -> dict[str, Any]:
    window = fields.get("sliding_window")
    if window and window < fields["max_position_embeddings"]:
        raise user_error(f"llama.cpp has no sliding window ({window}) for {fields['model_type']}")
    return {}


def _mixtral(fields: Fields) -> dict[str, Any]:
    found = _llama(fields) | _experts(fields)
    del found["expert_feed_forward_length"]
    return found


def _qwen3moe(fields: Fields) -> dict[str, Any]:
    if not fields.get("norm_topk_prob", True) or fields.get("mlp_only_layers"):
        raise user_error("llama.cpp knows qwen3_moe with norm_topk_prob and experts in every layer alone")
    return _experts(fields)


def _qwen35(fields: Fields) -> dict[str, Any]:
    rope = _rope(fields)
    heads = fields["linear_num_value_heads"]
    types = fields.get("layer_types") or []
    interval = fields.get("full_attention_interval") or 1 + (types or ["full_attention"]).index(
        "full_attention"
    )
    return {
        "full_attention_interval": interval,
        "rope.dimension_count": int(rope["partial_rotary_factor"] * fields["head_dim"]),
        "rope.dimension_sections": [*rope["mrope_section"], 0],
        "ssm.conv_kernel": fields["linear_conv_kernel_dim"],
        "ssm.state_size": fields["linear_key_head_dim"],
        "ssm.group_count": fields["linear_num_key_heads"],
        "ssm.time_step_rank": heads,
        "ssm.inner_size": heads * fields["linear_value_head_dim"],
    }


def _qwen35moe(fields: Fields) -> dict[str, Any]:
    shared = {"expert_shared_feed_forward_length": fields["shared_expert_intermediate_size"]}
    return _qwen35(fields) | _experts(fields) | shared


def _gpt_oss(fields: Fields) -> dict[str, Any]:
    return _experts(fields) | {"attention.sliding_window": fields["sliding_window"]}


def _partial(fields: Fields) -> dict[str, Any]:
    part = _rope(fields).get("partial_rotary_factor", fields.get("partial_rotary_factor", 1.0))
    return {"rope.dimension_count": int(part * _head_dim(fields))}


def _glm4moe(fields: Fields) -> dict[str, Any]:
    return (
        _partial(fields)
        | _experts(fields)
        | {
            "expert_shared_count": fields["n_shared_experts"],
            "leading_dense_block_count": fields["first_k_dense_replace"],
            "expert_group_count": fields.get("n_group", 1),
            "expert_group_used_count": fields.get("topk_group", 1),
            "expert_weights_scale": float(fields.get("routed_scaling_factor", 1.0)),
            "expert_weights_norm": bool(fields.get("norm_topk_prob", True)),
            "expert_gating_func": 2,  # sigmoid
        }
    )


def _gemma3(fields: Fields) -> dict[str, Any]:
    heads, layers = fields["num_attention_heads"], fields["num_hidden_layers"]
    scalar = fields["hidden_size"] // heads if layers == 62 else _head_dim(fields)
    if fields.get("query_pre_attn_scalar", scalar) != scalar:
        raise user_error(f"llama.cpp takes query_pre_attn_scalar of Gemma 3 for {scalar}")
    local = (fields.get("rope_parameters") or {}).get("sliding_attention", {})
    base = local.get("rope_theta", fields.get("rope_local_base_freq", 10000.0))
    return {"attention.sliding_window": fields["sliding_window"], "rope.freq_base_swa": float(base)}


def _granite(fields: Fields) -> dict[str, Any]:
    return {
        "attention.scale": float(fields["attention_multiplier"]),
        "embedding_scale": float(fields["embedding_multiplier"]),
        "residual_scale": float(fields["residual_multiplier"]),
        "logit_scale": float(fields["logits_scaling"]),
    }


def _phi3(fields: Fields) -> dict[str, Any]:
    if _rope(fields).get("rope_type") == "longrope":
        raise user_error("the longrope factors of Phi-3 are not written to GGUF yet; export merged weights")
    window = (
        {} if not fields.get("sliding_window") else {"attention.sliding_window": fields["sliding_window"]}
    )
    return _partial(fields) | window


def _smollm3(fields: Fields) -> dict[str, Any]:
    layers = fields.get("no_rope_layers") or []
    if [bool(one) for one in layers] != [(i + 1) % 4 != 0 for i in range(len(layers))]:
        raise user_error("llama.cpp rotates every layer of SmolLM3 but each fourth; this model has others")
    return {}


# By model_type. A text model inside one that sees is written as the text model that it is.
GGUF_LAYOUTS: dict[str, GgufLayout] = {
    "llama": GgufLayout("llama", _llama, _neighbours),
    "mistral": GgufLayout("llama", _llama, _neighbours),
    "mixtral": GgufLayout("llama", _mixtral, _neighbours),
    "qwen2": GgufLayout("qwen2"),
    "qwen3": GgufLayout("qwen3"),
    "qwen3_vl": GgufLayout("qwen3"),
    "qwen3_moe": GgufLayout("qwen3moe", _qwen3moe),
    "qwen3_vl_moe": GgufLayout("qwen3moe", _qwen3moe),
    **dict.fromkeys(("qwen3_5", "qwen3_5_text"), GgufLayout("qwen35", _qwen35, _tiled)),
    **dict.fromkeys(("qwen3_5_moe", "qwen3_5_moe_text"), GgufLayout("qwen35moe", _qwen35moe, _tiled)),
    "gpt_oss": GgufLayout("gpt-oss", _gpt_oss),
    "glm4": GgufLayout("glm4", _partial),
    "glm4_moe": GgufLayout("glm4moe", _glm4moe),
    **dict.fromkeys(("gemma3", "gemma3_text"), GgufLayout("gemma3", _gemma3, _plus_one)),
    "granite": GgufLayout("granite", _granite, _neighbours),
    "phi3": GgufLayout("phi3", _phi3),
    "smollm3": GgufLayout("smollm3", _smollm3, _neighbours),
    "olmoe": GgufLayout("olmoe", _experts),
}


def layout_of(model_type: str) -> GgufLayout:
    if model_type not in GGUF_LAYOUTS:
        raise user_error(
            f"model_type {model_type!r} is not written as GGUF; those that are: {', '.join(GGUF_LAYOUTS)}. "
            "llama.cpp's own converter reads what the format merged writes"
        )
    return GGUF_LAYOUTS[model_type]


def metadata_of(fields: Fields) -> dict[str, Any]:
    """All metadata of the model, without the architecture's name in front; `fields` are the text model's."""
    head_dim = _head_dim(fields)
    values = {
        "block_count": fields["num_hidden_layers"],
        "context_length": fields["max_position_embeddings"],
        "embedding_length": fields["hidden_size"],
        "feed_forward_length": fields.get("intermediate_size"),
        "attention.head_count": fields["num_attention_heads"],
        "attention.head_count_kv": fields.get("num_key_value_heads") or fields["num_attention_heads"],
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": float(fields["rms_norm_eps"]),
        "rope.dimension_count": head_dim,
        "rope.freq_base": float(_rope(fields).get("rope_theta", fields.get("rope_theta", 10000.0))),
        "vocab_size": fields["vocab_size"],
        **_rope_scaling(_rope(fields)),
        **layout_of(fields["model_type"]).more(fields),
    }
    return {key: value for key, value in values.items() if value is not None}


def _head_dim(fields: Fields) -> int:
    return fields.get("head_dim") or fields["hidden_size"] // fields["num_attention_heads"]


def _rope(fields: Fields) -> dict[str, Any]:
    rope = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    rope = rope.get("full_attention", rope)
    return {**rope, "rope_type": rope.get("rope_type", rope.get("type", "default"))}


def _rope_scaling(rope: Fields) -> dict[str, Any]:
    kind = rope["rope_type"]
    if kind in ("default", "llama3"):  # the factors of Llama 3 are a tensor
        return {}
    if kind == "linear":
        return {"rope.scaling.type": "linear", "rope.scaling.factor": float(rope["factor"])}
    if kind == "yarn":
        original = rope.get("original_max_position_embeddings", 4096)
        return {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": float(rope["factor"]),
            "rope.scaling.original_context_length": original,
        }
    if kind == "longrope":
        return {}  # refused where it matters
    raise user_error(f"rope scaling {kind!r} is not written to GGUF")


def rope_factors(fields: Fields) -> Tensor | None:
    """What Llama 3 divides its frequencies by, which llama.cpp reads as `rope_freqs.weight`."""
    rope = _rope(fields)
    if rope["rope_type"] != "llama3":
        return None
    size, theta = _head_dim(fields), float(rope.get("rope_theta", fields.get("rope_theta", 10000.0)))
    plain = theta ** (-torch.arange(0, size, 2, dtype=torch.float32) / size)
    return plain / llama3_frequencies(plain, rope)

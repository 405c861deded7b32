"""How llama.cpp wants each architecture: metadata beside what all have, names and shapes of tensors.

An entry of `GGUF_LAYOUTS` is a `model_type` that we write; its arithmetic must be what llama.cpp takes for
granted of the architecture, and a setting that is not is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tinkex.engine.request import user_error
from tinkex.engine.torch.gguf_families import _VALUE_HEADS

Fields = Mapping[str, Any]
Names = Mapping[str, tuple[str, ...]]
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


def head_dim(fields: Fields) -> int:
    return fields.get("head_dim") or fields["hidden_size"] // fields["num_attention_heads"]


def rope_of(fields: Fields) -> dict[str, Any]:
    rope = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    rope = rope.get("full_attention", rope)
    return {**rope, "rope_type": rope.get("rope_type", rope.get("type", "default"))}


def _nothing_more(fields: Fields) -> dict[str, Any]:
    return {}


@dataclass(frozen=True)
class GgufLayout:
    """One architecture of llama.cpp's."""

    arch: str
    more: Callable[[Fields], dict[str, Any]] = _nothing_more  # beside what every architecture has
    turn: Turn = _as_stored
    # Where the `gguf` package's table of names has nothing or something else: endings of our names, or of
    # stored tensors that are written whole, and the tensors of the file that they become.
    names: Callable[[Fields], Names] = _nothing_more


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
    rope = rope_of(fields)
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


def _next_turned(fields: Fields, name: str, tensor: Tensor) -> Tensor:
    """As `_tiled`, but for the order of value heads, which llama.cpp keeps for Qwen3-Next."""
    part = name.split(".", 2)[-1]
    if part == "ssm_a":
        return -tensor.float().exp()
    if part == "ffn_gate_inp_shexp.weight":
        return tensor[0]
    if part == "ssm_conv1d.weight":
        return tensor[:, 0]
    return tensor if part == "ssm_norm.weight" else _plus_one(fields, name, tensor)


def _qwen3next(fields: Fields) -> dict[str, Any]:
    if fields.get("mlp_only_layers") or not fields.get("norm_topk_prob", True):
        raise user_error("llama.cpp knows qwen3_next with norm_topk_prob and experts in every layer alone")
    found = _qwen35moe({**fields, "rope_parameters": rope_of(fields) | {"mrope_section": []}})
    return found | {"rope.dimension_sections": None}


def _qwen35moe(fields: Fields) -> dict[str, Any]:
    shared = {"expert_shared_feed_forward_length": fields["shared_expert_intermediate_size"]}
    return _qwen35(fields) | _experts(fields) | shared


def _gpt_oss(fields: Fields) -> dict[str, Any]:
    return _experts(fields) | {"attention.sliding_window": fields["sliding_window"]}


def _partial(fields: Fields) -> dict[str, Any]:
    part = rope_of(fields).get("partial_rotary_factor", fields.get("partial_rotary_factor", 1.0))
    return {"rope.dimension_count": int(part * head_dim(fields))}


def _leading_dense(fields: Fields) -> int:
    """How many layers before the first with experts."""
    if "first_k_dense_replace" in fields:
        return fields["first_k_dense_replace"]
    types = fields["mlp_layer_types"]
    first = types.index("sparse")
    if "dense" in types[first:]:
        raise user_error("llama.cpp knows dense layers before those with experts alone")
    return first


def _glm4moe(fields: Fields) -> dict[str, Any]:
    return (
        _partial(fields)
        | _experts(fields)
        | {
            "expert_shared_count": fields["n_shared_experts"],
            "leading_dense_block_count": _leading_dense(fields),
            "expert_group_count": fields.get("n_group", 1),
            "expert_group_used_count": fields.get("topk_group", 1),
            "expert_weights_scale": float(fields.get("routed_scaling_factor", 1.0)),
            "expert_weights_norm": bool(fields.get("norm_topk_prob", True)),
            "expert_gating_func": 2,  # sigmoid
        }
    )


def _gemma3(fields: Fields) -> dict[str, Any]:
    heads, layers = fields["num_attention_heads"], fields["num_hidden_layers"]
    scalar = fields["hidden_size"] // heads if layers == 62 else head_dim(fields)
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
    if rope_of(fields).get("rope_type") == "longrope":
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


def _latent_turned(fields: Fields, name: str, tensor: Tensor) -> Tensor:
    """The matrix from latents to keys and values as two, head by head; that of the keys transposed."""
    keys, values = fields["qk_nope_head_dim"], fields["v_head_dim"]
    if name.endswith(("attn_k_b.weight", "attn_v_b.weight")):
        heads = tensor.unflatten(0, (fields["num_attention_heads"], keys + values))
        return heads[:, :keys].transpose(1, 2) if "attn_k_b" in name else heads[:, keys:]
    return tensor


def _deepseek2(fields: Fields) -> dict[str, Any]:
    rope, rotated, rank = rope_of(fields), fields["qk_rope_head_dim"], fields["kv_lora_rank"]
    interleaved = fields.get("rope_interleave", True)
    if not interleaved:
        raise user_error("llama.cpp rotates neighbouring pairs of latent attention; rope_interleave is false")
    scaling = {}
    if rope["rope_type"] == "yarn":
        scaling = {"rope.scaling.yarn_log_multiplier": 0.1 * float(rope.get("mscale_all_dim") or 0.0)}
        if rope.get("mscale", 1.0) != rope.get("mscale_all_dim", 1.0):
            raise user_error("llama.cpp takes mscale and mscale_all_dim for equal; this model's differ")
    return (
        _glm4moe(fields)
        | scaling
        | {
            "attention.head_count_kv": 1,  # what is cached is one latent for all heads
            "attention.q_lora_rank": fields.get("q_lora_rank"),
            "attention.kv_lora_rank": rank,
            "attention.key_length": rank + rotated,
            "attention.value_length": rank,
            "attention.key_length_mla": fields["qk_nope_head_dim"] + rotated,
            "attention.value_length_mla": fields["v_head_dim"],
            "rope.dimension_count": rotated,
        }
    )


def _llama4(fields: Fields) -> dict[str, Any]:
    experts, layers = fields["num_local_experts"], fields["num_hidden_layers"]
    rotated = fields.get("no_rope_layers") or [int((i + 1) % 4 != 0) for i in range(layers)]
    known = {
        "attention_chunk_size": (fields.get("attention_chunk_size"), 8192),
        "floor_scale": (fields.get("floor_scale", 8192), 8192),
        "attn_scale": (fields.get("attn_scale", 0.1), 0.1),
        "attn_temperature_tuning": (bool(fields.get("attn_temperature_tuning", True)), True),
        "no_rope_layers": (list(map(bool, rotated)), [(i + 1) % 4 != 0 for i in range(layers)]),
        "use_qk_norm": (bool(fields.get("use_qk_norm", True)), experts != 128),
    }
    for name, (given, expected) in known.items():
        if given != expected:
            raise user_error(f"llama.cpp takes {name} of Llama 4 for {expected}, and this model has {given}")
    return _experts(fields) | {
        "expert_feed_forward_length": fields["intermediate_size"],
        "feed_forward_length": fields["intermediate_size_mlp"],
        "interleave_moe_layer_step": fields.get("interleave_moe_layer_step", 1),
    }


def _state_turned(fields: Fields, name: str, tensor: Tensor) -> Tensor:
    """Mamba2: decays and skips as columns, norms by group, the convolution without its middle axis."""
    part = name.split(".", 2)[-1]
    if part == "ssm_a":
        return -tensor.float().exp()[:, None]
    if part == "ssm_d":
        return tensor[:, None]
    if part == "ssm_conv1d.weight":
        return tensor[:, 0]
    if part == "ssm_norm.weight":
        return tensor.unflatten(0, (fields.get("mamba_n_groups") or fields["n_groups"], -1))
    return tensor


def _layers_of(fields: Fields, kind: str, value: int, key: str = "layer_types") -> list[int]:
    """A number for each layer: `value` for those of a kind, 0 for the others."""
    return [value if each == kind else 0 for each in fields[key]]


def _granitehybrid(fields: Fields) -> dict[str, Any]:
    heads = fields["mamba_n_heads"]
    width = fields["mamba_expand"] * fields["hidden_size"]
    types = [each.replace("mamba", "linear_attention") for each in fields["layer_types"]]
    types = ["full_attention" if each == "attention" else each for each in types]
    kv = _layers_of({"layer_types": types}, "full_attention", fields["num_key_value_heads"])
    if 0 not in kv or fields.get("position_embedding_type") == "rope":
        raise user_error("llama.cpp knows Granite 4 with recurrent layers and without rotations alone")
    if fields.get("mamba_n_groups", 1) != 1:
        raise user_error("llama.cpp norms each group of a Mamba layer by itself, and Granite 4 all of them")
    experts = _experts(fields) if fields.get("num_local_experts") else {}
    shared = fields["shared_intermediate_size"]
    found = _granite(fields) | experts | {
        "attention.head_count_kv": kv,
        "rope.scaling.finetuned": False,
        "ssm.conv_kernel": fields["mamba_d_conv"],
        "ssm.state_size": fields["mamba_d_state"],
        "ssm.group_count": fields["mamba_n_groups"],
        "ssm.time_step_rank": heads,
        "ssm.inner_size": width,
    }  # fmt: skip
    if experts:
        return found | {"expert_shared_feed_forward_length": shared}
    return found | {"feed_forward_length": shared}


def _nemotron(fields: Fields) -> dict[str, Any]:
    types = fields["layers_block_type"]
    mlp = dict(
        zip(("mlp", "moe"), (fields["intermediate_size"], fields["moe_intermediate_size"]), strict=True)
    )
    heads = fields["mamba_num_heads"]
    found = {
        "attention.head_count_kv": [
            fields["num_key_value_heads"] if each in ("full_attention", "attention") else 0 for each in types
        ],
        "feed_forward_length": [mlp.get(each, 0) for each in types],
        "attention.layer_norm_epsilon": float(fields["layer_norm_epsilon"]),
        "ssm.conv_kernel": fields["conv_kernel"],
        "ssm.state_size": fields["ssm_state_size"],
        "ssm.group_count": fields["n_groups"],
        "ssm.time_step_rank": heads,
        "ssm.inner_size": heads * fields["mamba_head_dim"],
    }
    if "moe" not in types:
        return found
    if "mlp" in types:
        raise user_error("llama.cpp knows Nemotron with experts in every layer that has an MLP alone")
    return found | {
        **_experts(fields),
        "expert_shared_count": 1,
        "expert_shared_feed_forward_length": fields["moe_shared_expert_intermediate_size"],
        "expert_group_count": fields.get("n_group", 1),
        "expert_group_used_count": fields.get("topk_group", 1),
        "expert_weights_scale": float(fields.get("routed_scaling_factor", 1.0)),
        "expert_weights_norm": bool(fields.get("norm_topk_prob", True)),
        "moe_latent_size": fields.get("moe_latent_size"),
    }


def global_head_dim(fields: Fields) -> int:
    """The size of a head in Gemma 4's layers of full attention."""
    own = (fields.get("per_layer_config") or {}).values()
    sizes = [each["head_dim"] for each in own if "head_dim" in each]
    return fields.get("global_head_dim") or (sizes[0] if sizes else head_dim(fields))


def _gemma4(fields: Fields) -> dict[str, Any]:
    types, ropes = fields["layer_types"], fields.get("rope_parameters") or {}
    local, whole = ropes.get("sliding_attention", {}), ropes.get("full_attention", {})
    size, wide = head_dim(fields), global_head_dim(fields)
    few = fields.get("num_global_key_value_heads") or fields["num_key_value_heads"]
    shared = fields.get("attention_k_eq_v", False)
    own = fields.get("per_layer_config") or {}
    experts = {}
    if fields.get("enable_moe_block"):
        experts = {
            "expert_count": fields["num_experts"],
            "expert_used_count": fields["top_k_experts"],
            "expert_feed_forward_length": fields["moe_intermediate_size"],
        }
    kv = [few if shared and each == "full_attention" else fields["num_key_value_heads"] for each in types]
    kv = [own.get(str(i), {}).get("num_key_value_heads", heads) for i, heads in enumerate(kv)]
    reused = fields.get("num_kv_shared_layers") or 0
    width = [fields["intermediate_size"]] * len(types)
    if fields.get("use_double_wide_mlp") and reused:
        width[-reused:] = [2 * fields["intermediate_size"]] * reused
    return experts | {
        "feed_forward_length": width,
        "attention.head_count_kv": kv,
        "attention.key_length": wide,
        "attention.value_length": wide,
        "attention.key_length_swa": size,
        "attention.value_length_swa": size,
        "attention.sliding_window": fields["sliding_window"],
        "attention.sliding_window_pattern": [each == "sliding_attention" for each in types],
        "attention.shared_kv_layers": reused,
        "rope.dimension_count": wide,
        "rope.dimension_count_swa": size,
        "rope.freq_base": float(whole.get("rope_theta", 1e6)),
        "rope.freq_base_swa": float(local.get("rope_theta", 10000.0)),
        "final_logit_softcapping": fields.get("final_logit_softcapping"),
        "embedding_length_per_layer_input": fields.get("hidden_size_per_layer_input") or 0,
    }


def _olmo3(fields: Fields) -> dict[str, Any]:
    types = fields["layer_types"]
    if types != ["full_attention" if (i + 1) % 4 == 0 else "sliding_attention" for i in range(len(types))]:
        raise user_error("llama.cpp takes each fourth layer of OLMo 3 alone for full attention")
    return {"attention.sliding_window": fields["sliding_window"]}


def _mistral3(fields: Fields) -> dict[str, Any]:
    rope = rope_of(fields)
    found = _llama(fields)
    if rope["rope_type"] == "yarn":
        found |= {
            "rope.scaling.yarn_beta_fast": float(rope.get("beta_fast", 32.0)),
            "rope.scaling.yarn_beta_slow": float(rope.get("beta_slow", 1.0)),
            "rope.scaling.yarn_log_multiplier": float(rope.get("mscale_all_dim") or 0.0),
        }
    if beta := rope.get("llama_4_scaling_beta"):
        found |= {"attention.temperature_scale": float(beta)}
    return found


def _next_names(fields: Fields) -> Names:
    return {r"linear_attn\.in_proj_ba\.weight": ("ssm_ba.weight",)}


def _latent_names(fields: Fields) -> Names:
    return {r"self_attn\.kv_b_proj\.weight": ("attn_k_b.weight", "attn_v_b.weight")}


def _granite_names(fields: Fields) -> Names:
    shared = "_shexp" if fields.get("num_local_experts") else ""
    parts = {
        r"input_linear\.weight": (f"ffn_gate{shared}.weight", f"ffn_up{shared}.weight"),
        r"output_linear\.weight": (f"ffn_down{shared}.weight",),
    }
    experts = {
        rf"block_sparse_moe\.experts\.\d+\.{part}_proj\.weight": (f"ffn_{part}_exps.weight",)
        for part in ("gate", "up", "down")
    }
    return {**_STATES, **experts} | {rf"shared_mlp\.{ours}": theirs for ours, theirs in parts.items()}


def _granite_turned(fields: Fields, name: str, tensor: Tensor) -> Tensor:
    """One matrix for gate and up becomes two."""
    if fields.get("num_local_experts"):
        halves = {".ffn_gate_shexp.": 0, ".ffn_up_shexp.": 1}
    else:
        halves = {".ffn_gate.": 0, ".ffn_up.": 1}
    for part, half in halves.items():
        if part in name:
            return tensor.chunk(2)[half]
    return _state_turned(fields, name, tensor)


def _nemotron_names(fields: Fields) -> Names:
    return {**_STATES} | {rf"mixer\.{ours}": (theirs,) for ours, theirs in _NEMOTRON.items()}


def _gemma4_names(fields: Fields) -> Names:
    return _GEMMA4


_LATENT = GgufLayout("deepseek2", _deepseek2, _latent_turned, _latent_names)
_STATES: Names = {
    rf"{mixer}\.{ours}": (theirs,)
    for mixer in ("mamba", "mixer")
    for ours, theirs in {
        r"in_proj\.weight": "ssm_in.weight",
        r"conv1d\.weight": "ssm_conv1d.weight",
        r"conv1d\.bias": "ssm_conv1d.bias",
        "dt_bias": "ssm_dt.bias",
        "A_log": "ssm_a",
        "D": "ssm_d",
        r"norm\.weight": "ssm_norm.weight",
        r"out_proj\.weight": "ssm_out.weight",
    }.items()
}
_NEMOTRON = {
    **{rf"{part}_proj\.weight": f"attn_{part}.weight" for part in "qkv"},
    r"o_proj\.weight": "attn_output.weight",
    r"up_proj\.weight": "ffn_up.weight",
    r"down_proj\.weight": "ffn_down.weight",
    r"gate\.weight": "ffn_gate_inp.weight",
    r"gate\.e_score_correction_bias": "exp_probs_b.bias",
    r"experts\.\d+\.up_proj\.weight": "ffn_up_exps.weight",
    r"experts\.\d+\.down_proj\.weight": "ffn_down_exps.weight",
    r"shared_experts\.up_proj\.weight": "ffn_up_shexp.weight",
    r"shared_experts\.down_proj\.weight": "ffn_down_shexp.weight",
    r"fc1_latent_proj\.weight": "ffn_latent_down.weight",
    r"fc2_latent_proj\.weight": "ffn_latent_up.weight",
}
_GEMMA4: Names = {
    "layer_scalar": ("layer_output_scale.weight",),
    r"router\.proj\.weight": ("ffn_gate_inp.weight",),
    r"router\.scale": ("ffn_gate_inp.scale",),
    r"router\.per_expert_scale": ("ffn_down_exps.scale",),
    r"experts\.gate_up_proj": ("ffn_gate_up_exps.weight",),
}
REFUSED = {
    "glm_moe_dsa": "llama.cpp needs the indexer of GLM-5, which is not read here",
}
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
    "qwen3_next": GgufLayout("qwen3next", _qwen3next, _next_turned, _next_names),
    **dict.fromkeys(("deepseek_v3", "kimi_k2", "kimi_k25", "glm4_moe_lite"), _LATENT),
    **dict.fromkeys(("llama4", "llama4_text"), GgufLayout("llama4", _llama4)),
    "granitemoehybrid": GgufLayout("granitehybrid", _granitehybrid, _granite_turned, _granite_names),
    "nemotron_h": GgufLayout("nemotron_h", _nemotron, _state_turned, _nemotron_names),
    **dict.fromkeys(("gemma4", "gemma4_text"), GgufLayout("gemma4", _gemma4, names=_gemma4_names)),
    "olmo3": GgufLayout("olmo2", _olmo3),
    **dict.fromkeys(("ministral3", "mistral3"), GgufLayout("mistral3", _mistral3, _neighbours)),
    "gpt_oss": GgufLayout("gpt-oss", _gpt_oss),
    "glm4": GgufLayout("glm4", _partial),
    "glm4_moe": GgufLayout("glm4moe", _glm4moe),
    **dict.fromkeys(("gemma3", "gemma3_text"), GgufLayout("gemma3", _gemma3, _plus_one)),
    "granite": GgufLayout("granite", _granite, _neighbours),
    "phi3": GgufLayout("phi3", _phi3),
    "smollm3": GgufLayout("smollm3", _smollm3, _neighbours),
    "olmoe": GgufLayout("olmoe", _experts),
}


def layout_of(fields: Fields) -> GgufLayout:
    model_type = fields["model_type"]
    if model_type not in GGUF_LAYOUTS:
        why = REFUSED.get(model_type, "its layout in llama.cpp is not known to us")
        raise user_error(
            f"model_type {model_type!r} is not written as GGUF: {why}. Those that are: "
            f"{', '.join(GGUF_LAYOUTS)}. llama.cpp's own converter reads what the format merged writes"
        )
    layout = GGUF_LAYOUTS[model_type]
    if model_type == "nemotron_h" and "moe" in fields["layers_block_type"]:
        return replace(layout, arch="nemotron_h_moe")
    return layout

"""GGUF metadata that only one architecture of llama.cpp has, from the fields of a `config.json`.

A setting that llama.cpp does not support for the architecture is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tinkex.engine.request import user_error

Fields = Mapping[str, Any]


def head_dim(fields: Fields) -> int:
    return fields.get("head_dim") or fields["hidden_size"] // fields["num_attention_heads"]


def rope_of(fields: Fields) -> dict[str, Any]:
    rope = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    rope = rope.get("full_attention", rope)
    return {**rope, "rope_type": rope.get("rope_type", rope.get("type", "default"))}


def expert_fields(fields: Fields) -> dict[str, Any]:
    counts = ("num_local_experts", "num_experts", "n_routed_experts")
    return {
        "expert_count": next(fields[key] for key in counts if fields.get(key)),
        "expert_used_count": fields["num_experts_per_tok"],
        "expert_feed_forward_length": fields.get("moe_intermediate_size") or fields["intermediate_size"],
    }


def llama(fields: Fields) -> dict[str, Any]:
    window = fields.get("sliding_window")
    if window and window < fields["max_position_embeddings"]:
        raise user_error(f"llama.cpp has no sliding window ({window}) for {fields['model_type']}")
    return {}


def mixtral(fields: Fields) -> dict[str, Any]:
    found = llama(fields) | expert_fields(fields)
    del found["expert_feed_forward_length"]
    return found


def qwen3moe(fields: Fields) -> dict[str, Any]:
    if not fields.get("norm_topk_prob", True) or fields.get("mlp_only_layers"):
        raise user_error("llama.cpp supports qwen3_moe only with norm_topk_prob and experts in every layer")
    return expert_fields(fields)


def qwen35(fields: Fields) -> dict[str, Any]:
    rope = rope_of(fields)
    heads = fields["linear_num_value_heads"]
    types = fields.get("layer_types") or []
    interval = fields.get("full_attention_interval") or 1 + (types.index("full_attention") if types else 0)
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


def qwen3next(fields: Fields) -> dict[str, Any]:
    if fields.get("mlp_only_layers") or not fields.get("norm_topk_prob", True):
        raise user_error("llama.cpp supports qwen3_next only with norm_topk_prob and experts in every layer")
    found = qwen35moe({**fields, "rope_parameters": rope_of(fields) | {"mrope_section": []}})
    return found | {"rope.dimension_sections": None}


def qwen35moe(fields: Fields) -> dict[str, Any]:
    shared = {"expert_shared_feed_forward_length": fields["shared_expert_intermediate_size"]}
    return qwen35(fields) | expert_fields(fields) | shared


def gpt_oss(fields: Fields) -> dict[str, Any]:
    return expert_fields(fields) | {"attention.sliding_window": fields["sliding_window"]}


def partial(fields: Fields) -> dict[str, Any]:
    part = rope_of(fields).get("partial_rotary_factor", fields.get("partial_rotary_factor", 1.0))
    return {"rope.dimension_count": int(part * head_dim(fields))}


def _leading_dense(fields: Fields) -> int:
    """How many layers before the first with experts."""
    if "first_k_dense_replace" in fields:
        return fields["first_k_dense_replace"]
    types = fields["mlp_layer_types"]
    first = types.index("sparse")
    if "dense" in types[first:]:
        raise user_error("llama.cpp supports dense layers only before those with experts")
    return first


def glm4moe(fields: Fields) -> dict[str, Any]:
    return (
        partial(fields)
        | expert_fields(fields)
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


def gemma3(fields: Fields) -> dict[str, Any]:
    heads, layers = fields["num_attention_heads"], fields["num_hidden_layers"]
    scalar = fields["hidden_size"] // heads if layers == 62 else head_dim(fields)
    if fields.get("query_pre_attn_scalar", scalar) != scalar:
        raise user_error(f"llama.cpp takes query_pre_attn_scalar of Gemma 3 for {scalar}")
    local = (fields.get("rope_parameters") or {}).get("sliding_attention", {})
    base = local.get("rope_theta", fields.get("rope_local_base_freq", 10000.0))
    return {"attention.sliding_window": fields["sliding_window"], "rope.freq_base_swa": float(base)}


def granite(fields: Fields) -> dict[str, Any]:
    return {
        "attention.scale": float(fields["attention_multiplier"]),
        "embedding_scale": float(fields["embedding_multiplier"]),
        "residual_scale": float(fields["residual_multiplier"]),
        "logit_scale": float(fields["logits_scaling"]),
    }


def phi3(fields: Fields) -> dict[str, Any]:
    if rope_of(fields).get("rope_type") == "longrope":
        raise user_error("the longrope factors of Phi-3 are not written to GGUF yet; export merged weights")
    return partial(fields) | {"attention.sliding_window": fields.get("sliding_window") or None}


def smollm3(fields: Fields) -> dict[str, Any]:
    layers = fields.get("no_rope_layers") or []
    if [bool(one) for one in layers] != [(i + 1) % 4 != 0 for i in range(len(layers))]:
        raise user_error("llama.cpp rotates every layer of SmolLM3 but each fourth; this model has others")
    return {}


def deepseek2(fields: Fields) -> dict[str, Any]:
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
        glm4moe(fields)
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


def llama4(fields: Fields) -> dict[str, Any]:
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
    return expert_fields(fields) | {
        "expert_feed_forward_length": fields["intermediate_size"],
        "feed_forward_length": fields["intermediate_size_mlp"],
        "interleave_moe_layer_step": fields.get("interleave_moe_layer_step", 1),
    }


def granitehybrid(fields: Fields) -> dict[str, Any]:
    heads = fields["mamba_n_heads"]
    width = fields["mamba_expand"] * fields["hidden_size"]
    attention, heads_of = ("full_attention", "attention"), fields["num_key_value_heads"]
    kv = [heads_of if each in attention else 0 for each in fields["layer_types"]]
    if 0 not in kv or fields.get("position_embedding_type") == "rope":
        raise user_error("llama.cpp supports Granite 4 only with recurrent layers and without rotations")
    if fields.get("mamba_n_groups", 1) != 1:
        raise user_error("llama.cpp norms each group of a Mamba layer by itself, and Granite 4 all of them")
    routed = expert_fields(fields) if fields.get("num_local_experts") else {}
    shared = fields["shared_intermediate_size"]
    found = granite(fields) | routed | {
        "attention.head_count_kv": kv,
        "rope.scaling.finetuned": False,
        "ssm.conv_kernel": fields["mamba_d_conv"],
        "ssm.state_size": fields["mamba_d_state"],
        "ssm.group_count": fields["mamba_n_groups"],
        "ssm.time_step_rank": heads,
        "ssm.inner_size": width,
    }  # fmt: skip
    if routed:
        return found | {"expert_shared_feed_forward_length": shared}
    return found | {"feed_forward_length": shared}


def nemotron(fields: Fields) -> dict[str, Any]:
    types = fields["layers_block_type"]
    mlp = {"mlp": fields["intermediate_size"], "moe": fields["moe_intermediate_size"]}
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
        raise user_error("llama.cpp supports Nemotron only with experts in every layer that has an MLP")
    return found | {
        **expert_fields(fields),
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


def gemma4(fields: Fields) -> dict[str, Any]:
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


def olmo3(fields: Fields) -> dict[str, Any]:
    types = fields["layer_types"]
    if types != ["full_attention" if (i + 1) % 4 == 0 else "sliding_attention" for i in range(len(types))]:
        raise user_error("llama.cpp gives OLMo 3 full attention only in every fourth layer")
    return {"attention.sliding_window": fields["sliding_window"]}


def mistral3(fields: Fields) -> dict[str, Any]:
    rope = rope_of(fields)
    found = llama(fields)
    if rope["rope_type"] == "yarn":
        found |= {
            "rope.scaling.yarn_beta_fast": float(rope.get("beta_fast", 32.0)),
            "rope.scaling.yarn_beta_slow": float(rope.get("beta_slow", 1.0)),
            "rope.scaling.yarn_log_multiplier": float(rope.get("mscale_all_dim") or 0.0),
        }
    if beta := rope.get("llama_4_scaling_beta"):
        found |= {"attention.temperature_scale": float(beta)}
    return found

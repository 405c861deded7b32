"""Families whose layers are attention and one MLP each: from a `config.json` to a `ModelConfig`."""

from __future__ import annotations

from dataclasses import replace

from tinkex.engine.torch.models.architecture import LayerConfig, ModelConfig, Temperature
from tinkex.engine.torch.models.config_fields import (
    SANDWICH,
    Fields,
    assembled,
    attention_of,
    integer,
    layer_count,
    layer_types,
    mlp_of,
    multipliers,
    refuse,
    sliding,
    upper_windows,
)
from tinkex.engine.torch.models.norms import NormConfig, NormPlacement
from tinkex.engine.torch.models.rotary import read_rope, rope_fields


def llama(fields: Fields) -> ModelConfig:
    """Llama 2 and 3, SmolLM2."""
    attention = attention_of(fields, biased=True)
    layer = LayerConfig(attention, mlp_of(fields, bias=bool(fields.get("mlp_bias", False))))
    return assembled(fields, [layer] * layer_count(fields))


def mistral(fields: Fields) -> ModelConfig:
    attention = attention_of(fields, window=fields.get("sliding_window", 4096))
    return assembled(fields, [LayerConfig(attention, mlp_of(fields))] * layer_count(fields))


def qwen2(fields: Fields) -> ModelConfig:
    attention, mlp = attention_of(fields, qkv_bias=True), mlp_of(fields)
    windows = upper_windows(fields)
    return assembled(fields, [LayerConfig(replace(attention, window=window), mlp) for window in windows])


def qwen3(fields: Fields) -> ModelConfig:
    attention = attention_of(fields, head_dim=128, qk_norm="head", biased=True)
    windows, mlp = upper_windows(fields), mlp_of(fields)
    return assembled(fields, [LayerConfig(replace(attention, window=window), mlp) for window in windows])


def qwen3_vl(fields: Fields) -> ModelConfig:
    """The text of Qwen3-VL: Qwen3's, with positions of three axes, which are equal without images."""
    return qwen3({"rope_theta": 5e5, **fields})


def gemma3(fields: Fields) -> ModelConfig:
    refuse(fields, use_bidirectional_attention=False, final_logit_softcapping=None)
    fields = {"rope_theta": 1e6, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", **fields}
    every, count = fields.get("sliding_window_pattern", 6), layer_count(fields)
    types = layer_types(
        fields, ("full_attention" if (i + 1) % every == 0 else "sliding_attention" for i in range(count))
    )
    scale = fields.get("query_pre_attn_scalar", 256) ** -0.5
    full = attention_of(fields, qk_norm="head", biased=True, scale=scale, whole_images=True)
    mixers = {"full_attention": full, "sliding_attention": sliding(full, fields, theta=1e4, window=4096)}
    return assembled(
        fields,
        [LayerConfig(mixers[kind], mlp_of(fields), SANDWICH) for kind in types],
        norm=NormConfig(float(fields.get("rms_norm_eps", 1e-6)), "offset"),
        embedding_scale=integer(fields, "hidden_size") ** 0.5,
        tied=bool(fields.get("tie_word_embeddings", True)),
    )


def olmo3(fields: Fields) -> ModelConfig:
    fields, count = {"rope_theta": 5e5, "rms_norm_eps": 1e-5, **fields}, layer_count(fields)
    types = layer_types(
        fields, ("full_attention" if (i + 1) % 4 == 0 else "sliding_attention" for i in range(count))
    )
    full = attention_of(fields, qk_norm="whole", biased=True)
    local = sliding(full, fields, theta=fields["rope_theta"], window=4096)
    mixers = {"full_attention": full, "sliding_attention": local}
    norms = NormPlacement(None, "post_attention_layernorm", None, "post_feedforward_layernorm")
    return assembled(
        fields,
        [LayerConfig(mixers[kind], mlp_of(fields), norms) for kind in types],
        norm=NormConfig(float(fields["rms_norm_eps"]), "wide"),
    )


def phi3(fields: Fields) -> ModelConfig:
    """Phi-3, Phi-3.5 and Phi-4. "su" and "yarn" are older names of their "longrope"."""
    rope = rope_fields(fields)
    if rope["rope_type"] in ("su", "yarn"):
        rope["rope_type"] = "longrope"
    own = {"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096}
    fields = {**own, **fields, "rope_parameters": rope}
    window = fields.get("sliding_window")
    attention = attention_of(fields, fused=True, window=window, partial=1.0)
    return assembled(fields, [LayerConfig(attention, mlp_of(fields, fused=True))] * layer_count(fields))


def granite(fields: Fields) -> ModelConfig:
    """Granite 3."""
    attention = attention_of(fields, biased=True, scale=float(fields.get("attention_multiplier", 1.0)))
    layer = LayerConfig(attention, mlp_of(fields, bias=bool(fields.get("mlp_bias", False))))
    return assembled(fields, [layer] * layer_count(fields), **multipliers(fields))


def smollm3(fields: Fields) -> ModelConfig:
    fields, count = {"rope_theta": 2e6, **fields}, layer_count(fields)
    every = fields.get("no_rope_layer_interval", 4)
    rotated = fields.get("no_rope_layers") or [(i + 1) % every != 0 for i in range(count)]
    window = fields.get("sliding_window") if fields.get("use_sliding_window", False) else None
    types = layer_types(fields, ("full_attention" if one else "sliding_attention" for one in rotated))
    attention = attention_of(fields, biased=True)
    mlp = mlp_of(fields, bias=bool(fields.get("mlp_bias", False)))
    mixers = [
        replace(attention, rope=attention.rope if one else None, window=window if kind[0] == "s" else None)
        for one, kind in zip(rotated, types, strict=False)
    ]
    tied = bool(fields.get("tie_word_embeddings", True))
    return assembled(fields, [LayerConfig(mixer, mlp) for mixer in mixers], tied=tied)


def glm4(fields: Fields) -> ModelConfig:
    """GLM-4 and GLM-Z1, dense."""
    fields = {"head_dim": 128, **fields}
    rope = read_rope(fields, fields["head_dim"], partial=0.5, adjacent=True)
    attention = attention_of(fields, rope=rope, qkv_bias=bool(fields.get("attention_bias", True)))
    norms = NormPlacement(
        "input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"
    )
    layer = LayerConfig(attention, mlp_of(fields, fused=True), norms)
    norm = NormConfig(float(fields.get("rms_norm_eps", 1.5625e-7)))
    return assembled(fields, [layer] * layer_count(fields), norm=norm)


def ministral3(fields: Fields) -> ModelConfig:
    """Ministral 3 and, by the field that they name, what else wears Mistral 3's wrapper."""
    if fields["model_type"] == "mistral":
        return mistral(fields)
    fields = {"rms_norm_eps": 1e-5, "head_dim": 128, **fields}
    rope = rope_fields(fields)
    beta, length = rope.get("llama_4_scaling_beta"), rope.get("original_max_position_embeddings")
    hotter = None if beta is None or length is None else Temperature(float(beta), int(length))
    attention = attention_of(fields, window=fields.get("sliding_window"), temperature=hotter)
    return assembled(fields, [LayerConfig(attention, mlp_of(fields))] * layer_count(fields))

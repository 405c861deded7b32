"""Families of models: for each `model_type` of a `config.json` a function from its fields to a `ModelConfig`.

Every field that changes the numbers is read, in the spellings of transformers 4 and 5, or the model is
refused with a message that names the field.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, Literal

from tinkex.engine.torch.models.architecture import (
    AttentionConfig,
    ClampedSwiGlu,
    DeltaConfig,
    ExpertNorms,
    ExpertsConfig,
    LatentConfig,
    LayerConfig,
    MambaConfig,
    MlpConfig,
    ModelConfig,
    NormConfig,
    NormPlacement,
    RouterConfig,
    SharedExpert,
    Temperature,
)
from tinkex.engine.torch.models.attend import Chunk
from tinkex.engine.torch.models.rotary import read_rope, rope_fields
from tinkex.errors import InvalidInputError

Fields = Mapping[str, Any]

# What stored names begin with, and what our names do.
_PREFIXES = {
    "model.language_model.": "model.",
    "language_model.model.blocks.": "model.layers.",  # as transformers saves Kimi-K2.5
    "language_model.model.": "model.",
    "language_model.": "",
    # Nemotron's, as released and as transformers calls them
    "backbone.embeddings.": "model.embed_tokens.",
    "backbone.norm_f.": "model.norm.",
    "backbone.": "model.",
    "model.embeddings.": "model.embed_tokens.",
    "model.norm_f.": "model.norm.",
}
# Of models that see: their towers are not read. Of models with heads for several tokens: neither are those.
TOWERS = ("model.visual.", "visual.", "vision_tower.", "model.vision_tower.", "multi_modal_projector.",
          "model.multi_modal_projector.", "vision_model.", "mm_projector.",
          "model.mm_projector.")  # fmt: skip
MTP = ("mtp.",)
_ACTIVATIONS: dict[str, Literal["silu", "gelu_tanh"]] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
}
SANDWICH = NormPlacement(
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
)


def model_config(fields: Fields, *, vocab_size: int | None = None) -> ModelConfig:
    """Read the fields of a `config.json`; `vocab_size` overrides it where known better."""
    arch = fields.get("model_type")
    if arch not in FAMILIES:
        named = ", ".join(map(str, fields.get("architectures") or ())) or "no architecture named"
        raise InvalidInputError(
            f"model_type {arch!r} ({named}) is not a supported architecture; supported: {', '.join(FAMILIES)}"
        )
    config = FAMILIES[arch](text_fields(fields))
    seen = fields.get("vision_config")
    return replace(
        config,
        arch=arch,
        vocab_size=min(vocab_size or config.padded_vocab, config.padded_vocab),
        vision_config=seen,
        skipped=config.skipped + (() if seen is None else TOWERS),
    )


def text_fields(fields: Fields) -> dict[str, Any]:
    """The fields of the text model: those of `text_config`, where there is one, before those around it."""
    tied = {key: fields[key] for key in ("tie_word_embeddings",) if key in fields}  # said of the whole model
    return {**fields, **(fields.get("text_config") or {}), **tied}


def our_name(stored: str) -> str:
    """The name that our decoder gives to a stored tensor."""
    for prefix, ours in _PREFIXES.items():
        if stored.startswith(prefix):
            return ours + stored.removeprefix(prefix)
    return stored


# -- parts of the functions below ------------------------------------------------------------------------


def integer(fields: Fields, key: str) -> int:
    value = fields.get(key)
    if not isinstance(value, int) or value <= 0:
        raise InvalidInputError(f"config.json: {key} must be a positive integer, got {value!r}")
    return value


def refuse(fields: Fields, **allowed: Any) -> None:
    """Refuse fields that are given and are not what is allowed."""
    for key, value in allowed.items():
        if (given := fields.get(key)) not in (None, value):
            raise InvalidInputError(f"{key} {given!r} is not supported; allowed: {value!r}")


def assembled(fields: Fields, stack: Iterable[LayerConfig], **own: Any) -> ModelConfig:
    """A model of these layers; `own` replaces what is read from the fields."""
    padded_vocab, eos = integer(fields, "vocab_size"), fields.get("eos_token_id")
    read = {
        "arch": fields["model_type"],
        "width": integer(fields, "hidden_size"),
        "vocab_size": padded_vocab,
        "padded_vocab": padded_vocab,
        "max_context": _max_context(fields),
        "tied": bool(fields.get("tie_word_embeddings", False)),
        "norm": NormConfig(float(fields.get("rms_norm_eps", 1e-6))),
        "stack": tuple(stack),
        "eos_ids": () if eos is None else tuple(eos if isinstance(eos, list | tuple) else [int(eos)]),
    }
    return ModelConfig(**(read | own))


def attention_of(
    fields: Fields, *, head_dim: int | None = None, partial: float | None = None, **own: Any
) -> AttentionConfig:
    """Attention; `head_dim` where the fields may leave it out, `partial` as `read_rope` has it."""
    heads = integer(fields, "num_attention_heads")
    size: int = fields.get("head_dim") or head_dim or integer(fields, "hidden_size") // heads
    kv_heads = fields.get("num_key_value_heads") or heads
    rope = own.pop("rope", None) or read_rope(fields, size, partial=partial)
    return AttentionConfig(heads, kv_heads, size, rope, **own)


def sliding(full: AttentionConfig, fields: Fields, *, theta: float, window: int) -> AttentionConfig:
    """The sliding layers of a model whose rope scaling is that of the others; the last two are defaults."""
    if "sliding_attention" not in (fields.get("rope_parameters") or {}):
        theta = fields.get("rope_local_base_freq", theta)
        fields = {**fields, "rope_theta": theta, "rope_parameters": None, "rope_scaling": None}
    rope = read_rope(fields, full.head_dim, "sliding_attention")
    return replace(full, rope=rope, window=fields.get("sliding_window", window))


def delta_of(fields: Fields) -> DeltaConfig:
    sizes = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim")
    keys, values, key_dim, value_dim, conv = (integer(fields, f"linear_{size}") for size in sizes)
    return DeltaConfig(keys, values, key_dim, value_dim, conv)


def mlp_of(fields: Fields, *, bias: bool = False, fused: bool = False) -> MlpConfig:
    return MlpConfig(integer(fields, "intermediate_size"), bias, activation_of(fields), fused=fused)


def activation_of(fields: Fields, default: str = "silu") -> Literal["silu", "gelu_tanh"]:
    given = fields.get("hidden_activation") or fields.get("hidden_act") or default
    if given not in _ACTIVATIONS:
        allowed = ", ".join(_ACTIVATIONS)
        raise InvalidInputError(f"hidden_act {given!r} is not supported; allowed: {allowed}")
    return _ACTIVATIONS[given]


def layer_count(fields: Fields) -> int:
    return integer(fields, "num_hidden_layers")


def layer_types(fields: Fields, default: Iterable[str], allowed: tuple[str, ...] = ()) -> list[str]:
    """What each layer attends to; `allowed` beside full and sliding attention."""
    types, allowed = (
        fields.get("layer_types") or list(default),
        ("full_attention", "sliding_attention", *allowed),
    )
    if unknown := set(types) - set(allowed):
        raise InvalidInputError(
            f"layer_types {sorted(unknown)} are not supported; allowed: {', '.join(allowed)}"
        )
    return types


def _max_context(fields: Fields) -> int:
    given, rope = integer(fields, "max_position_embeddings"), rope_fields(fields)
    if rope["rope_type"] == "yarn" and (original := rope.get("original_max_position_embeddings")):
        return max(given, int(original * rope["factor"]))
    return given


def _upper_windows(fields: Fields) -> list[int | None]:
    """Qwen's sliding windows: none, or those of the upper layers, or as listed."""
    window, full = fields.get("sliding_window"), fields.get("max_window_layers", 28)
    count, asked = layer_count(fields), fields.get("use_sliding_window", False)
    types = layer_types(fields, ("full_attention" if i < full else "sliding_attention" for i in range(count)))
    return [window if asked and kind == "sliding_attention" else None for kind in types]


# -- the families ----------------------------------------------------------------------------------------


def llama(fields: Fields) -> ModelConfig:
    """Llama 2 and 3, SmolLM2."""
    bias = bool(fields.get("attention_bias", False))
    attention = attention_of(fields, qkv_bias=bias, o_bias=bias)
    layer = LayerConfig(attention, mlp_of(fields, bias=bool(fields.get("mlp_bias", False))))
    return assembled(fields, [layer] * layer_count(fields))


def mistral(fields: Fields) -> ModelConfig:
    attention = attention_of(fields, window=fields.get("sliding_window", 4096))
    return assembled(fields, [LayerConfig(attention, mlp_of(fields))] * layer_count(fields))


def qwen2(fields: Fields) -> ModelConfig:
    attention, mlp = attention_of(fields, qkv_bias=True), mlp_of(fields)
    windows = _upper_windows(fields)
    return assembled(fields, [LayerConfig(replace(attention, window=window), mlp) for window in windows])


def qwen3(fields: Fields) -> ModelConfig:
    bias = bool(fields.get("attention_bias", False))
    attention = attention_of(fields, head_dim=128, qk_norm="head", qkv_bias=bias, o_bias=bias)
    windows, mlp = _upper_windows(fields), mlp_of(fields)
    return assembled(fields, [LayerConfig(replace(attention, window=window), mlp) for window in windows])


def qwen3_moe(fields: Fields) -> ModelConfig:
    bias = bool(fields.get("attention_bias", False))
    window = fields.get("sliding_window") if fields.get("use_sliding_window", False) else None
    attention = attention_of(fields, qk_norm="head", qkv_bias=bias, o_bias=bias, window=window)
    count = "num_experts" if "num_experts" in fields else "num_local_experts"  # transformers 4, 5
    experts = ExpertsConfig(
        count=integer(fields, count),
        per_token=integer(fields, "num_experts_per_tok"),
        width=integer(fields, "moe_intermediate_size"),
        router=RouterConfig(normalise=bool(fields.get("norm_topk_prob", False))),
    )
    step, dense, mlp = (
        fields.get("decoder_sparse_step", 1),
        fields.get("mlp_only_layers") or (),
        mlp_of(fields),
    )
    sparse = (i not in dense and (i + 1) % step == 0 for i in range(layer_count(fields)))
    return assembled(fields, [LayerConfig(attention, experts if one else mlp) for one in sparse])


def qwen3_vl(fields: Fields) -> ModelConfig:
    """The text of Qwen3-VL: Qwen3's, with positions of three axes, which are equal without images."""
    return qwen3({"rope_theta": 5e5, **fields})


def qwen3_vl_moe(fields: Fields) -> ModelConfig:
    config = qwen3_moe({"rope_theta": 5e5, **fields, "norm_topk_prob": True})
    stack = [
        replace(layer, mlp=replace(layer.mlp, transposed="either"))
        if isinstance(layer.mlp, ExpertsConfig) else layer
        for layer in config.stack
    ]  # fmt: skip
    return replace(config, stack=tuple(stack))


def mixtral(fields: Fields) -> ModelConfig:
    experts = ExpertsConfig(
        count=integer(fields, "num_local_experts"),
        per_token=integer(fields, "num_experts_per_tok"),
        width=mlp_of(fields).width,
    )
    attention = attention_of(fields, window=fields.get("sliding_window"))
    return assembled(fields, [LayerConfig(attention, experts)] * layer_count(fields))


def gemma3(fields: Fields) -> ModelConfig:
    refuse(fields, use_bidirectional_attention=False, final_logit_softcapping=None)
    fields = {"rope_theta": 1e6, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", **fields}
    every, count = fields.get("sliding_window_pattern", 6), layer_count(fields)
    types = layer_types(
        fields, ("full_attention" if (i + 1) % every == 0 else "sliding_attention" for i in range(count))
    )
    bias, scale = bool(fields.get("attention_bias", False)), fields.get("query_pre_attn_scalar", 256) ** -0.5
    own = {"qkv_bias": bias, "o_bias": bias, "scale": scale, "whole_images": True}
    full = attention_of(fields, qk_norm="head", **own)
    mixers = {"full_attention": full, "sliding_attention": sliding(full, fields, theta=1e4, window=4096)}
    return assembled(
        fields,
        [LayerConfig(mixers[kind], mlp_of(fields), SANDWICH) for kind in types],
        norm=NormConfig(float(fields.get("rms_norm_eps", 1e-6)), "offset"),
        embedding_scale=integer(fields, "hidden_size") ** 0.5,
        tied=bool(fields.get("tie_word_embeddings", True)),
    )


def gemma4(fields: Fields) -> ModelConfig:
    if fields.get("use_bidirectional_attention") == "all":
        refuse(fields, use_bidirectional_attention=None)
    fields = {"head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", **fields}
    count, same = layer_count(fields), bool(fields.get("attention_k_eq_v", False))
    types = layer_types(
        fields, ("full_attention" if (i + 1) % 6 == 0 else "sliding_attention" for i in range(count))
    )
    types = [*types[:-1], "full_attention"]
    ropes = {
        "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    fields = {**fields, "rope_parameters": fields.get("rope_parameters") or ropes}
    wide = {"head_dim": fields.get("global_head_dim", 512)}
    if same and fields.get("num_global_key_value_heads"):
        wide["num_key_value_heads"] = fields["num_global_key_value_heads"]
    of_layer, bias = fields.get("per_layer_config") or {}, bool(fields.get("attention_bias", False))
    lent = count - fields.get("num_kv_shared_layers", 0)
    stack = []
    for i, kind in enumerate(types):
        full, shares = kind == "full_attention", i >= lent > 0
        given = {**fields, **((of_layer.get(str(i)) or {}) if of_layer else wide if full else {})}
        mixer = attention_of(
            given, qk_norm="head", qkv_bias=bias, o_bias=bias, scale=1.0, v_norm=True, k_as_v=same and full,
            window=None if full else fields.get("sliding_window", 512),
            rope=read_rope(given, given["head_dim"], kind),
            share=max(j for j in range(lent) if types[j] == kind) if shares else None,
            whole_images=not full and fields.get("use_bidirectional_attention") == "vision",
        )  # fmt: skip
        mlp = mlp_of(fields)
        double = fields.get("use_double_wide_mlp", False) and shares
        mlp = replace(mlp, width=mlp.width * (1 + double))
        if fields.get("enable_moe_block", False):
            norms = SANDWICH._replace(before_mlp=None)  # the experts' own
            stack.append(LayerConfig(mixer, _gemma4_experts(fields, mlp), norms))
        else:
            stack.append(LayerConfig(mixer, mlp, SANDWICH))
    width = fields.get("hidden_size_per_layer_input", 256)
    return assembled(
        fields,
        stack,
        norm=NormConfig(float(fields.get("rms_norm_eps", 1e-6)), "wide"),
        embedding_scale=integer(fields, "hidden_size") ** 0.5,
        logit_softcap=fields.get("final_logit_softcapping"),
        layer_inputs=(fields.get("vocab_size_per_layer_input", 262144), width) if width else None,
        layer_scalars=True,
        tied=bool(fields.get("tie_word_embeddings", True)),
    )


def _gemma4_experts(fields: Fields, mlp: MlpConfig) -> ExpertsConfig:
    """Experts beside the dense MLP, each with norms of its own."""
    return ExpertsConfig(
        count=integer(fields, "num_experts"),
        per_token=integer(fields, "top_k_experts"),
        width=integer(fields, "moe_intermediate_size"),
        router=RouterConfig(norm=True, expert_scale=True),
        activation=mlp.activation,
        shared=SharedExpert(mlp.width, mlp=mlp),
        name="",
        norms=ExpertNorms(),
    )


def olmo3(fields: Fields) -> ModelConfig:
    fields, count = {"rope_theta": 5e5, "rms_norm_eps": 1e-5, **fields}, layer_count(fields)
    types = layer_types(
        fields, ("full_attention" if (i + 1) % 4 == 0 else "sliding_attention" for i in range(count))
    )
    bias = bool(fields.get("attention_bias", False))
    full = attention_of(fields, qk_norm="whole", qkv_bias=bias, o_bias=bias)
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
    fields = {
        "rms_norm_eps": 1e-5,
        "original_max_position_embeddings": 4096,
        **fields,
        "rope_parameters": rope,
    }
    window = fields.get("sliding_window")
    attention = attention_of(fields, fused=True, window=window, partial=1.0)
    return assembled(fields, [LayerConfig(attention, mlp_of(fields, fused=True))] * layer_count(fields))


def granite(fields: Fields) -> ModelConfig:
    """Granite 3."""
    bias = bool(fields.get("attention_bias", False))
    scale = float(fields.get("attention_multiplier", 1.0))
    attention = attention_of(fields, qkv_bias=bias, o_bias=bias, scale=scale)
    layer = LayerConfig(attention, mlp_of(fields, bias=bool(fields.get("mlp_bias", False))))
    return assembled(fields, [layer] * layer_count(fields), **_multipliers(fields))


def granite4(fields: Fields) -> ModelConfig:
    """Granite 4: Mamba2 and attention; a dense MLP in every layer, beside experts if there are any."""
    refuse(fields, hidden_act="silu")
    types = layer_types(
        {"layer_types": _older_types(fields.get("layer_types"))},
        ["linear_attention"] * layer_count(fields),
        ("linear_attention",),
    )
    bias, heads = bool(fields.get("attention_bias", False)), integer(fields, "mamba_n_heads")
    scale = float(fields.get("attention_multiplier", 1.0))
    attention = attention_of(fields, qkv_bias=bias, o_bias=bias, scale=scale)
    if fields.get("position_embedding_type") != "rope":
        attention = replace(attention, rope=None)
    inner, head_dim = (
        fields.get("mamba_expand", 2) * integer(fields, "hidden_size"),
        fields.get("mamba_d_head"),
    )
    mamba = MambaConfig(
        heads,
        head_dim if isinstance(head_dim, int) else inner // heads,
        integer(fields, "mamba_d_state"),
        fields.get("mamba_n_groups", 1),
        fields.get("mamba_d_conv", 4),
        conv_bias=bool(fields.get("mamba_conv_bias", True)),
        bias=bool(fields.get("mamba_proj_bias", False)),
        step_limits=_step_limits(fields),
    )
    mlp = MlpConfig(
        integer(fields, "shared_intermediate_size"), fused=True, name="shared_mlp",
        matrices=("input_linear", "output_linear"),
    )  # fmt: skip
    experts = mlp if not fields.get("num_local_experts", 8) else ExpertsConfig(
        count=fields.get("num_local_experts", 8),
        per_token=integer(fields, "num_experts_per_tok"),
        width=integer(fields, "intermediate_size"),
        router=RouterConfig("softmax_of_best"),
        shared=SharedExpert(mlp.width, mlp=mlp),
        name="block_sparse_moe",
    )  # fmt: skip
    mixers = {"full_attention": attention, "linear_attention": mamba}
    return assembled(fields, [LayerConfig(mixers[kind], experts) for kind in types], **_multipliers(fields))


def _multipliers(fields: Fields) -> dict[str, float]:
    return {
        "embedding_scale": float(fields.get("embedding_multiplier", 1.0)),
        "residual_scale": float(fields.get("residual_multiplier", 1.0)),
        "logit_scale": 1.0 / float(fields.get("logits_scaling", 1.0)),
    }


def _older_types(types: list[str] | None) -> list[str] | None:
    """Layers by the names that transformers has for them since version 5."""
    renamed = {"mamba": "linear_attention", "attention": "full_attention"}
    return types and [renamed.get(kind, kind) for kind in types]


def _step_limits(fields: Fields) -> tuple[float, float]:
    """transformers writes the infinite one as {"__float__": "Infinity"}."""
    low, high = fields.get("time_step_limit") or (0.0, math.inf)
    low, high = (one["__float__"] if isinstance(one, dict) else one for one in (low, high))
    return float(low), float(high)


def smollm3(fields: Fields) -> ModelConfig:
    fields, count = {"rope_theta": 2e6, **fields}, layer_count(fields)
    every, bias = fields.get("no_rope_layer_interval", 4), bool(fields.get("attention_bias", False))
    rotated = fields.get("no_rope_layers") or [(i + 1) % every != 0 for i in range(count)]
    window = fields.get("sliding_window") if fields.get("use_sliding_window", False) else None
    types = layer_types(fields, ("full_attention" if one else "sliding_attention" for one in rotated))
    attention = attention_of(fields, qkv_bias=bias, o_bias=bias)
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


def llama4(fields: Fields) -> ModelConfig:
    """Llama 4 (Scout, Maverick): rotated layers see chunks, every fourth one all; top-1 experts."""
    fields, count = {"rms_norm_eps": 1e-5, "rope_theta": 5e5, "head_dim": 128, **fields}, layer_count(fields)
    every, bias = fields.get("no_rope_layer_interval", 4), bool(fields.get("attention_bias", False))
    rotated = fields.get("no_rope_layers") or [(i + 1) % every != 0 for i in range(count)]
    types = layer_types(
        fields, ("chunked_attention" if one else "full_attention" for one in rotated), ("chunked_attention",)
    )
    norm: Literal["rotated"] | None = "rotated" if fields.get("use_qk_norm", True) else None
    attention = attention_of(
        fields, qk_norm=norm, qkv_bias=bias, o_bias=bias,
        rope=read_rope(fields, fields["head_dim"], adjacent=True),
    )  # fmt: skip
    hotter = Temperature(fields.get("attn_scale", 0.1), fields.get("floor_scale", 8192), offset=1)
    hotter = hotter if fields.get("attn_temperature_tuning", True) else None
    plain = replace(attention, rope=None, qk_norm=None, temperature=hotter)
    size = fields.get("attention_chunk_size", 8192)
    width = integer(fields, "intermediate_size")
    experts = ExpertsConfig(
        count=integer(fields, "num_local_experts"),
        per_token=fields.get("num_experts_per_tok", 1),
        width=width,
        router=RouterConfig("sigmoid", normalise=False, on_input=True),
        shared=SharedExpert(width, "shared_expert"),
        transposed=True,
        name="feed_forward",
    )
    dense = MlpConfig(integer(fields, "intermediate_size_mlp"), name="feed_forward")
    step, sparse = fields.get("interleave_moe_layer_step", 1), fields.get("moe_layers")
    sparse = range(step - 1, count, step) if sparse is None else sparse
    activation_of(fields)
    stack = []
    for i, (turned, kind) in enumerate(zip(rotated, types, strict=False)):
        mixer = attention if turned else plain
        if kind == "chunked_attention" and size is not None:
            mixer = replace(mixer, window=Chunk(size))
        stack.append(LayerConfig(mixer, experts if i in sparse else dense))
    return assembled(fields, stack)


def olmoe(fields: Fields) -> ModelConfig:
    refuse(fields, clip_qkv=None)
    bias = bool(fields.get("attention_bias", False))
    attention = attention_of(fields, qk_norm="whole", qkv_bias=bias, o_bias=bias)
    experts = ExpertsConfig(
        count=integer(fields, "num_experts"),
        per_token=integer(fields, "num_experts_per_tok"),
        width=integer(fields, "intermediate_size"),
        router=RouterConfig(normalise=bool(fields.get("norm_topk_prob", False))),
    )
    norm = NormConfig(float(fields.get("rms_norm_eps", 1e-5)))
    return assembled(fields, [LayerConfig(attention, experts)] * layer_count(fields), norm=norm)


def gpt_oss(fields: Fields) -> ModelConfig:
    fields = {"rms_norm_eps": 1e-5, "head_dim": 64, "rope_theta": 1.5e5, **fields}
    kinds = ("sliding_attention", "full_attention")
    types = layer_types(fields, (kinds[i % 2] for i in range(layer_count(fields))))
    bias = bool(fields.get("attention_bias", True))
    full = attention_of(fields, qkv_bias=bias, o_bias=bias, sinks=True)
    local = replace(full, window=fields.get("sliding_window", 128))
    count = "num_local_experts" if "num_local_experts" in fields else "num_experts"
    experts = ExpertsConfig(
        count=integer(fields, count),
        per_token=integer(fields, "num_experts_per_tok"),
        width=integer(fields, "intermediate_size"),
        router=RouterConfig("softmax_of_best", bias=True),
        activation=ClampedSwiGlu(fields.get("swiglu_alpha", 1.702), fields.get("swiglu_limit", 7.0)),
        bias=True,
        transposed=True,
        interleaved=True,
    )
    mixers = {"full_attention": full, "sliding_attention": local}
    norm = NormConfig(float(fields["rms_norm_eps"]), "wide")
    return assembled(fields, [LayerConfig(mixers[kind], experts) for kind in types], norm=norm)


def glm4_moe(fields: Fields) -> ModelConfig:
    """GLM-4.5, 4.6 and 4.7."""
    fields = {"rms_norm_eps": 1e-5, "first_k_dense_replace": 1, **fields}
    norm: Literal["head"] | None = "head" if fields.get("use_qk_norm", False) else None
    bias = bool(fields.get("attention_bias", False))
    attention = attention_of(fields, partial=0.5, qkv_bias=bias, qk_norm=norm)
    return _with_experts(fields, attention)


def deepseek_v3(fields: Fields) -> ModelConfig:
    """DeepSeek-V3, V3.1 and R1, Kimi-K2, GLM-4.7-Flash."""
    nope, rotated = integer(fields, "qk_nope_head_dim"), integer(fields, "qk_rope_head_dim")
    rope, scale = rope_fields(fields), (nope + rotated) ** -0.5
    if rope["rope_type"] != "default" and (all_dim := rope.get("mscale_all_dim")):
        scale *= (0.1 * all_dim * math.log(rope["factor"]) + 1.0 if rope["factor"] > 1 else 1.0) ** 2
    attention = LatentConfig(
        heads=integer(fields, "num_attention_heads"),
        rank=integer(fields, "kv_lora_rank"),
        nope_dim=nope,
        rope_dim=rotated,
        value_dim=integer(fields, "v_head_dim"),
        rope=read_rope(fields, rotated, adjacent=bool(fields.get("rope_interleave", True))),
        scale=scale,
        query_rank=fields.get("q_lora_rank"),
        bias=bool(fields.get("attention_bias", False)),
    )
    return _with_experts(fields, attention)


def glm_moe_dsa(fields: Fields) -> ModelConfig:
    """GLM-5, up to the context where its sparse attention sees every token: there it is plain MLA."""
    context = min(integer(fields, "max_position_embeddings"), fields.get("index_topk", 2048))
    indexers = tuple(f"model.layers.{i}.self_attn.indexer." for i in range(layer_count(fields)))
    config = deepseek_v3({"rms_norm_eps": 1e-5, **fields})
    return replace(config, max_context=context, skipped=config.skipped + indexers)


def _with_experts(fields: Fields, mixer: AttentionConfig | LatentConfig) -> ModelConfig:
    """DeepSeek's MLPs: the first layers dense, then routed experts beside shared ones."""
    width, count = integer(fields, "moe_intermediate_size"), layer_count(fields)
    dense = fields.get("first_k_dense_replace", 1 if fields["model_type"] == "glm4_moe_lite" else 3)
    types = fields.get("mlp_layer_types") or ["dense" if i < dense else "sparse" for i in range(count)]
    shared = fields.get("n_shared_experts") or 0
    experts = ExpertsConfig(
        count=integer(fields, "n_routed_experts"),
        per_token=integer(fields, "num_experts_per_tok"),
        width=width,
        router=_sigmoid_router(fields),
        shared=SharedExpert(width * shared) if shared else None,
    )
    mlp = mlp_of(fields)
    stack = [LayerConfig(mixer, mlp if kind == "dense" else experts) for kind in types]
    return assembled(fields, stack, skipped=(f"model.layers.{count}.",))  # a head for a further token


def _sigmoid_router(fields: Fields) -> RouterConfig:
    return RouterConfig(
        "sigmoid",
        normalise=bool(fields.get("norm_topk_prob", True)),
        selection_bias=True,
        groups=fields.get("n_group") or 1,
        kept_groups=fields.get("topk_group") or 1,
        scale=float(fields.get("routed_scaling_factor", 1.0)),
    )


def qwen3_5(fields: Fields) -> ModelConfig:
    """Qwen3.5, 3.6 and 3.8, dense and with experts: three gated delta nets, then gated attention."""
    every, bias = fields.get("full_attention_interval", 4), bool(fields.get("attention_bias", False))
    kinds = ["linear_attention"] * (every - 1) + ["full_attention"]
    default = (kinds * layer_count(fields))[: layer_count(fields)]
    heads = {"head_dim": 256, "partial": 0.25}
    attention = attention_of(fields, **heads, qk_norm="head", gate=True, qkv_bias=bias, o_bias=bias)
    mixers = {"full_attention": attention, "linear_attention": delta_of(fields)}
    mixers["sliding_attention"] = replace(attention, window=fields.get("sliding_window"))
    types = layer_types(fields, default, ("linear_attention",))
    mlp = mlp_of(fields) if "num_experts" not in fields else ExpertsConfig(
        count=integer(fields, "num_experts"),
        per_token=integer(fields, "num_experts_per_tok"),
        width=integer(fields, "moe_intermediate_size"),
        shared=SharedExpert(integer(fields, "shared_expert_intermediate_size"), "shared_expert", gated=True),
    )  # fmt: skip
    norm = NormConfig(float(fields.get("rms_norm_eps", 1e-6)), "offset")
    return assembled(fields, [LayerConfig(mixers[kind], mlp) for kind in types], norm=norm, skipped=MTP)


def qwen3_next(fields: Fields) -> ModelConfig:
    """Qwen3.5's layers, whose projections are stored by key head; some of them may have a dense MLP."""
    config = qwen3_5(fields)
    step, dense = fields.get("decoder_sparse_step", 1), fields.get("mlp_only_layers") or ()
    router, mlp = RouterConfig(normalise=bool(fields.get("norm_topk_prob", True))), mlp_of(fields)
    stack = []
    for i, layer in enumerate(config.stack):
        if isinstance(layer.mixer, DeltaConfig):
            layer = replace(layer, mixer=replace(layer.mixer, by_key_head=True))
        if isinstance(layer.mlp, ExpertsConfig):
            sparse = i not in dense and (i + 1) % step == 0
            layer = replace(layer, mlp=replace(layer.mlp, router=router) if sparse else mlp)
        stack.append(layer)
    return replace(config, stack=tuple(stack))


def nemotron_h(fields: Fields) -> ModelConfig:
    """Nemotron-H and Nemotron-3: a layer is Mamba2, attention without positions, an MLP or experts alone."""
    refuse(fields, mlp_hidden_act="relu2", mamba_hidden_act="silu", attention_bias=False, sliding_window=None)
    fields = {"head_dim": 128, "norm_topk_prob": True, **fields}
    letters = {"M": "linear_attention", "E": "moe", "*": "full_attention", "-": "mlp"}
    types = fields.get("layers_block_type") or fields.get("layer_types")
    types = _older_types(types) or [letters.get(c, c) for c in fields.get("hybrid_override_pattern") or ""]
    unknown = set(types) - {*letters.values()}
    if unknown or not types:
        given = f"of unknown kinds {sorted(unknown)}" if types else "missing"
        raise InvalidInputError(f"layers_block_type is {given}; allowed: {', '.join(letters.values())}")
    layers = {kind: _nemotron_layer(fields, kind) for kind in dict.fromkeys(types)}
    norm = NormConfig(float(fields.get("layer_norm_epsilon", 1e-5)), "wide")
    return assembled(fields, [layers[kind] for kind in types], norm=norm, skipped=MTP)


def _nemotron_layer(fields: Fields, kind: str) -> LayerConfig:
    before_mixer, before_mlp = NormPlacement("norm", before_mlp=None), NormPlacement(None, before_mlp="norm")
    if kind == "full_attention":
        return LayerConfig(replace(attention_of(fields), rope=None, name="mixer"), None, before_mixer)
    if kind == "moe":
        return LayerConfig(None, _nemotron_experts(fields), before_mlp)
    if kind == "mlp":
        width, bias = integer(fields, "intermediate_size"), bool(fields.get("mlp_bias", False))
        mlp = MlpConfig(width, bias, activation="relu2", gated=False, name="mixer")
        return LayerConfig(None, mlp, before_mlp)
    groups = fields.get("n_groups", 8)
    mamba = MambaConfig(
        integer(fields, "mamba_num_heads"),
        integer(fields, "mamba_head_dim"),
        integer(fields, "ssm_state_size"),
        groups,
        fields.get("conv_kernel", 4),
        conv_bias=bool(fields.get("use_conv_bias", True)),
        bias=bool(fields.get("use_bias", False)),
        norm_groups=groups,
        step_limits=_step_limits(fields),
        name="mixer",
    )
    return LayerConfig(mamba, None, before_mixer)


def _nemotron_experts(fields: Fields) -> ExpertsConfig:
    refuse(fields, mlp_bias=False)
    return ExpertsConfig(
        count=integer(fields, "n_routed_experts"),
        per_token=integer(fields, "num_experts_per_tok"),
        width=integer(fields, "moe_intermediate_size"),
        router=_sigmoid_router(fields),
        activation="relu2",
        gated=False,
        shared=SharedExpert(integer(fields, "moe_shared_expert_intermediate_size")),
        latent_width=fields.get("moe_latent_size"),
        name="mixer",
    )


FAMILIES: dict[str, Callable[[Fields], ModelConfig]] = {
    "llama": llama,
    "mistral": mistral,
    "mixtral": mixtral,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "qwen3_moe": qwen3_moe,
    "qwen3_5": qwen3_5,
    "qwen3_5_text": qwen3_5,
    "qwen3_next": qwen3_next,
    "qwen3_vl": qwen3_vl,
    "qwen3_vl_moe": qwen3_vl_moe,
    "qwen3_5_moe": qwen3_5,
    "qwen3_5_moe_text": qwen3_5,
    "gemma3": gemma3,
    "gemma3_text": gemma3,
    "gemma4": gemma4,
    "gemma4_text": gemma4,
    "olmo3": olmo3,
    "phi3": phi3,
    "granite": granite,
    "granitemoehybrid": granite4,
    "smollm3": smollm3,
    "glm4": glm4,
    "llama4": llama4,
    "llama4_text": llama4,
    "ministral3": ministral3,
    "mistral3": ministral3,
    "olmoe": olmoe,
    "gpt_oss": gpt_oss,
    "glm4_moe": glm4_moe,
    "glm4_moe_lite": deepseek_v3,
    "deepseek_v3": deepseek_v3,
    "kimi_k2": deepseek_v3,
    "kimi_k25": deepseek_v3,
    "glm_moe_dsa": glm_moe_dsa,
    "nemotron_h": nemotron_h,
}

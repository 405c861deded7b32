"""Families with attention and delta-net or Mamba layers: from a `config.json` to a `ModelConfig`."""

from __future__ import annotations

import math
from dataclasses import replace

from tinkex.engine.torch.models.architecture import (
    DeltaConfig,
    ExpertsConfig,
    LayerConfig,
    MambaConfig,
    MlpConfig,
    ModelConfig,
    RouterConfig,
    SharedExpert,
)
from tinkex.engine.torch.models.config_fields import (
    Fields,
    assembled,
    attention_of,
    delta_of,
    experts_of,
    integer,
    layer_count,
    layer_types,
    mlp_of,
    multipliers,
    refuse,
    sigmoid_router,
)
from tinkex.engine.torch.models.norms import NormConfig, NormPlacement
from tinkex.errors import InvalidInputError

MTP = ("mtp.",)  # heads for several tokens, which are not read


def granite4(fields: Fields) -> ModelConfig:
    """Granite 4: Mamba2 and attention; a dense MLP in every layer, plus experts if there are any."""
    refuse(fields, hidden_act="silu")
    types = layer_types(
        {"layer_types": _older_types(fields.get("layer_types"))},
        ["linear_attention"] * layer_count(fields),
        ("linear_attention",),
    )
    heads, scale = integer(fields, "mamba_n_heads"), float(fields.get("attention_multiplier", 1.0))
    attention = attention_of(fields, biased=True, scale=scale)
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
    return assembled(fields, [LayerConfig(mixers[kind], experts) for kind in types], **multipliers(fields))


def _older_types(types: list[str] | None) -> list[str] | None:
    """Layers by the names that transformers has for them since version 5."""
    renamed = {"mamba": "linear_attention", "attention": "full_attention"}
    return types and [renamed.get(kind, kind) for kind in types]


def _step_limits(fields: Fields) -> tuple[float, float]:
    """transformers writes the infinite one as {"__float__": "Infinity"}."""
    low, high = fields.get("time_step_limit") or (0.0, math.inf)
    low, high = (one["__float__"] if isinstance(one, dict) else one for one in (low, high))
    return float(low), float(high)


def qwen3_5(fields: Fields) -> ModelConfig:
    """Qwen3.5, 3.6 and 3.8, dense and with experts: three gated delta nets, then gated attention."""
    every = fields.get("full_attention_interval", 4)
    kinds = ["linear_attention"] * (every - 1) + ["full_attention"]
    default = (kinds * layer_count(fields))[: layer_count(fields)]
    attention = attention_of(fields, head_dim=256, partial=0.25, qk_norm="head", gate=True, biased=True)
    mixers = {"full_attention": attention, "linear_attention": delta_of(fields)}
    mixers["sliding_attention"] = replace(attention, window=fields.get("sliding_window"))
    types = layer_types(fields, default, ("linear_attention",))
    if "num_experts" in fields:
        width = integer(fields, "shared_expert_intermediate_size")
        mlp = experts_of(fields, shared=SharedExpert(width, "shared_expert", gated=True))
    else:
        mlp = mlp_of(fields)
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
    """Nemotron-H and Nemotron-3: a layer is one of Mamba2, attention without positions, MLP, experts."""
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
    return experts_of(
        fields, "n_routed_experts", router=sigmoid_router(fields), activation="relu2", gated=False,
        name="mixer", shared=SharedExpert(integer(fields, "moe_shared_expert_intermediate_size")),
        latent_width=fields.get("moe_latent_size"),
    )  # fmt: skip

"""Fields of a `config.json` that families share: read, checked, and put together to layers and a model.

No family is known here. A value that is missing, wrong or not supported is refused with the field's name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Literal

from tinkex.engine.torch.models.architecture import (
    AttentionConfig,
    DeltaConfig,
    ExpertsConfig,
    LayerConfig,
    MlpConfig,
    ModelConfig,
    RouterConfig,
)
from tinkex.engine.torch.models.norms import NormConfig, NormPlacement
from tinkex.engine.torch.models.rotary import read_rope, rope_fields
from tinkex.errors import InvalidInputError

Fields = Mapping[str, Any]
_ACTIVATIONS: dict[str, Literal["silu", "gelu_tanh"]] = {
    "silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh",
}  # fmt: skip
SANDWICH = NormPlacement(
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
)


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
    fields: Fields, *, head_dim: int | None = None, partial: float | None = None, biased: bool = False,
    **own: Any,
) -> AttentionConfig:  # fmt: skip
    """Attention; `head_dim` where the fields may leave it out, `partial` as `read_rope` has it.

    `biased`: all of its projections have a bias if `attention_bias` says so.
    """
    heads = integer(fields, "num_attention_heads")
    size: int = fields.get("head_dim") or head_dim or integer(fields, "hidden_size") // heads
    kv_heads = fields.get("num_key_value_heads") or heads
    rope = own.pop("rope", None) or read_rope(fields, size, partial=partial)
    bias = {"qkv_bias": True, "o_bias": True} if biased and fields.get("attention_bias") else {}
    return AttentionConfig(heads, kv_heads, size, rope, **bias, **own)


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


def experts_of(
    fields: Fields, count: str = "num_experts", width: str = "moe_intermediate_size", **own: Any
) -> ExpertsConfig:
    """Experts; their number and width by the names that a family has for them."""
    per_token = integer(fields, "num_experts_per_tok")
    return ExpertsConfig(integer(fields, count), per_token, integer(fields, width), **own)


def mlp_of(fields: Fields, *, bias: bool = False, fused: bool = False) -> MlpConfig:
    return MlpConfig(integer(fields, "intermediate_size"), bias, activation_of(fields), fused=fused)


def activation_of(fields: Fields) -> Literal["silu", "gelu_tanh"]:
    given = fields.get("hidden_activation") or fields.get("hidden_act") or "silu"
    if given not in _ACTIVATIONS:
        allowed = ", ".join(_ACTIVATIONS)
        raise InvalidInputError(f"hidden_act {given!r} is not supported; allowed: {allowed}")
    return _ACTIVATIONS[given]


def layer_count(fields: Fields) -> int:
    return integer(fields, "num_hidden_layers")


def layer_types(fields: Fields, default: Iterable[str], allowed: tuple[str, ...] = ()) -> list[str]:
    """What each layer attends to; `allowed` in addition to full and sliding attention."""
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


def upper_windows(fields: Fields) -> list[int | None]:
    """Qwen's sliding windows: none, or those of the upper layers, or as listed."""
    window, full = fields.get("sliding_window"), fields.get("max_window_layers", 28)
    count, asked = layer_count(fields), fields.get("use_sliding_window", False)
    types = layer_types(fields, ("full_attention" if i < full else "sliding_attention" for i in range(count)))
    return [window if asked and kind == "sliding_attention" else None for kind in types]


def multipliers(fields: Fields) -> dict[str, float]:
    return {
        "embedding_scale": float(fields.get("embedding_multiplier", 1.0)),
        "residual_scale": float(fields.get("residual_multiplier", 1.0)),
        "logit_scale": 1.0 / float(fields.get("logits_scaling", 1.0)),
    }


def sigmoid_router(fields: Fields) -> RouterConfig:
    return RouterConfig(
        "sigmoid",
        normalise=bool(fields.get("norm_topk_prob", True)),
        selection_bias=True,
        groups=fields.get("n_group") or 1,
        kept_groups=fields.get("topk_group") or 1,
        scale=float(fields.get("routed_scaling_factor", 1.0)),
    )

"""What a decoder looks like: `ModelConfig`, read from the fields of a Hugging Face `config.json`.

Promises: every field that changes the numbers is read, in the spellings of transformers 4 and 5, or the model
is refused with a message that names the field; an architecture we do not have is refused by name.
Does not know files, weights or torch modules.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from tinkex.errors import InvalidInputError

# config.json's model_type. SmolLM2 and Llama 2/3.x are "llama"; Qwen2.5 is "qwen2".
ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe")
ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")


@dataclass(frozen=True)
class Rope:
    """Rotary frequencies: `inv_freq` [head_dim / 2], and a factor on cos and sin (yarn's; else 1)."""

    inv_freq: tuple[float, ...]
    scale: float = 1.0

    def angles(self, positions_T: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin of every position, [T, head_dim / 2]."""
        inv_freq = _on_device(self.inv_freq, positions_T.device)
        angle = positions_T.to(torch.float32)[:, None] * inv_freq
        cos, sin = angle.cos(), angle.sin()
        if self.scale != 1.0:
            cos, sin = cos * self.scale, sin * self.scale
        return cos.to(dtype), sin.to(dtype)


@lru_cache
def _on_device(values: tuple[float, ...], device: torch.device) -> Tensor:
    """Copied once: a copy in every pass would make the host wait for the device."""
    with torch.inference_mode(False):
        return torch.tensor(values, dtype=torch.float32, device=device)


@dataclass(frozen=True)
class Experts:
    """A mixture of experts: `layers` have it in place of the dense MLP."""

    count: int
    per_token: int
    width: int
    normalise: bool  # the chosen experts' weights sum to one
    layers: frozenset[int]


@dataclass(frozen=True)
class ModelConfig:
    """The shape of one decoder. Ids from `vocab_size`, what may be used, to `padded_vocab` are padding."""

    arch: str
    layers: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp_width: int
    vocab_size: int
    padded_vocab: int
    max_context: int
    tied: bool
    norm_eps: float
    rope: Rope
    windows: tuple[int | None, ...]  # per layer: how many positions, itself included, a token sees; None: all
    eos_ids: tuple[int, ...] = ()
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    experts: Experts | None = None


def model_config(
    fields: Mapping[str, Any], *, vocab_size: int | None = None, eos_ids: tuple[int, ...] | None = None
) -> ModelConfig:
    """Read the fields of a `config.json`; `vocab_size` and `eos_ids` override it where known better."""
    arch = fields.get("model_type")
    if arch not in ARCHITECTURES:
        named = ", ".join(map(str, fields.get("architectures") or ())) or "no architecture named"
        raise InvalidInputError(
            f"model_type {arch!r} ({named}) is not an architecture we have: {', '.join(ARCHITECTURES)}"
        )
    if (activation := fields.get("hidden_act", "silu")) not in ("silu", "swish"):
        raise InvalidInputError(f"hidden_act {activation!r} is not supported; allowed: silu")
    heads, width, layers = (
        _integer(fields, key) for key in ("num_attention_heads", "hidden_size", "num_hidden_layers")
    )
    head_dim = fields.get("head_dim") or (128 if arch == "qwen3" else width // heads)
    padded_vocab = _integer(fields, "vocab_size")
    qwen2, attention_bias = arch == "qwen2", bool(fields.get("attention_bias", False))
    return ModelConfig(
        arch=arch,
        layers=layers,
        width=width,
        heads=heads,
        kv_heads=fields.get("num_key_value_heads") or heads,
        head_dim=head_dim,
        mlp_width=_integer(fields, "intermediate_size"),
        vocab_size=min(vocab_size or padded_vocab, padded_vocab),
        padded_vocab=padded_vocab,
        max_context=_max_context(fields),
        tied=bool(fields.get("tie_word_embeddings", False)),
        norm_eps=float(fields.get("rms_norm_eps", 1e-6)),
        rope=_rope(fields, head_dim),
        windows=_windows(fields, arch, layers),
        eos_ids=_ids(fields.get("eos_token_id")) if eos_ids is None else eos_ids,
        qkv_bias=qwen2 or (attention_bias and arch != "mistral"),
        o_bias=attention_bias and arch not in ("qwen2", "mistral"),
        mlp_bias=bool(fields.get("mlp_bias", False)) and arch == "llama",
        qk_norm=arch in ("qwen3", "qwen3_moe"),
        experts=_experts(fields, layers) if arch == "qwen3_moe" else None,
    )


def _integer(fields: Mapping[str, Any], key: str) -> int:
    value = fields.get(key)
    if not isinstance(value, int) or value <= 0:
        raise InvalidInputError(f"config.json: {key} must be a positive integer, got {value!r}")
    return value


def _ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list | tuple) else (int(value),)


def _experts(fields: Mapping[str, Any], layers: int) -> Experts:
    count = "num_experts" if "num_experts" in fields else "num_local_experts"  # transformers 4, 5
    step, dense = fields.get("decoder_sparse_step", 1), set(fields.get("mlp_only_layers") or ())
    return Experts(
        count=_integer(fields, count),
        per_token=_integer(fields, "num_experts_per_tok"),
        width=_integer(fields, "moe_intermediate_size"),
        normalise=bool(fields.get("norm_topk_prob", False)),
        layers=frozenset(i for i in range(layers) if i not in dense and (i + 1) % step == 0),
    )


def _windows(fields: Mapping[str, Any], arch: str, layers: int) -> tuple[int | None, ...]:
    """Sliding windows: all layers of Mistral, the upper ones of a Qwen that asks for them, or as listed."""
    if arch == "llama":
        return (None,) * layers
    window = fields.get("sliding_window", 4096 if arch == "mistral" else None)
    if arch != "mistral" and not fields.get("use_sliding_window", False):
        window = None
    if arch in ("mistral", "qwen3_moe"):  # one mask for all layers
        return (window,) * layers
    types = fields.get("layer_types")
    if types is None:
        full = fields.get("max_window_layers", 28)
        types = ["full_attention" if i < full else "sliding_attention" for i in range(layers)]
    if unknown := set(types) - {"full_attention", "sliding_attention"}:
        raise InvalidInputError(
            f"layer_types {sorted(unknown)} are not supported; allowed: full_attention, sliding_attention"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in types)


# -- rotary embeddings ---------------------------------------------------------------------------------


def _rope_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """One form of the two: `rope_parameters` (transformers 5), or `rope_theta` beside `rope_scaling` (4)."""
    scaling = dict(fields.get("rope_parameters") or fields.get("rope_scaling") or {})
    scaling.setdefault("rope_type", scaling.get("type", "default"))
    scaling.setdefault("rope_theta", fields.get("rope_theta", 10000.0))
    return scaling


def _max_context(fields: Mapping[str, Any]) -> int:
    given, rope = _integer(fields, "max_position_embeddings"), _rope_fields(fields)
    if rope["rope_type"] == "yarn" and (original := rope.get("original_max_position_embeddings")):
        return max(given, int(original * rope["factor"]))
    return given


def _rope(fields: Mapping[str, Any], head_dim: int) -> Rope:
    rope = _rope_fields(fields)
    kind, theta = rope["rope_type"], float(rope["rope_theta"])
    if kind not in ROPE_TYPES:
        raise InvalidInputError(f"rope_type {kind!r} is not supported; allowed: {', '.join(ROPE_TYPES)}")
    if (part := rope.get("partial_rotary_factor", fields.get("partial_rotary_factor", 1.0))) != 1.0:
        raise InvalidInputError(f"partial_rotary_factor {part} is not supported; allowed: 1.0")
    inv_freq = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    scale = 1.0
    match kind:
        case "linear":
            inv_freq = inv_freq / rope["factor"]
        case "llama3":
            inv_freq = llama3_frequencies(inv_freq, rope)
        case "yarn":
            inv_freq, scale = _yarn(inv_freq, theta, rope, fields["max_position_embeddings"])
        # "dynamic" stretches only beyond max_position_embeddings, which is where our context ends.
    return Rope(tuple(inv_freq.tolist()), scale)


def llama3_frequencies(inv_freq: Tensor, rope: Mapping[str, Any]) -> Tensor:
    """Long wavelengths are slowed by `factor`, short ones kept, those between blended."""
    low, high, factor = rope["low_freq_factor"], rope["high_freq_factor"], rope["factor"]
    turns = rope["original_max_position_embeddings"] * inv_freq / (2 * math.pi)  # within the first context
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return inv_freq * kept + inv_freq / factor * (1 - kept)


def _yarn(
    inv_freq: Tensor, theta: float, rope: Mapping[str, Any], max_positions: int
) -> tuple[Tensor, float]:
    """Blend kept and stretched frequencies over a ramp of dimensions; and the factor on cos and sin."""
    pairs, factor = len(inv_freq), rope["factor"]
    original = rope.get("original_max_position_embeddings") or max_positions

    def pair_with_turns(turns: float) -> float:
        return pairs * math.log(original / (turns * 2 * math.pi)) / math.log(theta)

    low, high = pair_with_turns(rope.get("beta_fast") or 32), pair_with_turns(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * pairs - 1)
    ramp = (torch.arange(pairs, dtype=torch.float32) - low) / max(high - low, 0.001)
    stretched = ramp.clamp(0, 1)
    return inv_freq / factor * stretched + inv_freq * (1 - stretched), _yarn_scale(rope, factor)


def _yarn_scale(rope: Mapping[str, Any], factor: float) -> float:
    def temperature(mscale: float) -> float:
        return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0

    if (given := rope.get("attention_factor")) is not None:
        return float(given)
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return temperature(rope["mscale"]) / temperature(rope["mscale_all_dim"])
    return temperature(1.0)

"""The shape of a decoder: `ModelConfig`, read from the fields of a Hugging Face `config.json`.

Every field that changes the numbers is read, in the spellings of transformers 4 and 5, or the model is
refused with a message that names the field.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tinkex.engine.torch.models.rotary import Rope, read_rope, rope_fields
from tinkex.errors import InvalidInputError

# config.json's model_type. SmolLM2 and Llama 2/3.x are "llama"; Qwen2.5 is "qwen2".
ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe")


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
    """The shape of one decoder. Ids from `vocab_size` to `padded_vocab` are padding: logits of -inf."""

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


def model_config(fields: Mapping[str, Any], *, vocab_size: int | None = None) -> ModelConfig:
    """Read the fields of a `config.json`; `vocab_size` overrides it where known better."""
    arch = fields.get("model_type")
    if arch not in ARCHITECTURES:
        named = ", ".join(map(str, fields.get("architectures") or ())) or "no architecture named"
        raise InvalidInputError(
            f"model_type {arch!r} ({named}) is not a supported architecture; supported: "
            f"{', '.join(ARCHITECTURES)}"
        )
    if (activation := fields.get("hidden_act", "silu")) not in ("silu", "swish"):
        raise InvalidInputError(f"hidden_act {activation!r} is not supported; allowed: silu")
    heads, width, layers = (
        _integer(fields, key) for key in ("num_attention_heads", "hidden_size", "num_hidden_layers")
    )
    head_dim = fields.get("head_dim") or (128 if arch == "qwen3" else width // heads)
    padded_vocab = _integer(fields, "vocab_size")
    attention_bias, eos = bool(fields.get("attention_bias", False)), fields.get("eos_token_id")
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
        rope=read_rope(fields, head_dim),
        windows=_windows(fields, arch, layers),
        eos_ids=() if eos is None else tuple(eos if isinstance(eos, list | tuple) else [int(eos)]),
        qkv_bias=arch == "qwen2" or (attention_bias and arch != "mistral"),
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


def _max_context(fields: Mapping[str, Any]) -> int:
    given, rope = _integer(fields, "max_position_embeddings"), rope_fields(fields)
    if rope["rope_type"] == "yarn" and (original := rope.get("original_max_position_embeddings")):
        return max(given, int(original * rope["factor"]))
    return given

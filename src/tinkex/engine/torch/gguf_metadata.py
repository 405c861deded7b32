"""GGUF metadata that all architectures share, from a model's config.json; `gguf_fields` has the rest.

The other direction of `gguf_families`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tinkex.engine.request import user_error
from tinkex.engine.torch.gguf_fields import Fields, global_head_dim, head_dim, rope_of
from tinkex.engine.torch.gguf_layouts import layout_of
from tinkex.engine.torch.models.rotary import llama3_frequencies


def metadata_of(fields: Fields) -> dict[str, Any]:
    """All metadata of the model, without the architecture's name in front; `fields` are the text model's."""
    size = head_dim(fields)
    values = {
        "block_count": fields["num_hidden_layers"],
        "context_length": fields["max_position_embeddings"],
        "embedding_length": fields["hidden_size"],
        "feed_forward_length": fields.get("intermediate_size"),
        "attention.head_count": fields["num_attention_heads"],
        "attention.head_count_kv": fields.get("num_key_value_heads") or fields["num_attention_heads"],
        "attention.key_length": size,
        "attention.value_length": size,
        "attention.layer_norm_rms_epsilon": float(fields.get("rms_norm_eps") or fields["layer_norm_epsilon"]),
        "rope.dimension_count": size,
        "rope.freq_base": float(rope_of(fields).get("rope_theta", fields.get("rope_theta", 10000.0))),
        "vocab_size": fields["vocab_size"],
        **_rope_scaling(rope_of(fields)),
        **layout_of(fields).more(fields),
    }
    return {key: value for key, value in values.items() if value is not None}


def _rope_scaling(rope: Fields) -> dict[str, Any]:
    kind = rope["rope_type"]
    if kind in ("default", "llama3", "proportional"):  # the factors of the latter two are a tensor
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
    """What frequencies are divided by, which llama.cpp reads as `rope_freqs.weight`: Llama 3, Gemma 4."""
    rope = rope_of(fields)
    if rope["rope_type"] == "proportional":  # a part of each head is rotated, at the whole head's frequencies
        pairs = global_head_dim(fields) // 2
        turned = int(rope.get("partial_rotary_factor", 1.0) * pairs)
        return torch.cat([torch.ones(turned), torch.full((pairs - turned,), 1e30)])
    if rope["rope_type"] != "llama3":
        return None
    size, theta = head_dim(fields), float(rope.get("rope_theta", fields.get("rope_theta", 10000.0)))
    plain = theta ** (-torch.arange(0, size, 2, dtype=torch.float32) / size)
    return plain / llama3_frequencies(plain, rope)

"""Families of models: for each `model_type` of a `config.json` a function from its fields to a `ModelConfig`.

Every field that changes the numbers is read, in the spellings of transformers 4 and 5, or the model is
refused with a message that names the field.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tinkex.engine.torch.models import dense_families, expert_families, hybrid_families
from tinkex.engine.torch.models.architecture import ModelConfig
from tinkex.engine.torch.models.config_fields import Fields
from tinkex.errors import InvalidInputError

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
# Of models that see: their towers are not read.
TOWERS = ("model.visual.", "visual.", "vision_tower.", "model.vision_tower.", "multi_modal_projector.",
          "model.multi_modal_projector.", "vision_model.", "mm_projector.",
          "model.mm_projector.")  # fmt: skip


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


FAMILIES: dict[str, Callable[[Fields], ModelConfig]] = {
    "llama": dense_families.llama,
    "mistral": dense_families.mistral,
    "mixtral": expert_families.mixtral,
    "qwen2": dense_families.qwen2,
    "qwen3": dense_families.qwen3,
    "qwen3_moe": expert_families.qwen3_moe,
    "qwen3_5": hybrid_families.qwen3_5,
    "qwen3_5_text": hybrid_families.qwen3_5,
    "qwen3_next": hybrid_families.qwen3_next,
    "qwen3_vl": dense_families.qwen3_vl,
    "qwen3_vl_moe": expert_families.qwen3_vl_moe,
    "qwen3_5_moe": hybrid_families.qwen3_5,
    "qwen3_5_moe_text": hybrid_families.qwen3_5,
    "gemma3": dense_families.gemma3,
    "gemma3_text": dense_families.gemma3,
    "gemma4": expert_families.gemma4,
    "gemma4_text": expert_families.gemma4,
    "olmo3": dense_families.olmo3,
    "phi3": dense_families.phi3,
    "granite": dense_families.granite,
    "granitemoehybrid": hybrid_families.granite4,
    "smollm3": dense_families.smollm3,
    "glm4": dense_families.glm4,
    "llama4": expert_families.llama4,
    "llama4_text": expert_families.llama4,
    "ministral3": dense_families.ministral3,
    "mistral3": dense_families.ministral3,
    "olmoe": expert_families.olmoe,
    "gpt_oss": expert_families.gpt_oss,
    "glm4_moe": expert_families.glm4_moe,
    "glm4_moe_lite": expert_families.deepseek_v3,
    "deepseek_v3": expert_families.deepseek_v3,
    "kimi_k2": expert_families.deepseek_v3,
    "kimi_k25": expert_families.deepseek_v3,
    "glm_moe_dsa": expert_families.glm_moe_dsa,
    "nemotron_h": hybrid_families.nemotron_h,
}

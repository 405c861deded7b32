"""Tiny random models of the families that the cookbook names, in the shape that their released files have.

    path = tiny_family(tmp_path / "tiny", "Qwen/Qwen3.5-9B")

`config.json` and the names of tensors are those of a released model: nested where it sees, experts stacked
or one by one. Layers are few and narrow. Knows nothing of our own code.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

_SHAPE: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "initializer_range": 0.1,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_HYBRID: dict[str, Any] = {
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e7,
        "partial_rotary_factor": 0.5,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
}
_TOWER: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 16,
    "num_heads": 2,
    "intermediate_size": 16,
    "patch_size": 4,
    "num_position_embeddings": 16,
    "out_hidden_size": 32,
    "deepstack_visual_indexes": [0],
}
_LATENT: dict[str, Any] = {
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}
_KIMI_TOWER: dict[str, Any] = {
    "num_hidden_layers": 1,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "patch_size": 4,
    "pos_emb_height": 4,
    "pos_emb_width": 4,
}
_NEMOTRON: dict[str, Any] = {
    "layers_block_type": ["linear_attention", "moe", "full_attention", "linear_attention", "moe"],
    "mamba_num_heads": 4,
    "mamba_head_dim": 12,
    "ssm_state_size": 8,
    "n_groups": 2,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 40,
}
# The class of transformers, the fields that differ from those above, and those of the part that sees.
FAMILIES: dict[str, tuple[str, dict[str, Any], dict[str, Any] | None]] = {
    "meta-llama/Llama-3.2-1B": ("Llama", {"tie_word_embeddings": True}, None),
    "meta-llama/Llama-3.1-8B-Instruct": ("Llama", {}, None),
    "Qwen/Qwen3-8B": ("Qwen3", {}, None),
    "Qwen/Qwen3-30B-A3B": ("Qwen3Moe", {**_EXPERTS, "norm_topk_prob": True}, None),
    "Qwen/Qwen3-VL-30B-A3B-Instruct": (
        "Qwen3VLMoe",
        {
            **_EXPERTS,
            "rope_parameters": {
                "rope_type": "default", "rope_theta": 5e6, "mrope_section": [4, 2, 2],
                "mrope_interleaved": True,
            },
        },
        _TOWER,
    ),
    "Qwen/Qwen3.5-4B": ("Qwen3_5", {**_HYBRID, "tie_word_embeddings": True}, _TOWER),
    "Qwen/Qwen3.5-9B": ("Qwen3_5", _HYBRID, _TOWER),
    "Qwen/Qwen3.6-35B-A3B": (
        "Qwen3_5Moe",
        {**_HYBRID, **_EXPERTS, "shared_expert_intermediate_size": 16},
        _TOWER,
    ),
    "openai/gpt-oss-20b": (
        "GptOss",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 32, "sliding_window": 8},
        None,
    ),
    "deepseek-ai/DeepSeek-V3.1": ("DeepseekV3", {**_LATENT, "n_group": 2, "head_dim": 8}, None),
    "moonshotai/Kimi-K2-Thinking": ("DeepseekV3", {**_LATENT, "head_dim": 8}, None),
    "moonshotai/Kimi-K2.6": ("Kimi_K25", {**_LATENT, "head_dim": 8}, _KIMI_TOWER),
    "zai-org/GLM-5.3": (
        "GlmMoeDsa",
        {**_LATENT, "head_dim": 8, "index_topk": 2048, "index_head_dim": 16, "index_n_heads": 2},
        None,
    ),
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": ("NemotronH", _NEMOTRON, None),
    "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16": (
        "NemotronH",
        {**_NEMOTRON, "moe_latent_size": 20},
        None,
    ),
}  # fmt: skip


def tiny_family(path: Path, name: str, **overrides: Any) -> Path:
    """Write the model that stands for `name` to `path`; `overrides` are fields of its text config."""
    kind, own, tower = FAMILIES[name]
    fields, head = _SHAPE | own | overrides, "ForCausalLM"
    if tower is not None:
        head, tied = "ForConditionalGeneration", fields.pop("tie_word_embeddings", False)
        fields = {"text_config": fields, "vision_config": tower, "tie_word_embeddings": tied}
    config = getattr(transformers, f"{kind}Config")(**fields)
    torch.manual_seed(0)
    model = getattr(transformers, kind + head)(config).to(torch.float32)
    model.save_pretrained(path)
    _as_released(path, name)
    return path


def _as_released(path: Path, name: str) -> None:
    """Name and lay out the tensors as in the files of the hub, where transformers does otherwise."""
    tensors = load_file(path / "model.safetensors")
    config = json.loads((path / "config.json").read_text())
    if "Kimi" in name:
        config["model_type"] = "kimi_k25" if "vision_config" in config else "kimi_k2"
        layers = re.compile(r"^language_model\.model\.blocks\.")
        tensors = {layers.sub("language_model.model.layers.", key): tensors[key] for key in tensors}
    elif config["model_type"] == "glm_moe_dsa":
        del config["layer_types"]  # the cookbook's transformers does not know them
    elif config["model_type"] == "nemotron_h":
        letters = {"linear_attention": "M", "moe": "E", "full_attention": "*"}
        config["hybrid_override_pattern"] = "".join(letters[kind] for kind in config.pop("layers_block_type"))
        del config["mtp_layers_block_type"]
    elif config["model_type"] == "qwen3_5_moe":
        tensors = _stacked(tensors)
    elif config["model_type"] == "qwen3_vl_moe":
        for key in [key for key in tensors if ".experts." in key]:
            tensors[key] = tensors[key].transpose(1, 2).contiguous()
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    (path / "config.json").write_text(json.dumps(config, indent=2))


def _stacked(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The experts of each layer in one tensor: gate and up one below the other, and down."""
    stacked, stems = {}, {key.split(".experts.")[0] for key in tensors if ".experts." in key}
    for stem in sorted(stems):
        count = sum(key.startswith(f"{stem}.experts.") for key in tensors) // 3
        gate, up, down = (
            torch.stack([tensors.pop(f"{stem}.experts.{i}.{part}_proj.weight") for i in range(count)])
            for part in ("gate", "up", "down")
        )
        stacked[f"{stem}.experts.gate_up_proj"] = torch.cat((gate, up), 1)
        stacked[f"{stem}.experts.down_proj"] = down
    return tensors | stacked

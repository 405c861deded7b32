"""Tiny random models of every family we have, as Hugging Face directories written by transformers.

    path = tiny_model(tmp_path, "qwen3", num_hidden_layers=3)

Weights are fp32, the same for the same arguments, and larger than a fresh model's, so that a wrong norm, bias
or rotation shows in the logits. Knows nothing of our own code: what is written here is an oracle's input.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
import transformers

# llama2, qwen2 and qwen3_moe are written in several shards, the others in one file.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama2": ("Llama", {"num_key_value_heads": 4, "rms_norm_eps": 1e-5, "shards": True}),
    "llama3": (
        "Llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            },
            "eos_token_id": [2, 3],
        },
    ),
    "mistral": ("Mistral", {"sliding_window": 12}),
    "qwen2": ("Qwen2", {"shards": True}),
    "qwen3": ("Qwen3", {"head_dim": 24}),
    "smollm2": (
        "Llama",
        {"hidden_size": 48, "num_attention_heads": 3, "num_key_value_heads": 1, "tied": True},
    ),
    "qwen3_moe": (
        "Qwen3Moe",
        {
            "head_dim": 24,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
            "shards": True,
        },
    ),
}
_QWEN3_VL: dict[str, Any] = {
    "head_dim": 24,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e4,
        "mrope_section": [6, 3, 3],
        "mrope_interleaved": True,
    },
    "vision_config": {
        "depth": 2,
        "hidden_size": 32,
        "num_heads": 2,
        "intermediate_size": 64,
        "patch_size": 4,
        "num_position_embeddings": 16,
        "out_hidden_size": 64,
        "deepstack_visual_indexes": [0],
    },
}
# Families that `test_families` tries alone; a class may be given with its module where it is not exported.
MORE: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3": (
        "Gemma3Text",
        {
            "num_hidden_layers": 7,
            "head_dim": 16,
            "sliding_window": 8,
            "query_pre_attn_scalar": 24,
            "tied": True,
            "vocab_size": 256,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "gemma3 that sees": (
        "Gemma3",
        {
            "head_dim": 16,
            "num_hidden_layers": 2,
            "sliding_window": 8,
            "sliding_window_pattern": 2,
            "tied": True,
            "vision_config": {
                "model_type": "siglip_vision_model",
                "hidden_size": 16,
                "intermediate_size": 16,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "image_size": 56,
                "patch_size": 14,
            },
        },
    ),
    "qwen3_vl": ("Qwen3VL", _QWEN3_VL),
    "qwen3_vl_moe": (
        "Qwen3VLMoe",
        _QWEN3_VL | {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    ),
    "gemma4 E": (
        "Gemma4Text",
        {
            "num_hidden_layers": 7,
            "layer_types": [
                "sliding_attention",
                "full_attention",
                "sliding_attention",
                "full_attention",
                "sliding_attention",
                "sliding_attention",
                "full_attention",
            ],
            "head_dim": 16,
            "global_head_dim": 32,
            "num_kv_shared_layers": 3,
            "use_double_wide_mlp": True,
            "sliding_window": 8,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 320,
            "final_logit_softcapping": 5.0,
            "tied": True,
        },
    ),
    "gemma4": (
        "Gemma4Text",
        {
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "head_dim": 16,
            "global_head_dim": 32,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "sliding_window": 8,
            "hidden_size_per_layer_input": 0,
            "final_logit_softcapping": 5.0,
            "tied": True,
        },
    ),
    "kimi_k25": (
        "Kimi_K25",
        {
            "num_key_value_heads": 4,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
            "n_group": 1,
            "topk_group": 1,
            "moe_intermediate_size": 32,
            "first_k_dense_replace": 1,
            "q_lora_rank": 32,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 12,
            "vision_config": {
                "num_hidden_layers": 1,
                "hidden_size": 32,
                "num_attention_heads": 2,
                "intermediate_size": 64,
                "patch_size": 4,
                "pos_emb_height": 4,
                "pos_emb_width": 4,
            },
        },
    ),
    "mistral3 that sees": (
        "Mistral3",
        {
            "model_type": "ministral3",
            "head_dim": 16,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 16.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "original_max_position_embeddings": 16,
                "llama_4_scaling_beta": 0.1,
            },
            "vision_config": {
                "model_type": "pixtral",
                "hidden_size": 16,
                "intermediate_size": 16,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "image_size": 56,
                "patch_size": 14,
            },
        },
    ),
    "olmo3": (
        "Olmo3",
        {
            "num_hidden_layers": 4,
            "sliding_window": 8,
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "yarn",
                    "rope_theta": 5e5,
                    "factor": 4.0,
                    "original_max_position_embeddings": 64,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 5e5},
            },
        },
    ),
    "phi4": ("Phi3", {"sliding_window": 20, "pad_token_id": 0}),
    "phi4 mini": (
        "Phi3",
        {
            "tied": True,
            "pad_token_id": 0,
            "original_max_position_embeddings": 3,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.75,
                "short_factor": [1.0] * 6,
                "long_factor": [1.0, 1.2, 1.5, 2.0, 3.0, 4.0],
            },
        },
    ),
    "granite3": (
        "Granite",
        {
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.1,
            "logits_scaling": 8.0,
            "tied": True,
        },
    ),
    "smollm3": ("SmolLM3", {"num_hidden_layers": 4, "no_rope_layer_interval": 2, "pad_token_id": 0}),
    "glm4": ("Glm4", {"head_dim": 16, "pad_token_id": 0}),
    "ministral3": (
        "Ministral3",
        {
            "head_dim": 16,
            "sliding_window": 40,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 16.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "original_max_position_embeddings": 16,
                "llama_4_scaling_beta": 0.1,
            },
        },
    ),
}
# With recurrent layers: `test_hybrids` asks them all of that, and what states need.
_HYBRID: dict[str, Any] = {
    "num_hidden_layers": 4,
    "head_dim": 32,
    "rms_norm_eps": 1e-2,  # with less, norms make much of rounding in results that are almost zero
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 12,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
        "mrope_section": [2, 1, 1],
    },
}
_EXPERTS = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 24,
}
_GRANITE: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    "rms_norm_eps": 1e-2,
    "shared_intermediate_size": 48,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "intermediate_size": 32,
    "mamba_n_heads": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 16,
    "embedding_multiplier": 4.0,
    "residual_multiplier": 0.5,
    "attention_multiplier": 0.1,
    "logits_scaling": 2.0,
}
_NEMOTRON: dict[str, Any] = {
    "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "linear_attention", "moe"],
    "layer_norm_epsilon": 1e-2,
    "head_dim": 24,
    "mamba_num_heads": 8,
    "mamba_head_dim": 12,
    "ssm_state_size": 16,
    "n_groups": 2,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 40,
    "routed_scaling_factor": 2.5,
}
HYBRIDS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_5": ("Qwen3_5Text", _HYBRID),
    "qwen3_5_moe": ("Qwen3_5MoeText", _HYBRID | _EXPERTS),
    "qwen3_next": ("Qwen3Next", _HYBRID | _EXPERTS | {"mlp_only_layers": [1]}),
    "nemotron3": ("NemotronH", _NEMOTRON),
    "nemotron3 latent": ("NemotronH", _NEMOTRON | {"moe_latent_size": 24, "use_bias": True}),
    "granite4": ("GraniteMoeHybrid", _GRANITE),
    "granite4 dense": (
        "GraniteMoeHybrid",
        _GRANITE
        | {
            "num_local_experts": 0,
            "position_embedding_type": "rope",
            "mamba_proj_bias": True,
            "mamba_n_groups": 1,
            "tied": True,
        },
    ),
}
# With their towers: `test_hybrids` and `test_expert_families` export their adapters.
SEEING: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_5_moe that sees": (
        "Qwen3_5Moe",
        _HYBRID | _EXPERTS | {"vision_config": _QWEN3_VL["vision_config"]},
    ),
    "llama4 that sees": (
        "Llama4",
        {
            "head_dim": 16,
            "num_local_experts": 4,
            "intermediate_size": 48,
            "intermediate_size_mlp": 56,
            "interleave_moe_layer_step": 2,
            "attention_chunk_size": 12,
            "vision_config": {
                "hidden_size": 32,
                "num_attention_heads": 2,
                "num_hidden_layers": 1,
                "intermediate_size": 64,
                "image_size": 28,
                "vision_output_dim": 32,
                "projector_input_dim": 32,
                "projector_output_dim": 32,
            },
        },
    ),
}
# With experts: `test_expert_families` asks them all of that.
_OF_EXPERTS: dict[str, Any] = {"intermediate_size": 48, "num_hidden_layers": 3, "pad_token_id": 0}
_LATENT: dict[str, Any] = {
    "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_shared_experts": 2,
    "q_lora_rank": 32, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12,
    "num_key_value_heads": 4, "routed_scaling_factor": 1.8, "rms_norm_eps": 1e-5,
}  # fmt: skip
EXPERTS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", {"num_local_experts": 6, "num_experts_per_tok": 2}),
    "olmoe": ("Olmoe", {"num_experts": 6, "num_experts_per_tok": 2, "rms_norm_eps": 1e-5}),
    "gpt_oss": (
        "GptOss",
        {
            "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8,
            "intermediate_size": 64,
            "num_hidden_layers": 4,
        },
    ),
    "glm4_moe": (
        "Glm4Moe",
        {
            "head_dim": 16, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
            "n_shared_experts": 1, "first_k_dense_replace": 1, "use_qk_norm": True, "attention_bias": True,
            "routed_scaling_factor": 1.5,
        },
    ),
    "gemma4 with experts": (
        "Gemma4Text",
        {
            "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2,
            "head_dim": 16, "global_head_dim": 32, "num_global_key_value_heads": 1, "attention_k_eq_v": True,
            "sliding_window": 8, "hidden_size_per_layer_input": 0, "final_logit_softcapping": 5.0,
            "enable_moe_block": True, "num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 32,
            "tie_word_embeddings": False,
        },
    ),
    "llama4": (
        "Llama4Text",
        {
            "num_hidden_layers": 4, "head_dim": 16, "num_local_experts": 6, "num_experts_per_tok": 1,
            "intermediate_size_mlp": 56, "interleave_moe_layer_step": 2, "attention_chunk_size": 12,
            "no_rope_layer_interval": 4, "floor_scale": 7, "attn_scale": 0.3,
            "rope_parameters": {
                "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
                "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
            },
        },
    ),
    "llama4 of two experts": (
        "Llama4Text",
        {
            "num_hidden_layers": 2, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2,
            "intermediate_size_mlp": 56, "use_qk_norm": False, "attention_chunk_size": 40,
            "no_rope_layers": [0, 1], "attn_temperature_tuning": False,
        },
    ),
    "glm4_moe_lite": ("Glm4MoeLite", _LATENT),
    "deepseek_v3": (
        "DeepseekV3",
        _LATENT | {
            "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "max_position_embeddings": 512,
            "rope_parameters": {
                "rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "mscale": 1.0,
                "mscale_all_dim": 1.0, "original_max_position_embeddings": 64, "beta_fast": 32,
                "beta_slow": 1,
            },
        },
    ),
    "glm_moe_dsa": (
        "GlmMoeDsa",
        _LATENT | {"index_topk": 128, "index_head_dim": 16, "index_n_heads": 2, "first_k_dense_replace": 1,
                   "head_dim": 8},
    ),
}  # fmt: skip
_JAMBA: dict[str, Any] = {
    "num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8,
    "mamba_dt_rank": 4, "intermediate_size": 48, "rms_norm_eps": 1e-3, "num_experts": 1,
}  # fmt: skip
# Architectures that have no family of ours: transformers computes them. `test_families` asks them the same.
UNKNOWN: dict[str, tuple[str, dict[str, Any]]] = {
    "starcoder2": ("Starcoder2", {"sliding_window": 20, "use_bias": True, "tied": True}),
    "stablelm": ("StableLm", {"use_qkv_bias": True, "qk_layernorm": True}),
    "cohere2": (
        "Cohere2",
        {"num_hidden_layers": 4, "sliding_window": 8, "sliding_window_pattern": 2, "logit_scale": 0.25},
    ),
    "gpt_bigcode": (
        "GPTBigCode",
        {"n_positions": 256, "n_embd": 64, "n_layer": 2, "n_head": 4, "tied": True},
    ),
    "jamba": ("Jamba", _JAMBA),
    "jamba with experts": ("Jamba", _JAMBA | {"num_experts": 4, "expert_layer_offset": 1}),
}
_SHAPE: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def tiny_model(directory: Path, family: str, *, seed: int = 0, **overrides: Any) -> Path:
    """Write a tiny random model of `family` under `directory` and return its path.

    `overrides` are fields of the transformers config; `shards=True` splits the weights over several files.
    """
    class_name, own = (FAMILIES | MORE | HYBRIDS | SEEING | EXPERTS | UNKNOWN)[family]
    fields = _SHAPE | (_OF_EXPERTS if family in EXPERTS else {}) | own | overrides
    sharded = fields.pop("shards", False)
    if fields.pop("tied", False):
        fields.setdefault("tie_word_embeddings", True)
    head = "ForCausalLM"
    if vision := fields.pop("vision_config", None):
        head, tied = "ForConditionalGeneration", fields.get("tie_word_embeddings", False)
        fields = {"text_config": fields, "vision_config": vision, "tie_word_embeddings": tied}
    config = getattr(transformers, class_name + "Config")(**fields)
    model = getattr(transformers, class_name.removesuffix("Text") + head)(config).to(torch.float32)
    _randomise(model, seed, 0.0 if family.startswith(("qwen3_5", "qwen3_next")) else 1.0)
    path = directory / f"{family}-{seed}"
    model.save_pretrained(path, max_shard_size="60KB" if sharded else "1GB")
    return path


def _randomise(model: torch.nn.Module, seed: int, norm: float) -> None:
    """`norm` is the mean of norms' weights: 0 where the model adds 1 to them."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if re.search(r"norm(_\d)?\.weight$", name):
                weight.copy_((1.0 if "linear_attn" in name else norm) + 0.2 * noise)
            else:
                weight.copy_(noise * (0.3 if weight.dim() == 1 else 1.2 / weight.shape[-1] ** 0.5))
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.copy_(1 + 0.2 * torch.randn(buffer.shape, generator=generator))
            elif name.endswith("e_score_correction_bias"):
                buffer.copy_(0.3 * torch.randn(buffer.shape, generator=generator))


def reference_model(path: Path) -> Any:
    """The same directory through transformers, plain attention, no gradients to its weights.

    Logits of ids that its tokenizer does not have are -inf; without a tokenizer it has all.
    """
    nested = "vision_config" in json.loads((path / "config.json").read_text())
    auto = transformers.AutoModelForImageTextToText if nested else transformers.AutoModelForCausalLM
    model = auto.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    if (path / "tokenizer.json").is_file():
        vocab = len(transformers.AutoTokenizer.from_pretrained(path))

        def mask(module: torch.nn.Module, args: Any, output: Any) -> None:
            beyond = torch.arange(output.logits.shape[-1]) >= vocab
            output.logits = output.logits.masked_fill(beyond, -torch.inf)

        model.register_forward_hook(mask)
    return model.eval().requires_grad_(False)


def reference_logits(path: Path, sequences: list[list[int]]) -> list[torch.Tensor]:
    """transformers' logits of each sequence, computed one by one: [length, vocabulary] each."""
    model = reference_model(path)
    with torch.no_grad():
        return [model(torch.tensor([ids]), use_cache=False).logits[0] for ids in sequences]


def tiny_tokenizer(directory: Path) -> Path:
    """Write a byte-level tokenizer of 259 ids (ids 256-258 special, ChatML template) into `directory`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|endoftext|>",
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
    )
    fast.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    fast.save_pretrained(directory)
    return directory

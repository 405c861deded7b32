"""Shapes of released models, as config.json has them, and hosted Tinker's LoRA parameters per rank."""

from __future__ import annotations

from typing import Any


def dense(kind: str, width: int, layers: int, heads: int, kv_heads: int, mlp: int, **more: Any) -> dict:
    return {
        "model_type": kind,
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 128,
        "intermediate_size": mlp,
        "vocab_size": 151936 if kind.startswith("qwen") else 128256,
        "max_position_embeddings": 40960,
    } | more


def qwen3_moe(width: int, layers: int, heads: int, expert: int) -> dict[str, Any]:
    experts = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": expert}
    return dense("qwen3_moe", width, layers, heads, 4, 6144, **experts)


def gpt_oss(layers: int, experts: int) -> dict[str, Any]:
    own = {"num_local_experts": experts, "num_experts_per_tok": 4, "head_dim": 64, "vocab_size": 201088}
    return dense("gpt_oss", 2880, layers, 64, 8, 2880, **own)


def latent(kind: str, width: int, layers: int, heads: int, mlp: int, **own: int) -> dict[str, Any]:
    """The shapes that DeepSeek-V3 has, unless `own` says otherwise."""
    fields = {
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "n_shared_experts": 1,
        "first_k_dense_replace": 3,
    }
    return dense(kind, width, layers, heads, heads, mlp, **(fields | own))


DEEPSEEK = latent("deepseek_v3", 7168, 61, 128, 18432, vocab_size=129280)
KIMI = latent(
    "kimi_k2", 7168, 61, 64, 18432, n_routed_experts=384, first_k_dense_replace=1, vocab_size=163840
)
GLM = latent(
    "glm_moe_dsa", 6144, 78, 64, 12288, q_lora_rank=2048, qk_nope_head_dim=192, v_head_dim=256,
    vocab_size=154880,
)  # fmt: skip


def qwen3_5(width: int, layers: int, heads: tuple[int, int], mlp: int, **own: int) -> dict[str, Any]:
    """`heads` are query and kv heads; 4B and 9B have 32 value heads."""
    linear = {"num_key_heads": 16, "num_value_heads": 32, "key_head_dim": 128, "value_head_dim": 128}
    fields = {f"linear_{key}": value for key, value in linear.items()} | {"linear_conv_kernel_dim": 4}
    fields |= {"head_dim": 256, "vocab_size": 248320}
    return dense("qwen3_5_moe" if own.get("num_experts") else "qwen3_5", width, layers, *heads, mlp,
                 **(fields | own))  # fmt: skip


def qwen3_5_moe(count: int, per_token: int, width: int) -> dict[str, int]:
    return {
        "num_experts": count,
        "num_experts_per_tok": per_token,
        "moe_intermediate_size": width,
        "shared_expert_intermediate_size": width,
    }


def nemotron(width: int, layers: str, kv: tuple[int, int], mamba: int, **experts: int) -> dict[str, Any]:
    """`kv` are query and kv heads; `mamba` is the number of heads."""
    return {
        "model_type": "nemotron_h",
        "hidden_size": width,
        "hybrid_override_pattern": layers,
        "num_attention_heads": kv[0],
        "num_key_value_heads": kv[1],
        "mamba_num_heads": mamba,
        "mamba_head_dim": 64,
        "ssm_state_size": 128,
        "num_experts_per_tok": 6,
        "vocab_size": 131072,
        "max_position_embeddings": 262144,
    } | experts


NANO = nemotron(
    2688, "ME" * 23 + "*" * 6, (32, 2), 64, n_routed_experts=128, moe_intermediate_size=1856,
    moe_shared_expert_intermediate_size=3712,
)  # fmt: skip
SUPER = nemotron(
    4096, "ME" * 40 + "*" * 8, (32, 2), 128, n_routed_experts=512, moe_intermediate_size=2688,
    moe_shared_expert_intermediate_size=5376, moe_latent_size=1024,
)  # fmt: skip


def inside(kind: str, text: dict[str, Any]) -> dict[str, Any]:
    """The model that sees, around a text model."""
    return {"model_type": kind, "text_config": text, "vision_config": {}}


# name: config.json, and parameters per rank of mlp, attn and unembed
MODELS: dict[str, tuple[dict[str, Any], tuple[int, int, int]]] = {
    "Llama-3.1-8B": (dense("llama", 4096, 32, 32, 8, 14336), (1_769_472, 851_968, 132_352)),
    "Llama-3.1-70B": (dense("llama", 8192, 80, 64, 8, 28672), (8_847_360, 4_096_000, 136_448)),
    "Llama-3.2-1B": (dense("llama", 2048, 16, 32, 8, 8192, head_dim=64), (491_520, 212_992, 130_304)),
    "Llama-3.2-3B": (dense("llama", 3072, 28, 24, 8, 8192), (946_176, 573_440, 131_328)),
    "Qwen3-4B": (dense("qwen3", 2560, 36, 32, 8, 9728), (1_327_104, 737_280, 154_496)),
    "Qwen3-8B": (dense("qwen3", 4096, 36, 32, 8, 12288), (1_769_472, 958_464, 156_032)),
    "Qwen3-32B": (dense("qwen3", 5120, 64, 64, 8, 25600), (5_898_240, 2_490_368, 157_056)),
    "Qwen3-30B-A3B": (qwen3_moe(2048, 48, 32, 768), (14_450_688, 835_584, 153_984)),
    "Qwen3-235B-A22B": (qwen3_moe(4096, 94, 64, 1536), (56_598_528, 3_176_448, 156_032)),
    "Qwen3.5-4B": (qwen3_5(2560, 32, (16, 4), 9216), (1_130_496, 897_024, 250_880)),
    "Qwen3.5-9B": (qwen3_5(4096, 32, (16, 4), 12288), (1_572_864, 1_130_496, 252_416)),
    "Qwen3.5-27B": (
        qwen3_5(5120, 64, (24, 4), 17408, linear_num_value_heads=48),
        (4_325_376, 2_965_504, 253_440),
    ),
    "Qwen3.5-35B-A3B": (
        qwen3_5(2048, 40, (16, 2), 512, **qwen3_5_moe(256, 8, 512)),
        (16_281_600, 1_013_760, 250_368),
    ),
    "Qwen3.5-397B-A17B": (
        qwen3_5(4096, 60, (32, 2), 1024, linear_num_value_heads=64, **qwen3_5_moe(512, 10, 1024)),
        (96_030_720, 2_841_600, 252_416),
    ),
    "Qwen3-VL-30B-A3B": (
        inside("qwen3_vl_moe", qwen3_moe(2048, 48, 32, 768)),
        (14_450_688, 835_584, 153_984),
    ),
    "Qwen3-VL-235B-A22B": (
        inside("qwen3_vl_moe", qwen3_moe(4096, 94, 64, 1536)),
        (56_598_528, 3_176_448, 156_032),
    ),
    "gpt-oss-20b": (gpt_oss(24, 32), (6_842_880, 497_664, 203_968)),
    "gpt-oss-120b": (gpt_oss(36, 128), (40_124_160, 746_496, 203_968)),
    "DeepSeek-V3.1": (DEEPSEEK, (94_307_328, 2_440_000, 136_448)),
    "Kimi-K2": (KIMI, (144_583_680, 1_940_288, 171_008)),
    "Kimi-K2.5": (inside("kimi_k25", KIMI), (144_583_680, 1_940_288, 171_008)),
    "Nemotron-3-Nano-30B-A3B": (NANO, (11_346_176, 584_832, 133_760)),
    "Nemotron-3-Super-120B-A12B": (SUPER, (111_349_760, 1_675_264, 135_168)),
    "GLM-5.3": (GLM, (121_356_288, 2_920_320, 161_024)),
}

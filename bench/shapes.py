"""The models of the engine benchmark, written as Hugging Face directories.

Real architectures with random weights: speed does not depend on their values, so nothing is downloaded.
SmolLM2 takes its real ones if the test suite's GGUF file is at hand. Also what a token costs at the least,
for shares of the hardware's limits. Knows neither our engine's classes nor peft's.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

RANK = 32
SMOLLM2_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def _shape(arch: str, width: int, layers: int, heads: tuple[int, int, int], mlp: int, vocab: int, tied: bool):
    """`heads` are query heads, kv heads and the width of one."""
    names = {"llama": "Llama", "qwen3": "Qwen3", "qwen3_moe": "Qwen3Moe"}
    names |= {"qwen3_5_text": "Qwen3_5", "qwen3_5_moe_text": "Qwen3_5Moe", "gpt_oss": "GptOss"}
    name = f"{names[arch]}ForCausalLM"
    return {
        "architectures": [name],
        "model_type": arch,
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "head_dim": heads[2],
        "intermediate_size": mlp,
        "vocab_size": vocab,
        "tie_word_embeddings": tied,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5 if arch == "llama" else 1e-6,
        "rope_theta": 100000.0 if arch == "llama" else 1000000.0,
        "max_position_embeddings": 40960,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def _hybrid(
    width: int, layers: int, heads: tuple[int, int, int], mlp: int, values: int, arch: str = "qwen3_5_text",
    tied: bool = False,
):  # fmt: skip
    """Three gated delta nets of 16 key heads and `values` value heads of 128, then attention."""
    linear = {"num_key_heads": 16, "num_value_heads": values, "key_head_dim": 128, "value_head_dim": 128}
    return _shape(arch, width, layers, heads, mlp, 248320, tied) | {
        **{f"linear_{key}": value for key, value in linear.items()},
        "linear_conv_kernel_dim": 4,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e7,
            "partial_rotary_factor": 0.25,
            "mrope_section": [11, 11, 10],
        },
    }


def _gpt_oss(layers: int, experts: int):
    """Of one width throughout; every other layer sees 128 positions."""
    yarn = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
    return _shape("gpt_oss", 2880, layers, (64, 8, 64), 2880, 201088, tied=False) | {
        "num_local_experts": experts,
        "num_experts_per_tok": 4,
        "sliding_window": 128,
        "attention_bias": True,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150000.0,
        "rope_scaling": yarn | {"original_max_position_embeddings": 4096},
        "max_position_embeddings": 131072,
    }


SHAPES: dict[str, dict[str, Any]] = {
    "line": _shape("llama", 256, 4, (4, 2, 64), 768, 4096, tied=False),
    "small-10m": _shape("llama", 256, 8, (4, 2, 64), 704, 8192, tied=False),
    "small": _shape("llama", 384, 8, (6, 2, 64), 1024, 16384, tied=False),
    "small-moe": _shape("qwen3_moe", 384, 8, (6, 2, 64), 1024, 16384, tied=False)
    | {"num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 384, "norm_topk_prob": True},
    "smollm2-135m": _shape("llama", 576, 30, (9, 3, 64), 1536, 49152, tied=True),
    "qwen3-0.6b": _shape("qwen3", 1024, 28, (16, 8, 128), 3072, 151936, tied=True),
    "qwen3.5-0.8b": _hybrid(1024, 24, (8, 2, 256), 3584, 16, tied=True),
    "qwen3.5-9b": _hybrid(4096, 32, (16, 4, 256), 12288, 32),
    "qwen3.5-35b-a3b": _hybrid(2048, 40, (16, 2, 256), 0, 32, "qwen3_5_moe_text")
    | {"num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512}
    | {"shared_expert_intermediate_size": 512},
    "qwen3-8b": _shape("qwen3", 4096, 36, (32, 8, 128), 12288, 151936, tied=False),
    "qwen3-30b-a3b": _shape("qwen3_moe", 2048, 48, (32, 4, 128), 6144, 151936, tied=False)
    | {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True},
    "gpt-oss-20b": _gpt_oss(24, 32),
    "gpt-oss-120b": _gpt_oss(36, 128),
}
SHAPES |= {f"qwen3-8b-{scheme}": SHAPES["qwen3-8b"] for scheme in ("nf4", "fp8")}

# How the weights of layers, or of experts alone, are kept, and bytes of a weight with its share of a scale.
PACKED = {"qwen3-8b-nf4": "nf4", "qwen3-8b-fp8": "fp8", "gpt-oss-20b": "mxfp4", "gpt-oss-120b": "mxfp4"}
_PACKED_BYTES = {"nf4": 0.5 + 2 / 64, "fp8": 1.0, "mxfp4": 0.5 + 2 / 32}
GPU_SHAPES = (  # of `--device cuda`
    "qwen3-0.6b",
    "qwen3-8b",
    "qwen3-30b-a3b",
    "qwen3.5-9b",
    "qwen3.5-35b-a3b",
    *PACKED,
)


def write_model(shape: str, directory: Path, device: str) -> str:
    """A model of `shape` under `directory`; returns what both sides load."""
    path = directory / shape
    path.mkdir()
    (path / "config.json").write_text(json.dumps(SHAPES[shape]))
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    weights = _real_weights(shape) or _random_weights(SHAPES[shape], device, dtype)
    save_file(
        {name: w.to(dtype).contiguous().cpu() for name, w in weights.items()}, path / "model.safetensors"
    )
    return str(path)


def _real_weights(shape: str) -> dict[str, torch.Tensor]:
    cache = Path(os.environ.get("TINKEX_TEST_CACHE") or Path.home() / ".cache" / "tinkex-tests")
    if shape != "smollm2-135m" or not (cache / SMOLLM2_GGUF).exists():
        return {}
    from tinkex.engine.torch.load import load_decoder

    return load_decoder(cache / SMOLLM2_GGUF).weights()


def _random_weights(config: dict[str, Any], device: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    import transformers

    with torch.device("meta"):
        fields = {key: value for key, value in config.items() if key != "model_type"}
        model = getattr(transformers, config["architectures"][0])(
            transformers.AutoConfig.for_model(config["model_type"], **fields)
        )
    torch.manual_seed(0)
    weights = {}
    for name, meta in model.named_parameters():  # a tied head is not among them
        weight = torch.ones(meta.shape, dtype=dtype, device=device)
        weights[name] = weight if name.endswith("norm.weight") else weight.normal_(std=0.02)
        weights[name] = weights[name].cpu()
    return weights


# -- what a token costs at the least -------------------------------------------------------------------


def expert_count(shape: str) -> int:
    return SHAPES[shape].get("num_experts") or SHAPES[shape].get("num_local_experts") or 0


def _parameters(shape: str, requests: int | None = None) -> tuple[float, float, float]:
    """Weights of mixers and routers, of MLPs or experts, and of the head, that a token is multiplied with.

    With `requests`: those that a step of so many reads, if each draws its experts at random.
    """
    c, layers, experts = SHAPES[shape], SHAPES[shape]["num_hidden_layers"], expert_count(shape)
    heads, kv = (c[key] * c["head_dim"] for key in ("num_attention_heads", "num_key_value_heads"))
    mlp: float = 3 * c["intermediate_size"]
    if experts:
        used = best = c["num_experts_per_tok"]
        if requests is not None:
            used = experts * (1 - (1 - best / experts) ** requests)
        mlp = used * 3 * c.get("moe_intermediate_size", c["intermediate_size"])
        mlp += 3 * c.get("shared_expert_intermediate_size", 0)
    attention, recurrent = _mixers(c)
    gates = heads if recurrent else 0  # of attention, in models that have recurrent layers
    keys, values = _delta_widths(c)
    mixers = attention * (2 * heads + 2 * kv + gates) + layers * experts
    mixers += recurrent * (2 * keys + 3 * values + 2 * c.get("linear_num_value_heads", 0))
    return tuple(c["hidden_size"] * part for part in (mixers, layers * mlp, c["vocab_size"]))  # type: ignore[return-value]


def _mixers(config: dict[str, Any]) -> tuple[int, int]:
    """How many layers have attention, and how many a gated delta net: three of four where there are any."""
    layers = config["num_hidden_layers"]
    attention = layers // 4 if "linear_num_key_heads" in config else layers
    return attention, layers - attention


def _delta_widths(config: dict[str, Any]) -> tuple[int, int]:
    """Of a delta net's keys and values."""
    keys, values = (config.get(f"linear_num_{kind}_heads", 0) for kind in ("key", "value"))
    return keys * config.get("linear_key_head_dim", 0), values * config.get("linear_value_head_dim", 0)


def training_flops(shape: str) -> float:
    """A token's products with the frozen weights, forward and backward; LoRA and attention aside."""
    return 4.0 * sum(_parameters(shape))


def step_bytes(shape: str, itemsize: int, cached_tokens: float, requests: int) -> float:
    """What one decoding step must move: the weights in use and the keys and values of `cached_tokens`, which
    are read, and the recurrent states in fp32, which are read and written.
    """
    c, (mixers, mlp, head) = SHAPES[shape], _parameters(shape, requests)
    (attention, recurrent), (keys, values) = _mixers(c), _delta_widths(c)
    kv = 2 * attention * c["num_key_value_heads"] * c["head_dim"]
    inputs = (c.get("linear_conv_kernel_dim", 1) - 1) * (2 * keys + values)
    states = requests * recurrent * (c.get("linear_key_head_dim", 0) * values + inputs)
    packed = 0.0 if shape not in PACKED else mlp if expert_count(shape) else mixers + mlp
    read = _PACKED_BYTES[PACKED[shape]] * packed if packed else 0.0
    return read + itemsize * (mixers + mlp - packed + head + kv * cached_tokens) + 2 * 4 * states

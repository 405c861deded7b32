"""A hub of the families that the cookbook names: tiny random models in the shape of released ones.

    python -m tests.compat.cookbook.released DIRECTORY

Each has the configuration, the special ids and the vocabulary of its model where a package has the real
tokenizer, and a stand-in otherwise. ROWS is which renderer is tried on which of them.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import torch

from tests.compat.cookbook.families import tiny_family
from tests.compat.cookbook.hub import kept
from tests.compat.cookbook.vocabularies import VOCABULARIES, write_tokenizer

# A model: which one of `families` stands for it, its tokenizer, the size of its vocabulary, its renderers.
MODELS: dict[str, tuple[str, str, int, str]] = {
    "Qwen/Qwen3-8B": ("Qwen/Qwen3-8B", "qwen3", 151936, "qwen3 qwen3_disable_thinking"),
    "Qwen/Qwen3-30B-A3B-Instruct-2507": ("Qwen/Qwen3-30B-A3B", "qwen3", 151936, "qwen3_instruct"),
    "Qwen/Qwen3-VL-30B-A3B-Instruct": (
        "Qwen/Qwen3-VL-30B-A3B-Instruct", "qwen3", 151936, "qwen3_vl_instruct",
    ),
    "Qwen/Qwen3.5-4B": (
        "Qwen/Qwen3.5-4B", "qwen3_5", 248320, "qwen3_5 qwen3_5_disable_thinking qwen3_5_preserve_thinking",
    ),
    "Qwen/Qwen3.5-9B-Base": ("Qwen/Qwen3.5-9B", "qwen3_5", 248320, "role_colon"),
    "Qwen/Qwen3.6-35B-A3B": ("Qwen/Qwen3.6-35B-A3B", "qwen3_5", 248320, "qwen3_5"),
    "Qwen/Qwen3.8-27B": (
        "Qwen/Qwen3.5-9B", "qwen3_5", 248320,
        "qwen3_8_xhigh_reasoning qwen3_8_disable_thinking qwen3_8_medium_reasoning qwen3_8_low_reasoning",
    ),
    "openai/gpt-oss-20b": (
        "openai/gpt-oss-20b", "gpt_oss", 201088, "gpt_oss_no_sysprompt gpt_oss_medium_reasoning",
    ),
    "deepseek-ai/DeepSeek-V3.1": (
        "deepseek-ai/DeepSeek-V3.1", "deepseek", 129280, "deepseekv3 deepseekv3_thinking",
    ),
    "moonshotai/Kimi-K2-Thinking": ("moonshotai/Kimi-K2-Thinking", "stand-in", 320, "kimi_k2"),
    "moonshotai/Kimi-K2.5": (
        "moonshotai/Kimi-K2.6", "stand-in", 320, "kimi_k25 kimi_k25_disable_thinking",
    ),
    "moonshotai/Kimi-K2.6": (
        "moonshotai/Kimi-K2.6", "stand-in", 320,
        "kimi_k26 kimi_k26_disable_thinking kimi_k26_preserve_thinking",
    ),
    "zai-org/GLM-5.3": (
        "zai-org/GLM-5.3", "stand-in", 320, "glm5_3_max_reasoning glm5_3_low_reasoning glm5_3_high_reasoning",
    ),
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": (
        "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "stand-in", 320,
        "nemotron3 nemotron3_disable_thinking nemotron3_preserve_thinking",
    ),
    "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16": (
        "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16", "stand-in", 320, "nemotron3_low_thinking",
    ),
    "nvidia/NVIDIA-Nemotron-3-Ultra-550B-A55B-BF16": (
        "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16", "stand-in", 320,
        "nemotron3_ultra nemotron3_ultra_disable_thinking nemotron3_ultra_medium_thinking "
        "nemotron3_ultra_preserve_thinking",
    ),
    "meta-llama/Llama-3.1-8B-Instruct": ("meta-llama/Llama-3.1-8B-Instruct", "stand-in", 320, "llama3"),
    "meta-llama/Llama-3.2-1B": ("meta-llama/Llama-3.2-1B", "stand-in", 320, "role_colon"),
}  # fmt: skip
ROWS = [f"{model}:{renderer}" for model, row in MODELS.items() for renderer in row[3].split()]
# Renderers of models that we do not load, and why.
NOT_TRIED = {
    "deepseekv4_1": "DeepSeek-V4.1 (deepseek_v4) is not loaded",
    "tml_v0": "Inkling (inkling_mm_model) is not loaded",
}


def released() -> Path:
    """The hub of these very sources."""
    return kept("released", ("families.py", "released.py", "vocabularies.py"), __name__)


def build(directory: Path) -> None:
    ends = {kind: write_tokenizer(kind, directory / "tokenizers" / kind) for kind in VOCABULARIES}
    for name, (family, kind, size, _) in MODELS.items():
        tiny_family(directory / name, family, vocab_size=size, eos_token_id=ends[kind])
        shutil.copytree(directory / "tokenizers" / kind, directory / name, dirs_exist_ok=True)
    shutil.rmtree(directory / "tokenizers")


if __name__ == "__main__":
    torch.set_num_threads(1)
    build(Path(sys.argv[1]))

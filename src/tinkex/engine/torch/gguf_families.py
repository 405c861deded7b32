"""What the GGUF files of each architecture say in their own way: fields of a `config.json`, and tensors.

An entry of `GGUF_FAMILIES` is an architecture (`general.architecture`) that we read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor


class GgufMetadata(Protocol):
    """Metadata by key; `{arch}` in one stands for the architecture's name."""

    def get(self, key: str, default: Any = None) -> Any: ...
    def require(self, key: str) -> Any: ...


def _nothing_more(file: GgufMetadata) -> dict[str, Any]:
    return {}


def _as_stored(file: GgufMetadata, name: str, tensor: Tensor) -> Tensor:
    return tensor


@dataclass(frozen=True)
class GgufFamily:
    """How to read one architecture."""

    model_type: str
    class_name: str  # in transformers
    fields: Callable[[GgufMetadata], dict[str, Any]] = _nothing_more  # beside those of every file
    undo: Callable[[GgufMetadata, str, Tensor], Tensor] = _as_stored  # what the converter did to a tensor


def _halves(file: GgufMetadata, name: str, tensor: Tensor) -> Tensor:
    """Rotary pairs from neighbours (0, 1), (2, 3) … of a head back to halves (0, C/2), (1, C/2 + 1) …"""
    if ".attn_q." not in name and ".attn_k." not in name:
        return tensor
    heads = file.require("{arch}.attention.head_count")
    if ".attn_k." in name:
        heads = file.get("{arch}.attention.head_count_kv", heads)
    return tensor.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)


def _offset_norms(file: GgufMetadata, name: str, tensor: Tensor) -> Tensor:
    """Norms that multiply by 1 + w are stored as that."""
    return tensor - 1.0 if name.endswith("norm.weight") else tensor


def _qwen3moe(file: GgufMetadata) -> dict[str, Any]:
    return {
        "num_experts": file.require("{arch}.expert_count"),
        "num_experts_per_tok": file.require("{arch}.expert_used_count"),
        "moe_intermediate_size": file.require("{arch}.expert_feed_forward_length"),
        "norm_topk_prob": True,  # the file does not say; every qwen3moe file is read so
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _gemma3(file: GgufMetadata) -> dict[str, Any]:
    heads, width = file.require("{arch}.attention.head_count"), file.require("{arch}.embedding_length")
    # The file does not say it; of the released models only the largest, of 62 layers, has another.
    largest = file.require("{arch}.block_count") == 62
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": width // heads if largest else file.require("{arch}.attention.key_length"),
        "sliding_window": file.require("{arch}.attention.sliding_window"),
        "rope_local_base_freq": file.get("{arch}.rope.freq_base_swa", 10000.0),
        "final_logit_softcapping": file.get("{arch}.final_logit_softcapping"),
    }


# By general.architecture. Mistral files call themselves "llama".
GGUF_FAMILIES: dict[str, GgufFamily] = {
    "llama": GgufFamily("llama", "LlamaForCausalLM", undo=_halves),
    "qwen2": GgufFamily("qwen2", "Qwen2ForCausalLM"),
    "qwen3": GgufFamily("qwen3", "Qwen3ForCausalLM"),
    "qwen3moe": GgufFamily("qwen3_moe", "Qwen3MoeForCausalLM", _qwen3moe),
    "gemma3": GgufFamily("gemma3_text", "Gemma3ForCausalLM", _gemma3, _offset_norms),
}

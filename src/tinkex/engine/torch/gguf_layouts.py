"""How llama.cpp wants each architecture: names and shapes of tensors; metadata is in `gguf_fields`.

An entry of `GGUF_LAYOUTS` is a `model_type` that we write; llama.cpp assumes some settings of each
architecture, and a model with another value is refused with the setting's name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tinkex.engine.request import user_error
from tinkex.engine.torch import gguf_fields
from tinkex.engine.torch.gguf_families import _VALUE_HEADS
from tinkex.engine.torch.gguf_fields import Fields

Names = Mapping[str, tuple[str, ...]]
Turn = Callable[[Fields, str, Tensor], Tensor]  # config.json, the GGUF name, the tensor as it is stored


def _as_stored(fields: Fields, name: str, tensor: Tensor) -> Tensor:
    return tensor


def _neighbours(fields: Fields, name: str, tensor: Tensor) -> Tensor:
    """Rotary pairs from halves (0, C/2), (1, C/2 + 1) … of a head to neighbours (0, 1), (2, 3) …"""
    if ".attn_q." not in name and ".attn_k." not in name:
        return tensor
    heads = fields["num_attention_heads"]
    if ".attn_k." in name:
        heads = fields.get("num_key_value_heads") or heads
    return tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def _plus_one(fields: Fields, name: str, tensor: Tensor) -> Tensor:
    return tensor.float() + 1.0 if name.endswith("norm.weight") else tensor


def _next_turned(fields: Fields, name: str, tensor: Tensor) -> Tensor:
    """Delta nets: norms with 1 added, decays as they are used, no axes of size one."""
    part = name.split(".", 2)[-1]
    if part == "ssm_a":
        return -tensor.float().exp()
    if part == "ffn_gate_inp_shexp.weight":
        return tensor[0]
    if part == "ssm_conv1d.weight":
        return tensor[:, 0]
    return tensor if part == "ssm_norm.weight" else _plus_one(fields, name, tensor)


def _tiled(fields: Fields, name: str, tensor: Tensor) -> Tensor:
    """The same, with value heads in another order: the first of every key head, then the second …"""
    part, tensor = name.split(".", 2)[-1], _next_turned(fields, name, tensor)
    if part not in _VALUE_HEADS:
        return tensor
    keys, values = fields["linear_num_key_heads"], fields["linear_num_value_heads"]
    before, axis = _VALUE_HEADS[part]
    rows = before * keys * fields["linear_key_head_dim"]
    first, grouped = tensor.split([rows, tensor.shape[axis] - rows], axis)
    turned = grouped.unflatten(axis, (keys, values // keys, -1)).transpose(axis, axis + 1)
    return torch.cat([first, turned.flatten(axis, axis + 2)], axis)


def _nothing_more(fields: Fields) -> dict[str, Any]:
    return {}


@dataclass(frozen=True)
class GgufLayout:
    """One architecture of llama.cpp's."""

    arch: str
    more: Callable[[Fields], dict[str, Any]] = _nothing_more  # in addition to what every architecture has
    turn: Turn = _as_stored
    # Where the `gguf` package's table of names has nothing or something else: endings of our names, or of
    # stored tensors that are written whole, and the tensors of the file that they become.
    names: Callable[[Fields], Names] = _nothing_more


def _latent_turned(fields: Fields, name: str, tensor: Tensor) -> Tensor:
    """The matrix from latents to keys and values as two, head by head; that of the keys transposed."""
    keys, values = fields["qk_nope_head_dim"], fields["v_head_dim"]
    if name.endswith(("attn_k_b.weight", "attn_v_b.weight")):
        heads = tensor.unflatten(0, (fields["num_attention_heads"], keys + values))
        return heads[:, :keys].transpose(1, 2) if "attn_k_b" in name else heads[:, keys:]
    return tensor


def _state_turned(fields: Fields, name: str, tensor: Tensor) -> Tensor:
    """Mamba2: decays and skips as columns, norms by group, the convolution without its middle axis."""
    part = name.split(".", 2)[-1]
    if part == "ssm_a":
        return -tensor.float().exp()[:, None]
    if part == "ssm_d":
        return tensor[:, None]
    if part == "ssm_conv1d.weight":
        return tensor[:, 0]
    if part == "ssm_norm.weight":
        return tensor.unflatten(0, (fields.get("mamba_n_groups") or fields["n_groups"], -1))
    return tensor


def _granite_names(fields: Fields) -> Names:
    shared = "_shexp" if fields.get("num_local_experts") else ""
    parts = {
        r"input_linear\.weight": (f"ffn_gate{shared}.weight", f"ffn_up{shared}.weight"),
        r"output_linear\.weight": (f"ffn_down{shared}.weight",),
    }
    experts = {
        rf"block_sparse_moe\.experts\.\d+\.{part}_proj\.weight": (f"ffn_{part}_exps.weight",)
        for part in ("gate", "up", "down")
    }
    return {**_STATES, **experts} | {rf"shared_mlp\.{ours}": theirs for ours, theirs in parts.items()}


def _granite_turned(fields: Fields, name: str, tensor: Tensor) -> Tensor:
    """One matrix for gate and up becomes two."""
    if fields.get("num_local_experts"):
        halves = {".ffn_gate_shexp.": 0, ".ffn_up_shexp.": 1}
    else:
        halves = {".ffn_gate.": 0, ".ffn_up.": 1}
    for part, half in halves.items():
        if part in name:
            return tensor.chunk(2)[half]
    return _state_turned(fields, name, tensor)


_NEXT: Names = {r"linear_attn\.in_proj_ba\.weight": ("ssm_ba.weight",)}
_LATENT: Names = {r"self_attn\.kv_b_proj\.weight": ("attn_k_b.weight", "attn_v_b.weight")}
_STATES: Names = {
    rf"{mixer}\.{ours}": (theirs,)
    for mixer in ("mamba", "mixer")
    for ours, theirs in {
        r"in_proj\.weight": "ssm_in.weight",
        r"conv1d\.weight": "ssm_conv1d.weight",
        r"conv1d\.bias": "ssm_conv1d.bias",
        "dt_bias": "ssm_dt.bias",
        "A_log": "ssm_a",
        "D": "ssm_d",
        r"norm\.weight": "ssm_norm.weight",
        r"out_proj\.weight": "ssm_out.weight",
    }.items()
}
_NEMOTRON: Names = _STATES | {
    rf"mixer\.{ours}": (theirs,)
    for ours, theirs in {
        **{rf"{part}_proj\.weight": f"attn_{part}.weight" for part in "qkv"},
        r"o_proj\.weight": "attn_output.weight",
        r"gate\.weight": "ffn_gate_inp.weight",
        r"gate\.e_score_correction_bias": "exp_probs_b.bias",
        **{rf"{part}_proj\.weight": f"ffn_{part}.weight" for part in ("up", "down")},
        **{rf"experts\.\d+\.{part}_proj\.weight": f"ffn_{part}_exps.weight" for part in ("up", "down")},
        **{rf"shared_experts\.{part}_proj\.weight": f"ffn_{part}_shexp.weight" for part in ("up", "down")},
        r"fc1_latent_proj\.weight": "ffn_latent_down.weight",
        r"fc2_latent_proj\.weight": "ffn_latent_up.weight",
    }.items()
}
_GEMMA4: Names = {
    "layer_scalar": ("layer_output_scale.weight",),
    r"router\.proj\.weight": ("ffn_gate_inp.weight",),
    r"router\.scale": ("ffn_gate_inp.scale",),
    r"router\.per_expert_scale": ("ffn_down_exps.scale",),
    r"experts\.gate_up_proj": ("ffn_gate_up_exps.weight",),
}
REFUSED = {"glm_moe_dsa": "llama.cpp needs the indexer of GLM-5, which is not read here"}
# By model_type. A text model inside one that sees is written as the text model that it is.
GGUF_LAYOUTS: dict[str, GgufLayout] = {
    "llama": GgufLayout("llama", gguf_fields.llama, _neighbours),
    "mistral": GgufLayout("llama", gguf_fields.llama, _neighbours),
    "mixtral": GgufLayout("llama", gguf_fields.mixtral, _neighbours),
    "qwen2": GgufLayout("qwen2"),
    "qwen3": GgufLayout("qwen3"),
    "qwen3_vl": GgufLayout("qwen3"),
    "qwen3_moe": GgufLayout("qwen3moe", gguf_fields.qwen3moe),
    "qwen3_vl_moe": GgufLayout("qwen3moe", gguf_fields.qwen3moe),
    **dict.fromkeys(("qwen3_5", "qwen3_5_text"), GgufLayout("qwen35", gguf_fields.qwen35, _tiled)),
    **dict.fromkeys(
        ("qwen3_5_moe", "qwen3_5_moe_text"), GgufLayout("qwen35moe", gguf_fields.qwen35moe, _tiled)
    ),
    "qwen3_next": GgufLayout("qwen3next", gguf_fields.qwen3next, _next_turned, lambda _: _NEXT),
    **dict.fromkeys(
        ("deepseek_v3", "kimi_k2", "kimi_k25", "glm4_moe_lite"),
        GgufLayout("deepseek2", gguf_fields.deepseek2, _latent_turned, lambda _: _LATENT),
    ),
    **dict.fromkeys(("llama4", "llama4_text"), GgufLayout("llama4", gguf_fields.llama4)),
    "granitemoehybrid": GgufLayout(
        "granitehybrid", gguf_fields.granitehybrid, _granite_turned, _granite_names
    ),
    "nemotron_h": GgufLayout("nemotron_h", gguf_fields.nemotron, _state_turned, lambda _: _NEMOTRON),
    **dict.fromkeys(
        ("gemma4", "gemma4_text"), GgufLayout("gemma4", gguf_fields.gemma4, names=lambda _: _GEMMA4)
    ),
    "olmo3": GgufLayout("olmo2", gguf_fields.olmo3),
    **dict.fromkeys(("ministral3", "mistral3"), GgufLayout("mistral3", gguf_fields.mistral3, _neighbours)),
    "gpt_oss": GgufLayout("gpt-oss", gguf_fields.gpt_oss),
    "glm4": GgufLayout("glm4", gguf_fields.partial),
    "glm4_moe": GgufLayout("glm4moe", gguf_fields.glm4moe),
    **dict.fromkeys(("gemma3", "gemma3_text"), GgufLayout("gemma3", gguf_fields.gemma3, _plus_one)),
    "granite": GgufLayout("granite", gguf_fields.granite, _neighbours),
    "phi3": GgufLayout("phi3", gguf_fields.phi3),
    "smollm3": GgufLayout("smollm3", gguf_fields.smollm3, _neighbours),
    "olmoe": GgufLayout("olmoe", gguf_fields.expert_fields),
}


def layout_of(fields: Fields) -> GgufLayout:
    model_type = fields["model_type"]
    if model_type not in GGUF_LAYOUTS:
        why = REFUSED.get(model_type, "its layout in llama.cpp is not known to us")
        raise user_error(
            f"model_type {model_type!r} is not written as GGUF: {why}. Those that are: "
            f"{', '.join(GGUF_LAYOUTS)}. llama.cpp's own converter reads what the format merged writes"
        )
    layout = GGUF_LAYOUTS[model_type]
    if model_type == "nemotron_h" and "moe" in fields["layers_block_type"]:
        return replace(layout, arch="nemotron_h_moe")
    return layout

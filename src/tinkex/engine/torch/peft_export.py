"""Write an adapter so that PEFT loads it onto a transformers model whose experts are stacked tensors.

Our files (`adapter_files`) have experts' w1, w2 and w3, with the factor that experts share stored once. PEFT
adapts `gate_up_proj` and `down_proj`: the shared factor is repeated, and gate and up become one
block-diagonal pair of twice the rank. So do the parts of in_proj_qkv(z), and Mamba's gate_proj and x_proj,
the first rows of in_proj. Everything else is copied. Loads no base model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import pad

from tinkex.engine.request import user_error
from tinkex.engine.torch.adapter_files import (
    CONFIG,
    WEIGHTS,
    new_directory,
    present,
    read_facts,
    read_peft_config,
    verify,
    write_json,
)
from tinkex.engine.torch.models.architecture import ModelConfig
from tinkex.engine.torch.models.delta_net import by_key_head
from tinkex.engine.torch.models.families import model_config

_EXPERTS = ".experts."


def export_peft(
    adapter_dir: Path,
    out_dir: Path,
    *,
    base_dir: Path | None = None,
    nested: bool = False,
    overwrite: bool = False,
) -> None:
    """Write the adapter of `adapter_dir` to `out_dir` as PEFT reads it.

    `base_dir`, of which config.json is read, is needed for Qwen3-Next and for a model with Mamba layers.
    `nested`: for the whole model that has the text model inside, such as one that sees.

    >>> export_peft(Path("adapters/final"), Path("adapters/final-peft"))    # doctest: +SKIP
    """
    verify(adapter_dir, (WEIGHTS, CONFIG))
    config, tensors = read_peft_config(adapter_dir), present(load_file(adapter_dir / WEIGHTS))
    # an adapter's file names its base's architecture
    base = read_facts(adapter_dir).get("base", {}).get("fingerprint", "")
    if nested:
        tensors = _named_inside(tensors, base)
    stems = [name.split(".x_proj.lora_A")[0] for name in tensors if ".x_proj.lora_A." in name]
    # Jamba has an x_proj too, which is a matrix of its own
    mamba = [stem for stem in stems if f"{stem}.gate_proj.lora_A.weight" in tensors]
    if mamba:
        rows = _in_proj_rows(adapter_dir, base_dir)
        for stem in mamba:
            _join_rows(tensors, stem, ("gate_proj", "x_proj"), "in_proj", rows)
    _stack_experts(tensors, config, base)
    key_heads = _base(adapter_dir, base_dir).stored_key_heads if base.startswith("qwen3_next-") else 0
    if fused := join_qkv(tensors, key_heads):
        tensors, parts = fused, "qkvz" if key_heads else "qkv"
        _retarget(config, tuple(f"in_proj_{part}" for part in parts), f"in_proj_{parts}")
    if mamba:
        _retarget(config, ("gate_proj", "x_proj"), "in_proj")
    if nested:  # not the modules of the same names in its tower
        heads = [r"(.*\.)?lm_head" for name in config["target_modules"] if name == "lm_head"]
        inner = "|".join(name for name in config["target_modules"] if name != "lm_head")
        config["target_modules"] = "|".join([rf"(.*\.)?language_model\..*\.({inner})", *heads])
    with new_directory(out_dir, overwrite=overwrite) as temporary:
        save_file(tensors, temporary / WEIGHTS, {"format": "pt"})
        write_json(temporary / CONFIG, config)


def _named_inside(tensors: dict[str, Tensor], base: str) -> dict[str, Tensor]:
    """The tensors by their names in the model that has the text model inside."""
    outer, inner = "base_model.model.model.", "base_model.model.model.language_model."
    if base.startswith("llama4"):  # which has the head inside too
        outer, inner = "base_model.model.", "base_model.model.language_model."
    return {name.replace(outer, inner, 1): tensor for name, tensor in tensors.items()}


def _stack_experts(tensors: dict[str, Tensor], config: dict[str, Any], base: str) -> None:
    """Replace experts' w1, w2 and w3 by adapters of gate_up_proj and down_proj, which `config` then names."""
    stems = sorted({name.split(_EXPERTS)[0] + _EXPERTS[:-1] for name in tensors if _EXPERTS in name})
    # gpt-oss has the rows of gate and up in turn
    in_turn, gated = base.startswith("gpt_oss-"), False
    for stem in stems:
        first, down = _pair(tensors, f"{stem}.w1"), _pair(tensors, f"{stem}.w2")
        if gated := f"{stem}.w3.lora_A.weight" in tensors:
            (a1, b1), (a3, b3) = first, _pair(tensors, f"{stem}.w3")
            first = torch.cat((a1, a3), 1), _block_diagonal(b1, b3, in_turn)
        # PEFT wraps a module once for each parameter: the first of them is the innermost.
        for name, (a_ERI, b_EOR) in ((f"{stem}.base_layer", first), (stem, down)):
            if base.startswith("llama4"):  # stored [E, in, out], which PEFT takes for [E, out, in]
                a_ERI, b_EOR = b_EOR.transpose(1, 2), a_ERI.transpose(1, 2)
            tensors[f"{name}.lora_A.weight"] = a_ERI.flatten(0, 1).contiguous()
            tensors[f"{name}.lora_B.weight"] = b_EOR.permute(1, 2, 0).flatten(1).contiguous()
    if not stems:
        return
    parts = sorted({name.rsplit(".", 3)[-3] for name in tensors if ".lora_A." in name})
    # PEFT takes modules of these names for experts of old files: dense ones are named as parameters
    dense = [name for name in parts if name in ("gate_proj", "up_proj", "down_proj")]
    config["target_modules"] = [name for name in parts if name not in (*dense, "experts", "base_layer")]
    experts = _EXPERTS.strip(".")
    config["target_parameters"] = [f"{experts}.down_proj", f"{experts}.{'gate_' if gated else ''}up_proj"]
    config["target_parameters"] += [f"{name}.weight" for name in dense]
    if gated:  # gate and up side by side: twice the rank at the same scale
        config["rank_pattern"] = {f"{experts}.gate_up_proj": 2 * config["r"]}
        config["alpha_pattern"] = {f"{experts}.gate_up_proj": 2 * config["lora_alpha"]}


def _pair(tensors: dict[str, Tensor], name: str) -> tuple[Tensor, Tensor]:
    """Take out one module's A [E, R, I] and B [E, O, R], of as many experts on both sides."""
    a, b = (tensors.pop(f"{name}.lora_{side}.weight") for side in "AB")
    count = max(len(a), len(b))
    return a.expand(count, -1, -1), b.expand(count, -1, -1)


def join_qkv(tensors: Mapping[str, Tensor], key_heads: int = 0) -> dict[str, Tensor] | None:
    """All tensors, in_proj_q, in_proj_k and in_proj_v as block-diagonal pairs; None: there are none.

    With `key_heads`, in_proj_z belongs to them, and rows are in the order of the key heads.
    """
    parts = "qkvz" if key_heads else "qkv"
    stems = [name.split(".in_proj_q.")[0] for name in tensors if name.endswith(".in_proj_q.lora_A.weight")]
    joined = dict(tensors)
    for stem in stems:
        sizes = [len(joined[f"{stem}.in_proj_{part}.lora_B.weight"]) for part in parts]
        _join_rows(joined, stem, tuple(f"in_proj_{part}" for part in parts), f"in_proj_{parts}")
        if key_heads:
            rows = joined[name := f"{stem}.in_proj_qkvz.lora_B.weight"].split(sizes)
            joined[name] = by_key_head(rows, key_heads)
    return joined if stems else None


def _join_rows(
    tensors: dict[str, Tensor], stem: str, parts: tuple[str, ...], whole: str, rows: int = 0
) -> None:
    """Replace adapters of a matrix's first parts by a block-diagonal one of all its rows (0: theirs)."""
    a, b = ([tensors.pop(f"{stem}.{part}.lora_{side}.weight") for part in parts] for side in "AB")
    both = torch.block_diag(*b)
    tensors[f"{stem}.{whole}.lora_A.weight"] = torch.cat(a)
    tensors[f"{stem}.{whole}.lora_B.weight"] = pad(both, (0, 0, 0, max(0, rows - len(both))))


def _retarget(config: dict[str, Any], parts: tuple[str, ...], whole: str) -> None:
    """Name one module in place of its parts, with the rank and alpha of all of them."""
    config["target_modules"] = sorted({*config["target_modules"], whole} - {*parts})
    for key, size in (("rank_pattern", config["r"]), ("alpha_pattern", config["lora_alpha"])):
        config[key] = {**config.get(key, {}), whole: len(parts) * size}


def _base(adapter_dir: Path, base_dir: Path | None) -> ModelConfig:
    if base_dir is None:
        raise user_error(
            f"{adapter_dir} adapts parts of matrices whose other rows, or whose order of rows, no adapter "
            "knows: give base_dir, a directory with the base model's config.json"
        )
    return model_config(json.loads((base_dir / "config.json").read_text()))


def _in_proj_rows(adapter_dir: Path, base_dir: Path | None) -> int:
    mamba = _base(adapter_dir, base_dir).mamba
    if mamba is None:
        raise user_error(f"{adapter_dir} adapts Mamba layers, and {base_dir} has none")
    return mamba.width + mamba.channels + mamba.heads


def _block_diagonal(first_EOR: Tensor, second_EOR: Tensor, in_turn: bool) -> Tensor:
    """One after the other along O, or their rows in turn."""
    zeros = torch.zeros_like(first_EOR)
    both = torch.cat((first_EOR, zeros), 2), torch.cat((zeros, second_EOR), 2)
    return torch.stack(both, 2).flatten(1, 2) if in_turn else torch.cat(both, 1)

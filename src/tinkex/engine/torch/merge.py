"""Merge an adapter into its base model: a full Hugging Face directory from the two.

W + scale·B·A is computed in fp32 and written in the base's dtype, with one shard in memory at a time.
A trained unembedding unties a tied head: `lm_head.weight` is written, and config.json says so. All other
files are copied. The directory is written atomically.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from tinkex.engine.request import user_error
from tinkex.engine.torch.adapter_files import (
    CONFIG,
    WEIGHTS,
    new_directory,
    present,
    read_peft_config,
    verify,
    write_json,
)
from tinkex.engine.torch.load import our_views
from tinkex.engine.torch.models.architecture import ModelConfig
from tinkex.engine.torch.models.families import FAMILIES, model_config, our_name
from tinkex.engine.torch.peft_export import join_qkv
from tinkex.engine.torch.quantised_files import method_name, quantisation
from tinkex.store import CHECKSUMS

_INDEX, _HEAD = "model.safetensors.index.json", "lm_head.weight"
_EMBEDDINGS = ("model.embed_tokens.weight", "transformer.wte.weight")
_NOT_COPIED = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json", CHECKSUMS)

Delta = tuple[Tensor, Tensor]  # A [R, I] and scale·B [O, R]


def merge_adapter(base_dir: Path, adapter_dir: Path, out_dir: Path, *, overwrite: bool = False) -> None:
    """Write `base_dir` with the adapter of `adapter_dir` merged into it.

    >>> merge_adapter(Path("models/Qwen3-0.6B"), Path("adapters/final"), Path("merged"))    # doctest: +SKIP
    """
    shards = _shards(base_dir)
    config = json.loads((base_dir / "config.json").read_text())
    if scheme := quantisation(config):
        raise user_error(
            f"{base_dir} is quantised ({method_name(scheme)}), and an adapter can be merged into plain "
            "weights alone; give the base model's directory in bfloat16"
        )
    known = model_config(config) if config.get("model_type") in FAMILIES else None
    deltas = _deltas(adapter_dir, known)
    stored = {our_name(name) for names in shards.values() for name in names}
    tied = config.get("tie_word_embeddings") or _HEAD not in stored
    untied = deltas.pop(_HEAD, None) if tied else None
    if untied is not None:
        config["tie_word_embeddings"] = False
        # a file may hold a copy of the tied embedding under the head's name
        shards = {
            shard: [name for name in names if our_name(name) != _HEAD] for shard, names in shards.items()
        }
    with new_directory(out_dir, overwrite=overwrite) as temporary:
        index: dict[str, str] = {}
        for shard, names in shards.items():
            with safe_open(base_dir / shard, framework="pt") as file:
                tensors = {name: _merged(name, file.get_tensor(name), deltas, known) for name in names}
                embedding = [name for name in names if our_name(name) in _EMBEDDINGS]
                if untied is not None and embedding:
                    tensors[_HEAD] = _added(file.get_tensor(embedding[0]), untied)
            save_file(tensors, temporary / shard, {"format": "pt"})
            index |= dict.fromkeys(tensors, shard)
        if untied is not None and _HEAD not in index:
            raise user_error(
                f"{adapter_dir} adapts the head, and {base_dir} has no {_EMBEDDINGS[0]} to untie"
            )
        if deltas:
            raise user_error(f"{adapter_dir} adapts {sorted(deltas)[0]}, which {base_dir} does not have")
        if len(shards) > 1:
            size = sum(file.stat().st_size for file in temporary.glob("*.safetensors"))
            places = dict(sorted(index.items()))
            write_json(temporary / _INDEX, {"metadata": {"total_size": size}, "weight_map": places})
        write_json(temporary / "config.json", config)
        for path in base_dir.iterdir():
            copied = path.name.endswith(_NOT_COPIED) or (temporary / path.name).exists()
            if path.is_file() and not copied:
                shutil.copy2(path, temporary / path.name)


def _shards(base_dir: Path) -> dict[str, list[str]]:
    files = sorted(base_dir.glob("*.safetensors")) if base_dir.is_dir() else []
    if not files or not (base_dir / "config.json").exists():
        raise user_error(
            f"{base_dir} is not a Hugging Face directory: merging needs config.json and *.safetensors"
        )
    if (base_dir / _INDEX).exists():
        used = set(json.loads((base_dir / _INDEX).read_text())["weight_map"].values())
        files = [file for file in files if file.name in used]
    shards = {}
    for path in files:
        with safe_open(path, framework="pt") as file:
            shards[path.name] = list(file.keys())
    return shards


def _deltas(adapter_dir: Path, base: ModelConfig | None) -> dict[str, Delta]:
    """The adapter's matrices by the name of the weight that they change; one per expert."""
    verify(adapter_dir, (WEIGHTS, CONFIG))
    peft = read_peft_config(adapter_dir)
    scale = peft["lora_alpha"] / peft["r"]
    deltas: dict[str, Delta] = {}
    tensors, suffix = present(load_file(adapter_dir / WEIGHTS)), ".lora_A.weight"
    tensors = join_qkv(tensors, base.stored_key_heads if base else 0) or tensors
    for key, a in tensors.items():
        if not key.endswith(suffix):
            # PEFT also writes the base weights of an adapted head; merging would lose anything else.
            if not key.endswith((".lora_B.weight", ".base_layer.weight")):
                raise user_error(f"{adapter_dir} holds {key}, which is not part of a low-rank adapter")
            continue
        name = key.removeprefix("base_model.model.").removesuffix(suffix)
        a, b = a.float(), scale * tensors[key.replace("lora_A", "lora_B")].float()
        if a.dim() == 2:
            deltas[f"{name}.weight"] = a, b
            continue
        stem, part = name.rsplit(".", 1)
        gated = key.replace(part, "w3") in tensors
        parts = {"w1": "gate_proj" if gated else "up_proj", "w2": "down_proj", "w3": "up_proj"}
        for i in range(max(len(a), len(b))):  # either side may be shared by all experts
            pair = a[i % len(a)], b[i % len(b)]
            deltas[f"{stem}.{i}.{parts[part]}.weight"] = pair
    return deltas


def _merged(name: str, tensor: Tensor, deltas: dict[str, Delta], base: ModelConfig | None) -> Tensor:
    """A stored tensor with what the adapter adds to it, or to the modules that are stacked in it."""
    names = [ours for ours, _ in our_views(base, name, tensor)]
    if not deltas.keys() & names:
        return tensor
    merged = tensor.clone()
    for ours, view in our_views(base, name, merged):
        if (delta := deltas.pop(ours, None)) is not None:
            view.copy_(_added(view, delta))
    return merged


def _added(weight: Tensor, delta: Delta) -> Tensor:
    a, b = delta
    return torch.addmm(weight.float(), b, a).to(weight.dtype).contiguous()

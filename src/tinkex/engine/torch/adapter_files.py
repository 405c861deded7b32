"""Adapters on disk: PEFT directories, with the optimizer's state and our own metadata beside the weights.

    adapter_model.safetensors   plain Hugging Face names, fp32; experts as 3-D tensors w1, w2, w3
    adapter_config.json         what PEFT and vLLM read
    tinkex.json                 rank, train flags, which base model, AdamW's step
    optimizer.safetensors       AdamW's moments under the same names, if asked for

Save and load are exact. A directory is written atomically (`tinkex.store`). A tensor that does not fit is
refused by name. Knows nothing of runs or of where directories belong.
"""

from __future__ import annotations

import contextlib
import json
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from torch import Tensor

from tinkex import store
from tinkex.engine.request import user_error
from tinkex.engine.torch.adapters import ALPHA, Adapter, lay_out
from tinkex.engine.torch.hooks import Sites
from tinkex.engine.torch.models.decoder import Decoder
from tinkex.types.params import LoraConfig

WEIGHTS, CONFIG, FACTS, OPTIMIZER = (
    "adapter_model.safetensors",
    "adapter_config.json",
    "tinkex.json",
    "optimizer.safetensors",
)
_PREFIX = "base_model.model."
_HOSTED_UNEMBED = "model.unembed_tokens"  # what hosted Tinker calls lm_head


@dataclass(frozen=True)
class BaseIdentity:
    """Which base model an adapter belongs to: a name for people, and a fingerprint of its weights."""

    name: str
    fingerprint: str

    @classmethod
    def of(cls, decoder: Decoder, name: str) -> BaseIdentity:
        """The fingerprint hashes the shape and the first numbers of every weight, in bfloat16."""
        sums = []
        for key, weight in sorted(decoder.weights().items()):
            head = weight.reshape(-1, weight.shape[-1])[0, :16].to(torch.bfloat16).view(torch.int16)
            sums.append(f"{key} {list(weight.shape)} {head.tolist()}")
        return cls(name, f"{decoder.config.arch}-{zlib.crc32(chr(10).join(sums).encode()):08x}")


# -- saving --------------------------------------------------------------------------------------------


def save_adapter(
    adapter: Adapter,
    directory: Path,
    base: BaseIdentity,
    *,
    optimizer: bool = False,
    overwrite: bool = False,
    sync: bool = True,
) -> int:
    """Write a PEFT directory; returns its bytes."""
    with new_directory(directory, overwrite=overwrite, sync=sync) as temporary:
        save_file(_arrays(adapter, adapter.flat), temporary / WEIGHTS, {"format": "pt"})
        _write_json(temporary / CONFIG, _peft_config(adapter, base))
        if optimizer:
            moments = dict(zip(("exp_avg", "exp_avg_sq"), adapter.moments(), strict=True))
            arrays = {f"{m}.{k}": v for m, flat in moments.items() for k, v in _arrays(adapter, flat).items()}
            save_file(arrays, temporary / OPTIMIZER)
        facts = {"format": 1, "lora": asdict(adapter.lora), "base": asdict(base), "step": adapter.step}
        _write_json(temporary / FACTS, facts)
        return sum(file.stat().st_size for file in temporary.iterdir())


def _arrays(adapter: Adapter, flat: Tensor) -> dict[str, Any]:
    named = adapter.named(flat.cpu())
    return {
        f"{_PREFIX}{name}.lora_{side}.weight": tensor.contiguous().numpy()
        for name, pair in named.items()
        for side, tensor in zip("AB", pair, strict=True)
    }


def _peft_config(adapter: Adapter, base: BaseIdentity) -> dict[str, Any]:
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base.name,
        "r": adapter.lora.rank,
        "lora_alpha": int(ALPHA),
        "lora_dropout": 0.0,
        "target_modules": sorted({name.rsplit(".", 1)[-1] for name in adapter.named()}),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "modules_to_save": None,
        "layers_to_transform": None,
        "layers_pattern": None,
        "rank_pattern": {},
        "alpha_pattern": {},
        "use_rslora": False,
        "use_dora": False,
        "revision": None,
    }


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


@contextlib.contextmanager
def new_directory(directory: Path, *, overwrite: bool = False, sync: bool = True) -> Iterator[Path]:
    """`store.atomic_directory`, where an existing directory is the user's error."""
    try:
        with store.atomic_directory(directory, overwrite=overwrite, sync=sync) as temporary:
            yield temporary
    except store.LocationExistsError as error:
        raise user_error(str(error)) from None


# -- loading -------------------------------------------------------------------------------------------


def load_adapter(
    directory: Path,
    sites: Sites,
    experts: int,
    base: BaseIdentity,
    head: Tensor,
    *,
    optimizer: bool = False,
) -> Adapter:
    """The adapter that a directory holds; ours, or any PEFT directory for the same modules with alpha 32.

    `head` is the base model's unembedding, on whose device it will be.
    """
    tensors = _read_tensors(directory / WEIGHTS)
    _drop_head(tensors, head, directory)
    facts = _read_json(directory / FACTS) if (directory / FACTS).exists() else {}
    lora = _lora_config(directory, facts, tensors)
    saved = facts.get("base", {})
    if saved and saved.get("fingerprint") != base.fingerprint:
        raise user_error(
            f"{directory} was saved for the base model {saved.get('name')!r} ({saved.get('fingerprint')}), "
            f"and this one is {base.name!r} ({base.fingerprint})"
        )
    adapter = Adapter(lora, lay_out(sites, lora, experts), head.device)
    _fill(
        adapter, adapter.flat, {_plain(name): tensor for name, tensor in tensors.items()}, directory / WEIGHTS
    )
    if optimizer:
        if not (directory / OPTIMIZER).exists():
            raise user_error(f"{directory} was saved without the optimizer's state: it has no {OPTIMIZER}")
        state = _read_tensors(directory / OPTIMIZER)
        for key, flat in zip(("exp_avg.", "exp_avg_sq."), adapter.moments(), strict=True):
            part = {name.removeprefix(key): t for name, t in state.items() if name.startswith(key)}
            _fill(adapter, flat, part, directory / OPTIMIZER)
        adapter.step = _step(directory, facts)
    return adapter


def _drop_head(tensors: dict[str, Tensor], head: Tensor, directory: Path) -> None:
    """PEFT writes the weights of an adapted head beside its adapter: nothing new, if they are the base's."""
    given = tensors.pop(f"{_PREFIX}lm_head.base_layer.weight", None)
    if given is not None and not torch.equal(given.to(head), head):
        raise user_error(f"{directory / WEIGHTS} has a head of its own, which is not this base model's")


def _step(directory: Path, facts: Mapping[str, Any]) -> int:
    if not isinstance(step := facts.get("step"), int):
        raise user_error(f"{directory / FACTS} does not say how many steps the optimizer has made")
    return step


def check_fits(have: LoraConfig, saved: LoraConfig, directory: Path) -> None:
    """Refuse a saved adapter whose rank or train flags are not those of the run it is to replace."""
    for key in ("rank", "train_attn", "train_mlp", "train_unembed"):
        if getattr(have, key) != getattr(saved, key):
            raise user_error(
                f"{directory} has {key} {getattr(saved, key)}, and the run has {getattr(have, key)}; "
                "they must be the same"
            )


def _lora_config(directory: Path, facts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> LoraConfig:
    if facts:
        try:
            return LoraConfig(**facts["lora"])
        except (KeyError, TypeError, ValueError) as error:
            raise user_error(f"{directory / FACTS} is not one of ours: {error}") from None
    peft = read_peft_config(directory)
    if (alpha := peft.get("lora_alpha")) != ALPHA:
        raise user_error(f"{directory / CONFIG}: lora_alpha is {alpha}; adapters here have alpha {ALPHA:g}")
    names = " ".join(_plain(name) for name in tensors)
    try:
        return LoraConfig(
            rank=peft.get("r"),  # type: ignore[arg-type]  # checked there
            train_attn=".self_attn." in names,
            train_mlp=".mlp." in names,
            train_unembed="lm_head." in names,
        )
    except ValueError as error:
        raise user_error(f"{directory / CONFIG}: {error}") from None


def read_peft_config(directory: Path) -> dict[str, Any]:
    """What adapter_config.json says; refuses settings that make more of the tensors than alpha/r · B·A."""
    peft = _read_json(directory / CONFIG)
    for key in ("use_rslora", "use_dora", "rank_pattern", "alpha_pattern"):
        if peft.get(key):
            raise user_error(
                f"{directory / CONFIG}: {key} is {peft[key]}; adapters with it are not read here"
            )
    return peft


def _plain(name: str) -> str:
    return name.replace(_HOSTED_UNEMBED, "lm_head")


def _fill(adapter: Adapter, flat: Tensor, tensors: dict[str, Tensor], source: Path) -> None:
    """Copy every tensor to its place; names and shapes must be exactly the adapter's."""
    places = {
        f"{_PREFIX}{name}.lora_{side}.weight": view
        for name, pair in adapter.named(flat).items()
        for side, view in zip("AB", pair, strict=True)
    }
    missing, extra = sorted(places.keys() - tensors.keys()), sorted(tensors.keys() - places.keys())
    if missing or extra:
        raise user_error(
            f"{source} does not fit this base model with rank {adapter.lora.rank}: "
            f"missing {missing[:2] or 'nothing'}, unexpected {extra[:2] or 'nothing'}"
        )
    for name, view in places.items():
        if view.shape != tensors[name].shape:
            raise user_error(
                f"{source}: {name} has shape {list(tensors[name].shape)}, needed is {list(view.shape)} "
                f"(rank {adapter.lora.rank})"
            )
        view.copy_(tensors[name])
    if not torch.isfinite(flat).all():
        raise user_error(f"{source} holds numbers that are not finite")


def _read_tensors(path: Path) -> dict[str, Tensor]:
    if not path.exists():
        raise user_error(f"{path.parent} is not an adapter: it has no {path.name}")
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise user_error(f"{path} is corrupted: {error}") from None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        raise user_error(f"{path.parent} is not an adapter: it has no {path.name}") from None
    except (ValueError, OSError) as error:
        raise user_error(f"{path} is corrupted: {error}") from None

"""Adapters on disk: PEFT directories, plus the optimizer's state and our own metadata.

    adapter_model.safetensors   plain Hugging Face names, fp32; experts as 3-D tensors w1, w2, w3, with one
                                matrix on the side that they share
    adapter_config.json         what PEFT and vLLM read
    tinkex.json                 rank, train flags, which base model, AdamW's step
    optimizer.safetensors       AdamW's moments under the same names, if asked for
    SHA256SUMS                  the checksum of each of these files

Save and load are exact. A directory is written atomically (`tinkex.store`). A file that does not match its
checksum, or a tensor that does not fit, is refused by name. Knows nothing of runs or of where directories
belong.
"""

from __future__ import annotations

import contextlib
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
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
from tinkex.engine.torch.models.decoder import Decoder
from tinkex.engine.torch.peft_import import PREFIX, as_ours, hosted_name
from tinkex.types.params import LoraConfig

WEIGHTS, OPTIMIZER = "adapter_model.safetensors", "optimizer.safetensors"
CONFIG, FACTS = "adapter_config.json", "tinkex.json"


@dataclass(frozen=True)
class BaseIdentity:
    """Which base model an adapter belongs to: a name for people, and a fingerprint of its weights."""

    name: str
    fingerprint: str

    @classmethod
    def of(cls, decoder: Decoder, name: str) -> BaseIdentity:
        weights = {
            key: (weight.shape, weight.reshape(-1, weight.shape[-1])[0, :16])
            for key, weight in decoder.weights().items()
        }
        slots = {key: (matrix.part_shape(i), matrix.head(i)) for key, (matrix, i) in decoder.slots().items()}
        return cls(name, fingerprint(decoder.config.arch, weights, slots))


Heads = Mapping[str, tuple[Sequence[int], Tensor]]  # by name: shapes, and the first 16 numbers


def fingerprint(arch: str, weights: Heads, quantised: Heads) -> str:
    """A hash of the shape and the first numbers of every weight, in bfloat16."""
    sums = []
    for key, (shape, head) in sorted(weights.items()):
        sums.append(f"{key} {list(shape)} {head.to(torch.bfloat16).view(torch.int16).tolist()}")
    for key, (shape, head) in sorted(quantised.items()):
        sums.append(f"{key} {list(shape)} {head.tolist()}")
    return f"{arch}-{zlib.crc32(chr(10).join(sums).encode()):08x}"


def save_adapter(
    adapter: Adapter,
    location: str | Path,
    base: BaseIdentity,
    *,
    optimizer: bool = False,
    overwrite: bool = False,
    sync: bool = True,
) -> int:
    with new_directory(location, overwrite=overwrite, sync=sync) as temporary:
        save_file(_arrays(adapter, adapter.flat), temporary / WEIGHTS, {"format": "pt"})
        write_json(temporary / CONFIG, peft_config(adapter, base))
        if optimizer:
            moments = dict(zip(("exp_avg", "exp_avg_sq"), adapter.moments(), strict=True))
            arrays = {f"{m}.{k}": v for m, flat in moments.items() for k, v in _arrays(adapter, flat).items()}
            save_file(arrays, temporary / OPTIMIZER)
        write_json(temporary / FACTS, facts_of(adapter, base, adapter.step))
    return store.directory_bytes(location)


def facts_of(adapter: Adapter, base: BaseIdentity, step: int) -> dict[str, Any]:
    """What tinkex.json says."""
    return {"format": 1, "lora": asdict(adapter.lora), "base": asdict(base), "step": step}


def named(adapter: Adapter, flat: Tensor) -> dict[str, Tensor]:
    return {
        f"{PREFIX}{name}.lora_{side}.weight": view
        for name, pair in adapter.named(flat).items()
        for side, view in zip("AB", pair, strict=True)
    }


def _arrays(adapter: Adapter, flat: Tensor) -> dict[str, Any]:
    return {name: view.contiguous().numpy() for name, view in named(adapter, flat.cpu()).items()}


def peft_config(adapter: Adapter, base: BaseIdentity) -> dict[str, Any]:
    modules = {part.name.rsplit(".", 1)[-1] for shape in adapter.shapes.values() for part in shape.parts}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base.name,
        "r": adapter.lora.rank,
        "lora_alpha": int(ALPHA),
        "lora_dropout": 0.0,
        "target_modules": sorted(modules),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        **dict.fromkeys(("modules_to_save", "layers_to_transform", "layers_pattern")),
        "rank_pattern": {},
        "alpha_pattern": {},
        "use_rslora": False,
        "use_dora": False,
        "revision": None,
    }


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


@contextlib.contextmanager
def new_directory(location: str | Path, **options: bool) -> Iterator[Path]:
    """`store.atomic_directory`, where an existing directory is the user's error."""
    try:
        with store.atomic_directory(location, **options) as temporary:
            yield temporary
    except store.LocationExistsError as error:
        raise user_error(str(error)) from None


@contextlib.contextmanager
def reading(location: str) -> Iterator[Path]:
    """`store.local_copy`, where what is missing or damaged is the user's error."""
    with contextlib.ExitStack() as stack:
        try:
            directory = stack.enter_context(store.local_copy(location))
        except (store.DamagedError, FileNotFoundError) as error:
            raise user_error(str(error)) from None
        yield directory


def verify(directory: Path, names: Sequence[str]) -> None:
    """Compare these files with their checksums; one that is damaged is refused."""
    try:
        store.verify(directory, names)
    except store.DamagedError as error:
        raise user_error(str(error)) from None


def load_adapter(
    directory: Path, decoder: Decoder, base: BaseIdentity, *, optimizer: bool = False,
    device: torch.device | None = None,
) -> Adapter:  # fmt: skip
    """The adapter that a directory holds, for `decoder` and on its device: ours, or any of PEFT's."""
    files = weight_files(directory)
    verify(directory, (*files, CONFIG, FACTS, *([OPTIMIZER] if optimizer else [])))
    weights, facts = directory / files[0], read_facts(directory)
    read = (_read_tensors(directory / file) for file in files)
    saved, tensors = facts.get("base", {}), present({k: v for part in read for k, v in part.items()})
    if saved and saved.get("fingerprint") != base.fingerprint:
        raise user_error(
            f"{directory} was saved for the base model {saved.get('name')!r} ({saved.get('fingerprint')}), "
            f"and this one is {base.name!r} ({base.fingerprint})"
        )
    if facts:
        lora = _lora_config(directory, facts)
        tensors = {hosted_name(name, decoder): tensor for name, tensor in tensors.items()}
    else:
        lora, tensors = as_ours(directory, _read_json(directory / CONFIG), tensors, decoder)
    shared = not any(".experts." in name and min(_counts(tensors, name)) > 1 for name in tensors)
    device = device or decoder.unembed_weight.device
    adapter = Adapter(lora, lay_out(decoder.sites(), lora, shared=shared), device)
    _fill(adapter, adapter.flat, tensors, weights)
    if optimizer:
        _load_optimizer(adapter, directory, facts)
    return adapter


def shard_name(number: int, count: int) -> str:
    """One of `count` files of weights, counted from 1."""
    return f"adapter_model-{number:05}-of-{count:05}.safetensors"


def weight_files(directory: Path) -> list[str]:
    """The names of the files that hold a directory's weights, or should."""
    one = next(directory.glob("adapter_model-*-of-*.safetensors"), None)
    if one is None or not (count := one.stem.rpartition("-")[2]).isdigit():
        return [WEIGHTS]
    return [shard_name(n + 1, int(count)) for n in range(int(count))]


def _counts(tensors: Mapping[str, Tensor], name: str) -> list[int]:
    """How many matrices a module's A and B hold."""
    sides = (name.replace("lora_B", "lora_A"), name.replace("lora_A", "lora_B"))
    return [len(tensors[side]) for side in sides if side in tensors]


def _load_optimizer(adapter: Adapter, directory: Path, facts: Mapping[str, Any]) -> None:
    if not (directory / OPTIMIZER).exists():
        raise user_error(f"{directory} was saved without the optimizer's state: it has no {OPTIMIZER}")
    state = _read_tensors(directory / OPTIMIZER)
    for key, flat in zip(("exp_avg.", "exp_avg_sq."), adapter.moments(), strict=True):
        part = {name.removeprefix(key): t for name, t in state.items() if name.startswith(key)}
        _fill(adapter, flat, part, directory / OPTIMIZER)
    if not isinstance(step := facts.get("step"), int):
        raise user_error(f"{directory / FACTS} does not say how many steps the optimizer has made")
    adapter.step = step


def _lora_config(directory: Path, facts: Mapping[str, Any]) -> LoraConfig:
    try:
        return LoraConfig(**facts["lora"])
    except (KeyError, TypeError, ValueError) as error:
        raise user_error(f"{directory / FACTS} is not one of ours: {error}") from None


def present(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Without the empty w3 that hosted Tinker writes for experts that have no gate."""
    return {name: tensor for name, tensor in tensors.items() if tensor.numel() or ".experts.w3." not in name}


def read_facts(directory: Path) -> dict[str, Any]:
    """What tinkex.json says; nothing, if it is not there."""
    return _read_json(directory / FACTS) if (directory / FACTS).exists() else {}


def read_peft_config(directory: Path) -> dict[str, Any]:
    """What adapter_config.json says; refuses settings that make more of the tensors than alpha/r · B·A."""
    peft = _read_json(directory / CONFIG)
    for key in ("use_rslora", "use_dora", "rank_pattern", "alpha_pattern"):
        if peft.get(key):
            raise user_error(
                f"{directory / CONFIG}: {key} is {peft[key]}; adapters with it are not read here"
            )
    return peft


def _fill(adapter: Adapter, flat: Tensor, tensors: dict[str, Tensor], source: Path) -> None:
    """Copy every tensor to its place; names and shapes must be exactly the adapter's."""
    places = named(adapter, flat)
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


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    if not path.exists():
        raise user_error(f"{path.parent} is not an adapter: it has no {path.name}")
    try:
        yield
    except (SafetensorError, ValueError, OSError) as error:
        raise user_error(f"{path} is corrupted: {error}") from None


def _read_tensors(path: Path) -> dict[str, Tensor]:
    with _reading(path), safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def _read_json(path: Path) -> dict[str, Any]:
    with _reading(path):
        return json.loads(path.read_text(encoding="utf-8"))

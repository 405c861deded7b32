"""Directories of the fake engine's adapters: a PEFT one's files, though no PEFT model fits them.

Numpy alone: safetensors is simple enough to write by hand.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from tinkex.engine.fake.model import ALPHA, Adapter
from tinkex.engine.request import user_error
from tinkex.types.params import LoraConfig


def save(adapter: Adapter, model: str, directory: Path, *, optimizer: bool, overwrite: bool) -> int:
    """Write a directory that has a PEFT one's files, though no PEFT model fits them."""
    directory = Path(directory)
    if directory.exists() and not overwrite:
        raise user_error(f"{directory} exists already")
    part = directory.with_name(directory.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    config = {
        "peft_type": "LORA",
        "base_model_name_or_path": model,
        "r": adapter.lora.rank,
        "lora_alpha": ALPHA,
        "tinkex": adapter.lora.model_dump(),
    }
    (part / "adapter_config.json").write_text(json.dumps(config, indent=2))
    a, b = adapter.pair
    name = "base_model.model.fake"
    _write(part / "adapter_model.safetensors", {f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b})
    if optimizer:
        state = {"exp_avg": adapter.moments, "exp_avg_sq": adapter.squares, "step": np.array([adapter.step])}
        _write(part / "optimizer.safetensors", state)
    shutil.rmtree(directory, ignore_errors=True)
    part.rename(directory)
    return sum(file.stat().st_size for file in directory.iterdir())


def load(directory: Path, model: str, *, optimizer: bool) -> Adapter:
    directory = Path(directory)
    try:
        config = json.loads((directory / "adapter_config.json").read_text())
        tensors = _read_tensors(directory / "adapter_model.safetensors")
    except OSError:
        raise user_error(f"{directory} holds no adapter") from None
    if config["base_model_name_or_path"] != model:
        raise user_error(
            f"{directory} is for base model {config['base_model_name_or_path']!r}, not {model!r}"
        )
    adapter = Adapter(LoraConfig(**config["tinkex"]))
    adapter.params = np.concatenate([tensors[key].ravel() for key in sorted(tensors)])
    if optimizer:
        if not (directory / "optimizer.safetensors").exists():
            raise user_error(f"{directory} was saved without its optimizer state")
        state = _read_tensors(directory / "optimizer.safetensors")
        adapter.moments, adapter.squares = state["exp_avg"], state["exp_avg_sq"]
        adapter.step = int(state["step"][0])
    return adapter


def _write(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """A safetensors file: the length of a JSON header, the header, the numbers."""
    header, body = {}, b""
    for name, array in tensors.items():
        data = array.tobytes()
        kind = "F64" if array.dtype.kind == "f" else "I64"
        header[name] = {
            "dtype": kind,
            "shape": array.shape,
            "data_offsets": [len(body), len(body) + len(data)],
        }
        body += data
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + body)


def _read_tensors(path: Path) -> dict[str, np.ndarray]:
    raw = path.read_bytes()
    body = 8 + int.from_bytes(raw[:8], "little")
    out = {}
    for name, entry in json.loads(raw[8:body]).items():
        first, last = (body + at for at in entry["data_offsets"])
        kind = np.float64 if entry["dtype"] == "F64" else np.int64
        out[name] = np.frombuffer(raw[first:last], kind).reshape(entry["shape"]).copy()
    return out

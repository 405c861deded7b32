"""Directories of the fake engine's adapters: a PEFT one's files, though no PEFT model fits them.

Numpy alone: safetensors is simple enough to write by hand.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tinkex import store
from tinkex.engine.fake.model import ALPHA, Adapter
from tinkex.engine.protocol import Location
from tinkex.engine.request import user_error
from tinkex.types.params import LoraConfig


@dataclass(frozen=True)
class FakeExport:
    """The fake engine's `ExportedAdapter`."""

    lora: LoraConfig
    model: str
    params: np.ndarray

    @property
    def nbytes(self) -> int:
        return self.params.nbytes


def save(
    adapter: Adapter, model: str, location: Location, *, optimizer: bool, overwrite: bool, sync: bool
) -> int:
    """Write a directory with a PEFT one's files; returns its bytes."""
    try:
        with store.atomic_directory(location, overwrite=overwrite, sync=sync) as part:
            _write_files(adapter, model, part, optimizer=optimizer)
    except store.LocationExistsError as error:
        raise user_error(str(error)) from None
    return store.directory_bytes(location)


def _write_files(adapter: Adapter, model: str, part: Path, *, optimizer: bool) -> None:
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


def load(location: Location, model: str, *, optimizer: bool) -> Adapter:
    directory = Path(location)
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

"""Files of the fake engine's adapters: those of a PEFT directory, though no PEFT model fits them."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from tinkex import store
from tinkex.engine.fake.bigram import ALPHA, FakeAdapter
from tinkex.engine.protocol import Location, SaveAdapter
from tinkex.engine.request import user_error
from tinkex.types.params import LoraConfig

_WEIGHTS, _OPTIMIZER, _CONFIG = "adapter_model.safetensors", "optimizer.safetensors", "adapter_config.json"
_NAME = "base_model.model.fake"


@dataclass(frozen=True)
class FakeExport:
    """The fake engine's `ExportedAdapter`."""

    lora: LoraConfig
    model: str
    params: np.ndarray

    @property
    def nbytes(self) -> int:
        return self.params.nbytes


def save(adapter: FakeAdapter, model: str, command: SaveAdapter) -> int:
    """Write a directory with a PEFT one's files; returns its bytes."""
    from safetensors.numpy import save_file

    config = {
        "peft_type": "LORA",
        "base_model_name_or_path": model,
        "r": adapter.lora.rank,
        "lora_alpha": ALPHA,
        "tinkex": asdict(adapter.lora),
    }
    a, b = adapter.pair
    state = {"exp_avg": adapter.moments, "exp_avg_sq": adapter.squares, "step": np.array([adapter.step])}
    try:
        with store.atomic_directory(
            command.location, overwrite=command.overwrite, sync=command.sync
        ) as directory:
            (directory / _CONFIG).write_text(json.dumps(config, indent=2))
            save_file({f"{_NAME}.lora_A.weight": a, f"{_NAME}.lora_B.weight": b}, directory / _WEIGHTS)
            if command.optimizer:
                save_file(state, directory / _OPTIMIZER)
    except store.LocationExistsError as error:
        raise user_error(str(error)) from None
    return store.directory_bytes(command.location)


def load(location: Location, model: str, *, optimizer: bool) -> FakeAdapter:
    from safetensors.numpy import load_file

    directory = Path(location)
    try:
        config = json.loads((directory / _CONFIG).read_text())
        tensors = load_file(directory / _WEIGHTS)
    except OSError:
        raise user_error(f"{directory} holds no adapter") from None
    if config["base_model_name_or_path"] != model:
        raise user_error(
            f"{directory} is for base model {config['base_model_name_or_path']!r}, not {model!r}"
        )
    adapter = FakeAdapter(LoraConfig(**config["tinkex"]))
    adapter.params = np.concatenate([tensors[key].ravel() for key in sorted(tensors)])
    if optimizer:
        if not (directory / _OPTIMIZER).exists():
            raise user_error(f"{directory} was saved without its optimizer state")
        state = load_file(directory / _OPTIMIZER)
        adapter.moments, adapter.squares = state["exp_avg"], state["exp_avg_sq"]
        adapter.step = int(state["step"][0])
    return adapter

"""A broken model directory gets one clear sentence: the key, tensor or file, and what would help."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.engine.tiny import tiny_model, tiny_tokenizer
from tinkex.engine.torch.load import load_decoder
from tinkex.errors import InvalidInputError


def config(**changes: Any) -> Callable[[Path], None]:
    """Set fields of config.json; None removes one."""

    def change(path: Path) -> None:
        fields = json.loads((path / "config.json").read_text()) | changes
        (path / "config.json").write_text(json.dumps({k: v for k, v in fields.items() if v is not None}))

    return change


def text(name: str, content: str) -> Callable[[Path], None]:
    return lambda path: (path / name).write_text(content) and None


def weights(**changes: torch.Tensor | None) -> Callable[[Path], None]:
    """Replace tensors, `__` for dots; None removes one."""

    def change(path: Path) -> None:
        file = path / "model.safetensors"
        tensors = load_file(file) | {name.replace("__", "."): t for name, t in changes.items()}
        save_file({name: t for name, t in tensors.items() if t is not None}, file)

    return change


def cut_short(path: Path) -> None:
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:20_000])


def index(content: Any) -> Callable[[Path], None]:
    return text("model.safetensors.index.json", json.dumps(content))


BROKEN: dict[str, tuple[Callable[[Path], None], list[str]]] = {
    "no config": (lambda path: (path / "config.json").unlink(), ["has no config.json"]),
    "a config that is no JSON": (
        text("config.json", '{"a": 1'),
        ["config.json is not valid JSON", "fetch it again"],
    ),
    "a config that is a list": (text("config.json", "[1]"), ["config.json must be a JSON object, got list"]),
    "a missing key": (config(hidden_size=None), ["hidden_size must be a positive integer, got None"]),
    "a key of another kind": (config(num_hidden_layers="two"), ["num_hidden_layers", "'two'"]),
    "heads that do not divide": (config(num_attention_heads=-4), ["num_attention_heads", "-4"]),
    "a missing tensor": (weights(model__norm__weight=None), ["missing: model.norm.weight", "of one model?"]),
    "a tensor too many": (weights(model__more=torch.ones(2)), ["unexpected: model.more"]),
    "a wrong shape": (
        weights(model__norm__weight=torch.ones(63)),
        ["model.norm.weight has shape [63]", "[64]"],
    ),
    "a file cut short": (cut_short, ["model.safetensors is corrupted or cut short", "fetch it again"]),
    "no weights": (lambda path: (path / "model.safetensors").unlink(), ["has no model.safetensors", "index"]),
    "an index of absent files": (
        index({"weight_map": {"model.norm.weight": "model-00001-of-00009.safetensors"}}),
        ["model.safetensors.index.json names files that are not there: model-00001-of-00009.safetensors;"],
    ),
    "an index without a map": (index({"metadata": {}}), ["model.safetensors.index.json", "weight_map"]),
    "an index that leads away": (index({"weight_map": {"a": "../b"}}), ["../b"]),
    "a tokenizer that is no JSON": (text("tokenizer.json", "{"), ["tokenizer.json is not valid JSON"]),
}


@pytest.mark.parametrize("case", BROKEN)
def test_one_sentence_says_what_is_wrong(tmp_path: Path, case: str) -> None:
    path, (damage, said) = tiny_tokenizer(tiny_model(tmp_path, "llama3")), BROKEN[case]
    damage(path)
    with pytest.raises(InvalidInputError) as caught:
        load_decoder(path)
    message = str(caught.value)
    assert all(part in message for part in said), message
    assert "\n" not in message

"""Adapters of every family through the cookbook's merge and export tools: they write what ours writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.compat.cookbook.families import FAMILIES, tiny_family
from tests.compat.cookbook.kitchen import OFFICIAL, Kitchen
from tests.compat.environments import interpreter
from tests.engine.commands import do
from tests.engine.oracle import randomise
from tinkex.engine.protocol import CreateAdapter, SaveAdapter
from tinkex.engine.torch.load import load_decoder
from tinkex.engine.torch.merge import merge_adapter
from tinkex.engine.torch.trainer import TorchTrainer
from tinkex.types.params import LoraConfig

pytestmark = pytest.mark.ci

PROGRAM = Path(__file__).parent / "programs" / "merge.py"
NOT_CONVERTED = {"deepseek-ai/DeepSeek-V3.1"}  # the tool's own choice: no server takes such an adapter


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """For each family a directory with its model, an adapter, and what both tools made of them."""
    python, directory = interpreter("cookbook"), tmp_path_factory.mktemp("merge")
    places = {name: directory / name for name in FAMILIES}
    for name, place in places.items():
        base = tiny_family(place / "base", name)
        trainer = TorchTrainer(load_decoder(base), name)
        # the cookbook adds a tied head's adapter to the embedding too: train heads that are untied
        tied = json.loads((base / "config.json").read_text())["tie_word_embeddings"]
        do(trainer, CreateAdapter("run", LoraConfig(3, train_unembed=not tied)))
        randomise(trainer.adapter("run").flat, seed=1)
        do(trainer, SaveAdapter("run", str(place / "adapter")))
        merge_adapter(base, place / "adapter", place / "ours")
    kitchen = Kitchen(OFFICIAL, python, directory, directory)
    run = kitchen.run(directory, str(PROGRAM), *map(str, places.values()))
    refused = json.loads(run.said.splitlines()[-1])
    assert set(refused) == {str(places[name]) for name in NOT_CONVERTED}, refused
    return places


@pytest.mark.parametrize("name", FAMILIES)
def test_merged_weights_are_ours(places: dict[str, Path], name: str) -> None:
    base, ours, theirs = (_weights(places[name] / kind) for kind in ("base", "ours", "merged"))
    assert theirs.keys() == ours.keys() == base.keys()
    changed = {key for key in base if not torch.equal(ours[key], base[key])}
    assert len(changed) > 10
    for key in ours:
        torch.testing.assert_close(theirs[key], ours[key], atol=1e-6, rtol=1e-6, msg=key)
        assert (key in changed) is not torch.equal(theirs[key], base[key]), key


def _weights(directory: Path) -> dict[str, Tensor]:
    return {key: value for file in directory.glob("*.safetensors") for key, value in load_file(file).items()}

"""Adapters in the slots of a captured step's table: what a graph is told of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.by_kernels import MARKS
from tests.engine.tiny import tiny_model
from tinkex.engine.cuda import fused_projection as fused
from tinkex.engine.cuda.cuda_backend import CudaBackend
from tinkex.engine.cuda.grouped_lora import AdapterSlots, matches_trainer
from tinkex.engine.torch.adapters import Adapter
from tinkex.engine.torch.load import load_decoder
from tinkex.engine.torch.models.decoder import Decoder
from tinkex.types.params import LoraConfig

pytestmark = [*MARKS, pytest.mark.slow]


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    path: Path = tiny_model(tmp_path_factory.mktemp("model"), "llama3")
    return load_decoder(path)


def adapter(decoder: Decoder, rank: int) -> Adapter:
    return Adapter.fresh(LoraConfig(rank=rank), decoder.sites(), decoder.unembed_weight.device)


def test_what_is_true_of_all_ranks(decoder: Decoder) -> None:
    slots, (a, b, c) = AdapterSlots(decoder, 8), (adapter(decoder, rank) for rank in (8, 24, 12))
    _, shape = slots.place([(a, 0, 3), (None, 3, 5), (b, 5, 9)])
    assert (shape.rank, shape.vectors) == (32, True)
    _, shape = slots.place([(a, 0, 3), (c, 3, 5)])
    assert (shape.rank, shape.vectors) == (16, False)
    table = slots.table(shape)
    assert (table.widest, table.vectors) == (16, False)
    assert table.addresses[:2, 0].tolist() == [8, 12]


@pytest.mark.parametrize(
    ("largest", "rows", "tile"),
    [(1 << 30, 16, 16), (1 << 30, 64, 64), (1 << 30, 200, 128), (0, 16, 64), (0, 64, 64), (0, 80, 32)],
)
def test_tiles_of_one_adapter(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch, largest: int, rows: int, tile: int
) -> None:
    """As large as whatever multiplies them can hold: with large weights less."""
    monkeypatch.setattr(fused, "LARGE", largest)
    cells, shape = AdapterSlots(decoder, 256).place([(adapter(decoder, 8), 0, rows)])
    assert (shape.rows, shape.tiles) == (tile, cells.shape[1])
    assert cells[2].sum() == rows


def test_whose_captured_steps_have_a_trainers_bits(
    decoder: Decoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All weights are large, without a bias; deterministic decoders have them anyway."""
    sizes = sorted(i * sum(p.out_features for p in parts) for i, parts in decoder.sites().values())
    for largest, there in ((sizes[0] - 1, True), (sizes[0], False)):
        monkeypatch.setattr(fused, "LARGE", largest)
        assert matches_trainer(decoder) == there
    monkeypatch.setattr(fused, "LARGE", 0)
    assert not matches_trainer(load_decoder(tiny_model(tmp_path, "qwen2")))
    weight = decoder.unembed_weight
    assert not matches_trainer(decoder.with_backend(CudaBackend(weight.device, weight.dtype, invariant=True)))

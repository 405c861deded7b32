"""A projection with its adapters in one launch, and what is done with it, against products and `plain`."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.engine.adapter_rows import DIM, DOWN, GATE_UP, HEADS, QKV, WIDTH, assert_near, given
from tests.engine.by_kernels import BF16, DEVICE, INTERPRETED, MARKS, random
from tinkex.engine.cuda import elementwise
from tinkex.engine.cuda import fused_projection as kernel
from tinkex.engine.cuda.adapter_table import AdapterTable, RowTiles, SiteAdapters, cut_tiles
from tinkex.engine.cuda.fused_projection import (
    FusedProjection,
    ProductTile,
    split_in_two,
    suits,
    tile_for,
)
from tinkex.engine.torch import plain
from tinkex.engine.torch.hooks import Site

pytestmark = [*MARKS, pytest.mark.slow]

lengths = pytest.mark.parametrize("lengths", [[1, 0, 0, 0], [20, 17, 2, 1], [40, 33, 20, 40]])
shapes = pytest.mark.parametrize(
    "shape", [ProductTile(32, 32, 1), ProductTile(16, 64, 4), ProductTile(64, 128, 1)]
)


def projected(site: Site, lengths: list[int]) -> tuple[FusedProjection, torch.Tensor, object]:
    x, weight, adapters, want, held = given(site, lengths)
    return FusedProjection(x, weight, adapters), want, held


def angles(rows: int, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    angle = random(rows, dim // 2, seed=5).float()
    return angle.cos().to(BF16), angle.sin().to(BF16)


@lengths
@shapes
@pytest.mark.parametrize("site", [QKV, GATE_UP, DOWN])
def test_the_parts_of_the_sum(lengths: list[int], site: Site, shape: ProductTile) -> None:
    one, want, _held = projected(site, lengths)
    parts = one.splits(shape)
    assert parts.shape[0] == shape.splits
    assert_near((parts.sum(0),), (want,))


@lengths
@shapes
def test_gate_and_up_become_one(lengths: list[int], shape: ProductTile) -> None:
    one, want, _held = projected(GATE_UP, lengths)
    assert_near((one.gated(shape),), (plain.swiglu(want),))


@lengths
def test_as_whatever_reads_it_asks(lengths: list[int]) -> None:
    one, want, _held = projected(QKV, lengths)
    assert_near((one.total(),), (want,))
    cos, sin = angles(sum(lengths), DIM)
    told = plain.rotate(want, cos.float(), sin.float(), HEADS, None, 1e-5)[:3]
    assert_near(one.rotate(cos, sin, HEADS, None, 1e-5), told)
    one, want, _held = projected(GATE_UP, lengths)
    assert_near((one.swiglu(),), (plain.swiglu(want),))


def test_a_norm_adds_up_the_parts() -> None:
    one, want, _held = projected(DOWN, [20, 17, 2, 1])
    parts = one.addend()
    assert parts.shape[0] > 1
    stream, rest, scale = random(40, WIDTH, seed=8), random(40, WIDTH, seed=9) / 256, random(WIDTH, seed=10)
    got = elementwise.normalise(stream, rest, parts, scale, 1e-5)
    told = plain.normalise(stream.float(), rest.float(), want, scale.float(), 1e-5)
    assert_near((got[0], got[2]), (told[0], told[2]))


def test_sums_are_cut_where_columns_are_few() -> None:
    assert tile_for(64, 64, [1024], 2048).splits > 1
    assert tile_for(64, 64, [32768], 2048).splits == 1
    assert tile_for(64, 64, [2048, 1024, 1024], 1024).splits == 1  # a block lies in one part


@pytest.mark.skipif(INTERPRETED, reason="a GPU's memory is what is asked for here")
@pytest.mark.parametrize("rank", [8, 32, 64])
@pytest.mark.parametrize(
    ("rows", "tile"), [(1, 16), (16, 16), (20, 64), (64, 64), (128, 64), (256, 64), (160, 128), (256, 128)]
)
@pytest.mark.parametrize(
    ("width", "outs"), [(1024, [2048, 1024, 1024]), (1024, [3072, 3072]), (3072, [1024]), (4096, [4096])]
)
def test_real_sizes_fit(rank: int, rows: int, tile: int, width: int, outs: list[int]) -> None:
    x, weight = random(rows, width), random(width, sum(outs), seed=1).t() / width**0.5
    a = random(len(outs) * rank, width, seed=2) / width**0.5
    bs = [random(rank, out, seed=3 + i) for i, out in enumerate(outs)]
    addresses = torch.tensor([[rank, a.data_ptr(), *(b.data_ptr() for b in bs)]], device=DEVICE)
    cells = torch.from_numpy(cut_tiles([(0, 0, rows)], tile)).to(DEVICE)
    adapters = SiteAdapters(
        AdapterTable(addresses, torch.full((1,), 0.5, device=DEVICE), rank),
        RowTiles(cells, tile),
        1,
        width,
        outs,
    )
    us = (x.float() @ a.float().t()).split(rank, 1)
    part = torch.cat([u @ b.float() for u, b in zip(us, bs, strict=True)], 1)
    want, one = x.float() @ weight.float().t() + 0.5 * part, FusedProjection(x, weight, adapters)
    assert_near((one.total(), one.addend().sum(0)), (want, want))
    if len(outs) == 2:
        assert_near((one.swiglu(),), (plain.swiglu(want),))
    if len(outs) == 3:
        (cos, sin), norm = angles(rows, 128), random(128, seed=6)
        wide = cos.float(), sin.float(), (16, 8), (norm.float(), norm.float()), 1e-5
        assert_near(one.rotate(cos, sin, (16, 8), (norm, norm), 1e-5), plain.rotate(want, *wide)[:3])


@pytest.mark.parametrize(
    ("rows", "tile", "tiles", "does"),
    [(64, 64, 1, True), (40, 64, 1, True), (256, 128, 2, True), (192, 128, 2, True),
     (1, 16, 1, True), (16, 16, 4, True), (16, 16, 8, False), (32, 16, 2, False),
     (256, 16, 16, False), (256, 64, 16, False)],
)  # fmt: skip
def test_rows_of_many_adapters_are_served_otherwise(rows: int, tile: int, tiles: int, does: bool) -> None:
    _x, weight, adapters, *_ = given(DOWN, [1, 0, 0, 0])
    cells = torch.zeros(3, tiles, dtype=torch.int32)
    assert suits(rows, weight, replace(adapters, tiles=RowTiles(cells, tile))) is does


@pytest.mark.parametrize(
    ("rows", "tile", "tiles", "outs", "does"),
    [(64, 64, 1, 4096, True), (17, 64, 1, 4096, True), (65, 64, 2, 4096, False),
     (64, 64, 1, 24576, False), (16, 16, 1, 4096, False), (64, 16, 4, 4096, False)],
)  # fmt: skip
def test_large_weights_are_served_where_rows_and_columns_are_few(
    rows: int, tile: int, tiles: int, outs: int, does: bool
) -> None:
    _x, _weight, one, *_ = given(DOWN, [1, 0, 0, 0])
    cells = torch.zeros(6, tiles, dtype=torch.int32)
    adapters = SiteAdapters(one.table, RowTiles(cells, tile), 1, 4096, [outs])
    weight = torch.empty(outs, 4096, dtype=BF16, device=DEVICE)
    assert suits(rows, weight, adapters) is does


def test_split_in_two_where_a_sampler_can_match_it() -> None:
    def shaped(columns: int, features: int) -> torch.Tensor:
        return torch.empty(columns, features, device="meta")

    assert split_in_two(shaped(4096, 12288))
    assert split_in_two(shaped(3584, 18944))
    assert not split_in_two(shaped(4096, 4096))  # short enough
    assert not split_in_two(shaped(9216, 7168))  # the sampler leaves such a product to the library
    assert not split_in_two(shaped(4096, 12288 + 128))  # halves would begin within a block
    assert not split_in_two(shaped(1024, 8000))  # cut as is quickest


def test_large_weights_have_the_sums_of_a_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole, or with many features two of half their length."""
    monkeypatch.setattr(kernel, "LARGE", 0)
    one, want, _held = projected(GATE_UP, [20, 17, 2, 1])
    assert_near((one.swiglu(),), (plain.swiglu(want),))
    one, want, _held = projected(DOWN, [20, 17, 2, 1])
    assert one.addend().shape[0] == 1
    assert_near((one.total(), one.addend()[0]), (want, want))
    monkeypatch.setattr(kernel, "split_in_two", lambda weight: True)
    assert one.addend().shape[0] == 2
    assert_near((one.total(), one.addend().sum(0)), (want, want))

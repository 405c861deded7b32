"""A decoding step's projections left as summands, and what adds them up, against products and `plain`."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from tests.engine.by_kernels import BF16, DEVICE, INTERPRETED, MARKS, random
from tinkex.engine.cuda import grouped
from tinkex.engine.cuda import lora_kernels as lora
from tinkex.engine.cuda import step_kernels as step
from tinkex.engine.torch import plain
from tinkex.engine.torch.adapters import Adapter
from tinkex.engine.torch.hooks import Part, Site, Sites
from tinkex.engine.torch.lora import PlainLora
from tinkex.types.params import LoraConfig

pytestmark = MARKS

BOUND = 1e-5 if INTERPRETED else 1e-2

HEADS, DIM, WIDTH, MLP = (4, 2), 32, 96, 160
QKV, DOWN, GATE_UP = Site(0, "qkv"), Site(0, "down"), Site(0, "gate_up")


def adapter(sites: Sites, rank: int, seed: int, **flags: bool) -> Adapter:
    one = Adapter.fresh(LoraConfig(rank=rank, seed=seed, **flags), sites, DEVICE)
    one.flat.copy_(0.3 * torch.randn(one.flat.shape, generator=torch.Generator().manual_seed(seed)))
    return one


class Case(NamedTuple):
    sums: step.Summands
    want: Tensor  # the projection, by plain operations
    held: list[Adapter | None]  # the table has only their addresses


class Given(NamedTuple):
    x: Tensor
    weight: Tensor
    adapters: step.Adapters
    want: Tensor
    held: list[Adapter | None]


def sites_of(dim: int) -> Sites:
    h, g = (heads * dim for heads in HEADS)
    return {
        QKV: (WIDTH, (Part("q", h, "attn"), Part("k", g, "attn"), Part("v", g, "attn"))),
        GATE_UP: (WIDTH, (Part("gate", MLP, "mlp"), Part("up", MLP, "mlp"))),
        DOWN: (1100, (Part("down", WIDTH, "mlp"),)),
    }


def given(site: Site, lengths: list[int], *, tile: int = 16, dim: int = DIM, whole: bool = False) -> Given:
    """Rows of four adapters, of which one is none and one has nothing on the MLP.

    `whole`: all ranks are multiples of 8, and the kernels know it.
    """
    sites = sites_of(dim)
    in_features, parts = sites[site]
    outs, rows = sum(part.out_features for part in parts), sum(lengths)
    x, weight = random(rows, in_features), random(in_features, outs, seed=1).t() / in_features**0.5
    ones = [
        adapter(sites, 8 if whole else 4, 1),
        None,
        adapter(sites, 16, 2, train_mlp=False),
        adapter(sites, 8, 3),
    ]
    want = PlainLora(ones, lengths)(site, x.float(), x.float() @ weight.float().t())
    there = [one for one in ones if one is not None]
    table = torch.from_numpy(grouped.table_rows(there, [one.flat_as(BF16) for one in there]))
    table = torch.cat((table, torch.zeros(1, table.shape[1], dtype=torch.int64)))
    scales = torch.tensor([one.scale for one in there] + [0.0])
    slots = iter(there.index(one) if one in there else len(there) for one in ones)
    starts = [sum(lengths[:i]) for i in range(5)]
    cells = lora.cut_tiles([(next(slots), a, b) for a, b in pairwise(starts)], tile)
    adapters = step.Adapters(
        lora.Table(table.to(DEVICE), scales.to(DEVICE), 16, whole=whole),
        lora.Tiles(torch.from_numpy(cells.copy()).to(DEVICE), tile),
        lora.Site(grouped.column_of(site), in_features, [part.out_features for part in parts]),
    )
    return Given(x, weight, adapters, want, ones)


def case(site: Site, lengths: list[int], *, library: bool, whole: bool = False) -> Case:
    x, weight, adapters, want, ones = given(site, lengths, whole=whole)
    if not library:
        return Case(step.project(x, weight, adapters), want, ones)
    u = lora.shrink(x, adapters.table, adapters.tiles, adapters.site)
    return Case(step.Summands((x @ weight.t())[None], u, adapters, BF16), want, ones)


def assert_near(got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> None:
    for one, other in zip(got, want, strict=True):
        assert one.shape == other.shape
        assert (one.float() - other.float()).norm() / other.float().norm() < BOUND


products = pytest.mark.parametrize(
    ("lengths", "library"),
    [
        ([1, 0, 0, 0], False),
        ([3, 7, 1, 5], False),
        ([3, 7, 1, 5], True),
        ([20, 17, 2, 1], True),
        ([40, 33, 20, 40], True),
    ],
)


@products
@pytest.mark.parametrize("normed", [False, True])
def test_rotation(lengths: list[int], library: bool, normed: bool) -> None:
    one = case(QKV, lengths, library=library)
    angle = random(sum(lengths), DIM // 2, seed=5).float()
    cos, sin = angle.cos().to(BF16), angle.sin().to(BF16)
    norms = (1 + 0.2 * random(DIM, seed=6), 1 + 0.2 * random(DIM, seed=7)) if normed else None
    wide = None if norms is None else (norms[0].float(), norms[1].float())
    got = one.sums.rotate(cos, sin, HEADS, norms, 1e-5)
    assert_near(got, plain.rotate(one.want, cos.float(), sin.float(), HEADS, wide, 1e-5)[:3])


@products
def test_swiglu(lengths: list[int], library: bool) -> None:
    one = case(GATE_UP, lengths, library=library)
    assert_near((one.sums.swiglu(),), (plain.swiglu(one.want),))


@products
def test_the_sum_itself(lengths: list[int], library: bool) -> None:
    one = case(DOWN, lengths, library=library)
    assert_near((one.sums.total(),), (one.want,))


@pytest.mark.parametrize("library", [False, True])
def test_ranks_that_are_multiples_of_8(library: bool) -> None:
    """Which lets u be read in larger pieces."""
    lengths = [3, 7, 1, 5]
    one, angle = case(QKV, lengths, library=library, whole=True), random(16, DIM // 2, seed=5).float()
    wide = angle.cos().to(BF16).float(), angle.sin().to(BF16).float()
    got = one.sums.rotate(*(x.to(BF16) for x in wide), HEADS, None, 1e-5)
    assert_near(got, plain.rotate(one.want, *wide, HEADS, None, 1e-5)[:3])
    one = case(GATE_UP, lengths, library=library, whole=True)
    assert_near((one.sums.swiglu(),), (plain.swiglu(one.want),))
    one = case(DOWN, lengths, library=library, whole=True)
    assert_near((one.sums.total(),), (one.want,))


def test_a_long_sum_is_cut() -> None:
    one = case(DOWN, [3, 7, 1, 5], library=False)
    assert one.sums.y_SMO.shape[0] > 1
    assert one.sums.u_SMR.shape[0] > 1

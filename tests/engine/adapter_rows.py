"""Rows of several adapters on one projection, and the projection by plain operations as the oracle."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from tests.engine.by_kernels import BF16, DEVICE, INTERPRETED, random
from tests.engine.plain_lora import PlainLora
from tinkex.engine.cuda.adapter_table import (
    AdapterTable,
    RowTiles,
    SiteAdapters,
    column_of,
    cut_tiles,
    table_rows,
)
from tinkex.engine.torch.adapters import Adapter
from tinkex.engine.torch.hooks import Part, Site, Sites
from tinkex.types.params import LoraConfig

BOUND = 1e-5 if INTERPRETED else 1e-2
HEADS, DIM, WIDTH, MLP = (4, 2), 32, 96, 160


QKV, DOWN, GATE_UP = Site(0, "qkv"), Site(0, "down"), Site(0, "gate_up")


def adapter(sites: Sites, rank: int, seed: int, **flags: bool) -> Adapter:
    one = Adapter.fresh(LoraConfig(rank=rank, seed=seed, **flags), sites, DEVICE)
    one.flat.copy_(0.3 * torch.randn(one.flat.shape, generator=torch.Generator().manual_seed(seed)))
    return one


class Given(NamedTuple):
    x: Tensor
    weight: Tensor
    adapters: SiteAdapters
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
    table = torch.from_numpy(table_rows(there, [one.flat_as(BF16) for one in there]))
    table = torch.cat((table, torch.zeros(1, table.shape[1], dtype=torch.int64)))
    scales = torch.tensor([one.scale for one in there] + [0.0])
    slots = iter(there.index(one) if one in there else len(there) for one in ones)
    starts = [sum(lengths[:i]) for i in range(5)]
    cells = cut_tiles([(next(slots), a, b) for a, b in pairwise(starts)], tile)
    adapters = SiteAdapters(
        AdapterTable(table.to(DEVICE), scales.to(DEVICE), 16, vectors=whole),
        RowTiles(torch.from_numpy(cells.copy()).to(DEVICE), tile),
        column_of(site),
        in_features,
        [part.out_features for part in parts],
    )
    return Given(x, weight, adapters, want, ones)


def assert_near(got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> None:
    for one, other in zip(got, want, strict=True):
        assert one.shape == other.shape
        assert (one.float() - other.float()).norm() / other.float().norm() < BOUND

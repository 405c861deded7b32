"""Many rows' products with their adapters in one launch: on a Hopper GPU; elsewhere only that it compiles."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.engine.by_kernels import DEVICE, MARKS, random
from tinkex.engine.cuda import gluon_projection as project
from tinkex.engine.cuda import lora_kernels as lora
from tinkex.engine.cuda.adapter_table import AdapterTable, RowTiles, SiteAdapters, cut_tiles
from tinkex.engine.cuda.fused_projection import FusedProjection, ProductTile

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
pytestmark = [*MARKS, pytest.mark.slow]
hopper = pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")

RANKS, SCALES = [32, 8, 0, 72], [0.5, 2.0, 1.0, 0.25]
LENGTHS = {
    "one": [1100, 0, 0, 0],
    "several": [700, 1, 130, 269],
    "pieces": [1, 127, 2, 970],
}
SITES = {"qkv": (512, [2048, 1024, 1024]), "down": (3072, [4096]), "unembed": (384, [5000])}


class Case:
    """Rows of four adapters, of which one has rank 0, on a frozen product."""

    def __init__(
        self, site: str, lengths: list[int], *, by_rows: bool, padding: int = 0, exact: bool = True
    ) -> None:
        self.width, self.outs = SITES[site]
        self.lengths, rows = lengths, sum(lengths)
        self.x, self.grad = random(rows, self.width), random(rows, sum(self.outs), seed=1)
        weight = random(self.width, sum(self.outs), seed=2) / self.width**0.5
        self.weight = weight.t().contiguous() if by_rows else weight.t()
        self.a = [random(len(self.outs) * r, self.width, seed=3 + r) / self.width**0.5 for r in RANKS]
        self.b = [[random(r, out, seed=90 + r + i) for i, out in enumerate(self.outs)] for r in RANKS]
        addresses = [[r, *(m.data_ptr() if r else 0 for m in (a, *b))] for r, a, b in self._adapters()]
        scales = torch.tensor(SCALES, device=DEVICE)
        table = AdapterTable(torch.tensor(addresses, device=DEVICE), scales, max(RANKS), invariant=True)
        ends = np.cumsum(lengths).tolist()
        cells = cut_tiles(
            [(i, end - n, end) for i, (n, end) in enumerate(zip(lengths, ends, strict=True))], 64
        )
        filled = np.zeros((6, cells.shape[1] + padding), np.int32)
        filled[:, : cells.shape[1]] = cells
        filled[3, cells.shape[1] :] = cells.shape[1] + (0 if exact else padding // 2)
        tiles = RowTiles(torch.from_numpy(filled).to(DEVICE), 64)
        self.at = SiteAdapters(table, tiles, 1, self.width, self.outs)

    def _adapters(self) -> list[tuple[int, Tensor, list[Tensor]]]:
        return list(zip(RANKS, self.a, self.b, strict=True))

    def project(self) -> Tensor:
        assert project.suits(len(self.x), self.weight, self.outs)
        return project_alone(self)

    def project_back(self, grad_u: Tensor) -> Tensor:
        grad_x = torch.full_like(self.x, torch.nan)
        return project.project(self.grad, self.weight.t(), grad_u, self.at.a, grad_x)

    def wanted(self) -> Tensor:
        parts = []
        for x, (rank, a, b), scale in zip(self.x.split(self.lengths), self._adapters(), SCALES, strict=True):
            us = (x.float() @ a.float().t()).split(max(rank, 1), 1) if rank else []
            added = torch.cat([u @ one.float() for u, one in zip(us, b, strict=True)], 1) if rank else 0
            parts.append(x.float() @ self.weight.float().t() + scale * added)
        return torch.cat(parts)

    def wanted_back(self, grad_u: Tensor) -> Tensor:
        parts = []
        split = zip(self.grad.split(self.lengths), grad_u.split(self.lengths), strict=True)
        for (grad, du), (rank, a, _), scale in zip(split, self._adapters(), SCALES, strict=True):
            added = du[:, : len(self.outs) * rank].float() @ a.float()
            parts.append(grad.float() @ self.weight.float() + scale * added)
        return torch.cat(parts)


def project_alone(case: Case) -> Tensor:
    (u,) = lora.shrink(case.x, case.at.a)
    return project.project(case.x, case.weight, u, case.at.b)


def off(got: Tensor, want: Tensor) -> float:
    return float((got.float() - want).norm() / want.norm())


@hopper
@pytest.mark.parametrize("site", SITES)
@pytest.mark.parametrize("by_rows", [False, True], ids=["by-inputs", "by-outputs"])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_the_product_and_the_gradient(site: str, lengths: list[int], by_rows: bool):
    case = Case(site, lengths, by_rows=by_rows)
    assert off(case.project(), case.wanted()) < 4e-3
    if case.width % 256 == 0:
        grad_u = random(len(case.x), len(case.outs) * max(RANKS), seed=5)
        assert off(case.project_back(grad_u), case.wanted_back(grad_u)) < 4e-3


@hopper
def test_tiles_that_do_nothing_change_nothing():
    """As in a captured step that serves fewer rows than it could; also if rows are said to be theirs."""
    want = Case("qkv", LENGTHS["several"], by_rows=True).project()
    for exact in (True, False):
        case = Case("qkv", LENGTHS["several"], by_rows=True, padding=40, exact=exact)
        assert torch.equal(case.project(), want)


@hopper
def test_rows_without_a_tile_are_the_frozen_products():
    case = Case("qkv", LENGTHS["several"], by_rows=True)
    few = Case("qkv", [300, 1, 130, 0], by_rows=True, padding=40)
    at = replace(case.at, tiles=few.at.tiles)
    (u,) = lora.shrink(case.x, at.a)
    got = project.project(case.x, case.weight, u, at.b)
    assert torch.equal(got[:301], project_alone(few)[:301])
    assert off(got[512:], case.x[512:].float() @ case.weight.float().t()) < 4e-3


@hopper
@pytest.mark.parametrize("number", [torch.inf, -torch.inf, torch.nan])
def test_what_is_not_finite_stays_with_its_run(number: float):
    """A tile has rows of several adapters, and multiplies each of those with all of it."""
    case = Case("qkv", LENGTHS["several"], by_rows=True)
    want, first = case.project(), LENGTHS["several"][0]
    for b in case.b[0]:
        b.fill_(number)
    got = case.project()
    assert torch.equal(got[first:], want[first:])
    assert not got[:first].isfinite().all()


@hopper
@pytest.mark.parametrize("site", ["qkv", "unembed"])  # of weights that are not rounded first
def test_a_few_rows_by_themselves_are_bitwise_the_same(site: str):
    case = Case(site, LENGTHS["one"], by_rows=False)
    few = RowTiles(torch.from_numpy(cut_tiles([(0, 0, 64)], 64)).to(DEVICE), 64)
    table = AdapterTable(case.at.table.addresses, case.at.table.scales, RANKS[0])
    alone = FusedProjection(case.x[:64].contiguous(), case.weight, replace(case.at, table=table, tiles=few))
    assert torch.equal(case.project()[:64], alone.splits(ProductTile(64, 64))[0])


COMPILES = """
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime.jit import create_function_from_signature
from tinkex.engine.cuda.adapter_table import AdapterTable, RowTiles, SiteAdapters
from tinkex.engine.cuda import gluon_projection as project

target = GPUTarget("cuda", 90, 32)
backend = make_backend(target)
kernel = project._project._kernel

class Compile:
    def __getitem__(self, grid):
        def launch(*arguments, **constants):
            bind = create_function_from_signature(kernel.signature, kernel.params, backend)
            bound, special, rest = bind(*arguments, **constants)
            options, *given = kernel._pack_args(backend, constants, bound, special, rest)
            source = GluonASTSource(kernel, *given)
            done = triton.compile(source, target=target, options=options.__dict__)
            assert done.metadata.shared <= 232_448, done.metadata.shared
            assert "wgmma" in done.asm["ptx"]
        return launch

project._project = Compile()
some = lambda *shape, dtype=torch.bfloat16: torch.zeros(shape, dtype=dtype)
table = AdapterTable(some(2, 32, dtype=torch.int64), some(2, dtype=torch.float32), 32)
at = SiteAdapters(table, RowTiles(some(6, 16, dtype=torch.int32), 64), 5, 1024, [2048, 1024, 1024])
for weight in (some(4096, 1024), some(1024, 4096).t()):
    project.project(some(1000, 1024), weight, some(1000, 96), at.b)
    project.project(some(1000, 4096), weight.t(), some(1000, 96), at.a)
"""


def test_it_compiles_for_hopper():
    """With the Triton that is installed, which may call things differently; needs no GPU."""
    source = Path(project.__file__).parents[3]
    environment = os.environ | {"PYTHONPATH": str(source)}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run([sys.executable, "-c", COMPILES], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr

"""Rotation and SwiGLU that add the adapters' up-projection, against plain operations on the whole sum."""

from __future__ import annotations

from typing import NamedTuple

import pytest
from torch import Tensor

from tests.engine.adapter_rows import DIM, GATE_UP, HEADS, QKV, assert_near, given
from tests.engine.by_kernels import BF16, MARKS, random
from tinkex.engine.cuda import lora_kernels as lora
from tinkex.engine.cuda.deferred_expand import DeferredExpand
from tinkex.engine.torch import plain
from tinkex.engine.torch.adapters import Adapter
from tinkex.engine.torch.hooks import Site

pytestmark = [*MARKS, pytest.mark.slow]


class Case(NamedTuple):
    deferred: DeferredExpand
    want: Tensor  # the projection, by plain operations
    held: list[Adapter | None]  # the table has only their addresses


def case(site: Site, lengths: list[int], *, splits: int | None = None, whole: bool = False) -> Case:
    x, weight, adapters, want, ones = given(site, lengths, whole=whole)
    u = lora.shrink(x, adapters.a, splits)
    return Case(DeferredExpand(x @ weight.t(), u, adapters), want, ones)


rows = pytest.mark.parametrize("lengths", [[1, 0, 0, 0], [3, 7, 1, 5], [20, 17, 2, 1], [40, 33, 20, 40]])
splits = pytest.mark.parametrize("splits", [None, 1, 2])


@rows
@splits
@pytest.mark.parametrize("normed", [False, True])
def test_rotation(lengths: list[int], splits: int | None, normed: bool) -> None:
    one = case(QKV, lengths, splits=splits)
    angle = random(sum(lengths), DIM // 2, seed=5).float()
    cos, sin = angle.cos().to(BF16), angle.sin().to(BF16)
    norms = (1 + 0.2 * random(DIM, seed=6), 1 + 0.2 * random(DIM, seed=7)) if normed else None
    wide = None if norms is None else (norms[0].float(), norms[1].float())
    got = one.deferred.rotate(cos, sin, HEADS, norms, 1e-5)
    assert_near(got, plain.rotate(one.want, cos.float(), sin.float(), HEADS, wide, 1e-5)[:3])


@rows
@splits
def test_swiglu(lengths: list[int], splits: int | None) -> None:
    one = case(GATE_UP, lengths, splits=splits)
    assert_near((one.deferred.swiglu(),), (plain.swiglu(one.want),))


def test_ranks_that_are_multiples_of_8() -> None:
    """u is then loaded 16 bytes at a time."""
    lengths = [3, 7, 1, 5]
    one, angle = case(QKV, lengths, whole=True), random(16, DIM // 2, seed=5).float()
    wide = angle.cos().to(BF16).float(), angle.sin().to(BF16).float()
    got = one.deferred.rotate(*(x.to(BF16) for x in wide), HEADS, None, 1e-5)
    assert_near(got, plain.rotate(one.want, *wide, HEADS, None, 1e-5)[:3])
    one = case(GATE_UP, lengths, whole=True)
    assert_near((one.deferred.swiglu(),), (plain.swiglu(one.want),))

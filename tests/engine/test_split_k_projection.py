"""A decoding step's projections left as summands, and what adds them up, against products and `plain`."""

from __future__ import annotations

from typing import NamedTuple

import pytest
from torch import Tensor

from tests.engine.adapter_rows import DIM, DOWN, GATE_UP, HEADS, QKV, assert_near, given
from tests.engine.by_kernels import BF16, MARKS, random
from tinkex.engine.cuda import lora_kernels as lora
from tinkex.engine.cuda import split_k_projection as step
from tinkex.engine.torch import plain
from tinkex.engine.torch.adapters import Adapter
from tinkex.engine.torch.hooks import Site

pytestmark = [*MARKS, pytest.mark.slow]


class Case(NamedTuple):
    sums: step.SplitKProjection
    want: Tensor  # the projection, by plain operations
    held: list[Adapter | None]  # the table has only their addresses


def case(site: Site, lengths: list[int], *, library: bool, whole: bool = False) -> Case:
    x, weight, adapters, want, ones = given(site, lengths, whole=whole)
    if not library:
        return Case(step.project(x, weight, adapters), want, ones)
    u = lora.shrink(x, adapters.table, adapters.tiles, adapters.site)
    return Case(step.SplitKProjection((x @ weight.t())[None], u, adapters, BF16), want, ones)


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

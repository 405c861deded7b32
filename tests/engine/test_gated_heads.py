"""Kernels of attention with gates and partial rotation against the plain block."""

from __future__ import annotations

import pytest
import torch

from tests.engine.by_kernels import BF16, INTERPRETED, MARKS, random
from tinkex.engine.cuda import gated_heads
from tinkex.engine.cuda.gated_heads import HeadShape
from tinkex.engine.torch import plain
from tinkex.engine.torch.models.attend import turn

pytestmark = [*MARKS, pytest.mark.slow]
BOUND = 1e-5 if INTERPRETED else 1e-2


def off(got: torch.Tensor, want: torch.Tensor) -> float:
    got, want = got.detach().double(), want.detach().double()
    return float((got - want).norm() / want.norm())


@pytest.mark.parametrize("gate", [False, True])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("heads", "dim", "pairs"), [((4, 2), 32, 4), ((3, 1), 24, 6), ((2, 1), 16, 8)])
def test_heads_are_split_normalised_and_rotated(
    heads: tuple[int, int], dim: int, pairs: int, normed: bool, gate: bool
) -> None:
    (h, g), shape = heads, HeadShape(*heads, dim, gate)
    qkv, angle = random(5, shape.width), random(5, pairs, seed=1, dtype=torch.float32)
    cos, sin = angle.cos().to(BF16), angle.sin().to(BF16)
    norms = (
        tuple(1 + 0.2 * random(dim, seed=2 + i, dtype=torch.float32) for i in range(2)) if normed else None
    )
    q_norm, k_norm = norms or (None, None)
    leaf, wide = qkv.clone().requires_grad_(), qkv.float().requires_grad_()
    got = gated_heads.SplitHeads.apply(leaf, cos, sin, shape, q_norm, k_norm, 1e-5)

    q, k, v = wide.split([(1 + gate) * h * dim, g * dim, g * dim], 1)
    q, *gates = q.unflatten(1, (h, -1)).split(dim, 2)
    k, v = k.unflatten(1, (g, -1)), v.unflatten(1, (g, -1))
    if norms is not None:
        q, k = (
            x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * n
            for x, n in zip((q, k), norms, strict=True)
        )
    want = [*(turn(x, cos.float(), sin.float(), False) for x in (q, k)), v, *gates]
    assert len(got) == 3 + gate
    to = [random(*x.shape, seed=10 + i) for i, x in enumerate(want)]
    for one, other in zip(got, want, strict=True):
        assert off(one, other) < BOUND
    (mine,), (theirs,) = (
        torch.autograd.grad(out, x, [t.to(x.dtype) for t in to]) for out, x in ((got, leaf), (want, wide))
    )
    assert off(mine, theirs) < BOUND


def test_results_are_gated() -> None:
    o, gates, to = (random(7, 3, 40, seed=i) for i in range(3))
    leaves, wide = ([x.to(dtype).requires_grad_() for x in (o, gates)] for dtype in (BF16, torch.float32))
    got, want = gated_heads.GateHeads.apply(*leaves), wide[0] * wide[1].sigmoid()
    assert off(got, want) < BOUND
    back = torch.autograd.grad(got, leaves, to), torch.autograd.grad(want, wide, to.float())
    for one, other in zip(*back, strict=True):
        assert off(one, other) < BOUND


def test_whole_heads_are_rotated_as_by_the_plain_function() -> None:
    qkv, angle = random(4, 4 * 16), random(4, 8, seed=1, dtype=torch.float32)
    cos, sin = angle.cos().to(BF16), angle.sin().to(BF16)
    got = gated_heads.split(qkv, cos, sin, HeadShape(2, 1, 16, False), None, 1e-5)
    for one, other in zip(
        got, plain.rotate(qkv.float(), cos.float(), sin.float(), (2, 1), None, 1e-5)[:3], strict=False
    ):
        assert off(one, other) < BOUND

"""The fast attention against the plain one, forward and backward; the plain one against a loop in numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from tinkex.engine.torch.models.attend import PackedAttend, attend


def attend_plain(q_BLHC: Tensor, k_BLGC: Tensor, v_BLGC: Tensor, window: int | None = None) -> Tensor:
    """softmax(q·k / √C)·v written out. A query sees itself and earlier positions, `window` in all."""
    (b, l, h, c), g = q_BLHC.shape, k_BLGC.shape[2]
    q, at = q_BLHC.reshape(b, l, g, h // g, c), torch.arange(l)
    scores = torch.einsum("bsgrc,blgc->bgrsl", q, k_BLGC) / c**0.5
    seen = (at <= at[:, None]) & (at > at[:, None] - (window or l))
    scores = scores.masked_fill(~seen, float("-inf"))
    return torch.einsum("bgrsl,blgc->bsgrc", scores.softmax(dim=-1), v_BLGC).reshape(b, l, h, c)


def qkv(b: int, l: int, h: int = 4, g: int = 2, c: int = 16) -> list[Tensor]:
    generator = torch.Generator().manual_seed(l * 101)
    shapes = ((b, l, h, c), (b, l, g, c), (b, l, g, c))
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


def test_plain_equals_a_loop() -> None:
    q, k, v = (x.detach().numpy() for x in qkv(1, 9))
    expected = np.zeros_like(q)
    for at in range(9):
        for head in range(4):
            keys = slice(max(0, at - 2), at + 1)  # a window of 3
            scores = k[0, keys, head // 2] @ q[0, at, head] / 4
            weights = np.exp(scores - scores.max())
            expected[0, at, head] = weights @ v[0, keys, head // 2] / weights.sum()
    ours = attend_plain(*(torch.from_numpy(x) for x in (q, k, v)), window=3)
    np.testing.assert_allclose(ours.numpy(), expected, atol=1e-5)


@pytest.mark.parametrize("window", [None, 1, 5, 16, 100])
@pytest.mark.parametrize(("b", "l"), [(1, 1), (3, 40), (2, 33), (1, 300)])
def test_fast_equals_plain(b: int, l: int, window: int | None) -> None:
    inputs, results = qkv(b, l), []
    for function in (attend, attend_plain):
        o = function(*inputs, window=window)
        results.append(
            (o, *torch.autograd.grad((o * torch.linspace(-1, 1, o.numel()).view_as(o)).sum(), inputs))
        )
    for fast, plain in zip(*results, strict=True):
        torch.testing.assert_close(fast, plain, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 1)])
def test_heads_share_keys(heads: tuple[int, int]) -> None:
    q, k, v = qkv(2, 12, *heads)
    torch.testing.assert_close(attend(q, k, v), attend_plain(q, k, v), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("lengths", [[6], [6, 6, 6], [3, 9, 9, 1, 1, 3]])
def test_packed_sequences_do_not_see_each_other(lengths: list[int]) -> None:
    total = sum(lengths)
    inputs = [x.detach()[0].requires_grad_() for x in qkv(1, total)]
    packed = PackedAttend(lengths, [4, None])
    for layer, window in enumerate((4, None)):
        o = packed(layer, *inputs)
        pieces = zip(*(x.split(lengths) for x in inputs), strict=True)
        one_by_one = torch.cat(
            [attend_plain(*(x[None] for x in piece), window=window)[0] for piece in pieces]
        )
        torch.testing.assert_close(o, one_by_one, atol=2e-5, rtol=1e-4)
        ramp = torch.linspace(-1, 1, o.numel()).view_as(o)
        got = torch.autograd.grad((o * ramp).sum(), inputs)
        want = torch.autograd.grad((one_by_one * ramp).sum(), inputs)
        for ours, theirs in zip(got, want, strict=True):
            torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-4)

"""The decoder's elementwise steps and products against plain torch, forward and backward."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tinkex.engine.torch import functions
from tinkex.engine.torch.models.moe import expert_linear

Outputs = Tensor | tuple[Tensor, ...]


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def assert_same(ours: Callable[..., Outputs], plain: Callable[..., Outputs], *inputs: Tensor) -> None:
    """Equal outputs, with and without gradients asked for, and equal gradients of every input."""
    results = []
    for function in (ours, plain):
        leaves = [x.clone().requires_grad_() for x in inputs]
        outputs = function(*leaves)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        loss = sum((o * random(*o.shape, seed=i)).sum() for i, o in enumerate(outputs))
        assert isinstance(loss, Tensor)
        loss.backward()
        results.append([*(o.detach() for o in outputs), *(x.grad for x in leaves)])
    with torch.no_grad():
        bare = ours(*inputs)
    results[0] += bare if isinstance(bare, tuple) else (bare,)
    results[1] += results[1][: len(results[0]) - len(results[1])]
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, atol=2e-5, rtol=1e-4)


def plain_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * weight


def test_rms_norm() -> None:
    weight = random(24, seed=5)
    assert_same(
        lambda x: functions.rms_norm(functions.Stream(x), weight, 1e-5),
        lambda x: plain_norm(x, weight),
        random(7, 24),
    )


def flat(normed: tuple[functions.Stream, Tensor]) -> tuple[Tensor, Tensor]:
    assert normed[0].rest is None  # in fp32 there is nothing to keep
    return normed[0].x, normed[1]


def test_add_rms_norm() -> None:
    weight = random(24, seed=5)
    assert_same(
        lambda x, d: flat(functions.add_rms_norm(functions.Stream(x), d, weight, 1e-5)),
        lambda x, d: (x + d, plain_norm(x + d, weight)),
        random(7, 24),
        random(7, 24, seed=1),
    )


def test_add_rms_norm_when_only_the_stream_is_used() -> None:
    x = random(3, 8).requires_grad_()
    functions.add_rms_norm(functions.Stream(x), random(3, 8), random(8), 1e-5)[0].x.sum().backward()
    assert x.grad is not None
    assert bool((x.grad == 1).all())


def test_a_bf16_stream_keeps_what_rounding_takes() -> None:
    deltas, weight = [random(5, 32, seed=i).to(torch.bfloat16) for i in range(60)], torch.ones(32)
    stream = functions.Stream(random(5, 32, seed=60).to(torch.bfloat16).requires_grad_())
    exact, rounded = stream.x.detach().float(), stream.x.detach()
    first = stream.x
    for i, delta in enumerate(deltas):
        exact, rounded = exact + delta, rounded + delta
        if i % 2:
            stream = functions.add(stream, delta)
        else:
            stream, y = functions.add_rms_norm(stream, delta, weight.to(torch.bfloat16), 1e-5)
            assert (y - plain_norm(exact, weight)).abs().max() < 0.02
    assert stream.rest is not None
    assert not stream.rest.requires_grad
    kept = (stream.x.float() + stream.rest.float() - exact).abs().max()
    assert kept < (rounded.float() - exact).abs().max() / 50
    stream.x.sum().backward()
    assert first.grad is not None
    assert bool((first.grad == 1).all())


def test_swiglu() -> None:
    assert_same(functions.swiglu, lambda x: F.silu(x[:, :5]) * x[:, 5:], random(6, 10))


@pytest.mark.parametrize("normed", [False, True])
def test_split_rotate(normed: bool) -> None:
    h, g, c = 4, 2, 8
    angle = random(5, c // 2, seed=3)
    q_norm, k_norm = 1 + 0.3 * random(2, c, seed=4)

    def plain(qkv: Tensor) -> tuple[Tensor, ...]:
        x = qkv.view(5, h + 2 * g, c)
        qk, v = x[:, : h + g], x[:, h + g :]
        if normed:
            qk = torch.cat((plain_norm(qk[:, :h], q_norm), plain_norm(qk[:, h:], k_norm)), dim=1)
        pairs = torch.complex(*qk.chunk(2, dim=-1))
        turned = pairs * torch.polar(torch.ones_like(angle), angle)[:, None]
        qk = torch.cat((turned.real, turned.imag), dim=-1)
        return qk[:, :h], qk[:, h:], v

    def ours(qkv: Tensor) -> tuple[Tensor, ...]:
        norms = (q_norm, k_norm) if normed else None
        return functions.split_rotate(qkv, angle.cos(), angle.sin(), (h, g), norms, 1e-5)

    assert_same(ours, plain, random(5, (h + 2 * g) * c))


@pytest.mark.parametrize("rows", [1, 5, 300])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
def test_linear(rows: int, bias: bool, transposed: bool) -> None:
    """Large enough that the CPU takes its own path, in both memory layouts."""
    weight = random(256, 320, seed=1) / 16
    if transposed:
        weight = weight.T.contiguous().T
    b = random(256, seed=2) if bias else None
    assert_same(lambda x: functions.linear(x, weight, b), lambda x: F.linear(x, weight, b), random(rows, 320))


@pytest.mark.parametrize("rows", [1, 2, 3, 16, 300])
@pytest.mark.parametrize("shape", [(256, 320), (320, 256)])
@pytest.mark.parametrize("transposed", [False, True])
def test_a_packed_weight_gives_the_same_product(rows: int, shape: tuple[int, int], transposed: bool) -> None:
    """Where no gradient is needed: every kernel that the number of rows may choose."""
    weight = random(*shape, seed=1) / 16
    if transposed:
        weight = weight.T.contiguous().T
    x, b, packed = random(rows, shape[1]), random(shape[0], seed=2), functions.pack(weight)
    expected = F.linear(x.double(), weight.double(), b.double()).float()
    for bias in (None, b):
        wanted = expected if bias is not None else expected - b
        torch.testing.assert_close(functions.linear(x, weight, bias, packed), wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("counts", [[3, 0, 5, 2], [0, 0, 10, 0]])
def test_expert_linear(counts: list[int]) -> None:
    weight, chosen = random(4, 6, 8, seed=1), torch.repeat_interleave(torch.arange(4), torch.tensor(counts))

    def plain(x: Tensor) -> Tensor:
        return torch.einsum("ni,noi->no", x, weight[chosen])

    assert_same(lambda x: expert_linear(x, weight, torch.tensor(counts)), plain, random(10, 8))

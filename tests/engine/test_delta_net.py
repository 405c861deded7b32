"""The gated delta rule: chunks equal steps and transformers, packed sequences single ones."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen

from tinkex.engine.torch.models.delta_net import Chunks, conv_silu, delta_chunks, delta_step, unit

pytestmark = pytest.mark.slow  # it imports models of transformers, which takes seconds

K, H, D, V = 2, 4, 16, 8
PACKED = ([70, 5, 130, 64, 1], [64, 64], [128], [3, 3, 3], [1, 200])


def _inputs(tokens: int) -> list[Tensor]:
    torch.manual_seed(tokens)
    q, k = unit(torch.randn(tokens, K, D)) / D**0.5, unit(torch.randn(tokens, K, D))
    return [q, k, torch.randn(tokens, H, V), -torch.rand(tokens, H), torch.rand(tokens, H)]


def _chunks(lengths: Sequence[int]) -> Chunks:
    return Chunks(lengths, torch.device("cpu"))


def _reference(inputs: list[Tensor], state: Tensor) -> tuple[Tensor, Tensor]:
    q, k = (x.repeat_interleave(H // K, 1)[None] for x in inputs[:2])
    v, g, beta = (x[None] for x in inputs[2:])
    o, state = qwen.torch_chunk_gated_delta_rule(
        q * D**0.5, k, v, g=g, beta=beta, initial_state=state[None], output_final_state=True
    )
    return o[0], state[0]


@pytest.mark.parametrize("lengths", PACKED)
def test_packed_chunks_equal_transformers_on_each_sequence(lengths: list[int]) -> None:
    inputs, state = _inputs(sum(lengths)), torch.randn(len(lengths), H, D, V)
    o, final = delta_chunks(*inputs, _chunks(lengths), state)
    split = zip(*(x.split(lengths) for x in (*inputs, o)), strict=True)
    for i, (*one, got) in enumerate(split):
        want, after = _reference(one, state[i])
        torch.testing.assert_close(got, want, rtol=0, atol=1e-5)
        torch.testing.assert_close(final[i], after, rtol=0, atol=1e-5)


def test_steps_equal_chunks() -> None:
    inputs = _inputs(2 * 70)
    o, final = delta_chunks(*inputs, _chunks([70, 70]))
    state, steps = torch.zeros(2, H, D, V), []
    for at in zip(*(x.unflatten(0, (2, 70)).unbind(1) for x in inputs), strict=True):
        steps.append(delta_step(*at, state))
    torch.testing.assert_close(torch.stack(steps, 1).flatten(0, 1), o, rtol=0, atol=1e-5)
    torch.testing.assert_close(state, final, rtol=0, atol=1e-5)


def test_a_sequence_goes_on_from_its_state() -> None:
    inputs = _inputs(150)
    o, final = delta_chunks(*inputs, _chunks([150]))
    first, state = delta_chunks(*(x[:83] for x in inputs), _chunks([83]))
    rest, after = delta_chunks(*(x[83:] for x in inputs), _chunks([67]), state)
    torch.testing.assert_close(torch.cat((first, rest)), o, rtol=0, atol=1e-5)
    torch.testing.assert_close(after, final, rtol=0, atol=1e-5)


@pytest.mark.parametrize("lengths", PACKED)
def test_gradients_equal_those_of_transformers(lengths: list[int]) -> None:
    inputs = [x.requires_grad_() for x in _inputs(sum(lengths))]
    o, _ = delta_chunks(*inputs, _chunks(lengths))
    to = torch.randn_like(o)
    got = torch.autograd.grad(o, inputs, to)
    split = zip(*(x.split(lengths) for x in inputs), strict=True)
    o = torch.cat([_reference(list(one), torch.zeros(H, D, V))[0] for one in split])
    for mine, want in zip(got, torch.autograd.grad(o, inputs, to), strict=True):
        torch.testing.assert_close(mine, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("lengths", PACKED)
def test_convolution_stays_within_sequences(lengths: list[int]) -> None:
    x, weight, before = (torch.randn(s, 6) for s in (sum(lengths), 4, 3 * len(lengths)))
    x.requires_grad_()
    y, last = conv_silu(x, weight, lengths, before.unflatten(0, (-1, 3)))
    to, want, ends = torch.randn_like(y), [], []
    for one, carried in zip(x.split(lengths), before.split(3), strict=True):
        seen = torch.cat((carried, one))
        ends.append(seen[-3:])
        want.append(silu(sum(weight[i] * seen[i : i + len(one)] for i in range(4))))
    torch.testing.assert_close(y, torch.cat(want))
    torch.testing.assert_close(last, torch.stack(ends))
    (got,), (asked,) = (torch.autograd.grad(o, x, to) for o in (y, torch.cat(want)))
    torch.testing.assert_close(got, asked)

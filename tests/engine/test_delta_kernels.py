"""The kernels of gated delta nets against the plain layer: chunks, gradients, states, single steps."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.engine.by_kernels import BF16, DEVICE, INTERPRETED, MARKS, random
from tinkex.engine.torch.models.architecture import DeltaConfig
from tinkex.engine.torch.models.delta_net import DeltaNet
from tinkex.engine.torch.models.families import model_config
from tinkex.engine.torch.states import StateGroup, StatePool

from tinkex.engine.cuda import delta_gradients, delta_kernels  # isort: skip
from tinkex.engine.cuda.delta_kernels import ChunkLayout, DeltaWeights, SlotStates, WalkTile  # isort: skip

pytestmark = [*MARKS, pytest.mark.slow]

K, H, D, V = 1, 2, 16, 32
CONFIG = DeltaConfig(K, H, D, V, 4)
# Of bf16, which rounds q and k of length 1: with heads of 16 numbers q·k is off by 5e-4, and the norm of a
# small result makes that large. `test_heads_of_real_models` has the bound for heads of 128.
BOUND = 1e-4 if INTERPRETED else 8e-2
PACKED = ([70, 5, 130, 1], [64, 2], [3, 3])


class Wide(DeltaNet):
    """The plain layer in fp32, with random weights; `weights` are those of the kernels."""

    def __init__(self, config: DeltaConfig = CONFIG, seed: int = 0) -> None:
        fields = {
            "model_type": "qwen3", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
            "num_key_value_heads": 1, "head_dim": 16, "intermediate_size": 32, "vocab_size": 64,
            "max_position_embeddings": 64,
        }  # fmt: skip
        super().__init__(model_config(fields), config, 0)
        for i, (name, scale) in enumerate((("conv", 0.5), ("a_log", 0.5), ("dt_bias", 0.5), ("norm", 0.3))):
            weight = getattr(self, name)
            values = random(*weight.shape, seed=100 * seed + i, dtype=BF16).float() * scale
            setattr(self, name, torch.nn.Parameter((values + (name == "norm")).to(BF16).float(), False))
        self.held = DeltaWeights(
            config,
            *(w.data.to(DEVICE, BF16) for w in (self.conv, self.a_log, self.dt_bias, self.norm)),
            self.eps,
        )
        self.to(DEVICE)


def inputs(tokens: int, seed: int, config: DeltaConfig = CONFIG) -> tuple[Tensor, Tensor]:
    qkvz = random(tokens, config.channels + config.widths[3], seed=seed)
    return qkvz, random(tokens, 2 * config.value_heads, seed=seed + 1)


def close(got: Tensor, want: Tensor, bound: float = BOUND) -> None:
    """To rounding: in fp32 of every number, in bf16 of all of them together."""
    if INTERPRETED:
        scale = want.abs().max().clamp_min(1e-3)
        torch.testing.assert_close(got.float() / scale, want.float() / scale, rtol=0, atol=bound)
    else:
        off = (got.float() - want.float()).norm() / want.float().norm().clamp_min(1e-3)
        assert off <= bound, float(off)


@pytest.mark.parametrize("lengths", PACKED)
def test_chunks_and_gradients_equal_the_plain_layer(lengths: list[int]) -> None:
    check_gradients(lengths, CONFIG, BOUND)


@pytest.mark.skipif(INTERPRETED, reason="hours in the interpreter")
def test_heads_of_real_models() -> None:
    check_gradients([700, 5, 300], DeltaConfig(2, 4, 128, 128, 4), 2e-2)


def check_gradients(lengths: list[int], config: DeltaConfig, bound: float) -> None:
    net, (qkvz, rates) = Wide(config, seed=len(lengths)), inputs(sum(lengths), 7, config)
    wide = [x.float().requires_grad_() for x in (qkvz, rates)]
    want = net.mixed(*wide, [StateGroup(lengths, DEVICE)])
    given = [x.requires_grad_() for x in (qkvz, rates)]
    layout = delta_kernels.lay_out(lengths, DEVICE)
    got = delta_gradients.DeltaMixed.apply(*given, net.held, layout)
    close(got, want, bound)
    to = random(*want.shape, seed=3)
    grads, wanted = torch.autograd.grad(got, given, to), torch.autograd.grad(want, wide, to.float())
    close(grads[0], wanted[0], bound)
    close(grads[1], wanted[1], 2 * bound)  # those of decays are differences of sums


@pytest.mark.parametrize("tile", [(1, 1), (2, 1), (1, 2), (4, 1)])
def test_walks_and_steps_are_bitwise_identical(tile: tuple[int, int]) -> None:
    check_bits([9, 1, 4], CONFIG, WalkTile(*tile))


@pytest.mark.skipif(INTERPRETED, reason="hours in the interpreter")
@pytest.mark.parametrize("tile", [(1, 1), (4, 1), (1, 2), (4, 2), (2, 4), (1, 4)])
def test_walks_and_steps_of_real_models_are_bitwise_identical(tile: tuple[int, int]) -> None:
    check_bits([300, 1, 2, 63, 64, 65, 128, 200], DeltaConfig(16, 32, 128, 128, 4), WalkTile(*tile))


def check_bits(lengths: list[int], config: DeltaConfig, tile: WalkTile) -> None:
    """A whole pass, one that goes on from slots after a third of each sequence, and single steps."""
    net, (qkvz, rates) = Wide(config, seed=3), inputs(sum(lengths), 50, config)
    layout = delta_kernels.lay_out(lengths, DEVICE)
    made = delta_kernels.prepare(qkvz, rates, net.held, layout, None)
    o = delta_kernels.walk(made, net.held, layout.sequences, None, tile)
    want = delta_kernels.gate(o, qkvz, net.held)
    assert torch.equal(delta_kernels.mixed(qkvz, rates, net.held, layout), want)
    pools = [StatePool({0: config.state_shapes}, len(lengths), DEVICE) for _ in range(2)]
    for pool in pools:
        for tensor in pool.tensors[0]:
            tensor.zero_()
    starts = np.cumsum(lengths) - np.array(lengths)
    got, done = torch.zeros_like(want), [0] * len(lengths)
    for third in (True, False):
        new = [n // 3 if third else n - n // 3 for n in lengths]
        rows = torch.cat([torch.arange(s + d, s + d + n) for s, d, n in zip(starts, done, new, strict=True)])
        some, states = slot_layout(new, list(range(len(new))), pools[0])
        rows = rows.to(DEVICE)
        got[rows] = delta_kernels.mixed(qkvz[rows], rates[rows], net.held, some, states)
        done = new
    assert torch.equal(got, want)
    slots = torch.arange(len(lengths), device=DEVICE)
    for at in range(max(lengths)):
        have = torch.tensor([at < n for n in lengths])
        rows = torch.from_numpy(np.minimum(starts + at, sum(lengths) - 1)).to(DEVICE)
        states = SlotStates(*pools[1].tensors[0], slots.where(have.to(DEVICE), -1))
        result = delta_kernels.step(qkvz[rows], rates[rows], net.held, states)
        assert torch.equal(result[have], want[rows][have]), at
    for mine, other in zip(pools[0].tensors[0], pools[1].tensors[0], strict=True):
        assert torch.equal(mine, other)


def test_long_memory_and_equal_keys() -> None:
    """Decays near one, rates near one and keys all alike: what makes the triangular system hard to invert."""
    net, tokens = Wide(seed=5), 130
    qkvz, rates = inputs(tokens, 9)
    qkvz[:, : 2 * K * D] = qkvz[0, : 2 * K * D]
    rates[:, :H], rates[:, H:] = 6.0, -6.0
    layout = delta_kernels.lay_out([tokens], DEVICE)
    want = net.mixed(qkvz.float(), rates.float(), [StateGroup([tokens], DEVICE)])
    close(delta_kernels.mixed(qkvz, rates, net.held, layout), want)


def new_pool(slots: int) -> StatePool:
    pool = StatePool({0: CONFIG.state_shapes}, slots, DEVICE)
    for i, tensor in enumerate(pool.tensors[0]):
        tensor.copy_(random(*tensor.shape, seed=20 + i, dtype=torch.float32))
    return pool


def slot_layout(lengths: list[int], slots: list[int], pool: StatePool) -> tuple[ChunkLayout, SlotStates]:
    chunks, sequences, order = delta_kernels.cells_of(lengths)
    padded = [np.pad(cells, ((0, 0), (0, 1))) for cells in (chunks, sequences)]  # columns that do nothing
    cells = [torch.from_numpy(x).to(DEVICE) for x in padded]
    slots_B = torch.tensor([*np.array(slots)[order], -1], device=DEVICE)
    return ChunkLayout(*cells), SlotStates(*pool.tensors[0], slots_B)


@pytest.mark.parametrize("lengths", [[70, 1, 2, 64], [1, 1]])
def test_sequences_go_on_from_their_slots(lengths: list[int]) -> None:
    net, slots, (ours, plain) = Wide(), [4, 0, 5, 2][: len(lengths)], (new_pool(7), new_pool(7))
    qkvz, rates = inputs(sum(lengths), 30)
    want = net.mixed(qkvz.float(), rates.float(), plain.groups(slots, lengths))
    layout, states = slot_layout(lengths, slots, ours)
    close(delta_kernels.mixed(qkvz, rates, net.held, layout, states), want)
    for mine, other in zip(ours.tensors[0], plain.tensors[0], strict=True):
        close(mine, other)


def test_one_token_changes_its_slot_alone() -> None:
    net, slots, (ours, plain) = Wide(), [3, 6, 1], (new_pool(7), new_pool(7))
    states = SlotStates(*ours.tensors[0], torch.tensor([3, -1, 6, 1], device=DEVICE))
    for turn in range(5):
        qkvz, rates = inputs(4, 40 + turn)
        used = torch.tensor([0, 2, 3], device=DEVICE)
        want = net.mixed(qkvz[used].float(), rates[used].float(), plain.groups(slots, [1, 1, 1]))
        got = delta_kernels.step(qkvz, rates, net.held, states)
        close(got[used], want)
        assert not got[1].any()
    for mine, other in zip(ours.tensors[0], plain.tensors[0], strict=True):
        close(mine, other)

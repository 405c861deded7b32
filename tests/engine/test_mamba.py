"""Mamba2: chunks equal steps and transformers, packed sequences single ones, the block both its models'."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn
from transformers import GraniteMoeHybridConfig, NemotronHConfig
from transformers.models.granitemoehybrid.modeling_granitemoehybrid import GraniteMoeHybridMambaLayer
from transformers.models.nemotron_h import modeling_nemotron_h as nemotron

from tinkex.engine.torch.backend import Backend
from tinkex.engine.torch.hooks import ForwardContext
from tinkex.engine.torch.models.architecture import LayerConfig, MambaConfig, ModelConfig
from tinkex.engine.torch.models.attend import PackedAttend
from tinkex.engine.torch.models.delta_net import Chunks
from tinkex.engine.torch.models.mamba import Mamba, mamba_chunks, mamba_step
from tinkex.engine.torch.models.norms import NormConfig
from tinkex.engine.torch.states import StateGroup, StatePool

pytestmark = pytest.mark.slow  # it imports models of transformers, which takes seconds

G, H, S, P, D = 2, 4, 16, 8, 24
PACKED = ([70, 5, 130, 64, 1], [64, 64], [128], [3, 3, 3], [1, 200])
CPU = torch.device("cpu")


def _inputs(tokens: int) -> list[Tensor]:
    """x times its step, decay, B and C."""
    torch.manual_seed(tokens)
    shared = [torch.randn(tokens, G, S) for _ in range(2)]
    return [torch.randn(tokens, H, P), -torch.rand(tokens, H), *shared]


def _reference(inputs: list[Tensor], state_HSP: Tensor) -> tuple[Tensor, Tensor]:
    """By transformers, whose steps are one here."""
    dx, a, b, c = (x[None] for x in inputs)
    ones, state = torch.ones(H), state_HSP.transpose(1, 2)[None]
    dt = -a  # a = dt·A with A = -1, and x·dt = dx
    y, state = nemotron.mamba2_chunk_scan(
        dx / dt[..., None], dt, -ones, b, c, chunk_size=32, initial_states=state, return_final_states=True
    )
    return y[0], state[0].transpose(1, 2)


def _chunks(lengths: Sequence[int]) -> Chunks:
    return Chunks(lengths, CPU)


@pytest.mark.parametrize("lengths", PACKED)
def test_packed_chunks_equal_transformers_on_each_sequence(lengths: list[int]) -> None:
    inputs, state = _inputs(sum(lengths)), torch.randn(len(lengths), H, S, P)
    y, final = mamba_chunks(*inputs, _chunks(lengths), state)
    split = zip(*(x.split(lengths) for x in (*inputs, y)), strict=True)
    for i, (*one, got) in enumerate(split):
        want, after = _reference(one, state[i])
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-4)
        torch.testing.assert_close(final[i], after, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("lengths", PACKED)
def test_gradients_equal_those_of_transformers(lengths: list[int]) -> None:
    inputs = [x.requires_grad_() for x in _inputs(sum(lengths))]
    y, _ = mamba_chunks(*inputs, _chunks(lengths))
    to = torch.randn_like(y)
    got = torch.autograd.grad(y, inputs, to)
    split = zip(*(x.split(lengths) for x in inputs), strict=True)
    y = torch.cat([_reference(list(one), torch.zeros(H, S, P))[0] for one in split])
    for mine, want in zip(got, torch.autograd.grad(y, inputs, to), strict=True):
        assert (mine - want).norm() <= 1e-4 * want.norm()


def test_steps_equal_chunks() -> None:
    inputs = _inputs(2 * 70)
    y, final = mamba_chunks(*inputs, _chunks([70, 70]))
    state, steps = torch.zeros(2, H, S, P), []
    for at in zip(*(x.unflatten(0, (2, 70)).unbind(1) for x in inputs), strict=True):
        steps.append(mamba_step(*at, state))
    torch.testing.assert_close(torch.stack(steps, 1).flatten(0, 1), y, rtol=0, atol=1e-4)
    torch.testing.assert_close(state, final, rtol=0, atol=1e-4)


def test_a_sequence_goes_on_from_its_state() -> None:
    inputs = _inputs(150)
    y, final = mamba_chunks(*inputs, _chunks([150]))
    first, state = mamba_chunks(*(x[:83] for x in inputs), _chunks([83]))
    rest, after = mamba_chunks(*(x[83:] for x in inputs), _chunks([67]), state)
    torch.testing.assert_close(torch.cat((first, rest)), y, rtol=0, atol=1e-4)
    torch.testing.assert_close(after, final, rtol=0, atol=1e-4)


# -- the block -----------------------------------------------------------------------------------------


def _pair(kind: str) -> tuple[Mamba, nn.Module]:
    """Our block and transformers', with the same random weights; Nemotron's norms by groups."""
    if kind == "granite":
        config = GraniteMoeHybridConfig(
            hidden_size=D, mamba_expand=1, mamba_n_heads=H, mamba_d_state=S, mamba_n_groups=G,
            mamba_proj_bias=True, num_hidden_layers=1, rms_norm_eps=1e-5,
        )  # fmt: skip
        sizes = MambaConfig(H, D // H, S, G, 4, bias=True)
        theirs: nn.Module = GraniteMoeHybridMambaLayer(config, 0)
    else:
        config = NemotronHConfig(
            hidden_size=D, mamba_num_heads=H, mamba_head_dim=P, ssm_state_size=S, n_groups=G,
            layers_block_type=["linear_attention"], layer_norm_epsilon=1e-5,
        )  # fmt: skip
        sizes = MambaConfig(H, P, S, G, 4, norm_groups=G)
        theirs = nemotron.NemotronHMamba2Mixer(config, 0)
    model = ModelConfig("test", D, 8, 8, 512, True, NormConfig(1e-5), (LayerConfig(sizes, None),))
    ours, generator = Mamba(model, sizes, 0), torch.Generator().manual_seed(0)
    mine, cut = ours.weights() | ours.gate_x.weights() | ours.out.weights(), [sizes.width] * 2
    with torch.no_grad():
        for name, weight in theirs.named_parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator) * (0.5 if weight.dim() < 2 else 0.3))
            module, _, end = name.partition(".")
            rows = weight.split([*cut, len(weight) - sum(cut)]) if module == "in_proj" else [weight]
            names = ("gate_proj", "x_proj", "in_proj_rest") if module == "in_proj" else (module,)
            for one, view in zip(names, rows, strict=True):
                mine.pop(".".join(filter(None, (ours.name, one, end)))).copy_(view)
    assert not mine
    return ours, theirs.eval()


def _run(block: Mamba, x_TD: Tensor, groups: Sequence[StateGroup]) -> Tensor:
    context = ForwardContext(Backend(), [], PackedAttend([len(x_TD)], (None,)), None, {}, None, groups)
    y = block(x_TD, context)
    assert isinstance(y, Tensor)
    return y


@pytest.mark.parametrize("kind", ["granite", "nemotron"])
def test_the_block_equals_transformers_on_each_sequence(kind: str) -> None:
    (ours, theirs), lengths = _pair(kind), [70, 1, 130]
    x = torch.randn(sum(lengths), D, generator=torch.Generator().manual_seed(1), requires_grad=True)
    got = _run(ours, x, [StateGroup(lengths, CPU)])
    want = torch.cat([theirs(one[None])[0] for one in x.split(lengths)])
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5)
    to = torch.randn_like(want)
    mine, other = (torch.autograd.grad(y, x, to)[0] for y in (got, want))
    assert (mine - other).norm() <= 1e-4 * other.norm()


def test_slots_carry_sequences_through_prefill_decoding_and_forks() -> None:
    """What one pass gives, in pieces: of two sequences in one step, and of a copy that goes on alone."""
    (ours, _), lengths = _pair("nemotron"), (40, 30)
    x = torch.randn(70, D, generator=torch.Generator().manual_seed(1))
    pool = StatePool({0: ours.config.state_shapes}, 4, CPU)
    with torch.no_grad():
        want = _run(ours, x, [StateGroup(lengths, CPU)]).split(lengths)
        slots = [slot for _ in lengths if (slot := pool.start([])) is not None]
        done = [0, 0]
        got: list[list[Tensor]] = [[], []]
        for counts in ([20, 7], [1, 9], [1, 1], [17, 12]):
            pieces = [one[at : at + n] for one, at, n in zip(x.split(lengths), done, counts, strict=True)]
            y = _run(ours, torch.cat(pieces), pool.groups(slots, counts)).split(counts)
            done = [at + n for at, n in zip(done, counts, strict=True)]
            for sequence, piece in zip(got, y, strict=True):
                sequence.append(piece)
        fork = pool.fork(slots[0])
        assert fork is not None
        ends = [_run(ours, x[39:40], pool.groups([slot], [1])) for slot in (fork, slots[0])]
    for sequence, whole in zip(got, want, strict=True):
        y = torch.cat(sequence)
        torch.testing.assert_close(y, whole[: len(y)], rtol=0, atol=1e-5)
    for end in ends:
        torch.testing.assert_close(end, want[0][39:], rtol=0, atol=1e-5)


def test_decays_keep_their_precision() -> None:
    block, _ = _pair("nemotron")
    block.to(torch.bfloat16)
    assert block.a_log.dtype == block.dt_bias.dtype == block.skip.dtype == torch.float32
    assert block.conv.dtype == torch.bfloat16

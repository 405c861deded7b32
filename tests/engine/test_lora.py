"""Many adapters on one frozen projection: the fast hook against plain autograd, and whose gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.engine.oracle import randomise
from tests.engine.plain_lora import PlainLora
from tinkex.engine.torch.adapters import Adapter, lay_out
from tinkex.engine.torch.hooks import Part, Site, Sites
from tinkex.engine.torch.lora import LoraBatch
from tinkex.types.params import LoraConfig

E = 3
QKV, DOWN, HEAD = Site(0, "qkv"), Site(0, "down"), Site(-1, "unembed")
EXPERTS, EXPERTS_DOWN = Site(1, "experts_gate_up"), Site(1, "experts_down")
SITES: Sites = {
    QKV: (12, (Part("q", 16, "attn"), Part("k", 8, "attn"), Part("v", 8, "attn"))),
    DOWN: (20, (Part("down", 12, "mlp"),)),
    EXPERTS: (12, (Part("experts.w1", 10, "mlp", E, "A"), Part("experts.w3", 10, "mlp", E, "A"))),
    EXPERTS_DOWN: (10, (Part("experts.w2", 12, "mlp", E, "B"),)),
    HEAD: (12, (Part("lm_head", 30, "unembed"),)),
}


def adapter(rank: int, seed: int, *, shared: bool = True, **flags: bool) -> Adapter:
    lora = LoraConfig(rank, seed=seed, **flags)
    made = Adapter(lora, lay_out(SITES, lora, shared=shared))
    randomise(made.flat, seed)
    return made


def out_features(site: Site) -> int:
    return sum(part.out_features for part in SITES[site][1])


def rows_of(tokens: int) -> tuple[Tensor, Tensor]:
    """Two experts for every token, rows sorted by expert, as a mixture's layer sorts them."""
    choice = torch.stack([torch.arange(tokens) % E, (torch.arange(tokens) // 2 + 1) % E], 1)
    experts, order = choice.flatten().sort(stable=True)
    return order // 2, experts


def run(kind: type[LoraBatch], adapters, lengths, *, frozen_input: bool = False) -> dict[str, Tensor]:
    """One pass through every site; outputs, input gradients and the adapters' gradients, by name."""
    batch, tokens = kind(adapters, lengths, train=True), sum(lengths)
    torch.manual_seed(0)
    out: dict[str, Tensor] = {}
    for site in SITES:
        rows, experts = rows_of(tokens) if site.group.startswith("experts") else (None, None)
        n = tokens if rows is None else len(rows)
        x = torch.randn(n, SITES[site][0], requires_grad=not frozen_input)
        y = torch.randn(n, out_features(site), requires_grad=not frozen_input)
        z = batch(site, x, y.clone(), rows=rows, experts=experts)
        z.backward(torch.randn_like(z))
        out[f"{site} z"] = z.detach()
        if not frozen_input:
            assert x.grad is not None
            assert y.grad is not None
            out |= {f"{site} x": x.grad, f"{site} y": y.grad}
    if isinstance(batch, PlainLora):
        batch.collect()
    for i, one in enumerate(adapters):
        if one is not None:
            assert one.grad is not None
            out[f"grad {i}"] = one.grad.clone()
            one.take_grad()
    return out


@pytest.mark.parametrize("frozen_input", [False, True])
def test_the_fast_hook_equals_plain_autograd(frozen_input: bool) -> None:
    """Mixed ranks, flags and layouts of experts in one pass."""
    adapters = [
        adapter(4, 1),
        None,
        adapter(1, 2, train_attn=False),
        adapter(7, 3, train_mlp=False),
        adapter(3, 5, shared=False),
        adapter(2, 4, train_unembed=False),
    ]
    lengths = [5, 3, 1, 8, 6, 4]
    plain = run(PlainLora, adapters, lengths, frozen_input=frozen_input)
    fast = run(LoraBatch, adapters, lengths, frozen_input=frozen_input)
    assert plain.keys() == fast.keys()
    for key, value in plain.items():
        torch.testing.assert_close(fast[key], value, atol=1e-5, rtol=1e-5, msg=key)


def test_gradients_accumulate_over_passes() -> None:
    one = adapter(4, 1)
    single = run(LoraBatch, [one], [6])["grad 0"]
    batch = LoraBatch([one], [6], train=True)
    torch.manual_seed(0)
    x, y = torch.randn(6, 12), torch.randn(6, 32)
    grad = torch.randn(6, 32)
    for _ in range(2):
        batch(QKV, x, y.clone()).backward(grad)
    assert one.grad is not None
    twice, once = one.named(one.grad), one.named(single)
    for name in ("q", "k", "v"):
        for ours, theirs in zip(twice[name], once[name], strict=True):
            torch.testing.assert_close(ours, 2 * theirs)


def test_a_tenant_gets_only_its_own_gradients() -> None:
    mine, other = adapter(4, 1), adapter(4, 2)
    batch = LoraBatch([mine, other], [3, 2], train=True)
    z = batch(QKV, torch.randn(5, 12), torch.zeros(5, 32))
    z[:3].sum().backward()
    assert mine.grad is not None
    assert other.grad is not None
    assert mine.grad.abs().sum() > 0
    assert not other.grad.any()


def test_rows_choose_the_segment_of_their_token() -> None:
    """A sampler asks for the logits of some tokens only."""
    adapters, lengths = [adapter(3, 1), None, adapter(5, 2)], [4, 2, 5]
    x, batch = torch.randn(11, 12), LoraBatch(adapters, lengths)
    rows = torch.tensor([3, 4, 10])
    every = batch(HEAD, x, torch.zeros(11, 30))
    torch.testing.assert_close(batch(HEAD, x[rows], torch.zeros(3, 30), rows=rows), every[rows])
    assert not every[4:6].any()


def test_neighbours_with_one_adapter_are_one_segment() -> None:
    one = adapter(2, 1)
    assert [(start, stop) for _, start, stop in LoraBatch([one, one, None, one], [2, 3, 1, 4]).segments] == [
        (0, 5),
        (5, 6),
        (6, 10),
    ]


def test_a_fresh_adapter_is_seeded_and_starts_at_the_base_model() -> None:
    a, same, other = (Adapter.fresh(LoraConfig(4, seed=seed), SITES) for seed in (7, 7, 8))
    assert torch.equal(a.flat, same.flat)
    assert not torch.equal(a.flat, other.flat)
    for name, (down, up) in a.named().items():
        assert not up.any(), name
        bound = down.shape[-1] ** -0.5
        assert bound * 0.8 < float(down.abs().max()) <= bound, name
        assert abs(float(down.mean())) < bound / 2
    unseeded = [Adapter.fresh(LoraConfig(4), SITES).flat for _ in range(2)]
    assert not torch.equal(*unseeded)


@pytest.mark.parametrize("flags", [{"train_attn": False}, {"train_mlp": False}, {"train_unembed": False}])
def test_flags_say_which_modules_there_are(flags: dict[str, bool]) -> None:
    kinds = {part.name: part.kind for _, parts in SITES.values() for part in parts}
    off = next(iter(flags)).removeprefix("train_")
    assert set(adapter(2, 1, **flags).named()) == {name for name, kind in kinds.items() if kind != off}


def test_named_views_cover_the_buffer_and_have_the_shapes_of_peft() -> None:
    one = adapter(4, 1)
    named = one.named()
    assert {k: (tuple(a.shape), tuple(b.shape)) for k, (a, b) in named.items()} == {
        "q": ((4, 12), (16, 4)),
        "k": ((4, 12), (8, 4)),
        "v": ((4, 12), (8, 4)),
        "down": ((4, 20), (12, 4)),
        "experts.w1": ((1, 4, 12), (E, 10, 4)),
        "experts.w3": ((1, 4, 12), (E, 10, 4)),
        "experts.w2": ((E, 4, 10), (1, 12, 4)),
        "lm_head": ((4, 12), (30, 4)),
    }
    older = {k: (len(a), len(b)) for k, (a, b) in adapter(4, 1, shared=False).named().items()}
    assert [older[f"experts.w{i}"] for i in (1, 2, 3)] == [(E, E)] * 3
    for a, b in named.values():
        a.fill_(1.0)
        b.fill_(1.0)
    assert bool((one.flat == 1.0).all())


def test_a_snapshot_does_not_follow_its_adapter() -> None:
    one = adapter(2, 1)
    copy, before = one.snapshot(), one.flat.clone()
    one.flat.add_(1.0)
    assert torch.equal(copy.flat, before)


def test_copies_in_another_dtype_follow_a_change() -> None:
    one = adapter(2, 1)
    x = torch.randn(3, 12, dtype=torch.bfloat16)

    def output() -> Tensor:
        return LoraBatch([one], [3])(HEAD, x, torch.zeros(3, 30, dtype=torch.bfloat16))

    before = output()
    one.flat.mul_(2.0)
    one.changed()
    torch.testing.assert_close(output(), 4 * before)


def test_matrices_that_are_kept_carry_no_notes_of_autograd() -> None:
    """They lie in the adapter's buffers; as views that autograd knows they would take twice the memory."""
    one = adapter(2, 1)
    run(LoraBatch, [one], [5])
    assert one._grad_buffer is not None
    kept = [(one.flat, one.matrices(torch.float32)[site]) for site in SITES]
    kept += [(one._grad_buffer, one.grad_matrices(site)) for site in SITES]
    for flat, matrices in kept:
        for tensor in (t for a, b_t in matrices for t in (a, *b_t)):
            assert tensor.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()
            assert not tensor._is_view()

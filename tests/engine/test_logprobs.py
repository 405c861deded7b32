"""Chunked logprobs and their gradients against a plain log_softmax over everything."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from tests.engine.oracle import randomise
from tests.engine.plain_lora import PlainLora
from tinkex.engine.torch.hooks import Part
from tinkex.engine.torch.logprobs import Targets, logprob_chunk, target_logprobs
from tinkex.engine.torch.lora import Adapter, LoraBatch
from tinkex.engine.torch.models.weights import UNEMBED
from tinkex.types.params import LoraConfig

D, V, T = 16, 50, 23
SITES = {UNEMBED: (D, (Part("lm_head", V, "unembed"),))}


def targets_of(per_row: list[int], seed: int = 0) -> Targets:
    generator = torch.Generator().manual_seed(seed)
    counts = torch.tensor(per_row)
    return Targets(
        rows_M=torch.repeat_interleave(torch.arange(len(per_row)), counts),
        ids_M=torch.randint(0, V, (int(counts.sum()),), generator=generator),
        starts=torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)]),
    )


def adapters() -> list[Adapter | None]:
    made: list[Adapter | None] = [None]
    for seed, rank in enumerate((3, 5)):
        one = Adapter.fresh(LoraConfig(rank, seed=seed), SITES)
        randomise(one.flat, seed)
        made.insert(seed, one)
    return made


def plain(h: Tensor, weight: Tensor, targets: Targets, lora: PlainLora, cap: float | None = None) -> Tensor:
    logits = lora(UNEMBED, h, h @ weight.t())
    logits = logits if cap is None else cap * (logits / cap).tanh()
    return logits.log_softmax(-1)[targets.rows_M, targets.ids_M]


@pytest.mark.parametrize("chunk", [1, 4, 7, 23, 100])
@pytest.mark.parametrize("per_row", [[1] * T, [3] * T, [1 + t % 4 for t in range(T)]])
@pytest.mark.parametrize("cap", [None, 3.0])
def test_equals_plain_log_softmax(chunk: int, per_row: list[int], cap: float | None) -> None:
    torch.manual_seed(0)
    h, weight = torch.randn(T, D), torch.randn(V, D)
    targets, segments = targets_of(per_row), [9, 6, 8]
    pull = torch.randn(len(targets.ids_M))
    pull[torch.rand(len(pull)) < 0.4] = 0.0  # a prompt's
    # a position may name a token twice, as zero-padded candidates do
    targets.ids_M[1::5] = targets.ids_M[0::5][: len(targets.ids_M[1::5])]

    mine, theirs = adapters(), adapters()
    fast = LoraBatch(mine, segments, train=True)
    lp, grad = target_logprobs(
        h, weight, targets, fast, V, lambda lp, first, last: pull[first:last], chunk=chunk,
        compute=partial(logprob_chunk, softcap=cap),
    )  # fmt: skip

    leaf, slow = h.clone().requires_grad_(), PlainLora(theirs, segments, train=True)
    expected = plain(leaf, weight, targets, slow, cap)
    expected.backward(pull)
    slow.collect()
    torch.testing.assert_close(lp, expected.detach(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(grad, leaf.grad, atol=1e-5, rtol=1e-4)
    for one, other in zip(mine, theirs, strict=True):
        if one is not None and other is not None:
            torch.testing.assert_close(one.grad, other.grad, atol=1e-5, rtol=1e-4)


def test_the_gradient_may_depend_on_the_logprobs() -> None:
    torch.manual_seed(0)
    h, weight, targets = torch.randn(T, D), torch.randn(V, D), targets_of([1] * T)
    lora = LoraBatch([None], [T], train=True)
    _, grad = target_logprobs(h, weight, targets, lora, V, lambda lp, first, last: lp.exp(), chunk=4)
    leaf = h.clone().requires_grad_()
    (leaf @ weight.t()).log_softmax(-1)[targets.rows_M, targets.ids_M].exp().sum().backward()
    torch.testing.assert_close(grad, leaf.grad, atol=1e-6, rtol=1e-4)


def test_without_a_gradient_nothing_is_accumulated() -> None:
    torch.manual_seed(0)
    h, weight, targets = torch.randn(T, D), torch.randn(V, D), targets_of([1] * T)
    made = adapters()
    lp, grad = target_logprobs(h, weight, targets, LoraBatch(made, [9, 6, 8]), V)
    assert grad is None
    assert lp.dtype == torch.float32
    assert all(one is None or one.grad is None for one in made)


def test_never_holds_logits_of_all_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest tensor that is made is a chunk's logits."""
    tokens, vocab, chunk = 300, 400, 20
    h, weight = torch.randn(tokens, D), torch.randn(vocab, D)
    targets = targets_of([1] * tokens)
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            if isinstance(out, Tensor):
                largest = max(largest, out.untyped_storage().nbytes() // 4)
            return out

    with Watch():
        lora = LoraBatch([None], [tokens], train=True)
        target_logprobs(
            h, weight, targets, lora, vocab, lambda lp, first, last: torch.ones_like(lp), chunk=chunk
        )
    assert chunk * vocab <= largest < 2 * chunk * vocab

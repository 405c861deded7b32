"""What a deterministic engine is made of: each kernel against the plain path, and every row by itself.

In bf16 on a GPU, where a row must be batch-invariant; where there is none, in fp32 by Triton's
interpreter, which shows that the logic is right.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.engine.by_kernels import BF16, DEVICE, INTERPRETED, MARKS, random
from tests.engine.plain_lora import PlainLora
from tinkex.engine.cuda import grouped_lora as grouped
from tinkex.engine.cuda import packed_attention as packed
from tinkex.engine.cuda import token_kernels
from tinkex.engine.cuda.attention_hooks import PackedForward
from tinkex.engine.cuda.cuda_backend import CudaBackend
from tinkex.engine.cuda.invariant_product import product
from tinkex.engine.rng import stream_keys
from tinkex.engine.torch import next_tokens
from tinkex.engine.torch.adapters import Adapter
from tinkex.engine.torch.backend import Backend
from tinkex.engine.torch.hooks import Frozen, Part, Site
from tinkex.engine.torch.next_tokens import TorchRows
from tinkex.types.params import LoraConfig

pytestmark = [*MARKS, pytest.mark.slow]
INVARIANT = CudaBackend(DEVICE, BF16, invariant=True)


def assert_near(got: Tensor, want: Tensor, bound: float = 8e-3) -> None:
    assert got.shape == want.shape
    assert float((got.double() - want.double()).norm() / want.double().norm()) < bound


def assert_same(got: Tensor, want: Tensor) -> None:
    """To the last bit; the interpreter's products are numpy's, which promises nothing."""
    if INTERPRETED:
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    else:
        differ = (got != want).nonzero()
        assert not len(differ), f"{len(differ)} of {got.numel()} differ, first at {differ[0].tolist()}"


# -- products ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "k"), [(96, 80), (130, 257)] if INTERPRETED else [(1536, 4096), (500, 1000)])
@pytest.mark.parametrize("by_columns", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_product(n: int, k: int, by_columns: bool, bias: bool):
    """Any number of rows through any shape of tile: each is what it is alone."""
    weight = (random(k, n).t() if by_columns else random(n, k)) / k**0.5
    added = random(n, seed=1) if bias else None
    x = random(600 if not INTERPRETED else 70, k, seed=2)
    alone = torch.cat([product(row, weight, added) for row in x[:5].split(1)])
    for rows in (5, 17, 40, 65, 130, 600):
        some = x[:rows]
        got = product(some, weight, added)
        want = F.linear(some.double(), weight.double(), None if added is None else added.double())
        assert_near(got, want)
        assert_same(got[:5], alone)


def test_the_gradient_of_an_invariant_product():
    weight, x, grad = random(48, 64), random(9, 64, seed=1).requires_grad_(), random(9, 48, seed=2)
    INVARIANT.linear(x, weight).backward(grad)
    assert x.grad is not None
    assert_near(x.grad, grad.double() @ weight.double())


# -- adapters ----------------------------------------------------------------------------------------------

QKV = Site(0, "qkv")
WIDTH = 64 if INTERPRETED else 1024
SITES = {QKV: (WIDTH, (Part("q", 48, "attn"), Part("k", 16, "attn"), Part("v", 24, "attn")))}


def adapter(rank: int, seed: int) -> Adapter:
    one = Adapter.fresh(LoraConfig(rank=rank, seed=seed), SITES, DEVICE)
    one.flat.copy_(0.3 * torch.randn(one.flat.shape, generator=torch.Generator().manual_seed(seed)))
    return one


def projected(adapters: list[Adapter | None], lengths: list[int], x: Tensor, weight: Tensor) -> Tensor:
    oracle = PlainLora(adapters, lengths)
    hook = grouped.CudaLora(adapters, lengths, DEVICE, BF16, invariant=True)
    got = hook.project(QKV, x, Frozen(weight, None, None, INVARIANT.linear))
    assert_near(got, oracle(QKV, x.float(), x.float() @ weight.float().t()), 1e-2)
    return got


def test_adapters_give_a_row_the_same_alone_and_among_others():
    """Beside wider ranks, in tiles of other sizes, and beside rows without an adapter."""
    first, wide = adapter(4, 1), adapter(80, 2)
    x, weight = random(700, WIDTH), random(WIDTH, 88, seed=1).t() / WIDTH**0.5
    alone = projected([first], [2], x[:2], weight)
    assert_same(projected([first, None, wide], [2, 5, 9], x[:16], weight)[:2], alone)
    if not INTERPRETED:
        assert_same(projected([first, wide], [300, 400], x, weight)[:2], alone)
        assert_same(projected([first], [700], x, weight)[:2], alone)


# -- attention ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [None, 21])
def test_packed_attention_in_the_samplers_tiles(window: int | None):
    """It gives what the trainer's own kernel gives, and a sequence the same alone."""
    (h, g, c), lengths = (6, 2, 24), [1, 70, 17]
    q, k, v = (random(sum(lengths), n, c, seed=i) for i, n in enumerate((h, g, g)))
    tiles = packed.cut(lengths, DEVICE)
    want, want_lse = packed.forward(q, k, v, tiles, window)
    got, lse = PackedForward(lengths, DEVICE)(q, k, v, window)
    assert_near(got, want)
    torch.testing.assert_close(lse, want_lse, atol=1e-2, rtol=1e-2)
    middle = slice(1, 71)
    alone, lse_alone = PackedForward([70], DEVICE)(q[middle], k[middle], v[middle], window)
    assert_same(got[middle], alone)
    assert_same(lse[:, middle], lse_alone)


# -- logprobs ----------------------------------------------------------------------------------------------


def test_one_normaliser_for_all():
    """Logprobs that were drawn, scored, listed and trained on are the same number."""
    vocab, rows = 4900, 6
    logits = 3 * random(rows, 5000)
    logits[:, vocab:] += 20  # of padding
    temperature = torch.tensor([1.0, 0.5, 0.0, 2.0, 1.0, 0.0], device=DEVICE)
    want = next_tokens.scaled_logprobs(logits.double().float(), temperature, vocab)
    keys = torch.from_numpy(stream_keys(np.arange(rows, dtype=np.uint64), np.zeros(rows), np.arange(rows)))
    keys = keys.view(torch.int64).to(DEVICE)
    tokens = torch.full((rows + 2,), -7, device=DEVICE)  # a captured step's tensors have room for more rows
    drawn, spare = torch.full((rows + 2,), 7.0, device=DEVICE), torch.ones(2, device=DEVICE)
    wide = torch.cat((temperature, spare))
    token_kernels.draw(logits, wide, keys, vocab, tokens, drawn, invariant=True)
    assert (tokens[rows:].tolist(), drawn[rows:].tolist()) == ([-7, -7], [7.0, 7.0])
    tokens, drawn = tokens[:rows], drawn[:rows]
    torch.testing.assert_close(drawn, want.gather(1, tokens[:, None])[:, 0], atol=1e-4, rtol=1e-4)
    at = np.arange(rows)
    scored = TorchRows(logits, vocab, INVARIANT)
    picked = scored.pick(at, tokens.cpu().numpy())
    ones = torch.ones(rows, device=DEVICE)
    trained = logits.float() - token_kernels.normaliser(logits, vocab, ones)[:, None]
    assert np.array_equal(picked, trained.gather(1, tokens[:, None])[:, 0].cpu().numpy())
    ones = ((temperature == 1) | (temperature == 0)).cpu().numpy()
    assert np.array_equal(drawn.cpu().numpy()[ones], picked[ones])
    ids, listed = scored.top(3)
    assert np.array_equal(listed[:, 0], trained[:, :vocab].max(-1).values.cpu().numpy())
    assert np.array_equal(
        listed, np.stack([scored.pick(at, ids[:, i].astype(np.int64)) for i in range(3)], 1)
    )


def test_rows_scored_one_by_one_are_those_scored_at_once():
    logits = 3 * random(5, 700)
    keys = stream_keys(np.arange(5, dtype=np.uint64), np.zeros(5), np.arange(5))
    one, all_ = TorchRows(logits, 690, INVARIANT), TorchRows(logits, 690, Backend())
    np.testing.assert_allclose(one.top(4)[1], all_.top(4)[1], atol=1e-5)
    assert np.array_equal(one.draw(keys), all_.draw(keys))
    alone = TorchRows(logits[3:4].clone(), 690, INVARIANT)
    for got, want in zip(alone.top(4), one.top(4), strict=True):
        assert np.array_equal(got[0], want[3])
    assert alone.draw(keys[3:4])[0] == one.draw(keys)[3]

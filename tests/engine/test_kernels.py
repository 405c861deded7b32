"""Every Triton kernel against the plain path it stands for.

In bf16 on a GPU; where there is none, in fp32 by Triton's interpreter (see tests/conftest.py), which shows
that their logic is right and nothing of their speed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.engine.by_kernels import BF16, DEVICE, INTERPRETED, MARKS, random
from tests.engine.plain_lora import PlainLora
from tinkex.engine.cuda import elementwise, token_kernels
from tinkex.engine.cuda import grouped_lora as grouped
from tinkex.engine.cuda import lora_kernels as lora
from tinkex.engine.cuda import packed_attention as packed
from tinkex.engine.cuda import paged_attention as paged
from tinkex.engine.cuda.adapter_table import AdapterTable, RowTiles, SiteAdapters, cut_tiles
from tinkex.engine.rng import stream_keys
from tinkex.engine.torch import next_tokens, plain
from tinkex.engine.torch.adapters import Adapter
from tinkex.engine.torch.hooks import Part, Site
from tinkex.engine.torch.models.rotary import Rope
from tinkex.types.params import LoraConfig

pytestmark = [*MARKS, pytest.mark.slow]


def off(got: Tensor, want: Tensor) -> float:
    """‖got − want‖ / ‖want‖, in double."""
    assert got.shape == want.shape
    got, want = got.double(), want.double()
    return float((got - want).norm() / want.norm())


def assert_near(got: Any, want: Any, bound: float = 8e-3) -> None:
    for one, other in zip(got, want, strict=True):
        assert off(one, other) < bound, off(one, other)


# -- elementwise -------------------------------------------------------------------------------------------


def assert_exact_sums(whole: Tensor, *pairs: tuple[Tensor, Tensor]):
    """Half a unit in the last place of bf16 is 2^-9, and so is that of what it leaves over: 2^-18 in all."""
    for total, left in pairs:
        assert_near([total], [whole])
        error = (total.float() + left.float() - whole).abs()
        assert bool((error <= 2**-17 * whole.abs() + 2**-20).all())


@pytest.mark.parametrize("width", [64, 96, 1024])
@pytest.mark.parametrize("added", [False, True])
def test_norm(width: int, added: bool):
    x, grad, weight = random(9, width), random(9, width, seed=1), random(width, seed=2)
    delta, more = (random(9, width, seed=3), random(9, width, seed=4)) if added else (None, None)
    rest = 2**-9 * random(9, width, seed=5) if added else None
    total, left, y, rstd = elementwise.normalise(x, rest, delta, weight, 1e-5)
    whole = sum(t.float() for t in (x, rest, delta) if t is not None)
    want = plain.normalise(whole, None, None, weight.float(), 1e-5)  # type: ignore[arg-type]
    assert_near((total, y, rstd), (want[0], *want[2:]))
    if rest is not None and delta is not None and left is not None:
        assert_exact_sums(whole, (total, left), elementwise.add(x, rest, delta))
    got = elementwise.normalise_backward(grad, total, rstd, weight, more)
    want = plain.normalise_backward(
        grad.float(), total.float(), rstd, weight.float(), None if more is None else more.float()
    )
    assert_near([got], [want])


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("heads", "dim"), [((4, 2), 16), ((3, 1), 24), ((16, 8), 128)])
def test_rotate(normed: bool, heads: tuple[int, int], dim: int):
    h, g = heads
    qkv, angle = random(5, (h + 2 * g) * dim), random(5, dim // 2, seed=1, dtype=torch.float32)
    cos, sin = angle.cos().to(BF16), angle.sin().to(BF16)
    norms = (1 + 0.2 * random(dim, seed=2), 1 + 0.2 * random(dim, seed=3)) if normed else None
    wide = None if norms is None else (norms[0].float(), norms[1].float())
    got = elementwise.rotate(qkv, cos, sin, heads, norms, 1e-5)
    want = plain.rotate(qkv.float(), cos.float(), sin.float(), heads, wide, 1e-5)
    assert_near(got[:3], want[:3])
    grads = tuple(random(*part.shape, seed=4 + i) for i, part in enumerate(got[:3]))
    back = elementwise.rotate_backward(grads, qkv, cos, sin, norms, got[3])  # type: ignore[arg-type]
    wide_grads = tuple(grad.float() for grad in grads)
    want_back = plain.rotate_backward(wide_grads, qkv.float(), cos.float(), sin.float(), wide, want[3])  # type: ignore[arg-type]
    assert_near([back], [want_back])


def test_swiglu():
    gate_up, grad = random(7, 2 * 1040), random(7, 1040, seed=1)
    assert_near([elementwise.swiglu(gate_up)], [plain.swiglu(gate_up.float())])
    got = elementwise.swiglu_backward(grad, gate_up)
    assert_near([got], [plain.swiglu_backward(grad.float(), gate_up.float())])


# -- adapters ----------------------------------------------------------------------------------------------

QKV, DOWN, QKVZ = Site(0, "qkv"), Site(0, "down"), Site(1, "qkvz")
SITES = {
    QKVZ: (64, tuple(Part(name, n, "attn") for name, n in (("q", 16), ("k", 16), ("v", 48), ("z", 40)))),
    QKV: (64, (Part("q", 48, "attn"), Part("k", 16, "attn"), Part("v", 24, "attn"))),
    DOWN: (160, (Part("down", 64, "mlp"),)),
}


def adapter(rank: int, seed: int, **flags: bool) -> Adapter:
    one = Adapter.fresh(LoraConfig(rank=rank, seed=seed, **flags), SITES, DEVICE)
    one.flat.copy_(0.3 * torch.randn(one.flat.shape, generator=torch.Generator().manual_seed(seed)))
    return one


@pytest.mark.parametrize("site", [QKV, DOWN, QKVZ])
@pytest.mark.parametrize("by_rows", [False, True], ids=["by-inputs", "by-outputs"])
@pytest.mark.parametrize("whole", [False, True], ids=["some", "all"])
@pytest.mark.parametrize("lengths", [[3, 20, 1, 7], [40, 1, 600, 70]], ids=["few", "many"])
def test_adapters_of_several_ranks(site: Site, lengths: list[int], whole: bool, by_rows: bool):
    """With many rows that all have an adapter, the frozen product comes last."""
    check_adapters(site, lengths, whole, by_rows, last_rank=8)


def check_adapters(site: Site, lengths: list[int], whole: bool, by_rows: bool, last_rank: int) -> None:
    """A product with its adapters, the gradient to x and every adapter's; one has nothing on the MLP."""
    second = adapter(5, 4) if whole else None
    adapters = [adapter(4, 1), second, adapter(16, 2, train_mlp=False), adapter(last_rank, 3)]
    in_features, outs = SITES[site][0], sum(part.out_features for part in SITES[site][1])
    tokens, weight = sum(lengths), random(in_features, outs, seed=1).t() / in_features**0.5
    weight = weight.contiguous() if by_rows else weight
    x, grad = random(tokens, in_features), random(tokens, outs, seed=2)

    for one in adapters:
        if one is not None:
            one.open_grad()
    oracle = PlainLora(adapters, lengths, train=True)
    leaf = x.float().clone().requires_grad_()
    wide = oracle(site, leaf, leaf @ weight.float().t())
    wide.backward(grad.float())
    oracle.collect()
    want = {one: one.grad.clone() for one in adapters if one is not None and one.grad is not None}

    for one in want:
        one.take_grad()
        one.open_grad()
    fast = grouped.CudaLora(adapters, lengths, DEVICE, BF16, train=True)
    at = fast.site(site)
    assert at is not None
    got_y, kept = fast.product(at, x, weight)
    got_x = fast.grad_x(at, grad, fast.backward(at, grad, x, kept), weight)
    assert off(got_y, wide.detach()) < 1e-2
    assert leaf.grad is not None
    assert off(got_x, leaf.grad) < 1e-2
    for one, grads in want.items():
        assert one.grad is not None
        if site in one.shapes:
            assert off(one.grad, grads) < 1e-2
        else:
            assert not one.grad.any()


@pytest.mark.parametrize("last_rank", [8, 100])  # all parts of which are more than `write` can hold
@pytest.mark.parametrize("halved", [False, True])
@pytest.mark.parametrize("site", SITES)
def test_adapters_on_a_large_weight(
    monkeypatch: pytest.MonkeyPatch, site: Site, halved: bool, last_rank: int
):
    """Whose sums are whole or halved, gradients being the same."""
    monkeypatch.setattr(grouped.fused, "LARGE", 0)
    monkeypatch.setattr(grouped.fused, "split_in_two", lambda weight: halved)
    check_adapters(site, [3, 20, 1, 7], whole=True, by_rows=False, last_rank=last_rank)


@pytest.mark.parametrize("tile", [16, 128])
def test_a_wide_part_is_written_by_several_programs(tile: int):
    rows, rank, width = 150, 4, 1300
    u, b = random(2, rows, rank, dtype=torch.float32), random(rank, width, seed=1)
    table = AdapterTable(
        torch.tensor([[rank, 0, b.data_ptr()], [0, 0, 0]], device=DEVICE),
        torch.full((2,), 0.5, device=DEVICE),
        rank,
    )
    segments = [(0, 0, 100), (1, 100, 110), (0, 110, rows)]
    tiles = RowTiles(torch.from_numpy(cut_tiles(segments, tile)).to(DEVICE), tile)
    y = torch.full((rows, width), torch.nan, dtype=BF16, device=DEVICE)
    lora.write(u, y, SiteAdapters(table, tiles, 1, 1, [width]).b)
    want = 0.5 * u.sum(0) @ b.float()
    want[100:110] = 0
    assert off(y, want) < 1e-2
    assert not y[100:110].any()


@pytest.mark.parametrize("tile", [16, 64, 128])
def test_a_tile_is_shrunk_by_one_program_or_several(tile: int):
    rows, rank, width, scale = 150, 4, 520, torch.ones(2, device=DEVICE)
    x, a = random(rows, width), random(rank, width, seed=1) / width**0.5
    table = AdapterTable(torch.tensor([[0, 0], [rank, a.data_ptr()]], device=DEVICE), scale, rank)
    cells = cut_tiles([(1, 0, 21), (0, 21, 25), (1, 25, rows)], tile)
    tiles = RowTiles(torch.from_numpy(cells).to(DEVICE), tile)
    u = lora.shrink(x, SiteAdapters(table, tiles, 1, width, [1]).a).float().sum(0)[:, :rank]
    there = [*range(21), *range(25, rows)]
    assert off(u[there], x[there].float() @ a.float().t()) < 1e-2


@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("rows", [40, 100, 250, 300])  # several programs a tile, one tile each in clusters
def test_sums_are_cut_as_asked(rows: int, splits: int):
    rank, width = 5, 768
    x, a = random(rows, width), random(2 * rank, width, seed=1) / width**0.5
    table = AdapterTable(
        torch.tensor([[rank, a.data_ptr()]], device=DEVICE), torch.ones(1, device=DEVICE), rank
    )
    tiles = RowTiles(torch.from_numpy(cut_tiles([(0, 0, rows)], 64)).to(DEVICE), 64)
    for _ in range(2):  # clusters from the second time on
        u = lora.shrink(x, SiteAdapters(table, tiles, 1, width, [1, 1]).a, splits, beside=True)
    assert len(u) == splits
    parts = zip(u, x.float().chunk(splits, 1), a.float().chunk(splits, 1), strict=True)
    for got, left, right in parts:
        assert off(got[:, : 2 * rank], left @ right.t()) < 1e-2


def test_a_long_sum_of_a_large_weight_is_two_of_half_its_length(monkeypatch: pytest.MonkeyPatch):
    """Several adapters, of which one has nothing here; also that such a weight's other products are right."""
    monkeypatch.setattr(grouped.fused, "LARGE", 0)
    width, outs, rows = 512, [160, 96], [33, 20, 7]
    x, weight = random(sum(rows), width), random(width, sum(outs), seed=1).t() / width**0.5
    matrices = [
        (random(2 * rank, width, seed=rank), [random(rank, n, seed=90 + rank + n) for n in outs])
        for rank in (8, 24)
    ]
    addresses = [[len(a) // 2, a.data_ptr(), *(b.data_ptr() for b in bs)] for a, bs in matrices]
    table = AdapterTable(
        torch.tensor([*addresses, [16, 0, 0, 0]], device=DEVICE),
        torch.tensor([0.5, 0.3, 1.0], device=DEVICE),
        24,
    )
    cells = cut_tiles([(0, 0, 33), (1, 33, 53), (2, 53, 60)], 32)
    at = SiteAdapters(table, RowTiles(torch.from_numpy(cells).to(DEVICE), 32), 1, width, outs)
    want = x.float() @ weight.float().t()
    theirs = zip(x.split(rows)[:2], want.split(rows)[:2], matrices, (0.5, 0.3), strict=True)
    for x_part, y_part, (a, bs), scale in theirs:
        us = (x_part.float() @ a.float().t()).chunk(2, 1)
        y_part += scale * torch.cat([u @ b.float() for u, b in zip(us, bs, strict=True)], 1)
    whole, u = grouped.product_with(x, weight, at)
    assert u.shape[0] == 1
    monkeypatch.setattr(grouped.fused, "MAX_FEATURES", 256)
    halved, us = grouped.product_with(x, weight, at)
    assert us.shape[0] == 2
    assert_near((whole, halved), (want, want))
    assert_near([us.sum(0)[:33, :16]], [u[0, :33, :16].float()])


def test_few_rows_of_a_small_weight_are_rounded_once():
    """As in a sampler's steps: with the adapters' part rounded before it is added there would be two errors.

    In fp16, which the interpreter can multiply.
    """
    half, (rows, width, out, rank) = torch.float16, (60, 256, 64, 16)
    x, weight = random(rows, width, seed=1, dtype=half), random(out, width, seed=2, dtype=half)
    a, b = random(rank, width, seed=3, dtype=half), random(rank, out, seed=4, dtype=half)
    table = AdapterTable(
        torch.tensor([[rank, a.data_ptr(), b.data_ptr()]], device=DEVICE),
        torch.tensor([0.5], device=DEVICE),
        rank,
    )
    cells = torch.from_numpy(cut_tiles([(0, 0, rows)], 64)).to(DEVICE)
    y, u = grouped.product_with(x, weight, SiteAdapters(table, RowTiles(cells, 64), 1, width, [out]))
    frozen, added = x.double() @ weight.double().t(), 0.5 * u[0, :, :rank].double() @ b.double()
    want = frozen + added
    bound = torch.ldexp(torch.ones_like(want), want.frexp().exponent - 12) + 2e-3  # half a last bit, and sums
    assert bool(((y.double() - want).abs() <= bound).all())
    twice = (frozen + added.to(half).double()).to(half)
    assert bool(((twice.double() - want).abs() > bound).any())


def test_few_tiles_are_cut_into_more_programs():
    def columns(outs: list[int], tiles: int) -> int:
        cells, none = torch.zeros(6, tiles, dtype=torch.int32), torch.zeros(1, 1)
        at = SiteAdapters(AdapterTable(none, none, 8), RowTiles(cells, 64), 1, 1, outs)
        return lora.columns_for(at.b, 128)

    assert 2 * 151_936 / columns([151_936], 2) > 1000
    assert columns([2048, 1024, 1024], 8) == 128
    assert columns([2048, 1024, 1024], 252) == 1024
    assert columns([1024], 252) == 512


@pytest.mark.parametrize("site", [QKV, DOWN])
@pytest.mark.parametrize(
    ("order", "lengths"),
    [((0,), [700]), ((0, 1, 0), [270, 5, 30])],
    ids=["together", "in pieces"],
)
@pytest.mark.parametrize("invariant", [False, True])
def test_gradients_of_many_rows(site: Site, order: tuple[int, ...], lengths: list[int], invariant: bool):
    """They are added to what is there, bitwise the same each time if that is asked for."""
    adapters = [(adapter(8, 1), adapter(16, 2))[i] for i in order]
    in_features, outs = SITES[site][0], sum(part.out_features for part in SITES[site][1])
    x, grad = random(sum(lengths), in_features), random(sum(lengths), outs, seed=2)

    oracle = PlainLora(adapters, lengths, train=True)
    leaf = x.float().requires_grad_()
    oracle(site, leaf, torch.zeros(sum(lengths), outs, device=DEVICE)).backward(grad.float())
    oracle.collect()
    want = {one: one.grad.clone() for one in adapters if one.grad is not None}

    fast = grouped.CudaLora(adapters, lengths, DEVICE, BF16, train=True, invariant=invariant)
    at = fast.site(site)
    assert at is not None
    weight, once = x.new_zeros(outs, in_features), []
    _, kept = fast.product(at, x, weight)
    for one in want:
        assert one.grad is not None
        one.grad.zero_()
    for _ in range(2):
        got_x = fast.grad_x(at, grad, fast.backward(at, grad, x, kept), weight)
        once.append({one: one.grad.clone() for one in want if one.grad is not None})
    assert leaf.grad is not None
    assert off(got_x, leaf.grad) < 1e-2
    assert want.keys() == once[0].keys()
    for one, grads in want.items():
        assert off(once[0][one], grads) < 1e-2
        if invariant and len(order) == 1:
            assert torch.equal(once[1][one], 2 * once[0][one])
        else:
            assert off(once[1][one], 2 * grads) < 1e-2


# -- packed attention --------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [None, 21, 100])
@pytest.mark.parametrize(
    ("heads", "dim"),
    [((6, 2), 24), ((4, 4), 64)] if INTERPRETED else [((6, 2), 24), ((4, 4), 64), ((4, 1), 128)],
)
def test_packed_attention(window: int | None, heads: tuple[int, int], dim: int):
    """Sequences from one token to several tiles."""
    lengths = [1, 250, 64, 17] if INTERPRETED else [1, 300, 128, 17, 129]
    check_packed_attention(lengths, heads, dim, window)


@pytest.mark.parametrize("window", [None, 21])
def test_sinks_take_their_share(window: int | None):
    check_packed_attention([1, 90, 64], (6, 2), 24, window, random(6, seed=9))


@pytest.mark.parametrize(("heads", "dim"), [((3, 1), 24), ((4, 2), 40), ((2, 2), 64)])
def test_slopes_are_kept_or_computed_again(monkeypatch, heads: tuple[int, int], dim: int):
    """Sequences up to, at and beyond a tile's end: the gradients are the same either way."""
    lengths = [63, 1, 65, 200, 64]
    grad_q, *others = check_packed_attention(lengths, heads, dim, None)
    monkeypatch.setattr(packed, "ROOM", 0)
    again_q, *again = check_packed_attention(lengths, heads, dim, None)
    assert off(again_q, grad_q) < (1e-6 if INTERPRETED else 1e-3)  # scores are k·q there and q·k here
    for one, other in zip(again, others, strict=True):
        assert torch.equal(one, other)


def check_packed_attention(
    lengths: list[int], heads: tuple[int, int], dim: int, window: int | None, sinks: Tensor | None = None
) -> tuple[Tensor, ...]:
    """The output and all three gradients are what autograd gives in double; the gradients."""
    h, g = heads
    q, k, v = (random(sum(lengths), n, dim, seed=i) for i, n in enumerate((h, g, g)))
    grad = random(sum(lengths), h, dim, seed=3)
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    pieces = zip(*(x.split(lengths) for x in leaves), strict=True)
    want = torch.cat([attention(*piece, window, sinks) for piece in pieces])
    want.backward(grad.double())
    tiles = packed.cut(lengths, DEVICE)
    out, lse = packed.forward(q, k, v, tiles, window, sinks)
    assert off(out, want.detach()) < 8e-3
    back = packed.backward(grad, q, k, v, out, lse, tiles, window)
    for got, leaf in zip(back, leaves, strict=True):
        assert leaf.grad is not None
        assert off(got, leaf.grad) < 1.5e-2
    return back


# -- paged attention ---------------------------------------------------------------------------------------


def attention(q: Tensor, k: Tensor, v: Tensor, window: int | None, sinks: Tensor | None = None) -> Tensor:
    """The last len(q) of len(k) positions attend: [S, H, C] over [L, G, C], in double."""
    (s, h, c), (length, g, _) = q.shape, k.shape
    k, v = (x.double().repeat_interleave(h // g, 1) for x in (k, v))
    scores = torch.einsum("shc,lhc->hsl", q.double(), k) / c**0.5
    at, key = torch.arange(length - s, length)[:, None], torch.arange(length)[None]
    hidden = (key > at) | ((key <= at - window) if window else torch.zeros_like(key, dtype=torch.bool))
    scores = scores.masked_fill(hidden.to(DEVICE), -torch.inf)
    if sinks is not None:  # one more key, without a value
        scores = torch.cat((scores, sinks.double()[:, None, None].expand(h, s, 1)), dim=-1)
    return torch.einsum("hsl,lhc->shc", scores.softmax(-1)[..., :length], v)


@pytest.mark.parametrize("window", [None, 7, 21, 75])
@pytest.mark.parametrize(
    ("tokens", "splits", "least", "many"),
    [
        (1, 1, 0, 0),
        (1, 1, 64, 0),
        (1, 1, 0, 99),
        (1, 4, 0, 99),
        (1, 4, 64, 99),
        (1, 4, 128, 99),
        (16, 1, 0, 99),
    ],
)
def test_paged_attention(
    window: int | None, tokens: int, splits: int, least: int, many: int, monkeypatch: pytest.MonkeyPatch
):
    check_paged_attention(window, tokens, splits, least, many, monkeypatch)


@pytest.mark.parametrize(
    ("window", "tokens", "splits", "least", "many"),
    [
        (None, 1, 1, 0, 0),
        (21, 1, 1, 64, 0),
        (21, 1, 4, 0, 99),
        (None, 1, 4, 64, 99),
        (21, 16, 1, 0, 99),
        (None, 16, 1, 0, 99),
    ],
)
def test_paged_attention_with_sinks(
    window: int | None, tokens: int, splits: int, least: int, many: int, monkeypatch: pytest.MonkeyPatch
):
    check_paged_attention(window, tokens, splits, least, many, monkeypatch, random(6, seed=9))


def check_paged_attention(
    window: int | None, tokens: int, splits: int, least: int, many: int, monkeypatch: pytest.MonkeyPatch,
    sinks: Tensor | None = None,
) -> None:  # fmt: skip
    """Sequences of several lengths whose pages lie anywhere, with stale NaNs in what they do not use."""
    monkeypatch.setattr(paged, "_MANY", many)
    h, g, c, page, pages = 6, 2, 24, 16, 40
    new = [1] * 5 if tokens == 1 else [1, 16, 33, 50, 5]
    lengths = [1, 16, 90, 200, 31]
    pools = [torch.full((pages * page, g * c), float("nan"), dtype=BF16, device=DEVICE) for _ in range(2)]
    free = np.random.default_rng(0).permutation(pages).tolist()
    table = torch.zeros(5, 16, dtype=torch.int32)
    q, whole, tiles, row, new_k, new_v, new_slots = random(sum(new), h, c), [], [], 0, [], [], []
    for i, (length, count) in enumerate(zip(lengths, new, strict=True)):
        count = min(count, length)
        held = [free.pop() for _ in range(-(-length // page))]
        table[i, : len(held)] = torch.tensor(held)
        slots = (torch.tensor(held)[:, None] * page + torch.arange(page)).flatten()[:length].to(DEVICE)
        k, v = random(length, g, c, seed=10 + i), random(length, g, c, seed=30 + i)
        written = slice(0, length - count)  # new tokens are written with their attention
        paged.write(k[written], v[written], pools[0], pools[1], slots[written])
        new_slots.append(slots[length - count :])
        new_k.append(k[length - count :])
        new_v.append(v[length - count :])
        tiles += [
            (row + at, min(tokens, count - at), length - count + at, i) for at in range(0, count, tokens)
        ]
        whole.append(attention(q[row : row + count], k, v, window, sinks))
        row += count
    cells = torch.tensor([*tiles, (0, 0, 0, 0)], dtype=torch.int32).T.contiguous().to(DEVICE)
    queries = paged.Queries(cells, table.to(DEVICE), tokens, splits, least)
    news = q[:row].contiguous(), torch.cat(new_k), torch.cat(new_v)
    got, _ = paged.attend(*news, *pools, queries, torch.cat(new_slots), page, window, sinks)
    assert off(got, torch.cat(whole)) < 8e-3


def test_a_slot_below_zero_is_nowhere():
    pool = torch.zeros(4, 8, dtype=BF16, device=DEVICE)
    k = random(2, 1, 8)
    paged.write(k, k, pool, pool, torch.tensor([-1, 2], device=DEVICE))
    assert torch.equal(pool[2], k[1, 0])
    assert not pool[[0, 1, 3]].any()


# -- the beginning of a step -------------------------------------------------------------------------------


def test_orders_are_spread_over_the_rows_of_a_step():
    """Tokens of the host's and of the step before, a row that does nothing, and angles to the last bit."""
    rows, capacity, page = 4, 6, 16
    last = torch.tensor([70, 71, 72, 73, 74, 75], device=DEVICE)
    orders = torch.full((token_kernels.ORDERS, capacity), -1, device=DEVICE)
    orders[:4, 0] = torch.tensor([-1, 5, 33, 9 * page + 1])
    orders[:4, 1] = torch.tensor([3, 0, 0, 4 * page])
    orders[:4, 3] = torch.tensor([0, 0, 60, 2 * page + 12])
    rope = Rope(tuple(1.0 / 100.0 ** (i / 12) for i in range(12)), 1.25)
    known = rope.angles(torch.arange(64, device=DEVICE), BF16)
    tokens, slots = torch.empty(2, rows, dtype=torch.int64, device=DEVICE)
    cells = torch.empty(4, rows, dtype=torch.int32, device=DEVICE)
    table = torch.full((capacity, 4), -7, dtype=torch.int32, device=DEVICE)
    cos, sin = torch.full((2, rows, 12), torch.nan, dtype=BF16, device=DEVICE)
    token_kernels.begin(orders, last, tokens, slots, cells, table, page, known, (cos, sin))
    assert tokens.tolist() == [5, 73, 0, 70]
    assert slots.tolist() == [9 * page + 1, 4 * page, -1, 2 * page + 12]
    assert cells.tolist() == [[0, 1, 2, 3], [1, 1, 0, 1], [33, 0, -1, 60], [0, 1, 2, 3]]
    want = torch.full_like(table, -7)
    want[0, 2], want[1, 0], want[3, 3] = 9, 4, 2
    assert torch.equal(table, want)
    told = rope.angles(torch.tensor([33, 0, 0, 60], device=DEVICE), BF16)
    assert torch.equal(cos, told[0])
    assert torch.equal(sin, told[1])


# -- drawing -----------------------------------------------------------------------------------------------


def test_draws_are_the_hosts():
    """The same keys give the same tokens; logprobs agree; greedy rows and padded ids included."""
    vocab, padded, rows = 1001, 1216, 64
    logits = 3 * random(rows, padded)
    logits[:, vocab:] += 20
    temperature = torch.tensor([0.0, 1.0, 0.5, 2.0] * (rows // 4), device=DEVICE)
    keys = stream_keys(np.arange(rows, dtype=np.uint64), np.zeros(rows), np.arange(rows))
    tokens = torch.full((rows,), -1, dtype=torch.int64, device=DEVICE)
    chosen = torch.full((rows,), torch.nan, device=DEVICE)
    token_kernels.draw(
        logits, temperature, torch.from_numpy(keys.view(np.int64)).to(DEVICE), vocab, tokens, chosen
    )
    logprobs_BV = next_tokens.scaled_logprobs(logits, temperature, vocab)
    off_switch = np.zeros(rows, np.int64), np.ones(rows, np.float32)
    want = next_tokens.draw(logprobs_BV, next_tokens.Choice(temperature.cpu().numpy(), *off_switch, keys))
    greedy = (temperature == 0).nonzero()[:, 0]
    best = logprobs_BV[:, :vocab].max(-1).values
    torch.testing.assert_close(logprobs_BV[greedy, tokens[greedy]], best[greedy])  # bf16 logits have ties
    drawn = (temperature != 0).nonzero()[:, 0]
    assert (tokens[drawn] == want[drawn]).float().mean() > 0.95  # a tie of rounding may go either way
    torch.testing.assert_close(chosen, logprobs_BV.gather(1, tokens[:, None])[:, 0], atol=1e-4, rtol=1e-4)


def test_draws_follow_the_distribution():
    rows, vocab = (128, 300) if INTERPRETED else (8192, 600)
    logits = random(1, vocab).expand(rows, -1).contiguous()
    ones = torch.ones(rows, device=DEVICE)
    keys = stream_keys(np.full(rows, 7, np.uint64), np.arange(rows), np.zeros(rows))
    tokens, chosen = torch.empty(rows, dtype=torch.int64, device=DEVICE), torch.empty_like(ones)
    token_kernels.draw(logits, ones, torch.from_numpy(keys.view(np.int64)).to(DEVICE), vocab, tokens, chosen)
    p = logits[0].float().softmax(-1)
    share = torch.bincount(tokens, minlength=vocab).float() / rows
    # Pearson's statistic has mean vocab - 1 and variance about twice that
    statistic = float(((share - p).square() / p).sum() * rows)
    assert abs(statistic - (vocab - 1)) < 6 * (2 * vocab) ** 0.5


# -- logprobs ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab", [9001, 9000, 8999, 8192, 4096, 100])
def test_normaliser_and_gradient(vocab: int):
    """Padding, whatever its logits are, is in no normaliser and has a gradient of exactly zero."""
    logits = 4 * random(5, 9001)
    logits[:, vocab:] += 20
    ids = torch.tensor([3, vocab - 1, -1, 0, vocab // 2], device=DEVICE)
    grads = torch.tensor([1.0, -2.0, 0.5, 0.0, 3.0], device=DEVICE)
    wide = logits.double()
    wide[:, vocab:] = -torch.inf
    normaliser = token_kernels.normaliser(logits, vocab)
    torch.testing.assert_close(normaliser.double(), wide.logsumexp(-1), atol=1e-4, rtol=1e-5)
    onehot = torch.zeros_like(wide)
    onehot[ids >= 0, ids[ids >= 0]] = 1.0
    want = grads.double()[:, None] * (onehot - wide.softmax(-1))
    assert off(token_kernels.gradient_(logits, vocab, normaliser, ids, grads), want) < 8e-3
    assert not logits[:, vocab:].any()

"""Drawing: frequencies against the softmax, cuts against numpy, and rows that mind their own business."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tinkex.engine.rng import exponentials, stream_key, stream_keys
from tinkex.engine.torch.backend import Backend
from tinkex.engine.torch.next_tokens import (
    BLOCK,
    Choice,
    TorchRows,
    draw,
    keep_likeliest,
    race,
    scaled_logprobs,
)
from tinkex.types.outputs import TOPK_PADDING

pytestmark = pytest.mark.slow


def keys(count: int, seed: int = 0) -> np.ndarray:
    positions = np.arange(count)
    return stream_keys(np.full(count, seed, np.uint64), np.zeros(count, np.int64), positions)


def choose(rows: int, temperature: float = 1.0, top_k: int = -1, top_p: float = 1.0, seed: int = 0) -> Choice:
    return Choice(
        np.full(rows, temperature, np.float32),
        np.full(rows, top_k),
        np.full(rows, top_p, np.float32),
        keys(rows, seed),
    )


def warmth(choice: Choice) -> torch.Tensor:
    return torch.from_numpy(choice.temperature)


def drawn(logits: torch.Tensor, rows: int, vocab: int | None = None, **how) -> np.ndarray:
    """`rows` draws from one row of logits."""
    choice = choose(rows, **how)
    logprobs = scaled_logprobs(logits.expand(rows, -1), warmth(choice), vocab or logits.shape[-1])
    return draw(logprobs, choice).numpy()


def chi_square(counts: np.ndarray, expected: np.ndarray) -> float:
    """Standard deviations by which the statistic is above its mean, rare cells taken together."""
    order = np.argsort(expected)
    rare = np.cumsum(expected[order]) < 10
    few, many = order[rare], order[~rare]
    groups = [(counts[i], expected[i]) for i in many]
    if len(few) and expected[few].sum() > 1:
        groups.append((counts[few].sum(), expected[few].sum()))
    observed, wanted = np.array(groups).T
    degrees = len(groups) - 1
    return (((observed - wanted) ** 2 / wanted).sum() - degrees) / np.sqrt(2 * degrees)


# -- frequencies -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("vocab", "temperature"), [(50, 1.0), (700, 1.0), (700, 0.6), (700, 1.7)])
def test_frequencies_are_the_softmaxs(vocab: int, temperature: float):
    logits = torch.from_numpy(np.random.default_rng(vocab).normal(size=vocab) * 1.5)
    scaled = logits.numpy() / temperature
    p = np.exp(scaled - scaled.max()) / np.exp(scaled - scaled.max()).sum()
    draws = 60_000
    counts = np.bincount(drawn(logits, draws, temperature=temperature), minlength=vocab)
    assert abs(chi_square(counts, p * draws)) < 4


def test_frequencies_after_a_cut_are_the_kept_ones_renormalised():
    logits = torch.from_numpy(np.random.default_rng(5).normal(size=600))
    p = np.exp(logits.numpy())
    kept = np.argsort(-p)[:40]
    expected = np.zeros(600)
    expected[kept] = p[kept] / p[kept].sum()
    counts = np.bincount(drawn(logits, 40_000, top_k=40), minlength=600)
    assert counts[expected == 0].sum() == 0
    assert abs(chi_square(counts[kept], expected[kept] * 40_000)) < 4


def test_exponentials_are_exponential_and_independent_of_each_other():
    numbers = exponentials(keys(400), 500).astype(np.float64)
    assert numbers.min() > 0
    assert abs(numbers.mean() - 1) < 0.01
    assert abs(numbers.var() - 1) < 0.03
    assert abs(np.corrcoef(numbers[:, :-1].ravel(), numbers[:, 1:].ravel())[0, 1]) < 0.01
    assert abs(np.corrcoef(numbers[:-1].ravel(), numbers[1:].ravel())[0, 1]) < 0.01


def test_every_seed_sample_and_position_has_its_own_stream():
    seeds, samples, positions = (a.ravel() for a in np.meshgrid(np.arange(30), np.arange(30), np.arange(30)))
    assert len(np.unique(stream_keys(seeds.astype(np.uint64), samples, positions))) == 30**3
    huge = np.array([2**64 - 1, 2**63, 0], np.uint64)
    assert len(np.unique(stream_keys(huge, np.zeros(3, int), np.zeros(3, int)))) == 3


def test_one_key_in_plain_numbers_is_that_of_arrays():
    for seed, index, position in [(0, 0, 0), (1, 2, 3), (2**64 - 1, 2**32 + 7, 4095), (2**63, 1, 2**31)]:
        arrays = stream_keys(np.array([seed], np.uint64), np.array([index]), np.array([position]))
        assert stream_key(seed, index, position) == arrays[0]


# -- rows mind their own business ---------------------------------------------------------------------------


def test_a_row_is_drawn_alike_alone_and_in_company():
    rng = np.random.default_rng(1)
    logits = torch.from_numpy(rng.normal(size=(20, 1000)).astype(np.float32))
    choice = Choice(
        np.array([0.0, 0.5, 1.0, 1.3] * 5, np.float32),
        np.array([-1, 0, 5, 30, 2000] * 4),
        np.array([1.0, 0.9] * 10, np.float32),
        keys(20),
    )
    together = draw(scaled_logprobs(logits, warmth(choice), 990), choice)
    for i in range(20):
        one = slice(i, i + 1)
        alone = Choice(choice.temperature[one], choice.top_k[one], choice.top_p[one], choice.keys[one])
        assert draw(scaled_logprobs(logits[one], warmth(alone), 990), alone)[0] == together[i]


@pytest.mark.parametrize("spread", [0.3, 3.0])
def test_rounding_noise_hardly_ever_changes_a_draw(spread: float):
    """Another batch size, or a recomputation after preemption, rounds logits a little differently."""
    rng = np.random.default_rng(2)
    logits = torch.from_numpy((rng.normal(size=(2000, 5000)) * spread).astype(np.float32))
    noisy = logits + torch.from_numpy(rng.normal(size=logits.shape).astype(np.float32)) * 2e-6
    choice = choose(2000)
    a, b = (draw(scaled_logprobs(z, warmth(choice), 5000), choice) for z in (logits, noisy))
    assert int((a != b).sum()) <= 1


# -- cuts --------------------------------------------------------------------------------------------------


def kept_by_numpy(p: np.ndarray, top_k: int, top_p: float) -> set[int]:
    order = np.argsort(-p, kind="stable")
    if top_k > 0:
        order = order[:top_k]
    mass = p[order] / p[order].sum()
    kept, total = [], 0.0
    for token, m in zip(order, mass, strict=True):
        if kept and top_p < 1 and total >= top_p:
            break
        kept.append(int(token))
        total += m
    return set(kept)


@given(
    st.integers(0, 10**6), st.integers(2, 60), st.integers(-1, 70),
    st.sampled_from([0.0, 0.01, 0.3, 0.5, 0.77, 0.95, 1.0]),
)  # fmt: skip
@settings(deadline=None, max_examples=200)
def test_cuts_keep_what_numpy_keeps(seed: int, vocab: int, top_k: int, top_p: float):
    p = np.random.default_rng(seed).dirichlet(np.full(vocab, 0.5)).astype(np.float32)
    kept = keep_likeliest(torch.from_numpy(p)[None], torch.tensor([top_k]), torch.tensor([top_p]))[0].numpy()
    expected = kept_by_numpy(p.astype(np.float64), top_k, top_p)
    assert set(np.nonzero(kept)[0]) == {i for i in expected if p[i] > 0}
    np.testing.assert_array_equal(kept[kept > 0], p[kept > 0])


def test_greedy_ignores_the_cuts_and_the_stream():
    logits = torch.randn(3, 500, generator=torch.Generator().manual_seed(0))
    for seed in range(3):
        choice = choose(3, temperature=0.0, top_k=3, top_p=0.1, seed=seed)
        tokens = draw(scaled_logprobs(logits, warmth(choice), 500), choice)
        assert tokens.tolist() == logits.argmax(-1).tolist()


# -- logprobs ------------------------------------------------------------------------------------------------


def test_logprobs_are_tempered_and_greedy_reports_one():
    z = np.random.default_rng(0).normal(size=(3, 40)).astype(np.float32) * 3
    reported = scaled_logprobs(torch.from_numpy(z), torch.tensor([0.0, 1.0, 0.5]), z.shape[1]).numpy()
    for row, temperature in enumerate((1.0, 1.0, 0.5)):
        scaled = z[row].astype(np.float64) / temperature
        np.testing.assert_allclose(reported[row], scaled - np.log(np.exp(scaled).sum()), atol=1e-5)


def test_padded_ids_are_never_normalised_over_drawn_or_listed():
    logits = torch.zeros(1, BLOCK + 10)
    logits[:, BLOCK - 5 :] = 5.0  # most of the mass is padding
    vocab = BLOCK - 2
    for temperature in (0.0, 1.0, 30.0):
        assert drawn(logits[0], 500, vocab, temperature=temperature).max() < vocab
    logprobs = scaled_logprobs(logits, torch.tensor([1.0]), vocab)
    assert float(logprobs[0, :vocab].exp().sum()) == pytest.approx(1.0, abs=1e-5)
    assert (logprobs[0, vocab:] == -torch.inf).all()
    ids, values = TorchRows(logits, vocab, Backend()).top(vocab + 4)
    assert set(ids[0, :vocab].tolist()) == set(range(vocab))
    assert (values[0, vocab:] == TOPK_PADDING).all()


@pytest.mark.parametrize("top_p", [0.9, 1.0])
def test_the_coldest_draw_is_the_greedy_one_though_padding_is_likelier(top_p: float):
    logits = torch.randn(300, generator=torch.Generator().manual_seed(0))
    logits[290] = logits.max() + 3.0
    tokens = drawn(logits, 50, 290, temperature=0.001, top_p=top_p)
    assert (tokens == int(logits[:290].argmax())).all()


def test_blocks_without_mass_are_never_drawn():
    p = torch.zeros(64, 4 * BLOCK + 7)
    p[:, 2 * BLOCK + 3] = 1e-20
    assert (race(p, keys(64)) == 2 * BLOCK + 3).all()

"""What is said of a prompt: its logprobs, likeliest tokens, given targets and drawn alternatives."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from tests.exactness.conftest import EOS, MODEL, SECONDS, Start, World
from tests.exactness.reference import Reference, Table, surprise
from tinkex import ModelInput, SamplingClient, SamplingParams, ServiceClient, TensorData

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 200, 7]
KNOWN = EOS + 2
ONE = SamplingParams(max_tokens=1, seed=1)
close = {"rtol": 0, "atol": 1e-5}


@pytest.fixture(scope="module", params=["adapter", "base model"])
def scored(
    request: pytest.FixtureRequest, world: World, client: ServiceClient, start: Start, reference: Reference
) -> tuple[SamplingClient, Table]:
    """A sampler, and the logprobs of every token at every position of the prompt."""
    if request.param == "adapter":
        return start.sampler, reference.table(PROMPT)
    return client.create_sampling_client(base_model=MODEL), Reference(world.model).table(PROMPT)


def test_logprobs_of_the_prompt(scored: tuple[SamplingClient, Table]) -> None:
    sampler, table = scored
    right = table[np.arange(len(PROMPT) - 1), PROMPT[1:]]
    prompt = ModelInput.from_ints(PROMPT)
    computed = sampler.compute_logprobs(prompt).result(SECONDS)
    asked = sampler.sample(
        prompt, 1, SamplingParams(max_tokens=1, temperature=0.3), include_prompt_logprobs=True
    )
    for given in (computed, asked.result(SECONDS).prompt_logprobs):  # at T = 1 whatever is drawn
        assert given is not None
        assert given[0] is None
        np.testing.assert_allclose(given[1:], right, **close)  # type: ignore[arg-type]


@pytest.mark.parametrize("last", [1, 4, 10, 50])
def test_logprobs_of_the_prompts_end(scored: tuple[SamplingClient, Table], last: int) -> None:
    sampler, table = scored
    first = max(1, len(PROMPT) - last)
    right = table[np.arange(first - 1, len(PROMPT) - 1), PROMPT[first:]]
    prompt = ModelInput.from_ints(PROMPT)
    response = sampler.sample(
        prompt, 1, ONE, include_prompt_logprobs=True, topk_prompt_logprobs=2, prompt_logprobs_last_n=last
    ).result(SECONDS)
    computed = sampler.compute_logprobs(prompt, prompt_logprobs_last_n=last).result(SECONDS)
    for given in (response.prompt_logprobs, computed):
        assert given is not None
        assert given[:first] == [None] * first
        np.testing.assert_allclose(given[first:], right, **close)  # type: ignore[arg-type]
    rows = response.topk_prompt_logprobs
    assert rows is not None
    assert [row is None for row in rows] == [i < first for i in range(len(PROMPT))]


@pytest.mark.parametrize("k", [1, 5, 20])
def test_the_likeliest_tokens_of_the_prompt(scored: tuple[SamplingClient, Table], k: int) -> None:
    sampler, table = scored
    rows = sampler.sample(ModelInput.from_ints(PROMPT), 1, ONE, topk_prompt_logprobs=k)
    (first, *rest) = rows.result(SECONDS).topk_prompt_logprobs or []
    assert first is None
    best = np.argsort(-table[:-1, :KNOWN], axis=1)[:, :k]  # ids beyond the tokenizer's are never listed
    for row, ids, right in zip(rest, best, table, strict=False):
        assert row is not None
        assert [token for token, _ in row] == ids.tolist()
        np.testing.assert_allclose([logprob for _, logprob in row], right[ids], **close)
    assert len(rest) == len(PROMPT) - 1


def test_given_targets(scored: tuple[SamplingClient, Table]) -> None:
    """Dense and as CSR, answered in the layout they came in; -1, and what CSR leaves out, is 0."""
    sampler, table = scored
    dice = np.random.default_rng(0)
    targets = dice.integers(0, KNOWN, (len(PROMPT) - 1, 9))
    targets[dice.random(targets.shape) < 0.8] = -1
    targets[3] = -1
    right = np.where(targets < 0, 0.0, np.take_along_axis(table[:-1], targets.clip(0), 1))
    dense = TensorData.from_numpy(targets)
    listed = targets >= 0
    crow = np.concatenate([[0], listed.sum(1).cumsum()])
    sparse = TensorData(targets[listed], "int64", targets.shape, crow, np.nonzero(listed)[1])
    for asked in (dense, sparse):
        given = sampler.sample(ModelInput.from_ints(PROMPT), 1, ONE, target_prompt_logprobs=asked)
        answer = given.result(SECONDS).target_prompt_logprobs
        assert answer is not None
        assert (answer.dtype, answer.is_sparse) == ("float32", asked.is_sparse)
        if asked.is_sparse:
            assert answer.sparse_crow_indices == asked.sparse_crow_indices
            assert answer.sparse_col_indices == asked.sparse_col_indices
        np.testing.assert_allclose(answer.to_numpy(), right, **close)


def test_alternatives_are_drawn_at_every_position(scored: tuple[SamplingClient, Table]) -> None:
    """By the model's own probabilities at T = 1, however the continuation is drawn."""
    sampler, table = scored
    draws = 1500
    params = SamplingParams(max_tokens=1, seed=4, temperature=0.5, top_k=2)
    response = sampler.sample(ModelInput.from_ints(PROMPT[:5]), 1, params, prompt_alt_tokens_k=draws)
    drawn = response.result(SECONDS).prompt_alt_tokens
    assert drawn is not None
    tokens, logprobs = drawn.tokens.to_numpy(), drawn.logprobs.to_numpy()
    assert tokens.shape == logprobs.shape == (4, draws)
    np.testing.assert_allclose(logprobs, np.take_along_axis(table[:4], tokens, 1), **close)
    for row, counted in zip(table[:4], tokens.tolist(), strict=True):
        p = np.exp(row[:KNOWN])
        assert surprise(Counter(counted), dict(enumerate(p / p.sum()))) < 4


def test_everything_at_once_is_what_each_is_alone(scored: tuple[SamplingClient, Table]) -> None:
    sampler, table = scored
    targets = TensorData.from_numpy(np.full((len(PROMPT) - 1, 1), 42))
    response = sampler.sample(
        ModelInput.from_ints(PROMPT), 3, SamplingParams(max_tokens=4, seed=2, stop=[]),
        include_prompt_logprobs=True, topk_prompt_logprobs=3, topk_sample_logprobs=2,
        target_prompt_logprobs=targets, prompt_alt_tokens_k=2,
    ).result(SECONDS)  # fmt: skip
    alone = sampler.sample(ModelInput.from_ints(PROMPT), 3, SamplingParams(max_tokens=4, seed=2, stop=[]))
    assert [s.tokens for s in response.sequences] == [s.tokens for s in alone.result(SECONDS).sequences]
    right = table[np.arange(len(PROMPT) - 1), PROMPT[1:]]
    np.testing.assert_allclose(response.prompt_logprobs[1:], right, **close)  # type: ignore[index]
    assert response.target_prompt_logprobs is not None
    np.testing.assert_allclose(response.target_prompt_logprobs.to_numpy()[:, 0], table[:-1, 42], **close)
    assert response.prompt_alt_tokens is not None
    assert all(len(s.topk_logprobs or []) == 4 for s in response.sequences)

"""What is drawn: from which distribution, by which seed, how far, and with which logprobs.

Frequencies are held to the reference's by chi-square; a seed makes the draws, and so the verdict, the same
every time.
"""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import numpy as np
import pytest

from tests.exactness.conftest import EOS, MODEL, SECONDS, Start, plain_data
from tests.exactness.reference import Reference, kept, surprise
from tinkex import (
    AdamParams,
    ModelInput,
    SampledSequence,
    SamplingClient,
    SamplingParams,
    ServiceClient,
)

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
KNOWN = EOS + 2  # ids that the tokenizer has; the rest of the vocabulary is padding
CONTEXT = 256
DRAWS = 3000
LIMIT = 4.0  # standard deviations of a chi-square statistic


def draw(sampler: SamplingClient, count: int = 1, **params: Any) -> list[SampledSequence]:
    given = {"max_tokens": 8, "seed": 1, "stop": [], **params}
    prompt = ModelInput.from_ints(PROMPT)
    return list(sampler.sample(prompt, count, SamplingParams(**given)).result(SECONDS).sequences)


def tokens(sequences: list[SampledSequence]) -> list[list[int]]:
    return [sequence.tokens for sequence in sequences]


def probabilities(reference: Reference, ids: list[int], temperature: float = 1.0, **cut: Any) -> np.ndarray:
    """Of every token that may come next."""
    return kept(np.exp(reference.table(ids, temperature)[-1, :KNOWN]), **cut)


# -- logprobs ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 0.4, 1.0, 1.7])
@pytest.mark.parametrize("cut", [{}, {"top_k": 4}, {"top_p": 0.6}], ids=str)
def test_logprobs_are_tempered_and_of_the_whole_distribution(
    start: Start, reference: Reference, temperature: float, cut: dict
) -> None:
    """log_softmax(logits / T), whatever is cut off; greedy reports T = 1."""
    for sequence in draw(start.sampler, 3, max_tokens=12, temperature=temperature, **cut):
        right = reference.scores(PROMPT + sequence.tokens, temperature or 1.0)[len(PROMPT) - 1 :]
        assert len(sequence.tokens) == 12
        np.testing.assert_allclose(sequence.logprobs, right, rtol=0, atol=2e-5)  # type: ignore[arg-type]


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0])
def test_the_likeliest_tokens_at_every_draw(start: Start, reference: Reference, temperature: float) -> None:
    params = SamplingParams(max_tokens=10, seed=3, temperature=temperature, stop=[])
    response = start.sampler.sample(ModelInput.from_ints(PROMPT), 2, params, topk_sample_logprobs=6)
    for sequence in response.result(SECONDS).sequences:
        table = reference.table(PROMPT + sequence.tokens, temperature or 1.0)[len(PROMPT) - 1 : -1, :KNOWN]
        best = np.argsort(-table, axis=1)[:, :6]
        rows = sequence.topk_logprobs
        assert rows is not None
        for row, ids, right in zip(rows, best, table, strict=True):
            assert row is not None
            assert [token for token, _ in row] == ids.tolist()
            np.testing.assert_allclose([lp for _, lp in row], right[ids], rtol=0, atol=2e-5)


def test_greedy_is_the_likeliest_token(start: Start, reference: Reference) -> None:
    """And so is every choice that leaves but one; it needs no seed."""
    (greedy,) = draw(start.sampler, temperature=0.0, max_tokens=20)
    table = reference.table(PROMPT + greedy.tokens)[len(PROMPT) - 1 : -1, :KNOWN]
    assert greedy.tokens == table.argmax(1).tolist()
    for narrow in ({"temperature": 0.0, "seed": None}, {"top_k": 1}, {"top_p": 0.0}, {"top_p": 1e-6}):
        assert tokens(draw(start.sampler, 2, max_tokens=20, **narrow)) == [greedy.tokens] * 2


# -- frequencies -------------------------------------------------------------------------------------------


CUTS = [
    {}, {"temperature": 0.5}, {"temperature": 1.6}, {"top_k": 7}, {"top_p": 0.5}, {"top_k": 12, "top_p": 0.7},
    {"temperature": 1.6, "top_k": 30, "top_p": 0.9},
]  # fmt: skip


@pytest.mark.parametrize("how", CUTS, ids=str)
def test_frequencies_of_a_token(start: Start, reference: Reference, how: dict) -> None:
    """Nothing outside of the cut is drawn, everything well inside is, as often as it should be."""
    p = probabilities(reference, PROMPT, **how)
    counts = Counter(s.tokens[0] for s in draw(start.sampler, DRAWS, max_tokens=1, **how))
    assert set(counts) <= set(np.nonzero(p)[0].tolist())
    assert {token for token in range(KNOWN) if p[token] * DRAWS > 15} <= set(counts)
    assert surprise(counts, dict(enumerate(p))) < LIMIT


def test_frequencies_of_several_tokens(start: Start, reference: Reference) -> None:
    """Each token is drawn given those before it: the frequencies of whole sequences are products."""
    p: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        longer = {}
        for before, mass in p.items():
            following = probabilities(reference, PROMPT + list(before), top_k=3)
            longer |= {(*before, int(token)): mass * following[token] for token in np.nonzero(following)[0]}
        p = longer
    assert len(p) == 27
    counts = Counter(tuple(s.tokens) for s in draw(start.sampler, DRAWS, max_tokens=3, top_k=3))
    assert surprise(counts, p) < LIMIT


def test_frequencies_over_seeds(start: Start, reference: Reference) -> None:
    """One sample of each of many seeds is as random as many samples of one."""
    prompt = ModelInput.from_ints(PROMPT)
    futures = [
        start.sampler.sample(prompt, 1, SamplingParams(max_tokens=2, seed=seed, top_k=4, stop=[]))
        for seed in range(600)
    ]
    drawn = [tuple(future.result(SECONDS).sequences[0].tokens) for future in futures]
    first = probabilities(reference, PROMPT, top_k=4)
    p = {
        (int(a), int(b)): first[a] * second[b]
        for a in np.nonzero(first)[0]
        for second in [probabilities(reference, [*PROMPT, int(a)], top_k=4)]
        for b in np.nonzero(second)[0]
    }
    assert surprise(Counter(drawn), p) < LIMIT


# -- seeds -------------------------------------------------------------------------------------------------


def test_seeds(start: Start) -> None:
    """The k-th sample of a seed is the same however many are asked for, and no other's."""
    many = tokens(draw(start.sampler, 6))
    assert tokens(draw(start.sampler, 2)) == many[:2]
    others = tokens(draw(start.sampler, 6, seed=2)) + tokens(draw(start.sampler, 6, seed=-1))
    assert len({tuple(drawn) for drawn in many + others}) == 18
    far = {"seed": None, "max_tokens": 40, "temperature": 1.7}
    unseeded = tokens(draw(start.sampler, 2, **far)) + tokens(draw(start.sampler, 2, **far))
    assert len({tuple(drawn) for drawn in unseeded}) == 4


def test_a_stream_draws_what_a_sample_does(start: Start) -> None:
    params = SamplingParams(max_tokens=20, seed=6, temperature=0.8, stop=[])
    whole = start.sampler.sample(ModelInput.from_ints(PROMPT), 3, params).result(SECONDS).sequences
    streamed: list[list[tuple[int, float]]] = [[], [], []]
    for new in start.sampler.sample_stream(ModelInput.from_ints(PROMPT), params, 3, timeout=SECONDS):
        streamed[new.sequence] += zip(new.tokens, new.logprobs, strict=True)
    for sequence, pieces in zip(whole, streamed, strict=True):
        assert [token for token, _ in pieces] == sequence.tokens
        np.testing.assert_allclose([lp for _, lp in pieces], sequence.logprobs, rtol=0, atol=1e-5)  # type: ignore[arg-type]


def test_a_seed_draws_on_as_far_as_it_is_let(start: Start) -> None:
    """max_tokens, and what is asked for beside the tokens, change nothing of what is drawn."""
    (long,) = tokens(draw(start.sampler, max_tokens=30))
    for count in (1, 7, 29):
        (short,) = draw(start.sampler, max_tokens=count)
        assert (short.tokens, short.stop_reason) == (long[:count], "length")


def test_without_max_tokens_the_context_is_filled(start: Start) -> None:
    (sequence,) = draw(start.sampler, max_tokens=None)
    assert (len(sequence.tokens), sequence.stop_reason) == (CONTEXT - len(PROMPT), "length")


# -- stops -------------------------------------------------------------------------------------------------

SAID = "Yes, a naïve\n\nUser: no"  # a byte is a token: every string here spans several
ASK = [65, 66, 67]


@pytest.fixture(scope="module")
def parrot(client: ServiceClient) -> SamplingClient:
    """A sampler that answers ASK with SAID, the end of the sequence, and SAID again."""
    run = client.create_lora_training_client(MODEL, rank=16, seed=1)
    said = client.create_sampling_client(base_model=MODEL).get_tokenizer().encode(SAID)
    sequence = [*ASK, *said, EOS, *said]
    for _ in range(300):  # 60 or so, as the CPU rounds
        loss = run.forward_backward(plain_data([sequence]), "cross_entropy")
        if loss.result(SECONDS).metrics["loss:sum"] < 0.1:
            break
        run.optim_step(AdamParams(learning_rate=2e-2))
    return run.save_weights_and_get_sampling_client()


def answered(parrot: SamplingClient, **params: Any) -> SampledSequence:
    """What it says, greedily."""
    given = SamplingParams(**{"max_tokens": 60, "temperature": 0.0, **params})
    (sequence,) = parrot.sample(ModelInput.from_ints(ASK), 1, given).result(SECONDS).sequences
    assert len(sequence.logprobs or []) == len(sequence.tokens)
    return sequence


@pytest.mark.parametrize(
    ("stop", "end", "match"),
    [
        (None, "", EOS),
        ("\n\nUser:", "Yes, a naïve\n\nUser:", "\n\nUser:"),
        (["\n\nUser:"], "Yes, a naïve\n\nUser:", "\n\nUser:"),
        ("ï", "Yes, a naï", "ï"),
        (["never", "naïve", "User"], "Yes, a naïve", "naïve"),
        (["e", "Yes"], "Ye", "e"),
        ("never", "", EOS),
        (SAID * 9, "", EOS),
    ],
    ids=repr,
)
def test_stops_at_text(parrot: SamplingClient, stop: Any, end: str, match: Any) -> None:
    """What stops a sample stays in it; the end of the sequence stops it too (here where `end` is empty)."""
    encode = parrot.get_tokenizer().encode
    sequence = answered(parrot, stop=stop)
    assert sequence.tokens == (encode(end) if end else [*encode(SAID), EOS])
    assert sequence.stop_reason == "stop"
    assert (sequence.stop_detail, sequence.stop_match) == ("stop_sequence" if end else "eos", match)


@pytest.mark.parametrize(("letters", "end"), [("a", "Yes, a"), ("Za,", "Yes,"), ("Z", "")])
def test_stops_at_ids(parrot: SamplingClient, letters: str, end: str) -> None:
    encode = parrot.get_tokenizer().encode
    sequence = answered(parrot, stop=encode(letters))
    assert sequence.tokens == (encode(end) if end else [*encode(SAID), EOS])
    assert sequence.stop_reason == "stop"
    detail = ("stop_sequence", encode(end)[-1]) if end else ("eos", EOS)
    assert (sequence.stop_detail, sequence.stop_match) == detail


def test_nothing_stops_what_is_never_to_stop(parrot: SamplingClient) -> None:
    said = parrot.get_tokenizer().encode(SAID)
    sequence = answered(parrot, stop=[], max_tokens=2 * len(said) + 1)
    assert sequence.tokens == [*said, EOS, *said]
    assert sequence.stop_reason == "length"
    assert (sequence.stop_detail, sequence.stop_match) == ("max_tokens", None)
    assert answered(parrot, stop=[], max_tokens=None).stop_detail == "context"


def test_a_stop_on_the_last_token_is_a_stop(parrot: SamplingClient) -> None:
    for count, reason in ((2, "length"), (3, "stop"), (4, "stop")):
        sequence = answered(parrot, stop="Yes", max_tokens=count)
        assert (len(sequence.tokens), sequence.stop_reason) == (min(count, 3), reason)


def test_each_sample_stops_by_itself(start: Start) -> None:
    """Seeded samples with stops are those without, cut where the stop first is."""
    whole = tokens(draw(start.sampler, 12, max_tokens=40, temperature=1.3))
    counts = Counter(itertools.chain.from_iterable(set(drawn) for drawn in whole))
    stop = next(token for token, n in counts.most_common() if n < 12 and token != EOS)
    stopped = draw(start.sampler, 12, max_tokens=40, temperature=1.3, stop=[stop])
    reasons = set()
    for sequence, free in zip(stopped, whole, strict=True):
        ends = [i + 1 for i, token in enumerate(free) if token in (stop, EOS)]
        assert sequence.tokens == free[: ends[0] if ends else 40]
        assert sequence.stop_reason == ("stop" if ends else "length")
        reasons.add(sequence.stop_reason)
    assert reasons == {"stop", "length"}

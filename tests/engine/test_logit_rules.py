"""Penalties, bias and minimum length against transformers' logits processors and `generate`."""

from __future__ import annotations

import re
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from tests.engine.stepping import finish
from tests.engine.tiny import reference_model, tiny_model
from tinkex.engine.logit_rules import LogitRules
from tinkex.engine.protocol import SampleWork
from tinkex.engine.rng import stream_keys
from tinkex.engine.torch.continuous_batch import ContinuousBatch, StepLimits
from tinkex.engine.torch.kv import KVCache
from tinkex.engine.torch.load import load_decoder
from tinkex.engine.torch.next_tokens import Choice, draw
from tinkex.types.params import SamplingParams

pytestmark = pytest.mark.slow

VOCAB, STOPS = 40, (2, 3)
ids = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=12)


def edited(params: SamplingParams, prompt: list[int], drawn: list[int], logits: np.ndarray) -> np.ndarray:
    work = SampleWork(np.array(prompt, np.int32), params)
    assert LogitRules.asked(work)
    edit = LogitRules(work, STOPS).edit(drawn)
    logits = logits.copy()
    logits[edit.ids] = edit.apply(logits[edit.ids])
    return logits


@given(
    ids,
    ids,
    st.floats(0.3, 3),
    st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-5, 5), min_size=1),
    st.integers(1, 15),
    st.integers(0, 99),
)
def test_rules_change_logits_as_transformers_does(
    prompt: list[int],
    drawn: list[int],
    repetition: float,
    bias: dict[int, float],
    min_tokens: int,
    seed: int,
):
    logits = np.random.default_rng(seed).normal(size=VOCAB).astype(np.float32) * 3
    params = SamplingParams(repetition_penalty=repetition, logit_bias=bias, min_tokens=min_tokens)
    theirs = LogitsProcessorList([
        SequenceBiasLogitsProcessor({(token,): value for token, value in bias.items()}),
        RepetitionPenaltyLogitsProcessor(repetition),
        MinNewTokensLengthLogitsProcessor(len(prompt), min_tokens, list(STOPS), device="cpu"),
    ])  # fmt: skip
    expected = theirs(torch.tensor([prompt + drawn]), torch.from_numpy(logits[None].copy()))[0].numpy()
    np.testing.assert_allclose(edited(params, prompt, drawn, logits), expected, rtol=1e-5, atol=1e-5)


@given(ids, ids, st.floats(-2, 2), st.floats(0.1, 2))
def test_presence_and_frequency_are_openais_formula(
    prompt: list[int], drawn: list[int], presence: float, frequency: float
):
    logits = np.linspace(-3, 3, VOCAB, dtype=np.float32)
    params = SamplingParams(presence_penalty=presence, frequency_penalty=frequency)
    counts = np.bincount(drawn, minlength=VOCAB)
    expected = logits - counts * frequency - (counts > 0) * presence  # the prompt does not count
    np.testing.assert_allclose(edited(params, prompt, drawn, logits), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("min_p", [0.05, 0.3, 0.9])
def test_min_p_keeps_what_transformers_keeps(min_p: float):
    rows = 20_000
    logits = torch.from_numpy(np.random.default_rng(3).normal(size=(1, 60)).astype(np.float32) * 1.5)
    kept = torch.isfinite(MinPLogitsWarper(min_p)(torch.zeros(1, 1), logits)[0])
    choice = Choice(
        np.ones(rows, np.float32), np.full(rows, -1), np.ones(rows, np.float32),
        stream_keys(np.zeros(rows, np.uint64), np.zeros(rows, np.int64), np.arange(rows)),
        np.full(rows, min_p, np.float32),
    )  # fmt: skip
    tokens = draw(logits.log_softmax(-1).expand(rows, -1), choice)
    p = torch.where(kept, logits[0].exp(), 0.0)
    counts = torch.bincount(tokens, minlength=60) / rows
    assert set(tokens.tolist()) <= set(kept.nonzero()[:, 0].tolist())
    torch.testing.assert_close(counts, p / p.sum(), atol=0.02, rtol=0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), "qwen3")


RULES = {
    "repetition": ({"repetition_penalty": 1.7}, {"repetition_penalty": 1.7}),
    "bias": (
        {"logit_bias": {11: 4.0, 30: -3.0}, "repetition_penalty": 1.2},
        {"sequence_bias": {(11,): 4.0, (30,): -3.0}, "repetition_penalty": 1.2},
    ),
}


@pytest.mark.parametrize("which", RULES)
def test_greedy_samples_are_those_of_transformers_generate(model: Path, which: str):
    ours, theirs = RULES[which]
    decoder = load_decoder(model, torch.device("cpu"), torch.float32)
    shape = decoder.config
    cache = KVCache(shape.kv_shapes, 64, torch.device("cpu"), torch.float32)
    batch = ContinuousBatch(decoder, cache, StepLimits(context=256, sequences=8))
    oracle = reference_model(model)
    futures = []
    prompts = [np.random.default_rng(n).integers(5, shape.vocab_size, 6 + n).astype(np.int32) for n in (1, 2)]
    for prompt in prompts:
        work = SampleWork(prompt, SamplingParams(max_tokens=24, temperature=0.0, stop=[], **ours))
        futures.append(Future())
        batch.submit(work, batch.check_work(work), None, futures[-1])
    finish(batch)
    plain = torch.stack([_greedy(oracle, prompt, {}) for prompt in prompts])
    assert not torch.equal(plain, torch.stack([_greedy(oracle, prompt, theirs) for prompt in prompts]))
    for prompt, future in zip(prompts, futures, strict=True):
        (sequence,) = future.result().sequences
        assert sequence.tokens == _greedy(oracle, prompt, theirs).tolist()
        whole = torch.from_numpy(np.concatenate([prompt, sequence.tokens_np]).astype(np.int64))[None]
        logprobs = oracle(whole).logits[0].log_softmax(-1)
        chosen = logprobs[range(len(prompt) - 1, whole.shape[1] - 1), sequence.tokens]
        # What is reported are the model's own logprobs, whatever was drawn from.
        np.testing.assert_allclose(sequence.logprobs_np, chosen.detach().numpy(), atol=1e-4)


def _greedy(oracle, prompt: np.ndarray, how: dict) -> torch.Tensor:
    oracle.generation_config.eos_token_id = None
    given = torch.from_numpy(prompt.astype(np.int64))[None]
    out = oracle.generate(given, max_new_tokens=24, do_sample=False, pad_token_id=0, eos_token_id=None, **how)
    return out[0, len(prompt) :]


@pytest.mark.parametrize(
    ("params", "named"),
    [
        ({"presence_penalty": 3.0}, "presence_penalty must be in"),
        ({"repetition_penalty": 0.0}, "repetition_penalty must be in"),
        ({"min_p": 2.0}, "min_p must be in"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens must be at most max_tokens"),
        ({"logit_bias": {"x": 1.0}}, "no token id"),
        ({"logit_bias": {5: 101}}, "[-100, 100]"),
        ({"grammar": {"bnf": "x"}}, "exactly one of json_schema, regex, lark"),
        ({"grammar": {"regex": 5}}, "must be a string"),
        ({"grammar": {"regex": "x"}, "min_tokens": 1}, "not both"),
        ({"ignore_eos": 1}, "True or False"),
    ],
)
def test_what_is_wrong_is_named(params: dict, named: str):
    with pytest.raises(ValueError, match=re.escape(named)):
        SamplingParams(**params)


def test_json_has_strings_as_keys_and_the_same_biases():
    assert SamplingParams(logit_bias={"7": 1}).logit_bias == {7: 1.0}

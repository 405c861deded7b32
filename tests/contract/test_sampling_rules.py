"""What every sampler promises of penalties, bias, minimum length and grammars."""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from tokenizers import decoders, pre_tokenizers

from tests.contract.conftest import NEAR, logprobs, tokens
from tests.engine.tiny import tiny_tokenizer
from tinkex.engine.protocol import Engine, EngineConfig, EngineError, SampleWork, build_engine
from tinkex.types.outputs import SampledSequence
from tinkex.types.params import SamplingParams

pytestmark = pytest.mark.anyio


async def drawn(engine: Engine, count: int = 1, prompt: int = 5, **params) -> list[SampledSequence]:
    given = {"max_tokens": 24, "stop": [], "seed": 1, **params}
    work = SampleWork(tokens(engine, 0, prompt), SamplingParams(**given), num_samples=count)
    return (await engine.sampler.sample(work)).sequences


async def test_penalties_make_tokens_rarer(engine: Engine):
    plain = await drawn(engine, 4, temperature=0.5)
    for penalty in ({"frequency_penalty": 2.0, "presence_penalty": 2.0}, {"repetition_penalty": 50.0}):
        penalised = await drawn(engine, 4, temperature=0.5, **penalty)
        most = [max(Counter(s.tokens).values()) for s in (*plain, *penalised)]
        assert sum(most[4:]) < sum(most[:4])


async def test_a_bias_forces_and_forbids_tokens_and_logprobs_stay_the_models(engine: Engine, run: str):
    token = int(tokens(engine, 8, 1)[0])
    (forced,) = await drawn(engine, max_tokens=4, logit_bias={token: 100.0})
    assert forced.tokens == [token] * 4
    prompt = tokens(engine, 0, 5)
    whole = np.concatenate([prompt, np.array(forced.tokens, np.int32)])
    np.testing.assert_allclose(forced.logprobs_np, logprobs(engine, run, whole)[-4:], atol=NEAR)
    likely = (await drawn(engine, temperature=0.0, max_tokens=1))[0].tokens[0]
    assert (await drawn(engine, temperature=0.0, max_tokens=1, logit_bias={likely: -100}))[0].tokens != [
        likely
    ]
    with pytest.raises(EngineError, match="logit_bias has token") as caught:
        await drawn(engine, logit_bias={engine.info.vocab_size: 1.0})
    assert caught.value.category == "user"


async def test_nothing_ends_a_sequence_before_min_tokens(engine: Engine):
    eos = engine.info.eos_ids[0]
    bias = {eos: 100.0}
    assert len((await drawn(engine, stop=None, logit_bias=bias))[0].tokens) == 1
    (late,) = await drawn(engine, stop=None, logit_bias=bias, min_tokens=6)
    assert (len(late.tokens), late.tokens[-1], late.stop_reason) == (7, eos, "stop")
    assert eos not in late.tokens[:-1]
    (on,) = await drawn(engine, stop=None, logit_bias=bias, ignore_eos=True)
    assert (on.tokens, on.stop_reason) == ([eos] * 24, "length")


async def test_min_p_of_one_is_greedy(engine: Engine):
    (greedy,) = await drawn(engine, temperature=0.0)
    (cut,) = await drawn(engine, min_p=1.0)
    assert cut.tokens == greedy.tokens


async def test_a_rule_is_kept_whoever_else_is_in_the_batch(engine: Engine):
    alone = (await drawn(engine, frequency_penalty=1.0))[0].tokens
    mixed = await drawn(engine, 3, frequency_penalty=1.0)
    assert mixed[0].tokens == alone
    assert len({tuple(s.tokens) for s in mixed}) > 1


# -- grammars ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def spelling(config: EngineConfig, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """An engine whose tokens are bytes."""
    directory = tiny_tokenizer(tmp_path_factory.mktemp("bytes"))
    engine = build_engine(replace(config, tokenizer=str(directory)))
    yield engine
    engine.close()


def text_of(engine: Engine, sequence: SampledSequence) -> str:
    """The text of an answer that must have ended by itself."""
    *body, last = sequence.tokens
    assert last in engine.info.eos_ids
    assert sequence.stop_reason == "stop"
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    return decoders.ByteLevel().decode([alphabet[token] for token in body])


async def test_samples_match_their_regex_and_end_there(spelling: Engine):
    regex = "(ab|cd|e f){2,4}gh"
    sequences = await drawn(spelling, 4, grammar={"regex": regex}, stop=None, max_tokens=64)
    texts = [text_of(spelling, sequence) for sequence in sequences]
    assert all(re.fullmatch(regex, text) for text in texts)
    assert len(set(texts)) > 1
    assert all(np.isfinite(sequence.logprobs_np).all() for sequence in sequences)


async def test_samples_match_their_schema(spelling: Engine):
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}, "kind": {"enum": ["a", "b", "long one"]}},
        "required": ["ok", "kind"],
        "additionalProperties": False,
    }
    (sequence,) = await drawn(spelling, grammar={"json_schema": schema}, stop=None, max_tokens=240)
    answer = json.loads(text_of(spelling, sequence))
    assert set(answer) == {"ok", "kind"}
    assert type(answer["ok"]) is bool
    assert answer["kind"] in ("a", "b", "long one")


async def test_a_grammar_in_lark_is_followed_beside_samples_without_one(spelling: Engine):
    lark = 'start: "x" ("y" | "z")+ "!"'
    free = asyncio.create_task(drawn(spelling, 2, max_tokens=64))
    (sequence,) = await drawn(spelling, grammar={"lark": lark}, stop=None, max_tokens=200, min_p=0.0)
    assert re.fullmatch("x[yz]+!", text_of(spelling, sequence))
    assert [len(s.tokens) for s in await free] == [64, 64]
    assert [s.tokens for s in await drawn(spelling, 2, max_tokens=64)] == [s.tokens for s in await free]


async def test_after_the_end_of_a_grammar_anything_may_come(spelling: Engine):
    (sequence,) = await drawn(spelling, grammar={"regex": "ab"}, stop=[], max_tokens=20)
    assert len(sequence.tokens) == 20
    assert sequence.tokens[2] in spelling.info.eos_ids


@pytest.mark.parametrize(
    ("grammar", "named"),
    [
        ({"regex": "("}, "regex"),
        ({"lark": "start: nobody"}, "lark"),
        ({"json_schema": {"type": 5}}, "json"),
    ],
)
async def test_a_wrong_grammar_is_the_users(spelling: Engine, grammar: dict, named: str):
    with pytest.raises(EngineError, match=named) as caught:
        await drawn(spelling, grammar=grammar)
    assert caught.value.category == "user"
    assert len((await drawn(spelling))[0].tokens) == 24

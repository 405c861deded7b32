"""What every sampler promises."""

from __future__ import annotations

import asyncio
import pickle
import subprocess
import sys
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.contract.conftest import (
    LORA,
    NEAR,
    SECONDS,
    datum,
    do,
    every_family,
    forward_backward,
    logprobs,
    new_run,
    tokens,
    train,
)
from tinkex.engine.protocol import (
    ContinuePasses,
    CreateAdapter,
    DropAdapter,
    Engine,
    EngineConfig,
    EngineError,
    EngineLost,
    ExportAdapter,
    ForwardBackward,
    OptimStep,
    Pass,
    PassProgress,
    SampledTokens,
    SampleWork,
    SaveAdapter,
    build_engine,
)
from tinkex.types.outputs import TOPK_PADDING, SampledSequence, SampleResponse
from tinkex.types.params import AdamParams, SamplingParams
from tinkex.types.tensor import TensorData

pytestmark = pytest.mark.anyio


async def sample(engine: Engine, prompt: np.ndarray, *, work: dict | None = None, **params) -> SampleResponse:
    params = {"max_tokens": 8, "stop": [], "seed": 1, **params}
    return await engine.sampler.sample(SampleWork(prompt, SamplingParams(**params), **(work or {})))


async def published(engine: Engine, run: str) -> str:
    """An adapter that has learnt something, sampleable under its run's name."""
    train(engine, run, tokens(engine, 99, 20), steps=2)
    await engine.sampler.publish(run, do(engine, ExportAdapter(run)))
    return run


def only(response: SampleResponse) -> SampledSequence:
    (sequence,) = response.sequences
    return sequence


def log_softmax(z: np.ndarray) -> np.ndarray:
    z = z.astype(np.float64)
    return z - np.log(np.exp(z - z.max()).sum()) - z.max()


# -- shapes and lengths ------------------------------------------------------------------------------------


async def test_a_sample_has_a_logprob_for_every_token(engine: Engine):
    response = await sample(engine, tokens(engine, 0, 5), max_tokens=6, work={"num_samples": 3})
    assert len(response.sequences) == 3
    for sequence in response.sequences:
        assert sequence.tokens_np is not None
        assert sequence.tokens_np.dtype == np.int32
        assert sequence.logprobs_np is not None
        assert sequence.logprobs_np.dtype == np.float32
        assert len(sequence.tokens) == len(sequence.logprobs_np) == 6
        assert sequence.stop_reason == "length"
        assert (sequence.logprobs_np <= 0).all()
        assert np.isfinite(sequence.logprobs_np).all()
    assert response.prompt_logprobs_np is None
    assert response.topk_prompt_logprobs_np is None
    assert response.target_prompt_logprobs is None
    assert response.prompt_alt_tokens is None


async def test_without_max_tokens_the_context_is_the_end(engine: Engine):
    prompt = tokens(engine, 0, engine.info.max_context - 9)
    assert len(only(await sample(engine, prompt, max_tokens=None)).tokens) == 9


@pytest.mark.parametrize("asked", [{"max_tokens": 4}, {"max_tokens": 5}])
async def test_prompt_and_answer_must_fit_the_context(engine: Engine, asked: dict):
    limit = engine.info.max_context
    prompt = tokens(engine, 0, limit - 4)
    if asked["max_tokens"] == 4:
        assert len(only(await sample(engine, prompt, **asked)).tokens) == 4
        return
    with pytest.raises(EngineError) as caught:
        await sample(engine, prompt, **asked)
    assert caught.value.category == "user"
    assert caught.value.message == (
        f"Prompt length plus max_tokens exceeds the model's context window: {limit - 4} + 5 > {limit}"
    )


async def test_a_prompt_as_long_as_the_context_can_be_scored(engine: Engine):
    prompt = tokens(engine, 0, engine.info.max_context)
    response = await sample(engine, prompt, max_tokens=1, work={"prompt_logprobs": True})
    assert response.prompt_logprobs_np is not None
    assert len(response.prompt_logprobs_np) == len(prompt)
    with pytest.raises(EngineError, match="exceeds the model's context window"):
        await sample(engine, prompt, max_tokens=1)
    with pytest.raises(EngineError, match="exceeds the model's context window"):
        await sample(engine, np.append(prompt, prompt[:1]), max_tokens=1, work={"prompt_logprobs": True})


@pytest.mark.parametrize(
    ("prompt", "work", "named"),
    [
        ([], {}, "empty"),
        ([5, 10**6], {}, "token 1"),
        ([5], {"num_samples": 0}, "num_samples"),
        ([5], {"adapter": "nobody"}, "nobody"),
        ([5], {"prompt_logprobs_last_n": 0}, "prompt_logprobs_last_n"),
        ([5, 6], {"topk_sample_logprobs": -1}, "topk_sample_logprobs"),
        ([5, 6], {"topk_sample_logprobs": 2**24, "num_samples": 5}, "topk_sample_logprobs must be at most"),
        ([5, 6], {"topk_prompt_logprobs": 2**25 + 1}, "topk_prompt_logprobs must be at most"),
        ([5, 6], {"prompt_alt_tokens_k": 2**19 + 1}, f"prompt_alt_tokens_k must be 0 to {2**19} "),
        ([5, 6], {"stop_bytes": (b"x", b"")}, "stop"),
        ([5, 6], {"target_prompt_logprobs": TensorData.from_numpy(np.zeros((2, 1), np.int64))}, r"\[1, K\]"),
        ([5, 6], {"target_prompt_logprobs": TensorData.from_numpy(np.zeros((1, 1)))}, "int64"),
        ([5, 6], {"target_prompt_logprobs": TensorData.from_numpy(np.full((1, 1), -2))}, "-2"),
    ],
)
async def test_what_cannot_be_served_is_refused_as_the_users(
    engine: Engine, prompt: list[int], work: dict, named: str
):
    with pytest.raises(EngineError, match=named) as caught:
        await sample(engine, np.array(prompt, np.int32), work=work)
    assert caught.value.category == "user"


# -- stops -------------------------------------------------------------------------------------------------


async def distinct_start(engine: Engine, n: int) -> tuple[np.ndarray, list[int]]:
    """A prompt and its seeded continuation whose first `n` tokens are all different."""
    for seed in range(20):
        prompt = tokens(engine, seed, 6)
        out = only(await sample(engine, prompt, max_tokens=12)).tokens
        if len(set(out[:n])) == n:
            return prompt, out
    raise AssertionError("no such prompt")


async def test_a_stop_token_ends_the_sample_and_stays_in_it(engine: Engine):
    prompt, out = await distinct_start(engine, 5)
    stopped = only(await sample(engine, prompt, max_tokens=12, stop=[out[4]]))
    assert stopped.tokens == out[:5]
    assert (stopped.stop_reason, stopped.stop_detail, stopped.stop_match) == ("stop", "stop_sequence", out[4])


async def test_a_stop_on_the_last_token_is_still_a_stop(engine: Engine):
    prompt, out = await distinct_start(engine, 5)
    assert only(await sample(engine, prompt, max_tokens=5, stop=[out[4]])).stop_reason == "stop"


async def test_stop_bytes_may_span_tokens(engine: Engine):
    prompt, out = await distinct_start(engine, 5)
    spanning = f"{out[2]}><{out[3]}".encode()  # the end of one token and the beginning of the next
    work = {"stop_bytes": (b"nowhere", spanning)}
    stopped = only(await sample(engine, prompt, max_tokens=12, stop=None, work=work))
    assert stopped.tokens == out[:4]
    assert (stopped.stop_reason, stopped.stop_detail) == ("stop", "stop_sequence")
    assert stopped.stop_match == spanning.decode(errors="replace")


async def test_stop_bytes_need_a_tokenizer(config: EngineConfig, tmp_path: Path):
    for tokenizer in (None, str(tmp_path)):
        engine = build_engine(replace(config, tokenizer=tokenizer))
        with pytest.raises(EngineError, match=r"has no tokenizer here.*stop at ids") as caught:
            await sample(engine, tokens(engine, 1, 5), stop=None, work={"stop_bytes": (b"x",)})
        assert caught.value.category == "user"
        assert len(only(await sample(engine, tokens(engine, 1, 5), stop=None)).tokens) >= 1
        engine.close()


async def with_eos(engine: Engine) -> tuple[np.ndarray, int, list[int], int]:
    """A prompt and a sample, drawn without stops, that has an end-of-sequence token before its end."""
    for seed in range(200):
        prompt = tokens(engine, seed, 4)
        response = await sample(engine, prompt, max_tokens=40, seed=seed, work={"num_samples": 8})
        for index, sequence in enumerate(response.sequences):
            ends = [i for i, token in enumerate(sequence.tokens) if token in engine.info.eos_ids]
            if ends and 2 < ends[0] < 39:
                return prompt, seed, sequence.tokens[: ends[0] + 1], index
    raise AssertionError("the model never ends")


async def test_eos_stops_unless_told_never_to(engine: Engine):
    prompt, seed, expected, index = await with_eos(engine)
    unlikely = next(i for i in range(engine.info.vocab_size) if i not in expected)
    for stop, stop_bytes in ((None, ()), ([unlikely], ()), (None, (b"nowhere",))):
        work = {"num_samples": 8, "stop_bytes": stop_bytes}
        response = await sample(engine, prompt, max_tokens=40, seed=seed, stop=stop, work=work)
        sequence = response.sequences[index]
        assert (sequence.stop_reason, sequence.stop_detail) == ("stop", "eos")
        assert sequence.stop_match in engine.info.eos_ids
        assert sequence.tokens == expected


# -- drawing -----------------------------------------------------------------------------------------------


async def test_a_seed_gives_the_same_tokens_again_and_each_sample_its_own(engine: Engine):
    prompt = tokens(engine, 0, 5)
    first = await sample(engine, prompt, work={"num_samples": 4})
    again = await sample(engine, prompt, work={"num_samples": 6})
    drawn = [s.tokens for s in again.sequences]
    assert [s.tokens for s in first.sequences] == drawn[:4]
    assert len({tuple(t) for t in drawn}) == 6
    other = await sample(engine, prompt, seed=2, work={"num_samples": 4})
    assert [s.tokens for s in other.sequences] != drawn[:4]
    part = await sample(engine, prompt, work={"num_samples": 2, "first_sample": 3})
    assert [s.tokens for s in part.sequences] == drawn[3:5]


async def test_without_a_seed_draws_differ(engine: Engine):
    results = [only(await sample(engine, tokens(engine, 0, 5), seed=None)).tokens for _ in range(4)]
    assert len({tuple(r) for r in results}) == 4


@every_family
async def test_a_seeded_request_does_not_notice_company(engine: Engine):
    prompt = tokens(engine, 0, 30)
    alone = only(await sample(engine, prompt, max_tokens=30))
    company = [sample(engine, tokens(engine, i, 3 + 5 * i), max_tokens=20, seed=i) for i in range(12)]
    among, *_ = await asyncio.gather(sample(engine, prompt, max_tokens=30), *company)
    assert only(among).tokens == alone.tokens
    np.testing.assert_allclose(only(among).logprobs_np, alone.logprobs_np, atol=NEAR)


async def test_greedy_is_the_likeliest_and_is_what_a_narrow_choice_draws(engine: Engine):
    prompt = tokens(engine, 0, 5)
    greedy = only(await sample(engine, prompt, temperature=0.0, work={"topk_sample_logprobs": 1}))
    assert greedy.topk_logprobs is not None
    assert [row[0][0] for row in greedy.topk_logprobs if row] == greedy.tokens
    for narrow in ({"top_k": 1}, {"top_p": 0.0}, {"top_p": 1e-6}, {"temperature": 1e-7}):
        assert only(await sample(engine, prompt, seed=None, **narrow)).tokens == greedy.tokens


async def test_draws_stay_within_top_k_and_top_p(engine: Engine):
    prompt = tokens(engine, 0, 5)
    work = {"num_samples": 64, "topk_sample_logprobs": engine.info.vocab_size}
    for narrow in ({"top_k": 5}, {"top_p": 0.3}, {"top_k": 5, "top_p": 0.5}):
        response = await sample(engine, prompt, max_tokens=1, seed=3, work=work, **narrow)
        top = response.sequences[0].topk_logprobs_np
        assert top is not None
        p = np.exp(top.logprobs[0].astype(np.float64))[: narrow.get("top_k", len(top.logprobs[0]))]
        kept = int(((p.cumsum() - p) / p.sum() < narrow.get("top_p", 2.0)).sum())
        drawn = {s.tokens[0] for s in response.sequences}
        assert drawn <= set(top.token_ids[0, :kept].tolist())
        assert len(drawn) > 1


@every_family
async def test_sampled_logprobs_are_the_trainers(engine: Engine, run: str):
    name = await published(engine, run)
    prompt = tokens(engine, 0, 9)
    for temperature in (1.0, 0.0):
        work = {"adapter": name, "num_samples": 2}
        response = await sample(engine, prompt, max_tokens=12, temperature=temperature, work=work)
        for sequence in response.sequences:
            expected = logprobs(engine, run, np.concatenate([prompt, sequence.tokens_np]))  # type: ignore[list-item]
            np.testing.assert_allclose(sequence.logprobs_np, expected[len(prompt) - 1 :], atol=NEAR)
    await engine.sampler.retire(name)


@pytest.mark.parametrize("narrow", [{}, {"top_k": 3}, {"top_p": 0.5}])
async def test_logprobs_are_of_the_tempered_distribution_before_any_cut(engine: Engine, narrow: dict):
    prompt = tokens(engine, 0, 9)
    work = {"topk_sample_logprobs": engine.info.vocab_size}
    plain = only(await sample(engine, prompt, max_tokens=1, work=work)).topk_logprobs_np
    assert plain is not None
    at_one = np.zeros(engine.info.vocab_size)
    at_one[plain.token_ids[0]] = plain.logprobs[0]
    drawn = only(await sample(engine, prompt, max_tokens=1, temperature=0.5, **narrow))
    assert drawn.logprobs is not None
    assert drawn.logprobs[0] == pytest.approx(log_softmax(at_one / 0.5)[drawn.tokens[0]], abs=1e-4)


async def test_topk_of_samples_holds_the_sampled_token(engine: Engine):
    everything = engine.info.vocab_size + 3
    work = {"topk_sample_logprobs": everything}
    sequence = only(await sample(engine, tokens(engine, 0, 5), temperature=0.7, work=work))
    top = sequence.topk_logprobs_np
    assert top is not None
    assert top.token_ids.shape == (8, everything)
    assert (np.diff(top.logprobs, axis=1) <= 0).all()
    assert (top.logprobs[:, -3:] == TOPK_PADDING).all()
    for i, row in enumerate(sequence.topk_logprobs or []):
        assert row is not None
        assert len(row) == engine.info.vocab_size
        assert dict(row)[sequence.tokens[i]] == pytest.approx(sequence.logprobs[i], abs=1e-6)  # type: ignore[index]


# -- scoring -----------------------------------------------------------------------------------------------


@every_family
async def test_prompt_logprobs_are_the_trainers(engine: Engine, run: str):
    name = await published(engine, run)
    prompt = tokens(engine, 1, 40)
    expected = logprobs(engine, run, prompt)
    for last_n in (None, 7, 100):
        work = {"adapter": name, "prompt_logprobs": True, "prompt_logprobs_last_n": last_n}
        for _ in range(2):  # the second time, whatever was cached must not be missing
            scored = (await sample(engine, prompt, max_tokens=1, work=work)).prompt_logprobs_np
            assert scored is not None
            assert scored.dtype == np.float32
            first = max(1, 40 - (last_n or 40))
            assert np.isnan(scored[:first]).all()
            np.testing.assert_allclose(scored[first:], expected[first - 1 :], atol=NEAR)
    await engine.sampler.retire(name)


async def test_a_fresh_adapter_is_the_base_model(engine: Engine, run: str):
    prompt = tokens(engine, 1, 20)
    scored = (await sample(engine, prompt, max_tokens=1, work={"prompt_logprobs": True})).prompt_logprobs_np
    assert scored is not None
    np.testing.assert_allclose(scored[1:], logprobs(engine, run, prompt), atol=1e-5)


async def test_topk_of_the_prompt(engine: Engine):
    prompt = tokens(engine, 1, 20)
    work = {"prompt_logprobs": True, "topk_prompt_logprobs": 4, "prompt_logprobs_last_n": 6}
    response = await sample(engine, prompt, max_tokens=1, work=work)
    top, scored = response.topk_prompt_logprobs_np, response.prompt_logprobs_np
    assert top is not None
    assert scored is not None
    assert top.token_ids.shape == top.logprobs.shape == (20, 4)
    assert (top.logprobs[:14] == TOPK_PADDING).all()
    assert response.topk_prompt_logprobs is not None
    assert response.topk_prompt_logprobs[:14] == [None] * 14
    assert (np.diff(top.logprobs[14:], axis=1) <= 0).all()
    for position in range(14, 20):
        listed = dict(response.topk_prompt_logprobs[position] or [])
        assert max(listed.values()) >= scored[position]
        if int(prompt[position]) in listed:
            assert listed[int(prompt[position])] == pytest.approx(scored[position], abs=1e-6)


async def test_targets_are_scored_in_the_layout_they_came_in(engine: Engine, run: str):
    prompt = tokens(engine, 1, 12)
    rng = np.random.default_rng(0)
    targets = rng.integers(0, engine.info.vocab_size, (11, 3))
    targets[rng.random((11, 3)) < 0.6] = -1
    targets[4:7] = -1
    expected = np.zeros((11, 3), np.float32)
    for row, column in np.argwhere(targets >= 0):
        ids = np.append(prompt[: row + 1], np.int32(targets[row, column]))
        expected[row, column] = logprobs(engine, run, ids)[-1]
    rows, columns = np.nonzero(targets >= 0)
    crow = np.concatenate([[0], np.cumsum((targets >= 0).sum(1))])
    dense = TensorData.from_numpy(targets)
    sparse = TensorData(targets[rows, columns], "int64", (11, 3), crow, columns)
    for given in (dense, sparse):
        work = {"target_prompt_logprobs": given}
        scored = (await sample(engine, prompt, max_tokens=1, work=work)).target_prompt_logprobs
        assert scored is not None
        assert scored.dtype == "float32"
        assert scored.is_sparse == given.is_sparse
        assert scored.dense_shape == (11, 3)
        np.testing.assert_allclose(scored.to_numpy(), expected, atol=1e-5)
        if given.is_sparse:
            assert scored.sparse_col_indices == given.sparse_col_indices


async def test_alternative_tokens_are_drawn_at_every_position(engine: Engine):
    prompt = tokens(engine, 1, 12)
    alts = (await sample(engine, prompt, max_tokens=1, work={"prompt_alt_tokens_k": 5})).prompt_alt_tokens
    assert alts is not None
    drawn = alts.tokens.to_numpy()
    assert alts.tokens.dtype == "int64"
    assert drawn.shape == (11, 5)
    assert len(np.unique(drawn)) > 5
    work = {"target_prompt_logprobs": alts.tokens}
    scored = (await sample(engine, prompt, max_tokens=1, work=work)).target_prompt_logprobs
    assert scored is not None
    np.testing.assert_allclose(alts.logprobs.to_numpy(), scored.to_numpy(), atol=1e-5)


async def test_one_token_has_nothing_to_score(engine: Engine):
    work = {"prompt_logprobs": True, "topk_prompt_logprobs": 2, "prompt_alt_tokens_k": 2,
            "target_prompt_logprobs": TensorData(np.empty(0, np.int64), "int64", (0, 2))}  # fmt: skip
    response = await sample(engine, tokens(engine, 1, 1), max_tokens=1, work=work)
    assert response.prompt_logprobs == [None]
    assert response.topk_prompt_logprobs == [None]
    assert response.target_prompt_logprobs is not None
    assert response.target_prompt_logprobs.shape == [0, 2]
    assert response.prompt_alt_tokens is not None
    assert response.prompt_alt_tokens.tokens.shape == [0, 2]


# -- published adapters --------------------------------------------------------------------------------------


async def test_a_published_adapter_never_changes(engine: Engine, run: str, tmp_path: Path):
    name = await published(engine, run)
    prompt = tokens(engine, 1, 20)

    async def scored(adapter: str) -> np.ndarray:
        work = {"adapter": adapter, "prompt_logprobs": True}
        return (await sample(engine, prompt, max_tokens=1, work=work)).prompt_logprobs_np  # type: ignore[return-value]

    before = await scored(name)
    do(engine, SaveAdapter(run, str(tmp_path / "saved")))
    train(engine, run, tokens(engine, 98, 20), steps=3)
    await engine.sampler.publish(name, do(engine, ExportAdapter(run)))  # the name exists: nothing happens
    np.testing.assert_array_equal(await scored(name), before)
    await engine.sampler.publish("later", do(engine, ExportAdapter(run)))
    await engine.sampler.publish("from-disk", str(tmp_path / "saved"))
    do(engine, DropAdapter(run))
    np.testing.assert_array_equal(await scored(name), before)
    np.testing.assert_array_equal(await scored("from-disk"), before)
    assert np.abs(await scored("later") - before)[1:].max() > 1e-3
    for adapter in (name, "later", "from-disk"):
        await engine.sampler.retire(adapter)


@every_family
async def test_mixed_adapters_in_one_step_keep_apart(engine: Engine):
    runs = [new_run(engine) for _ in range(3)]
    for i, run in enumerate(runs):
        train(engine, run, tokens(engine, 50 + i, 20), steps=2)
        await engine.sampler.publish(run, do(engine, ExportAdapter(run)))
    prompt = tokens(engine, 1, 18)
    names = [None, *runs]

    def asked(name: str | None) -> Awaitable[SampleResponse]:
        return sample(engine, prompt, max_tokens=10, work={"adapter": name, "prompt_logprobs": True})

    alone = [await asked(name) for name in names]
    together = await asyncio.gather(*(asked(name) for name in names * 3))
    for i, response in enumerate(together):
        assert only(response).tokens == only(alone[i % 4]).tokens
        np.testing.assert_allclose(response.prompt_logprobs_np, alone[i % 4].prompt_logprobs_np, atol=NEAR)
    for run in runs:
        await engine.sampler.retire(run)
        do(engine, DropAdapter(run))


async def test_a_retired_adapter_is_refused_to_newcomers_and_kept_for_its_users(engine: Engine, run: str):
    name = await published(engine, run)
    user = asyncio.create_task(sample(engine, tokens(engine, 1, 5), max_tokens=150, work={"adapter": name}))
    await until(lambda: user.done() or engine.heartbeat().stats["sequences_running"] > 0)
    await engine.sampler.retire(name)
    assert user.done() or len(only(await user).tokens) == 150
    with pytest.raises(EngineError, match=name):
        await sample(engine, tokens(engine, 1, 5), work={"adapter": name})
    await engine.sampler.retire(name)  # not there any more: not an error


async def test_publishing_what_is_not_there(engine: Engine, tmp_path: Path):
    with pytest.raises(EngineError, match="nobody"):
        await engine.sampler.publish("x", str(tmp_path / "nobody"))
    with pytest.raises(EngineError, match="'x'"):
        await sample(engine, tokens(engine, 1, 5), work={"adapter": "x"})


ELSEWHERE = """
import pickle, sys
from tinkex.engine.protocol import build_engine
config, commands = pickle.load(sys.stdin.buffer)
engine = build_engine(config)
results = [engine.trainer.submit(command).result() for command in commands]
sys.stdout.buffer.write(pickle.dumps((results[-1].lora, results[-1])))
engine.close()
"""


@pytest.mark.slow
async def test_an_exported_adapter_crosses_a_process(config: EngineConfig, engine: Engine, tmp_path: Path):
    """Trained and saved by an engine in another process, exported to this one: bitwise the same."""
    saved, data = str(tmp_path / "saved"), [datum(tokens(engine, 99, 20))]
    commands = (
        CreateAdapter("there", LORA),
        ForwardBackward((Pass("there", data, "cross_entropy"),)),
        OptimStep("there", AdamParams(learning_rate=1e-2)),
        SaveAdapter("there", saved),
        ExportAdapter("there"),
    )
    given = pickle.dumps((config, commands))
    child = [sys.executable, "-c", ELSEWHERE]
    done = await asyncio.to_thread(subprocess.run, child, input=given, capture_output=True, timeout=100)
    assert done.returncode == 0, done.stderr.decode()
    lora, exported = pickle.loads(done.stdout)
    assert lora == LORA
    assert exported.nbytes > 0
    await engine.sampler.publish("exported", exported)
    await engine.sampler.publish("saved", saved)
    responses = []
    for name in ("exported", "saved", None):
        work = {"adapter": name, "prompt_logprobs": True}
        responses.append(await sample(engine, tokens(engine, 1, 20), work=work))
    first, second, base = responses
    assert only(first).tokens == only(second).tokens
    np.testing.assert_array_equal(only(first).logprobs_np, only(second).logprobs_np)
    np.testing.assert_array_equal(first.prompt_logprobs_np, second.prompt_logprobs_np)
    assert not np.array_equal(first.prompt_logprobs_np, base.prompt_logprobs_np)
    for name in ("exported", "saved"):
        await engine.sampler.retire(name)


async def test_work_and_responses_can_be_pickled(engine: Engine):
    params = SamplingParams(max_tokens=5, stop=[], seed=1)
    work = SampleWork(tokens(engine, 1, 9), params, num_samples=2, prompt_logprobs=True)
    copied = pickle.loads(pickle.dumps(work))
    assert repr(copied) == repr(work)
    response = await engine.sampler.sample(copied)
    assert repr(pickle.loads(pickle.dumps(response))) == repr(response)
    async for piece in engine.sampler.stream(copied):
        assert repr(pickle.loads(pickle.dumps(piece))) == repr(piece)


# -- coming and going ----------------------------------------------------------------------------------------


async def test_a_stream_has_the_tokens_as_they_come_and_the_response_last(engine: Engine):
    prompt, seen = tokens(engine, 1, 5), {}
    params = SamplingParams(max_tokens=8, stop=[], seed=1)
    pieces = [p async for p in engine.sampler.stream(SampleWork(prompt, params, num_samples=3))]
    response = pieces.pop()
    assert isinstance(response, SampleResponse)
    for piece in pieces:
        assert isinstance(piece, SampledTokens)
        assert (piece.tokens.dtype, piece.logprobs.dtype) == (np.int32, np.float32)
        assert len(piece.tokens) == len(piece.logprobs) >= 1
        seen.setdefault(piece.index, []).extend(
            zip(piece.tokens.tolist(), piece.logprobs.tolist(), strict=True)
        )
    assert len(pieces) > 3, "not all at once"
    whole = await sample(engine, prompt, work={"num_samples": 3})
    for i, (sequence, other) in enumerate(zip(response.sequences, whole.sequences, strict=True)):
        assert seen[i] == list(zip(sequence.tokens, sequence.logprobs or [], strict=True))
        assert sequence.tokens == other.tokens


async def test_a_refusal_ends_a_stream(engine: Engine):
    work = SampleWork(tokens(engine, 1, 5), SamplingParams(max_tokens=8), adapter="nobody")
    with pytest.raises(EngineError, match="nobody"):
        await anext(aiter(engine.sampler.stream(work)))


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(2000):
        if condition():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("it never happened")


async def until_idle(engine: Engine) -> None:
    names = ("kv_pages_used", "sequences_running", "sequences_waiting")
    await until(lambda: not any(engine.heartbeat().stats[name] for name in names))


async def test_cancelling_frees_what_was_held(engine: Engine):
    work = {"num_samples": 3}
    task = asyncio.create_task(sample(engine, tokens(engine, 1, 40), max_tokens=200, work=work))
    other = asyncio.create_task(sample(engine, tokens(engine, 2, 5), max_tokens=50))
    await until(lambda: engine.heartbeat().stats["sequences_running"] > 0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(only(await other).tokens) == 50
    await until_idle(engine)


async def test_closing_a_stream_frees_what_was_held(engine: Engine):
    params = SamplingParams(max_tokens=200, stop=[])
    stream = engine.sampler.stream(SampleWork(tokens(engine, 1, 40), params, num_samples=3))
    assert isinstance(await anext(stream), SampledTokens)
    await stream.aclose()  # type: ignore[attr-defined]
    await until_idle(engine)


async def test_a_crowd_is_served(engine: Engine):
    prompts = [tokens(engine, i, 1 + i % 50) for i in range(60)]
    responses = await asyncio.gather(
        *(sample(engine, p, max_tokens=1 + i % 9) for i, p in enumerate(prompts))
    )
    for i, response in enumerate(responses):
        assert len(only(response).tokens) == 1 + i % 9
    await until_idle(engine)


async def test_training_and_sampling_at_once(engine: Engine, run: str):
    data = [datum(tokens(engine, seed, 30)) for seed in range(8)]
    training = asyncio.to_thread(lambda: [forward_backward(engine, run, data) for _ in range(3)])
    samples = [sample(engine, tokens(engine, i, 10), max_tokens=20) for i in range(8)]
    outputs, *responses = await asyncio.gather(training, *samples)
    assert len(outputs) == 3
    assert all(len(only(response).tokens) == 20 for response in responses)


async def test_decoding_goes_on_between_the_micro_batches_of_a_pass(engine_of_small_batches: Engine):
    engine = engine_of_small_batches
    run = new_run(engine)
    data = [datum(tokens(engine, seed, 11)) for seed in range(20)]
    params = SamplingParams(max_tokens=200, stop=[])
    stream = engine.sampler.stream(SampleWork(tokens(engine, 1, 5), params))
    assert isinstance(await anext(stream), SampledTokens)
    outcome = await asyncio.wrap_future(
        engine.trainer.submit(ForwardBackward((Pass(run, data, "cross_entropy"),)))
    )
    for done in range(1, 10):
        assert isinstance(outcome, PassProgress)
        assert outcome.done == done
        assert isinstance(await asyncio.wait_for(anext(stream), SECONDS), SampledTokens)
        outcome = await asyncio.wrap_future(engine.trainer.submit(ContinuePasses(outcome.ticket)))
    assert isinstance(outcome, list)
    pieces = [piece async for piece in stream]
    assert isinstance(pieces[-1], SampleResponse)
    assert len(only(pieces[-1]).tokens) == 200
    do(engine, DropAdapter(run))


async def test_closing_fails_what_is_pending_and_what_comes_after(config: EngineConfig):
    engine = build_engine(config)
    pending = [asyncio.create_task(sample(engine, tokens(engine, i, 5), max_tokens=240)) for i in range(4)]
    stream = engine.sampler.stream(SampleWork(tokens(engine, 9, 5), SamplingParams(max_tokens=240, stop=[])))
    assert isinstance(await anext(stream), SampledTokens)
    await asyncio.to_thread(engine.close)
    for task in pending:
        with pytest.raises(EngineLost, match="closed"):
            await task
    with pytest.raises(EngineLost, match="closed"):
        async for _ in stream:
            pass
    for call in (
        sample(engine, tokens(engine, 0, 5)),
        anext(engine.sampler.stream(SampleWork(tokens(engine, 0, 5), SamplingParams(max_tokens=2)))),
        engine.sampler.publish("late", "nowhere"),
    ):
        with pytest.raises(EngineLost, match="closed"):
            await call
    engine.close()  # twice is not an error

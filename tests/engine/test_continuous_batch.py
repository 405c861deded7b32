"""Continuous batching against transformers, against itself in other company, and against leaks."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.commands import do
from tests.engine.stepping import check, finish
from tests.engine.tiny import reference_logits, reference_model, tiny_model
from tinkex.engine.native.build import library
from tinkex.engine.protocol import (
    CreateAdapter,
    EngineError,
    ForwardBackward,
    Pass,
    SampledTokens,
    SampleWork,
)
from tinkex.engine.torch.adapters import Adapter
from tinkex.engine.torch.continuous_batch import ContinuousBatch, StepLimits
from tinkex.engine.torch.kv import PAGE, KVCache
from tinkex.engine.torch.load import load_decoder
from tinkex.engine.torch.models.decoder import Decoder
from tinkex.engine.torch.sequences import Listener, PublishedAdapter
from tinkex.engine.torch.trainer import TorchTrainer
from tinkex.types.data import Datum, ModelInput
from tinkex.types.outputs import ForwardBackwardOutput, SampledSequence, SampleResponse
from tinkex.types.params import LoraConfig, SamplingParams
from tinkex.types.tensor import TensorData

pytestmark = pytest.mark.slow


class Counting:
    """A decoder that counts the tokens it computes, and fails when told to."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self.config, self.unembed_weight, self.logits = decoder.config, decoder.unembed_weight, decoder.logits
        self.backend = decoder.backend
        self.tokens = 0
        self.error: Exception | None = None

    def __call__(self, tokens_T: torch.Tensor, *args: Any, **more: Any) -> torch.Tensor:
        self.tokens += len(tokens_T)
        if self.error:
            raise self.error
        return self._decoder(tokens_T, *args, **more)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), "llama3")


@pytest.fixture(scope="module")
def decoder(model: Path) -> Decoder:
    return load_decoder(model)


def new_batch(decoder: Any, pages: int = 100, compiled: bool = False, **limits: int) -> ContinuousBatch:
    c = decoder.config
    cache = KVCache(c.kv_shapes, pages, torch.device("cpu"), torch.float32)
    make = decoder.backend.compiled_step(decoder, room=float("inf")) if compiled else None
    bounds = StepLimits(**{"context": c.max_context, "sequences": 64, **limits})
    return ContinuousBatch(decoder, cache, bounds, compiled=make and make(cache))


either_step = pytest.mark.parametrize(
    "compiled",
    [False, pytest.param(True, marks=pytest.mark.skipif(library() is None, reason="there is no C compiler"))],
)


def prompt(seed: int, length: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(4, 320, length).astype(np.int32)


def submit(
    batch: ContinuousBatch,
    ids: np.ndarray,
    *,
    published: PublishedAdapter | None = None,
    work: dict | None = None,
    listener: Listener | None = None,
    **params: Any,
) -> Future[SampleResponse]:
    asked = SamplingParams(**{"max_tokens": 8, "stop": [], "seed": 1, **params})
    future: Future[SampleResponse] = Future()
    request = SampleWork(ids, asked, **(work or {}))
    batch.submit(request, batch.check_work(request), published, future, listener=listener)
    return future


def run(batch: ContinuousBatch, ids: np.ndarray, **more: Any) -> SampleResponse:
    future = submit(batch, ids, **more)
    finish(batch)
    return future.result(timeout=0)


def only(response: SampleResponse) -> SampledSequence:
    (sequence,) = response.sequences
    return sequence


# -- against transformers ----------------------------------------------------------------------------------


def greedy_by_transformers(model: Any, ids: np.ndarray, count: int) -> list[int]:
    given = torch.tensor(ids[None].astype(np.int64))
    out = model.generate(
        given, attention_mask=torch.ones_like(given), max_new_tokens=count, do_sample=False,
        eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return out[0, len(ids) :].tolist()


@pytest.mark.parametrize("family", ["llama2", "llama3", "mistral", "qwen2", "qwen3", "smollm2", "qwen3_moe"])
@either_step
def test_greedy_equals_transformers(family: str, compiled: bool, tmp_path: Path):
    path = tiny_model(tmp_path, family)
    batch = new_batch(load_decoder(path), compiled=compiled, prefill_alone=40, prefill_beside=9)
    prompts = [prompt(i, length) for i, length in enumerate((1, 3, 15, 16, 17, 47, 80))]
    futures = [submit(batch, ids, max_tokens=20, temperature=0.0, work={"num_samples": 2}) for ids in prompts]
    finish(batch)
    reference = reference_model(path)
    for ids, future in zip(prompts, futures, strict=True):
        first, second = (s.tokens for s in future.result().sequences)
        assert first == second
        assert len(first) == 20
        if first != greedy_by_transformers(reference, ids, 20):  # two logits may tie but for rounding
            with torch.no_grad():
                logits = reference(torch.tensor([[*ids, *first]])).logits[0, len(ids) - 1 : -1]
            drawn = logits.gather(1, torch.tensor(first)[:, None])[:, 0]
            assert (logits.amax(1) - drawn).max() < 1e-5


def test_smollm2_greedy_equals_transformers_and_logprobs_the_trainers(smollm2_gguf: Path):
    import transformers

    decoder = load_decoder(smollm2_gguf)
    ids = np.array([504, 3575, 282, 4649, 314], np.int32)  # "The capital of France is"
    sequence = only(run(new_batch(decoder), ids, max_tokens=12, temperature=0.0))
    trainer = TorchTrainer(decoder, "smollm2")
    do(trainer, CreateAdapter("run", LoraConfig(rank=4)))
    sampled = only(run(new_batch(decoder), ids, max_tokens=12))
    text = np.concatenate([ids, np.array(sampled.tokens, np.int32)])
    datum = Datum(ModelInput.from_ints(text[:-1]), {"target_tokens": text[1:].astype(np.int64)})
    (out,) = do(trainer, ForwardBackward((Pass("run", [datum], "cross_entropy", backward=False),)))
    assert isinstance(out, ForwardBackwardOutput)
    trained = out.loss_fn_outputs[0]["logprobs"].to_numpy()[len(ids) - 1 :]
    np.testing.assert_allclose(sampled.logprobs_np, trained, atol=1e-4)
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        smollm2_gguf.parent, gguf_file=smollm2_gguf.name, dtype=torch.float32
    ).eval()
    assert sequence.tokens == greedy_by_transformers(reference, ids, 12)
    with torch.no_grad():
        logits = reference(torch.tensor([[*ids, *sequence.tokens]])).logits[0, len(ids) - 1 : -1]
    expected = logits.log_softmax(-1).gather(1, torch.tensor(sequence.tokens)[:, None])[:, 0]
    np.testing.assert_allclose(sequence.logprobs_np, expected, atol=1e-4)


def test_scores_equal_transformers(model: Path, decoder: Decoder):
    batch = new_batch(decoder, prefill_alone=13, logits=7 * 320)  # a few rows at a time
    ids = prompt(0, 50)
    targets = np.random.default_rng(1).integers(-1, 320, (49, 2))
    work = {
        "prompt_logprobs": True,
        "topk_prompt_logprobs": 5,
        "topk_sample_logprobs": 3,
        "target_prompt_logprobs": TensorData.from_numpy(targets),
    }
    response = run(batch, ids, max_tokens=1, work=work)
    expected = reference_logits(model, [ids.tolist()])[0].log_softmax(-1).numpy()
    scored = response.prompt_logprobs_np
    assert scored is not None
    np.testing.assert_allclose(scored[1:], expected[np.arange(49), ids[1:]], atol=1e-5)
    top = response.topk_prompt_logprobs_np
    assert top is not None
    np.testing.assert_allclose(top.logprobs[1:], -np.sort(-expected[:-1])[:, :5], atol=1e-5)
    np.testing.assert_allclose(
        np.take_along_axis(expected[:-1], top.token_ids[1:].astype(np.int64), 1), top.logprobs[1:], atol=1e-5
    )
    cells = np.where(targets < 0, 0.0, np.take_along_axis(expected[:-1], np.maximum(targets, 0), 1))
    assert response.target_prompt_logprobs is not None
    np.testing.assert_allclose(response.target_prompt_logprobs.to_numpy(), cells, atol=1e-5)
    after = only(response).topk_logprobs_np
    assert after is not None
    np.testing.assert_allclose(after.logprobs[0], -np.sort(-expected[-1])[:3], atol=1e-5)


def test_padded_ids_are_never_drawn_or_listed(decoder: Decoder):
    padded = Counting(decoder)
    padded.config = dataclasses.replace(decoder.config, vocab_size=40)
    batch = new_batch(padded)
    ids = np.random.default_rng(0).integers(0, 40, 20).astype(np.int32)
    work = {
        "num_samples": 8,
        "topk_prompt_logprobs": 60,
        "topk_sample_logprobs": 60,
        "prompt_alt_tokens_k": 4,
    }
    response = run(batch, ids, max_tokens=10, work=work)
    assert response.topk_prompt_logprobs_np is not None
    assert response.topk_prompt_logprobs_np.token_ids.max() < 40
    assert response.prompt_alt_tokens is not None
    assert response.prompt_alt_tokens.tokens.to_numpy().max() < 40
    for sequence in response.sequences:
        assert max(sequence.tokens) < 40
        assert sequence.topk_logprobs_np is not None
        assert sequence.topk_logprobs_np.token_ids.max() < 40
        mass = np.exp(sequence.topk_logprobs_np.logprobs).sum(1)
        np.testing.assert_allclose(mass, 1.0, atol=1e-5)  # what may be drawn is all there is


# -- in whatever company -------------------------------------------------------------------------------------


@either_step
def test_a_seeded_request_is_the_same_alone_among_strangers_and_after_preemption(
    decoder: Decoder, compiled: bool
):
    ids = prompt(0, 37)
    asked: dict[str, Any] = {"max_tokens": 40, "work": {"num_samples": 2}}
    alone = run(new_batch(decoder), ids, **asked)
    crowded = new_batch(decoder, pages=300, compiled=compiled, prefill_beside=20)
    tight = new_batch(decoder, pages=24, compiled=compiled, prefill_beside=20)
    for batch in (crowded, tight):
        strangers = [submit(batch, prompt(i, 5 + 2 * i), max_tokens=30, seed=i) for i in range(16)]
        future = submit(batch, ids, **asked)
        strangers += [submit(batch, prompt(i, 5 + 2 * i), max_tokens=30, seed=i) for i in range(16, 32)]
        finish(batch)
        assert all(len(only(s.result()).tokens) == 30 for s in strangers)
        for mine, theirs in zip(future.result().sequences, alone.sequences, strict=True):
            assert mine.tokens == theirs.tokens
            np.testing.assert_allclose(mine.logprobs_np, theirs.logprobs_np, atol=1e-5)
    assert crowded.preemptions == 0
    assert tight.preemptions > 5


def test_a_preempted_request_streams_each_token_once(decoder: Decoder):
    batch = new_batch(decoder, pages=9)
    seen: list[list[int]] = [[], [], []]
    futures = []
    for i in range(3):
        listener = lambda piece, i=i: seen[i].extend(piece.tokens.tolist())  # noqa: E731
        work = {"prompt_logprobs": True}
        futures.append(submit(batch, prompt(i, 20), max_tokens=40, seed=i, work=work, listener=listener))
    finish(batch)
    assert batch.preemptions > 0
    assert seen == [only(f.result()).tokens for f in futures]


@either_step
def test_one_that_is_computed_anew_token_by_token_goes_on_as_it_was(decoder: Decoder, compiled: bool):
    """What is left of a step for prompts may be one token; whoever gets it and lacks more is not decoding."""
    batch = new_batch(decoder, pages=12, compiled=compiled, prefill_beside=1)
    asked: list[dict[str, Any]] = [{"ids": prompt(i, 20 + i), "max_tokens": 40, "seed": i} for i in range(12)]
    futures = [submit(batch, **request) for request in asked]
    finish(batch)
    assert batch.preemptions > 5
    for future, request in zip(futures, asked, strict=True):
        assert only(future.result()).tokens == only(run(new_batch(decoder), **request)).tokens


@either_step
def test_mixed_adapters_equal_each_alone(decoder: Decoder, compiled: bool):
    adapters = [adapter(decoder, rank, rank) for rank in (2, 8, 3)]
    alone = [only(run(new_batch(decoder), prompt(0, 20), published=p)).tokens for p in [None, *adapters]]
    assert len({tuple(tokens) for tokens in alone}) == 4
    batch = new_batch(decoder, compiled=compiled)
    futures = [submit(batch, prompt(0, 20), published=p) for p in [None, *adapters] * 3]
    finish(batch)
    assert [only(f.result()).tokens for f in futures] == alone * 3
    assert all(p.users == 0 for p in adapters)


def adapter(decoder: Decoder, rank: int, seed: int) -> PublishedAdapter:
    """A published adapter with something in its B."""
    fresh = Adapter.fresh(LoraConfig(rank=rank, seed=seed), decoder.sites())
    fresh.flat += 0.02 * torch.randn(fresh.flat.shape, generator=torch.Generator().manual_seed(seed))
    return PublishedAdapter(f"a{seed}", fresh, f"adapter {seed}".encode())


# -- sharing prompts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 15, 16, 17, 32, 50])
def test_a_prompt_is_computed_once_for_all_its_samples(decoder: Decoder, length: int):
    counting = Counting(decoder)
    response = run(new_batch(counting), prompt(0, length), max_tokens=5, work={"num_samples": 6})
    assert counting.tokens == length + 6 * 4  # the last token drawn is never computed
    one_by_one = [run(new_batch(decoder), prompt(0, length), max_tokens=5, work={"num_samples": n + 1})
                  for n in range(6)]  # fmt: skip
    assert [s.tokens for s in response.sequences] == [r.sequences[-1].tokens for r in one_by_one]


def test_samples_that_have_no_place_wait_and_find_the_prompt_cached(decoder: Decoder):
    counting = Counting(decoder)
    batch = new_batch(counting, sequences=2)
    response = run(batch, prompt(0, 40), max_tokens=5, work={"num_samples": 6})
    assert len({tuple(s.tokens) for s in response.sequences}) == 6
    assert counting.tokens == 40 + 6 * 4 + 4 * 8  # the unfinished page of the four that came later
    expected = run(new_batch(decoder), prompt(0, 40), max_tokens=5, work={"num_samples": 6})
    assert [s.tokens for s in response.sequences] == [s.tokens for s in expected.sequences]


@pytest.mark.parametrize(("length", "hits"), [(15, 0), (16, 0), (17, 16), (50, 48), (64, 48)])
def test_a_common_prefix_is_reused_and_reported(decoder: Decoder, length: int, hits: int):
    counting = Counting(decoder)
    batch = new_batch(counting)
    ids = prompt(0, length)
    first = run(batch, ids)
    assert first.prompt_cache_hit_tokens == 0
    counting.tokens = 0
    second = run(batch, ids)
    assert second.prompt_cache_hit_tokens == hits
    assert counting.tokens == length - hits + 7
    assert only(second).tokens == only(first).tokens


@pytest.mark.parametrize(("length", "hits"), [(5, 32), (30, 48)])
def test_growing_conversations_reuse_what_was_sampled_too(decoder: Decoder, length: int, hits: int):
    batch = new_batch(decoder)
    ids = prompt(0, length)
    out = only(run(batch, ids, max_tokens=30)).tokens_np
    assert out is not None
    longer = np.concatenate([ids, out, prompt(1, 10)])
    response = run(batch, longer)
    assert response.prompt_cache_hit_tokens == hits
    assert only(response).tokens == only(run(new_batch(decoder), longer)).tokens


def test_adapters_share_no_cache_not_even_under_one_name(decoder: Decoder):
    batch = new_batch(decoder)
    ids = prompt(0, 40)
    first, second = adapter(decoder, 4, 1), adapter(decoder, 4, 2)
    run(batch, ids)
    assert run(batch, ids, published=first).prompt_cache_hit_tokens == 0
    assert run(batch, ids, published=first).prompt_cache_hit_tokens == 32
    assert run(batch, ids, published=second).prompt_cache_hit_tokens == 0


def test_scoring_computes_what_it_needs_though_it_is_cached(decoder: Decoder):
    counting = Counting(decoder)
    batch = new_batch(counting)
    ids = prompt(0, 60)
    full = run(batch, ids, max_tokens=1, work={"prompt_logprobs": True}).prompt_logprobs_np
    counting.tokens = 0
    work = {"prompt_logprobs": True, "prompt_logprobs_last_n": 10}
    response = run(batch, ids, max_tokens=1, work=work)
    assert response.prompt_cache_hit_tokens == 48  # position 50 is scored by the token before it
    assert counting.tokens == 12
    assert full is not None
    assert response.prompt_logprobs_np is not None
    np.testing.assert_allclose(response.prompt_logprobs_np[50:], full[50:], atol=1e-5)


def test_cached_pages_make_room_for_those_who_need_it(decoder: Decoder):
    batch = new_batch(decoder, pages=10)
    for i in range(12):
        run(batch, prompt(i, 60))
    assert run(batch, prompt(11, 60)).prompt_cache_hit_tokens == 48
    assert run(batch, prompt(0, 60)).prompt_cache_hit_tokens == 0


# -- turns -------------------------------------------------------------------------------------------------


def test_decoding_goes_on_while_a_long_prompt_is_read(decoder: Decoder):
    batch = new_batch(decoder, prefill_beside=16)
    streamed: list[int] = []
    quick = submit(batch, prompt(0, 4), max_tokens=60, listener=lambda _: streamed.append(1))
    batch.step()
    long = submit(batch, prompt(1, 200), max_tokens=2)
    for steps in range(1, 13):
        batch.step()
        assert len(streamed) == 1 + steps  # a token in every step
    assert not long.done()
    finish(batch)
    assert quick.done()
    assert only(long.result()).tokens == only(run(new_batch(decoder), prompt(1, 200), max_tokens=2)).tokens


def test_a_step_has_no_more_tokens_where_some_decode(decoder: Decoder):
    counting: Any = Counting(decoder)
    batch = new_batch(counting, prefill_alone=64, prefill_beside=64)
    for i in range(5):
        submit(batch, prompt(i, 4), max_tokens=60)
    batch.step()
    submit(batch, prompt(9, 200), max_tokens=2)
    before = counting.tokens
    batch.step()
    assert counting.tokens - before == 64


def test_a_request_that_can_never_fit_is_refused(decoder: Decoder):
    batch = new_batch(decoder, pages=4)
    with pytest.raises(EngineError, match=r"the KV cache holds 64 tokens.*40 \+ 29") as caught:
        submit(batch, prompt(0, 40), max_tokens=30)
    assert caught.value.category == "user"
    assert len(only(run(batch, prompt(0, 40), max_tokens=25)).tokens) == 25
    assert len(only(run(batch, prompt(0, 40), max_tokens=None)).tokens) == 25  # as far as it goes
    with pytest.raises(EngineError, match="KV cache"):
        submit(batch, prompt(0, 65), max_tokens=None)


def test_a_step_that_fails_fails_those_it_touched_and_no_others(decoder: Decoder):
    counting = Counting(decoder)
    batch = new_batch(counting, sequences=2)
    published = adapter(decoder, 2, 2)
    touched = [submit(batch, prompt(i, 20), published=published) for i in range(2)]
    waiting = submit(batch, prompt(2, 20))
    counting.error = RuntimeError("out of memory")
    batch.step()
    counting.error = None
    for future in touched:
        with pytest.raises(EngineError, match="out of memory") as caught:
            future.result(timeout=0)
        assert caught.value.category == "server"
    check(batch)
    assert published.users == 0
    finish(batch)
    assert only(waiting.result()).tokens == only(run(new_batch(decoder), prompt(2, 20))).tokens


def test_a_listener_that_raises_fails_its_request_alone(decoder: Decoder):
    def listener(piece: SampledTokens) -> None:
        if piece.index == 1:
            raise ValueError("no more")

    batch = new_batch(decoder)
    noisy = submit(batch, prompt(0, 20), work={"num_samples": 3}, listener=listener)
    quiet = submit(batch, prompt(1, 20))
    finish(batch)
    with pytest.raises(EngineError, match="no more"):
        noisy.result(timeout=0)
    assert len(only(quiet.result()).tokens) == 8


@either_step
def test_samples_of_a_failed_request_that_the_step_still_had_in_its_plan_harm_nobody(
    decoder: Decoder, compiled: bool
):
    heard: list[int] = []

    def listener(piece: SampledTokens) -> None:
        heard.append(piece.index)
        if heard.count(0) == 2:
            raise ValueError("no more")

    batch = new_batch(decoder, compiled=compiled, logits=2 * 320)  # drawn two by two
    noisy = submit(batch, prompt(0, 20), work={"num_samples": 3}, listener=listener)
    quiet = submit(batch, prompt(1, 20))
    finish(batch)
    with pytest.raises(EngineError, match="no more"):
        noisy.result(timeout=0)
    assert only(quiet.result()).tokens == only(run(new_batch(decoder), prompt(1, 20))).tokens


@either_step
def test_a_failed_request_one_of_whose_samples_was_being_computed_anew_harms_nobody(
    decoder: Decoder, compiled: bool
):
    def listener(piece: SampledTokens) -> None:
        second = [s for s in batch.running if s.request.future is noisy and s.index == 1]
        if piece.index == 0 and second and batch.preemptions:  # the second had to go, and is back
            raise ValueError("no more")

    batch = new_batch(decoder, pages=8, compiled=compiled, prefill_beside=48)
    submit(batch, prompt(2, 60), max_tokens=20)  # its end makes room for the sample that had to go
    noisy = submit(batch, prompt(0, 20), max_tokens=60, work={"num_samples": 2}, listener=listener)
    quiet = submit(batch, prompt(1, 20))
    finish(batch)
    with pytest.raises(EngineError, match="no more"):
        noisy.result(timeout=0)
    assert only(quiet.result()).tokens == only(run(new_batch(decoder), prompt(1, 20))).tokens


def test_logits_that_are_not_finite_fail_their_request(decoder: Decoder):
    broken = adapter(decoder, 2, 2)
    broken.adapter.flat[:] = torch.nan
    batch = new_batch(decoder)
    bad, good = submit(batch, prompt(0, 20), published=broken), submit(batch, prompt(0, 20))
    finish(batch)
    with pytest.raises(EngineError, match="not finite"):
        bad.result(timeout=0)
    assert len(only(good.result()).tokens) == 8
    check(batch)


def test_an_adapter_that_has_diverged_leaves_nothing_behind_in_its_pages(decoder: Decoder):
    broken = adapter(decoder, 2, 2)
    broken.adapter.flat[:] = torch.nan
    batch = new_batch(decoder, pages=3)
    expected = only(run(new_batch(decoder), prompt(1, 18))).tokens
    for _ in range(3):  # all pages are used again and again
        bad = submit(batch, prompt(0, 40), published=broken)
        finish(batch)
        assert isinstance(bad.exception(timeout=0), EngineError)
        assert only(run(batch, prompt(1, 18))).tokens == expected
        batch.cache.pages.release(batch.cache.pages.take(3) or [])  # forget what is cached


@either_step
def test_an_adapter_that_has_diverged_harms_nobody_who_decodes_beside_it(decoder: Decoder, compiled: bool):
    broken = adapter(decoder, 2, 2)
    broken.adapter.flat[:] = torch.nan
    batch = new_batch(decoder, compiled=compiled)
    first = submit(batch, prompt(9, 5), max_tokens=3)
    batch.step()
    short, long = (submit(batch, prompt(i, length)) for i, length in ((0, 5), (1, 60)))
    while not first.done():
        batch.step()
    bad = submit(batch, prompt(2, 20), published=broken)  # has the first page that there is
    finish(batch)
    assert isinstance(bad.exception(timeout=0), EngineError)
    for future, ids in ((short, prompt(0, 5)), (long, prompt(1, 60))):
        assert only(future.result()).tokens == only(run(new_batch(decoder), ids)).tokens


@given(
    pages=st.integers(6, 40),
    places=st.integers(1, 6),
    moves=st.lists(
        st.one_of(
            st.tuples(st.just("submit"), st.integers(1, 60), st.integers(1, 20), st.integers(1, 4)),
            st.tuples(st.just("cancel"), st.integers(0, 30), st.just(0), st.just(0)),
            st.tuples(st.just("step"), st.integers(1, 6), st.just(0), st.just(0)),
        ),
        max_size=25,
    ),
)
@settings(deadline=None, max_examples=60)
def test_no_mix_of_cancels_leaks_a_page(
    decoder: Decoder, pages: int, places: int, moves: Sequence[tuple[str, int, int, int]]
):
    batch = new_batch(decoder, pages=pages, sequences=places, prefill_alone=30, prefill_beside=10)
    requests, futures = [], []
    for kind, a, b, c in moves:
        if kind == "submit":
            work = SampleWork(prompt(a % 3, a), SamplingParams(max_tokens=b, seed=a), num_samples=c)
            future: Future[SampleResponse] = Future()
            requests.append(batch.submit(work, batch.check_work(work), None, future))
            futures.append((future, c))
        elif kind == "cancel" and requests:
            at = a % len(requests)
            futures[at][0].cancel()
            batch.cancel(requests[at])
        elif kind == "step":
            for _ in range(a):
                if batch.busy:
                    batch.step()
        check(batch)
    finish(batch)
    for future, samples in futures:
        assert future.cancelled() or len(future.result(timeout=0).sequences) == samples


def test_pages_hold_sixteen_tokens():
    assert PAGE == 16  # the numbers above count on it

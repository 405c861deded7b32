"""Sampling beside training: repeats, batch polls, cancelling, stops, limits, and fairness between owners."""

from __future__ import annotations

import asyncio
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine.gguf_files import byte_bpe_metadata, write_gguf
from tests.engine.tiny import tiny_model, tiny_tokenizer
from tests.service.harness import MODEL, Failed, User, killed_copy, serving, until
from tinkex.engine.fake import FakeEngine
from tinkex.engine.protocol import EngineConfig, SampleWork
from tinkex.service import adapter_cache
from tinkex.service.config import ServiceConfig
from tinkex.service.futures import Completions
from tinkex.service.refusal import Refusal
from tinkex.service.sample_requests import fingerprint
from tinkex.service.served_models import ServedModels
from tinkex.service.service import Service
from tinkex.types import futures, sampling
from tinkex.types.data import ModelInput
from tinkex.types.outputs import SampleResponse
from tinkex.types.params import SamplingParams
from tinkex.types.tensor import TensorData
from tinkex.wire import ops

pytestmark = pytest.mark.anyio


async def test_a_repeated_sample_is_the_same_promise(user: User):
    sampler = await user.sampler(await user.session())
    first, again, other = [await user.sample(sampler, seq_id) for seq_id in (5, 5, 6)]
    assert first == again
    assert other.request_id != first.request_id
    assert len(first.sample_sequence_ids or []) == 1


async def test_an_adapter_samples_as_it_was_trained(user: User):
    run = await user.run()
    session = run.split(":")[0]
    unnamed = await user.unnamed_sampler(run, 1, 7)
    assert unnamed == f"{session}:sample:7"
    await user.train(run, 2, 5)
    path = await user.save_for_sampler(run, 12, "s")
    named = await user.sampler(session, 8, path)
    base = await user.sampler(session, 9)
    texts = {
        s: (await user.result(await user.sample(s))).sequences[0].logprobs for s in (unnamed, named, base)
    }
    assert texts[unnamed] == texts[base]  # B is zero until the first step
    assert texts[named] != texts[base]
    about = await user.call(ops.GET_SAMPLER, sampling.GetSamplerRequest(sampler_id=named))
    assert (about.base_model, about.model_path) == (MODEL, path)


async def test_a_sampler_never_gets_what_was_saved_over_its_checkpoint_while_it_waited(home: Path):
    """Adapters are loaded one at a time; meanwhile its run goes on, and saves under the same name."""
    loading, go_on = asyncio.Event(), asyncio.Event()

    class OneAtATime(FakeEngine):
        def __init__(self, config: EngineConfig) -> None:
            super().__init__(config)
            publish = self.sampler.publish

            async def slowly(name: str, source: Any) -> None:
                if "first" in name:
                    loading.set()
                    await go_on.wait()
                await publish(name, source)

            self.sampler.publish = slowly  # type: ignore[method-assign]

    async with serving(home, OneAtATime) as service:
        user = User(service)
        run = await user.run()
        await user.train(run, 1, 1)
        session = run.split(":")[0]
        first = await user.sampler(session, 0, await user.save(run, 3, "first"))
        latest = await user.sampler(session, 1, await user.save(run, 4, "latest"))
        sampling_first = await user.sample(first)
        await loading.wait()
        sampling_latest = await user.sample(latest)
        await user.train(run, 5, 3)
        await user.save(run, 11, "latest", overwrite=True)
        go_on.set()
        await user.result(sampling_first)
        with pytest.raises(Failed, match="was deleted or replaced since this sampler was made"):
            await user.result(sampling_latest)


async def test_clones_get_numbers_of_their_own(user: User):
    sampler = await user.sampler(await user.session())
    join = sampling.JoinSamplingSessionRequest(sampling_session_id=sampler)
    assert [(await user.call(ops.JOIN_SAMPLING_SESSION, join)).client_counter for _ in range(3)] == [1, 2, 3]


async def test_a_prompt_may_fill_the_context_only_to_be_scored(user: User):
    sampler = await user.sampler(await user.session())
    full = tuple(range(2, 66))  # the fake model's 64
    for loaded in (False, True):
        with pytest.raises(
            Refusal, match=r"^Prompt length plus max_tokens exceeds the model's context window: 60 \+ 5 > 64"
        ):
            await user.sample(sampler, 0, prompt=full[:60], max_tokens=5)
        with pytest.raises(Refusal) as refused:
            await user.sample(sampler, 1, prompt=full, max_tokens=1)
        assert refused.value.status == 400
        request = sampling.SampleRequest(
            ModelInput.from_ints(list(full)), SamplingParams(max_tokens=1), 1, sampler, 10 + loaded,
            prompt_logprobs=True,
        )  # fmt: skip
        response = await user.result(await user.call(ops.SAMPLE, request))
        assert len(response.prompt_logprobs) == 64


async def test_bad_content_is_a_failed_future(user: User):
    sampler = await user.sampler(await user.session())
    with pytest.raises(Failed, match="token ids must be") as failed:
        await user.result(await user.sample(sampler, prompt=(10**6,)))
    assert failed.value.category == "user"


async def test_stop_strings_stop_over_token_bytes(home: Path, tmp_path: Path):
    model = tiny_tokenizer(tmp_path)  # ids 0..255 are bytes, in the alphabet's order
    async with serving(home, models={MODEL: str(model)}) as service:
        user = User(service)
        sampler = await user.sampler(await user.session())
        free = (await user.result(await user.sample(sampler, 0, max_tokens=40, stop=[]))).sequences[0]
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(model)
        at = next(i for i, token in enumerate(free.tokens) if i and 33 < token < 90)  # a plain character
        text = tokenizer.decode([free.tokens[at]])
        stopped = (await user.result(await user.sample(sampler, 1, max_tokens=40, stop=[text]))).sequences[0]
        assert stopped.stop_reason == "stop"
        assert stopped.tokens == free.tokens[: len(stopped.tokens)]
        assert text in tokenizer.decode([stopped.tokens[-1]])


async def test_the_first_who_need_a_tokenizer_may_come_together(tmp_path: Path, home: Path):
    """That of a GGUF file is unpacked for the first of them, and the others wait for it."""
    metadata = byte_bpe_metadata("smollm", "qwen2")
    directory = tiny_model(tmp_path, "qwen2", vocab_size=len(metadata["tokenizer.ggml.tokens"]))
    file = write_gguf(tmp_path / "tiny.gguf", "qwen2", directory, **metadata)
    engine = EngineConfig(model="", kind="torch", device="cpu")
    model = ServedModels(ServiceConfig(home, models={MODEL: str(file)}, engine=engine)).find(MODEL)
    places = await asyncio.gather(*(asyncio.to_thread(model.tokenizer_dir) for _ in range(4)))
    assert len(set(places)) == 1


async def test_a_model_without_a_tokenizer_says_so(user: User):
    sampler = await user.sampler(await user.session())
    with pytest.raises(Failed, match="cannot stop at strings"):
        await user.result(await user.sample(sampler, stop="\n"))


async def test_a_cancelled_sample_ends(home: Path):
    async with serving(home, SlowSampling) as service:
        user = User(service)
        sampler = await user.sampler(await user.session())
        promise = await user.sample(sampler)
        await until(lambda: service.models.find(MODEL).engine is not None)
        await user.call(ops.CANCEL_FUTURE, futures.CancelFutureRequest(request_id=promise.request_id))
        with pytest.raises(Failed, match="cancelled"):
            await user.result(promise)


async def test_a_sample_cancelled_before_it_begins_ends_too(user: User):
    sampler = await user.sampler(await user.session())
    await user.result(await user.sample(sampler, 0))  # the engine is there
    promise = await user.sample(sampler, 1)  # nothing was waited for: its task has not begun
    await user.call(ops.CANCEL_FUTURE, futures.CancelFutureRequest(request_id=promise.request_id))
    with pytest.raises(Failed, match="cancelled"):
        await user.result(promise)
    assert not user.service.samplers._running


async def test_samples_that_come_together_are_recorded_before_they_are_acknowledged(user: User):
    sampler, path = await user.sampler(await user.session()), user.service.home.root / "samples"

    async def is_recorded(seq_id: int) -> bool:
        promise = await user.sample(sampler, seq_id)
        return f"+{promise.request_id} " in path.read_text()

    assert all(await asyncio.gather(*map(is_recorded, range(5))))


async def test_one_that_cannot_be_counted_takes_no_result_from_those_that_end_with_it(
    user: User, monkeypatch: pytest.MonkeyPatch
):
    sampler, counted = await user.sampler(await user.session()), user.service.activity.count
    fails = iter([True])

    def count(row: Any, amounts: Any) -> None:
        if next(fails, False):
            raise ArithmeticError("the first one cannot be counted")
        counted(row, amounts)

    monkeypatch.setattr(user.service.activity, "count", count)
    reported: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context["exception"]))
    promises = await asyncio.gather(*(user.sample(sampler, n) for n in range(3)))
    async with asyncio.timeout(10):
        for promise in promises:
            assert (await user.result(promise)).sequences
    assert [str(error) for error in reported] == ["the first one cannot be counted"]


@pytest.mark.parametrize("why", ["cancelled", "stopping"])
async def test_a_sample_that_ends_as_it_is_accepted_is_not_computed(user: User, why: str):
    samplers, sampler = user.service.samplers, await user.sampler(await user.session())
    await user.result(await user.sample(sampler, 0))  # the engine is there
    request = sampling.SampleRequest(ModelInput.from_ints([5]), SamplingParams(max_tokens=1), 1, sampler, 1)
    future = samplers.start(request, user.caller)
    if why == "stopping":
        await samplers.stop()
    else:
        samplers.cancel(future)
    assert why in future.outcome.error
    await asyncio.sleep(0)
    assert not samplers.running


class SlowSampling(FakeEngine):
    """Samples only when it is told to; remembers who was sampled, in order."""

    def __init__(self, config) -> None:
        super().__init__(config)
        self.turn = asyncio.Semaphore(0)
        self.order: list[int] = []
        sample = self.sampler.sample

        async def one_by_one(work):
            self.order.append(int(work.prompt[0]))
            await self.turn.acquire()
            return await sample(work)

        self.sampler.sample = one_by_one  # type: ignore[method-assign]


async def test_a_flood_does_not_starve_the_others(home: Path):
    async with serving(home, SlowSampling, samples_in_flight=4) as service:
        ann, bob = User(service, "ann"), User(service, "bob")
        flooding = await ann.sampler(await ann.session())
        floods = [await ann.sample(flooding, n, prompt=(10,)) for n in range(100)]
        model = service.models.find(MODEL)
        await until(lambda: model.engine is not None and len(model.engine.order) == 4)  # type: ignore[union-attr]
        few = [await bob.sample(await bob.sampler(await bob.session()), n, prompt=(20,)) for n in range(3)]
        service.long_poll = 0.01
        state = await bob.call(ops.RETRIEVE_FUTURE, futures.FutureRetrieveRequest(few[0].request_id))
        assert state.queue_state == "paused_capacity"
        service.long_poll = 5.0
        engine = model.engine
        assert isinstance(engine, SlowSampling)
        for _ in range(103):
            engine.turn.release()
        for promise in few:
            await bob.result(promise)
        await ann.result(floods[-1])
        first_of_bob = engine.order.index(20)
        assert first_of_bob <= 5  # four were inside already
        assert engine.order[:20].count(20) == 3


# -- batch polls -----------------------------------------------------------------------------------------


async def poll(user: User, sampler: str, cursor: int = 0, fetched: tuple[str, ...] = (), clone: int = 0):
    target = futures.SamplingSessionFuturesTarget(sampling_session_id=sampler, cloned_sampler_id=clone)
    request = futures.FuturesRetrieveRequest(
        target=target, prev_cursor=cursor, retrieved_request_ids=list(fetched), timeout=2.0
    )
    reply = await user.call(ops.RETRIEVE_FUTURES, request)
    return {c.request_id: c.state for c in reply.completions}, reply.cursor


async def test_a_batch_poll_reports_each_end_until_it_is_acknowledged(user: User):
    sampler = await user.sampler(await user.session())
    good, bad = await user.sample(sampler, 0), await user.sample(sampler, 1, prompt=(10**6,))
    clone = await user.sample(sampler, 3 * 10**9)
    await user.result(good)
    with pytest.raises(Failed):
        await user.result(bad)
    expected = {good.request_id: "finished", bad.request_id: "failed"}
    seen, cursor = await poll(user, sampler)
    assert seen == expected
    assert (await poll(user, sampler))[0] == expected  # the answer may have been lost
    waiting = asyncio.ensure_future(poll(user, sampler, cursor, fetched=(good.request_id,)))
    await asyncio.sleep(0.02)
    third = await user.sample(sampler, 2)
    assert (await waiting)[0] == {third.request_id: "finished"}
    gone = futures.FutureRetrieveRequest(good.request_id)
    assert await user.status_of(ops.RETRIEVE_FUTURE, gone) == 410
    assert set((await poll(user, sampler, clone=3))[0]) == {clone.request_id}


async def test_a_cursor_of_a_process_whose_clock_was_ahead_hides_nothing():
    feeds = Completions(None)
    feeds.begin("s#0", "r")
    feeds.end("s#0", "r", failed=False)
    far = 2**62
    completions, cursor = await feeds.poll("s#0", far, 0.0)
    assert [done.request_id for done in completions] == ["r"]
    assert await feeds.poll("s#0", cursor, 0.0) == ([], cursor)


async def test_a_clients_last_word_is_answered_at_once(user: User):
    sampler = await user.sampler(await user.session())
    promise = await user.sample(sampler, 0)
    await user.result(promise)
    _, cursor = await poll(user, sampler)
    user.service.long_poll = 1000.0
    last = asyncio.ensure_future(poll(user, sampler, cursor, fetched=(promise.request_id,)))
    assert (await asyncio.wait_for(last, 60.0))[0] == {}  # not after the poll's 1,000 seconds


async def test_after_a_restart_lost_samples_are_reported_and_answer_410(home: Path):
    async with serving(home, SlowSampling) as service:
        user = User(service)
        sampler = await user.sampler(await user.session())
        promise, other = await user.sample(sampler, 0), await user.sample(sampler, 1)
        async with serving(killed_copy(home)) as second:
            again = User(second)
            seen, cursor = await poll(again, sampler, cursor=17)
            assert set(seen) == {promise.request_id, other.request_id}
            ask = futures.FutureRetrieveRequest(promise.request_id)
            assert await again.status_of(ops.RETRIEVE_FUTURE, ask) == 410
            anew = await again.sample(sampler, 2)
            await again.result(anew)
            assert set((await poll(again, sampler, cursor))[0]) == {anew.request_id}


def test_the_file_of_samples_is_rewritten_and_survives_being_cut_off(tmp_path: Path):
    path = tmp_path / "samples"
    feeds = Completions(path)
    feeds.restore()
    for n in range(12_000):
        feeds.begin("s#0", f"r{n}")
        feeds.fetched([f"r{n}"])
    feeds.begin("s#0", "open")
    feeds.write()
    assert path.stat().st_size < 200_000
    with path.open("ab") as file:
        file.write(b"+cut s")
    feeds = Completions(path)
    feeds.restore()
    assert set(feeds._open) == {"open"}


def test_samples_of_another_server_are_adopted_once(tmp_path: Path):
    """A takeover that fails half-way is tried again."""
    left = Completions(tmp_path / "samples")
    left.restore()
    left.begin("s#0", "lost")
    left.write()
    feeds = Completions(None)
    for _ in range(2):
        feeds.adopt(tmp_path / "samples")
    feeds.fetched(["lost"])
    assert not feeds.is_open("s#0")


# -- published adapters ----------------------------------------------------------------------------------


async def test_adapters_that_make_room_come_back(home: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(adapter_cache, "MAX_ADAPTERS", 2)
    async with serving(home) as service:
        user = User(service)
        run = await user.run()
        samplers = []
        for n in range(4):
            await user.train(run, 1 + 3 * n, 1)
            samplers.append(await user.unnamed_sampler(run, 3 + 3 * n, n))
        engine = service.models.find(MODEL).engine
        assert isinstance(engine, FakeEngine)
        assert len(engine.sampler.published) <= 3
        first = [(await user.result(await user.sample(s, 0))).sequences[0].logprobs for s in samplers]
        again = [(await user.result(await user.sample(s, 1))).sequences[0].logprobs for s in samplers]
        assert first == again
        assert len({tuple(np.round(logprobs, 6)) for logprobs in first}) == 4
        assert len(engine.sampler.published) <= 3


async def test_an_adapter_that_is_taken_while_others_make_room_stays(
    home: Path, monkeypatch: pytest.MonkeyPatch
):
    """Several have to go at once, and while the first one does, somebody begins to use the second."""
    monkeypatch.setattr(adapter_cache, "MAX_ADAPTERS", 3)
    async with serving(home) as service:
        user = User(service)
        run = await user.run()
        samplers = [await user.unnamed_sampler(run, 1 + n, n) for n in range(3)]
        engine = service.models.find(MODEL).engine
        assert isinstance(engine, FakeEngine)
        retire, sample = engine.sampler.retire, engine.sampler.sample
        going, taken, go_on = asyncio.Event(), asyncio.Event(), asyncio.Event()

        async def slowly(name: str) -> None:
            going.set()
            await taken.wait()
            await retire(name)

        async def later(work: SampleWork) -> SampleResponse:
            taken.set()
            await go_on.wait()
            return await sample(work)

        monkeypatch.setattr(engine.sampler, "retire", slowly)
        monkeypatch.setattr(engine.sampler, "sample", later)
        monkeypatch.setattr(adapter_cache, "MAX_ADAPTERS", 2)
        last = asyncio.create_task(user.unnamed_sampler(run, 4, 3))  # two too many
        await going.wait()
        promise = await user.sample(samplers[1])
        await last
        go_on.set()
        assert (await user.result(promise)).sequences


async def test_an_adapter_whose_sample_is_cancelled_while_it_is_loaded_can_go_too(
    home: Path, monkeypatch: pytest.MonkeyPatch
):
    """The engine has begun, and does not stop: what it then holds must make room like any other."""
    monkeypatch.setattr(adapter_cache, "MAX_ADAPTERS", 1)
    async with serving(home) as service:
        user = User(service)
        run = await user.run()
        session = run.split(":")[0]
        sampler = await user.sampler(session, 0, await user.save_for_sampler(run, 1, "s"))
        engine = service.models.find(MODEL).engine
        assert isinstance(engine, FakeEngine)
        publish, begun, go_on = engine.sampler.publish, asyncio.Event(), asyncio.Event()

        async def slowly(name: str, source: Any) -> None:
            async def job() -> None:
                begun.set()
                await go_on.wait()
                await publish(name, source)

            await asyncio.shield(asyncio.create_task(job()))

        monkeypatch.setattr(engine.sampler, "publish", slowly)
        promise = await user.sample(sampler)
        await begun.wait()
        await user.call(ops.CANCEL_FUTURE, futures.CancelFutureRequest(request_id=promise.request_id))
        go_on.set()
        await until(lambda: engine.sampler.published)
        last = [await user.unnamed_sampler(run, 2 + n, 1 + n) for n in range(2)][-1]
        assert list(engine.sampler.published) == [last]


async def test_a_seq_id_with_another_prompt_is_another_sample(user: User):
    """Copies of a sampler, of clients that number them badly: nobody gets the answer to another's prompt."""
    sampler = await user.sampler(await user.session())
    first = await user.sample(sampler, 0, prompt=(5, 6, 7))
    changes = {"prompt": (5, 6, 8)}, {"num_samples": 2}, {"temperature": 0.5}
    others = [await user.sample(sampler, 0, **changed) for changed in changes]  # type: ignore[arg-type]
    assert len({promise.request_id for promise in (first, *others)}) == 4
    assert await user.sample(sampler, 0, prompt=(5, 6, 7)) == first


OTHERWISE: dict[str, Any] = {
    "prompt": ModelInput.from_ints([5, 6, 8]), "num_samples": 2, "prompt_logprobs": True,
    "topk_prompt_logprobs": 2, "topk_sample_logprobs": 2, "prompt_alt_tokens_k": 2,
    "prompt_logprobs_last_n": 2, "record_stability_info": True,
    "target_prompt_logprobs": TensorData.from_numpy(np.arange(6).reshape(3, 2)),
    "max_tokens": 3, "seed": 1, "stop": ["a"], "temperature": 0.5, "top_k": 3, "top_p": 0.5,
    "presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.5, "min_p": 0.1,
    "min_tokens": 2, "ignore_eos": True, "logit_bias": {5: 1.0}, "grammar": {"regex": "a"},
}  # fmt: skip


def test_every_field_tells_a_sample_from_another():
    """A seq id that comes again is the same request only if all of it is."""
    own = {field.name for field in fields(sampling.SampleRequest)}
    where = {"sampling_params", "sampling_session_id", "seq_id", "base_model", "model_path"}
    assert set(OTHERWISE) == (own - where) | {field.name for field in fields(SamplingParams)}
    prompt, found = ModelInput.from_ints([5, 6, 7]), []
    for changed in ({}, *({name: value} for name, value in OTHERWISE.items()), {"stop": [5]}, {"stop": "a"}):
        params = SamplingParams(**{k: v for k, v in changed.items() if k not in own})
        request = sampling.SampleRequest(prompt, params)
        request = replace(request, **{k: v for k, v in changed.items() if k in own})
        found.append(fingerprint(request))
        assert found[-1] == fingerprint(replace(request, seq_id=5))
    assert len(set(found)) == len(OTHERWISE) + 3


async def test_a_number_of_another_sampler_is_a_422(user: User):
    run = await user.run()
    session = run.split(":")[0]
    path = await user.save_for_sampler(run, 1, "s")
    base, named, unnamed = 0, 1, 2
    await user.sampler(session, base)
    await user.sampler(session, named, path)
    await user.unnamed_sampler(run, 2, unnamed)
    for number, other in ((base, path), (named, None), (unnamed, None), (unnamed, path)):
        with pytest.raises(Refusal, match=f"sampling_session_seq_id {number} was another") as refused:
            await user.sampler(session, number, other)
        assert refused.value.status == 422
    assert await user.sampler(session, named, path) == f"{session}:sample:1"


async def test_sampling_on_an_exported_or_unknown_checkpoint_is_refused(user: User, service: Service):
    session = await user.session()
    for path in ("tinker://x:train:0/sampler_weights/s", "tinker://nonsense"):
        request = sampling.CreateSamplingSessionRequest(
            session_id=session, sampling_session_seq_id=0, model_path=path
        )
        assert await user.status_of(ops.CREATE_SAMPLING_SESSION, request) in (400, 404)

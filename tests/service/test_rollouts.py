"""Rollouts: kept beside the work, joined with the passes that train on them, and within their budget."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest

from tests.service.harness import User, name_of, serving
from tinkex.service import rollouts
from tinkex.service.rollout_reader import RolloutReader
from tinkex.service.rows import SamplerRow
from tinkex.service.service import Service
from tinkex.types.checkpoints import CheckpointRequest
from tinkex.types.chunks import ImageAssetPointerChunk
from tinkex.types.data import Datum, ModelInput
from tinkex.types.outputs import SampledSequence, SampleResponse, TopkLogprobs
from tinkex.types.params import SamplingParams
from tinkex.types.sampling import SampleRequest
from tinkex.types.training import ForwardBackwardInput, ForwardBackwardRequest
from tinkex.wire import ops

pytestmark = pytest.mark.anyio


@pytest.fixture
async def keeping(home: Path) -> AsyncIterator[Service]:
    async with serving(home, keep_rollouts=1.0) as service:
        yield service


async def answers(user: User, sampler: str, prompt: list[int], count: int, seed: int = 1) -> list[list[int]]:
    promise = await user.sample(sampler, prompt=prompt, num_samples=count, max_tokens=5, seed=seed, stop=[])
    return [sequence.tokens for sequence in (await user.result(promise)).sequences]


def as_datum(prompt: list[int], answer: list[int], advantage: float, logprob: float = -1.0) -> Datum:
    whole = prompt + answer
    weights = [0.0] * (len(prompt) - 1) + [advantage] * len(answer)
    inputs = {"target_tokens": whole[1:], "logprobs": [logprob] * len(weights), "advantages": weights}
    return Datum(ModelInput.from_ints(whole[:-1]), inputs)


async def train(user: User, run: str, seq_id: int, *data: Datum) -> list[list[float]]:
    work = ForwardBackwardInput(list(data), "importance_sampling", None)
    output = await user.result(
        await user.call(ops.FORWARD_BACKWARD, ForwardBackwardRequest(work, run, seq_id))
    )
    await user.result(await user.step(run, seq_id + 1))
    return [record["logprobs"].tolist() for record in output.loss_fn_outputs]


async def test_a_pass_is_joined_with_what_was_sampled_by_its_tokens(keeping: Service):
    user, prompt = User(keeping), [5, 6, 7]
    run = await user.run()
    sampler = await user.unnamed_sampler(run, 1, 0)
    first, second = await answers(user, sampler, prompt, 2)
    trained = await train(user, run, 2, as_datum(prompt, first, 1.5), as_datum(prompt, second, -0.5))
    keeping.rollouts.flush()
    reader = RolloutReader()
    (one,) = reader.list(keeping.home.run_dir(run))
    assert (one.step, one.prompt, [s.tokens for s in one.samples]) == (0, 3, [5, 5])
    assert [s.advantage for s in one.samples] == [1.5, -0.5]
    assert [s.trained_at for s in one.samples] == [0, 0]
    for index, answer in enumerate((first, second)):
        record = reader.record(one, index)
        assert (record["prompt"], record["tokens"]) == (prompt, answer)
        expected = trained[index][len(prompt) - 1 :]
        assert record["joined"]["trainer"] == pytest.approx(expected, abs=1e-4)
        pairs = zip(record["logprobs"], expected, strict=True)
        assert one.samples[index].difference == pytest.approx(sum(abs(a - b) for a, b in pairs) / 5, abs=1e-4)


async def test_every_turn_of_a_conversation_is_joined(keeping: Service):
    user, prompt = User(keeping), [5, 6, 7]
    run = await user.run()
    sampler = await user.unnamed_sampler(run, 1, 0)
    ((*first,),) = await answers(user, sampler, prompt, 1)
    later = [*prompt, *first, 9, 9]
    ((*second,),) = await answers(user, sampler, later, 1)
    whole = later + second
    advantages = [0.0] * 2 + [1.0] * 5 + [0.0] * 2 + [2.0] * 5
    inputs = {"target_tokens": whole[1:], "logprobs": [-1.0] * len(advantages), "advantages": advantages}
    await train(user, run, 2, Datum(ModelInput.from_ints(whole[:-1]), inputs))
    keeping.rollouts.flush()
    found = RolloutReader().list(keeping.home.run_dir(run))
    assert [one.samples[0].advantage for one in reversed(found)] == [1.0, 2.0]


async def test_groups_know_the_step_that_their_sampler_was_made_at(keeping: Service):
    user, prompt = User(keeping), [5, 6, 7]
    run = await user.run()
    for number in range(2):
        sampler = await user.unnamed_sampler(run, 1 + 3 * number, number)
        (answer,) = await answers(user, sampler, prompt, 1, seed=number)
        await train(user, run, 2 + 3 * number, as_datum(prompt, answer, 1.0))
    keeping.rollouts.flush()
    found = RolloutReader().list(keeping.home.run_dir(run))
    assert [one.step for one in reversed(found)] == [0, 1]
    assert len({one.group for one in found}) == 1, "the same prompt over training"


async def test_an_answer_that_comes_again_is_joined_at_the_step_that_drew_it(keeping: Service):
    user, answer = User(keeping), np.array([8, 9], np.int32)
    run, prompt = await user.run(), [5, 6, 7]
    trained = list[list[float]]()
    for step in range(3):
        for _ in range(2):
            observe(
                keeping, run, SampledSequence("stop", "", answer, np.zeros(2, np.float32)), sampler=f"s{step}"
            )
        data = [as_datum(prompt, [8, 9], advantage) for advantage in (1.0, -0.5)]
        trained += (await train(user, run, 1 + 2 * step, *data))[:1]
    keeping.rollouts.flush()
    reader = RolloutReader()
    found = reader.list(keeping.home.run_dir(run))[::-1]
    assert [(one.step, one.samples[0].trained_at) for one in found] == [(k // 2, k // 2) for k in range(6)]
    assert [one.samples[0].advantage for one in found] == [1.0, -0.5] * 3
    for one in found:
        record = reader.record(one, 0)
        assert record["joined"]["trainer"] == pytest.approx(trained[one.step][2:], abs=1e-4)


async def test_an_equal_answer_of_one_sampler_is_joined_before_one_that_was(keeping: Service):
    user, answer = User(keeping), np.array([8, 9], np.int32)
    run = await user.run()
    for number, advantage in enumerate((1.0, -0.5, 2.0)):
        observe(keeping, run, SampledSequence("stop", "", answer, np.zeros(2, np.float32)), sampler="s0")
        await train(user, run, 1 + 2 * number, as_datum([5, 6, 7], [8, 9], advantage))
    keeping.rollouts.flush()
    found = RolloutReader().list(keeping.home.run_dir(run))[::-1]
    assert [one.samples[0].advantage for one in found] == [1.0, -0.5, 2.0]


async def test_a_full_budget_drops_the_oldest_and_no_request(home: Path):
    async with serving(home, keep_rollouts=1.0, rollout_bytes=16_000) as service:
        user = User(service)
        run = await user.run()
        sampler = await user.unnamed_sampler(run, 1, 0)
        reader = RolloutReader()
        for n in range(120):
            assert len(await answers(user, sampler, [5, 6, n % 50 + 1], 1, seed=n)) == 1
            if n % 40 == 0:
                service.rollouts.flush()
                reader.list(service.home.run_dir(run))
        service.rollouts.flush()
        place = service.home.run_dir(run) / rollouts.DIRECTORY
        assert sum(path.stat().st_size for path in place.iterdir()) <= 16_000
        kept, anew = reader.list(service.home.run_dir(run)), RolloutReader().list(service.home.run_dir(run))
        assert [one.id for one in kept] == [one.id for one in anew]
        assert 10 < len(kept) < 120
        assert reader.record(kept[-1], 0)["tokens"]
        assert service.rollouts.dropped == 0


async def test_nothing_is_kept_unless_it_is_asked_for_and_groups_are_kept_whole(home: Path):
    async with serving(home) as service:
        user = User(service)
        run = await user.run()
        await answers(user, await user.unnamed_sampler(run, 1, 0), [5, 6, 7], 1)
        assert not (service.home.run_dir(run) / rollouts.DIRECTORY).exists()
    async with serving(home, keep_rollouts=0.5) as service:
        user = User(service)
        run = await user.run()
        sampler = await user.unnamed_sampler(run, 1, 0)
        for n in range(20):
            for seed in range(2):
                await answers(user, sampler, [5, 6, n + 1], 1, seed=seed)
        service.rollouts.flush()
        found = RolloutReader().list(service.home.run_dir(run))
        groups = {one.group: sum(other.group == one.group for other in found) for one in found}
        assert set(groups.values()) == {2}
        assert 3 <= len(groups) <= 17


async def test_a_thread_that_cannot_keep_up_drops_rollouts_and_holds_up_nobody(
    home: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(rollouts, "WAITING", 2)
    async with serving(home, keep_rollouts=1.0) as service:
        user = User(service)
        run = await user.run()
        sampler = await user.unnamed_sampler(run, 1, 0)
        monkeypatch.setattr(service.rollouts, "_record", lambda: None)
        for n in range(5):
            assert await answers(user, sampler, [5, 6, n + 1], 1)
        assert service.rollouts.dropped == 3
        service.rollouts._thread = None  # nobody would take its last item


async def test_damaged_lines_cost_themselves(keeping: Service):
    user = User(keeping)
    run = await user.run()
    sampler = await user.unnamed_sampler(run, 1, 0)
    await answers(user, sampler, [5, 6, 7], 1)
    keeping.rollouts.flush()
    (file,) = (keeping.home.run_dir(run) / rollouts.DIRECTORY).iterdir()
    good = file.read_bytes()
    file.write_bytes(b'nonsense\n{"kind": "joined", "id": 1, "sample": 9}\n[]\n' + good + good[:20])
    (one,) = RolloutReader().list(keeping.home.run_dir(run))
    assert json.dumps(RolloutReader().record(one, 0)["prompt"]) == "[5, 6, 7]"


OLD = b"""\
{"kind":"sample","id":1763560000000001,"time":1763560000.5,"step":3,"group":"9f1c2d3e4a5b","prompt":[5,6,7],\
"samples":[{"tokens":[8,9],"stop":"stop","logprobs":[-0.5,-1.5],"topk":[[[8,-0.5],[9,-1.0]],null]}],\
"temperature":1.0,"sampler":"s:sample:0"}
{"kind":"joined","id":1763560000000001,"sample":0,"step":3,"trainer":[-0.75,-1.25],"advantage":1.5}
"""


async def test_lines_of_an_earlier_version_are_read_and_stay_as_they_are(keeping: Service):
    user = User(keeping)
    run = await user.run()
    place = keeping.home.run_dir(run) / rollouts.DIRECTORY
    place.mkdir()
    (place / "000004.jsonl").write_bytes(OLD)
    await answers(user, await user.unnamed_sampler(run, 1, 0), [5, 6, 7], 1)
    keeping.rollouts.flush()
    assert [path.name for path in sorted(place.iterdir())] == ["000004.jsonl", "000005.packed"]
    assert (place / "000004.jsonl").read_bytes() == OLD
    reader = RolloutReader()
    _, old = reader.list(keeping.home.run_dir(run))
    (sample,) = old.samples
    assert (old.step, old.prompt, sample.tokens, sample.logprob, sample.advantage) == (3, 3, 2, -1.0, 1.5)
    assert (sample.difference, sample.trained_at) == (0.25, 3)
    record = reader.record(old, 0)
    assert (record["prompt"], record["tokens"], record["logprobs"]) == ([5, 6, 7], [8, 9], [-0.5, -1.5])
    assert (record["topk"], record["joined"]["trainer"]) == ([[[8, -0.5], [9, -1.0]], None], [-0.75, -1.25])


def observe(
    service: Service,
    run: str,
    *sequences: SampledSequence,
    prompt: ModelInput | None = None,
    sampler: str = "s",
) -> None:
    """As if a sampler of the run had answered."""
    session, number = run.split(":train:")
    row = SamplerRow(sampler, session, "ann", "m", 0.0, adapter_dir=f"runs/{session}/train-{number}/x")
    request = SampleRequest(prompt or ModelInput.from_ints([5, 6, 7]), SamplingParams(max_tokens=9))
    service.rollouts.sampled(row, 0.1, SampleResponse(list(sequences)), request)


async def test_what_json_cannot_say_and_likely_tokens_are_kept(keeping: Service):
    run = await User(keeping).run()
    logprobs = np.array([-0.123456, -np.inf, np.nan], np.float32)
    likely = TopkLogprobs(
        np.arange(21, dtype=np.int32).reshape(3, 7),
        np.array([[-1.0] * 7, [-2.0] + [-99999.0] * 6, [-99999.0] * 7], "f4"),
    )
    tokens = np.array([8, 9, 10], np.int32)
    observe(keeping, run, SampledSequence("stop", "", tokens, logprobs, likely), SampledSequence("length"))
    keeping.rollouts.flush()
    reader = RolloutReader()
    (one,) = reader.list(keeping.home.run_dir(run))
    assert [(s.tokens, s.stop, s.logprob is None) for s in one.samples] == [
        (3, "stop", False),
        (0, "length", True),
    ]
    record = reader.record(one, 0)
    assert record["logprobs"] == [-0.12346, -99999.0, 0.0]
    assert record["topk"] == [[(k, -1.0) for k in range(5)], [(7, -2.0)], None]
    assert "logprobs" not in reader.record(one, 1)


@pytest.mark.parametrize("share", [0.5, 1.0])
async def test_prompts_with_images_are_left_out(home: Path, share: float):
    async with serving(home, keep_rollouts=share) as service:
        run = await User(service).run()
        image = ImageAssetPointerChunk("png", "file:///x.png", expected_tokens=4)
        tokens = SampledSequence("stop", "", np.array([8], np.int32))
        observe(service, run, tokens, prompt=ModelInput([image]))
        service.rollouts.flush()
        assert RolloutReader().list(service.home.run_dir(run)) == []


async def test_a_torn_record_costs_itself_and_the_one_that_was_written_behind_it(keeping: Service):
    run = await User(keeping).run()
    place = keeping.home.run_dir(run) / rollouts.DIRECTORY
    reader, found = RolloutReader(), list[list[int]]()
    for token in range(8, 12):
        observe(keeping, run, SampledSequence("stop", "", np.array([token, 10], np.int32)))
        keeping.rollouts.flush()
        (file,) = place.iterdir()
        if token == 8:
            file.write_bytes(file.read_bytes()[:-3])
        found.append([reader.record(one, 0)["tokens"][0] for one in reader.list(keeping.home.run_dir(run))])
    assert found == [[], [], [10], [11, 10]]


async def test_what_waits_is_bounded_by_its_tokens(keeping: Service, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(rollouts, "WAITING_TOKENS", 100)
    run, stuck = await User(keeping).run(), threading.Event()
    monkeypatch.setattr(rollouts, "write", lambda *_: stuck.wait(20))
    large, small = (SampledSequence("stop", "", np.zeros(count, np.int32)) for count in (200, 30))
    observe(keeping, run, large)  # alone it may be as large as it is
    assert (keeping.rollouts.dropped, keeping.rollouts._written_tokens) == (0, 0)
    observe(keeping, run, small)
    assert keeping.rollouts.dropped == 1
    stuck.set()
    keeping.rollouts.flush()
    for count in range(1, 5):  # 33 tokens each
        observe(keeping, run, small)
        assert keeping.rollouts.dropped == 1 + (count > 3)


async def test_a_disk_that_hangs_holds_up_no_request_and_not_the_end(
    home: Path, monkeypatch: pytest.MonkeyPatch
):
    stuck = threading.Event()
    monkeypatch.setattr(rollouts, "write", lambda *_: stuck.wait(60))
    monkeypatch.setattr(rollouts, "ENDING", 0.3)
    async with serving(home, keep_rollouts=1.0) as service:
        user = User(service)
        run = await user.run()
        sampler = await user.unnamed_sampler(run, 1, 0)
        for n in range(30):
            (answer,) = await answers(user, sampler, [5, 6, n + 1], 1)
        await train(user, run, 2, as_datum([5, 6, 30], answer, 1.0))
        began = time.monotonic()
        await asyncio.to_thread(service.rollouts.stop)
        assert 0.2 < time.monotonic() - began < 5
        stuck.set()


async def test_only_what_a_run_s_owner_draws_in_a_session_is_kept(keeping: Service):
    """A checkpoint may be others' to sample from: by a token, in a project, once it is published."""
    ann, carl, bob = User(keeping, "ann", "p"), User(keeping, "carl", "p"), User(keeping, "bob")
    dora = User(keeping, "dora")
    run = await ann.run(await ann.session(project_id="p"))
    path = await ann.save_for_sampler(run, 1, "one")
    keeping.access._opened_by = lambda token: run if token == "a token" else None
    dora.caller = dora.caller._replace(weights_token="a token")

    async def draw(user: User, first: int) -> None:
        await answers(user, await user.sampler(await user.session(), path=path), [first, 6, 7], 1)
        params = SamplingParams(max_tokens=5, seed=1, stop=[])
        prompt = ModelInput.from_ints([first, 8, 9])  # as the playground and /v1 do: without a session
        await user.result(await user.call(ops.SAMPLE, SampleRequest(prompt, params, 1, model_path=path)))

    await draw(carl, 21)
    await draw(dora, 22)
    await ann.call(ops.PUBLISH_CHECKPOINT, CheckpointRequest(**name_of(path)))
    await draw(bob, 23)
    await draw(ann, 24)
    keeping.rollouts.flush()
    reader = RolloutReader()
    found = reader.list(keeping.home.run_dir(run))
    assert [reader.record(one, 0)["prompt"] for one in found] == [[24, 6, 7]]


async def test_an_index_is_made_without_opening_a_file_for_every_pass(
    keeping: Service, monkeypatch: pytest.MonkeyPatch
):
    user, prompt = User(keeping), [5, 6, 7]
    run = await user.run()
    sampler = await user.unnamed_sampler(run, 1, 0)
    drawn = await answers(user, sampler, prompt, 4)
    await train(user, run, 2, *(as_datum(prompt, answer, 1.0) for answer in drawn))
    keeping.rollouts.flush()
    monkeypatch.setattr("tinkex.service.rollout_reader.read_record", lambda *_: pytest.fail("a file"))
    (one,) = RolloutReader().list(keeping.home.run_dir(run))
    assert all(sample.difference is not None for sample in one.samples)

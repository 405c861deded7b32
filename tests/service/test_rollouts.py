"""Rollouts: kept beside the work, joined with the passes that train on them, and within their budget."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.service.harness import User, serving
from tinkex.service import rollouts
from tinkex.service.rollout_reader import RolloutReader
from tinkex.service.service import Service
from tinkex.types.data import Datum, ModelInput
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
        assert sum(path.stat().st_size for path in place.glob("*")) <= 16_000
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
    (file,) = (keeping.home.run_dir(run) / rollouts.DIRECTORY).glob("*.jsonl")
    good = file.read_bytes()
    file.write_bytes(b'nonsense\n{"kind": "joined", "id": 1, "sample": 9}\n[]\n' + good + good[:20])
    (one,) = RolloutReader().list(keeping.home.run_dir(run))
    assert json.dumps(RolloutReader().record(one, 0)["prompt"]) == "[5, 6, 7]"

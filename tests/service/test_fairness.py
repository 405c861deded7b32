"""One owner's huge request does not hold up another's small ones, and its results do not change by that."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.service.harness import User, datum, serving, until
from tinkex.engine.fake import FakeEngine
from tinkex.engine.protocol import (
    ContinuePasses,
    EngineConfig,
    EngineLost,
    ForwardBackward,
    OptimStep,
    SampleWork,
    SaveAdapter,
)
from tinkex.service import samplers
from tinkex.service.sample_events import SampleEvents
from tinkex.service.scheduler import QueuedRequest, Scheduler
from tinkex.types.data import ModelInput
from tinkex.types.outputs import NewTokens, SampleResponse
from tinkex.types.params import SamplingParams
from tinkex.types.sampling import SampleRequest
from tinkex.wire import ops

pytestmark = pytest.mark.anyio

MICRO_BATCHES = 40
TOKENS = EngineConfig(model="", kind="fake", max_context=64, max_pass_tokens=6)  # one datum a micro-batch
HUGE = [datum(n) for n in range(MICRO_BATCHES)]


class Held(FakeEngine):
    """Stops before the third micro-batch of the huge pass until `go`; `did` is what it has executed."""

    def __init__(self, config: EngineConfig, lost_at: int = 0) -> None:
        super().__init__(config)
        self.go, self.arrived, self.did = threading.Event(), threading.Event(), list[Any]()
        execute = self.trainer._execute

        def noting(command: Any) -> Any:
            self.did.append(command)
            if self.continued() == 2:
                self.arrived.set()
                assert self.go.wait(30)
            if lost_at and self.continued() == lost_at:
                self.close()
                raise EngineLost("the device fell off the bus")
            return execute(command)

        self.trainer._execute = noting  # type: ignore[method-assign]

    def continued(self) -> int:
        return sum(isinstance(command, ContinuePasses) for command in self.did)

    def first(self, kind: type, run: str) -> int:
        """The place of the first command of this kind for a run."""
        for place, command in enumerate(self.did):
            runs = [one.run for one in command.passes] if kind is ForwardBackward is type(command) else []
            if isinstance(command, kind) and (run in runs or getattr(command, "run", "") == run):
                return place
        raise AssertionError(f"no {kind.__name__} of {run} in {self.did}")


def keeping(engines: list[Held], **options: Any) -> Callable[[EngineConfig], Held]:
    """Builds engines, of which only the first is held or lost."""

    def build(config: EngineConfig) -> Held:
        engines.append(Held(config, **({} if engines else options)))
        if len(engines) > 1:
            engines[-1].go.set()
        return engines[-1]

    return build


async def huge_pass(user: User, run: str) -> Any:
    promise = await user.forward_backward(run, 1, *HUGE)
    await user.step(run, 2)
    return promise


async def losses(user: User, run: str, promise: Any) -> list[float]:
    """Of the huge pass, and of one after its step."""
    return [(await user.result(promise)).metrics["loss:sum"], await user.loss(run, 3)]


async def alone(home: Path) -> list[float]:
    async with serving(home) as service:
        user = User(service)
        run = await user.run()
        return await losses(user, run, await huge_pass(user, run))


async def test_passes_and_barriers_of_others_run_between_two_micro_batches(home: Path, tmp_path: Path):
    expected, engines = await alone(tmp_path / "alone"), list[Held]()
    async with serving(home, keeping(engines), engine=TOKENS) as service:
        big, small = User(service, "big"), User(service, "small")
        flood, run, twin = await big.run(), await small.run(), await small.run()
        promise = await huge_pass(big, flood)
        await asyncio.to_thread(engines[0].arrived.wait, 30)
        training = asyncio.create_task(small.train(run, 1, 1))
        saving = asyncio.create_task(small.save(twin, 1, "between"))
        await until(lambda: len(small.service.futures.pending(run)) == 2)
        await until(lambda: small.service.futures.pending(twin))
        engines[0].go.set()
        assert await losses(big, flood, promise) == expected
        await training
        await saving
    [engine] = engines
    third = [n for n, command in enumerate(engine.did) if isinstance(command, ContinuePasses)][3]
    assert engine.first(ForwardBackward, run) < third
    assert engine.first(OptimStep, run) < third
    assert engine.first(SaveAdapter, twin) < third


async def test_a_stop_does_not_wait_for_a_pass_under_way(home: Path, tmp_path: Path):
    expected, engines = await alone(tmp_path / "alone"), list[Held]()
    async with serving(home, keeping(engines), engine=TOKENS) as service:
        user = User(service)
        run = await user.run()
        promise = await huge_pass(user, run)
        await asyncio.to_thread(engines[0].arrived.wait, 30)
        asyncio.get_running_loop().call_later(0.05, engines[0].go.set)
    assert engines[0].continued() < MICRO_BATCHES / 2
    async with serving(home) as service:
        assert await losses(User(service), run, promise) == expected


async def test_a_forward_under_way_is_not_covered_by_the_snapshot_of_a_stop(home: Path):
    engines = list[Held]()
    async with serving(home, keeping(engines), engine=TOKENS) as service:
        user = User(service)
        run = await user.run()
        await user.train(run, 1, 1)
        promise = await user.forward_backward(run, 3, *HUGE, forward_only=True)
        await asyncio.to_thread(engines[0].arrived.wait, 30)
        asyncio.get_running_loop().call_later(0.05, engines[0].go.set)
    async with serving(home) as service:
        user = User(service)
        assert len((await user.result(promise)).loss_fn_outputs) == MICRO_BATCHES


@pytest.mark.parametrize("lost_at", [1, 5])
async def test_an_engine_that_is_lost_with_passes_of_two_owners_under_way(
    home: Path, tmp_path: Path, lost_at: int
):
    expected, engines = await alone(tmp_path / "alone"), list[Held]()
    async with serving(home, keeping(engines, lost_at=lost_at), engine=TOKENS) as service:
        ann, bob = User(service, "ann"), User(service, "bob")
        first, second = await ann.run(), await bob.run()
        engines[0].go.set()
        promises = [await huge_pass(ann, first), await huge_pass(bob, second)]
        assert await losses(ann, first, promises[0]) == expected
        assert await losses(bob, second, promises[1]) == expected
    assert len(engines) == 2


# -- the scheduler -----------------------------------------------------------------------------------------


def one_pass(run: str, seq_id: int, tokens: int) -> QueuedRequest:
    return QueuedRequest(run, seq_id, f"{run}/{seq_id}", is_pass=True, tokens=tokens)


def opened(*runs: str) -> Scheduler:
    scheduler = Scheduler()
    for run in runs:
        scheduler.open(run, f"owner of {run}")
    return scheduler


def test_a_small_pass_does_not_join_the_batch_of_a_large_one():
    scheduler = opened("small", "big", "peer")
    for run, tokens in (("small", 250), ("big", 20_000), ("peer", 250)):
        scheduler.submit(one_pass(run, 1, tokens), 0.0)
    assert [work.run_id for work in scheduler.next_batch(0.0)] == ["small", "peer"]
    assert [work.run_id for work in scheduler.next_batch(0.0)] == ["big"]


@pytest.mark.parametrize("seconds", [0.5, 1.0, 1.5])
@pytest.mark.parametrize("passes", [1, 300], ids=["one huge pass", "many passes of a micro-batch"])
def test_a_closed_loop_of_small_passes_has_half_of_the_engine(passes: int, seconds: float):
    """A micro-batch is 1,000 tokens and takes `seconds`; the small owner comes back after 20 ms."""
    scheduler, now, spent, sent = opened("big", "small"), 0.0, {"big": 0.0, "small": 0.0}, 0
    for n in range(passes):
        scheduler.submit(one_pass("big", n + 1, 300_000 // passes), now)
    computed, arrives = dict[str, int](), 0.5
    while now < 120:
        if arrives <= now:
            sent += 1
            scheduler.submit(one_pass("small", sent, 250), arrives)
            arrives = float("inf")
        until = scheduler.wait_until(now)
        if until is not None and until > now:
            now = min(until, max(arrives, now))
            continue
        batch = scheduler.next_batch(now)
        [run] = {work.run_id for work in batch}
        total = sum(work.tokens for work in batch)
        done = computed[batch[0].request_id] = min(total, computed.get(batch[0].request_id, 0) + 1000)
        took = 0.25 if run == "small" else seconds
        now, spent[run] = now + took, spent[run] + took
        if done < total:
            scheduler.progressed(batch, done / total, now)
            continue
        for work in batch:
            scheduler.done(work, now)
        if run == "small":
            arrives = now + 0.02
    assert spent["small"] > 0.45 * now
    assert spent["big"] > 0.45 * now


def test_runs_of_one_owner_take_turns_too():
    scheduler = Scheduler()
    for run in ("big", "small"):
        scheduler.open(run, "me")
    scheduler.submit(one_pass("big", 1, 300_000), 0.0)
    huge = scheduler.next_batch(0.0)
    scheduler.submit(one_pass("small", 1, 10), 0.0)
    scheduler.progressed(huge, 0.01, 1.0)
    [small] = scheduler.next_batch(1.0)
    assert small.run_id == "small"
    scheduler.done(small, 1.1)
    assert scheduler.next_batch(1.1) is huge


def test_batches_of_a_lost_engine_are_forgotten():
    scheduler = opened("big")
    scheduler.submit(one_pass("big", 1, 300_000), 0.0)
    scheduler.progressed(scheduler.next_batch(0.0), 0.01, 1.0)
    scheduler.abandon()
    scheduler.close("big")
    assert scheduler.next_batch(1.0) == []


# -- samples -----------------------------------------------------------------------------------------------


async def test_a_flood_of_samples_leaves_room_for_another_owner(home: Path):
    """The engine answers nobody who asks for many, and yet another's sample comes at once."""
    inside, never = list[int](), asyncio.Event()

    class Stuck(FakeEngine):
        def __init__(self, config: EngineConfig) -> None:
            super().__init__(config)
            sample = self.sampler.sample

            async def stuck(work: SampleWork) -> SampleResponse:
                if work.num_samples > 1:
                    inside.append(work.num_samples)
                    await never.wait()
                return await sample(work)

            self.sampler.sample = stuck  # type: ignore[method-assign]

    async with serving(home, Stuck) as service:
        flood, small = User(service, "flood"), User(service, "small")
        many = await flood.sampler(await flood.session())
        for n in range(4):
            await flood.sample(many, n, num_samples=4096)
        await until(lambda: inside)
        sampler = await small.sampler(await small.session())
        for n in range(3):
            assert len((await small.result(await small.sample(sampler, n))).sequences) == 1
        assert sum(inside) < service.config.engine.max_batch
        assert max(inside) <= samplers.PART


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_request_in_parts_gives_what_it_would_give_whole(
    home: Path, monkeypatch: pytest.MonkeyPatch, streamed: bool
):
    async with serving(home) as service:
        user = User(service)
        sampler = await user.sampler(await user.session())
        prompt, params = ModelInput.from_ints([5, 6, 7]), SamplingParams(max_tokens=4, seed=3)
        answers = list[SampleResponse]()
        pieces = list[dict[int, list[int]]]()
        for n, part in enumerate((4096, 3)):
            monkeypatch.setattr(samplers, "PART", part)
            request = SampleRequest(prompt, params, 20, sampler, n, prompt_logprobs=True)
            if streamed:
                drawn: dict[int, list[int]] = {}
                async for event in SampleEvents(service.samplers, request, user.caller):
                    if isinstance(event, NewTokens):
                        drawn.setdefault(event.sequence, []).extend(event.tokens)
                    elif isinstance(event, SampleResponse):
                        answers.append(event)
                pieces.append(drawn)
            else:
                answers.append(await user.result(await user.call(ops.SAMPLE, request)))
        whole, parts = answers
        assert [one.tokens for one in parts.sequences] == [one.tokens for one in whole.sequences]
        assert [one.logprobs for one in parts.sequences] == [one.logprobs for one in whole.sequences]
        assert parts.prompt_logprobs == whole.prompt_logprobs
        assert len({tuple(one.tokens) for one in parts.sequences}) > 1
        if streamed:
            assert pieces[0] == pieces[1] == {n: one.tokens for n, one in enumerate(whole.sequences)}

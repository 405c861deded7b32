"""An engine that is lost is replaced: runs go on from snapshot and journal, and clients see nothing of it."""

from __future__ import annotations

import gc
import time
import weakref
from pathlib import Path
from typing import Any

import pytest

from tests.service.harness import MODEL, Failed, User, datum, serving, until
from tinkex.engine.fake import FakeEngine
from tinkex.engine.protocol import EngineConfig, EngineLost, ForwardBackward, OptimStep
from tinkex.errors import ModelError
from tinkex.service.refusal import Refusal
from tinkex.service.served_models import MAX_LOSSES
from tinkex.types.config import EmptyRequest
from tinkex.wire import ops

pytestmark = [pytest.mark.anyio, pytest.mark.slow]


class Mortal(FakeEngine):
    """Is lost at the commands of type `kind` whose numbers, counted over all engines, are in `deaths`."""

    kind: type = ForwardBackward
    deaths: frozenset[int] = frozenset()
    seen = 0
    built = 0

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        Mortal.built += 1
        execute = self.trainer._execute

        def maybe(command: Any) -> Any:
            if isinstance(command, Mortal.kind):
                Mortal.seen += 1
                if Mortal.seen in Mortal.deaths:
                    self.close()
                    raise EngineLost("the device fell off the bus")
            return execute(command)

        self.trainer._execute = maybe  # type: ignore[method-assign]


@pytest.fixture(autouse=True)
def _alive() -> None:
    Mortal.kind, Mortal.deaths, Mortal.seen, Mortal.built = ForwardBackward, frozenset(), 0, 0


async def losses_of(home: Path, steps: int) -> list[float]:
    async with serving(home, Mortal, snapshot_steps=2) as service:
        user = User(service)
        run = await user.run()
        return await user.train(run, 1, steps) + [await user.loss(run, 1 + 2 * steps)]


@pytest.mark.parametrize("kind", [ForwardBackward, OptimStep])
async def test_pipelined_runs_go_on_with_a_new_engine(tmp_path: Path, kind: type):
    expected = await losses_of(tmp_path / "calm", 9)
    _count(kind, 3, 8)
    assert await losses_of(tmp_path / "lost", 9) == expected
    assert Mortal.built == 1 + 1 + 2  # of the calm home, of this one, and two replacements


def _count(kind: type, *deaths: int) -> None:
    Mortal.kind, Mortal.deaths, Mortal.seen = kind, frozenset(deaths), 0


async def test_runs_of_other_users_come_back_when_they_are_asked_for(home: Path):
    async with serving(home, Mortal) as service:
        ann, bob = User(service, "ann"), User(service, "bob")
        idle, twin, busy = await ann.run(), await ann.run(), await bob.run(seed=2)
        await ann.train(idle, 1, 2)
        await ann.train(twin, 1, 2)
        _count(ForwardBackward, 1)
        await bob.train(busy, 1, 1)
        assert service.ledger.run(idle).state == "evicted"  # type: ignore[union-attr]
        assert await ann.train(idle, 5, 2) == await ann.train(twin, 5, 2)


async def test_a_sample_is_drawn_again(home: Path):
    async with serving(home, Mortal) as service:
        user = User(service)
        run = await user.run()
        sampler = await user.unnamed_sampler(run, 1, 0)
        first = await user.result(await user.sample(sampler, 0))
        engine = service.models.find(MODEL).engine
        assert engine is not None
        engine.close()
        again = await user.result(await user.sample(sampler, 1))
        assert again.sequences[0].tokens == first.sequences[0].tokens
        assert Mortal.built == 2
        assert (await user.call(ops.GET_HEALTH, EmptyRequest())).status == "ok"


async def test_training_goes_on_when_a_sample_noticed_first(home: Path):
    async with serving(home, Mortal) as service:
        user = User(service)
        run, twin = await user.run(), await user.run()
        losses = await user.train(run, 1, 2)
        assert await user.train(twin, 1, 2) == losses
        engine = service.models.find(MODEL).engine
        assert engine is not None
        engine.close()
        await user.result(await user.sample(await user.sampler(run.split(":")[0])))
        assert await user.train(run, 5, 2) == await user.train(twin, 5, 2)
        assert Mortal.built == 2


async def test_a_model_that_keeps_losing_its_engine_is_given_up(home: Path):
    async with serving(home, Mortal) as service:
        user = User(service)
        run = await user.run()
        _count(ForwardBackward, *range(1, 100))
        with pytest.raises(
            Failed, match="was lost: the device fell off the bus; restart the server"
        ) as failed:
            await user.result(await user.forward_backward(run, 1, datum(0)))
        assert failed.value.category == "server"
        assert Mortal.built == MAX_LOSSES
        with pytest.raises(Refusal, match="was lost") as sick:
            await user.call(ops.GET_HEALTH, EmptyRequest())
        assert sick.value.status == 503


async def test_requests_that_arrive_meanwhile_are_answered(home: Path):
    async with serving(home, Mortal) as service:
        user = User(service)
        run, twin = await user.run(), await user.run()
        _count(ForwardBackward, 1)
        first = await user.forward_backward(run, 1, datum(0))
        model = service.models.find(MODEL)
        await until(lambda: model.was_loaded and Mortal.seen)
        await user.step(run, 2)
        second = await user.forward_backward(run, 3, datum(1))
        losses = [(await user.result(promise)).metrics["loss:sum"] for promise in (first, second)]
        assert losses == await user.train(twin, 1, 2)


async def test_a_model_that_cannot_be_reloaded_corrupts_no_run(home: Path):
    away = False

    def build(config: EngineConfig) -> Mortal:
        if away:
            raise ModelError("the directory of models is not mounted")
        return Mortal(config)

    async with serving(home, build) as service:
        user = User(service)
        run = await user.run()
        twin = await user.run()
        losses = await user.train(run, 1, 2)
        assert await user.train(twin, 1, 2) == losses
        away = True
        engine = service.models.find(MODEL).engine
        assert engine is not None
        engine.close()
        with pytest.raises(Failed, match="not mounted") as failed:
            await user.result(await user.forward_backward(run, 5, datum(0)))
        assert failed.value.category == "server"
        row = service.ledger.run(run)
        assert row is not None
        assert not row.corrupted
    away = False
    async with serving(home, build) as service:
        user = User(service)
        assert (await user.train(twin, 5, 2))[0] > 0


async def test_a_lost_engine_is_freed_before_the_next_is_built(home: Path):
    engines: list[weakref.ref[Mortal]] = []

    def build(config: EngineConfig) -> Mortal:
        patience = time.monotonic() + 10  # for what the event loop is just finishing on the lost engine
        while any(engine() for engine in engines):
            assert time.monotonic() < patience, "the lost engine is still referenced"
            time.sleep(0.05)
            gc.collect()
        engine = Mortal(config)
        engines.append(weakref.ref(engine))
        return engine

    async with serving(home, build) as service:
        user = User(service)
        run = await user.run()
        await user.train(run, 1, 1)
        await user.loss(run, 3)  # the step before it is done: nothing is being executed
        service.models.find(MODEL).engine.close()  # type: ignore[union-attr]
        await user.result(await user.sample(await user.sampler(run.split(":")[0])))
        await user.train(run, 4, 1)
        assert len(engines) == 2


async def test_no_engine_is_built_for_a_service_that_ends(home: Path):
    async with serving(home, Mortal) as service:
        user = User(service)
        run = await user.run()
        service.models.begin_closing()
        service.models.find(MODEL).engine.close()  # type: ignore[union-attr]
        with pytest.raises(Failed, match="stopping"):
            await user.result(await user.sample(await user.sampler(run.split(":")[0])))
        assert Mortal.built == 1

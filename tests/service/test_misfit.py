"""A server that was once started with other weights under a base model's name costs no run its life."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.engine.tiny import tiny_model
from tests.service.harness import MODEL, Failed, User, datum, killed_copy, serving, until
from tinkex.engine.fake import FakeEngine
from tinkex.engine.protocol import EngineConfig, ForwardBackward, OptimStep, build_engine
from tinkex.service.refusal import Refusal
from tinkex.types import training
from tinkex.wire import ops

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

OTHER = {MODEL: "other"}


def holding(kind: type) -> tuple[type[FakeEngine], threading.Event]:
    """An engine that does no command of this kind before it is told to."""
    go_on = threading.Event()

    class Held(FakeEngine):
        def __init__(self, config: EngineConfig) -> None:
            super().__init__(config)
            run = self.trainer._execute

            def held(command: Any) -> Any:
                if isinstance(command, kind):
                    go_on.wait(60)
                return run(command)

            self.trainer._execute = held  # type: ignore[method-assign]

    return Held, go_on


async def corrupted(user: User, run: str) -> bool:
    request = training.GetTrainingRunRequest(training_run_id=run)
    return (await user.call(ops.GET_TRAINING_RUN, request)).corrupted


async def test_runs_come_back_with_the_weights_that_they_were_made_with(home: Path, tmp_path: Path):
    """Two runs: one with a snapshot, which the other model cannot load, and one which it could replay."""
    shape = {"family": "llama3", "vocab_size": 320}
    right = {MODEL: str(tiny_model(tmp_path / "right", **shape))}
    wrong = {MODEL: str(tiny_model(tmp_path / "wrong", **shape, num_hidden_layers=1))}
    torch: dict[str, Any] = {"build": build_engine, "engine": EngineConfig("", device="cpu", threads=1)}
    async with serving(home, models=right, snapshot_steps=2, **torch) as service:
        user = User(service)
        kept, replayed = await user.run(), await user.run()
        await user.train(kept, 1, 3)
        await user.train(replayed, 1, 1)
        await until(lambda: service.runs.get(kept).journal.next_seq == 5)  # type: ignore[union-attr]
        expected = [await user.loss(kept, 7), await user.loss(replayed, 3)]
        copy = killed_copy(home)
    async with serving(copy, models=wrong, preload=True, **torch) as service:
        user = User(service)
        for run, seq_id in ((kept, 8), (replayed, 4)):
            with pytest.raises(Refusal, match=f"{run} was made with other weights than .* 'm/base'"):
                await user.loss(run, seq_id)
            assert not await corrupted(user, run)
    async with serving(copy, models=right, **torch) as service:
        user = User(service)
        assert [await user.loss(kept, 8), await user.loss(replayed, 4)] == expected


@pytest.mark.parametrize("preload", [True, False])
async def test_what_waited_is_done_once_the_right_model_is_there(home: Path, preload: bool):
    engine, go_on = holding(OptimStep)
    async with serving(home, engine) as service:
        user = User(service)
        run = await user.run()
        answered = await user.forward_backward(run, 1, datum(0))
        before = (await user.result(answered)).metrics
        waiting = [await user.step(run, 2), await user.forward_backward(run, 3, datum(0))]
        copy = killed_copy(home)
        go_on.set()
        expected = [(await user.result(promise)).metrics for promise in waiting]
    async with serving(copy, models=OTHER, preload=preload) as service:
        user = User(service)
        assert (await user.result(answered)).metrics == before
        for promise in waiting:
            with pytest.raises(Failed, match="start the server with those"):
                await user.result(promise)
        with pytest.raises(Refusal, match="other weights"):
            await user.step(run, 4)
        assert not await corrupted(user, run)
    async with serving(copy) as service:
        user = User(service)
        assert [(await user.result(promise)).metrics for promise in waiting] == expected
        await user.result(await user.step(run, 4))


async def test_what_waited_is_done_in_the_same_process_once_the_right_weights_are_there(home: Path):
    """Its failures were about the weights, and end with them."""
    engine, go_on = holding(OptimStep)
    async with serving(home, engine) as service:
        user = User(service)
        run = await user.run()
        await user.result(await user.forward_backward(run, 1, datum(0)))
        waiting = [await user.step(run, 2), await user.forward_backward(run, 3, datum(0))]
        copy = killed_copy(home)
        go_on.set()
        expected = [(await user.result(promise)).metrics for promise in waiting]
    weights = ["other"]
    async with serving(copy, lambda config: FakeEngine(replace(config, model=weights[0]))) as service:
        user, model = User(service), service.models.find(MODEL)
        for promise in waiting:
            with pytest.raises(Failed, match="start the server with those"):
                await user.result(promise)
        opened = service.runs.get(run)
        assert opened is not None
        assert await service.runs.evict(opened)
        weights[0] = "fake"
        model.lose_engine("it was replaced", model.engine)
        await user.result(await user.step(run, 4))
        assert [(await user.result(promise)).metrics for promise in waiting] == expected


async def test_a_server_that_cannot_load_its_model_fails_nothing_that_waits(home: Path):
    def missing(config: EngineConfig) -> FakeEngine:
        raise FileNotFoundError("there is no such model")

    engine, go_on = holding(ForwardBackward)
    async with serving(home, engine) as service:
        user = User(service)
        run = await user.run()
        waiting = [await user.forward_backward(run, 1), await user.step(run, 2)]
        copy = killed_copy(home)
        go_on.set()
    with pytest.raises(Refusal, match="no such model"):
        async with serving(copy, missing, preload=True):
            pass
    async with serving(copy) as service:
        for promise in waiting:
            assert (await User(service).result(promise)).metrics

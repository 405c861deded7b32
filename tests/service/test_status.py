"""What listings say of runs and samplers that failed, were interrupted or never were."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.service.harness import MODEL, Failed, User, serving
from tinkex.engine.fake import FakeEngine
from tinkex.engine.protocol import Engine, EngineConfig, build_engine
from tinkex.errors import InvalidInputError
from tinkex.service import home as home_module
from tinkex.service.refusal import Refusal
from tinkex.types import sessions, training
from tinkex.types.params import LoraConfig
from tinkex.wire import ops

pytestmark = pytest.mark.anyio


async def shown(user: User, run: str) -> training.TrainingRun:
    return await user.call(ops.GET_TRAINING_RUN, training.GetTrainingRunRequest(training_run_id=run))


def creating(session: str, number: int = 0) -> training.CreateModelRequest:
    return training.CreateModelRequest(
        session_id=session, model_seq_id=number, base_model=MODEL, lora_config=LoraConfig(4, 1)
    )


def refuse(config: EngineConfig) -> Engine:
    raise InvalidInputError("MambaForCausalLM is not supported")


async def test_a_run_that_could_not_be_made_says_why_after_a_restart_too(home: Path):
    async with serving(home, refuse) as service:
        user = User(service)
        session = await user.session()
        with pytest.raises(Failed, match="MambaForCausalLM is not supported") as failed:
            await user.result(await user.call(ops.CREATE_MODEL, creating(session)))
        assert failed.value.category == "user"
        before = await shown(user, f"{session}:train:0")
    assert (before.corrupted, before.status) == (True, "failed")
    assert "MambaForCausalLM is not supported" in (before.status_reason or "")
    async with serving(home) as service:
        again = await shown(User(service), f"{session}:train:0")
        assert again.status_reason == before.status_reason


async def test_a_run_whose_creation_was_not_accepted_is_not_listed(
    home: Path, monkeypatch: pytest.MonkeyPatch
):
    async with serving(home) as service:
        user = User(service)
        session = await user.session()
        with monkeypatch.context() as full:
            full.setattr(home_module, "DISK_RESERVE", 1 << 60)
            with pytest.raises(Refusal, match="disk is full"):
                await user.call(ops.CREATE_MODEL, creating(session))
        listed = await user.call(ops.LIST_TRAINING_RUNS, training.ListTrainingRunsRequest())
        assert listed.training_runs == []
        assert (await user.result(await user.call(ops.CREATE_MODEL, creating(session)))).model_id


async def test_a_run_is_running_until_its_session_ends_and_then_says_how(user: User):
    ends = {
        "finished": sessions.ClientSessionFinishSuccess(),
        "interrupted": sessions.ClientSessionFinishInterrupted(),
        "failed": sessions.ClientSessionFinishErrored(),
    }
    for status, reason in ends.items():
        run = await user.run()
        assert (await shown(user, run)).status == "running"
        request = sessions.FinishSessionRequest(session_id=run.split(":")[0], reason=reason)
        await user.call(ops.FINISH_SESSION, request)
        ended = await shown(user, run)
        assert (ended.status, ended.corrupted) == (status, False)


async def test_a_run_whose_process_ended_was_interrupted(home: Path):
    async with serving(home, resume=False) as service:
        run = await User(service).run()
    async with serving(home, resume=False) as service:
        left = await shown(User(service), run)
        assert (left.status, left.status_reason) == ("interrupted", "its process has ended")


async def test_a_sampler_whose_model_cannot_be_loaded_is_not_listed(home: Path):
    broken = True

    def build(config: EngineConfig) -> Engine:
        return refuse(config) if broken else FakeEngine(config)

    async with serving(home, build) as service:
        user = User(service)
        session = await user.session()
        sampler = await user.sampler(session)
        with pytest.raises(Failed, match="not supported") as failed:
            await user.result(await user.sample(sampler))
        assert failed.value.category == "user"
        request = sessions.GetSessionRequest(session_id=session)
        assert (await user.call(ops.GET_SESSION, request)).sampler_ids == []
        broken = False
        await user.result(await user.sample(sampler, 1))
        assert (await user.call(ops.GET_SESSION, request)).sampler_ids == [sampler]


async def test_a_broken_model_directory_is_the_users_mistake(home: Path, tmp_path: Path):
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text("{")
    engine = EngineConfig(model="", device="cpu")
    async with serving(home, build_engine, models={MODEL: str(directory)}, engine=engine) as service:
        user = User(service)
        with pytest.raises(Failed, match="not valid JSON") as failed:
            await user.result(await user.call(ops.CREATE_MODEL, creating(await user.session())))
        assert failed.value.category == "user"

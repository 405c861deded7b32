"""Every operation is offered, and what belongs to someone else is not there."""

from __future__ import annotations

import json
import resource
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import pytest

from tests.service.harness import MODEL, Failed, User, datum, serving, usage_of_run
from tinkex.engine.fake import FakeEngine
from tinkex.engine.protocol import CheckLoss, EngineConfig, EngineError
from tinkex.service import run_metrics
from tinkex.service.rows import Scope
from tinkex.service.service import Service
from tinkex.types import (
    checkpoints,
    config,
    futures,
    reports,
    sampling,
    sessions,
    training,
)
from tinkex.types.data import ForwardBackwardInput, ModelInput
from tinkex.types.params import AdamParams, SamplingParams
from tinkex.wire import ops

pytestmark = pytest.mark.anyio

# What the server answers by itself, because it is about keys.
SERVERS = {"get_auth_token", "get_api_key", "delete_api_key"}


async def test_every_operation_has_a_method(service: Service):
    assert set(service._methods) == set(ops.OPS.values())
    assert set(ops.OPS) >= SERVERS


@pytest.mark.parametrize("name", sorted(SERVERS))
async def test_a_service_has_no_keys(user: User, name: str):
    assert await user.status_of(ops.OPS[name], config.EmptyRequest()) == 404


async def test_a_service_describes_itself(user: User):
    await user.run()
    capabilities = await user.call(ops.GET_SERVER_CAPABILITIES, config.EmptyRequest())
    assert [(m.model_name, m.max_context_length) for m in capabilities.supported_models] == [(MODEL, 64)]
    assert (await user.call(ops.GET_HEALTH, config.EmptyRequest())).status == "ok"
    settings = await user.call(ops.GET_CLIENT_CONFIG, config.ClientConfigRequest(sdk_version="0.36.0"))
    assert settings.custom_loss_server_side
    assert not settings.sample_use_retrieve_futures  # a poll for each: the result comes with it
    dynamic = await user.call(ops.GET_DYNAMIC_CONFIG, config.ClientConfigRequest(sdk_version="0.36.0"))
    assert dynamic.sample_cancel_enabled
    sent = reports.TelemetrySendRequest(events=[], platform="", sdk_version="", session_id="x")
    assert (await user.call(ops.SEND_TELEMETRY, sent)).status == "accepted"


class Belongings:
    """One of everything that a user can have."""

    def __init__(self, session: str, run: str, sampler: str, path: str, request_id: str) -> None:
        self.session, self.run, self.sampler, self.path, self.request_id = (
            session,
            run,
            sampler,
            path,
            request_id,
        )

    @classmethod
    async def make(cls, user: User) -> Belongings:
        session = await user.session()
        run = await user.run(session)
        promise = await user.forward_backward(run, 1)
        path = await user.save_for_sampler(run, 2, "s")
        return cls(session, run, await user.sampler(session), path, promise.request_id)

    def requests(self):
        """Every way to touch them, and how it is asked."""
        one = {"training_run_id": self.run, "checkpoint_id": "sampler_weights/s"}
        checkpoint = checkpoints.CheckpointRequest(**one)
        work = ForwardBackwardInput([datum()], "cross_entropy")
        named = {"model_id": self.run, "seq_id": 9, "path": "x"}
        prompt = ModelInput.from_ints([1])
        graph = training.CustomLossGraph(nodes=[])
        target = futures.SamplingSessionFuturesTarget(sampling_session_id=self.sampler)
        done = sessions.ClientSessionFinishSuccess()
        yield (
            ops.CREATE_MODEL,
            training.CreateModelRequest(session_id=self.session, model_seq_id=7, base_model=MODEL),
        )
        yield ops.SESSION_HEARTBEAT, sessions.SessionHeartbeatRequest(session_id=self.session)
        yield ops.FINISH_SESSION, sessions.FinishSessionRequest(session_id=self.session, reason=done)
        yield ops.GET_SESSION, sessions.GetSessionRequest(session_id=self.session)
        yield (
            ops.ASSIGN_SESSION_PROJECT,
            sessions.AssignSessionProjectRequest(session_id=self.session, project_id="mine"),
        )
        yield ops.DELETE_SESSION, sessions.DeleteSessionRequest(session_id=self.session)
        yield ops.EXPORT_SESSION_TRACE, sessions.ExportSessionTraceRequest(session_id=self.session)
        yield (
            ops.CREATE_CUSTOM_LOSS,
            training.CreateCustomLossRequest(
                session_id=self.session, custom_loss_seq_id=0, name="l", inputs=[], graph=graph
            ),
        )
        yield ops.FORWARD_BACKWARD, training.ForwardBackwardRequest(work, self.run, 9)
        yield ops.FORWARD, training.ForwardBackwardRequest(work, self.run, 9)
        yield (
            ops.OPTIM_STEP,
            training.OptimStepRequest(model_id=self.run, seq_id=9, optim_params=AdamParams()),
        )
        yield ops.SAVE_WEIGHTS, checkpoints.SaveWeightsRequest(**named)
        yield ops.SAVE_WEIGHTS_FOR_SAMPLER, checkpoints.SaveWeightsForSamplerRequest(**named)
        yield ops.SAVE_WEIGHTS_EXTERNAL, checkpoints.SaveWeightsExternalRequest(**named)
        yield ops.LOAD_WEIGHTS, checkpoints.LoadWeightsRequest(**{**named, "path": self.path})
        yield ops.UNLOAD_MODEL, training.UnloadModelRequest(model_id=self.run)
        yield ops.GET_INFO, training.GetInfoRequest(model_id=self.run)
        yield ops.GET_TRAINING_RUN, training.GetTrainingRunRequest(training_run_id=self.run)
        yield ops.GET_RUN_METRICS, training.GetTrainingRunRequest(training_run_id=self.run)
        yield ops.LOG_RUN_METRICS, training.LogRunMetricsRequest(training_run_id=self.run, metrics={"a": 1})
        yield ops.UPDATE_RUN, training.UpdateRunRequest(training_run_id=self.run, name="mine now")
        yield ops.DELETE_RUN, training.DeleteRunRequest(training_run_id=self.run, checkpoints=True)
        yield ops.LIST_CHECKPOINTS, checkpoints.ListCheckpointsRequest(training_run_id=self.run)
        yield ops.PUBLISH_CHECKPOINT, checkpoint
        yield ops.UNPUBLISH_CHECKPOINT, checkpoint
        yield ops.SET_CHECKPOINT_TTL, checkpoints.SetCheckpointTTLRequest(**one, ttl_seconds=None)
        yield ops.DELETE_CHECKPOINT, checkpoint
        yield ops.GET_CHECKPOINT_ARCHIVE_URL, checkpoint
        yield ops.GET_EXTERNAL_WEIGHTS_URLS, checkpoint
        yield ops.GET_WEIGHTS_INFO, checkpoints.WeightsInfoRequest(tinker_path=self.path)
        yield (
            ops.CREATE_SAMPLING_SESSION,
            sampling.CreateSamplingSessionRequest(
                session_id=self.session, sampling_session_seq_id=5, base_model=MODEL
            ),
        )
        yield ops.JOIN_SAMPLING_SESSION, sampling.JoinSamplingSessionRequest(sampling_session_id=self.sampler)
        yield ops.GET_SAMPLER, sampling.GetSamplerRequest(sampler_id=self.sampler)
        yield (
            ops.SAMPLE,
            sampling.SampleRequest(
                prompt, SamplingParams(max_tokens=1), sampling_session_id=self.sampler, seq_id=0
            ),
        )
        yield ops.RETRIEVE_FUTURE, futures.FutureRetrieveRequest(self.request_id)
        yield ops.RETRIEVE_FUTURES, futures.FuturesRetrieveRequest(target=target, timeout=0)
        yield (
            ops.COPY_WEIGHTS,
            checkpoints.CopyWeightsRequest(source_path=self.path, destination_project_id="mine"),
        )


ABOUT_NOTHING = {
    "get_tokenizer_file",
    "get_client_config", "get_dynamic_config", "get_health", "get_server_capabilities", "send_telemetry",
    "create_session", "search_sessions", "list_sessions", "list_training_runs", "list_user_checkpoints",
    "get_audit_log", "get_billing_usage", "get_current_checkpoint_storage_usage", "cancel_future",
    "upload_weights", "import_weights",  # an upload is found under its own user alone: test_imports.py
} | SERVERS  # fmt: skip


async def test_another_users_things_do_not_exist(service: Service):
    ann, bob = User(service, "ann"), User(service, "bob")
    things = await Belongings.make(ann)
    asked = list(things.requests())
    assert {op.name for op, _ in asked} | ABOUT_NOTHING == set(ops.OPS)
    for op, request in asked:
        # A request id of another's is as unknown as any: clients act on 410.
        assert await bob.status_of(op, request) == (410 if op is ops.RETRIEVE_FUTURE else 404), op.name
    never = futures.FutureRetrieveRequest("never:train:0#1")
    assert await bob.status_of(ops.RETRIEVE_FUTURE, never) == 410
    # and nothing was changed by asking
    assert (
        await ann.status_of(ops.GET_WEIGHTS_INFO, checkpoints.WeightsInfoRequest(tinker_path=things.path))
        == 200
    )
    assert await ann.loss(things.run, 3) > 0


async def test_another_users_things_are_in_no_list(service: Service):
    ann, bob = User(service, "ann"), User(service, "bob")
    await Belongings.make(ann)
    later = datetime.now(UTC) + timedelta(days=1)
    usage = reports.GetBillingUsageRequest(starting_on=later - timedelta(days=2), ending_before=later)

    async def counts(user: User) -> list[int]:
        storage = reports.GetCurrentCheckpointStorageUsageRequest()
        return [
            len((await user.call(ops.LIST_SESSIONS, sessions.ListSessionsRequest())).sessions),
            len((await user.call(ops.SEARCH_SESSIONS, sessions.SessionSearchRequest())).sessions),
            len((await user.call(ops.LIST_TRAINING_RUNS, training.ListTrainingRunsRequest())).training_runs),
            len(
                (
                    await user.call(ops.LIST_USER_CHECKPOINTS, checkpoints.ListUserCheckpointsRequest())
                ).checkpoints
            ),
            len((await user.call(ops.GET_AUDIT_LOG, reports.AuditLogRequest())).entries),
            len((await user.call(ops.GET_BILLING_USAGE, usage)).data),
            len((await user.call(ops.GET_CURRENT_CHECKPOINT_STORAGE_USAGE, storage)).data),
        ]

    assert all(counted >= 1 for counted in await counts(ann))
    assert await counts(bob) == [0] * 7


async def test_cancelling_another_users_sample_does_nothing(service: Service):
    ann, bob = User(service, "ann"), User(service, "bob")
    sampler = await ann.sampler(await ann.session())
    promise = await ann.sample(sampler, max_tokens=50, stop=[])
    await bob.call(ops.CANCEL_FUTURE, futures.CancelFutureRequest(request_id=promise.request_id))
    assert len((await ann.result(promise)).sequences[0].tokens) == 50


async def test_a_published_checkpoint_can_be_read_by_all_and_changed_by_its_owner(service: Service):
    ann, bob = User(service, "ann"), User(service, "bob")
    things = await Belongings.make(ann)
    one = checkpoints.CheckpointRequest(training_run_id=things.run, checkpoint_id="sampler_weights/s")
    for _ in range(2):  # a repeated publish is not an error
        await ann.call(ops.PUBLISH_CHECKPOINT, one)
    assert (
        await bob.status_of(ops.GET_WEIGHTS_INFO, checkpoints.WeightsInfoRequest(tinker_path=things.path))
        == 200
    )
    run = await bob.run()
    await bob.load(run, 1, things.path, optimizer=False)
    sampler = await bob.sampler(await bob.session(), path=things.path)
    await bob.result(await bob.sample(sampler))
    for op in (ops.DELETE_CHECKPOINT, ops.UNPUBLISH_CHECKPOINT, ops.PUBLISH_CHECKPOINT):
        assert await bob.status_of(op, one) == 404
    await ann.call(ops.UNPUBLISH_CHECKPOINT, one)
    assert (
        await bob.status_of(ops.GET_WEIGHTS_INFO, checkpoints.WeightsInfoRequest(tinker_path=things.path))
        == 404
    )


async def test_a_weights_access_token_opens_one_runs_checkpoints(service: Service):
    ann, bob = User(service, "ann"), User(service, "bob")
    things, others = await Belongings.make(ann), await Belongings.make(ann)
    service.access._opened_by = lambda token: things.run if token == "good" else None
    run = await bob.run()
    await bob.load(run, 1, things.path, optimizer=False, weights_access_token="good")
    for path, token in ((things.path, "bad"), (others.path, "good")):
        request = checkpoints.LoadWeightsRequest(
            model_id=run, seq_id=2, path=path, optimizer=False, weights_access_token=token
        )
        assert await bob.status_of(ops.LOAD_WEIGHTS, request) == 404


async def test_a_project_is_read_by_its_members_and_used_by_owners(service: Service):
    ann, bob, eve = (
        User(service, name, project) for name, project in (("ann", "p"), ("bob", "p"), ("eve", "q"))
    )
    things = await Belongings.make(ann)
    get = sessions.GetSessionRequest(session_id=things.session)
    assert await bob.status_of(ops.GET_SESSION, get) == 200
    assert await eve.status_of(ops.GET_SESSION, get) == 404
    accessible = training.ListTrainingRunsRequest(access_scope="accessible")
    assert len((await bob.call(ops.LIST_TRAINING_RUNS, accessible)).training_runs) == 1
    assert len((await eve.call(ops.LIST_TRAINING_RUNS, accessible)).training_runs) == 0
    done = sessions.ClientSessionFinishSuccess()
    assert (
        await bob.status_of(
            ops.FINISH_SESSION, sessions.FinishSessionRequest(session_id=things.session, reason=done)
        )
        == 404
    )
    step = training.OptimStepRequest(model_id=things.run, seq_id=3, optim_params=AdamParams())
    assert await bob.status_of(ops.OPTIM_STEP, step) == 404
    # nobody puts anything into a project that is not theirs
    assert await eve.status_of(ops.CREATE_SESSION, sessions.CreateSessionRequest(project_id="p")) == 404


async def test_what_a_run_saves_after_its_session_moved_is_in_the_new_project(service: Service):
    ann, bob = User(service, "ann"), User(service, "bob", "p")
    run = await ann.run()
    session = run.split(":")[0]
    await ann.train(run, 1, 1)
    move = sessions.AssignSessionProjectRequest(session_id=session, project_id="p")
    await ann.call(ops.ASSIGN_SESSION_PROJECT, move)
    path = await ann.save(run, 3, "c")
    info = checkpoints.WeightsInfoRequest(tinker_path=path)
    assert await bob.status_of(ops.GET_WEIGHTS_INFO, info) == 200


async def test_a_clock_that_is_set_back_takes_nothing_from_what_was_stored(
    service: Service, monkeypatch: pytest.MonkeyPatch
):
    user = User(service)
    await user.save(await user.run(), 1, "c")
    clock = time.time
    monkeypatch.setattr(time, "time", lambda: clock() - 24 * 3600.0)
    service.billing.count_storage()
    stored = [row.amount for row in service.ledger.usage(0, 2**40, Scope(None)) if row.kind == "storage"]
    assert stored
    assert min(stored) >= 0


async def test_usage_counts_tokens_by_kind(service: Service):
    user = User(service)
    session = await user.session(user_metadata={"name": "it"})
    run = await user.run(session)
    await user.result(await user.forward_backward(run, 1, datum(length=6), datum(length=6)))
    sampler = await user.sampler(session)
    await user.result(await user.sample(sampler, prompt=(5, 6, 7), max_tokens=4, stop=[], num_samples=2))
    now = datetime.now(UTC)
    request = reports.GetBillingUsageRequest(starting_on=now - timedelta(hours=2), ending_before=now)
    usage = await user.call(ops.GET_BILLING_USAGE, request)
    counted = {
        event.event_info.type: event.event_info.token_count
        for event in usage.data
        if hasattr(event.event_info, "token_count")
    }
    assert counted == {"training": 12, "sampling_prefill": 3, "sampling_sample": 8}
    assert usage.sessions[session].user_metadata == {"name": "it"}
    assert {(event.user_id, event.base_model) for event in usage.data} == {("ann", MODEL)}
    for of in (await user.unnamed_sampler(run, 2, 5), await user.save_for_sampler(run, 3, "named")):
        adapted = await user.sampler(session, 6, of) if of.startswith("tinker:") else of
        await user.result(await user.sample(adapted, prompt=(5, 6), max_tokens=1))
    used = usage_of_run(service, run)
    assert used == {"training": 12, "sampling_prefill": 4, "sampling_sample": 2, "checkpoint": 1}
    assert (await User(service, "bob").call(ops.GET_BILLING_USAGE, request)).data == []


def _read(url: str) -> dict:
    return json.loads(Path(urlparse(url).path).read_text())


async def test_a_trace_shows_what_was_done(service: Service):
    user = User(service)
    session = await user.session()
    run = await user.run(session)
    await user.train(run, 1, 2)
    await user.result(await user.sample(await user.sampler(session)))
    reply = await user.call(ops.EXPORT_SESSION_TRACE, sessions.ExportSessionTraceRequest(session_id=session))
    assert reply.status == "ready"
    events = _read(reply.url)["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert [s["name"] for s in spans].count("forward_backward") == 2
    assert {"create_model", "optim_step", "sample"} <= {span["name"] for span in spans}
    assert all(span["dur"] >= 0 for span in spans)


async def test_a_long_history_loses_every_second_line_and_never_the_last(
    service: Service, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(run_metrics, "MAX_BYTES", 4000)
    user = User(service)
    run = await user.run()
    await user.train(run, 1, 40)
    await user.loss(run, 81)  # after the last step
    asking = training.GetTrainingRunRequest(training_run_id=run)
    lines = (await user.call(ops.GET_RUN_METRICS, asking)).splitlines()
    steps = [json.loads(line)["step"] for line in lines]
    assert steps[-1] == 40
    assert steps == sorted(set(steps))
    assert 4 < len(steps) < 20
    assert sum(map(len, lines)) <= 4000


async def test_half_a_line_that_a_full_disk_took_spoils_no_other(
    service: Service, monkeypatch: pytest.MonkeyPatch
):
    """A limit on the size of files cuts a write off in the middle, as a disk that fills up does."""
    user = User(service)
    run = await user.run()
    place = service.home.run_dir(run) / run_metrics.STEPS
    write, limits = service.metrics._write, resource.getrlimit(resource.RLIMIT_FSIZE)

    def cut_off(*args: Any) -> None:
        room = place.stat().st_size + 30 if place.exists() else 30
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))
        try:
            write(*args)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    await user.train(run, 1, 2)
    await user.loss(run, 5)  # the steps before it are done
    monkeypatch.setattr(service.metrics, "_write", cut_off)
    await user.train(run, 6, 1)
    await user.loss(run, 8)
    monkeypatch.undo()
    await user.train(run, 9, 1)
    await user.loss(run, 11)
    request = training.GetTrainingRunRequest(training_run_id=run)
    lines = (await user.call(ops.GET_RUN_METRICS, request)).splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 4]


async def test_nothing_is_kept_of_the_passes_of_a_run_that_has_ended(service: Service):
    user = User(service)
    session = await user.session()
    run = await user.run(session)
    await user.result(await user.forward_backward(run, 1))
    assert service.metrics._windows
    await user.finish(session)
    await service.upkeep.tick()
    assert not service.metrics._windows


async def test_an_uploaded_loss_is_looked_at(service: Service):
    user = User(service)
    session = await user.session()

    async def upload(number: int, **changes):
        placeholder = {"op": "placeholder", "name": "logprobs", "target": "logprobs"}
        total = {"op": "call_method", "name": "total", "target": "sum", "args": [{"ref": "logprobs"}]}
        out = {
            "op": "output",
            "name": "output",
            "target": "output",
            "args": [{"tuple": [{"ref": "total"}, {"dict": {}}]}],
        }
        fields = {"nodes": [placeholder, total, out], "inputs": [{"name": "logprobs", "rank": 1}], **changes}
        request = training.CreateCustomLossRequest(
            session_id=session, custom_loss_seq_id=number, name="mine", inputs=fields["inputs"],
            graph={"nodes": fields["nodes"]},
        )  # fmt: skip
        return await user.call(ops.CREATE_CUSTOM_LOSS, request)

    promise = await upload(0)
    assert (await user.result(promise)).loss_id == f"{session}:loss:0"
    assert (await upload(0)).request_id == promise.request_id
    output = {"op": "output", "name": "output", "target": "output", "args": [{"ref": "nowhere"}]}
    for number, nodes in enumerate(([], [output]), 1):
        bad = await upload(number, nodes=nodes)
        outcome = await user.call(ops.RETRIEVE_FUTURE, futures.FutureRetrieveRequest(bad.request_id))
        assert outcome.category == "user"
    service.drop_results([promise.request_id])  # as after a restart
    assert (await user.result(promise)).loss_id == f"{session}:loss:0"


class Choosy(FakeEngine):
    """An engine that has losses, but not all."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        execute = self.trainer._execute

        def choosy(command: Any) -> Any:
            for node in command.loss.nodes if isinstance(command, CheckLoss) else ():
                if node["target"] == "torch.load":
                    raise EngineError(
                        f"custom loss node {node['name']!r}: torch.load is not on the list", "user"
                    )
            return execute(command)

        self.trainer._execute = choosy  # type: ignore[method-assign]


async def test_what_no_engine_would_run_is_refused_at_the_upload(home: Path):
    nodes = [
        {"op": "placeholder", "name": "logprobs", "target": "logprobs"},
        {"op": "call_function", "name": "bad", "target": "torch.load", "args": [{"ref": "logprobs"}]},
        {"op": "output", "name": "output", "target": "output", "args": [{"tuple": [{"ref": "bad"}, {}]}]},
    ]
    async with serving(home, Choosy, preload=True) as service:
        user = User(service)
        request = training.CreateCustomLossRequest(
            session_id=await user.session(), custom_loss_seq_id=0, name="mine",
            inputs=[{"name": "logprobs", "rank": 1}], graph={"nodes": nodes},
        )  # fmt: skip
        with pytest.raises(Failed, match=r"node 'bad': torch\.load") as failed:
            await user.result(await user.call(ops.CREATE_CUSTOM_LOSS, request))
        assert failed.value.category == "user"
        assert service.ledger.custom_loss(f"{request.session_id}:loss:0") is None

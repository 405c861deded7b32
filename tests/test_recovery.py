"""Recovery against a stub that loses runs on command: detection, attempts and events."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.client.conftest import QUICK, close, datum, eventually, fast_retries
from tests.stub import Action, Stub, fail, status
from tinkex import (
    InvalidInputError,
    PassIncompleteError,
    RecoveryFailedError,
    RecoveryPolicy,
    RequestFailedError,
    RunLostError,
    ServiceClient,
    TrainingClient,
)
from tinkex.recovery import RecoveryAttempt, RecoveryGaveUp, RunLost, RunResumed, step_of
from tinkex.types import Checkpoint

DATA = [datum(3)]


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    for name in ("API_KEY", "BASE_URL", "CREDENTIAL_CMD"):
        monkeypatch.delenv(f"TINKER_{name}", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))


@pytest.fixture
def stub() -> Iterator[Stub]:
    with Stub() as server:
        yield server


@pytest.fixture
def service(stub: Stub) -> Iterator[ServiceClient]:
    client = ServiceClient(base_url=stub.url, timeouts=QUICK)
    fast_retries(client, lost_budget=0.2, status_budget=0.2)
    yield client
    close(client)


class Loop:
    """Ten steps, a checkpoint after every second; `lose` is called once, before step 5."""

    def __init__(self, service: ServiceClient, lose: Any, times: int = 1) -> None:
        self.service, self.lose, self.times = service, lose, times
        self.calls: list[tuple[str, int]] = []  # of which run, from which step
        self.steps: list[int] = []
        self.events: list[Any] = []

    def create(self) -> TrainingClient:
        return self.service.create_lora_training_client("stub/base", rank=4)

    def train(self, run: TrainingClient, step: int) -> str:
        self.calls.append((run.model_id, step))
        while step < 10:
            if step == 5 and self.times:
                self.times -= 1
                self.lose(run)
            passing = run.forward_backward(DATA, "cross_entropy")
            run.optim_step().result(10)
            passing.result(10)
            self.steps.append(step)
            step += 1
            if step % 2 == 0:
                run.save_state(f"step-{step:03d}").result(10)
        return "done"

    def policy(self, **options: Any) -> RecoveryPolicy:
        return RecoveryPolicy(backoff=0.01, on_event=self.events.append, **options)

    def run(self, *, checkpoint: str | None = None, **options: Any) -> str:
        return self.policy(**options).run(self.service, self.create, self.train, checkpoint=checkpoint)

    def kinds(self) -> list[type]:
        return [type(event) for event in self.events]


def forget(stub: Stub) -> Any:
    """Lose a run and its results, but not what it saved."""

    def lose(run: TrainingClient) -> None:
        stub._on_loop(lambda: stub.runs.pop(run.model_id))
        stub.script(
            "*", status(404), where=lambda r: r.op == "forward_backward" and run.model_id.encode() in r.body
        )

    return lose


def test_a_lost_run_goes_on_from_its_latest_checkpoint(stub: Stub, service: ServiceClient) -> None:
    loop = Loop(service, forget(stub))
    assert loop.run() == "done"
    (first, begun), (second, resumed) = loop.calls
    assert (begun, resumed) == (0, 4)
    assert loop.steps == [0, 1, 2, 3, 4, 4, 5, 6, 7, 8, 9]
    lost, attempt, back = loop.events
    assert (lost.run_id, type(lost.error)) == (first, PassIncompleteError)
    assert "the server does not know it" in str(lost)
    assert (attempt.attempt, attempt.delay) == (1, 0.0)
    path = f"tinker://{first}/weights/step-004"
    assert back == RunResumed(first, second, path, 4)
    assert str(back) == f"run {first} goes on as {second} from {path}, at step 4"
    loaded = stub.sent("load_weights")[-1].json
    assert (loaded["path"], loaded["optimizer"]) == (path, True)


def test_async(stub: Stub, service: ServiceClient) -> None:
    loop = Loop(service, forget(stub))

    async def create() -> TrainingClient:
        return await service.create_lora_training_client_async("stub/base", rank=4)

    async def train(run: TrainingClient, step: int) -> str:
        loop.calls.append((run.model_id, step))
        while step < 10:
            if step == 5 and loop.times:
                loop.times -= 1
                loop.lose(run)
            await (await run.forward_backward_async(DATA, "cross_entropy"))
            await (await run.optim_step_async())
            step += 1
            if step % 2 == 0:
                await (await run.save_state_async(f"{step:06d}"))
        return "done"

    assert asyncio.run(loop.policy().run_async(service, create, train)) == "done"
    assert [step for _, step in loop.calls] == [0, 4]
    assert loop.kinds() == [RunLost, RecoveryAttempt, RunResumed]


def corrupt(stub: Stub) -> Any:
    def lose(run: TrainingClient) -> None:
        known = {
            "training_run_id": run.model_id, "base_model": "stub/base", "model_owner": "me", "is_lora": True,
            "last_request_time": "2026-01-02T03:04:05Z", "corrupted": True,
        }  # fmt: skip
        stub.script("forward_backward", status(422), where=lambda r: run.model_id.encode() in r.body)
        stub.script(
            "*", status(200, body=known), where=lambda r: r.path.endswith(f"training_runs/{run.model_id}")
        )

    return lose


def end_session(stub: Stub) -> Any:
    def lose(run: TrainingClient) -> None:
        session = run.model_id.partition(":")[0]
        stub.script("forward_backward", status(422), where=lambda r: run.model_id.encode() in r.body)
        stub.script(
            "session_heartbeat", status(410), always=True, where=lambda r: r.json["session_id"] == session
        )

    return lose


def break_connection(stub: Stub) -> Any:
    def lose(run: TrainingClient) -> None:
        stub.stop()
        threading.Timer(0.4, stub.start).start()

    return lose


def lose_results(stub: Stub) -> Any:
    return lambda run: stub.script("retrieve_future", status(410))


def fail_as_server(stub: Stub) -> Any:
    return lambda run: stub.script("forward_backward", fail("the device fell over", "server"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "words"),
    [
        (corrupt, "could not restore it"),
        (end_session, "its session has ended"),
        (break_connection, "could not be used"),
        (lose_results, "was forgotten"),
        (fail_as_server, "failed a request"),
    ],
)
def test_what_is_noticed(stub: Stub, service: ServiceClient, how: Any, words: str) -> None:
    loop = Loop(service, how(stub))
    assert loop.run(attempts=20) == "done"
    assert words in str(loop.events[0])
    assert [step for _, step in loop.calls] == [0, 4]


def test_a_session_that_ended_is_opened_anew(stub: Stub, service: ServiceClient) -> None:
    loop = Loop(service, end_session(stub))
    loop.run()
    sessions = {run_id.partition(":")[0] for run_id, _ in loop.calls}
    assert len(sessions) == len(stub.sessions) == 2


def looks(stub: Stub) -> int:
    """How often the server was asked for a run's record."""
    return sum("/training_runs/" in r.path and "checkpoints" not in r.path for r in stub.sent())


class Pondering(Loop):
    """A loop that makes no call from its loss on, until it has been told of it."""

    def __init__(self, service: ServiceClient, lose: Any) -> None:
        self.told = threading.Event()
        super().__init__(service, lambda run: (lose(run), self.told.wait(20)))

    def policy(self, **options: Any) -> RecoveryPolicy:
        def on_event(event: Any) -> None:
            self.events.append(event)
            self.told.set()

        return RecoveryPolicy(backoff=0.01, watch=0.02, on_event=on_event, **options)


def only_forget(stub: Stub) -> Any:
    return lambda run: stub._on_loop(lambda: stub.runs.pop(run.model_id))


@pytest.mark.parametrize(
    ("how", "words"),
    [
        (only_forget, "does not know it any more"),
        (corrupt, "could not restore it"),
        (end_session, "its session has ended"),
    ],
)
def test_a_watch_notices_though_nobody_makes_a_call(
    stub: Stub, service: ServiceClient, how: Any, words: str
) -> None:
    loop = Pondering(service, how(stub))
    passes = lambda: stub.count("forward_backward")  # noqa: E731
    seen = list[int]()
    losing = loop.lose

    def lose(run: TrainingClient) -> None:
        eventually(lambda: looks(stub))
        losing(run)
        assert loop.kinds() == [RunLost], "told before any call"
        eventually(lambda: run.queue._lost)
        seen.append(passes())
        with pytest.raises(RunLostError, match=words):
            run.optim_step()
        assert passes() == seen[0], "nothing was sent"

    loop.lose = lose
    assert loop.run() == "done"
    assert words in str(loop.events[0])
    assert loop.kinds() == [RunLost, RecoveryAttempt, RunResumed]
    assert [step for _, step in loop.calls] == [0, 4]


def test_a_watch_ends_with_its_loop(stub: Stub, service: ServiceClient) -> None:
    loop = Loop(service, lambda run: None)
    assert loop.run(watch=0.02) == "done"
    asked = looks(stub)
    time.sleep(0.3)
    assert 0 < looks(stub) <= asked + 1, "one may have been on its way"
    assert loop.events == []


def test_a_watch_takes_no_silence_and_no_ignorance_for_a_loss(stub: Stub, service: ServiceClient) -> None:
    """A server that fails, is away, or has never had the run's record (not every one keeps them)."""

    def lose(run: TrainingClient) -> None:
        stub.script("*", status(404), always=True, where=lambda r: "training_runs" in r.path)
        eventually(lambda: looks(stub) > 3)

    stub.script("*", status(500), always=True, where=lambda r: "training_runs" in r.path)
    loop = Loop(service, lose)
    assert loop.run(watch=0.02) == "done"
    assert loop.events == []


def test_async_loops_are_watched_too(stub: Stub, service: ServiceClient) -> None:
    events: list[Any] = []

    async def create() -> TrainingClient:
        return await service.create_lora_training_client_async("stub/base", rank=4)

    async def train(run: TrainingClient, step: int) -> int:
        if step == 0:
            await (await run.save_state_async("000003"))
            await asyncio.to_thread(eventually, lambda: looks(stub) > 0)
            only_forget(stub)(run)
            while True:
                await asyncio.sleep(0.01)
                await asyncio.to_thread(eventually, lambda: run.queue._lost)
                await (await run.forward_backward_async(DATA, "cross_entropy"))
        return step

    policy = RecoveryPolicy(watch=0.02, on_event=events.append)
    assert asyncio.run(policy.run_async(service, create, train)) == 3
    assert [type(event) for event in events] == [RunLost, RecoveryAttempt, RunResumed]
    assert isinstance(events[0].error, RunLostError)


@pytest.mark.parametrize(
    ("lose", "error"),
    [
        (lambda stub: fail("datum 0 is wrong", "user"), RequestFailedError),
        (lambda stub: status(422), PassIncompleteError),
        (lambda stub: status(401), PassIncompleteError),
        (lambda stub: status(404), PassIncompleteError),
    ],
)
def test_what_is_the_loops_own_fault_is_not_retried(
    stub: Stub, service: ServiceClient, lose: Any, error: Any
) -> None:
    loop = Loop(service, lambda run: stub.script("forward_backward", lose(stub)))
    with pytest.raises(error):
        loop.run()
    assert loop.events == []
    assert len(loop.calls) == 1


def test_an_error_of_the_users_code_passes_through(service: ServiceClient) -> None:
    def lose(run: TrainingClient) -> None:
        raise ZeroDivisionError

    loop = Loop(service, lose)
    with pytest.raises(ZeroDivisionError):
        loop.run()
    assert loop.events == []


def test_a_run_lost_before_its_first_checkpoint_begins_anew(stub: Stub, service: ServiceClient) -> None:
    loop = Loop(service, lambda run: (stub.checkpoints.clear(), forget(stub)(run)))
    loop.run()
    assert [step for _, step in loop.calls] == [0, 0]
    assert loop.events[-1].checkpoint is None
    again = Loop(service, lambda run: (stub.checkpoints.clear(), forget(stub)(run)))
    with pytest.raises(RecoveryFailedError, match="no checkpoint to go on from"):
        again.run(start_over=False)
    assert again.kinds() == [RunLost, RecoveryAttempt, RecoveryGaveUp]


def test_a_given_checkpoint(stub: Stub, service: ServiceClient) -> None:
    loop = Loop(service, forget(stub))
    earlier = loop.create()
    path = earlier.save_state("by-name-2").result(10).path
    loop.run(checkpoint=path)
    assert loop.events[-1].checkpoint == path
    assert [step for _, step in loop.calls] == [0, 2]
    with pytest.raises(InvalidInputError):
        loop.run(checkpoint="no path")


@pytest.mark.parametrize(
    ("failures", "step"),
    [
        ([fail("unreadable", "user")], 2),
        ([fail("busy", "server")], 4),
        ([fail("busy", "server"), fail("busy", "server")], 2),
        ([status(404)], 2),
        ([status(429), status(429)], 4),
    ],
)
def test_a_checkpoint_that_cannot_be_loaded_gives_way_to_the_one_before(
    stub: Stub, service: ServiceClient, failures: Any, step: int
) -> None:
    """At once if it is the checkpoint's fault, the second time if the server may have been the reason."""

    def lose(run: TrainingClient) -> None:
        forget(stub)(run)
        stub.script("load_weights", *failures, where=lambda r: "004" in r.json["path"])

    loop = Loop(service, lose)
    loop.run()
    assert [step for _, step in loop.calls] == [0, step]
    assert loop.kinds()[-2:] == [RecoveryAttempt, RunResumed]


def test_training_never_begins_anew_because_checkpoints_cannot_be_read(
    stub: Stub, service: ServiceClient
) -> None:
    loop = Loop(service, forget(stub))
    stub.script("load_weights", fail("unreadable", "user"), always=True)
    with pytest.raises(RecoveryFailedError, match="unreadable"):
        loop.run(attempts=4)
    assert len(loop.calls) == 1
    assert loop.kinds() == [RunLost, *[RecoveryAttempt] * 4, RecoveryGaveUp]


def test_a_loop_that_gets_no_further_gives_up(stub: Stub, service: ServiceClient) -> None:
    loop = Loop(service, forget(stub), times=99)
    with pytest.raises(RecoveryFailedError, match=r"step-004 3 times and got no further"):
        loop.run(attempts=3)
    assert [step for _, step in loop.calls] == [0, 4, 4, 4]


def test_delays_double_up_to_the_most(stub: Stub, service: ServiceClient) -> None:
    loop = Loop(service, forget(stub))
    stub.script("load_weights", fail("busy", "server"), always=True)
    policy = RecoveryPolicy(attempts=5, backoff=0.02, max_backoff=0.06, on_event=loop.events.append)
    with pytest.raises(RecoveryFailedError):
        policy.run(service, loop.create, loop.train)
    delays = [event.delay for event in loop.events if isinstance(event, RecoveryAttempt)]
    for delay, most in zip(delays, [0.0, 0.02, 0.04, 0.06, 0.06], strict=True):
        assert 0.75 * most <= delay <= most


@pytest.mark.slow
def test_so_many_resume_at_once(stub: Stub, service: ServiceClient) -> None:
    loops, events = [Loop(service, forget(stub)) for _ in range(5)], list[Any]()
    policy = RecoveryPolicy(concurrent=2, on_event=events.append)
    stub.hold("load_weights")
    threads = [
        threading.Thread(target=lambda loop=loop: policy.run(service, loop.create, loop.train))
        for loop in loops
    ]
    for thread in threads:
        thread.start()
    eventually(lambda: sum(isinstance(event, RecoveryAttempt) for event in events) == 5)
    stub.wait_for("load_weights", 2)
    time.sleep(0.2)  # for a third, if it were let through
    assert stub.count("load_weights") == 2
    stub.release()
    for thread in threads:
        thread.join(20)
    assert all([step for _, step in loop.calls] == [0, 4] for loop in loops)
    assert stub.count("load_weights") == 5


def test_an_interrupted_recovery_leaves_its_place(stub: Stub, service: ServiceClient) -> None:
    """A KeyboardInterrupt, or a cancelled task, in the middle of it: the next one is not held up."""
    loop, policy = Loop(service, forget(stub)), RecoveryPolicy(concurrent=1)

    async def create() -> TrainingClient:
        return await service.create_lora_training_client_async("stub/base", rank=4)

    async def train(run: TrainingClient, step: int) -> str:
        return await asyncio.to_thread(loop.train, run, step)

    async def scenario() -> None:
        stub.hold("load_weights")
        task = asyncio.create_task(policy.run_async(service, create, train))
        await asyncio.to_thread(stub.wait_for, "load_weights", 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        stub.release()
        loop.times = 1
        assert await policy.run_async(service, create, train) == "done"

    asyncio.run(scenario())


def test_a_listener_that_fails_costs_nothing(stub: Stub, service: ServiceClient) -> None:
    loop = Loop(service, forget(stub))

    def told(event: Any) -> None:
        raise ValueError

    assert RecoveryPolicy(on_event=told).run(service, loop.create, loop.train) == "done"


def test_coroutines_are_for_run_async(service: ServiceClient) -> None:
    async def train(run: TrainingClient, step: int) -> None: ...

    with pytest.raises(InvalidInputError, match="use run_async"):
        RecoveryPolicy().run(service, Loop(service, None).create, train)


@pytest.mark.parametrize(
    ("name", "metadata", "step"),
    [
        ("000080", None, 80),
        ("step-12", {}, 12),
        ("best", {"step": "7"}, 7),
        ("best-3", {"step": "7"}, 7),
        ("best", None, None),
    ],
)
def test_the_step_of_a_checkpoint(name: str, metadata: Any, step: int | None) -> None:
    checkpoint = Checkpoint(
        checkpoint_id=f"weights/{name}", checkpoint_type="training", time="2026-01-02T03:04:05Z",  # type: ignore[arg-type]
        tinker_path=f"tinker://s:train:0/weights/{name}", user_metadata=metadata,
    )  # fmt: skip
    assert step_of(checkpoint) == step


def test_a_checkpoint_without_a_step_is_said(stub: Stub, service: ServiceClient) -> None:
    loop = Loop(service, forget(stub))

    def train(run: TrainingClient, step: int) -> None:
        run.save_state("best").result(10)
        forget(stub)(run)
        run.forward_backward(DATA, "cross_entropy").result(10)

    with pytest.raises(RecoveryFailedError, match="weights/best does not say its step"):
        RecoveryPolicy().run(service, loop.create, train)


@pytest.mark.parametrize(
    "options", [{"attempts": 0}, {"concurrent": True}, {"backoff": -1}, {"max_backoff": "1"}, {"watch": 0}]
)
def test_options_are_checked(options: Any) -> None:
    with pytest.raises(InvalidInputError, match=next(iter(options))):
        RecoveryPolicy(**options)


def test_the_example_of_the_docs_works(stub: Stub, service: ServiceClient, capsys: Any) -> None:
    page = (Path(__file__).parents[1] / "docs" / "client.md").read_text()
    scope: dict[str, Any] = {}
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    code = next(block for block in blocks if "RecoveryPolicy(" in block)
    exec(code.partition("\ndata = ")[0], scope)  # what follows has a model of its own: tests/test_docs.py
    lose = status(410)
    stub.script("retrieve_future", *[Action()] * 50, lose)  # some step after the twentieth
    losses = scope["train_with_recovery"](service, "stub/base", [DATA] * 35)
    assert list(losses.values()) == [1.5] * 35
    assert "weights/000020, at step 20" in capsys.readouterr().out

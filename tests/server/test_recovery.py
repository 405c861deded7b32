"""A real `tinkex serve`, killed, comes back without the run: the losses are those of an undisturbed one."""

from __future__ import annotations

import shutil
import sqlite3
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.server.served import MODEL, Serve
from tests.service.harness import datum
from tinkex import AdamParams, RecoveryPolicy, RunLostError, ServiceClient, TrainingClient
from tinkex.recovery import RecoveryAttempt, RunLost, RunResumed

pytestmark = pytest.mark.slow

STEPS, KILLED_AT = 8, 5
ADAM = AdamParams(learning_rate=1e-2)


@pytest.fixture(scope="module")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    server = Serve(tmp_path_factory.mktemp("served"))
    yield server
    server.kill()


def forget_everything_but_checkpoints(serve: Serve, run_id: str) -> None:
    with sqlite3.connect(serve.home / "ledger.sqlite") as db:
        for table in ("runs", "sessions", "samplers", "custom_losses"):
            db.execute(f"DELETE FROM {table}")
    db.close()
    for journal in serve.home.glob("runs/*/*/journal"):
        shutil.rmtree(journal)


def remove_the_journal(serve: Serve, run_id: str) -> None:
    shutil.rmtree(serve.journal(run_id))


def damage_the_journal(serve: Serve, run_id: str) -> None:
    for file in serve.journal(run_id).rglob("*"):
        if file.is_file():
            content = bytearray(file.read_bytes())
            content[len(content) // 3 :] = bytes(byte ^ 0xFF for byte in content[len(content) // 3 :])
            file.write_bytes(content)


class Loop:
    """A pipelined loop with a checkpoint after every second step; `disturb` is called once, in step 5."""

    def __init__(self, service: ServiceClient, disturb: Callable[[str], None] | None = None) -> None:
        self.service, self.disturb = service, disturb
        self.losses: dict[int, float] = {}
        self.begun: list[int] = []
        self.events: list[Any] = []

    def create(self) -> TrainingClient:
        return self.service.create_lora_training_client(MODEL, rank=4, seed=5)

    def train(self, run: TrainingClient, step: int, until: int = STEPS) -> list[float]:
        self.begun.append(step)
        while step < until:
            batch = [datum(3 * step + i, length=8) for i in range(3)]
            passing = run.forward_backward(batch, "cross_entropy")
            stepping = run.optim_step(ADAM)
            if step == KILLED_AT and self.disturb is not None:
                disturb, self.disturb = self.disturb, None
                disturb(run.model_id)
            self.losses[step] = passing.result(60).metrics["loss:sum"]
            stepping.result(60)
            step += 1
            if step % 2 == 0:
                run.save_state(f"{step:06d}").result(60)
        return list(self.losses.values())


@pytest.fixture(scope="module")
def undisturbed(serve: Serve) -> list[float]:
    with ServiceClient(base_url=serve.url, api_key="tml-ann") as service:
        loop = Loop(service)
        return loop.train(loop.create(), 0)


@pytest.mark.parametrize("how", [damage_the_journal, remove_the_journal, forget_everything_but_checkpoints])
def test_a_run_that_a_killed_server_lost_goes_on(serve: Serve, undisturbed: list[float], how: Any) -> None:
    service = ServiceClient(base_url=serve.url, api_key="tml-ann")

    def disturb(run_id: str) -> None:
        serve.kill()
        how(serve, run_id)
        serve.start()

    loop = Loop(service, disturb)
    policy = RecoveryPolicy(backoff=0.05, on_event=loop.events.append)
    losses = policy.run(service, loop.create, loop.train)
    assert losses == pytest.approx(undisturbed, abs=1e-5, rel=1e-5)
    assert loop.begun == [0, 4]
    assert [type(event) for event in loop.events] == [RunLost, RecoveryAttempt, RunResumed]
    lost, _, back = loop.events
    assert back.checkpoint == f"tinker://{lost.run_id}/weights/000004"
    # What was resumed is the checkpoint as a user would resume it.
    again = service.create_training_client_from_state_with_optimizer(back.checkpoint)
    twin = Loop(service)
    twin.train(again, 4)
    assert list(twin.losses.values()) == pytest.approx(undisturbed[4:], abs=1e-5, rel=1e-5)
    service.close().result(10)


@pytest.mark.parametrize("how", [damage_the_journal, forget_everything_but_checkpoints])
def test_a_loss_is_noticed_though_the_loop_makes_no_call(
    serve: Serve, undisturbed: list[float], how: Any
) -> None:
    """In the middle of it the loop thinks for itself, with nothing under way: a watch tells of the loss."""
    service = ServiceClient(base_url=serve.url, api_key="tml-ann")
    noticed, events = threading.Event(), list[Any]()

    def told(event: Any) -> None:
        events.append(event)
        noticed.set()

    class Thinking(Loop):
        def train(self, run: TrainingClient, step: int) -> list[float]:
            if step == 0:
                super().train(run, 0, until=4)
                serve.kill()
                how(serve, run.model_id)
                serve.start()
                assert noticed.wait(60)
                step = 4
            return super().train(run, step)

    loop = Thinking(service)
    losses = RecoveryPolicy(watch=0.1, on_event=told).run(service, loop.create, loop.train)
    assert losses == pytest.approx(undisturbed, abs=1e-5, rel=1e-5)
    assert [type(event) for event in events] == [RunLost, RecoveryAttempt, RunResumed]
    assert isinstance(events[0].error, RunLostError)
    assert events[-1].checkpoint == f"tinker://{events[0].run_id}/weights/000004"
    service.close().result(10)


def test_several_runs_of_one_client_are_lost_at_once(serve: Serve, undisturbed: list[float]) -> None:
    """They share a session, which is lost too, and one policy, which lets one resume at a time."""
    service = ServiceClient(base_url=serve.url, api_key="tml-ann")
    together, back = threading.Barrier(3), threading.Event()

    def disturb(run_id: str) -> None:
        together.wait(60)
        serve.kill()
        forget_everything_but_checkpoints(serve, run_id)
        serve.start()
        back.set()

    def wait(run_id: str) -> None:
        together.wait(60)
        assert back.wait(60)

    loops = [Loop(service, disturb), Loop(service, wait), Loop(service, wait)]
    events: list[Any] = []
    policy = RecoveryPolicy(backoff=0.05, concurrent=1, on_event=events.append)
    with ThreadPoolExecutor(3) as pool:
        results = list(pool.map(lambda loop: policy.run(service, loop.create, loop.train), loops))
    for losses in results:
        assert losses == pytest.approx(undisturbed, abs=1e-4, rel=1e-5)
    assert [loop.begun for loop in loops] == [[0, 4]] * 3
    resumed = [event for event in events if isinstance(event, RunResumed)]
    assert len({event.new_run_id.partition(":")[0] for event in resumed}) == 1  # one new session for all
    service.close().result(10)

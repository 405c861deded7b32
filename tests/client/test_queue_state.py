"""Why work waits: on each change to an observer, a metric and the log."""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

import pytest

from tests.client.conftest import PARAMS, PROMPT, close, eventually, fast_retries
from tests.stub import Stub, status
from tinkex import InvalidInputError, ServiceClient
from tinkex.client import polling
from tinkex.client.polling import QueueWatch

CAPACITY = {"type": "try_again", "queue_state": "paused_capacity", "queue_state_reason": "the engine is full"}


class Seen:
    """An observer that remembers, and where it was called."""

    def __init__(self) -> None:
        self.changes: list[tuple[str, str | None]] = []
        self.threads: set[str] = set()

    def on_queue_state_change(self, queue_state: str, queue_state_reason: str | None) -> None:
        self.changes.append((queue_state, queue_state_reason))
        self.threads.add(threading.current_thread().name.partition("_")[0])

    @property
    def states(self) -> list[str]:
        return [state for state, _ in self.changes]


@pytest.fixture
def seen() -> Seen:
    return Seen()


@pytest.fixture
def observed(stub: Stub, seen: Seen) -> Any:
    service = ServiceClient(base_url=stub.url, queue_state_observer=seen)
    fast_retries(service, billing_delay=0.05)
    yield service
    close(service)


def test_only_changes_are_told_and_counted(seen: Seen) -> None:
    watch = QueueWatch("it", seen.on_queue_state_change)
    for state in ("active", "paused_capacity", "paused_capacity", "paused_rate_limit", "active", "active"):
        watch(state, None)
    eventually(lambda: len(seen.changes) == 3)
    assert seen.states == ["paused_capacity", "paused_rate_limit", "active"]
    assert watch.stats().changes == {"paused_capacity": 1, "paused_rate_limit": 1, "active": 1}
    assert set(watch.stats().seconds) == {"active", "paused_capacity", "paused_rate_limit"}
    assert watch.stats().state == "active"


def test_one_that_is_put_off_and_one_that_goes_on_do_not_contradict_each_other(seen: Seen) -> None:
    """The polls of what was accepted say nothing of what is being refused."""
    watch = QueueWatch("it", seen.on_queue_state_change)
    watch.submitting("paused_rate_limit", "slow down")
    for _ in range(5):
        watch("active", None)
    watch("paused_capacity", None)
    watch("active", None)
    watch.submitting("active", None)
    eventually(lambda: len(seen.changes) >= 2)
    time.sleep(0.05)
    assert seen.changes == [("paused_rate_limit", "slow down"), ("active", None)]


def test_the_same_state_is_logged_once_a_minute(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = QueueWatch("sampler x")
    with caplog.at_level(logging.INFO, "tinkex"):
        for _ in range(5):
            watch("paused_capacity", "full")
            watch("active", None)
        monkeypatch.setattr(polling, "LOG_EVERY", 0.0)
        watch("paused_capacity", "full")
    assert [record.getMessage() for record in caplog.records] == [
        "sampler x is paused (paused_capacity): full",
        "sampler x is running again",
        "sampler x is paused (paused_capacity): full",
    ]
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO", "WARNING"]


def test_an_observer_hears_of_runs_and_samplers_off_the_loop(
    stub: Stub, observed: ServiceClient, seen: Seen
) -> None:
    """Capacity, as polls tell it; on the change and on recovery."""
    run = observed.create_lora_training_client("stub/base", timeout=20)
    stub.script("retrieve_future", status(408, body=CAPACITY))
    run.optim_step().result(20)
    sampler = observed.create_sampling_client(base_model="stub/base", timeout=20)
    stub.script("retrieve_future", *[status(408, body=CAPACITY)] * 2)
    sampler.sample(PROMPT, 1, PARAMS).result(20)
    eventually(lambda: len(seen.changes) == 4)
    assert seen.changes == [("paused_capacity", "the engine is full"), ("active", None)] * 2
    assert seen.threads == {"tinkex-observer"}
    for client in (run, sampler):
        stats = client.queue_stats
        assert stats.changes == {"paused_capacity": 1, "active": 1}
        assert stats.seconds["paused_capacity"] > 0


@pytest.mark.parametrize(("code", "state"), [(429, "paused_rate_limit"), (402, "paused_billing")])
def test_what_submissions_meet_is_a_state_too(
    stub: Stub, observed: ServiceClient, seen: Seen, code: int, state: str
) -> None:
    """Rate limits and billing, of samples and of training."""
    run = observed.create_lora_training_client("stub/base", timeout=20)
    sampler = observed.create_sampling_client(base_model="stub/base", timeout=20)
    for op, call in (
        ("optim_step", run.optim_step),
        ("asample", lambda: sampler.sample(PROMPT, 1, PARAMS)),
    ):
        seen.changes.clear()
        stub.script(op, *[status(code, {"retry-after-ms": "20"})] * 2)
        call().result(20)
        eventually(lambda: len(seen.changes) == 2)
        assert seen.states == [state, "active"]
        assert f"scripted {code}" in (seen.changes[0][1] or "")


def test_an_observer_that_takes_its_time_holds_nothing_up(stub: Stub) -> None:
    """Nor does one that fails."""

    enough = threading.Event()

    class Slow:
        def on_queue_state_change(self, queue_state: str, queue_state_reason: str | None) -> None:
            enough.wait(20)
            raise RuntimeError("an observer's own trouble")

    service = ServiceClient(base_url=stub.url, queue_state_observer=Slow())
    sampler = service.create_sampling_client(base_model="stub/base", timeout=20)
    stub.script("retrieve_future", status(408, body=CAPACITY))
    sampler.sample(PROMPT, 1, PARAMS).result(10)
    assert not enough.is_set()
    enough.set()
    close(service)


def test_an_observer_must_be_one(stub: Stub) -> None:
    with pytest.raises(InvalidInputError, match="on_queue_state_change"):
        ServiceClient(base_url=stub.url, queue_state_observer=object())  # type: ignore[arg-type]

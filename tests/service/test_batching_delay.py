"""Waiting for runs that are about to come: only for those that are due, briefly, and not in vain twice."""

from __future__ import annotations

import pytest

from tinkex.service.scheduler import PART, PATIENCE, TURN_PATIENCE, QueuedRequest, Scheduler

SOON = PATIENCE / 2


def rests(scheduler: Scheduler, run: str, seq_id: int, at: float) -> None:
    """It sends a step, and has its result at once."""
    scheduler.submit(QueuedRequest(run, seq_id, f"{run}#{seq_id}", is_pass=False), at)
    [item] = scheduler.next_batch(at)
    scheduler.done(item, at)


def rested(scheduler: Scheduler, run: str, seconds: float, at: float = 0.0) -> None:
    """It has come back after `seconds` once, and rests again from `at` on."""
    scheduler.open(run, run)
    rests(scheduler, run, 1, at - seconds)
    rests(scheduler, run, 2, at)


def batch_took(scheduler: Scheduler, seconds: float, at: float = 0.0) -> None:
    """A batch ends at `at`, and the first pass of the next one is ready."""
    [item] = scheduler.next_batch(at - seconds)
    scheduler.done(item, at)
    ready(scheduler, item.seq_id + 1, at)


def ready(scheduler: Scheduler, seq_id: int, at: float) -> None:
    scheduler.submit(QueuedRequest("ready", seq_id, f"ready#{seq_id}", is_pass=True), at)


@pytest.fixture
def scheduler() -> Scheduler:
    """One pass is ready, and the batch before took long enough for all patience that there is."""
    scheduler = Scheduler()
    scheduler.open("ready", "ready")
    ready(scheduler, 1, -1.0)
    batch_took(scheduler, 1.0)
    return scheduler


def test_alone_nobody_is_waited_for(scheduler: Scheduler):
    assert scheduler.wait_until(0.0) is None


def test_a_run_that_never_came_back_is_not_waited_for(scheduler: Scheduler):
    scheduler.open("new", "new")
    rests(scheduler, "new", 1, 0.0)
    assert scheduler.wait_until(0.0) is None


def test_a_run_that_is_due_is_waited_for_until_it_comes(scheduler: Scheduler):
    rested(scheduler, "a", SOON)
    assert scheduler.wait_until(0.001) == pytest.approx(0.001 + PATIENCE)
    scheduler.submit(QueuedRequest("a", 3, "a#3", is_pass=True), SOON)
    assert scheduler.wait_until(SOON) is None


def test_all_that_are_due_are_waited_for_but_the_time_is_that_of_the_first_pass(scheduler: Scheduler):
    rested(scheduler, "a", SOON)
    rested(scheduler, "b", SOON)
    end = scheduler.wait_until(0.0)
    scheduler.submit(QueuedRequest("a", 3, "a#3", is_pass=True), SOON)
    assert scheduler.wait_until(SOON) == end == pytest.approx(PATIENCE)
    assert scheduler.wait_until(PATIENCE) is None


def test_the_next_batch_has_its_own_time(scheduler: Scheduler):
    rested(scheduler, "a", SOON)
    scheduler.wait_until(0.0)
    batch_took(scheduler, 1.0, at=5.0)
    rested(scheduler, "a", SOON, at=5.0)
    assert scheduler.wait_until(5.0) == pytest.approx(5.0 + PATIENCE)


def test_a_run_that_takes_its_time_is_not_waited_for(scheduler: Scheduler):
    rested(scheduler, "slow", 2 * TURN_PATIENCE)
    assert scheduler.wait_until(0.0) is None


def test_a_run_that_does_not_come_back_is_waited_for_once(scheduler: Scheduler):
    rested(scheduler, "gone", SOON)
    assert scheduler.wait_until(0.0) is not None
    batch_took(scheduler, 1.0)
    assert scheduler.wait_until(2 * SOON + PATIENCE) is None


def test_a_run_that_is_closed_is_not_waited_for(scheduler: Scheduler):
    rested(scheduler, "a", SOON)
    scheduler.close("a")
    assert scheduler.wait_until(0.0) is None


def test_short_batches_wait_shortly(scheduler: Scheduler):
    seconds = PATIENCE / 10
    batch_took(scheduler, PART * seconds)
    rested(scheduler, "a", seconds / 2)
    assert scheduler.wait_until(0.0) == pytest.approx(seconds)
    batch_took(scheduler, PART * seconds)
    rested(scheduler, "b", 2 * seconds)
    scheduler.close("a")
    assert scheduler.wait_until(0.0) is None  # it would come too late

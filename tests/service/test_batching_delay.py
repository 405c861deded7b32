"""Waiting for runs that are about to come: only for those that are due, briefly, and not in vain twice."""

from __future__ import annotations

import pytest

from tinkex.service.batching_delay import PART, PATIENCE, BatchingDelay

SOON = PATIENCE / 2


def rested(gathering: BatchingDelay, run: str, seconds: float, at: float = 0.0) -> None:
    """It has come back after `seconds` once, and rests again from `at` on."""
    gathering.rests(run, at - seconds)
    gathering.comes(run, at)
    gathering.rests(run, at)


@pytest.fixture
def gathering() -> BatchingDelay:
    gathering = BatchingDelay()
    gathering.took(1.0)  # long enough for all patience that there is
    return gathering


def test_alone_nobody_is_waited_for(gathering: BatchingDelay):
    assert gathering.until(0.0) is None


def test_a_run_that_never_came_back_is_not_waited_for(gathering: BatchingDelay):
    gathering.rests("new", 0.0)
    assert gathering.until(0.0) is None


def test_a_run_that_is_due_is_waited_for_until_it_comes(gathering: BatchingDelay):
    rested(gathering, "a", SOON)
    assert gathering.until(0.001) == pytest.approx(0.001 + PATIENCE)
    gathering.comes("a", SOON)
    assert gathering.until(SOON) is None


def test_all_that_are_due_are_waited_for_but_the_time_is_that_of_the_first_pass(gathering: BatchingDelay):
    rested(gathering, "a", SOON)
    rested(gathering, "b", SOON)
    end = gathering.until(0.0)
    gathering.comes("a", SOON)
    assert gathering.until(SOON) == end == pytest.approx(PATIENCE)
    assert gathering.until(PATIENCE) is None


def test_the_next_batch_has_its_own_time(gathering: BatchingDelay):
    rested(gathering, "a", SOON)
    gathering.until(0.0)
    gathering.begins()
    rested(gathering, "a", SOON, at=5.0)
    assert gathering.until(5.0) == pytest.approx(5.0 + PATIENCE)


def test_a_run_that_takes_its_time_is_not_waited_for(gathering: BatchingDelay):
    rested(gathering, "slow", 2 * PATIENCE)
    assert gathering.until(0.0) is None


def test_a_run_that_does_not_come_back_is_waited_for_once(gathering: BatchingDelay):
    rested(gathering, "gone", SOON)
    assert gathering.until(0.0) is not None
    gathering.begins()
    assert gathering.until(SOON + PATIENCE) is None


def test_a_run_that_is_closed_is_not_waited_for(gathering: BatchingDelay):
    rested(gathering, "a", SOON)
    gathering.goes("a")
    assert gathering.until(0.0) is None


def test_short_batches_wait_shortly(gathering: BatchingDelay):
    seconds = PATIENCE / 10
    gathering.took(PART * seconds)
    rested(gathering, "a", seconds / 2)
    assert gathering.until(0.0) == pytest.approx(seconds)
    gathering.begins()
    rested(gathering, "b", 2 * seconds)
    gathering.goes("a")
    assert gathering.until(0.0) is None  # it would come too late

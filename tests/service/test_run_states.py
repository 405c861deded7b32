"""A run's state changes along the arrows drawn in lifecycle.py, and along no others."""

from __future__ import annotations

import asyncio
import re
from itertools import product

import pytest

from tests.service.harness import User
from tinkex.service.runs import lifecycle
from tinkex.service.runs.lifecycle import Run, RunState

pytestmark = pytest.mark.anyio

# Written out once more: neither the drawing nor the table may change alone.
LEGAL = {
    (RunState.OPEN, RunState.RESIDENT), (RunState.OPEN, RunState.MISMATCHED),
    (RunState.OPEN, RunState.FAILED), (RunState.OPEN, RunState.EVICTED),
    (RunState.RESIDENT, RunState.FAILED), (RunState.RESIDENT, RunState.EVICTED),
    (RunState.MISMATCHED, RunState.EVICTED), (RunState.FAILED, RunState.EVICTED),
}  # fmt: skip
ARROW = re.compile(r"^    (.+?) ──.+?──► (\w+)", re.MULTILINE)


@pytest.fixture
async def run(user: User) -> Run:
    found = user.service.runs.get(await user.run())
    assert found is not None
    return found


def test_the_arrows_drawn_are_the_table() -> None:
    arrows = {
        (RunState[before], RunState[after])
        for sources, after in ARROW.findall(lifecycle.__doc__ or "")
        for before in sources.split(", ")
        if sources != "on disk"
    }
    assert arrows == {(before, after) for before, next in lifecycle._NEXT.items() for after in next}
    assert arrows == LEGAL


@pytest.mark.parametrize(("before", "after"), [*product(RunState, RunState)])
async def test_a_run_moves_only_along_the_arrows(run: Run, before: RunState, after: RunState) -> None:
    run.state = before
    if (before, after) in LEGAL:
        run.move(after)
        assert run.state is after
    else:
        with pytest.raises(AssertionError, match="cannot go from"):
            run.move(after)
        assert run.state is before
    run.state = before  # for the end of the service


async def test_a_failed_run_holds_the_device_until_it_is_evicted(run: Run) -> None:
    assert (run.state, run.on_device) == (RunState.RESIDENT, True)
    run.move(RunState.FAILED, "it broke")
    assert (run.on_device, run.resident, run.problem) == (True, False, "it broke")
    run.move(RunState.EVICTED)
    assert not run.on_device


async def test_a_step_after_a_failed_pass_must_fail(run: Run) -> None:
    run.add_pass()
    assert (run.has_gradients, run.failed_pass) == (True, None)
    run.add_pass(failed="first")
    run.add_pass(failed="second")
    run.add_pass()
    assert run.failed_pass == "first"
    run.clear_gradients()
    assert (run.has_gradients, run.failed_pass) == (False, None)


async def test_a_request_opens_a_run_that_recovery_is_leaving_on_disk(user: User, run: Run) -> None:
    runs, ledger = user.service.runs, user.service.ledger
    assert await runs.evict(run)
    ledger.update_run(run.id, state="live")  # as a killed process leaves it
    row = ledger.run(run.id)
    assert row is not None
    await runs.resume_pending(row)
    left = ledger.run(run.id)
    assert left is not None
    assert (left.state, runs.get(run.id)) == ("evicted", None)  # it has no pending requests
    _, found = await asyncio.gather(runs.resume_pending(row), runs.find(row))
    opened = ledger.run(run.id)
    assert opened is not None
    assert (opened.state, runs.get(run.id)) == ("live", found)
    assert await user.loss(run.id, 1) > 0

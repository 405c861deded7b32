"""The scheduler against a small reference model: whatever arrives in whatever order, order is kept."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tinkex.service.scheduler import BARRIERS_A_ROUND, QueuedRequest, Scheduler, Verdict

BUDGET = 100


def work(
    run: str, seq_id: int, *, is_pass: bool = True, tokens: int = 10, digest: bytes = b""
) -> QueuedRequest:
    return QueuedRequest(run, seq_id, f"{run}/{seq_id}", is_pass, tokens if is_pass else 0, digest)


def step(run: str, seq_id: int) -> QueuedRequest:
    return QueuedRequest(run, seq_id, f"{run}/{seq_id}", is_pass=False, shares=True)


def drain(scheduler: Scheduler, now: float = 0.0) -> list[list[QueuedRequest]]:
    """Execute everything that becomes ready, at once."""
    batches = []
    while batch := scheduler.next_batch(now):
        batches.append(batch)
        for item in batch:
            scheduler.done(item, now)
    return batches


@dataclass
class Reference:
    """What must hold, spelled out: each run is a sequence, executed in order, without what never came."""

    next_seq: dict[str, int] = field(default_factory=dict)
    arrived: dict[str, dict[int, bool]] = field(default_factory=dict)  # seq -> is_pass

    def ready(self, run: str) -> bool:
        return self.next_seq[run] in self.arrived[run]


runs = st.sampled_from(["a0", "a1", "b0", "c0"])  # the first letter is the owner
arrivals = st.lists(st.tuples(runs, st.integers(1, 12), st.booleans(), st.integers(1, 150)), max_size=60)


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(arrivals, st.lists(st.integers(0, 3), max_size=60))
def test_every_run_is_executed_in_order_and_only_once(arriving, pauses):
    scheduler = Scheduler(batch_tokens=BUDGET)
    reference = Reference()
    for run in ("a0", "a1", "b0", "c0"):
        scheduler.open(run, run[0])
        reference.next_seq[run], reference.arrived[run] = 1, {}
    executed: list[QueuedRequest] = []
    running: list[QueuedRequest] = []
    pauses = iter(pauses)
    for run, seq_id, is_pass, tokens in arriving:
        verdict, request_id = scheduler.submit(work(run, seq_id, is_pass=is_pass, tokens=tokens), 0.0)
        known = reference.arrived[run]
        assert request_id == f"{run}/{seq_id}"
        assert verdict is (Verdict.REPEATED if seq_id in known else Verdict.ACCEPTED)
        known.setdefault(seq_id, is_pass)
        for _ in range(next(pauses, 0)):
            for item in running:
                scheduler.done(item, 0.0)
            running = scheduler.next_batch(0.0)
            assert all(item.is_pass for item in running) or len(running) == 1
            assert len(running) <= 1 or sum(item.tokens for item in running) <= BUDGET
            for item in running:
                assert reference.next_seq[item.run_id] == item.seq_id
                reference.next_seq[item.run_id] += 1
                executed.append(item)
    for item in running:
        scheduler.done(item, 0.0)
    for batch in drain(scheduler):
        for item in batch:
            assert reference.next_seq[item.run_id] == item.seq_id
            reference.next_seq[item.run_id] += 1
            executed.append(item)
    assert not any(reference.ready(run) for run in reference.next_seq)  # nothing that could run was left
    assert len({(item.run_id, item.seq_id) for item in executed}) == len(executed)


def test_chunks_that_arrive_backwards_are_executed_forwards():
    scheduler = Scheduler(batch_tokens=BUDGET)
    scheduler.open("r", "me")
    for seq_id in (3, 2, 4, 1):
        scheduler.submit(work("r", seq_id, is_pass=seq_id < 4), 0.0)
    assert [[w.seq_id for w in batch] for batch in drain(scheduler)] == [[1, 2, 3], [4]]


def test_passes_of_different_runs_share_a_batch():
    scheduler = Scheduler(batch_tokens=BUDGET)
    for run in ("a", "b", "c"):
        scheduler.open(run, f"owner of {run}")
        scheduler.submit(work(run, 1), 0.0)
        scheduler.submit(work(run, 2, is_pass=False), 0.0)
    batches = drain(scheduler)
    assert [w.run_id for w in batches[0]] == ["a", "b", "c"]
    assert [len(batch) for batch in batches] == [3, 1, 1, 1]


def test_steps_come_before_the_next_batch_so_that_all_runs_join_it():
    scheduler = Scheduler(batch_tokens=BUDGET)
    for run in ("a", "b"):
        scheduler.open(run, run)
        for seq_id in range(1, 5):
            scheduler.submit(work(run, seq_id, is_pass=seq_id % 2 == 1), 0.0)
    assert [len(batch) for batch in drain(scheduler)] == [2, 1, 1, 2, 1, 1]


def test_a_gap_is_waited_for_then_given_up_for_good():
    scheduler = Scheduler(batch_tokens=BUDGET, gap_patience=60.0)
    scheduler.open("r", "me")
    scheduler.submit(work("r", 2), 100.0)
    assert scheduler.next_batch(0.0) == []
    assert scheduler.give_up_gaps(120.0) == 160.0
    assert scheduler.next_batch(0.0) == []
    assert scheduler.give_up_gaps(160.0) is None
    assert [w.seq_id for batch in drain(scheduler) for w in batch] == [2]
    assert scheduler.submit(work("r", 1), 161.0)[0] is Verdict.LATE
    assert drain(scheduler) == []


def test_a_gap_that_closes_in_time_costs_nothing():
    scheduler = Scheduler(batch_tokens=BUDGET, gap_patience=60.0)
    scheduler.open("r", "me")
    scheduler.submit(work("r", 2), 0.0)
    scheduler.submit(work("r", 1), 59.0)
    assert scheduler.give_up_gaps(61.0) is None
    assert [w.seq_id for batch in drain(scheduler) for w in batch] == [1, 2]


def test_what_was_given_up_in_an_earlier_life_is_not_waited_for():
    scheduler = Scheduler(batch_tokens=BUDGET)
    queue = scheduler.open("r", "me")
    for seq_id in (3, 5, 9):
        scheduler.submit(work("r", seq_id), 0.0)
    assert scheduler.next_batch(0.0) == []
    queue.give_up(5, 0.0)
    assert [w.seq_id for batch in drain(scheduler) for w in batch] == [3, 5]
    assert queue.missing == 6
    assert scheduler.submit(work("r", 4), 0.0)[0] is Verdict.LATE


def test_what_is_being_written_down_is_not_given_up():
    scheduler = Scheduler(batch_tokens=BUDGET, gap_patience=60.0)
    queue = scheduler.open("r", "me")
    scheduler.submit(work("r", 3), 0.0)
    with queue.arriving(2):
        assert scheduler.give_up_gaps(100.0) == 160.0  # 1 is, and 2 is waited for anew
        assert scheduler.submit(work("r", 2), 100.0)[0] is Verdict.ACCEPTED
    assert [w.seq_id for batch in drain(scheduler) for w in batch] == [2, 3]


def test_what_could_not_be_written_down_is_given_up_in_its_time():
    scheduler = Scheduler(batch_tokens=BUDGET, gap_patience=60.0)
    queue = scheduler.open("r", "me")
    scheduler.submit(work("r", 2), 0.0)
    with queue.arriving(1):
        assert scheduler.give_up_gaps(60.0) == 120.0
    assert scheduler.give_up_gaps(120.0) is None
    assert [w.seq_id for batch in drain(scheduler) for w in batch] == [2]


def test_a_repeat_is_the_same_work_and_another_body_is_a_conflict():
    scheduler = Scheduler(batch_tokens=BUDGET)
    scheduler.open("r", "me")
    assert scheduler.submit(work("r", 1, digest=b"x"), 0.0) == (Verdict.ACCEPTED, "r/1")
    again = QueuedRequest("r", 1, "another id", True, 10, b"x")
    assert scheduler.submit(again, 0.0) == (Verdict.REPEATED, "r/1")
    drain(scheduler)
    assert scheduler.submit(again, 0.0) == (Verdict.REPEATED, "r/1")
    assert scheduler.submit(work("r", 1, digest=b"y"), 0.0)[0] is Verdict.CONFLICT
    assert drain(scheduler) == []


def test_a_flood_of_passes_does_not_starve_another_owner():
    scheduler = Scheduler(batch_tokens=BUDGET)
    for n in range(50):
        scheduler.open(f"flood{n}", "flood")
        for seq_id in range(1, 5):
            scheduler.submit(work(f"flood{n}", seq_id), 0.0)
    scheduler.next_batch(0.0)  # the flood is being served when the other one comes
    scheduler.open("small", "small")
    scheduler.submit(work("small", 1), 0.0)
    assert "small" in [w.run_id for w in scheduler.next_batch(0.0)]


@pytest.mark.parametrize("both_pause", [False, True])
def test_whoever_comes_back_after_long_does_not_starve_those_who_worked(both_pause: bool):
    scheduler = Scheduler(batch_tokens=BUDGET)
    scheduler.open("old", "away")  # and does nothing for long
    scheduler.open("busy", "busy")
    for seq_id in range(1, 1000):
        scheduler.submit(work("busy", seq_id, tokens=50), 0.0)
    if both_pause:
        drain(scheduler)
    else:
        for _ in range(400):
            for item in scheduler.next_batch(0.0):
                scheduler.done(item, 0.0)
    for seq_id in range(1, 100):
        scheduler.submit(work("old", seq_id, tokens=50), 0.0)
    scheduler.submit(work("busy", 1000, tokens=50), 0.0)
    turns = []
    for _ in range(4):
        batch = scheduler.next_batch(0.0)
        turns += [item.run_id for item in batch]
        for item in batch:
            scheduler.done(item, 0.0)
    assert turns.count("old") >= 2
    assert "busy" in turns


def test_a_flood_of_barriers_does_not_starve_another_owner():
    scheduler = Scheduler(batch_tokens=BUDGET)
    for n in range(50):
        scheduler.open(f"flood{n}", "flood")
        for seq_id in range(1, 20):
            scheduler.submit(work(f"flood{n}", seq_id, is_pass=False), 0.0)
    scheduler.open("small", "small")
    scheduler.submit(work("small", 1), 0.0)
    scheduler.submit(work("small", 2, is_pass=False), 0.0)
    order = [w.run_id for batch in drain(scheduler) for w in batch]
    first, second = (i for i, run in enumerate(order) if run == "small")
    assert first <= BARRIERS_A_ROUND
    assert second <= first + 2


@pytest.mark.parametrize("tokens", [10, 60], ids=["small passes", "one pass a batch"])
def test_runs_of_one_owner_advance_together(tokens: int):
    """Each sends its next pass and step once its last step is done, as loops do; none falls behind."""
    scheduler = Scheduler(batch_tokens=BUDGET)
    runs = [f"run-{n}" for n in range(3 * BARRIERS_A_ROUND)]
    steps, seq = dict.fromkeys(runs, 0), dict.fromkeys(runs, 1)

    def go_on(run: str) -> None:
        for is_pass in (True, False):
            scheduler.submit(work(run, seq[run], is_pass=is_pass, tokens=tokens), 0.0)
            seq[run] += 1

    for run in runs:
        scheduler.open(run, "a")
        go_on(run)
    while max(steps.values()) < 10:
        for item in scheduler.next_batch(0.0):
            scheduler.done(item, 0.0)
            if not item.is_pass:
                steps[item.run_id] += 1
                go_on(item.run_id)
    assert min(steps.values()) >= 8


def test_a_pass_larger_than_the_budget_goes_alone():
    scheduler = Scheduler(batch_tokens=BUDGET)
    scheduler.open("r", "me")
    for seq_id, tokens in ((1, 500), (2, 10), (3, 10)):
        scheduler.submit(work("r", seq_id, tokens=tokens), 0.0)
    assert [[w.seq_id for w in batch] for batch in drain(scheduler)] == [[1], [2, 3]]


def test_closing_a_run_leaves_the_others():
    scheduler = Scheduler(batch_tokens=BUDGET)
    for run in ("a", "b"):
        scheduler.open(run, "me")
        scheduler.submit(work(run, 2), 0.0)
        scheduler.submit(work(run, 1), 0.0)
    begun = scheduler.next_batch(0.0)
    scheduler.close("a")
    for item in begun:
        scheduler.done(item, 0.0)  # finishing work of a closed run is not an error
    assert drain(scheduler) == []
    scheduler.submit(work("b", 4), 0.0)
    assert scheduler.waiting() == 1
    scheduler.close("b")
    assert scheduler.waiting() == 0


def test_steps_of_several_runs_are_done_together_up_to_a_barrier_that_is_none():
    scheduler = Scheduler(batch_tokens=BUDGET)
    for run in ("a", "b", "saves", "c"):
        scheduler.open(run, run)
        scheduler.submit(work(run, 1, is_pass=False) if run == "saves" else step(run, 1), 0.0)
    assert [[w.run_id for w in batch] for batch in drain(scheduler)] == [["a", "b"], ["saves"], ["c"]]


def test_steps_done_together_are_no_more_of_one_owner_than_one_by_one():
    scheduler = Scheduler(batch_tokens=BUDGET)
    for n in range(2 * BARRIERS_A_ROUND):
        scheduler.open(f"flood{n}", "flood")
        scheduler.submit(step(f"flood{n}", 1), 0.0)
    scheduler.open("small", "small")
    scheduler.submit(work("small", 1), 0.0)
    assert [len(batch) for batch in drain(scheduler)] == [BARRIERS_A_ROUND, 1, BARRIERS_A_ROUND]


def test_all_steps_of_an_owner_who_is_alone_come_first_so_that_the_passes_behind_them_share_a_batch():
    scheduler, count = Scheduler(batch_tokens=100 * BUDGET), 3 * BARRIERS_A_ROUND
    for n in range(count):
        scheduler.open(f"run{n}", "alone")
        scheduler.submit(step(f"run{n}", 1), 0.0)
        scheduler.submit(work(f"run{n}", 2), 0.0)
    assert [len(batch) for batch in drain(scheduler)] == 3 * [BARRIERS_A_ROUND] + [count]


def in_turn(scheduler: Scheduler, *runs: str) -> None:
    """Each has had a pass and a step, came back 4 ms later, has had them again, and rests since second 8."""
    for run in runs:
        scheduler.open(run, run)
    for n, (arrives, begins, ends) in enumerate([(0.0, 0.0, 1.0), (1.004, 7.0, 8.0)]):
        for run in runs:
            scheduler.submit(work(run, 1 + 2 * n), arrives)
            scheduler.submit(step(run, 2 + 2 * n), arrives)
        for _ in range(2):
            for item in scheduler.next_batch(begins):
                scheduler.done(item, ends)


def test_a_pass_waits_for_the_passes_of_runs_that_are_about_to_come():
    scheduler = Scheduler(batch_tokens=BUDGET)
    in_turn(scheduler, "a", "b")
    scheduler.submit(work("a", 5), 8.002)
    until = scheduler.wait_until(8.002)
    assert until is not None
    assert 8.004 < until < 8.1
    scheduler.submit(work("b", 5), 8.004)
    assert scheduler.wait_until(8.004) is None
    assert [w.run_id for w in scheduler.next_batch(8.004)] == ["a", "b"]


def test_nothing_waits_beside_a_barrier_or_in_a_full_batch():
    scheduler = Scheduler(batch_tokens=BUDGET)
    in_turn(scheduler, "a", "b", "c")
    assert scheduler.wait_until(8.0) is None  # nothing is ready
    scheduler.submit(work("a", 5, tokens=BUDGET), 8.002)
    assert scheduler.wait_until(8.002) is None
    scheduler.next_batch(8.002)
    scheduler.submit(step("b", 5), 8.002)
    assert scheduler.wait_until(8.002) is None


@pytest.mark.parametrize("creation", [0.05, 0.3])
def test_an_owner_with_long_barriers_takes_less_than_half_of_the_time(creation: float):
    """One creates runs of a large rank without end; another sends its next pass 5 ms after its last step."""
    scheduler, now, spent = Scheduler(), 0.0, {"flood": 0.0, "honest": 0.0}
    scheduler.open("honest", "honest")
    sent, arrives, created = 0, 0.0, 0
    while now < 60:
        if arrives <= now:
            scheduler.submit(work("honest", sent + 1, tokens=256), arrives)
            scheduler.submit(step("honest", sent + 2), arrives)
            sent, arrives = sent + 2, math.inf
        if not any(run.startswith("flood") for run in scheduler.order()[1]):
            created += 1
            scheduler.open(f"flood{created}", "flood", 0)
            scheduler.submit(work(f"flood{created}", 0, is_pass=False), now)
        if (until := scheduler.wait_until(now)) is not None:
            now = min(until, arrives)
            continue
        for item in (batch := scheduler.next_batch(now)):
            who = "honest" if item.run_id == "honest" else "flood"
            took = creation if who == "flood" else 0.075 if item.is_pass else 0.005
            now, spent[who] = now + took, spent[who] + took
            scheduler.done(item, now)
        if batch[0].run_id == "honest" and not batch[0].is_pass:
            arrives = now + 0.005
    assert 0.5 < spent["honest"] / now < 0.65

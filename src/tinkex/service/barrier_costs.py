"""Measures how long each owner's barriers (create, save, load) take, for the scheduler's fairness.

A barrier cannot be interrupted and blocks every other run. A long one is therefore charged at 1.5 × its
duration. Pure. Knows nothing of what a barrier does.
"""

from __future__ import annotations

from collections import defaultdict

LONG = 0.03  # seconds, of the barriers of one owner in a round; less costs nothing
TIMES = 1.5  # what a second of a long barrier is charged; one of passes is charged 1
MOST_CHARGED = 5.0  # seconds: the first barrier does not pay for building the engine


class BarrierCosts:
    """Seconds spent in barriers, per owner. Steps are counted separately because runs share them."""

    def __init__(self) -> None:
        self._last: dict[tuple[str, bool], float] = {}
        self._spent: defaultdict[str, float] = defaultdict(float)  # this round
        self._began, self._together = 0.0, 1

    def begin(self, now: float, together: int) -> None:
        self._began, self._together = now, together

    def end(self, owner: str, shares: bool, now: float) -> float:
        """What the owner of a finished barrier is charged, in seconds; 0 for a short one."""
        seconds = min(MOST_CHARGED, (now - self._began) / self._together)
        self._last[owner, shares] = seconds
        self._spent[owner] += seconds
        return TIMES * seconds if self._spent[owner] >= LONG else 0.0

    def expected(self, owner: str, shares: bool) -> float:
        """What the next one may take, plus those that the owner has had this round."""
        return self._spent[owner] + self._last.get((owner, shares), 0.0)

    def begin_round(self) -> None:
        self._spent.clear()

    def forget(self, owner: str) -> None:
        for shares in (False, True):
            self._last.pop((owner, shares), None)

"""How long the barriers of each owner take, so that a long one has its turn by owner, as passes do.

A step takes milliseconds; a run of a large rank is created, saved or loaded in a second, and nothing can
interrupt that: all others wait for it, so its owner is charged for half as much again as it takes. Pure, as
the scheduler that asks. Knows nothing of what a barrier does.
"""

from __future__ import annotations

from collections import defaultdict

LONG = 0.03  # seconds, of the barriers of one owner in a round: less is nobody's concern
TIMES = 1.5  # what a second of a long barrier counts, where one of passes counts 1
MOST_CHARGED = 5.0  # seconds: the one that an engine was built for does not pay for all of that


class BarrierCosts:
    """Seconds of barriers, by owner. Steps, which share, are told apart from the rest."""

    def __init__(self) -> None:
        self._last: dict[tuple[str, bool], float] = {}
        self._spent: defaultdict[str, float] = defaultdict(float)  # this round
        self._began, self._together = 0.0, 1

    def begin(self, now: float, together: int) -> None:
        self._began, self._together = now, together

    def end(self, owner: str, shares: bool, now: float) -> float:
        """What the owner of a barrier that is done pays for, in seconds; nothing for one that is short."""
        seconds = min(MOST_CHARGED, (now - self._began) / self._together)
        self._last[owner, shares] = seconds
        self._spent[owner] += seconds
        return TIMES * seconds if self._spent[owner] >= LONG else 0.0

    def expected(self, owner: str, shares: bool) -> float:
        """What the next one may take, with those that the owner has had this round."""
        return self._spent[owner] + self._last.get((owner, shares), 0.0)

    def begin_round(self) -> None:
        self._spent.clear()

    def forget(self, owner: str) -> None:
        for shares in (False, True):
            self._last.pop((owner, shares), None)

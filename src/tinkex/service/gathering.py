"""How long a batch of passes waits for runs that are about to send theirs. Pure: told what happens, and when.

A run that trains step by step comes back a few milliseconds after its answer. A trainer that begins with
whoever is first leaves the others to a batch of their own, and what a batch costs at least is paid twice.
Promises: nobody waits but for a run that is due by how long it rested the last time, never longer than a part
of what the last batch took, and for one that does not come back only once. Knows nothing of work.
"""

from __future__ import annotations

PATIENCE = 0.010  # seconds, at the most
PART = 4  # a batch waits no longer than the last one took, divided by this


class Gathering:
    """When each run went, and how soon it is used to come back."""

    def __init__(self) -> None:
        self._resting: dict[str, float] = {}  # since when
        self._rested: dict[str, float] = {}  # for how long, the last time
        self._patience = 0.0
        self._since: float | None = None  # when the first pass of the next batch was ready

    def rests(self, run: str, now: float) -> None:
        """All that it asked for is done."""
        self._resting[run] = now

    def comes(self, run: str, now: float) -> None:
        """It asks for something."""
        if (since := self._resting.pop(run, None)) is not None:
            self._rested[run] = now - since

    def goes(self, run: str) -> None:
        """It will not come back."""
        self._resting.pop(run, None)
        self._rested.pop(run, None)

    def begins(self) -> None:
        """A batch is begun."""
        self._since = None

    def took(self, seconds: float) -> None:
        """The last batch is done."""
        self._patience = min(PATIENCE, seconds / PART)

    def until(self, now: float) -> float | None:
        """Passes are ready: until when they should wait for others; None if they should not."""
        self._since = now if self._since is None else self._since
        end = self._since + self._patience
        return end if now < end and any(self._due(run, now, end) for run in self._resting) else None

    def _due(self, run: str, now: float, end: float) -> bool:
        """Should it be here by `end`, and is it not long overdue?"""
        if run not in self._rested:
            return False
        expected = self._resting[run] + self._rested[run]
        return expected <= end and now < expected + PATIENCE

"""How long a batch of passes waits for runs that are about to send theirs. Pure: callers pass the time.

A run that trains step by step sends its next request a few milliseconds after its last result. Starting with
the first one to arrive would leave the others to a second batch, and the fixed cost of a batch is paid twice.
A batch waits only for a run that is due (judged by its last pause), for at most 1/PART of what the last batch
took, and only once for a run that does not come back.
"""

from __future__ import annotations

PATIENCE = 0.010  # seconds, at the most
PART = 4  # a batch waits no longer than the last one took, divided by this


class BatchingDelay:
    """When each run was last answered, and how soon it usually sends its next request."""

    def __init__(self) -> None:
        self._resting: dict[str, float] = {}  # since when
        self._rested: dict[str, float] = {}  # for how long, the last time
        self._patience = 0.0
        self._since: float | None = None  # when the first pass of the next batch was ready

    def rests(self, run: str, now: float) -> None:
        """All its requests are done."""
        self._resting[run] = now

    def comes(self, run: str, now: float) -> None:
        """It sent a request."""
        if (since := self._resting.pop(run, None)) is not None:
            self._rested[run] = now - since

    def goes(self, run: str) -> None:
        """It was evicted."""
        self._resting.pop(run, None)
        self._rested.pop(run, None)

    def begins(self) -> None:
        """A batch started."""
        self._since = None

    def took(self, seconds: float) -> None:
        """A batch took so long."""
        self._patience = min(PATIENCE, seconds / PART)

    def until(self, now: float) -> float | None:
        """Passes are ready: until when they should wait for others; None: not at all."""
        self._since = now if self._since is None else self._since
        end = self._since + self._patience
        return end if now < end and any(self._due(run, now, end) for run in self._resting) else None

    def _due(self, run: str, now: float, end: float) -> bool:
        """Should its next request be here by `end`, and is it not long overdue?"""
        if run not in self._rested:
            return False
        expected = self._resting[run] + self._rested[run]
        return expected <= end and now < expected + PATIENCE

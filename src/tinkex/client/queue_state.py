"""Queue states of one run or sampler: why its work is paused, as the server reports it.

Promises: each change is reported once and in order to the observers, off the loop; it is counted, and logged
(the same state at most once a minute). Polls and submissions are tracked apart, so that one request that is
paused and another that proceeds do not contradict each other. Knows nothing of polling.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from tinkex.client.loop import in_order

log = logging.getLogger("tinkex")
LOG_EVERY = 60.0  # seconds before the same state is logged again
ACTIVE = "active"

QueueListener = Callable[[str, str | None], None]  # queue state, its reason


class QueueStateObserver(Protocol):
    """Receives changes of queue states.

    States are active, paused_capacity, paused_rate_limit, paused_billing, or one of a newer server.
    """

    def on_queue_state_change(self, queue_state: str, queue_state_reason: str | None) -> None: ...


@dataclass(frozen=True)
class QueueStats:
    """How often each state was entered, and how many seconds the past ones lasted in all."""

    state: str
    changes: dict[str, int]
    seconds: dict[str, float]


class QueueWatch:
    """Merges the states that polls and submissions report into one, and reports its changes."""

    def __init__(
        self,
        what: str,
        *listeners: QueueListener,
        changed: Callable[[str, str, float], None] = lambda old, new, seconds: None,
    ) -> None:
        self._what = what
        self._listeners = listeners
        self._changed = changed  # called with the old state, the new one, and how long the old one lasted
        self._paused: dict[str, tuple[str, str | None]] = {}  # by source: a state other than active
        self._state = ACTIVE
        self._since = time.monotonic()
        self._logged: dict[str, float] = {}  # when each state was last logged
        self._pause_was_logged = False
        self._changes: Counter[str] = Counter()
        self._seconds: defaultdict[str, float] = defaultdict(float)

    def __call__(self, state: str, reason: str | None) -> None:
        """Report what a poll says."""
        self._report("poll", state, reason)

    def submitting(self, state: str, reason: str | None) -> None:
        """Report how a submission went."""
        self._report("submission", state, reason)

    def stats(self) -> QueueStats:
        return QueueStats(self._state, dict(self._changes), dict(self._seconds))

    def _report(self, source: str, state: str, reason: str | None) -> None:
        if state == ACTIVE:
            if not self._paused:  # the usual case
                return
            self._paused.pop(source, None)
        else:
            self._paused[source] = (state, reason)
        state, reason = next(iter(self._paused.values()), (ACTIVE, None))
        if state != self._state:
            self._change(state, reason)

    def _change(self, state: str, reason: str | None) -> None:
        now = time.monotonic()
        old, lasted = self._state, now - self._since
        self._state, self._since = state, now
        self._changes[state] += 1
        self._seconds[old] += lasted
        self._log(state, reason, now)
        self._changed(old, state, lasted)
        for listener in self._listeners:
            in_order(f"{self._what}: its queue state observer failed", listener, state, reason)

    def _log(self, state: str, reason: str | None, now: float) -> None:
        if state == ACTIVE:
            if self._pause_was_logged:
                log.info("%s is running again", self._what)
            return
        self._pause_was_logged = now - self._logged.get(state, -LOG_EVERY) >= LOG_EVERY
        if self._pause_was_logged:
            self._logged[state] = now
            log.warning("%s is paused (%s)%s", self._what, state, f": {reason}" if reason else "")

"""Why work waits: a server's queue states, followed for one run or one sampler.

Promises: each change is told once, in order, to whoever observes, off the loop; it is counted, and logged
(the same state at most once a minute). What polls say and what submissions meet are kept apart, so that one
request that is put off and another that goes on do not contradict each other. Knows nothing of polling.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from tinkex.client.loop import Threads

log = logging.getLogger("tinkex")
LOG_EVERY = 60.0  # seconds before the same state of the same thing is logged again
ACTIVE = "active"

Listener = Callable[[str, str | None], None]  # queue state, its reason
_observing: Threads | None = None  # one thread: observers hear of changes in their order


class QueueStateObserver(Protocol):
    """Whoever wants to know.

    States are active, paused_capacity, paused_rate_limit, paused_billing, or what a newer server says.
    """

    def on_queue_state_change(self, queue_state: str, queue_state_reason: str | None) -> None: ...


@dataclass(frozen=True)
class QueueStats:
    """How often each state came to be, and how long those that are over lasted, in seconds."""

    state: str
    changes: dict[str, int]
    seconds: dict[str, float]


class QueueWatch:
    """Turns what polls and submissions say into changes of one state."""

    def __init__(
        self,
        what: str,
        *listeners: Listener,
        changed: Callable[[str, str, float], None] = lambda old, new, seconds: None,
    ) -> None:
        self._what = what
        self._listeners = listeners
        self._changed = changed  # told of the old state, the new one, and how long the old one lasted
        self._said: dict[str, tuple[str, str | None]] = {}  # by who says so, unless it is "active"
        self._state = ACTIVE
        self._since = time.monotonic()
        self._logged: dict[str, float] = {}  # when each state was last said
        self._pause_was_said = False
        self._changes: Counter[str] = Counter()
        self._seconds: defaultdict[str, float] = defaultdict(float)

    def __call__(self, state: str, reason: str | None) -> None:
        """What a poll says."""
        self._take("poll", state, reason)

    def submitting(self, state: str, reason: str | None) -> None:
        """What a submission met."""
        self._take("submission", state, reason)

    def stats(self) -> QueueStats:
        return QueueStats(self._state, dict(self._changes), dict(self._seconds))

    def _take(self, source: str, state: str, reason: str | None) -> None:
        if state == ACTIVE:
            if not self._said:  # as nearly always
                return
            self._said.pop(source, None)
        else:
            self._said[source] = (state, reason)
        now_state, why = next(iter(self._said.values()), (ACTIVE, None))
        if now_state != self._state:
            self._change(now_state, why)

    def _change(self, state: str, reason: str | None) -> None:
        now = time.monotonic()
        old, lasted = self._state, now - self._since
        self._state, self._since = state, now
        self._changes[state] += 1
        self._seconds[old] += lasted
        self._log(state, reason, now)
        self._changed(old, state, lasted)
        for listener in self._listeners:
            _observe(self._what, listener, state, reason)

    def _log(self, state: str, reason: str | None, now: float) -> None:
        if state == ACTIVE:
            if self._pause_was_said:
                log.info("%s is running again", self._what)
            return
        self._pause_was_said = now - self._logged.get(state, -LOG_EVERY) >= LOG_EVERY
        if self._pause_was_said:
            self._logged[state] = now
            log.warning("%s is paused (%s)%s", self._what, state, f": {reason}" if reason else "")


def _observe(what: str, listener: Listener, state: str, reason: str | None) -> None:
    global _observing
    if _observing is None:
        _observing = Threads(1, thread_name_prefix="tinkex-observer")

    def tell() -> None:
        try:
            listener(state, reason)
        except Exception:  # a user's code: it must not cost the result that was being waited for
            log.exception("%s: its queue state observer failed", what)

    _observing.submit(tell)

"""What the console learns from the service in its own process: which runs are busy or wait, and for what."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from tinkex.service.futures import ACTIVE
from tinkex.service.rows import RunRow
from tinkex.service.samplers import RunningSample
from tinkex.service.service import Service
from tinkex.service.sessions import TraceEvent

EVENTS = 200  # of a run, at most


class LiveService:
    """A view of a running service."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._flushed = 0.0
        self._looked, self._samples = -1.0, dict[str, list[RunningSample]]()

    def flush(self) -> None:
        """At most once a second, however many pages are open: it writes to the ledger."""
        if (now := time.monotonic()) - self._flushed >= 1.0:
            self._flushed = now
            self._service.flush()

    def busy(self) -> set[str]:
        return {*self._service.runs.busy(), *self._sampling()}

    def _sampling(self) -> dict[str, list[RunningSample]]:
        """What is sampled of which run; looked up twice a second, however many pages are open."""
        if (now := time.monotonic()) - self._looked >= 0.5:
            self._looked, self._samples = now, self._service.samplers.under_way()
            asyncio.get_running_loop().call_later(1.0, self._samples.clear)  # else results stay in memory
        return self._samples

    def seen_at(self, session_id: str) -> float | None:
        return self._service.activity.seen.get(session_id)

    def events(self, row: RunRow) -> list[TraceEvent]:
        return self._service.traces.latest(row.session_id, row.run_id, EVENTS)

    def waits_for(self, row: RunRow, owns: Callable[[str], bool]) -> str:
        return self._training_waits(row, owns) or self._draws(row)

    def _draws(self, row: RunRow) -> str:
        if not (samples := [one for one in self._sampling().get(row.run_id, ()) if not one.future.done]):
            return ""
        states = [one.future.queue_state for one in samples]
        if ACTIVE not in states:
            return f"its samples wait: {states[-1][1]}"
        count = sum(one.request.num_samples for one in samples)
        return f"draws {count} sample{'' if count == 1 else 's'}"

    def _training_waits(self, row: RunRow, owns: Callable[[str], bool]) -> str:
        run = self._service.runs.get(row.run_id)
        if run is None or run.idle:
            return ""
        if run.model.loading:
            return f"the base model {run.model.name} is being loaded"
        if (missing := run.queue.missing) is not None:
            return f"request {missing} of this run has not arrived, and those after it wait"
        executed, waiting = self._service.runs.order(run.model)
        if row.run_id in executed or row.run_id not in waiting:
            return ""
        before = [*executed, *waiting[: waiting.index(row.run_id)]]
        return f"{ordinal(len(before) + 1)} in the queue, behind {self._whose(before, owns)}"

    def _whose(self, runs: list[str], owns: Callable[[str], bool]) -> str:
        """Runs by name, if they are the visitor's; of others only how many there are."""
        rows = [found.row for run in runs if (found := self._service.runs.get(run)) is not None]
        mine = [row.name or row.run_id for row in rows if owns(row.owner)]
        others = len(runs) - len(mine)
        parts = mine[:3]
        if len(mine) > 3:
            parts.append(f"{len(mine) - 3} more of yours")
        if others:
            parts.append(f"{others} {'run' if others == 1 else 'runs'} of others")
        return " and ".join(parts) or "nobody"


def ordinal(number: int) -> str:
    """A place in a queue.

    >>> [ordinal(n) for n in (1, 2, 3, 11, 22)]
    ['1st', '2nd', '3rd', '11th', '22nd']
    """
    ending = "th" if 10 <= number % 100 <= 20 else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"

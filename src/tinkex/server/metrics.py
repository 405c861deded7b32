"""What is counted: requests, waits, work, tokens, failures. How Prometheus reads it is in prometheus.py.

Promises: counting costs a dictionary look-up. Nothing here says whose work it was. Knows what the service's
observers tell; asks the service nothing on the path of a request.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter as Tally
from collections import defaultdict
from collections.abc import Iterable
from typing import Any, Protocol

from tinkex.types.futures import RequestFailedResponse
from tinkex.types.outputs import SampleResponse

SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)


class Watched(Protocol):
    """What the gauges are read from."""

    def queue_depths(self) -> Iterable[tuple[str, int]]:
        """Work accepted and not begun, by base model."""
        ...

    def engine_stats(self) -> Iterable[tuple[str, dict[str, float]]]:
        """Each loaded engine's gauges, by base model."""
        ...

    def futures_kept(self) -> int: ...


class Durations:
    """How often something took how long."""

    def __init__(self) -> None:
        self.counts = [0] * (len(SECONDS) + 1)
        self.total = 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(SECONDS, seconds)] += 1
        self.total += seconds


class Metrics:
    """All numbers of one server."""

    def __init__(self) -> None:
        self.requests: Tally[tuple[str, int]] = Tally()
        self.tokens: Tally[str] = Tally()
        self.failures: Tally[str] = Tally()
        self.work: defaultdict[str, Durations] = defaultdict(Durations)
        self.waits: defaultdict[str, Durations] = defaultdict(Durations)
        self.samples = Durations()
        self.watched: Watched | None = None

    # -- told by others ----------------------------------------------------------------------------------

    def count_request(self, op: str, status: int) -> None:
        self.requests[op, status] += 1

    def worked(self, work: Any, op: str, seconds: float) -> None:
        """A worker's observer: `work` (service.scheduler.Work) was executed in `seconds`."""
        future = work.what.future
        self.work[op].add(seconds)
        self.waits[op].add(max(0.0, time.monotonic() - seconds - future.created))
        if work.is_pass:
            self.tokens["training"] += work.tokens
        if isinstance(future.outcome, RequestFailedResponse):
            self.failures[str(future.outcome.category)] += 1

    def sampled(self, sampler: Any, seconds: float, outcome: SampleResponse | RequestFailedResponse) -> None:
        """The samplers' observer."""
        self.samples.add(seconds)
        if isinstance(outcome, RequestFailedResponse):
            self.failures[str(outcome.category)] += 1
            return
        for sequence in outcome.sequences:
            self.tokens["sampled"] += 0 if sequence.tokens_np is None else sequence.tokens_np.size
        self.tokens["prompt_cached"] += outcome.prompt_cache_hit_tokens

    def watch(self, watched: Watched) -> None:
        self.watched = watched

"""Counters and histograms of one server: requests, queue waits, work, tokens, failures.

Counting is a dictionary look-up. No number names a user. The service calls `worked` and `sampled` as its
observers; prometheus.py renders the numbers.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter, defaultdict

from tinkex.service.rows import SamplerRow
from tinkex.service.runs.execution import Execution
from tinkex.types.futures import RequestFailedResponse
from tinkex.types.outputs import SampleResponse

SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)


class DurationHistogram:
    """Counts by upper bound (SECONDS, and infinity), and the sum."""

    def __init__(self) -> None:
        self.counts = [0] * (len(SECONDS) + 1)
        self.total = 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(SECONDS, seconds)] += 1
        self.total += seconds


class Metrics:
    """All numbers of one server."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, int]] = Counter()
        self.tokens: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()
        self.work: defaultdict[str, DurationHistogram] = defaultdict(DurationHistogram)
        self.waits: defaultdict[str, DurationHistogram] = defaultdict(DurationHistogram)
        self.samples = DurationHistogram()

    def count_request(self, op: str, status: int) -> None:
        self.requests[op, status] += 1

    def worked(self, work: Execution, seconds: float) -> None:
        """The service executed a training request."""
        future = work.future
        self.work[work.op].add(seconds)
        self.waits[work.op].add(max(0.0, time.monotonic() - seconds - future.created))
        if work.one_pass is not None:
            self.tokens["training"] += work.tokens
        if isinstance(future.outcome, RequestFailedResponse):
            self.failures[str(future.outcome.category)] += 1

    def sampled(
        self, row: SamplerRow, seconds: float, outcome: SampleResponse | RequestFailedResponse
    ) -> None:
        """A sample request ended, `seconds` after it was accepted."""
        self.samples.add(seconds)
        if isinstance(outcome, RequestFailedResponse):
            self.failures[str(outcome.category)] += 1
            return
        for sequence in outcome.sequences:
            self.tokens["sampled"] += 0 if sequence.tokens_np is None else sequence.tokens_np.size
        self.tokens["prompt_cached"] += outcome.prompt_cache_hit_tokens

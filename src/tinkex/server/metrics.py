"""Counters and histograms of one server, and the page on which Prometheus reads them.

Counting is a dictionary look-up. No number names a user. The service calls `worked` and `sampled` as its
observers.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate
from types import SimpleNamespace
from typing import Any, NamedTuple

from tinkex.service.rows import SamplerRow
from tinkex.service.runs.execution import Execution
from tinkex.service.samplers import Outcome
from tinkex.service.service import Service
from tinkex.types.futures import RequestFailedResponse
from tinkex.types.sampling import SampleRequest

SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)


class DurationHistogram:
    """Counts by upper bound (SECONDS, and infinity), and the sum."""

    def __init__(self) -> None:
        self.counts = [0] * (len(SECONDS) + 1)
        self.total = 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(SECONDS, seconds)] += 1
        self.total += seconds


class RecentError(NamedTuple):
    """A future that failed, and whose it was."""

    at: float
    owner: str
    what: str
    text: str


class Metrics:
    """All numbers of one server. Only `errors` names users: pages show each their own."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, int]] = Counter()  # by operation and status
        self.tokens: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()
        self.work: defaultdict[str, DurationHistogram] = defaultdict(DurationHistogram)
        self.waits: defaultdict[str, DurationHistogram] = defaultdict(DurationHistogram)
        self.samples = DurationHistogram()
        self.stalls = DurationHistogram()
        self._recent_stalls: deque[float] = deque([0.0], maxlen=600)
        self.errors: deque[RecentError] = deque(maxlen=500)
        self._history: deque[tuple[float, dict[str, float]]] = deque(maxlen=13)  # of a minute

    def worked(self, work: Execution, seconds: float) -> None:
        """The service executed a training request."""
        future = work.future
        self.work[work.op].add(seconds)
        self.waits[work.op].add(max(0.0, time.monotonic() - seconds - future.created))
        if work.one_pass is not None:
            self.tokens["training"] += work.tokens
        if isinstance(future.outcome, RequestFailedResponse):
            self._failed(
                work.run.row.owner, f"{work.op} of {work.run.row.name or work.run.id}", future.outcome
            )

    def _failed(self, owner: str, what: str, outcome: RequestFailedResponse) -> None:
        self.failures[str(outcome.category)] += 1
        self.errors.append(RecentError(time.time(), owner, what, outcome.error))

    def refused(self, owner: str, what: str, text: str) -> None:
        """A request was answered with an error."""
        self.errors.append(RecentError(time.time(), owner, what, text))

    def sampled(self, row: SamplerRow, seconds: float, outcome: Outcome, request: SampleRequest) -> None:
        """A sample request ended, `seconds` after it was accepted."""
        self.samples.add(seconds)
        if isinstance(outcome, RequestFailedResponse):
            self._failed(row.owner, f"sample from {row.model_path or row.base_model}", outcome)
            return
        for sequence in outcome.sequences:
            self.tokens["sampled"] += 0 if sequence.tokens_np is None else sequence.tokens_np.size
        self.tokens["prompt_cached"] += outcome.prompt_cache_hit_tokens

    def stalled(self, seconds: float) -> None:
        """The event loop came to a timer that much too late; called ten times a second."""
        self.stalls.add(seconds)
        self._recent_stalls.append(seconds)
        now = time.monotonic()
        if not self._history or now - self._history[-1][0] >= 5.0:
            self._history.append((now, self._counts()))

    def _counts(self) -> dict[str, float]:
        failures = sum(self.failures.values())
        return {
            "requests per second": sum(self.requests.values()),
            "trained tokens per second": self.tokens["training"],
            "sampled tokens per second": self.tokens["sampled"], "failures per second": failures,
        }  # fmt: skip

    def rates(self, now: float) -> dict[str, float]:
        """How much there was of what, over the last minute."""
        if not self._history:
            return {}
        then, before = self._history[0]
        seconds = max(now - then, 1.0)
        return {name: (count - before[name]) / seconds for name, count in self._counts().items()}

    def page(self, service: Service) -> tuple[str, bytes]:
        """The content type and the text of the page, with gauges read from the service at this moment."""
        # Imported here: it takes a tenth of a second, and many servers are never scraped.
        from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

        collector: Any = SimpleNamespace(collect=lambda: self._families(service))
        return CONTENT_TYPE_LATEST, generate_latest(collector)

    def _families(self, service: Service) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        def family(kind: Any, name: str, about: str, labels: list[str], values: Iterable[Any]) -> Any:
            made = kind(f"tinkex_{name}", about, labels=labels)
            for label, *value in values:
                made.add_metric([label] if isinstance(label, str) else [*map(str, label)], *value)
            return made

        counter, gauge, histogram = CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
        yield family(counter, "requests", "HTTP requests.", ["op", "status"], self.requests.items())
        yield family(counter, "tokens", "Tokens, by kind.", ["kind"], self.tokens.items())
        yield family(counter, "failures", "Futures that failed.", ["category"], self.failures.items())
        about = "Execution, by operation."
        yield family(histogram, "work_seconds", about, ["op"], _durations(self.work))
        about = "From acceptance to execution, by operation."
        yield family(histogram, "wait_seconds", about, ["op"], _durations(self.waits))
        about = "Sample requests, from acceptance to the end."
        yield family(histogram, "sample_seconds", about, [], _durations({(): self.samples}))
        about = "How late the event loop was, looked at every 0.1 s."
        yield family(histogram, "loop_stall_seconds", about, [], _durations({(): self.stalls}))
        about = "The longest stall of the event loop within a minute."
        yield gauge("tinkex_loop_longest_stall_seconds", about, max(self._recent_stalls))
        if not service.ready:
            return
        about = "Training work accepted, not begun."
        yield family(gauge, "queue_depth", about, ["model"], service.runs.queue_depths())
        yield gauge("tinkex_futures", "Futures in memory.", len(service.futures))
        stats: defaultdict[str, list[tuple[str, float]]] = defaultdict(list)
        for model in service.models:
            for name, value in model.engine.heartbeat().stats.items() if model.engine is not None else ():
                stats[name].append((model.name, value))
        for name, values in stats.items():
            yield family(gauge, f"engine_{name}", "A gauge of the engine.", ["model"], values)


def _durations(histograms: Mapping[Any, DurationHistogram]) -> Iterator[tuple[Any, ...]]:
    bounds = [*map(str, SECONDS), "+Inf"]
    for label, each in histograms.items():
        yield label, list(zip(bounds, accumulate(each.counts), strict=True)), each.total

"""What is counted, for Prometheus: requests, waits, work, tokens, failures, and what the engines hold.

Promises: counting costs a dictionary look-up; gauges are read when somebody asks. Nothing here says whose
work it was. Knows what the service's observers tell; asks the service nothing on the path of a request.
"""

from __future__ import annotations

import time
from collections import Counter as Tally
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

from tinkex.types.futures import RequestFailedResponse
from tinkex.types.outputs import SampleResponse

_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
CONTENT_TYPE = CONTENT_TYPE_LATEST


class Watched(Protocol):
    """What the gauges are read from."""

    def queue_depths(self) -> Iterable[tuple[str, int]]:
        """Work accepted and not begun, by base model."""
        ...

    def engine_stats(self) -> Iterable[tuple[str, dict[str, float]]]:
        """Each loaded engine's gauges, by base model."""
        ...

    def futures_kept(self) -> int: ...


class Metrics(Collector):
    """All numbers of one server."""

    def __init__(self) -> None:
        self._requests: Tally[tuple[str, int]] = Tally()
        self._watched: Watched | None = None
        self._registry = CollectorRegistry()
        self._registry.register(self)
        self._work = self._histogram("work_seconds", "Execution, by operation.", "op")
        self._waits = self._histogram("wait_seconds", "From acceptance to execution, by operation.", "op")
        self._samples = self._histogram("sample_seconds", "Sample requests, from acceptance to the end.")
        self._tokens = Counter("tinkex_tokens", "Tokens, by kind.", ["kind"], registry=self._registry)
        self._failures = Counter(
            "tinkex_failures", "Futures that failed.", ["category"], registry=self._registry
        )

    def _histogram(self, name: str, help: str, *labels: str) -> Histogram:
        return Histogram(f"tinkex_{name}", help, labels, buckets=_SECONDS, registry=self._registry)

    # -- told by others ----------------------------------------------------------------------------------

    def count_request(self, op: str, status: int) -> None:
        self._requests[op, status] += 1

    def worked(self, work: Any, op: str, seconds: float) -> None:
        """A worker's observer: `work` (service.scheduler.Work) was executed in `seconds`."""
        future = work.what.future
        self._work.labels(op).observe(seconds)
        self._waits.labels(op).observe(max(0.0, time.monotonic() - seconds - future.created))
        if work.is_pass:
            self._tokens.labels("training").inc(work.tokens)
        if isinstance(future.outcome, RequestFailedResponse):
            self._failures.labels(str(future.outcome.category)).inc()

    def sampled(self, sampler: Any, seconds: float, response: SampleResponse | None) -> None:
        """The samplers' observer; a failed sample has no response."""
        self._samples.observe(seconds)
        if response is None:
            self._failures.labels("unknown").inc()
            return
        drawn = sum(0 if s.tokens_np is None else len(s.tokens_np) for s in response.sequences)
        self._tokens.labels("sampled").inc(drawn)
        self._tokens.labels("prompt_cached").inc(response.prompt_cache_hit_tokens)

    def watch(self, watched: Watched) -> None:
        self._watched = watched

    # -- asked by Prometheus -----------------------------------------------------------------------------

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        requests = CounterMetricFamily("tinkex_requests", "HTTP requests.", labels=["op", "status"])
        for (op, status), count in self._requests.items():
            requests.add_metric([op, str(status)], count)
        yield requests
        if self._watched is None:
            return
        depth = GaugeMetricFamily(
            "tinkex_queue_depth", "Training work accepted, not begun.", labels=["model"]
        )
        for model, waiting in self._watched.queue_depths():
            depth.add_metric([model], waiting)
        yield depth
        yield GaugeMetricFamily("tinkex_futures", "Promises kept.", self._watched.futures_kept())
        yield from self._engine_gauges(self._watched)

    @staticmethod
    def _engine_gauges(watched: Watched) -> Iterable[Metric]:
        gauges: dict[str, GaugeMetricFamily] = {}
        for model, stats in watched.engine_stats():
            for name, value in stats.items():
                if name not in gauges:
                    gauges[name] = GaugeMetricFamily(
                        f"tinkex_engine_{name}", "See Engine.stats.", labels=["model"]
                    )
                gauges[name].add_metric([model], value)
        return gauges.values()

"""What was counted, as Prometheus reads it; the gauges are read when somebody asks.

Imported when first asked for: the library takes a tenth of a second, and many servers are never asked.
"""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Iterator
from itertools import accumulate

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from tinkex.server.metrics import SECONDS, Durations, Metrics, Watched

CONTENT_TYPE = CONTENT_TYPE_LATEST


class Page:
    """All numbers of one server."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def text(self) -> bytes:
        return generate_latest(self)  # type: ignore[arg-type]  # of a registry it asks for `collect` alone

    def collect(self) -> Iterator[Metric]:
        metrics = self._metrics
        requests = CounterMetricFamily("tinkex_requests", "HTTP requests.", labels=["op", "status"])
        for (op, status), count in metrics.requests.items():
            requests.add_metric([op, str(status)], count)
        yield requests
        yield _counter("tokens", "Tokens, by kind.", "kind", metrics.tokens)
        yield _counter("failures", "Futures that failed.", "category", metrics.failures)
        yield _histogram("work_seconds", "Execution, by operation.", "op", metrics.work)
        yield _histogram("wait_seconds", "From acceptance to execution, by operation.", "op", metrics.waits)
        samples = {"": metrics.samples}
        yield _histogram("sample_seconds", "Sample requests, from acceptance to the end.", "", samples)
        if metrics.watched is not None:
            yield from _gauges(metrics.watched)


def _counter(name: str, help: str, label: str, tally: Tally[str]) -> Metric:
    family = CounterMetricFamily(f"tinkex_{name}", help, labels=[label])
    for key, count in tally.items():
        family.add_metric([key], count)
    return family


def _histogram(name: str, help: str, label: str, durations: dict[str, Durations]) -> Metric:
    family = HistogramMetricFamily(f"tinkex_{name}", help, labels=[label] if label else [])
    bounds = [*map(str, SECONDS), "+Inf"]
    for key, each in durations.items():
        buckets = list(zip(bounds, accumulate(each.counts), strict=True))
        family.add_metric([key] if label else [], buckets, each.total)
    return family


def _gauges(watched: Watched) -> Iterator[Metric]:
    depth = GaugeMetricFamily("tinkex_queue_depth", "Training work accepted, not begun.", labels=["model"])
    for model, waiting in watched.queue_depths():
        depth.add_metric([model], waiting)
    yield depth
    yield GaugeMetricFamily("tinkex_futures", "Promises kept.", watched.futures_kept())
    gauges: dict[str, GaugeMetricFamily] = {}
    for model, stats in watched.engine_stats():
        for name, value in stats.items():
            if name not in gauges:
                gauges[name] = GaugeMetricFamily(
                    f"tinkex_engine_{name}", "See Engine.stats.", labels=["model"]
                )
            gauges[name].add_metric([model], value)
    yield from gauges.values()

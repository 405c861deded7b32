"""The page that Prometheus scrapes: the server's counters, and gauges read from the service at that moment.

Imported on the first scrape: prometheus_client takes a tenth of a second, and many servers are never scraped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import accumulate

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST as CONTENT_TYPE

from tinkex.server.metrics import SECONDS, DurationHistogram, Metrics
from tinkex.service.service import Service

__all__ = ["CONTENT_TYPE", "MetricsPage"]


class MetricsPage:
    """A collector in prometheus_client's sense."""

    def __init__(self, metrics: Metrics, service: Service) -> None:
        self._metrics, self._service = metrics, service

    def text(self) -> bytes:
        return generate_latest(self)  # type: ignore[arg-type]  # it only calls `collect`

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
        if self._service.ready:
            yield from _gauges(self._service)


def _counter(name: str, help: str, label: str, counts: Counter[str]) -> Metric:
    family = CounterMetricFamily(f"tinkex_{name}", help, labels=[label])
    for key, count in counts.items():
        family.add_metric([key], count)
    return family


def _histogram(name: str, help: str, label: str, durations: dict[str, DurationHistogram]) -> Metric:
    family = HistogramMetricFamily(f"tinkex_{name}", help, labels=[label] if label else [])
    bounds = [*map(str, SECONDS), "+Inf"]
    for key, each in durations.items():
        buckets = list(zip(bounds, accumulate(each.counts), strict=True))
        family.add_metric([key] if label else [], buckets, each.total)
    return family


def _gauges(service: Service) -> Iterator[Metric]:
    depth = GaugeMetricFamily("tinkex_queue_depth", "Training work accepted, not begun.", labels=["model"])
    for name, waiting in service.runs.queue_depths():
        depth.add_metric([name], waiting)
    yield depth
    yield GaugeMetricFamily("tinkex_futures", "Futures in memory.", len(service.futures))
    gauges: dict[str, GaugeMetricFamily] = {}
    for model in service.models:
        for name, value in model.engine.heartbeat().stats.items() if model.engine is not None else ():
            if name not in gauges:
                about = "A gauge of the engine."
                gauges[name] = GaugeMetricFamily(f"tinkex_engine_{name}", about, labels=["model"])
            gauges[name].add_metric([model.name], value)
    yield from gauges.values()

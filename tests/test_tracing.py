"""OpenTelemetry: one trace through all six hops, nothing of anyone's in it, and no cost to who has none."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import metrics, trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tests.client.conftest import eventually
from tests.server.conftest import Running
from tests.service.harness import MODEL, config, datum
from tinkex import AdamParams, Datum, ModelInput, RequestFailedError, SamplingParams, ServiceClient
from tinkex.client import loop as background
from tinkex.client.polling import QueueWatch
from tinkex.client.server_connection import ServerConnection
from tinkex.engine.fake import FakeEngine
from tinkex.local import LocalTransport
from tinkex.server.serve import ServerConfig
from tinkex.service.service import Service

HOPS = ["client", "transport", "server", "service", "scheduler", "engine"]
KEY = "tml-secretForTracing"


@pytest.fixture(scope="module")
def exporter() -> Iterator[InMemorySpanExporter]:
    """The process's tracer, set up as a user does; it can be set only once."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    yield exporter
    exporter.shutdown()  # the tests after these keep nothing


@pytest.fixture
def spans(exporter: InMemorySpanExporter) -> Callable[[], list[Any]]:
    exporter.clear()
    return lambda: list(exporter.get_finished_spans())


@pytest.fixture(params=["served", "embedded"])
def service(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[ServiceClient]:
    for name in ("TINKER_API_KEY", "TINKER_BASE_URL", "TINKER_TELEMETRY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    settings = config(tmp_path / "home")
    if request.param == "served":
        running = Running(ServerConfig(settings, port=0, drain_seconds=0.1))
        client = ServiceClient(base_url=running.url, api_key=KEY)
        yield client
        client.close().result(10)
        running.stop()
    else:
        local = Service(settings, FakeEngine)
        transport = LocalTransport(local)
        monkeypatch.setattr("tinkex.local.connection", lambda settings: ServerConnection(transport, settings))
        client = ServiceClient()
        yield client
        client.close().result(10)
        asyncio.run_coroutine_threadsafe(local.stop(), background.get_loop()).result(10)


def hop_of(span: Any) -> str:
    return span.name.removeprefix("tinkex.").partition(" ")[0]


def within(spans: list[Any], root: Any) -> list[Any]:
    return [span for span in spans if span.context.trace_id == root.get_span_context().trace_id]


@pytest.mark.slow
@pytest.mark.parametrize("op", ["forward_backward", "optim_step", "sample", "stream_sample"])
def test_one_trace_from_the_users_span_to_the_engine(
    service: ServiceClient, spans: Callable[[], list[Any]], op: str
) -> None:
    """The six hops; embedded skips the third and nothing else."""
    run = service.create_lora_training_client(MODEL, rank=4, timeout=20)
    sampler = service.create_sampling_client(base_model=MODEL, timeout=20)
    prompt, params = ModelInput.from_ints([1, 2, 3]), SamplingParams(max_tokens=3)
    calls: dict[str, Callable[[], Any]] = {
        "forward_backward": lambda: run.forward_backward([datum()], "cross_entropy"),
        "optim_step": lambda: run.optim_step(AdamParams()),
        "sample": lambda: sampler.sample(prompt, 1, params),
        "stream_sample": lambda: sampler.sample_stream(prompt, params),
    }
    with trace.get_tracer("mine").start_as_current_span("mine") as mine:
        calls[op]().result(20)
    served = bool(service._connection.base_url)
    wanted = [hop for hop in HOPS if served or hop != "server"]
    eventually(lambda: {hop_of(span) for span in within(spans(), mine)} >= set(wanted))
    found = within(spans(), mine)
    by_id = {span.context.span_id: span for span in found}
    engine = next(span for span in found if hop_of(span) == "engine")
    path, span = [hop_of(engine)], engine
    while span.parent is not None and span.parent.span_id in by_id:
        span = by_id[span.parent.span_id]
        if hop_of(span) != "mine":
            path.insert(0, hop_of(span))
    if "sample" in op:  # the wait for room and the engine's work are one after the other
        assert "scheduler" in {hop_of(span) for span in found}
        wanted.remove("scheduler")
    assert path == wanted
    assert engine.name.split()[1] == {"stream_sample": "sample"}.get(op, op)


def test_requests_that_share_a_batch_are_linked(
    service: ServiceClient, spans: Callable[[], list[Any]]
) -> None:
    """Promise 4: runs share a pass; each request finds the engine's span, by parent or by link."""
    runs = [service.create_lora_training_client(MODEL, rank=4, timeout=20) for _ in range(6)]
    for _ in range(20):
        futures = [run.forward_backward([datum()], "cross_entropy") for run in runs]
        for future in futures:
            future.result(20)
        engines = [s for s in spans() if s.name == "tinkex.engine forward_backward"]
        if any(span.links for span in engines):
            break
    shared = next(span for span in engines if span.links)
    assert shared.attributes["tinkex.requests"] == len(shared.links) + 1
    assert (
        len({link.context.trace_id for link in shared.links} | {shared.context.trace_id})
        == len(shared.links) + 1
    )


def test_nothing_of_anyones_is_in_a_span(service: ServiceClient, spans: Callable[[], list[Any]]) -> None:
    """An error's class is told, not its words."""
    run = service.create_lora_training_client(MODEL, rank=4, timeout=20)
    bad = Datum(ModelInput.from_ints([1, 999999]), {"target_tokens": [2, 3]})
    with pytest.raises(RequestFailedError, match="token ids are"):
        run.forward_backward([bad], "cross_entropy").result(20)
    eventually(lambda: any(s.name == "tinkex.client forward_backward" for s in spans()))
    text = "".join(span.to_json() for span in spans())
    for secret in (KEY, "999999", "token ids are", "x-api-key"):
        assert secret not in text
    (failed,) = [s for s in spans() if s.name == "tinkex.client forward_backward"]
    assert failed.status.description == "RequestFailedError"
    assert not failed.events


def test_what_nobody_called_for_makes_no_trace(
    service: ServiceClient, spans: Callable[[], list[Any]]
) -> None:
    """Heartbeats and telemetry are no part of anyone's trace."""
    service.create_sampling_client(base_model=MODEL, timeout=20)
    (root,) = {s.context.trace_id for s in spans() if s.name.startswith("tinkex.client")}
    assert {s.context.trace_id for s in spans() if hop_of(s) in ("transport", "service")} == {root}


def test_queue_states_are_a_metric() -> None:
    reader = InMemoryMetricReader()
    metrics.set_meter_provider(MeterProvider([reader]))
    watch = QueueWatch("it")
    for _ in range(2):
        watch("paused_capacity", "why")
        watch("active", None)
    data: Any = reader.get_metrics_data()
    found = {
        (metric.name, point.attributes["state"]): point.value
        for metric in data.resource_metrics[0].scope_metrics[0].metrics
        for point in metric.data.data_points
    }
    assert found["tinkex.queue.changes", "paused_capacity"] == 2
    assert found["tinkex.queue.changes", "active"] == 2
    assert found["tinkex.queue.seconds", "paused_capacity"] > 0


CLIENT = """
import sys, tinkex
assert not [m for m in sys.modules if m.startswith("opentelemetry")], "importing the package"
from tests.stub import Stub
with Stub() as stub:
    with tinkex.ServiceClient(base_url=stub.url) as service:
        run = service.create_lora_training_client("stub/base")
        run.optim_step().result(10)
        sampler = service.create_sampling_client(base_model="stub/base")
        sampler.sample(tinkex.ModelInput.from_ints([1]), 1, tinkex.SamplingParams(max_tokens=1)).result(10)
    assert not any("traceparent" in request.headers for request in stub.requests)
print([m for m in sys.modules if m.startswith("opentelemetry")])
"""


@pytest.mark.slow
def test_who_does_not_trace_does_not_even_import_it() -> None:
    """No import cost, whether or not it is installed."""
    done = subprocess.run([sys.executable, "-c", CLIENT], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"

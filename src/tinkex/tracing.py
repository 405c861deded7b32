"""OpenTelemetry spans for the hops of a request, and metrics of its queue states.

    tinkex.client · tinkex.transport · tinkex.server · tinkex.service · tinkex.scheduler · tinkex.engine

Spans exist only if the process itself has imported OpenTelemetry's API. One trace runs from the caller's span
to the engine, across threads and HTTP. No span holds a key, a prompt, a token or an error message.
"""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any, Literal, TypeVar

from tinkex._version import __version__

Kind = Literal["internal", "client", "server"]
T = TypeVar("T")
_NOTHING = nullcontext()


def is_on() -> bool:
    """Whether this process uses OpenTelemetry."""
    return "opentelemetry.trace" in sys.modules


def span(
    name: str, *, kind: Kind = "internal", parent: Any = None, within: bool = False, **attributes: Any
) -> AbstractContextManager[Any]:
    """A span around a block, current within it; an error sets the status to its class name.

    `within`: only inside another span, so that background work (a heartbeat) starts no trace.
    """
    if not is_on() or (within and not _is_within()):
        return _NOTHING
    return begin(name, kind=kind, parent=parent, **attributes) or _NOTHING


async def traced(name: str, work: Awaitable[T]) -> T:
    """Await `work` within a child span."""
    with span(name, within=True):
        return await work


def _is_within() -> bool:
    from opentelemetry import trace

    return trace.get_current_span().get_span_context().is_valid


def begin(
    name: str,
    *,
    kind: Kind = "internal",
    parent: Any = None,
    links: Iterable[Hop | None] = (),
    **attributes: Any,
) -> Hop | None:
    """Start a span that ends with `end`; None if the process does not trace.

    `parent` is another Hop or the result of `extract`; None: the current span.
    """
    if not is_on():
        return None
    from opentelemetry import trace

    if isinstance(parent, Hop):
        parent = trace.set_span_in_context(parent.span)
    started = _tracer(trace.get_tracer_provider()).start_span(
        f"tinkex.{name}",
        context=parent,
        kind=trace.SpanKind[kind.upper()],
        links=[trace.Link(hop.span.get_span_context()) for hop in links if hop is not None],
        attributes={key.replace("_", "."): value for key, value in attributes.items() if value is not None},
    )
    return Hop(started)


class Hop:
    """One span. As a context manager, it is current within the block and ends with it."""

    def __init__(self, span: Any) -> None:
        self.span = span
        self._current: Any = None

    def current(self) -> AbstractContextManager[Any]:
        """Make it the current span within a block, without ending it."""
        from opentelemetry import trace

        return trace.use_span(self.span, record_exception=False, set_status_on_exception=False)

    def end(self, error: BaseException | None = None) -> None:
        if error is not None:
            from opentelemetry import trace

            self.span.set_status(trace.Status(trace.StatusCode.ERROR, type(error).__name__))
        self.span.end()

    def __enter__(self) -> Any:
        self._current = self.current()
        self._current.__enter__()
        return self.span

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._current.__exit__(kind, error, trace)
        self.end(error)


def current(hop: Hop | None) -> AbstractContextManager[Any]:
    """Make a hop, if there is one, the current span within a block."""
    return _NOTHING if hop is None else hop.current()


def inject(headers: dict[str, str]) -> None:
    """Add the headers that continue the current trace on a server."""
    if is_on():
        from opentelemetry import propagate

        propagate.inject(headers)


def extract(headers: Mapping[str, str]) -> Any:
    """The trace context of a request's headers, as a parent; None if there is none."""
    if not is_on() or "traceparent" not in headers:
        return None
    from opentelemetry import propagate

    return propagate.extract(headers)


def count_queue_state(old: str, new: str, lasted: float) -> None:
    """Record the metrics `tinkex.queue.changes` and `tinkex.queue.seconds`, by state."""
    if "opentelemetry.metrics" in sys.modules:
        from opentelemetry import metrics

        changes, seconds = _counters(metrics.get_meter_provider())
        changes.add(1, {"state": new})
        seconds.add(lasted, {"state": old})


@lru_cache(1)  # a program may replace the provider
def _counters(provider: Any) -> tuple[Any, Any]:
    meter = provider.get_meter("tinkex", __version__)
    changes = "tinkex.queue.changes", "", "Changes of queue state, by the new one."
    seconds = "tinkex.queue.seconds", "s", "How long queue states lasted."
    return meter.create_counter(*changes), meter.create_counter(*seconds)


@lru_cache(1)
def _tracer(provider: Any) -> Any:
    return provider.get_tracer("tinkex", __version__)

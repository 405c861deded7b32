"""What goes on at this moment: sessions, the queue, who is executed, engines, GPUs, rates, latencies, errors.

A visitor sees their own sessions, runs and errors; of others only how many there are.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncGenerator
from itertools import accumulate
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from tinkex.server.console.event_pages import LiveStreams
from tinkex.server.console.gpus import Gpus
from tinkex.server.console.site import ConsoleSite
from tinkex.server.console.visitors import Visitor
from tinkex.server.metrics import SECONDS, DurationHistogram, Metrics
from tinkex.server.stream_sample import server_sent
from tinkex.service.served_models import ServedModel
from tinkex.service.service import Service

TICK = 2.0
MOST = 50  # sessions and errors
_STATS = {
    "adapters_live": "adapters in training", "adapters_published": "adapters to sample from",
    "sequences_running": "sequences decoded", "sequences_waiting": "sequences that wait",
    "batch_occupancy": "batch occupancy",
}  # fmt: skip


class NowPage:
    """One page, live."""

    def __init__(self, site: ConsoleSite, service: Service, metrics: Metrics, streams: LiveStreams) -> None:
        self._site, self._service, self._metrics, self._streams = site, service, metrics, streams
        self._gpus = Gpus()
        site.add("/console/now", self.show)
        site.add("/console/now/events", self.events)

    async def show(self, request: Request, visitor: Visitor) -> Response:
        return self._site.render("now.html", visitor, **await self._describe(visitor))

    async def events(self, request: Request, visitor: Visitor) -> Response:
        return self._streams.response(self._follow(visitor), visitor)

    async def _follow(self, visitor: Visitor) -> AsyncGenerator[bytes]:
        shown = b""
        while True:
            text = self._site.text("_now.html", visitor, **await self._describe(visitor))
            if (digest := hashlib.sha256(text.encode()).digest()) != shown:
                shown = digest
                yield server_sent("part", {"id": "now", "html": text})
            yield b""
            await asyncio.sleep(TICK)

    async def _describe(self, visitor: Visitor) -> dict[str, Any]:
        service, metrics, caller = self._service, self._metrics, visitor.caller
        sessions = [
            row
            for session_id in list(service.activity.seen)
            if (row := service.ledger.session(session_id)) is not None and caller.owns(row.owner)
        ]
        sessions.sort(key=lambda row: row.created_at, reverse=True)
        errors = [one for one in reversed(metrics.errors) if caller.owns(one.owner)]
        return {
            "sessions": sessions[:MOST],
            "seen": service.activity.seen,
            "others": len(service.activity.seen) - len(sessions),
            "engines": [self._engine(t, visitor) for model in service.models for t in model.trainers],
            "gpus": await self._gpus.read(),
            "rates": metrics.rates(time.monotonic()),
            "latencies": _latencies(metrics),
            "errors": errors[:MOST],
        }

    def _engine(self, model: ServedModel, visitor: Visitor) -> dict[str, Any]:
        executed, waiting = self._service.runs.order(model)
        engine = model.engine
        beat = None if engine is None else engine.heartbeat()
        stats = {} if beat is None else dict(beat.stats)
        return {
            "name": model.name,
            "state": model.trouble or ("loading" if model.loading else "" if engine else "not loaded yet"),
            "executed": self._runs(executed, visitor),
            "waiting": self._runs(waiting, visitor),
            "pages": (stats.pop("kv_pages_used", None), stats.pop("kv_pages_total", None)),
            "stats": {_STATS.get(name, name.replace("_", " ")): value for name, value in stats.items()},
            "memory": {} if beat is None else beat.memory,
        }

    def _runs(self, run_ids: list[str], visitor: Visitor) -> dict[str, Any]:
        rows = [run.row for run_id in run_ids if (run := self._service.runs.get(run_id)) is not None]
        mine = [row for row in rows if visitor.caller.owns(row.owner)]
        return {"mine": mine, "others": len(run_ids) - len(mine)}


def _latencies(metrics: Metrics) -> list[tuple[str, int, float | None, float | None]]:
    """By operation: how many, and what half and 95 % of them took at most."""
    all_of = [(f"{op}: executed", one) for op, one in metrics.work.items()]
    all_of += [(f"{op}: waited", one) for op, one in metrics.waits.items()]
    all_of.append(("samples", metrics.samples))
    return [(n, sum(h.counts), quantile(h, 0.5), quantile(h, 0.95)) for n, h in all_of if sum(h.counts)]


def quantile(histogram: DurationHistogram, share: float) -> float | None:
    """About what this share of all took at most: within one bound and the next, a straight line."""
    total = sum(histogram.counts)
    wanted, before, low = share * total, 0, 0.0
    for bound, count in zip((*SECONDS, SECONDS[-1]), accumulate(histogram.counts), strict=True):
        if count >= wanted and count > before:
            return low + (bound - low) * (wanted - before) / (count - before)
        before, low = count, bound
    return None

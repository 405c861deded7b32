"""The page of current activity: sessions, the queue, what is executed, engines, GPUs, latencies, errors.

A visitor sees their own sessions, runs and errors; of others only how many there are.
"""

from __future__ import annotations

import platform
import time
from collections.abc import AsyncGenerator, Mapping
from itertools import accumulate
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from tinkex.engine.gpus import GpuReading, Gpus
from tinkex.engine.protocol import Heartbeat, PartitionedEngine
from tinkex.server.console.event_pages import LiveStreams, next_tick
from tinkex.server.console.site import ConsoleSite
from tinkex.server.console.visitors import Visitor
from tinkex.server.metrics import SECONDS, DurationHistogram, Metrics
from tinkex.server.stream_sample import server_sent
from tinkex.service.served_models import ServedModel
from tinkex.service.service import Service

TICK = 2.0
MOST = 50  # sessions and errors
_STATS = {
    "adapters_live": "Training adapters", "adapters_published": "Sampling adapters",
    "adapter_bytes": "Adapter memory", "sequences_waiting": "Waiting sequences",
    "preemptions": "Preempted sequences", "trainers": "Trainers", "samplers": "Samplers",
}  # fmt: skip


class NowPage:
    """One page, live."""

    def __init__(self, site: ConsoleSite, service: Service, metrics: Metrics, streams: LiveStreams) -> None:
        self._site, self._service, self._metrics, self._streams = site, service, metrics, streams
        self._gpus = Gpus()
        self._owners: dict[str, str] = {}  # of sessions
        site.add("/console/now", self.show)
        site.add("/console/now/events", self.events)

    async def show(self, request: Request, visitor: Visitor) -> Response:
        return self._site.render("now.html", visitor, **await self._describe(visitor))

    async def events(self, request: Request, visitor: Visitor) -> Response:
        return self._streams.response(self._follow(visitor), request, visitor)

    async def _follow(self, visitor: Visitor) -> AsyncGenerator[bytes]:
        shown, key = b"", ("now", visitor.name, visitor.scope)

        async def render() -> bytes:
            text = self._site.text("_now.html", visitor, **await self._describe(visitor))
            return server_sent("part", {"id": "now", "html": text})

        while True:
            part = await self._streams.parts.get(key, TICK / 2, render)
            yield b"" if part == shown else part
            shown = part
            await next_tick(TICK)

    async def _describe(self, visitor: Visitor) -> dict[str, Any]:
        service, metrics, caller, clean = self._service, self._metrics, visitor.caller, self._site.clean
        seen = service.activity.seen
        self._owners = {i: owner for i in list(seen) if (owner := self._owner(i))}  # none that has ended
        mine = sorted((i for i, owner in self._owners.items() if caller.owns(owner)), key=seen.__getitem__)
        sessions = [row for i in mine[: -MOST - 1 : -1] if (row := service.ledger.session(i)) is not None]
        errors = [one for one in reversed(metrics.errors) if caller.owns(one.owner)][:MOST]
        return {
            "alone": service.peers is None,
            "sessions": sessions, "seen": seen, "others": len(seen) - len(mine),
            "engines": (engines := [self._engine(model, visitor) for model in service.models]),
            "nodes": _nodes(await self._gpus.read(), engines),
            "rates": metrics.rates(time.monotonic()),
            "latencies": _latencies(metrics),
            "errors": [one._replace(what=clean(one.what), text=clean(one.text)) for one in errors],
        }  # fmt: skip

    def _owner(self, session_id: str) -> str:
        """Whose session it is; it never changes, and there may be thousands."""
        if (owner := self._owners.get(session_id)) is None:
            row = self._service.ledger.session(session_id)
            owner = "" if row is None else row.owner
        return owner

    def _engine(self, model: ServedModel, visitor: Visitor) -> dict[str, Any]:
        """One base model: who is executed and who waits at its trainers, and what its engine reports."""
        engine, trainers = model.engine, list[dict[str, Any]]()
        for number, part in enumerate(model.trainers):
            executed, waiting = self._service.runs.order(part)
            trainers.append({
                "name": "" if len(model.trainers) == 1 else f"Trainer {number}: ",
                "trouble": part.trouble if part is not model else "",
                "executed": self._runs(executed, visitor), "waiting": self._runs(waiting, visitor),
            })  # fmt: skip
        beat = None if engine is None else engine.heartbeat()
        processes = engine.processes() if isinstance(engine, PartitionedEngine) else []
        return {
            "name": model.name,
            "state": model.trouble or ("loading" if model.loading else "" if engine else "not loaded yet"),
            "trainers": trainers,
            **_described(beat),
            "memory": {} if beat is None else beat.memory,
            "processes": [(name, one, _described(one)) for name, one in processes],
        }

    def _runs(self, run_ids: list[str], visitor: Visitor) -> dict[str, Any]:
        rows = [run.row for run_id in run_ids if (run := self._service.runs.get(run_id)) is not None]
        mine = [row for row in rows if visitor.caller.owns(row.owner)]
        return {"mine": mine, "others": len(run_ids) - len(mine)}


def _described(beat: Heartbeat | None) -> dict[str, Any]:
    """What an engine reports: how full its batch and its KV cache are, and the rest by name."""
    stats: Mapping[str, float] = {} if beat is None else beat.stats
    return {
        "batch": (stats.get("sequences_running", 0), stats.get("batch_slots", 0)),
        "pages": (stats.get("kv_pages_used", 0), stats.get("kv_pages_total", 0)),
        "stats": {label: stats[name] for name, label in _STATS.items() if name in stats},
    }


def _nodes(here: list[GpuReading], engines: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The machines: their GPUs, and which processes of engines run there."""
    nodes: dict[str, dict[str, Any]] = {platform.node(): {"gpus": here, "processes": list[str]()}}
    for engine in engines:
        for name, beat, _ in engine["processes"]:
            node = nodes.setdefault(beat.node, {"gpus": list(beat.gpus), "processes": list[str]()})
            node["processes"].append(f"{name} of {engine['name']}")
    return nodes


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

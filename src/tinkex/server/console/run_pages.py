"""The list of runs, one run's page with its live curves, and runs overlaid."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from typing import Any
from urllib.parse import urlencode

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from tinkex.server.console.console_data import ConsoleData, ShownRun
from tinkex.server.console.event_pages import LiveStreams, next_tick
from tinkex.server.console.site import ConsoleSite, as_json
from tinkex.server.console.visitors import Visitor
from tinkex.server.stream_sample import server_sent
from tinkex.service.refusal import Refusal
from tinkex.service.rows import RUN_ORDERS, RunQuery, RunRow
from tinkex.service.run_series import Curve, Mark, View
from tinkex.service.sessions import TraceEvent

PAGE = 50  # runs of one page
MOST_COMPARED = 24
STATES = ("running", "idle", "finished", "interrupted", "failed")
TIMELINE = 60  # requests of a run's page
TICK = 1.0  # seconds between two looks at what a page shows
_SPLIT = ("seconds", "waiting_seconds", "publishing_seconds")
# What a chart is called, and the metrics in it; others get a chart each.
_PANELS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("Loss", ("loss",)),
    ("Better answers of a group", ("better_answers:mean",)),
    ("Targets surely right (p > ½)", ("surely_right:mean",)),
    ("KL sampler − trainer", ("kl_sample_train_v1:mean", "kl_sample_train_v2:mean")),
    ("Ratio trainer / sampler", ("ratio:mean", "ratio:min", "ratio:max")),
    ("Entropy (of sampled tokens)", ("entropy:mean",)),
    ("Advantage", ("advantage:mean", "positive_advantages:mean")),
    ("Spread of rewards within a group", ("reward_spread:mean",)),
    ("Tokens of an answer", ("answer_tokens:mean",)),
    ("Gradient norm", ("grad_norm",)),
    ("Learning rate", ("learning_rate",)),
    ("Tokens per second", ("tokens_per_second",)),
    ("Time of a step in seconds", _SPLIT),
)
_LABELS = {
    "seconds": "computing", "waiting_seconds": "waiting", "publishing_seconds": "publishing",
    "kl_sample_train_v1:mean": "KL v1", "kl_sample_train_v2:mean": "KL v2", "advantage:mean": "mean",
    "positive_advantages:mean": "share above 0", "entropy:mean": "entropy",
    "ratio:mean": "mean", "ratio:min": "least", "ratio:max": "greatest",
    "better_answers:mean": "better answers", "surely_right:mean": "surely right",
    "reward_spread:mean": "spread of rewards", "answer_tokens:mean": "answer tokens",
}  # fmt: skip
_FIRST = ("reward", "accuracy", "score", "correct", "return")  # words of metrics that come after the loss
_LEFT_OUT = {
    "wall_seconds", "loss:sum", "datums:sum", "active:sum", "tokens:sum", "grad_clipped", "skipped",
}  # fmt: skip


class RunPages:
    """Pages about runs."""

    def __init__(self, site: ConsoleSite, data: ConsoleData, streams: LiveStreams) -> None:
        self._site, self._data, self._streams = site, data, streams
        site.add("/console/runs", self.list)
        site.add("/console/runs/{run_id}", self.show)
        site.add("/console/runs/{run_id}/curves", self.curves)
        site.add("/console/runs/{run_id}/events", self.events)
        site.add("/console/compare", self.compare)
        site.add("/console/compare/curves", self.compared_curves)
        site.add("/sessions", self._moved)  # where official clients' get_console_url leads
        site.add("/training_runs/{run_id}", self._moved)

    async def _moved(self, request: Request, visitor: Visitor) -> Response:
        run_id = request.path_params.get("run_id")
        return self._site.redirect(f"/console/runs/{run_id}" if run_id else "/console/runs")

    # -- the list ----------------------------------------------------------------------------------------

    async def list(self, request: Request, visitor: Visitor) -> Response:
        given = request.query_params
        order = given.get("order", "created_at")
        query = RunQuery(
            given.get("q", "")[:200], given.get("state", ""), given.get("model", ""), given.get("tag", ""),
            order if order in RUN_ORDERS else "created_at", given.get("way") != "up",
        )  # fmt: skip
        number = max(1, int(n)) if (n := given.get("page", "1")).isdecimal() and len(n) < 9 else 1
        page = self._data.runs(query, visitor, limit=PAGE, offset=(number - 1) * PAGE)
        models = self._data.ledger.run_models(visitor.scope)
        values: dict[str, Any] = {
            "runs": page.rows, "total": page.total, "query": query, "states": STATES, "models": models,
            "page": number, "pages": max(1, -(-page.total // PAGE)), "link": _link(query),
        }  # fmt: skip
        part = request.headers.get("hx-target") == "runs"
        return self._site.render("_runs.html" if part else "runs.html", visitor, **values)

    # -- one run -----------------------------------------------------------------------------------------

    async def show(self, request: Request, visitor: Visitor) -> Response:
        run = self._data.run(request.path_params["run_id"], visitor)
        values = await asyncio.to_thread(self._describe, run, visitor)
        session = self._data.ledger.session(run.row.session_id)
        saved = self._data.checkpoints(run.row)
        return self._site.render("run.html", visitor, **values, session=session, checkpoints=saved)

    def _describe(self, run: ShownRun, visitor: Visitor) -> dict[str, Any]:
        """What changes while a run's page is open."""
        live = self._data.live
        return {
            "run": run,
            "last": self._data.series.last(self._data.directory(run.row)),
            "waits": "" if live is None else live.waits_for(run.row, visitor.caller.owns),
            "timeline": [] if live is None else _timeline(live.events(run.row)),
            "labels": _LABELS,
        }

    async def curves(self, request: Request, visitor: Visitor) -> Response:
        row = self._data.row(request.path_params["run_id"], visitor)
        curves, _, _ = await asyncio.to_thread(
            self._data.series.read, self._data.directory(row), by_time=_by_time(request), view=_view(request)
        )
        return as_json(_chart_data(curves, anew=True))

    async def events(self, request: Request, visitor: Visitor) -> Response:
        row = self._data.row(request.path_params["run_id"], visitor)
        return self._streams.response(self._follow(row, visitor, _by_time(request)), visitor)

    async def _follow(self, row: RunRow, visitor: Visitor, by_time: bool) -> AsyncGenerator[bytes]:
        """The curves of a run and then what is added to them; and its state, when it changes."""
        mark, shown, turn, share = Mark(), b"", 0, self._streams.parts.get
        while True:
            key = row.run_id, mark, by_time
            points, mark = await share(key, TICK / 2, self._points(row, mark, by_time))
            yield points
            if (turn := turn + 1) % 2:  # the state is looked at every second time
                who = row.run_id, visitor.name, visitor.scope
                state = await share(who, TICK, self._state(row.run_id, visitor))
                if state != shown:
                    shown = state
                    yield state
            await next_tick(TICK)

    def _points(
        self, row: RunRow, mark: Mark, by_time: bool
    ) -> Callable[[], Coroutine[Any, Any, tuple[bytes, Mark]]]:
        """What comes after a mark, as an event; b"" if nothing does. And how far it goes."""

        async def read() -> tuple[bytes, Mark]:
            curves, reached, anew = await asyncio.to_thread(
                self._data.series.read, self._data.directory(row), mark, by_time=by_time
            )
            new = curves or anew
            return server_sent("points", _chart_data(curves, anew)) if new else b"", reached

        return read

    def _state(self, run_id: str, visitor: Visitor) -> Callable[[], Coroutine[Any, Any, bytes]]:
        """A run's state as an event; Refusal, once the run is not the visitor's any more."""

        async def render() -> bytes:
            run = self._data.run(run_id, visitor)
            values = await asyncio.to_thread(self._describe, run, visitor)
            text = self._site.text("_run_state.html", visitor, **values)
            return server_sent("part", {"id": "state", "html": text})

        return render

    # -- runs overlaid -----------------------------------------------------------------------------------

    def _compared(self, request: Request, visitor: Visitor) -> list[ShownRun]:
        asked = list(dict.fromkeys(request.query_params.getlist("run")))
        if len(asked) > MOST_COMPARED:
            raise Refusal(422, f"at most {MOST_COMPARED} runs can be compared at a time, got {len(asked)}")
        return [self._data.run(run_id, visitor) for run_id in asked]

    async def compare(self, request: Request, visitor: Visitor) -> Response:
        runs = self._compared(request, visitor)
        last = [await asyncio.to_thread(self._data.series.last, self._data.directory(r.row)) for r in runs]
        names = [n for n in dict.fromkeys(n for one in last for n in one) if n not in _LEFT_OUT | {"time"}]
        facts = [_configuration(run.row) for run in runs]
        keys = list(dict.fromkeys(key for one in facts for key in one))
        differ = [key for key in keys if len({one.get(key) for one in facts}) > 1]
        same = {key: facts[0][key] for key in keys if key not in differ} if facts else {}
        return self._site.render(
            "compare.html", visitor, runs=runs, last=last, names=names, facts=facts, differ=differ, same=same,
            labels=_whole_names(), query=urlencode([("run", run.row.run_id) for run in runs]),
        )  # fmt: skip

    async def compared_curves(self, request: Request, visitor: Visitor) -> Response:
        runs = self._compared(request, visitor)
        curves, names = dict[str, Curve](), dict[str, None]()
        view = _view(request)._replace(pixels=max(60, 800 // max(1, len(runs))))
        for index, run in enumerate(runs):
            directory = self._data.directory(run.row)
            found, _, _ = await asyncio.to_thread(
                self._data.series.read, directory, by_time=_by_time(request), view=view
            )
            names |= dict.fromkeys(found)
            for name, curve in found.items():
                if _by_time(request):  # seconds since it began: runs began at different times
                    curve = Curve(curve.x - run.row.created_at, curve.y)
                curves[f"{name}@{index}"] = curve
        panels = [
            {"title": _title(title, name, metrics),
             "lines": [[f"{name}@{i}", run.title] for i, run in enumerate(runs) if f"{name}@{i}" in curves]}
            for title, metrics in _panels(names)
            for name in metrics
        ]  # fmt: skip
        return as_json({"anew": True, "panels": panels, "curves": _plain(curves)})


def _link(query: RunQuery) -> Any:
    """The address of the same list, with something changed."""

    def link(**changes: Any) -> str:
        now = {
            "q": query.text, "state": query.state, "model": query.model, "tag": query.tag,
            "order": query.order, "way": "" if query.descending else "up",
        }  # fmt: skip
        return f"?{urlencode({name: value for name, value in (now | changes).items() if value})}"

    return link


def _by_time(request: Request) -> bool:
    return request.query_params.get("x") == "time"


def _view(request: Request) -> View:
    def given(name: str, otherwise: float) -> float:
        try:
            return float(request.query_params.get(name, otherwise))
        except ValueError:
            return otherwise

    view = View()
    return View(given("low", view.low), given("high", view.high), view.pixels)


def _chart_data(curves: Mapping[str, Curve], anew: bool) -> dict[str, Any]:
    panels = [
        {"title": title, "lines": [[name, _LABELS.get(name, name)] for name in names]}
        for title, names in _panels(curves)
    ]
    return {"anew": anew, "panels": panels, "curves": _plain(curves)}


def _plain(curves: Mapping[str, Curve]) -> dict[str, Any]:
    return {name: {"x": np.round(curve.x, 3), "y": curve.y} for name, curve in curves.items()}


def _panels(names: Mapping[str, Any]) -> list[tuple[str, list[str]]]:
    """Charts, in the order of a page: the loss, rewards, what we know of, then the rest."""
    known = [(title, [name for name in metrics if name in names]) for title, metrics in _PANELS]
    taken = {name for _, metrics in _PANELS for name in metrics} | _LEFT_OUT
    rest = [name for name in names if name not in taken]
    first = [name for name in rest if any(word in name.lower() for word in _FIRST)]
    others = [(name, [name]) for name in sorted(rest) if name not in first]
    loss, *ours = known
    return [one for one in (loss, *((name, [name]) for name in first), *ours, *others) if one[1]]


def _title(title: str, name: str, metrics: list[str]) -> str:
    """Of a chart with one metric of those that share a chart elsewhere."""
    return title if len(metrics) == 1 else f"{title}: {_LABELS.get(name, name)}"


def _whole_names() -> dict[str, str]:
    """What metrics are called where no title of a chart is above them."""
    return {name: _title(title, name, list(names)) for title, names in _PANELS for name in names}


def _configuration(row: RunRow) -> dict[str, str]:
    """What a run was set up with, as names and values."""
    lora = {f"lora.{name}": str(value) for name, value in row.lora.model_dump().items()}
    metadata = {f"metadata.{name}": str(value) for name, value in (row.user_metadata or {}).items()}
    made = {"made from": row.parent} if row.parent else {}
    return {"base model": row.base_model, **lora, "optimizer": str(row.optimizer_config), **made, **metadata}


def _timeline(events: list[TraceEvent]) -> list[dict[str, Any]]:
    """The last requests as bars on one axis, in thousandths of its width."""
    last = events[-TIMELINE:]
    if not last:
        return []
    begin, end = min(e[2] for e in last), max(e[2] + e[3] for e in last)
    width = max(end - begin, 1e-6)
    return [
        {"name": name, "at": begun, "seconds": seconds, "seq_id": seq_id, "failed": failed,
         "x": round(1000 * (begun - begin) / width, 1), "w": max(2.0, round(1000 * seconds / width, 1))}
        for name, _, begun, seconds, seq_id, failed in last
    ]  # fmt: skip

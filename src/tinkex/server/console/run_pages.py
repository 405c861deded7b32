"""The list of runs, one run's page with its live curves, and runs overlaid."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from typing import Any
from urllib.parse import quote, urlencode

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from tinkex.server.console.console_data import ConsoleData, ShownRun
from tinkex.server.console.event_pages import LiveStreams, next_tick
from tinkex.server.console.site import ConsoleSite, as_json, page_of
from tinkex.server.console.visitors import Visitor
from tinkex.server.stream_sample import server_sent
from tinkex.service.peers import Elsewhere
from tinkex.service.refusal import Refusal
from tinkex.service.rows import RUN_ORDERS, RowPage, RunQuery, RunRow
from tinkex.service.run_series import Curve, Mark, View
from tinkex.service.sessions import TraceEvent

PAGE = 50  # runs of one page
OVERLAID = 500  # runs of one page of a comparison
TOGETHER = 24  # of them, those whose curves are sent at a time, and whose values are in a table
MOST_ROWS = 100  # of a table
STATES = ("running", "idle", "finished", "interrupted", "failed")
TIMELINE = 60  # requests of a run's page
TICK = 1.0  # seconds between two looks at what a page shows
LEAST_PIXELS, GRID = 12, 1024  # of a curve among very many; places on its x axis
_SPLIT = ("seconds", "waiting_seconds", "publishing_seconds", "sampling_seconds")
# What a chart is called, and the metrics in it; others get a chart each.
_PANELS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("Loss", ("loss",)),
    ("Group win rate", ("better_answers:mean",)),
    ("Targets surely right (p > ½)", ("surely_right:mean",)),
    ("KL sampler − trainer", ("kl_sample_train_v1:mean", "kl_sample_train_v2:mean")),
    ("Importance ratio (trainer/sampler)", ("ratio:mean", "ratio:min", "ratio:max")),
    ("Entropy (of sampled tokens)", ("entropy:mean",)),
    ("Advantage", ("advantage:mean", "positive_advantages:mean")),
    ("Reward spread in group", ("reward_spread:mean",)),
    ("Tokens per answer", ("answer_tokens:mean",)),
    ("Gradient norm", ("grad_norm",)),
    ("Learning rate", ("learning_rate",)),
    ("Tokens per second", ("tokens_per_second",)),
    ("Time of a step in seconds", _SPLIT),
)
_LABELS = {
    "seconds": "computing", "waiting_seconds": "waiting", "publishing_seconds": "publishing",
    "sampling_seconds": "sampling",
    "kl_sample_train_v1:mean": "KL v1", "kl_sample_train_v2:mean": "KL v2", "advantage:mean": "mean",
    "positive_advantages:mean": "share above 0", "entropy:mean": "entropy",
    "ratio:mean": "mean", "ratio:min": "min", "ratio:max": "max",
    "better_answers:mean": "group win rate", "surely_right:mean": "surely right",
    "reward_spread:mean": "reward spread", "answer_tokens:mean": "answer tokens",
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
        return self._site.redirect(f"/console/runs/{quote(run_id, ':')}" if run_id else "/console/runs")

    # -- the list ----------------------------------------------------------------------------------------

    async def list(self, request: Request, visitor: Visitor) -> Response:
        query = _query(request)
        number, offset = page_of(request, PAGE)
        page = self._data.runs(query, visitor, limit=PAGE, offset=offset)
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
        values = await self._describe(run, visitor)
        session = self._data.ledger.session(run.row.session_id)
        return self._site.render(
            "run.html", visitor, **values, session=session, checkpoints=self._data.checkpoints(run.row),
            may_change=visitor.caller.owns(run.row.owner),
        )  # fmt: skip

    async def _describe(self, run: ShownRun, visitor: Visitor) -> dict[str, Any]:
        """What changes while a run's page is open."""
        live = self._data.live
        last = await self._site.off_loop(self._data.series.last, self._data.directory(run.row))
        return {
            "run": run, "last": last, "labels": _whole_names(),
            "names": _ordered([last]) + sorted(_LEFT_OUT & last.keys()),
            "waits": "" if live is None else live.waits_for(run.row, visitor.caller.owns),
            "timeline": [] if live is None else _timeline(live.events(run.row)),
        }  # fmt: skip

    async def curves(self, request: Request, visitor: Visitor) -> Response:
        row = self._data.row(request.path_params["run_id"], visitor)
        event, _ = await self._site.off_loop(self._read, row, Mark(), _by_time(request), _view(request))
        return as_json(event)

    def _read(
        self, row: RunRow, mark: Mark, by_time: bool, view: View = View()
    ) -> tuple[dict[str, Any] | None, Mark]:
        """What comes after a mark, for charts; None if nothing does. And how far it goes."""
        directory, series = self._data.directory(row), self._data.series
        curves, reached, anew = series.read(directory, mark, by_time=by_time, view=view, without=_LEFT_OUT)
        if not curves and not anew:
            return None, reached
        return _chart_data(curves, series.left_out(directory), anew=anew), reached

    async def events(self, request: Request, visitor: Visitor) -> Response:
        row = self._data.row(request.path_params["run_id"], visitor)
        return self._streams.response(self._follow(row, visitor, _by_time(request)), request, visitor)

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
        """`_read` as an event; b"" if nothing is new."""

        def read() -> tuple[bytes, Mark]:
            new, reached = self._read(row, mark, by_time)
            return b"" if new is None else server_sent("points", new), reached

        return lambda: self._site.off_loop(read)

    def _state(self, run_id: str, visitor: Visitor) -> Callable[[], Coroutine[Any, Any, bytes]]:
        """A run's state as an event; Refusal, once the run is not the visitor's any more."""

        async def render() -> bytes:
            run = self._data.run(run_id, visitor)
            values = await self._describe(run, visitor)
            text = self._site.text("_run_state.html", visitor, **values)
            return server_sent("part", {"id": "state", "html": text})

        return render

    # -- runs overlaid -----------------------------------------------------------------------------------

    async def _compared(self, request: Request, visitor: Visitor, most: int) -> tuple[RowPage[ShownRun], int]:
        """Runs that are named, or that a search of the list finds; and of how many the files are elsewhere.

        Elsewhere, if they are all at one other server.
        """
        named = list(dict.fromkeys(request.query_params.getlist("run")))
        _, offset = page_of(request, most, "part")
        if "match" in request.query_params:
            found = self._data.runs(_query(request), visitor, limit=most, offset=offset)
        else:
            found = RowPage(self._data.some(named[offset : offset + most], visitor), len(named))
        away, sessions = list[Refusal](), Counter(run.row.session_id for run in found.rows)
        for session_id, count in sessions.items():
            try:
                await self._site.check_here(session_id)
            except Refusal as refusal:
                away += [refusal] * count
        places = {one.url if isinstance(one, Elsewhere) else "" for one in away}
        if away and len(away) == len(found.rows) and len(places) == 1:
            raise away[0]
        return found, len(away)

    async def compare(self, request: Request, visitor: Visitor) -> Response:
        (runs, total), away = await self._compared(request, visitor, OVERLAID)
        (part, before), (number, first) = page_of(request, OVERLAID, "part"), page_of(request, TOGETHER)
        shown = runs[first : first + TOGETHER]
        last = [await self._site.off_loop(self._data.series.last, self._data.directory(r.row)) for r in shown]
        facts = [_configuration(run.row) for run in runs]
        keys = list(dict.fromkeys(key for one in facts for key in one))
        differ = [key for key in keys if len({one.get(key) for one in facts}) > 1]
        same = {key: facts[0][key] for key in keys if key not in differ} if facts else {}
        asked = [pair for pair in request.query_params.multi_items() if pair[0] not in ("part", "page")]

        def link(**changes: int) -> str:
            return f"?{urlencode([*asked, *((name, str(value)) for name, value in changes.items())])}"

        return self._site.render(
            "compare.html", visitor, runs=runs, total=total, before=before, part=part,
            missing=min(OVERLAID, total - before) - len(runs), away=away, parts=-(-total // OVERLAID),
            shown=shown, first=first, page=number, pages=-(-len(runs) // TOGETHER), last=last,
            names=_ordered(last), labels=_whole_names(),
            facts=facts[first : first + TOGETHER], differ=differ, same=same, most=MOST_ROWS, link=link,
            together=1 if away else TOGETHER,
        )  # fmt: skip

    async def compared_curves(self, request: Request, visitor: Visitor) -> Response:
        """Curves of some runs of a comparison of `of` runs, which are its runs from number `first` on."""
        (runs, _), _ = await self._compared(request, visitor, TOGETHER)
        first, of = (_count(request, name) for name in ("first", "of"))
        return as_json(await self._site.off_loop(self._overlaid, runs, request, first, max(of, len(runs))))

    def _overlaid(self, runs: Sequence[ShownRun], request: Request, first: int, of: int) -> dict[str, Any]:
        curves, names, left_out = dict[str, Curve](), dict[str, None](), 0
        by_time, view, many = _by_time(request), _view(request), of > TOGETHER
        view = view._replace(in_all=view.in_all // max(1, of))
        if many:
            view = view._replace(fewest=max(LEAST_PIXELS, view.fewest * TOGETHER // of))
        for index, run in enumerate(runs, first):
            directory, series = self._data.directory(run.row), self._data.series
            began = run.row.created_at if by_time else 0.0  # runs began at different times
            part = view._replace(low=view.low + began, high=view.high + began)
            found, _, _ = series.read(directory, by_time=by_time, view=part, without=_LEFT_OUT)
            left_out = max(left_out, series.left_out(directory))
            names |= dict.fromkeys(found)
            axes = {id(x): x - began for x, _ in found.values()}
            if many:
                axes = {key: snapped(x) for key, x in axes.items()}
            curves |= {f"{name}@{index}": Curve(axes[id(x)], y) for name, (x, y) in found.items()}
        titles = _whole_names()
        panels = [
            {"title": titles.get(name, name),
             "lines": [
                 [f"{name}@{i}", run.title] for i, run in enumerate(runs, first) if f"{name}@{i}" in curves
             ]}
            for _, metrics in _panels(names)
            for name in metrics
        ]  # fmt: skip
        return _described(panels, curves, left_out, anew=True, digits=4)


def _query(request: Request) -> RunQuery:
    """What a list of runs, or a comparison, is asked for."""
    given = request.query_params
    order = given.get("order", "created_at")
    return RunQuery(
        given.get("q", "")[:200], given.get("state", ""), given.get("model", ""), given.get("tag", ""),
        order if order in RUN_ORDERS else "created_at", given.get("way") != "up",
    )  # fmt: skip


def _link(query: RunQuery) -> Any:
    """The address of the same list, with something changed."""

    def link(**changes: Any) -> str:
        now = {
            "q": query.text, "state": query.state, "model": query.model, "tag": query.tag,
            "order": query.order, "way": "" if query.descending else "up",
        }  # fmt: skip
        return f"?{urlencode({name: value for name, value in (now | changes).items() if value})}"

    return link


def _count(request: Request, name: str) -> int:
    given = request.query_params.get(name, "")
    return int(given) if given.isdecimal() and len(given) < 6 else 0


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


def _chart_data(curves: Mapping[str, Curve], left_out: int, *, anew: bool) -> dict[str, Any]:
    panels = [
        {"title": title, "lines": [[name, _LABELS.get(name, name)] for name in names]}
        for title, names in _panels(curves)
    ]
    return _described(panels, curves, left_out, anew=anew)


def _described(
    panels: list[dict[str, Any]], curves: Mapping[str, Curve], left_out: int, *, anew: bool, digits: int = 5
) -> dict[str, Any]:
    """Charts as charts.js takes them; curves have few digits, and most have their x in common.

    `panels`: title and lines (a curve's key, its label). `x`: every different x axis once, as its first value
    and then the differences. `curves`: by key, the number of its x axis, and y. `left_out`: how many metrics
    are not sent, because there are too many. `anew`: they replace what was sent before.
    """
    axes, shown = dict[bytes, tuple[int, np.ndarray]](), dict[str, tuple[int, np.ndarray]]()
    for key, (x, y) in curves.items():
        rounded = np.round(x, 2)
        number, _ = axes.setdefault(rounded.tobytes(), (len(axes), rounded))
        shown[key] = number, significant(y, digits)
    steps = [np.round(np.diff(x, prepend=0.0), 2) for _, x in axes.values()]
    whole = [one.astype(int) if (one == one.astype(int)).all() else one for one in steps]
    return {"anew": anew, "panels": panels, "x": whole, "curves": shown, "left_out": left_out}


def snapped(x: np.ndarray) -> np.ndarray:
    """An x axis on a grid that it shares with others of about its length, finer than a chart's pixels.

    >>> snapped(np.array([0.0, 1.26, 700.1])).tolist()
    [0.0, 1.0, 700.0]
    """
    if not len(x) or x[-1] <= x[0]:
        return x
    width = 2.0 ** math.ceil(math.log2((x[-1] - x[0]) / GRID))
    return np.round(x / width) * width


def significant(values: np.ndarray, digits: int) -> np.ndarray:
    """Rounded to so many digits.

    >>> significant(np.array([123456.0, -0.00123456, 0.0]), 3).tolist()
    [123000.0, -0.00123, 0.0]
    """
    y = values.astype(float)
    with np.errstate(divide="ignore"):
        power = digits - 1 - np.floor(np.log10(np.abs(y)))
    power = np.where(np.isfinite(power), power, 0)
    up, down = 10.0 ** np.maximum(power, 0), 10.0 ** np.maximum(-power, 0)
    return np.round(y * up / down) / up * down


def _panels(names: Mapping[str, Any]) -> list[tuple[str, list[str]]]:
    """Charts, in the order of a page: the loss, rewards, what we know of, then the rest."""
    known = [(title, [name for name in metrics if name in names]) for title, metrics in _PANELS]
    taken = {name for _, metrics in _PANELS for name in metrics} | _LEFT_OUT
    rest = [name for name in names if name not in taken]
    first = [name for name in rest if any(word in name.lower() for word in _FIRST)]
    others = [(name, [name]) for name in sorted(rest) if name not in first]
    loss, *ours = known
    return [one for one in (loss, *((name, [name]) for name in first), *ours, *others) if one[1]]


def _ordered(last: Sequence[Mapping[str, float]]) -> list[str]:
    """The metrics of these last values: the step, then as their charts are ordered."""
    found = dict.fromkeys(name for one in last for name in one if name not in ("step", "time"))
    return ["step"][: any("step" in one for one in last)] + [n for _, names in _panels(found) for n in names]


def _title(title: str, name: str, metrics: list[str]) -> str:
    """Of a chart with one metric of those that share a chart elsewhere."""
    return title if len(metrics) == 1 else f"{title}: {_LABELS.get(name, name)}"


def _whole_names() -> dict[str, str]:
    """What metrics are called where no title of a chart is above them."""
    return {"step": "Step"} | {n: _title(title, n, list(names)) for title, names in _PANELS for n in names}


def _configuration(row: RunRow) -> dict[str, str]:
    """What a run was set up with, as names and values."""
    lora = {f"lora.{name}": str(value) for name, value in row.lora.model_dump().items()}
    metadata = {f"metadata.{name}": str(value) for name, value in (row.user_metadata or {}).items()}
    made = {"made from": row.parent} if row.parent else {}
    settings = {name: str(value) for name, value in row.optimizer_config.items()}
    return {"base model": row.base_model, **lora, **settings, **made, **metadata}


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

"""The pages that `get_console_url` names: a list of runs, and a run with its curves.

Read-only; they show what the caller's key may see. A browser logs in by HTTP Basic authentication: any name,
and the API key as the password. The API itself does not accept that login, so that no other site can use it.
A page loads nothing from elsewhere.
"""

from __future__ import annotations

import asyncio
import base64
import json
import math
from datetime import datetime
from html import escape
from typing import Any
from urllib.parse import quote

from starlette.responses import Response
from starlette.routing import Route

from tinkex.charts import html_page, html_table, number, svg_chart
from tinkex.server.bodies import IncomingRequest
from tinkex.server.gateway import Endpoint, Gateway
from tinkex.service.refusal import Caller
from tinkex.types.checkpoints import Checkpoint, ListCheckpointsRequest
from tinkex.types.training import GetTrainingRunRequest, ListTrainingRunsRequest, TrainingRun
from tinkex.wire import ops

CURVES = ("loss", "grad_norm", "learning_rate")
RUNS_PER_PAGE = 100
_NOT_SHOWN = ("step", "time")
_HEADERS = {
    "cache-control": "no-store",
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'",
}
_LOGIN = {"www-authenticate": 'Basic realm="Tinkex: any name, and your API key as the password"'}
_WHICH_KEY = "\nThe password is the key that your script uses: TINKER_API_KEY, or tml-local if none is set."


def console_routes(gateway: Gateway) -> list[Route]:
    async def runs(http: IncomingRequest) -> Response:
        request = ListTrainingRunsRequest(limit=RUNS_PER_PAGE)
        listed = await gateway.service.call(ops.LIST_TRAINING_RUNS, request, _admit(gateway, http))
        body = _list(listed.training_runs, listed.cursor.total_count)
        return _page("Runs", gateway.without_paths(body))

    async def run(http: IncomingRequest) -> Response:
        caller, run_id = _admit(gateway, http), http.path_params["run_id"]
        one, call = GetTrainingRunRequest(training_run_id=run_id), gateway.service.call
        found = await call(ops.GET_TRAINING_RUN, one, caller)
        lines = await call(ops.GET_RUN_METRICS, one, caller)
        saved = await call(ops.LIST_CHECKPOINTS, ListCheckpointsRequest(training_run_id=run_id), caller)
        # A long history is megabytes: format it off the event loop.
        body = await asyncio.to_thread(lambda: _describe(found, _steps(lines), saved.checkpoints))
        return _page(f"Run {run_id}", gateway.without_paths(body))

    return [
        Route("/sessions", Endpoint(gateway, "console", runs, _page_error), methods=["GET"]),
        Route("/training_runs/{run_id}", Endpoint(gateway, "console", run, _page_error), methods=["GET"]),
    ]


def _admit(gateway: Gateway, http: IncomingRequest) -> Caller:
    scheme, _, given = http.headers.get("authorization", "").partition(" ")
    if scheme.lower() == "basic":
        try:
            name, _, password = base64.b64decode(given).decode().partition(":")
        except ValueError:  # neither base64 nor text
            name = password = ""
        http.headers["x-api-key"] = password or name
    return gateway.admit(http)


def _page_error(status: int, message: str, headers: dict[str, str] | None) -> Response:
    if status == 401:
        message, headers = message + _WHICH_KEY, {**(headers or {}), **_LOGIN}
    return Response(message, status, {**_HEADERS, **(headers or {})}, "text/plain")


def _page(title: str, body: str) -> Response:
    return Response(html_page(title, body), 200, _HEADERS, "text/html")


def _list(runs: list[TrainingRun], total: int) -> str:
    if not runs:
        return "<p>None yet.</p>"
    rows = "".join(
        f"<tr><td>{_link(run.training_run_id)}</td><td>{escape(run.base_model)}</td>"
        f"<td>{escape(_status(run))}</td><td>{_at(run.last_request_time)}</td></tr>\n"
        for run in runs
    )
    older = f"<p>{total - len(runs)} older ones are not shown.</p>" if total > len(runs) else ""
    return f"<table>\n{rows}</table>{older}"


def _link(run_id: str) -> str:
    """Relative, as all links here: a proxy may have put the server below a path."""
    return f'<a href="training_runs/{quote(run_id, safe=":")}">{escape(run_id)}</a>'


def _describe(run: TrainingRun, steps: list[dict[str, Any]], checkpoints: list[Checkpoint]) -> str:
    facts = {
        "Base model": run.base_model,
        "LoRA rank": str(run.lora_rank),
        "Owner": run.model_owner,
        "Status": _status(run),
        "Last request": _at(run.last_request_time),
        "Steps": str(int(steps[-1]["step"])) if steps else "none yet",
    }
    facts |= {f"Metadata: {name}": value for name, value in (run.user_metadata or {}).items()}
    last = {name: number(value) for name, value in (steps or [{}])[-1].items() if name not in _NOT_SHOWN}
    saved = {c.tinker_path: _at(c.time) for c in checkpoints}
    curves = {name: [step.get(name, math.nan) for step in steps] for name in CURVES}
    curves = {name: values for name, values in curves.items() if not all(map(math.isnan, values))}
    parts = [html_table(facts)]
    if last:
        parts += ["<h2>The last step</h2>", html_table(last)]
    if saved:
        parts += ["<h2>Checkpoints</h2>", html_table(saved)]
    if curves:
        parts.append(svg_chart(curves, x=[step["step"] for step in steps]))
    return "\n".join([*parts, '<p><a href="../sessions">All runs</a></p>'])


def _steps(lines: bytes) -> list[dict[str, Any]]:
    """The steps that were taken; one without gradients is skipped."""
    steps = [json.loads(line) for line in lines[: lines.rfind(b"\n") + 1].splitlines()]
    return [step for step in steps if not step.get("skipped")]


def _status(run: TrainingRun) -> str:
    status = run.status or "active"
    return f"{status}: {run.status_reason}" if run.status_reason else status


def _at(time: datetime) -> str:
    return f"{time:%Y-%m-%d %H:%M:%S} UTC"

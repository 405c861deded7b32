"""`tinkex run` and `tinkex session`: training runs, their metrics step by step, timelines of sessions."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tinkex.cli.output import (
    Whole,
    ago,
    answered,
    bar,
    format_option,
    gather,
    note,
    show,
    show_json,
    size,
    wants_json,
)
from tinkex.cli.run_changes import delete, prune, rename, tag
from tinkex.cli.target import is_local, rest, where

if TYPE_CHECKING:
    from tinkex.client.rest import RestClient
    from tinkex.client.rest_results import StepMetrics
    from tinkex.types.training import TrainingRun

_FILE = click.Path(path_type=Path, dir_okay=False)
# what -c takes: the column's title, and its value for a run
_COLUMNS: dict[str, tuple[str, Callable[[TrainingRun, RestClient], Any]]] = {
    "id": ("Run", lambda run, _: run.training_run_id),
    "model": ("Model", lambda run, _: run.base_model),
    "owner": ("Owner", lambda run, _: run.model_owner),
    "lora": ("Rank", lambda run, _: run.lora_rank if run.is_lora else "full"),
    "updated": ("Updated", lambda run, _: run.last_request_time),
    "status": ("Status", lambda run, _: _status(run)),
    "name": ("Name", lambda run, _: run.name),
    "tags": ("Tags", lambda run, _: ", ".join(run.tags or [])),
    "steps": ("Steps", lambda run, _: run.steps),
    "checkpoint": ("Checkpoint", lambda run, _: run.last_checkpoint and run.last_checkpoint.checkpoint_id),
    "checkpoint_time": ("Saved", lambda run, _: run.last_checkpoint and run.last_checkpoint.time),
    "loss": ("Loss", lambda run, client: _loss_curve(run, client)),  # costs a request for each run
}
_DEFAULT = "id,model,lora,updated,status"


@click.group()
def run() -> None:
    """Training runs: list, show, plot, rename, tag, delete."""


for _command in (rename, tag, delete, prune):
    run.add_command(_command)


@run.command("list")
@click.option("--limit", default=20, type=Whole(0), show_default=True, help="At most this many; 0: all.")
@click.option(
    "-c", "--columns",
    help=f"Which columns, separated by commas: {', '.join(_COLUMNS)} (a curve).  "
    f"[default: {_DEFAULT}; on this machine loss too]",
)  # fmt: skip
@format_option
def list_runs(limit: int, columns: str | None) -> None:
    """List training runs, newest first."""
    columns = columns or (f"{_DEFAULT},loss" if is_local() else _DEFAULT)
    names = [name.strip() for name in columns.split(",") if name.strip()]
    if unknown := [name for name in names if name not in _COLUMNS]:
        raise click.ClickException(
            f"no column is called {', '.join(unknown)}; there are: {', '.join(_COLUMNS)}"
        )
    chosen = [_COLUMNS[name] for name in names]
    with rest() as client:
        listing = client.iter_training_runs(page_size=min(limit or 100, 100))
        runs, title = gather(listing, limit, "run", where())
        shown = [] if wants_json() else runs
        rows = [{name: value(run, client) for name, value in chosen} for run in shown]
    show({"runs": runs}, title, rows)
    if not runs and is_local() and not wants_json():
        note("`tinkex demo` makes one; set TINKER_BASE_URL and TINKER_API_KEY to list the runs of a server")


def _loss_curve(run: TrainingRun, client: RestClient) -> str | None:
    from tinkex.charts import sparkline

    metrics = _metrics(client, run)
    return (sparkline(metrics.curves(["loss"])["loss"], 16) or None) if metrics else None


def _status(run: TrainingRun) -> str:
    """The state as one word; other servers only report whether a run is corrupted."""
    return (run.status or ("failed" if run.corrupted else "active")).capitalize()


@run.command("info")
@click.argument("run_id")
@format_option
def info(run_id: str) -> None:
    """Show one run: its last checkpoints, and how its loss went."""
    with rest() as client:
        found = client.get_training_run(run_id).result()
        metrics = None if wants_json() else _metrics(client, found)
    named = {"Name": found.name, "Tags": ", ".join(found.tags or [])}
    facts: dict[str, Any] = {
        **{about: value for about, value in named.items() if value},
        "Base model": found.base_model,
        "Owner": found.model_owner,
        "LoRA rank": found.lora_rank if found.is_lora else "none: all weights are trained",
        "Last request": found.last_request_time,
        "Status": f"{_status(found)}: {found.status_reason}" if found.status_reason else _status(found),
    }
    for kind, saved in (("Training", found.last_checkpoint), ("Sampler", found.last_sampler_checkpoint)):
        if saved is not None:
            facts[f"{kind} checkpoint, {ago(saved.time)}"] = saved.tinker_path
    facts |= {f"Metadata: {name}": value for name, value in (found.user_metadata or {}).items()}
    show(found, f"Run {found.training_run_id}", facts | _curve_facts(metrics))


def _curve_facts(metrics: StepMetrics | None) -> dict[str, str]:
    from tinkex.charts import number, sparkline

    if metrics is None:
        return {}
    if not (steps := metrics.steps()):
        return {"Metrics": "no step yet"}
    facts = {"Steps": str(int(steps[-1]))}
    for name, values in metrics.curves().items():
        facts[name] = f"{sparkline(values, 24)}  {number(values[0])} → {number(values[-1])}"
    return facts


@run.command("plot")
@click.argument("run_id", required=False)
@click.option("--png", type=_FILE, help="Write a picture (needs tinkex[plot]).")
@click.option("--html", type=_FILE, help="Write a report for a browser (needs tinkex[plot]).")
@click.option(
    "-m", "--metric", "names", multiple=True,
    help="What to plot; may be given several times.  [default: loss, grad_norm, learning_rate]",
)  # fmt: skip
@format_option
def plot(run_id: str | None, png: Path | None, html: Path | None, names: tuple[str, ...]) -> None:
    """Plot a run's metrics in the terminal, or to a file. Without a RUN_ID: the newest run with a step.

    With --format json it prints the numbers of every step.
    """
    from tinkex import charts

    with rest() as client:
        found = client.get_training_run(run_id).result() if run_id else _newest(client)
        metrics = _metrics(client, found)
    run_id = found.training_run_id
    if metrics is None:
        raise click.ClickException("this server keeps no metrics of runs; log them in your script")
    if wants_json():
        show_json({"training_run_id": run_id, "steps": metrics})
        return
    if not metrics.steps():
        raise click.ClickException(f"run {run_id} has no metrics: it has taken no step")
    if unknown := [name for name in names if name not in metrics.metrics()]:
        known = ", ".join(metrics.metrics())
        raise click.ClickException(f"this run has no metric {', '.join(unknown)}; it has: {known}")
    curves, steps = metrics.curves(names), metrics.steps()
    if png is None and html is None:
        width = min(100, shutil.get_terminal_size().columns)
        height = 10 if len(curves) == 1 else 6 * len(curves)
        click.echo(charts.terminal_chart(curves, width=width, height=height, title=f"Run {run_id}", x=steps))
    if png is not None:
        charts.write_png(png, curves, title=f"{found.base_model}, rank {found.lora_rank}", x=steps)
        note(f"wrote {png}")
    if html is not None:
        chart, facts = charts.svg_chart(curves, x=steps), _report_facts(found, metrics)
        html.write_text(charts.html_page(f"Run {run_id}", facts, chart), encoding="utf-8")
        note(f"wrote {html}")


def _newest(client: RestClient) -> TrainingRun:
    """The newest of the last 20 runs with a step; the newest of all if none has one."""
    last = list(islice(client.iter_training_runs(page_size=20), 20))
    if not last:
        raise click.ClickException(f"there is no run {where()} yet; `tinkex demo` makes one")
    return next((found for found in last if _metrics(client, found)), last[0])


def _report_facts(run: TrainingRun, metrics: StepMetrics) -> dict[str, str]:
    tokens = sum(line.get("tokens:sum", 0) for line in metrics)
    seconds = sum(line.get("seconds", 0) for line in metrics)
    saved = run.last_checkpoint or run.last_sampler_checkpoint
    return {
        "Base model": run.base_model,
        "LoRA rank": str(run.lora_rank or "-"),
        "Steps": str(int(metrics.steps()[-1])),
        "Tokens trained on": f"{tokens:,.0f}",
        "Compute": f"{seconds:,.1f} s" + (f" ({tokens / seconds:,.0f} tokens/s)" if seconds else ""),
        "Last checkpoint": saved.tinker_path if saved else "-",
    }


def _metrics(client: RestClient, run: TrainingRun) -> StepMetrics | None:
    """The run's metrics step by step; None if the server does not keep them."""
    from tinkex.errors import NotFoundError

    try:
        return client.get_run_metrics(run.training_run_id).result()
    except NotFoundError:
        return None


@click.group()
def session() -> None:
    """Sessions. A session is what one client process did on the server."""


@session.command("delete")
@click.argument("session_id")
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@format_option
def delete_session(session_id: str, yes: bool) -> None:
    """Delete a session of yours with its runs for good. Delete their checkpoints first."""
    if not yes:
        with answered("nobody answered; --yes deletes without asking"):
            click.confirm(f"Delete session {session_id} and its runs for good?", abort=True, err=True)
    with rest() as client:
        client.delete_session(session_id).result()
    show({"session_id": session_id, "deleted": True}, f"deleted session {session_id}")


@session.command("export-trace")
@click.argument("session_id")
@click.option("-o", "--output", type=_FILE, help="The file to write.  [default: SESSION_ID.pftrace]")
@click.option("--url-only", is_flag=True, help="Print the link to the trace instead of downloading it.")
@format_option
def export_trace(session_id: str, output: Path | None, url_only: bool) -> None:
    """Export a session's timeline. Open the file at ui.perfetto.dev.

    The link of --url-only works without a key, for about an hour.
    """
    from tinkex.client.download import download

    if is_local():
        raise click.ClickException(
            "the process that trains keeps the timeline in its memory: export it there, with "
            "RestClient.export_session_trace, or set TINKER_BASE_URL to ask a server"
        )
    note(f"the server is making the trace of {session_id}; this may take a while")
    with rest() as client:
        url = client.export_session_trace(session_id).result()
    if url_only:
        show({"session_id": session_id, "url": url}, url)
        return
    target = output or Path(f"{session_id}.pftrace")
    with bar("Downloading", of_bytes=True) as progress:
        count = download(url, target, progress)
    facts = {"File": target, "Size": size(count), "Open it at": "https://ui.perfetto.dev"}
    fields = {"session_id": session_id, "destination": str(target), "file_size_bytes": count}
    show(fields, f"Trace of session {session_id}", facts)

"""`tinkex run`: training runs, each with its history where the server keeps one."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tinkex.cli.numbers import Whole
from tinkex.cli.output import (
    CONTEXT,
    Column,
    ago,
    format_option,
    gather,
    note,
    plural,
    show_facts,
    show_json,
    show_table,
    wants_json,
)
from tinkex.cli.place import is_local, rest, where

if TYPE_CHECKING:
    from tinkex.client.rest import RestClient
    from tinkex.client.rest_results import RunMetrics
    from tinkex.types.training import TrainingRun

# what -c takes: the column's title, and what it shows of a run and of its history
_COLUMNS: dict[str, tuple[str, Callable[[TrainingRun], Any]]] = {
    "id": ("Run", lambda run: run.training_run_id),
    "model": ("Model", lambda run: run.base_model),
    "owner": ("Owner", lambda run: run.model_owner),
    "lora": ("Rank", lambda run: run.lora_rank if run.is_lora else "full"),
    "updated": ("Updated", lambda run: run.last_request_time),
    "status": ("Status", lambda run: _status(run)),
    "checkpoint": ("Checkpoint", lambda run: run.last_checkpoint and run.last_checkpoint.checkpoint_id),
    "checkpoint_time": ("Saved", lambda run: run.last_checkpoint and run.last_checkpoint.time),
}
_HISTORY = "loss"  # a column of ours: a sparkline, which costs a request for each run
_DEFAULT = "id,model,lora,updated,status"


@click.group(context_settings=CONTEXT)
def run() -> None:
    """Training runs."""


@run.command("list", context_settings=CONTEXT)
@click.option("--limit", default=20, type=Whole(0), show_default=True, help="At most so many; 0: all.")
@click.option(
    "-c", "--columns",
    help=f"Which columns, separated by commas: {', '.join(_COLUMNS)}, and {_HISTORY} for its curve.  "
    f"[default: {_DEFAULT}; on this machine {_HISTORY} too]",
)  # fmt: skip
@format_option
def list_runs(limit: int, columns: str | None) -> None:
    """List training runs, newest first."""
    columns = columns or (f"{_DEFAULT},{_HISTORY}" if is_local() else _DEFAULT)
    names = [name.strip() for name in columns.split(",") if name.strip()]
    if unknown := [name for name in names if name not in (*_COLUMNS, _HISTORY)]:
        known = ", ".join((*_COLUMNS, _HISTORY))
        raise click.ClickException(f"no column is called {', '.join(unknown)}; there are: {known}")
    with rest() as client:
        listing = client.iter_training_runs(page_size=min(limit or 100, 100))
        runs = gather(listing, limit, "Runs")
        rows = [[_cell(client, run, name) for name in names] for run in runs] if not wants_json() else []
    if wants_json():
        show_json({"runs": runs})
        return
    left = (listing.total or len(runs)) - len(runs)
    more = f" ({left} more: --limit 0 shows all)" if left > 0 else ""
    titles = [Column("Loss") if name == _HISTORY else Column(_COLUMNS[name][0]) for name in names]
    show_table(f"{plural(len(runs), 'run')} {where()}{more}", titles, rows)
    if not runs and is_local():
        note("what was trained through a server is listed through it: set TINKER_BASE_URL and TINKER_API_KEY")


def _cell(client: RestClient, run: TrainingRun, name: str) -> Any:
    if name != _HISTORY:
        return _COLUMNS[name][1](run)
    from tinkex.charts import sparkline

    return sparkline([line["loss"] for line in _history(client, run) or () if "loss" in line], 16) or None


def _status(run: TrainingRun) -> str:
    return "Failed" if run.corrupted else "OK"


@run.command("info", context_settings=CONTEXT)
@click.argument("run_id")
@format_option
def info(run_id: str) -> None:
    """Show one run, its last checkpoints, and how its loss went."""
    with rest() as client:
        found = client.get_training_run(run_id).result()
        lines = _history(client, found) if not wants_json() else None
    if wants_json():
        show_json(found)
        return
    facts: dict[str, Any] = {
        "Base model": found.base_model,
        "Owner": found.model_owner,
        "LoRA rank": found.lora_rank if found.is_lora else "none: all weights are trained",
        "Last request": ago(found.last_request_time),
        "Status": _status(found),
    }
    for kind, saved in (("Training", found.last_checkpoint), ("Sampler", found.last_sampler_checkpoint)):
        if saved is not None:
            facts[f"{kind} checkpoint, {ago(saved.time)}"] = saved.tinker_path
    facts |= {f"Metadata: {name}": value for name, value in (found.user_metadata or {}).items()}
    facts |= _history_facts(lines)
    show_facts(f"Run {found.training_run_id}", facts)


def _history_facts(lines: RunMetrics | None) -> dict[str, str]:
    from tinkex.charts import number, sparkline

    if lines is None:
        return {}
    if not lines:
        return {"History": "no step yet"}
    facts = {"Steps": str(int(lines[-1]["step"]))}
    for name, values in lines.curves().items():
        facts[name] = f"{sparkline(values, 24)}  {number(values[0])} → {number(values[-1])}"
    return facts


@run.command("plot", context_settings=CONTEXT)
@click.argument("run_id", required=False)
@click.option("--png", type=click.Path(path_type=Path, dir_okay=False), help="Write a picture to this file.")
@click.option("--html", type=click.Path(path_type=Path, dir_okay=False), help="Write a report to this file.")
@click.option(
    "-m",
    "--metric",
    "metrics",
    multiple=True,
    help="What to plot, once for each.  [default: those of a step]",
)
@format_option
def plot(run_id: str | None, png: Path | None, html: Path | None, metrics: tuple[str, ...]) -> None:
    """Plot a run's history: here, as a PNG, or as an HTML report. Without a RUN_ID it is the newest run with
    a step.

    With --format json it prints every step's numbers instead: what is in the run's metrics.jsonl.
    """
    with rest() as client:
        found = client.get_training_run(run_id).result() if run_id else _newest(client)
        lines = _history(client, found)
    run_id = found.training_run_id
    if lines is None:
        raise click.ClickException(
            "this server keeps no history of runs (servers of ours do); log metrics in your script"
        )
    if wants_json():
        show_json({"training_run_id": run_id, "steps": lines})
        return
    if not lines:
        raise click.ClickException(f"run {run_id} has no history: it has taken no step")
    if unknown := [name for name in metrics if name not in lines.metrics()]:
        known = ", ".join(lines.metrics())
        raise click.ClickException(f"this run has no metric {', '.join(unknown)}; it has: {known}")
    curves, steps = lines.curves(metrics), lines.steps()
    if png is None and html is None:
        _plot_here(found.training_run_id, curves, steps)
    if png is not None:
        from tinkex.charts import write_png

        write_png(png, curves, title=f"{found.base_model}, rank {found.lora_rank}", x=steps)
        note(f"wrote {png}")
    if html is not None:
        from tinkex.svg import html_page, html_table, svg_chart

        report = html_table(_report_facts(found, lines)) + svg_chart(curves, x=steps)
        html.write_text(html_page(f"Run {run_id}", report), encoding="utf-8")
        note(f"wrote {html}")


def _newest(client: RestClient) -> TrainingRun:
    """The newest run with a step, among the last few; the newest of all if none has one."""
    last = list(itertools.islice(client.iter_training_runs(page_size=20), 20))
    if not last:
        raise click.ClickException(f"there is no run {where()} yet; `tinkex demo` makes one")
    return next((found for found in last if _history(client, found)), last[0])


def _plot_here(title: str, curves: dict[str, list[float]], steps: list[float]) -> None:
    import shutil

    from tinkex.charts import terminal_chart

    width = min(100, shutil.get_terminal_size().columns)
    height = 10 if len(curves) == 1 else 6 * len(curves)
    click.echo(terminal_chart(curves, width=width, height=height, title=f"Run {title}", x=steps))


def _report_facts(run: TrainingRun, lines: RunMetrics) -> dict[str, str]:
    tokens = sum(line.get("tokens:sum", 0) for line in lines)
    seconds = sum(line.get("seconds", 0) for line in lines)
    saved = run.last_checkpoint or run.last_sampler_checkpoint
    return {
        "Base model": run.base_model,
        "LoRA rank": str(run.lora_rank or "-"),
        "Steps": str(int(lines[-1]["step"])),
        "Tokens trained on": f"{tokens:,.0f}",
        "Compute": f"{seconds:,.1f} s" + (f" ({tokens / seconds:,.0f} tokens/s)" if seconds else ""),
        "Last checkpoint": saved.tinker_path if saved else "-",
    }


def _history(client: RestClient, run: TrainingRun) -> RunMetrics | None:
    """What the run said step by step; None if the server does not keep it."""
    from tinkex.errors import NotFoundError

    try:
        return client.get_run_metrics(run.training_run_id).result()
    except NotFoundError:
        return None

"""`tinkex run rename`, `tag`, `delete` and `prune`: changes to runs, which only Tinkex servers offer."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING

import click

from tinkex.cli.output import Whole, format_option, plural, show
from tinkex.cli.target import delete_each, rest

if TYPE_CHECKING:
    from tinkex.client.rest import RestClient
    from tinkex.types.training import TrainingRun

_STATES = ("running", "idle", "finished", "interrupted", "failed")
_yes = click.option("-y", "--yes", is_flag=True, help="Do not ask.")
_checkpoints = click.option("--checkpoints", is_flag=True, help="Delete their checkpoints too.")


@click.command("rename")
@click.argument("run_id", metavar="RUN")
@click.argument("name")
@format_option
def rename(run_id: str, name: str) -> None:
    """Call a RUN (its id, the beginning of it, or its name) by another NAME; "" takes its name away."""
    with rest() as client:
        found = client.get_training_run(run_id).result()
        client.update_training_run(found.training_run_id, name=name).result()
    show({"training_run_id": found.training_run_id, "name": name}, f"{found.training_run_id} is now {name!r}")


@click.command("tag")
@click.argument("run_id", metavar="RUN")
@click.argument("tags", nargs=-1)
@click.option("-d", "--delete", "removed", multiple=True, metavar="TAG", help="Take a tag away.")
@format_option
def tag(run_id: str, tags: tuple[str, ...], removed: tuple[str, ...]) -> None:
    """Add TAGS to a RUN, or take some away; without any, show them."""
    with rest() as client:
        found = client.get_training_run(run_id).result()
        all_tags: list[str] = [*(found.tags or []), *tags]
        now = [one for one in dict.fromkeys(all_tags) if one not in removed]
        if tags or removed:
            client.update_training_run(found.training_run_id, tags=now).result()
    show({"training_run_id": found.training_run_id, "tags": now}, ", ".join(now) or "no tags")


@click.command("delete")
@click.argument("run_ids", nargs=-1, required=True, metavar="RUN...")
@_checkpoints
@_yes
@format_option
def delete(run_ids: tuple[str, ...], checkpoints: bool, yes: bool) -> None:
    """Delete RUNs for good: metrics, rollouts and, with --checkpoints, what they saved.

    A run that has checkpoints is not deleted without --checkpoints. What a running one does ends.
    """
    with rest() as client:
        runs = [client.get_training_run(run_id).result() for run_id in run_ids]
        _delete(client, runs, checkpoints, yes)


@click.command("prune")
@click.option("--older-than", default="7d", show_default=True, metavar="TIME", help="As 12h, 7d or 4w.")
@click.option(
    "--state", "states", multiple=True, type=click.Choice(_STATES), help="Only these; may be repeated.  "
    "[default: finished, interrupted and failed]",
)  # fmt: skip
@click.option("--max-steps", type=Whole(0), help="Only runs that took at most so many steps.")
@click.option("--dry-run", is_flag=True, help="Show which, and delete nothing.")
@_checkpoints
@_yes
@format_option
def prune(older_than: str, states: tuple[str, ...], max_steps: int | None, **options: bool) -> None:
    """Delete runs that were not used for long. Runs with checkpoints stay, unless --checkpoints is given."""
    before = datetime.now(UTC) - _age(older_than)
    wanted = states or ("finished", "interrupted", "failed")
    with rest() as client:
        runs = [
            run
            for run in client.iter_training_runs(page_size=1000)
            if run.last_request_time < before
            and run.status in wanted
            and (max_steps is None or (run.steps or 0) <= max_steps)
            and (options["checkpoints"] or not (run.last_checkpoint or run.last_sampler_checkpoint))
        ]
        if options["dry_run"]:
            columns = {"Run": "training_run_id", "Name": "name", "State": "status"}
            listed = [{title: run.model_dump()[name] for title, name in columns.items()} for run in runs]
            show({"runs": runs}, f"{plural(len(runs), 'run')} would be deleted", listed)
        else:
            _delete(client, runs, options["checkpoints"], options["yes"])


def _age(text: str) -> timedelta:
    """A length of time.

    >>> _age("36h")
    datetime.timedelta(days=1, seconds=43200)
    """
    found = re.fullmatch(r"(\d{1,6})([hdw])", text.strip())
    if found is None:
        raise click.ClickException(f"--older-than {text}: write a number and a unit, as 12h, 7d or 4w")
    return timedelta(hours=int(found[1]) * {"h": 1, "d": 24, "w": 168}[found[2]])


def _delete(client: RestClient, runs: Sequence[TrainingRun], checkpoints: bool, yes: bool) -> None:
    lines = {run.training_run_id: f"{run.training_run_id} {run.name or ''}".rstrip() for run in runs}
    remove = partial(client.delete_training_run, checkpoints=checkpoints)
    delete_each("run", lines, "training_run_id", remove, yes)

"""`tinkex billing`: what was used hour by hour and what checkpoints take up; in CSV, the official columns."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from tinkex.cli.output import CONTEXT, Column, format_option, plural, show_json, show_table, size, wants_json
from tinkex.cli.place import admin, where

_AMOUNTS = ("count", "gigabyte_hours", "token_count")


@click.group(context_settings=CONTEXT)
def billing() -> None:
    """What was used, and what is stored."""


@billing.command("usage", context_settings=CONTEXT)
@click.argument("starting_on")
@click.argument("ending_before")
@click.option("--csv", "csv_path", metavar="PATH", help="Write the rows as CSV instead ('-': stdout).")
@click.option(
    "--sessions-csv", "sessions_path", metavar="PATH",
    help="Also write what each session said of itself, as CSV, to join on session_id ('-': stdout).",
)  # fmt: skip
@format_option
def usage(starting_on: str, ending_before: str, csv_path: str | None, sessions_path: str | None) -> None:
    """Show what was used, hour by hour. From and to whole hours (UTC), at most 14 days apart.

    \b
    tinkex billing usage 2026-07-13T00:00:00Z 2026-07-14T00:00:00Z

    A row is an hour, a kind of use, a base model, a session and a user; amounts are tokens, gigabyte-hours or
    counts. Costs are shown where the server prices what it does: one of your own does not.
    """
    from tinkex.types.billing import BillingUsageEvent

    with admin() as client:
        report = client.get_billing_usage(starting_on, ending_before).result()
    said = report.model_dump(mode="json")
    if sessions_path:
        rows = [(name, json.dumps(one["user_metadata"] or {})) for name, one in said["sessions"].items()]
        _write_csv(sessions_path, ("session_id", "user_metadata"), rows)
    events = [_flat(event) for event in said["data"]]
    if csv_path:
        header = [*(n for n in BillingUsageEvent.model_fields if n != "event_info"), "type", *_AMOUNTS]
        _write_csv(csv_path, header, [[event.get(name) for name in header] for event in events])
    elif wants_json():
        show_json(said)
    else:
        _show_usage(events)


def _flat(event: Mapping[str, Any]) -> dict[str, Any]:
    info = event["event_info"]
    return {**{n: v for n, v in event.items() if n != "event_info"}, **info}


def _show_usage(events: Sequence[Mapping[str, Any]]) -> None:
    columns = [Column("Hour"), Column("Kind"), Column("Amount", right=True), Column("Unit"), Column("Model"),
               Column("User"), Column("Session"), Column("Cost $", right=True)]  # fmt: skip
    rows: list[list[Any]] = []
    for event in events:
        unit = next(name for name in _AMOUNTS if name in event)
        amount = f"{event[unit]:,.6g}" if unit == "gigabyte_hours" else f"{event[unit]:,}"
        words = {"count": "saved", "gigabyte_hours": "GB hours", "token_count": "tokens"}
        hour = event["bucket_start"].replace("T", " ").removesuffix(":00Z")
        user = event["user_name"] or event["user_id"]
        rows.append([
            hour, event["type"], amount, words[unit], event["base_model"], user, event["session_id"],
            event["estimated_cost_usd"],
        ])  # fmt: skip
    show_table(f"{plural(len(rows), 'row')} {where()}", columns, rows)


@billing.command("checkpoint-storage", context_settings=CONTEXT)
@click.option("--project-id", help="Only this project's.")
@click.option("--csv", "csv_path", metavar="PATH", help="Write the rows as CSV instead ('-': stdout).")
@format_option
def checkpoint_storage(project_id: str | None, csv_path: str | None) -> None:
    """Show what checkpoints take up now. By project and owner."""
    from tinkex.types.billing import CurrentCheckpointStorageUsageItem

    with admin() as client:
        report = client.get_current_checkpoint_storage_usage(project_id).result()
    said = report.model_dump(mode="json")
    rate = "effective_rate_usd_per_gigabyte_month"
    if csv_path:
        rows = [{rate: said[rate], **row} for row in said["data"]]
        header = [rate, *CurrentCheckpointStorageUsageItem.model_fields]
        _write_csv(csv_path, header, [[row[name] for name in header] for row in rows])
    elif wants_json():
        show_json(said)
    else:
        columns = [Column("Owner"), Column("Project"), Column("Checkpoints", right=True),
                   Column("Size", right=True), Column("$ a month", right=True)]  # fmt: skip
        rows = [
            [row["user_name"] or row["user_email"] or row["org_user_urn"], row["project_id"],
             row["checkpoint_count"], size(row["size_bytes"]), row["estimated_monthly_cost_usd"]]
            for row in said["data"]
        ]  # fmt: skip
        show_table(f"Checkpoints {where()}", columns, rows)


def _write_csv(path: str, header: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(header)
    writer.writerows(rows)
    if path == "-":
        click.echo(text.getvalue(), nl=False)
    else:
        Path(path).write_text(text.getvalue(), encoding="utf-8", newline="")

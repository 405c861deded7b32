"""`tinkex billing`: usage by the hour, and what checkpoints take up; CSV has the official columns."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from tinkex.cli.options import format_option
from tinkex.cli.output import Column, plural, show, show_table, size
from tinkex.cli.target import admin, where

_UNITS = {"count": "saved", "gigabyte_hours": "GB hours", "token_count": "tokens"}
_USAGE_COLUMNS = (
    "Hour", "Kind", Column("Amount", right=True), "Unit", "Model", "User", "Session",
    Column("Cost $", right=True),
)  # fmt: skip
_STORAGE_COLUMNS = (
    "Owner", "Project", Column("Checkpoints", right=True), Column("Size", right=True),
    Column("$ a month", right=True),
)  # fmt: skip


@click.group()
def billing() -> None:
    """Usage by the hour, and storage."""


_csv_option = click.option(
    "--csv", "csv_path", metavar="PATH", help="Write the rows as CSV instead ('-': stdout)."
)


@billing.command("usage")
@click.argument("starting_on")
@click.argument("ending_before")
@_csv_option
@click.option(
    "--sessions-csv", "sessions_path", metavar="PATH",
    help="Also write each session's metadata as CSV, to join on session_id ('-': stdout).",
)  # fmt: skip
@format_option
def usage(starting_on: str, ending_before: str, csv_path: str | None, sessions_path: str | None) -> None:
    """Show usage, hour by hour. From and to whole hours (UTC), at most 14 days apart.

    \b
    tinkex billing usage 2026-07-13T00:00:00Z 2026-07-14T00:00:00Z

    A row is an hour, a kind of use, a base model, a session and a user. Amounts are tokens, gigabyte-hours or
    counts. Costs are shown if the server has prices; a server of your own has none.
    """
    from tinkex.types.reports import BillingUsageEvent

    with admin() as client:
        report = client.get_billing_usage(starting_on, ending_before).result().model_dump(mode="json")
    if sessions_path:
        rows = [(name, json.dumps(one["user_metadata"] or {})) for name, one in report["sessions"].items()]
        _write_csv(sessions_path, ("session_id", "user_metadata"), rows)
    events = [{**event, **event["event_info"]} for event in report["data"]]
    if csv_path:
        header = [*(n for n in BillingUsageEvent.model_fields if n != "event_info"), "type", *_UNITS]
        _write_csv(csv_path, header, [[event.get(name) for name in header] for event in events])
        return
    title = f"{plural(len(events), 'row')} {where()}"
    show(report, lambda: show_table(title, _USAGE_COLUMNS, [_usage_row(event) for event in events]))


def _usage_row(event: Mapping[str, Any]) -> list[Any]:
    unit = next(name for name in _UNITS if name in event)
    amount = f"{event[unit]:,.6g}" if unit == "gigabyte_hours" else f"{event[unit]:,}"
    hour = event["bucket_start"].replace("T", " ").removesuffix(":00Z")
    user = event["user_name"] or event["user_id"]
    return [
        hour, event["type"], amount, _UNITS[unit], event["base_model"], user, event["session_id"],
        event["estimated_cost_usd"],
    ]  # fmt: skip


@billing.command("checkpoint-storage")
@click.option("--project-id", help="Only this project's.")
@_csv_option
@format_option
def checkpoint_storage(project_id: str | None, csv_path: str | None) -> None:
    """Show what checkpoints take up now. By project and owner."""
    from tinkex.types.reports import CurrentCheckpointStorageUsageItem

    with admin() as client:
        report = client.get_current_checkpoint_storage_usage(project_id).result().model_dump(mode="json")
    if csv_path:
        rate = "effective_rate_usd_per_gigabyte_month"
        header = [rate, *CurrentCheckpointStorageUsageItem.model_fields]
        rows = [{rate: report[rate], **row} for row in report["data"]]
        _write_csv(csv_path, header, [[row[name] for name in header] for row in rows])
        return
    cells = [
        [row["user_name"] or row["user_email"] or row["org_user_urn"], row["project_id"],
         row["checkpoint_count"], size(row["size_bytes"]), row["estimated_monthly_cost_usd"]]
        for row in report["data"]
    ]  # fmt: skip
    show(report, lambda: show_table(f"Checkpoints {where()}", _STORAGE_COLUMNS, cells))


def _write_csv(path: str, header: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(header)
    writer.writerows(rows)
    if path == "-":
        click.echo(text.getvalue(), nl=False)
    else:
        Path(path).write_text(text.getvalue(), encoding="utf-8", newline="")

"""`tinkex billing`: usage by the hour, and what checkpoints take up; CSV has the official columns."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from tinkex.cli.output import format_option, plural, show, size
from tinkex.cli.target import connected, where

_UNITS = {"count": "saved", "gigabyte_hours": "GB hours", "token_count": "tokens"}
_RATE = "effective_rate_usd_per_gigabyte_month"
_csv_option = click.option(
    "--csv", "csv_path", metavar="PATH", help="Write the rows as CSV instead ('-': stdout)."
)


@click.group()
def billing() -> None:
    """Usage by the hour, and storage."""


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
    from tinkex.client.admin import AdminClient
    from tinkex.types.reports import BillingUsageEvent

    with connected() as connection:
        found = AdminClient(connection).get_billing_usage(starting_on, ending_before).result()
    report = found.model_dump(mode="json")
    if sessions_path:
        sessions = [
            {"session_id": name, "user_metadata": json.dumps(one["user_metadata"] or {})}
            for name, one in report["sessions"].items()
        ]
        _write_csv(sessions_path, ("session_id", "user_metadata"), sessions)
    events = [{**event, **event["event_info"]} for event in report["data"]]
    if csv_path:
        header = [*(n for n in BillingUsageEvent.model_fields if n != "event_info"), "type", *_UNITS]
        _write_csv(csv_path, header, events)
    else:
        show(report, f"{plural(len(events), 'row')} {where()}", [_usage_row(event) for event in events])


def _usage_row(event: Mapping[str, Any]) -> dict[str, Any]:
    unit = next(name for name in _UNITS if name in event)
    return {
        "Hour": event["bucket_start"].replace("T", " ").removesuffix(":00Z"),
        "Kind": event["type"],
        "Amount": f"{event[unit]:,.6g}" if unit == "gigabyte_hours" else f"{event[unit]:,}",
        "Unit": _UNITS[unit],
        "Model": event["base_model"],
        "User": event["user_name"] or event["user_id"],
        "Session": event["session_id"],
        "Cost $": event["estimated_cost_usd"],
    }


@billing.command("checkpoint-storage")
@click.option("--project-id", help="Only this project's.")
@_csv_option
@format_option
def checkpoint_storage(project_id: str | None, csv_path: str | None) -> None:
    """Show what checkpoints take up now. By project and owner."""
    from tinkex.client.admin import AdminClient
    from tinkex.types.reports import CurrentCheckpointStorageUsageItem

    with connected() as connection:
        found = AdminClient(connection).get_current_checkpoint_storage_usage(project_id).result()
    report = found.model_dump(mode="json")
    if csv_path:
        rows = [{_RATE: report[_RATE], **row} for row in report["data"]]
        _write_csv(csv_path, [_RATE, *CurrentCheckpointStorageUsageItem.model_fields], rows)
        return
    cells = [
        {"Owner": row["user_name"] or row["user_email"] or row["org_user_urn"], "Project": row["project_id"],
         "Checkpoints": row["checkpoint_count"], "Size": size(row["size_bytes"]),
         "$ a month": row["estimated_monthly_cost_usd"]}
        for row in report["data"]
    ]  # fmt: skip
    show(report, f"Checkpoints {where()}", cells)


def _write_csv(path: str, header: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> None:
    text = io.StringIO()
    writer = csv.DictWriter(text, header, extrasaction="ignore")
    writer.writeheader()
    writer.writerows(rows)
    if path == "-":
        click.echo(text.getvalue(), nl=False)
    else:
        Path(path).write_text(text.getvalue(), encoding="utf-8", newline="")

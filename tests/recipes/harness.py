"""Reads what a run left in its directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def metrics(directory: Path) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl, without what depends on the clock."""
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if name != "tokens_per_second"} for row in rows]


def values(directory: Path, name: str) -> list[float]:
    return [row[name] for row in metrics(directory) if name in row]

"""`bench/line.py --device` runs whole, on the CPU and a tiny shape: every row of its table has a figure."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.compat, pytest.mark.timeout(600)]
ROOT = Path(__file__).parent.parent.parent
SMALL = {"prompts": 2, "samples": 2, "prompt-tokens": 8, "tokens": 4, "rank": 4, "rounds": 1, "counts": "1,3"}
TRIED = {
    "device": "cpu",
    "shape": "line",
    "sdk": "tinkex",
    "official": sys.executable,
    "ours": sys.executable,
}


def test_every_row_has_a_figure() -> None:
    options = [f"--{name}={value}" for name, value in (TRIED | SMALL).items()]
    command = [sys.executable, "bench/line.py", "--json", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=590)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    titles = [row["title"] for row in found["rows"]]
    assert any(title.startswith("publish, `power`") for title in titles)
    # A first time may take no longer than a second: these rows are differences.
    differences = (" - second", "longest stall", "once more: noise")
    figures = [row for row in found["rows"] if not any(word in row["title"] for word in differences)]
    assert all(row["ours"] > 0 for row in figures)
    assert len(figures) < len(titles)
    assert {row["goal"] for row in found["rows"]} >= {"≥ 0.9", "≥ 0.95", "≤ 1.1", "≤ 1.2", "≤ 2", "≤ 0.5"}

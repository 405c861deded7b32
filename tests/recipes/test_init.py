"""`tinkex init`: what it makes runs as it is."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow


def test_a_new_project_trains_and_its_test_passes(
    tinkex_command: Callable[..., subprocess.CompletedProcess[str]], model: Path
) -> None:
    said = tinkex_command("init", "pirates", "--model", model).stdout
    assert "cd pirates" in said
    steps = ["--steps", "3", "--batch", "4", "--learning-rate", "1e-2"]
    done = subprocess.run(
        [sys.executable, "pirates/train.py", *steps], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr[-3000:]
    before, after = (float(line.split()[-1]) for line in done.stdout.splitlines() if "held-out" in line)
    assert after < before
    assert "tinkex chat tinker://" in done.stdout
    (run,) = json.loads(tinkex_command("run", "list", "-f", "json").stdout)["runs"]
    assert run["name"] == "pirates"
    tested = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "pirates"]
    checked = subprocess.run(tested, capture_output=True, text=True, timeout=100)
    assert checked.returncode == 0, checked.stdout
    again = tinkex_command("init", "pirates", check=False)
    assert again.returncode == 1
    assert "has README.md, train.py, test_data.py, data already" in again.stderr

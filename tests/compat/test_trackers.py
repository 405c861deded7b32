"""`tinkex train sft --log wandb` and `--log trackio`, with the packages themselves and no network."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.compat.environments import ROOT, interpreter

pytestmark = [pytest.mark.slow, pytest.mark.compat]
CLIENTS = ROOT / "tests" / "compat" / "clients"


@pytest.mark.parametrize("kind", ["wandb", "trackio"])
def test_a_recipes_metrics_are_the_trackers(tmp_path: Path, model_directory: Path, kind: str) -> None:
    python = interpreter("trackers")
    (packages,) = python.parents[1].glob("lib/python*/site-packages")
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TINK")}
    environment = kept | {
        "WANDB_MODE": "offline", "TRACKIO_DIR": str(tmp_path / "trackio"), "HF_HUB_OFFLINE": "1",
        "TINKEX_HOME": str(tmp_path / "home"), "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    chats = tmp_path / "chats.jsonl"
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    chats.write_text("".join(json.dumps({"messages": turns}) + "\n" for _ in range(12)))

    def do(*command: str | Path) -> str:
        done = subprocess.run(
            command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    options = "--batch-size 2 --rank 4 --save-every 2 --eval-every 2 --steps 4 --out run --log"
    train = [sys.executable, CLIENTS / "tracked.py", packages, "train", "sft", chats]
    do(*train, "--model", model_directory, *options.split(), kind)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]

    found = json.loads(do(python, CLIENTS / "mirrored.py", tmp_path / "run", kind).splitlines()[-1])
    (run,) = found[kind]
    assert run["name"].startswith("run-")
    assert float(run["config"]["batch_size"]) == 2
    for name in ("loss", "eval_loss", "learning_rate"):
        assert by_step(run["rows"], name) == pytest.approx(by_step(rows, name)), name


def by_step(rows: list[dict[str, Any]], name: str) -> dict[int, float]:
    return {int(row["step"]): row[name] for row in rows if name in row}

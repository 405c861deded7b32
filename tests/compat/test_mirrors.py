"""`tinkex serve --mirror wandb --mirror trackio`, with both packages themselves and no network."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.compat.clients.report import MODEL
from tests.compat.environments import ROOT, interpreter
from tinkex import AdamParams, Datum, ModelInput, ServiceClient

pytestmark = [pytest.mark.slow, pytest.mark.compat]
DATA = [Datum(ModelInput.from_ints([1, 2, 3]), {"target_tokens": [2, 3, 4]})]


def train(url: str) -> list[float]:
    """Three steps of a run with a name, and a reward of each."""
    with ServiceClient(base_url=url, api_key="tml-mirrored") as service:
        run = service.create_lora_training_client(MODEL, rank=4, name="mirrored", tags=["a"])
        losses: list[float] = []
        for step in range(3):
            passed = run.forward_backward(DATA, "cross_entropy")
            run.optim_step(AdamParams()).result(60)
            losses.append(passed.result(60).metrics["loss:sum"] / 3)
            run.log({"reward": step / 10}).result(60)
    return losses


def test_both_trackers_have_what_the_server_has(tmp_path: Path) -> None:
    python, home = interpreter("trackers"), tmp_path / "home"
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TINK")}
    places = {"WANDB_MODE": "offline", "TRACKIO_DIR": str(tmp_path / "trackio"), "HF_HUB_OFFLINE": "1"}
    environment = kept | places | {"PYTHONPATH": str(ROOT / "src"), "TINKEX_MIRRORS": "wandb trackio"}
    options = ["--engine", "fake", "--model", f"{MODEL}=/none", "--home", str(home), "--port", "0"]
    with subprocess.Popen(
        [python, "-m", "tinkex.cli", "serve", "--drain", "0.1", *options], env=environment,
        stdout=subprocess.PIPE, text=True,
    ) as server:  # fmt: skip
        assert server.stdout is not None
        (url,) = re.findall(
            r" serves (http://\S+)", next(line for line in server.stdout if " serves " in line)
        )
        losses = train(url)
        server.terminate()
        assert server.wait(60) == 0
    script = ROOT / "tests" / "compat" / "clients" / "mirrored.py"
    read = [str(python), str(script), str(home / "mirrors" / "wandb"), "wandb", "trackio"]
    done = subprocess.run(read, env=kept | places, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    for kind, (run,) in found.items():
        assert run["name"].startswith("mirrored ("), kind
        assert run["config"]["base_model"] == MODEL
        by_metric = {
            name: {row["step"]: row[name] for row in run["rows"] if name in row}
            for name in ("loss", "reward")
        }
        assert by_metric["loss"] == pytest.approx(dict(enumerate(losses, 1))), kind
        assert by_metric["reward"] == pytest.approx({1: 0.0, 2: 0.1, 3: 0.2}), kind

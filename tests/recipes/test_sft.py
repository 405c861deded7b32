"""`tinkex train sft`: it learns, shows its batch, stops early, resumes after kill -9 to the same losses."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import tinkex
from tests.processes import in_terminal, interruptible
from tests.recipes.conftest import jsonl
from tests.recipes.harness import metrics, values
from tests.server.conftest import Running
from tinkex.engine.protocol import EngineConfig
from tinkex.recipes.progress import Progress
from tinkex.recipes.run_directory import RunDirectory
from tinkex.recipes.sft import SftConfig, train_sft
from tinkex.server.serve import ServerConfig
from tinkex.service.config import ServiceConfig

pytestmark = pytest.mark.slow

Command = Callable[..., subprocess.CompletedProcess[str]]


def settings(model: Path, data: Path, out: str, **more: Any) -> SftConfig:
    common = {"batch_size": 4, "learning_rate": 1e-2, "steps": 12, "eval_every": 6, "save_every": 4}
    return SftConfig(model=str(model), data=str(data), out=out, **{**common, **more})


def test_held_out_loss_falls_and_everything_is_written_down(
    tinkex_command: Command, model: Path, chats: Path
) -> None:
    options = ["--batch-size", 8, "--learning-rate", 1e-2, "--steps", 24, "--eval-every", 12, "--rank", 8]
    done = tinkex_command("train", "sft", chats, "--model", model, "--out", "run", *options)
    out = Path("run")
    losses = values(out, "eval_loss")
    assert losses[-1] < 0.4 * losses[0]
    assert [row["step"] for row in metrics(out) if "loss" in row] == list(range(1, 25))
    config = json.loads((out / "config.json").read_text())
    assert (config["recipe"], config["rank"], config["batch_size"]) == ("sft", 8, 8)
    samples = [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]
    assert [sample["step"] for sample in samples] == [12, 12, 24, 24]
    assert samples[-1]["text"].startswith("yes")
    assert (out / "curves.png").read_bytes().startswith(b"\x89PNG")
    adapter = json.loads((out / "result.json").read_text())["adapter"]
    assert "tinkex chat run\n" in done.stdout
    asked = tinkex_command("eval", model, "run", "--data", chats, "--limit", 2, "-f", "json")
    base, tuned = json.loads(asked.stdout)
    assert tuned["model"] == "run"
    assert tuned["loss"] < base["loss"]
    again = tinkex_command("train", "sft", chats, "--model", model, "--out", "run", *options)
    assert "is finished; --fresh trains anew" in again.stdout
    assert adapter in again.stdout


def test_the_batch_is_shown_and_nothing_is_trained(tinkex_command: Command, model: Path, chats: Path) -> None:
    done = tinkex_command(
        "train", "sft", chats, "--model", model, "--show-batch", "--batch-size", 2, "--out", "x"
    )
    shown = done.stdout
    assert shown.count("datum ") == 2
    assert "learnt" in shown
    assert "⟦yes " in shown
    assert "<|im_start|>assistant\n⟦" in shown, "what the model is asked is not learnt"
    assert not Path("x/state.json").exists()


def test_bad_rows_stop_the_run_or_are_counted(
    home: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows: list[dict[str, Any]] = [
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": f"b{n}"}]}
        for n in range(4)
    ]
    rows.insert(2, {"messages": [{"role": "user", "content": "nobody answers"}]})
    config = SftConfig(model=str(model), data=str(jsonl(tmp_path / "data.jsonl", rows)), steps=1)
    with tinkex.ServiceClient(base_url="local") as service:
        with pytest.raises(tinkex.InvalidInputError, match=r"jsonl:3: no message of the role .*--skip-bad"):
            train_sft(config, service)
        train_sft(replace(config, skip_bad=True), service, Progress())
    assert "1 bad rows left out" in capsys.readouterr().out
    assert Path("runs/sft-data/result.json").exists()


def test_early_stopping_keeps_the_best_adapter(home: Path, model: Path, chats: Path) -> None:
    """A rate that first learns and then destroys: training stops, and the best evaluation's adapter stays."""
    config = settings(
        model, chats, "run", steps=40, eval_every=2, early_stopping=2, learning_rate=0.15, schedule="constant"
    )
    with tinkex.ServiceClient(base_url="local") as service:
        outcome = train_sft(config, service)
        assert outcome is not None
        losses = values(Path("run"), "eval_loss")
        assert outcome.step < 40
        best = min(range(len(losses)), key=losses.__getitem__)
        assert best == len(losses) - 3, "two evaluations were no better"
        assert outcome.adapter.endswith(f"/sampler_weights/best-{2 * best:06d}") or best == 0


def test_settings_may_not_change_within_a_run(home: Path, model: Path, chats: Path) -> None:
    with tinkex.ServiceClient(base_url="local") as service:
        train_sft(settings(model, chats, "run", steps=1), service)
        with pytest.raises(tinkex.InvalidInputError, match=r"steps was 1 and is 2.*--fresh"):
            train_sft(settings(model, chats, "run", steps=2), service)
        jsonl(chats, [{"text": "other data"}] * 4)
        with pytest.raises(tinkex.InvalidInputError, match="data_digest was"):
            train_sft(settings(model, chats, "run", steps=1), service)
        outcome = train_sft(settings(model, chats, "run", steps=2, fresh=True), service)
        assert outcome is not None
        assert outcome.step == 2


def test_two_processes_cannot_share_a_directory(home: Path, model: Path, chats: Path) -> None:
    with RunDirectory(Path("run"), {}, Progress(quiet=True), fresh=False, tracker=None):
        with pytest.raises(tinkex.InvalidInputError, match="in use by another process"):
            train_sft(settings(model, chats, "run"))


def test_training_goes_on_from_a_saved_adapter(home: Path, model: Path, chats: Path) -> None:
    with tinkex.ServiceClient(base_url="local") as service:
        first = train_sft(settings(model, chats, "one"), service)
        assert first is not None
        train_sft(settings(model, chats, "two", start_from=first.state), service)
    assert values(Path("two"), "eval_loss")[0] == pytest.approx(
        values(Path("one"), "eval_loss")[-1], abs=1e-4
    )


def test_a_terminal_shows_a_bar(home: Path, model: Path, chats: Path) -> None:
    options = ["--model", str(model), "--steps", "3", "--batch-size", "4", "--out", "run"]
    command = [sys.executable, "-m", "tinkex.cli", "train", "sft", str(chats), *options]
    said = in_terminal(command, dict(os.environ))
    assert "training" in said
    assert "3/3" in said
    assert "loss" in said
    assert "tinkex chat run" in said


def test_a_server_trains_as_this_process_does(home: Path, model: Path, chats: Path, tmp_path: Path) -> None:
    with tinkex.ServiceClient(base_url="local") as service:
        train_sft(settings(model, chats, "here", steps=4, samples=0), service)
    served = ServiceConfig(tmp_path / "served", {"tiny": str(model)}, engine=EngineConfig("", device="cpu"))
    running = Running(ServerConfig(served, port=0, drain_seconds=0.1))
    try:
        with tinkex.ServiceClient(base_url=running.url, api_key="tml-ann") as service:
            outcome = train_sft(
                replace(settings(model, chats, "there", steps=4, samples=0), model="tiny"), service
            )
    finally:
        running.stop()
    assert outcome is not None
    assert outcome.base_model == "tiny"
    assert values(Path("there"), "loss") == pytest.approx(values(Path("here"), "loss"), abs=1e-5)


# -- interruptions -----------------------------------------------------------------------------------------


STEPS = {"steps": 30, "batch_size": 4, "learning_rate": 3e-3, "save_every": 7, "eval_every": 15, "seed": 3}


def command(model: Path, data: Path, out: str) -> list[str]:
    options = [f"--{name.replace('_', '-')}={value}" for name, value in STEPS.items()]
    recipe = [sys.executable, "-m", "tinkex.cli", "train", "sft", str(data)]
    return [*recipe, "--model", str(model), "--out", out, *options]


@pytest.fixture
def undisturbed(home: Path, model: Path, chats: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run in this process; what is started later has a home of its own."""
    with tinkex.ServiceClient(base_url="local") as service:
        train_sft(SftConfig(model=str(model), data=str(chats), out="whole", **STEPS), service)
    monkeypatch.setenv("TINKEX_HOME", str(home.with_name("home-of-children")))
    return Path("whole")


def test_after_kill_9_at_any_moment_the_same_command_gives_the_same_losses(
    undisturbed: Path, model: Path, chats: Path
) -> None:
    moments = random.Random(os.getpid())
    out = Path("killed")
    for wait in (1, moments.randrange(8, 20)):  # rows until it is killed: before anything is saved, and later
        child = subprocess.Popen(
            command(model, chats, "killed"), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )
        while child.poll() is None and rows_in(out) < wait:
            time.sleep(0.001)
        time.sleep(moments.random() * 0.02)
        assert child.poll() is None, child.communicate()
        os.kill(child.pid, signal.SIGKILL)
        child.communicate()
    subprocess.run(command(model, chats, "killed"), check=True, capture_output=True, timeout=100)
    assert_equal_runs(out, undisturbed)


def test_ctrl_c_saves_and_the_same_command_goes_on(undisturbed: Path, model: Path, chats: Path) -> None:
    out = Path("stopped")
    child = subprocess.Popen(
        interruptible(command(model, chats, "stopped")), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    while rows_in(out) < 9 and child.poll() is None:
        time.sleep(0.001)
    child.send_signal(signal.SIGINT)
    said = child.communicate(timeout=60)[1].decode()
    assert child.returncode == 130, said
    assert "the same command continues: tinkex train sft" in said
    listed = subprocess.run(
        [sys.executable, "-m", "tinkex.cli", "run", "list", "-f", "json"], capture_output=True, check=True
    )
    assert [run["status"] for run in json.loads(listed.stdout)["runs"]] == ["interrupted"]
    step = json.loads((out / "state.json").read_text())["step"]
    assert 0 < step < 30
    assert step == metrics(out)[-1]["step"], "nothing that was computed is lost"
    subprocess.run(command(model, chats, "stopped"), check=True, capture_output=True, timeout=100)
    assert_equal_runs(out, undisturbed)


def rows_in(directory: Path) -> int:
    try:
        return (directory / "metrics.jsonl").read_bytes().count(b"\n")
    except FileNotFoundError:
        return 0


def assert_equal_runs(one: Path, other: Path) -> None:
    ours, theirs = metrics(one), metrics(other)
    assert [row["step"] for row in ours] == [row["step"] for row in theirs]
    for mine, its in zip(ours, theirs, strict=True):
        assert mine == pytest.approx(its, abs=1e-5)
    samples = [json.loads(line) for line in (one / "samples.jsonl").read_text().splitlines()]
    assert samples == [json.loads(line) for line in (other / "samples.jsonl").read_text().splitlines()]

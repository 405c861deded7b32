"""`tinkex run` and the history behind it."""

from __future__ import annotations

import contextlib
import math
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from tests.cli.conftest import STEPS, Place
from tests.service.harness import MODEL, datum, killed_copy
from tinkex import AdamParams, Datum, ModelInput, RequestFailedError, ServiceClient

BEYOND = Datum(ModelInput.from_ints([10**6]), {"target_tokens": [5]})  # no token of any model here


def test_runs_are_listed(place: Place) -> None:
    (run,) = place.json("run", "list")["runs"]
    assert (run["training_run_id"], run["base_model"], run["lora_rank"]) == (place.run, MODEL, 4)
    assert run["user_metadata"] == {"note": "first"}
    assert run["last_checkpoint"]["tinker_path"] == place.paths["weights"]
    title, head, row = place.says("run", "list").splitlines()
    assert title.startswith("1 run ")
    curve = ["Loss"] if place.running is None else []  # of a server, only if asked for: it is a request a run
    assert head.split() == ["Run", "Model", "Rank", "Updated", "Status", *curve]
    assert row.split()[:6] == [place.run, MODEL, "4", "just", "now", "Running"]
    assert [len(cell) for cell in row.split()[6:]] == [STEPS] * len(curve)


@pytest.mark.parametrize("place", ["embedded"], indirect=True)
def test_looking_changes_nothing(place: Place) -> None:
    """Sessions that a killed process left are not ended: whoever owns the home next takes them up."""
    home = killed_copy(Path(place.env["TINKEX_HOME"]))

    def ledger() -> list[str]:
        with closing(sqlite3.connect(f"{(home / 'ledger.sqlite').as_uri()}?mode=ro", uri=True)) as db:
            return list(db.iterdump())

    before = ledger()
    assert any("active" in line for line in before)
    for command in (["run", "list"], ["run", "info", place.run], ["checkpoint", "list"], ["model", "list"]):
        place.says(*command, TINKEX_HOME=str(home))
    assert ledger() == before
    assert not (home / "lock").exists()


def test_columns_are_chosen(place: Place) -> None:
    row = place.says("run", "list", "-c", "id,checkpoint,loss").splitlines()[-1].split()
    assert row[:2] == [place.run, "weights/final"]
    assert len(row[2]) == STEPS
    assert "no column is called bogus; there are: id, model" in place.fails("run", "list", "-c", "id,bogus")


def test_one_run(place: Place) -> None:
    assert place.json("run", "info", place.run)["training_run_id"] == place.run
    shown = " ".join(place.says("run", "info", place.run).split())
    for fact in (MODEL, place.paths["weights"], place.paths["sampler_weights"], "first", f"Steps {STEPS}"):
        assert fact in shown
    assert "run nope does not exist" in place.fails("run", "info", "nope")


def test_a_run_is_renamed_and_tagged_and_found_by_both(place: Place) -> None:
    place.says("run", "rename", place.run[:8], "my run")
    assert place.json("run", "info", "my run")["training_run_id"] == place.run
    assert place.json("run", "tag", "my run", "a", "b")["tags"] == ["a", "b"]
    assert place.says("run", "tag", "my run", "-d", "a", "c").strip() == "b, c"
    assert place.json("run", "tag", "my run")["tags"] == ["b", "c"]
    shown = place.says("run", "list", "-c", "name,tags,steps").splitlines()[-1]
    assert shown.split()[:4] == ["my", "run", "b,", "c"]
    if place.running is not None:  # else the process that trains writes it every few seconds
        assert shown.split()[4] == str(STEPS)
    assert "at most 120" in place.fails("run", "rename", place.run, "n" * 200)


def test_runs_are_deleted_if_nothing_is_lost_unasked(place: Place) -> None:
    assert "nobody answered" in place.fails("run", "delete", place.run)
    refused = place.fails("run", "delete", place.run, "--yes")
    assert "has 3 checkpoints" in refused or "in use by another process" in refused
    assert place.json("run", "list")["runs"]
    nothing = place.json("run", "prune", "--yes")
    assert nothing["deleted_count"] == 0, "it is neither old nor over"
    (listed,) = place.json(
        "run", "prune", "--older-than", "0h", "--state", "running", "--checkpoints", "--dry-run"
    )["runs"]
    assert listed["training_run_id"] == place.run
    assert "write a number and a unit" in place.fails("run", "prune", "--older-than", "soon")
    if place.running is not None:
        assert place.says("run", "delete", place.run, "--checkpoints", "--yes").strip() == "deleted 1 run"
        assert place.json("run", "list")["runs"] == []


def test_every_step_is_in_the_history(place: Place) -> None:
    steps = place.json("run", "plot", place.run)["steps"]
    assert len(steps) == STEPS
    assert [line["tokens:sum"] for line in steps] == [18] * STEPS  # both passes of a step, together
    assert all(line["loss"] == pytest.approx(line["loss:sum"] / 18) for line in steps)
    assert all(math.isfinite(value) for line in steps for value in line.values())


def test_the_history_says_what_the_client_saw(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in place.env.items():
        monkeypatch.setenv(name, value)
    with ServiceClient() as client:
        run = client.create_lora_training_client(MODEL, rank=2)
        passed = run.forward_backward([datum(1)], "cross_entropy").result(20).metrics
        run.forward([datum(2)], "cross_entropy").result(20)  # no gradients, so no part of the step
        run.optim_step(AdamParams()).result(20)
        bad = run.forward_backward([BEYOND], "cross_entropy")  # fails the step after it
        step = run.optim_step(AdamParams())
        for failed in (bad, step):
            with pytest.raises(RequestFailedError):
                failed.result(20)
        (line,) = client.create_rest_client().get_run_metrics(run.model_id).result(20)
    assert line["loss:sum"] == pytest.approx(passed["loss:sum"])
    assert line["tokens:sum"] == passed["tokens:sum"]


@pytest.mark.parametrize(
    ("error", "status", "reason"),
    [
        (RuntimeError("no more data"), "Failed", "its script ended with an exception"),
        (KeyboardInterrupt(), "Interrupted", "interrupted"),
        (None, "Finished", ""),
    ],
)
def test_a_run_says_how_it_ended_and_why(
    place: Place, monkeypatch: pytest.MonkeyPatch, error: BaseException | None, status: str, reason: str
) -> None:
    for name, value in place.env.items():
        monkeypatch.setenv(name, value)
    with contextlib.suppress(RuntimeError, KeyboardInterrupt), ServiceClient() as client:
        run = client.create_lora_training_client(MODEL, rank=2).model_id
        if error is not None:
            raise error
    (shown,) = [line for line in place.says("run", "info", run).splitlines() if "Status" in line]
    assert shown.split()[1].rstrip(":") == status
    assert reason in shown
    (row,) = [line for line in place.says("run", "list").splitlines() if line.startswith(run)]
    assert status in row


def test_a_skipped_step_is_not_plotted(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in place.env.items():
        monkeypatch.setenv(name, value)
    with ServiceClient() as client:
        run = client.create_lora_training_client(MODEL, rank=2)
        run.optim_step(AdamParams()).result(20)  # there are no gradients
        assert "no step yet" in place.says("run", "info", run.model_id)
        run.forward_backward([datum(1)], "cross_entropy")
        run.optim_step(AdamParams())
        run.optim_step(AdamParams()).result(20)
        metrics = client.create_rest_client().get_run_metrics(run.model_id).result(20)
        assert "Steps 1" in " ".join(place.says("run", "info", run.model_id).split())
    assert [len(values) for values in metrics.curves().values()] == [1, 1, 1]
    assert metrics.steps() == [1]
    assert repr(metrics).startswith("StepMetrics(1 step,")


def test_a_run_without_a_step_says_so(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in place.env.items():
        monkeypatch.setenv(name, value)
    with ServiceClient() as client:
        run = client.create_lora_training_client(MODEL, rank=2).model_id
        assert "no step yet" in place.says("run", "info", run)
        assert "has no metrics" in place.fails("run", "plot", run)


@pytest.mark.parametrize("place", ["served"], indirect=True)
def test_a_server_without_histories_is_said_to_be_one(place: Place) -> None:
    place.has_no("get_run_metrics")
    assert "Steps" not in place.says("run", "info", place.run)
    assert "keeps no metrics of runs" in place.fails("run", "plot", place.run)
    assert place.says("run", "list", "-c", "id,loss").splitlines()[-1].split() == [place.run, "-"]


@pytest.mark.slow
def test_plots(place: Place, tmp_path: Path) -> None:
    assert "loss\n" in place.says("run", "plot", place.run)
    picture, report = tmp_path / "run.png", tmp_path / "run.html"
    done = place.invoke("run", "plot", place.run, "-m", "loss", "--png", str(picture), "--html", str(report))
    assert (done.exit_code, done.stdout) == (0, "")
    assert picture.read_bytes().startswith(b"\x89PNG")
    page = report.read_text()
    assert place.run in page
    for namespace in ("2000/svg", "1999/xlink"):
        page = page.replace(f"http://www.w3.org/{namespace}", "")
    assert "http" not in page  # it needs nothing else
    assert "loss" in page[page.index("<svg") : page.index("</svg>")]
    assert "it has: loss, loss:sum" in place.fails("run", "plot", place.run, "-m", "bogus")


def test_without_an_id_the_newest_run_with_a_step_is_plotted(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in place.env.items():
        monkeypatch.setenv(name, value)
    with ServiceClient() as client:
        client.create_lora_training_client(MODEL, rank=2)  # newer, and without one
        assert place.json("run", "plot")["training_run_id"] == place.run


@pytest.mark.slow
def test_a_picture_that_cannot_be_written_is_one_line(place: Place) -> None:
    assert "No such file" in place.fails("run", "plot", place.run, "--png", "/no/such/place.png")

"""`tinkex checkpoint`, `session`, `billing` and `model`: what they print, and what they change."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors.numpy import load_file

from tests.cli.conftest import Place
from tests.service.harness import MODEL
from tinkex.cli.transfer import push
from tinkex.types.checkpoints import ParsedCheckpointTinkerPath

pytestmark = pytest.mark.slow


def test_checkpoints_are_listed(place: Place) -> None:
    all_of_them = place.json("checkpoint", "list")
    assert [c["tinker_path"] for c in all_of_them["checkpoints"]] == list(reversed(place.paths.values()))
    of_run = place.json("checkpoint", "list", "--run-id", place.run, "--limit", "1")
    assert of_run == {"run_id": place.run, **all_of_them}
    assert len(place.json("checkpoint", "list", "--limit", "2")["checkpoints"]) == 2
    title, *_ = place.says("checkpoint", "list", "--limit", "2").splitlines()
    assert title.startswith("2 checkpoints ")
    assert title.endswith("(1 more: --limit 0 shows all)")
    assert len(place.json("checkpoint", "list", "--limit", "0")["checkpoints"]) == 3


def test_one_checkpoint_is_shown_published_and_given_an_end(place: Place) -> None:
    path = place.paths["weights"]
    before = place.json("checkpoint", "info", path)
    assert (before["tinker_path"], before["lora_rank"], before["public"]) == (path, 4, False)
    assert place.json("checkpoint", "list")["checkpoints"][-1].items() <= before.items()
    for command, field, becomes in (
        (["publish", path], "public", True),
        (["unpublish", path], "public", False),
        (["set-ttl", path, "--remove"], "expires_at", None),
    ):
        assert place.says("checkpoint", *command) == ""
        assert place.json("checkpoint", "info", path)[field] == becomes
    place.says("checkpoint", "set-ttl", path, "--ttl", "7200")
    assert place.json("checkpoint", "info", path)["expires_at"] is not None
    assert "expires in" in " ".join(place.says("checkpoint", "info", path).lower().split())


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["info", "foo"], "one looks like tinker://RUN/weights/NAME"),
        (["info", "tinker://RUN/weights/none"], "has no checkpoint weights/none; `tinkex checkpoint list"),
        (["publish", "tinker://nope:train:0/weights/none"], "does not exist, or is not yours"),
        (["set-ttl", "tinker://RUN/weights/final"], "give either --ttl SECONDS or --remove"),
        (["set-ttl", "tinker://RUN/weights/final", "--ttl", "5"], "must be from 3600"),
        (["delete"], "name the checkpoints to delete, or give --run-id"),
        (["delete", "tinker://RUN/weights/final", "--run-id", "RUN"], "not both"),
        (["delete", "tinker://RUN/weights/final", "--before", "2026-01-01"], "go with --run-id"),
        (["delete", "--run-id", "RUN", "--type", "foo"], "weights, sampler_weights, external_weights"),
        (["delete", "--run-id", "RUN", "--before", "soon"], "a date looks like"),
        (["delete", "tinker://RUN/weights/final"], "--yes deletes without asking"),
        (["download", "tinker://RUN/weights/none"], "does not exist, or is not yours"),
    ],
)
def test_mistakes_are_one_line_and_change_nothing(place: Place, arguments: list[str], says: str) -> None:
    before = place.json("checkpoint", "list")
    assert says in place.fails("checkpoint", *(a.replace("RUN", place.run) for a in arguments))
    assert place.json("checkpoint", "list") == before


def test_deleting_asks_first(place: Place) -> None:
    path = place.paths["sampler_weights"]
    refused = place.invoke("checkpoint", "delete", path, stdin="n\n")
    assert (refused.exit_code, refused.stdout) == (0, "deleted 0 checkpoints\n")
    assert path in refused.stderr
    assert place.says("checkpoint", "delete", path, stdin="y\n") == "deleted 1 checkpoint\n"
    gone = place.invoke("-f", "json", "checkpoint", "delete", path, "-y")
    assert gone.exit_code == 1
    (failed,) = json.loads(gone.stdout)["failed"]
    assert (failed["tinker_path"], "does not exist" in failed["error"]) == (path, True)


def test_deleting_of_a_run_by_kind_and_time(place: Place) -> None:
    of_run = ["checkpoint", "delete", "--run-id", place.run, "-y"]
    assert place.json(*of_run, "--before", "2020-01-01")["deleted_count"] == 0
    assert place.json(*of_run, "--after", "2999-01-01T00:00:00Z")["deleted_count"] == 0
    assert place.json(*of_run, "--type", "weights")["deleted_count"] == 1
    left = [c["checkpoint_id"] for c in place.json("checkpoint", "list")["checkpoints"]]
    assert left == ["external_weights/final", "sampler_weights/final"]
    assert place.json(*of_run)["deleted_count"] == 2


@pytest.mark.parametrize("kind", ["weights", "sampler_weights", "external_weights"])
def test_a_download_is_a_directory_that_appears_whole(place: Place, tmp_path: Path, kind: str) -> None:
    command = ["checkpoint", "download", place.paths[kind], "-o", str(tmp_path / "out")]
    told = place.json(*command)
    target = tmp_path / "out" / f"{place.run}_{kind}_final"
    assert (told["checkpoint_path"], told["destination"]) == (place.paths[kind], str(target))
    assert told["file_size_bytes"] == sum(file.stat().st_size for file in target.iterdir())
    assert load_file(target / "adapter_model.safetensors")
    assert "exists; --force overwrites it" in place.fails(*command)
    (target / "stray").touch()
    place.says(*command, "--force")
    assert not (target / "stray").exists()
    assert [p.name for p in (tmp_path / "out").iterdir()] == [target.name]  # and nothing half-done


@pytest.mark.parametrize("place", ["served"], indirect=True)
def test_where_there_are_no_archives_a_download_is_exported(place: Place, tmp_path: Path) -> None:
    place.has_no("get_checkpoint_archive_url")
    command = ["checkpoint", "download", "-o", str(tmp_path)]
    place.says(*command, place.paths["weights"])
    target = tmp_path / f"{place.run}_weights_final"
    assert {"adapter_config.json", "adapter_model.safetensors"} <= {p.name for p in target.iterdir()}
    assert "optimizer.safetensors" not in {p.name for p in target.iterdir()}
    left = [c["tinker_path"] for c in place.json("checkpoint", "list")["checkpoints"]]
    assert left == list(reversed(place.paths.values()))  # the export was deleted
    assert "no download of sampler checkpoints" in place.fails(*command, place.paths["sampler_weights"])


class Hub:
    """The hub's library, as far as it is used."""

    endpoint = "https://hub.example"

    def __init__(self) -> None:
        self.made: dict[str, Any] = {}
        self.files: dict[str, bytes] = {}

    def create_repo(self, **what: Any) -> SimpleNamespace:
        self.made = what
        return SimpleNamespace(repo_id=f"ann/{what['repo_id'].rpartition('/')[2]}")

    def create_commit(self, *, operations: list[Any], **what: Any) -> None:
        self.made |= what
        for one in operations:
            with one.as_file() as file:
                self.files[one.path_in_repo] = file.read()


def test_pushing_sends_an_adapter_and_a_card(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in place.env.items():
        monkeypatch.setenv(name, value)
    hub = Hub()
    parsed = ParsedCheckpointTinkerPath.from_tinker_path(place.paths["weights"])
    pushed = push(parsed, hub, public=False, repo="ann/adapter", create_pr=True)
    assert pushed == {"repo_id": "ann/adapter", "revision": None, "url": "https://hub.example/ann/adapter"}
    assert (hub.made["private"], hub.made["create_pr"]) == (True, True)
    assert set(hub.files) == {"adapter_config.json", "adapter_model.safetensors", "README.md"}
    assert b"library_name: peft" in hub.files["README.md"]
    without = Hub()
    push(parsed, without, public=True, no_model_card=True)
    assert (without.made["private"], "README.md" in without.files) == (False, False)
    assert ":" not in without.made["repo_id"]


def test_models(place: Place) -> None:
    listed = place.json("model", "list")["models"]
    if "TINKER_BASE_URL" in place.env:
        assert listed == [
            {"model_name": MODEL, "max_context_length": 64, "trainable": True, "sampleable": True}
        ]
        assert place.json("model", "list", "BASE")["models"] == listed
    assert "no model's name contains 'zzz'" in place.fails("model", "list", "zzz")


def test_usage_and_storage(place: Place, tmp_path: Path) -> None:
    span = ["2026-01-01T00:00:00Z", "2026-01-02T00:00:00Z"]
    assert place.json("billing", "usage", *span)["data"] == []
    rows = tmp_path / "rows.csv"
    printed = place.says("billing", "usage", *span, "--csv", str(rows), "--sessions-csv", "-")
    assert printed.splitlines()[0] == "session_id,user_metadata"
    assert rows.read_text().startswith("bucket_start,bucket_end,base_model,user_id,")
    assert "starting_on must be" in place.fails("billing", "usage", "soon", "later")
    (stored,) = place.json("billing", "checkpoint-storage")["data"]
    (row,) = csv.DictReader(io.StringIO(place.says("billing", "checkpoint-storage", "--csv", "-")))
    assert (stored["checkpoint_count"], row["checkpoint_count"]) == (3, "3")
    assert int(row["size_bytes"]) == stored["size_bytes"] > 0


def test_a_trace(place: Place, tmp_path: Path) -> None:
    command = ["session", "export-trace", place.session]
    if "TINKER_BASE_URL" not in place.env:
        assert "the process that trains keeps the timeline" in place.fails(*command)
        return
    url = place.json(*command, "--url-only")["url"]
    assert url.startswith(place.env["TINKER_BASE_URL"])
    target = tmp_path / "trace"
    told = place.json(*command, "-o", str(target))
    assert told == {
        "session_id": place.session, "destination": str(target), "file_size_bytes": target.stat().st_size
    }  # fmt: skip
    assert "optim_step" in target.read_text()
    assert "session nope does not exist" in place.fails("session", "export-trace", "nope")

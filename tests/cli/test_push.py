"""`checkpoint push-hf` with the hub's own library, against a hub on loopback: what arrives is the adapter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load

from tests.cli.conftest import Place
from tests.cli.hub import Hub
from tests.service.harness import MODEL

pytest.importorskip("huggingface_hub")
pytestmark = [pytest.mark.slow, pytest.mark.parametrize("place", ["served"], indirect=True)]


@pytest.fixture
def hub() -> Iterator[Hub]:
    server = Hub("hf_secret")
    yield server
    server.close()


def push(place: Place, hub: Hub, home: Path, *options: str, token: str = "hf_secret") -> tuple[int, str, str]:
    """The command as a program of its own: the library reads its environment when it is imported."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("TINKE", "HF_"))}
    env = {
        **kept, **place.env, "HOME": str(home), "HF_HOME": str(home / "hub"), "HF_ENDPOINT": hub.url,
        "HF_TOKEN": token, "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1",
    }  # fmt: skip
    command = [sys.executable, "-m", "tinkex.cli", "-f", "json", "checkpoint", "push-hf"]
    done = subprocess.run(
        [*command, place.paths["weights"], *options], env=env, capture_output=True, text=True, timeout=100
    )
    return done.returncode, done.stdout, done.stderr


def hidden(repo: dict[str, Any]) -> bool:
    """Whether a repository was made private: libraries before 2.0 have a flag for it, later ones a word."""
    return repo.get("visibility") == "private" or repo.get("private") is True


def test_the_hub_has_the_adapter(place: Place, hub: Hub, tmp_path: Path) -> None:
    options = ["--repo", "ann/adapter", "--commit-message", "The first"]
    code, said, complained = push(place, hub, tmp_path, *options)
    assert code == 0, complained
    assert json.loads(said) == {
        "checkpoint_path": place.paths["weights"], "repo_id": "ann/adapter", "revision": None,
        "url": f"{hub.url}/ann/adapter",
    }  # fmt: skip
    (repo,) = hub.repos
    assert (repo["name"], hidden(repo)) == ("adapter", True)
    (commit,) = hub.commits
    assert (commit["summary"], commit["revision"], commit["query"]) == ("The first", "main", "")
    assert set(hub.files) == {"adapter_config.json", "adapter_model.safetensors", "README.md"}
    config = json.loads(hub.files["adapter_config.json"])
    assert config["r"] == 4
    assert load(hub.files["adapter_model.safetensors"])
    card = hub.files["README.md"].decode()
    assert config["base_model_name_or_path"] == MODEL  # not where the server has it on its disk
    assert f"base_model: {MODEL}\n" in card
    assert f'AutoModelForCausalLM.from_pretrained("{MODEL}")' in card
    assert hub.strange == []


def test_every_option_reaches_the_hub(place: Place, hub: Hub, tmp_path: Path) -> None:
    options = ["-r", "adapter", "--public", "--revision", "main", "--create-pr", "--no-model-card"]
    code, said, complained = push(place, hub, tmp_path, *options, "--ignore-pattern", "*.safetensors")
    assert code == 0, complained
    assert json.loads(said)["repo_id"] == "ann/adapter"  # with its owner
    assert not hidden(hub.repos[0])
    assert "create_pr=1" in hub.commits[0]["query"]
    assert set(hub.files) == {"adapter_config.json"}
    hub.files.clear()
    assert push(place, hub, tmp_path, "-r", "adapter", "--allow-pattern", "README.md")[0] == 0
    assert set(hub.files) == {"README.md"}


def test_without_access_it_is_one_line_and_nothing_is_sent(place: Place, hub: Hub, tmp_path: Path) -> None:
    code, said, complained = push(place, hub, tmp_path, token="hf_wrong")
    assert (code, said) == (1, "")
    assert complained.strip().splitlines()[-1].startswith("Error: no access to the hub (")
    assert "hf auth login" in complained
    assert "hf_wrong" not in complained
    assert (hub.repos, hub.commits) == ([], [])

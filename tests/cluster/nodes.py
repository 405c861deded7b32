"""A Ray cluster of three nodes on loopback, each with processes of its own: what can be killed by parts."""

from __future__ import annotations

import contextlib
from typing import Any

import psutil

from tinkex.config import make_ray_token, prepare_ray
from tinkex.engine.cluster import connection

STORE = 80 * 2**20  # bytes: the least that Ray accepts, about
CPUS = 16  # that a node claims to have: room for actors, which hardly compute
# How soon a dead node is noticed. Ray's own settings are for networks with pauses.
_SOON = {
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 500,
    "health_check_failure_threshold": 4,
}

prepare_ray(loopback=True)  # Ray reads the environment when it is imported
make_ray_token()


class Nodes:
    """Three nodes; this process is connected to them."""

    def __init__(self, count: int = 3) -> None:
        from ray.cluster_utils import Cluster

        head = {**_node(), "_system_config": _SOON}
        self._cluster = Cluster(initialize_head=True, head_node_args=head)
        self._workers = [self.add() for _ in range(count - 1)]
        self.address: str = self._cluster.address
        connection.connect(self.address)

    def add(self) -> Any:
        return self._cluster.add_node(**_node())

    def kill(self) -> None:
        """Kill a node without the head, all its processes at once, and start another."""
        self._cluster.remove_node(self._workers.pop(0), allow_graceful=False)
        self._workers.append(self.add())

    def close(self) -> None:
        connection.disconnect()
        self._cluster.shutdown()


def _node() -> dict[str, Any]:
    return {
        "num_cpus": CPUS, "num_gpus": 0, "object_store_memory": STORE, "node_ip_address": "127.0.0.1",
        "include_dashboard": False,
    }  # fmt: skip


def actors(kind: str) -> list[psutil.Process]:
    """The processes of this cluster's actors of one class."""
    found: list[psutil.Process] = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if process.cmdline()[:1] and process.cmdline()[0].startswith(f"ray::{kind}"):
                found.append(process)
    return sorted(found, key=lambda process: process.pid)

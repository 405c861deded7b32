"""This process's connection to a Ray cluster; Ray allows one. Refuses a cluster that is open to anyone.

Anyone who reaches the ports of a Ray cluster can run code on it. So a cluster that we start listens only on
loopback, and one that listens elsewhere must require a token. No dashboard is started.
"""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from typing import Any

from tinkex.config import (
    environment_without_ray_token,
    has_ray_token,
    is_loopback_host,
    make_ray_token,
    prepare_ray,
)
from tinkex.engine.protocol import EngineError

log = logging.getLogger("tinkex")
AUTO = "auto"
_LOOPBACK = "127.0.0.1"
_PROBE_SECONDS = 60.0
_connecting = threading.Lock()
_connected_to = ""

# Run with authentication off, against a cluster that should refuse it.
_PROBE = """
import sys
from ray._raylet import GcsClient
from ray.exceptions import AuthenticationError
try:
    GcsClient(address=sys.argv[1]).get_all_node_info(timeout=5.0)
except AuthenticationError:
    print("refused")
else:
    print("answered")
"""


def connect(address: str) -> None:
    """Connect to a cluster, or start one on this machine (`auto`), unless this process is connected to it."""
    global _connected_to
    with _connecting:
        if _connected_to == address and _ray().is_initialized():
            return
        if _connected_to and _ray().is_initialized():
            raise EngineError(
                f"this process uses the Ray cluster {_connected_to}; it cannot use {address} too"
            )
        if address == AUTO:
            _start()
        else:
            _join(address)
        _connected_to = address


def disconnect() -> None:
    """Leave the cluster; one that was started here ends."""
    global _connected_to
    with _connecting:
        if _connected_to:
            _ray().shutdown()
        _connected_to = ""


def _ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise EngineError(f"a cluster needs Ray: pip install 'tinkex[cluster]' ({error})", "user") from None
    logging.getLogger("ray").setLevel(logging.ERROR)  # its hints are for those who use it directly
    return ray


def _start() -> None:
    prepare_ray(loopback=True)
    make_ray_token()
    ray = _ray()
    failed: list[BaseException] = []
    ready, ended = threading.Event(), threading.Event()

    def start() -> None:
        try:
            ray.init(address="local", _node_ip_address=_LOOPBACK, include_dashboard=False, **_QUIET)
        except BaseException as error:
            failed.append(error)
        ready.set()
        ended.wait()  # Ray's processes end with the thread that started them

    threading.Thread(target=start, name="tinkex-ray", daemon=True).start()
    ready.wait()
    if failed:
        ended.set()
        raise EngineError(f"Ray could not be started on this machine: {failed[0]}") from failed[0]
    if beyond := _beyond_loopback():
        ray.shutdown()
        raise EngineError(
            f"Ray listens on {beyond[0]} instead of {_LOOPBACK} alone: it was imported before the server "
            "could tell it. Start the server in a process of its own"
        )


def _beyond_loopback() -> list[str]:
    """The nodes' addresses that other machines can reach."""
    found = [node["NodeManagerAddress"] for node in _ray().nodes()]
    return [address for address in found if not is_loopback_host(address)]


_QUIET: dict[str, Any] = {
    "log_to_driver": False,
    "configure_logging": False,
    "logging_level": logging.WARNING,
}


def _join(address: str) -> None:
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise EngineError(f"--cluster {address!r} is no cluster: give auto, or HOST:PORT of its head", "user")
    loopback = is_loopback_host(host)
    prepare_ray(loopback=loopback)
    if not loopback and not has_ray_token():
        raise EngineError(
            f"the Ray cluster {address} is on a network, and RAY_AUTH_MODE=token is not set: whoever reaches "
            "its ports could run code on it. Start its nodes and this server with RAY_AUTH_MODE=token and "
            "RAY_AUTH_TOKEN_PATH (`ray get-auth-token --generate` makes a token)",
            "user",
        )
    ray = _ray()
    more = {"_node_ip_address": _LOOPBACK} if loopback else {}
    try:
        ray.init(address=address, **_QUIET, **more)
    except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        why = f"the Ray cluster {address} cannot be joined: {error}"
        here = f"this machine must be a node of it: ray start --address={address} --num-cpus=0"
        raise EngineError(f"{why} ({here})") from error
    try:
        _check_refuses_strangers(address, loopback)
    except EngineError:
        ray.shutdown()
        raise


def _check_refuses_strangers(address: str, loopback: bool) -> None:
    beyond = _beyond_loopback()
    if (beyond or not loopback) and answers_anybody(address):
        where = beyond[0] if beyond else address
        raise EngineError(
            f"the Ray cluster {address} listens on {where} and asks nobody for a token: whoever reaches its "
            "ports can run code on it. Restart its nodes with RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH",
            "user",
        )


def answers_anybody(address: str) -> bool:
    """Does a cluster answer without a token? EngineError if that cannot be told."""
    command = [sys.executable, "-P", "-c", _PROBE, address]  # -P: nothing from the working directory
    environment = environment_without_ray_token()
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=_PROBE_SECONDS
        )
        answer, why = done.stdout.strip(), done.stderr.strip().rpartition("\n")[2]
    except (OSError, subprocess.TimeoutExpired) as error:
        answer, why = "", str(error)
    if answer not in ("answered", "refused"):
        raise EngineError(
            f"cannot tell whether the Ray cluster {address} refuses those without a token: {why}"
        )
    return answer == "answered"

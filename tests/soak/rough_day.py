"""The rough day: tenants at work on a server that is killed, lied to and hung up on; then the books.

    python -m tests.soak.rough_day --tenants 4 --actions 40 --kills 6 --seed 1     # the longer, the rougher
    python -m tests.soak.rough_day --hostile                                       # with a tenant who floods

First the same tenants have a quiet day on a server of their own: what they note then is what they must
note on the rough one. A second, calm round on the last process shows what it leaks.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from tests.engine.tiny import tiny_model
from tests.soak.hostile import Hostile
from tests.soak.tenants import PATIENCE, VOCABULARY, Tenant
from tests.soak.vandal import Vandal

ROOT = Path(__file__).parents[2]
DISTURBANCES = ("cancels", "timeouts", "disconnects", "garbage", "lapses", "kills")


class Server:
    """A process at one address over one home, that can be killed and started again."""

    def __init__(self, home: Path, model: Path) -> None:
        self.home = home
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self._command = [sys.executable, "-m", "tests.soak.server", str(home), str(model), str(port)]
        self.start()

    def start(self) -> None:
        environment = {k: v for k, v in os.environ.items() if not k.startswith("TINK")}
        self._log = (self.home.parent / f"{self.home.name}.log").open("a")
        self._process = subprocess.Popen(
            self._command, cwd=ROOT, stdout=self._log, stderr=subprocess.STDOUT,
            env=environment | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
        )  # fmt: skip
        deadline = time.monotonic() + 60
        while not self._is_healthy():
            assert self._process.poll() is None, f"the server ended: see {self._log.name}"
            assert time.monotonic() < deadline, "the server does not come up"
            time.sleep(0.05)

    def _is_healthy(self) -> bool:
        try:
            return urllib.request.urlopen(f"{self.url}/api/v1/healthz", timeout=2).status == 200
        except OSError:
            return False

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()
        self._log.close()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *error: object) -> None:
        """As an operator ends it."""
        self._process.terminate()
        try:
            ended = self._process.wait(60)
        except subprocess.TimeoutExpired:
            self.kill()
            raise
        self._log.close()
        assert ended == 0, f"the server ended with {ended}: see {self._log.name}"

    def has_evicted(self, run: str) -> bool:
        """Whether its log says that this run was evicted because its session lapsed."""
        return f"run {run} was evicted: its session" in Path(self._log.name).read_text()

    def gauge(self, name: str) -> float:
        text = urllib.request.urlopen(f"{self.url}/metrics", timeout=10).read().decode()
        return sum(
            float(value) for value in re.findall(rf"^{name}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)
        )

    def settles(self, limits: dict[str, float]) -> dict[str, float]:
        """What it holds above these limits, once connections had time to end."""
        for _ in range(600):
            over = {name: held for name, held in self.holds().items() if held > limits.get(name, held)}
            if not over:
                break
            time.sleep(0.2)
        return over

    def holds(self) -> dict[str, float]:
        """What a leak would make grow."""
        process = psutil.Process(self._process.pid)
        return {
            "files and sockets": process.num_fds(),
            "threads": process.num_threads(),
            "MB resident": process.memory_info().rss / 1e6,
            "KV pages": self.gauge("tinkex_engine_kv_pages_used"),
            "slots": self.gauge("tinkex_engine_adapters_live"),
            "published adapters": self.gauge("tinkex_engine_adapters_published"),
            "queued": self.gauge("tinkex_queue_depth"),
        }


@dataclass
class Report:
    """What a day came to."""

    notes: dict[int, list[Any]] = field(default_factory=dict)
    resolved: int = 0
    happened: Counter[str] = field(default_factory=Counter)  # of DISTURBANCES
    faults: list[str] = field(default_factory=list)


def work(server: Server, seeds: range, actions: int, calm: threading.Event | None = None) -> Report:
    """All tenants through their plans at once; the first one's trouble is everybody's."""
    if calm is None:
        calm = threading.Event()
        calm.set()
    tenants = {seed: Tenant(server.url, seed, actions, server.has_evicted, calm) for seed in seeds}
    for tenant in tenants.values():
        tenant.start()
    for tenant in tenants.values():
        tenant.join()
        if tenant.trouble is not None:
            raise tenant.trouble
    happened = sum((tenant.happened for tenant in tenants.values()), Counter[str]())
    return Report(
        {s: t.notes for s, t in tenants.items()}, sum(t.resolved for t in tenants.values()), happened
    )


def rough_work(
    server: Server, seeds: range, actions: int, kills: int, seed: int, *, flooded: bool = False
) -> Report:
    """The same, with a client that disturbs, a server that is killed, and a tenant who floods if asked."""
    done, calm, killed, random_ = threading.Event(), threading.Event(), 0, random.Random(seed)

    def disturb() -> None:
        nonlocal killed
        while killed < kills and not done.wait(random_.uniform(0.2, 2.0)):
            server.kill()
            killed += 1
            server.start()
        calm.set()

    vandal, killer = Vandal(server.url, seed), threading.Thread(target=disturb, name="killer")
    hostile = Hostile(server.url, VOCABULARY)
    vandal.start()
    killer.start()
    if flooded:
        hostile.start()
    try:
        report = work(server, seeds, actions, calm)
    finally:
        done.set()
        killer.join()
        vandal.stop()
        if flooded:
            hostile.stop(PATIENCE)
    report.happened += vandal.happened + hostile.happened + Counter(kills=killed)
    report.faults = [*vandal.faults, *hostile.faults]
    return report


def differences(got: Report, wanted: Report) -> list[str]:
    """Where two days of the same tenants came out differently; sums may differ by how passes were batched."""
    found = []
    for seed, expected in wanted.notes.items():
        noted = got.notes[seed]
        if len(noted) != len(expected):
            found.append(f"tenant {seed}: {len(noted)} notes, not {len(expected)}")
        for number, ((kind, value), (wanted_kind, right)) in enumerate(zip(noted, expected, strict=False)):
            close = (
                math.isclose(value, right, rel_tol=1e-4, abs_tol=1e-4) if is_number(value) else value == right
            )
            if kind != wanted_kind or not close:
                found.append(f"tenant {seed}, note {number}: {kind} {value}, not {wanted_kind} {right}")
    return found


def is_number(value: Any) -> bool:
    return isinstance(value, int | float)


def leftovers(home: Path) -> list[str]:
    """Files that were being written when something happened, and were forgotten."""
    return [str(path.relative_to(home)) for path in home.rglob("*") if path.name.endswith((".tmp", ".new"))]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tenants", type=int, default=4)
    parser.add_argument("--actions", type=int, default=40, help="of each tenant")
    parser.add_argument("--kills", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--hostile", action="store_true", help="with a tenant who floods the server")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rough-day-") as directory:
        model = tiny_model(Path(directory), "qwen3", vocab_size=VOCABULARY)
        seeds = range(options.seed * 1000, options.seed * 1000 + options.tenants)
        with Server(Path(directory) / "quiet", model) as quiet:
            expected = work(quiet, seeds, options.actions)
        with Server(Path(directory) / "rough", model) as server:
            report = rough_work(
                server, seeds, options.actions, options.kills, options.seed, flooded=options.hostile
            )
            print(server.holds())
        wrong = [*differences(report, expected), *report.faults]
        print(f"{report.resolved} results, {dict(report.happened)}, {len(wrong)} wrong")
        print("\n".join(wrong))
        sys.exit(bool(wrong))


if __name__ == "__main__":
    main()

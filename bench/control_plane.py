"""The control plane in figures: a shared ledger against SQLite, stalls of the event loop, takeovers, fencing.

    python -m bench.control_plane [--seconds 10] [--takeovers 5]

Servers of the fake engine, a Postgres and an S3 server (SeaweedFS) on this machine: what is measured is the
control plane, not compute. Requests are optimizer steps and passes of one token of many clients, each
acknowledged by the ledger and the journal. Servers take turns, and medians of their rounds are told. CPU is
that of the server's process. Stalls are its own `tinkex_loop_stall_seconds`, of all rounds together. A
takeover lasts until the lease has another owner; the first result after it is not timed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import signal
import statistics
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import psutil
import psycopg

import tinkex
from tests.cloud.members import MODEL, MemberProcess
from tests.cloud.servers import BUCKET, postgres_server, s3_server
from tinkex.types import AdamParams, Datum, ModelInput

RUNS = 16
IDS = np.arange(2, 11)
LEASE = 2.0
ROUNDS = 3


def datum() -> Datum:
    inputs = {"target_tokens": IDS[1:], "weights": np.ones(8, np.float32)}
    return Datum(model_input=ModelInput.from_ints(IDS[:-1].tolist()), loss_fn_inputs=inputs)


async def drive(url: str, pid: int, seconds: float) -> tuple[float, float]:
    """Training requests and their results per second, of RUNS runs in as many sessions; CPU ms of each."""
    services = [tinkex.ServiceClient(base_url=url, api_key="tml-bench") for _ in range(RUNS)]
    runs = [await one.create_lora_training_client_async(MODEL, rank=4) for one in services]
    until, done = time.monotonic() + seconds, 0

    async def work(run: tinkex.TrainingClient) -> None:
        nonlocal done
        while time.monotonic() < until:
            passed = await run.forward_backward_async([datum()], "cross_entropy")
            stepped = await run.optim_step_async(AdamParams(learning_rate=0.01))
            await passed.result_async()
            await stepped.result_async()
            done += 2

    began, spent = time.monotonic(), _cpu(pid)
    await asyncio.gather(*map(work, runs))
    return done / (time.monotonic() - began), 1000 * (_cpu(pid) - spent) / done


def _cpu(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system


def stalls(url: str) -> Counter[float]:
    """How many ticks of the event loop, ten a second, were late at most by so many seconds (a bucket)."""
    with urllib.request.urlopen(f"{url}/metrics") as answer:
        page = answer.read().decode()
    buckets = re.findall(r'tinkex_loop_stall_seconds_bucket\{le="([^"]+)"\} ([\d.e+]+)', page)
    return Counter({float(le): int(float(count)) for le, count in buckets})


def p99(late: Counter[float]) -> float:
    """Milliseconds by which 99 of 100 ticks were late at most (a bucket's bound)."""
    return 1000 * min(le for le, count in late.items() if count >= 0.99 * late[float("inf")])


@contextmanager
def member(home: Path, *options: str) -> Iterator[MemberProcess]:
    made = MemberProcess(home, *options)
    try:
        yield made
    finally:
        made.end()


def throughput(
    place: Path, options: dict[str, tuple[str, ...]], seconds: float
) -> dict[str, dict[str, float]]:
    rounds: dict[str, list[tuple[float, float]]] = {name: [] for name in options}
    late: dict[str, Counter[float]] = {name: Counter() for name in options}
    for n in range(ROUNDS):
        for name, given in options.items():
            with member(place / f"{name} {n}", *given) as server:
                before = stalls(server.url)
                rounds[name].append(asyncio.run(drive(server.url, server.process.pid, seconds)))
                late[name] += stalls(server.url) - before
    told: dict[str, dict[str, float]] = {}
    for name, found in rounds.items():
        rate, cpu = (round(statistics.median(values), 2) for values in zip(*found, strict=True))
        told[name] = {
            "requests per second": rate, "CPU ms per request": cpu, "stall p99 ms": p99(late[name]),
        }  # fmt: skip
    return told


def takeovers(place: Path, database: str, store: str, count: int) -> dict[str, float]:
    """Seconds from kill -9 to the first result of the next request, and whether a zombie was refused."""
    options = ("--ledger", database, "--store", store, "--lease", str(LEASE))
    took, refused = [], 0
    for n in range(count):
        zombie = n % 2 == 1
        with member(place / f"a{n}", *options) as a, member(place / f"b{n}", *options) as b:
            service = tinkex.ServiceClient(base_url=a.url, api_key="tml-bench")
            run = service.create_lora_training_client(MODEL, rank=4)
            run.forward_backward([datum()], "cross_entropy").result()
            session = run.model_id.partition(":")[0]
            a.signal(signal.SIGSTOP if zombie else signal.SIGKILL)
            began = time.monotonic()
            while not _owns(database, session, b):
                time.sleep(0.02)
            took.append(time.monotonic() - began)
            if zombie:
                a.signal(signal.SIGCONT)
                refused += a.process.wait(30) != 0
    return {
        "takeover median s": round(statistics.median(took), 2), "takeover most s": round(max(took), 2),
        "lease s": LEASE, "zombies": count // 2, "zombies refused": refused,
    }  # fmt: skip


def _owns(database: str, session: str, server: MemberProcess) -> bool:
    with psycopg.connect(database) as db:
        found = db.execute("SELECT server FROM leases WHERE session_id = %s", [session]).fetchone()
    return found is not None and found[0] == server.server_id()


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--seconds", type=float, default=10.0)
    arguments.add_argument("--takeovers", type=int, default=4)
    asked = arguments.parse_args()
    with ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (place / "s3").mkdir()
        os.environ.update(stack.enter_context(s3_server(place / "s3")))
        database = stack.enter_context(postgres_server())
        with psycopg.connect(database, autocommit=True) as db:
            for name in ("disk", "objects"):
                db.execute(f"CREATE DATABASE {name}")  # type: ignore[arg-type]
        on = {name: database.replace("/postgres?", f"/{name}?") for name in ("disk", "objects")}
        objects = f"s3://{BUCKET}/bench"
        options = {
            "SQLite, home": (),
            "Postgres, directory": ("--ledger", on["disk"], "--store", str(place / "store")),
            "Postgres, S3": ("--ledger", on["objects"], "--store", objects),
        }
        told = throughput(place, options, asked.seconds)
        first = told["SQLite, home"]["requests per second"]
        for figures in told.values():
            figures["of SQLite"] = round(figures["requests per second"] / first, 2)
        told["takeovers"] = takeovers(place, on["objects"], objects, asked.takeovers)
        print(json.dumps(told, indent=2))


if __name__ == "__main__":
    main()

"""The control plane in figures: a shared ledger against SQLite, stalls of the event loop, takeovers, fencing.

    python -m bench.control_plane [--seconds 10] [--takeovers 4] [--zombies 4]

Servers of the fake engine, a Postgres and an S3 server (SeaweedFS) on this machine: what is measured is the
control plane, not compute. Requests are optimizer steps and passes of one token of many clients, each
acknowledged by the ledger and the journal. Servers take turns, and medians of their rounds are told. CPU is
that of the server's process. Stalls are its own `tinkex_loop_stall_seconds`, of all rounds together.

A takeover begins with kill -9 of one of two servers behind a load balancer; it is timed until the lease has
another owner, and until a client has the result of its next request. For a zombie one of the two is stopped
(SIGSTOP) while clients train, and goes on once its sessions are the other's. It must end; and every client's
losses must be those of a server that nothing happened to, so that nothing acknowledged is missing, and
nothing that the zombie still did counts.
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
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import psutil
import psycopg

import tinkex
from tests.cloud.members import MODEL, MemberProcess, balancer
from tests.cloud.servers import BUCKET, postgres_server, s3_server
from tinkex.types import AdamParams, Datum, ModelInput

RUNS = 16
IDS = np.arange(2, 11)
LEASE = 2.0
ROUNDS = 3
ZOMBIE_RUNS, ZOMBIE_STEPS = 6, 100


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
    """Seconds from kill -9 until the session has another owner, and to the first result there."""
    options = ("--ledger", database, "--store", store, "--lease", str(LEASE))
    owned, answered = list[float](), list[float]()
    for n in range(count):
        with (
            member(place / f"a{n}", *options) as a,
            member(place / f"b{n}", *options) as b,
            balancer([a.port, b.port]) as url,
            tinkex.ServiceClient(base_url=url, api_key="tml-bench") as service,
        ):
            run = service.create_lora_training_client(MODEL, rank=4)
            run.forward_backward([datum()], "cross_entropy").result()
            session = run.model_id.partition(":")[0]
            owner, heir = (a, b) if _owns(database, session, a) else (b, a)
            owner.signal(signal.SIGKILL)
            began = time.monotonic()
            next_one = run.forward_backward([datum()], "cross_entropy")
            while not _owns(database, session, heir):
                time.sleep(0.02)
            owned.append(time.monotonic() - began)
            next_one.result()
            answered.append(time.monotonic() - began)
    told = {"lease s": LEASE}
    for name, took in (("another owner", owned), ("first result", answered)):
        told[f"{name}, median s"] = round(statistics.median(took), 2)
        told[f"{name}, most s"] = round(max(took), 2)
    return told


async def train(url: str, pace: float = 0.0) -> list[list[float]]:
    """The losses of ZOMBIE_RUNS runs, each in a session of its own."""

    async def work(seed: int) -> list[float]:
        with tinkex.ServiceClient(base_url=url, api_key="tml-bench") as service:
            run = await service.create_lora_training_client_async(MODEL, rank=4, seed=seed)
            losses = list[float]()
            for _ in range(ZOMBIE_STEPS):
                passed = await run.forward_backward_async([datum()], "cross_entropy")
                stepped = await run.optim_step_async(AdamParams(learning_rate=0.01))
                losses.append((await passed.result_async()).metrics["loss:sum"])
                await stepped.result_async()
                await asyncio.sleep(pace)
            return losses

    return await asyncio.gather(*map(work, range(1, 1 + ZOMBIE_RUNS)))


def zombies(place: Path, database: str, store: str, count: int) -> dict[str, float]:
    """Servers that are stopped under load, and wake up when another one has their sessions."""
    options = ("--ledger", database, "--store", store, "--lease", str(LEASE))
    refused = wrong = 0
    with member(place / "calm") as calm:
        expected = asyncio.run(train(calm.url))
    for n in range(count):
        with (
            member(place / f"y{n}", *options) as a,
            member(place / f"z{n}", *options) as b,
            balancer([a.port, b.port]) as url,
            ThreadPoolExecutor(1) as thread,
        ):
            training = thread.submit(asyncio.run, train(url, 0.02))
            time.sleep(1.0 + 0.13 * n)  # another moment each time
            a.signal(signal.SIGSTOP)
            while _sessions(database, a):
                time.sleep(0.02)
            a.signal(signal.SIGCONT)
            refused += a.process.wait(30) != 0
            wrong += sum(got != right for got, right in zip(training.result(), expected, strict=True))
            assert b.process.poll() is None
    return {
        "zombies": count, "zombies ended": refused,
        "runs": count * ZOMBIE_RUNS, "runs with other losses": wrong,
    }  # fmt: skip


def _sessions(database: str, server: MemberProcess) -> int:
    with psycopg.connect(database) as db:
        found = db.execute("SELECT count(*) FROM leases WHERE server = %s", [server.server_id()]).fetchone()
    return 0 if found is None else found[0]


def _owns(database: str, session: str, server: MemberProcess) -> bool:
    with psycopg.connect(database) as db:
        found = db.execute("SELECT server FROM leases WHERE session_id = %s", [session]).fetchone()
    return found is not None and found[0] == server.server_id()


def main() -> None:
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("--seconds", type=float, default=10.0)
    arguments.add_argument("--takeovers", type=int, default=4)
    arguments.add_argument("--zombies", type=int, default=4)
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
        told = throughput(place, options, asked.seconds) if asked.seconds else {}
        for figures in told.values():
            first = told["SQLite, home"]["requests per second"]
            figures["of SQLite"] = round(figures["requests per second"] / first, 2)
        if asked.takeovers:
            told["takeovers"] = takeovers(place, on["objects"], objects, asked.takeovers)
        if asked.zombies:
            told["zombies"] = zombies(place, on["objects"], objects, asked.zombies)
        print(json.dumps(told, indent=2))


if __name__ == "__main__":
    main()

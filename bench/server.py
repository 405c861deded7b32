"""The CPU time, memory and latency of our server with the fake engine: `make bench-server`, or --help.

sample   CPU time of the server process for one sample (submit, then retrieve), over that of a bare Starlette
         application which reads the same two bodies and answers with as many bytes: the same uvicorn, event
         loop, settings and client. Our server has the fake engine, whose arithmetic counts, and one that
         answers at once. The sides alternate every third of a second, and the table shows medians.
accept   Small passes that are accepted and journaled, and not executed, with --durability process and power.
polls    5,000 long polls held open at once, each on a socket and a future of its own.
bodies   Cheap calls while 50 MB passes stream in from another process on two connections, without a pause.

CPU time is user + system time of the whole process, all threads. A missed goal does not fail the run; a
crash does. It measures no engine that computes.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raw_http import WANTS_PROTO, Client, Connection, post, request
from server_child import MODEL, PARAMS, PROMPT

HERE = Path(__file__).resolve().parent
PAGE = os.sysconf("SC_PAGE_SIZE")
Figures = dict[str, float]


@dataclass(frozen=True)
class Row:
    """One line of the table; the goal, where there is one, is an upper bound."""

    key: str
    title: str
    goal: float | None = None


ROWS = [
    Row("sample.echo_us", "sample: echo of its two requests, CPU µs"),
    Row("sample.instant_us", "sample: our server, an engine that computes nothing, CPU µs"),
    Row("sample.fake_us", "sample: our server, the fake engine, CPU µs"),
    Row("sample.instant_ratio", "  with the engine that computes nothing / echo", 2.0),
    Row("sample.fake_ratio", "  with the fake engine / echo", 2.0),
    Row("sample.echo_per_s", "sample: echo, samples/s"),
    Row("sample.instant_per_s", "sample: our server, an engine that computes nothing, samples/s"),
    Row("accept.process_per_s", "passes accepted, 32 in flight: --durability process, requests/s"),
    Row("accept.power_per_s", "passes accepted, 32 in flight: --durability power, requests/s"),
    Row("accept.lost", "  lost through the syncs, %", 10.0),
    Row("accept.process_us", "passes accepted, 32 in flight: process, CPU µs"),
    Row("accept.power_us", "passes accepted, 32 in flight: power, CPU µs"),
    Row("accept.process_ms", "passes accepted, one at a time: process, ms"),
    Row("accept.power_ms", "passes accepted, one at a time: power, ms"),
    Row("polls.kb_each", "5,000 polls: RSS each, kB"),
    Row("polls.idle_cpu", "5,000 polls: CPU while nothing happens, % of a core", 5.0),
    Row("polls.unanswered", "5,000 polls: not answered in the end", 0.0),
    Row("polls.answer_s", "5,000 polls: from the last request to the last answer, s"),
    Row("bodies.mb_per_s", "50 MB bodies: taken, MB/s"),
    Row("bodies.quiet_p99_ms", "cheap call with nothing else: p99, ms"),
    Row("bodies.p50_ms", "cheap call meanwhile: p50, ms"),
    Row("bodies.p99_ms", "cheap call meanwhile: p99, ms", 100.0),
    Row("bodies.max_ms", "cheap call meanwhile: longest, ms"),
]
PARTS = ("sample", "accept", "polls", "bodies")


# -- processes -----------------------------------------------------------------------------------------------


class Child:
    """A process of server_child.py, which says facts in lines of JSON."""

    def __init__(self, *arguments: str) -> None:
        paths = [str(HERE.parent / "src"), os.environ.get("PYTHONPATH", "")]
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "server_child.py"), *arguments],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
            stdout=subprocess.PIPE,
            text=True,
        )

    def hear(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.process.args}: exit status {self.process.wait()}")
        return json.loads(line)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()

    def cpu(self) -> float:
        """Seconds of CPU that it has used, user and system, in all threads; not in ticks of 10 ms."""
        return time.clock_gettime(~self.process.pid << 3 | 2)  # as clock_getcpuclockid makes it on Linux

    def rss(self) -> int:
        return int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]) * PAGE


@contextlib.contextmanager
def child(*arguments: str) -> Iterator[Child]:
    started = Child(*arguments)
    try:
        yield started
    finally:
        started.close()


@contextlib.contextmanager
def our_server(engine: str = "fake", durability: str = "process") -> Iterator[tuple[Child, int]]:
    with tempfile.TemporaryDirectory(prefix="tinkex-bench-") as home:
        with child("serve", home, engine, durability) as server:
            yield server, server.hear()["port"]


@contextlib.asynccontextmanager
async def client(port: int) -> AsyncIterator[Client]:
    connection = await Connection.open("127.0.0.1", port)
    yield Client(connection)
    connection.close()


async def open_session(asking: Client) -> str:
    fields = {"tags": [], "user_metadata": {}, "sdk_version": "0.36.0", "type": "create_session"}
    return (await asking.post("create_session", **fields))["session_id"]


async def open_run(asking: Client) -> str:
    fields = {"session_id": await open_session(asking), "model_seq_id": 0, "base_model": MODEL}
    return (await asking.result(await asking.post("create_model", **fields)))["model_id"]


# -- sample --------------------------------------------------------------------------------------------------


def submission(sampler: str, seq_id: int) -> bytes:
    """What the official client posts for a sample."""
    fields = {
        "num_samples": 1,
        "prompt": {"chunks": [{"tokens": PROMPT, "type": "encoded_text"}]},
        "sampling_params": PARAMS,
        "sampling_session_id": sampler,
        "seq_id": seq_id,
        "prompt_logprobs": False,
        "topk_prompt_logprobs": 0,
        "topk_sample_logprobs": 0,
        "prompt_alt_tokens_k": 0,
        "record_stability_info": False,
        "type": "sample",
    }
    return post("asample", fields)


def retrieval(promise: bytes) -> bytes:
    """The poll for it. An echo's promise names nothing: then it asks for something of the same length."""
    begin = promise.find(b'"request_id":"') + 14
    name = promise[begin : promise.find(b'"', begin)].decode() if begin > 13 else "0123456789ab-12345"
    return post("retrieve_future", {"request_id": name, "allow_metadata_only": True}, WANTS_PROTO)


async def samples(port: int, bodies: list[bytes], connections: int) -> tuple[int, int]:
    """Submit and retrieve each, on `connections` connections at a time; the sizes of the two responses."""
    left, sizes = iter(bodies), (0, 0)

    async def worker() -> None:
        nonlocal sizes
        connection = await Connection.open("127.0.0.1", port)
        for body in left:
            status, promise = await connection.ask(body)
            assert status == 200, promise
            status, result = await connection.ask(retrieval(promise))
            assert status == 200, result
            sizes = len(promise), len(result)
        connection.close()

    await asyncio.gather(*(worker() for _ in range(connections)))
    return sizes


async def open_sampler(port: int) -> str:
    async with client(port) as asking:
        fields = {"session_id": await open_session(asking), "sampling_session_seq_id": 0, "base_model": MODEL}
        return (await asking.post("create_sampling_session", **fields))["sampling_session_id"]


async def measure_sample(options: argparse.Namespace) -> Figures:
    count, connections = 2_000, 32
    seen: dict[str, list[float]] = defaultdict(list)
    with our_server("fake") as (fake, fake_port), our_server("instant") as (instant, instant_port):
        samplers = {port: await open_sampler(port) for port in (fake_port, instant_port)}
        for port, sampler in samplers.items():
            sizes = await samples(port, [submission(sampler, n) for n in range(500)], connections)
        with child("echo", *map(str, sizes)) as echo:
            sides = {"echo": (echo, echo.hear()["port"]), "instant": (instant, instant_port)}
            sides["fake"] = fake, fake_port
            samplers[sides["echo"][1]] = samplers[fake_port]
            for turn in range(-1, options.rounds):  # the first one is not counted
                for name in sorted(sides, reverse=bool(turn % 2)):
                    process, port = sides[name]
                    bodies = [submission(samplers[port], 1000 + (turn + 1) * count + n) for n in range(count)]
                    cpu, wall = process.cpu(), time.perf_counter()
                    await samples(port, bodies, connections)
                    if turn >= 0:
                        seen[f"{name}_us"].append((process.cpu() - cpu) / count * 1e6)
                        seen[f"{name}_per_s"].append(count / (time.perf_counter() - wall))
    found = {key: statistics.median(values) for key, values in seen.items()}
    return found | {f"{name}_ratio": found[f"{name}_us"] / found["echo_us"] for name in ("instant", "fake")}


# -- polls ---------------------------------------------------------------------------------------------------


def small_pass(run: str, seq_id: int) -> dict[str, Any]:
    targets = {"data": [3, 4, 5], "dtype": "int64", "shape": [3]}
    datum = {"model_input": {"chunks": [{"tokens": [2, 3, 4]}]}, "loss_fn_inputs": {"target_tokens": targets}}
    work = {"data": [datum], "loss_fn": "cross_entropy"}
    return {"forward_input": work, "model_id": run, "seq_id": seq_id}


async def accept(port: int, runs: list[str], first: int, each: int) -> None:
    """Send `each` passes of every run, in the order of their seq ids; the runs side by side."""

    async def one(run: str) -> None:
        async with client(port) as asking:
            for seq_id in range(first, first + each):
                await asking.post("forward", **small_pass(run, seq_id))

    await asyncio.gather(*map(one, runs))


async def measure_accept(options: argparse.Namespace) -> Figures:
    """Every pass waits for its run's first one, which is never sent."""
    count, each = 32, 40
    seen: dict[str, list[float]] = defaultdict(list)
    with our_server() as process, our_server(durability="power") as power:
        sides, runs = {"process": process, "power": power}, dict[str, list[str]]()
        for name, (_, port) in sides.items():
            async with client(port) as asking:
                runs[name] = [await open_run(asking) for _ in range(count)]
        for turn in range(-1, options.rounds):  # the first one is not counted
            first = 2 + 2 * each * (turn + 1)
            for name in sorted(sides, reverse=bool(turn % 2)):
                server, port = sides[name]
                cpu, wall = server.cpu(), time.perf_counter()
                await accept(port, runs[name], first, each)
                used, took = server.cpu() - cpu, time.perf_counter() - wall
                await accept(port, runs[name][:1], first + each, each)
                alone = time.perf_counter() - wall - took
                if turn >= 0:
                    seen[f"{name}_per_s"].append(count * each / took)
                    seen[f"{name}_us"].append(used / (count * each) * 1e6)
                    seen[f"{name}_ms"].append(alone / each * 1e3)
    found = {key: statistics.median(values) for key, values in seen.items()}
    return found | {"lost": 100 * (1 - found["power_per_s"] / found["process_per_s"])}


async def measure_polls(options: argparse.Namespace) -> Figures:
    """Passes that wait for the first one of their run, each polled for; then the first one is sent."""
    count, hold = 5_000, 3.0 if options.quick else 10.0
    with our_server() as (server, port):
        async with client(port) as asking:
            run = await open_run(asking)
            promises = [await asking.post("forward", **small_pass(run, 2 + n)) for n in range(count)]
            before = server.rss()
            connections = [await Connection.open("127.0.0.1", port) for _ in range(count)]
            polls = [
                asyncio.create_task(
                    connection.ask(post("retrieve_future", {"request_id": p["request_id"]}, WANTS_PROTO))
                )
                for connection, p in zip(connections, promises, strict=True)
            ]
            await asyncio.sleep(2.0)
            cpu, held = server.cpu(), server.rss()
            await asyncio.sleep(hold)
            idle = server.cpu() - cpu
            assert not any(poll.done() for poll in polls)
            began = time.perf_counter()
            await asking.post("forward", **small_pass(run, 1))
            answers = await asyncio.gather(*polls)
            took = time.perf_counter() - began
            for connection in connections:
                connection.close()
    return {
        "kb_each": (held - before) / count / 1024,
        "idle_cpu": 100 * idle / hold,
        "unanswered": sum(status != 200 for status, _ in answers),
        "answer_s": took,
    }


# -- bodies --------------------------------------------------------------------------------------------------


async def latencies(asking: Client, session: str, seconds: float) -> list[float]:
    """Of cheap calls, one every few milliseconds, in ms."""
    calls = [
        request("GET", "/api/v1/healthz"),
        request("GET", "/api/v1/get_server_capabilities"),
        post("session_heartbeat", {"session_id": session, "type": "session_heartbeat"}),
    ]
    found, end = [], time.perf_counter() + seconds
    while time.perf_counter() < end:
        for call in calls:
            began = time.perf_counter()
            await asking.send(call)
            found.append((time.perf_counter() - began) * 1e3)
        await asyncio.sleep(0.005)
    return found


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]


async def measure_bodies(options: argparse.Namespace) -> Figures:
    seconds = 5.0 if options.quick else 20.0
    with our_server() as (_, port):
        async with client(port) as asking:
            session = await open_session(asking)
            runs = [await open_run(asking) for _ in range(2)]
            quiet = await latencies(asking, session, 3.0)
            with child("stream", str(port), *runs) as streaming:
                taken = [streaming.hear()["taken"]]

                def listen() -> None:
                    with contextlib.suppress(SystemExit):
                        while True:
                            taken.append(streaming.hear()["taken"])

                threading.Thread(target=listen, daemon=True).start()
                first = taken[-1]
                meanwhile = await latencies(asking, session, seconds)
                done = taken[-1] - first
    return {
        "mb_per_s": done * 50 / seconds,
        "quiet_p99_ms": percentile(quiet, 0.99),
        "p50_ms": percentile(meanwhile, 0.5),
        "p99_ms": percentile(meanwhile, 0.99),
        "max_ms": max(meanwhile),
    }


# -- telling -------------------------------------------------------------------------------------------------


def summary(figures: Figures) -> list[dict[str, Any]]:
    return [
        {
            "measure": row.key,
            "title": row.title,
            "value": figures[row.key],
            "goal": row.goal,
            "met": None if row.goal is None else figures[row.key] <= row.goal,
        }
        for row in ROWS
        if row.key in figures
    ]


def table(rows: list[dict[str, Any]]) -> str:
    lines = [f"{'measure':<60}{'value':>10}  {'goal':<8}met", "-" * 82]
    for row in rows:
        value = f"{row['value']:,.0f}" if row["value"] >= 100 else f"{row['value']:.3g}"
        goal = "" if row["goal"] is None else f"≤ {row['goal']:g}"
        met = {True: "yes", False: "NO", None: ""}[row["met"]]
        lines.append(f"{row['title']:<60}{value:>10}  {goal:<8}{met}".rstrip())
    return "\n".join(lines)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    parser.add_argument("--only", choices=PARTS, action="append", help="this part alone (may be repeated)")
    parser.add_argument("--rounds", type=int, default=15, help="of the sample part")
    parser.add_argument("--quick", action="store_true", help="two rounds, fewer and shorter")
    options = parser.parse_args()
    options.rounds = 2 if options.quick else options.rounds
    return options


def main() -> None:
    options = parse()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    measures = {
        "sample": measure_sample,
        "accept": measure_accept,
        "polls": measure_polls,
        "bodies": measure_bodies,
    }
    figures: Figures = {}
    load = [round(os.getloadavg()[0], 1)]
    for part in options.only or PARTS:
        print(part, file=sys.stderr, flush=True)
        found = asyncio.run(measures[part](options))
        figures |= {f"{part}.{key}": value for key, value in found.items()}
    rows = summary(figures)
    about = {
        "platform": platform.platform(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "load": [*load, round(os.getloadavg()[0], 1)],
    }
    if options.json:
        print(json.dumps({"about": about, "quick": options.quick, "measures": rows}, indent=2))
    else:
        print(", ".join(f"{key} {value}" for key, value in about.items()), end="\n\n")
        print(table(rows))


if __name__ == "__main__":
    main()

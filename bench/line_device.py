"""Client, server and engine on one GPU: `bench/line.py --device cuda --shape qwen3-8b`, one table.

    official client (a process) → HTTP → `tinkex serve` (a process) → engine, random weights, rank 32

A round is what a step of reinforcement learning does: 64 prompts of 128 tokens × 4 samples × 128 tokens, a
pass of importance_sampling over all of it, optim_step, save_weights_and_get_sampling_client. The engine alone
does the same work in a process of its own, on the same device, in the same run, without server and client.
Two servers run in turn, from one home: the first compiles everything and has process as its durability, the
second finds the cache warm and has power. `--quick` leaves out our own client. Figures are told as they
come. A missed goal does not fail the run; a crash does. `--device cpu --shape line` tries it all.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shapes import write_model

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
PUBLISH = {"qwen3-0.6b": 60.0, "qwen3-8b": 100.0}  # ms
Figures = dict[str, Any]


# -- processes -----------------------------------------------------------------------------------------------


class Talker:
    """A process that answers each line of JSON with one."""

    def __init__(self, *command: str, **environment: str) -> None:
        kept = {k: v for k, v in os.environ.items() if not k.startswith("TINK")}
        self.process = subprocess.Popen(
            command, env=kept | environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, name: str, **settings: Any) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(json.dumps([name, settings]), file=self.process.stdin, flush=True)
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{name}: exit status {self.process.wait()}")
        return json.loads(line)


@contextlib.contextmanager
def talker(*command: str, **environment: str) -> Iterator[Talker]:
    started = Talker(*command, **environment)
    try:
        yield started
    finally:
        started.process.kill()
        started.process.wait()


def environment(options: argparse.Namespace) -> dict[str, str]:
    """Our processes keep what they compile in one place, which is empty at first."""
    path = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]))
    return {"PYTHONPATH": path, "TINKEX_HOME": str(options.home)}


@contextlib.contextmanager
def client_of(options: argparse.Namespace, url: str, sdk: str) -> Iterator[Talker]:
    given = {"TINKER_BASE_URL": url, "TINKER_API_KEY": "tml-bench", "TINKER_TELEMETRY": "0"}
    python = options.official if sdk == "tinker" else options.ours
    if sdk == "tinkex":
        given |= environment(options)
    with talker(str(python), str(HERE / "line_device_client.py"), sdk, **given) as client:
        yield client


@dataclass
class Served:
    """A running `tinkex serve`; `lines` is what it said until it was ready."""

    url: str
    ready: float  # seconds
    lines: list[str]


@contextlib.contextmanager
def server(options: argparse.Namespace, model: str, durability: str) -> Iterator[Served]:
    command = [str(options.ours), "-m", "tinkex.cli", "serve", "--model", f"{options.shape}={model}"]
    command += ["--device", options.device, "--port", "0", "--durability", durability]
    began = time.perf_counter()
    kept = {k: v for k, v in os.environ.items() if not k.startswith("TINK")}
    process = subprocess.Popen(
        command, env=kept | environment(options), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout is not None
    try:
        lines: list[str] = []
        for line in process.stdout:
            lines.append(line.rstrip())
            print(f"  server: {line.rstrip()}", file=sys.stderr, flush=True)
            if found := re.search(r" serves (http://\S+)", line):
                drain = threading.Thread(target=_drain, args=(process.stdout,), daemon=True)
                drain.start()
                yield Served(found.group(1), time.perf_counter() - began, lines)
                break
        else:
            raise SystemExit(f"tinkex serve: exit status {process.wait()}")
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _drain(lines: Any) -> None:
    for line in lines:
        if "WARNING" in line or "ERROR" in line:
            print(f"  server: {line.rstrip()}", file=sys.stderr, flush=True)


# -- measuring -----------------------------------------------------------------------------------------------


def work(options: argparse.Namespace) -> dict[str, Any]:
    """What every process does, in numbers."""
    names = ("shape", "prompts", "samples", "prompt_tokens", "tokens", "rank", "vocab")
    return {name: getattr(options, name) for name in names}


def first_and_second(client: Talker, options: argparse.Namespace) -> Figures:
    """How much longer the first step and the first sample after "ready" take than the second ones."""
    steps = [client.ask("step", **work(options)) for _ in range(3)]
    published = [client.ask("publish") for _ in range(2)]
    singles = [client.ask("sample", **work(options) | {"prompts": 1, "samples": 1}) for _ in range(3)]
    return {
        "first_step": steps[0]["seconds"] - min(s["seconds"] for s in steps[1:]),
        "first_sample": singles[0]["seconds"] - min(s["seconds"] for s in singles[1:]),
        "first_publish_ms": 1e3 * published[0]["seconds"],
        "second_step": min(s["seconds"] for s in steps[1:]),
        "second_sample": min(s["seconds"] for s in singles[1:]),
    }


def stalls(client: Talker, options: argparse.Namespace) -> Figures:
    """The longest that a number of requests takes the first time beyond the second time.

    The official client is not asked: it makes an HTTP client for each 50 requests that are open at once.
    `noise_ms`: the same of the worst number once more, when nothing of it is new.
    """

    def beyond(count: int) -> float:
        given = work(options) | {"prompts": count, "samples": 1, "tokens": min(16, options.tokens)}
        first, second, third = (client.ask("sample", **given)["seconds"] for _ in range(3))
        return max(0.0, first - min(second, third))

    beyond(1)  # the client's own first request
    found = {count: beyond(count) for count in options.counts}
    worst = max(found, key=lambda count: found[count])
    noise = beyond(worst)
    return {"stall_ms": 1e3 * found[worst], "stall_at": worst, "noise_ms": 1e3 * noise, "seconds": found}


def rounds(client: Talker, options: argparse.Namespace, before: int = 1) -> Figures:
    """Medians over whole rounds, after some that do not count."""
    seen = [client.ask("round", **work(options)) for _ in range(before + options.rounds)][before:]
    return {key: statistics.median(one[key] for one in seen) for key in seen[0]}


def publishing(client: Talker, options: argparse.Namespace, place: Path) -> Figures:
    """Publishing after a step, and in turn the disk's own writing and syncing of as many bytes."""
    took, disk, size = [], [], 0
    for turn in range(options.rounds + 1):
        client.ask("step", **work(options) | {"prompts": 1})
        took.append(client.ask("publish")["seconds"])
        copies = sorted(options.home.glob("runs/*/*/ephemeral/*"), key=lambda path: path.stat().st_mtime)
        size = sum(file.stat().st_size for file in copies[-1].iterdir())
        disk.append(write_and_sync(place / f"disk-{turn}", size))
    own = {"write_ms": [d[0] for d in disk[1:]], "sync_ms": [d[1] for d in disk[1:]]}
    figures = {key: 1e3 * statistics.median(values) for key, values in own.items()}
    return figures | {"publish_ms": 1e3 * statistics.median(took[1:]), "megabytes": size / 1e6}


def write_and_sync(path: Path, size: int) -> tuple[float, float]:
    """Seconds to write so many bytes to a new file, and with its sync."""
    data = os.urandom(min(size, 1 << 24))
    began = time.perf_counter()
    with path.open("wb", buffering=0) as file:
        left = size
        while left > 0:
            left -= file.write(data[:left] if left < len(data) else data)
        written = time.perf_counter() - began
        os.fsync(file.fileno())
    synced = time.perf_counter() - began
    path.unlink()
    return written, synced


class Found(Figures):
    """Figures, told as they come: a run that is cut off has said what it knew."""

    def keep(self, prefix: str, figures: Figures) -> None:
        self.update({f"{prefix}.{key}": value for key, value in figures.items()})
        print(f"  {prefix}: {json.dumps(figures)}", file=sys.stderr, flush=True)


def measure(options: argparse.Namespace, model: str, place: Path) -> Figures:
    found = Found()
    with server(options, model, "process") as served:
        found.keep("cold", {"ready": served.ready, "lines": served.lines})
        with client_of(options, served.url, options.sdk) as client:
            client.ask("begin", **work(options))
            found.keep("cold", first_and_second(client, options))
            with client_of(options, served.url, "tinkex") as ours:  # the official one stalls by itself
                ours.ask("begin", **work(options))
                ours.ask("publish")
                found.keep("stalls", stalls(ours, options))
            found.keep("process", publishing(client, options, place))
            found.keep("line", rounds(client, options))
        if not options.quick:
            with client_of(options, served.url, "tinkex") as client:
                client.ask("begin", **work(options))
                client.ask("publish")
                found.keep("ours", rounds(client, options))
    child = [str(options.ours), str(HERE / "line_device_child.py"), model, options.device]
    compiled = {"TRITON_CACHE_DIR": str(options.home / "compiled")}  # where the server keeps its kernels
    with talker(*child, **environment(options), **compiled) as engine:
        engine.ask("begin", **work(options))
        found.keep("engine", rounds(engine, options, before=2))
    with server(options, model, "power") as served, client_of(options, served.url, options.sdk) as client:
        found.keep("warm", {"ready": served.ready})
        client.ask("begin", **work(options))
        found.keep("warm", first_and_second(client, options))
        found.keep("power", publishing(client, options, place))
        found.keep("power", rounds(client, options))
    return found


# -- telling -------------------------------------------------------------------------------------------------


def table(found: Figures, options: argparse.Namespace) -> list[Figures]:
    """Rows: a title, ours, what it is compared with, their ratio, the goal and whether it is met."""
    rows: list[Figures] = []

    def add(
        title: str, ours: float, base: float | None = None, *, most: float | None = None, least: float = 0.0
    ) -> None:
        ratio = ours / base if base else None
        judged = ours if ratio is None else ratio
        goal = f"≤ {most:g}" if most else f"≥ {least:g}" if least else ""
        met = None if not goal else judged <= most if most else judged >= least
        rows.append({"title": title, "ours": ours, "base": base, "ratio": ratio, "goal": goal, "met": met})

    engine, line = found["engine.sample"], found["line.sample"]
    add("publish, `process`, ms", found["process.publish_ms"], most=PUBLISH.get(options.shape))
    add("  the disk's own write of the same bytes, ms", found["process.write_ms"])
    add("publish, `power`, ms: write + fsync", found["power.publish_ms"], found["power.sync_ms"], most=1.2)
    add("  megabytes of a sampler's copy", found["power.megabytes"])
    add("sampling, tokens/s: engine alone", line, engine, least=0.9)
    add("training and a step, tokens/s: engine alone", found["line.train"], found["engine.train"], least=0.95)
    both = found["engine.sample_s"] + found["engine.train_s"]
    add("a round, s: the engine's sampling + training", found["line.round_s"], both, most=1.1)
    add("  with `power`", found["power.round_s"], both)
    if "ours.sample" in found:
        add("sampling with our client: engine alone", found["ours.sample"], engine)
        add("training and a step with our client: engine alone", found["ours.train"], found["engine.train"])
        add("a round with our client", found["ours.round_s"], both)
    add("first step after ready - second, s (warm)", found["warm.first_step"], most=2.0)
    add("first sample after ready - second, s (warm)", found["warm.first_sample"], most=0.5)
    add(
        f"longest stall, new number of requests ({found['stalls.stall_at']}), ms",
        found["stalls.stall_ms"],
        most=100,
    )
    add("  the same number once more: noise, ms", found["stalls.noise_ms"])
    add("ready, s: with a cold cache", found["warm.ready"], found["cold.ready"])
    add("first step after ready - second, s (cold)", found["cold.first_step"])
    add("first sample after ready - second, s (cold)", found["cold.first_sample"])
    return rows


def show(rows: list[Figures]) -> str:
    def number(value: float | None) -> str:
        return "-" if value is None else f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"

    head = f"{'measure':<54}{'ours':>10}{'base':>10}{'ratio':>8}  {'goal':<8}{'met':<4}"
    lines = [head, "-" * len(head)]
    for row in rows:
        ratio = "-" if row["ratio"] is None else f"{row['ratio']:.2f}"
        met = {True: "yes", False: "NO", None: ""}[row["met"]]
        numbers = f"{number(row['ours']):>10}{number(row['base']):>10}{ratio:>8}"
        lines.append(f"{row['title']:<54}{numbers}  {row['goal']:<8}{met:<4}".rstrip())
    return "\n".join(lines)


def commit() -> str:
    asked = ["git", "describe", "--always", "--dirty"]
    found = subprocess.run(asked, cwd=HERE, capture_output=True, text=True)
    return found.stdout.strip() or "unknown"


def _apart() -> str | None:
    """A place in memory: writing a model's pages back would disturb the disk that is measured."""
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


def run(options: argparse.Namespace) -> None:
    import torch
    from shapes import SHAPES

    for name in ("official", "ours"):  # an environment of their own, or this one
        if not getattr(options, name).exists():
            setattr(options, name, Path(sys.executable))
    options.vocab = SHAPES[options.shape]["vocab_size"]
    device = torch.cuda.get_device_name() if options.device.startswith("cuda") else "cpu"
    with tempfile.TemporaryDirectory(prefix="tinkex-bench-") as directory:
        place = Path(directory)
        options.home = place / "home"
        with tempfile.TemporaryDirectory(prefix="tinkex-bench-", dir=_apart()) as models:
            model = write_model(options.shape, Path(models), "cpu" if device == "cpu" else "cuda")
            if device != "cpu":
                torch.cuda.empty_cache()
            found = measure(options, model, place)
    about = f"{options.shape}, {device}, torch {torch.__version__}, {options.sdk}, commit {commit()}, "
    about += f"{options.prompts} prompts x {options.samples} samples x {options.tokens} tokens"
    rows = table(found, options)
    if options.json:
        print(json.dumps({"about": about, "rows": rows, "figures": found}))
    else:
        print(f"{about}\n\n{show(rows)}")
        kept = {key: round(value, 4) for key, value in found.items() if isinstance(value, float)}
        print(f"\n{json.dumps(kept)}")

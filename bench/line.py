"""Client, server and engine together on a 5 M parameter model: `make bench-line`.

    client 0.36.0 (a process of its own environment) → HTTP → `tinkex serve` → engine, 2 cores, fp32

The peer, in the same run, is what people write without a service: a plain peft loop and `generate`, on the
same weights and threads. A batch is 8 sequences of 128 tokens, rank 8. The sides alternate over rounds, and
the table shows medians. Each of the four tenants is a process of its own, as users are. There are two
servers: goals hold for `--durability process`, and the last column is the other, with its clients: `power`,
or with `--against DIR` the server of another checkout, and ours over its. A missed goal does not fail the
run; a crash does. On a busy machine the figures mean little: the first line
has the load average. With `--device` it measures what bench/line_device.py says instead.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import statistics
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shapes import write_model

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
TENANTS = 4
Figures = dict[str, float]


@dataclass(frozen=True)
class Row:
    """One line: ours, the peer's, and a bound on ours or, where there is a peer, on ours / peer."""

    title: str
    ours: str
    peer: str = ""
    at_least: float | None = None
    at_most: float | None = None


ROWS = [
    Row("train 8x128, tokens/s: plain peft loop", "train.in_turn", "peft.rate", at_least=1.0),
    Row("  submitted ahead, tokens/s", "train.ahead", "peft.rate"),
    Row("optim_step, ms", "optim_step.ms"),
    Row("  over a call that does nothing, ms", "optim_step.more_ms", at_most=5.0),
    Row("import torch to the end of the first step, s", "first.seconds", at_most=3.0),
    Row("  of which until the server is ready, s", "first.ready_s"),
    Row("one-token sample, ms", "one_token.ms", at_most=20.0),
    Row("sample 8x64, tokens/s: generate", "sample.rate", "generate.rate", at_least=3.0),
    Row("4 runs of 2x16 tokens, tokens/s: one alone", "tenants.together", "tenants.alone", at_least=1.5),
    Row("  their requests/s", "tenants.requests"),
    Row("  CPU of the server a request, ms", "tenants.cpu_ms"),
]


# -- processes -----------------------------------------------------------------------------------------------


class Child:
    """A process that answers in lines of JSON."""

    def __init__(self, *command: str, **environment: str) -> None:
        kept = {k: v for k, v in os.environ.items() if not k.startswith("TINK")}
        self.process = subprocess.Popen(
            command, env=kept | environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, name: str) -> Figures:
        self.tell(name)
        return self.hear()

    def tell(self, name: str) -> None:
        assert self.process.stdin is not None
        print(name, file=self.process.stdin, flush=True)

    def hear(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.process.args}: exit status {self.process.wait()}")
        return json.loads(line)

    def cpu_seconds(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def child(*command: str, **environment: str) -> Iterator[Child]:
    started = Child(*command, **environment)
    try:
        yield started
    finally:
        started.process.kill()
        started.process.wait()


@contextlib.contextmanager
def official(python: Path) -> Iterator[Child]:
    with child(str(python), str(HERE / "line_client.py"), TINKER_TELEMETRY="0") as started:
        yield started


@contextlib.contextmanager
def ours(python: Path, *arguments: str, tree: Path = ROOT) -> Iterator[Child]:
    path = os.pathsep.join(filter(None, [str(tree / "src"), os.environ.get("PYTHONPATH", "")]))
    with child(str(python), str(tree / "bench/line_child.py"), *arguments, PYTHONPATH=path) as started:
        yield started


# -- measuring -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Side:
    """A server and its clients. Its name is its durability, or "other": the server of another checkout."""

    name: str
    server: Child
    client: Child
    tenants: list[Child]
    first: Figures


@contextlib.contextmanager
def serving(options: argparse.Namespace, model: str, home: str, name: str) -> Iterator[Side]:
    with official(options.official) as client, contextlib.ExitStack() as stack:
        tenants = [stack.enter_context(official(options.official)) for _ in range(TENANTS)]
        for other in (client, *tenants):
            other.hear()  # all is imported on both sides: the server has the machine to itself
        arguments = ["serve", f"{home}-{name}", model, str(options.threads)]
        tree = options.against if name == "other" else ROOT
        durability = [] if name == "other" else [name]
        with ours(options.ours, *arguments, *durability, tree=tree) as server:
            torch_at = server.hear()["torch_at"]
            ready = server.hear()
            client.ask(ready["url"])
            first = {"ready_s": ready["at"] - torch_at, "seconds": client.ask("first")["at"] - torch_at}
            for tenant in tenants:
                tenant.ask(ready["url"])
            yield Side(name, server, client, tenants, first)


def measure(options: argparse.Namespace, model: str, home: str) -> dict[str, Figures]:
    """By the name of the side; what the peer does is with `process`."""
    second = "other" if options.against else "power"
    seen: dict[str, dict[str, list[float]]] = {"process": defaultdict(list), second: defaultdict(list)}
    with contextlib.ExitStack() as stack:
        peer = stack.enter_context(ours(options.ours, "peer", model, str(options.threads)))
        peer.hear()
        sides = [stack.enter_context(serving(options, model, home, side)) for side in seen]
        for turn in range(-1, options.rounds):  # the first one warms all sides up
            for side, name, figures in one_round(sides, peer, turn):
                if turn >= 0:
                    for key, value in figures.items():
                        seen[side][f"{name}.{key}"].append(value)
    found = {d: {key: statistics.median(values) for key, values in seen[d].items()} for d in seen}
    for one in sides:
        figures = found[one.name]
        figures |= {f"first.{key}": value for key, value in one.first.items()}
        figures["optim_step.more_ms"] = figures["optim_step.ms"] - figures["optim_step.nothing_ms"]
    return found


def one_round(sides: list[Side], peer: Child, turn: int) -> Iterator[tuple[str, str, Figures]]:
    sides = sides[:: -1 if turn % 2 else 1]  # nobody always goes first
    for name, peer_name, peer_measure in (("train", "peft", "train"), ("sample", "generate", "sample")):
        if turn % 2:
            yield "process", peer_name, peer.ask(peer_measure)
        for side in sides:
            yield side.name, name, side.client.ask(name)
        if not turn % 2:
            yield "process", peer_name, peer.ask(peer_measure)
    for name in ("optim_step", "one_token"):
        for side in sides:
            yield side.name, name, side.client.ask(name)
    for side in sides:
        alone = small_steps(side, 1)["together"]
        yield side.name, "tenants", {"alone": alone, **small_steps(side, TENANTS)}


def small_steps(side: Side, count: int) -> Figures:
    """Tokens and requests a second of so many tenants together, and what a request costs the server."""
    tenants = side.tenants[:count]
    for tenant in tenants:
        tenant.ask("warm")
    before = side.server.cpu_seconds()
    for tenant in tenants:
        tenant.tell("small")
    heard = [tenant.hear() for tenant in tenants]
    cpu = side.server.cpu_seconds() - before
    seconds = max(h["ended"] for h in heard) - min(h["began"] for h in heard)
    tokens, requests = (sum(h[key] for h in heard) for key in ("tokens", "requests"))
    return {"together": tokens / seconds, "requests": requests / seconds, "cpu_ms": cpu / requests * 1e3}


# -- telling -------------------------------------------------------------------------------------------------


def summary(measured: dict[str, Figures]) -> list[dict[str, Any]]:
    found, figures = [], measured["process"]
    second = next(name for name in measured if name != "process")
    for row in ROWS:
        value, base = figures[row.ours], figures.get(row.peer)
        ratio = value / base if base else None
        judged = value if ratio is None else ratio
        goal = row.at_least or row.at_most
        met = None if goal is None else (judged >= goal if row.at_least else judged <= goal)
        found.append(
            {"title": row.title, "base": base, "ours": value, "ratio": ratio, "goal": _goal(row), "met": met}
            | {second: measured[second][row.ours]}
        )
    return found


def _goal(row: Row) -> str:
    times = "x" if row.peer else ""
    if row.at_least is not None:
        return f"≥ {row.at_least:g}{times}"
    return "" if row.at_most is None else f"≤ {row.at_most:g}{times}"


def table(rows: list[dict[str, Any]]) -> str:
    def number(value: float | None) -> str:
        return "-" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.3g}"

    head = f"{'measure':<50}{'base':>9}{'ours':>9}{'ratio':>8}  {'goal':<8}{'met':<5}"
    head += f"{'other':>7}{'ours / other':>14}" if "other" in rows[0] else f"{'power':>7}"
    lines = [head, "-" * len(head)]
    for row in rows:
        ratio = "-" if row["ratio"] is None else f"{row['ratio']:.2f}x"
        met = {True: "yes", False: "NO", None: ""}[row["met"]]
        numbers = f"{number(row['base']):>9}{number(row['ours']):>9}{ratio:>8}"
        second = row.get("power") or row.get("other")
        last = f"{number(second):>7}" + (f"{row['ours'] / second:>14.2f}" if "other" in row else "")
        lines.append(f"{row['title']:<50}{numbers}  {row['goal']:<8}{met:<5}{last}")
    return "\n".join(lines)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="two rounds")
    parser.add_argument("--against", type=Path, metavar="DIR", help="another checkout of this project")
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1), help="of both sides")
    parser.add_argument(
        "--official", type=Path, default=ROOT / ".venv-official/bin/python", help="its interpreter"
    )
    parser.add_argument("--ours", type=Path, default=ROOT / ".venv/bin/python", help="our interpreter")
    gpu = parser.add_argument_group("with --device")
    gpu.add_argument("--device", help="cuda, or cpu to try it: rounds of reinforcement learning")
    gpu.add_argument("--shape", default="qwen3-0.6b", help="of bench/shapes.py")
    gpu.add_argument("--sdk", default="tinker", choices=["tinker", "tinkex"], help="whose client")
    gpu.add_argument("--prompts", type=int, default=64)
    gpu.add_argument("--samples", type=int, default=4, help="of each prompt")
    gpu.add_argument("--prompt-tokens", type=int, default=128)
    gpu.add_argument("--tokens", type=int, default=128, help="of each sample")
    gpu.add_argument("--rank", type=int, default=32)
    gpu.add_argument("--counts", type=_counts, default="3,5,11,23,37,50,77,100,150,200,250", metavar="N,N,…",
                     help="numbers of requests not seen before")  # fmt: skip
    options = parser.parse_args()
    options.rounds = 2 if options.quick else options.rounds
    options.against = options.against and options.against.resolve()
    return options


def _counts(text: str) -> list[int]:
    return [int(count) for count in text.split(",")]


def main() -> None:
    options = parse()
    if options.device is not None:
        import line_device

        return line_device.run(options)
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="tinkex-bench-") as directory:
        model = write_model("line", Path(directory), "cpu")
        rows = summary(measure(options, model, str(Path(directory) / "home")))
    about = {
        "platform": platform.platform(),
        "cores": os.cpu_count(),
        "threads": options.threads,
        "rounds": options.rounds,
        "load": [round(load, 1), round(os.getloadavg()[0], 1)],
    }
    if options.json:
        print(json.dumps({"about": about, "measures": rows}, indent=2))
    else:
        print(", ".join(f"{key} {value}" for key, value in about.items()), end="\n\n")
        print(table(rows))


if __name__ == "__main__":
    main()

"""Our engine and peft + transformers on the same weights and data in one run: `make bench-engine`, or --help.

Every side of every measure is a child process of its own (bench/engine_child.py). On the CPU the children of a
measure take turns over rounds and the table shows medians, because machines are noisy: trust ratios, and on a
busy machine the ratio of CPU seconds beside them. On CUDA they run one after the other. A goal that is missed
never fails the run; a crash does. What it cannot tell: anything about a service, a network or learning.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from engine_child import Figures, Task
from shapes import SHAPES, step_bytes, training_flops, write_model

HERE = Path(__file__).resolve().parent
FORMS = ("padded", "bucketed", "packed", "single")
Seen = dict[tuple[str, str], list[Figures]]  # (side, way) -> rounds


@dataclass(frozen=True)
class Measure:
    """What is timed, on which model, with how much data; `ours` and `peer` are the ways that each side has."""

    name: str
    kind: str  # which function of ours.py and peers.py
    shape: str
    lengths: list[int]
    ours: tuple[str, ...] = ("ours",)
    peer: tuple[str, ...] = ()
    new_tokens: int = 0
    adapters: int = 1


@dataclass(frozen=True)
class Row:
    """One line: `ours` against `base`, each a (side, way); a base without a way is the peer's best.

    `unit` is "tokens/s", "ms" or "MiB"; the ratio is ours / base, of tokens per second, time or bytes.
    """

    measure: str
    title: str
    base: tuple[str, str | None]
    ours: tuple[str, str]
    unit: str = "tokens/s"
    goal: float | None = None


def spread(shortest: int, longest: int, count: int) -> list[int]:
    """Lengths of constant ratio, in an order without order."""
    lengths = np.geomspace(shortest, longest, count).round().astype(int)
    return np.random.default_rng(0).permutation(lengths).tolist()


def cpu_plan() -> tuple[list[Measure], list[Row]]:
    chat = np.linspace(16, 128, 16).astype(int).tolist()
    measures = [
        Measure("train-small", "train", "small", spread(32, 512, 16), peer=FORMS),
        Measure("train-smollm2", "train", "smollm2-135m", spread(32, 512, 8), peer=FORMS),
        Measure("tenants", "tenants", "small", [64] * 16, peer=("in turn",), adapters=8),
        Measure("sharing-small", "sharing", "small", [128] * 16, ours=("1", "16")),
        Measure("sharing-smollm2", "sharing", "smollm2-135m", [64] * 16, ours=("1", "16")),
        Measure("sample-small", "sample", "small", chat, peer=("dynamic",), new_tokens=64),
        Measure("sample-smollm2", "sample", "smollm2-135m", chat, peer=("dynamic",), new_tokens=64),
        Measure("sample-one", "sample", "smollm2-135m", [64], peer=("dynamic",), new_tokens=64),
        Measure("memory", "memory", "smollm2-135m", [512] * 8, ("as planned", "one piece"), ("padded", "recomputed")),
        Measure("threads", "threads", "small", spread(32, 512, 16), ours=("1", "2", "chosen")),
        Measure("publish", "publish", "smollm2-135m", [64]),
    ]
    best, ours = ("peer", None), ("ours", "ours")
    rows = [
        Row("train-small", "train, 25 M Llama: peft padded", ("peer", "padded"), ours, goal=1.3),
        Row("train-small", "train, 25 M Llama: peft's best form", best, ours, goal=1.3),
        Row("train-smollm2", "train, SmolLM2-135M: peft padded", ("peer", "padded"), ours, goal=1.1),
        Row("train-smollm2", "train, SmolLM2-135M: peft's best form", best, ours, goal=1.1),
        Row("tenants", "8 runs x 128 tokens: peft in turn", best, ours, goal=3),
        Row("sharing-small", "25 M: pass of 16 adapters / of 1", ("ours", "1"), ("ours", "16"), "ms", -1.25),
        Row("sharing-smollm2", "SmolLM2: pass of 16 adapters / of 1", ("ours", "1"), ("ours", "16"), "ms", -1.25),
        Row("sample-small", "sample 16, 25 M Llama: generate", best, ours, goal=3),
        Row("sample-smollm2", "sample 16, SmolLM2: generate", best, ours, goal=3),
        Row("sample-one", "sample 1, SmolLM2: generate", best, ours),
        Row("memory", "4k-token pass in one piece: peft", ("peer", "padded"), ("ours", "one piece"), "MiB", -0.6),
        Row("memory", "  cut as we plan it: peft", ("peer", "padded"), ("ours", "as planned"), "MiB"),
        Row("memory", "  cut as we plan it: peft recomputing", ("peer", "recomputed"), ("ours", "as planned"), "MiB"),
        Row("threads", "train, 25 M: 2 threads / 1 thread", ("ours", "1"), ("ours", "2")),
        Row("threads", "train, 25 M: chosen threads / 1 thread", ("ours", "1"), ("ours", "chosen")),
        Row("publish", "step to first new token, SmolLM2", ("ours", "none"), ours, "ms"),
    ]  # fmt: skip
    return measures, rows


def cuda_plan(shape: str) -> tuple[list[Measure], list[Row]]:
    mixed, tokens = spread(128, 2048, 24), spread(128, 1024, 48)
    measures = [
        Measure("train", "train", shape, mixed, peer=("padded", "bucketed", "packed")),
        Measure("sharing", "sharing", shape, tokens, ours=("1", "16")),
        Measure("memory", "memory", shape, [1024] * 16, ("one piece",), ("padded", "recomputed")),
        Measure("publish", "publish", shape, [128]),
    ]
    for requests in (1, 64, 256):
        forms = ("dynamic", "static") if requests < 256 else ("static",)
        measures.append(Measure(f"sample-{requests}", "sample", shape, [128] * requests, peer=forms, new_tokens=128))
    measures.append(
        Measure("sample-256-16", "sample", shape, [128] * 256, ours=("16",), new_tokens=128)
    )
    best, ours = ("peer", None), ("ours", "ours")
    rows = [
        Row("train", "train, mixed lengths up to 2k: peft's best form", best, ours),
        Row("sharing", "pass of 16 adapters / of 1", ("ours", "1"), ("ours", "16"), "ms"),
        Row("memory", "16k-token pass: peft recomputing", ("peer", "recomputed"), ("ours", "one piece"), "MiB"),
        Row("publish", "step to first new token", ("ours", "none"), ours, "ms"),
        *(Row(f"sample-{n}", f"sample {n}: generate", best, ours) for n in (1, 64, 256)),
        Row("sample-256-16", "sample 256 over 16 adapters", ("ours", "none"), ("ours", "16")),
    ]
    return measures, rows


# -- running -------------------------------------------------------------------------------------------


class Child:
    """A process that does one task, a round at a time."""

    def __init__(self, task: Task) -> None:
        self.key = (task.side, task.way)
        paths = [str(HERE.parent / "src"), os.environ.get("PYTHONPATH", "")]
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "engine_child.py"), json.dumps(asdict(task))],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._answer()

    def round(self, turn: int) -> Figures:
        assert self._process.stdin is not None
        print(turn, file=self._process.stdin, flush=True)
        return self._answer()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _answer(self) -> Figures:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.key}: exit status {self._process.wait()}")
        return json.loads(line)


def tasks(measure: Measure, options: argparse.Namespace, model: str) -> Iterator[Task]:
    common = Task(
        measure.kind,
        "ours",
        "",
        measure.shape,
        model,
        options.device,
        options.threads,
        SHAPES[measure.shape]["vocab_size"],
        measure.lengths,
        measure.new_tokens,
        measure.adapters,
    )
    for way in measure.ours:
        adapters = int(way) if way.isdigit() and measure.kind != "threads" else measure.adapters
        threads = {"1": 1, "2": 2, "chosen": 0}[way] if measure.kind == "threads" else options.threads
        yield replace(common, way=way, adapters=adapters, threads=threads)
    if options.peers:
        for way in measure.peer:
            yield replace(common, side="peer", way=way)


def run(measure: Measure, options: argparse.Namespace, model: str) -> Seen:
    """All rounds of all sides: taking turns on a noisy CPU, one after the other where the device is ours."""
    rounds = 1 if measure.kind == "memory" else options.rounds
    todo, seen = list(tasks(measure, options, model)), Seen()
    alternate = options.device == "cpu" and measure.kind != "memory"
    for together in [todo] if alternate else [[task] for task in todo]:
        children = []
        for task in together:
            print(f"{measure.name}: {task.side} {task.way}", file=sys.stderr, flush=True)
            children.append(Child(task))
        for turn in range(rounds):
            for child in children if turn % 2 else reversed(children):  # nobody always goes first
                seen.setdefault(child.key, []).append(child.round(turn))
        for child in children:
            child.close()
    return seen


# -- telling -------------------------------------------------------------------------------------------


def middle(rounds: list[Figures], unit: str, clock: str = "seconds") -> float:
    """The median round, in `unit`."""
    match unit:
        case "MiB":
            return max(one["bytes"] for one in rounds) / 2**20
        case "ms":
            return statistics.median(one[clock] for one in rounds) * 1e3
        case _:
            return statistics.median(one["tokens"] / one[clock] for one in rounds)


def line(row: Row, seen: Seen) -> dict[str, Any] | None:
    """One row's figures; None where ours was not measured."""
    if row.ours not in seen:
        return None
    side, way = row.base
    base = seen.get((side, way)) if way else None
    if way is None and (forms := {w: r for (s, w), r in seen.items() if s == side}):
        way = max(forms, key=lambda form: middle(forms[form], row.unit))
        base = forms[way]
    found: dict[str, Any] = {"title": row.title, "unit": row.unit, "ours": middle(seen[row.ours], row.unit)}
    found |= {"way": way, "base": None, "ratio": None, "cpu_ratio": None, "goal": row.goal, "met": None}
    if base:
        found["base"] = middle(base, row.unit)
        found["ratio"] = found["ours"] / found["base"]
        if row.unit != "MiB":
            found["cpu_ratio"] = middle(seen[row.ours], row.unit, "cpu") / middle(base, row.unit, "cpu")
        if row.goal:
            found["met"] = found["ratio"] >= row.goal if row.goal > 0 else found["ratio"] <= -row.goal
    return found


def table(rows: list[dict[str, Any]]) -> str:
    head = f"{'measure':<50}{'unit':<10}{'base':>10}{'ours':>10}{'ratio':>8}{'CPU':>8}  {'goal':<8}met"
    lines = [head, "-" * len(head)]
    for row in rows:
        title = row["title"] + (f" ({row['way']})" if "best" in row["title"] else "")
        numbers = "".join(f"{_number(row[key]):>10}" for key in ("base", "ours"))
        ratios = "".join(f"{_ratio(row[key]):>8}" for key in ("ratio", "cpu_ratio"))
        goal = "" if not row["goal"] else f"{'≥' if row['goal'] > 0 else '≤'} {abs(row['goal']):g}x"
        met = {True: "yes", False: "NO", None: ""}[row["met"]]
        lines.append(f"{title:<50}{row['unit']:<10}{numbers}{ratios}  {goal:<8}{met}".rstrip())
    return "\n".join(lines)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"


def limits(measures: list[Measure], figures: dict[str, Seen], machine: Figures, itemsize: int) -> list[dict]:
    """Every side's tokens/s, and what share that is of the machine's FLOP/s or memory bandwidth."""
    found = []
    for measure in measures:
        for (side, way), rounds in figures.get(measure.name, {}).items():
            shape, each = measure.shape, {"measure": measure.name, "side": side, "way": way}
            if measure.kind in ("train", "tenants", "sharing", "threads"):
                rate = middle(rounds, "tokens/s")
                share = rate * training_flops(shape) / machine["flops"]
                found.append(each | {"rate": rate, "share": share, "of": "FLOP/s"})
            elif measure.kind == "sample":
                decode = [r.get("decode_tokens", 0) / (r.get("decode_seconds") or 1) for r in rounds]
                rate = statistics.median(decode) or middle(rounds, "tokens/s")
                cached = sum(measure.lengths) + len(measure.lengths) * measure.new_tokens / 2
                least = step_bytes(shape, itemsize, cached) / machine["bandwidth"]
                share = rate / len(measure.lengths) * least
                found.append(each | {"rate": rate, "share": share, "of": "bandwidth"})
    return found


def limits_table(rows: list[dict], machine: Figures) -> str:
    head = f"{'measure':<18}{'side':<6}{'way':<12}{'tokens/s':>12}{'share of the limit':>24}"
    lines = [
        f"{machine['flops'] / 1e12:.3g} TFLOP/s of a product, {machine['bandwidth'] / 1e9:.4g} GB/s of a copy",
        head,
        "-" * len(head),
    ]
    for row in rows:
        share = f"{row['share']:.1%} of {row['of']}"
        lines.append(
            f"{row['measure']:<18}{row['side']:<6}{row['way']:<12}{_number(row['rate']):>12}{share:>24}"
        )
    return "\n".join(lines)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b", help="the model on CUDA")
    parser.add_argument("--threads", type=int, help="compute threads of both sides; default: as the engine chooses")
    parser.add_argument("--only", action="append", help="measures whose name begins so (may be repeated)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="two rounds")
    parser.add_argument("--no-peers", dest="peers", action="store_false", help="our side alone")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the tables")
    options = parser.parse_args()
    options.device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    options.rounds = 2 if options.quick else options.rounds
    options.peers = options.peers and importlib.util.find_spec("peft") is not None
    options.threads = options.threads or chosen_threads()
    return options


def chosen_threads() -> int:
    sys.path.insert(0, str(HERE.parent / "src"))
    from tinkex.engine.torch.threads import threads_beside, usable_cores

    return threads_beside(os.getloadavg()[0], usable_cores())


def main() -> None:
    options = parse()
    measures, rows = cpu_plan() if options.device == "cpu" else cuda_plan(options.shape)
    if options.only:
        measures = [m for m in measures if m.name.startswith(tuple(options.only))]
    load = os.getloadavg()[0]
    figures: dict[str, Seen] = {}
    with tempfile.TemporaryDirectory(prefix="tinkex-bench-") as directory:
        models = {
            shape: write_model(shape, Path(directory), options.device)
            for shape in dict.fromkeys(m.shape for m in measures)
        }
        ceiling = Measure("machine", "ceilings", measures[0].shape, [], ours=("",))
        (task,) = tasks(ceiling, argparse.Namespace(**{**vars(options), "peers": False}), "")
        child = Child(replace(task, side="machine"))
        machine = child.round(0)
        child.close()
        for measure in measures:
            figures[measure.name] = run(measure, options, models[measure.shape])
    lines = [found for row in rows if (found := line(row, figures.get(row.measure, {})))]
    shares = limits(measures, figures, machine, 4 if options.device == "cpu" else 2)
    about = {
        "machine": torch.cuda.get_device_name() if options.device == "cuda" else platform.machine(),
        "cores": os.cpu_count(),
        "threads": options.threads,
        "load": [round(load, 1), round(os.getloadavg()[0], 1)],
        "torch": torch.__version__,
        "rounds": options.rounds,
    }
    if options.json:
        print(json.dumps({"about": about, "ceilings": machine, "measures": lines, "shares": shares}, indent=2))
        return
    print(", ".join(f"{key} {value}" for key, value in about.items()), end="\n\n")
    print(table(lines), end="\n\n")
    print(limits_table(shares, machine))


if __name__ == "__main__":
    main()

"""Our engine and peft + transformers on the same weights and data in one run: `make bench-engine`, or --help.

Every side of every measure is a child process of its own (bench/engine_child.py). On the CPU the children of
a measure take turns over rounds and the table shows medians, because machines are noisy: trust ratios, and on
a busy machine the ratio of CPU seconds beside them. On CUDA our engine runs alone, against goals: see
bench/engine_cuda.py. A goal that is missed never fails the run; a crash does. Tells nothing about a service,
a network or learning.
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
from shapes import GPU_SHAPES, RANK, SHAPES, step_bytes, training_flops, write_model

HERE = Path(__file__).resolve().parent
FORMS = ("padded", "bucketed", "packed", "single")
Seen = dict[tuple[str, str], list[Figures]]  # (side, way) -> rounds


@dataclass(frozen=True)
class Measure:
    """What is timed, on which model, with how much data; `ours` and `peer` are the ways each side has."""

    name: str
    kind: str  # which function of ours.py and peers.py
    shape: str
    lengths: list[int]
    ours: tuple[str, ...] = ("ours",)
    peer: tuple[str, ...] = ()
    new_tokens: int = 0
    adapters: int = 1
    rank: int = RANK


@dataclass(frozen=True)
class Row:
    """One line: `ours` against `base`, each a (side, way) or None; the way "best" is the peer's best.

    `unit` is "tokens/s", "ms", "MiB" or "cores" (CPU seconds in a second); the ratio is ours / base, and the
    goal is a bound on it.
    """

    measure: str
    title: str
    base: tuple[str, str] | None
    ours: tuple[str, str] = ("ours", "ours")
    unit: str = "tokens/s"
    at_least: float | None = None
    at_most: float | None = None


def spread(shortest: int, longest: int, count: int) -> list[int]:
    """Lengths of constant ratio, in an order without order."""
    lengths = np.geomspace(shortest, longest, count).round().astype(int)
    return np.random.default_rng(0).permutation(lengths).tolist()


BEST, PADDED, IN_TURN = ("peer", "best"), ("peer", "padded"), ("peer", "in turn")
PLAIN, ONE, MANY = ("ours", "plain"), ("ours", "1"), ("ours", "16")
SIZES = {"small": "25 M Llama", "small-10m": "10 M Llama"}
# Small runs, eight at a time: the measure's name, shape, rank and tokens of each run
TENANTS = [
    (f"tenants-{shape}-rank{rank}-{tokens}", shape, rank, tokens)
    for shape, rank, lengths in (
        ("small", 32, (16, 32, 128)),
        ("small-10m", 32, (16, 128)),
        ("small-10m", 8, (16, 32, 128)),
    )
    for tokens in lengths
]


def cpu_plan() -> tuple[list[Measure], list[Row]]:
    mixed = spread(32, 512, 16)
    chat, documents = (np.linspace(16, longest, 16).astype(int).tolist() for longest in (128, 512))
    smol, hybrid = "smollm2-135m", "qwen3.5-0.8b"
    pieces, whole = ("as planned", "one piece"), ("padded", "recomputed")
    measures = [
        Measure("train-small", "train", "small", mixed, peer=FORMS),
        Measure("train-even", "train", "small", [256] * 8, peer=FORMS),
        Measure("train-smollm2", "train", smol, spread(32, 256, 8), peer=FORMS),
        Measure("train-quantised", "train", "small", [256] * 4, ours=("plain", "nf4", "fp8", "int8")),
        Measure(
            "sample-quantised",
            "sample",
            "small",
            [64] * 4,
            ours=("plain", "nf4", "fp8", "int8"),
            new_tokens=32,
        ),
        *(
            Measure(name, "tenants", shape, [n // 2] * 16, peer=("in turn",), adapters=8, rank=rank)
            for name, shape, rank, n in TENANTS
        ),
        Measure("sharing-small", "sharing", "small", [128] * 16, ours=("1", "16")),
        Measure("sharing-smollm2", "sharing", smol, [64] * 16, ours=("1", "16")),
        Measure("sample-small", "sample", "small", chat, peer=("dynamic",), new_tokens=64),
        Measure("sample-long", "sample", "small", documents, peer=("dynamic",), new_tokens=64),
        Measure("sample-smollm2", "sample", smol, chat, peer=("dynamic",), new_tokens=64),
        Measure("sample-one", "sample", smol, [64], peer=("dynamic",), new_tokens=64),
        # transformers' recurrent layers cannot keep packed sequences apart
        Measure("train-hybrid", "train", hybrid, spread(16, 128, 8), peer=("padded", "bucketed", "single")),
        Measure("sample-hybrid", "sample", hybrid, [32] * 4, peer=("dynamic",), new_tokens=16),
        Measure("memory", "memory", smol, [512] * 8, ours=pieces, peer=whole),
        Measure("threads", "threads", "small", mixed, ours=("1", "2", "chosen")),
        Measure("publish", "publish", smol, [64]),
    ]
    planned = ("ours", "as planned")
    rows = [
        Row("train-small", "train, 25 M Llama, 32-512 tokens: peft", PADDED, at_least=1.3),
        Row("train-small", "train, 25 M Llama, 32-512 tokens: peft", BEST, at_least=1.3),
        Row("train-even", "train, 25 M Llama, 8 x 256 tokens: peft", PADDED, at_least=1.3),
        Row("train-even", "train, 25 M Llama, 8 x 256 tokens: peft", BEST, at_least=1.3),
        Row("train-smollm2", "train, SmolLM2-135M, 32-256 tokens: peft", PADDED, at_least=1.1),
        Row("train-smollm2", "train, SmolLM2-135M, 32-256 tokens: peft", BEST, at_least=1.1),
        *(
            Row("train-quantised", f"train, 25 M Llama, {way} / plain", PLAIN, ("ours", way), at_least=0.7)
            for way in ("nf4", "fp8", "int8")
        ),
        *(
            Row("sample-quantised", f"sample 4 requests, 25 M Llama, {way} / plain", PLAIN, ("ours", way))
            for way in ("nf4", "fp8", "int8")
        ),
        *(
            Row(name, f"8 runs of {n} tokens, {SIZES[shape]}, rank {rank}: peft", IN_TURN, at_least=3)
            for name, shape, rank, n in TENANTS
        ),
        Row("sharing-small", "pass of 16 adapters / of 1, 25 M Llama", ONE, MANY, "ms", at_most=1.25),
        Row("sharing-smollm2", "pass of 16 adapters / of 1, SmolLM2", ONE, MANY, "ms", at_most=1.25),
        Row("sample-small", "sample 16 of 16-128 tokens, 25 M Llama: generate", BEST, at_least=3),
        Row("sample-long", "sample 16 of 16-512 tokens, 25 M Llama: generate", BEST, at_least=3),
        Row("sample-smollm2", "sample 16 requests, SmolLM2: generate", BEST, at_least=3),
        Row("sample-one", "sample 1 request, SmolLM2: generate", BEST),
        Row("train-hybrid", "train, Qwen3.5-0.8B, 8 of 16-128 tokens: peft", PADDED, at_least=1.3),
        Row("train-hybrid", "train, Qwen3.5-0.8B, 8 of 16-128 tokens: peft", BEST, at_least=1.3),
        Row("sample-hybrid", "sample 4 requests, Qwen3.5-0.8B: generate", BEST, at_least=2),
        Row("memory", "4k-token pass, one piece: peft", PADDED, ("ours", "one piece"), "MiB", at_most=0.6),
        Row("memory", "4k-token pass, as planned: peft", PADDED, planned, "MiB", at_most=0.6),
        Row("memory", "4k-token pass, as planned: peft", ("peer", "recomputed"), planned, "MiB"),
        Row("threads", "train, 25 M Llama: 2 threads / 1", ONE, ("ours", "2")),
        Row("threads", "train, 25 M Llama: threads as chosen / 1", ONE, ("ours", "chosen")),
        Row("threads", "cores used, threads as chosen / 1", ONE, ("ours", "chosen"), "cores"),
        Row("publish", "end of a step to first new token, SmolLM2", None, unit="ms"),
    ]
    return measures, rows


def against_row(measure: Measure, way: str) -> Row:
    """This checkout against another one."""
    unit = {"memory": "MiB", "publish": "ms"}.get(measure.kind, "tokens/s")
    title = measure.name if way == "ours" else f"{measure.name}, {way}"
    return Row(measure.name, title, ("other", way), ("ours", way), unit)


# -- running -------------------------------------------------------------------------------------------


class Child:
    """A process that does one task, a round at a time, with the code of the checkout `tree`."""

    def __init__(self, task: Task, tree: Path = HERE.parent) -> None:
        self.key = (task.side if tree == HERE.parent else "other", task.way)
        paths = [str(tree / "src"), os.environ.get("PYTHONPATH", "")]
        self._process = subprocess.Popen(
            [sys.executable, str(tree / "bench" / "engine_child.py"), json.dumps(asdict(task))],
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
        measure.rank,
        1 if options.quick else 2,
    )
    for way in measure.ours:
        adapters = int(way) if way.isdigit() and measure.kind != "threads" else measure.adapters
        threads = {"1": 1, "2": 2, "chosen": 0}[way] if measure.kind == "threads" else options.threads
        yield replace(common, way=way, adapters=adapters, threads=threads)
    if options.peers:
        for way in measure.peer:
            yield replace(common, side="peer", way=way)


def run(measure: Measure, options: argparse.Namespace, model: str) -> Seen:
    """All rounds of all sides: taking turns on a noisy CPU, one after the other where the device is ours.

    An engine that chooses its threads leaves cores to those who used them last: its rounds follow each other.
    So do those of a large model with more than two sides, which would not fit in memory together.
    """
    rounds = 1 if measure.kind == "memory" else options.rounds
    todo, seen = [(task, HERE.parent) for task in tasks(measure, options, model)], Seen()
    if options.against:
        todo += [(task, options.against) for task, _ in todo if task.side == "ours"]
    fits = SHAPES[measure.shape]["vocab_size"] < 200_000 or len(todo) <= 2
    alternate = options.device == "cpu" and measure.kind not in ("memory", "threads") and fits
    for together in [todo] if alternate else [[task] for task in todo]:
        children = []
        for task, tree in together:
            children.append(Child(task, tree))
            print(f"{measure.name}: {' '.join(children[-1].key)}", file=sys.stderr, flush=True)
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
        case "cores":
            return statistics.median(one["cpu"] / one["seconds"] for one in rounds)
        case "ms":
            return statistics.median(one[clock] for one in rounds) * 1e3
        case _:
            return statistics.median(one["tokens"] / one[clock] for one in rounds)


def line(row: Row, seen: Seen) -> dict[str, Any] | None:
    """One row's figures; None where ours was not measured."""
    if row.ours not in seen:
        return None
    key = row.base
    if key == BEST:
        forms = {key: middle(rounds, row.unit) for key, rounds in seen.items() if key[0] == "peer"}
        key = max(forms, key=lambda form: forms[form], default=None)
    ours, base = seen[row.ours], seen.get(key) if key else None
    found: dict[str, Any] = {"title": row.title, "unit": row.unit, "ours": middle(ours, row.unit)}
    found |= {"base_way": key[1] if key and key[0] == "peer" else None}
    found |= {"at_least": row.at_least, "at_most": row.at_most}
    if base:
        found["base"] = middle(base, row.unit)
        found["ratio"] = found["ours"] / found["base"]
        if row.unit not in ("MiB", "cores"):
            found["cpu_ratio"] = middle(ours, row.unit, "cpu") / middle(base, row.unit, "cpu")
        if row.at_least or row.at_most:
            found["met"] = (row.at_least or 0) <= found["ratio"] <= (row.at_most or float("inf"))
    return found


def table(rows: list[dict[str, Any]]) -> str:
    head = f"{'measure':<56}{'unit':<10}{'base':>9}{'ours':>9}{'ratio':>8}{'CPU':>8}  {'goal':<8}met"
    lines = [head, "-" * len(head)]
    for row in rows:
        title = row["title"] + (f" {row['base_way']}" if row["base_way"] else "")
        numbers = "".join(f"{_number(row.get(key)):>9}" for key in ("base", "ours"))
        ratios = "".join(f"{_ratio(row.get(key)):>8}" for key in ("ratio", "cpu_ratio"))
        bound = row["at_least"] or row["at_most"]
        goal = f"{'≥' if row['at_least'] else '≤'} {bound:g}x" if bound else ""
        met = {True: "yes", False: "NO", None: ""}[row.get("met")]
        lines.append(f"{title:<56}{row['unit']:<10}{numbers}{ratios}  {goal:<8}{met}".rstrip())
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
                least = step_bytes(shape, itemsize, cached, len(measure.lengths)) / machine["bandwidth"]
                share = rate / len(measure.lengths) * least
                found.append(each | {"rate": rate, "share": share, "of": "bandwidth"})
    return found


def limits_table(rows: list[dict], machine: Figures) -> str:
    head = f"{'measure':<18}{'side':<6}{'way':<12}{'tokens/s':>12}{'share of the limit':>24}"
    lines = [
        f"a product's {machine['flops'] / 1e12:.3g} TFLOP/s, a copy's {machine['bandwidth'] / 1e9:.4g} GB/s",
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
    parser.add_argument("--shape", choices=GPU_SHAPES, default="qwen3-0.6b", help="on CUDA")
    parser.add_argument(
        "--threads", type=int, help="compute threads of both sides; default: as the engine chooses"
    )
    parser.add_argument("--only", action="append", help="measures whose name begins so (may be repeated)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="two rounds, one to warm up")
    parser.add_argument("--no-peers", dest="peers", action="store_false", help="our side alone")
    parser.add_argument(
        "--against",
        type=Path,
        help="another checkout of this project: both take turns, at least five rounds, and ratios are told",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the tables")
    options = parser.parse_args()
    options.device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    options.rounds = 2 if options.quick else options.rounds
    if options.against:
        options.against = options.against.resolve()
        options.peers, options.rounds = False, max(5, options.rounds)
    options.peers = options.peers and importlib.util.find_spec("peft") is not None
    options.threads = options.threads or chosen_threads()
    return options


def chosen_threads() -> int:
    sys.path.insert(0, str(HERE.parent / "src"))
    from tinkex.engine.torch.cpu_threads import threads_beside, usable_cores

    return threads_beside(os.getloadavg()[0], usable_cores())


def measure_all(
    measures: list[Measure], rows: list[Row], options: argparse.Namespace
) -> tuple[Figures, dict[str, Seen]]:
    """The machine's ceilings and every measure's rounds; each measure's rows are told as it ends."""
    figures: dict[str, Seen] = {}
    with tempfile.TemporaryDirectory(prefix="tinkex-bench-") as directory:
        shapes = dict.fromkeys(measure.shape for measure in measures)
        models = {shape: write_model(shape, Path(directory), options.device) for shape in shapes}
        child = Child(Task("ceilings", "machine", "", "", "", options.device, options.threads, 0, []))
        machine = child.round(0)
        child.close()
        for measure in measures:
            figures[measure.name] = run(measure, options, models[measure.shape])
            print(table(lines_of(rows, {measure.name: figures[measure.name]})), file=sys.stderr, flush=True)
    return machine, figures


def lines_of(rows: list[Row], figures: dict[str, Seen]) -> list[dict[str, Any]]:
    return [found for row in rows if (found := line(row, figures.get(row.measure, {})))]


def main() -> None:
    options = parse()
    if options.device == "cuda":
        import engine_cuda

        if options.against:
            return engine_cuda.compare(options.shape, options.only, options.rounds, options.against)
        given = {"as_json": options.json, "peers": options.peers}
        return engine_cuda.run(options.shape, options.only, options.rounds, **given)
    measures, rows = cpu_plan()
    if options.only:
        measures = [m for m in measures if m.name.startswith(tuple(options.only))]
    if options.against:
        rows = [against_row(measure, way) for measure in measures for way in measure.ours]
    load = os.getloadavg()[0]
    machine, figures = measure_all(measures, rows, options)
    lines = lines_of(rows, figures)
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
        print(
            json.dumps({"about": about, "ceilings": machine, "measures": lines, "shares": shares}, indent=2)
        )
        return
    print(", ".join(f"{key} {value}" for key, value in about.items()), end="\n\n")
    print(table(lines), end="\n\n")
    print(limits_table(shares, machine))


if __name__ == "__main__":
    main()

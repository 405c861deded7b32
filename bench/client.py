"""The official SDK and ours on the same stub server in one run: `make bench`, or bench/client.py --help.

Each figure comes from a child process of its own (bench/client_child.py). The sides alternate over rounds,
and the table shows medians. Trust the ratios: absolute times depend on the machine. CPU is user + system
time of the whole child process, all threads. A missed goal does not fail the run; a crash does. It measures
no network and no server that computes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
KEY = "tml-0123456789abcdef0123456789abcdef"  # as long as real ones, which replies are searched for
OFFICIAL_DEAD_HOST_S = 314.9  # measured once; --slow measures it again
Figures = dict[str, float]


@dataclass(frozen=True)
class Goal:
    """A bound on ours / official, or, unless `ratio`, on ours alone."""

    bound: float
    ratio: bool = False
    at_least: bool = False

    def met(self, official: float | None, ours: float) -> bool | None:
        if self.ratio and not official:
            return None
        value = ours / official if self.ratio and official else ours
        return value >= self.bound if self.at_least else value <= self.bound

    def __str__(self) -> str:
        bound = as_ratio(self.bound) if self.ratio else f"{self.bound:g}"
        return f"{'≥' if self.at_least else '≤'} {bound}"


@dataclass(frozen=True)
class Row:
    part: str
    key: str
    title: str
    goal: Goal | None = None


def of_official(bound: float, at_least: bool = False) -> Goal:
    return Goal(bound, ratio=True, at_least=at_least)


ROWS = [
    Row("import", "cpu_ms", "import: CPU, ms", of_official(1 / 10)),
    Row("import", "wall_ms", "import: wall, ms"),
    Row("import", "rss_mb", "import: RSS, MB"),
    Row("import", "modules", "import: modules loaded"),
    Row("import", "heavy", "import: how many of numpy, torch, transformers", Goal(0)),
    Row("start", "cpu_ms", "import to the first sample's result: CPU, ms"),
    Row("start", "wall_ms", "import to the first sample's result: wall, ms"),
    Row("sample", "cpu_ms", "sample: CPU per call, ms", of_official(1 / 10)),
    Row("sample", "per_s", "sample: calls/s, 1,000 in flight", of_official(8, at_least=True)),
    Row("sample", "p50_ms", "sample: p50 latency, ms"),
    Row("sample", "p99_ms", "sample: p99 latency, ms"),
    Row("sample_async", "cpu_ms", "sample_async: CPU per call, ms", of_official(1 / 10)),
    Row("sample_async", "per_s", "sample_async: calls/s, 1,000 in flight", of_official(8, at_least=True)),
    Row("sample_async", "p50_ms", "sample_async: p50 latency, ms"),
    Row("sample_async", "p99_ms", "sample_async: p99 latency, ms"),
    Row("train", "build_cpu_ms", "128 datums x 2,048 tokens: build, CPU ms"),
    Row("train", "cpu_ms", "forward_backward of them: CPU, ms", of_official(1 / 5)),
    Row("train", "fresh_cpu_ms", "  of datums built for each call: CPU, ms", of_official(1 / 5)),
    Row("train", "wall_ms", "forward_backward of them: wall, ms"),
    Row("train", "user_stall_ms", "caller's loop: longest stall in a call, ms", Goal(5)),
    Row("train", "user_stall_p50_ms", "  median call"),
    Row("train", "user_idle_ms", "  with nothing to do (the machine's noise)"),
    Row("train", "user_work_ms", "  CPU spent on the loop without a break"),
    Row("train", "sdk_stall_ms", "SDK's own loop: longest stall in a call, ms", Goal(5)),
    Row("train", "sdk_stall_p50_ms", "  median call"),
    Row("train", "sdk_idle_ms", "  with nothing to do (the noise)"),
    Row("train", "sdk_work_ms", "  CPU spent on the loop without a break"),
    Row("memory", "kb_each", "2,000 samples in flight: RSS each, kB", of_official(1 / 8)),
    Row("memory", "sockets", "2,000 samples in flight: sockets"),
    Row("memory_batch", "kb_each", "  with batch retrieval: RSS each, kB", of_official(1 / 8)),
    Row("memory_batch", "sockets", "  with batch retrieval: sockets", Goal(16)),
    Row("dead", "seconds", "host never reached: seconds to an error", Goal(10)),
]
PARTS = list(dict.fromkeys(row.part for row in ROWS))
SIDES = ("official", "ours")

# In a bare interpreter, so that nothing the measuring needs is loaded already.
IMPORT = """
import sys, time, os
cpu, wall = time.process_time(), time.perf_counter()
import {module}
cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
rss = int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
modules = len(sys.modules)
heavy = sum(name in sys.modules for name in ("numpy", "torch", "transformers"))
import json
seen = dict(cpu_ms=cpu * 1e3, wall_ms=wall * 1e3, rss_mb=rss, modules=modules, heavy=heavy)
print(json.dumps(seen))
"""
START = """
import os, time
cpu, wall = time.process_time(), time.perf_counter()
import {module} as tinker
sampler = tinker.ServiceClient().create_sampling_client(base_model="stub/base")
prompt, params = tinker.types.ModelInput.from_ints([1, 2]), tinker.types.SamplingParams(max_tokens=8)
sampler.sample(prompt, num_samples=1, sampling_params=params).result()
cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
import json
print(json.dumps(dict(cpu_ms=cpu * 1e3, wall_ms=wall * 1e3)), flush=True)
os._exit(0)
"""
SNIPPETS = {"import": IMPORT, "start": START}


# --- running ----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def stub_server(python: Path) -> Iterator[str]:
    """The stub in a process of its own; yields its URL.

    It runs at low priority: on few cores it would otherwise displace the threads whose stalls are measured.
    """
    command = ["nice", "-n", "10", str(python), "-m", "tests.stub"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            if not (url := process.stdout.readline().strip()):  # clients would ask the hosted service
                raise SystemExit(f"the stub server did not start: {' '.join(command)}")
            yield url
        finally:
            process.kill()


def closed_port() -> int:
    """A loopback port on which nothing listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def measure(part: str, side: str, python: Path, url: str, quick: bool) -> Figures:
    """One child, one part, one side."""
    if part in SNIPPETS:
        module = "tinker" if side == "official" else "tinkex"
        arguments = ["-c", SNIPPETS[part].format(module=module)]
    else:
        arguments = [str(ROOT / "bench/client_child.py"), part, side, *(["--quick"] if quick else [])]
    url = f"http://127.0.0.1:{closed_port()}" if part == "dead" else url
    clean = {name: value for name, value in os.environ.items() if not name.startswith("TINKER_")}
    env = {**clean, "TINKER_BASE_URL": url, "TINKER_API_KEY": KEY}
    done = subprocess.run([str(python), *arguments], env=env, capture_output=True, text=True, timeout=600)
    if done.returncode != 0:
        raise SystemExit(f"{part}, {side}: exit status {done.returncode}\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def run_all(
    pythons: dict[str, Path], parts: list[str], rounds: int, quick: bool, slow: bool
) -> dict[str, Figures]:
    """Medians over rounds: {"part.key": {side: figure}}."""
    seen: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for part in parts:
        with stub_server(ROOT / ".venv/bin/python") as url:
            for turn in range(rounds_of(part, rounds)):
                for side in sorted(pythons, reverse=bool(turn % 2)):  # neither side always goes first
                    if part == "dead" and side == "official" and not slow:
                        figures = {"seconds": OFFICIAL_DEAD_HOST_S}
                    else:
                        print(f"{part} {turn + 1} {side}", file=sys.stderr, flush=True)
                        figures = measure(part, side, pythons[side], url, quick)
                    for key, value in figures.items():
                        seen[f"{part}.{key}"][side].append(value)
    return {
        name: {side: statistics.median(values) for side, values in by.items()} for name, by in seen.items()
    }


def rounds_of(part: str, rounds: int) -> int:
    """Cheap parts are repeated more often; the dead host is measured once."""
    return {"import": rounds + 2, "start": rounds + 2, "dead": 1}.get(part, rounds)


# --- telling ----------------------------------------------------------------------------------------------


def as_number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.3g}"


def as_ratio(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.1f}x".replace(".0x", "x") if value >= 1 else f"1/{1 / value:.1f}".replace(".0", "")


def summary(figures: dict[str, Figures]) -> list[dict[str, Any]]:
    found = []
    for row in ROWS:
        by_side = figures.get(f"{row.part}.{row.key}")
        if by_side is None:
            continue
        official, ours = by_side.get("official"), by_side.get("ours")
        ratio = ours / official if ours and official else None
        met = row.goal.met(official, ours) if row.goal and ours is not None else None
        known = {"measure": f"{row.part}.{row.key}", "title": row.title, "official": official, "ours": ours}
        found.append({**known, "ratio": ratio, "goal": str(row.goal) if row.goal else None, "met": met})
    return found


def table(rows: list[dict[str, Any]]) -> str:
    lines = [f"{'measure':<48}{'official':>10}{'ours':>10}{'ratio':>10}  {'goal':<8}{'met':<4}"]
    lines.append("-" * 92)
    for row in rows:
        official, ours, ratio = (row[key] for key in ("official", "ours", "ratio"))
        met = {True: "yes", False: "NO", None: ""}[row["met"]]
        numbers = f"{as_number(official):>10}{as_number(ours):>10}{as_ratio(ratio):>10}"
        lines.append(f"{row['title']:<48}{numbers}  {row['goal'] or '':<8}{met:<4}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    parser.add_argument("--only", choices=PARTS, action="append", help="this part alone (may be repeated)")
    parser.add_argument("--side", choices=SIDES, help="this side alone")
    parser.add_argument("--quick", action="store_true", help="one round, fewer calls")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--slow", action="store_true", help="wait for the official SDK's dead-host error (5 min)"
    )
    parser.add_argument(
        "--official", type=Path, default=ROOT / ".venv-official/bin/python", help="its interpreter"
    )
    parser.add_argument("--ours", type=Path, default=ROOT / ".venv/bin/python", help="our interpreter")
    options = parser.parse_args()
    pythons = {side: getattr(options, side) for side in SIDES if options.side in (None, side)}
    rounds = 1 if options.quick else options.rounds
    rows = summary(run_all(pythons, options.only or PARTS, rounds, options.quick, options.slow))
    if options.json:
        machine = {
            "platform": platform.platform(),
            "cores": os.cpu_count(),
            "python": platform.python_version(),
        }
        print(
            json.dumps(
                {"machine": machine, "rounds": rounds, "quick": options.quick, "measures": rows}, indent=2
            )
        )
    else:
        print(table(rows))


if __name__ == "__main__":
    main()

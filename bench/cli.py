"""What a command line costs before it does anything: the official `tinker` and our `tinkex`, in one run.

CPU is user + system time of the child process, all threads. The sides alternate over rounds, and the table
shows medians. Trust the ratios: absolute times depend on the machine. `make bench`, or bench/cli.py --rounds
9.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SIDES = {"official": ROOT / ".venv-official/bin/tinker", "ours": ROOT / ".venv/bin/tinkex"}
COMMANDS = {
    "--help": ["--help"],
    "version": ["version"],
    "run list --help": ["run", "list", "--help"],
    "checkpoint --help": ["checkpoint", "--help"],
    "a mistyped command": ["chekpoint"],
}
GOAL = 1 / 6  # of the official cost, for --help


def cpu_seconds(command: list[str]) -> float:
    """The CPU time of one child process; its output is discarded."""
    quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(command, **quiet)  # type: ignore[call-overload]
    _, _, used = os.wait4(process.pid, 0)
    return used.ru_utime + used.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    for side in SIDES.values():
        cpu_seconds([str(side), "--help"])  # the first run fills the disk cache and writes bytecode
    figures = {title: {side: [] for side in SIDES} for title in COMMANDS}
    for _ in range(rounds):
        for title, arguments in COMMANDS.items():
            for side, program in SIDES.items():
                figures[title][side].append(cpu_seconds([str(program), *arguments]))
    print("| command | official, ms CPU | ours, ms CPU | ratio | goal |\n|---|---|---|---|---|")
    for title, by_side in figures.items():
        official, ours = (statistics.median(by_side[side]) for side in SIDES)
        goal = "" if title != "--help" else f"≤ 1/6: {'met' if ours <= official * GOAL else 'MISSED'}"
        print(f"| `{title}` | {official * 1e3:.0f} | {ours * 1e3:.0f} | 1/{official / ours:.0f} | {goal} |")
    print(f"\nmedians of {rounds} rounds")


if __name__ == "__main__":
    main()

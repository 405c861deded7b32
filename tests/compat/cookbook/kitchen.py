"""Runs a recipe of the cookbook as its own documentation does, and reads what it wrote about itself.

    run = kitchen.cook("recipes.sl_loop", max_steps=12)
    run.metrics[-1]["train_mean_nll"]

Three ways to reach the same service: the official SDK against a server, ours against a server, ours with the
models inside the process. Knows the cookbook's log files; knows no recipe.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.compat.environments import DIRECTORIES, ROOT

SOURCE = ROOT / DIRECTORIES["cookbook"] / "source"  # tutorials, tests, example data: `make cookbook-env`
OFFICIAL, OURS, EMBEDDED = "official", "ours", "embedded"
PACKAGE = "tinker_cookbook"
PATIENCE = 1500  # seconds for a program: an idle machine needs one for most


@dataclass(frozen=True)
class Run:
    """One finished run of a program: what it printed, and the log directory it was given."""

    directory: Path
    said: str

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The rows of the recipe's metrics.jsonl, one a step."""
        return _rows(self.directory / "metrics.jsonl")

    @property
    def checkpoints(self) -> list[dict[str, Any]]:
        return _rows(self.directory / "checkpoints.jsonl")

    def series(self, name: str) -> list[float]:
        """A metric over the steps that report it."""
        return [row[name] for row in self.metrics if name in row]


@dataclass(frozen=True)
class Kitchen:
    """Where recipes run: a hub as working directory, an interpreter, and a server unless embedded."""

    way: str
    python: Path
    hub: Path
    runs: Path
    url: str = ""
    key: str = "tml-cookbook"

    def cook(self, recipe: str, name: str = "", **options: Any) -> Run:
        """Run `python -m tinker_cookbook.<recipe>` with these options and a log directory of its own."""
        directory = self.runs / (name or recipe)
        given = {"log_path": directory, **options}
        arguments = [f"{option}={value}" for option, value in given.items()]
        return self.run(directory, "-m", f"{PACKAGE}.{recipe}", *arguments)

    def run(self, directory: Path, *arguments: str, seconds: float = PATIENCE, fails: bool = False) -> Run:
        """Run a program with this kitchen's interpreter; `fails` where it is expected to."""
        prefix = [] if self.way == OFFICIAL else ["-m", "tinkex.compat"]
        done = subprocess.run(
            [str(self.python), *prefix, *arguments], cwd=self.hub, env=self.environment(), timeout=seconds,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        # The official SDK's transport now and then aborts while the interpreter exits, after all is said.
        aborted = self.way == OFFICIAL and done.returncode == -signal.SIGABRT
        if (done.returncode != 0 and not aborted) is not fails:
            raise AssertionError(f"{' '.join(arguments)} ended with {done.returncode}\n{done.stdout[-6000:]}")
        return Run(directory, done.stdout)

    def environment(self) -> dict[str, str]:
        """This process's, without what would lead a client elsewhere, and with nothing to download from."""
        kept = {k: v for k, v in os.environ.items() if not re.match(r"TINK|HF_|PYTHON|.*_proxy$", k, re.I)}
        server = {"TINKER_BASE_URL": self.url, "TINKER_API_KEY": self.key} if self.url else {}
        home = {"TINKEX_HOME": str(self.runs / "home")} if self.way == EMBEDDED else {}
        return kept | home | server | {
            "HF_HUB_OFFLINE": "1",
            "HF_DATASETS_OFFLINE": "1",
            "HF_HOME": str(self.runs / "hf"),
            "HOME": str(self.runs),
            "TINKER_COOKBOOK_RUNS_DIR": str(self.runs),
            "TOKENIZERS_PARALLELISM": "false",
            "MPLBACKEND": "agg",
            "OMP_NUM_THREADS": "1",
            # The hub has directories called like packages: they must not be imported.
            "PYTHONSAFEPATH": "1",
        }  # fmt: skip


def _rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]

"""The cookbook's own unit tests on the official package and on ours: the same ones must pass.

    python tests/compat/alias.py        # after `make cookbook-env`; about two minutes a side

Ours run through `python -m tinkex.compat` in an environment without the official package. What fails on both
sides (a tokenizer from a hub, an optional package) tells nothing.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
OFFICIAL, OURS = ROOT / ".venv-cookbook", ROOT / ".venv-cookbook-tinkex"
COOKBOOK = OFFICIAL / "source"
# What touches the SDK's types, or pins the format of adapters.
TESTS = """
capture checkpoint_utils_test.py completers_test.py eval/inspect_utils_test.py recipes/audio
recipes/decisions recipes/sdft renderers/tml_v0_test.py rl supervised third_party utils weights
"""


def outcomes(*, ours: bool) -> dict[str, str]:
    """Each test's outcome by its name: PASSED, FAILED, ERROR, SKIPPED."""
    runner = ["-m", "tinkex.compat", "-m", "pytest"] if ours else ["-m", "pytest"]
    done = subprocess.run(
        [
            str((OURS if ours else OFFICIAL) / "bin/python"), *runner, "-q", "-rA", "-p", "no:cacheprovider",
            "--continue-on-collection-errors", *(f"tinker_cookbook/{name}" for name in TESTS.split()),
        ],
        cwd=COOKBOOK, capture_output=True, text=True, timeout=1500, env=_environment(),
    )  # fmt: skip
    found = re.findall(r"^(PASSED|FAILED|ERROR) (tinker_cookbook/\S+)", done.stdout, re.MULTILINE)
    assert found, done.stdout[-2000:] + done.stderr[-2000:]
    return {name: outcome for outcome, name in found}


def _environment() -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("TINK", "PYTEST", "PYTHON"))}
    return kept | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


def passed(found: dict[str, str]) -> set[str]:
    return {name for name, outcome in found.items() if outcome == "PASSED"}


def compare() -> tuple[set[str], set[str]]:
    """The tests that pass on the official package, and those that pass on ours."""
    return passed(outcomes(ours=False)), passed(outcomes(ours=True))


if __name__ == "__main__":
    official, tinkex = compare()
    print(f"{len(official)} pass on the official package, {len(tinkex)} on ours")
    for name in sorted(official ^ tinkex):
        print("only on the official package:" if name in official else "only on ours:", name)
    sys.exit(official != tinkex)

"""The cookbook's own integration tests, as its authors run them against the hosted service.

They start recipes with `uv run python -m …`: a shim of that name runs them in the kitchen's environment.
Left out are those that need data or services of others, those that train at full length, and one that needs
more rows than our hub has (rolling checkpoints, for which test_supervised.py asks the same).
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.compat.cookbook.kitchen import OFFICIAL, PATIENCE, SOURCE, Kitchen

# 134: the official SDK's transport now and then aborts while the interpreter exits, after all is said.
SHIM = """#!/bin/sh
shift 2  # run python
{python} "$@"
code=$?
[ $code -eq {forgiven} ] && exit 0
exit $code
"""
RECIPES = {
    "tests/recipes/test_recipe_math_rl.py": 3,
    "tests/recipes/test_recipe_chat_sl.py": 2,
}
# These take a sampler's weights out as an archive, which the official SDK can no longer ask for.
WEIGHTS = {
    "tests/weights/test_lifecycle.py": 1,
    "tests/weights/test_partial_lora_lifecycle.py": 6,
}


@pytest.mark.parametrize("name", RECIPES)
def test_recipes(kitchen: Kitchen, tmp_path: Path, name: str) -> None:
    assert passed(kitchen, tmp_path, name) == RECIPES[name]


@pytest.mark.parametrize("name", [*RECIPES, *WEIGHTS])
def test_on_our_sdk(ours: Kitchen, tmp_path: Path, name: str) -> None:
    assert passed(ours, tmp_path, name) == {**RECIPES, **WEIGHTS}[name]


def passed(kitchen: Kitchen, shims: Path, name: str) -> int:
    """How many tests of this file pass, of which none may fail."""
    official = kitchen.way == OFFICIAL
    python = [str(kitchen.python), *([] if official else ["-m", "tinkex.compat"])]
    (shims / "uv").write_text(SHIM.format(python=" ".join(python), forgiven=134 if official else 0))
    (shims / "uv").chmod(0o755)
    environment = kitchen.environment()
    environment["PATH"] = f"{shims}{os.pathsep}{environment['PATH']}"
    environment["SMOKE_TEST_TIMEOUT"] = str(PATIENCE)
    # Without its conftest, which skips them all where no key is set.
    pytest_ = ["-m", "pytest", "--noconftest", f"--rootdir={SOURCE}", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*python, *pytest_, str(SOURCE / name)],
        cwd=kitchen.hub, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        timeout=PATIENCE,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:]
    (count,) = re.findall(r"(\d+) passed", done.stdout)
    return int(count)

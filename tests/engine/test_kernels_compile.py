"""Every kernel compiles for Hopper with the Triton that is installed; needs no GPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engine.by_kernels import MARKS

pytestmark = [*MARKS, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[2]
KERNELS = ROOT / "src" / "tinkex" / "engine" / "cuda"


def test_every_kernel_compiles_for_hopper(tmp_path: Path) -> None:
    """But the one in Gluon, which test_gluon_projection.py compiles."""
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    environment = os.environ | {"PYTHONPATH": paths, "TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    script = [sys.executable, "-m", "tests.engine.compile_kernels"]
    done = subprocess.run(script, capture_output=True, text=True, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    sources = {path.stem: path.read_text() for path in KERNELS.glob("*.py")}
    kernels = {
        f"{module}.{name}"
        for module, source in sources.items()
        for name in re.findall(r"^@launched\n@triton\.jit.*\ndef (\w+)", source, re.MULTILINE)
    }
    assert set(done.stdout.split()) == kernels

"""The page and the notebook of the first hour, run as a stranger would, with a tiny default model."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

DOCS = Path(__file__).parents[2] / "docs"
CONSOLE = re.compile(r"^```console\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.fixture
def stranger(home: Path, model: Path) -> Path:
    """Somebody whose default model is tiny."""
    (home / "models").mkdir(parents=True)
    (home / "models" / "SmolLM2-135M-Instruct").symlink_to(model)
    return home


def script_of(page: str) -> str:
    """The commands of a page; a line that begins with "> " is what is typed into the one above it."""
    lines = ["set -e", f'tinkex() {{ {shlex.quote(sys.executable)} -m tinkex.cli "$@"; }}']
    for block in CONSOLE.findall(page):
        for command in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            first, *typed = command.strip().split("\n")
            said = "".join(line.removeprefix("> ") + "\n" for line in typed)
            lines.append(f"printf %s {shlex.quote(said)} | {first}" if said else first)
    return "\n".join(lines)


@pytest.mark.timeout(300)
def test_every_command_of_the_page_runs(stranger: Path) -> None:
    script = script_of((DOCS / "first-hour.md").read_text()).replace("python -c", f"{sys.executable} -c")
    assert script.count("tinkex ") >= 8
    done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    made = Path("pirates")
    assert (made / "runs" / "pirates" / "result.json").exists()
    assert (made / "runs" / "sums" / "result.json").exists()
    assert (made / "adapter" / "adapter_config.json").exists(), "PEFT's file"
    assert (made / "merged" / "config.json").exists(), "transformers' file"


def test_the_notebook_runs(stranger: Path) -> None:
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    notebook = nbformat.read(DOCS / "first-hour.ipynb", as_version=4)
    nbclient.NotebookClient(notebook, timeout=100, kernel_name="python3").execute()
    said = "".join(output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", []))
    before, after = map(float, re.findall(r"held-out loss: ([\d.]+) before, ([\d.]+) after", said)[0])
    assert after < before
    assert "tinker://" in said
    assert all(not cell.get("outputs") for cell in nbformat.read(DOCS / "first-hour.ipynb", 4).cells), (
        "as kept"
    )

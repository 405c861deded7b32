"""docs/architecture.md lists the files of a `forward_backward`: a traced request goes through no others."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engine.tiny import tiny_model, tiny_tokenizer

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "tinkex"
PAGE = (ROOT / "docs" / "architecture.md").read_text()
FILES, LINES = 25, 6000  # what a newcomer reads for one request
FAMILY_LINES = 60  # from a `config.json` to a `ModelConfig`
# Not a function call: the values of the contract, and the table of operations.
DECLARATIONS = {"engine/protocol.py", "wire/ops.py"}


def listed(heading: str) -> list[str]:
    """The files that are linked between a heading and the next."""
    section = re.search(rf"^## {heading}$(.*?)(?=^## )", PAGE, re.DOTALL | re.MULTILINE)
    assert section is not None, heading
    return re.findall(r"\]\(\.\./src/tinkex/([\w/]+\.py)\)", section[1])


PATH = listed("A forward_backward, file by file")
SIDE = listed("Beside the path")
HTTP = listed("Over HTTP")


@pytest.fixture(scope="module", params=["embedded", "served"])
def executed(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, set[str]]:
    model = tiny_tokenizer(tiny_model(tmp_path_factory.mktemp("model"), "llama3"))
    command = [sys.executable, "-m", "tests.request_path", request.param, str(model)]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("TINKE")}
    done = subprocess.run(command, env=clean, cwd=ROOT, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr[-4000:]
    return request.param, set(json.loads(done.stdout))


def test_the_path_is_short_enough_to_read() -> None:
    assert len(PATH) <= FILES
    assert sum(len((SOURCE / file).read_text().splitlines()) for file in PATH) <= LINES


def test_a_family_is_a_short_function() -> None:
    """A family is told apart by what it is made of, so that the next one is quickly added."""
    files = (SOURCE / "engine" / "torch" / "models").glob("*families.py")
    functions = [
        node
        for file in files
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.FunctionDef)
    ]
    lengths = {node.name: (node.end_lineno or 0) - node.lineno + 1 for node in functions}
    assert {"llama", "gemma4", "qwen3_5", "deepseek_v3", "nemotron_h"} <= lengths.keys()
    assert {name: lines for name, lines in lengths.items() if lines > FAMILY_LINES} == {}


def test_no_file_is_listed_twice() -> None:
    everything = [*PATH, *SIDE, *HTTP]
    assert sorted(everything) == sorted(set(everything))


def test_a_request_goes_through_no_file_that_is_not_listed(executed: tuple[str, set[str]]) -> None:
    mode, files = executed
    assert files - set(PATH) - set(SIDE) - (set(HTTP) if mode == "served" else set()) == set()


def test_every_file_of_the_path_is_executed(executed: tuple[str, set[str]]) -> None:
    mode, files = executed
    wanted = set(HTTP) | (set(PATH) - {"local.py"}) if mode == "served" else set(PATH)
    assert wanted - DECLARATIONS - files == set()

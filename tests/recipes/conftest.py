"""A tiny model and a home for the tests of recipes, and the command line as a user runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.engine.tiny import tiny_model, tiny_tokenizer


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models")
    return tiny_tokenizer(tiny_model(directory, "qwen3", eos_token_id=257, max_position_embeddings=2048))


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No key and no server are set, models run here, and the working directory is the test's own."""
    for name in [name for name in os.environ if name.startswith(("TINKER", "TINKEX"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("TINKEX_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "home"


@pytest.fixture
def tinkex_command(home: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    def run(*arguments: object, check: bool = True) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [sys.executable, "-m", "tinkex.cli", *map(str, arguments)],
            capture_output=True, text=True, timeout=100,
        )  # fmt: skip
        assert not check or done.returncode == 0, done.stderr[-3000:]
        return done

    return run


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    """Forty questions whose answers have one form."""
    rows = [
        [{"role": "user", "content": f"say {n}?"}, {"role": "assistant", "content": f"yes {n}"}]
        for n in range(40)
    ]
    return jsonl(tmp_path / "chats.jsonl", [{"messages": row} for row in rows])


def jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path

"""A real `tinkex serve` process with a tiny model, and a way to run a client's script against it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.compat.clients.report import MODEL
from tests.compat.environments import ROOT, interpreter
from tests.engine.tiny import tiny_model, tiny_tokenizer

CLIENTS = Path(__file__).parent / "clients"
PATIENCE = 500  # seconds for a client's script: some take ten on an idle machine
AT_ONCE = 30  # seconds: what is retried or waited for takes a minute and more
EOS = 257  # <|im_end|> of the tiny tokenizer


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.timeout(PATIENCE + 100))


@dataclass
class Served:
    """A running server: where it is, what it serves, what it has said."""

    url: str
    model: Path
    said: list[str] = field(default_factory=list)

    def run(self, client: str, script: str, *arguments: str, key: str = "") -> dict[str, dict[str, Any]]:
        """Run a script in its client's environment, as a tenant of its own; its facts by step."""
        key = key or f"tml-{uuid.uuid4().hex}"
        done = subprocess.run(
            [str(interpreter(client)), str(CLIENTS / script), *arguments],
            capture_output=True, text=True, timeout=PATIENCE, env=self.environment(key),
            cwd=self.model.parents[1],
        )  # fmt: skip
        assert done.returncode == 0, f"{script} failed\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
        sheets = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"step"')]
        return {sheet.pop("step"): sheet for sheet in sheets}

    def environment(self, key: str) -> dict[str, str]:
        """This process's, without what would lead a client elsewhere."""
        kept = {k: v for k, v in os.environ.items() if not re.match(r"TINK|OPENAI|PYTHON|.*_proxy$", k, re.I)}
        return kept | {
            "TINKER_BASE_URL": self.url,
            "TINKER_API_KEY": key,
            "OPENAI_BASE_URL": f"{self.url}/v1",
            "OPENAI_API_KEY": key,
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
        }


@pytest.fixture(scope="session")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a client that runs beside it finds its tokenizer: the official ones look for the model's name."""
    models = tmp_path_factory.mktemp("models")
    (models / MODEL).parent.mkdir()
    return tiny_tokenizer(tiny_model(models, "qwen3", eos_token_id=EOS).rename(models / MODEL))


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory, model_directory: Path) -> Iterator[Served]:
    """One server for the whole session: every script is a tenant of its own."""
    with serving({MODEL: model_directory}, tmp_path_factory.mktemp("home")) as (url, said):
        yield Served(url, model_directory, said)


@contextmanager
def serving(models: dict[str, Path], home: Path, *options: str) -> Iterator[tuple[str, list[str]]]:
    """A `tinkex serve` process: its URL, and what it has said. It must end cleanly, without a traceback."""
    command = [
        sys.executable, "-m", "tinkex.cli", "serve", *(f"--model={name}={models[name]}" for name in models),
        "--port", "0", "--home", str(home), "--device", "cpu", "--drain", "0.5", *options,
    ]  # fmt: skip
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT,
        env={k: v for k, v in os.environ.items() if not k.startswith("TINK")} | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert process.stdout is not None
    said: list[str] = []
    for line in process.stdout:
        said.append(line)
        if found := re.search(r" serves (http://\S+)", line):
            break
    else:
        pytest.fail(f"the server did not start:\n{''.join(said)}")
    reader = threading.Thread(target=said.extend, args=(process.stdout,), daemon=True)
    reader.start()
    try:
        yield found.group(1), said
    finally:
        process.terminate()
        ended = process.wait(120)
    assert ended == 0, "".join(said)[-4000:]
    reader.join(5)
    assert "Traceback" not in "".join(said), "".join(said)[-4000:]

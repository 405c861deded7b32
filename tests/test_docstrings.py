"""Run every example in a docstring: as a doctest, or, in client modules, on a stub server."""

from __future__ import annotations

import doctest
import importlib
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

import pytest

import tinkex
from tests.client.conftest import PROMPT, close, datum
from tests.client.events import DONE, TOKENS, events
from tests.stub import Stub, status
from tinkex import AdamParams, ModelInput, SamplingParams, ServiceClient

pytestmark = pytest.mark.slow

ROOT = Path(tinkex.__file__).parent
# Examples that no test can run, and what they would need.
SKETCHES = {
    "tinkex.engine.torch.load": "a model on a GPU",
    "tinkex.service.runs.journal": "a caller with requests to journal",
    "tinkex.service.ledger": "rows of every kind",
}


def modules() -> Iterator[str]:
    for file in sorted(ROOT.rglob("*.py")):
        if ">>> " in file.read_text():
            parts = file.relative_to(ROOT.parent).with_suffix("").parts
            yield ".".join(parts).removesuffix(".__init__")


ALL = list(modules())
CLIENTS = [name for name in ALL if name.startswith("tinkex.client.")]


@pytest.mark.parametrize("name", [name for name in ALL if name not in (*CLIENTS, *SKETCHES)])
def test_examples_are_true(name: str) -> None:
    assert doctest.testmod(importlib.import_module(name)).failed == 0


@pytest.fixture
def readers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[dict[str, Any]]:
    """What the examples of clients take for granted, on a server that has what they ask for."""
    with Stub() as stub:
        monkeypatch.setenv("HOME", str(tmp_path))
        monkeypatch.setenv("TINKER_BASE_URL", stub.url)
        stub.script("stream_sample", events(TOKENS, DONE))
        stub.script("metrics", status(200, body=b'{"loss": 1.5}\n'))
        service = ServiceClient()
        run = service.create_lora_training_client("stub/base", timeout=20)
        yield {
            "service": service, "run": run, "run_id": run.model_id, "rest": service.create_rest_client(),
            "sampler": service.create_sampling_client(base_model="stub/base", timeout=20),
            "prompt": PROMPT, "tokens": [1, 2], "data": [datum()], "AdamParams": AdamParams, "date": date,
            "ModelInput": ModelInput, "SamplingParams": SamplingParams, "http://127.0.0.1:8000": stub.url,
        }  # fmt: skip
        close(service)


@pytest.mark.parametrize("name", CLIENTS)
def test_examples_of_clients_run(name: str, readers: dict[str, Any]) -> None:
    """Also those marked to be skipped by who has no server; what has an answer written down must give it."""
    module = importlib.import_module(name)
    found = [test for test in doctest.DocTestFinder().find(module) if test.examples]
    assert found
    for test in found:
        names = {**vars(module), **readers}
        for example in test.examples:
            source = example.source.replace("http://127.0.0.1:8000", readers["http://127.0.0.1:8000"])
            if not example.want:
                exec(source, names)
                continue
            assert repr(eval(source, names)) == example.want.strip(), f"{name}: {source}"

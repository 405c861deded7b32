"""Which build of torch `make setup` installs, and what it says about it."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

FILE = Path(__file__).parent.parent / ".ci" / "torch_index.py"


@pytest.fixture
def torch_index(monkeypatch: pytest.MonkeyPatch) -> Any:
    spec = importlib.util.spec_from_file_location("torch_index", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(sys, "platform", "linux")
    return module


@pytest.mark.parametrize(
    ("asked", "gpu", "found", "reachable", "options", "says"),
    [
        ("https://x/cpu", True, "2.13.0", True, "--extra-index-url https://x/cpu", "as TORCH_INDEX says"),
        ("", True, "2.13.0", True, "", "for CUDA"),
        ("", False, "2.13.0+cpu", False, "", "2.13.0+cpu, the CPU build"),
        ("", False, "2.13.0", True, "--extra-index-url CPU_INDEX", "TORCH_INDEX=none takes pip's default"),
        ("", False, "2.13.0", False, "", "CUDA build, about 3 GB"),
        ("", False, None, False, "", "make setup TORCH_INDEX="),
        ("none", False, "2.13.0", True, "", "CUDA build, about 3 GB"),
    ],
)
def test_the_build_of_torch(
    torch_index: Any, asked: str, gpu: bool, found: str | None, reachable: bool, options: str, says: str
) -> None:
    got, said = torch_index.choose(asked, gpu, lambda: found, lambda url: reachable)
    assert got == options.replace("CPU_INDEX", torch_index.CPU_INDEX)
    assert says in said


def test_a_machine_with_a_gpu_asks_nobody(torch_index: Any) -> None:
    def never(*_: str) -> Any:
        raise AssertionError("asked")

    assert torch_index.choose("", True, never, never)[0] == ""

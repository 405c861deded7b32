"""A directory as a tar, read back with the standard library's, and how long one that is kept lives."""

from __future__ import annotations

import errno
import io
import os
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tinkex.service import archive as archive_module
from tinkex.service.archive import LINK_LIFE, Archive, Archives
from tinkex.service.home import Home

names = st.text(st.characters(exclude_characters="/\0", exclude_categories=["Cs"]), min_size=1, max_size=60)


@given(st.dictionaries(names.filter(lambda n: n not in (".", "..")), st.binary(max_size=1500), max_size=4))
@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_was_there_is_in_it(tmp_path: Path, files: dict[str, bytes]) -> None:
    place = tmp_path / "d"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    for name, content in files.items():
        (place / name).write_bytes(content)
    archive = Archive(place)
    raw = b"".join(archive)
    assert len(raw) == archive.length
    with tarfile.open(fileobj=io.BytesIO(raw)) as tar:
        found = {m.name: tar.extractfile(m).read() for m in tar}  # type: ignore[union-attr]
    assert found == files


def test_only_regular_files_and_no_matter_what_is_deleted_meanwhile(tmp_path: Path) -> None:
    (tmp_path / "d" / "inner").mkdir(parents=True)
    (tmp_path / "d" / "kept").write_bytes(b"x" * 3_000_000)
    (tmp_path / "d" / "link").symlink_to("/etc/passwd")
    chunks = iter(archive := Archive(tmp_path / "d"))
    first = next(chunks)
    shutil.rmtree(tmp_path / "d")
    raw = first + b"".join(chunks)
    assert len(raw) == archive.length
    with tarfile.open(fileobj=io.BytesIO(raw)) as tar:
        assert tar.getnames() == ["kept"]


# -- those that are kept ---------------------------------------------------------------------------------


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    place = tmp_path / "runs" / "état"
    place.mkdir(parents=True)
    (place / "a").write_text("one")
    return place


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """Where archives are kept."""
    return tmp_path / "archives"


def content(file: Path) -> dict[str, bytes]:
    with tarfile.open(file) as tar:
        assert all(member.isreg() for member in tar)
        return {member.name: tar.extractfile(member).read() for member in tar}  # type: ignore[union-attr]


def test_however_often_it_is_asked_for_there_is_one_and_the_newest(
    tmp_path: Path, directory: Path, kept: Path
) -> None:
    archives = Archives(Home(tmp_path))
    first = archives.pack(directory)
    assert content(first) == {"a": b"one"}
    (directory / "a").write_text("two")
    with first.open("rb") as begun:  # whoever reads the old one reads it to its end
        assert archives.pack(directory) == first
        assert b"one" in begun.read()
    assert content(first) == {"a": b"two"}
    assert list(kept.iterdir()) == [first]
    assert first.stat().st_mode & 0o077 == 0


def test_what_one_process_removes_is_no_others(tmp_path: Path, directory: Path, kept: Path) -> None:
    mine, others = Archives(Home(tmp_path)), Archives(Home(tmp_path))
    mine.pack(directory)
    theirs = others.pack(directory)
    mine.clear()
    assert list(kept.iterdir()) == [theirs]


def test_with_its_directory_every_archive_of_it_goes(tmp_path: Path, directory: Path, kept: Path) -> None:
    neighbour = directory.with_name("other")
    neighbour.mkdir()
    archives = Archives(Home(tmp_path))
    archives.pack(directory)
    Archives(Home(tmp_path)).pack(directory)
    left = archives.pack(neighbour)
    archives.forget(directory)
    assert list(kept.iterdir()) == [left]


def test_what_is_left_of_others_goes_when_no_link_to_it_works(
    tmp_path: Path, directory: Path, kept: Path
) -> None:
    Archives(Home(tmp_path)).pack(directory)
    (kept / ".half.part").touch()  # as a process leaves it that is killed
    young = Archives(Home(tmp_path)).pack(directory)
    for file in kept.iterdir():
        age = LINK_LIFE - 60 if file == young else LINK_LIFE + 60
        os.utime(file, times=(time.time() - age,) * 2)
    Archives(Home(tmp_path)).sweep()
    assert list(kept.iterdir()) == [young]


def test_a_disk_that_is_full_leaves_nothing_half_written(
    tmp_path: Path, directory: Path, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(file: BinaryIO, size: int) -> Iterator[bytes]:
        yield file.read(1)
        raise OSError(errno.ENOSPC, "No space left on device")

    archives = Archives(Home(tmp_path))
    before = archives.pack(directory)
    monkeypatch.setattr(archive_module, "_content", full)
    with pytest.raises(OSError, match="No space left"):
        archives.pack(directory)
    assert list(kept.iterdir()) == [before]
    assert content(before) == {"a": b"one"}


LEAVE = """
import os, sys
from pathlib import Path
from tinkex.service.archive import Archives
from tinkex.service.home import Home
home = Path(sys.argv[1])
packed = Archives(Home(home)).pack(home / "runs" / "état")
if (child := os.fork()) == 0:
    sys.exit()
os.waitpid(child, 0)
assert packed.exists(), "a forked child took it along"
"""


def test_it_ends_with_its_process_and_not_with_a_child(tmp_path: Path, directory: Path, kept: Path) -> None:
    done = subprocess.run([sys.executable, "-c", LEAVE, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert list(kept.iterdir()) == []

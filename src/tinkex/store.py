"""Directories that appear whole or not at all, with a checksum of every file in them.

A crash leaves either the old state or the new one. `SHA256SUMS` in a directory has the SHA-256 of its files,
in the format of `sha256sum -c`. A directory without one is of an older version, or of another program: there
is nothing to compare it with.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import uuid
from collections.abc import Generator, Iterable
from pathlib import Path

from tinkex.errors import TinkerError

CHECKSUMS = "SHA256SUMS"
_LINE = re.compile(r"([0-9a-f]{64})  ([^\n]+)\n")


class LocationExistsError(FileExistsError):
    """There is something at the location already."""


class DamagedError(TinkerError):
    """A file is not what was written; the message names it."""


@contextlib.contextmanager
def atomic_directory(location: str | Path, *, overwrite: bool = False, sync: bool = True) -> Generator[Path]:
    """A temporary directory to write into; it becomes `location` on success and is removed on failure.

    Raises LocationExistsError if `location` exists and `overwrite` is not given. Without `sync`, the caller
    adds checksums and syncs.
    """
    target = Path(location)
    if target.exists() and not overwrite:
        raise LocationExistsError(f"{target} already exists; choose another name")
    named = [parent.parent for parent in target.parents if not parent.exists()]  # what will name new ones
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.tmp")
    temporary.mkdir()
    try:
        yield temporary
        if sync:
            add_checksums(temporary)
            sync_tree(temporary)
        replaced = temporary.with_suffix(".old")
        if target.exists():
            target.rename(replaced)
        temporary.rename(target)
        for directory in (target.parent, *named) if sync else ():
            sync_path(directory)
        shutil.rmtree(replaced, ignore_errors=True)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def add_checksums(directory: Path) -> None:
    """Write the checksums of all files below; if they came with the files (a copy), check them instead."""
    if (directory / CHECKSUMS).exists():
        verify(directory)
        return
    lines = [f"{_sum(directory / name)}  {name}\n" for name in _names(directory)]
    (directory / CHECKSUMS).write_text("".join(lines), encoding="utf-8")


def verify(directory: Path, names: Iterable[str] | None = None) -> None:
    """Compare files with their checksums: those of `names` that exist, or all that there are or should be.

    Raises DamagedError. A directory that has no checksums passes.
    """
    try:
        text = (directory / CHECKSUMS).read_bytes().decode("utf-8", "replace")
    except FileNotFoundError:
        return
    sums = {name: digest for digest, name in _LINE.findall(text)}
    place = "/".join(directory.parts[-2:])
    if text != "".join(f"{digest}  {name}\n" for name, digest in sums.items()):
        raise DamagedError(f"{place}/{CHECKSUMS} is damaged: it is no list of checksums")
    for name in dict.fromkeys([*sums, *_names(directory)]) if names is None else names:
        file = directory / name
        if name == CHECKSUMS or (names is not None and not file.exists()):
            continue
        why = "" if file.is_file() else "it is missing"
        if not why and name not in sums:
            why = f"{CHECKSUMS} does not list it"
        elif not why and _sum(file) != sums[name]:
            why = f"it is not what {CHECKSUMS} says"
        if why:
            raise DamagedError(
                f"{place}/{name} is damaged: {why}. Take another copy of these files; if they were changed "
                f"on purpose, delete {CHECKSUMS}"
            )


def _names(directory: Path) -> list[str]:
    files = (path for path in directory.rglob("*") if path.is_file())
    return sorted(name for file in files if (name := file.relative_to(directory).as_posix()) != CHECKSUMS)


def _sum(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def directory_bytes(location: str | Path) -> int:
    """The size of all files below; those that are deleted meanwhile do not count."""
    total = 0
    for place, _, files in os.walk(location):
        for file in files:
            with contextlib.suppress(FileNotFoundError):
                total += os.lstat(os.path.join(place, file)).st_size
    return total


def sync_path(path: str | Path) -> None:
    """Flush one file, or the entries of one directory, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_tree(location: str | Path) -> None:
    """Flush everything below `location`, files before the directories that name them."""
    for directory, _, files in os.walk(location, topdown=False):
        for name in files:
            sync_path(Path(directory) / name)
        sync_path(directory)

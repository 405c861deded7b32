"""Directories that appear whole or not at all, and whether their bytes have reached the disk.

Promises: a directory is written under a temporary name, flushed and renamed, so a crash leaves either the old
state or the new one. Knows nothing of what the files hold.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
from collections.abc import Generator
from pathlib import Path


class LocationExistsError(FileExistsError):
    """There is something at the location already."""


@contextlib.contextmanager
def atomic_directory(location: str | Path, *, overwrite: bool = False, sync: bool = True) -> Generator[Path]:
    """A temporary directory to write into; it becomes `location` on success and is removed on failure.

    Raises LocationExistsError if `location` exists and `overwrite` is not given.
    """
    target = Path(location)
    if target.exists() and not overwrite:
        raise LocationExistsError(f"{target} already exists; choose another name")
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.tmp")
    temporary.mkdir()
    try:
        yield temporary
        if sync:
            sync_tree(temporary)
        replace_directory(temporary, target)
        if sync:
            sync_path(target.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def replace_directory(source: Path, target: Path) -> None:
    """Rename `source` to `target`; a directory that is there is moved aside first and deleted afterwards."""
    if not target.exists():
        source.rename(target)
        return
    replaced = source.with_suffix(".old")
    target.rename(replaced)
    source.rename(target)
    shutil.rmtree(replaced)


def directory_bytes(location: str | Path) -> int:
    """The size of all files below `location`."""
    return sum(path.stat().st_size for path in Path(location).rglob("*") if path.is_file())


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

"""Directories that appear whole or not at all: a crash leaves either the old state or the new one."""

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
        replaced = temporary.with_suffix(".old")
        if target.exists():
            target.rename(replaced)
        temporary.rename(target)
        shutil.rmtree(replaced, ignore_errors=True)
        if sync:
            sync_path(target.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


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

"""Files of this machine: locks that end with their process, and writes that happen whole or not at all."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Callable, Generator
from pathlib import Path
from typing import BinaryIO

ByteProgress = Callable[[int, int | None], None]  # bytes done, and in all if known


def try_lock(descriptor: int) -> bool:
    """Lock an open file unless another process has it; closing the file unlocks it."""
    try:
        if sys.platform == "win32":
            import msvcrt

            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def append_whole(path: Path, data: bytes) -> int:
    """Add all of `data` to a file or, where the disk is full, nothing of it; returns the file's size."""
    with open(path, "ab", buffering=0) as file:
        size = file.tell()
        if file.write(data) < len(data):
            file.truncate(size)
            raise OSError("no space is left for it")
    return size + len(data)


@contextlib.contextmanager
def replacing(path: Path, *, mode: int = 0o644, sync: bool = False) -> Generator[BinaryIO]:
    """A file to write, which takes the place of `path` on success: readers see the old content or the new."""
    handle, part = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            if sync:
                file.flush()
                os.fsync(handle)
        os.chmod(part, mode)
        os.replace(part, path)
    except BaseException:
        Path(part).unlink(missing_ok=True)
        raise

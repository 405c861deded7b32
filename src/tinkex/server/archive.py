"""A directory as one tar file, written while it is sent.

Promises: plain tar, the directory's regular files at its root, no links in it; its length is known before the
first byte; what was begun is sent whole though the directory be deleted meanwhile. Knows no HTTP.
"""

from __future__ import annotations

import contextlib
import os
import stat
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

_CHUNK = 1024 * 1024
_END = bytes(2 * tarfile.BLOCKSIZE)


class Archive:
    """The files of `directory`, open from now on: deleting them no longer matters. Iterating closes them."""

    def __init__(self, directory: Path) -> None:
        self._entries: list[tuple[bytes, BinaryIO, int]] = []  # header, file, size
        with contextlib.ExitStack() as opened:
            for name in sorted(os.listdir(directory)):
                if not stat.S_ISREG((directory / name).lstat().st_mode):
                    continue
                file = opened.enter_context(open(directory / name, "rb"))
                about = os.fstat(file.fileno())
                entry = tarfile.TarInfo(name)
                entry.size, entry.mtime, entry.mode = about.st_size, int(about.st_mtime), 0o644
                self._entries.append((entry.tobuf(tarfile.PAX_FORMAT), file, about.st_size))
            self._files = opened.pop_all()

    @property
    def length(self) -> int:
        return sum(len(head) + size + _padding(size) for head, _, size in self._entries) + len(_END)

    def __iter__(self) -> Iterator[bytes]:
        with self._files:
            for head, file, size in self._entries:
                yield head
                yield from _content(file, size)
                yield bytes(_padding(size))
            yield _END


def _padding(size: int) -> int:
    return -size % tarfile.BLOCKSIZE


def _content(file: BinaryIO, size: int) -> Iterator[bytes]:
    while size:
        chunk = file.read(min(_CHUNK, size))
        if not chunk:
            raise OSError(f"{file.name} became shorter while it was sent")
        size -= len(chunk)
        yield chunk

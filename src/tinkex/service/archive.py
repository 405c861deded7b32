"""A directory as one tar file: streamed, or kept below the home while its link works.

Plain tar with the directory's regular files at its root. Its length is known before the first byte. A kept
archive is written atomically, and is deleted with its link, its directory or its process.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import os
import shutil
import stat
import tarfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from tinkex.files import replacing
from tinkex.service.home import Home
from tinkex.service.refusal import Caller
from tinkex.store import directory_bytes, verify

LINK_LIFE = 3600.0  # seconds for which a download link works
# Makes a path below the home downloadable until a time, a directory as a tar; returns a URL.
Link = Callable[[Caller, Path, float], str]
_CHUNK = 1024 * 1024
_END = bytes(2 * tarfile.BLOCKSIZE)


class Archive:
    """The files of `directory`. They are opened at once, so they may be deleted; iterating closes them.

    Raises DamagedError if one of them is not what its checksum says. Blocks while it reads them.
    """

    def __init__(self, directory: Path) -> None:
        verify(directory)
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

    def close(self) -> None:
        """Close the files without reading them."""
        self._files.close()

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


class Archives:
    """Archives for programs of this machine, in `archives` of the home.

    Each process keeps its own archives, at most one of each directory, and never removes another's. The next
    process removes what a killed one left, once no link to it can work any more.
    """

    def __init__(self, home: Home) -> None:
        self._home, self._place = home, home.root / "archives"
        self._process = os.getpid()
        self._mine = f"{self._process}-{uuid.uuid4().hex}"
        atexit.register(self.clear)

    def link(self, caller: Caller, path: Path, expires: float) -> str:
        """A file: URL for a program of this machine; blocks while a directory is packed."""
        if path.is_dir():
            self._home.check_disk(directory_bytes(path))
            path = self.pack(path)
        return path.absolute().as_uri()

    def pack(self, directory: Path) -> Path:
        """Write an archive of `directory`, in place of the last one; blocks."""
        self.sweep()
        self._place.mkdir(mode=0o700, parents=True, exist_ok=True)
        place = self._place / f"{_digest(directory)}-{self._mine}.tar"
        with replacing(place, mode=0o600) as out:
            out.writelines(Archive(directory))
        return place

    def room(self, name: str) -> Path:
        """An empty directory, for something that is downloaded and removed like an archive."""
        self.sweep()
        place = self._place / f"{name}-{self._mine}"
        _delete(place)
        place.mkdir(mode=0o700, parents=True)
        return place

    def remove(self, room: Path) -> None:
        _delete(room)

    def forget(self, directory: Path) -> None:
        """Remove every process's archive of `directory`, which is no more."""
        self._remove(f"{_digest(directory)}-*.tar")

    def sweep(self) -> None:
        """Remove those whose links no longer work, and what a killed process was writing."""
        long_ago = time.time() - LINK_LIFE
        for file in self._place.glob("*"):
            with contextlib.suppress(FileNotFoundError):  # another process sweeps too
                if file.stat().st_mtime <= long_ago:
                    _delete(file)

    def clear(self) -> None:
        """Remove this process's own; in a forked child they are its parent's."""
        if os.getpid() == self._process:
            self._remove(f"*-{self._mine}*")

    def _remove(self, pattern: str) -> None:
        for file in self._place.glob(pattern):
            _delete(file)


def _delete(place: Path) -> None:
    if place.is_dir():
        shutil.rmtree(place, ignore_errors=True)
    else:
        place.unlink(missing_ok=True)


def _digest(directory: Path) -> str:
    """A file name for it: the names in its path may be as long as a file name can be."""
    return hashlib.sha256(os.fsencode(directory.absolute())).hexdigest()[:32]

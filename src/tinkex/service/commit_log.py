"""A server's log of what it has appended to its files, as numbered objects of a shared store.

Objects are numbered and created with conditional puts. A server that takes over writes the next number itself
(the seal), so a late write by the old owner fails and everything it acknowledged precedes the seal. Damage is
a JournalError with the object's name. Everything blocks. Knows nothing of what the files mean.
"""

from __future__ import annotations

import json
import os
import struct
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import NamedTuple
from zlib import crc32

from tinkex import store
from tinkex.service.runs.segments import JournalError

_MAGIC = b"tinkex commits 1\n"
_HEAD = struct.Struct("<II")  # bytes of the JSON head, and a checksum of head and body
OBJECT_BYTES = 32 << 20  # of one object, unless one piece is larger
PATIENCE = 60.0  # seconds for which a store that cannot be reached is tried again
GONE = -1  # as a piece's offset: the file was deleted


class Piece(NamedTuple):
    """Bytes appended to a file, which ended at `offset` before; `path` is relative to the home."""

    path: str
    at: int
    data: bytes


class SealedError(JournalError):
    """Another server has ended this log."""


class _Object(NamedTuple):
    writer: str
    seal: bool
    first: int  # the first object that is still needed
    pieces: list[Piece]


def _encode(writer: str, first: int, pieces: list[Piece], *, seal: bool = False) -> bytes:
    head = json.dumps([writer, seal, first, [[path, at, len(data)] for path, at, data in pieces]]).encode()
    content = b"".join([head, *(piece.data for piece in pieces)])
    return _MAGIC + _HEAD.pack(len(head), crc32(content)) + content


def _read(name: str) -> _Object:
    stored = store.read_file(name)
    start = len(_MAGIC) + _HEAD.size
    if not stored.startswith(_MAGIC) or len(stored) < start:
        raise JournalError(f"{name} is damaged: it does not begin as a log of commits does")
    length, check = _HEAD.unpack_from(stored, len(_MAGIC))
    if crc32(memoryview(stored)[start:]) != check:
        raise JournalError(f"{name} is damaged: it is not what was written")
    writer, seal, first, described = json.loads(stored[start : start + length])
    at, pieces = start + length, list[Piece]()
    for path, offset, size in described:
        pieces.append(Piece(path, offset, stored[at : at + size]))
        at += size
    return _Object(writer, seal, first, pieces)


class CommitLog:
    """The log of one server, by the server itself."""

    def __init__(self, root: str, server: str, *, sync: bool = True) -> None:
        self._place, self._server, self._sync = log_place(root, server), server, sync
        self._next = self._first = 1
        self.size = 0  # bytes since `begin_anew`

    def append(self, pieces: Iterable[Piece]) -> None:
        """Keep these pieces. SealedError if another server has taken over."""
        batch, size = list[Piece](), 0
        for piece in pieces:
            if batch and size + len(piece.data) > OBJECT_BYTES:
                self._create(batch)
                batch, size = [], 0
            batch.append(piece)
            size += len(piece.data)
        self._create(batch)

    def _create(self, pieces: list[Piece]) -> None:
        """Write the next object; again, if the store cannot be reached meanwhile."""
        name, content = f"{self._place}/{self._next:08d}", _encode(self._server, self._first, pieces)
        until = time.monotonic() + PATIENCE
        while True:
            try:
                with suppress(store.LocationExistsError):
                    store.create_file(name, content, sync=self._sync)
                    break
                if store.read_file(name) == content:  # an answer was lost, and it was sent again
                    break
                raise SealedError(f"{name} was written by another server")
            except store.StoreError:
                if time.monotonic() > until:
                    raise
                time.sleep(0.5)
        self._next += 1
        self.size += len(content)

    def begin_anew(self, pieces: Iterable[Piece]) -> None:
        """Keep all that is still needed, and then delete what was written before."""
        old, self.size = range(self._first, self._next), 0
        first = self._next
        self.append(pieces)
        self._first = first
        self.append([])  # from here on, whoever reads the log begins there
        with suppress(store.StoreError):  # what stays is in nobody's way, and goes with the log
            for number in old:
                store.remove_file(f"{self._place}/{number:08d}")


def log_place(root: str, server: str) -> str:
    return store.join(root, f"journal/{server}")


def seal(root: str, ended: str, by: str) -> list[Piece]:
    """End the log of a server, and read it: its pieces, in order."""
    place = log_place(root, ended)
    last = max((int(name) for name in store.files(place) if name.isdigit()), default=0)
    while not last or not _read(f"{place}/{last:08d}").seal:
        try:
            store.create_file(f"{place}/{last + 1:08d}", _encode(by, 0, [], seal=True))
        except store.LocationExistsError:
            pass  # its server was quicker, or another one seals it too
        last += 1
    try:
        first = _read(f"{place}/{last - 1:08d}").first
    except FileNotFoundError:
        return []  # it never wrote, or what it wrote is on another log by now
    return [piece for n in range(first, last) for piece in _read(f"{place}/{n:08d}").pieces]


def forget(root: str, ended: str) -> None:
    """Delete the log of a server that another one has taken over; the seal stays, for it may yet wake up."""
    place = log_place(root, ended)
    for name in reversed(sorted(store.files(place))[:-1]):  # the last one first: see `seal`
        store.remove_file(f"{place}/{name}")


def write_pieces(home: Path, pieces: list[Piece]) -> set[Path]:
    """Write a log's pieces into the files of a home; returns the files that then exist."""
    written = set[Path]()
    for path, at, data in pieces:
        parts = PurePosixPath(path).parts
        if not parts or ".." in parts or parts[0] == "/":
            raise JournalError(f"a log of commits names a file outside of the home: {path!r}")
        file = home.joinpath(*parts)
        if at == GONE:
            file.unlink(missing_ok=True)
            written.discard(file)
            continue
        file.parent.mkdir(parents=True, exist_ok=True)
        with open(os.open(file, os.O_RDWR | os.O_CREAT, 0o600), "r+b") as opened:
            opened.truncate(at)
            opened.seek(at)
            opened.write(data)
        written.add(file)
    return written

"""An append-only log of records in numbered segment files. A journal consists of two.

A record is a JSON head and a body: a pickle with its arrays out of band, because copying them would hold the
interpreter lock for long. Damage raises JournalError with its file and offset.
"""

from __future__ import annotations

import errno
import io
import json
import os
import pickle
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol
from zlib import crc32

from tinkex.errors import TinkerError
from tinkex.store import sync_path

_MAGIC = b"tinkex journal 2\n"
_OLDER = b"tinkex journal 1\n"
# Lengths of head and body, a checksum of both, and one of this header: a length that was damaged must not
# be taken for a record that was cut off.
_LENGTHS = struct.Struct("<IQI")
_CHECK = struct.Struct("<I")
_HEADER_BYTES = _LENGTHS.size + _CHECK.size
_COUNT = struct.Struct("<Q")  # of the parts of a body; their sizes follow, then they themselves
_WRITE_BYTES = 1 << 20  # small parts are joined up to this before they are written
# Classes as journals of earlier versions name them, and the modules they are in now.
_MOVED = {("tinkex.service.jobs", "Unreadable"): "tinkex.service.runs.execution"}

Bytes = bytes | memoryview


class JournalError(TinkerError):
    """A journal that cannot be read or written; the message names the file."""


class JournalFullError(JournalError):
    """There is no space for the record. The journal is as it was before."""


@dataclass(frozen=True)
class Record:
    """One record, and where its body is."""

    head: list[Any]
    segment: int
    path: Path
    offset: int
    length: int

    def body(self) -> bytes:
        with self.path.open("rb") as file:
            file.seek(self.offset)
            return file.read(self.length)

    def unpickle(self) -> Any:
        try:
            return unpack(self.body())
        except (OSError, MemoryError):
            raise  # that is not the record's fault
        except Exception as error:
            raise JournalError(
                f"{self.path}: what the record at byte {self.offset} holds cannot be read by this version of "
                f"Tinkex ({type(error).__name__}: {error})"
            ) from error


def pack(value: Any) -> list[Bytes]:
    """A value as the pieces of a body: a table of sizes, its pickle, and its arrays, uncopied."""
    arrays: list[memoryview] = []

    def keep(array: pickle.PickleBuffer) -> None:
        arrays.append(array.raw())  # being Python, it also lets other threads have a turn at every array

    parts = [pickle.dumps(value, protocol=5, buffer_callback=keep), *arrays]
    return [_COUNT.pack(len(parts)) + struct.pack(f"<{len(parts)}Q", *map(len, parts)), *parts]


def unpack(body: bytes) -> Any:
    """The value of a body. Its arrays are read-only views of the body."""
    (count,) = _COUNT.unpack_from(body)
    sizes = struct.unpack_from(f"<{count}Q", body, _COUNT.size)
    at, view = _COUNT.size * (1 + count), memoryview(body)
    parts: list[memoryview] = []
    for size in sizes:
        parts.append(view[at : at + size])
        at += size
    return _Unpickler(io.BytesIO(parts[0]), buffers=parts[1:]).load()


class _Unpickler(pickle.Unpickler):
    """Finds classes where they are now."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        return super().find_class(_MOVED.get((module_name, global_name), module_name), global_name)


def _parse(file: BinaryIO, left: int) -> tuple[list[Any], int, int] | None:
    """The record that begins here: its head, its body's bytes, its bytes in all; None if it is cut off."""
    header = file.read(_HEADER_BYTES)
    if len(header) < _HEADER_BYTES:
        return None
    if header[_LENGTHS.size :] != _CHECK.pack(crc32(header[: _LENGTHS.size])):
        if not any(header) and not any(file.read()):
            return None  # zeros up to the end: what a power cut makes of a record not yet on the disk
        raise ValueError("a record's header is not what was written")
    head_bytes, body_bytes, check = _LENGTHS.unpack_from(header)
    total = _HEADER_BYTES + head_bytes + body_bytes
    if total > left:
        return None
    content = file.read(head_bytes + body_bytes)
    if crc32(content) != check:
        raise ValueError("a record is not what was written")
    return json.loads(content[:head_bytes]), body_bytes, total


class DiskSyncs(Protocol):
    """Syncs what was written to the disk; group_commit.py implements it."""

    def wrote(self, path: Path) -> None: ...

    def appended(self, path: Path, at: int, data: bytes) -> None: ...

    def names(self, path: Path) -> bool: ...


class SegmentedLog:
    """An append-only log of records, in the files NAME-000001.log, NAME-000002.log, … of a directory.

    `append` returns when the kernel has the whole record, and otherwise leaves the log as it was. `disk` is
    then given what to sync; without it nothing is synced. Only the last record of the last segment may be cut
    off, and is then ignored: a segment is on the disk before the next one begins.
    """

    def __init__(
        self, directory: Path, name: str, disk: DiskSyncs | None = None, segment_bytes: int = 0
    ) -> None:
        self.directory = directory
        self.name = name
        self._disk = disk
        self._segment_bytes = segment_bytes
        self._sizes = {
            int(path.stem.rpartition("-")[2]): path.stat().st_size for path in directory.glob(f"{name}-*.log")
        }
        self._last = max(self._sizes, default=0)
        self._end = 0  # of the last segment's last whole record, once that is read
        self._file: int | None = None  # a descriptor of the last segment, while it is being written
        self._open_path = directory
        self._broken = False

    @property
    def size(self) -> int:
        return sum(self._sizes.values())

    @property
    def open_path(self) -> Path | None:
        """The segment being written, if there is one: those before it are on the disk."""
        return None if self._file is None else self._open_path

    def closed_segments(self) -> list[int]:
        """Those that nothing will be appended to any more, oldest first."""
        return sorted(n for n in self._sizes if n != self._last or self._file is None)

    def path(self, segment: int) -> Path:
        return self.directory / f"{self.name}-{segment:06d}.log"

    def read(self) -> list[Record]:
        """All records, without their bodies."""
        return [record for segment in sorted(self._sizes) for record in self._read(segment)]

    def _read(self, segment: int) -> Iterator[Record]:
        path, size, is_last = self.path(segment), self._sizes[segment], segment == self._last
        with path.open("rb") as file:
            magic = file.read(len(_MAGIC))
            if magic == _OLDER:
                raise JournalError(
                    f"{path} is from an older version of Tinkex, which alone can go on with it"
                )
            if magic != _MAGIC and not (is_last and size < len(_MAGIC) and _MAGIC.startswith(magic)):
                raise JournalError(f"{path} is damaged at byte 0: it does not begin as a journal does")
            self._end = len(_MAGIC)
            while self._end < size:
                at = f"{path} is damaged at byte {self._end}"
                try:
                    parsed = _parse(file, size - self._end)
                except ValueError as error:
                    raise JournalError(f"{at}: {error}") from None
                if parsed is None:
                    if is_last:
                        return
                    raise JournalError(f"{at}: a record is cut off")
                head, body_bytes, total = parsed
                self._end += total
                yield Record(head, segment, path, self._end - body_bytes, body_bytes)

    def repair(self) -> None:
        """Remove a last record that `read` found cut off, so that it does not come to stand in the middle."""
        size = self._sizes.get(self._last, self._end)
        if size < len(_MAGIC) and self._sizes:
            self.delete(self._last)
        elif self._end < size:
            os.truncate(self.path(self._last), self._end)
            self._sizes[self._last] = self._end
        if self._disk is not None:  # the process before may have been killed before it synced these
            if self._last in self._sizes:
                sync_path(self.path(self._last))
            sync_path(self.directory)

    def append(self, head: list[Any], body: Iterable[Bytes] = ()) -> Record:
        """Add a record; `body` comes in pieces (see `pack`)."""
        front, length = json.dumps(head).encode(), 0
        check = crc32(front)
        for piece in body:
            check, length = crc32(piece, check), length + len(piece)
        lengths = _LENGTHS.pack(len(front), length, check)
        if self._file is not None and self._sizes[self._last] >= self._segment_bytes:
            self.rotate()
        if self._file is None:
            self._open()
        self._write(lengths + _CHECK.pack(crc32(lengths)), front, *body)
        return Record(head, self._last, self._open_path, self._sizes[self._last] - length, length)

    def _open(self) -> None:
        number = self._last + 1
        while self._disk is not None and self._disk.names(self.path(number)):
            number += 1  # one was deleted, and may yet be written again after a power cut
        path = self.path(number)
        try:
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
        except OSError as error:
            raise _cannot_write(path, error) from error
        self._last, self._open_path = number, path
        self._sizes[self._last] = 0
        if self._disk is not None:
            self._disk.wrote(self.directory)
        self._write(_MAGIC)

    def _write(self, *parts: Bytes) -> None:
        """All or nothing, at the end of the open segment."""
        path = self._open_path
        if self._broken:
            raise JournalError(f"{path} could not be written before: restart to go on")
        assert self._file is not None
        piece, at = b"", self._sizes[self._last]
        try:
            for piece in _joined(parts):
                rest = memoryview(piece)
                while rest:
                    rest = rest[os.write(self._file, rest) :]
        except OSError as error:
            self._undo(self._file)
            raise _cannot_write(path, error) from error
        size = sum(map(len, parts))
        self._sizes[self._last] += size
        if self._disk is not None and len(piece) == size:
            self._disk.appended(path, at, piece)
        elif self._disk is not None:
            self._disk.wrote(path)

    def _undo(self, file: int) -> None:
        try:
            os.ftruncate(file, self._sizes[self._last])
            if not self._sizes[self._last]:  # without its first line a segment is none
                self.close()
                self.delete(self._last)
        except OSError:
            self._broken = True  # half a record is there, and only as the last one is it harmless

    def rotate(self) -> None:
        """Let the next record begin a new segment."""
        if self._disk is not None:
            self.sync()
        self.close()

    def sync(self) -> None:
        """Put the segment being written on the disk."""
        if self._file is not None:
            os.fsync(self._file)

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def delete(self, segment: int) -> None:
        os.unlink(self.path(segment))
        del self._sizes[segment]
        if self._disk is not None:
            self._disk.wrote(self.path(segment))


def _joined(parts: Iterable[Bytes]) -> Iterator[bytes]:
    """The same bytes in fewer pieces, none of which takes long to join."""
    waiting: list[Bytes] = []
    size = 0
    for part in parts:
        waiting.append(part)
        size += len(part)
        if size >= _WRITE_BYTES:
            yield b"".join(waiting)
            waiting, size = [], 0
    yield b"".join(waiting)


def _cannot_write(path: Path, error: OSError) -> JournalError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return JournalFullError(f"no space left to write {path}: free some; what was accepted is safe")
    return JournalError(f"{path} cannot be written: {error}")

"""The journal of one run: its accepted requests and their outcomes, on disk.

After `kill -9` at any point (after a power cut too, with `fsync`) `restore` finds everything that `accept`
and `resolve` returned from. A record cut off in mid-write is dropped, since no client was told of it; a
damaged one raises JournalError with its file and offset. There are two logs: requests are large and needed
until a snapshot covers them, outcomes are small and needed until they are delivered. Bodies are pickles:
whoever can write to the home directory can already do anything that we can. Knows nothing of engines.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tinkex.service.runs.segments import JournalError, JournalFullError, Record, SegmentedLog, pack
from tinkex.store import sync_path

__all__ = ["Journal", "JournalEntry", "JournalError", "JournalFullError", "Restored", "delete", "restore"]

SEGMENT_BYTES = 16 << 20


@dataclass(frozen=True)
class JournalEntry:
    """One accepted request. `digest` is for telling a repeated request from another one."""

    seq_id: int
    request_id: str
    op: str
    request: Any
    accepted_at: float
    digest: bytes = b""


@dataclass(frozen=True)
class Restored:
    """What a run needs to go on.

    Load `snapshot` (None: create the adapter), then execute `entries` in order. One whose id is in `done` was
    executed before, so a seq id missing below it was given up for good; if its outcome is in `outcomes`, that
    one holds, whatever the replay computes. `undelivered` are the entries below `next_seq` whose outcomes are
    still to be fetched, without their requests: a client may send one again and must get the same id.
    """

    snapshot: Path | None = None
    next_seq: int = 0  # the first seq id that the snapshot does not cover
    entries: list[JournalEntry] = field(default_factory=list[JournalEntry])
    outcomes: dict[str, Any] = field(default_factory=dict[str, Any])
    done: frozenset[str] = frozenset()
    undelivered: list[JournalEntry] = field(default_factory=list[JournalEntry])


class Journal:
    """The open journal of a live run. Methods may be called from any thread.

    >>> journal.accept(JournalEntry(7, "r7", "optim_step", request, now))  # before anybody may execute it
    >>> journal.resolve("r7", result)                               # before anybody is told
    >>> part = journal.begin_snapshot(next_seq=8)                   # what is saved there has 7 in it
    >>> trainer.submit(SaveAdapter(run, str(part / "adapter"), optimizer=True)).result()
    >>> journal.commit_snapshot(part)
    """

    def __init__(self, directory: Path, *, fsync: bool = False, segment_bytes: int = SEGMENT_BYTES) -> None:
        """Open or create; goes on after whatever is there (see `restore`)."""
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self._fsync = fsync
        self._lock = threading.Lock()
        self._requests = SegmentedLog(directory, "requests", fsync=fsync, segment_bytes=segment_bytes)
        self._results = SegmentedLog(directory, "results", fsync=fsync, segment_bytes=segment_bytes)
        self._index = _Index()
        self._index.read(self._requests, self._results)
        self._requests.repair()
        self._results.repair()
        self.snapshot, self.next_seq = _latest_snapshot(directory)
        self._begun: tuple[Path, int] | None = None
        self._trim()

    @property
    def replay_bytes(self) -> int:
        """How much of requests is kept: what a restart may have to read and do again."""
        with self._lock:
            return self._requests.size

    # -- requests and outcomes ---------------------------------------------------------------------------

    def accept(self, entry: JournalEntry) -> None:
        """Keep a request. Do this before it can be executed, and before its client hears of it."""
        request = pack(entry.request)
        with self._lock:
            if entry.seq_id < self.next_seq:
                raise ValueError(f"seq id {entry.seq_id} is below the snapshot's {self.next_seq}")
            assert entry.request_id not in self._index.known, f"{entry.request_id} is accepted already"
            self._index.accepted(self._requests.append(["accept", *_described(entry)], request))

    def resolve(self, request_id: str, outcome: Any) -> None:
        """Keep a request's outcome. The first one holds; that of a trimmed request is not kept."""
        content = pack(outcome)
        with self._lock:
            entry = self._index.known.get(request_id)
            if entry is not None and not self._index.done(request_id):
                self._index.resolved(self._results.append(["resolve", *_described(entry)], content))

    def forget(self, request_ids: Iterable[str]) -> None:
        """Write a tombstone: these outcomes were delivered, or have expired."""
        with self._lock:
            self._forget(request_ids)

    def _forget(self, request_ids: Iterable[str]) -> None:
        index = self._index
        ids = [i for i in request_ids if i in index.known and i not in index.forgotten]
        if ids:
            index.forgot(self._results.append(["forget", *ids]))

    # -- snapshots ---------------------------------------------------------------------------------------

    def begin_snapshot(self, next_seq: int) -> Path:
        """An empty directory for a snapshot that covers every seq id below `next_seq`.

        Requests and outcomes may be added while it is filled. One begun before and not committed is void.
        """
        with self._lock:
            assert next_seq >= self.next_seq, f"the last snapshot covers more: {self.next_seq} > {next_seq}"
            self._sweep(keep=self.snapshot)
            number = 1 if self.snapshot is None else int(self.snapshot.name.split("-")[1]) + 1
            part = self.directory / f"part-{number:06d}-{next_seq}"
            os.mkdir(part)
            self._requests.rotate()  # what comes from now on is not covered: keep it apart, to trim the rest
            self._begun = part, next_seq
            return part

    def commit_snapshot(self, path: Path, delivered: Iterable[str] = ()) -> None:
        """From now on a restart begins here; what only led up to it is deleted.

        So are the outcomes of those requests among `delivered` that it covers: neither a client nor a replay
        will need them. What is in `path` must be on the disk by now. JournalError if the outcome of a
        request that it covers was not kept: that could never be delivered.
        """
        with self._lock:
            begun, next_seq = self._begun or (None, 0)
            assert begun == path, f"{path} is not the snapshot begun last ({begun})"
            for entry in self._index.unresolved(self.next_seq, next_seq):
                raise JournalError(
                    f"{path} covers seq id {entry.seq_id}, but {entry.request_id} has no outcome recorded"
                )
            snapshot = path.with_name(path.name.replace("part", "snapshot", 1))
            os.rename(path, snapshot)  # the one moment at which it becomes the snapshot
            if self._fsync:
                sync_path(self.directory)
            self.snapshot, self.next_seq, self._begun = snapshot, next_seq, None
            known = self._index.known
            self._forget([i for i in delivered if i in known and known[i].seq_id < next_seq])
            self._trim()

    def _trim(self) -> None:
        self._sweep(keep=self.snapshot)
        self._index.trim(self._requests, self._results, self.next_seq)

    def _sweep(self, keep: Path | None) -> None:
        for old in (*self.directory.glob("snapshot-*"), *self.directory.glob("part-*")):
            if old != keep:
                shutil.rmtree(old)

    # -- the end -----------------------------------------------------------------------------------------

    def restored(self) -> Restored:
        """What was there when the journal was opened, as a run needs it to go on."""
        with self._lock:
            return _restored(self._index, self.snapshot, self.next_seq)

    def close(self) -> None:
        with self._lock:
            self._requests.close()
            self._results.close()


def delete(directory: Path) -> None:
    """Remove a journal, be it damaged. Killed halfway, this leaves nothing that looks like a journal."""
    gone = directory.with_name(f"{directory.name}.deleted")
    shutil.rmtree(gone, ignore_errors=True)
    os.rename(directory, gone)
    shutil.rmtree(gone)


def restore(directory: Path) -> Restored:
    """What the journal in `directory` holds, without opening it. JournalError if it is damaged."""
    if not directory.is_dir():
        return Restored()
    index = _Index()
    index.read(SegmentedLog(directory, "requests"), SegmentedLog(directory, "results"))
    return _restored(index, *_latest_snapshot(directory))


def _restored(index: _Index, snapshot: Path | None, next_seq: int) -> Restored:
    entries = [
        replace(index.known[i], request=record.unpickle())
        for i, record in index.requests.items()
        if index.known[i].seq_id >= next_seq
    ]
    kept = [i for i in index.results if i not in index.forgotten]
    return Restored(
        snapshot,
        next_seq,
        sorted(entries, key=lambda entry: entry.seq_id),
        outcomes={i: index.results[i].unpickle() for i in kept},
        done=frozenset(entry.request_id for entry in entries if index.done(entry.request_id)),
        undelivered=[index.known[i] for i in kept if index.known[i].seq_id < next_seq],
    )


def _latest_snapshot(directory: Path) -> tuple[Path | None, int]:
    latest = max(directory.glob("snapshot-*"), key=lambda path: int(path.name.split("-")[1]), default=None)
    return latest, 0 if latest is None else int(latest.name.split("-")[2])


# -- what the records say --------------------------------------------------------------------------------


def _described(entry: JournalEntry) -> list[Any]:
    return [entry.seq_id, entry.request_id, entry.op, entry.accepted_at, entry.digest.hex()]


class _Index:
    """Which requests the two logs speak of, and in which records."""

    def __init__(self) -> None:
        self.known: dict[str, JournalEntry] = {}  # without their requests
        self.requests: dict[str, Record] = {}
        self.results: dict[str, Record] = {}
        self.forgotten: dict[str, Record] = {}

    def read(self, requests: SegmentedLog, results: SegmentedLog) -> None:
        for record in requests.read():
            self.accepted(record)
        for record in results.read():
            if record.head[0] == "resolve":
                self.resolved(record)
            else:
                self.forgot(record)

    def accepted(self, record: Record) -> None:
        self.requests[self._know(record)] = record

    def resolved(self, record: Record) -> None:
        self.results[self._know(record)] = record

    def forgot(self, record: Record) -> None:
        self.forgotten.update((request_id, record) for request_id in record.head[1:])

    def _know(self, record: Record) -> str:
        _, seq_id, request_id, op, accepted_at, digest = record.head
        self.known[request_id] = JournalEntry(
            seq_id, request_id, op, None, accepted_at, bytes.fromhex(digest)
        )
        return request_id

    def done(self, request_id: str) -> bool:
        return request_id in self.results or request_id in self.forgotten

    def unresolved(self, start: int, end: int) -> list[JournalEntry]:
        return [e for i, e in self.known.items() if start <= e.seq_id < end and not self.done(i)]

    # -- trimming ----------------------------------------------------------------------------------------

    def trim(self, requests: SegmentedLog, results: SegmentedLog, next_seq: int) -> None:
        """Delete the files that no restart will need, and forget what was in them alone."""
        covered = {i for i, entry in self.known.items() if entry.seq_id < next_seq}
        self.requests = {i: record for i, record in self.requests.items() if i not in covered}
        needed = {record.segment for record in self.requests.values()}
        for segment in requests.closed_segments():
            if segment not in needed:
                requests.delete(segment)
        for segment in results.closed_segments():  # oldest first: an outcome goes before its tombstone
            if not self._needed(segment):
                results.delete(segment)
                self._drop(segment)
        self.known = {i: e for i, e in self.known.items() if i in self.requests or i in self.results}

    def _needed(self, segment: int) -> bool:
        """Does it hold an outcome to be delivered, or the tombstone of one that would else reappear?"""
        outcomes = (i for i, record in self.results.items() if record.segment == segment)
        tombstones = (i for i, record in self.forgotten.items() if record.segment == segment)
        return any(i not in self.forgotten for i in outcomes) or any(
            i in self.requests or (i in self.results and self.results[i].segment != segment)
            for i in tombstones
        )

    def _drop(self, segment: int) -> None:
        self.results = {i: r for i, r in self.results.items() if r.segment != segment}
        self.forgotten = {i: r for i, r in self.forgotten.items() if r.segment != segment}

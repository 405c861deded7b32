"""The journal of one run: its accepted requests and their outcomes, on disk.

After `kill -9` at any point `restore` finds everything that `accept` and `resolve` returned from; after a
power cut, everything of it that was synced (see `disk`). A record cut off in mid-write is dropped, since it
was never acknowledged; a damaged one raises JournalError with its file and offset. There are two logs:
requests are large and needed until a snapshot covers them, outcomes are small and needed until they are
delivered. Bodies are pickles: anybody who can write to the home directory can already run code as the server.
Knows nothing of engines.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tinkex.service.runs.segments import DiskSyncs, JournalError, JournalFullError, Record, SegmentedLog, pack
from tinkex.store import sync_path

__all__ = ["Journal", "JournalEntry", "JournalError", "JournalFullError", "Restored", "delete", "restore"]

SEGMENT_BYTES = 16 << 20


@dataclass(frozen=True)
class JournalEntry:
    """One accepted request. `digest` distinguishes a repeated request from another one."""

    seq_id: int
    request_id: str
    op: str
    request: Any
    accepted_at: float
    digest: bytes = b""


@dataclass(frozen=True)
class Restored:
    """What a run needs to go on.

    Load `snapshot` (or create the adapter), then execute `entries` in order. Ids in `done` were executed
    before the crash, so a seq id missing below them was given up for good. If one has an outcome in
    `outcomes`, clients get that outcome, not the replay's. `undelivered` are the entries below `next_seq`
    whose outcomes are still to be fetched, without their requests: a client that repeats one gets its id.
    """

    snapshot: Path | None = None
    next_seq: int = 0  # the first seq id that the snapshot does not cover
    entries: list[JournalEntry] = field(default_factory=list[JournalEntry])
    outcomes: dict[str, Any] = field(default_factory=dict[str, Any])
    done: frozenset[str] = frozenset()
    tries: dict[str, int] = field(default_factory=dict[str, int])  # how often it was begun and not finished
    undelivered: list[JournalEntry] = field(default_factory=list[JournalEntry])


class _Contents:
    """What the directory of a journal holds: which requests its logs speak of, and in which records."""

    def __init__(self, directory: Path, disk: DiskSyncs | None = None, segment_bytes: int = 0) -> None:
        self.directory = directory
        self._requests = SegmentedLog(directory, "requests", disk, segment_bytes)
        self._results = SegmentedLog(directory, "results", disk, segment_bytes)
        self._known: dict[str, JournalEntry] = {}  # without their requests
        self._accepted: dict[str, Record] = {}
        self._resolved: dict[str, Record] = {}
        self._forgotten: dict[str, Record] = {}
        self._tries: dict[str, list[Record]] = {}
        for record in (*self._requests.read(), *self._results.read()):
            self._note(record)
        snapshots = {int(path.name.split("-")[1]): path for path in directory.glob("snapshot-*")}
        self.snapshot: Path | None = snapshots[max(snapshots)] if snapshots else None
        self.next_seq = 0 if self.snapshot is None else int(self.snapshot.name.split("-")[2])

    def _note(self, record: Record) -> None:
        kind, *rest = record.head
        if kind == "forget":
            self._forgotten.update(dict.fromkeys(rest, record))
            return
        if kind in ("begin", "interrupt"):
            for request_id in rest:
                self._tries.setdefault(request_id, []).append(record)
            return
        seq_id, request_id, op, accepted_at, digest = rest
        entry = JournalEntry(seq_id, request_id, op, None, accepted_at, bytes.fromhex(digest))
        self._known[request_id] = entry
        (self._accepted if kind == "accept" else self._resolved)[request_id] = record

    def _done(self, request_id: str) -> bool:
        return request_id in self._resolved or request_id in self._forgotten

    def _unfinished(self, request_id: str) -> int:
        kinds = [record.head[0] for record in self._tries.get(request_id, ())]
        return 0 if self._done(request_id) else kinds.count("begin") - kinds.count("interrupt")

    def restored(self) -> Restored:
        """What was there when the journal was opened, as a run needs it to go on."""
        entries = [
            replace(self._known[i], request=record.unpickle())
            for i, record in self._accepted.items()
            if self._known[i].seq_id >= self.next_seq
        ]
        kept = [i for i in self._resolved if i not in self._forgotten]
        return Restored(
            self.snapshot,
            self.next_seq,
            sorted(entries, key=lambda entry: entry.seq_id),
            outcomes={i: self._resolved[i].unpickle() for i in kept},
            done=frozenset(entry.request_id for entry in entries if self._done(entry.request_id)),
            tries={i: self._unfinished(i) for i in self._tries},
            undelivered=[self._known[i] for i in kept if self._known[i].seq_id < self.next_seq],
        )


def restore(directory: Path) -> Restored:
    """What the journal in `directory` holds, without opening it. JournalError if it is damaged."""
    return _Contents(directory).restored()


class Journal(_Contents):
    """The open journal of a live run. Methods may be called from any thread.

    >>> journal.accept(JournalEntry(7, "r7", "optim_step", request, now))  # before anybody may execute it
    >>> journal.resolve("r7", result)                               # before any client gets it
    >>> part = journal.begin_snapshot(next_seq=8)                   # what is saved there has 7 in it
    >>> trainer.submit(SaveAdapter(run, str(part / "adapter"), optimizer=True)).result()
    >>> journal.commit_snapshot(part)
    """

    def __init__(
        self, directory: Path, *, disk: DiskSyncs | None = None, segment_bytes: int = SEGMENT_BYTES
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        super().__init__(directory, disk, segment_bytes)
        self._disk = disk
        self._lock = threading.RLock()
        self._begun: tuple[Path, int] | None = None
        self._requests.repair()
        self._results.repair()
        self._trim()

    @property
    def replay_bytes(self) -> int:
        """How much of requests is kept: what a restart may have to read and do again."""
        with self._lock:
            return self._requests.size

    def accept(self, entry: JournalEntry) -> None:
        """Keep a request. Do this before it can be executed, and before its client hears of it."""
        request = pack(entry.request)
        with self._lock:
            if entry.seq_id < self.next_seq:
                raise ValueError(f"seq id {entry.seq_id} is below the snapshot's {self.next_seq}")
            assert entry.request_id not in self._known, f"{entry.request_id} is accepted already"
            self._note(self._requests.append(["accept", *_described(entry)], request))

    def begin(self, request_id: str) -> None:
        """Note that a request, or the next part of it, is about to be executed, in case that kills us."""
        with self._lock:
            self._note(self._requests.append(["begin", request_id]))

    def interrupt(self, request_id: str) -> None:
        """Note that a request, begun and not done, rests: if this process ends now, it is not to blame."""
        with self._lock:
            if not self._done(request_id):
                self._note(self._requests.append(["interrupt", request_id]))

    def resolve(self, request_id: str, outcome: Any) -> None:
        """Keep a request's outcome. The first one holds; that of a trimmed request is not kept."""
        if request_id in self._resolved:
            return  # a large outcome is kept early, on a thread
        content = pack(outcome)
        with self._lock:
            entry = self._known.get(request_id)
            if entry is not None and not self._done(request_id):
                self._note(self._results.append(["resolve", *_described(entry)], content))

    def forget(self, request_ids: Iterable[str]) -> None:
        """Write a tombstone: these outcomes were delivered, or have expired."""
        with self._lock:
            if ids := [i for i in request_ids if i in self._known and i not in self._forgotten]:
                self._note(self._results.append(["forget", *ids]))

    def begin_snapshot(self, next_seq: int) -> Path:
        """An empty directory for a snapshot of all seq ids below `next_seq`; one begun before is void."""
        self._sync(self._requests)  # what is left when it is rotated takes no time
        with self._lock:
            assert next_seq >= self.next_seq, f"the last snapshot covers more: {self.next_seq} > {next_seq}"
            self._sweep()
            number = 1 if self.snapshot is None else int(self.snapshot.name.split("-")[1]) + 1
            part = self.directory / f"part-{number:06d}-{next_seq}"
            os.mkdir(part)
            self._requests.rotate()  # what comes from now on is not covered: keep it apart, to trim the rest
            self._begun = part, next_seq
            return part

    def commit_snapshot(self, path: Path, delivered: Iterable[str] = ()) -> None:
        """From now on a restart begins here; requests that it covers are deleted.

        So are the outcomes among `delivered` that it covers. What is in `path` must be on the disk by now.
        JournalError if a request that it covers has no outcome: that could never be delivered.
        """
        with self._lock:
            begun, next_seq = self._begun or (None, 0)
            assert begun == path, f"{path} is not the snapshot begun last ({begun})"
            for request_id, entry in self._known.items():
                if self.next_seq <= entry.seq_id < next_seq and not self._done(request_id):
                    raise JournalError(
                        f"{path} covers seq id {entry.seq_id}, but {request_id} has no outcome recorded"
                    )
        self._sync(self._results)  # nothing can compute them again from here on
        snapshot = path.with_name(path.name.replace("part", "snapshot", 1))
        os.rename(path, snapshot)  # the one moment at which it becomes the snapshot
        if self._disk is not None:
            sync_path(self.directory)
            for record in snapshot.iterdir():  # to be in a store before what it replaces is gone there
                if record.is_file():
                    self._disk.wrote(record)
        with self._lock:
            self.snapshot, self.next_seq, self._begun = snapshot, next_seq, None
            self.forget([i for i in delivered if i in self._known and self._known[i].seq_id < next_seq])
            self._trim()

    def _sync(self, log: SegmentedLog) -> None:
        """Put a log on the disk, without holding up those who write to it."""
        with self._lock:
            path = log.open_path
        if self._disk is not None and path is not None:
            sync_path(path)

    def _sweep(self) -> None:
        for old in (*self.directory.glob("snapshot-*"), *self.directory.glob("part-*")):
            if old != self.snapshot:
                shutil.rmtree(old)

    def _trim(self) -> None:
        """Delete the files that no restart will need, and forget what was only in them."""
        self._sweep()
        self._accepted = {i: r for i, r in self._accepted.items() if self._known[i].seq_id >= self.next_seq}
        self._tries = {i: r for i, r in self._tries.items() if i in self._accepted and not self._done(i)}
        needed = {record.segment for record in self._accepted.values()}
        needed |= {record.segment for records in self._tries.values() for record in records}
        for segment in self._requests.closed_segments():
            if segment not in needed:
                self._requests.delete(segment)
        for segment in self._results.closed_segments():  # oldest first: an outcome goes before its tombstone
            if not self._needs(segment):
                self._results.delete(segment)
                self._resolved = {i: r for i, r in self._resolved.items() if r.segment != segment}
                self._forgotten = {i: r for i, r in self._forgotten.items() if r.segment != segment}
        self._known = {i: e for i, e in self._known.items() if i in self._accepted or i in self._resolved}

    def _needs(self, segment: int) -> bool:
        """Does it hold an outcome to be delivered, or the tombstone of one that would reappear without it?"""
        outcomes = (i for i, record in self._resolved.items() if record.segment == segment)
        tombstones = (i for i, record in self._forgotten.items() if record.segment == segment)
        return any(i not in self._forgotten for i in outcomes) or any(
            i in self._accepted or (i in self._resolved and self._resolved[i].segment != segment)
            for i in tombstones
        )

    def close(self) -> None:
        with self._lock:
            self._requests.close()  # whoever opens it next syncs what is not on the disk yet
            self._results.close()


def delete(directory: Path) -> None:
    """Remove a journal, even a damaged one. Killed halfway, this leaves nothing that looks like a journal."""
    gone = directory.with_name(f"{directory.name}.deleted")
    shutil.rmtree(gone, ignore_errors=True)
    os.rename(directory, gone)
    shutil.rmtree(gone)


def _described(entry: JournalEntry) -> list[Any]:
    return [entry.seq_id, entry.request_id, entry.op, entry.accepted_at, entry.digest.hex()]

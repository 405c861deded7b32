"""Group commit: one fsync makes the writes of many callers durable before any of them is acknowledged.

`wrote` registers files, `appended` registers short appends. `mark()` numbers the current round;
`reached(mark)` waits for it. Appends go to one log, `commits-….log`, which `replay` applies after a crash. A
file is synced before the log forgets it. After a failed fsync no round succeeds again: the kernel may have
dropped dirty pages. Without `power` every mark is 0, and nothing is synced.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue

from tinkex.service.refusal import Refusal
from tinkex.service.runs.segments import JournalError, SegmentedLog
from tinkex.store import sync_path

log = logging.getLogger("tinkex.service")
THREADS = 8  # a file system commits what is synced at the same time at once
LOG = "commits"
LOG_BYTES = 16 << 20  # of the log, before what it speaks of is synced and it begins anew
LOGGED_BYTES = 64 << 10  # of one append: a longer one is not worth writing twice
WAITING_BYTES = 1 << 20  # of the appends of one round: their files are synced instead of more
# Before a round whose writers waited for the one before: they are many, and more of them share the sync.
PAUSE = 0.001  # seconds
Append = tuple[Path, int, bytes]
Round = tuple[asyncio.AbstractEventLoop, Callable[[], None]]


class GroupCommit:
    """The syncs of one home. `wrote`, `appended` and `names` may be called from any thread."""

    def __init__(self, home: Path, *, power: bool) -> None:
        self.power = power
        self._home = home
        self._rounds = SimpleQueue[Round | None]()
        self._thread: threading.Thread | None = None
        self._threads = ThreadPoolExecutor(THREADS, "sync")
        self._lock = threading.Lock()
        self._unsynced: set[Path] = set()
        self._appends: list[Append] = []
        self._append_bytes = 0
        self._named: set[Path] = set()  # files that the log speaks of, or will
        self._log: SegmentedLog | None = None
        self._begun = self._done = 0  # rounds
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []
        self._pause: asyncio.TimerHandle | None = None
        self._problem = ""

    def wrote(self, path: Path) -> None:
        """This file was written, or the entries of this directory have changed."""
        if self.power:
            with self._lock:
                self._unsynced.add(path)

    def appended(self, path: Path, at: int, data: bytes) -> None:
        """This was written at the end of a file that only ever grows."""
        if not self.power:
            return
        with self._lock:
            if path in self._unsynced:
                return
            if len(data) > LOGGED_BYTES or self._append_bytes + len(data) > WAITING_BYTES:
                self._unsynced.add(path)
            else:
                self._appends.append((path, at, data))
                self._append_bytes += len(data)
                self._named.add(path)

    def names(self, path: Path) -> bool:
        """Whether a replay may write to this path."""
        return path in self._named

    def mark(self) -> int:
        """The round after which everything written so far is on the disk."""
        with self._lock:
            return self._begun + self._has_work()

    def _has_work(self) -> bool:
        return bool(self._unsynced or self._appends)

    async def reached(self, mark: int) -> None:
        """Wait for a round; Refusal if the disk does not take what it should hold."""
        if mark <= self._done:
            return
        if self._problem:
            raise Refusal(503, self._problem)
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[None] = loop.create_future()
        self._waiting.append((mark, waiter))
        if self._begun == self._done and self._pause is None:
            self._begin(loop)
        await waiter

    async def synced(self) -> None:
        """Wait until everything written so far is on the disk."""
        await self.reached(self.mark())

    def _begin(self, loop: asyncio.AbstractEventLoop) -> None:
        self._pause = None
        with self._lock:
            work = self._take()
            self._begun += 1
        if self._thread is None:
            self._thread = threading.Thread(target=self._execute, name="commit", daemon=True)
            self._thread.start()
        self._rounds.put((loop, work))

    def _take(self) -> Callable[[], None]:
        """What the next round is to do on its thread.

        Where that is one write to an open log, it is written here, into the kernel's memory as every journal
        is: a thread that only syncs takes the interpreter lock from the event loop less often.
        """
        paths, self._unsynced = self._unsynced, set()
        appends, self._appends = self._appends, []
        self._append_bytes = 0
        commits = self._log
        if commits is None or paths or commits.open_path is None or commits.size >= LOG_BYTES:
            return lambda: self._round(paths, appends)
        if len(files := {path for path, _, _ in appends}) < 2:
            return lambda: self._sync(files)
        try:
            self._append(commits, appends)
        except JournalError:  # no space, say
            return lambda: self._sync(files)
        return commits.sync

    def _ended(self, loop: asyncio.AbstractEventLoop, error: Exception | None) -> None:
        if error is None:
            self._done = self._begun
        else:
            self._problem = f"the server's disk failed ({error}): this was not accepted; restart the server"
            log.error("%s", self._problem)
        waiting, self._waiting = self._waiting, []
        for mark, waiter in waiting:
            if waiter.done():
                continue
            if self._problem:
                waiter.set_exception(Refusal(503, self._problem))
            elif mark <= self._done:
                waiter.set_result(None)
            else:
                self._waiting.append((mark, waiter))
        if self._waiting:
            self._pause = loop.call_later(PAUSE, self._begin, loop)

    # -- on a thread -------------------------------------------------------------------------------------

    def _execute(self) -> None:
        """Rounds, one after another. A plain queue: an executor's futures cost more than a sync."""
        while (task := self._rounds.get()) is not None:
            (loop, work), problem = task, None
            try:
                work()
            except Exception as error:
                problem = error
            with suppress(RuntimeError):  # the event loop is closed: nobody waits any more
                loop.call_soon_threadsafe(self._ended, loop, problem)

    def _round(self, paths: set[Path], appends: list[Append]) -> None:
        appends = [append for append in appends if append[0] not in paths]
        files = {path for path, _, _ in appends}
        if len(files) < 2:  # the log would save nothing
            return self._sync(files | paths)
        self._sync(paths)  # first: a file in the log has its name on the disk, and all that is before
        try:
            self._write(appends)
        except JournalError:  # no space, say
            self._sync(files)

    def _write(self, appends: list[Append]) -> None:
        if self._log is None:
            self._log = SegmentedLog(self._home, LOG, segment_bytes=LOG_BYTES)
        if self._log.size >= LOG_BYTES:
            with self._lock:
                named = self._named.copy()
            self._sync(named)
            _forget(self._log)
            with self._lock:
                self._named = {path for path, _, _ in (*appends, *self._appends)}
        begins = self._log.open_path is None
        self._append(self._log, appends)
        self._log.sync()
        if begins:
            sync_path(self._home)

    def _append(self, commits: SegmentedLog, appends: list[Append]) -> None:
        skip = len(str(self._home)) + 1
        head = [[str(path)[skip:], at, len(data)] for path, at, data in appends]
        commits.append(head, [data for _, _, data in appends])

    def _sync(self, paths: Collection[Path]) -> None:
        if len(paths) < 2:
            for path in paths:
                _sync(path)
        else:
            list(self._threads.map(_sync, paths))

    def close(self) -> None:
        """Wait for the round under way; then leave no log."""
        self._end_rounds()
        if self._log is not None and not self._problem:
            self._sync(self._named)
            _forget(self._log)
        self._threads.shutdown()

    def _end_rounds(self) -> None:
        if self._pause is not None:
            self._pause.cancel()
        self._rounds.put(None)
        if self._thread is not None:
            self._thread.join()


def replay(home: Path) -> None:
    """Write again what the log says was appended to each file, where a power cut has lost it.

    Called before anything is read. JournalError if the log is damaged.
    """
    commits, files = SegmentedLog(home, LOG), set[Path]()
    try:
        records = commits.read()
    except JournalError as error:
        why = f"{error}; acknowledged requests may be lost with it"
        raise JournalError(f"{why}: start without it by `tinkex server repair --home {home}`") from None
    for record in records:
        body, begin = record.body(), 0
        for name, at, size in record.head:
            path, data = home / name, body[begin : begin + size]
            begin += size
            with suppress(FileNotFoundError), path.open("r+b") as file:  # deleted since
                files.add(path)
                file.seek(at)
                if file.read(size) != data:
                    file.seek(at)
                    file.write(data)
    for path in files:
        sync_path(path)
    _forget(commits)


def _forget(commits: SegmentedLog) -> None:
    """Delete the log: the files that it speaks of are on the disk."""
    commits.close()
    for segment in (segments := commits.closed_segments()):
        commits.delete(segment)
    if segments:
        sync_path(commits.directory)


def _sync(path: Path) -> None:
    with suppress(FileNotFoundError):  # deleted since: what it held is needed no more
        sync_path(path)

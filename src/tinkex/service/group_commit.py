"""Group commit: what was written reaches the disk, many writers at a time, before anybody is told.

Files and directories are named with `wrote`. All that were named are synced together, round after round;
`mark` is the round that covers everything written so far, and `reached` waits for it. The event loop never
waits for the disk. After a sync that failed nothing is promised any more: the kernel may have dropped the
data, and would call the next sync a success. Without `power` every mark is 0, and nothing is synced.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from tinkex.service.refusal import Refusal
from tinkex.store import sync_path

log = logging.getLogger("tinkex.service")
THREADS = 8  # a file system commits what is synced at the same time at once


class GroupCommit:
    """The syncs of one home. `wrote` may be called from any thread, the rest on the event loop."""

    def __init__(self, *, power: bool) -> None:
        self.power = power
        self._threads = ThreadPoolExecutor(THREADS, "sync")
        self._lock = threading.Lock()
        self._unsynced: set[Path] = set()
        self._begun = self._done = 0  # rounds
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []
        self._problem = ""

    def wrote(self, path: Path) -> None:
        """This file was written, or the entries of this directory have changed."""
        if self.power:
            with self._lock:
                self._unsynced.add(path)

    def mark(self) -> int:
        """The round after which everything written so far is on the disk."""
        with self._lock:
            return self._begun + bool(self._unsynced)

    async def reached(self, mark: int) -> None:
        """Wait for a round; Refusal if the disk does not take what it should hold."""
        if mark <= self._done:
            return
        if self._problem:
            raise Refusal(503, self._problem)
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[None] = loop.create_future()
        self._waiting.append((mark, waiter))
        if self._begun == self._done:
            self._begin(loop)
        await waiter

    async def synced(self) -> None:
        """Wait until everything written so far is on the disk."""
        await self.reached(self.mark())

    def _begin(self, loop: asyncio.AbstractEventLoop) -> None:
        with self._lock:
            paths, self._unsynced = self._unsynced, set()
            self._begun += 1
        shares = [share for n in range(THREADS) if (share := list(paths)[n::THREADS])]
        syncs = [loop.run_in_executor(self._threads, _sync, share) for share in shares]
        asyncio.gather(*syncs).add_done_callback(self._ended)

    def _ended(self, syncing: asyncio.Future[list[None]]) -> None:
        if (error := syncing.exception()) is None:
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
            self._begin(syncing.get_loop())

    def close(self) -> None:
        self._threads.shutdown()


def _sync(paths: Iterable[Path]) -> None:
    for path in paths:
        with suppress(FileNotFoundError):  # deleted since: what it held is needed no more
            sync_path(path)

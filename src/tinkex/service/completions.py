"""Completion feeds: which samples of a sampler have ended, in the order in which they did.

A poll returns completions and a cursor; the next poll with that cursor acknowledges them. Cursors keep rising
after a restart. A file keeps the ids of samples not yet fetched. After a crash those are reported as ended:
the client asks for the result, gets 410, and samples again. Knows nothing of results, nor of who may poll.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from tinkex.service.futures import wait_among, wake
from tinkex.types.futures import FutureFailed, FutureFinished

REWRITE = 10_000  # stale lines before the file is written again
_Event = tuple[int, str, bool]  # cursor, request id, failed?


@dataclass
class _Feed:
    events: deque[_Event] = field(default_factory=deque[_Event])
    waiters: list[asyncio.Future[None]] = field(default_factory=list[asyncio.Future[None]])


class Completions:
    """The samples of all samplers that have not been fetched; `path` None: not kept over a restart."""

    def __init__(self, path: Path | None) -> None:
        self._feeds: dict[str, _Feed] = {}
        self._open: dict[str, str] = {}  # request id -> feed, until it is fetched
        self._cursor = time.time_ns() // 1000  # the last one
        self._path, self._file, self._stale = path, -1, 0
        self._lost: set[str] = set()  # accepted by an earlier process
        self._lost_since = time.monotonic()
        self._counts = Counter[str]()  # how many are open in each feed

    def restore(self) -> None:
        """Read what an earlier process left, and keep the file from now on."""
        if self._path is None:
            return
        lost = _read(self._path)
        self._lost.update(lost)
        self._open.update(lost)
        self._counts.update(lost.values())
        for request_id, feed in lost.items():
            self._add(feed, request_id, failed=False)
        self._rewrite()

    # -- samples -----------------------------------------------------------------------------------------

    def begin(self, feed: str, request_id: str) -> None:
        """A sample was accepted."""
        self._open[request_id] = feed
        self._counts[feed] += 1
        self._write(f"+{request_id} {feed}\n")

    def end(self, feed: str, request_id: str, *, failed: bool) -> None:
        """A sample ended: wake the polls."""
        wake(self._add(feed, request_id, failed).waiters)

    def fetched(self, request_ids: Iterable[str]) -> None:
        """The results of these were fetched, or dropped."""
        gone = [(i, feed) for i in request_ids if (feed := self._open.pop(i, None)) is not None]
        if gone:
            self._write("".join(f"-{request_id}\n" for request_id, _ in gone))
        for _, feed in gone:
            self._stale += 2
            self._counts[feed] -= 1
            if not self._counts[feed]:
                del self._counts[feed]
            self._tidy(feed)
        if self._stale > REWRITE + 2 * len(self._open):
            self._rewrite()

    def is_open(self, feed: str) -> bool:
        """Is there anything that a poll could wait for?"""
        return feed in self._counts

    def _add(self, key: str, request_id: str, failed: bool) -> _Feed:
        self._cursor += 1
        if (feed := self._feeds.get(key)) is None:
            feed = self._feeds[key] = _Feed()
        feed.events.append((self._cursor, request_id, failed))
        return feed

    def _tidy(self, key: str) -> None:
        feed = self._feeds.get(key)
        if feed is None:
            return
        while feed.events and feed.events[0][1] not in self._open:
            feed.events.popleft()
        if not feed.events and not feed.waiters:
            del self._feeds[key]

    def expire(self, now: float, keep: float) -> None:
        """Give up on clients that waited for samples of an earlier process."""
        if self._lost and now - self._lost_since > keep:
            self.fetched(self._lost)
            self._lost.clear()

    # -- polls -------------------------------------------------------------------------------------------

    async def poll(
        self, key: str, after: int, seconds: float
    ) -> tuple[list[FutureFinished | FutureFailed], int]:
        """What ended since the cursor `after`, waiting up to `seconds` for something; and the new cursor."""
        feed = self._feeds.setdefault(key, _Feed())
        if after > self._cursor:  # of an earlier process whose clock was ahead
            after = 0
        told: list[str] = []
        while feed.events and feed.events[0][0] <= after:
            told.append(feed.events.popleft()[1])
        self.fetched(i for i in told if i in self._lost)
        feed = self._feeds.setdefault(key, feed)
        if not feed.events:
            await wait_among(feed.waiters, seconds)
        completions = [
            FutureFailed(request_id=i) if failed else FutureFinished(request_id=i)
            for _, i, failed in feed.events
        ]
        cursor = feed.events[-1][0] if feed.events else after
        self._tidy(key)
        return completions, cursor

    # -- the file ----------------------------------------------------------------------------------------

    def _write(self, line: str) -> None:
        if self._file >= 0:
            try:
                os.write(self._file, line.encode())
            except OSError:
                pass  # a full disk: after a crash this one is not reported, and its client times out

    def _rewrite(self) -> None:
        if self._path is None:
            return
        self.close()
        part = self._path.with_suffix(".part")
        part.write_text("".join(f"+{i} {feed}\n" for i, feed in self._open.items()))
        part.rename(self._path)
        self._file = os.open(self._path, os.O_WRONLY | os.O_APPEND)
        self._stale = 0

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def _read(path: Path) -> dict[str, str]:
    found: dict[str, str] = {}
    text = path.read_text(errors="replace") if path.exists() else ""
    for line in text.split("\n")[:-1]:  # what follows the last newline was cut off in mid-write
        name, _, feed = line[1:].partition(" ")
        if line.startswith("+") and feed:
            found[name] = feed
        elif line.startswith("-"):
            found.pop(name, None)
    return found

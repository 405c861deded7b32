"""Batch polls: which samples of a sampler have ended, in the order in which they did.

Promises: each completion is reported until the poll that carried it is acknowledged by its cursor; cursors
rise over restarts; a sample that a killed process had accepted is reported too, so that whoever waits for it
asks, is told 410, and samples anew. For that the names of samples not yet fetched are kept in a file of short
lines, one write each. Knows nothing of results, nor of who may poll (the samplers do).
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

REWRITE = 10_000  # lines that say nothing any more, before the file is written anew
_Event = tuple[int, str, bool]  # cursor, request id, failed?


@dataclass
class _Lane:
    events: deque[_Event] = field(default_factory=deque[_Event])
    waiters: list[asyncio.Future[None]] = field(default_factory=list[asyncio.Future[None]])


class Lanes:
    """The samples of all samplers that have not been fetched; `path` None: not kept over a restart."""

    def __init__(self, path: Path | None) -> None:
        self._lanes: dict[str, _Lane] = {}
        self._open: dict[str, str] = {}  # request id -> lane, until it was fetched
        self._cursor = time.time_ns() // 1000  # the last one
        self._path, self._file, self._stale = path, -1, 0
        lost = _read(path) if path is not None else {}
        self._lost = set(lost)  # accepted by an earlier process
        self._lost_since = time.monotonic()
        self._open.update(lost)
        self._counts = Counter(lost.values())  # how many are open in each lane
        for request_id, lane in lost.items():
            self._add(lane, request_id, failed=False)
        self._rewrite()

    # -- samples -----------------------------------------------------------------------------------------

    def begin(self, lane: str, request_id: str) -> None:
        """A sample was accepted."""
        self._open[request_id] = lane
        self._counts[lane] += 1
        self._write(f"+{request_id} {lane}\n")

    def end(self, lane: str, request_id: str, *, failed: bool) -> None:
        """It is done: whoever polls is told."""
        wake(self._add(lane, request_id, failed).waiters)

    def fetched(self, request_ids: Iterable[str]) -> None:
        """Nobody waits for these any more."""
        gone = [(i, lane) for i in request_ids if (lane := self._open.pop(i, None)) is not None]
        if gone:
            self._write("".join(f"-{request_id}\n" for request_id, _ in gone))
        for _, lane in gone:
            self._stale += 2
            self._counts[lane] -= 1
            if not self._counts[lane]:
                del self._counts[lane]
            self._tidy(lane)
        if self._stale > REWRITE + 2 * len(self._open):
            self._rewrite()

    def is_open(self, lane: str) -> bool:
        """Is there anything that a poll could wait for?"""
        return lane in self._counts

    def _add(self, key: str, request_id: str, failed: bool) -> _Lane:
        self._cursor += 1
        if (lane := self._lanes.get(key)) is None:
            lane = self._lanes[key] = _Lane()
        lane.events.append((self._cursor, request_id, failed))
        return lane

    def _tidy(self, key: str) -> None:
        lane = self._lanes.get(key)
        if lane is None:
            return
        while lane.events and lane.events[0][1] not in self._open:
            lane.events.popleft()
        if not lane.events and not lane.waiters:
            del self._lanes[key]

    def expire(self, now: float, keep: float) -> None:
        """Give up on whoever waited for samples of an earlier process."""
        if self._lost and now - self._lost_since > keep:
            self.fetched(self._lost)
            self._lost.clear()

    # -- polls -------------------------------------------------------------------------------------------

    async def poll(
        self, key: str, after: int, seconds: float
    ) -> tuple[list[FutureFinished | FutureFailed], int]:
        """What ended since the cursor `after`, waiting up to `seconds` for something; and the new cursor."""
        lane = self._lanes.setdefault(key, _Lane())
        if after > self._cursor:  # an earlier process's, whose clock was ahead: it says nothing of our events
            after = 0
        told: list[str] = []
        while lane.events and lane.events[0][0] <= after:
            told.append(lane.events.popleft()[1])
        self.fetched(i for i in told if i in self._lost)
        lane = self._lanes.setdefault(key, lane)
        if not lane.events:
            await wait_among(lane.waiters, seconds)
        completions = [
            FutureFailed(request_id=i) if failed else FutureFinished(request_id=i)
            for _, i, failed in lane.events
        ]
        cursor = lane.events[-1][0] if lane.events else after
        self._tidy(key)
        return completions, cursor

    # -- the file ----------------------------------------------------------------------------------------

    def _write(self, line: str) -> None:
        if self._file >= 0:
            try:
                os.write(self._file, line.encode())
            except OSError:
                pass  # a full disk: after a crash nobody is told of this one, and its client's patience ends

    def _rewrite(self) -> None:
        if self._path is None:
            return
        self.close()
        part = self._path.with_suffix(".part")
        part.write_text("".join(f"+{i} {lane}\n" for i, lane in self._open.items()))
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
        name, _, lane = line[1:].partition(" ")
        if line.startswith("+") and lane:
            found[name] = lane
        elif line.startswith("-"):
            found.pop(name, None)
    return found

"""Futures: accepted requests and their results, until the results have been fetched; and completion feeds.

Results stay until fetched or expired. A completion feed lists the finished samples of one sampler, with a
cursor that also acknowledges earlier ones. After a crash, unfetched samples are reported as finished;
fetching one returns 410 and the client samples again. Knows nothing of what is computed, nor of who may poll.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import time
import uuid
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from zlib import crc32

from tinkex.errors import RequestErrorCategory
from tinkex.types.futures import FutureFailed, FutureFinished, RequestFailedResponse

log = logging.getLogger("tinkex.service")
SAMPLES = "samples"  # a file in the home: the ids of samples not yet fetched
REWRITE = 10_000  # stale lines before the file of samples is written again
# Why a future is not done yet: a queue state of the wire, and a sentence about it.
QueueState = tuple[str, str | None]
ACTIVE: QueueState = ("active", None)
_Event = tuple[int, str, bool]  # of a completion feed: cursor, request id, failed?


@dataclass(eq=False, slots=True)
class Future:
    """One accepted request. `outcome` is its result, or a RequestFailedResponse."""

    request_id: str
    owner: str
    feed: str = ""  # the completion feed that reports it
    created: float = field(default_factory=time.monotonic)
    outcome: Any = None
    done: bool = False
    finished: float = 0.0
    mark: int = 0  # the round of group commit that must end before it, or its outcome, is acknowledged
    delivered: float | None = None  # when it was fetched for the first time
    queue_state: QueueState = ACTIVE
    size: int = 0  # bytes of a large outcome, as far as they can be foreseen
    release: Callable[[], None] | None = None  # frees what its request uses; called once, when it is done
    _waiters: list[asyncio.Future[None]] | None = None  # most are done before anybody polls

    def resolve(self, outcome: Any) -> None:
        """Set the outcome. The first one holds."""
        if not self.done:
            self.outcome, self.done, self.finished = outcome, True, time.monotonic()
            if self.release is not None:
                self.release()
            if self._waiters:
                _wake_all(self._waiters)

    @property
    def failed(self) -> bool:
        return isinstance(self.outcome, RequestFailedResponse)

    def hold_until(self, mark: int) -> None:
        self.mark = mark

    def pause(self, why: str) -> None:
        self.queue_state = "paused_capacity", why

    def resume(self) -> None:
        self.queue_state = ACTIVE

    def fetch(self) -> Any:
        """The outcome; from now on it counts as delivered."""
        self.delivered = self.delivered or time.monotonic()
        return self.outcome

    async def wait(self, seconds: float) -> bool:
        """True once it is done, False after `seconds`."""
        if not self.done:
            if self._waiters is None:
                self._waiters = []
            await _wait_among(self._waiters, seconds)
        return self.done


def failure(message: str, category: str = "server") -> RequestFailedResponse:
    return RequestFailedResponse(error=message, category=RequestErrorCategory.parse(category))


def run_of(request_id: str) -> str:
    """A training request's id is RUN#SEQ_ID, so that its result is found once the run is on disk."""
    return request_id.rpartition("#")[0]


def seq_of(request_id: str) -> int:
    return int(request_id.rpartition("#")[2])


async def _wait_among(waiters: list[asyncio.Future[None]], seconds: float) -> None:
    """Wait to be woken with all of `waiters`, or for `seconds`. (asyncio.wait would cost five times this.)"""
    loop = asyncio.get_running_loop()
    waiter = loop.create_future()
    waiters.append(waiter)
    timer = loop.call_later(seconds, _wake, waiter)
    try:
        await waiter
    finally:
        timer.cancel()
        if waiter in waiters:
            waiters.remove(waiter)


def _wake_all(waiters: list[asyncio.Future[None]]) -> None:
    for waiter in waiters:
        _wake(waiter)
    waiters.clear()


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


class Futures:
    """All futures of a service."""

    def __init__(self, prefix: str = "") -> None:
        self._futures: dict[str, Future] = {}
        self.held: Counter[str] = Counter()  # bytes of large outcomes, pending ones too, by owner
        self._prefix, self._count = prefix or uuid.uuid4().hex[:12], itertools.count()

    def __len__(self) -> int:
        return len(self._futures)

    def create(
        self, owner: str, *, request_id: str | None = None, feed: str = "", size: int = 0,
        mark: int = 0, release: Callable[[], None] | None = None,
    ) -> Future:  # fmt: skip
        request_id = request_id or f"{self._prefix}-{next(self._count)}"
        future = Future(request_id, owner, feed, mark=mark, size=size, release=release)
        self._futures[request_id] = future
        if size:
            self.held[owner] += size
        return future

    def create_resolved(self, owner: str, outcome: Any, request_id: str | None = None) -> Future:
        future = self.create(owner, request_id=request_id)
        future.resolve(outcome)
        return future

    def get(self, request_id: str) -> Future | None:
        return self._futures.get(request_id)

    def is_done(self, request_id: str) -> bool:
        return (future := self._futures.get(request_id)) is not None and future.done

    def drop(self, request_ids: Iterable[str]) -> list[str]:
        """Forget those of these that are done; returns their ids."""
        dropped = [i for i in request_ids if (future := self._futures.get(i)) is not None and future.done]
        for request_id in dropped:
            future = self._futures.pop(request_id)
            if future.size:
                self.held[future.owner] -= future.size
        return dropped

    def large_delivered(self, owner: str, before: float) -> list[str]:
        """Large outcomes of an owner that were fetched before then."""
        large = ((i, f.delivered) for i, f in self._futures.items() if f.size and f.owner == owner)
        return [i for i, delivered in large if delivered is not None and delivered < before]

    def expired(self, now: float, keep: float, keep_delivered: float) -> list[str]:
        """Those fetched more than `keep_delivered` seconds ago, or done and not fetched for `keep`."""
        return [
            i
            for i, f in self._futures.items()
            if f.done and (now - f.finished > keep or now - (f.delivered or now) > keep_delivered)
        ]

    def pending(self, run_id: str) -> list[Future]:
        """The unresolved futures of a run's requests."""
        return [f for i, f in self._futures.items() if not f.done and run_of(i) == run_id]


@dataclass
class _Feed:
    events: deque[_Event] = field(default_factory=deque[_Event])
    waiters: list[asyncio.Future[None]] = field(default_factory=list[asyncio.Future[None]])
    open: int = 0  # samples that are not fetched


class Completions:
    """The samples of all samplers that have not been fetched; `path` None: not kept over a restart."""

    def __init__(self, path: Path | None, wrote: Callable[[Path], None] = lambda path: None) -> None:
        self._wrote = wrote  # is told when the file has changed
        self._feeds: defaultdict[str, _Feed] = defaultdict(_Feed)
        self._open: dict[str, str] = {}  # request id -> feed, until it is fetched
        self._cursor = time.time_ns() // 1000  # the last one
        self._path, self._file, self._stale = path, -1, 0
        self._begun: list[bytes] = []  # lines that are not written yet
        self._lost: set[str] = set()  # accepted by an earlier process
        self._lost_since = time.monotonic()

    def restore(self) -> None:
        """Read what an earlier process left, and keep the file from now on."""
        if self._path is not None:
            self.adopt(self._path)
            self._rewrite(self._path)

    def adopt(self, path: Path) -> None:
        """Report the samples as ended that another process left in its file: their clients sample again."""
        for request_id, feed in _read(path).items():
            if request_id in self._lost:
                continue  # a takeover is tried again
            self._lost.add(request_id)
            self.begin(feed, request_id)
            self.end(feed, request_id, failed=False)
        self.write()

    def begin(self, feed: str, request_id: str) -> None:
        """A sample was accepted; `write` must follow before that is acknowledged."""
        self._open[request_id] = feed
        self._feeds[feed].open += 1
        self._begun.append(_line(f"+{request_id} {feed}"))

    def end(self, feed: str, request_id: str, *, failed: bool) -> None:
        """A sample ended: wake the polls."""
        self._cursor += 1
        self._feeds[feed].events.append((self._cursor, request_id, failed))
        _wake_all(self._feeds[feed].waiters)

    def fetched(self, request_ids: Iterable[str]) -> None:
        """The results of these were fetched, or dropped."""
        gone = [(i, feed) for i in request_ids if (feed := self._open.pop(i, None)) is not None]
        if gone:
            self.write(b"".join(_line(f"-{request_id}") for request_id, _ in gone))
        for _, feed in gone:
            self._stale += 2
            self._feeds[feed].open -= 1
            self._tidy(feed)
        if self._path is not None and self._stale > REWRITE + 2 * len(self._open):
            self._rewrite(self._path)

    def is_open(self, feed: str) -> bool:
        """Is there anything that a poll could wait for?"""
        return feed in self._feeds and self._feeds[feed].open > 0

    def _tidy(self, key: str) -> None:
        feed = self._feeds[key]
        while feed.events and feed.events[0][1] not in self._open:
            feed.events.popleft()
        if not feed.events and not feed.waiters and not feed.open:
            del self._feeds[key]

    def expire(self, now: float, keep: float) -> None:
        """Give up on clients that waited for samples of an earlier process."""
        if self._lost and now - self._lost_since > keep:
            self.fetched(self._lost)
            self._lost.clear()

    async def poll(
        self, key: str, after: int, seconds: float
    ) -> tuple[list[FutureFinished | FutureFailed], int]:
        """What ended since the cursor `after`, waiting up to `seconds` for something; and the new cursor."""
        feed = self._feeds[key]
        if after > self._cursor:  # of an earlier process whose clock was ahead
            after = 0
        acknowledged: list[str] = []
        while feed.events and feed.events[0][0] <= after:
            acknowledged.append(feed.events.popleft()[1])
        self.fetched(i for i in acknowledged if i in self._lost)
        feed = self._feeds[key]  # it may have been deleted as empty
        if not feed.events:
            await _wait_among(feed.waiters, seconds)
        completions = [
            FutureFailed(request_id=i) if failed else FutureFinished(request_id=i)
            for _, i, failed in feed.events
        ]
        cursor = feed.events[-1][0] if feed.events else after
        self._tidy(key)
        return completions, cursor

    def write(self, lines: bytes = b"") -> None:
        """Write what began since the last time, then these lines."""
        lines, self._begun = b"".join((*self._begun, lines)), []
        if self._file >= 0 and lines:
            with suppress(OSError):  # a full disk: after a crash it is not reported, and its client times out
                os.write(self._file, lines)
            if self._path is not None:
                self._wrote(self._path)

    def _rewrite(self, path: Path) -> None:
        self.close()
        part = path.with_suffix(".part")
        try:
            part.write_bytes(b"".join(_line(f"+{i} {feed}") for i, feed in self._open.items()))
            part.rename(path)
            self._stale = 0
        except OSError as error:  # the old file stays in use
            log.error("%s could not be rewritten: %s", path, error)
        with suppress(OSError):
            self._file = os.open(path, os.O_WRONLY | os.O_APPEND)

    def close(self) -> None:
        self.write()
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def _line(text: str) -> bytes:
    line = text.encode()
    return b"%b\t%08x\n" % (line, crc32(line))


def _read(path: Path) -> dict[str, str]:
    found: dict[str, str] = {}
    content = path.read_text(errors="replace") if path.exists() else ""
    checked = "\t" in content  # else it is of an older version, whose lines have no checksums
    for number, whole in enumerate(content.split("\n")[:-1], 1):  # what follows was cut off in mid-write
        line = whole.partition("\t")[0]
        if checked and f"{whole}\n".encode() != _line(line):
            log.error("%s is damaged in line %d: a sample of before may be given up", path, number)
            continue
        name, _, feed = line[1:].partition(" ")
        if line.startswith("+") and feed:
            found[name] = feed
        elif line.startswith("-"):
            found.pop(name, None)
    return found

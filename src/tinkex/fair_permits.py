"""Counted permits that many sources share fairly: runs and samplers in the client, users in the service.

Promises: the requests of one source are served in order; a request for more permits than there are is
admitted alone; a cancelled waiter gives up its place, and permits that it got meanwhile. `FairPermits` serves
its sources round-robin, in O(1). `FewestTokensFirst` serves the one with the fewest tokens under way.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Awaitable

RESERVE = 9  # 1 / RESERVE of the permits is kept from a source that holds the others

_Waiter = tuple[int, int, asyncio.Future[None]]  # permits, tokens, and its turn
_NOTHING = (0, 0)  # permits and tokens of a source that holds none


class FairPermits:
    """`capacity` permits, with a queue for each source; sources take turns."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.used = 0
        self._waiting: OrderedDict[str, deque[_Waiter]] = OrderedDict()  # by source, in order of their turns

    def __len__(self) -> int:
        """How many requests wait."""
        return sum(map(len, self._waiting.values()))

    def try_acquire(self, source: str, permits: int = 1, tokens: int = 1) -> bool:
        """Acquire, if the permits are free and no other request waits."""
        return not self._waiting and self._take(source, permits, tokens)

    async def acquire(self, source: str = "", permits: int = 1, tokens: int = 1) -> None:
        """`tokens` is what the holder may compute with its permits."""
        if not self._waiting and self._take(source, permits, tokens):
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        queue = self._waiting.setdefault(source, deque())
        queue.append((permits, tokens, turn))
        if len(queue) == 1:
            self._admit()  # the other sources may all be at their limits
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.release(source, permits, tokens)  # it was admitted in the same iteration of the loop
            else:
                turn.cancel()
                self._admit()  # others may have waited behind it
            raise

    def release(self, source: str = "", permits: int = 1, tokens: int = 1) -> None:
        self.used -= permits
        if self._waiting:
            self._admit()

    def resize(self, capacity: int) -> None:
        self.capacity = capacity
        self._admit()

    def permit(self, source: str = "", permits: int = 1) -> Permit:
        """`async with limiter.permit(source, n):` acquires and always releases."""
        return Permit(self, source, permits)

    def _admit(self) -> None:
        """Admit requests, until the next one does not fit."""
        while self._waiting and (source := self._next()) is not None:
            queue = self._waiting[source]
            permits, tokens, turn = queue[0]
            if is_wanted := not turn.done():  # else it was cancelled
                if not self._take(source, permits, tokens):
                    return
                turn.set_result(None)
            queue.popleft()
            if not queue:
                del self._waiting[source]
            elif is_wanted:
                self._waiting.move_to_end(source)

    def _next(self) -> str | None:
        """The source whose first request is next; None if none of them may hold more."""
        return next(iter(self._waiting))

    def _take(self, source: str, permits: int, tokens: int) -> bool:
        """Take permits, if they are free."""
        if self.used and self.used + permits > self.capacity:
            return False
        self.used += permits
        return True


class FewestTokensFirst(FairPermits):
    """The source with the fewest tokens under way goes next; among equals, the one that waited longest.

    No source ever holds all permits, so a source that holds none gets in at once.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.most = capacity - capacity // RESERVE  # of one source
        self._held: dict[str, tuple[int, int]] = {}  # permits and tokens

    def release(self, source: str = "", permits: int = 1, tokens: int = 1) -> None:
        held, under_way = self._held.pop(source)
        if held > permits:
            self._held[source] = held - permits, under_way - tokens
        self.used -= permits
        if self._waiting:
            self._admit()

    def _next(self) -> str | None:
        for source in sorted(self._waiting, key=lambda s: self._held.get(s, _NOTHING)[1]):
            permits, _, turn = self._waiting[source][0]
            held, _ = self._held.get(source, _NOTHING)
            if not held or held + permits <= self.most or turn.done():
                return source
        return None

    def _take(self, source: str, permits: int, tokens: int) -> bool:
        held, under_way = self._held.get(source, _NOTHING)
        if held and held + permits > self.most:
            return False
        if self.used and self.used + permits > self.capacity:
            return False
        self.used += permits
        self._held[source] = held + permits, under_way + tokens
        return True


class Permit:
    """Permits for the length of an `async with` block."""

    __slots__ = ("_limiter", "_permits", "_source")

    def __init__(self, limiter: FairPermits, source: str, permits: int) -> None:
        self._limiter, self._source, self._permits = limiter, source, permits

    def __aenter__(self) -> Awaitable[None]:
        return self._limiter.acquire(self._source, self._permits)

    async def __aexit__(self, *_: object) -> None:
        self._limiter.release(self._source, self._permits)

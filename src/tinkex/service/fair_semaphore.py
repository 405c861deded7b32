"""A semaphore that many owners share: when permits are free, the owner with the fewest tokens goes next.

Requests of one owner are served in order. A request for many permits is not starved by small ones. One owner
never holds all permits, so that whoever holds none gets in at once.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import NamedTuple

RESERVE = 9  # 1 / RESERVE of the permits is kept from an owner who holds the others


class PermitRequest(NamedTuple):
    """`tokens` is what the holder may compute with its permits."""

    permits: int
    tokens: int
    turn: asyncio.Future[None]


class FairSemaphore:
    """`capacity` permits; a request for more than one owner may hold is admitted alone."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.most = capacity - capacity // RESERVE  # of one owner
        self.used = 0
        self._held: dict[str, tuple[int, int]] = {}  # permits and tokens
        self._waiting: dict[str, deque[PermitRequest]] = {}

    def waiting(self) -> int:
        return sum(map(len, self._waiting.values()))

    def try_acquire(self, owner: str, permits: int, tokens: int = 1) -> bool:
        """Acquire, if the permits are free and no other request waits."""
        if self._waiting or not self._may_hold(owner, permits) or not self._fits(permits):
            return False
        self._take(owner, permits, tokens)
        return True

    async def acquire(self, owner: str, permits: int, tokens: int = 1) -> None:
        if self.try_acquire(owner, permits, tokens):
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, deque()).append(PermitRequest(permits, tokens, turn))
        self._admit()  # those who wait may all be at their limits
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.release(owner, permits, tokens)
            else:
                turn.cancel()
                self._admit()  # others may have waited behind it
            raise

    def release(self, owner: str, permits: int, tokens: int = 1) -> None:
        held, under_way = self._held.pop(owner)
        self.used -= permits
        if held > permits:
            self._held[owner] = held - permits, under_way - tokens
        if self._waiting:
            self._admit()

    def _may_hold(self, owner: str, permits: int) -> bool:
        held, _ = self._held.get(owner, (0, 0))
        return not held or held + permits <= self.most

    def _fits(self, permits: int) -> bool:
        return not self.used or self.used + permits <= self.capacity

    def _take(self, owner: str, permits: int, tokens: int) -> None:
        held, under_way = self._held.get(owner, (0, 0))
        self.used += permits
        self._held[owner] = held + permits, under_way + tokens

    def _admit(self) -> None:
        while owner := self._next():
            queue = self._waiting.pop(owner)
            permits, tokens, turn = queue.popleft()
            if queue:  # at the end: among equals, the owner that has waited longest goes next
                self._waiting[owner] = queue
            if not turn.done():
                self._take(owner, permits, tokens)
                turn.set_result(None)

    def _next(self) -> str:
        """The owner whose first request is over or can be admitted; "" if there is none."""
        for owner in sorted(self._waiting, key=lambda o: self._held.get(o, (0, 0))[1]):
            permits, _, turn = self._waiting[owner][0]
            if turn.done() or (self._may_hold(owner, permits) and self._fits(permits)):
                return owner
            if self._may_hold(owner, permits):
                return ""  # the others wait behind it
        return ""

"""A semaphore that many owners share: when permits are free, the owner with the fewest goes next.

Requests of one owner are served in order. A request for many permits is not starved by small ones.
"""

from __future__ import annotations

import asyncio
from collections import deque


class FairSemaphore:
    """`capacity` permits; a request for more than that is admitted alone."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.used = 0
        self._held: dict[str, int] = {}
        self._waiting: dict[str, deque[tuple[int, asyncio.Future[None]]]] = {}

    def waiting(self) -> int:
        return sum(map(len, self._waiting.values()))

    def try_acquire(self, owner: str, permits: int) -> bool:
        """Acquire, if the permits are free and no other request waits."""
        if self._waiting or not self._fits(permits):
            return False
        self._take(owner, permits)
        return True

    async def acquire(self, owner: str, permits: int) -> None:
        if self.try_acquire(owner, permits):
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, deque()).append((permits, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.release(owner, permits)
            else:
                turn.cancel()
                self._admit()  # others may have waited behind it
            raise

    def release(self, owner: str, permits: int) -> None:
        self.used -= permits
        self._held[owner] -= permits
        if not self._held[owner]:
            del self._held[owner]
        if self._waiting:
            self._admit()

    def _fits(self, permits: int) -> bool:
        return not self.used or self.used + permits <= self.capacity

    def _take(self, owner: str, permits: int) -> None:
        self.used += permits
        self._held[owner] = self._held.get(owner, 0) + permits

    def _admit(self) -> None:
        while self._waiting:
            owner = min(self._waiting, key=lambda o: self._held.get(o, 0))
            permits, turn = self._waiting[owner][0]
            if not turn.done() and not self._fits(permits):
                return
            queue = self._waiting.pop(owner)
            queue.popleft()
            if queue:  # at the end: among equals, the owner that has waited longest goes next
                self._waiting[owner] = queue
            if not turn.done():
                self._take(owner, permits)
                turn.set_result(None)

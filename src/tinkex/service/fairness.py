"""A gate that many owners share: at most so much at once, and whoever has the least goes next.

Promises: within one owner, first come, first served; nobody is passed by for ever, however small or large
what they want. Knows nothing of what is done inside.
"""

from __future__ import annotations

import asyncio
from collections import deque


class FairGate:
    """At most `capacity` units inside (or one request, however large)."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.used = 0
        self._inside: dict[str, int] = {}
        self._waiting: dict[str, deque[tuple[int, asyncio.Future[None]]]] = {}

    def waiting(self) -> int:
        return sum(map(len, self._waiting.values()))

    def try_enter(self, owner: str, units: int) -> bool:
        """Enter, if there is room now and nobody waits for it."""
        if self._waiting or not self._fits(units):
            return False
        self._take(owner, units)
        return True

    async def enter(self, owner: str, units: int) -> None:
        if self.try_enter(owner, units):
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, deque()).append((units, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.leave(owner, units)
            else:
                turn.cancel()
                self._admit()  # it may have been what the others waited behind
            raise

    def leave(self, owner: str, units: int) -> None:
        self.used -= units
        self._inside[owner] -= units
        if not self._inside[owner]:
            del self._inside[owner]
        if self._waiting:
            self._admit()

    def _fits(self, units: int) -> bool:
        return not self.used or self.used + units <= self.capacity

    def _take(self, owner: str, units: int) -> None:
        self.used += units
        self._inside[owner] = self._inside.get(owner, 0) + units

    def _admit(self) -> None:
        while self._waiting:
            owner = min(self._waiting, key=lambda o: self._inside.get(o, 0))
            units, turn = self._waiting[owner][0]
            if not turn.done() and not self._fits(units):
                return
            queue = self._waiting.pop(owner)
            queue.popleft()
            if queue:
                self._waiting[owner] = queue  # at the end: among equals, whoever has waited longest goes next
            if not turn.done():
                self._take(owner, units)
                turn.set_result(None)

"""How much may be under way at once: FIFO gates, and the rate limit that all samplers of a process share.

Promises: O(1) for every acquire and release however many wait, first come first served, a waiter that is
cancelled gives its place up. Lives on the background loop; knows nothing of what is being limited.
"""

from __future__ import annotations

import asyncio
import weakref
from collections import deque


class Gate:
    """At most `capacity` units at a time; one request larger than all of it may pass alone.

    >>> gate = Gate(2)  # async with gate.hold(1): …
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.used = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    def __len__(self) -> int:
        """How many are waiting."""
        return len(self._waiting)

    def _fits(self, units: int) -> bool:
        return self.used == 0 or self.used + units <= self.capacity

    async def acquire(self, units: int = 1) -> None:
        if not self._waiting and self._fits(units):
            self.used += units
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((units, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.release(units)  # it had just been let in
            raise

    def release(self, units: int = 1) -> None:
        self.used -= units
        self._admit()

    def resize(self, capacity: int) -> None:
        self.capacity = capacity
        self._admit()

    def _admit(self) -> None:
        while self._waiting:
            units, turn = self._waiting[0]
            if turn.done():  # cancelled while waiting
                self._waiting.popleft()
                continue
            if not self._fits(units):
                return
            self._waiting.popleft()
            self.used += units
            turn.set_result(None)

    def hold(self, units: int = 1) -> _Hold:
        """`async with gate.hold(n):` acquires and always releases."""
        return _Hold(self, units)


class _Hold:
    __slots__ = ("_gate", "_units")

    def __init__(self, gate: Gate, units: int) -> None:
        self._gate, self._units = gate, units

    async def __aenter__(self) -> None:
        await self._gate.acquire(self._units)

    async def __aexit__(self, *_: object) -> None:
        self._gate.release(self._units)


class RateLimit:
    """A pause that one 429 imposes on everyone who shares the same server and credential.

    While a pause lasts nobody sends; afterwards the waiters go one by one, each freed by the answer to the
    one before, until an answer shows that the server takes work again.
    """

    def __init__(self) -> None:
        self._until = 0.0
        self._cautious = False
        self._probe = Gate(1)

    def pause(self, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        self._until = max(self._until, loop.time() + seconds)
        self._cautious = True

    def succeeded(self) -> None:
        self._cautious = False

    @property
    def open(self) -> bool:
        return not self._cautious

    async def turn(self) -> bool:
        """Wait until sending makes sense; True if this caller is the probe and must `finish_probe`."""
        if not self._cautious:
            return False
        await self._probe.acquire()
        try:
            now = asyncio.get_running_loop().time
            while self._cautious and (wait := self._until - now()) > 0:
                await asyncio.sleep(wait)
        except BaseException:
            self._probe.release()
            raise
        if self._cautious:
            return True
        self._probe.release()
        return False

    def finish_probe(self) -> None:
        self._probe.release()


_shared: weakref.WeakValueDictionary[tuple[str, str], RateLimit] = weakref.WeakValueDictionary()


def shared_rate_limit(base_url: str, identity: str) -> RateLimit:
    """The rate limit of one server and credential, the same object for every client of the process."""
    key = (base_url, identity)
    limit = _shared.get(key)
    if limit is None:
        limit = _shared[key] = RateLimit()
    return limit

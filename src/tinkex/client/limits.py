"""Limits that requests wait for: fair permits, and the state that all clients of one server share.

Promises: every acquire and release is O(1); owners (runs, samplers) take turns, and the requests of one owner
are first in, first out; a cancelled waiter gives up its place. Runs on the background loop. Knows nothing of
what is limited.
"""

from __future__ import annotations

import asyncio
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable

from tinkex.client.retry import Breaker
from tinkex.errors import ClientClosedError


class FairLimiter:
    """A semaphore of `capacity` units with one queue per owner, served round-robin.

    A request for more units than there are is admitted alone.

    >>> limiter = FairLimiter(2)  # async with limiter.permit(1, owner="a run"): …
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.used = 0
        self._waiting: OrderedDict[str, deque[tuple[int, asyncio.Future[None]]]] = OrderedDict()  # by owner

    def __len__(self) -> int:
        """How many are waiting."""
        return sum(map(len, self._waiting.values()))

    def _fits(self, units: int) -> bool:
        return self.used == 0 or self.used + units <= self.capacity

    async def acquire(self, units: int = 1, owner: str = "") -> None:
        if not self._waiting and self._fits(units):
            self.used += units
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, deque()).append((units, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.release(units)  # it was admitted in the same iteration of the loop
            raise

    def release(self, units: int = 1) -> None:
        self.used -= units
        self._admit()

    def resize(self, capacity: int) -> None:
        self.capacity = capacity
        self._admit()

    def _admit(self) -> None:
        while self._waiting:
            owner, queue = next(iter(self._waiting.items()))
            units, turn = queue[0]
            if not turn.done() and not self._fits(units):
                return
            queue.popleft()
            if not queue:
                del self._waiting[owner]
            elif not turn.done():
                self._waiting.move_to_end(owner)
            if not turn.done():  # else it was cancelled
                self.used += units
                turn.set_result(None)

    def permit(self, units: int = 1, owner: str = "") -> Permit:
        """`async with limiter.permit(n, owner):` acquires and always releases."""
        return Permit(self, units, owner)


class Permit:
    """Units of a limiter for the length of an `async with` block."""

    __slots__ = ("_limiter", "_owner", "_units")

    def __init__(self, limiter: FairLimiter, units: int, owner: str) -> None:
        self._limiter, self._units, self._owner = limiter, units, owner

    def __aenter__(self) -> Awaitable[None]:
        return self._limiter.acquire(self._units, self._owner)

    async def __aexit__(self, *_: object) -> None:
        self._limiter.release(self._units)


class RateLimit:
    """A pause that one 429 imposes on all clients with the same server and credential.

    Nobody sends during the pause. Afterwards waiters send one at a time, each after the response to the one
    before, until a response shows that the server accepts work again.
    """

    def __init__(self) -> None:
        self._until = 0.0
        self._cautious = False
        self._probe = FairLimiter(1)

    def pause(self, seconds: float) -> None:
        self._until = max(self._until, asyncio.get_running_loop().time() + seconds)
        self._cautious = True

    def succeeded(self) -> None:
        self._cautious = False

    async def turn(self) -> bool:
        """Wait until sending makes sense; True if this caller is the probe and must call `finish_probe`."""
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
        if not self._cautious:
            self._probe.release()
        return self._cautious

    def finish_probe(self) -> None:
        self._probe.release()


class Host:
    """One server's circuit breaker: whether it can be reached, and a shared wait for when it cannot."""

    def __init__(self) -> None:
        self.breaker = Breaker()
        self._waiters = 0
        self._prober: asyncio.Task[None] | None = None  # ends when the host responds

    def failed(self, cause: BaseException) -> None:
        self.breaker.failed(cause, time.monotonic())

    def answered(self) -> None:
        if self.breaker.failures:
            self.breaker.answered()
            if self._prober is not None and self._prober is not asyncio.current_task():
                self._prober.cancel()

    async def reachable(
        self, within: float, probe: Callable[[], Awaitable[object]], delay: Callable[[int], float]
    ) -> bool:
        """Wait until the host responds; False if it did not `within` so many seconds.

        One caller's `probe`, which raises OSError if the host does not respond, runs at a time; the next one
        starts `delay(n)` seconds after the n-th.
        """
        loop = asyncio.get_running_loop()
        until = loop.time() + within
        self._waiters += 1
        try:
            while self.breaker.is_open:
                if self._prober is None or self._prober.done():
                    self._prober = loop.create_task(self._probe(probe, delay))
                await asyncio.wait([self._prober], timeout=max(0.0, until - loop.time()))
                if loop.time() >= until:
                    break
        finally:
            self._waiters -= 1
        return not self.breaker.is_open

    async def _probe(self, probe: Callable[[], Awaitable[object]], delay: Callable[[int], float]) -> None:
        """Probe once, and again while anybody waits."""
        while self.breaker.is_open:
            await asyncio.sleep(self.breaker.last + delay(self.breaker.probes) - time.monotonic())
            try:
                await probe()
            except OSError as cause:
                self.failed(cause)
            except ClientClosedError:
                return  # the next waiter starts a prober of its own
            else:
                self.answered()
            if not self._waiters:
                return


_rate_limits: weakref.WeakValueDictionary[tuple[str, str], RateLimit] = weakref.WeakValueDictionary()
_hosts: weakref.WeakValueDictionary[str, Host] = weakref.WeakValueDictionary()


def shared_rate_limit(base_url: str, identity: str) -> RateLimit:
    """The rate limit of one server and credential, the same object for every client of the process."""
    return _rate_limits.setdefault((base_url, identity), RateLimit())


def shared_host(base_url: str) -> Host:
    """The host behind a URL, the same object for every client of the process."""
    return _hosts.setdefault(base_url, Host())

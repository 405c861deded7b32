"""What all clients of one server share: the pause after a 429, and the circuit breaker of a host.

Promises: a cancelled waiter gives up its place. Runs on the background loop.
"""

from __future__ import annotations

import asyncio
import time
import weakref
from collections.abc import Awaitable, Callable

from tinkex.errors import ClientClosedError

CIRCUIT_LIMIT = 5  # failures to connect in a row, after which a host's circuit opens


class RateLimit:
    """A pause that one 429 imposes on all clients with the same server and credential.

    After the pause waiters send one at a time, until a response shows that the server accepts work again.
    """

    def __init__(self) -> None:
        self._until = 0.0
        self._cautious = False
        self._probe = asyncio.Lock()

    def pause(self, seconds: float) -> None:
        self._until = max(self._until, time.monotonic() + seconds)
        self._cautious = True

    def succeeded(self) -> None:
        self._cautious = False

    async def turn(self) -> bool:
        """Wait until sending makes sense; True if this caller is the probe and must call `finish_probe`."""
        if not self._cautious:
            return False
        await self._probe.acquire()
        try:
            while self._cautious and (wait := self._until - time.monotonic()) > 0:
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
    """One server's circuit breaker, shared by all its callers.

    Closed: they send. Open, after CIRCUIT_LIMIT failures to connect in a row: they wait for one probe at
    a time, until the host responds to anything.
    """

    def __init__(self) -> None:
        self.failures = 0  # to connect, in a row
        self.cause: BaseException | None = None
        self._probes = 0  # that failed since it is open
        self._first = self._last = 0.0  # when the failures began, and the last one, by time.monotonic()
        self._waiters = 0
        self._prober: asyncio.Task[None] | None = None  # ends when the host responds

    @property
    def is_open(self) -> bool:
        return self.failures >= CIRCUIT_LIMIT

    def failed(self, cause: BaseException) -> None:
        self._last = time.monotonic()
        if not self.failures:
            self._first = self._last
        self._probes += self.is_open
        self.failures, self.cause = self.failures + 1, cause

    def answered(self) -> None:
        if self.failures:
            self.failures, self._probes, self.cause = 0, 0, None
            if self._prober is not None and self._prober is not asyncio.current_task():
                self._prober.cancel()

    def state(self) -> str:
        if not self.is_open:
            return "circuit closed"
        span = self._last - self._first
        return f"circuit open: {self.failures} failures to connect in a row over {span:.1f} s"

    async def reachable(
        self, within: float, probe: Callable[[], Awaitable[object]], delay: Callable[[int], float]
    ) -> bool:
        """Wait until the host responds; False if it did not within `within` seconds.

        One `probe` runs at a time, and raises OSError if the host does not respond; the next one starts
        `delay(n)` seconds after the n-th.
        """
        loop = asyncio.get_running_loop()
        until = loop.time() + within
        self._waiters += 1
        try:
            while self.is_open:
                if self._prober is None or self._prober.done():
                    self._prober = loop.create_task(self._probe(probe, delay))
                await asyncio.wait([self._prober], timeout=max(0.0, until - loop.time()))
                if loop.time() >= until:
                    break
        finally:
            self._waiters -= 1
        return not self.is_open

    async def _probe(self, probe: Callable[[], Awaitable[object]], delay: Callable[[int], float]) -> None:
        """Probe once, and again while there are waiters."""
        while self.is_open:
            await asyncio.sleep(self._last + delay(self._probes) - time.monotonic())
            try:
                await probe()
                self.answered()
            except OSError as cause:
                self.failed(cause)
            except ClientClosedError:
                return  # the next waiter starts a prober of its own
            if not self._waiters:
                return


# One object for each server (and credential), shared by every client of the process.
_rate_limits: weakref.WeakValueDictionary[tuple[str, str], RateLimit] = weakref.WeakValueDictionary()
_hosts: weakref.WeakValueDictionary[str, Host] = weakref.WeakValueDictionary()


def shared_rate_limit(base_url: str, identity: str) -> RateLimit:
    return _rate_limits.setdefault((base_url, identity), RateLimit())


def shared_host(base_url: str) -> Host:
    return _hosts.setdefault(base_url, Host())

"""Which sampler gets a request, and how many samplers there should be. Pure: no Ray, no clock, no threads.

Requests with the same adapter and the same beginning of the prompt go to the same sampler, which has both the
adapter and the prefix's KV pages: rendezvous hashing, so that adding or removing a sampler moves only its own
share. No sampler takes more than `BOUND` times the mean load: the excess goes to the next in the order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

PREFIX = 128  # tokens of the prompt that count: a later turn of a conversation begins as the first one did
BOUND = 1.25  # times the mean load
LEAST_BOUND = 8  # sequences: with few in flight, a mean says nothing
BUSY_SECONDS = 2.0  # that a request waited: one more sampler is needed
IDLE_SECONDS = 60.0  # that one sampler fewer would have done: it may go
SPARE = 0.5  # of the capacity that must then be left


def route_key(adapter: str | None, prompt: np.ndarray) -> bytes:
    """What requests that should meet on one sampler have in common."""
    name = b"" if adapter is None else adapter.encode()
    return len(name).to_bytes(4, "little") + name + prompt[:PREFIX].astype("<i4").tobytes()


def ranked(key: bytes, samplers: Mapping[int, int] | list[int]) -> list[int]:
    """The samplers in the order in which this key prefers them."""
    return sorted(samplers, key=lambda n: blake2b(key, digest_size=8, salt=n.to_bytes(8, "little")).digest())


def choose(key: bytes, loads: Mapping[int, int], size: int, capacity: int) -> int | None:
    """The sampler for `size` more sequences, by the sequences that each has; None if all are full.

    A request that is larger than `capacity` is admitted to an idle sampler.
    """
    if not loads:
        return None
    bound = max(LEAST_BOUND, math.ceil(BOUND * (sum(loads.values()) + size) / len(loads)))
    order = ranked(key, loads)
    for most in (min(bound, capacity), capacity):
        for number in order:
            if not loads[number] or loads[number] + size <= most:
                return number
    return None


@dataclass
class Autoscaler:
    """How many samplers there should be, between two numbers, by how long requests wait for one."""

    least: int
    most: int
    capacity: int  # sequences of one sampler
    _spare_since: float | None = None

    def wanted(self, now: float, count: int, in_flight: int, waited: float) -> int:
        """`waited`: seconds that the request that is next has waited, 0.0 if none does."""
        if count < self.least:
            return self.least
        if waited > BUSY_SECONDS and count < self.most:
            self._spare_since = None
            return count + 1
        if count == self.least or in_flight > SPARE * self.capacity * (count - 1):
            self._spare_since = None
            return count
        if self._spare_since is None:
            self._spare_since = now
        if now - self._spare_since < IDLE_SECONDS:
            return count
        self._spare_since = None
        return count - 1

"""A counter-based random-number generator: the same (seed, sample, position) always gives the same numbers.

There is no state, so a sequence draws the same tokens after preemption, on another engine and in any batch.
Needs only numpy; knows nothing of tokens.
"""

from __future__ import annotations

import numpy as np

_STRIDE = np.uint64(0x9E3779B97F4A7C15)
_64_BITS = 2**64 - 1


def _mix(x: np.ndarray) -> np.ndarray:
    """SplitMix64's finaliser: every bit of the input reaches every bit of the output."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def stream_keys(seed: np.ndarray, index: np.ndarray, position: np.ndarray) -> np.ndarray:
    """One key, uint64, for each (seed, index of the sample, position)."""
    key = np.zeros(len(seed), np.uint64)
    for part in (seed, index, position):
        key = _mix(key * _STRIDE + np.asarray(part).astype(np.uint64) + np.uint64(1))
    return key


def stream_key(seed: int, index: int, position: int) -> int:
    """`stream_keys` for one, in plain integers: ten times as fast as an array of one."""
    key = 0
    for part in (seed, index, position):
        key = (key * 0x9E3779B97F4A7C15 + part + 1) & _64_BITS
        key = ((key ^ (key >> 30)) * 0xBF58476D1CE4E5B9) & _64_BITS
        key = ((key ^ (key >> 27)) * 0x94D049BB133111EB) & _64_BITS
        key ^= key >> 31
    return key


def exponentials(keys: np.ndarray, count: int) -> np.ndarray:
    """`count` independent standard exponential numbers for each key: float32 [len(keys), count]."""
    counters = np.arange(1, count + 1, dtype=np.uint64) * _STRIDE
    bits = _mix(keys[:, None] + counters[None, :]) >> np.uint64(12)
    return -np.log((bits.astype(np.float64) + 0.5) * 2.0**-52).astype(np.float32)  # inside (0, 1): never 0

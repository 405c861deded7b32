"""The router and the autoscaler: pure functions of what they are told."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from tinkex.engine.cluster.routing import (
    BUSY_SECONDS,
    IDLE_SECONDS,
    LEAST_BOUND,
    PREFIX,
    Autoscaler,
    choose,
    ranked,
    route_key,
)

KEYS = [route_key(f"adapter-{n % 7}", np.arange(n, n + 20)) for n in range(2000)]


def test_requests_with_one_adapter_and_one_beginning_have_one_key():
    first = np.arange(3 * PREFIX, dtype=np.int32)
    other = np.concatenate([first[:PREFIX], first[:PREFIX]])
    assert route_key("a", first) == route_key("a", other.astype(np.int64))
    assert (
        len({route_key("a", first), route_key("b", first), route_key(None, first), route_key("a", first[1:])})
        == 4
    )


def test_keys_spread_evenly_over_samplers():
    counts = Counter(ranked(key, [0, 1, 2, 3])[0] for key in KEYS)
    assert min(counts.values()) > 0.8 * len(KEYS) / 4


def test_a_sampler_that_goes_or_comes_moves_its_own_keys_alone():
    for key in KEYS:
        four = ranked(key, [0, 1, 2, 3])
        assert ranked(key, [0, 1, 3]) == [n for n in four if n != 2]


def test_one_popular_prefix_is_spread_once_its_sampler_has_its_share():
    loads = dict.fromkeys(range(4), 0)
    for _ in range(200):
        number = choose(KEYS[0], loads, 1, 256)
        assert number is not None
        loads[number] += 1
    assert max(loads.values()) <= 1.25 * 50 + 1
    few = dict.fromkeys(range(4), 0)
    for _ in range(LEAST_BOUND):
        few[choose(KEYS[0], few, 1, 256)] += 1  # type: ignore[index]
    assert max(few.values()) == LEAST_BOUND, "a few of them stay together"


@pytest.mark.parametrize(("loads", "size", "wanted"), [
    ({}, 1, None), ({0: 16, 1: 16}, 1, None), ({0: 16, 1: 15}, 1, 1), ({0: 10, 1: 0}, 99, 1),
    ({0: 10, 1: 1}, 99, None),
])  # fmt: skip
def test_no_sampler_gets_more_than_it_can_hold(loads: dict[int, int], size: int, wanted: int | None):
    assert choose(b"key", loads, size, 16) == wanted


def test_samplers_are_added_while_requests_wait_and_let_go_when_they_are_idle():
    scaler = Autoscaler(1, 3, capacity=10)
    assert scaler.wanted(0.0, 0, 0, 0.0) == 1
    assert scaler.wanted(1.0, 1, 15, BUSY_SECONDS / 2) == 1
    assert scaler.wanted(2.0, 1, 30, BUSY_SECONDS + 0.1) == 2
    assert scaler.wanted(3.0, 3, 90, 60.0) == 3, "there may be no more"
    assert scaler.wanted(4.0, 3, 5, 0.0) == 3
    assert scaler.wanted(3.0 + IDLE_SECONDS, 3, 5, 0.0) == 3, "not long enough"
    assert scaler.wanted(4.0 + IDLE_SECONDS, 3, 5, 0.0) == 2
    assert scaler.wanted(5.0 + IDLE_SECONDS, 2, 5, 0.0) == 2
    assert scaler.wanted(6.0 + IDLE_SECONDS, 2, 9, 0.0) == 2, "one could not hold them with room to spare"
    assert scaler.wanted(9.0 + 3 * IDLE_SECONDS, 2, 5, 0.0) == 2, "idle since then alone"

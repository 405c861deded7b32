"""The reports of a cluster's processes: who is well, who is gone, and who has been silent for too long.

A process answers beside its engine's thread, so a long command is no silence. One that was stopped, or hangs
with its interpreter locked, says nothing, and its calls would wait for good.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Any

import ray
from ray.exceptions import RayError

from tinkex.engine.protocol import EngineLost, Heartbeat

SILENCE = 60.0  # seconds without a report after which a process is taken for lost


class Heartbeats:
    """Asks each actor for its report, one at a time."""

    def __init__(self) -> None:
        self._asked: dict[Any, tuple[Any, float]] = {}  # by actor: the call, and since when

    def collect(self, actors: Iterable[Any]) -> Iterator[tuple[Any, Heartbeat | Exception]]:
        """What each has reported since the last time; the error of one that is lost. Blocks shortly."""
        now = time.monotonic()
        asked = {actor: self._asked.get(actor) or (actor.beat.remote(), now) for actor in actors}
        calls = [call for call, _ in asked.values()]
        answered = set(ray.wait(calls, num_returns=len(calls), timeout=1.0)[0] if calls else ())
        self._asked = {actor: one for actor, one in asked.items() if one[0] not in answered}
        for actor, (call, since) in asked.items():
            if call in answered:
                try:
                    yield actor, ray.get(call)
                except RayError as error:
                    yield actor, error
            elif now - since > SILENCE:
                yield actor, EngineLost(f"no report for {SILENCE:.0f} s")

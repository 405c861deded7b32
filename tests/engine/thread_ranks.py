"""A tensor-parallel group whose ranks are threads of this process: many families in seconds, without gloo."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tinkex.engine.torch.tensor_parallel.shards import Reduction, Shards
from tinkex.engine.torch.tensor_parallel.team import Team


class Meeting:
    """Where the threads of a group exchange tensors."""

    def __init__(self, count: int, timeout: float) -> None:
        self.places: list[Any] = [None] * count
        self.barrier = threading.Barrier(count, timeout=timeout)

    def exchange(self, rank: int, x: Tensor, make: Callable[[Sequence[Tensor]], Any]) -> Any:
        self.places[rank] = x
        self.barrier.wait()
        made = make(self.places)
        self.barrier.wait()  # all have read: each may change its own
        return made


class ThreadShards(Shards):
    """A rank that is a thread of this process: all ranks may be on one device."""

    def __init__(self, rank: int, meeting: Meeting) -> None:
        super().__init__(rank, len(meeting.places))
        self._meeting = meeting

    @classmethod
    def group(cls, count: int, timeout: float = 120.0) -> list[ThreadShards]:
        meeting = Meeting(count, timeout)
        return [cls(rank, meeting) for rank in range(count)]

    def _reduce(self, x: Tensor, how: Reduction) -> None:
        def reduced(all_x: Sequence[Tensor]) -> Tensor:
            out = all_x[0].clone()
            for other in all_x[1:]:
                out = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}[how](out, other)
            return out

        x.copy_(self._meeting.exchange(self.rank, x, reduced))

    def _broadcast(self, x: Tensor) -> None:
        x.copy_(self._meeting.exchange(self.rank, x, lambda all_x: all_x[0].clone()))

    def _gather(self, x: Tensor) -> list[Tensor]:
        return self._meeting.exchange(self.rank, x, lambda all_x: [one.clone() for one in all_x])

    def close(self) -> None:
        self._meeting.barrier.abort()


class ThreadTeam(Team):
    """Ranks that are threads of this process; `build` makes each rank's `Follower.execute`."""

    def __init__(self, ranks: list[ThreadShards], build: Callable[[Shards], Callable[[Any], None]]) -> None:
        super().__init__(ranks[0])
        self._queues: list[queue.SimpleQueue[Any]] = []
        self._threads: list[threading.Thread] = []
        for shards in ranks[1:]:
            orders: queue.SimpleQueue[Any] = queue.SimpleQueue()
            self._queues.append(orders)
            self._threads.append(
                threading.Thread(target=self._follow, args=(shards, build, orders), daemon=True)
            )
            self._threads[-1].start()

    def _follow(
        self, shards: Shards, build: Callable[[Shards], Callable[[Any], None]], orders: queue.SimpleQueue[Any]
    ) -> None:
        try:
            execute = build(shards)
            while (order := orders.get()) is not None:
                execute(order)
        except BaseException as error:
            self.lose(f"rank {shards.rank} failed: {type(error).__name__}: {error}")

    def least_free(self) -> float:
        return float("inf")

    def _send(self, order: Any) -> None:
        for orders in self._queues:
            orders.put(order)

    def _end(self) -> None:
        for orders in self._queues:
            orders.put(None)
        for thread in self._threads:
            thread.join(10.0)

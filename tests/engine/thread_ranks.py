"""A tensor-parallel group whose ranks are threads of this process: many families in seconds, without gloo.

One rank computes at a time, up to its next collective: Triton's interpreter is not for several threads, and
on one GPU the ranks' kernels follow each other on one stream. `OneGpuShards` captures the steps of all ranks
in one CUDA graph.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from tinkex.engine.protocol import EngineConfig
from tinkex.engine.torch.engine import TorchEngine
from tinkex.engine.torch.tensor_parallel.ranks import Ranks
from tinkex.engine.torch.tensor_parallel.shards import Reduction, Shards
from tinkex.engine.torch.tensor_parallel.team import Team
from tinkex.engine.torch.tensor_parallel.worker import load_follower


class Meeting:
    """Where the threads of a group exchange tensors. The one that computes has the `turn`."""

    def __init__(self, count: int, timeout: float) -> None:
        self.places: list[Any] = [None] * count
        self.barrier = threading.Barrier(count, timeout=timeout)
        self.turn = threading.RLock()
        self.stream: Any = None  # that rank 0 captures

    def wait(self) -> None:
        """Until all are here."""
        held = self.turn._is_owned()  # type: ignore[attr-defined]  # not while a rank is built
        if held:
            self.turn.release()
        try:
            self.barrier.wait()
        finally:
            if held:
                self.turn.acquire()

    def exchange(self, rank: int, x: Tensor, make: Callable[[Sequence[Tensor]], Any]) -> Any:
        self.places[rank] = x
        self.wait()
        made = make(self.places)
        self.wait()  # all have read: each may change its own
        return made


class ThreadShards(Shards):
    """A rank that is a thread of this process: all ranks may be on one device."""

    def __init__(self, rank: int, meeting: Meeting) -> None:
        super().__init__(rank, len(meeting.places))
        self.meeting = meeting

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

        x.copy_(self.meeting.exchange(self.rank, x, reduced))

    def _broadcast(self, x: Tensor) -> None:
        x.copy_(self.meeting.exchange(self.rank, x, lambda all_x: all_x[0].clone()))

    def _gather(self, x: Tensor) -> list[Tensor]:
        return self.meeting.exchange(self.rank, x, lambda all_x: [one.clone() for one in all_x])

    def close(self) -> None:
        self.meeting.barrier.abort()


class OneGpuShards(ThreadShards):
    """Ranks on one GPU. Rank 0 captures; the others' threads add to the stream that it captures.

    So one graph holds the kernels and the sums of all ranks, in the order in which they take turns.
    """

    def captured(self, step: Callable[[], None], record: Callable[[Callable[[], None]], Any]) -> Any:
        meeting = self.meeting

        def together() -> None:
            meeting.stream = torch.cuda.current_stream()
            meeting.wait()
            step()
            meeting.wait()

        meeting.wait()  # nobody launches anything else any more
        if self.rank == 0:
            graph = record(together)
        else:
            graph = None
            meeting.wait()
            with torch.cuda.stream(meeting.stream):
                step()
            meeting.wait()
        return TurnOfAll(meeting, graph)


class TurnOfAll:
    """A graph of all ranks, which rank 0 replays when the others have filled their inputs."""

    def __init__(self, meeting: Meeting, graph: torch.cuda.CUDAGraph | None) -> None:
        self._meeting, self._graph = meeting, graph

    def replay(self) -> None:
        self._meeting.wait()
        if self._graph is not None:
            self._graph.replay()
        self._meeting.wait()


class ThreadTeam(Team):
    """Ranks that are threads of this process; `build` makes each rank's `Follower.execute`."""

    def __init__(self, ranks: list[ThreadShards], build: Callable[[Shards], Callable[[Any], None]]) -> None:
        super().__init__(ranks[0])
        self._meeting, self._done = ranks[0].meeting, queue.SimpleQueue[int]()
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
                with self._meeting.turn:
                    execute(order)
                self._done.put(shards.rank)
        except BaseException as error:
            self.lose(f"rank {shards.rank} failed: {type(error).__name__}: {error}")
            self._done.put(shards.rank)

    @contextmanager
    def order(self, order: Any) -> Iterator[None]:
        """The others have executed it, too, when this ends: rank 0 alone computes between orders."""
        with super().order(order):
            with self._meeting.turn:
                yield
            for _ in self._threads:
                self._done.get(timeout=120)

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


def threaded(config: EngineConfig, kind: type[ThreadShards] = ThreadShards) -> TorchEngine:
    """An engine whose ranks are threads of this process, all on one device."""
    device = torch.device("cpu" if config.device == "cpu" else "cuda")

    def build(shards: Shards) -> Callable[[Any], None]:
        return load_follower(config, shards, device).execute

    return TorchEngine(config, ranks=Ranks(ThreadTeam(kind.group(config.tensor), build)))

"""The contract's trainer over `TrainerActor`s: a queue in this process, one command at a time over there.

A command that has not been sent can be cancelled. When an actor is gone, all unanswered and all
later commands fail with EngineLost. A command is never sent twice, because it may have been executed.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from concurrent.futures import Future, InvalidStateError
from typing import Any

import ray
from ray.exceptions import RayError

from tinkex.engine.cluster.actors import StoredExport, is_lost
from tinkex.engine.cluster.trainer_group import TrainerGroup
from tinkex.engine.protocol import Command, EngineError, EngineLost, Heartbeat, OptimStep, R
from tinkex.types.params import LoraConfig

TOGETHER = 32  # steps in one call: the first waits for the last


class RemoteExport:
    """An exported adapter whose bytes are in Ray's object store. Pickled, it is the export itself."""

    def __init__(self, stored: StoredExport) -> None:
        self.stored = stored

    @property
    def lora(self) -> LoraConfig:
        return self.stored.lora

    @property
    def nbytes(self) -> int:
        return self.stored.nbytes

    def __reduce__(self) -> tuple[Any, ...]:
        return _itself, (ray.get(self.stored.refs[0]),)


def _itself(export: Any) -> Any:
    return export


class RemoteTrainer:
    """One trainer of one or several processes."""

    def __init__(self, group: TrainerGroup) -> None:
        self._group = group
        self._queue: deque[tuple[Command[Any], Future[Any]]] = deque()
        self._wake = threading.Condition()
        self.trouble = ""  # why it can do nothing any more
        threading.Thread(target=self._run, name="tinkex-remote-trainer", daemon=True).start()

    @property
    def beat(self) -> Heartbeat:
        """Its last report."""
        return self._group.beat

    @property
    def actors(self) -> list[Any]:
        return self._group.actors

    def submit(self, command: Command[R]) -> Future[R]:
        future: Future[R] = Future()
        with self._wake:
            if self.trouble:
                raise EngineLost(self.trouble)
            self._queue.append((command, future))
            self._wake.notify()
        return future

    def close(self, why: str = "the engine was closed") -> None:
        """End its processes; pending commands fail."""
        with self._wake:
            if self.trouble:
                return
            self.trouble = why
            self._wake.notify()
        for actor in self._group.actors:
            with contextlib.suppress(RayError):
                ray.kill(actor)

    def heard(self, actor: Any, told: Heartbeat | Exception) -> None:
        """One of its processes has reported, or is lost."""
        if isinstance(told, Exception):
            self.close(_why(told))
        elif actor is self.actors[0]:
            self._group.beat = told

    def _run(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._queue or self.trouble)
                if self.trouble:
                    break
                taken = self._take()
            if begun := [one for one in taken if one[1].set_running_or_notify_cancel()]:
                self._execute([command for command, _ in begun], [future for _, future in begun])
            del taken, begun  # they may be large
        for _, future in self._queue:
            settle(future, EngineLost(self.trouble))

    def _take(self) -> list[tuple[Command[Any], Future[Any]]]:
        """The next command; steps that wait behind a step go with it, as a call takes longer than a step."""
        taken = [self._queue.popleft()]
        while self._queue and len(taken) < TOGETHER:
            if not all(isinstance(command, OptimStep) for command, _ in (taken[0], self._queue[0])):
                break
            taken.append(self._queue.popleft())
        return taken

    def _execute(self, commands: list[Command[Any]], futures: list[Future[Any]]) -> None:
        try:
            results = self._group.execute_all(commands)
        except RayError as error:
            self.close(_why(error))
            results = [EngineLost(self.trouble) for _ in commands]
        except Exception as error:  # a command that cannot be pickled, say
            results = [EngineError(f"{type(error).__name__}: {error}") for _ in commands]
        if lost := next(filter(is_lost, results), None):
            self.close(lost.message)
        for future, result in zip(futures, results, strict=True):
            settle(future, RemoteExport(result) if isinstance(result, StoredExport) else result)


def fetch(reference: Any, timeout: float | None = None) -> Any:
    """The value of one reference; blocks until it is there."""
    return ray.get(reference, timeout=timeout)


def settle(future: Future[Any], result: Any) -> None:
    """Resolve a future, whose caller may have cancelled it meanwhile."""
    with contextlib.suppress(InvalidStateError):
        if isinstance(result, BaseException):
            future.set_exception(result)
        else:
            future.set_result(result)


def _why(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"its process on the cluster is gone ({type(error).__name__}{': ' + lines[0] if lines else ''})"

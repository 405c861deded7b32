"""The one thread of an engine: training commands one after the other, decoding steps in between.

Two kinds of work come in from other threads. A job (a command, a publication) runs alone, in the order given.
An errand (a request that arrives or is cancelled) is cheap, and runs before the next decoding step, even in
the middle of a job that calls `between`; those that come together after a rest are taken together. Promises:
nobody waits for ever: when the thread ends, everything that was not done fails with EngineError. A failure
after which the device cannot be used any more ends the thread. Knows nothing of models.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from typing import Any, Protocol, TypeVar

from tinkex.engine.protocol import EngineError

log = logging.getLogger("tinkex")
_PAUSE, _LONGEST = 3e-4, 0.02  # seconds without another request that end a burst, and its longest
T = TypeVar("T")


class Steps(Protocol):
    """What the thread does when it has nothing else to do, and between micro-batches."""

    @property
    def busy(self) -> bool: ...

    def step(self) -> None: ...

    def fail_all(self, error: EngineError) -> None: ...


class Worker:
    """Starts its thread at once. `begin` runs on it first; what it returns runs before every turn.

    `probe` is tried after each failure that nobody expected: if it fails too, the device is lost.
    """

    def __init__(
        self, steps: Steps, begin: Callable[[], Callable[[], None]], probe: Callable[[], None] = lambda: None
    ) -> None:
        self._steps, self._begin, self._probe = steps, begin, probe
        self._why = "the engine was closed"
        self._wake = threading.Condition()
        self._jobs: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._errands: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="tinkex-engine", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        return not self._closed

    def job(self, function: Callable[[], T]) -> Future[T]:
        return self._put(self._jobs, function)

    def errand(self, function: Callable[[], T]) -> Future[T]:
        return self._put(self._errands, function)

    def _put(
        self, queue: deque[tuple[Callable[[], Any], Future[Any]]], function: Callable[[], T]
    ) -> Future[T]:
        if threading.current_thread() is self._thread:
            raise EngineError("an engine's callbacks cannot wait for the engine: call it from another thread")
        future: Future[T] = Future()
        with self._wake:
            if self._closed:
                raise EngineError(self._why)
            queue.append((function, future))
            self._wake.notify()
        return future

    def close(self) -> None:
        """Stop after the micro-batch or step that runs now; what is left fails."""
        with self._wake:
            self._closed = True
            self._wake.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    # -- on the thread ---------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._loop(self._begin())
        finally:
            self._end()

    def _loop(self, look: Callable[[], None]) -> None:
        while not self._closed:
            rested = False
            with self._wake:
                while not (self._closed or self._jobs or self._errands or self._steps.busy):
                    rested = self._wake.wait()
            look()
            if rested:
                self._gather()
            self._turn()
            if self._jobs and not self._closed:
                self._do(*self._jobs.popleft())

    def _gather(self) -> None:
        """Take in requests for as long as they keep coming.

        A step of whichever came first would let all others wait, and be of another size every time.
        """
        end = time.monotonic() + _LONGEST
        while time.monotonic() < end:
            self._run_errands()
            with self._wake:
                self._wake.wait_for(lambda: self._errands or self._jobs or self._closed, _PAUSE)
            if not self._errands:
                return

    def _end(self) -> None:
        with self._wake:
            self._closed = True  # also when the thread dies of a bug: nothing more is taken in
        self._run_errands()  # so that requests that just came are among those that fail
        self._steps.fail_all(EngineError(self._why))
        for _, future in self._jobs:
            _settle(future, EngineError(self._why))

    def between(self) -> None:
        """Called by a job that takes long, where it can be interrupted: errands and one decoding step."""
        if self._closed:
            raise EngineError(self._why)
        self._turn()

    def _run_errands(self) -> None:
        while self._errands:
            self._do(*self._errands.popleft())

    def _turn(self) -> None:
        self._run_errands()
        if self._steps.busy:
            try:
                self._steps.step()
            except Exception as error:  # the step looks after its own: a bug, and not the thread's end
                self._steps.fail_all(EngineError(f"decoding failed: {type(error).__name__}: {error}"))
                self.examine()

    def _do(self, function: Callable[[], Any], future: Future[Any]) -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            outcome = function()
        except EngineError as error:
            outcome = error
        except Exception as error:
            outcome = EngineError(f"{type(error).__name__}: {error}")
            outcome.__cause__ = error
            self.examine()
        _settle(future, outcome)

    def examine(self) -> None:
        """Stop if the device does not work any more: some errors of a GPU are for the rest of the process."""
        try:
            self._probe()
        except Exception as error:
            self._why = f"the device has failed, and only a restart helps: {error}"
            log.error("%s", self._why)
            self._closed = True


def _settle(future: Future[Any], outcome: Any) -> None:
    try:
        if isinstance(outcome, EngineError):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)
    except InvalidStateError:  # cancelled meanwhile
        pass

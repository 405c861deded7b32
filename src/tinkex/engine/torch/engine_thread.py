"""The one thread of an engine: it executes training commands in order, and decodes between them.

While both have work, training has half of the time or more; between two commands that take longer than a step
there is one. When the thread ends, everything that was not done fails with EngineLost; an error after which
the device cannot be used any more ends it. Knows nothing of models.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

from tinkex.engine.protocol import EngineError, EngineLost

if TYPE_CHECKING:
    from tinkex.engine.torch.continuous_batch import ContinuousBatch

log = logging.getLogger("tinkex")
# A burst of requests ends when none has come for `_PAUSE` seconds, or after `_LONGEST`.
_PAUSE, _LONGEST = 3e-4, 0.02
_REPORT_EVERY = 0.01  # seconds, while decoding
_MOST_AHEAD = 0.1  # seconds that decoding or training may have had more than the other
_SOON = 0.005  # seconds in which a command comes that is sent when the last one's result is there
T = TypeVar("T")
Queue = deque[tuple[Callable[[], Any], Future[Any]]]
BeforeTurn = Callable[[], None]


def _nothing() -> None:
    """Before a turn, or as a probe."""


class EngineThread:
    """`begin` runs on the thread first; what it returns runs before every turn.

    `probe`, called after each unexpected failure, raises if the device is lost.
    """

    def __init__(
        self,
        decoding: ContinuousBatch,
        begin: Callable[[], BeforeTurn] = lambda: _nothing,
        probe: Callable[[], None] = _nothing,
    ) -> None:
        self._decoding, self._begin, self._probe = decoding, begin, probe
        self._why = "the engine was closed"
        self._wake = threading.Condition()
        self._commands: Queue = deque()
        self._posted: Queue = deque()
        self._closed = False
        self._ahead = 0.0  # seconds that decoding has had more than training
        self._after_command = False  # no decode step has run since the last command
        # The last report: taken after each command, on going idle, and regularly while decoding.
        self._report: Callable[[], Mapping[str, float]] = dict
        self.stats, self._reported = self._report(), 0.0
        self._thread = threading.Thread(target=self._run, name="tinkex-engine", daemon=True)

    def start(self, report: Callable[[], Mapping[str, float]] = dict) -> None:
        """Begin with what was queued; `report` gives `stats`."""
        self._report, self.stats = report, report()
        self._thread.start()

    @property
    def trouble(self) -> str:
        """Why the thread can do nothing any more; "" while it can."""
        return self._why if self._closed else ""

    def submit(self, command: Callable[[], T]) -> Future[T]:
        """Queue a command: one runs per turn, after the commands before it."""
        return self._put(self._commands, command)

    def post(self, function: Callable[[], T]) -> Future[T]:
        """Run something short, such as admitting a request, before the next decode step."""
        return self._put(self._posted, function)

    def _put(self, queue: Queue, function: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        with self._wake:
            if self._closed:
                raise EngineLost(self._why)
            queue.append((function, future))
            self._wake.notify()
        return future

    def close(self) -> None:
        """Stop after the command or decode step that runs now; what is left fails."""
        with self._wake:
            self._closed = True
            self._wake.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        try:
            self._loop(self._begin())
        finally:
            with self._wake:
                self._closed = True  # also when the thread dies of a bug: nothing more is accepted
            self._run_posted()  # so that requests that just came are among those that fail
            self._decoding.fail_all(EngineLost(self._why))
            for _, future in self._commands:
                settle(future, EngineLost(self._why))

    def _loop(self, before_turn: BeforeTurn) -> None:
        while not self._closed:
            if rested := not (self._commands or self._posted or self._decoding.busy):
                self._take_report()
                with self._wake:
                    self._wake.wait_for(lambda: self._closed or self._commands or self._posted)
            elif time.monotonic() > self._reported + _REPORT_EVERY:
                self._take_report()
            before_turn()
            if rested:
                self._gather()
            self._run_posted()
            if not self._training_is_due():
                self._step()
            if self._commands and not self._closed:
                began = time.monotonic()
                self._do(*self._commands.popleft(), report=True)
                self._count(began - time.monotonic())
                self._after_command = True

    def _training_is_due(self) -> bool:
        """Has decoding had more of the time, and is a command there, or about to follow the last one?"""
        if self._ahead <= 0 or not self._decoding.busy:
            return False
        if self._after_command and not self._commands:
            with self._wake:
                self._wake.wait_for(lambda: self._closed or self._commands, min(_SOON, self._ahead / 8))
        return bool(self._commands)

    def _count(self, seconds: float) -> None:  # of decoding; training's are negative
        self._ahead = max(-_MOST_AHEAD, min(_MOST_AHEAD, self._ahead + seconds))

    def _gather(self) -> None:
        """Admit a burst of requests before the first decode step, so that sizes do not vary by timing."""
        end = time.monotonic() + _LONGEST
        while time.monotonic() < end:
            self._run_posted()
            with self._wake:
                self._wake.wait_for(lambda: self._posted or self._commands or self._closed, _PAUSE)
            if not self._posted:
                return

    def _run_posted(self) -> None:
        while self._posted:
            self._do(*self._posted.popleft())

    def _step(self) -> None:
        if not self._decoding.busy:
            return
        began = time.monotonic()
        try:
            self._decoding.step()
        except Exception as error:  # a bug, since a step fails its own requests: the thread goes on
            if self._device_works():
                message = f"decoding failed: {type(error).__name__}: {error}"
                self._decoding.fail_all(EngineError(message))
        self._count(time.monotonic() - began)
        self._after_command = False

    def rest(self) -> None:
        """Called by a long command between its parts: decode a step, unless the thread is closed."""
        if not self._closed:
            self._run_posted()
            self._step()

    def _do(self, function: Callable[[], Any], future: Future[Any], report: bool = False) -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            outcome = function()
        except EngineError as error:
            outcome = error
        except Exception as error:
            outcome = EngineError(f"{type(error).__name__}: {error}")
            outcome.__cause__ = error
            if not self._device_works():
                outcome = EngineLost(self._why)
        if report:
            self._take_report()
        settle(future, outcome)

    def _take_report(self) -> None:
        self.stats, self._reported = self._report(), time.monotonic()

    def _device_works(self) -> bool:
        """Close if not: some errors of a GPU last for the rest of the process."""
        try:
            self._probe()
        except Exception as error:
            self._why = f"the device has failed, and only a restart helps: {error}"
            log.error("%s", self._why)
            self._closed = True
        return not self._closed


def settle(future: Future[Any], outcome: Any) -> None:
    """Give a future its result or error; one that was cancelled meanwhile is left alone."""
    with suppress(InvalidStateError):
        if isinstance(outcome, EngineError):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)

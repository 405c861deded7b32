"""One base model's trainer at work: takes what the scheduler says is next, executes it, resolves its future.

Promises: one command at a time, never on the event loop; an exception fails the work it belongs to and
nothing else; a failed pass fails the step of its window, and the run's gradients are cleared, so that
nothing is ever applied to a part of a batch. Knows nothing of requests, files or the ledger.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from tinkex import tracing
from tinkex.engine.protocol import (
    ClearGradients,
    Command,
    Engine,
    EngineError,
    Failure,
    ForwardBackward,
    Pass,
)
from tinkex.service.engines import BaseModel
from tinkex.service.futures import Future
from tinkex.service.refusal import Refusal
from tinkex.service.scheduler import Scheduler, Work
from tinkex.service.threads import Lane

log = logging.getLogger("tinkex.service")
R = TypeVar("R")
T = TypeVar("T")


@dataclass(frozen=True)
class Job:
    """What is to be done for one piece of work: a pass, or a barrier that does it by itself."""

    future: Future
    name: str  # the operation, for metrics and traces
    one_pass: Pass | None = None
    barrier: Callable[[Engine], Awaitable[Any]] | None = None
    breaks_window: bool = False  # if it fails, so must the next step of its run
    replayed: bool = False  # it was done, and counted, in an earlier life
    hop: tracing.Hop | None = None  # its wait for its turn, for whoever traces


class Worker:
    """The loop between a scheduler and an engine."""

    def __init__(self, model: BaseModel, scheduler: Scheduler) -> None:
        self.model = model
        self.scheduler = scheduler
        # Runs that have had a pass since their last step: why that step must fail, or None if it need not.
        self._windows: dict[str, str | None] = {}
        self._errands: deque[tuple[Callable[[], Awaitable[Any]], asyncio.Future[Any]]] = deque()
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._stopping = False
        # Called before work of a run, to have it on the device; and after a pass, a step or a load, when the
        # run holds no gradients.
        self.prepare: Callable[[Engine, Work], Awaitable[None]] = _nothing
        self.settled: Callable[[Engine, Work], Awaitable[None]] = _nothing
        # Told of every finished piece of work: its operation, how long it ran.
        self.observe: Callable[[Work, str, float], None] = lambda work, op, seconds: None

    def wake(self) -> None:
        if self._task is None and not self._stopping:
            self._task = asyncio.get_running_loop().create_task(self._run(), name=f"worker {self.model.name}")
        self._wake.set()

    async def between(self, errand: Callable[[], Awaitable[T]]) -> T:
        """Do something between two batches, when nothing of any run is being executed."""
        done: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._errands.append((errand, done))
        self.wake()
        return await done

    async def stop(self) -> None:
        """Finish what is being executed, and begin nothing more."""
        self._stopping = True
        self._wake.set()
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
        for _, done in self._errands:
            done.cancel()

    def has_gradients(self, run: str) -> bool:
        """Has it had passes that no step has used yet?"""
        return run in self._windows

    def forget(self, run: str) -> None:
        self._windows.pop(run, None)

    # -- the loop ----------------------------------------------------------------------------------------

    async def _run(self) -> None:
        while not self._stopping:
            self._wake.clear()
            now = time.monotonic()
            again = self.scheduler.give_up_gaps(now)
            if self._errands:
                await self._do_errand(*self._errands.popleft())
            elif (until := self.scheduler.gather_until(now)) is not None:
                await self._sleep(until if again is None else min(until, again))
            elif batch := self.scheduler.next_batch(now):
                await self._execute(batch)
            else:
                await self._sleep(again)

    async def _sleep(self, until: float | None) -> None:
        timeout = None if until is None else max(0.0, until - time.monotonic())
        try:
            await asyncio.wait_for(self._wake.wait(), timeout)
        except TimeoutError:
            pass

    async def _do_errand(self, errand: Callable[[], Awaitable[Any]], done: asyncio.Future[Any]) -> None:
        try:
            result = await errand()
        except Exception as error:
            if not done.done():
                done.set_exception(error)
        else:
            if not done.done():
                done.set_result(result)

    async def _execute(self, batch: list[Work]) -> None:
        started = time.monotonic()
        for work in batch:
            if work.what.hop is not None:
                work.what.hop.end()
        try:
            engine = await self.model.load()
        except Exception as error:
            return self._finish(batch, started, error)
        ready: list[Work] = []
        for work in batch:  # one after the other: each may need room on the device
            try:
                await self.prepare(engine, work)
                ready.append(work)
            except Exception as error:
                self._finish([work], started, error)
        if ready and ready[0].is_pass:
            await self._finishing(ready, started, self._passes(engine, ready))
        else:
            barriers = [self._finishing([w], started, self._barrier(engine, w)) for w in ready]
            await asyncio.gather(*barriers)

    async def _finishing(self, batch: list[Work], started: float, doing: Awaitable[None]) -> None:
        try:
            await doing
        except Exception as error:
            self._finish(batch, started, error)
        else:
            self._finish(batch, started)

    def _finish(self, batch: list[Work], started: float, error: Exception | None = None) -> None:
        """It is done or has failed, and its runs may go on: at once, not when all that it shares with is."""
        now = time.monotonic()
        for work in batch:
            if error is not None:
                self._fail(work, error)
            self.scheduler.done(work, now)
            if not work.what.replayed:
                self.observe(work, work.what.name, now - started)

    async def _passes(self, engine: Engine, batch: list[Work]) -> None:
        for work in batch:
            if work.what.one_pass.backward:
                self._windows.setdefault(work.run, None)
        command = ForwardBackward(tuple(work.what.one_pass for work in batch))
        with _traced(batch):
            outcomes = await execute(engine, command)
        for work, outcome in zip(batch, outcomes, strict=True):
            if isinstance(outcome, Failure):
                self._fail(work, EngineError(outcome.message, outcome.category))
            else:
                work.what.future.resolve(outcome)
        for work in {work.run: work for work in batch}.values():  # the last one of each
            if not self.has_gradients(work.run):
                await self.settled(engine, work)

    async def _barrier(self, engine: Engine, work: Work) -> None:
        job: Job = work.what
        assert job.barrier is not None
        with _traced([work]):
            await self._do_barrier(engine, work, job, job.barrier)

    async def _do_barrier(
        self, engine: Engine, work: Work, job: Job, barrier: Callable[[Engine], Awaitable[Any]]
    ) -> None:
        if job.name != "optim_step":
            job.future.resolve(await barrier(engine))
            if job.name == "load_weights":
                self._windows.pop(work.run, None)  # loading has cleared the gradients
                await self.settled(engine, work)
            return
        try:
            reason = self._windows.pop(work.run, None)
            if reason is not None:
                raise EngineError(
                    f"no step was taken: a pass before it failed ({reason}), and the gradients were "
                    "discarded with it",
                    "user",
                )
            job.future.resolve(await barrier(engine))
        except Exception:
            with contextlib.suppress(EngineError):  # the run is not there at all
                await execute(engine, ClearGradients(work.run))
            raise
        await self.settled(engine, work)

    def _fail(self, work: Work, error: Exception) -> None:
        job: Job = work.what
        category = error.category if isinstance(error, EngineError) else "server"
        if isinstance(error, Refusal):
            category = "user" if error.status < 500 else "server"
        elif not isinstance(error, EngineError):
            log.exception("%s of %s failed", job.name, work.run, exc_info=error)
        if job.breaks_window:
            self._windows[work.run] = self._windows.get(work.run) or str(error)
        job.future.fail(str(error) or type(error).__name__, category)


def _traced(batch: list[Work]) -> AbstractContextManager[Any]:
    """The engine's hop: a part of the first request's trace, linked to those of the others in the batch."""
    hops = [work.what.hop for work in batch if work.what.hop is not None]
    if not hops:
        return contextlib.nullcontext()
    name = f"engine {batch[0].what.name}"
    hop = tracing.begin(name, parent=hops[0], links=hops[1:], tinkex_requests=len(batch))
    return contextlib.nullcontext() if hop is None else hop


async def _nothing(engine: Engine, work: Work) -> None:
    """No one wants to know."""


_lanes: WeakKeyDictionary[Engine, Lane] = WeakKeyDictionary()


async def execute(engine: Engine, command: Command[R]) -> R:
    """Run a command of the trainer, off the event loop, after those given before."""
    lane = _lanes.setdefault(engine, Lane())
    return await lane.run(lambda: engine.trainer.run(command))

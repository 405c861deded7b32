"""The loop between the scheduler and the engine of one base model: take the next batch, execute it, resolve.

One batch at a time. An exception fails the request it belongs to and no other. A failed pass fails the next
step of its run, and the gradients are cleared: nothing is ever applied to part of a batch. A lost engine ends
`run` with EngineLost, and what was being executed stays unanswered. Knows nothing of journals or files.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import weakref
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

from tinkex import tracing
from tinkex.engine.protocol import (
    ClearGradients,
    ContinuePasses,
    Engine,
    EngineError,
    EngineLost,
    Failure,
    ForwardBackward,
    Pass,
    PassProgress,
)
from tinkex.service.futures import failure
from tinkex.service.refusal import Refusal
from tinkex.service.runs.barriers import Barriers
from tinkex.service.runs.execution import Execution, FinishedWork
from tinkex.service.runs.lifecycle import RunState
from tinkex.service.runs.residency import Residency
from tinkex.service.scheduler import QueuedRequest, Scheduler
from tinkex.service.served_models import ServedModel, execute
from tinkex.types.outputs import ForwardBackwardOutput

log = logging.getLogger("tinkex.service")
T = TypeVar("T")


class TrainingObserver(Protocol):
    """Counts or records executed training requests."""

    def worked(self, work: FinishedWork, /) -> None: ...


class TrainingLoop:
    """Executes what the scheduler of one base model hands out."""

    def __init__(
        self,
        model: ServedModel,
        scheduler: Scheduler,
        residency: Residency,
        barriers: Barriers,
        observers: Sequence[TrainingObserver],
    ) -> None:
        self.model = model
        self.scheduler = scheduler
        self._residency = residency
        self._barriers = barriers
        self._observers = observers
        self._between: deque[tuple[Callable[[], Awaitable[Any]], asyncio.Future[Any]]] = deque()
        # The engine that resident runs are on; weak, so that a lost one frees its memory before the next.
        self._engine: weakref.ref[Engine] | None = None
        self._wake = asyncio.Event()
        self._stopping = False

    def submit(self, item: QueuedRequest) -> None:
        """Queue a request; its `payload` is an Execution."""
        self.scheduler.submit(item, time.monotonic())
        self._wake.set()

    async def between_batches(self, function: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Call `function` when nothing of any run is being executed."""
        done: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._between.append((function, done))
        self._wake.set()
        return await done

    def stop(self) -> None:
        """Let `run` return once the present batch is done."""
        self._stopping = True
        self._wake.set()

    async def run(self) -> None:
        """Execute batches until `stop`; EngineLost if the engine is gone."""
        try:
            while not self._stopping:
                await self._turn()
        except EngineLost as error:
            self.model.lose_engine(str(error), None if self._engine is None else self._engine())
            self._engine = None
            raise
        finally:
            if self._stopping:
                for _, done in self._between:
                    done.cancel()

    async def _turn(self) -> None:
        self._wake.clear()
        now = time.monotonic()
        again = self.scheduler.give_up_gaps(now)
        if self._between:
            await _settle(*self._between.popleft())
        elif (until := self.scheduler.wait_until(now)) is not None:
            await self._sleep(until if again is None else min(until, again))
        elif batch := self.scheduler.next_batch(now):
            await self._execute(batch)
        else:
            await self._sleep(again)

    async def _sleep(self, until: float | None) -> None:
        timeout = None if until is None else max(0.0, until - time.monotonic())
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._wake.wait(), timeout)

    # -- one batch ---------------------------------------------------------------------------------------

    async def _execute(self, batch: list[QueuedRequest]) -> None:
        started = time.monotonic()
        for item in batch:
            if item.payload.hop is not None:
                item.payload.hop.end()
        try:
            engine = await self.model.load()
        except Exception as error:
            for item in batch:
                self._finish([item], started, _load_failure(item, error))
            return
        if self._engine is not None and self._engine() is not engine:
            raise EngineLost("a sample noticed that the engine was lost")
        self._engine = weakref.ref(engine)
        ready: list[QueuedRequest] = []
        for item in batch:  # one after the other: each may need room on the device
            try:
                await self._residency.make_resident(engine, item.payload.run, item.seq_id)
                ready.append(item)
            except EngineLost:
                raise
            except Exception as error:
                self._finish([item], started, error)
        if ready and ready[0].is_pass:
            await self._finishing(ready, started, self._passes(engine, ready))
        else:
            barriers = [self._finishing([item], started, self._barrier(engine, item)) for item in ready]
            ended = await asyncio.gather(*barriers, return_exceptions=True)
            for error in filter(None, ended):
                raise error

    async def _finishing(self, batch: list[QueuedRequest], started: float, doing: Awaitable[None]) -> None:
        try:
            await doing
        except EngineLost:
            raise
        except Exception as error:
            self._finish(batch, started, error)
        else:
            self._finish(batch, started)

    def _finish(self, batch: list[QueuedRequest], started: float, error: Exception | None = None) -> None:
        """The runs may go on: at once, not when everything in the same batch has ended."""
        now = time.monotonic()
        for item in batch:
            try:
                if error is not None:
                    self._fail(item, error)
                self._observe(item, now - started)
            except Exception:  # a ledger that cannot be written, say: the run must not wait for ever
                log.exception("%s of %s could not be recorded", item.payload.op, item.run)
            finally:
                self.scheduler.done(item, now)

    def _observe(self, item: QueuedRequest, seconds: float) -> None:
        work: Execution = item.payload
        if work.future is not None:
            one_pass = work.one_pass
            finished = FinishedWork(
                work.run.row, work.op, item.seq_id, item.tokens, seconds, work.future,
                item.is_pass, one_pass is not None and one_pass.backward,
            )  # fmt: skip
            for observer in self._observers:
                observer.worked(finished)

    async def _passes(self, engine: Engine, batch: list[QueuedRequest]) -> None:
        passes: list[Pass] = [item.payload.one_pass for item in batch]
        for item, one_pass in zip(batch, passes, strict=True):
            item.payload.run.has_gradients |= one_pass.backward
        with _traced(batch):
            outcomes = await _compute(engine, tuple(passes))
        for item, outcome in zip(batch, outcomes, strict=True):
            if isinstance(outcome, Failure):
                self._fail(item, EngineError(outcome.message, outcome.category))
            else:
                self._residency.resolve(item.payload, outcome)
        for item in {item.run: item for item in batch}.values():  # the last one of each run
            if not item.payload.run.has_gradients:
                await self._residency.after_pass(engine, item.payload.run, item.seq_id + 1)

    async def _barrier(self, engine: Engine, item: QueuedRequest) -> None:
        work: Execution = item.payload
        with _traced([item]):
            if work.op == "optim_step":
                await self._step(engine, work)
            else:
                outcome = await self._barriers.execute(engine, work)
                if work.op in ("create_model", "load_weights") and not work.run.resident:
                    work.run.move(RunState.RESIDENT)
                self._residency.resolve(work, outcome)
            if work.op == "load_weights":
                work.run.clear_gradients()  # as loading did on the device
            if work.op in ("optim_step", "load_weights"):
                await self._residency.after_step(engine, work, item.seq_id + 1)

    async def _step(self, engine: Engine, work: Execution) -> None:
        run, failed_pass = work.run, work.run.failed_pass
        run.clear_gradients()
        try:
            if failed_pass is not None:
                raise EngineError(
                    f"no step was taken: a pass before it failed ({failed_pass}), and the gradients were "
                    "discarded with it",
                    "user",
                )
            self._residency.resolve(work, await self._barriers.execute(engine, work))
        except EngineLost:
            raise
        except Exception:
            with contextlib.suppress(EngineError):  # the run may not be on the device at all
                await execute(engine, ClearGradients(run.id))
            raise

    def _fail(self, item: QueuedRequest, error: Exception) -> None:
        work: Execution = item.payload
        category = error.category if isinstance(error, EngineError) else "server"
        if isinstance(error, Refusal):
            category = "user" if error.status < 500 else "server"
        elif not isinstance(error, EngineError):
            log.exception("%s of %s failed", work.op, item.run, exc_info=error)
        message = str(error) or type(error).__name__
        if work.breaks_window:
            work.run.has_gradients, work.run.failed_pass = True, work.run.failed_pass or message
        if work.must_succeed:
            self._residency.diverged(work, item.seq_id, message, category)
        self._residency.resolve(work, failure(message, category))


def _load_failure(item: QueuedRequest, error: Exception) -> Exception:
    """Why a base model could not be loaded, as a failure of `item`.

    Only for a run that is being created can it be the user's mistake. Any other run stays on disk as it is.
    """
    work: Execution = item.payload
    if item.seq_id == 0 and not work.must_succeed:
        return error
    return EngineError(str(error), "server")


async def _compute(engine: Engine, passes: tuple[Pass, ...]) -> list[ForwardBackwardOutput | Failure]:
    """One command per micro-batch, so that other commands and decoding have their turn in between."""
    outcome = await execute(engine, ForwardBackward(passes))
    while isinstance(outcome, PassProgress):
        outcome = await execute(engine, ContinuePasses(outcome.ticket))
    return outcome


async def _settle(function: Callable[[], Awaitable[Any]], done: asyncio.Future[Any]) -> None:
    try:
        result = await function()
    except Exception as error:
        if not done.done():
            done.set_exception(error)
    else:
        if not done.done():
            done.set_result(result)


def _traced(batch: list[QueuedRequest]) -> AbstractContextManager[Any]:
    """The engine's span: part of the first request's trace, linked to those of the others in the batch."""
    hops = [item.payload.hop for item in batch if item.payload.hop is not None]
    if not hops:
        return contextlib.nullcontext()
    name = f"engine {batch[0].payload.op}"
    hop = tracing.begin(name, parent=hops[0], links=hops[1:], tinkex_requests=len(batch))
    return contextlib.nullcontext() if hop is None else hop

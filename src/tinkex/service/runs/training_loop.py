"""The loop between the scheduler and the engine of one base model: take the next batch, execute it, resolve.

One micro-batch or some barriers at a time: others have their turn in between. `stop` leaves batches under way
unanswered, to be replayed. An exception fails the request it belongs to and no other. A failed pass fails the
next step of its run, and the gradients are cleared: nothing is ever applied to part of a batch. A lost engine
ends `run` with EngineLost, and what was being executed stays unanswered.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import weakref
from collections.abc import Awaitable, Callable, Generator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, cast

from tinkex import tracing
from tinkex.engine import protocol
from tinkex.engine.protocol import Command, Engine, EngineError, EngineLost, PassesResult
from tinkex.service.futures import failure
from tinkex.service.group_commit import GroupCommit
from tinkex.service.refusal import Refusal
from tinkex.service.runs.execution import Barriers, Execution
from tinkex.service.runs.lifecycle import Run, RunState
from tinkex.service.scheduler import Scheduler
from tinkex.service.served_models import ServedModel, execute

log = logging.getLogger("tinkex.service")
T = TypeVar("T")


class TrainingObserver(Protocol):
    """Counts or records executed training requests; replayed ones are not reported."""

    def worked(self, work: Execution, seconds: float, /) -> None: ...


@dataclass(eq=False)
class TrainingLoop:
    """Executes what the scheduler of one base model hands out."""

    model: ServedModel
    scheduler: Scheduler
    barriers: Barriers
    disk: GroupCommit
    observers: Sequence[TrainingObserver]

    def __post_init__(self) -> None:
        self.executing = asyncio.Lock()  # held while something of a run is executed or evicted
        # The engine that resident runs are on; weak, so that a lost one frees its memory before the next.
        self._engine: weakref.ref[Engine] | None = None
        # The ticket and the seconds spent of each batch under way, by the request id of its first pass.
        self._under_way: dict[str, tuple[str, float]] = {}
        self._in_hand: list[str] = []  # the request ids of what is being executed
        self._wake = asyncio.Event()
        self._stopping = False

    def submit(self, work: Execution) -> None:
        self.scheduler.submit(work, time.monotonic())
        self._wake.set()

    async def between_batches(self, function: Callable[[], Awaitable[T]]) -> T:
        """Call `function` when the engine executes nothing; passes of busy runs may be under way."""

        async def exclusively() -> T:
            async with self.executing:
                if self._stopping:
                    raise Refusal(503, "the service is stopping")
                return await function()

        return await asyncio.shield(asyncio.get_running_loop().create_task(exclusively()))

    async def withdraw(self, run: Run) -> None:
        """Give up what a run has waiting and under way, its futures resolved; called between two batches."""
        now = time.monotonic()
        under_way = self.scheduler.withdraw(run.id, now)
        if self.model.engine is not None:
            with contextlib.suppress(EngineError):  # the run may not be on the device at all
                await execute(self.model.engine, protocol.ClearGradients(run.id))
        run.clear_gradients()
        for batch in under_way:
            self._under_way.pop(batch[0].request_id, None)
            self._finish(cast(list[Execution], batch), now)

    def stop(self) -> None:
        """Let `run` return once the present micro-batch or barrier is done."""
        self._stopping = True
        self._wake.set()

    async def run(self) -> None:
        """Execute batches until `stop`; EngineLost if the engine is gone."""
        try:
            while not self._stopping:
                await self._turn()
        except EngineLost as error:
            lost = None if self._engine is None else self._engine()
            self.model.lose_engine(str(error), lost, self._in_hand)
            del lost  # its memory is needed by the next one
            self._engine = None
            self._under_way.clear()
            self.scheduler.abandon()
            raise
        async with self.executing:
            pass  # an eviction that has begun ends first

    async def _turn(self) -> None:
        self._wake.clear()
        now = time.monotonic()
        until = self.scheduler.give_up_gaps(now)
        if (delay := self.scheduler.wait_until(now)) is not None:
            until = delay if until is None else min(until, delay)
        else:
            async with self.executing:
                if batch := cast(list[Execution], self.scheduler.next_batch(time.monotonic())):
                    large = [work for work in batch if work.is_large]
                    await self._execute(batch)
                    if large:  # the event loop would have to free megabytes
                        del batch
                        asyncio.get_running_loop().run_in_executor(None, large.clear)
                    return None
        timeout = None if until is None else max(0.0, until - time.monotonic())
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._wake.wait(), timeout)

    async def _execute(self, batch: list[Execution]) -> None:
        ticket, spent = self._under_way.pop(batch[0].request_id, (None, 0.0))
        self._in_hand = [work.request_id for work in batch]
        started = time.monotonic() - spent
        for work in batch if ticket is None else ():
            if work.hop is not None:
                work.hop.end()
        try:
            # Nothing is executed that a restart might not know of: a checkpoint would be there unasked.
            await self.disk.reached(max(work.future.mark for work in batch))
            engine = await self.model.load()
        except Exception as error:
            for work in batch:
                # Only for a run that is being created can it be the user's mistake.
                creates = work.seq_id == 0 and not work.must_succeed
                self._finish([work], started, error if creates else EngineError(str(error), "server"))
            return
        if self._engine is not None and self._engine() is not engine:
            raise EngineLost("a sample noticed that the engine was lost")
        self._engine = weakref.ref(engine)
        if ticket is not None:
            for work in batch:
                work.resume()
            return await self._passes(engine, batch, started, protocol.ContinuePasses(ticket))
        ready: list[Execution] = []
        for work in batch:  # one after the other: each may need room on the device
            with self._failing([work], started):
                await work.run.make_resident(engine, work.seq_id)
                work.begin()
                ready.append(work)
        if ready and ready[0].is_pass:
            for work in ready:
                if work.backward:
                    work.run.add_pass()
            passes = tuple(work.one_pass for work in ready if work.one_pass is not None)
            await self._passes(engine, ready, started, protocol.ForwardBackward(passes))
        else:
            barriers = [self._finishing(work, started, self._barrier(engine, work)) for work in ready]
            ended = await asyncio.gather(*barriers, return_exceptions=True)
            for error in filter(None, ended):
                raise error

    async def _finishing(self, work: Execution, started: float, doing: Awaitable[None]) -> None:
        with self._failing([work], started):
            await doing
            self._finish([work], started)

    @contextlib.contextmanager
    def _failing(self, batch: list[Execution], started: float) -> Generator[None]:
        """An exception within fails the batch. EngineLost concerns all runs, so it is raised."""
        try:
            yield
        except EngineLost:
            raise
        except Exception as error:
            self._finish(batch, started, error)

    def _finish(self, batch: list[Execution], started: float, error: Exception | None = None) -> None:
        """Let the runs continue: at once, not when everything in the same batch has ended."""
        now = time.monotonic()
        for work in batch:
            try:
                if error is not None:
                    _fail(work, error)
                for observer in () if work.replayed else self.observers:
                    observer.worked(work, now - started)
            except Exception:  # a ledger that cannot be written, say: the run must not wait for ever
                log.exception("%s of %s could not be recorded", work.op, work.run_id)
            finally:
                self.scheduler.done(work, now)

    async def _passes(
        self, engine: Engine, batch: list[Execution], started: float, command: Command[PassesResult]
    ) -> None:
        """Compute one micro-batch; the last one resolves the passes."""
        with self._failing(batch, started):
            with _traced(batch):
                outcome = await execute(engine, command)
            if isinstance(outcome, protocol.PassProgress):
                now = time.monotonic()
                for work in batch:
                    work.pause()
                self._under_way[batch[0].request_id] = outcome.ticket, now - started
                return self.scheduler.progressed([*batch], outcome.done / outcome.total, now)
            assert isinstance(outcome, list)
            for work, result in zip(batch, outcome, strict=True):
                if isinstance(result, protocol.Failure):
                    _fail(work, EngineError(result.message, result.category))
                else:
                    # An uploaded loss runs against the clock: it might not end in time again.
                    timed = work.one_pass is not None and work.one_pass.custom_loss is not None
                    if work.is_large:
                        await work.run.record(work.future, result)
                    work.run.resolve(work.future, result, repeatable=not timed)
            for work in {work.run: work for work in batch}.values():  # the last one of each run
                if not work.run.has_gradients:
                    await work.run.after_pass(engine, work.seq_id + 1)
            self._finish(batch, started)

    async def _barrier(self, engine: Engine, work: Execution) -> None:
        run, loads = work.run, work.op == "load_weights"
        with _traced([work]):
            if work.op == "optim_step":
                await self._step(engine, work)
            else:
                outcome = await self.barriers.execute(engine, work)
                if (loads or work.op == "create_model") and not run.resident:
                    run.move(RunState.RESIDENT)
                run.resolve(work.future, outcome)
            if loads:
                run.clear_gradients()  # as loading did on the device
            if loads or work.op == "optim_step":
                await run.after_step(engine, work.seq_id + 1, loaded=loads)

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
            run.resolve(work.future, await self.barriers.execute(engine, work), repeatable=True)
        except EngineLost:
            raise
        except Exception:
            with contextlib.suppress(EngineError):  # the run may not be on the device at all
                await execute(engine, protocol.ClearGradients(run.id))
            raise


def _fail(work: Execution, error: Exception) -> None:
    run, category = work.run, error.category if isinstance(error, EngineError) else "server"
    if isinstance(error, Refusal):
        category = "user" if error.status < 500 else "server"
    elif not isinstance(error, EngineError):
        log.exception("%s of %s failed", work.op, run.id, exc_info=error)
    message = str(error) or type(error).__name__
    if work.backward:
        run.add_pass(failed=message)
    if work.must_succeed and not run.problem:
        run.cannot_restore(f"{work.op} {work.seq_id} had succeeded and now failed ({message})", category)
    run.resolve(work.future, failure(message, category))


def _traced(batch: list[Execution]) -> AbstractContextManager[Any]:
    """The engine's span: part of the first request's trace, linked to those of the others in the batch."""
    hops = [work.hop for work in batch if work.hop is not None]
    hop = None
    if hops:
        name = f"engine {batch[0].op}"
        hop = tracing.begin(name, parent=hops[0], links=hops[1:], tinkex_requests=len(batch))
    return hop or contextlib.nullcontext()

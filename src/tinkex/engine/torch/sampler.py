"""The contract's sampler over a continuous batch: tasks on event loops wait, the engine's thread computes.

A request that cannot be served is refused at once. Cancelling the task that awaits a sample, or closing its
stream, frees the request's pages before the next decode step.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import deque
from collections.abc import AsyncGenerator, Iterator, Sequence
from concurrent.futures import Future
from weakref import WeakKeyDictionary

from tinkex.engine.grammar import Grammars, GrammarState
from tinkex.engine.protocol import EngineLost, ExportedAdapter, Location, SampledTokens, SampleWork
from tinkex.engine.request import user_error
from tinkex.engine.token_bytes import TokenTable
from tinkex.engine.torch.continuous_batch import ContinuousBatch
from tinkex.engine.torch.engine_thread import EngineThread
from tinkex.engine.torch.sequences import Listener, PublishedAdapter, RunningRequest
from tinkex.engine.torch.trainer import TorchTrainer
from tinkex.types.outputs import SampleResponse


class Waker:
    """Wakes tasks of one event loop from the engine's thread: all of a step's at once.

    A call into a loop costs as much as drawing several tokens, and a step may have hundreds of streams.
    """

    def __init__(self) -> None:
        self._ready: deque[asyncio.Event] = deque()
        self._called = False

    def wake(self, loop: asyncio.AbstractEventLoop, ready: asyncio.Event) -> None:
        self._ready.append(ready)
        if not self._called:
            self._called = True
            loop.call_soon_threadsafe(self._set)

    def _set(self) -> None:
        self._called = False  # before the events are set: one that comes now is not missed
        while self._ready:
            self._ready.popleft().set()


class TorchSampler:
    """Requests are checked here; everything else but waiting happens on the engine's thread."""

    def __init__(
        self,
        thread: EngineThread,
        trainer: TorchTrainer,
        batch: ContinuousBatch,
        published: dict[str, PublishedAdapter],
        table: TokenTable,
        grammars: Grammars,
    ) -> None:
        self._thread, self._trainer, self._batch, self._table = thread, trainer, batch, table
        self._grammars = grammars
        self._published = published
        self._serial = itertools.count()
        self._wakers: WeakKeyDictionary[asyncio.AbstractEventLoop, Waker] = WeakKeyDictionary()

    async def sample(self, work: SampleWork) -> SampleResponse:
        table, grammar = await self._table.of(work), await self._grammars.of(work)
        with self._submitted(work, table, grammar) as future:
            return await asyncio.wrap_future(future)

    async def stream(self, work: SampleWork) -> AsyncGenerator[SampledTokens | SampleResponse, None]:
        table, grammar = await self._table.of(work), await self._grammars.of(work)
        loop, ready = asyncio.get_running_loop(), asyncio.Event()
        waker = self._wakers.setdefault(loop, Waker())
        pieces: deque[SampledTokens] = deque()

        def listen(piece: SampledTokens) -> None:  # on the engine's thread
            pieces.append(piece)
            waker.wake(loop, ready)

        with self._submitted(work, table, grammar, listen) as future:
            future.add_done_callback(lambda _: waker.wake(loop, ready))
            done = False
            while not done:
                await ready.wait()
                ready.clear()
                done = future.done()  # asked before the pieces are read: then none is missed
                while pieces:
                    yield pieces.popleft()
            yield future.result()

    @contextlib.contextmanager
    def _submitted(
        self,
        work: SampleWork,
        token_bytes: Sequence[bytes],
        grammar: GrammarState | None,
        listener: Listener | None = None,
    ) -> Iterator[Future[SampleResponse]]:
        """Submit a request; leaving before it is done cancels it."""
        max_tokens = self._batch.check_work(work)  # raises at once, even while a command runs
        future: Future[SampleResponse] = Future()
        admitted: list[RunningRequest] = []

        def submit() -> None:
            if not future.cancelled():
                try:
                    published = self._find(work.adapter)
                    request = self._batch.submit(
                        work, max_tokens, published, future, token_bytes, listener, grammar=grammar
                    )
                    admitted.append(request)
                except Exception as error:
                    future.set_exception(error)

        self._thread.post(submit)
        try:
            yield future
        finally:
            if not future.done() or future.cancelled():
                future.cancel()
                with contextlib.suppress(EngineLost):  # then all pages are gone anyway
                    self._thread.post(lambda: [self._batch.cancel(request) for request in admitted])

    def _find(self, name: str | None) -> PublishedAdapter | None:
        if name is not None and name not in self._published:
            raise user_error(f"there is no published adapter {name!r} on this engine")
        return None if name is None else self._published[name]

    async def publish(self, name: str, source: Location | ExportedAdapter) -> None:
        def publish() -> None:
            if name not in self._published:
                adapter = self._trainer.published(source)
                root = f"adapter {next(self._serial)}".encode()  # a name may come back with other weights
                self._published[name] = PublishedAdapter(name, adapter, root)

        await asyncio.wrap_future(self._thread.submit(publish))

    async def retire(self, name: str) -> None:
        done: Future[None] = Future()

        def retire() -> None:
            published = self._published.pop(name, None)
            if published is None:
                done.set_result(None)
            else:
                published.retired.append(done)
                published.settle()

        self._thread.post(retire)
        await asyncio.wrap_future(done)

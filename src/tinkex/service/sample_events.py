"""A sample as a stream of events, for endpoints that send tokens while they are drawn."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from tinkex import tracing
from tinkex.service.futures import ACTIVE
from tinkex.service.refusal import Caller
from tinkex.service.samplers import Pieces, Samplers, sequence_ids
from tinkex.types import sampling as types
from tinkex.types.futures import PendingFuture
from tinkex.types.outputs import NewTokens, SampleResponse


class SampleEvents:
    """An async iterator over a sample as it is drawn: tokens, why it waits, and its response or failure last.

    Closing it early stops the work and frees what it used.
    """

    def __init__(self, samplers: Samplers, request: types.SampleRequest, caller: Caller) -> None:
        self._samplers = samplers
        self._events: Pieces = asyncio.Queue()
        with tracing.span("service stream_sample", within=True):
            self._future = samplers.start(request, caller, self._events)
        self._ending = asyncio.get_running_loop().create_task(self._wait_for_the_end())
        self._over = False

    async def _wait_for_the_end(self) -> None:
        future, state = self._future, ACTIVE
        while not await future.wait(self._samplers.config.long_poll):
            if future.queue_state[0] != state[0]:
                state = future.queue_state
                self._events.put_nowait(PendingFuture(future.request_id, *state))
        outcome = future.outcome
        if isinstance(outcome, SampleResponse):
            ids = sequence_ids(future.request_id, len(outcome.sequences))
            named = [replace(one, sequence_id=id) for one, id in zip(outcome.sequences, ids, strict=True)]
            outcome = replace(outcome, sequences=named)
        self._events.put_nowait(outcome)

    def __aiter__(self) -> SampleEvents:
        return self

    async def __anext__(self) -> types.SampleEvent:
        if self._over:
            raise StopAsyncIteration
        event = await self._events.get()
        if not isinstance(event, NewTokens | PendingFuture):
            await self.aclose()
        return event

    async def aclose(self) -> None:
        """Stop the work, if it is not done; nothing more comes."""
        if not self._over:
            self._over = True
            self._ending.cancel()
            self._samplers.discard(self._future)

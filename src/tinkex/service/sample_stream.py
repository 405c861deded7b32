"""A sample as it is drawn: its tokens, why it waits, and at last the whole response.

A request that is refused raises before there is a stream. The last event is the response or its failure.
Closing the stream early stops the work and frees what it used. Knows nothing of HTTP.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

from tinkex import tracing
from tinkex.service.polling import Polling
from tinkex.service.refusal import Caller
from tinkex.service.samplers import Pieces, Samplers
from tinkex.types.futures import (
    CancelFutureRequest,
    FutureRetrieveRequest,
    PendingFuture,
    RequestFailedResponse,
    UntypedAPIFuture,
)
from tinkex.types.outputs import NewTokens, SampleResponse
from tinkex.types.sampling import SampleEvent, SampleRequest


class SampleEvents:
    """An async iterator over the events of one sample; `Service.stream` opens it."""

    def __init__(self, samplers: Samplers, polling: Polling, request: SampleRequest, caller: Caller) -> None:
        self._polling, self._caller = polling, caller
        self._events: Pieces = asyncio.Queue()
        with tracing.span("service stream_sample", within=True):
            self._promise: UntypedAPIFuture = samplers.start(request, caller, self._events)
        self._ending = asyncio.get_running_loop().create_task(self._wait_for_the_end())
        self._over = False

    async def _wait_for_the_end(self) -> None:
        request, state = FutureRetrieveRequest(self._promise.request_id), "active"
        try:
            while True:
                outcome = await self._polling.retrieve_future(request, self._caller)
                if not isinstance(outcome, PendingFuture):
                    break
                if outcome.queue_state != state:
                    state = outcome.queue_state
                    self._events.put_nowait(outcome)
        except Exception as error:
            outcome = RequestFailedResponse(error=str(error) or type(error).__name__)
        self._events.put_nowait(self._named(outcome))

    def _named(self, outcome: Any) -> Any:
        """The response with its sequences' ids, which the promise has."""
        ids = self._promise.sample_sequence_ids
        if not isinstance(outcome, SampleResponse) or not ids:
            return outcome
        named = [replace(one, sequence_id=id) for one, id in zip(outcome.sequences, ids, strict=True)]
        return replace(outcome, sequences=named)

    def __aiter__(self) -> SampleEvents:
        return self

    async def __anext__(self) -> SampleEvent:
        if self._over:
            raise StopAsyncIteration
        event = await self._events.get()
        if not isinstance(event, NewTokens | PendingFuture):
            await self.aclose()
        return event

    async def aclose(self) -> None:
        """Stop the work, if it is not done; nothing more comes."""
        if self._over:
            return
        self._over = True
        self._ending.cancel()
        request = CancelFutureRequest(request_id=self._promise.request_id)
        await self._polling.cancel_future(request, self._caller)
        self._polling.drop([self._promise.request_id])

"""A sample as it is drawn: its tokens, why it waits, and at last the whole response.

Promises: a request that is refused raises before there is any stream; the last event is the response or its
failure, and nothing comes after it; whoever leaves early stops the work, and what it held is free at once.
Knows nothing of HTTP, nor of how an event is written.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np

from tinkex import tracing
from tinkex.service.refusal import Caller
from tinkex.types.futures import (
    CancelFutureRequest,
    FutureRetrieveRequest,
    Pending,
    RequestFailedResponse,
    UntypedAPIFuture,
)
from tinkex.types.outputs import NewTokens, SampleResponse
from tinkex.types.sampling import SampleEvent, SampleRequest
from tinkex.wire import ops


class SampleEvents:
    """An async iterator of one sample's events; made by `open`, ended by its last event or by `aclose`."""

    def __init__(self, service: Any, caller: Caller) -> None:
        self._service, self._caller = service, caller
        self._events: asyncio.Queue[SampleEvent] = asyncio.Queue()
        self._promise = UntypedAPIFuture("")
        self._ending: asyncio.Task[None] | None = None
        self._over = False

    @classmethod
    async def open(cls, service: Any, request: SampleRequest, caller: Caller) -> SampleEvents:
        """Have `request` sampled by a service (its `samplers`); Refusal if it is not accepted."""
        self = cls(service, caller)
        loop, put = asyncio.get_running_loop(), self._events.put_nowait

        def on_tokens(sequence: int, tokens: np.ndarray, logprobs: np.ndarray) -> None:  # the engine's thread
            loop.call_soon_threadsafe(put, NewTokens(sequence, tokens.copy(), logprobs.copy()))

        with tracing.span("service stream_sample", within=True):
            self._promise = await service.samplers.sample(request, caller, on_tokens)
        self._ending = loop.create_task(self._wait_for_the_end())
        return self

    async def _wait_for_the_end(self) -> None:
        request, state = FutureRetrieveRequest(self._promise.request_id), "active"
        try:
            while True:
                outcome = await self._service.call(ops.RETRIEVE_FUTURE, request, self._caller)
                if not isinstance(outcome, Pending):
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
        if not isinstance(event, NewTokens | Pending):
            await self.aclose()
        return event

    async def aclose(self) -> None:
        """Stop the work, if it is not done; nothing more comes."""
        if self._over:
            return
        self._over = True
        assert self._ending is not None
        self._ending.cancel()
        request = CancelFutureRequest(request_id=self._promise.request_id)
        await self._service.call(ops.CANCEL_FUTURE, request, self._caller)
        self._service.core.futures.drop([self._promise.request_id])

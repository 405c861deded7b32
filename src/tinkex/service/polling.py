"""Long polls: the result of one request, or which samples of a sampler have ended; and cancelling.

A request id that is not in memory is looked for on disk: its run may have been evicted.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from tinkex.service.access import Access
from tinkex.service.config import ServiceConfig
from tinkex.service.custom_losses import CustomLosses
from tinkex.service.futures import Completions, Futures
from tinkex.service.refusal import Caller, Refusal
from tinkex.service.runs.manager import RunManager
from tinkex.service.samplers import Samplers
from tinkex.types.futures import (
    CancelFutureRequest,
    FutureRetrieveRequest,
    FuturesRetrieveRequest,
    FuturesRetrieveResponse,
    PendingFuture,
)


@dataclass(eq=False)
class Polling:
    """Fetching results, one method per operation."""

    config: ServiceConfig
    access: Access
    futures: Futures
    completions: Completions
    runs: RunManager
    samplers: Samplers
    custom_losses: CustomLosses

    def __post_init__(self) -> None:
        self.long_poll = self.config.long_poll

    async def retrieve_future(self, request: FutureRetrieveRequest, caller: Caller) -> Any:
        request_id = request.request_id
        future = (
            self.futures.get(request_id)
            or self.custom_losses.find_future(request_id)
            or await self.runs.find_future(request_id, caller)
        )
        if future is None:  # not 404: on 410 official samplers sample again by themselves
            raise Refusal(410, "this request's result is no longer kept")
        caller.must_own(future.owner, f"request {request_id}")
        if not future.done and not await future.wait(self.long_poll):
            return PendingFuture(request_id, *self.runs.queue_state(future))
        if future.delivered is None:
            future.delivered = time.monotonic()
        return future.outcome

    async def retrieve_futures(
        self, request: FuturesRetrieveRequest, caller: Caller
    ) -> FuturesRetrieveResponse:
        """What ended since the last poll of a sampler, or of one of its clones."""
        target = request.target
        self.access.sampler(target.sampling_session_id, caller)
        fetched = [self.futures.get(i) for i in request.retrieved_request_ids]
        self.drop(f.request_id for f in fetched if f is not None and f.owner == caller.user)
        feed = f"{target.sampling_session_id}#{target.cloned_sampler_id}"
        wait = self.long_poll if request.timeout is None else min(request.timeout, self.long_poll)
        if request.retrieved_request_ids and not self.completions.is_open(feed):
            wait = 0.0  # a client's last acknowledgement: it waits for nothing
        completions, cursor = await self.completions.poll(feed, request.prev_cursor, max(0.0, wait))
        return FuturesRetrieveResponse(completions=completions, cursor=cursor)

    async def cancel_future(self, request: CancelFutureRequest, caller: Caller) -> None:
        """Stop a sample. Training requests cannot be cancelled: they are journaled."""
        future = self.futures.get(request.request_id)
        if future is not None and future.owner == caller.user:
            self.samplers.cancel(future)

    def drop(self, request_ids: Iterable[str]) -> None:
        """Forget results that were delivered or have expired."""
        if dropped := self.futures.drop(request_ids):
            self.completions.fetched(dropped)
            self.runs.forget_results(dropped)

    def expire(self, now: float) -> None:
        self.drop(self.futures.expired(now, self.config.keep_results, self.config.keep_delivered))
        self.completions.expire(now, self.config.keep_results)

"""SampleStream: the tokens of a sample as they are drawn, and the whole response at the end.

Promises: one object for `for` and `async for`, from any thread and event loop; leaving it (close, the end of
its `with` block, its last reference gone) frees what it held on the server at once; a stream that breaks off
is begun anew only if nothing of it had come, and otherwise raises an error that has what came. Tokens wait
here until they are asked for: never more than the response itself. Knows nothing of HTTP.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import itertools
import threading
import time
import weakref
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from types import TracebackType
from typing import Any, Self

import numpy as np

from tinkex.client import loop as background
from tinkex.client.future import APIFuture, completed
from tinkex.client.retry import Attempt, RetryConfig, RetryPolicy
from tinkex.errors import (
    APIStatusError,
    ClientClosedError,
    ExpiredError,
    RequestFailedError,
    StreamBrokenError,
    StreamingUnsupportedError,
    TinkerError,
)
from tinkex.types.futures import Pending, RequestFailedResponse
from tinkex.types.outputs import NewTokens, SampleResponse
from tinkex.types.sampling import SampleEvent, SampleRequest

Opening = Callable[[], AsyncGenerator[SampleEvent, None]]


class Feed:
    """Tokens on their way from the background loop to whoever iterates."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a stream may be collected, and its feed ended, within any of these
        self._ready: deque[NewTokens] = deque()
        self._waiting: deque[APIFuture[NewTokens | None]] = deque()
        self._over = False
        self._all: list[NewTokens] = []

    @property
    def begun(self) -> bool:
        return bool(self._all)

    def put(self, new: NewTokens) -> None:
        with self._lock:
            self._all.append(new)
            self._ready.append(new)
        self._serve()

    def end(self) -> None:
        """Nothing more comes."""
        with self._lock:
            self._over = True
        self._serve()

    def take(self) -> APIFuture[NewTokens | None]:
        """The next tokens; None if there will be none."""
        background.check_fork()
        with self._lock:
            if self._ready and not self._waiting:
                return completed(self._ready.popleft(), "tokens")
            future: APIFuture[NewTokens | None] = APIFuture("next tokens of the stream")
            self._waiting.append(future)
        self._serve()
        return future

    def give_back(self, taken: APIFuture[NewTokens | None]) -> None:
        """Whoever took it does not wait any longer: what it got, or would have got, is the next one's."""
        if not taken.cancel() and not taken.exception() and (new := taken.result()) is not None:
            with self._lock:
                self._ready.appendleft(new)
            self._serve()

    def _serve(self) -> None:
        """Bring those who wait and what is there together; futures are resolved outside the lock."""
        while True:
            with self._lock:
                if not self._waiting or not (self._ready or self._over):
                    return
                future, new = self._waiting.popleft(), self._ready.popleft() if self._ready else None
            try:
                future.set_result(new)
            except concurrent.futures.InvalidStateError:  # it was cancelled
                if new is not None:
                    with self._lock:
                        self._ready.appendleft(new)

    def received(self) -> list[NewTokens]:
        """What has come of each sequence that has begun, in one piece."""
        with self._lock:
            parts = list(self._all)
        return [
            NewTokens(
                index,
                np.concatenate([part.tokens_np for part in parts if part.sequence == index]),
                np.concatenate([part.logprobs_np for part in parts if part.sequence == index]),
            )
            for index in sorted({part.sequence for part in parts})
        ]


class SampleStream:
    """A sample under way: iterate it for its tokens, and ask it for the `result`.

    >>> with sampler.sample_stream(prompt, SamplingParams(max_tokens=64)) as stream:    # doctest: +SKIP
    ...     for new in stream:
    ...         print(new.sequence, new.tokens, new.logprobs)
    ...     response = stream.result()
    """

    def __init__(self, feed: Feed, done: APIFuture[SampleResponse], timeout: float | None = None) -> None:
        self._feed, self._done, self._timeout = feed, done, timeout
        done.when_done(lambda _: feed.end())
        finalizer = weakref.finalize(self, _leave, done)
        finalizer.atexit = False

    # -- tokens ------------------------------------------------------------------------------------------

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> NewTokens:
        taken = self._feed.take()
        try:
            new = taken.result(self._timeout)
        except BaseException:
            self._feed.give_back(taken)
            raise
        if new is None:
            self._raise_if_failed()
            raise StopIteration
        return new

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> NewTokens:
        taken = self._feed.take()
        try:
            new = await taken.result_async(self._timeout)
        except BaseException:
            self._feed.give_back(taken)
            raise
        if new is None:
            self._raise_if_failed()
            raise StopAsyncIteration
        return new

    def _raise_if_failed(self) -> None:
        if not self._done.cancelled() and (error := self._done.exception()) is not None:
            raise error

    @property
    def received(self) -> list[NewTokens]:
        """What has come so far: for each sequence that has begun, its tokens in one piece."""
        return self._feed.received()

    # -- the whole ---------------------------------------------------------------------------------------

    def result(self, timeout: float | None = None) -> SampleResponse:
        """The whole response, as `sample()` gives it; need not be iterated to come."""
        return self._done.result(timeout)

    async def result_async(self, timeout: float | None = None) -> SampleResponse:
        return await self._done.result_async(timeout)

    # -- the end -----------------------------------------------------------------------------------------

    def close(self) -> None:
        """Stop sampling, if it goes on; what came already can still be iterated."""
        _leave(self._done)

    async def aclose(self) -> None:
        self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: Any) -> None:
        self.close()


def _leave(done: APIFuture[SampleResponse]) -> None:
    try:
        background.check_fork()
        done.cancel()
    except (TinkerError, RuntimeError):
        pass  # a forked child, or an interpreter on its way out


# -- on the background loop ------------------------------------------------------------------------------


async def draw(
    opening: Opening, feed: Feed, policy: RetryPolicy, config: RetryConfig, observe: Callable[..., None]
) -> SampleResponse:
    """Sample, handing tokens to `feed` as they come; again, by the one policy, while none have come."""
    started = time.monotonic()
    for tries in itertools.count(1):
        try:
            return await _draw_once(opening, feed, observe)
        except ClientClosedError:
            raise
        except StreamBrokenError as error:
            error.received = feed.received()
            attempt = Attempt(cause=error, reached=True)
            delay = policy.decide(attempt, tries, time.monotonic() - started)
            if feed.begun or delay is None:
                raise
        except (ExpiredError, *config.retryable_exceptions):
            if feed.begun or not config.enable_retry_logic:
                raise
            delay = policy.backoff(tries)
        await asyncio.sleep(delay)
    raise AssertionError("unreachable")


async def _draw_once(opening: Opening, feed: Feed, observe: Callable[..., None]) -> SampleResponse:
    async with aclosing(opening()) as events:
        async for event in events:
            if isinstance(event, NewTokens):
                observe("active", None)
                feed.put(event)
            elif isinstance(event, Pending):
                observe(event.queue_state, event.queue_state_reason)
            elif isinstance(event, RequestFailedResponse):
                error = RequestFailedError(
                    f"sample failed ({event.category}): {event.error}", "", event.category
                )
                error.received = feed.received()
                raise error
            else:
                return event
    raise StreamBrokenError(message="the stream ended without its result")


def unsupported(error: APIStatusError, request: SampleRequest) -> APIStatusError:
    """The error, or another if it says that this server has no streams at all."""
    about_the_sampler = (request.sampling_session_id or "") in error.message
    if error.status_code not in (404, 405) or about_the_sampler:
        return error
    return StreamingUnsupportedError(
        f"this server offers no streams of samples: use sample() instead ({error.message})",
        error.response,
        error.body,
    )

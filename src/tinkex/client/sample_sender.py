"""SampleSender: sends the samples of one sampler, and fetches their results or tokens.

Promises: samples are independent and bounded in number; one whose result the server no longer has is sent
again; a cancelled one is cancelled on the server; if none finishes for `RetryConfig.progress_timeout`
seconds, all fail with an APIConnectionError.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from tinkex.client import loop as background
from tinkex.client.polling import BatchPoller, QueueWatch, retrieve
from tinkex.client.retry import Attempt, RetryConfig, RetryPolicy
from tinkex.client.session import Session
from tinkex.client.streaming import TokenBuffer
from tinkex.client.transport import CallContext
from tinkex.errors import (
    APIConnectionError,
    APIStatusError,
    ClientClosedError,
    ExpiredError,
    InvalidInputError,
    RequestFailedError,
    StreamBrokenError,
    StreamingUnsupportedError,
    TinkerError,
)
from tinkex.fair_permits import FairPermits
from tinkex.types.chunks import EncodedTextChunk
from tinkex.types.futures import CancelFutureRequest, PendingFuture, RequestFailedResponse
from tinkex.types.outputs import NewTokens, SampleResponse
from tinkex.types.sampling import CLONE_STRIDE, JoinSamplingSessionRequest, SampleRequest
from tinkex.wire import ops

log = logging.getLogger("tinkex")


class SampleSender:
    """The sends of one sampler. `next_seq` may be called from any thread, the rest on the background loop.

    `clone`: the sampler was created by another process, so its seq ids start at an offset of its own.
    """

    def __init__(
        self,
        session: Session,
        sampling_session_id: str,
        retry_config: RetryConfig | None,
        watch: QueueWatch,
        *,
        clone: bool,
    ) -> None:
        self._session, self._connection = session, session.connection
        self._id = sampling_session_id
        self._retry = retry_config or RetryConfig()
        self._watch = watch
        self._clone = clone
        self._context = CallContext(source=sampling_session_id, retry=retry_config, observer=watch.submitting)
        self._opening: asyncio.Task[None] | None = None
        self._seq = itertools.count()
        self._first_seq = 0
        self._limiter = FairPermits(1)  # resized once the server's settings are known
        self._batch: BatchPoller | None = None
        self._stuck = StuckDetector(sampling_session_id)

    def next_seq(self) -> int:
        return next(self._seq)

    # -- whole samples -----------------------------------------------------------------------------------

    async def send(self, request: SampleRequest) -> SampleResponse:
        await self._open()
        if self._first_seq:
            request = replace(request, seq_id=self._first_seq + (request.seq_id or 0))
        with self._stuck:
            async with self._limiter.permit():
                for tries in itertools.count(1):
                    try:
                        return await self._send_once(request)
                    except ClientClosedError:
                        raise
                    except (ExpiredError, *self._retry.retryable_exceptions):
                        # Expired: the server no longer has the result, for example after a restart.
                        if not self._may_resend():
                            raise
                    await asyncio.sleep(RetryPolicy().tuned(self._retry).backoff(tries))
                    request = replace(request, seq_id=self._first_seq + self.next_seq())
        raise AssertionError("unreachable")

    def _may_resend(self) -> bool:
        return self._retry.enable_retry_logic and not self._connection.config.sample_no_retries

    async def _send_once(self, request: SampleRequest) -> SampleResponse:
        promise = await self._connection.call(ops.SAMPLE, request, self._context)
        try:
            if self._batch is not None:
                response = await self._batch.retrieve(ops.SAMPLE, promise.request_id, self._watch)
            else:
                response = await retrieve(
                    self._connection, ops.SAMPLE, promise.request_id, observe=self._watch, source=self._id
                )
        except asyncio.CancelledError:
            background.spawn(self._cancel(promise.request_id))
            raise
        return checked(response, request, promise.sample_sequence_ids)

    async def _cancel(self, request_id: str) -> None:
        """Cancel a sample on the server; servers may ignore this."""
        try:
            request = CancelFutureRequest(request_id=request_id)
            await self._connection.transport.call(ops.CANCEL_FUTURE, request)
        except TinkerError as error:
            log.debug("sample %s could not be cancelled on the server: %s", request_id, error)

    # -- streams -----------------------------------------------------------------------------------------

    async def stream(self, request: SampleRequest, buffer: TokenBuffer) -> SampleResponse:
        """Send a sample, append its tokens to `buffer` as they arrive, and return the response."""
        with self._connection.reporting(ops.STREAM_SAMPLE.name):
            try:
                await self._open()
                with self._stuck:
                    async with self._limiter.permit():
                        response = await self._stream_until_done(request, buffer)
            except APIStatusError as error:
                raise _unsupported(error, request) from None
        return checked(response, request)

    async def _stream_until_done(self, request: SampleRequest, buffer: TokenBuffer) -> SampleResponse:
        """Stream, and start again after a failure that came before the first token."""
        policy = self._connection.transport.policy.tuned(
            replace(self._retry, enable_retry_logic=self._may_resend())
        )
        started = time.monotonic()
        for tries in itertools.count(1):
            try:
                return await self._stream_once(request, buffer)
            except ClientClosedError:
                raise
            except StreamBrokenError as error:
                error.received = buffer.received()
                attempt = Attempt(cause=error, reached=True)
                delay = policy.decide(attempt, tries, time.monotonic() - started)
                if buffer.begun or delay is None:
                    raise
            except (ExpiredError, *self._retry.retryable_exceptions):
                if buffer.begun or not self._may_resend():
                    raise
                delay = policy.backoff(tries)
            await asyncio.sleep(delay)
        raise AssertionError("unreachable")

    async def _stream_once(self, request: SampleRequest, buffer: TokenBuffer) -> SampleResponse:
        async with aclosing(self._connection.transport.stream(request, self._context)) as events:
            async for event in events:
                self._stuck.progressed()
                if isinstance(event, NewTokens):
                    self._watch("active", None)
                    buffer.put(event)
                elif isinstance(event, PendingFuture):
                    self._watch(event.queue_state, event.queue_state_reason)
                elif isinstance(event, RequestFailedResponse):
                    error = RequestFailedError(
                        f"sample failed ({event.category}): {event.error}", "", event.category
                    )
                    error.received = buffer.received()
                    raise error
                else:
                    return event
        raise StreamBrokenError(message="the stream ended without its result")

    # -- before the first sample -------------------------------------------------------------------------

    async def _open(self) -> None:
        """Open the session and apply the server's settings, once."""
        if self._opening is None or (self._opening.done() and self._opening.exception() is not None):
            self._opening = asyncio.get_running_loop().create_task(self._configure())
        if not self._opening.done():
            await asyncio.shield(self._opening)

    async def _configure(self) -> None:
        await self._session.open()
        config = self._connection.config
        clone_id = 0
        if self._clone and config.sample_join_sampling_session:
            request = JoinSamplingSessionRequest(sampling_session_id=self._id)
            clone_id = (await self._connection.call(ops.JOIN_SAMPLING_SESSION, request)).client_counter
        elif self._clone:
            clone_id = random.SystemRandom().randint(1, CLONE_STRIDE - 1)
        self._first_seq = clone_id * CLONE_STRIDE
        self._limiter.resize(self._retry.max_connections or config.sample_max_concurrent_requests)
        if config.sample_use_retrieve_futures:
            self._batch = BatchPoller(self._connection, self._id, clone_id)
        if self._retry.enable_stuck_detection and config.sample_enable_stuck_detection:
            self._stuck = StuckDetector(self._id, self._retry.progress_timeout)


class StuckDetector:
    """Cancels the tasks that entered it when none has made progress for `timeout` seconds; None: never."""

    def __init__(self, what: str, timeout: float | None = None) -> None:
        self._what, self._timeout = what, timeout
        self._tasks: set[Any] = set()
        self._error: APIConnectionError | None = None  # raised in tasks that were removed from `_tasks`
        self._last = 0.0
        self._checking = False

    def progressed(self) -> None:
        self._last = time.monotonic()

    def __enter__(self) -> None:
        if not self._tasks:
            self.progressed()
        self._tasks.add(asyncio.current_task())
        if self._timeout is not None and not self._checking:
            self._check(self._timeout)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        task = asyncio.current_task()
        if kind is None:
            self.progressed()
        elif kind is asyncio.CancelledError and self._error is not None and task not in self._tasks:
            raise self._error from None
        self._tasks.discard(task)

    def _check(self, timeout: float) -> None:
        """Check now, and again later while there are tasks."""
        if self._tasks and (quiet := time.monotonic() - self._last) > timeout:
            stuck, self._tasks = self._tasks, set()
            self._error = APIConnectionError(
                message=f"no sample of {self._what} finished for {quiet:.0f} s "
                f"(RetryConfig.progress_timeout); {len(stuck)} were waiting"
            )
            for task in stuck:
                task.cancel()
        self._checking = bool(self._tasks)
        if self._checking:
            asyncio.get_running_loop().call_later(min(60.0, timeout / 4), self._check, timeout)


# -- checks ----------------------------------------------------------------------------------------------


def check_request(request: SampleRequest) -> None:
    """Raise InvalidInputError for an empty prompt, or target_prompt_logprobs of the wrong shape."""
    if all(isinstance(chunk, EncodedTextChunk) and not chunk.length for chunk in request.prompt.chunks):
        raise InvalidInputError("prompt is empty: sampling needs at least one token to go on from")
    if (targets := request.target_prompt_logprobs) is not None:
        positions, shape = request.prompt.length - 1, targets.dense_shape
        if targets.dtype != "int64" or len(shape) != 2 or shape[0] != positions:
            raise InvalidInputError(
                f"target_prompt_logprobs must be int64 of shape [{positions}, K] (a row for each prompt "
                f"token but the first), got {targets.dtype} {list(shape)}"
            )


def checked(
    response: SampleResponse, request: SampleRequest, sequence_ids: Sequence[str] | None = None
) -> SampleResponse:
    """The response with its sequence ids; TinkerError if it lacks something that was requested."""
    if len(response.sequences) != request.num_samples:
        raise TinkerError(
            f"the server returned {len(response.sequences)} sequences for num_samples={request.num_samples}"
        )
    if request.prompt_alt_tokens_k and response.prompt_alt_tokens is None:
        raise TinkerError("this server does not support prompt_alt_tokens_k")
    if not sequence_ids or len(sequence_ids) != len(response.sequences):
        return response  # servers before 0.26 send no ids
    named = zip(response.sequences, sequence_ids, strict=True)
    return replace(response, sequences=[replace(sequence, sequence_id=name) for sequence, name in named])


def _unsupported(error: APIStatusError, request: SampleRequest) -> APIStatusError:
    """The error itself, or StreamingUnsupportedError if it means that the server has no streams."""
    about_the_sampler = (request.sampling_session_id or "") in error.message
    if error.status_code not in (404, 405) or about_the_sampler:
        return error
    message = f"this server offers no streams of samples: use sample() instead ({error.message})"
    return StreamingUnsupportedError(message, error.response, error.body)

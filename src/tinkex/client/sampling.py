"""SamplingClient: draws from a base model or a published adapter, thousands of requests at a time.

Promises: requests are independent of each other and fail alone; a result that the server forgot is asked
for anew; a cancelled request is cancelled on the server too; copies travel to other processes. Knows nothing
of how a call travels.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping
from dataclasses import replace
from typing import Any

from tinkex.client import loop as background
from tinkex.client import sampler_copies, samples, tokenizer_files
from tinkex.client.calls import checks_timeouts
from tinkex.client.future import APIFuture, owned, start
from tinkex.client.limits import FairLimiter
from tinkex.client.poller import BatchPoller, retrieve
from tinkex.client.progress import Progress
from tinkex.client.queue_state import QueueStats
from tinkex.client.retry import RetryConfig, RetryPolicy, check_wishes
from tinkex.client.server_connection import ServerConnection, check_headers
from tinkex.client.session import Session
from tinkex.client.streaming import Feed, SampleStream, draw, unsupported
from tinkex.client.telemetry import Telemetry
from tinkex.client.transport import CallContext
from tinkex.errors import APIStatusError, ClientClosedError, ExpiredError, InvalidInputError, TinkerError
from tinkex.types.data import ModelInput
from tinkex.types.futures import CancelFutureRequest
from tinkex.types.outputs import SampleResponse
from tinkex.types.params import SamplingParams
from tinkex.types.sampling import (
    CreateSamplingSessionRequest,
    GetSamplerRequest,
    GetSamplerResponse,
    JoinSamplingSessionRequest,
    SampleEvent,
    SampleRequest,
)
from tinkex.types.tensor import TensorData
from tinkex.wire import ops

log = logging.getLogger("tinkex")
CLONE_STRIDE = 1_000_000_000  # seq ids of one copy of a sampler


@checks_timeouts
class SamplingClient:
    """A sampler. Made by `create_sampling_client` and `save_weights_and_get_sampling_client`.

    >>> prompt = ModelInput.from_ints(tokens)                                   # doctest: +SKIP
    >>> future = sampler.sample(prompt, 4, SamplingParams(max_tokens=64))
    >>> [sequence.tokens for sequence in future.result().sequences]
    """

    def __init__(
        self,
        session: Session,
        sampling_session_id: str,
        *,
        retry_config: RetryConfig | None = None,
        record_stability_info: bool = False,
        base_model: str | None = None,
        model_path: str | None = None,
        clone: bool = False,
    ) -> None:
        self._session = session
        self._connection = session.connection
        self._sampling_session_id = sampling_session_id
        self.base_model = base_model
        self.model_path = model_path
        self.retry_config = retry_config or RetryConfig()
        self._record_stability_info = record_stability_info
        self._clone = clone
        self._ready: asyncio.Task[None] | None = None
        self._seq = itertools.count()
        self._first_seq = 0  # of a copy: where its own numbers begin, known once it is ready
        self._gate = FairLimiter(1)  # sized when the server's settings are known
        self._batch: BatchPoller | None = None
        self._watch = session.watch(f"sampler {sampling_session_id}", self.on_queue_state_change)
        self._context = CallContext(
            owner=sampling_session_id, retry=retry_config, observer=self._watch.submitting
        )
        self._progress = Progress(sampling_session_id)

    # -- sampling ----------------------------------------------------------------------------------------

    def sample(
        self,
        prompt: ModelInput,
        num_samples: int,
        sampling_params: SamplingParams,
        include_prompt_logprobs: bool = False,
        topk_prompt_logprobs: int = 0,
        topk_sample_logprobs: int = 0,
        target_prompt_logprobs: TensorData | None = None,
        prompt_alt_tokens_k: int = 0,
        prompt_logprobs_last_n: int | None = None,
    ) -> APIFuture[SampleResponse]:
        """`num_samples` continuations of `prompt`."""
        request = SampleRequest(
            prompt, sampling_params, num_samples, self._sampling_session_id, next(self._seq),
            prompt_logprobs=include_prompt_logprobs, topk_prompt_logprobs=topk_prompt_logprobs,
            topk_sample_logprobs=topk_sample_logprobs, target_prompt_logprobs=target_prompt_logprobs,
            prompt_alt_tokens_k=prompt_alt_tokens_k, prompt_logprobs_last_n=prompt_logprobs_last_n,
            record_stability_info=self._record_stability_info,
        )  # fmt: skip
        self._check(request)
        return start(lambda: self._sample(request), "sample")

    async def sample_async(
        self,
        prompt: ModelInput,
        num_samples: int,
        sampling_params: SamplingParams,
        include_prompt_logprobs: bool = False,
        topk_prompt_logprobs: int = 0,
        topk_sample_logprobs: int = 0,
        target_prompt_logprobs: TensorData | None = None,
        prompt_alt_tokens_k: int = 0,
        prompt_logprobs_last_n: int | None = None,
        *,
        timeout: float | None = None,
    ) -> SampleResponse:
        future = self.sample(
            prompt, num_samples, sampling_params, include_prompt_logprobs, topk_prompt_logprobs,
            topk_sample_logprobs, target_prompt_logprobs, prompt_alt_tokens_k, prompt_logprobs_last_n,
        )  # fmt: skip
        return await owned(future, timeout)

    def sample_stream(
        self,
        prompt: ModelInput,
        sampling_params: SamplingParams,
        num_samples: int = 1,
        *,
        include_prompt_logprobs: bool = False,
        topk_prompt_logprobs: int = 0,
        topk_sample_logprobs: int = 0,
        target_prompt_logprobs: TensorData | None = None,
        prompt_alt_tokens_k: int = 0,
        prompt_logprobs_last_n: int | None = None,
        timeout: float | None = None,
    ) -> SampleStream:
        """The same as `sample`, token by token: iterate it with `for` or `async for`.

        `timeout` limits the wait for each next piece; running out of it cancels nothing. Not every server
        has streams: one that does not raises StreamingUnsupportedError.
        """
        # Without a seq id: what breaks off is cancelled by the server, and must not be found again.
        request = SampleRequest(
            prompt, sampling_params, num_samples, self._sampling_session_id,
            prompt_logprobs=include_prompt_logprobs, topk_prompt_logprobs=topk_prompt_logprobs,
            topk_sample_logprobs=topk_sample_logprobs, target_prompt_logprobs=target_prompt_logprobs,
            prompt_alt_tokens_k=prompt_alt_tokens_k, prompt_logprobs_last_n=prompt_logprobs_last_n,
            record_stability_info=self._record_stability_info,
        )  # fmt: skip
        self._check(request)
        feed = Feed()
        return SampleStream(feed, start(lambda: self._stream(request, feed), "sample_stream"), timeout)

    async def _stream(self, request: SampleRequest, feed: Feed) -> SampleResponse:
        transport = self._connection.transport

        def observe(state: str, reason: str | None) -> None:
            self._progress.made()
            self._watch(state, reason)

        def opening() -> AsyncGenerator[SampleEvent, None]:
            return transport.stream(request, self._context)

        def drawing() -> Awaitable[SampleResponse]:
            again = self.retry_config.enable_retry_logic and not self._connection.config.sample_no_retries
            wishes = replace(self.retry_config, enable_retry_logic=again)
            policy = transport.policy.tuned(wishes)
            return draw(opening, feed, policy, wishes, observe)

        with self._connection.reporting(ops.STREAM_SAMPLE.name):
            try:
                response = await self._admitted(drawing)
            except APIStatusError as error:
                raise unsupported(error, request) from None
        return samples.checked(response, request)

    def compute_logprobs(
        self, prompt: ModelInput, prompt_logprobs_last_n: int | None = None
    ) -> APIFuture[list[float | None]]:
        """log p(token | what is before it) for each token of `prompt`; None for the first."""
        request = SampleRequest(
            prompt, SamplingParams(max_tokens=1), 1, self._sampling_session_id, next(self._seq),
            prompt_logprobs=True, prompt_logprobs_last_n=prompt_logprobs_last_n,
            record_stability_info=self._record_stability_info,
        )  # fmt: skip
        self._check(request)

        async def score() -> list[float | None]:
            return samples.prompt_logprobs(await self._sample(request))

        return start(score, "compute_logprobs")

    async def compute_logprobs_async(
        self, prompt: ModelInput, prompt_logprobs_last_n: int | None = None, *, timeout: float | None = None
    ) -> list[float | None]:
        return await owned(self.compute_logprobs(prompt, prompt_logprobs_last_n), timeout)

    def _check(self, request: SampleRequest) -> None:
        self._connection.check_open()
        samples.check_request(request)

    def _sample(self, request: SampleRequest) -> Coroutine[Any, Any, SampleResponse]:
        return self._admitted(lambda: self._sample_patiently(request))

    async def _admitted(self, sample: Callable[[], Awaitable[SampleResponse]]) -> SampleResponse:
        """Sample within this client's limits, and give up if nothing moves any more."""
        await self._open()
        with self._progress:
            async with self._gate.permit():
                return await sample()

    async def _sample_patiently(self, request: SampleRequest) -> SampleResponse:
        if self._first_seq:
            request = replace(request, seq_id=self._first_seq + (request.seq_id or 0))
        for tries in itertools.count(1):
            try:
                return await self._sample_once(request)
            except ClientClosedError:
                raise
            except (ExpiredError, *self.retry_config.retryable_exceptions):
                # Expired: the server no longer has the result (it restarted, say); ask for a new one.
                if not self.retry_config.enable_retry_logic or self._connection.config.sample_no_retries:
                    raise
            await asyncio.sleep(RetryPolicy().tuned(self.retry_config).backoff(tries))
            request = replace(request, seq_id=self._first_seq + next(self._seq))
        raise AssertionError("unreachable")

    async def _sample_once(self, request: SampleRequest) -> SampleResponse:
        promise = await self._connection.call(ops.SAMPLE, request, self._context)
        try:
            if self._batch is not None:
                response = await self._batch.retrieve(ops.SAMPLE, promise.request_id, self._watch)
            else:
                response = await retrieve(
                    self._connection, ops.SAMPLE, promise.request_id, observe=self._watch,
                    owner=self._sampling_session_id,
                )  # fmt: skip
        except asyncio.CancelledError:
            background.spawn(_cancel(self._connection, promise.request_id))
            raise
        return samples.checked(response, request, promise.sample_sequence_ids)

    async def _open(self) -> None:
        """Learn the server's settings and this copy's number, before the first sample."""
        if self._ready is None or (self._ready.done() and self._ready.exception() is not None):
            self._ready = asyncio.get_running_loop().create_task(self._get_ready())
        if not self._ready.done():
            await asyncio.shield(self._ready)

    async def _get_ready(self) -> None:
        await self._session.open()
        config = self._connection.config
        clone_id = 0
        if self._clone and config.sample_join_sampling_session:
            request = JoinSamplingSessionRequest(sampling_session_id=self._sampling_session_id)
            clone_id = (await self._connection.call(ops.JOIN_SAMPLING_SESSION, request)).client_counter
        elif self._clone:
            clone_id = random.SystemRandom().randint(1, CLONE_STRIDE - 1)
        self._first_seq = clone_id * CLONE_STRIDE
        self._gate.resize(self.retry_config.max_connections or config.sample_max_concurrent_requests)
        if config.sample_use_retrieve_futures:
            self._batch = BatchPoller(self._connection, self._sampling_session_id, clone_id)
        if self.retry_config.enable_stuck_detection and config.sample_enable_stuck_detection:
            self._progress.watch(self.retry_config.progress_timeout)

    def on_queue_state_change(self, queue_state: str, queue_state_reason: str | None) -> None:
        """Called when the server pauses or resumes this sampler; override it to be told."""

    @property
    def queue_stats(self) -> QueueStats:
        """How often this sampler was paused, why, and for how long."""
        return self._watch.stats()

    # -- what this sampler is ----------------------------------------------------------------------------

    def get_base_model(self, *, timeout: float | None = None) -> str:
        """The name of the base model under what it samples from."""
        return self._info().result(timeout).base_model

    async def get_base_model_async(self, *, timeout: float | None = None) -> str:
        return (await self._info().result_async(timeout)).base_model

    def _info(self) -> APIFuture[GetSamplerResponse]:
        return self._connection.submit(
            ops.GET_SAMPLER, GetSamplerRequest(sampler_id=self._sampling_session_id)
        )

    def get_tokenizer(self, *, timeout: float | None = None) -> Any:
        """The base model's tokenizer (a transformers one), cached."""
        return start(self._tokenizer, "tokenizer").result(timeout)

    # No coroutine function: programs that wrap all of those expect the official ones alone.
    def get_tokenizer_async(self, *, timeout: float | None = None) -> Awaitable[Any]:
        return start(self._tokenizer, "tokenizer").result_async(timeout)

    async def _tokenizer(self) -> Any:
        request = GetSamplerRequest(sampler_id=self._sampling_session_id)
        model = (await self._connection.call(ops.GET_SAMPLER, request)).base_model
        return await tokenizer_files.load(self._connection, model)

    def get_telemetry(self) -> Telemetry | None:
        """What tells the server of failures; None unless that was asked for."""
        return self._connection.telemetry

    def __repr__(self) -> str:
        return f"SamplingClient({self._sampling_session_id!r})"

    # -- copies in other processes -----------------------------------------------------------------------

    def _state(self, timeout: float | None = None) -> dict[str, Any]:
        """All that another process needs to make a copy of this sampler."""
        return {
            **sampler_copies.way_of(self._connection, self),
            "session_id": start(self._session.open).result(timeout),
            "sampling_session_id": self._sampling_session_id,
            "record_stability_info": self._record_stability_info,
            "base_model": self.base_model,
            "model_path": self.model_path,
        }

    def __reduce__(self):
        return _from_state, (self._state(), self.retry_config)

    def get_sampler_handle(self, *, timeout: float | None = None) -> str:
        """A string from which another process can make this sampler; it holds no credential."""
        return sampler_copies.to_handle(self._state(timeout), self.retry_config)

    @staticmethod
    def from_sampler_handle(
        handle: str,
        *,
        api_key: str | None = None,
        default_headers_overrides: Mapping[str, str] | None = None,
    ) -> SamplingClient:
        """The sampler that `get_sampler_handle` described, with headers besides those that came along."""
        more = check_headers(default_headers_overrides)
        try:
            state, config = sampler_copies.from_handle(handle)
            state["headers"] = {**state.get("headers", {}), **more}
            return _from_state(state, config, api_key=api_key)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if isinstance(error, TinkerError):
                raise
            raise InvalidInputError("not a sampler handle; make one with get_sampler_handle()") from None


def open_sampler(
    session: Session,
    *,
    model_path: str | None = None,
    base_model: str | None = None,
    retry_config: RetryConfig | None = None,
    record_stability_info: bool = False,
) -> APIFuture[SamplingClient]:
    """Open a sampling session on a base model, a published adapter, or both."""
    if model_path is None and base_model is None:
        raise InvalidInputError("give model_path (tinker://…) or base_model")
    if base_model is not None and (not isinstance(base_model, str) or not base_model):
        raise InvalidInputError(f"base_model must be a model's name, got {base_model!r}")
    if model_path is not None and not (isinstance(model_path, str) and model_path.startswith("tinker://")):
        raise InvalidInputError(f"model_path must start with tinker://, got {model_path!r}")
    check_wishes(retry_config, record_stability_info)

    async def create() -> SamplingClient:
        request = CreateSamplingSessionRequest(
            session_id=await session.open(),
            sampling_session_seq_id=next(session.sampling_seq),
            model_path=model_path,
            base_model=base_model,
        )
        reply = await session.connection.call(ops.CREATE_SAMPLING_SESSION, request)
        return SamplingClient(
            session, reply.sampling_session_id, retry_config=retry_config,
            record_stability_info=record_stability_info, base_model=base_model, model_path=model_path,
        )  # fmt: skip

    return start(create, "create_sampling_session")


def _from_state(
    state: dict[str, Any], retry_config: RetryConfig, *, api_key: str | None = None
) -> SamplingClient:
    return SamplingClient(
        sampler_copies.joined_session(state, api_key), state["sampling_session_id"], clone=True,
        retry_config=retry_config, record_stability_info=state["record_stability_info"],
        base_model=state.get("base_model"), model_path=state.get("model_path"),
    )  # fmt: skip


async def _cancel(connection: ServerConnection, request_id: str) -> None:
    """Tell the server that nobody waits any more; it may not care."""
    try:
        await connection.transport.call(ops.CANCEL_FUTURE, CancelFutureRequest(request_id=request_id))
    except TinkerError as error:
        log.debug("sample %s could not be cancelled on the server: %s", request_id, error)

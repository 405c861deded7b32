"""SamplingClient: samples from a base model or a published adapter, thousands of requests at a time.

Promises: the official names, parameters and defaults; a sampler can be pickled, or described by a handle, and
used in other processes. A pickle or handle holds the source of the credential, never the credential.
"""

from __future__ import annotations

import base64
import json
import logging
import weakref
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from tinkex.client.base_client import ModelClient
from tinkex.client.future import APIFuture, check_timeout, start
from tinkex.client.polling import QueueStats
from tinkex.client.retry import RetryConfig, check_sampler_settings
from tinkex.client.sample_sender import SampleSender, check_request
from tinkex.client.server_connection import check_headers, connect, is_public
from tinkex.client.session import Session
from tinkex.client.streaming import SampleStream, TokenBuffer
from tinkex.client.twins import awaited, blocking
from tinkex.config import Timeouts
from tinkex.errors import InvalidInputError, TinkerError
from tinkex.types.data import ModelInput
from tinkex.types.outputs import SampleResponse
from tinkex.types.params import SamplingParams
from tinkex.types.sampling import CreateSamplingSessionRequest, GetSamplerRequest, SampleRequest
from tinkex.types.tensor import TensorData
from tinkex.wire import ops

log = logging.getLogger("tinkex")


class SamplingClient(ModelClient):
    """A sampler, created by `create_sampling_client` or `save_weights_and_get_sampling_client`.

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
        super().__init__(session)
        self._sampling_session_id = sampling_session_id
        self.base_model = base_model
        self.model_path = model_path
        self.retry_config = retry_config or RetryConfig()
        self._record_stability_info = record_stability_info
        self._watch = session.watch(f"sampler {sampling_session_id}", self.on_queue_state_change)
        self._sender = SampleSender(session, sampling_session_id, retry_config, self._watch, clone=clone)

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
        """Draw `num_samples` continuations of `prompt`.

        >>> response = sampler.sample(prompt, 1, SamplingParams(max_tokens=64, temperature=0.7)).result()
        >>> response.sequences[0].tokens                                        # doctest: +SKIP
        """
        request = self._request(
            prompt, sampling_params, num_samples, self._sender.next_seq(),
            prompt_logprobs=include_prompt_logprobs, topk_prompt_logprobs=topk_prompt_logprobs,
            topk_sample_logprobs=topk_sample_logprobs, target_prompt_logprobs=target_prompt_logprobs,
            prompt_alt_tokens_k=prompt_alt_tokens_k, prompt_logprobs_last_n=prompt_logprobs_last_n,
        )  # fmt: skip
        return start(lambda: self._sender.send(request), "sample")

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
        """Like `sample`, token by token: iterate over the stream with `for` or `async for`.

        `timeout` limits the wait for each next piece; a timeout cancels nothing. A server without streams
        raises StreamingUnsupportedError.

        >>> for new in sampler.sample_stream(prompt, SamplingParams(max_tokens=64)):  # doctest: +SKIP
        ...     print(new.tokens)
        """
        check_timeout(timeout)
        # No seq id: the server cancels a stream that breaks off, and must not find it again on a resend.
        request = self._request(
            prompt, sampling_params, num_samples, None,
            prompt_logprobs=include_prompt_logprobs, topk_prompt_logprobs=topk_prompt_logprobs,
            topk_sample_logprobs=topk_sample_logprobs, target_prompt_logprobs=target_prompt_logprobs,
            prompt_alt_tokens_k=prompt_alt_tokens_k, prompt_logprobs_last_n=prompt_logprobs_last_n,
        )  # fmt: skip
        buffer = TokenBuffer()
        done = start(lambda: self._sender.stream(request, buffer), "sample_stream")
        return SampleStream(buffer, done, timeout)

    def compute_logprobs(
        self, prompt: ModelInput, prompt_logprobs_last_n: int | None = None
    ) -> APIFuture[list[float | None]]:
        """Compute the logprob of each token of `prompt` given those before it; None for the first.

        >>> sampler.compute_logprobs(ModelInput.from_ints(tokens)).result()    # doctest: +SKIP
        """
        request = self._request(
            prompt, SamplingParams(max_tokens=1), 1, self._sender.next_seq(),
            prompt_logprobs=True, prompt_logprobs_last_n=prompt_logprobs_last_n,
        )  # fmt: skip

        async def score() -> list[float | None]:
            logprobs = (await self._sender.send(request)).prompt_logprobs
            if logprobs is None:
                raise TinkerError("the server did not return the prompt's logprobs")
            return logprobs

        return start(score, "compute_logprobs")

    def _request(
        self, prompt: ModelInput, params: SamplingParams, num_samples: int, seq_id: int | None, **more: Any
    ) -> SampleRequest:
        request = SampleRequest(
            prompt, params, num_samples, self._sampling_session_id, seq_id,
            record_stability_info=self._record_stability_info, **more,
        )  # fmt: skip
        self._connection.check_open()
        check_request(request)
        return request

    def on_queue_state_change(self, queue_state: str, queue_state_reason: str | None) -> None:
        """Called when the server pauses or resumes this sampler; override it in a subclass."""

    @property
    def queue_stats(self) -> QueueStats:
        """How often the server paused this sampler, why, and for how long."""
        return self._watch.stats()

    # -- about the sampler -------------------------------------------------------------------------------

    @blocking
    def get_base_model(self) -> APIFuture[str]:
        """Return the name of the base model.

        >>> sampler.get_base_model()                                            # doctest: +SKIP
        """
        return start(self._base_model, "get_base_model")

    async def _base_model(self) -> str:
        request = GetSamplerRequest(sampler_id=self._sampling_session_id)
        return (await self._connection.call(ops.GET_SAMPLER, request)).base_model

    async def _model(self) -> tuple[str, None]:
        return await self._base_model(), None

    # -- the same, to await ------------------------------------------------------------------------------

    sample_async = awaited(sample, cancels=True)
    compute_logprobs_async = awaited(compute_logprobs, cancels=True)
    get_base_model_async = awaited(get_base_model)

    def __repr__(self) -> str:
        return f"SamplingClient({self._sampling_session_id!r})"

    # -- copies in other processes -----------------------------------------------------------------------

    def __reduce__(self):
        return _from_state, (self._state(None), self.retry_config)

    def get_sampler_handle(self, *, timeout: float | None = None) -> str:
        """Return a string from which another process can create this sampler; it holds no credential.

        >>> handle = sampler.get_sampler_handle()                               # doctest: +SKIP
        >>> copy = SamplingClient.from_sampler_handle(handle)
        """
        check_timeout(timeout)
        # Exception classes stay here: the other process may not have them.
        config = asdict(replace(self.retry_config, retryable_exceptions=()))
        state = {**self._state(timeout), "retry_config": config}
        return base64.urlsafe_b64encode(json.dumps(state).encode()).decode()

    @staticmethod
    def from_sampler_handle(
        handle: str, *, api_key: str | None = None, default_headers_overrides: Mapping[str, str] | None = None
    ) -> SamplingClient:
        """Create the sampler that a handle describes; the headers are added to the handle's."""
        more = check_headers(default_headers_overrides)
        try:
            state: dict[str, Any] = json.loads(base64.urlsafe_b64decode(handle))
            config: dict[str, Any] = {**state.pop("retry_config"), "retryable_exceptions": ()}
            state["headers"] = {**state.get("headers", {}), **more}
            return _from_state(state, RetryConfig(**config), api_key=api_key)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if isinstance(error, TinkerError):
                raise
            raise InvalidInputError("not a sampler handle; make one with get_sampler_handle()") from None

    def _state(self, timeout: float | None) -> dict[str, Any]:
        """What another process needs to create this sampler; headers that may be credentials are left out."""
        connection = self._connection
        if not connection.base_url:
            raise TypeError(
                "this sampler runs inside this process and cannot be sent to another one; start a server "
                "with `tinkex serve` to share it"
            )
        if left := [name for name, value in connection.headers.items() if not is_public(name, value)]:
            log.warning(
                "%r travels without the header %s, which may hold a credential: "
                "SamplingClient.from_sampler_handle(…, default_headers_overrides=…) takes it there",
                self, ", ".join(left),
            )  # fmt: skip
        return {
            "base_url": connection.base_url,
            "headers": {name: value for name, value in connection.headers.items() if name not in left},
            "timeouts": asdict(connection.timeouts),
            "credential": connection.credential_source,
            "session_id": start(self.session.open).result(timeout),
            "sampling_session_id": self._sampling_session_id,
            "record_stability_info": self._record_stability_info,
            "base_model": self.base_model,
            "model_path": self.model_path,
        }


_joined: weakref.WeakValueDictionary[tuple[Any, ...], Session] = weakref.WeakValueDictionary()


def _from_state(
    state: dict[str, Any], retry_config: RetryConfig, *, api_key: str | None = None
) -> SamplingClient:
    """Create a sampler from `SamplingClient._state`. Equal connections share a session and its heartbeat."""
    headers, timeouts = state.get("headers", {}), Timeouts(**state.get("timeouts", {}))
    source = None if api_key else state["credential"]
    connection = connect(state["base_url"], api_key, source=source, headers=headers, timeouts=timeouts)
    key = (
        state["base_url"], state["session_id"], connection.credential_source, api_key or "",
        tuple(sorted(headers.items())), timeouts,
    )  # fmt: skip
    session = _joined.get(key)
    if session is None or session.connection.closed:
        session = _joined[key] = Session(connection, session_id=state["session_id"])
    return SamplingClient(
        session, state["sampling_session_id"], clone=True, retry_config=retry_config,
        record_stability_info=state["record_stability_info"],
        base_model=state.get("base_model"), model_path=state.get("model_path"),
    )  # fmt: skip


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
    check_sampler_settings(retry_config, record_stability_info)
    session.connection.check_open()

    async def create() -> SamplingClient:
        request = CreateSamplingSessionRequest(
            session_id=await session.open(), sampling_session_seq_id=next(session.sampling_seq),
            model_path=model_path, base_model=base_model,
        )  # fmt: skip
        reply = await session.connection.call(ops.CREATE_SAMPLING_SESSION, request)
        return SamplingClient(
            session, reply.sampling_session_id, retry_config=retry_config,
            record_stability_info=record_stability_info, base_model=base_model, model_path=model_path,
        )  # fmt: skip

    return start(create, "create_sampling_session")

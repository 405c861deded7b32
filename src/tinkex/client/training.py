"""TrainingClient: one run, as a loop on a laptop sees it.

Promises: requests are executed in the order of the calls; a call returns at once with a future; what is
wrong with its input is raised at the call. A step whose pass was not wholly accepted is held back, so that
nothing is ever applied to a part of a batch. Hop 1 of a request.
"""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from tinkex.client import custom_loss, passes
from tinkex.client.calls import check_ttl, checks_timeouts
from tinkex.client.future import APIFuture, start
from tinkex.client.loop import in_own_thread, off_loop
from tinkex.client.poller import retrieve
from tinkex.client.queue_state import QueueStats
from tinkex.client.retry import RetryConfig, check_wishes
from tinkex.client.session import Session
from tinkex.client.telemetry import Telemetry
from tinkex.client.tokenizer_files import fetcher
from tinkex.client.turns import Turns
from tinkex.config import console_url
from tinkex.errors import (
    CredentialError,
    InvalidInputError,
    PassIncompleteError,
    RequestFailedError,
    TinkerError,
)
from tinkex.tokenizers import load_tokenizer, tokenizer_name
from tinkex.types.checkpoints import (
    LoadWeightsRequest,
    LoadWeightsResponse,
    ParsedCheckpointTinkerPath,
    SaveWeightsExternalRequest,
    SaveWeightsExternalResponse,
    SaveWeightsForSamplerRequest,
    SaveWeightsForSamplerResponse,
    SaveWeightsRequest,
    SaveWeightsResponse,
)
from tinkex.types.data import Datum, ForwardBackwardInput
from tinkex.types.optimizers import OptimParams
from tinkex.types.outputs import ForwardBackwardOutput
from tinkex.types.params import AdamParams
from tinkex.types.training import (
    ForwardBackwardRequest,
    GetInfoRequest,
    GetInfoResponse,
    OptimStepRequest,
    OptimStepResponse,
)
from tinkex.wire import ops
from tinkex.wire.ops import Op

if TYPE_CHECKING:
    from tinkex.client.sampling import SamplingClient

T = TypeVar("T")
LossConfig = Mapping[str, float | str]

# Errors after which a seq id is free again: nothing with it left this process.
NEVER_SENT = (InvalidInputError, CredentialError)


@checks_timeouts
class TrainingClient:
    """One run. Made by `ServiceClient.create_lora_training_client` and its siblings.

    >>> run = service.create_lora_training_client("Qwen/Qwen3-8B")      # doctest: +SKIP
    >>> loss = run.forward_backward(data, "cross_entropy")
    >>> run.optim_step(AdamParams(learning_rate=1e-4))
    >>> loss.result().metrics["loss:sum"]
    """

    def __init__(self, session: Session, model_id: str) -> None:
        self._session = session
        self.model_id = model_id
        self._turns = Turns()
        self._seq = 1  # create_model was 0; only touched in a turn
        self._incomplete: str | None = None  # why the next step must not be sent: a part of its pass was
        self._failed: str | None = (
            None  # why the pass before came to nothing, which bars steps already called
        )
        self._failures = 0
        self._cause: Exception | None = None  # what either of them came from
        self._watch = session.connection.watch(f"run {model_id}")

    # -- passes ------------------------------------------------------------------------------------------

    def forward(
        self, data: Sequence[Datum], loss_fn: str, loss_fn_config: LossConfig | None = None
    ) -> APIFuture[ForwardBackwardOutput]:
        """Logprobs and loss, with no gradient."""
        return self._pass("forward", data, loss_fn, loss_fn_config, forward_only=True)

    async def forward_async(
        self, data: Sequence[Datum], loss_fn: str, loss_fn_config: LossConfig | None = None
    ) -> APIFuture[ForwardBackwardOutput]:
        return self.forward(data, loss_fn, loss_fn_config)

    def forward_backward(
        self, data: Sequence[Datum], loss_fn: str, loss_fn_config: LossConfig | None = None
    ) -> APIFuture[ForwardBackwardOutput]:
        """Add the gradients of a loss, summed over all tokens and datums, to the run's."""
        return self._pass("forward_backward", data, loss_fn, loss_fn_config, forward_only=False)

    async def forward_backward_async(
        self, data: Sequence[Datum], loss_fn: str, loss_fn_config: LossConfig | None = None
    ) -> APIFuture[ForwardBackwardOutput]:
        return self.forward_backward(data, loss_fn, loss_fn_config)

    def forward_backward_custom(
        self,
        data: Sequence[Datum],
        loss_fn: custom_loss.CustomLossFnV1 | custom_loss.LossHandle | custom_loss.ArrayLoss,
        *,
        loss_type_input: str | None = None,
    ) -> APIFuture[ForwardBackwardOutput]:
        """As forward_backward, with a loss of your own.

        It is a torch function `fn(data, logprobs) -> (loss, metrics)`, which runs here; a LossHandle of
        `ServiceClient.create_custom_loss`; or an object that knows its gradients (tinkex.regularizers).
        `loss_type_input` is accepted for the official signature and has no effect.
        """
        if isinstance(loss_fn, custom_loss.LossHandle):
            return self._pass_of_handle(data, loss_fn)
        passes.check_pass(data, "cross_entropy", None)
        if not callable(loss_fn) and not isinstance(loss_fn, custom_loss.ArrayLoss):
            raise InvalidInputError(
                f"loss_fn must be a function, a LossHandle or an ArrayLoss, got {type(loss_fn).__name__}"
            )
        data = list(data)
        return self._enqueue(
            "forward_backward_custom", lambda: self._guarded(self._send_custom(data, loss_fn))
        )

    async def forward_backward_custom_async(
        self,
        data: Sequence[Datum],
        loss_fn: custom_loss.CustomLossFnV1 | custom_loss.LossHandle | custom_loss.ArrayLoss,
        *,
        loss_type_input: str | None = None,
    ) -> APIFuture[ForwardBackwardOutput]:
        return self.forward_backward_custom(data, loss_fn, loss_type_input=loss_type_input)

    def _pass_of_handle(
        self, data: Sequence[Datum], handle: custom_loss.LossHandle
    ) -> APIFuture[ForwardBackwardOutput]:
        passes.check_pass(data, "custom", None)
        handle.check(data)
        if handle.session_id != self._session.session_id:
            raise InvalidInputError(
                f"the loss {handle.name!r} was created in session {handle.session_id}, but this run is of "
                f"session {self._session.session_id}: create it with this run's ServiceClient"
            )
        data = list(data)
        send = self._send_uploaded if handle.loss_id is not None else self._send_traced
        return self._enqueue("forward_backward_custom", lambda: self._guarded(send(data, handle)))

    def _pass(
        self, what: str, data: Sequence[Datum], loss_fn: str, config: LossConfig | None, *, forward_only: bool
    ) -> APIFuture[ForwardBackwardOutput]:
        passes.check_pass(data, loss_fn, config)
        if loss_fn == "custom" and "loss_id" not in (config or {}):
            raise InvalidInputError(
                "the loss_fn 'custom' needs loss_fn_config={'loss_id': …}; for a loss of your own call "
                "forward_backward_custom"
            )
        data = list(data)  # the caller may reuse theirs
        if forward_only:
            return self._enqueue(what, lambda: self._send_pass(data, loss_fn, config, True))
        return self._enqueue(what, lambda: self._guarded(self._send_pass(data, loss_fn, config, False)))

    async def _guarded(self, sending: Awaitable[T]) -> T:
        """Send a pass that a step builds on; if it comes to nothing, the step must not be sent."""
        try:
            return await sending
        except Exception as error:
            self._cause = error
            if self._incomplete is None:
                self._failures += 1
                self._failed = str(error) or type(error).__name__
            raise

    async def _send_pass(
        self, data: list[Datum], loss_fn: str, config: LossConfig | None, forward_only: bool
    ) -> Awaitable[ForwardBackwardOutput]:
        limits = self._session.connection.config
        chunks = passes.cut(data, limits.fwdbwd_max_chunk_len, limits.fwdbwd_max_chunk_bytes_count)
        first, self._seq = self._seq, self._seq + len(chunks)
        requests = [
            ForwardBackwardRequest(
                ForwardBackwardInput(chunk, loss_fn, config), self.model_id, first + n, forward_only
            )
            for n, chunk in enumerate(chunks)
        ]
        promises = await self._post_chunks(requests, parallel=limits.parallel_fwdbwd_chunks)
        return self._collect_pass([promise.request_id for promise in promises])

    async def _post_chunks(self, requests: list[ForwardBackwardRequest], *, parallel: bool) -> list[Any]:
        """Post all chunks of a pass; if any is refused, say so and remember that the pass is incomplete."""

        def post(request: ForwardBackwardRequest) -> Awaitable[Any]:
            return self._session.call(ops.FORWARD_BACKWARD, request, observe=self._watch.submitting)

        answers: list[Any] = []
        if parallel:
            # The first chunk last: when it arrives, the server has the whole pass and can batch it.
            rest = await asyncio.gather(*map(post, requests[1:]), return_exceptions=True)
            answers = [*await asyncio.gather(post(requests[0]), return_exceptions=True), *rest]
        else:
            for request in requests:
                answers += await asyncio.gather(post(request), return_exceptions=True)
        errors = [answer for answer in answers if isinstance(answer, BaseException)]
        if not errors:
            return answers
        if len(errors) == len(answers) and all(isinstance(e, NEVER_SENT) for e in errors):
            self._seq = requests[0].seq_id
        elif not requests[0].forward_only:
            accepted = len(answers) - len(errors)
            self._incomplete = (
                f"{accepted} of {len(answers)} requests of a forward_backward were accepted ({errors[0]})"
            )
        raise errors[0]

    async def _collect_pass(self, request_ids: list[str]) -> ForwardBackwardOutput:
        outputs = await asyncio.gather(*(self._result(ops.FORWARD_BACKWARD, r) for r in request_ids))
        return passes.join(outputs)

    async def _send_uploaded(
        self, data: list[Datum], handle: custom_loss.LossHandle
    ) -> Awaitable[ForwardBackwardOutput]:
        waiting = await self._send_pass(data, "custom", {"loss_id": handle.loss_id or ""}, False)

        async def finish() -> ForwardBackwardOutput:
            try:
                return await waiting
            except RequestFailedError as error:
                raise handle.explain(error) from None

        return finish()

    def _send_traced(
        self, data: list[Datum], handle: custom_loss.LossHandle
    ) -> Awaitable[Awaitable[ForwardBackwardOutput]]:
        return self._send_custom(data, handle.run_here)

    async def _send_custom(
        self, data: list[Datum], loss_fn: custom_loss.CustomLossFnV1 | custom_loss.ArrayLoss
    ) -> Awaitable[ForwardBackwardOutput]:
        # All of it within one turn: what is called after this pass must be sent after its backward half.
        forward = await self._send_pass(custom_loss.probe(data), "cross_entropy", None, True)

        async def differentiate() -> custom_loss.Gradients:
            return await in_own_thread(custom_loss.differentiate, self, loss_fn, data, await forward)

        gradients = await self._turns.while_wanted(differentiate())
        surrogate = await off_loop(custom_loss.linearised, data, gradients.weights)
        waiting = await self._send_pass(surrogate, "cross_entropy", None, False)

        async def finish() -> ForwardBackwardOutput:
            return custom_loss.finished(await waiting, gradients)

        return finish()

    # -- steps -------------------------------------------------------------------------------------------

    def optim_step(
        self,
        optim_params: OptimParams | Mapping[str, Any] | None = None,
        *,
        adam_params: AdamParams | None = None,
    ) -> APIFuture[OptimStepResponse]:
        """One optimizer step from the gradients accumulated since the last one."""
        if optim_params is not None and adam_params is not None:
            raise InvalidInputError("give optim_params or adam_params, not both")
        params = optim_params if optim_params is not None else adam_params
        # Built now, so that bad parameters are refused at the call; its number comes with its turn.
        params = AdamParams() if params is None else params
        request = OptimStepRequest(optim_params=params, model_id=self.model_id)  # type: ignore[arg-type]
        failures = self._failures
        return self._enqueue("optim_step", lambda: self._send_step(request, failures))

    async def optim_step_async(
        self,
        optim_params: OptimParams | Mapping[str, Any] | None = None,
        *,
        adam_params: AdamParams | None = None,
    ) -> APIFuture[OptimStepResponse]:
        return self.optim_step(optim_params, adam_params=adam_params)

    async def _send_step(self, request: OptimStepRequest, failures: int) -> Awaitable[OptimStepResponse]:
        """Send a step, unless its pass was not wholly sent.

        `failures` is how many passes had come to nothing when the step was called: one that failed since then
        is news to the caller, one that failed before is not.
        """
        reason, self._incomplete = self._incomplete, None
        failed, self._failed = self._failed, None
        if reason is None and failed is not None and failures < self._failures:
            reason = f"the forward_backward before it came to nothing ({failed})"
        if reason is not None:
            raise PassIncompleteError(
                f"this optim_step was not sent: {reason}, so it would have applied a part of the batch. Call "
                "optim_step again to apply what was accepted, or load a checkpoint to discard it"
            ) from self._cause
        return await self._send(ops.OPTIM_STEP, request)

    # -- checkpoints -------------------------------------------------------------------------------------

    def save_state(
        self,
        name: str,
        ttl_seconds: int | None = None,
        overwrite: bool = False,
        user_metadata: dict[str, str] | None = None,
    ) -> APIFuture[SaveWeightsResponse]:
        """Save weights and optimizer, to go on from later."""
        if not isinstance(overwrite, bool):
            raise InvalidInputError(f"overwrite must be True or False, got {overwrite!r:.80}")
        request = SaveWeightsRequest(
            model_id=self.model_id, path=_checkpoint_name(name), ttl_seconds=check_ttl(ttl_seconds),
            overwrite=overwrite, user_metadata=user_metadata,
        )  # fmt: skip
        return self._enqueue("save_state", lambda: self._send(ops.SAVE_WEIGHTS, request))

    async def save_state_async(
        self,
        name: str,
        ttl_seconds: int | None = None,
        overwrite: bool = False,
        user_metadata: dict[str, str] | None = None,
    ) -> APIFuture[SaveWeightsResponse]:
        return self.save_state(name, ttl_seconds, overwrite, user_metadata)

    def load_state(
        self, path: str, weights_access_token: str | None = None
    ) -> APIFuture[LoadWeightsResponse]:
        """Replace the weights by saved ones; the optimizer starts anew."""
        _deprecated("load_state", "ServiceClient.create_training_client_from_state")
        return self._load(path, optimizer=False, token=weights_access_token)

    async def load_state_async(
        self, path: str, weights_access_token: str | None = None
    ) -> APIFuture[LoadWeightsResponse]:
        return self.load_state(path, weights_access_token)

    def load_state_with_optimizer(
        self, path: str, weights_access_token: str | None = None
    ) -> APIFuture[LoadWeightsResponse]:
        """Replace weights and optimizer by saved ones."""
        _deprecated(
            "load_state_with_optimizer", "ServiceClient.create_training_client_from_state_with_optimizer"
        )
        return self._load(path, optimizer=True, token=weights_access_token)

    async def load_state_with_optimizer_async(
        self, path: str, weights_access_token: str | None = None
    ) -> APIFuture[LoadWeightsResponse]:
        return self.load_state_with_optimizer(path, weights_access_token)

    def _load(self, path: str, *, optimizer: bool, token: str | None) -> APIFuture[LoadWeightsResponse]:
        ParsedCheckpointTinkerPath.from_tinker_path(path)
        request = LoadWeightsRequest(
            model_id=self.model_id, path=path, optimizer=optimizer, weights_access_token=token
        )
        return self._enqueue("load_state", lambda: self._send(ops.LOAD_WEIGHTS, request))

    def save_weights_for_sampler(
        self, name: str, ttl_seconds: int | None = None, user_metadata: dict[str, str] | None = None
    ) -> APIFuture[SaveWeightsForSamplerResponse]:
        """Publish the adapter under a name, for sampling."""
        request = SaveWeightsForSamplerRequest(
            model_id=self.model_id, path=_checkpoint_name(name), ttl_seconds=check_ttl(ttl_seconds),
            user_metadata=user_metadata,
        )  # fmt: skip

        async def send() -> Awaitable[SaveWeightsForSamplerResponse]:
            waiting = await self._send(ops.SAVE_WEIGHTS_FOR_SAMPLER, request)
            return _named(waiting, SaveWeightsForSamplerResponse)

        return self._enqueue("save_weights_for_sampler", send)

    async def save_weights_for_sampler_async(
        self, name: str, ttl_seconds: int | None = None, user_metadata: dict[str, str] | None = None
    ) -> APIFuture[SaveWeightsForSamplerResponse]:
        return self.save_weights_for_sampler(name, ttl_seconds, user_metadata)

    def save_weights_external(
        self,
        name: str,
        ttl_seconds: int | None = None,
        age_encryption_recipients: list[str] | None = None,
    ) -> APIFuture[SaveWeightsExternalResponse]:
        """Export the adapter as files to download, encrypted if recipients are given."""
        request = SaveWeightsExternalRequest(
            model_id=self.model_id, path=_checkpoint_name(name), ttl_seconds=check_ttl(ttl_seconds),
            age_encryption_recipients=age_encryption_recipients,
        )  # fmt: skip

        async def send() -> Awaitable[SaveWeightsExternalResponse]:
            waiting = await self._send(ops.SAVE_WEIGHTS_EXTERNAL, request)
            return _named(waiting, SaveWeightsExternalResponse)

        return self._enqueue("save_weights_external", send)

    async def save_weights_external_async(
        self,
        name: str,
        ttl_seconds: int | None = None,
        age_encryption_recipients: list[str] | None = None,
    ) -> APIFuture[SaveWeightsExternalResponse]:
        return self.save_weights_external(name, ttl_seconds, age_encryption_recipients)

    # -- sampling ----------------------------------------------------------------------------------------

    def create_sampling_client(
        self,
        model_path: str,
        retry_config: RetryConfig | None = None,
        record_stability_info: bool = False,
        *,
        timeout: float | None = None,
    ) -> SamplingClient:
        """A sampler of a published adapter."""
        return self._sampler(model_path, retry_config, record_stability_info).result(timeout)

    async def create_sampling_client_async(
        self,
        model_path: str,
        retry_config: RetryConfig | None = None,
        record_stability_info: bool = False,
        *,
        timeout: float | None = None,
    ) -> SamplingClient:
        return await self._sampler(model_path, retry_config, record_stability_info).result_async(timeout)

    def _sampler(
        self, model_path: str, retry_config: RetryConfig | None, record: bool
    ) -> APIFuture[SamplingClient]:
        from tinkex.client.sampling import open_sampler

        return open_sampler(
            self._session, model_path=model_path, retry_config=retry_config, record_stability_info=record
        )

    def save_weights_and_get_sampling_client(
        self,
        name: str | None = None,
        retry_config: RetryConfig | None = None,
        record_stability_info: bool = False,
        *,
        timeout: float | None = None,
    ) -> SamplingClient:
        """Publish the adapter as it is after everything called so far, and sample from it.

        `name` is accepted for the official signature and has no effect.
        """
        return self._publish(retry_config, record_stability_info).result(timeout)

    async def save_weights_and_get_sampling_client_async(
        self,
        name: str | None = None,
        retry_config: RetryConfig | None = None,
        record_stability_info: bool = False,
        *,
        timeout: float | None = None,
    ) -> SamplingClient:
        return await self._publish(retry_config, record_stability_info).result_async(timeout)

    def _publish(self, retry_config: RetryConfig | None, record: bool) -> APIFuture[SamplingClient]:
        from tinkex.client.sampling import SamplingClient

        check_wishes(retry_config, record)

        async def send() -> Awaitable[SamplingClient]:
            request = SaveWeightsForSamplerRequest(
                model_id=self.model_id, sampling_session_seq_id=next(self._session.sampling_seq)
            )
            waiting = await self._send(ops.SAVE_WEIGHTS_FOR_SAMPLER, request)

            async def finish() -> SamplingClient:
                reply = await waiting
                if not reply.sampling_session_id:
                    raise TinkerError(
                        "the server published the adapter, but named no sampling session for it"
                    )
                return SamplingClient(
                    self._session, reply.sampling_session_id,
                    retry_config=retry_config, record_stability_info=record,
                )  # fmt: skip

            return finish()

        return self._enqueue("save_weights_and_get_sampling_client", send)

    # -- what this run is --------------------------------------------------------------------------------

    def get_info(self, *, timeout: float | None = None) -> GetInfoResponse:
        """The run's base model, rank and tokenizer."""
        return self._info().result(timeout)

    async def get_info_async(self, *, timeout: float | None = None) -> GetInfoResponse:
        return await self._info().result_async(timeout)

    def _info(self) -> APIFuture[GetInfoResponse]:
        return self._session.connection.submit(ops.GET_INFO, GetInfoRequest(model_id=self.model_id))

    def get_tokenizer(self, *, timeout: float | None = None) -> Any:
        """The base model's tokenizer (a transformers one), cached."""
        return start(self._tokenizer, "tokenizer").result(timeout)

    # No coroutine function: programs that wrap all of those expect the official ones alone.
    def get_tokenizer_async(self, *, timeout: float | None = None) -> Awaitable[Any]:
        return start(self._tokenizer, "tokenizer").result_async(timeout)

    async def _tokenizer(self) -> Any:
        connection = self._session.connection
        info = await connection.call(ops.GET_INFO, GetInfoRequest(model_id=self.model_id))
        base_model = info.model_data.model_name or info.model_name or ""
        load = partial(load_tokenizer, _tokenizer_of(info), fetch=fetcher(connection, base_model))
        return await in_own_thread(load)

    def get_console_url(self) -> str:
        return console_url(self._session.connection.base_url, f"training_runs/{self.model_id}")

    def get_telemetry(self) -> Telemetry | None:
        """What tells the server of failures; None unless that was asked for."""
        return self._session.connection.telemetry

    @property
    def queue_stats(self) -> QueueStats:
        """How often this run was paused, why, and for how long."""
        return self._watch.stats()

    # -- sending -----------------------------------------------------------------------------------------

    def _enqueue(self, what: str, send: Callable[[], Awaitable[Awaitable[T]]]) -> APIFuture[T]:
        self._session.connection.check_open()
        if custom_loss.running_for() is self:
            raise TinkerError(
                f"{what} was called inside a custom loss of the same run, and could only be sent after it. "
                "Compute the loss from the logprobs alone, or call it after forward_backward_custom"
            )
        return self._turns.enqueue(what, send)

    async def _send(self, op: Op[Any, Any], request: Any) -> Awaitable[Any]:
        """Post one request with the next seq id; returns what waits for its result."""
        seq_id, self._seq = self._seq, self._seq + 1
        try:
            numbered = request.model_copy(update={"seq_id": seq_id})
            promise = await self._session.call(op, numbered, observe=self._watch.submitting)
        except NEVER_SENT:
            self._seq = seq_id
            raise
        return self._result(op, promise.request_id)

    async def _result(self, op: Op[Any, Any], request_id: str) -> Any:
        return await retrieve(
            self._session.connection, op, request_id, observe=self._watch, owner=self.model_id
        )

    def __repr__(self) -> str:
        return f"TrainingClient({self.model_id!r})"

    def __reduce__(self):
        raise TypeError("a TrainingClient cannot be pickled: its requests have one order, in one process")


def open_run(session: Session, make_request: Callable[[str], Any]) -> APIFuture[TrainingClient]:
    """Create a run; `make_request` gets the session's id."""

    async def create() -> TrainingClient:
        request = make_request(await session.open())
        promise = await session.call(ops.CREATE_MODEL, request)
        created = await retrieve(session.connection, ops.CREATE_MODEL, promise.request_id)
        return TrainingClient(session, created.model_id)

    return start(create, "create_model")


async def _named(waiting: Awaitable[Any], kind: type[T]) -> T:
    reply = await waiting
    if not reply.path:
        raise TinkerError("the server saved the weights, but gave no path for them")
    return kind(path=reply.path)  # type: ignore[call-arg]


def _checkpoint_name(name: str) -> str:
    if not isinstance(name, str) or not name or "/" in name:
        raise InvalidInputError(f"a checkpoint's name must be a string without '/', got {name!r}")
    return name


def _tokenizer_of(info: GetInfoResponse) -> str:
    name = info.model_data.model_name or info.model_name
    if not name and not info.model_data.tokenizer_id:
        raise TinkerError(
            "the server does not say which model this run is based on: no tokenizer can be chosen"
        )
    return tokenizer_name(name or "", info.model_data.tokenizer_id)


def _deprecated(name: str, instead: str) -> None:
    warnings.warn(f"{name} is deprecated; use {instead}", DeprecationWarning, stacklevel=3)

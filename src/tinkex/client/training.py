"""TrainingClient: one run, as a loop on a laptop sees it.

Promises: the official names, parameters and defaults; requests are executed in the order of the calls; a call
returns at once with a future; what is wrong with its input is raised at the call. Hop 1 of a request: how it
is numbered and sent is run_requests.py's. Knows nothing of how a call travels.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from tinkex.client import custom_pass, passes, tokenizer_files
from tinkex.client.calls import check_ttl, checks_timeouts, warn_caller
from tinkex.client.custom_pass import CustomLoss
from tinkex.client.future import APIFuture, start
from tinkex.client.poller import retrieve
from tinkex.client.queue_state import QueueStats
from tinkex.client.retry import RetryConfig, check_wishes
from tinkex.client.run_requests import LossConfig, RunRequests, after
from tinkex.client.sampling import SamplingClient, open_sampler
from tinkex.client.session import Session
from tinkex.client.telemetry import Telemetry
from tinkex.errors import InvalidInputError, RunLostError, TinkerError
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
from tinkex.types.data import Datum
from tinkex.types.optimizers import OptimParams
from tinkex.types.outputs import ForwardBackwardOutput
from tinkex.types.params import AdamParams
from tinkex.types.training import GetInfoRequest, GetInfoResponse, OptimStepRequest, OptimStepResponse
from tinkex.wire import ops


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
        self._requests = RunRequests(session, model_id)

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
        loss_fn: CustomLoss,
        *,
        loss_type_input: str | None = None,
    ) -> APIFuture[ForwardBackwardOutput]:
        """As forward_backward, with a loss of your own.

        It is a torch function `fn(data, logprobs) -> (loss, metrics)`, which runs here; a LossHandle of
        `ServiceClient.create_custom_loss`; or an object that knows its gradients (tinkex.regularizers).
        `loss_type_input` is accepted for the official signature and has no effect.
        """
        return custom_pass.submit(self._requests, data, loss_fn)

    async def forward_backward_custom_async(
        self,
        data: Sequence[Datum],
        loss_fn: CustomLoss,
        *,
        loss_type_input: str | None = None,
    ) -> APIFuture[ForwardBackwardOutput]:
        return self.forward_backward_custom(data, loss_fn, loss_type_input=loss_type_input)

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
        return self._requests.submit_pass(what, data, loss_fn, config, forward_only=forward_only)

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
        return self._requests.submit_step(request)

    async def optim_step_async(
        self,
        optim_params: OptimParams | Mapping[str, Any] | None = None,
        *,
        adam_params: AdamParams | None = None,
    ) -> APIFuture[OptimStepResponse]:
        return self.optim_step(optim_params, adam_params=adam_params)

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
        return self._requests.submit("save_state", ops.SAVE_WEIGHTS, request)

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
        return self._requests.submit("load_state", ops.LOAD_WEIGHTS, request)

    def save_weights_for_sampler(
        self, name: str, ttl_seconds: int | None = None, user_metadata: dict[str, str] | None = None
    ) -> APIFuture[SaveWeightsForSamplerResponse]:
        """Publish the adapter under a name, for sampling."""
        request = SaveWeightsForSamplerRequest(
            model_id=self.model_id, path=_checkpoint_name(name), ttl_seconds=check_ttl(ttl_seconds),
            user_metadata=user_metadata,
        )  # fmt: skip
        return self._requests.submit(
            "save_weights_for_sampler",
            ops.SAVE_WEIGHTS_FOR_SAMPLER,
            request,
            lambda reply: SaveWeightsForSamplerResponse(path=_path(reply)),
        )

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
        return self._requests.submit(
            "save_weights_external",
            ops.SAVE_WEIGHTS_EXTERNAL,
            request,
            lambda reply: SaveWeightsExternalResponse(path=_path(reply)),
        )

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
        check_wishes(retry_config, record)

        def open_published(reply: Any) -> SamplingClient:
            if not reply.sampling_session_id:
                raise TinkerError("the server published the adapter, but named no sampling session for it")
            return SamplingClient(
                self._session, reply.sampling_session_id,
                retry_config=retry_config, record_stability_info=record,
            )  # fmt: skip

        async def send() -> Awaitable[SamplingClient]:
            # Numbered when its turn comes: one that is cancelled before leaves no gap.
            seq_id = next(self._session.sampling_seq)
            request = SaveWeightsForSamplerRequest(model_id=self.model_id, sampling_session_seq_id=seq_id)
            return after(await self._requests.send(ops.SAVE_WEIGHTS_FOR_SAMPLER, request), open_published)

        return self._requests.enqueue("save_weights_and_get_sampling_client", send)

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
        name, tokenizer_id = info.model_data.model_name or info.model_name, info.model_data.tokenizer_id
        if not name and not tokenizer_id:
            raise TinkerError(
                "the server does not say which model this run is based on: no tokenizer can be chosen"
            )
        return await tokenizer_files.load(connection, name or "", tokenizer_id)

    def get_console_url(self) -> str:
        """A page about this run, for a browser; embedded, the directory that holds all runs."""
        return self._session.connection.console_url(f"training_runs/{self.model_id}")

    def get_telemetry(self) -> Telemetry | None:
        """What tells the server of failures; None unless that was asked for."""
        return self._session.connection.telemetry

    def _lose(self, error: RunLostError) -> None:
        """The server has lost this run (tinkex.client.run_watch)."""
        self._requests.lose(error)

    @property
    def queue_stats(self) -> QueueStats:
        """How often this run was paused, why, and for how long."""
        return self._requests.queue_stats()

    def __repr__(self) -> str:
        return f"TrainingClient({self.model_id!r})"

    def __reduce__(self):
        raise TypeError("a TrainingClient cannot be pickled: its requests have one order, in one process")


def open_run(session: Session, make_request: Callable[[str], Any]) -> APIFuture[TrainingClient]:
    """Create a run; `make_request` gets the session's id."""

    async def create() -> TrainingClient:
        request = make_request(await session.open())
        promise = await session.connection.call(ops.CREATE_MODEL, request)
        created = await retrieve(session.connection, ops.CREATE_MODEL, promise.request_id)
        return TrainingClient(session, created.model_id)

    return start(create, "create_model")


def _path(reply: Any) -> str:
    """Where the server put the weights."""
    if not reply.path:
        raise TinkerError("the server saved the weights, but gave no path for them")
    return reply.path


def _checkpoint_name(name: str) -> str:
    if not isinstance(name, str) or not name or "/" in name:
        raise InvalidInputError(f"a checkpoint's name must be a string without '/', got {name!r}")
    return name


def _deprecated(name: str, instead: str) -> None:
    warn_caller(f"{name} is deprecated; use {instead}", DeprecationWarning)

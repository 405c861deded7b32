"""ServiceClient: the door. Makes training, sampling and REST clients, which share one session.

Promises: made without any traffic; the session opens with the first run or sampler and ends with the
`with` block, `close()` or the process. Knows the official signatures; how things are done is elsewhere.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from tinkex.client.calls import check_text, check_ttl, checks_timeouts, warn_caller
from tinkex.client.credentials import looks_like_key
from tinkex.client.custom_loss import LossHandle, PerDatumLossFn, traced
from tinkex.client.future import APIFuture, start
from tinkex.client.poller import retrieve
from tinkex.client.queue_state import QueueStateObserver
from tinkex.client.rest import RestClient
from tinkex.client.retry import RetryConfig
from tinkex.client.sampling import SamplingClient, open_sampler
from tinkex.client.server_connection import ServerConnection, check_headers, connect
from tinkex.client.session import Session
from tinkex.client.telemetry import Telemetry
from tinkex.client.training import TrainingClient, open_run
from tinkex.client.transport import CallContext
from tinkex.config import LOCAL, Settings, Timeouts
from tinkex.errors import InvalidInputError, RequestFailedError, TinkerError
from tinkex.types.checkpoints import (
    CopyWeightsRequest,
    LoadWeightsRequest,
    ParsedCheckpointTinkerPath,
    WeightsInfoRequest,
    WeightsInfoResponse,
)
from tinkex.types.config import EmptyRequest, GetServerCapabilitiesResponse
from tinkex.types.optimizers import AdamOptimizerConfig, OptimizerConfig
from tinkex.types.params import LoraConfig
from tinkex.types.training import CreateCustomLossRequest, CreateModelRequest, CustomLossInputRank
from tinkex.wire import ops

if TYPE_CHECKING:
    from typing import Self

log = logging.getLogger("tinkex")


@checks_timeouts
class RemoteServiceClient:
    """A ServiceClient that always uses a server: the one given, TINKER_BASE_URL's, or the hosted one.

    `tinkex.ServiceClient` (tinkex/embedded.py) adds the service in this process.
    """

    def __init__(
        self,
        user_metadata: dict[str, str] | None = None,
        project_id: str | None = None,
        *,
        display_name: str | None = None,
        base_url: str | None = None,
        api_key: str | None = None,
        default_headers_overrides: Mapping[str, str] | None = None,
        timeouts: Timeouts | None = None,
        telemetry: bool | None = None,
        queue_state_observer: QueueStateObserver | None = None,
        **unknown: Any,
    ) -> None:
        if unknown:
            warn_caller(f"ServiceClient does not know {', '.join(unknown)}; ignored", FutureWarning)
        if timeouts is not None and not isinstance(timeouts, Timeouts):
            raise InvalidInputError(f"timeouts must be a Timeouts, got {type(timeouts).__name__}")
        if api_key is not None and not isinstance(api_key, str):
            raise InvalidInputError(f"api_key must be a string, got {type(api_key).__name__}")
        if telemetry is not None and not isinstance(telemetry, bool):
            raise InvalidInputError(f"telemetry must be True, False or None, got {telemetry!r:.80}")
        observer = queue_state_observer
        if observer is not None and not callable(getattr(observer, "on_queue_state_change", None)):
            raise InvalidInputError("queue_state_observer must have a method on_queue_state_change")
        check_text("base_url", base_url)
        headers = check_headers(default_headers_overrides)
        settings = Settings.read()
        here = base_url == LOCAL or (settings.embedded and not (base_url or api_key))
        connection = None
        if here:
            connection = self._connect_embedded(replace(settings, base_url=base_url or settings.base_url))
        if connection is None:
            connection = connect(
                base_url, api_key, settings=settings, headers=headers, timeouts=timeouts, telemetry=telemetry
            )
        self._connection = connection
        self._session = Session(
            connection, user_metadata=user_metadata, project_id=project_id, display_name=display_name,
            queue_observer=queue_state_observer,
        )  # fmt: skip
        self._losses: dict[tuple[str, str], LossHandle] = {}  # by session and what they compute

    def _connect_embedded(self, settings: Settings) -> ServerConnection | None:
        """Connect to a service in this process; None: use a server. Overridden in tinkex/embedded.py."""
        return None

    # -- the server --------------------------------------------------------------------------------------

    def get_server_capabilities(self, *, timeout: float | None = None) -> GetServerCapabilitiesResponse:
        """Which base models there are."""
        return self._capabilities().result(timeout)

    async def get_server_capabilities_async(
        self, *, timeout: float | None = None
    ) -> GetServerCapabilitiesResponse:
        return await self._capabilities().result_async(timeout)

    def _capabilities(self) -> APIFuture[GetServerCapabilitiesResponse]:
        return self._connection.submit(ops.GET_SERVER_CAPABILITIES, EmptyRequest())

    def create_rest_client(self) -> RestClient:
        """Runs, checkpoints and sessions, to list and to look after."""
        return RestClient(self._connection)

    def get_console_url(self) -> str:
        """A page with your runs, for a browser; embedded, the directory that holds them."""
        return self._connection.console_url("sessions")

    def get_telemetry(self) -> Telemetry | None:
        """What tells the server of failures; None unless that was asked for."""
        return self._connection.telemetry

    # -- runs --------------------------------------------------------------------------------------------

    def create_lora_training_client(
        self,
        base_model: str,
        rank: int = 32,
        seed: int | None = None,
        train_mlp: bool = True,
        train_attn: bool = True,
        train_unembed: bool = True,
        user_metadata: dict[str, str] | None = None,
        optimizer: OptimizerConfig | None = None,
        *,
        timeout: float | None = None,
    ) -> TrainingClient:
        """Start a run: a fresh LoRA adapter on a base model."""
        lora = LoraConfig(rank, seed, train_unembed, train_mlp, train_attn)
        return self._create_run(base_model, lora, user_metadata, optimizer).result(timeout)

    async def create_lora_training_client_async(
        self,
        base_model: str,
        rank: int = 32,
        seed: int | None = None,
        train_mlp: bool = True,
        train_attn: bool = True,
        train_unembed: bool = True,
        user_metadata: dict[str, str] | None = None,
        optimizer: OptimizerConfig | None = None,
        *,
        timeout: float | None = None,
    ) -> TrainingClient:
        lora = LoraConfig(rank, seed, train_unembed, train_mlp, train_attn)
        return await self._create_run(base_model, lora, user_metadata, optimizer).result_async(timeout)

    def _create_run(
        self,
        base_model: str,
        lora: LoraConfig,
        user_metadata: dict[str, str] | None,
        optimizer: OptimizerConfig | None,
    ) -> APIFuture[TrainingClient]:
        if not isinstance(base_model, str) or not base_model:
            raise InvalidInputError(f"base_model must be the name of a base model, got {base_model!r:.80}")
        self._connection.check_open()
        request = CreateModelRequest(
            session_id="", model_seq_id=0, base_model=base_model, lora_config=lora,
            user_metadata=user_metadata, optimizer_config=optimizer or AdamOptimizerConfig(),
        )  # fmt: skip
        seq = next(self._session.run_seq)  # taken last: what is refused above leaves no gap
        return open_run(
            self._session,
            lambda session_id: request.model_copy(update={"session_id": session_id, "model_seq_id": seq}),
        )

    def create_training_client_from_state(
        self,
        path: str,
        base_model: str | None = None,
        user_metadata: dict[str, str] | None = None,
        weights_access_token: str | None = None,
        optimizer: OptimizerConfig | None = None,
        *,
        timeout: float | None = None,
    ) -> TrainingClient:
        """Go on from saved weights, with a fresh optimizer."""
        return self._resume(path, False, base_model, user_metadata, weights_access_token, optimizer).result(
            timeout
        )

    async def create_training_client_from_state_async(
        self,
        path: str,
        base_model: str | None = None,
        user_metadata: dict[str, str] | None = None,
        weights_access_token: str | None = None,
        optimizer: OptimizerConfig | None = None,
        *,
        timeout: float | None = None,
    ) -> TrainingClient:
        future = self._resume(path, False, base_model, user_metadata, weights_access_token, optimizer)
        return await future.result_async(timeout)

    def create_training_client_from_state_with_optimizer(
        self,
        path: str,
        base_model: str | None = None,
        user_metadata: dict[str, str] | None = None,
        weights_access_token: str | None = None,
        *,
        timeout: float | None = None,
    ) -> TrainingClient:
        """Go on from a saved state: weights, Adam's moments and its step."""
        return self._resume(path, True, base_model, user_metadata, weights_access_token, None).result(timeout)

    async def create_training_client_from_state_with_optimizer_async(
        self,
        path: str,
        base_model: str | None = None,
        user_metadata: dict[str, str] | None = None,
        weights_access_token: str | None = None,
        *,
        timeout: float | None = None,
    ) -> TrainingClient:
        future = self._resume(path, True, base_model, user_metadata, weights_access_token, None)
        return await future.result_async(timeout)

    def _resume(
        self,
        path: str,
        with_optimizer: bool,
        base_model: str | None,
        user_metadata: dict[str, str] | None,
        token: str | None,
        optimizer: OptimizerConfig | None,
    ) -> APIFuture[TrainingClient]:
        ParsedCheckpointTinkerPath.from_tinker_path(path)
        self._connection.check_open()
        if base_model == "":
            raise InvalidInputError("base_model must be a model's name, or None for the checkpoint's, got ''")
        request = LoadWeightsRequest(
            path=path, optimizer=with_optimizer, base_model=base_model, user_metadata=user_metadata,
            optimizer_config=optimizer, weights_access_token=token,
        )  # fmt: skip
        seq = next(self._session.run_seq)

        async def via_load() -> TrainingClient:
            """The server makes the run and loads it in one request; the run's id follows from its number."""
            session_id = await self._session.open()
            numbered = request.model_copy(update={"session_id": session_id, "model_seq_id": seq})
            promise = await self._connection.call(ops.LOAD_WEIGHTS, numbered)
            loaded = await retrieve(self._connection, ops.LOAD_WEIGHTS, promise.request_id)
            return TrainingClient(self._session, loaded.model_id or f"{session_id}:train:{seq}")

        async def via_create() -> TrainingClient:
            info = await self._weights_info(path, token)
            run = await open_run(
                self._session,
                lambda session_id: CreateModelRequest(
                    session_id=session_id, model_seq_id=seq, base_model=base_model or info.base_model,
                    lora_config=_lora_of(info, path), user_metadata=user_metadata,
                    optimizer_config=optimizer or info.optimizer_config,
                ),
            )  # fmt: skip
            await run._load(path, optimizer=with_optimizer, token=token)
            return run

        async def resume() -> TrainingClient:
            await self._session.open()
            if self._connection.config.create_model_via_load_weights:
                return await via_load()
            return await via_create()

        return start(resume, "create_training_client_from_state")

    async def _weights_info(self, path: str, token: str | None) -> WeightsInfoResponse:
        """What a checkpoint is; another account's is asked for in its name: the token is a key of its."""
        mine, request = self._connection, WeightsInfoRequest(tinker_path=path)
        context = CallContext("get_weights_info_by_tinker_path")
        if not mine.base_url or token is None or not looks_like_key(token):
            return await mine.call(ops.GET_WEIGHTS_INFO, request, context)
        theirs = connect(
            mine.base_url, token, settings=mine.settings, headers=mine.headers, timeouts=mine.timeouts,
            telemetry=False,
        )  # fmt: skip
        try:
            return await theirs.call(ops.GET_WEIGHTS_INFO, request, context)
        finally:
            await theirs.close()

    # -- losses ------------------------------------------------------------------------------------------

    def create_custom_loss(
        self, fn: PerDatumLossFn, input_ranks: Mapping[str, CustomLossInputRank]
    ) -> APIFuture[LossHandle]:
        """Trace a loss of your own, for `forward_backward_custom`; it is uploaded if the server takes it.

        `fn(logprobs, *inputs) -> (loss, metrics)` is called once a datum and the losses are summed; the same
        loss of the same session is created once. docs/losses.md has what can be traced.
        """
        loss = traced(fn, input_ranks)
        self._connection.check_open()
        return start(lambda: self._create_loss(loss), "create_custom_loss")

    async def _create_loss(self, loss: LossHandle) -> LossHandle:
        session_id = await self._session.open()
        if (known := self._losses.get((session_id, loss.key))) is not None:
            return known
        loss_id = None
        if self._connection.config.custom_loss_server_side:
            request = CreateCustomLossRequest(
                session_id=session_id, custom_loss_seq_id=next(self._session.custom_loss_seq), name=loss.name,
                inputs=list(loss.inputs), graph=loss.wire,
            )  # fmt: skip
            promise = await self._connection.call(ops.CREATE_CUSTOM_LOSS, request)
            try:
                reply = await retrieve(self._connection, ops.CREATE_CUSTOM_LOSS, promise.request_id)
            except RequestFailedError as error:
                raise loss.explain(error) from None
            loss_id = reply.loss_id
        created = replace(loss, session_id=session_id, loss_id=loss_id)
        return self._losses.setdefault((session_id, loss.key), created)

    # -- samplers ----------------------------------------------------------------------------------------

    def create_sampling_client(
        self,
        model_path: str | None = None,
        base_model: str | None = None,
        retry_config: RetryConfig | None = None,
        record_stability_info: bool = False,
        *,
        timeout: float | None = None,
    ) -> SamplingClient:
        """A sampler of a base model or of a published adapter (`tinker://…/sampler_weights/…`)."""
        return self._sampler(model_path, base_model, retry_config, record_stability_info).result(timeout)

    async def create_sampling_client_async(
        self,
        model_path: str | None = None,
        base_model: str | None = None,
        retry_config: RetryConfig | None = None,
        record_stability_info: bool = False,
        *,
        timeout: float | None = None,
    ) -> SamplingClient:
        future = self._sampler(model_path, base_model, retry_config, record_stability_info)
        return await future.result_async(timeout)

    def _sampler(
        self, model_path: str | None, base_model: str | None, retry_config: RetryConfig | None, record: bool
    ) -> APIFuture[SamplingClient]:
        self._connection.check_open()
        return open_sampler(
            self._session, model_path=model_path, base_model=base_model, retry_config=retry_config,
            record_stability_info=record,
        )  # fmt: skip

    def copy_weights(
        self, path: str, *, ttl_seconds: int | None = None, weights_access_token: str | None = None
    ) -> APIFuture[str]:
        """Copy a checkpoint into this client's project or, if it has none, into its session; the new path."""
        if project := self._session.project_id:
            return RestClient(self._connection).copy_weights(
                path, project, ttl_seconds=ttl_seconds, weights_access_token=weights_access_token
            )
        ParsedCheckpointTinkerPath.from_tinker_path(path)
        self._connection.check_open()
        request = CopyWeightsRequest(
            source_path=path, ttl_seconds=check_ttl(ttl_seconds), weights_access_token=weights_access_token
        )
        seq = next(self._session.run_seq)

        async def copy() -> str:
            session_id = await self._session.open()
            numbered = request.model_copy(update={"session_id": session_id, "model_seq_id": seq})
            return (await self._connection.call(ops.COPY_WEIGHTS, numbered)).tinker_path

        return start(copy, "copy_weights")

    # -- the end -----------------------------------------------------------------------------------------

    def close(
        self, status: Literal["success", "errored", "interrupted"] = "success", detail: str | None = None
    ) -> APIFuture[None]:
        """Finish the session and close every connection. Later calls raise ClientClosedError."""
        if status not in ("success", "errored", "interrupted"):
            raise InvalidInputError(f"status must be success, errored or interrupted, got {status!r}")
        check_text("detail", detail)
        return start(lambda: self._session.close(status, detail), "close")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close(_status(kind)).result(self._connection.timeouts.close)
        except (TinkerError, TimeoutError) as failure:
            log.warning("the session could not be finished: %s", failure)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self.close(_status(kind)).result_async(self._connection.timeouts.close)
        except (TinkerError, TimeoutError) as failure:
            log.warning("the session could not be finished: %s", failure)

    def __repr__(self) -> str:
        return f"ServiceClient({self._connection.base_url or LOCAL!r})"


def _status(kind: type[BaseException] | None) -> Literal["success", "errored", "interrupted"]:
    if kind is None:
        return "success"
    return "errored" if issubclass(kind, Exception) else "interrupted"


def _lora_of(info: WeightsInfoResponse, path: str) -> LoraConfig:
    if not info.is_lora or info.lora_rank is None:
        raise TinkerError(f"{path} is not a LoRA checkpoint of known rank, and cannot be trained on")
    flags = {
        name: value
        for name in ("train_unembed", "train_mlp", "train_attn")
        if (value := getattr(info, name)) is not None
    }
    return LoraConfig(rank=info.lora_rank, **flags)

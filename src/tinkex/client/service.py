"""ServiceClient: creates training, sampling and REST clients, which share one session.

Promises: the official names, parameters and defaults; creating a ServiceClient sends nothing. The session
opens with the first run or sampler, and ends with the `with` block, `close()` or the process. A run's number
in its session is assigned after all checks, so a refused call leaves no gap.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from tinkex.client.base_client import BaseClient, check_text, check_ttl, warn_caller
from tinkex.client.credentials import looks_like_key
from tinkex.client.custom_loss import LossHandle, PerDatumLossFn, traced
from tinkex.client.future import APIFuture, start
from tinkex.client.polling import QueueStateObserver, retrieve
from tinkex.client.rest import RestClient
from tinkex.client.retry import RetryConfig
from tinkex.client.sampling import SamplingClient, open_sampler
from tinkex.client.server_connection import ServerConnection, check_headers, connect
from tinkex.client.session import Session
from tinkex.client.training import TrainingClient
from tinkex.client.transport import CallContext
from tinkex.client.twins import awaited, blocking
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

log = logging.getLogger("tinkex")


class RemoteServiceClient(BaseClient):
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
        connection = None
        if base_url == LOCAL or (settings.embedded and not (base_url or api_key)):
            connection = self._connect_embedded(replace(settings, base_url=base_url or settings.base_url))
        if connection is None:
            connection = connect(
                base_url, api_key, settings=settings, headers=headers, timeouts=timeouts, telemetry=telemetry
            )
        super().__init__(connection)
        self.session = Session(
            connection, user_metadata=user_metadata, project_id=project_id, display_name=display_name,
            queue_observer=queue_state_observer,
        )  # fmt: skip
        self._losses: dict[tuple[str, str], LossHandle] = {}  # by session and LossHandle.key

    def _connect_embedded(self, settings: Settings) -> ServerConnection | None:
        """Connect to a service in this process; None: use a server. Overridden in tinkex/embedded.py."""
        return None

    # -- the server --------------------------------------------------------------------------------------

    @blocking
    def get_server_capabilities(self) -> APIFuture[GetServerCapabilitiesResponse]:
        """Return the base models that the server offers.

        >>> models = service.get_server_capabilities().supported_models         # doctest: +SKIP
        """
        return self._connection.submit(ops.GET_SERVER_CAPABILITIES, EmptyRequest())

    def create_rest_client(self) -> RestClient:
        """Create a client for runs, checkpoints and sessions, on the same connection.

        >>> rest = service.create_rest_client()                                 # doctest: +SKIP
        """
        return RestClient(self._connection)

    def get_console_url(self) -> str:
        """Return the URL of the console; embedded, of the directory that holds all runs."""
        return self._connection.console_url("sessions")

    # -- runs --------------------------------------------------------------------------------------------

    @blocking
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
        name: str | None = None,
        tags: list[str] | None = None,
    ) -> APIFuture[TrainingClient]:
        """Create a run: a new LoRA adapter on a base model. Tinkex servers find it by `name` and `tags`.

        >>> run = service.create_lora_training_client("Qwen/Qwen3-8B", rank=32)  # doctest: +SKIP
        """
        lora = LoraConfig(rank, seed, train_unembed, train_mlp, train_attn)
        if not isinstance(base_model, str) or not base_model:
            raise InvalidInputError(f"base_model must be the name of a base model, got {base_model!r:.80}")
        self._connection.check_open()
        request = CreateModelRequest(
            session_id="", model_seq_id=0, base_model=base_model, lora_config=lora,
            user_metadata=user_metadata, optimizer_config=optimizer or AdamOptimizerConfig(), name=name,
            tags=tags,
        )  # fmt: skip
        seq = next(self.session.run_seq)
        return self._start(lambda: self._create(request, seq), "create_model")

    @blocking
    def create_training_client_from_state(
        self,
        path: str,
        base_model: str | None = None,
        user_metadata: dict[str, str] | None = None,
        weights_access_token: str | None = None,
        optimizer: OptimizerConfig | None = None,
        *,
        name: str | None = None,
        tags: list[str] | None = None,
    ) -> APIFuture[TrainingClient]:
        """Create a run from saved weights, with a new optimizer.

        >>> path = run.save_state("pretrained").result().path                   # doctest: +SKIP
        >>> tuned = service.create_training_client_from_state(path)
        """
        return self._resume(
            LoadWeightsRequest(
                path=path, optimizer=False, base_model=base_model, user_metadata=user_metadata,
                optimizer_config=optimizer, weights_access_token=weights_access_token, name=name, tags=tags,
            )
        )  # fmt: skip

    @blocking
    def create_training_client_from_state_with_optimizer(
        self,
        path: str,
        base_model: str | None = None,
        user_metadata: dict[str, str] | None = None,
        weights_access_token: str | None = None,
        *,
        name: str | None = None,
        tags: list[str] | None = None,
    ) -> APIFuture[TrainingClient]:
        """Create a run from saved weights and optimizer state: Adam's moments and its step count.

        >>> path = run.save_state("step-100").result().path                     # doctest: +SKIP
        >>> resumed = service.create_training_client_from_state_with_optimizer(path)
        """
        return self._resume(
            LoadWeightsRequest(
                path=path, optimizer=True, base_model=base_model, user_metadata=user_metadata,
                weights_access_token=weights_access_token, name=name, tags=tags,
            )
        )  # fmt: skip

    def _resume(self, request: LoadWeightsRequest) -> APIFuture[TrainingClient]:
        ParsedCheckpointTinkerPath.from_tinker_path(request.path)
        if request.base_model == "":
            raise InvalidInputError("base_model must be a model's name, or None for the checkpoint's, got ''")
        self._connection.check_open()
        seq = next(self.session.run_seq)

        async def resume() -> TrainingClient:
            session_id = await self.session.open()
            if not self._connection.config.create_model_via_load_weights:
                return await self._create_and_load(request, seq)
            numbered = request.model_copy(update={"session_id": session_id, "model_seq_id": seq})
            promise = await self._connection.call(ops.LOAD_WEIGHTS, numbered)
            loaded = await retrieve(self._connection, ops.LOAD_WEIGHTS, promise.request_id)
            return TrainingClient(self.session, loaded.model_id or f"{session_id}:train:{seq}")

        return self._start(resume, "create_training_client_from_state")

    async def _create(self, request: CreateModelRequest, seq: int) -> TrainingClient:
        numbered = request.model_copy(update={"session_id": await self.session.open(), "model_seq_id": seq})
        promise = await self._connection.call(ops.CREATE_MODEL, numbered)
        created = await retrieve(self._connection, ops.CREATE_MODEL, promise.request_id)
        return TrainingClient(self.session, created.model_id)

    async def _create_and_load(self, request: LoadWeightsRequest, seq: int) -> TrainingClient:
        """For a server that cannot load a checkpoint into a new run in one request."""
        token = request.weights_access_token
        info = await self._weights_info(request.path, token)
        if not info.is_lora or info.lora_rank is None:
            raise TinkerError(
                f"{request.path} is not a LoRA checkpoint of known rank, and cannot be trained on"
            )
        flags = info.model_dump(include={"train_unembed", "train_mlp", "train_attn"}, exclude_none=True)
        new = CreateModelRequest(
            session_id="", model_seq_id=0, base_model=request.base_model or info.base_model,
            lora_config=LoraConfig(rank=info.lora_rank, **flags), user_metadata=request.user_metadata,
            optimizer_config=request.optimizer_config or info.optimizer_config, name=request.name,
            tags=request.tags,
        )  # fmt: skip
        run = await self._create(new, seq)
        load = LoadWeightsRequest(
            model_id=run.model_id, path=request.path, optimizer=request.optimizer, weights_access_token=token
        )
        await run.queue.submit("load_state", ops.LOAD_WEIGHTS, load)
        return run

    async def _weights_info(self, path: str, token: str | None) -> WeightsInfoResponse:
        """The checkpoint's metadata. A token that is an API key reads a checkpoint of that key's account."""
        ours, context = self._connection, CallContext("get_weights_info_by_tinker_path")
        request = WeightsInfoRequest(tinker_path=path)
        if not ours.base_url or token is None or not looks_like_key(token):
            return await ours.call(ops.GET_WEIGHTS_INFO, request, context)
        theirs = connect(
            ours.base_url, token, settings=ours.settings, headers=ours.headers, timeouts=ours.timeouts,
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
        """Trace a loss for `forward_backward_custom`, and upload it if the server accepts losses.

        `fn(logprobs, *inputs) -> (loss, metrics)` is called per datum, and the losses are summed. Equal
        losses of a session are created once. docs/client.md says what can be traced.

        >>> def loss(logprobs):                                                 # doctest: +SKIP
        ...     return -logprobs.sum(), {}
        >>> handle = service.create_custom_loss(loss, {"logprobs": 1}).result()
        """
        loss = traced(fn, input_ranks)
        return self._start(lambda: self._create_loss(loss), "create_custom_loss")

    async def _create_loss(self, loss: LossHandle) -> LossHandle:
        session_id = await self.session.open()
        if (known := self._losses.get((session_id, loss.key))) is not None:
            return known
        loss_id = None
        if self._connection.config.custom_loss_server_side:
            request = CreateCustomLossRequest(
                session_id=session_id, custom_loss_seq_id=next(self.session.custom_loss_seq), name=loss.name,
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

    @blocking
    def create_sampling_client(
        self,
        model_path: str | None = None,
        base_model: str | None = None,
        retry_config: RetryConfig | None = None,
        record_stability_info: bool = False,
    ) -> APIFuture[SamplingClient]:
        """Create a sampler of a base model or of a published adapter (`tinker://…/sampler_weights/…`).

        >>> sampler = service.create_sampling_client(base_model="Qwen/Qwen3-8B")  # doctest: +SKIP
        """
        return open_sampler(
            self.session, model_path=model_path, base_model=base_model, retry_config=retry_config,
            record_stability_info=record_stability_info,
        )  # fmt: skip

    def copy_weights(
        self, path: str, *, ttl_seconds: int | None = None, weights_access_token: str | None = None
    ) -> APIFuture[str]:
        """Copy a checkpoint into this client's project or, without one, its session; returns the new path."""
        if project := self.session.project_id:
            return RestClient(self._connection).copy_weights(
                path, project, ttl_seconds=ttl_seconds, weights_access_token=weights_access_token
            )
        ParsedCheckpointTinkerPath.from_tinker_path(path)
        self._connection.check_open()
        request = CopyWeightsRequest(
            source_path=path, ttl_seconds=check_ttl(ttl_seconds), weights_access_token=weights_access_token
        )
        seq = next(self.session.run_seq)

        async def copy() -> str:
            session_id = await self.session.open()
            numbered = request.model_copy(update={"session_id": session_id, "model_seq_id": seq})
            return (await self._connection.call(ops.COPY_WEIGHTS, numbered)).tinker_path

        return self._start(copy, "copy_weights")

    # -- the same, to await ------------------------------------------------------------------------------

    get_server_capabilities_async = awaited(get_server_capabilities)
    create_lora_training_client_async = awaited(create_lora_training_client)
    create_training_client_from_state_async = awaited(create_training_client_from_state)
    create_training_client_from_state_with_optimizer_async = awaited(
        create_training_client_from_state_with_optimizer
    )
    create_sampling_client_async = awaited(create_sampling_client)

    # -- closing ----------------------------------------------------------------------------------------

    def close(
        self, status: Literal["success", "errored", "interrupted"] = "success", detail: str | None = None
    ) -> APIFuture[None]:
        """Finish the session and close the connections; later calls raise ClientClosedError."""
        if status not in ("success", "errored", "interrupted"):
            raise InvalidInputError(f"status must be success, errored or interrupted, got {status!r}")
        check_text("detail", detail)
        return start(lambda: self.session.close(status, detail), "close")

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self.close(_status(kind)).result(self._connection.timeouts.close)
        except (TinkerError, TimeoutError) as failure:
            log.warning("the session could not be finished: %s", failure)

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            await self.close(_status(kind)).result_async(self._connection.timeouts.close)
        except (TinkerError, TimeoutError) as failure:
            log.warning("the session could not be finished: %s", failure)


def _status(kind: type[BaseException] | None) -> Literal["success", "errored", "interrupted"]:
    if kind is None:
        return "success"
    return "errored" if issubclass(kind, Exception) else "interrupted"

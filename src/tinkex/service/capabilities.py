"""What a service can do: client settings, health, base models, tokenizer files."""

from __future__ import annotations

import asyncio

from tinkex.service.config import ServiceConfig
from tinkex.service.refusal import Caller, Refusal
from tinkex.service.served_models import ServedModels, in_daemon_thread
from tinkex.types import config, reports


class Capabilities:
    """Settings and capabilities, one method per operation."""

    def __init__(self, settings: ServiceConfig, models: ServedModels, *, issues_tokens: bool) -> None:
        self._settings = settings
        self._models = models
        self._issues_tokens = issues_tokens

    async def get_client_config(
        self, request: config.ClientConfigRequest, caller: Caller
    ) -> config.ClientConfigResponse:
        return config.ClientConfigResponse(
            pjwt_auth_enabled=self._issues_tokens,
            sample_use_retrieve_futures=True,
            custom_loss_server_side=self._settings.custom_losses,
            sample_join_sampling_session=True,
            create_model_via_load_weights=True,
        )

    async def get_dynamic_config(
        self, request: config.ClientConfigRequest, caller: Caller
    ) -> config.ClientDynamicConfigResponse:
        return config.ClientDynamicConfigResponse(sample_cancel_enabled=True)

    async def get_health(self, request: config.EmptyRequest, caller: Caller) -> config.HealthResponse:
        if why := self._models.trouble():
            raise Refusal(503, why)
        return config.HealthResponse()

    async def get_server_capabilities(
        self, request: config.EmptyRequest, caller: Caller
    ) -> config.GetServerCapabilitiesResponse:
        return config.GetServerCapabilitiesResponse(
            supported_models=[
                config.SupportedModel(
                    model_name=model.name,
                    max_context_length=model.max_context(),
                    trainable=True,
                    sampleable=True,
                )
                for model in self._models
            ]
        )

    async def get_tokenizer_file(self, request: config.TokenizerFileRequest, caller: Caller) -> bytes:
        """A file of a base model's tokenizer, for clients that have no other way to it."""
        model = self._models.find(request.model_name)
        directory = await in_daemon_thread(model.tokenizer_dir)  # which may fetch the model first
        if request.file not in config.TOKENIZER_FILES:
            known = ", ".join(config.TOKENIZER_FILES)
            raise Refusal(404, f"{request.file!r} is no file of a tokenizer; those are: {known}")
        if directory is None or not (path := directory / request.file).is_file():
            raise Refusal(404, f"the tokenizer of {request.model_name} has no {request.file}")
        return await asyncio.to_thread(path.read_bytes)

    async def send_telemetry(
        self, request: reports.TelemetrySendRequest, caller: Caller
    ) -> reports.TelemetryResponse:
        """Accepted and discarded: clients stall unless it is accepted."""
        return reports.TelemetryResponse()

    # -- keys: the server answers these; a service in the caller's own process has none -------------------

    async def get_auth_token(self, request: config.EmptyRequest, caller: Caller) -> config.AuthTokenResponse:
        raise Refusal(404, "this service issues no tokens")

    async def get_api_key(self, request: config.EmptyRequest, caller: Caller) -> config.ApiKeyResponse:
        raise Refusal(404, "this service has no keys")

    async def delete_api_key(self, request: config.EmptyRequest, caller: Caller) -> None:
        raise Refusal(404, "this service has no keys")

"""What a service reports about itself: its settings, its health, its base models and their tokenizers."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from tinkex.service.config import ServiceConfig
from tinkex.service.refusal import Caller, Refusal
from tinkex.service.served_models import ServedModel, ServedModels, in_daemon_thread
from tinkex.types import config as types
from tinkex.types import reports


@dataclass(eq=False)
class Capabilities:
    """Settings and capabilities, one method per operation."""

    _config: ServiceConfig
    _models: ServedModels
    _issues_tokens: bool

    async def get_client_config(self, request: types.ClientConfigRequest, caller: Caller):
        return types.ClientConfigResponse(
            pjwt_auth_enabled=self._issues_tokens,
            custom_loss_server_side=self._config.custom_losses,
            sample_join_sampling_session=True,
            create_model_via_load_weights=True,
        )

    async def get_dynamic_config(self, request: types.ClientConfigRequest, caller: Caller):
        return types.ClientDynamicConfigResponse(sample_cancel_enabled=True)

    async def get_health(self, request: types.EmptyRequest, caller: Caller) -> types.HealthResponse:
        if why := self._models.trouble():
            raise Refusal(503, why)
        return types.HealthResponse()

    async def get_server_capabilities(self, request: types.EmptyRequest, caller: Caller):
        models = await asyncio.gather(*map(self._supported, self._models))
        return types.GetServerCapabilitiesResponse(supported_models=models)

    async def _supported(self, model: ServedModel) -> types.SupportedModel:
        facts, context = await model.facts(), model.max_context()
        known = types.SupportedModel(
            model_name=model.name, max_context_length=context, trainable=True, sampleable=True
        )
        if facts is None:
            return known
        kept = self._config.engine.quantize
        more = {
            "family": facts.family, "parameters": facts.parameters,
            "active_parameters": facts.active_parameters,
            "quantisation": kept if kept not in ("none", "file") else facts.quantisation or "none",
            "memory_bytes": facts.weight_bytes + facts.kv_bytes, "fits": facts.fits,
            "max_context_length": context or facts.context,
        }  # fmt: skip
        return known.model_copy(update=more)

    async def get_tokenizer_file(self, request: types.TokenizerFileRequest, caller: Caller) -> bytes:
        """A file of a base model's tokenizer, for clients that have no other way to it."""
        model = self._models.find(request.model_name)
        directory = await in_daemon_thread(model.tokenizer_dir)  # which may fetch the model first
        if request.file not in types.TOKENIZER_FILES:
            known = ", ".join(types.TOKENIZER_FILES)
            raise Refusal(404, f"{request.file!r} is no file of a tokenizer; those are: {known}")
        if directory is None or not (path := directory / request.file).is_file():
            raise Refusal(404, f"the tokenizer of {request.model_name} has no {request.file}")
        return await asyncio.to_thread(path.read_bytes)

    async def send_telemetry(self, request: reports.TelemetrySendRequest, caller: Caller):
        """Accepted and discarded: clients stall unless it is accepted."""
        return reports.TelemetryResponse()

    async def no_keys(self, request: types.EmptyRequest, caller: Caller):
        """A server answers these itself; a service in the caller's own process has no keys."""
        raise Refusal(404, "this service has no keys, and issues no tokens")

"""What a server reports to clients: settings, capabilities, health, and the owner of a key.

Every setting has the default that a client assumes if the server does not send it.
"""

from __future__ import annotations

from typing import Literal

from tinkex.types.base import ReplyModel, RequestModel


class EmptyRequest(RequestModel):
    """A request without fields."""


class ClientConfigRequest(RequestModel):  # sent before any other request
    sdk_version: str


class ClientConfigResponse(ReplyModel):
    pjwt_auth_enabled: bool = False  # exchange the key for a JWT
    credential_default_source: str = "api_key"
    sample_dispatch_bytes_semaphore_size: int = 10 * 1024 * 1024
    inflight_response_bytes_semaphore_size: int = 50 * 1024 * 1024
    parallel_fwdbwd_chunks: bool = True
    proto_compress_fwdbwd: bool = False  # zstd bodies on forward_backward
    fwdbwd_max_chunk_len: int = 1024  # datums a request
    fwdbwd_max_chunk_bytes_count: int = 5_000_000
    fwdbwd_dispatch_bytes_semaphore_size: int = 50_000_000
    billing_exception_max_pause_duration_sec: int = 3600
    sample_no_retries: bool = False
    sample_enable_stuck_detection: bool = True
    sample_max_concurrent_requests: int = 2000
    use_pyqwest_transport: bool = True
    create_model_via_load_weights: bool = False
    sample_use_retrieve_futures: bool = False  # one long poll for all futures of a sampler
    custom_loss_server_side: bool = False
    sample_join_sampling_session: bool = False


class ClientDynamicConfigResponse(ReplyModel):  # may change while a client runs
    refresh_interval_sec: int = 300
    sample_cancel_enabled: bool = False
    sample_cancel_max_batch_size: int = 64


class AuthTokenResponse(ReplyModel):  # a JWT to use in place of the key
    jwt: str


class NamedDetails(ReplyModel):  # an organisation
    name: str


class UserDetails(ReplyModel):
    email: str


class ApiKeyDetails(ReplyModel):
    org_details: NamedDetails
    user_details: UserDetails


class ApiKeyResponse(ReplyModel):
    key_id: int
    name: str
    note: str
    details: ApiKeyDetails


class WhoamiResponse(ReplyModel):  # the owner of a JWT
    user_urn: str
    org_urn: str
    email: str | None = None


# The files of a model directory that a tokenizer needs.
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "chat_template.jinja", "tokenizer.model", "vocab.json", "merges.txt",
)  # fmt: skip


class TokenizerFileRequest(RequestModel):  # our extension
    model_name: str
    file: str


class HealthResponse(ReplyModel):
    status: Literal["ok"] = "ok"


class SupportedModel(ReplyModel):
    """A base model and its capabilities."""

    model_name: str | None = None
    max_context_length: int | None = None
    trainable: bool | None = None
    sampleable: bool | None = None
    # Our extension; None where a server does not say it.
    family: str | None = None
    parameters: int | None = None
    active_parameters: int | None = None
    quantisation: str | None = None
    memory_bytes: int | None = None
    fits: bool | None = None


class GetServerCapabilitiesResponse(ReplyModel):
    """The base models of the server."""

    supported_models: list[SupportedModel]

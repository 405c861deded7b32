"""Creates runs: new ones, and ones that start from a checkpoint.

Promises: a run's number in its session is assigned after all checks, so a refused call leaves no gap. Where
the server cannot load a checkpoint into a new run in one request, the client reads the checkpoint's metadata,
creates a run that fits it, and loads it.
"""

from __future__ import annotations

from tinkex.client.credentials import looks_like_key
from tinkex.client.future import APIFuture, start
from tinkex.client.polling import retrieve
from tinkex.client.server_connection import ServerConnection, connect
from tinkex.client.session import Session
from tinkex.client.training import TrainingClient
from tinkex.client.transport import CallContext
from tinkex.errors import InvalidInputError, TinkerError
from tinkex.types.checkpoints import (
    LoadWeightsRequest,
    ParsedCheckpointTinkerPath,
    WeightsInfoRequest,
    WeightsInfoResponse,
)
from tinkex.types.optimizers import AdamOptimizerConfig, OptimizerConfig
from tinkex.types.params import LoraConfig
from tinkex.types.training import CreateModelRequest
from tinkex.wire import ops


def create_run(
    session: Session,
    base_model: str,
    lora: LoraConfig,
    user_metadata: dict[str, str] | None,
    optimizer: OptimizerConfig | None,
) -> APIFuture[TrainingClient]:
    """Create a run with a new adapter."""
    if not isinstance(base_model, str) or not base_model:
        raise InvalidInputError(f"base_model must be the name of a base model, got {base_model!r:.80}")
    session.connection.check_open()
    request = CreateModelRequest(
        session_id="", model_seq_id=0, base_model=base_model, lora_config=lora,
        user_metadata=user_metadata, optimizer_config=optimizer or AdamOptimizerConfig(),
    )  # fmt: skip
    seq = next(session.run_seq)
    return start(lambda: _create(session, request, seq), "create_model")


async def _create(session: Session, request: CreateModelRequest, seq: int) -> TrainingClient:
    numbered = request.model_copy(update={"session_id": await session.open(), "model_seq_id": seq})
    promise = await session.connection.call(ops.CREATE_MODEL, numbered)
    created = await retrieve(session.connection, ops.CREATE_MODEL, promise.request_id)
    return TrainingClient(session, created.model_id)


def resume_run(
    session: Session,
    path: str,
    base_model: str | None,
    user_metadata: dict[str, str] | None,
    token: str | None,
    optimizer: OptimizerConfig | None = None,
    *,
    with_optimizer: bool = False,
) -> APIFuture[TrainingClient]:
    """Create a run from a checkpoint; `token` gives access to another account's."""
    ParsedCheckpointTinkerPath.from_tinker_path(path)
    session.connection.check_open()
    if base_model == "":
        raise InvalidInputError("base_model must be a model's name, or None for the checkpoint's, got ''")
    request = LoadWeightsRequest(
        path=path, optimizer=with_optimizer, base_model=base_model, user_metadata=user_metadata,
        optimizer_config=optimizer, weights_access_token=token,
    )  # fmt: skip
    seq = next(session.run_seq)

    async def resume() -> TrainingClient:
        await session.open()
        if session.connection.config.create_model_via_load_weights:
            return await _create_by_load(session, request, seq)
        return await _create_and_load(session, request, seq)

    return start(resume, "create_training_client_from_state")


async def _create_by_load(session: Session, request: LoadWeightsRequest, seq: int) -> TrainingClient:
    """The server creates the run and loads it in one request."""
    session_id = await session.open()
    numbered = request.model_copy(update={"session_id": session_id, "model_seq_id": seq})
    promise = await session.connection.call(ops.LOAD_WEIGHTS, numbered)
    loaded = await retrieve(session.connection, ops.LOAD_WEIGHTS, promise.request_id)
    return TrainingClient(session, loaded.model_id or f"{session_id}:train:{seq}")


async def _create_and_load(session: Session, request: LoadWeightsRequest, seq: int) -> TrainingClient:
    token = request.weights_access_token
    info = await _weights_info(session.connection, request.path, token)
    if not info.is_lora or info.lora_rank is None:
        raise TinkerError(f"{request.path} is not a LoRA checkpoint of known rank, and cannot be trained on")
    flags = {
        "train_unembed": info.train_unembed, "train_mlp": info.train_mlp, "train_attn": info.train_attn
    }  # fmt: skip
    lora = LoraConfig(rank=info.lora_rank, **{key: flag for key, flag in flags.items() if flag is not None})
    new = CreateModelRequest(
        session_id="", model_seq_id=0, base_model=request.base_model or info.base_model,
        lora_config=lora, user_metadata=request.user_metadata,
        optimizer_config=request.optimizer_config or info.optimizer_config,
    )  # fmt: skip
    run = await _create(session, new, seq)
    await run._load(request.path, optimizer=request.optimizer, token=token)
    return run


async def _weights_info(connection: ServerConnection, path: str, token: str | None) -> WeightsInfoResponse:
    """The checkpoint's metadata. A token that is an API key reads a checkpoint of that key's account."""
    request, context = WeightsInfoRequest(tinker_path=path), CallContext("get_weights_info_by_tinker_path")
    if not connection.base_url or token is None or not looks_like_key(token):
        return await connection.call(ops.GET_WEIGHTS_INFO, request, context)
    theirs = connect(
        connection.base_url, token, settings=connection.settings, headers=connection.headers,
        timeouts=connection.timeouts, telemetry=False,
    )  # fmt: skip
    try:
        return await theirs.call(ops.GET_WEIGHTS_INFO, request, context)
    finally:
        await theirs.close()

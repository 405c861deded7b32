"""Checkpoints: saving, loading, `tinker://` paths, listing and deleting."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Literal, Self

from pydantic import JsonValue

from tinkex.errors import InvalidInputError
from tinkex.types.base import Count, ReplyModel, RequestModel, RunName, RunTags
from tinkex.types.optimizers import AdamOptimizerConfig, OptimizerConfig

CheckpointType = Literal["training", "sampler", "external"]
FOLDERS: dict[str, CheckpointType] = {
    "weights": "training", "sampler_weights": "sampler", "external_weights": "external",
}  # fmt: skip


class Checkpoint(ReplyModel):
    """Saved weights."""

    checkpoint_id: str  # "weights/NAME", "sampler_weights/NAME" or "external_weights/NAME"
    checkpoint_type: CheckpointType
    time: datetime
    tinker_path: str
    size_bytes: int | None = None
    public: bool = False
    user_metadata: dict[str, str] | None = None
    expires_at: datetime | None = None


class Cursor(ReplyModel):  # a page's position in the whole list
    offset: int
    limit: int
    total_count: int


class ParsedCheckpointTinkerPath(ReplyModel):
    """A checkpoint's path, split into its parts.

    >>> ParsedCheckpointTinkerPath.from_tinker_path("tinker://s:train:0/weights/step-10").checkpoint_id
    'weights/step-10'
    """

    tinker_path: str
    training_run_id: str
    checkpoint_type: CheckpointType
    checkpoint_id: str

    @classmethod
    def from_tinker_path(cls, tinker_path: str) -> Self:
        """Read `tinker://RUN/weights/NAME`, or the same with sampler_weights or external_weights."""
        scheme, _, rest = str(tinker_path).partition("://")
        parts = rest.split("/")
        if scheme != "tinker" or len(parts) != 3 or not all(parts) or parts[1] not in FOLDERS:
            raise InvalidInputError(
                f"not a checkpoint path: {tinker_path!r}; one looks like tinker://RUN/weights/NAME "
                f"(or {' or '.join(list(FOLDERS)[1:])} in place of weights), NAME without '/'"
            )
        run, folder, name = parts
        return cls(
            tinker_path=tinker_path,
            training_run_id=run,
            checkpoint_type=FOLDERS[folder],
            checkpoint_id=f"{folder}/{name}",
        )


class SaveWeightsRequest(RequestModel):  # with the optimizer's state, to resume later
    model_id: str
    path: str | None = None  # the checkpoint's name
    seq_id: Count | None = None
    ttl_seconds: Count | None = None
    overwrite: bool = False
    user_metadata: dict[str, str] | None = None
    type: Literal["save_weights"] = "save_weights"


class SaveWeightsResponse(ReplyModel):
    """The checkpoint's path."""

    path: str
    type: Literal["save_weights"] | None = None


class SaveWeightsForSamplerRequest(RequestModel):  # under a name, or unnamed for one sampling session
    model_id: str
    path: str | None = None
    sampling_session_seq_id: Count | None = None
    seq_id: Count | None = None
    ttl_seconds: Count | None = None
    user_metadata: dict[str, str] | None = None
    type: Literal["save_weights_for_sampler"] = "save_weights_for_sampler"


class SaveWeightsForSamplerResponse(ReplyModel):
    """The checkpoint's path."""

    path: str
    type: Literal["save_weights_for_sampler"] | None = None


class SaveWeightsForSamplerResponseInternal(ReplyModel):  # a path if named, a sampling session if not
    path: str | None = None
    sampling_session_id: str | None = None
    type: Literal["save_weights_for_sampler"] | None = None


class SaveWeightsExternalRequest(RequestModel):  # as files to download, encrypted if recipients are given
    model_id: str
    path: str
    seq_id: Count | None = None
    ttl_seconds: Count | None = None
    age_encryption_recipients: list[str] | None = None
    type: Literal["save_weights_external"] = "save_weights_external"


class SaveWeightsExternalResponse(ReplyModel):
    path: str
    type: Literal["save_weights_external"] | None = None


class SaveWeightsExternalResponseInternal(ReplyModel):
    path: str | None = None
    size_bytes: int | None = None
    type: Literal["save_weights_external"] | None = None


class LoadWeightsRequest(RequestModel):  # into a run, or into a new one (session_id and model_seq_id)
    model_id: str | None = None
    seq_id: Count | None = None
    session_id: str | None = None
    model_seq_id: Count | None = None
    base_model: str | None = None
    user_metadata: Mapping[str, JsonValue] | None = None
    path: str
    optimizer: bool = True  # clients before 0.5.1 omit it and expect True
    optimizer_config: OptimizerConfig | None = None
    weights_access_token: str | None = None
    name: RunName | None = None  # our extension, for a new run
    tags: RunTags | None = None
    type: Literal["load_weights"] = "load_weights"


class LoadWeightsResponse(ReplyModel):
    path: str | None = None
    model_id: str | None = None
    type: Literal["load_weights"] | None = None


class WeightsInfoRequest(RequestModel):
    tinker_path: str


class WeightsInfoResponse(ReplyModel):  # the settings that a run must have to load the checkpoint
    base_model: str
    optimizer_config: OptimizerConfig = AdamOptimizerConfig()
    is_lora: bool
    lora_rank: int | None = None
    train_unembed: bool | None = None
    train_mlp: bool | None = None
    train_attn: bool | None = None


class CopyWeightsRequest(RequestModel):  # into a project, or into a session
    session_id: str | None = None
    model_seq_id: Count | None = None
    destination_project_id: str | None = None
    source_path: str
    ttl_seconds: Count | None = None
    weights_access_token: str | None = None


class CopyWeightsResponse(ReplyModel):
    tinker_path: str


class UploadWeightsRequest(RequestModel):  # a piece of one file of an adapter; pieces come in order
    upload_id: str
    file: str
    offset: Count
    data: bytes


class UploadWeightsResponse(ReplyModel):
    received: int  # bytes of the file so far


class ImportWeightsRequest(RequestModel):  # what was uploaded becomes a checkpoint
    upload_id: str
    base_model: str | None = None  # None: the one that its files name
    name: str = "imported"
    ttl_seconds: Count | None = None


class ImportWeightsResponse(ReplyModel):  # `tinker_path` is set when it is ready, `error` if it failed
    status: Literal["pending", "ready", "failed"]
    tinker_path: str | None = None
    error: str | None = None


class ListCheckpointsRequest(RequestModel):
    training_run_id: str


class ListUserCheckpointsRequest(RequestModel):
    limit: Count = 100
    offset: Count = 0


class CheckpointsListResponse(ReplyModel):
    checkpoints: list[Checkpoint]
    cursor: Cursor | None = None


class CheckpointRequest(RequestModel):  # to delete, publish, unpublish or download one
    training_run_id: str
    checkpoint_id: str


class SetCheckpointTTLRequest(CheckpointRequest):
    sent_as_null = frozenset({"ttl_seconds"})

    ttl_seconds: Count | None  # from now; None: never


class ExternalWeightsUrlsResponse(ReplyModel):  # by relative path
    urls: dict[str, str]
    expires: datetime


class CheckpointArchiveUrlResponse(ReplyModel):  # one file with everything, for clients up to 0.35.0
    url: str
    expires: datetime | None = None

"""Futures: requests that ask for a result, and their replies.

A retrieval is answered with `PendingFuture`, `MetadataOnly`, `RequestFailedResponse` or the result itself.
Knows nothing of polling, which is the client's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from tinkex.errors import InvalidInputError, RequestErrorCategory
from tinkex.types.base import Count, ReplyModel, RequestModel

ModelID = str
RequestID = str


@dataclass(frozen=True)
class UntypedAPIFuture:
    """A future's id. A dataclass and not a pydantic model, since every request returns one."""

    request_id: str
    model_id: str | None = None
    sample_sequence_ids: list[str] | None = None  # of a sample request: one per sequence, in order

    def to_wire(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if value is not None}

    @classmethod
    def model_validate(cls, fields: Mapping[str, Any], context: Any = None) -> UntypedAPIFuture:
        request_id = fields.get("request_id")
        ids: list[Any] | str | None = fields.get("sample_sequence_ids")
        if not isinstance(request_id, str) or not request_id:
            raise InvalidInputError(f"a future needs a request_id, got {request_id!r}")
        if ids is not None and not (isinstance(ids, list) and all(isinstance(i, str) for i in ids)):
            raise InvalidInputError(f"sample_sequence_ids must be a list of strings, got {ids!r}")
        return cls(request_id, fields.get("model_id"), ids)


@dataclass(frozen=True)
class FutureRetrieveRequest:
    """Retrieve a result. With `allow_metadata_only` a server may reply with its size first."""

    request_id: str
    allow_metadata_only: bool = False

    def to_wire(self) -> dict[str, Any]:
        return {"request_id": self.request_id, "allow_metadata_only": self.allow_metadata_only}

    @classmethod
    def model_validate(cls, fields: Mapping[str, Any], context: Any = None) -> FutureRetrieveRequest:
        request_id = fields.get("request_id")
        if not isinstance(request_id, str):
            raise InvalidInputError(f"FutureRetrieveRequest.request_id must be a string, got {request_id!r}")
        return cls(request_id, bool(fields.get("allow_metadata_only")))


@dataclass(frozen=True)
class PendingFuture:
    """The future is not resolved yet; the queue state says why."""

    request_id: str = ""
    queue_state: str = "active"  # active, paused_capacity, paused_rate_limit, or a newer server's state
    queue_state_reason: str | None = None


@dataclass(frozen=True)
class MetadataOnly:
    """The result is ready and has this size: retrieve it without `allow_metadata_only`."""

    size: int


class RequestFailedResponse(ReplyModel):
    """The request failed; `category` says whose fault it was."""

    error: str
    category: RequestErrorCategory = RequestErrorCategory.Unknown

    @field_validator("category", mode="before")
    @classmethod
    def _any_case(cls, value: Any) -> RequestErrorCategory:
        return RequestErrorCategory.parse(value)


class SamplingSessionFuturesTarget(RequestModel):  # the futures of one sampler, or of one of its clones
    type: Literal["sampling_session"] = "sampling_session"
    sampling_session_id: str
    cloned_sampler_id: Count = 0


class FuturesRetrieveRequest(RequestModel):
    """Which futures were resolved since `prev_cursor`; those listed as retrieved may be dropped."""

    large = frozenset({"retrieved_request_ids"})

    target: SamplingSessionFuturesTarget
    prev_cursor: Count = 0  # list what was resolved since
    timeout: float | None = None
    # The server may drop these results.
    retrieved_request_ids: list[str] = Field(default_factory=list, max_length=16384)


class FutureFinished(ReplyModel):
    state: Literal["finished"] = "finished"
    request_id: str
    response_payload_uncompressed_size: Count | None = None


class FutureFailed(ReplyModel):
    state: Literal["failed"] = "failed"
    request_id: str


FutureCompletion = Annotated[FutureFinished | FutureFailed, Field(discriminator="state")]


class FuturesRetrieveResponse(ReplyModel):
    completions: list[FutureCompletion]
    cursor: Count


# The replies to a retrieval; results have the types of wire/ops.py.
FutureRetrieveResponse = PendingFuture | MetadataOnly | RequestFailedResponse | Any


class CancelFutureRequest(RequestModel):  # its result will not be retrieved
    request_id: str

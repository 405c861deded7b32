"""The codec of streamed samples: JSON events of stream_sample, for both ends of a connection.

    event: tokens   {"sequence": 0, "tokens": [..], "logprobs": [..]}            as they are sampled
    event: queue    {"queue_state": "paused_capacity", "queue_state_reason": …}  when the state changes
    event: done     the whole response, as retrieve_future returns it in JSON, with `sample_sequence_ids`
    event: error    {"error": "…", "category": "user"}                           instead of done

Readers ignore events of unknown names, which newer servers may send. Bad input raises InvalidInputError.
Knows nothing of how events are framed.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import orjson

from tinkex.errors import InvalidInputError
from tinkex.types.base import AnyJson
from tinkex.types.data import EncodedTextChunk
from tinkex.types.futures import PendingFuture
from tinkex.types.outputs import NewTokens, SampleResponse
from tinkex.types.sampling import SampleEvent
from tinkex.wire import codec, ops
from tinkex.wire.codec import load_object


def write_event(event: SampleEvent) -> tuple[str, Any]:
    """Return an event's name and its fields."""
    if isinstance(event, NewTokens):
        fields = {"sequence": event.sequence, "tokens": event.tokens_np, "logprobs": event.logprobs_np}
        return "tokens", fields
    if isinstance(event, PendingFuture):
        return "queue", {"queue_state": event.queue_state, "queue_state_reason": event.queue_state_reason}
    if isinstance(event, SampleResponse):
        ids = [sequence.sequence_id for sequence in event.sequences]
        return "done", {**orjson.loads(codec.encode_result(event)[1]), "sample_sequence_ids": ids}
    return "error", event.to_wire()


def read_event(name: str, data: str) -> SampleEvent | None:
    """Decode what `write_event` wrote; None for an unknown name."""
    if name == "tokens":
        return _read_tokens(load_object(data))
    if name == "queue":
        fields = load_object(data)
        reason = fields.get("queue_state_reason")
        return PendingFuture(
            "", str(fields.get("queue_state") or "active"), None if reason is None else str(reason)
        )
    if name not in ("done", "error"):
        return None
    event = codec.decode_result(ops.SAMPLE, 200, {}, data.encode())
    if (name == "error") is isinstance(event, SampleResponse):
        raise InvalidInputError(f"an event named {name} with another content")
    return _with_ids(event, load_object(data).get("sample_sequence_ids"))


def _read_tokens(fields: dict[str, Any]) -> NewTokens:
    sequence = fields.get("sequence")
    tokens: AnyJson = fields.get("tokens")
    logprobs: AnyJson = fields.get("logprobs")
    if type(sequence) is not int or sequence < 0 or not isinstance(tokens, list):
        raise InvalidInputError(f"tokens of sequence {sequence!r}: {tokens!r}")
    if not isinstance(logprobs, list) or len(logprobs) != len(tokens):
        raise InvalidInputError(f"{len(tokens)} tokens, with these logprobs: {logprobs!r}")
    try:
        values = np.array([np.nan if value is None else value for value in logprobs], np.float32)
    except (TypeError, ValueError) as error:
        raise InvalidInputError(f"logprobs: {error}") from None
    return NewTokens(sequence, EncodedTextChunk(tokens).tokens_np, values)


def _with_ids(event: Any, ids: AnyJson) -> Any:
    if not isinstance(event, SampleResponse) or not isinstance(ids, list) or len(ids) != len(event.sequences):
        return event
    named = [replace(one, sequence_id=str(id)) for one, id in zip(event.sequences, ids, strict=True)]
    return replace(event, sequences=named)

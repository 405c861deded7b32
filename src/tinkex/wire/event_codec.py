"""The events of a streamed sample (stream_sample), in JSON.

    tokens   {"sequence": 0, "tokens": [..], "logprobs": [..]}            as they are sampled
    queue    {"queue_state": "paused_capacity", "queue_state_reason": …}  when the state changes
    done     the whole response, as retrieve_future returns it in JSON, with `sample_sequence_ids`
    error    {"error": "…", "category": "user"}                           instead of done

Readers ignore events of unknown names, which newer servers may send. Bad input raises InvalidInputError.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from tinkex import types as t
from tinkex.errors import InvalidInputError
from tinkex.strict import at
from tinkex.types.base import AnyJson
from tinkex.types.chunks import as_tokens
from tinkex.types.sampling import SampleEvent
from tinkex.wire import json_codec, ops
from tinkex.wire.codec import decode_result, load_object, read_pending


def write_event(event: SampleEvent) -> tuple[str, Any]:
    """Return an event's name and its fields."""
    if isinstance(event, t.NewTokens):
        fields = {"sequence": event.sequence, "tokens": event.tokens_np, "logprobs": event.logprobs_np}
        return "tokens", fields
    if isinstance(event, t.PendingFuture):
        return "queue", {"queue_state": event.queue_state, "queue_state_reason": event.queue_state_reason}
    if isinstance(event, t.SampleResponse):
        ids = [sequence.sequence_id for sequence in event.sequences]
        return "done", {**json_codec.write_samples(event), "sample_sequence_ids": ids}
    return "error", event.to_wire()


def read_event(name: str, data: str) -> SampleEvent | None:
    """Decode what `write_event` wrote; None for an unknown name."""
    if name == "tokens":
        return _read_tokens(load_object(data))
    if name == "queue":
        load_object(data)
        return replace(read_pending(data), request_id="")
    if name not in ("done", "error"):
        return None
    event: Any = decode_result(ops.SAMPLE, 200, {}, data.encode())
    if (name == "error") is isinstance(event, t.SampleResponse):
        raise InvalidInputError(f"an event named {name} with another content")
    ids: AnyJson = load_object(data).get("sample_sequence_ids")
    if isinstance(event, t.SampleResponse) and isinstance(ids, list) and len(ids) == len(event.sequences):
        named = [replace(one, sequence_id=str(id)) for one, id in zip(event.sequences, ids, strict=True)]
        return replace(event, sequences=named)
    return event


def _read_tokens(fields: dict[str, Any]) -> t.NewTokens:
    sequence = fields.get("sequence")
    tokens: AnyJson = fields.get("tokens")
    logprobs: AnyJson = fields.get("logprobs")
    if type(sequence) is not int or sequence < 0 or not isinstance(tokens, list):
        raise InvalidInputError(f"tokens of sequence {sequence!r}: {tokens!r}")
    if not isinstance(logprobs, list) or len(logprobs) != len(tokens):
        raise InvalidInputError(f"{len(tokens)} tokens, with these logprobs: {logprobs!r}")
    values = at("logprobs", np.array, [np.nan if n is None else n for n in logprobs], np.float32)
    return t.NewTokens(sequence, as_tokens(tokens), values)

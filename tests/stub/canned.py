"""What the stub reads of a request and answers to it: the protocol's protobuf messages, written by hand.

Independent of `tinkex.wire` on purpose, so that a client test cannot pass because both sides share a mistake.
Every logprob is -0.5 and a sample is the tokens 1..n.
"""

from __future__ import annotations

import functools
import itertools
import math
import struct
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any


def varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def pb(number: int, value: bytes | str | int | float) -> bytes:
    """One protobuf field: bytes and text are length-delimited, ints are varints, floats are doubles."""
    match value:
        case float():
            return varint(number << 3 | 1) + struct.pack("<d", value)
        case int():
            return varint(number << 3) + varint(value)
        case str():
            value = value.encode()
    return varint(number << 3 | 2) + varint(len(value)) + value


def pb_fields(data: memoryview) -> Iterator[tuple[int, Any]]:
    """(field number, value) pairs: int for varints, float for doubles, memoryview for the rest."""
    at = 0

    def read() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            at += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
            shift += 7

    while at < len(data):
        key = read()
        match key & 7:
            case 0:
                yield key >> 3, read()
            case 1:
                yield key >> 3, struct.unpack_from("<d", data, at)[0]
                at += 8
            case 2:
                size = read()
                yield key >> 3, data[at : at + size]
                at += size
            case kind:
                raise ValueError(f"wire type {kind} is not in the protocol")


@dataclass
class Pass:
    """What the stub reads of a forward or forward_backward: enough to answer it."""

    model_id: str = ""
    seq_id: int = 0
    shapes: list[list[int]] = field(default_factory=list)  # of each datum's target_tokens, else of its input
    forward_only: bool = False


def read_pass(body: bytes) -> Pass:
    out = Pass()
    for number, value in pb_fields(memoryview(body)):
        match number:
            case 1:
                out.model_id = str(value, "utf-8")
            case 2:
                out.seq_id = value
            case 3:
                out.shapes.append(read_datum(value))
            case 6:
                out.forward_only = bool(value)
    return out


def read_datum(data: memoryview) -> list[int]:
    length, shape = 0, []
    for number, value in pb_fields(data):
        if number == 1:
            for kind, chunk in pb_fields(value):
                inner = dict(pb_fields(chunk))
                length += len(inner.get(1, b"")) // 4 if kind == 1 else inner.get(3, 0)
        elif number == 2:
            entry = dict(pb_fields(value))
            if entry.get(1) == b"target_tokens":
                shape = read_shape(entry[2])
    return shape or [length]


def read_shape(tensor: memoryview) -> list[int]:
    shape: list[int] = []
    for number, value in pb_fields(tensor):
        if number == 4:
            shape += [value] if isinstance(value, int) else unpack_varints(value)
    return shape


def unpack_varints(data: memoryview) -> list[int]:
    out, value, shift = [], 0, 0
    for byte in data:
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            out.append(value)
            value = shift = 0
    return out


def read_json_pass(body: dict[str, Any]) -> Pass:
    """The JSON form that clients before 0.25 send."""
    given = body.get("forward_backward_input") or body["forward_input"]
    shapes = []
    for datum in given["data"]:
        targets = datum["loss_fn_inputs"].get("target_tokens")
        chunks = datum["model_input"]["chunks"]
        length = prompt_length(chunks)
        shapes.append((targets.get("shape") or [len(targets["data"])]) if targets else [length])
    return Pass(body["model_id"], body["seq_id"], shapes, "forward_input" in body)


def pass_output(shapes: list[list[int]], metrics: dict[str, float]) -> bytes:
    """ForwardBackwardOutput: one record per stretch of datums with the same trailing shape, logprobs -0.5."""
    out = pb(1, "TorchLossReturn")
    for trailing, group in itertools.groupby(shapes, key=lambda shape: shape[1:]):
        ends = list(itertools.accumulate((4 * math.prod(shape) for shape in group), initial=0))
        batched = pb(1, floats(ends[-1] // 4)) + pb(2, array("q", ends).tobytes()) + pb(3, 1)
        batched += pb(4, b"".join(map(varint, trailing))) if trailing else b""
        record = pb(1, "TorchLossReturn") + pb(2, pb(1, "logprobs") + pb(2, batched)) + pb(3, len(ends) - 1)
        out += pb(2, record)
    return out + b"".join(pb(3, pb(1, name) + pb(2, float(value))) for name, value in metrics.items())


def floats(count: int, value: float = -0.5) -> bytes:
    return struct.pack("<f", value) * count


def prompt_length(chunks: list[dict[str, Any]]) -> int:
    return sum(
        len(c["tokens"]) if isinstance(c.get("tokens"), list) else c.get("expected_tokens", 0) for c in chunks
    )


@functools.lru_cache(maxsize=64)
def sequences(count: int, length: int, topk: int) -> bytes:
    tokens = pb(2, array("i", range(1, length + 1)).tobytes())
    one = pb(1, 1) + tokens + pb(3, floats(length)) + (pb(4, topk_table(length, topk, 0)) if topk else b"")
    return pb(1, one) * count


def topk_table(length: int, k: int, padded: int) -> bytes:
    """TopkLogprobs with token ids 0..k-1 in each row; the first `padded` rows are sentinels."""
    ids = bytes(4 * k * padded) + array("i", range(k)).tobytes() * (length - padded)
    return (
        pb(1, ids)
        + pb(2, floats(k * padded, -99999.0) + floats(k * (length - padded)))
        + pb(3, k)
        + pb(4, length)
    )


def sample_output(body: dict[str, Any]) -> bytes:
    """SampleResponse for an asample body."""
    new = body["sampling_params"].get("max_tokens") or 16
    out = sequences(body.get("num_samples", 1), new, body.get("topk_sample_logprobs") or 0)
    if wanted := body.get("target_prompt_logprobs"):
        out += pb(5, scores_of(wanted))
    if not any(body.get(k) for k in ("prompt_logprobs", "topk_prompt_logprobs", "prompt_alt_tokens_k")):
        return out
    length = prompt_length(body["prompt"]["chunks"])
    skipped = max(1, length - (body.get("prompt_logprobs_last_n") or length))
    if body.get("prompt_logprobs"):
        out += pb(2, floats(skipped, math.nan) + floats(length - skipped))
    if k := body.get("topk_prompt_logprobs"):
        out += pb(3, topk_table(length, k, skipped))
    if k := body.get("prompt_alt_tokens_k"):
        shape = pb(4, varint(length - 1) + varint(k))
        drawn = array("q", [1] * ((length - 1) * k)).tobytes()
        scored = floats((length - 1) * k)
        out += pb(6, pb(1, pb(1, drawn) + pb(3, 2) + shape) + pb(2, pb(1, scored) + pb(3, 1) + shape))
    return out


def scores_of(wanted: dict[str, Any]) -> bytes:
    """A Tensor laid out like the targets asked for: -0.5 each, 0.0 where the target is -1."""
    values = array("f", [-0.5 if token >= 0 else 0.0 for token in wanted["data"]]).tobytes()
    data = pb(1, values)
    if (rows := wanted.get("sparse_crow_indices")) is not None:
        indices = [array("q", each).tobytes() for each in (rows, wanted["sparse_col_indices"])]
        data = pb(2, pb(1, values) + pb(2, indices[0]) + pb(3, indices[1]))
    return data + pb(3, 1) + pb(4, b"".join(map(varint, wanted["shape"])))


def sample_json(body: dict[str, Any]) -> dict[str, Any]:
    """The same for clients that take only JSON."""
    new = body["sampling_params"].get("max_tokens") or 16
    one = {"stop_reason": "length", "tokens": list(range(1, new + 1)), "logprobs": [-0.5] * new}
    length = prompt_length(body["prompt"]["chunks"])
    prompt = [None, *[-0.5] * (length - 1)] if body.get("prompt_logprobs") else None
    return {"type": "sample", "sequences": [one] * body.get("num_samples", 1), "prompt_logprobs": prompt}


def pass_json(given: Pass, metrics: dict[str, float]) -> dict[str, Any]:
    outputs = [
        {"logprobs": {"data": [-0.5] * math.prod(shape), "dtype": "float32", "shape": shape}}
        for shape in given.shapes
    ]
    return {"loss_fn_output_type": "TorchLossReturn", "loss_fn_outputs": outputs, "metrics": metrics}

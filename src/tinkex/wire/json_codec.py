"""The JSON codec: sample requests, and passes and results for peers without protobuf.

Output never contains NaN or infinity: such metrics are left out, such logprobs become null. Input may omit
every default, may have null for "not given", and may come from any SDK since 0.3. Bad input raises
InvalidInputError that names the field. Works on plain dicts; bytes and content types are codec.py's.
"""

from __future__ import annotations

import base64
import binascii
import math
from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np

from tinkex import types as t
from tinkex.errors import InvalidInputError
from tinkex.strict import assemble, at, check_count
from tinkex.types.base import AnyJson, read_plain
from tinkex.types.outputs import TOPK_PADDING

MAX_CHUNKS = 4096  # of one model input
MAX_PASS_DATUMS = 4096  # of one request

_NUMBERS = (list, np.ndarray)  # the second if they are many: see large_json.py

Json = dict[str, Any]
T = TypeVar("T")


def _get(obj: AnyJson, key: str, kind: type[T] | tuple[type, ...], where: str, default: Any = ...) -> Any:
    """`obj[key]`, which must be of this kind. If absent or null: `default`, or an error if there is none."""
    if type(obj) is not dict:
        raise InvalidInputError(f"{where} must be an object, got {type(obj).__name__}")
    value: Any = obj.get(key)
    if type(value) is kind:  # the common case
        return value
    if value is None:
        if default is ...:
            raise InvalidInputError(f"{where}.{key} is missing")
        return default
    kinds = kind if isinstance(kind, tuple) else (kind,)
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        names = " or ".join(k.__name__ for k in kinds if k is not np.ndarray)
        raise InvalidInputError(f"{where}.{key} must be {names}, got {type(value).__name__}")
    return value


# -- chunks and tensors ----------------------------------------------------------------------------------


def write_chunk(chunk: t.ModelInputChunk) -> Json:
    if isinstance(chunk, t.EncodedTextChunk):
        return {"tokens": chunk.tokens_np, "type": "encoded_text"}
    fields = chunk.model_dump(exclude_none=True)
    for name in ("data", "dmel"):
        if name in fields:
            fields[name] = base64.b64encode(fields[name]).decode()
    return fields


def _bytes(obj: Any, key: str, where: str) -> bytes:
    try:
        return base64.b64decode(_get(obj, key, str, where), validate=True)
    except binascii.Error as error:
        raise InvalidInputError(f"{where}.{key}: not base64: {error}") from None


def _chunk_kind(obj: Any, where: str) -> str:
    """The chunk's type. Old SDKs omit it; then the keys decide."""
    if (given := _get(obj, "type", str, where, None)) is not None:
        return given
    by_key = {"data": "image", "location": "image_asset_pointer", "dmel": "dmel"}
    return next((kind for key, kind in by_key.items() if obj.get(key) is not None), "encoded_text")


def read_chunk(obj: Any, where: str) -> t.ModelInputChunk:
    kind = _chunk_kind(obj, where)
    if kind == "encoded_text":
        return at(f"{where}.tokens", t.EncodedTextChunk, _get(obj, "tokens", _NUMBERS, where))
    if kind == "dmel":
        return t.DmelChunk(_bytes(obj, "dmel", where))
    if kind not in ("image", "image_asset_pointer"):
        raise InvalidInputError(
            f"{where}.type must be encoded_text, image, image_asset_pointer or dmel, got {kind!r}"
        )
    # SDKs up to 0.5.0 call the length `tokens`, and send a height and a width that are ignored.
    length = _get(obj, "expected_tokens", int, where, _get(obj, "tokens", int, where, None))
    picture = _get(obj, "format", str, where)
    if kind == "image":
        return at(where, t.ImageChunk, _bytes(obj, "data", where), picture, length)
    return at(where, t.ImageAssetPointerChunk, picture, _get(obj, "location", str, where), length)


def write_model_input(value: t.ModelInput) -> Json:
    return {"chunks": [write_chunk(chunk) for chunk in value.chunks]}


def read_model_input(obj: Any, where: str) -> t.ModelInput:
    chunks = _get(obj, "chunks", list, where)
    if len(chunks) > MAX_CHUNKS:
        check_count(f"{where}.chunks", len(chunks), MAX_CHUNKS)
    return t.ModelInput([read_chunk(chunk, f"{where}.chunks[{i}]") for i, chunk in enumerate(chunks)])


def write_tensor(value: t.TensorData) -> Json:
    out: Json = {"data": value.values_np, "dtype": value.dtype}
    if value.shape is not None:
        out["shape"] = value.shape
    if value.is_sparse:
        out["sparse_crow_indices"] = value.sparse_crow_np
        out["sparse_col_indices"] = value.sparse_col_np
    return out


def read_tensor(obj: Any, where: str) -> t.TensorData:
    shape, dtype = _get(obj, "shape", list, where, None), _get(obj, "dtype", str, where, None)
    indices = (_get(obj, n, _NUMBERS, where, None) for n in ("sparse_crow_indices", "sparse_col_indices"))
    return at(where, t.TensorData, _get(obj, "data", _NUMBERS, where), dtype, shape, *indices)


# -- passes ----------------------------------------------------------------------------------------------


def _write_spans(spans: t.ProvenanceSpans) -> list[Json]:
    kinds = {t.PromptProvenanceSpan: "prompt", t.SampledProvenanceSpan: "sampled"}
    return [{"type": kinds[type(span)], **vars(span)} for span in spans]


def _read_spans(obj: Any, key: str, where: str) -> t.ProvenanceSpans | None:
    items = _get(obj, key, list, where, None)
    if items is None:
        return None
    spans: t.ProvenanceSpans = []
    for i, item in enumerate(items):
        place = f"{where}.{key}[{i}]"
        prompt = _get(item, "type", str, place) == "prompt"
        cls = t.PromptProvenanceSpan if prompt else t.SampledProvenanceSpan
        length = _get(item, "length", int, place)
        where_from = _get(item, "sequence_id", str, place), _get(item, "offset", int, place, 0)
        spans.append(at(place, cls, *where_from, length=length))
    return spans


def _write_datum(datum: t.Datum) -> Json:
    out: Json = {
        "loss_fn_inputs": {key: write_tensor(value) for key, value in datum.loss_fn_inputs.items()},
        "model_input": write_model_input(datum.model_input),
    }
    if datum.model_input_spans is not None and datum.loss_fn_input_spans is not None:
        out["model_input_spans"] = _write_spans(datum.model_input_spans)
        out["loss_fn_input_spans"] = _write_spans(datum.loss_fn_input_spans)
    return out


def _read_datum(obj: Any, where: str) -> t.Datum:
    inputs = _get(obj, "loss_fn_inputs", dict, where, {})
    return at(
        where,
        t.Datum,
        read_model_input(_get(obj, "model_input", dict, where), f"{where}.model_input"),
        {key: read_tensor(value, f"{where}.loss_fn_inputs[{key!r}]") for key, value in inputs.items()},
        _read_spans(obj, "model_input_spans", where),
        _read_spans(obj, "loss_fn_input_spans", where),
    )


def write_pass(request: t.ForwardBackwardRequest) -> Json:
    """The body of /forward_backward, or of /forward if the pass computes no gradients."""
    work = request.forward_backward_input
    body: Json = {"data": [_write_datum(datum) for datum in work.data], "loss_fn": work.loss_fn}
    if work.loss_fn_config is not None:
        body["loss_fn_config"] = dict(work.loss_fn_config)
    name = "forward_input" if request.forward_only else "forward_backward_input"
    return {name: body, "model_id": request.model_id, "seq_id": request.seq_id}


def read_pass(obj: Any, *, forward_only: bool) -> t.ForwardBackwardRequest:
    name = "forward_input" if forward_only else "forward_backward_input"
    work = _get(obj, name, dict, "body")
    config: Json | None = _get(work, "loss_fn_config", dict, name, None)
    data: list[AnyJson] = _get(work, "data", list, name)
    check_count(f"{name}.data", len(data), MAX_PASS_DATUMS)
    for key, value in (config or {}).items():
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            raise InvalidInputError(
                f"{name}.loss_fn_config[{key!r}] must be a number or a string, got {value!r}"
            )
    return t.ForwardBackwardRequest(
        t.ForwardBackwardInput(
            [_read_datum(d, f"data[{i}]") for i, d in enumerate(data)],
            _get(work, "loss_fn", str, name),
            config or None,
        ),
        _get(obj, "model_id", str, "body"),
        _seq_id(obj, 2**31),
        forward_only,
    )


def _seq_id(obj: Any, limit: int) -> int:
    seq_id = _get(obj, "seq_id", int, "body", 0)
    if not 0 <= seq_id < limit:
        raise InvalidInputError(f"seq_id must be from 0 to {limit - 1}, got {seq_id}")
    return seq_id


# -- samples ---------------------------------------------------------------------------------------------


def write_sample_request(request: t.SampleRequest) -> Json:
    params: Json = request.sampling_params.__dict__.copy()
    out: Json = {**request.__dict__, "type": "sample", "sampling_params": params}
    out["prompt"] = write_model_input(request.prompt)
    if biases := request.sampling_params.logit_bias:
        params["logit_bias"] = {str(token): bias for token, bias in biases.items()}
    for name, absent in _OPTIONAL_PARAMS:
        if params[name] == absent:
            del params[name]
    for name in _OPTIONAL:
        if out[name] is None:
            del out[name]
    if request.target_prompt_logprobs is not None:
        out["target_prompt_logprobs"] = write_tensor(request.target_prompt_logprobs)
    return out


# Not sent at their defaults: optional fields, and those that other servers do not know.
_OPTIONAL_PARAMS = tuple(
    (f.name, f.default) for f in fields(t.SamplingParams) if f.name not in ("temperature", "top_k", "top_p")
)
_OPTIONAL = tuple(f.name for f in fields(t.SampleRequest) if f.default is None)
_SAMPLE_FIELDS: dict[str, type] = {  # optional: their defaults are SampleRequest's
    "num_samples": int, "sampling_session_id": str, "seq_id": int, "base_model": str, "model_path": str,
    "prompt_logprobs": bool, "topk_prompt_logprobs": int, "topk_sample_logprobs": int,
    "prompt_alt_tokens_k": int, "prompt_logprobs_last_n": int, "record_stability_info": bool,
}  # fmt: skip
_SCALARS = frozenset((int, float, bool, type(None)))
_PARAM_NAMES = frozenset(f.name for f in fields(t.SamplingParams))


def _read_params(given: Json) -> t.SamplingParams:
    # A program's samples mostly have the same numbers. What may be long (stops, a grammar) is not kept.
    if _SCALARS.issuperset(map(type, given.values())) and _PARAM_NAMES.issuperset(given):
        return _known_params(tuple(given), *given.values())
    return read_plain(t.SamplingParams, given, lenient=True)


@lru_cache(maxsize=256, typed=True)  # typed: True and 1.0 are no whole numbers
def _known_params(names: tuple[str, ...], *values: float | None) -> t.SamplingParams:
    return read_plain(t.SamplingParams, dict(zip(names, values, strict=True)), lenient=True)


def read_sample_request(obj: Any) -> t.SampleRequest:
    params = _get(obj, "sampling_params", dict, "body", {})
    fields: Json = {
        "prompt": read_model_input(_get(obj, "prompt", dict, "body"), "prompt"),
        "sampling_params": at("sampling_params", _read_params, params),
    }
    for name, value in obj.items():
        if (kind := _SAMPLE_FIELDS.get(name)) is not None and value is not None:
            fields[name] = value if type(value) is kind else _get(obj, name, kind, "body")
    if not 0 <= fields.get("seq_id", 0) < 2**63:
        _seq_id(obj, 2**63)  # refuses it
    if (target := _get(obj, "target_prompt_logprobs", dict, "body", None)) is not None:
        fields["target_prompt_logprobs"] = read_tensor(target, "target_prompt_logprobs")
    return assemble(t.SampleRequest, fields)


# -- results ---------------------------------------------------------------------------------------------


def write_output(value: t.ForwardBackwardOutput) -> Json:
    return {
        "loss_fn_output_type": value.loss_fn_output_type,
        "loss_fn_outputs": [
            {name: write_tensor(tensor) for name, tensor in record.items()}
            for record in value.loss_fn_outputs
        ],
        "metrics": {name: number for name, number in value.metrics.items() if math.isfinite(number)},
    }


def read_output(obj: Any) -> t.ForwardBackwardOutput:
    outputs: list[t.LossFnOutput] = []
    records: list[AnyJson] = _get(obj, "loss_fn_outputs", list, "body")
    for i, record in enumerate(records):
        if not isinstance(record, Mapping):
            raise InvalidInputError(f"loss_fn_outputs[{i}] must be an object, got {type(record).__name__}")
        outputs.append({k: _read_logprobs(v, f"loss_fn_outputs[{i}][{k!r}]") for k, v in record.items()})
    metrics = _get(obj, "metrics", dict, "body", {})
    numbers = {name: float(n) for name, n in metrics.items() if isinstance(n, int | float)}
    return t.ForwardBackwardOutput(_get(obj, "loss_fn_output_type", str, "body", ""), outputs, numbers)


def _read_logprobs(obj: AnyJson, where: str) -> t.TensorData:
    """A tensor in which null stands for NaN or an infinity."""
    data: AnyJson
    if isinstance(obj, Mapping) and isinstance(data := obj.get("data"), list) and None in data:
        obj = {**obj, "data": [math.nan if n is None else n for n in data]}
    return read_tensor(obj, where)


def _read_topk(rows: Sequence[Sequence[Any] | None] | None) -> t.TopkLogprobs | None:
    if rows is None:
        return None
    k = max((len(row) for row in rows if row), default=0)
    if not k:
        return None
    ids = np.zeros((len(rows), k), np.int32)
    logprobs = np.full((len(rows), k), TOPK_PADDING, np.float32)
    for i, row in enumerate(rows):
        for j, (token, logprob) in enumerate(row or ()):
            ids[i, j], logprobs[i, j] = token, math.nan if logprob is None else logprob
    return t.TopkLogprobs(ids, logprobs)


_STOP_FIELDS = ("stop_detail", "stop_match")  # our extension; other clients ignore them


def write_samples(value: t.SampleResponse) -> Json:
    sequences: list[Json] = []
    for sequence in value.sequences:
        item: Json = {
            "stop_reason": sequence.stop_reason,
            "tokens": [] if sequence.tokens_np is None else sequence.tokens_np,
            "logprobs": sequence.logprobs_np,
        }
        if sequence.topk_logprobs_np is not None:
            item["topk_logprobs"] = sequence.topk_logprobs_np.rows()
        item |= {key: said for key in _STOP_FIELDS if (said := getattr(sequence, key)) is not None}
        sequences.append(item)
    out: Json = {
        "type": "sample",
        "sequences": sequences,
        "prompt_logprobs": value.prompt_logprobs_np,
        "topk_prompt_logprobs": value.topk_prompt_logprobs,
        "prompt_cache_hit_tokens": value.prompt_cache_hit_tokens,
    }
    if value.target_prompt_logprobs is not None:
        out["target_prompt_logprobs"] = write_tensor(value.target_prompt_logprobs)
    if (alt := value.prompt_alt_tokens) is not None:
        out["prompt_alt_tokens"] = {name: write_tensor(tensor) for name, tensor in vars(alt).items()}
    return out


# Stop reasons of other servers, some of them more specific.
_STOP_REASONS: dict[str, t.StopReason] = {
    "stop": "stop", "length": "length", "max_tokens": "length", "stop_sequence": "stop", "eos": "stop",
}  # fmt: skip


def _read_floats(values: list[Any] | None) -> np.ndarray | None:
    return np.array([math.nan if v is None else v for v in values], np.float32) if values else None


def _read_sequence(obj: Any, where: str) -> t.SampledSequence:
    reason = _get(obj, "stop_reason", str, where)
    if reason not in _STOP_REASONS:
        raise InvalidInputError(f"{where}.stop_reason must be 'stop' or 'length', got {reason!r}")
    return t.SampledSequence(
        _STOP_REASONS[reason],
        tokens_np=at(f"{where}.tokens", t.EncodedTextChunk, _get(obj, "tokens", list, where)).tokens_np,
        logprobs_np=at(f"{where}.logprobs", _read_floats, _get(obj, "logprobs", list, where, None)),
        topk_logprobs_np=at(where, _read_topk, _get(obj, "topk_logprobs", list, where, None)),
        stop_detail=_get(obj, "stop_detail", str, where, None if reason in ("stop", "length") else reason),
        stop_match=_get(obj, "stop_match", (int, str), where, None),
    )


def read_samples(obj: Any) -> t.SampleResponse:
    target = _get(obj, "target_prompt_logprobs", dict, "body", None)
    topk = _get(obj, "topk_prompt_logprobs", list, "body", None)
    if (alt := _get(obj, "prompt_alt_tokens", dict, "body", None)) is not None:
        alt = t.PromptAltTokens(
            read_tensor(alt.get("tokens"), "prompt_alt_tokens.tokens"),
            _read_logprobs(alt.get("logprobs"), "prompt_alt_tokens.logprobs"),
        )
    return t.SampleResponse(
        [_read_sequence(s, f"sequences[{i}]") for i, s in enumerate(_get(obj, "sequences", list, "body"))],
        at("prompt_logprobs", _read_floats, _get(obj, "prompt_logprobs", list, "body", None)),
        at("topk_prompt_logprobs", _read_topk, topk),
        None if target is None else _read_logprobs(target, "target_prompt_logprobs"),
        _get(obj, "prompt_cache_hit_tokens", int, "body", 0),
        alt,
    )

"""The protobuf codec: forward_backward requests, their outputs, and samples.

Writing copies an array's bytes once; reading returns views of the parsed message. Bad input raises
InvalidInputError that names the field. Knows neither HTTP nor compression.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError

from tinkex import types as t
from tinkex.errors import InvalidInputError
from tinkex.strict import at, check_count
from tinkex.wire.json_codec import MAX_CHUNKS, MAX_PASS_DATUMS
from tinkex.wire.plain_datum import DTYPES as _DTYPES
from tinkex.wire.plain_datum import F32 as _F32
from tinkex.wire.plain_datum import I32 as _I32
from tinkex.wire.plain_datum import I64 as _I64
from tinkex.wire.plain_datum import Pieces, field_head, pb, write_plain

MAX_DATUMS = 1 << 20  # in one output record, so that a forged count cannot allocate without limit
_WIRE_DTYPES = {pb.DTYPE_FLOAT32: _F32, pb.DTYPE_INT64: _I64}
_ENDS: dict[int, t.StopReason] = {pb.STOP_REASON_STOP: "stop", pb.STOP_REASON_LENGTH: "length"}


def _parse(kind: Any, body: bytes) -> Any:
    try:
        return kind.FromString(body)
    except DecodeError as error:
        raise InvalidInputError(f"not a protobuf {kind.__name__}: {error}") from None


def _array(data: bytes, dtype: np.dtype, where: str) -> np.ndarray:
    if len(data) % dtype.itemsize:
        raise InvalidInputError(f"{where}: {len(data)} bytes are not a whole number of {dtype.name}s")
    return np.frombuffer(data, dtype)


def _typed_array(data: bytes, dtype: int, where: str) -> np.ndarray:
    """An array of a declared dtype, as float32 or int64."""
    if dtype == pb.DTYPE_FLOAT32:
        return _array(data, _F32, where)
    if dtype == pb.DTYPE_INT64:
        return _array(data, _I64, where)
    if dtype == pb.DTYPE_INT32:
        return _array(data, _I32, where).astype(np.int64)
    if dtype == pb.DTYPE_BFLOAT16:  # the upper half of a float32
        return (_array(data, np.dtype("<u2"), where).astype(np.uint32) << 16).view(np.float32)
    raise InvalidInputError(f"{where}: unknown dtype {dtype}")


# -- writing a pass --------------------------------------------------------------------------------------


def _write_any_datum(datum: t.Datum) -> Pieces:
    message = pb.Datum()
    for chunk in datum.model_input.chunks:
        if isinstance(chunk, t.EncodedTextChunk):
            part = {"encoded_text": pb.EncodedTextChunk(tokens=_packed(chunk.tokens_np, _I32))}
        elif isinstance(chunk, t.ImageChunk):
            length = chunk.expected_tokens
            part = {"image": pb.ImageChunk(data=chunk.data, format=chunk.format, expected_tokens=length)}
        elif isinstance(chunk, t.DmelChunk):
            part = {"dmel": pb.DmelChunk(dmel=chunk.dmel)}
        else:
            raise InvalidInputError(
                f"{type(chunk).__name__} can be sampled from but not trained on; send the image itself"
            )
        message.model_input.add(**part)
    for key, tensor in datum.loss_fn_inputs.items():
        message.loss_fn_inputs[key].CopyFrom(_write_tensor(tensor))
    for spans, given in (
        (message.model_input_spans, datum.model_input_spans),
        (message.loss_fn_input_spans, datum.loss_fn_input_spans),
    ):
        for span in given or ():
            kind = "prompt_tokens" if isinstance(span, t.PromptProvenanceSpan) else "sampled_tokens"
            spans.add(**{kind: vars(span)})
    body = message.SerializeToString()
    return [field_head(3, len(body)), body]


def _packed(array: Any, dtype: np.dtype) -> bytes:
    return array.astype(dtype, copy=False).tobytes()


def _write_tensor(tensor: t.TensorData) -> Any:
    values = _packed(tensor.values_np, _F32 if tensor.dtype == "float32" else _I64)
    message = pb.Tensor(dtype=_DTYPES[tensor.dtype], shape=tensor.shape)
    if tensor.is_sparse:
        message.sparse_csr.values = values
        message.sparse_csr.crow_indices = _packed(tensor.sparse_crow_np, _I64)
        message.sparse_csr.col_indices = _packed(tensor.sparse_col_np, _I64)
    else:
        message.dense = values  # even if empty: its presence marks the tensor as dense
    return message


def write_pass(request: t.ForwardBackwardRequest) -> Pieces:
    """The request as pieces to join: small bytes and views of the arrays."""
    work = request.forward_backward_input
    if not 0 <= request.seq_id < 2**31:
        raise InvalidInputError(f"seq_id must be from 0 to {2**31 - 1}, got {request.seq_id}")
    head = pb.ForwardBackwardRequest(model_id=request.model_id, seq_id=request.seq_id)
    pieces: Pieces = [head.SerializeToString()]
    for i, datum in enumerate(work.data):
        try:
            pieces += write_plain(datum) or _write_any_datum(datum)
        except ValueError as error:
            raise InvalidInputError(f"data[{i}]: {error}") from None
    tail = pb.ForwardBackwardRequest(loss_fn=work.loss_fn, forward_only=request.forward_only)
    for key, value in (work.loss_fn_config or {}).items():
        if isinstance(value, str):
            tail.loss_fn_config_v2[key].text = value
        else:  # numbers go in both maps: older servers read only the first
            tail.loss_fn_config[key] = tail.loss_fn_config_v2[key].number = float(value)
    return [*pieces, tail.SerializeToString()]


# -- reading a pass --------------------------------------------------------------------------------------


def _read_tensor(tensor: Any, where: str) -> t.TensorData:
    shape = list(tensor.shape) or None
    if tensor.WhichOneof("encoding") == "sparse_csr":
        csr = tensor.sparse_csr
        values = _typed_array(csr.values, tensor.dtype, where)
        crow, col = _array(csr.crow_indices, _I64, where), _array(csr.col_indices, _I64, where)
        return at(where, t.TensorData, values, None, shape, crow, col)
    return at(where, t.TensorData, _typed_array(tensor.dense, tensor.dtype, where), None, shape)


def _read_chunk(chunk: Any, where: str) -> t.ModelInputChunk:
    kind = chunk.WhichOneof("chunk")
    if kind == "encoded_text":
        return at(where, t.EncodedTextChunk, _array(chunk.encoded_text.tokens, _I32, where))
    if kind == "image":
        image = chunk.image
        length = image.expected_tokens if image.HasField("expected_tokens") else None
        return at(where, t.ImageChunk, image.data, image.format, length)
    if kind == "dmel":
        return t.DmelChunk(chunk.dmel.dmel)
    raise InvalidInputError(f"{where} holds nothing that this version understands")


def _read_spans(spans: Any, where: str) -> t.ProvenanceSpans:
    out: t.ProvenanceSpans = []
    for i, span in enumerate(spans):
        kind = span.WhichOneof("span")
        if kind is None:
            raise InvalidInputError(f"{where}[{i}] holds nothing that this version understands")
        held = getattr(span, kind)
        cls = t.PromptProvenanceSpan if kind == "prompt_tokens" else t.SampledProvenanceSpan
        out.append(at(f"{where}[{i}]", cls, held.sequence_id, held.offset, length=held.length))
    return out


def _read_plain(datum: Any) -> t.Datum | None:
    """A datum of one text and dense tensors, as most are, in a third of the time.

    None if it is another, or anything of it is wrong: `_read_datum` reads all, and names the field.
    """
    if datum.model_input_spans or datum.loss_fn_input_spans or len(datum.model_input) != 1:
        return None
    chunk = datum.model_input[0]
    text = chunk.encoded_text.tokens if chunk.WhichOneof("chunk") == "encoded_text" else b""
    if not text or len(text) % 4:
        return None
    tokens, inputs = np.frombuffer(text, _I32), dict[str, t.TensorData]()
    if tokens[tokens.argmin()] < 0:
        return None
    for key, tensor in datum.loss_fn_inputs.items():
        dtype, dense = _WIRE_DTYPES.get(tensor.dtype), tensor.dense
        if dtype is None or not dense or len(dense) % dtype.itemsize:
            return None
        try:
            inputs[key] = t.TensorData.of_bytes(np.frombuffer(dense, dtype), list(tensor.shape))
        except InvalidInputError:
            return None
    return t.Datum(t.ModelInput([t.EncodedTextChunk.of_bytes(tokens)]), inputs)


def _read_datum(datum: Any, where: str) -> t.Datum:
    check_count(f"{where}.model_input", len(datum.model_input), MAX_CHUNKS)
    chunks = [_read_chunk(c, f"{where}.model_input[{j}]") for j, c in enumerate(datum.model_input)]
    inputs = {k: _read_tensor(v, f"{where}.loss_fn_inputs[{k!r}]") for k, v in datum.loss_fn_inputs.items()}
    if not datum.model_input_spans and not datum.loss_fn_input_spans:
        return t.Datum(t.ModelInput(chunks), inputs)
    return t.Datum(
        t.ModelInput(chunks),
        inputs,
        _read_spans(datum.model_input_spans, f"{where}.model_input_spans"),
        _read_spans(datum.loss_fn_input_spans, f"{where}.loss_fn_input_spans"),
    )


def read_pass(body: bytes) -> t.ForwardBackwardRequest:
    message = _parse(pb.ForwardBackwardRequest, body)
    config: dict[str, float | str] = dict(message.loss_fn_config)
    for key, value in message.loss_fn_config_v2.items():
        kind = value.WhichOneof("value")
        if kind is None:
            raise InvalidInputError(f"loss_fn_config[{key!r}] holds neither a number nor a text")
        config[key] = getattr(value, kind)
    if message.seq_id < 0:
        raise InvalidInputError(f"seq_id must not be negative, got {message.seq_id}")
    check_count("data", len(message.data), MAX_PASS_DATUMS)
    data = [_read_plain(datum) or _read_datum(datum, f"data[{i}]") for i, datum in enumerate(message.data)]
    work = t.ForwardBackwardInput(data, message.loss_fn, config or None)
    return t.ForwardBackwardRequest(work, message.model_id, message.seq_id, message.forward_only)


def read_turn(body: bytes) -> tuple[str, int] | None:
    """The run and seq id of a pass; its content is not decoded."""
    message = _parse(pb.ForwardBackwardRequest, body)
    return (message.model_id, message.seq_id) if message.model_id and message.seq_id >= 0 else None


# -- a pass's outputs ------------------------------------------------------------------------------------


def _layout(record: t.LossFnOutput) -> tuple[tuple[str, str, tuple[int, ...]], ...]:
    """What datums of one record share: names, dtypes, and the dimensions after the first."""
    return tuple((name, tensor.dtype, tensor.dense_shape[1:]) for name, tensor in sorted(record.items()))


def write_output(value: t.ForwardBackwardOutput) -> bytes:
    message = pb.ForwardBackwardOutput(loss_fn_output_type=value.loss_fn_output_type, metrics=value.metrics)
    for layout, group in itertools.groupby(value.loss_fn_outputs, _layout):
        outputs = list(group)
        record = message.loss_fn_outputs.add(type_tag=value.loss_fn_output_type, num_datums=len(outputs))
        for name, dtype, trailing in layout:
            arrays = [output[name].to_numpy().reshape(-1) for output in outputs]
            field = record.fields[name]
            field.data = np.concatenate(arrays).tobytes()
            field.offsets = np.cumsum([0, *(a.nbytes for a in arrays)], dtype=_I64).tobytes()
            field.dtype = _DTYPES[dtype]
            field.trailing_shape.extend(trailing)
    return message.SerializeToString(deterministic=True)  # equal values give equal bytes


def _read_field(field: Any, where: str) -> list[t.TensorData]:
    """Split one output field into its datums."""
    offsets = _array(field.offsets, _I64, where)
    size = {pb.DTYPE_BFLOAT16: 2, pb.DTYPE_INT64: 8}.get(field.dtype, 4)
    flat = _typed_array(field.data, field.dtype, where)
    bounds, rest = np.divmod(offsets, size)
    rising = bounds.size and bounds[0] >= 0 and (np.diff(bounds) >= 0).all() and bounds[-1] <= flat.size
    if not rising or rest.any():
        raise InvalidInputError(f"{where}: its offsets do not split {len(field.data)} bytes")
    trailing = list(field.trailing_shape)
    row = math.prod(trailing)
    if any(n < 0 for n in trailing) or (np.diff(bounds) % max(row, 1)).any():
        raise InvalidInputError(f"{where}: trailing_shape {trailing} does not fit its values")
    flat.flags.writeable = False
    return t.TensorData.split(flat, bounds.tolist(), trailing)


def read_output(body: bytes) -> t.ForwardBackwardOutput:
    message = _parse(pb.ForwardBackwardOutput, body)
    outputs: list[t.LossFnOutput] = []
    for i, record in enumerate(message.loss_fn_outputs):
        where = f"loss_fn_outputs[{i}]"
        fields = {name: _read_field(f, f"{where}[{name!r}]") for name, f in record.fields.items()}
        count = record.num_datums or max(map(len, fields.values()), default=0)
        if count > MAX_DATUMS or any(len(tensors) != count for tensors in fields.values()):
            raise InvalidInputError(f"{where}: says {count} datums, but its fields have another number")
        outputs += [{name: tensors[n] for name, tensors in fields.items()} for n in range(count)]
    kind = message.loss_fn_output_type.rpartition(":")[2] or "ArrayRecord"
    return t.ForwardBackwardOutput(kind, outputs, dict(message.metrics))


# -- samples ---------------------------------------------------------------------------------------------


def _write_topk(value: t.TopkLogprobs) -> Any:
    ids, logprobs = _packed(value.token_ids, _I32), _packed(value.logprobs, _F32)
    return pb.TopkLogprobs(token_ids=ids, logprobs=logprobs, k=value.k, length=value.length)


def write_samples(value: t.SampleResponse) -> bytes:
    message = pb.SampleResponse(prompt_cache_hit_tokens=value.prompt_cache_hit_tokens)
    for sequence in value.sequences:
        ended = pb.STOP_REASON_STOP if sequence.stop_reason == "stop" else pb.STOP_REASON_LENGTH
        out = message.sequences.add(stop_reason=ended)
        if sequence.tokens_np is not None:
            out.tokens = sequence.tokens_np.astype(_I32, copy=False).tobytes()
        if sequence.logprobs_np is not None:
            out.logprobs = sequence.logprobs_np.astype(_F32, copy=False).tobytes()
        if sequence.topk_logprobs_np is not None:
            out.topk_sampled_logprobs.CopyFrom(_write_topk(sequence.topk_logprobs_np))
        if sequence.stop_detail is not None:
            out.stop_detail = sequence.stop_detail
        if isinstance(sequence.stop_match, str):
            out.stop_string = sequence.stop_match
        elif sequence.stop_match is not None:
            out.stop_token = sequence.stop_match
    if value.prompt_logprobs_np is not None:
        message.prompt_logprobs = _packed(value.prompt_logprobs_np, _F32)
    if value.topk_prompt_logprobs_np is not None:
        message.topk_prompt_logprobs.CopyFrom(_write_topk(value.topk_prompt_logprobs_np))
    if value.target_prompt_logprobs is not None:
        message.target_prompt_logprobs.CopyFrom(_write_tensor(value.target_prompt_logprobs))
    if (alt := value.prompt_alt_tokens) is not None:
        message.prompt_alt_tokens.tokens.CopyFrom(_write_tensor(alt.tokens))
        message.prompt_alt_tokens.logprobs.CopyFrom(_write_tensor(alt.logprobs))
    return message.SerializeToString()


def _read_topk(message: Any, where: str) -> t.TopkLogprobs | None:
    cells = message.k * message.length
    if not cells:
        return None
    ids, logprobs = _array(message.token_ids, _I32, where), _array(message.logprobs, _F32, where)
    if min(ids.size, logprobs.size) < cells:
        raise InvalidInputError(f"{where}: fewer than {message.length} rows of {message.k}")
    shape = message.length, message.k
    return t.TopkLogprobs(ids[:cells].reshape(shape), logprobs[:cells].reshape(shape))


def _floats(data: bytes, where: str) -> np.ndarray | None:
    return _array(data, _F32, where) if data else None


def _read_sequence(sequence: Any, where: str) -> t.SampledSequence:
    reason = _ENDS.get(sequence.stop_reason)
    if reason is None:
        raise InvalidInputError(f"{where}: unknown stop_reason {sequence.stop_reason}")
    topk = None
    if sequence.HasField("topk_sampled_logprobs"):
        topk = _read_topk(sequence.topk_sampled_logprobs, f"{where}.topk_sampled_logprobs")
    at_token = sequence.HasField("stop_token")
    return t.SampledSequence(
        reason,
        tokens_np=_array(sequence.tokens, _I32, f"{where}.tokens"),
        logprobs_np=_floats(sequence.logprobs, f"{where}.logprobs"),
        topk_logprobs_np=topk,
        stop_detail=sequence.stop_detail or None,
        stop_match=sequence.stop_token if at_token else sequence.stop_string or None,
    )


def read_samples(body: bytes) -> t.SampleResponse:
    message = _parse(pb.SampleResponse, body)
    target, alt = None, None
    if message.HasField("target_prompt_logprobs"):
        target = _read_tensor(message.target_prompt_logprobs, "target_prompt_logprobs")
    if message.HasField("prompt_alt_tokens"):
        alt = t.PromptAltTokens(
            _read_tensor(message.prompt_alt_tokens.tokens, "prompt_alt_tokens.tokens"),
            _read_tensor(message.prompt_alt_tokens.logprobs, "prompt_alt_tokens.logprobs"),
        )
    return t.SampleResponse(
        [_read_sequence(sequence, f"sequences[{i}]") for i, sequence in enumerate(message.sequences)],
        _floats(message.prompt_logprobs, "prompt_logprobs"),
        _read_topk(message.topk_prompt_logprobs, "topk_prompt_logprobs"),
        target,
        message.prompt_cache_hit_tokens,
        alt,
    )

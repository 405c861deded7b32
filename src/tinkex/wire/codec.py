"""The wire codec: requests, replies and results to bytes and back, for both ends of a connection.

A writer writes every default; a reader accepts its absence and takes null as "not given". Passes and samples
are protobuf for peers that accept it and JSON for others. Bad input raises InvalidInputError, which names the
field, and nothing else. Knows neither sockets nor an HTTP library. Header names are in lower case.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from email.utils import parsedate_to_datetime
from functools import partial
from http import HTTPStatus
from types import NoneType
from typing import Any, TypeVar
from urllib.parse import quote, urlencode

import numpy as np
import orjson
from pydantic import ValidationError

from tinkex import types as t
from tinkex.errors import InvalidInputError, RequestErrorCategory
from tinkex.types.base import WIRE, AnyJson, WireModel, explain
from tinkex.types.checkpoints import CopyWeightsRequest, UploadWeightsRequest
from tinkex.types.sampling import SampleRequest
from tinkex.types.training import ForwardBackwardRequest
from tinkex.wire import json_codec, large_json, ops, proto_codec
from tinkex.wire.ops import Op

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

JSON = "application/json"
_RAW = "application/octet-stream"
PROTO = "application/x-protobuf"
MAX_BODY = 256 * 1024 * 1024  # of a request, in bytes after decompression
_ACCESS_TOKEN = "x-tinker-weights-access-token"  # a header, to keep the secret out of logged bodies

Headers = Mapping[str, str]
_with_arrays = partial(large_json.loads, arrays=True)
T = TypeVar("T")


@dataclass(frozen=True)
class Encoded:
    """A request ready to send. `query` has no question mark."""

    path: str
    query: str = ""
    headers: dict[str, str] = field(default_factory=dict[str, str])
    content: bytes | list[bytes | memoryview] | None = None  # pieces: views of arrays, not copied

    @property
    def body(self) -> bytes | None:
        return b"".join(self.content) if isinstance(self.content, list) else self.content


# -- requests: the client writes -------------------------------------------------------------------------


def request_size(request: Any, enough: int = sys.maxsize) -> int:
    """Estimate the encoded size of `request` in bytes; counting stops at `enough`."""
    if isinstance(request, SampleRequest):
        return sum(map(_written_size, request.prompt.chunks))
    size = 0
    for datum in request.forward_backward_input.data if isinstance(request, ForwardBackwardRequest) else ():
        size += datum.nbytes
        if size >= enough:
            break
    return size


def _written_size(chunk: Any) -> int:
    """The estimated size of a chunk in a JSON body."""
    if isinstance(chunk, t.EncodedTextChunk):
        return chunk.tokens_np.size * 7  # digits and a comma
    return len(getattr(chunk, "data", b"") or getattr(chunk, "dmel", b"")) * 4 // 3  # base64


def encode_request(op: Op[Any, Any], request: Any, *, proto: bool = True, compress: bool = False) -> Encoded:
    """Encode `request` for `op`. `proto=False` is for servers that accept only JSON."""
    try:
        if isinstance(request, ForwardBackwardRequest):
            encoded = _encode_pass(op, request, proto=proto)
        elif isinstance(request, SampleRequest):
            encoded = Encoded(op.path, "", _headers(JSON), _dump(json_codec.write_sample_request(request)))
        else:
            encoded = _encode_model(op, request)
    except (AttributeError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise _refusal(op, error) from None
    if compress and encoded.content:
        headers = {**encoded.headers, "content-encoding": "zstd"}
        return replace(encoded, headers=headers, content=zstd.compress(encoded.body or b""))
    return encoded


def _headers(content_type: str) -> dict[str, str]:
    return {"accept": JSON, "content-type": content_type}


def _dump(value: Any) -> bytes:
    body = orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)
    # orjson's result keeps its 4 kB buffer. Copy small bodies, since thousands of polls may be in flight.
    return bytes(memoryview(body)) if len(body) < 1024 else body


def _encode_pass(op: Op[Any, Any], request: ForwardBackwardRequest, *, proto: bool) -> Encoded:
    if proto and op is not ops.FORWARD:
        return Encoded(op.path, "", _headers(PROTO), proto_codec.write_pass(request))
    op = ops.FORWARD if request.forward_only else ops.FORWARD_BACKWARD
    return Encoded(op.path, "", _headers(JSON), _dump(json_codec.write_pass(request)))


def _encode_model(op: Op[Any, Any], request: WireModel) -> Encoded:
    fields = request.to_wire() if not isinstance(request, UploadWeightsRequest) else _without_data(request)
    headers = _headers(JSON)
    if isinstance(request, CopyWeightsRequest) and (token := fields.pop("weights_access_token", None)):
        headers[_ACCESS_TOKEN] = token
    path = op.path
    for name, has_slashes in op.placeholders.items():
        value = str(fields.pop(name))
        if not value or value in (".", ".."):
            raise InvalidInputError(f"{name} must not be {value!r}")
        placeholder = f"{{{name}:path}}" if has_slashes else f"{{{name}}}"
        path = path.replace(placeholder, quote(value, safe="/:" if has_slashes else ":"))
    if op.method in ("GET", "DELETE"):
        return Encoded(path, urlencode(fields), {"accept": JSON})
    if isinstance(request, UploadWeightsRequest):
        return Encoded(path, urlencode(fields), _headers(_RAW), request.data)
    if op.placeholders and not fields:  # everything is in the path
        return Encoded(path, "", {"accept": JSON})
    return Encoded(path, "", headers, _dump(fields))


def _without_data(request: UploadWeightsRequest) -> dict[str, Any]:
    return {"upload_id": request.upload_id, "file": request.file, "offset": request.offset}


# -- requests: the server reads --------------------------------------------------------------------------


def decode_request(
    op: Op[Any, Any],
    path_params: Mapping[str, Any] | None = None,
    query: Mapping[str, str] | None = None,
    headers: Headers | None = None,
    body: bytes = b"",
    max_body: int = MAX_BODY,
) -> Any:
    """Decode a request to `op` from a client of any version."""
    headers = headers or {}
    try:
        if (encoding := headers.get("content-encoding")) is not None:
            body = unpack(body, encoding, max_body)
        if op.request is ForwardBackwardRequest and PROTO in headers.get("content-type", ""):
            return proto_codec.read_pass(body)
        if op.request is UploadWeightsRequest:
            fields = {**(query or {}), **(path_params or {}), "data": bytes(body)}
            return UploadWeightsRequest.model_validate(fields, context=WIRE)
        has_tensors = op.request in (ForwardBackwardRequest, SampleRequest)
        fields = load_object(body or b"{}", _with_arrays if has_tensors else large_json.loads)
        if query or path_params:
            fields = {**(query or {}), **fields, **(path_params or {})}
        if op.request is ForwardBackwardRequest:
            return json_codec.read_pass(fields, forward_only=op is ops.FORWARD)
        if op.request is SampleRequest:
            return json_codec.read_sample_request(fields)
        if op.request is CopyWeightsRequest and _ACCESS_TOKEN in headers:
            fields["weights_access_token"] = headers[_ACCESS_TOKEN]
        return op.request.model_validate(fields, context=WIRE)  # type: ignore[union-attr]
    except (TypeError, ValueError, OverflowError, RecursionError, MemoryError) as error:
        raise _refusal(op, error) from None


def peek_turn(
    op: Op[Any, Any], *, headers: Headers, body: bytes, max_body: int = MAX_BODY
) -> tuple[str, int] | None:
    """The run and seq id of a request that `decode_request` refused, if they can be read."""
    try:
        body = unpack(body, headers.get("content-encoding", ""), max_body)
        if op.request is ForwardBackwardRequest and PROTO in headers.get("content-type", ""):
            return proto_codec.read_turn(body)
        fields = load_object(body, _with_arrays)
    except (ValueError, MemoryError):
        return None
    run, seq_id = fields.get("model_id"), fields.get("seq_id")
    return (run, seq_id) if type(run) is str and type(seq_id) is int and 0 <= seq_id < 2**63 else None


def _refusal(op: Op[Any, Any], error: BaseException) -> InvalidInputError:
    if isinstance(error, ValidationError):
        return InvalidInputError(explain(error, op.request.__name__))
    return InvalidInputError(f"{op.name}: {error}")


def load_object(body: bytes | str, loads: Callable[[Any], AnyJson] = orjson.loads) -> dict[str, Any]:
    """Parse a JSON object."""
    try:
        value = loads(body)
    except orjson.JSONDecodeError as error:
        raise InvalidInputError(f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise InvalidInputError(f"a JSON object was expected, got {type(value).__name__}")
    return value


def unpack(body: bytes, encoding: str, limit: int) -> bytes:
    """Decompress `body`; refuse it, without decompressing the rest, once it exceeds `limit` bytes."""
    if encoding in ("", "identity"):
        return body
    if encoding not in ("zstd", "gzip"):
        raise InvalidInputError(f"content-encoding must be zstd, gzip or none, got {encoding!r}")
    gzip = encoding == "gzip"
    unpacker = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16) if gzip else zstd.ZstdDecompressor()
    try:
        out = unpacker.decompress(body, limit + 1)
    except (zstd.ZstdError, zlib.error) as error:
        raise InvalidInputError(f"not a {encoding} body: {error}") from None
    if len(out) > limit:
        raise InvalidInputError(f"the body unpacks to more than {limit} bytes")
    if not unpacker.eof or unpacker.unused_data:
        raise InvalidInputError(f"a {encoding} body must be one whole frame")
    return out


# -- replies and results: the server writes --------------------------------------------------------------


def encode_reply(value: WireModel | bytes | None) -> tuple[str, bytes]:
    """Content type and body of a reply; None has neither."""
    if isinstance(value, bytes):
        return _RAW, value
    return ("", b"") if value is None else (JSON, _dump(value.to_wire()))


def encode_result(value: Any, accept: str = JSON) -> tuple[str, bytes]:
    """Content type and body of a future's result, for a client that accepts `accept`."""
    proto = PROTO in accept
    if isinstance(value, t.ForwardBackwardOutput):
        if proto:
            return PROTO, proto_codec.write_output(value)
        return JSON, _dump(json_codec.write_output(value))
    if isinstance(value, t.SampleResponse):
        if proto:
            return PROTO, proto_codec.write_samples(value)
        return JSON, _dump(json_codec.write_samples(value))
    if isinstance(value, t.PendingFuture):
        return JSON, _dump({"type": "try_again", **{k: v for k, v in vars(value).items() if v is not None}})
    if isinstance(value, t.MetadataOnly):
        return JSON, _dump({"status": "complete_metadata", "response_payload_size": value.size})
    return encode_reply(value)


# -- replies and results: the client reads ---------------------------------------------------------------


def decode_reply(op: Op[Any, T], status: int, headers: Headers, body: bytes) -> T:
    """Decode the reply to `op`."""
    if op.reply is NoneType:
        return None  # type: ignore[return-value]
    if op.reply is bytes:
        return bytes(body)  # type: ignore[return-value]
    redirected = op is ops.GET_CHECKPOINT_ARCHIVE_URL and 300 <= status < 400
    reply: Any = _read_redirect(headers) if redirected else _read_model(op.reply, load_object(body))
    if op in _LINKS:
        _check_links(reply)
    return reply


def decode_result(
    op: Op[Any, Any], status: int, headers: Headers, body: bytes
) -> t.PendingFuture | t.MetadataOnly | t.RequestFailedResponse | Any:
    """Decode what a retrieval of `op`'s future returned: its result, its failure, or that it is pending."""
    if status == 408:
        return read_pending(body)
    in_json, in_proto = _READERS.get(op.result, (None, None))
    if PROTO in headers.get("content-type", ""):
        if in_proto is None:
            raise InvalidInputError(f"{op.name} is answered in JSON, got protobuf")
        return _guarded(in_proto, body)
    fields = load_object(body)
    if fields.get("type") == "try_again":
        return read_pending(body)
    if fields.get("status") == "complete_metadata":
        size = fields.get("response_payload_size")
        return t.MetadataOnly(size if isinstance(size, int) else 0)
    if "error" in fields:
        return _read_failure(fields)
    assert op.result is not None, f"{op.name} has no future"
    return _guarded(in_json, fields) if in_json else _read_model(op.result, fields)


# Replies that name URLs to download from.
_LINKS = (ops.GET_CHECKPOINT_ARCHIVE_URL, ops.GET_EXTERNAL_WEIGHTS_URLS, ops.EXPORT_SESSION_TRACE)


def _check_links(
    reply: t.CheckpointArchiveUrlResponse | t.ExternalWeightsUrlsResponse | t.SessionTraceExportResponse,
) -> None:
    """A server's links are http or https: a `file:` URL would name a file of the reader's machine."""
    urls = reply.urls.values() if isinstance(reply, t.ExternalWeightsUrlsResponse) else [reply.url]
    for url in urls:
        if url and not url.lower().startswith(("http://", "https://")):
            raise InvalidInputError(f"a link of a server must be an http or https URL, got {url!r:.80}")


# How results that hold arrays are read: from JSON, from protobuf.
_READERS: dict[Any, tuple[Callable[[Any], Any], Callable[[bytes], Any]]] = {
    t.ForwardBackwardOutput: (json_codec.read_output, proto_codec.read_output),
    t.SampleResponse: (json_codec.read_samples, proto_codec.read_samples),
}


def _guarded(read: Callable[[Any], T], value: Any) -> T:
    try:
        with np.errstate(over="ignore"):  # a logprob outside float32 becomes infinite
            return read(value)
    except (TypeError, ValueError, OverflowError, MemoryError) as error:
        raise InvalidInputError(str(error)) from None


def _read_model(kind: type[T], fields: dict[str, Any]) -> T:
    try:
        return kind.model_validate(fields)  # type: ignore[attr-defined]
    except ValidationError as error:
        raise InvalidInputError(explain(error, kind.__name__)) from None


def read_pending(body: bytes | str) -> t.PendingFuture:
    """A pending future. The body is optional."""
    try:
        fields = load_object(body)
    except InvalidInputError:
        return t.PendingFuture()
    request_id, state = fields.get("request_id") or "", fields.get("queue_state") or "active"
    reason = fields.get("queue_state_reason")
    return t.PendingFuture(str(request_id), str(state), None if reason is None else str(reason))


def _read_failure(fields: dict[str, Any]) -> t.RequestFailedResponse:
    error, said = fields["error"], fields.get("category") or "unknown"
    text = error if isinstance(error, str) else orjson.dumps(error).decode()
    category = RequestErrorCategory.parse(said)
    if category is RequestErrorCategory.Unknown and str(said).lower() != category:
        text = f"{text} (category {said!r:.80})"  # a newer server's category, kept for the reader
    return t.RequestFailedResponse(error=text, category=category)


def _read_redirect(headers: Headers) -> t.CheckpointArchiveUrlResponse:
    if not (url := headers.get("location")):
        raise InvalidInputError("a redirect without a location")
    expires: datetime | None = None
    with suppress(ValueError):
        expires = parsedate_to_datetime(headers.get("expires", ""))
    return t.CheckpointArchiveUrlResponse(url=url, expires=expires)


MAX_ERROR_TEXT = 2000


def decode_error(status: int, headers: Headers, body: bytes) -> tuple[str, AnyJson]:
    """The message of an error reply, and its JSON body if it has one.

    >>> decode_error(422, {}, b'{"detail": "rank must be positive"}')[0]
    'rank must be positive'
    """
    try:
        parsed: AnyJson = orjson.loads(body)
    except orjson.JSONDecodeError:
        parsed = None
    text = _message_of(parsed) or body.decode(errors="replace").strip()
    if not text:
        text = next((known.phrase for known in HTTPStatus if known == status), "no explanation")
    return text if len(text) <= MAX_ERROR_TEXT else text[:MAX_ERROR_TEXT] + "…", parsed


def _message_of(parsed: AnyJson) -> str:
    """The text under detail, message, error or msg; of a list of errors, each with its location."""
    if isinstance(parsed, str):
        return parsed
    if isinstance(parsed, list):
        return "; ".join(filter(None, map(_message_of, parsed)))
    if not isinstance(parsed, dict):
        return ""
    for key in ("detail", "message", "error", "msg"):
        if words := _message_of(parsed.get(key)):
            place: AnyJson = parsed.get("loc")
            return f"{'.'.join(map(str, place))}: {words}" if isinstance(place, list) else words
    return ""

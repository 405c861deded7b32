"""One operation as HTTP: its headers, the encoding of its request, the decoding of its response, its errors.

Promises: large bodies are encoded and decoded in a worker thread; medium ones on the event loop, one at a
time, with other work in between; a response that cannot be decoded is an APIResponseValidationError; no
credential that the server echoes is in a value or an error. A streamed sample arrives as server-sent events.
Decides nothing: transport and retries are http_transport.py's.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from tinkex import tracing
from tinkex._version import __version__
from tinkex.client.http1 import HttpResponse, HttpStream, RefusedResponseError
from tinkex.client.http_pools import LIBRARY_ERRORS
from tinkex.client.loop import off_loop
from tinkex.client.redaction import redacted, secrets_of
from tinkex.client.transport import AnyOp, CallContext
from tinkex.errors import (
    APIConnectionError,
    APIError,
    APIResponseValidationError,
    APITimeoutError,
    FailedRequest,
    FailedResponse,
    InvalidInputError,
    StreamBrokenError,
    status_error,
)
from tinkex.types.futures import RequestFailedResponse
from tinkex.types.sampling import SampleEvent
from tinkex.types.training import ForwardBackwardRequest
from tinkex.wire import codec, ops
from tinkex.wire.event_codec import read_event
from tinkex.wire.ops import Pool

# Above these sizes a body takes more than about a millisecond, and leaves the event loop.
# Protobuf bodies hold views of arrays instead of copies: their cost is in the number of datums.
BIG_JSON = 128 * 1024  # bytes
BIG_PROTO = 1024 * 1024  # bytes of a response
MANY_DATUMS = 128  # of a pass
MAX_EVENT = 1 << 28  # bytes of a server-sent event
MAX_STREAM = 1 << 30  # bytes of a stream of them: eight million tokens, one by one
BYTE_ORDER_MARK = b"\xef\xbb\xbf"

SAMPLES = (ops.SAMPLE, ops.STREAM_SAMPLE)


@dataclass(slots=True, eq=False)
class Call:
    """One call, and the state of its attempts."""

    op: AnyOp
    request: Any
    context: CallContext
    pool: Pool
    source: str
    idempotency_key: str = ""
    tries: int = 0  # failed attempts
    started: float | None = None  # start of its retry budget, by time.monotonic()
    error: APIError | None = None  # the last attempt's
    token: str = field(default="", repr=False)  # the last attempt's credential
    headers: dict[str, str] = field(default_factory=dict[str, str], repr=False)  # the last attempt's
    renewed: bool = False  # was it sent again with another token?

    def redacted(self, value: Any) -> Any:
        """Text of the server, without the credentials of the request."""
        return redacted(value, secrets_of(self.headers))


def source_of(request: Any) -> str:
    """The sampler or run that a request belongs to, for fair limits; "" if it belongs to none."""
    return getattr(request, "sampling_session_id", None) or getattr(request, "model_id", None) or ""


def headers_of(call: Call, encoded: codec.Encoded, given: dict[str, str]) -> dict[str, str]:
    """All headers of a request; `given` are those that every request of this client has."""
    headers = {"x-api-key": call.token, **given, **encoded.headers}
    if call.idempotency_key:
        headers["x-idempotency-key"] = call.idempotency_key
    if call.op is ops.STREAM_SAMPLE:
        headers["accept"] = "text/event-stream"
    if call.op in SAMPLES:
        headers["x-tinker-sampling-backpressure"] = "1"
    context = call.context
    if context.awaiting is not None:
        headers["x-tinker-request-type"] = context.awaiting.request_type
        headers["accept"] = "application/x-protobuf, application/json"
    if context.method:
        headers["x-sdk-version"], headers["x-sdk-method"] = __version__, context.method
    tracing.inject(headers)
    return headers


class Pace:
    """Lets the event loop do other work between two bodies that it encodes or decodes itself."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    async def turn(self) -> None:
        async with self._lock:
            await asyncio.sleep(0)


async def encode(call: Call, *, proto: bool, compress: bool, pace: Pace) -> codec.Encoded:
    """A request's path, query, headers and body. `proto` and `compress` apply to forward_backward only."""
    op, request = call.op, call.request
    compress = compress and op is ops.FORWARD_BACKWARD
    write = partial(codec.encode_request, op, request, proto=proto, compress=compress)
    if codec.request_size(request, BIG_JSON) < BIG_JSON:
        return write()
    views = proto and not compress and isinstance(request, ForwardBackwardRequest)
    if views and len(request.forward_backward_input.data) <= MANY_DATUMS:
        await pace.turn()
        return write()
    encoded = await off_loop(write)
    await pace.turn()
    return encoded


async def decode(call: Call, response: HttpResponse, base_url: str, pace: Pace) -> Any:
    status, headers, body, _ = response
    awaiting = call.context.awaiting
    reader, op = (codec.decode_reply, call.op) if awaiting is None else (codec.decode_result, awaiting)

    def read() -> Any:
        value = reader(op, status, headers, body if op.reply is bytes else call.redacted(body))
        if isinstance(value, RequestFailedResponse):  # its text may have been escaped
            return value.model_copy(update={"error": call.redacted(value.error)})
        return value

    try:
        if len(body) >= BIG_JSON:
            if len(body) >= BIG_PROTO or codec.PROTO not in headers.get("content-type", ""):
                return await off_loop(read)
            await pace.turn()
        return read()
    except InvalidInputError as error:
        raise _unreadable("the answer", error, response, call, base_url, body[:4096]) from None


# -- server-sent events ----------------------------------------------------------------------------------


class ServerSentEvent(NamedTuple):
    data: str
    event: str = "message"


class SSEDecoder:
    """An incremental decoder by the HTML standard: bytes in, events out. Ids and retry times are ignored.

    An event does not depend on how the bytes were cut, and is given with its last byte.

    >>> decoder = SSEDecoder()
    >>> decoder.feed(b"data: one\\n\\ndata: t")
    [ServerSentEvent(data='one', event='message')]
    >>> decoder.feed(b"wo\\r\\r")
    [ServerSentEvent(data='two', event='message')]
    """

    def __init__(self) -> None:
        self._line = bytearray()  # the unfinished line
        self._first = True  # has no line ended yet?
        self._after_cr = False  # an LF would belong to the line break before it
        self._data: list[str] = []
        self._size = 0
        self._event = ""

    def feed(self, data: bytes) -> list[ServerSentEvent]:
        if self._after_cr and data[:1] == b"\n":
            data = data[1:]
        elif not data:
            return []
        self._after_cr = data.endswith(b"\r")
        events: list[ServerSentEvent] = []
        for piece in bytes(data).splitlines(keepends=True):
            self._line += piece
            if len(self._line) + self._size > MAX_EVENT:
                raise InvalidInputError(f"an event of more than {MAX_EVENT} bytes")
            if piece.endswith((b"\r", b"\n")) and not self._end_line():
                if self._data:
                    events.append(ServerSentEvent("\n".join(self._data), self._event or "message"))
                self._data, self._size, self._event = [], 0, ""
        return events

    def _end_line(self) -> bool:
        """Read the line; False if it is empty, which ends an event."""
        raw = bytes(self._line).rstrip(b"\r\n")
        self._line.clear()
        if self._first:
            self._first, raw = False, raw.removeprefix(BYTE_ORDER_MARK)
        name, _, value = raw.decode(errors="replace").partition(":")  # a comment has no name
        value = value.removeprefix(" ")
        if name == "data":
            self._data.append(value)
            self._size += len(value) + 1
        elif name == "event":
            self._event = value
        return bool(raw)


async def read_events(streamed: HttpStream, call: Call, base_url: str) -> AsyncGenerator[SampleEvent, None]:
    """The events of the reply to `call`. The caller stops at the last one; running past it is an error."""
    url, decoder, size = base_url + call.op.path, SSEDecoder(), 0
    request = FailedRequest(call.op.method, url)
    try:
        if "text/event-stream" not in (kind := streamed.headers.get("content-type", "")):
            raise InvalidInputError(f"text/event-stream was expected, got {kind or 'nothing'}")
        piece: bytes | None = b""
        while piece is not None:
            piece = await anext(streamed.pieces, None)
            if (size := size + len(piece or b"")) > MAX_STREAM:
                raise InvalidInputError(f"a stream of more than {MAX_STREAM} bytes")
            for sent in decoder.feed(b"\n\n" if piece is None else piece):  # the end also ends an event
                if (event := read_event(sent.event, call.redacted(sent.data))) is not None:
                    yield event
    except (OSError, *LIBRARY_ERRORS) as cause:
        why = call.redacted(root_cause(cause))
        raise StreamBrokenError(request, f"{url} broke off: {why}") from None
    except InvalidInputError as error:
        raise _unreadable("an event", error, streamed, call, base_url, None) from None
    raise StreamBrokenError(request, f"{url} broke off: it ended without its result")


# -- errors ----------------------------------------------------------------------------------------------


def _unreadable(
    what: str,
    error: Exception,
    got: HttpResponse | HttpStream,
    call: Call,
    base_url: str,
    body: bytes | None,
) -> APIResponseValidationError:
    request = FailedRequest(call.op.method, base_url + call.op.path)
    message = f"{request.method} {request.url}: {what} cannot be read: {call.redacted(str(error))}"
    answer = FailedResponse(got.status, call.redacted(dict(got.headers.items())), "", request)
    return APIResponseValidationError(answer, call.redacted(body), message)


def refused_response(call: Call, url: str, cause: RefusedResponseError) -> APIResponseValidationError:
    """A response came that must not be read or followed."""
    response = FailedResponse(0, {}, "", FailedRequest(call.op.method, url))
    return APIResponseValidationError(response, None, f"{call.op.method} {url}: the server sent {cause}")


def connection_error(call: Call, url: str, cause: BaseException) -> APIConnectionError:
    """No response came."""
    method = call.op.method
    request = FailedRequest(method, url)
    if isinstance(cause, TimeoutError) and not isinstance(cause, ConnectionError):
        return APITimeoutError(request, f"no answer from {method} {url} in time")
    return APIConnectionError(request, f"no connection to {url}: {call.redacted(root_cause(cause))}")


def root_cause(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return str(error) or type(error).__name__


def response_error(call: Call, url: str, response: HttpResponse) -> APIError:
    """The server refused the call."""
    status, headers, body = response.status, dict(response.headers.items()), call.redacted(response.body)
    text, parsed = codec.decode_error(status, headers, body)
    request, shown = FailedRequest(call.op.method, url), body[:4096].decode(errors="replace")
    answer = FailedResponse(status, call.redacted(headers), shown, request)
    message = f"{status} from {call.op.method} {url}: {call.redacted(text)}"
    return status_error(message, answer, call.redacted(parsed))


def with_history(error: APIError, tries: int, elapsed: float, state: str = "") -> APIError:
    """The error, with how often and how long it was tried, and the state of the host's circuit."""
    tried = f"{tries} attempts in {elapsed:.1f} s" if tries > 1 else ""
    if history := "; ".join(filter(None, (tried, state))):
        error.message = f"{error.message} ({history})"
        error.args = (error.message,)
    return error

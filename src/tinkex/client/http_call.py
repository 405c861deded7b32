"""One operation as HTTP: its headers, the encoding of its request, the decoding of its response, its errors.

Promises: large bodies are encoded and decoded in a worker thread; medium ones on the event loop, one at a
time, with other work in between; a response that cannot be decoded is an APIResponseValidationError. Decides
nothing: transport and retries are http_transport.py's.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from tinkex import tracing
from tinkex._version import __version__
from tinkex.client.http1 import HttpResponse
from tinkex.client.loop import off_loop
from tinkex.client.transport import AnyOp, CallContext
from tinkex.errors import (
    APIConnectionError,
    APIError,
    APIResponseValidationError,
    APITimeoutError,
    FailedRequest,
    FailedResponse,
    InvalidInputError,
    status_error,
)
from tinkex.types.training import ForwardBackwardRequest
from tinkex.wire import codec, ops
from tinkex.wire.ops import Pool

# Above these sizes a body takes more than about a millisecond, and leaves the event loop.
# Protobuf bodies hold views of arrays instead of copies: their cost is in the number of datums.
BIG_JSON = 128 * 1024  # bytes
BIG_PROTO = 1024 * 1024  # bytes of a response
MANY_DATUMS = 128  # of a pass

SAMPLES = (ops.SAMPLE, ops.STREAM_SAMPLE)


@dataclass(slots=True, eq=False)
class Call:
    """One call, and the state of its attempts."""

    op: AnyOp
    request: Any
    context: CallContext
    pool: Pool
    idempotency_key: str
    owner: str
    tries: int = 0  # that failed
    started: float | None = None  # when its retry budget began, by time.monotonic()
    error: APIError | None = None  # of the last attempt
    token: str = field(default="", repr=False)  # the credential of the last attempt
    renewed: bool = False  # was it refused for its token, and sent again with another?


def owner_of(request: Any) -> str:
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
    """Lets the event loop run everything else between two bodies that it handles itself."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    async def turn(self) -> None:
        async with self._lock:
            await asyncio.sleep(0)


async def encode(op: AnyOp, request: Any, *, proto: bool, compress: bool, pace: Pace) -> codec.Encoded:
    """A request's path, query, headers and body. `proto` and `compress` concern forward_backward only."""
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
    """An operation's reply, or the result that was awaited."""
    status, headers, body = response.status, response.headers, response.body
    if (awaiting := call.context.awaiting) is not None:
        read = partial(codec.decode_result, awaiting, status, headers, body)
    else:
        read = partial(codec.decode_reply, call.op, status, headers, body)
    try:
        if len(body) < BIG_JSON:
            return read()
        if len(body) >= BIG_PROTO or codec.PROTO not in headers.get("content-type", ""):
            return await off_loop(read)
        await pace.turn()
        return read()
    except InvalidInputError as error:
        url = base_url + call.op.path
        message = f"{call.op.method} {url}: the answer cannot be read: {error}"
        refused = FailedResponse(status, headers, "", FailedRequest(call.op.method, url))
        raise APIResponseValidationError(refused, body[:4096], message) from error


# -- errors ----------------------------------------------------------------------------------------------


def connection_error(op: AnyOp, url: str, cause: BaseException) -> APIConnectionError:
    """No response came."""
    request = FailedRequest(op.method, url)
    if isinstance(cause, TimeoutError) and not isinstance(cause, ConnectionError):
        return APITimeoutError(request, f"no answer from {op.method} {url} in time")
    return APIConnectionError(request, f"no connection to {url}: {root_cause(cause)}")


def root_cause(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return str(error) or type(error).__name__


def response_error(op: AnyOp, url: str, response: HttpResponse) -> APIError:
    """The server refused the call."""
    status, headers, body = response.status, response.headers, response.body
    text, parsed = codec.decode_error(status, headers, body)
    shown = body[:4096].decode(errors="replace")
    answer = FailedResponse(status, dict(headers.items()), shown, FailedRequest(op.method, url))
    return status_error(f"{status} from {op.method} {url}: {text}", answer, parsed)


def with_history(error: APIError, tries: int, elapsed: float, state: str = "") -> APIError:
    """The error, with how often and how long it was tried, and the state of the host's circuit."""
    tried = f"{tries} attempts in {elapsed:.1f} s" if tries > 1 else ""
    if history := "; ".join(filter(None, (tried, state))):
        error.message = f"{error.message} ({history})"
        error.args = (error.message,)
    return error

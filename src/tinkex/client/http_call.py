"""One call, as HTTP says it: its headers, the bytes of its request, and what the bytes of its answer mean.

Promises: bodies that take long to build or to read are built and read off the event loop, and of those that
are not so quick either it handles one at a time, with a look at everything else in between; an answer that
cannot be read is an APIResponseValidationError. Decides nothing: when and how often a call is sent is
transport.py's, on which socket http_pools.py's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
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
    InvalidInputError,
    Request,
    Response,
    status_error,
)
from tinkex.types.training import ForwardBackwardRequest
from tinkex.wire import codec, ops
from tinkex.wire.ops import Pool

# From where on encoding or decoding leaves the loop, as it may take more than a millisecond. Arrays are not
# copied into or out of protobuf: there it is their number that counts.
BIG_BODY = 128 * 1024  # bytes of JSON
BIG_PROTO = 1024 * 1024  # bytes of an answer
MANY_DATUMS = 128  # of a pass

SAMPLES = (ops.SAMPLE, ops.STREAM_SAMPLE)


@dataclass(slots=True, eq=False)
class Call:
    """One call: what the caller said of it (see `CallContext`), and how it has gone so far."""

    op: AnyOp
    request: Any
    context: CallContext
    pool: Pool
    idempotency_key: str
    owner: str
    tries: int = 0  # that failed
    started: float | None = None  # since when its time is running, by time.monotonic()
    error: APIError | None = None  # of the last try
    token: str = field(default="", repr=False)  # what the last try was authorised with
    renewed: bool = False  # was it refused for its token, and sent again with another?


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
    """Big bodies that are handled on the event loop: one each time it has looked at everything else."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    async def turn(self) -> None:
        async with self._lock:
            await asyncio.sleep(0)


async def encode(op: AnyOp, request: Any, *, proto: bool, compress: bool, pace: Pace) -> codec.Encoded:
    """A request's path, query, headers and body, to be written at once. `proto`, `compress`: for passes."""
    compress = compress and op is ops.FORWARD_BACKWARD
    write = partial(codec.encode_request, op, request, proto=proto, compress=compress)
    if codec.request_size(request, BIG_BODY) < BIG_BODY:
        return write()
    views = proto and not compress and isinstance(request, ForwardBackwardRequest)
    if views and len(request.forward_backward_input.data) <= MANY_DATUMS:
        await pace.turn()
        return write()
    encoded = await off_loop(write)
    await pace.turn()
    return encoded


async def decode(call: Call, answer: HttpResponse, base_url: str, pace: Pace) -> Any:
    """What the server said: an operation's reply, or the result that was awaited."""
    if (awaiting := call.context.awaiting) is not None:
        read = partial(codec.decode_result, awaiting, answer.status, answer.headers, answer.body)
    else:
        read = partial(codec.decode_reply, call.op, answer.status, answer.headers, answer.body)
    big = BIG_PROTO if codec.PROTO in answer.headers.get("content-type", "") else BIG_BODY
    try:
        if len(answer.body) >= big:
            return await off_loop(read)
        if len(answer.body) >= BIG_BODY:
            await pace.turn()
        return read()
    except InvalidInputError as error:
        url = base_url + call.op.path
        response = Response(answer.status, answer.headers, "", Request(call.op.method, url))
        raise APIResponseValidationError(
            response, answer.body[:4096], f"{call.op.method} {url}: the answer cannot be read: {error}"
        ) from error


def owner_of(request: Any) -> str:
    """Whose request it is, for sharing limits: a sampler's, a run's, or nobody's in particular."""
    return getattr(request, "sampling_session_id", None) or getattr(request, "model_id", None) or ""


# -- errors ---------------------------------------------------------------------------------------------


def connection_error(op: AnyOp, url: str, cause: BaseException) -> APIConnectionError:
    """No answer came."""
    request = Request(op.method, url)
    if isinstance(cause, TimeoutError) and not isinstance(cause, ConnectionError):
        return APITimeoutError(request, f"no answer from {op.method} {url} in time")
    return APIConnectionError(request, f"no connection to {url}: {root_cause(cause)}")


def root_cause(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return str(error) or type(error).__name__


def answer_error(op: AnyOp, url: str, status: int, headers: Mapping[str, str], body: bytes) -> APIError:
    """An answer came that is a refusal."""
    text, parsed = codec.decode_error(status, headers, body)
    said = body[:4096].decode(errors="replace")
    response = Response(status, dict(headers.items()), said, Request(op.method, url))
    return status_error(f"{status} from {op.method} {url}: {text}", response, parsed)


def with_history(error: APIError, tries: int, elapsed: float, state: str = "") -> APIError:
    """The error, saying how often and how long it was tried, and what is known of the host."""
    tried = f"{tries} attempts in {elapsed:.1f} s" if tries > 1 else ""
    if history := "; ".join(filter(None, (tried, state))):
        error.message = f"{error.message} ({history})"
        error.args = (error.message,)
    return error

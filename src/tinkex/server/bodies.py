"""Request and response bodies: bounded reading, decoding, encoding and compression.

A body over the limit is refused as soon as its size is known, and is never decompressed past the limit. What
bodies take until they are decoded is bounded for each user and for the server.
Large bodies are decoded and encoded on threads of their own, so that neither the event loop nor the engine's
threads wait. A large result is encoded once for all clients that fetch it in the same form.
"""

from __future__ import annotations

import asyncio
import gzip
import sys
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import numpy as np
from starlette.datastructures import QueryParams
from starlette.types import Receive, Scope

from tinkex.errors import InvalidInputError
from tinkex.server.uvicorn_protocol import CONNECTION, SingleWriteProtocol
from tinkex.service.refusal import InUse, Refusal
from tinkex.types.checkpoints import UploadWeightsRequest
from tinkex.types.outputs import ForwardBackwardOutput, SampleResponse
from tinkex.types.reports import TelemetrySendRequest
from tinkex.types.sampling import SampleRequest
from tinkex.types.training import CreateCustomLossRequest, ForwardBackwardRequest
from tinkex.wire import codec
from tinkex.wire.ops import Op

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

BIG = 64 * 1024  # bytes from which a response is encoded on a thread, and is worth compressing
PARSED_HERE = 16 * 1024  # bytes up to which a body is parsed on the event loop, in 10 ms at worst
MAX_JSON = 32 * 1024 * 1024  # of any request: parsing it takes a second of a thread
MAX_SMALL_BODY = 512 * 1024  # of a request that is no pass, sample or uploaded loss
MAX_TELEMETRY = 4 * 1024 * 1024
MAX_PIECE = 16 * 1024 * 1024  # of an uploaded file
MAX_UNDECODED = 2 * 1024**3  # bytes of all bodies that are being received, or wait to be decoded
MAX_UNDECODED_PER_USER = 512 * 1024 * 1024
KEPT_BYTES = 64 * 1024 * 1024  # of large encoded results, cached for clients that fetch them again
REFUSED_PAUSE = 0.05  # seconds before a packed or large body is refused: a flood would keep a core busy
_THREADS = 2  # most of this work holds the GIL: more threads would only delay the event loop

_MOST_BYTES: dict[Any, int] = {  # of a request of this type; of all others MAX_SMALL_BODY
    ForwardBackwardRequest: MAX_JSON, SampleRequest: MAX_JSON, CreateCustomLossRequest: MAX_JSON,
    TelemetrySendRequest: MAX_TELEMETRY, UploadWeightsRequest: MAX_PIECE,
}  # fmt: skip

T = TypeVar("T")
Encoded = tuple[str, bytes]  # content type, body


class ClientDisconnected(Exception):
    """The client closed its connection before the response."""


class IncomingRequest:
    """An HTTP request as handlers read it. Starlette's own class costs more per request."""

    __slots__ = ("headers", "receive", "scope", "undecoded", "user")

    def __init__(self, scope: Scope, receive: Receive) -> None:
        self.scope, self.receive = scope, receive
        self.user: str | None = None  # once it is admitted
        self.undecoded = 0  # bytes of its body that are counted as in use
        # uvicorn gives header names in lower case.
        self.headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}

    @property
    def path_params(self) -> dict[str, Any]:
        return self.scope.get("path_params", {})

    @property
    def query(self) -> dict[str, str]:
        text = self.scope["query_string"]
        return dict(QueryParams(text)) if text else {}


async def unless_disconnected(receive: Receive, work: Awaitable[T]) -> T:
    """Await `work` for a client whose body was read; cancel it if the client disconnects first."""
    working, disconnect = asyncio.ensure_future(work), asyncio.create_task(_disconnect(receive))
    try:
        await asyncio.wait([working, disconnect], return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnected
        return working.result()
    finally:
        working.cancel()
        disconnect.cancel()
        await asyncio.gather(working, disconnect, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _free_of_frames(work: Callable[[], T]) -> T:
    """Run `work` such that its error does not keep its values: the event loop would have to free them."""
    try:
        return work()
    except InvalidInputError as error:
        message = str(error)
    raise InvalidInputError(message)


def _is_small(http: IncomingRequest, body: bytes) -> bool:
    return len(body) < PARSED_HERE and "content-encoding" not in http.headers  # unpacked, it may be large


def result_size(value: Any) -> int:
    """About how many bytes a result takes when encoded."""
    if isinstance(value, ForwardBackwardOutput):
        return sum(tensor.nbytes for output in value.loss_fn_outputs for tensor in output.values())
    if not isinstance(value, SampleResponse):
        return 0
    size = 0
    if value.prompt_logprobs_np is not None:
        size += 2 * value.prompt_logprobs_np.nbytes
    if value.topk_prompt_logprobs_np is not None:
        size += 2 * value.topk_prompt_logprobs_np.logprobs.nbytes
    for sequence in value.sequences:
        if sequence.tokens_np is not None:
            size += 8 * sequence.tokens_np.size
        if sequence.topk_logprobs_np is not None:
            size += 2 * sequence.topk_logprobs_np.logprobs.nbytes
    return size


class BodyCodec:
    """The encoding threads, and a cache of encoded results."""

    def __init__(
        self,
        *,
        limit: int = codec.MAX_BODY,
        undecoded: int = MAX_UNDECODED,
        undecoded_per_user: int = MAX_UNDECODED_PER_USER,
        compress: bool = True,
    ) -> None:
        self.limit = min(limit, undecoded, undecoded_per_user)
        self.undecoded = InUse("bytes of unfinished bodies", undecoded_per_user, undecoded)
        self.compress = compress
        self._threads = ThreadPoolExecutor(_THREADS, "bodies")
        self._results: OrderedDict[tuple[str, bool], asyncio.Future[Encoded]] = OrderedDict()
        self._kept = 0

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _off_loop(self, work: Callable[[], T]) -> asyncio.Future[T]:
        return asyncio.get_running_loop().run_in_executor(self._threads, work)

    def limit_of(self, op: Op[Any, Any], http: IncomingRequest) -> int:
        """The most bytes that a request to `op` may have, packed and unpacked."""
        if op.request is ForwardBackwardRequest and codec.PROTO in http.headers.get("content-type", ""):
            return self.limit
        return min(self.limit, _MOST_BYTES.get(op.request, MAX_SMALL_BODY))

    async def read(self, http: IncomingRequest, limit: int) -> bytes:
        """The whole body; 413 or 429 if its content-length, or what has arrived of it, is over a limit."""
        length, receive = http.headers.get("content-length", "0"), http.receive
        if not (length.isascii() and length.isdigit()):
            raise Refusal(400, f"content-length must be a number, got {length!r}")
        size = int(length)
        if size > limit:
            raise Refusal(413, f"the body has {length} bytes; at most {limit} are accepted")
        if size >= PARSED_HERE:
            self._take(http, size)
        connection: SingleWriteProtocol | None = http.scope.get(CONNECTION)
        if connection and (whole := connection.whole_body(http.scope)) is not None:
            return whole
        message = await receive()
        if message["type"] == "http.request" and not message.get("more_body"):
            return message.get("body", b"")
        # Memory that is not touched costs nothing, and a buffer that grows would be copied: 20 ms for 50 MB.
        body, size = np.empty(size or limit, np.uint8).data, 0
        while True:
            if message["type"] == "http.disconnect":
                raise ClientDisconnected
            part = message.get("body", b"")
            begun, size = size, size + len(part)
            if size > len(body):
                raise Refusal(
                    413, f"the body has more than {limit} bytes, which is the most that is accepted"
                )
            if size > http.undecoded:  # it came without its length
                self._take(http, size)
            body[begun:size] = part
            if not message.get("more_body"):
                return body[:size]  # type: ignore[return-value]  # decoders take any buffer
            message = await receive()

    def _take(self, http: IncomingRequest, size: int) -> None:
        assert http.user is not None, "bodies are read for users who were admitted"
        self.undecoded.take(http.user, size - http.undecoded)
        http.undecoded = size

    def forget(self, http: IncomingRequest) -> None:
        """The request's body is decoded, or never will be."""
        if http.undecoded and http.user is not None:
            self.undecoded.give_back(http.user, http.undecoded)
            http.undecoded = 0

    async def parse(self, http: IncomingRequest, body: bytes, work: Callable[[], T]) -> T:
        """What `work` makes of a body: on a thread, unless it is small."""
        if _is_small(http, body):
            return work()
        try:
            return await self._off_loop(lambda: _free_of_frames(work))
        except InvalidInputError:
            self.forget(http)
            await asyncio.sleep(REFUSED_PAUSE)
            raise
        finally:
            self.forget(http)

    async def decode(self, op: Op[Any, Any], http: IncomingRequest, body: bytes, limit: int) -> Any:
        parts = op, http.path_params, http.query, http.headers, body, limit
        if _is_small(http, body):  # as `parse` does, for less
            return codec.decode_request(*parts)
        return await self.parse(http, body, partial(codec.decode_request, *parts))

    async def encode_result(self, request_id: str, value: Any, accept: str) -> Encoded:
        if result_size(value) < BIG:
            return codec.encode_result(value, accept)
        key = (request_id, codec.PROTO in accept)
        encoding = self._results.get(key)
        if encoding is None:
            encoding = self._results[key] = self._off_loop(lambda: codec.encode_result(value, accept))
            encoding.add_done_callback(lambda done: self._cache(key, done))
        return await asyncio.shield(encoding)  # shared with other clients

    def _cache(self, key: tuple[str, bool], encoded: asyncio.Future[Encoded]) -> None:
        if encoded.cancelled() or encoded.exception() is not None:
            self._results.pop(key, None)
            return
        self._kept += len(encoded.result()[1])
        while self._kept > KEPT_BYTES:
            oldest = next((k for k, v in self._results.items() if v.done()), None)
            if oldest is None:
                return
            self._kept -= len(self._results.pop(oldest).result()[1])

    async def compressed(self, body: bytes, accept_encoding: str) -> tuple[str, bytes]:
        """The content encoding chosen for a large body, and the encoded body; ("", body) if there is none."""
        parts = [part.replace(" ", "").partition(";q=") for part in accept_encoding.lower().split(",")]
        offered = {name for name, _, weight in parts if self.compress and (not weight or weight.strip("0."))}
        if "zstd" in offered:
            return "zstd", await self._off_loop(lambda: zstd.compress(body, level=1))
        if "gzip" in offered:
            return "gzip", await self._off_loop(lambda: gzip.compress(body, compresslevel=1, mtime=0))
        return "", body

"""What a training request holds: its size, its fingerprint, and whether looking at all of it takes a thread.

Knows nothing of runs, queues or journals.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from typing import Any, TypeVar

from tinkex.service.runs.execution import LARGE_PASS, MANY_DATUMS, Unreadable, tokens_of
from tinkex.types.chunks import EncodedTextChunk
from tinkex.types.training import ForwardBackwardRequest

MANY_CHUNKS = 1024  # from which a pass is digested and journaled on a thread
T = TypeVar("T")


def is_small(request: Any) -> bool:
    """Can the event loop look at every datum of it?"""
    if not isinstance(request, ForwardBackwardRequest):
        return True
    data = request.forward_backward_input.data
    few = len(data) < MANY_DATUMS and sum(len(d.model_input.chunks) for d in data) < MANY_CHUNKS
    return few and tokens_of(request) < LARGE_PASS


async def off_loop(request: ForwardBackwardRequest, function: Callable[[Any], T]) -> T:
    """Call what looks at every datum of a pass: on a thread, unless they are few."""
    return function(request) if is_small(request) else await asyncio.to_thread(function, request)


def size_of(request: ForwardBackwardRequest) -> int:
    """The bytes of its arrays."""
    return sum(datum.nbytes for datum in request.forward_backward_input.data)


async def digest_of(request: Any) -> bytes:
    """A fingerprint of a request's content, except for what a client may change when it repeats one."""
    if isinstance(request, ForwardBackwardRequest):
        return await off_loop(request, _digest_pass)
    content = request
    if not isinstance(request, Unreadable):
        content = sorted(request.model_dump(exclude={"sampling_session_seq_id", "name", "tags"}).items())
    return hashlib.blake2b(repr(content).encode(), digest_size=16).digest()


def _digest_pass(request: ForwardBackwardRequest) -> bytes:
    work, digest = request.forward_backward_input, hashlib.blake2b(digest_size=16)
    config = sorted((work.loss_fn_config or {}).items())
    digest.update(repr((work.loss_fn, config, len(work.data), request.forward_only)).encode())
    for datum in work.data:
        for chunk in datum.model_input.chunks:
            text = isinstance(chunk, EncodedTextChunk)
            digest.update(chunk.tokens_np.data if text else repr(chunk.model_dump()).encode())
        for key, tensor in sorted(datum.loss_fn_inputs.items()):
            digest.update(repr((key, tensor.dtype, tensor.shape)).encode())
            for array in (tensor.values_np, tensor.sparse_crow_np, tensor.sparse_col_np):
                digest.update(b"" if array is None else array.data)
    return digest.digest()

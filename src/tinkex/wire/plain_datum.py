"""The usual datum, of text and dense tensors, as protobuf: pieces between cached frames.

A message is a list of pieces, joined once at the end: small bytes and views of the arrays. The generated
classes copy every array three times, so `proto_codec` uses them only for small or rare messages.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from tinkex import types as t
from tinkex.wire import tinkex_pb2

pb: Any = tinkex_pb2  # protobuf creates its classes at import, where a type checker does not see them

FEW_BYTES = 4096  # a datum up to this size is joined at once: cheaper than sending it in pieces
I32, I64, F32 = np.dtype("<i4"), np.dtype("<i8"), np.dtype("<f4")
DTYPES = {"float32": pb.DTYPE_FLOAT32, "int64": pb.DTYPE_INT64}

Pieces = list[bytes | memoryview]


def field_head(number: int, size: int) -> bytes:
    """The bytes before a message, a string or bytes of this size: its tag and its length."""
    out = bytearray((number << 3 | 2,))  # wire type 2: length-delimited
    while size > 0x7F:
        out.append(size & 0x7F | 0x80)
        size >>= 7
    out.append(size)
    return bytes(out)


@lru_cache(4096)
def _dense_frame(key: str, dtype: str, nbytes: int, shape: tuple[int, ...]) -> tuple[bytes, bytes]:
    """The bytes before and after a dense tensor's values in a datum. Cached: most datums are alike."""
    tail = pb.Tensor(dtype=DTYPES[dtype], shape=shape).SerializeToString()
    head, name = field_head(1, nbytes), key.encode()
    head = field_head(1, len(name)) + name + field_head(2, len(head) + nbytes + len(tail)) + head
    return field_head(2, len(head) + nbytes + len(tail)) + head, tail


@lru_cache(4096)
def _text_frame(nbytes: int) -> bytes:
    """The bytes before a text chunk's tokens in a datum."""
    head = field_head(1, nbytes) if nbytes else b""
    head = field_head(1, len(head) + nbytes) + head
    return field_head(1, len(head) + nbytes) + head


# One entry per array of a datum: a text chunk's size in bytes, or the arguments of _dense_frame.
Layout = tuple[int | tuple[str, str, int, tuple[int, ...]], ...]


@lru_cache(4096)
def _frames(layout: Layout) -> tuple[bytes, ...]:
    """The bytes before, between and after a datum's arrays, starting with the datum's own tag."""
    frames: list[bytes] = []
    tail, nbytes = b"", 0
    for array in layout:
        head, next_tail = (_text_frame(array), b"") if isinstance(array, int) else _dense_frame(*array)
        frames.append(tail + head)
        tail = next_tail
        nbytes += array if isinstance(array, int) else array[2]
    frames.append(tail)
    frames[0] = field_head(3, nbytes + sum(map(len, frames))) + frames[0]
    return tuple(frames)


def _view(array: np.ndarray, dtype: np.dtype) -> memoryview | bytes:
    """An array's bytes without a copy. Arrays of our types are always contiguous."""
    if array.dtype is not dtype:
        array = array.astype(dtype, copy=False)
    return array.data.cast("B") if array.size else b""


def write_plain(datum: t.Datum) -> Pieces | None:
    """A datum of text and dense tensors as a field of its pass; None: it has something else."""
    if datum.model_input_spans is not None:
        return None
    arrays: Pieces = []
    layout: list[int | tuple[str, str, int, tuple[int, ...]]] = []
    for chunk in datum.model_input.chunks:
        if not isinstance(chunk, t.EncodedTextChunk):
            return None
        arrays.append(tokens := _view(chunk.tokens_np, I32))
        layout.append(len(tokens))
    for key, tensor in datum.loss_fn_inputs.items():
        if tensor.sparse_crow_np is not None:
            return None
        arrays.append(values := _view(tensor.values_np, F32 if tensor.dtype == "float32" else I64))
        layout.append((key, tensor.dtype, len(values), tensor.dense_shape if tensor.shape else ()))
    pieces: Pieces = [b""] * (2 * len(arrays) + 1)
    pieces[::2], pieces[1::2] = _frames(tuple(layout)), arrays
    return pieces if datum.nbytes > FEW_BYTES else [b"".join(pieces)]

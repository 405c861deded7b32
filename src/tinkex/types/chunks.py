"""The chunks of a model's input: token ids, images and audio.

Token ids are int32 arrays from construction on; a bad one is refused with its position and value.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from tinkex.errors import InvalidInputError
from tinkex.strict import Dumpable, at, strict, strict_init
from tinkex.types.tensor import MAX_TOKEN

if TYPE_CHECKING:
    import torch


def shown(tokens: np.ndarray, most: int = 16) -> str:
    """Tokens for a repr: all of them if they are few, else the first.

    >>> shown(np.arange(100), 3)
    '[0, 1, 2, … 100 in all]'
    """
    if len(tokens) <= most:
        return str(tokens.tolist())
    return f"[{', '.join(map(str, tokens[:most].tolist()))}, … {len(tokens)} in all]"


def _listed(tokens: Any) -> list[Any] | np.ndarray:
    if hasattr(tokens, "detach"):  # a torch tensor
        return tokens.detach().cpu().numpy()
    kind: str = type(tokens).__name__
    if isinstance(tokens, str | bytes | Mapping) or not hasattr(tokens, "__iter__"):
        hint = "; encode it with the model's tokenizer" if isinstance(tokens, str) else ""
        hint = "; take its ['input_ids']" if isinstance(tokens, Mapping) and "input_ids" in tokens else hint
        raise InvalidInputError(f"tokens must be a list or array of token ids, got {kind}{hint}")
    return list(tokens)


def as_tokens(tokens: list[int] | Sequence[int] | np.ndarray | torch.Tensor) -> np.ndarray:
    """`tokens` (ints, or any integer array) as a flat, read-only int32 array.

    >>> as_tokens([1, 2.5])
    Traceback (most recent call last):
    tinkex.errors.InvalidInputError: token ids must be whole numbers; position 1 is 2.5
    """
    given = tokens if isinstance(tokens, (list, np.ndarray)) else _listed(tokens)
    array: np.ndarray
    if isinstance(given, np.ndarray):
        array = given
    else:
        try:
            # struct is twice as fast as numpy, as strict, and the result is immutable.
            array = np.frombuffer(struct.pack(f"{len(given)}i", *given), np.int32)
            if not array.size or array.item(array.argmin()) >= 0:
                return array
        except (struct.error, TypeError, ValueError):
            array = at("tokens must be a flat list of token ids", np.array, given)
    if array.ndim != 1:
        raise InvalidInputError(f"tokens must be one-dimensional, got shape {list(array.shape)}")
    if array.size == 0:
        array = array.astype(np.int32)
    if array.dtype.kind not in "iu":
        position, value = next(
            ((i, v) for i, v in enumerate(given) if isinstance(v, bool) or not hasattr(v, "__index__")),
            (0, array[0]),
        )
        raise InvalidInputError(f"token ids must be whole numbers; position {position} is {value!r}")
    if array.size and (array.min() < 0 or array.max() > MAX_TOKEN):
        position = int(np.argmax((array < 0) | (array > MAX_TOKEN)))
        raise InvalidInputError(f"token ids must be 0..{MAX_TOKEN}; position {position} is {array[position]}")
    array = np.array(array, dtype=np.int32)  # a copy: the caller may change theirs
    array.flags.writeable = False
    return array


def check(fine: bool, must: str, given: object) -> None:
    if not fine:
        raise InvalidInputError(f"{must}, got {given!r:.80}")


class EncodedTextChunk:
    """Consecutive token ids: `tokens_np` is the array, `tokens` a list that is made on first use."""

    type: Literal["encoded_text"] = "encoded_text"

    @strict_init
    def __init__(self, tokens: Sequence[int] | np.ndarray, type: str = "encoded_text") -> None:
        if type != "encoded_text":
            raise InvalidInputError(f"EncodedTextChunk.type must be 'encoded_text', got {type!r:.80}")
        self.tokens_np = as_tokens(tokens)

    @classmethod
    def of_bytes(cls, tokens: np.ndarray) -> EncodedTextChunk:
        """Over immutable int32 that are token ids: without copies or checks."""
        self = cls.__new__(cls)
        self.tokens_np = tokens
        return self

    @cached_property
    def tokens(self) -> list[int]:
        return self.tokens_np.tolist()

    @property
    def length(self) -> int:
        return self.tokens_np.size

    def model_dump(self, **_: Any) -> dict[str, Any]:
        return {"tokens": self.tokens, "type": self.type}

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, EncodedTextChunk):
            return NotImplemented
        return np.array_equal(self.tokens_np, other.tokens_np)

    def __hash__(self) -> int:
        return hash(self.tokens_np.tobytes())

    def __repr__(self) -> str:
        return f"EncodedTextChunk(tokens={shown(self.tokens_np)})"


class _Image(Dumpable):
    """The checks and the length of both kinds of image."""

    format: Any
    expected_tokens: int | None
    type: Any

    def __post_init__(self) -> None:
        cls, count = type(self), self.expected_tokens
        who = cls.__name__
        check(self.format in ("png", "jpeg"), f"{who}.format must be 'png' or 'jpeg'", self.format)
        check(self.type == cls.type, f"{who}.type must be {cls.type!r}", self.type)
        fine = count is None or (isinstance(count, int) and not isinstance(count, bool) and 0 < count < 2**31)
        check(fine, f"{who}.expected_tokens must be a whole number from 1 on", count)

    @property
    def length(self) -> int:
        if self.expected_tokens is None:
            hint = "set expected_tokens to how many positions it takes"
            raise InvalidInputError(f"{type(self).__name__} has no known length: {hint}")
        return self.expected_tokens


@strict
class ImageChunk(_Image):
    """An encoded image; `expected_tokens` is the number of positions that it takes."""

    data: bytes
    format: Literal["png", "jpeg"]
    expected_tokens: int | None = None
    type: Literal["image"] = "image"

    def __post_init__(self) -> None:
        super().__post_init__()
        fine = isinstance(self.data, bytes) and bool(self.data)
        check(fine, "ImageChunk.data must be the bytes of an image", self.data)


@strict
class ImageAssetPointerChunk(_Image):
    """An image by its location on the server. For sampling only."""

    format: Literal["png", "jpeg"]
    location: str
    expected_tokens: int | None = None
    type: Literal["image_asset_pointer"] = "image_asset_pointer"

    def __post_init__(self) -> None:
        super().__post_init__()
        fine = isinstance(self.location, str) and bool(self.location)
        check(fine, "ImageAssetPointerChunk.location must be a non-empty string", self.location)


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if at >= len(data) or shift > 63:
            raise InvalidInputError("DmelChunk.dmel has a broken header")
        value |= (data[at] & 0x7F) << shift
        at += 1
        if not data[at - 1] & 0x80:
            return value, at
        shift += 7


@strict
class DmelChunk(Dumpable):
    """Audio as a serialised tensor; its first dimension is its length in tokens."""

    dmel: bytes
    type: Literal["dmel"] = "dmel"

    def __post_init__(self) -> None:
        check(isinstance(self.dmel, bytes), "DmelChunk.dmel must be bytes", self.dmel)
        check(self.type == "dmel", "DmelChunk.type must be 'dmel'", self.type)

    @property
    def length(self) -> int:
        at = 2 if self.dmel[:1] == b"\xfe" else 1  # an optional marker, then the dtype byte
        ndim, at = _varint(self.dmel, at)
        return _varint(self.dmel, at)[0] if ndim else 0


ModelInputChunk = EncodedTextChunk | ImageAssetPointerChunk | ImageChunk | DmelChunk

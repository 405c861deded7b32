"""JSON of megabytes, parsed in pieces: a parser holds the interpreter's lock, and with it the event loop.

Long arrays of numbers are cut out and parsed a piece at a time. The rest is parsed at once, and refused if it
has too many objects, arrays, strings and numbers. Knows nothing of a body's meaning.
"""

from __future__ import annotations

import secrets
from typing import Any, cast

import numpy as np
import orjson

from tinkex.errors import InvalidInputError

PIECE_BYTES = 128 * 1024  # parsed at once: a few milliseconds
MAX_PARTS = 250_000  # objects, arrays, strings and numbers outside of long arrays: 10 ms
MAX_REST = 4 * 1024 * 1024  # bytes outside long arrays; spaces take time too
LONG = 64  # bytes of an array that is worth cutting out
LISTED = 4096  # numbers up to which an array is a list, as from any parser; a longer one is a numpy array
Bytes = bytes | memoryview
_BRACE, _OPEN, _CLOSE, _QUOTE, _ESCAPE = b'{[]"\\'


def loads(body: Bytes, *, arrays: bool = False) -> Any:
    """The value of a body; with `arrays`, its arrays of more than `LISTED` numbers are numpy arrays."""
    if len(body) <= PIECE_BYTES:
        return orjson.loads(body)
    codes = np.frombuffer(body, np.uint8)
    _check(sum(int(np.count_nonzero(codes == code)) for code in (_BRACE, _OPEN, _CLOSE, _QUOTE, _ESCAPE)))
    view, mark, rest, found, at = memoryview(body), secrets.token_hex(8), list[Bytes](), list[Any](), 0
    for start, end in _flat_arrays(codes):
        rest += [view[at:start], b'"%s%d"' % (mark.encode(), len(found))]
        found.append(_items(view[start + 1 : end], arrays))
        at = end + 1
    rest.append(view[at:])
    if (size := sum(map(len, rest))) > MAX_REST:
        raise InvalidInputError(f"{size} bytes of JSON beside arrays of numbers; at most {MAX_REST}")
    left = b"".join(rest)
    _check(left.count(b","))
    whole = [orjson.loads(left)]
    _put_back(whole, mark, found)
    return whole[0]


def _check(parts: int) -> None:
    if parts > MAX_PARTS:
        raise InvalidInputError(
            f"{parts} objects, strings and short arrays or their items in one JSON body; at most {MAX_PARTS} "
            "are accepted: send several smaller requests, or protobuf"
        )


def _flat_arrays(codes: np.ndarray) -> list[tuple[int, int]]:
    """Where arrays longer than `LONG` begin and end that hold no objects, arrays or strings."""
    braces, opens, closes, quotes, escapes = (
        np.flatnonzero(codes == code) for code in (_BRACE, _OPEN, _CLOSE, _QUOTE, _ESCAPE)
    )
    if escapes.size and quotes.size:  # a quote after an odd number of backslashes ends nothing
        runs = escapes[np.diff(escapes, prepend=-2) != 1]
        escaped = quotes[(codes[quotes - 1] == _ESCAPE) & (quotes > 0)]
        odd = escaped[(escaped - runs[np.searchsorted(runs, escaped) - 1]) % 2 == 1]
        quotes = np.setdiff1d(quotes, odd, assume_unique=True)
    opens = opens[np.searchsorted(quotes, opens) % 2 == 0]
    ends = _next(closes, opens, codes.size)
    flat = (ends - opens > LONG) & (ends < codes.size)
    for others in (braces, opens, quotes):
        flat &= ends < _next(others, opens, codes.size)
    return list(zip(opens[flat].tolist(), ends[flat].tolist(), strict=True))


def _next(places: np.ndarray, after: np.ndarray, none: int) -> np.ndarray:
    """The first of the places after each of these."""
    return np.append(places, none)[np.searchsorted(places, after, "right")]


def _items(text: memoryview, arrays: bool) -> list[Any] | np.ndarray:
    """The items of a flat array."""
    parts, items, at = list[np.ndarray](), list[Any](), 0
    while at <= len(text):
        end = _piece(text, at)
        piece = bytes(text[at:end])
        values: list[Any] = orjson.loads(b"[%b]" % piece)
        if not values and (at or end < len(text)):
            raise InvalidInputError("not JSON: a comma without a number after it")
        at = end + 1
        if not arrays or (len(text) <= end and not parts and len(values) <= LISTED):
            items += values
        elif b"u" in piece or b"a" in piece:  # true, false, null
            raise InvalidInputError(f"an array of more than {LISTED} items must have numbers alone")
        else:
            parts.append(np.array(values))
    if not parts:
        return items
    whole, at = np.empty(sum(part.size for part in parts), np.result_type(*parts)), 0
    for part in parts:  # np.concatenate would hold the lock for all of them
        whole[at : at + part.size] = part
        at += part.size
    return whole


def _piece(text: memoryview, at: int) -> int:
    """Where the piece of an array ends that begins here: at a comma, or at the end."""
    if at + PIECE_BYTES >= len(text):
        return len(text)
    comma = bytes(text[at + PIECE_BYTES :][:PIECE_BYTES]).find(b",")
    if comma < 0 and at + 2 * PIECE_BYTES < len(text):
        raise InvalidInputError(f"an array has {PIECE_BYTES} bytes without a comma")
    return len(text) if comma < 0 else at + PIECE_BYTES + comma


def _put_back(tree: list[Any], mark: str, found: list[Any]) -> None:
    todo: list[Any] = [tree]
    while todo:
        node: Any = todo.pop()
        is_object, pairs = isinstance(node, dict), cast(dict[Any, Any], node)
        for key, value in pairs.items() if is_object else enumerate(cast(list[Any], node)):
            if isinstance(value, dict | list):
                todo.append(value)
            elif isinstance(value, str) and value.startswith(mark):
                node[key] = found[int(value[len(mark) :])]

"""The files of a run's rollouts: records of numbers and arrays, in parts of which the oldest is dropped.

A record is a line of JSON and behind it the bytes of its arrays, which cost little to write and to read. An
earlier version wrote only lines (`.jsonl`); they are read too. Does not know what a record is about.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import orjson

from tinkex.files import append_whole

DIRECTORY = "rollouts"  # of a run
PARTS = 8  # files that a run's budget is split into
SUFFIX = ".packed"
Record = dict[str, Any]


def packed(record: Record) -> bytes:
    """The line has the number of `bytes` that follow it, and for each array its type, place and shape.

    >>> packed({"id": 7, "prompt": np.array([65, 66])})
    b'{"bytes":8,"id":7,"prompt":{"<i4":[0,2]}}\\nA\\x00\\x00\\x00B\\x00\\x00\\x00\\n'
    """
    arrays, size = list[bytes](), 0

    def placed(array: np.ndarray) -> dict[str, list[int]]:
        nonlocal size
        kind, place = "<f4" if array.dtype.kind == "f" else "<i4", size
        arrays.append(array.astype(kind, copy=False).tobytes())
        size += len(arrays[-1])
        return {kind: [place, *array.shape]}

    line = orjson.dumps(record, default=placed)
    return b'{"bytes":%d,%b\n%b\n' % (size, line[1:], b"".join(arrays))


def records(data: bytes) -> Iterator[tuple[int, int, Record]]:
    """Each record, and where it begins and ends. What is damaged is passed over, up to the next line."""
    begin = 0
    while line := data.find(b"\n", begin) + 1:
        try:
            record = orjson.loads(data[begin:line])
            end = line + record["bytes"] + 1 if "bytes" in record else line
            if end > len(data):
                return  # it is being written
            if data[end - 1 : end] != b"\n":
                raise ValueError("another record begins before its end")
            yield begin, end, record if end == line else _filled(record, data, line)
            begin = end
        except (ValueError, TypeError):
            begin = line


def _filled(value: Any, data: bytes, begin: int) -> Any:
    """A record with its arrays, which are from `begin` on. JSON has no numbers that are not finite."""
    if isinstance(value, list):
        return [_filled(one, data, begin) for one in cast(list[Any], value)]
    if not isinstance(value, dict):
        return value
    fields = cast(Record, value)
    for kind in fields.keys() & {"<i4", "<f4"}:
        place, *shape = fields[kind]
        array = np.frombuffer(data, kind, math.prod(shape), begin + place).reshape(shape)
        return array if kind == "<i4" else np.nan_to_num(array.astype(float), nan=0, posinf=0, neginf=-99999)
    return {key: _filled(one, data, begin) for key, one in fields.items()}


def read_record(path: Path, begin: int, end: int) -> Record:
    """The record that `records` found there; ValueError if it is gone."""
    with open(path, "rb") as file:
        file.seek(begin)
        for *_, record in records(file.read(end - begin)):
            return record
    raise ValueError(f"{path} has no record at {begin}")


def write(directory: Path, budget: int, found: list[bytes]) -> None:
    """Add packed records to the newest part; the oldest are dropped where all would exceed `budget` bytes."""
    if not found or not directory.parent.is_dir():
        return  # nothing was joined, or the run was deleted
    directory.mkdir(exist_ok=True)
    parts = sorted(directory.iterdir())
    sizes, added = [part.stat().st_size for part in parts], defaultdict[Path, list[bytes]](list)
    for one in found:
        if not parts or parts[-1].suffix != SUFFIX or sizes[-1] + len(one) > budget // PARTS:
            parts.append(directory / f"{int(parts[-1].stem) + 1 if parts else 1:06}{SUFFIX}")
            sizes.append(0)
        sizes[-1] += len(one)
        added[parts[-1]].append(one)
    while sum(sizes) > budget and len(parts) > 1:
        sizes.pop(0)
        added.pop(parts[0], None)
        parts.pop(0).unlink(missing_ok=True)
    for part, some in added.items():
        append_whole(part, b"".join(some))

"""Reads the metric files of runs as columns, a piece at a time, and downsamples them for a picture.

Takes no lock and writes nothing, so that any process may read while another one trains. A line that is being
written is read once it is whole; a file that was replaced by a shorter one is read anew. What is kept in
memory grows with the values of a file, and not with its lines times its names. Knows no users.
"""

from __future__ import annotations

import json
import math
import os
import threading
from array import array
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import orjson

STEPS, LOGGED = "metrics.jsonl", "logged.jsonl"
KEPT_RUNS, KEPT_BYTES = 1024, 256 * 1024 * 1024  # whose columns stay in memory, and what they may take
MOST_NAMES = 500  # metrics of one file; later ones are left out
MOST_SHOWN = 60  # metrics of one file that are drawn
NAN = math.nan
_AXES = ("step", "time")


@dataclass
class Column:
    """The values of one metric, and the numbers of their lines."""

    values: array[float]
    begin: int
    lines: array[int] | None = None  # None: all lines from `begin` on
    last: float = math.nan  # exactly; the others may be kept in single precision

    def extend(self, lines: Sequence[int], values: Sequence[float]) -> int:
        """Take up values; returns how many bytes that takes."""
        before, end = self.bytes, self.begin + len(self.values)
        if self.lines is None and (lines[0] != end or lines[-1] != end + len(lines) - 1):
            self.lines = array("I", range(self.begin, end))
        if self.lines is not None:
            self.lines.extend(lines)
        self.values.extend(values)
        self.last = values[-1]
        return self.bytes - before

    @property
    def bytes(self) -> int:
        return len(self.values) * self.values.itemsize + 4 * len(self.lines or ())

    def since(self, line: int) -> tuple[np.ndarray, np.ndarray]:
        if self.lines is not None:
            first = bisect_left(self.lines, line)
            return np.array(self.lines[first:]), np.array(self.values[first:])
        first = max(0, line - self.begin)
        found = np.array(self.values[first:])
        return np.arange(self.begin + first, self.begin + first + len(found)), found


class Columns:
    """Every metric of a file as a column of its own; what a line does not have takes no room."""

    def __init__(self) -> None:
        self.generation = -1  # rises when earlier lines were dropped
        self.clear()

    def clear(self) -> None:
        self.axes, self.names = dict[str, Column](), dict[str, Column]()
        self.length = self.bytes = 0
        self.generation += 1

    def add(self, block: list[dict[str, Any]]) -> None:
        """Take up lines that have the same names in the same order."""
        first, self.length = self.length, self.length + len(block)
        for name, given in zip(block[0], zip(*(line.values() for line in block), strict=True), strict=True):
            lines, values = range(first, self.length), given
            if not {*map(type, given)} <= {int, float, bool}:  # of somebody else's
                numbers = [i for i, value in enumerate(given) if isinstance(value, int | float)]
                lines, values = [first + i for i in numbers], [given[i] for i in numbers]
            kept = self.axes if name in _AXES else self.names
            if values and (name in kept or len(kept) < MOST_NAMES):
                if name not in kept:
                    kept[name] = Column(array("d" if name in _AXES else "f"), lines[0])
                    self.bytes += 500
                self.bytes += kept[name].extend(lines, values)

    def points(self, axis: str, start: int, without: Collection[str]) -> dict[str, tuple[Any, Any]]:
        """What there is from a line on, of those metrics that are drawn: x and y of each."""
        x, found = np.full(self.length - start, NAN), dict[str, tuple[Any, Any]]()
        if (column := self.axes.get(axis)) is not None:
            lines, values = column.since(start)
            x[lines - start] = values
        for name, column in islice(self.names.items(), MOST_SHOWN):
            lines, y = column.since(start)
            if len(y) and name not in without:
                found[name] = (x if len(y) == len(x) else x[lines - start]), y  # most share their x
        return found


@dataclass
class _File:
    path: Path
    columns: Columns = field(default_factory=Columns)
    inode: int = 0
    offset: int = 0

    def read(self) -> Columns:
        """Take up what was written since the last time."""
        try:
            with open(self.path, "rb") as file:
                status = os.fstat(file.fileno())
                if status.st_ino != self.inode or status.st_size < self.offset:
                    self.columns.clear()
                    self.inode, self.offset = status.st_ino, 0
                if status.st_size > self.offset:
                    file.seek(self.offset)
                    self._take(file.read())
        except OSError:  # there is none (yet)
            if self.columns.length:
                self.columns.clear()
            self.inode = self.offset = 0
        return self.columns

    def _take(self, data: bytes) -> None:
        whole = _whole(data)
        self.offset += data.rfind(b"\n") + 1
        for _, block in groupby(filter(None, map(self._parsed, whole)), key=tuple):
            self.columns.add(list(block))

    def _parsed(self, line: bytes) -> dict[str, Any] | None:
        """A line with a step's speed; None if it is damaged, or of a step that was skipped."""
        try:
            parsed: dict[str, Any] = orjson.loads(line)
            if self.path.name == STEPS:
                if parsed.get("skipped"):
                    return None
                seconds, tokens = parsed.get("wall_seconds"), parsed.get("tokens:sum")
                if seconds and tokens is not None:
                    parsed["tokens_per_second"] = tokens / seconds
            return parsed if isinstance(parsed, dict) else None
        except (ValueError, AttributeError, TypeError):
            return None


@dataclass(frozen=True)
class Mark:
    """How far a reader has come in a run's files."""

    steps: tuple[int, int] = (-1, 0)  # generation, lines
    logged: tuple[int, int] = (-1, 0)
    shared: int = 0  # metrics in both


class View(NamedTuple):
    """What a picture shows: a part of the x axis, on so many pixels."""

    low: float = -math.inf
    high: float = math.inf
    pixels: int = 400  # of one curve
    in_all: int = 10_000  # of all curves, down to `fewest` of each
    fewest: int = 50


class Curve(NamedTuple):
    """Points of one metric, sorted by x."""

    x: np.ndarray  # float64
    y: np.ndarray  # float32


class RunSeries:
    """The metric files of all runs, read when asked for. Any thread may ask.

    A metric that a client logged under a name that is the server's, too, is called "NAME (logged)".
    """

    def __init__(self) -> None:
        self._files: OrderedDict[Path, tuple[_File, _File, threading.Lock]] = OrderedDict()
        self._lock = threading.Lock()

    def _of(self, directory: Path) -> tuple[_File, _File, threading.Lock]:
        with self._lock:
            if directory not in self._files:
                self._files[directory] = _File(directory / STEPS), _File(directory / LOGGED), threading.Lock()
            self._files.move_to_end(directory)
            taken = sum(a.columns.bytes + b.columns.bytes for a, b, _ in self._files.values())
            while len(self._files) > 1 and (len(self._files) > KEPT_RUNS or taken > KEPT_BYTES):
                _, (a, b, _) = self._files.popitem(last=False)
                taken -= a.columns.bytes + b.columns.bytes
            return self._files[directory]

    def last(self, directory: Path) -> dict[str, float]:
        """The last value of every metric."""
        steps, logged, lock = self._of(directory)
        with lock:
            ours, theirs = steps.read(), logged.read()
            found = {
                axis: columns.axes[axis].last
                for axis, all_of in (("step", (theirs, ours)), ("time", (ours, theirs)))
                for columns in all_of
                if axis in columns.axes
            }
            found |= {name: column.last for name, column in ours.names.items()}
            return found | {_called(name, ours): column.last for name, column in theirs.names.items()}

    def left_out(self, directory: Path) -> int:
        """How many metrics are not among the curves, as far as was read."""
        steps, logged, _ = self._of(directory)
        return sum(max(0, len(file.columns.names) - MOST_SHOWN) for file in (steps, logged))

    def read(
        self,
        directory: Path,
        mark: Mark = Mark(),
        *,
        by_time: bool = False,
        view: View = View(),
        without: Collection[str] = (),
    ) -> tuple[dict[str, Curve], Mark, bool]:
        """Every curve by its name; how far they go; and whether they replace those before `mark`."""
        steps, logged, lock = self._of(directory)
        axis = "time" if by_time else "step"
        with lock:
            ours, theirs = steps.read(), logged.read()
            shared = len(ours.names.keys() & theirs.names.keys())
            now = Mark((ours.generation, ours.length), (theirs.generation, theirs.length), shared)
            pairs = (mark.steps, now.steps), (mark.logged, now.logged)
            anew = mark.shared != shared or any(a[0] != b[0] or a[1] > b[1] for a, b in pairs)
            given = theirs.points(axis, 0 if anew else mark.logged[1], ())
            found = {_called(name, ours): points for name, points in given.items()}
            found |= ours.points(axis, 0 if anew else mark.steps[1], without)
        view = view._replace(pixels=max(view.fewest, min(view.pixels, view.in_all // max(1, len(found)))))
        axes = {id(x): Axis(x, view) for x in {id(x): x for x, _ in found.values()}.values()}
        return {name: axes[id(x)].curve(y) for name, (x, y) in found.items()}, now, anew


def _called(name: str, ours: Columns) -> str:
    return f"{name} (logged)" if name in ours.names else name


class Axis:
    """An x axis in a picture: which of its points are shown, and where each pixel begins.

    >>> Axis(np.arange(6.0), View(pixels=2)).curve(np.array([1.0, 9, 2, 3, -4, 3])).y.tolist()
    [1.0, 9.0, -4.0, 3.0]
    """

    def __init__(self, x: np.ndarray, view: View) -> None:
        self._view, self._order, self._starts = view, None, None
        self._there = np.isfinite(x) & (x >= view.low) & (x <= view.high)
        x = x[self._there]
        if len(x) > 1 and (np.diff(x) < 0).any():  # a run that was set back to a checkpoint
            self._order = np.argsort(x, kind="stable")
            x = x[self._order]
        self._x = self._drawn = x
        if len(x) > 2 * view.pixels:
            width = (x[-1] - x[0]) or 1.0
            pixel = np.minimum((x - x[0]) * (view.pixels / width), view.pixels - 1).astype(int)
            self._starts = np.flatnonzero(np.diff(pixel, prepend=-1))
            self._ends = np.append(self._starts[1:], len(x)) - 1
            self._drawn = np.stack([x[self._starts], x[self._ends]], 1).reshape(-1)

    def curve(self, y: np.ndarray) -> Curve:
        """All points, or of each pixel the least and the greatest value, in the order of its ends."""
        y = y[self._there] if self._order is None else y[self._there][self._order]
        if not (finite := np.isfinite(y)).all():
            return Axis(self._x[finite], self._view).curve(y[finite])
        if self._starts is not None:
            least, greatest = np.minimum.reduceat(y, self._starts), np.maximum.reduceat(y, self._starts)
            falls = y[self._starts] > y[self._ends]
            y = np.stack([np.where(falls, greatest, least), np.where(falls, least, greatest)], 1).reshape(-1)
        return Curve(self._drawn, y.astype(np.float32))


def last_step(directory: Path) -> int:
    """The number of the last step that is in a run's file; 0 if there is none."""
    try:
        with open(directory / STEPS, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - 65536))
            lines = file.read().splitlines()
    except OSError:
        return 0
    for line in reversed(lines):
        try:
            return int(json.loads(line)["step"])
        except (ValueError, KeyError, TypeError):
            continue
    return 0


def names_in(path: Path) -> set[str]:
    """The metrics of a file."""
    return {name for line in _lines(_bytes(path)) for name in line} - {*_AXES}


def merged(directory: Path) -> bytes:
    """The lines of the steps, each with what was logged for its step; what was logged for no step, after."""
    steps, logged = (_bytes(directory / name) for name in (STEPS, LOGGED))
    if not logged:
        return steps
    lines = list(_lines(steps))
    ours = {name for line in lines for name in line}
    by_step: dict[float, dict[str, Any]] = {line.get("step", -1): line for line in lines}
    for said in _lines(logged):
        if (line := by_step.get(said["step"])) is None:
            lines.append(line := {"step": said["step"], "time": said["time"]})
            by_step[said["step"]] = line
        said = {name: value for name, value in said.items() if name not in _AXES}
        line.update({f"{name} (logged)" if name in ours else name: said[name] for name in said})
    lines.sort(key=lambda line: line.get("time", 0.0))
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


def _bytes(path: Path) -> bytes:
    return path.read_bytes() if path.exists() else b""


def _whole(data: bytes) -> list[bytes]:
    return data[: data.rfind(b"\n") + 1].splitlines()


def _lines(data: bytes) -> Iterator[dict[str, Any]]:
    """Those that are whole and not damaged."""
    for line in _whole(data):
        with suppress(ValueError):
            if isinstance(parsed := orjson.loads(line), dict):
                yield parsed


def thinned(data: bytes, share: float = 0.5) -> bytes:
    """A file's lines in that share of the bytes at most: of neighbours, the least and the greatest values.

    Two lines stay of each stretch of steps, all stretches being about equally long, so that spikes stay and
    a file that is thinned out again and again is equally dense everywhere. The last line stays as it is.

    >>> thinned(b"".join(b'{"step": %d, "loss": %d}\\n' % (n, 9 * (n == 4)) for n in range(9)))
    b'{"step":0,"loss":0}\\n{"step":3,"loss":0}\\n{"step":4,"loss":9}\\n{"step":7,"loss":0}\\n{"step":8,"loss":0}\\n'
    """
    lines = [line for line in _lines(data) if not line.get("skipped")]
    if len(lines) < 4:
        return data
    *rest, last = lines
    reached, before = [0.0], rest[0].get("step", 0)
    for line in rest[1:]:  # a run may have been set back to an earlier step
        reached.append(reached[-1] + max(1, abs((step := line.get("step", before)) - before)))
        before = step
    stretches = max(1, len(rest) // 4)
    while True:
        width = (reached[-1] + 1) / stretches
        grouped = groupby(zip(reached, rest, strict=True), key=lambda pair: int(pair[0] / width))
        kept = [line for _, pairs in grouped for line in _extremes([line for _, line in pairs])]
        out = b"".join(orjson.dumps(line) + b"\n" for line in [*kept, last])
        if len(out) <= share * len(data) or stretches == 1:
            return out
        stretches //= 2


def _extremes(lines: list[dict[str, float]]) -> list[dict[str, float]]:
    """Two lines in the place of several: of every metric the least and the greatest value, as they came."""
    if len(lines) <= 2:
        return lines
    kept = [{name: line[name] for name in _AXES if name in line} for line in (lines[0], lines[-1])]
    for name in dict.fromkeys(name for line in lines for name in line if name not in _AXES):
        values = [line[name] for line in lines if name in line]
        low, high = min(values), max(values)
        first, second = (low, high) if values.index(low) <= values.index(high) else (high, low)
        kept[1][name] = second
        if len(values) > 1:
            kept[0][name] = first
    return kept

"""Reads the metric files of runs as columns, a piece at a time, and downsamples them for a picture.

Takes no lock and writes nothing, so that any process may read while another one trains. A line that is being
written is read once it is whole; a file that was replaced by a shorter one is read anew. Knows no users.
"""

from __future__ import annotations

import json
import math
import os
import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import orjson

STEPS, LOGGED = "metrics.jsonl", "logged.jsonl"
KEPT_RUNS = 256  # whose columns stay in memory
NAN = math.nan


class Columns:
    """Every metric of a file as a column of its own; NaN where a line does not have it."""

    def __init__(self) -> None:
        self.names: dict[str, list[float]] = {}
        self.length = 0
        self.generation = 0  # rises when earlier lines were dropped

    def add(self, line: Mapping[str, float]) -> None:
        names = self.names
        for name, value in line.items():
            if (column := names.get(name)) is None:
                column = names[name] = [NAN] * self.length
            column.append(value)
        self.length += 1
        if len(line) < len(names):
            for column in names.values():
                if len(column) < self.length:
                    column.append(NAN)

    def clear(self) -> None:
        self.names.clear()
        self.length = 0
        self.generation += 1

    def array(self, name: str, start: int = 0) -> np.ndarray:
        column = self.names.get(name)
        return np.full(self.length - start, NAN) if column is None else np.array(column[start:], float)


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
        whole = data[: data.rfind(b"\n") + 1]
        self.offset += len(whole)
        for line in whole.splitlines():
            try:
                parsed: dict[str, Any] = orjson.loads(line)
                numbers = {name: value for name, value in parsed.items() if isinstance(value, int | float)}
            except (ValueError, AttributeError):
                continue  # damaged
            if not numbers.get("skipped"):
                self.columns.add(numbers)


@dataclass(frozen=True)
class Mark:
    """How far a reader has come in a run's files."""

    steps: tuple[int, int] = (-1, 0)  # generation, lines
    logged: tuple[int, int] = (-1, 0)


class View(NamedTuple):
    """What a picture shows: a part of the x axis, on so many pixels."""

    low: float = -math.inf
    high: float = math.inf
    pixels: int = 400


class Curve(NamedTuple):
    """Points of one metric, sorted by x."""

    x: np.ndarray  # float64
    y: np.ndarray  # float32


class RunSeries:
    """The metric files of all runs, read when asked for. Any thread may ask."""

    def __init__(self) -> None:
        self._files: OrderedDict[Path, tuple[_File, _File, threading.Lock]] = OrderedDict()
        self._lock = threading.Lock()

    def _of(self, directory: Path) -> tuple[_File, _File, threading.Lock]:
        with self._lock:
            if directory not in self._files:
                self._files[directory] = _File(directory / STEPS), _File(directory / LOGGED), threading.Lock()
                if len(self._files) > KEPT_RUNS:
                    self._files.popitem(last=False)
            self._files.move_to_end(directory)
            return self._files[directory]

    def names(self, directory: Path) -> list[str]:
        """The metrics that this run has."""
        steps, logged, lock = self._of(directory)
        with lock:
            known = dict.fromkeys([*steps.read().names, *logged.read().names])
        return [name for name in known if name not in ("step", "time")]

    def last(self, directory: Path) -> dict[str, float]:
        """The last value of every metric."""
        steps, logged, lock = self._of(directory)
        with lock:
            found: dict[str, float] = {}
            for columns in (steps.read(), logged.read()):
                for name, column in columns.names.items():
                    value = next((v for v in reversed(column) if not math.isnan(v)), None)
                    if value is not None and (name != "step" or "step" not in found):
                        found[name] = value
        return found

    def read(
        self, directory: Path, mark: Mark = Mark(), *, by_time: bool = False, view: View = View()
    ) -> tuple[dict[str, Curve], Mark, bool]:
        """Every curve by its name; how far they go; and whether they replace those before `mark`.

        `tokens_per_second` is computed from a step's tokens and its time.
        """
        steps, logged, lock = self._of(directory)
        axis, found, marks = "time" if by_time else "step", dict[str, Curve](), list[tuple[int, int]]()
        with lock:
            files = ((logged, mark.logged), (steps, mark.steps))
            now = [file.read().generation for file, _ in files]
            anew = now != [generation for _, (generation, _) in files]
            for file, (_, lines) in files:
                columns, start = file.columns, 0 if anew else lines
                marks.append((columns.generation, columns.length))
                if start < columns.length:
                    x = columns.array(axis, start)
                    for name, y in _curves(columns, start).items():
                        if name not in found and not np.isnan(y).all():
                            found[name] = downsample(x, y, view)
        return found, Mark(steps=marks[1], logged=marks[0]), anew


def _curves(columns: Columns, start: int) -> dict[str, np.ndarray]:
    curves = {name: columns.array(name, start) for name in columns.names if name not in ("step", "time")}
    if "wall_seconds" in curves and "tokens:sum" in curves:
        with np.errstate(divide="ignore", invalid="ignore"):
            rate = curves["tokens:sum"] / curves["wall_seconds"]
        curves["tokens_per_second"] = np.where(np.isfinite(rate), rate, NAN)
    return curves


def downsample(x: np.ndarray, y: np.ndarray, view: View) -> Curve:
    """The points of a curve that a picture shows: all, or of each pixel the least and the greatest value.

    >>> downsample(np.arange(6.0), np.array([1.0, 9, 2, 3, -4, 3]), View(pixels=2)).y.tolist()
    [1.0, 9.0, -4.0, 3.0]
    """
    there = np.isfinite(x) & np.isfinite(y) & (x >= view.low) & (x <= view.high)
    x, y = x[there], y[there].astype(np.float32)
    if len(x) > 1 and (np.diff(x) < 0).any():  # a run that was set back to a checkpoint
        order = np.argsort(x, kind="stable")
        x, y = x[order], y[order]
    if len(x) <= 2 * view.pixels:
        return Curve(x, y)
    width = (x[-1] - x[0]) or 1.0
    pixel = np.minimum((x - x[0]) * (view.pixels / width), view.pixels - 1).astype(int)
    starts = np.flatnonzero(np.diff(pixel, prepend=-1))
    ends = np.append(starts[1:], len(x)) - 1
    least, greatest = np.minimum.reduceat(y, starts), np.maximum.reduceat(y, starts)
    return Curve(np.stack([x[starts], x[ends]], 1).reshape(-1), np.stack([least, greatest], 1).reshape(-1))


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


def merged(directory: Path) -> bytes:
    """The lines of the steps, each with what was logged for its step; what was logged for no step, after."""
    steps, logged = (_bytes(directory / name) for name in (STEPS, LOGGED))
    if not logged:
        return steps
    lines: list[dict[str, Any]] = [json.loads(line) for line in _whole(steps)]
    by_step: dict[float, dict[str, Any]] = {line.get("step", -1): line for line in lines}
    for said in map(json.loads, _whole(logged)):
        if (line := by_step.get(said["step"])) is None:
            lines.append(line := {"step": said["step"], "time": said["time"]})
            by_step[said["step"]] = line
        line.update({name: value for name, value in said.items() if name not in ("step", "time")})
    lines.sort(key=lambda line: line.get("time", 0.0))
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


def _bytes(path: Path) -> bytes:
    return path.read_bytes() if path.exists() else b""


def _whole(data: bytes) -> list[bytes]:
    return data[: data.rfind(b"\n") + 1].splitlines()

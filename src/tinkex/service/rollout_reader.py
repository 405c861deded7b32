"""Reads the rollouts of a run: an index of all that are kept, and single records.

Takes no lock: a file that is dropped or being written while it is read costs what it held, and nothing else.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from tinkex.service.rollouts import DIRECTORY

KEPT_RUNS = 32  # whose index stays in memory


@dataclass
class SampleSummary:
    """One answer, in numbers."""

    tokens: int
    stop: str
    logprob: float | None  # the mean
    advantage: float | None = None
    difference: float | None = None  # the mean of |sampler − trainer|, of logprobs
    trained_at: int | None = None  # the step


@dataclass
class RolloutSummary:
    """One sample request, and where its record is."""

    id: int
    step: int
    group: str
    time: float
    file: Path
    offset: int
    prompt: int  # tokens
    samples: list[SampleSummary]
    joined: dict[int, tuple[Path, int]] = field(default_factory=dict[int, tuple[Path, int]])  # by sample


class _Index:
    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._read: dict[Path, int] = {}  # offsets
        self.rollouts: dict[int, RolloutSummary] = {}
        self.lock = threading.Lock()

    def update(self) -> None:
        """Take up what was written or dropped since the last time."""
        files = sorted(self._directory.glob("*.jsonl")) if self._directory.is_dir() else []
        if gone := set(self._read) - set(files):
            self.rollouts = {i: one for i, one in self.rollouts.items() if one.file not in gone}
            for one in self.rollouts.values():
                one.joined = {k: at for k, at in one.joined.items() if at[0] not in gone}
            self._read = {path: offset for path, offset in self._read.items() if path not in gone}
        for path in files:
            try:
                with open(path, "rb") as file:
                    file.seek(offset := self._read.get(path, 0))
                    data = file.read()
            except OSError:
                continue
            for line in data[: data.rfind(b"\n") + 1].splitlines(keepends=True):
                self._take(path, offset, line)
                offset += len(line)
            self._read[path] = offset

    def _take(self, path: Path, offset: int, line: bytes) -> None:
        try:
            record: dict[str, Any] = orjson.loads(line)
            if record["kind"] == "sample":
                self._sampled(record, path, offset)
            else:
                self._joined(record, path, offset)
        except (ValueError, KeyError, IndexError, TypeError, OSError):
            return  # damaged, or its sample was dropped

    def _sampled(self, record: dict[str, Any], path: Path, offset: int) -> None:
        kept: list[dict[str, Any]] = record["samples"]
        samples = [SampleSummary(len(o["tokens"]), o["stop"], _mean(o.get("logprobs") or [])) for o in kept]
        self.rollouts[record["id"]] = RolloutSummary(
            record["id"], record["step"], record["group"], record["time"], path, offset,
            len(record["prompt"]), samples,
        )  # fmt: skip

    def _joined(self, record: dict[str, Any], path: Path, offset: int) -> None:
        known, index = self.rollouts[record["id"]], int(record["sample"])
        sample = known.samples[index]
        sample.advantage, sample.trained_at = record.get("advantage"), record["step"]
        known.joined[index] = path, offset
        if sample.logprob is not None and record["trainer"]:
            sampled: list[float] = read_line(known.file, known.offset)["samples"][index]["logprobs"]
            trainer: list[float] = record["trainer"]
            sample.difference = _mean([abs(a - b) for a, b in zip(sampled, trainer, strict=False)])


class RolloutReader:
    """The rollouts of all runs. Any thread may ask."""

    def __init__(self) -> None:
        self._runs: OrderedDict[Path, _Index] = OrderedDict()
        self._lock = threading.Lock()

    def list(self, run_directory: Path) -> list[RolloutSummary]:
        """All of a run that are kept, newest first."""
        with self._lock:
            index = self._runs.setdefault(run_directory, _Index(run_directory / DIRECTORY))
            self._runs.move_to_end(run_directory)
            if len(self._runs) > KEPT_RUNS:
                self._runs.popitem(last=False)
        with index.lock:
            index.update()
            return sorted(index.rollouts.values(), key=lambda one: one.id, reverse=True)

    def record(self, one: RolloutSummary, sample: int) -> dict[str, Any]:
        """Prompt, answer, logprobs and what training said of them."""
        record = read_line(one.file, one.offset)
        fields = {"prompt": record["prompt"], **record["samples"][sample]}
        if (joined := one.joined.get(sample)) is not None:
            fields["joined"] = read_line(*joined)
        return fields


def read_line(path: Path, offset: int) -> dict[str, Any]:
    with open(path, "rb") as file:
        file.seek(offset)
        return orjson.loads(file.readline())


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None

"""Reads the rollouts of a run: an index of all that are kept, and single records.

Takes no lock: a file that is dropped or being written while it is read costs what it held, and nothing else.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from tinkex.service.rollout_files import DIRECTORY, Record, read_record, records
from tinkex.types.outputs import TopkLogprobs

KEPT_RUNS = 32  # whose index stays in memory
Place = tuple[Path, int, int]  # of a record: its file, and where it begins and ends there


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
    place: Place
    prompt: int  # tokens
    samples: list[SampleSummary]
    joined: dict[int, Place] = field(default_factory=dict[int, Place])  # by sample


class _Index:
    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._read: dict[Path, int] = {}  # offsets
        self.rollouts: dict[int, RolloutSummary] = {}
        self._recent: list[dict[int, Record]] = []  # samples of the last two files: most joins come soon
        self.lock = threading.Lock()

    def update(self) -> None:
        """Take up what was written or dropped since the last time."""
        files = sorted(self._directory.iterdir()) if self._directory.is_dir() else []
        if gone := set(self._read) - set(files):
            self.rollouts = {i: one for i, one in self.rollouts.items() if one.place[0] not in gone}
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
            self._recent = [*self._recent[-1:], {}]
            for begin, end, record in records(data):
                self._take((path, offset + begin, offset + end), record)
                self._read[path] = offset + end
        self._recent.clear()

    def _take(self, place: Place, record: Record) -> None:
        try:
            if record["kind"] == "sample":
                self._sampled(record, place)
            else:
                self._joined(record, place)
        except (ValueError, KeyError, IndexError, TypeError, OSError):
            return  # damaged, or its sample was dropped

    def _sampled(self, record: Record, place: Place) -> None:
        samples = [
            SampleSummary(len(o["tokens"]), o["stop"], _mean(o.get("logprobs"))) for o in record["samples"]
        ]
        prompt = len(record["prompt"])
        self._recent[-1][record["id"]] = record
        self.rollouts[record["id"]] = RolloutSummary(
            record["id"], record["step"], record["group"], record["time"], place, prompt, samples
        )

    def _joined(self, record: Record, place: Place) -> None:
        known, index = self.rollouts[record["id"]], int(record["sample"])
        sample = known.samples[index]
        sample.advantage, sample.trained_at = record.get("advantage"), record["step"]
        known.joined[index] = place
        if sample.logprob is not None:
            recent = next((one[known.id] for one in self._recent if known.id in one), None)
            sampled = (recent or read_record(*known.place))["samples"][index]["logprobs"]
            sample.difference = _mean(np.abs(np.subtract(sampled, record["trainer"])))


class RolloutReader:
    """The rollouts of all runs. Any thread may ask."""

    def __init__(self) -> None:
        self._index_of = lru_cache(KEPT_RUNS)(_Index)

    def list(self, run_directory: Path) -> list[RolloutSummary]:
        """All of a run that are kept, newest first."""
        index = self._index_of(run_directory / DIRECTORY)
        with index.lock:
            index.update()
            return sorted(index.rollouts.values(), key=lambda one: one.id, reverse=True)

    def prompt(self, one: RolloutSummary) -> list[int]:
        """Its token ids; OSError or ValueError if it was dropped."""
        return list(read_record(*one.place)["prompt"])

    def record(self, one: RolloutSummary, sample: int) -> dict[str, Any]:
        """Prompt, answer, logprobs and what training said of them."""
        record = read_record(*one.place)
        fields = {"prompt": record["prompt"], **record["samples"][sample]}
        if "top_tokens" in fields:
            fields["topk"] = TopkLogprobs(fields.pop("top_tokens"), fields.pop("top_logprobs")).rows()
        if (joined := one.joined.get(sample)) is not None:
            fields["joined"] = _listed(read_record(*joined))
        return _listed(fields)


def _listed(fields: Record) -> Record:
    """Arrays as lists, logprobs with five digits."""
    arrays: dict[str, np.ndarray] = {k: v for k, v in fields.items() if isinstance(v, np.ndarray)}
    return fields | {name: np.round(array, 5).tolist() for name, array in arrays.items()}


def _mean(values: np.ndarray | list[float] | None) -> float | None:
    return float(np.mean(values)) if values is not None and len(values) else None

"""Sends a run's metrics to wandb, trackio or tensorboard, whichever is installed.

Each is imported when it is used. A tracker that fails to start is an error; one that fails later is not
allowed to end a training run. Knows nothing of training.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from tinkex.errors import InvalidInputError

log = logging.getLogger("tinkex")
EXPERIMENT_TRACKERS = ("wandb", "trackio")
TRACKERS = (*EXPERIMENT_TRACKERS, "tensorboard")
PROJECT = "tinkex"


class Tracker(Protocol):
    """A second destination of metrics, after metrics.jsonl."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


def open_tracker(kind: str, name: str, directory: Path, settings: Mapping[str, Any]) -> Tracker:
    """A tracker for one run; `name` and `directory` are the run's own, so that it can be resumed."""
    if kind not in TRACKERS:
        raise InvalidInputError(f"--log must be one of {', '.join(TRACKERS)}, got {kind!r}")
    try:
        if kind == "tensorboard":
            return TensorboardFiles(directory / "tensorboard")
        return Tolerant(ExperimentTracker(kind, name, name, directory, settings))
    except ImportError as error:
        raise InvalidInputError(f"--log {kind} needs its package: pip install {kind} ({error})") from None


class ExperimentTracker:
    """One of this process's runs in wandb or trackio; `key` finds the same run again."""

    def __init__(
        self, kind: str, key: str, name: str, directory: Path, config: Mapping[str, Any], **more: Any
    ) -> None:
        module = import_module(kind)
        plain = {k: v if isinstance(v, int | float | bool) else str(v) for k, v in config.items()}
        self._wandb = kind == "wandb"
        if self._wandb:
            more |= {"dir": str(directory), "id": key, "reinit": "create_new"}
        self._run = module.init(project=PROJECT, name=name, config=plain, resume="allow", **more)
        if self._wandb:  # its own steps may only rise: a run that is set back to a checkpoint goes back
            self._run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._wandb:
            self._run.log({**metrics, "step": step})
        else:
            self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


class Tolerant:
    """A tracker whose failures are reported and otherwise ignored."""

    def __init__(self, tracker: Tracker) -> None:
        self._tracker = tracker

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        try:
            self._tracker.log(step, metrics)
        except Exception as error:  # a library may raise anything; training continues
            log.warning("the metrics of step %d were not tracked: %s", step, error)

    def close(self) -> None:
        self._tracker.close()


class TensorboardFiles:
    """Event files for tensorboard, written without torch or tensorflow."""

    def __init__(self, directory: Path) -> None:
        files: Any = import_module("tensorboard.summary.writer.event_file_writer")
        self._summary: Any = import_module("tensorboard.compat.proto.summary_pb2")
        self._event: Any = import_module("tensorboard.compat.proto.event_pb2")
        self._writer: Any = files.EventFileWriter(str(directory))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        values = [
            self._summary.Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()
        ]
        summary = self._summary.Summary(value=values)
        self._writer.add_event(self._event.Event(wall_time=time.time(), step=step, summary=summary))

    def close(self) -> None:
        self._writer.close()

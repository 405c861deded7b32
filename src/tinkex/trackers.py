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

log = logging.getLogger("tinkex.recipes")
TRACKERS = ("wandb", "trackio", "tensorboard")


class Tracker(Protocol):
    """Where metrics go besides metrics.jsonl."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


def open_tracker(kind: str, name: str, directory: Path, settings: Mapping[str, Any]) -> Tracker:
    """A tracker for one run; `name` and `directory` are the run's own, so that a resumed run goes on."""
    if kind not in TRACKERS:
        raise InvalidInputError(f"--log must be one of {', '.join(TRACKERS)}, got {kind!r}")
    try:
        if kind == "tensorboard":
            return TensorboardFiles(directory / "tensorboard")
        return ExperimentTracker(import_module(kind), kind, name, directory, settings)
    except ImportError as error:
        raise InvalidInputError(f"--log {kind} needs its package: pip install {kind} ({error})") from None


class ExperimentTracker:
    """wandb or trackio, which have the same functions."""

    def __init__(
        self, module: Any, kind: str, name: str, directory: Path, settings: Mapping[str, Any]
    ) -> None:
        plain = {
            key: value if isinstance(value, int | float | bool) else str(value)
            for key, value in settings.items()
        }
        more: dict[str, Any] = {"dir": str(directory), "id": name} if kind == "wandb" else {}
        self._module = module
        self._run = module.init(project="tinkex", name=name, config=plain, resume="allow", **more)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        try:
            self._module.log(dict(metrics), step=step)
        except Exception as error:  # whatever a library of others raises: training goes on
            log.warning("the metrics of step %d were not tracked: %s", step, error)

    def close(self) -> None:
        self._module.finish()


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

"""The process that copies metrics to a tracker: `python -m tinkex.service.mirror_process wandb DIRECTORY`.

It reads one JSON object per line from its standard input, and ends with it. A run of ours is a run of the
tracker with the same id. Each kind of failure is logged once; only the lines it concerns are lost.
"""

from __future__ import annotations

import logging
import re
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from tinkex.trackers import ExperimentTracker

log = logging.getLogger("tinkex.service")
MOST_RUNS = 64  # that are open there; the one that was quiet longest is closed for the next
_QUIET: dict[str, dict[str, Any]] = {
    "wandb": {"settings": {"silent": True, "console": "off", "disable_git": True}},
    "trackio": {"embed": False, "auto_log_gpu": False, "auto_log_cpu": False},
}


class MirroredRuns:
    """The open runs of one tracker."""

    def __init__(self, kind: str, directory: Path) -> None:
        self._kind, self._directory = kind, directory
        self._open: OrderedDict[str, ExperimentTracker] = OrderedDict()
        self._told: set[str] = set()

    def take(self, about: dict[str, Any]) -> None:
        """One line of metrics. Whatever a library of others raises, the next line is taken."""
        try:
            metrics: dict[str, float] = about["metrics"]
            step = int(metrics.pop("step"))
            metrics.pop("time", None)
            self._tracker(about).log(step, metrics)
        except Exception as error:
            self._tell(error)

    def _tracker(self, about: dict[str, Any]) -> ExperimentTracker:
        run_id: str = about["run"]
        if run_id not in self._open:
            key = re.sub(r"[^A-Za-z0-9_-]+", "-", run_id)
            name = f"{about['name']} ({run_id[:8]})" if about["name"] else key
            self._open[run_id] = ExperimentTracker(
                self._kind, key, name, self._directory, about["config"], **_QUIET[self._kind]
            )
            if len(self._open) > MOST_RUNS:
                self._close(next(iter(self._open)))
        self._open.move_to_end(run_id)
        return self._open[run_id]

    def close(self) -> None:
        for run_id in list(self._open):
            self._close(run_id)

    def _close(self, run_id: str) -> None:
        try:
            self._open.pop(run_id).close()
        except Exception as error:
            self._tell(error)

    def _tell(self, error: Exception) -> None:
        kind = f"{type(error).__name__}: {error}"
        if type(error).__name__ not in self._told:
            self._told.add(type(error).__name__)
            log.warning("metrics are not mirrored to %s: %.300s (told once)", self._kind, kind)


def main(kind: str, directory: str, lines: BinaryIO) -> None:
    logging.basicConfig(
        stream=sys.stderr, level="WARNING", format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    runs = MirroredRuns(kind, Path(directory))
    for line in lines:
        runs.take(orjson.loads(line))
    runs.close()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.stdin.buffer)

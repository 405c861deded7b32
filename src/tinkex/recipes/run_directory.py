"""A training run's directory: settings, metrics, samples, the last checkpoint, the result. It can be resumed.

`metrics.jsonl` has a line for each step and evaluation. `state.json` names the last saved checkpoint; it is
replaced once the checkpoint is complete and the metrics before it are on disk, so a run killed at any moment
resumes with its complete history: later lines are dropped, and written again. One process owns a directory at
a time. Knows nothing of losses and data.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
import uuid
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

import tinkex
from tinkex.errors import InvalidInputError, NotFoundError, TinkerError
from tinkex.files import replacing, try_lock
from tinkex.recipes.progress import Progress
from tinkex.trackers import Tracker, open_tracker

_WINDOW = 11  # results over which the speed is measured
_FILES = ("config.json", "metrics.jsonl", "samples.jsonl", "state.json", "result.json", "tracked.json")


@dataclass(frozen=True)
class SavedStep:
    """A checkpoint with the optimizer's state, and the steps before it."""

    step: int
    path: str
    best: str | None = None  # the adapter of the best evaluation so far, if it is kept


@dataclass(frozen=True)
class Outcome:
    """How a run ended: what to sample from, what to train on, and the last value of each metric."""

    step: int
    base_model: str
    adapter: str  # tinker://…/sampler_weights/…
    state: str  # tinker://…/weights/…
    directory: str
    metrics: dict[str, float] = field(default_factory=dict[str, float])


class Interrupted(KeyboardInterrupt):
    """Ctrl-C stopped the run after a step; the same command continues it."""


class RunDirectory:
    """Opens a directory for one run: a new one, or one to resume."""

    def __init__(
        self, path: Path, settings: Mapping[str, Any], progress: Progress, *, fresh: bool,
        tracker: str | None, name: str | None = None,
    ) -> None:  # fmt: skip
        self.path, self.progress, self.name = path, progress, name
        path.mkdir(parents=True, exist_ok=True)
        self._lock = _locked(path)
        if fresh:
            for name in _FILES:
                (path / name).unlink(missing_ok=True)
            shutil.rmtree(path / "tensorboard", ignore_errors=True)
        settings = json.loads(json.dumps(settings, default=str))
        state = _read(path / "state.json")
        self.saved = SavedStep(**state) if state else None
        if self.saved is not None:
            _check_settings(path, settings)
        result = _read(path / "result.json")
        self.outcome = Outcome(**result) if result else None
        self.rows = _kept(path / "metrics.jsonl", self.saved)
        _kept(path / "samples.jsonl", self.saved)
        _replace(path / "config.json", settings)
        self._computed = deque([(time.monotonic(), 0)], maxlen=_WINDOW)
        self._metrics = (path / "metrics.jsonl").open("a", encoding="utf-8")
        self._samples = (path / "samples.jsonl").open("a", encoding="utf-8")
        self._tracker: Tracker | None = None
        if tracker is not None:
            self._tracker = open_tracker(tracker, f"{path.name}-{_tracked_as(path)}", path, settings)

    @property
    def done(self) -> int:
        """Steps whose results are saved."""
        return self.saved.step if self.saved else 0

    def resume(self, service: tinkex.ServiceClient) -> tinkex.TrainingClient | None:
        """The run as it was saved, with its optimizer's state; None: it has to be created."""
        if self.saved is None:
            return None
        try:
            return service.create_training_client_from_state_with_optimizer(self.saved.path, name=self.name)
        except NotFoundError as error:
            raise InvalidInputError(
                f"{self.path} goes on from {self.saved.path}, which is gone ({error}); --fresh starts anew"
            ) from None

    def log(self, step: int, metrics: Mapping[str, float], tokens: int = 0) -> None:
        """Write the metrics of a step or an evaluation; `tokens` is how many it computed."""
        self._computed.append((time.monotonic(), tokens))
        (began, _), (now, _) = self._computed[0], self._computed[-1]
        count = sum(each for _, each in islice(self._computed, 1, None))
        speed = {"tokens_per_second": round(count / (now - began), 1)} if tokens else {}
        row = {"step": step, **metrics, **speed, **({"tokens": tokens} if tokens else {})}
        self.rows.append(row)
        _append(self._metrics, row)
        self.progress.row(row)
        if self._tracker is not None:
            self._tracker.log(step, {**metrics, **speed})

    def sample(self, step: int, **sample: Any) -> None:
        _append(self._samples, {"step": step, **sample})

    def save(
        self, service: tinkex.ServiceClient, run: tinkex.TrainingClient, step: int, best: str | None = None
    ) -> SavedStep:
        """Save the run's state; the checkpoint before it is deleted when this one is in place."""
        path = run.save_state(f"step-{step:06d}", overwrite=True).result().path
        for file in (self._metrics, self._samples):
            file.flush()
            os.fsync(file.fileno())
        before, self.saved = self.saved, SavedStep(step, path, best)
        _replace(self.path / "state.json", asdict(self.saved))
        if before is not None and before.path != path:
            with contextlib.suppress(TinkerError):  # it may be gone already, and costs little
                service.create_rest_client().delete_checkpoint_from_tinker_path(before.path).result()
        return self.saved

    def finish(self, run: tinkex.TrainingClient) -> Outcome:
        """Publish the adapter (or take the best one), and write down how the run ended."""
        assert self.saved is not None, "the last step is saved"
        info = run.get_info()
        adapter = self.saved.best or run.save_weights_for_sampler("final").result().path
        last = {name: value for row in self.rows for name, value in row.items() if name != "step"}
        base = info.model_data.model_name or info.model_name or ""
        self.outcome = Outcome(self.saved.step, base, adapter, self.saved.path, str(self.path), last)
        _replace(self.path / "result.json", asdict(self.outcome))
        return self.outcome

    def close(self) -> None:
        self.progress.end()
        if self._tracker is not None:
            self._tracker.close()
        for file in (self._metrics, self._samples, self._lock):
            file.close()

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def trained(model: str, *, state: bool = False) -> str:
    """The adapter (or the state to train on) of a finished run by its directory; any other name as it is.

    >>> trained("SmolLM2-135M-Instruct")
    'SmolLM2-135M-Instruct'
    """
    result = _read(Path(model) / "result.json")
    if result is None and (Path(model) / "metrics.jsonl").exists():
        raise InvalidInputError(f"the run in {model} is not finished: its command goes on with it")
    if result is None:
        return model
    return str(result["state" if state else "adapter"])


def _tracked_as(path: Path) -> str:
    """Part of the run's name in trackers: unique, and kept when the run resumes."""
    known = _read(path / "tracked.json") or {"id": uuid.uuid4().hex[:8]}
    _replace(path / "tracked.json", known)
    return str(known["id"])


def _check_settings(path: Path, settings: Mapping[str, Any]) -> None:
    before = _read(path / "config.json")
    if not before or before == settings:
        return
    changed = [
        f"{name} was {before.get(name)!r} and is {settings.get(name)!r}"
        for name in {**before, **settings}
        if before.get(name) != settings.get(name)
    ]
    raise InvalidInputError(
        f"{path} has a run with other settings: {'; '.join(changed)}. Give the same ones to go on with it, "
        "another --out for another run, or --fresh to start anew in its place"
    )


def _kept(path: Path, saved: SavedStep | None) -> list[dict[str, float]]:
    """Drop the lines of steps that are not saved, and a last one that was cut off; the rest."""
    if not path.exists():
        return []
    rows: list[dict[str, Any]] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        with contextlib.suppress(ValueError):
            rows.append(json.loads(line))
    rows = [row for row in rows if saved is not None and row["step"] <= saved.step]
    _replace_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return rows


def _append(file: TextIO, row: Mapping[str, Any]) -> None:
    file.write(json.dumps(row, ensure_ascii=False) + "\n")
    file.flush()


def _read(path: Path) -> dict[str, Any] | None:
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError:
        raise InvalidInputError(f"{path} is damaged; --fresh starts the run anew") from None


def _replace(path: Path, value: Mapping[str, Any]) -> None:
    _replace_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def _replace_text(path: Path, text: str) -> None:
    """The new content whole, or the old one."""
    with replacing(path, sync=True) as file:
        file.write(text.encode())


def _locked(path: Path) -> TextIO:
    """A lock that ends with the process."""
    file = (path / ".lock").open("a")
    if not try_lock(file.fileno()):
        file.close()
        raise InvalidInputError(f"{path} is in use by another process; give another --out")
    return file

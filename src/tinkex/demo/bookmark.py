"""Stopping and resuming a demo: Ctrl-C stops it after the current step, and a file says how to continue.

A bookmark names a checkpoint that has exactly the steps of its curve. It is written atomically. This module
does not know what is trained.
"""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import tinkex
from tinkex.errors import InvalidInputError

_KEEP_SECONDS = 7 * 24 * 3600  # after which the checkpoint is deleted


@dataclass(frozen=True)
class Bookmark:
    model: str
    checkpoint: str  # with optimizer state
    steps: int  # of the whole demo
    curve: list[float]  # the loss or reward of each step so far

    def write(self, out: Path, kind: str) -> None:
        out.mkdir(parents=True, exist_ok=True)
        part = _file(out, kind).with_suffix(".part")
        part.write_text(json.dumps(asdict(self), indent=2) + "\n")
        os.replace(part, _file(out, kind))

    @classmethod
    def read(cls, out: Path, kind: str) -> Bookmark:
        try:
            return cls(**json.loads(_file(out, kind).read_text()))
        except FileNotFoundError:
            raise InvalidInputError(f"there is nothing to resume: no {_file(out, kind)}") from None

    @staticmethod
    def delete(out: Path, kind: str) -> None:
        _file(out, kind).unlink(missing_ok=True)


def _file(out: Path, kind: str) -> Path:
    return out / f"{kind}-stopped.json"


def open_run(
    service: tinkex.ServiceClient, model: str, rank: int, bookmark: Bookmark | None
) -> tinkex.TrainingClient:
    """A new run, or the one that a bookmark names."""
    if bookmark is not None:
        return service.create_training_client_from_state_with_optimizer(bookmark.checkpoint)
    # PEFT and vLLM can load an adapter without an unembedding; with one, only PEFT can.
    return service.create_lora_training_client(model, rank, seed=1, train_unembed=False)


def save_bookmark(
    run: tinkex.TrainingClient, name: str, model: str, steps: int, curve: list[float], out: Path, kind: str
) -> None:
    """Save the run, and write the bookmark with which the demo continues from here."""
    saved = run.save_state(f"{name}-{len(curve)}", ttl_seconds=_KEEP_SECONDS, overwrite=True).result()
    Bookmark(model, saved.path, steps, curve).write(out, kind)


@contextmanager
def ctrl_c() -> Generator[Callable[[], bool]]:
    """Has Ctrl-C been pressed? The first press lets the current step finish; the second interrupts."""
    pressed = threading.Event()
    if threading.current_thread() is not threading.main_thread():  # only the main thread gets signals
        yield pressed.is_set
        return

    def handle(number: int, frame: object) -> None:
        pressed.set()
        # Not print: the signal may have interrupted one.
        os.write(2, b"\nending this step, then saving; Ctrl-C again stops at once\n")
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield pressed.is_set
    finally:
        signal.signal(signal.SIGINT, before)

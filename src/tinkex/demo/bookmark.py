"""Where a demo stopped: Ctrl-C asks it to stop after the step in hand, and a file says how to go on.

Promises: a bookmark is written whole or not at all, and names a checkpoint that has exactly the steps of its
curve. Knows nothing of what is trained.
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

from tinkex.errors import InvalidInputError


@dataclass(frozen=True)
class Bookmark:
    model: str
    checkpoint: str  # with the optimizer's state
    steps: int  # of the whole demo
    curve: list[float]  # what was measured at each step so far

    def write(self, out: Path, act: str) -> None:
        out.mkdir(parents=True, exist_ok=True)
        part = _file(out, act).with_suffix(".part")
        part.write_text(json.dumps(asdict(self), indent=2) + "\n")
        os.replace(part, _file(out, act))

    @classmethod
    def read(cls, out: Path, act: str) -> Bookmark:
        try:
            return cls(**json.loads(_file(out, act).read_text()))
        except FileNotFoundError:
            raise InvalidInputError(f"there is nothing to resume: no {_file(out, act)}") from None

    @staticmethod
    def forget(out: Path, act: str) -> None:
        _file(out, act).unlink(missing_ok=True)


def _file(out: Path, act: str) -> Path:
    return out / f"{act}-stopped.json"


@contextmanager
def ctrl_c() -> Generator[Callable[[], bool]]:
    """Has Ctrl-C been pressed? The first is noted, so that the step in hand ends; the second interrupts."""
    pressed = threading.Event()
    if threading.current_thread() is not threading.main_thread():  # signals are the main thread's
        yield pressed.is_set
        return

    def note(number: int, frame: object) -> None:
        pressed.set()
        os.write(
            2, b"\nending this step, then saving; Ctrl-C again stops at once\n"
        )  # a print may be under way
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield pressed.is_set
    finally:
        signal.signal(signal.SIGINT, before)

"""Ctrl-C in a training loop: the first press lets the current step finish and be saved, the second stops."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager


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
        os.write(2, b"\nfinishing the steps under way, then saving; Ctrl-C again stops at once\n")
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield pressed.is_set
    finally:
        signal.signal(signal.SIGINT, before)

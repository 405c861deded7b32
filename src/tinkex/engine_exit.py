"""Closes the engines of this process at exit: one that computes meanwhile would abort the process."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterable
from contextlib import suppress

from tinkex.engine.protocol import Engine
from tinkex.service.service import Service

EXIT_PATIENCE = 120.0  # seconds that an engine has to end its micro-batch
EXIT_NOTICE = 0.5  # seconds after which a message says why the process waits
ENDING = "tinkex: the engine ends the micro-batch in hand; Ctrl-C leaves at once"


def stop_engines(services: Iterable[Service]) -> None:
    for service in services:
        service.models.begin_closing()
        service.rollouts.stop()
        for engine in service.models.engines():
            try:
                _close(engine)
            except KeyboardInterrupt:
                _leave()


def _close(engine: Engine) -> None:
    closing = threading.Thread(target=engine.close, daemon=True)
    try:
        closing.start()
    except RuntimeError:  # Python 3.12 begins no threads at exit
        engine.close()
        return
    closing.join(EXIT_NOTICE)
    if closing.is_alive():
        print(ENDING, file=sys.stderr)  # noqa: T201
        closing.join(EXIT_PATIENCE)


def _leave() -> None:
    """End as a process does that Ctrl-C ends, and without the interpreter's help: it would wait, or abort."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, OSError, ValueError):  # closed, or a broken pipe
            stream.flush()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGINT)

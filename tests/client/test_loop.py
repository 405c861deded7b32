"""The background thread at the very end of a process: after the interpreter, and before exit is done."""

from __future__ import annotations

import subprocess
import sys

EXITS_SLOWLY = """
import asyncio, ctypes, sys, threading
from tinkex.client import loop

started = threading.Event()

async def wake_up_late():
    started.set()
    await asyncio.sleep(0.5)

loop.call_soon(lambda: loop.spawn(wake_up_late()))
started.wait()
libc = ctypes.CDLL(None)
libc.on_exit(libc.sleep, None)  # called with the exit status: a second, once the interpreter is gone
sys.exit(1)
"""

ASKS_LATE = """
import atexit
from tinkex.errors import TinkerError

def late():
    try:
        loop.get_loop()
    except TinkerError as error:
        print(error)

atexit.register(late)  # before the loop's own, so called after it
from tinkex.client import loop
loop.get_loop()
"""


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)


def test_a_timer_that_is_due_after_the_interpreter_has_gone_does_not_crash() -> None:
    done = python(EXITS_SLOWLY)
    assert done.returncode == 1, done.stderr


def test_asking_when_it_is_too_late_is_an_error_and_no_wait() -> None:
    done = python(ASKS_LATE)
    assert done.returncode == 0, done.stderr
    assert "the interpreter is exiting" in done.stdout

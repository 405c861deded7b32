"""Start child processes that Ctrl-C can end, or in a terminal.

A shell that starts a command in the background, and `nohup`, make it ignore SIGINT, and every process that it
starts inherits that. A test that sends SIGINT to a child starts it with `interruptible`.
"""

from __future__ import annotations

import os
import pty
import subprocess
import sys

_RESTORE = (
    "import os, signal, sys\n"
    "signal.signal(signal.SIGINT, signal.SIG_DFL)\n"
    "os.execv(sys.argv[1], sys.argv[1:])\n"
)


def interruptible(command: list[str]) -> list[str]:
    """The command line that runs `command`, in the same process, with the default action of SIGINT.

    `command[0]` is an absolute path, such as `sys.executable`. Python installs its own handler, which raises
    KeyboardInterrupt, only if it is started with the default action.
    """
    return [sys.executable, "-I", "-S", "-c", _RESTORE, *command]


def in_terminal(command: list[str], env: dict[str, str]) -> str:
    """What a command writes to a terminal of 80 columns."""
    mother, child = pty.openpty()
    process = subprocess.Popen(command, stdin=child, stdout=child, stderr=child, env={**env, "COLUMNS": "80"})
    os.close(child)
    said = b""
    try:
        while piece := os.read(mother, 65536):
            said += piece
    except OSError:  # how a terminal says that nobody writes to it any more
        pass
    process.wait(30)
    os.close(mother)
    return said.decode().replace("\r\n", "\n")

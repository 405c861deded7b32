"""Limits itself, then becomes the program to run: `python -I -S sandbox_child.py LIMITS PROGRAM ARGS…`.

It is run by path, in a process of its own, and imports nothing of Tinkex: a fork of a process with threads
must not run Python code before it executes another program.
"""

import contextlib
import ctypes
import json
import os
import resource
import sys

_NEW_USER, _NEW_NETWORK = 0x10000000, 0x40000000  # CLONE_NEWUSER, CLONE_NEWNET


def main() -> None:
    limits, program = json.loads(sys.argv[1]), sys.argv[2:]
    with contextlib.suppress(OSError, AttributeError):  # not allowed here: then there is a network
        ctypes.CDLL(None).unshare(_NEW_USER | _NEW_NETWORK)
    for name, most in limits.items():
        with contextlib.suppress(ValueError, OSError):  # a lower limit is set already
            resource.setrlimit(vars(resource)[name], (most, most))
    os.setsid()
    os.execv(program[0], program)


if __name__ == "__main__":
    main()

"""A warning about failed futures whose results nobody has read.

A training loop that never reads its futures would not notice that all of its steps fail. Promises: every
unread failure is counted in one warning, which quotes the first; it comes after a while, or at exit. Knows
nothing of requests: futures report when they fail and when they are read.
"""

from __future__ import annotations

import asyncio
import atexit
import itertools
import logging
import os
import sys
import time

from tinkex.client import loop as background

log = logging.getLogger("tinkex")
PATIENCE = 30.0  # seconds to read a failure before the warning
_CAPACITY = 1000  # failures remembered at a time

_unread: dict[int, tuple[float, str]] = {}  # when it failed, and its message
_numbers = itertools.count()
_watching = False


def failed(what: str, error: BaseException) -> int:
    """Record a failure; returns its number, for `seen`."""
    global _watching
    number = next(_numbers)
    if len(_unread) < _CAPACITY and not _is_interrupted():
        _unread[number] = time.monotonic(), f"{what} failed ({type(error).__name__}: {error})"
        if not _watching and background.on_loop():
            _watching = True
            asyncio.get_running_loop().call_later(PATIENCE, _watch)
    return number


def _is_interrupted() -> bool:
    """Has Ctrl-C ended the script? Then its failures are expected. (At a prompt it only ends one line.)"""
    return getattr(sys, "last_type", None) is KeyboardInterrupt and not hasattr(sys, "ps1")


def seen(number: int) -> None:
    _unread.pop(number, None)


def say(before: float = float("inf")) -> None:
    """Warn of the failures before this moment that were not read since."""
    due = [number for number, (since, _) in list(_unread.items()) if since <= before]
    texts = [entry[1] for number in due if (entry := _unread.pop(number, None))]
    if texts:
        more = f", and {len(texts) - 1} more did" if len(texts) > 1 else ""
        log.warning("%s%s; nobody has asked for the result, which would have raised this", texts[0], more)


def _watch() -> None:
    global _watching
    say(before=time.monotonic() - PATIENCE / 2)  # failures of the same moment go into one warning
    _watching = bool(_unread)
    if _watching:
        asyncio.get_running_loop().call_later(PATIENCE / 3, _watch)


atexit.register(say)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_unread.clear)  # the parent warns of them

"""Failures that nobody has looked at: said aloud after a while, or when the process ends.

A loop that never reads the futures of its steps would not learn that all of them fail, and would save what it
never trained. Promises: each such failure is part of one warning, which quotes the first. Knows nothing of
requests; futures say when they fail and when somebody looks.
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
PATIENCE = 30.0  # seconds that whoever asked has to look
_MOST = 1000  # that are remembered at a time

_unread: dict[int, tuple[float, str]] = {}  # since when, and what it was
_numbers = itertools.count()
_watching = False


def failed(what: str, error: BaseException) -> int:
    """Something failed; returns the number by which `seen` knows it."""
    global _watching
    number = next(_numbers)
    if len(_unread) < _MOST and not _is_given_up():
        _unread[number] = time.monotonic(), f"{what} failed ({type(error).__name__}: {error})"
        if not _watching and background.on_loop():
            _watching = True
            asyncio.get_running_loop().call_later(PATIENCE, _watch)
    return number


def _is_given_up() -> bool:
    """Has Ctrl-C ended the script? Whoever pressed it knows. At a prompt it ends one line of many."""
    return getattr(sys, "last_type", None) is KeyboardInterrupt and not hasattr(sys, "ps1")


def seen(number: int) -> None:
    _unread.pop(number, None)


def say(before: float = float("inf")) -> None:
    """Warn of what failed before this moment and was not looked at since."""
    due = [number for number, (since, _) in list(_unread.items()) if since <= before]
    texts = [entry[1] for number in due if (entry := _unread.pop(number, None))]
    if texts:
        more = f", and {len(texts) - 1} more did" if len(texts) > 1 else ""
        log.warning("%s%s; nobody has asked for the result, which would have raised this", texts[0], more)


def _watch() -> None:
    global _watching
    say(before=time.monotonic() - PATIENCE / 2)  # so that those of one moment are in one warning
    _watching = bool(_unread)
    if _watching:
        asyncio.get_running_loop().call_later(PATIENCE / 3, _watch)


atexit.register(say)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_unread.clear)  # they are the parent's

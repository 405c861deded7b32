"""Progress of a download on stderr: a bar in a terminal, a line for each stage elsewhere."""

from __future__ import annotations

import sys
from typing import Protocol, TextIO


class Report(Protocol):
    """Called with the current stage and, repeatedly, the bytes done and in all."""

    def __call__(self, what: str, done: int = 0, total: int = 0) -> None: ...


def on_stderr(stream: TextIO | None = None) -> Report:
    """A report that writes to stderr; `stream` is for tests."""
    out = sys.stderr if stream is None else stream
    stage = ""  # the stage begun last
    open_line = False  # the bar's line has no newline yet

    def report(what: str, done: int = 0, total: int = 0) -> None:
        nonlocal stage, open_line
        if not out.isatty():
            if what != stage:
                out.write(f"tinkex: {what}\n")
        elif total:
            out.write(f"\r\x1b[Ktinkex: {what} {_bar(done, total)}")
            open_line = done < total
            if not open_line:
                out.write("\n")
        else:
            out.write(("\n" if open_line else "") + f"tinkex: {what}\n")
            open_line = False
        stage = what
        out.flush()

    return report


def _bar(done: int, total: int, width: int = 20) -> str:
    filled = min(width, width * done // total)
    return f"[{'#' * filled}{'.' * (width - filled)}] {done / 1e6:.0f}/{total / 1e6:.0f} MB"

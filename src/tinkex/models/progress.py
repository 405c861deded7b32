"""What someone who waits for a model is told: a bar in a terminal, a line for each stage elsewhere."""

from __future__ import annotations

import sys
from typing import Protocol, TextIO


class Report(Protocol):
    """Called with what is being done and, again and again, how many bytes of how many are there."""

    def __call__(self, what: str, done: int = 0, total: int = 0) -> None: ...


def on_stderr(stream: TextIO | None = None) -> Report:
    """A report on stderr; `stream` is for tests."""
    out = sys.stderr if stream is None else stream
    told = ""  # the stage that was last begun
    open_line = False  # a bar stands on a line that has not ended

    def report(what: str, done: int = 0, total: int = 0) -> None:
        nonlocal told, open_line
        if not out.isatty():
            if what != told:
                out.write(f"tinkex: {what}\n")
        elif total:
            out.write(f"\r\x1b[Ktinkex: {what} {_bar(done, total)}")
            open_line = done < total
            if not open_line:
                out.write("\n")
        else:
            out.write(("\n" if open_line else "") + f"tinkex: {what}\n")
            open_line = False
        told = what
        out.flush()

    return report


def _bar(done: int, total: int, width: int = 20) -> str:
    filled = min(width, width * done // total)
    return f"[{'#' * filled}{'.' * (width - filled)}] {done / 1e6:.0f}/{total / 1e6:.0f} MB"

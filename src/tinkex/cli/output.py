"""What commands print: tables for people, JSON for programs, progress bars.

With `--format json` stdout is one JSON value, with the official field names. Notes and bars go to stderr,
bars only to a terminal. Piped output is never wrapped or truncated, and an id is never truncated: a table
wider than the terminal is shown with each row as a paragraph. Imports nothing heavy.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from tinkex.cli.options import wants_json

if TYPE_CHECKING:
    from tinkex.client.rest_results import Listing

_BAR_DELAY = 0.3  # seconds before a progress bar appears
_LONG_NAME = 22  # characters from which a fact's name gets its own line

Item = TypeVar("Item")


def show(value: Any, print_table: Callable[[], None]) -> None:
    """Print `value` with `--format json`; otherwise call `print_table`."""
    if wants_json():
        show_json(value)
    else:
        print_table()


def show_json(value: Any) -> None:
    import json

    # Where stdout's encoding lacks characters, escape them.
    is_utf8 = (sys.stdout.encoding or "utf-8").lower().replace("-", "") == "utf8"
    click.echo(json.dumps(value, indent=2, default=_plain, ensure_ascii=not is_utf8))


def _plain(value: Any) -> Any:
    return value.model_dump() if hasattr(value, "model_dump") else str(value)


def note(text: str) -> None:
    """Print to stderr: a hint, not a result."""
    click.echo(text, err=True)


@dataclass(frozen=True)
class Column:
    title: str
    right: bool = False


def show_table(title: str, columns: Sequence[Column | str], rows: Sequence[Sequence[Any]]) -> None:
    """A table under its title. The first column identifies a row."""
    click.echo(click.style(title, bold=True))
    if not rows:
        return
    columns = [column if isinstance(column, Column) else Column(column) for column in columns]
    cells = [[text(cell) for cell in row] for row in rows]
    widths = [
        max(len(column.title), *map(len, of))
        for column, of in zip(columns, zip(*cells, strict=True), strict=True)
    ]
    if sum(widths) + 2 * (len(widths) - 1) > _width():
        _show_paragraphs(columns, cells)
        return
    click.echo(click.style(_line([column.title for column in columns], widths, columns), bold=True))
    for row in cells:
        click.echo(_line(row, widths, columns))


def _line(cells: Sequence[str], widths: Sequence[int], columns: Sequence[Column]) -> str:
    padded = [
        cell.rjust(width) if column.right else cell.ljust(width)
        for cell, width, column in zip(cells, widths, columns, strict=True)
    ]
    return "  ".join(padded).rstrip()


def _show_paragraphs(columns: Sequence[Column], cells: Sequence[Sequence[str]]) -> None:
    for name, *rest in cells:
        click.echo(name)
        facts = [
            f"{column.title.lower()} {cell}" for column, cell in zip(columns[1:], rest, strict=True) if cell
        ]
        for line in _wrapped(facts, _width() - 4):
            click.echo(f"    {line}")


def _wrapped(pieces: Sequence[str], width: int) -> Iterator[str]:
    line = ""
    for piece in pieces:
        if line and len(line) + 3 + len(piece) > width:
            yield line
            line = ""
        line = f"{line} · {piece}" if line else piece
    if line:
        yield line


def show_facts(title: str, facts: Mapping[str, Any]) -> None:
    """Names and values of one thing. A value that does not fit beside its name is printed below it."""
    click.echo(click.style(title, bold=True))
    margin = min(_LONG_NAME, max(map(len, facts))) + 2
    for name, fact in facts.items():
        value = text(fact)
        if len(name) > _LONG_NAME or margin + 2 + len(value) > _width():
            click.echo(f"  {name}\n    {value}")
        else:
            click.echo(f"  {name.ljust(margin)}{value}".rstrip())


def _width() -> int:
    """The terminal's columns; no limit for a pipe."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else sys.maxsize


# -- values as text --------------------------------------------------------------------------------------


def text(value: Any) -> str:
    """A value as a table shows it."""
    match value:
        case None:
            return "-"
        case bool():
            return "yes" if value else "no"
        case datetime():
            return ago(value)
        case _:
            return " ".join(str(value).split("\n"))


def ago(moment: datetime, now: datetime | None = None) -> str:
    """A moment relative to now.

    >>> ago(datetime(2026, 1, 1, tzinfo=UTC), datetime(2026, 1, 3, tzinfo=UTC))
    '2 days ago'
    """
    moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    seconds = ((now or datetime.now(UTC)) - moment).total_seconds()
    if abs(seconds) < 60:
        return "just now" if seconds >= 0 else "in less than a minute"
    units = (("minute", 60), ("hour", 3600), ("day", 86400), ("week", 604800), ("year", 31557600))
    name, size = max((unit for unit in units if abs(seconds) >= unit[1]), key=lambda unit: unit[1])
    span = plural(int(abs(seconds) // size), name)
    return f"{span} ago" if seconds > 0 else f"in {span}"


def size(count: int | None) -> str:
    """A number of bytes.

    >>> [size(n) for n in (None, 110, 45030, 3 * 1024**3)]
    ['-', '110 B', '44.0 KB', '3.0 GB']
    """
    if count is None:
        return "-"
    if count < 1024:
        return f"{count} B"
    power = min(4, (count.bit_length() - 1) // 10)
    return f"{count / 1024**power:.1f} {'KMGT'[power - 1]}B"


def plural(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def program_name() -> str:
    """How to call this command line from the user's shell, for lines to be copied."""
    own, known = Path(sys.executable).with_name("tinkex"), shutil.which("tinkex")
    if known is not None and Path(known).resolve() == own.resolve():
        return "tinkex"
    if not own.is_file():
        return f"{shlex.quote(sys.executable)} -m tinkex.cli"
    return shlex.quote(min(str(own), os.path.relpath(own), key=len))  # an environment that is not activated


# -- progress --------------------------------------------------------------------------------------------


@contextmanager
def bar(what: str, *, of_bytes: bool = False) -> Generator[Callable[[int, int | None], None]]:
    """A progress bar on stderr, if that is a terminal and work takes a moment; call it with (done, total)."""
    with ExitStack() as until_done:
        began, update = time.monotonic(), None

        def report(done: int, total: int | None) -> None:
            nonlocal update
            if update is None and sys.stderr.isatty() and time.monotonic() - began > _BAR_DELAY:
                update = until_done.enter_context(_rich_bar(what, of_bytes))
            if update is not None:
                update(completed=done, total=total)

        yield report


@contextmanager
def _rich_bar(what: str, of_bytes: bool) -> Generator[Callable[..., None]]:
    from rich import progress
    from rich.console import Console

    counts = progress.DownloadColumn() if of_bytes else progress.MofNCompleteColumn()
    columns = (progress.TextColumn("{task.description}"), progress.BarColumn(), counts)
    with progress.Progress(*columns, console=Console(stderr=True), transient=True) as shown:
        yield partial(shown.update, shown.add_task(what, total=None))


def gather(listing: Listing[Any, Item], limit: int, what: str) -> list[Item]:
    """The first `limit` items of a listing (0: all of them), with a progress bar."""
    found: list[Item] = []
    with bar(what) as report:
        for item in islice(listing, limit or None):
            found.append(item)
            total = listing.total or len(found)
            report(len(found), min(limit or total, total))
    return found


def title(count: int, noun: str, place: str, total: int | None) -> str:
    """The title of a listing, with how many more there are."""
    left = (total or count) - count
    return f"{plural(count, noun)} {place}" + (f" ({left} more: --limit 0 shows all)" if left > 0 else "")

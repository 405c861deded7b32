"""What commands print: tables for people, JSON for programs, bars for those who wait.

Promises: with `--format json` stdout is one JSON value and nothing else, with the official fields and their
spelling; notes and bars go to stderr, bars only to a terminal. What is piped is never wrapped or cut, and an
id is never cut anywhere: a table too wide for the terminal is shown with each row as a paragraph. Imports
nothing heavy: help and errors are quick.
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

if TYPE_CHECKING:
    from tinkex.client.rest_results import Listing

CONTEXT: dict[str, Any] = {"help_option_names": ["-h", "--help"]}
_FORMAT = "tinkex.format"  # where the chosen format is kept
_A_MOMENT = 0.3  # seconds after which whoever waits is shown a bar
_LONG_NAME = 22  # characters from which a fact's name has a line to itself

Item = TypeVar("Item")
Wrapped = TypeVar("Wrapped", bound=Callable[..., Any])


# -- which form ------------------------------------------------------------------------------------------


def _remember(ctx: click.Context, parameter: click.Parameter, value: str | None) -> None:
    if value is not None:
        ctx.meta[_FORMAT] = value  # shared by a command and its groups


def format_option(command: Wrapped) -> Wrapped:
    """`-f/--format`, before a command's name (where the official one has it) or after."""
    return click.option(
        "-f", "--format", type=click.Choice(["table", "json"]), expose_value=False, callback=_remember,
        help="How to print: a table (the default), or JSON for programs.",
    )(command)  # fmt: skip


def wants_json() -> bool:
    return click.get_current_context().meta.get(_FORMAT) == "json"


# -- printing --------------------------------------------------------------------------------------------


def show_json(value: Any) -> None:
    import json

    # Where stdout cannot say all characters, JSON has a way to say them in ASCII.
    is_utf8 = (sys.stdout.encoding or "utf-8").lower().replace("-", "") == "utf8"
    click.echo(json.dumps(value, indent=2, default=_plain, ensure_ascii=not is_utf8))


def _plain(value: Any) -> Any:
    return value.model_dump() if hasattr(value, "model_dump") else str(value)


def note(text: str) -> None:
    """Something that whoever reads stdout does not need."""
    click.echo(text, err=True)


@dataclass(frozen=True)
class Column:
    title: str
    right: bool = False


def show_table(title: str, columns: Sequence[Column], rows: Sequence[Sequence[Any]]) -> None:
    """A table under its title; the first column is what each row is called by."""
    click.echo(click.style(title, bold=True))
    if not rows:
        return
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
        said = [
            f"{column.title.lower()} {cell}" for column, cell in zip(columns[1:], rest, strict=True) if cell
        ]
        for line in _wrapped(said, _width() - 4):
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
    """What there is to say about one thing; a fact that does not fit beside its name stands below it."""
    click.echo(click.style(title, bold=True))
    margin = min(_LONG_NAME, max(map(len, facts))) + 2
    for name, fact in facts.items():
        value = text(fact)
        if len(name) > _LONG_NAME or margin + 2 + len(value) > _width():
            click.echo(f"  {name}\n    {value}")
        else:
            click.echo(f"  {name.ljust(margin)}{value}".rstrip())


def _width() -> int:
    """Columns to fill: the terminal's, or as many as needed where no one looks."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else sys.maxsize


# -- words for values ------------------------------------------------------------------------------------


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
    """How far a moment is away.

    >>> ago(datetime(2026, 1, 1, tzinfo=UTC), datetime(2026, 1, 3, tzinfo=UTC))
    '2 days ago'
    """
    moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    seconds = ((now or datetime.now(UTC)) - moment).total_seconds()
    if abs(seconds) < 60:
        return "just now" if seconds >= 0 else "in less than a minute"
    units = (("minute", 60), ("hour", 3600), ("day", 86400), ("week", 604800), ("year", 31557600))
    name, size = max((unit for unit in units if abs(seconds) >= unit[1]), key=lambda unit: unit[1])
    count = int(abs(seconds) // size)
    span = f"{count} {name}{'' if count == 1 else 's'}"
    return f"{span} ago" if seconds > 0 else f"in {span}"


def size(count: int | None) -> str:
    """Bytes, as people say them.

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


def how_called() -> str:
    """What this command line is called by in the shell that it was called from, for lines to be copied."""
    own, known = Path(sys.executable).with_name("tinkex"), shutil.which("tinkex")
    if known is not None and Path(known).resolve() == own.resolve():
        return "tinkex"
    if not own.is_file():
        return f"{shlex.quote(sys.executable)} -m tinkex.cli"
    return shlex.quote(min(str(own), os.path.relpath(own), key=len))  # an environment that is not activated


# -- waiting ---------------------------------------------------------------------------------------------


@contextmanager
def bar(what: str, *, of_bytes: bool = False) -> Generator[Callable[[int, int | None], None]]:
    """A progress bar on stderr, if that is a terminal and it takes a moment; tell it (so far, in all)."""
    with ExitStack() as until_done:
        begun, update = time.monotonic(), None

        def told(done: int, total: int | None) -> None:
            nonlocal update
            if update is None and sys.stderr.isatty() and time.monotonic() - begun > _A_MOMENT:
                update = until_done.enter_context(_drawn(what, of_bytes))
            if update is not None:
                update(completed=done, total=total)

        yield told


@contextmanager
def _drawn(what: str, of_bytes: bool) -> Generator[Callable[..., None]]:
    from rich import progress
    from rich.console import Console

    counts = progress.DownloadColumn() if of_bytes else progress.MofNCompleteColumn()
    columns = (progress.TextColumn("{task.description}"), progress.BarColumn(), counts)
    with progress.Progress(*columns, console=Console(stderr=True), transient=True) as shown:
        yield partial(shown.update, shown.add_task(what, total=None))


def gather(listing: Listing[Any, Item], limit: int, what: str) -> list[Item]:
    """The first `limit` items of a listing (0: all of them), with a bar if that takes a moment."""
    found: list[Item] = []
    with bar(what) as told:
        for item in islice(listing, limit or None):
            found.append(item)
            total = listing.total or len(found)
            told(len(found), min(limit or total, total))
    return found

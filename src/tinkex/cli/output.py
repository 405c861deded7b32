"""What commands share: the option `--format`, numbers, tables for people, JSON for programs, progress bars.

With `--format json` stdout is one JSON value, with the official field names. Notes and bars go to stderr,
bars only to a terminal. Piped output is never wrapped or truncated, and an id is never truncated: a table
wider than the terminal is shown with each row as a paragraph. Imports nothing heavy.
"""

from __future__ import annotations

import re
import shutil
import sys
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from tinkex.client.rest_results import Listing

_FORMAT = "tinkex.format"  # the key of the chosen format in click's context
_BAR_DELAY = 0.3  # seconds before a progress bar appears
_NUMBER = re.compile(r"-|[\d.,]+(e[-+]\d+)?( [KMGT]?B)?")  # columns of these are aligned right
_LONG_NAME = 22  # characters from which a fact's name gets its own line

Decorated = TypeVar("Decorated", bound=Callable[..., Any])
Item = TypeVar("Item")


def format_option(command: Decorated) -> Decorated:
    """`-f/--format`, before a command's name (as in the official CLI) or after it."""
    return click.option(
        "-f", "--format", type=click.Choice(["table", "json"]), expose_value=False, callback=_store_format,
        help="Print a table (the default), or JSON.",
    )(command)  # fmt: skip


def _store_format(ctx: click.Context, parameter: click.Parameter, value: str | None) -> None:
    if value is not None:
        ctx.meta[_FORMAT] = value  # shared by a command and its groups


def wants_json() -> bool:
    context = click.get_current_context(silent=True)
    return context is not None and context.meta.get(_FORMAT) == "json"


class _SixtyFourBits(click.ParamType[Any]):
    """Refuses numbers of more than 64 bits, NaN and infinity."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if not abs(number) < 2**63:  # NaN too: it is within every range
            self.fail(f"{number} is not a number of at most 64 bits.", param, ctx)
        return number


class Integer(_SixtyFourBits, click.types.IntParamType):
    """Any integer."""


class Whole(_SixtyFourBits, click.IntRange):
    """An integer within a range."""


class Finite(_SixtyFourBits, click.FloatRange):
    """A number within a range."""


# -- results ---------------------------------------------------------------------------------------------


def show(
    value: Any, title: str, details: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None
) -> None:
    """Print `value` with `--format json`; otherwise `title` and, below it, facts or the rows of a table.

    The first column of a table identifies a row.
    """
    if wants_json():
        show_json(value)
        return
    click.echo(title if details is None else click.style(title, bold=True))
    if isinstance(details, Mapping):
        _show_facts(details)
    elif details:
        _show_table(details)


def show_json(value: Any) -> None:
    import json

    # Where stdout's encoding lacks characters, escape them.
    is_utf8 = (sys.stdout.encoding or "utf-8").lower().replace("-", "") == "utf8"
    plain: Callable[[Any], Any] = lambda v: v.model_dump() if hasattr(v, "model_dump") else str(v)  # noqa: E731
    click.echo(json.dumps(value, indent=2, default=plain, ensure_ascii=not is_utf8))


def note(text: str) -> None:
    """Print to stderr: a hint, not a result."""
    click.echo(text, err=True)


def _show_table(rows: Sequence[Mapping[str, Any]]) -> None:
    names, cells = list(rows[0]), [[text(cell) for cell in row.values()] for row in rows]
    columns = list(zip(*cells, strict=True))
    widths = [max(map(len, (name, *column))) for name, column in zip(names, columns, strict=True)]
    if sum(widths) + 2 * (len(widths) - 1) > _width():
        for first, *rest in cells:
            facts = [f"{name.lower()} {cell}" for name, cell in zip(names[1:], rest, strict=True) if cell]
            click.echo("\n    ".join([first, *_wrapped(facts, _width() - 4)]))
        return
    aligned = [str.rjust if all(map(_NUMBER.fullmatch, column)) else str.ljust for column in columns]
    for row in (names, *cells):
        line = "  ".join(align(cell, width) for align, cell, width in zip(aligned, row, widths, strict=True))
        click.echo(click.style(line.rstrip(), bold=True) if row is names else line.rstrip())


def _wrapped(pieces: Sequence[str], width: int) -> Iterator[str]:
    line = ""
    for piece in pieces:
        if line and len(line) + 3 + len(piece) > width:
            yield line
            line = ""
        line = f"{line} · {piece}" if line else piece
    if line:
        yield line


def _show_facts(facts: Mapping[str, Any]) -> None:
    """Names and values of one thing. A long value is printed below its name."""
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
    units = {31557600: "year", 604800: "week", 86400: "day", 3600: "hour", 60: "minute"}
    unit = next(unit for unit in units if abs(seconds) >= unit)
    span = plural(int(abs(seconds) // unit), units[unit])
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


# -- waiting ---------------------------------------------------------------------------------------------


@contextmanager
def bar(what: str, *, of_bytes: bool = False) -> Generator[Callable[[int, int | None], None]]:
    """A progress bar on stderr, if that is a terminal and work takes a moment; call it with (done, total)."""
    began, shown = time.monotonic(), None

    def report(done: int, total: int | None) -> None:
        nonlocal shown
        if shown is None and sys.stderr.isatty() and time.monotonic() - began > _BAR_DELAY:
            from rich import progress
            from rich.console import Console

            counts = progress.DownloadColumn() if of_bytes else progress.MofNCompleteColumn()
            columns = (progress.TextColumn("{task.description}"), progress.BarColumn(), counts)
            shown = progress.Progress(*columns, console=Console(stderr=True), transient=True)
            shown.add_task(what, total=None)
            shown.start()
        if shown is not None:
            shown.update(shown.task_ids[0], completed=done, total=total)

    try:
        yield report
    finally:
        if shown is not None:
            shown.stop()


def gather(listing: Listing[Any, Item], limit: int, noun: str, place: str) -> tuple[list[Item], str]:
    """The first `limit` items of a listing (0: all of them), and the title of their table."""
    found: list[Item] = []
    with bar(f"{noun.capitalize()}s") as report:
        for item in islice(listing, limit or None):
            found.append(item)
            total = listing.total or len(found)
            report(len(found), min(limit or total, total))
    left = (listing.total or len(found)) - len(found)
    more = f" ({left} more: --limit 0 shows all)" if left > 0 else ""
    return found, f"{plural(len(found), noun)} {place}{more}"


@contextmanager
def needing(extra: str, what: str = "this") -> Generator[None]:
    """Say which extra to install, if an import fails."""
    try:
        yield
    except ImportError as error:
        raise click.ClickException(
            f"{what} needs more packages: pip install 'tinkex[{extra}]' ({error})"
        ) from None


@contextmanager
def answered(otherwise: str) -> Generator[None]:
    """Wraps a prompt: without a terminal it fails with the message `otherwise`."""
    try:
        yield
    except click.Abort:
        if sys.stdin.isatty():
            raise
        note("")  # the prompt's line has no newline yet
        raise click.ClickException(otherwise) from None

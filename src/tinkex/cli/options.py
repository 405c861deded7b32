"""Options that several commands share: the output format, and number types that refuse NaN and infinity."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

_FORMAT = "tinkex.format"  # the key of the chosen format in click's context
_TOO_LARGE = 2**63

Decorated = TypeVar("Decorated", bound=Callable[..., Any])


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
    return click.get_current_context().meta.get(_FORMAT) == "json"


class Integer(click.types.IntParamType):
    """Any integer of at most 64 bits."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return _bounded(self, super().convert(value, param, ctx), param, ctx)


class Whole(click.IntRange):
    """An integer of at most 64 bits, within a range."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return _bounded(self, super().convert(value, param, ctx), param, ctx)


class Finite(click.FloatRange):
    """A finite number."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return _bounded(self, super().convert(value, param, ctx), param, ctx)


def _bounded(
    kind: click.ParamType[Any], number: float, param: click.Parameter | None, ctx: click.Context | None
) -> float:
    if not abs(number) < _TOO_LARGE:  # NaN too: it is within every range
        kind.fail(f"{number} is not a number of at most 64 bits.", param, ctx)
    return number

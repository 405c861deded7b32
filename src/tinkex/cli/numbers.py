"""Numbers on the command line: click's, less those that are within every range and of no use to anyone.

NaN is neither below nor above a limit, and what needs more than 64 bits no clock, database or wire takes.
"""

from __future__ import annotations

from typing import Any

import click

_TOO_LARGE = 2**63


class Whole(click.IntRange):
    """A whole number of at most 64 bits."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return _usable(self, super().convert(value, param, ctx), param, ctx)


class Finite(click.FloatRange):
    """A number, and no larger than a whole one may be."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return _usable(self, super().convert(value, param, ctx), param, ctx)


def _usable(
    kind: click.ParamType[Any], number: float, param: click.Parameter | None, ctx: click.Context | None
) -> float:
    if not abs(number) < _TOO_LARGE:
        kind.fail(f"{number} is not a number of at most 64 bits.", param, ctx)
    return number

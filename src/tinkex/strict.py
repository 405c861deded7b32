"""Strict construction: unknown arguments are refused with a suggestion. Knows no pydantic.

A class decorated with `strict` is a frozen dataclass whose unknown, missing or superfluous arguments raise
InvalidInputError. `Dumpable` adds pydantic's `model_dump` family, which scripts for the official types use.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ParamSpec, Self, TypeVar, dataclass_transform

from tinkex.errors import InvalidInputError

T = TypeVar("T")
P = ParamSpec("P")


def unknown_field(owner: str, given: str, known: Iterable[str]) -> str:
    """The message for a name that `owner` does not have.

    >>> unknown_field("SamplingParams", "temprature", ["temperature", "top_k"])
    "SamplingParams has no 'temprature'; did you mean 'temperature'? It takes: temperature, top_k"
    """
    known = list(known)
    return f"{owner} has no '{given}'{did_you_mean(given, known)} It takes: {', '.join(known)}"


def did_you_mean(given: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """The end of a sentence about an unknown name: the closest known one, or a full stop."""
    close = difflib.get_close_matches(given, list(known), n=1, cutoff=cutoff)
    return f"; did you mean '{close[0]}'?" if close else "."


def check_seconds(owner: str, value: object) -> None:
    """Refuse anything but a number of seconds above 0; infinity is allowed."""
    if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value) or value <= 0:
        raise InvalidInputError(f"{owner} must be seconds above 0, got {value!r}")


class Dumpable:
    """The methods of pydantic models that users of the official types rely on."""

    def model_dump(self, *, exclude_none: bool = False, **_: Any) -> dict[str, Any]:
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}  # type: ignore[arg-type]
        return {k: v for k, v in fields.items() if not (exclude_none and v is None)}

    def model_copy(self, *, update: dict[str, Any] | None = None, **_: Any) -> Self:
        return dataclasses.replace(self, **(update or {}))  # type: ignore[type-var]

    @classmethod
    def model_validate(cls, obj: Any) -> Self:
        return obj if isinstance(obj, cls) else cls(**obj)


def strict_init(init: Callable[P, None]) -> Callable[P, None]:
    """Wrap `__init__` to explain unknown, missing and superfluous arguments."""
    signature = inspect.signature(init)
    _, *names = signature.parameters

    @functools.wraps(init)
    def __init__(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            init(*args, **kwargs)
        except TypeError:
            owner = type(args[0]).__name__
            for name in kwargs:
                if name not in names:
                    raise InvalidInputError(unknown_field(owner, name, names)) from None
            try:
                signature.bind(*args, **kwargs)
            except TypeError as error:  # too few, too many, or one given twice
                problem = re.sub("missing a required .*argument:", "needs", str(error))
                raise InvalidInputError(f"{owner} {problem}. It takes: {', '.join(names)}") from None
            raise

    return __init__


def at(where: str, build: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Call `build`; if it refuses its arguments, prefix the message with `where`."""
    try:
        return build(*args, **kwargs)
    except (ValueError, TypeError, OverflowError) as error:
        raise InvalidInputError(f"{where}: {error}") from None


def check_count(where: str, given: int, most: int) -> None:
    """Refuse a list that is longer than `most`."""
    if given > most:
        raise InvalidInputError(f"{where} has {given} entries; at most {most} are accepted")


def assemble(cls: type[T], fields: Mapping[str, Any]) -> T:
    """`cls(**fields)` for a strict class and names that are its own, in half the time."""
    defaults, count = _defaults(cls)
    values = {**defaults, **fields}
    if len(values) < count:  # the constructor makes other defaults, or reports what is missing
        return cls(**fields)
    made = object.__new__(cls)
    made.__dict__.update(values)
    made.__post_init__()  # type: ignore[attr-defined]
    return made


@functools.cache
def _defaults(cls: type) -> tuple[dict[str, Any], int]:
    fields = dataclasses.fields(cls)
    return {f.name: f.default for f in fields if f.default is not dataclasses.MISSING}, len(fields)


@dataclass_transform(frozen_default=True, kw_only_default=False)
def strict(cls: type[T]) -> type[T]:
    """Make `cls` a frozen dataclass whose construction is strict."""
    cls = dataclasses.dataclass(frozen=True)(cls)
    cls.__init__ = strict_init(cls.__init__)  # type: ignore[method-assign]
    return cls

"""Construction that refuses what it does not know, and says what was probably meant.

Promises: a class decorated with `strict` is a frozen dataclass whose unknown or missing arguments raise
`InvalidInputError` with a did-you-mean, and which offers the pydantic-style `model_dump` family that
scripts written for the official types use. Does not know pydantic: `types/base.py` does.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
from collections.abc import Callable, Iterable
from typing import Any, Self, TypeVar, dataclass_transform

from tinkex.errors import InvalidInputError

T = TypeVar("T")


def unknown_field(owner: str, given: str, known: Iterable[str]) -> str:
    """The message for a name that `owner` does not have.

    >>> unknown_field("SamplingParams", "temprature", ["temperature", "top_k"])
    "SamplingParams has no 'temprature'; did you mean 'temperature'? It takes: temperature, top_k"
    """
    known = list(known)
    close = difflib.get_close_matches(given, known, n=1, cutoff=0.6)
    hint = f"; did you mean '{close[0]}'?" if close else "."
    return f"{owner} has no '{given}'{hint} It takes: {', '.join(known)}"


class Dumpable:
    """The part of pydantic's surface that users of the official types rely on."""

    def model_dump(self, *, exclude_none: bool = False, **_: Any) -> dict[str, Any]:
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}  # type: ignore[arg-type]
        return {k: v for k, v in fields.items() if not (exclude_none and v is None)}

    def model_copy(self, *, update: dict[str, Any] | None = None, **_: Any) -> Self:
        return dataclasses.replace(self, **(update or {}))  # type: ignore[type-var]

    @classmethod
    def model_validate(cls, obj: Any) -> Self:
        return obj if isinstance(obj, cls) else cls(**obj)


@dataclass_transform(frozen_default=True, kw_only_default=False)
def strict(cls: type[T]) -> type[T]:
    """Make `cls` a frozen dataclass that refuses unknown and missing arguments helpfully."""
    cls = dataclasses.dataclass(frozen=True)(cls)
    fields = [f for f in dataclasses.fields(cls) if f.init]  # type: ignore[arg-type]
    names = [f.name for f in fields]
    required = [
        f.name
        for f in fields
        if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    ]
    plain: Callable[..., None] = cls.__init__

    @functools.wraps(plain)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            plain(self, *args, **kwargs)
        except TypeError:
            for name in kwargs:
                if name not in names:
                    raise InvalidInputError(unknown_field(cls.__name__, name, names)) from None
            for name in required[len(args) :]:
                if name not in kwargs:
                    raise InvalidInputError(f"{cls.__name__} needs '{name}'") from None
            raise

    cls.__init__ = __init__  # type: ignore[method-assign]
    return cls
